"""Training in two stages: first only the scheme's new weights, then all weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from hf_posenc.errors import OptionError
from hf_posenc.recipes.training.optimizer import is_scheme_parameter


class NewParametersFirst(TrainerCallback):
    """Callback that trains only the schemes' weights for the first share of the steps.

    The gradients of the model's own weights are computed and dropped, since DDP does not allow `requires_grad` to
    change, and optimizers skip weights without gradients. Gradient clipping sees them as zero (except under FSDP).

    `Trainer` does not tell its callbacks about errors or interrupts, after which the model's own weights would keep
    zero gradients. Use the callback as a context manager to avoid this:
    `with NewParametersFirst(...) as first: Trainer(..., callbacks=[first]).train()`.

    Args:
        share: Share of the steps, from 0 to 1.

    Raises:
        OptionError: The share is out of range, or (when training begins) no scheme has weights to train.
    """

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share <= 1:
            raise OptionError(f"NewParametersFirst(share={share!r}): expected a number from 0 to 1.")
        self.share = share
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> NewParametersFirst:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin the first stage; raise if it would train nothing."""
        self._end()
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        own = [parameter for name, parameter in trained if not is_scheme_parameter(name)]
        if self.share and len(own) == len(trained):
            raise OptionError(
                f"NewParametersFirst(share={self.share!r}): no scheme of the {type(model).__name__} has weights to "
                "train, so the first stage would train nothing. Leave the callback out, or patch with a scheme that "
                "learns."
            )
        self._hooks = [parameter.register_hook(torch.zeros_like) for parameter in own]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the first stage once its share is over."""
        if not self._first(state):
            self._end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the first stage if it lasted the whole training."""
        self._end()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Drop the gradients of the model's own weights in the first stage."""
        if self._first(state):
            for name, parameter in model.named_parameters():
                if not is_scheme_parameter(name):
                    parameter.grad = None

    def _first(self, state: Any) -> bool:
        # Division, as in `Handover`, since 0.55 * 100 is more than 55.
        return bool(state.global_step / max(1, state.max_steps) < self.share)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
