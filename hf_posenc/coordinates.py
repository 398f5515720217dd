"""Coordinates of tokens in more than one dimension, such as the patches of an image within a text.

Pass them as `position_coords` to a patched model's forward or `generate`; schemes with several axes read them. Text
follows the rule of M-RoPE (Qwen2-VL): a text token has the same number on every axis, one more than the largest
coordinate before it. An image begins, on every axis, where the next text token would be.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.errors import PositionError


def grid(rows: int, columns: int, *, step: float = 1.0) -> Tensor:
    """Return the coordinates (row, column) of the patches of an image, row by row.

    Args:
        rows: Patches from top to bottom.
        columns: Patches from left to right.
        step: Distance between neighbouring patches. `R / rows` keeps the coordinates of an image of R rows at a
            resolution of `rows` rows.
    """
    for name, value in (("rows", rows), ("columns", columns)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PositionError(f"grid({name}={value!r}): expected a positive integer.")
    if not step > 0:
        raise PositionError(f"grid(step={step!r}): expected a number above 0.")
    down, across = torch.arange(rows) * step, torch.arange(columns) * step
    return torch.cartesian_prod(down, across).view(1, rows * columns, 2).float()


def join(*parts: int | Tensor, axes: int | None = None) -> Tensor:
    """Return the coordinates of a prompt made of texts and images: `join(5, grid(4, 6), 7)`.

    Args:
        *parts: Parts in order: the number of tokens of a text, or coordinates `[1, S, n]` or `[S, n]` that count from
            0.
        axes: Number of coordinates n of a token; needed only if all parts are texts.
    """
    for part in parts:
        if isinstance(part, Tensor):
            if _rows(part).ndim != 2 or not part.numel():
                raise PositionError(f"join: got coordinates of shape {list(part.shape)}; expected [1, S, n].")
        elif isinstance(part, bool) or not isinstance(part, int) or part < 0:
            raise PositionError(f"join: got {part!r}; expected a number of tokens, or coordinates [1, S, n].")
    widths = {part.shape[-1] for part in parts if isinstance(part, Tensor)} | ({axes} if axes is not None else set())
    if len(widths) != 1:
        raise PositionError(
            f"join: got parts with {sorted(widths)} axes; expected one number of axes. Give axes= for texts."
        )
    (width,) = widths
    joined, begin = [torch.zeros(0, width)], 0.0
    for part in parts:
        counted = _rows(part).float() if isinstance(part, Tensor) else torch.arange(part)[:, None].expand(-1, width)
        joined.append(counted + begin)
        begin = max(begin, float(joined[-1].max()) + 1) if len(joined[-1]) else begin
    return torch.cat(joined)[None]


def stack(parts: Sequence[Tensor], *, padding_side: str = "left") -> Tensor:
    """Return the coordinates of several prompts as one batch, as a tokenizer pads their tokens.

    Args:
        parts: Coordinates of the prompts, each `[1, S, n]` or `[S, n]`.
        padding_side: `"left"` (needed for generation) or `"right"`.

    Returns:
        `[B, longest S, n]`, zero for padding.
    """
    rows = [_rows(part) for part in parts]
    if not rows or any(row.ndim != 2 or row.shape[1] != rows[0].shape[1] for row in rows):
        raise PositionError(
            f"stack: got coordinates of shapes {[list(part.shape) for part in parts]}; expected [1, S, n] with one n."
        )
    if padding_side not in ("left", "right"):
        raise PositionError(f"stack: got padding_side={padding_side!r}; expected 'left' or 'right'.")
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=padding_side)


def _rows(part: Tensor) -> Tensor:
    return part[0] if part.ndim == 3 and part.shape[0] == 1 else part
