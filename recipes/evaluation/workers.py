"""The processes that measure together: one, or those that `accelerate launch` started."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from hf_posenc.errors import PositionError
from hf_posenc.recipes.processes import processes

# Tensors that belong together, without a batch axis.
Row = tuple[Tensor, ...]


class Workers:
    """Share rows among processes, in batches that are the same for any number of them.

    All processes must call `map` with the same rows in the same order; all get all results.

    Args:
        batch_size: Rows per forward.
        advance: Called with the number of tokens that were read, by this and the processes beside it.
    """

    def __init__(self, *, batch_size: int = 8, advance: Callable[[int], None] = lambda tokens: None) -> None:
        self.batch_size, self._advance = batch_size, advance
        # Decides first whether this is a CPU's work, which Accelerator takes over.
        processes()
        self._accelerator = Accelerator()

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self._accelerator.device
        return device

    @property
    def count(self) -> int:
        """How many processes there are."""
        return int(self._accelerator.num_processes)

    def map(self, function: Callable[..., Tensor], rows: Sequence[Row], width: int) -> Tensor:
        """Call a function on all rows, each once in one of the processes.

        Args:
            function: Makes `[batch, width]` of the stacked tensors of some rows, all of the same shapes, on the CPU.
            rows: What it is called on.
            width: How many numbers it makes of a row.

        Returns:
            What it made, float64 `[rows, width]` on the CPU; NaN where it raised `PositionError`.
        """
        own = self._accelerator.process_index
        found: list[tuple[int, list[float]]] = []
        for number, batch in enumerate(_batches(rows, self.batch_size)):
            if number % self.count != own:
                continue
            parts = [torch.stack(tensors) for tensors in zip(*(rows[index] for index in batch), strict=True)]
            try:
                values = function(*parts).double().cpu()
            except PositionError:
                values = torch.full((len(batch), width), torch.nan, dtype=torch.float64)
            found += zip(batch, values.tolist(), strict=True)
            self._advance(self.count * sum(part.numel() for part in parts))
        results = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
        for index, numbers in gather_object(found):
            results[index] = torch.tensor(numbers, dtype=torch.float64)
        return results


def _batches(rows: Sequence[Row], size: int) -> list[list[int]]:
    """Return the numbers of rows that go together: those of the same shapes, so that nothing is padded."""
    alike: dict[tuple[torch.Size, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        alike[tuple(part.shape for part in row)].append(index)
    return [group[start : start + size] for group in alike.values() for start in range(0, len(group), size)]
