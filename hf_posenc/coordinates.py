"""Coordinates of tokens in more than one dimension: patches of an image, or cells of a table within a text.

Pass them as `position_coords` to a patched model's forward or `generate`; schemes with several axes read them. Text
follows the rule of M-RoPE (Qwen2-VL): a text token has the same number on every axis, one more than the largest
coordinate before it. An image or a table begins, on every axis, where the next text token would be.
"""

from __future__ import annotations

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

    Returns:
        float32 `[1, rows * columns, 2]`.

    Raises:
        PositionError: A size or the step is not positive.
    """
    for name, value in (("rows", rows), ("columns", columns)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PositionError(f"grid({name}={value!r}): expected a positive integer.")
    if not step > 0:
        raise PositionError(f"grid(step={step!r}): expected a number above 0.")
    down, across = torch.arange(rows) * step, torch.arange(columns) * step
    return torch.cartesian_prod(down, across).view(1, rows * columns, 2).float()


def join(*parts: int | Tensor, axes: int | None = None) -> Tensor:
    """Return the coordinates of a prompt made of texts, images and tables: `join(5, grid(4, 6), 7)`.

    Args:
        *parts: Parts in order: the number of tokens of a text, or coordinates `[1, S, n]` or `[S, n]` that count from
            0.
        axes: Number of coordinates n of a token; needed only if all parts are texts.

    Returns:
        float32 `[1, S, n]`.

    Raises:
        PositionError: A part is misshapen, or the parts differ in the number of axes.
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


def table(
    text: str,
    offsets: Sequence[tuple[int, int]] | Tensor,
    *,
    span: tuple[int, int] | None = None,
    delimiter: str = "|",
    order: bool = False,
) -> Tensor:
    """Return the coordinates of the tokens of a text that contains a table; a token in the table has those of its cell.

    Rows end with a line break, cells with the delimiter; a delimiter at the beginning of a row (Markdown) opens its
    first cell. A line break or delimiter belongs to the row or cell that it ends, and a token belongs to the cell of
    its last character. Before and after the table the rule for texts holds.

    Args:
        text: The prompt.
        offsets: Begin and end of each token's characters, `[S, 2]`, as fast tokenizers return with
            `return_offsets_mapping=True`. Tokens without characters (special tokens, padding) count as text.
        span: Begin and end of the table in the text, in characters; `None` is the whole text.
        delimiter: End of a cell: `"|"`, `","`, a tab.
        order: Add a first axis that counts tokens as in a text. Without it all tokens of one cell have the same
            coordinates, and the model cannot see their order.

    Returns:
        float32 `[1, S, 2]` of (row, column), or `[1, S, 3]` of (order, row, column).

    Raises:
        PositionError: Offsets or span lie outside of the text, or the delimiter is empty or a line break.
    """
    begin, end = (0, len(text)) if span is None else span
    if not 0 <= begin <= end <= len(text):
        raise PositionError(
            f"table: got span={span!r}; expected begin and end within the {len(text)} characters of text."
        )
    if not delimiter or "\n" in delimiter:
        raise PositionError(f"table: got delimiter={delimiter!r}; expected a string without line breaks.")
    pairs = offsets.tolist() if isinstance(offsets, Tensor) else [tuple(pair) for pair in offsets]
    if any(len(pair) != 2 or not 0 <= pair[0] <= pair[1] <= len(text) for pair in pairs):
        raise PositionError(
            f"table: expected offsets [S, 2], begin and end of each token within the {len(text)} characters of text. "
            "Ask the tokenizer for return_offsets_mapping=True, on this text alone."
        )
    placed: list[list[int]] = []
    largest, origin = -1, 0
    inside = False
    for first, stop in pairs:
        if not (first < stop and begin < stop <= end):
            inside, place = False, [largest + 1] * 3
        else:
            if not inside:
                origin = largest + 1
            row, column = _cell(text[begin:end], stop - 1 - begin, delimiter)
            place = [placed[-1][0] + 1 if inside else origin, origin + row, origin + column]
            inside = True
        placed.append(place)
        largest = max(largest, *place[0 if order else 1 :])
    return torch.tensor(placed, dtype=torch.float32).view(1, len(placed), 3)[..., 0 if order else 1 :]


def stack(parts: Sequence[Tensor], *, padding_side: str = "left") -> Tensor:
    """Return the coordinates of several prompts as one batch, as a tokenizer pads their tokens.

    Args:
        parts: Coordinates of the prompts, each `[1, S, n]` or `[S, n]`.
        padding_side: `"left"` (needed for generation) or `"right"`.

    Returns:
        `[B, longest S, n]`, zero for padding.

    Raises:
        PositionError: There are no parts, they differ in the number of axes, or the side is unknown.
    """
    rows = [_rows(part) for part in parts]
    if not rows or any(row.ndim != 2 or row.shape[1] != rows[0].shape[1] for row in rows):
        raise PositionError(
            f"stack: got coordinates of shapes {[list(part.shape) for part in parts]}; expected [1, S, n] with one n."
        )
    if padding_side not in ("left", "right"):
        raise PositionError(f"stack: got padding_side={padding_side!r}; expected 'left' or 'right'.")
    longest = max(len(row) for row in rows)
    batch = rows[0].new_zeros(len(rows), longest, rows[0].shape[1])
    for place, row in zip(batch, rows, strict=True):
        place[longest - len(row) if padding_side == "left" else 0 :][: len(row)] = row
    return batch


def _rows(part: Tensor) -> Tensor:
    """Return coordinates `[1, S, n]` as `[S, n]`."""
    return part[0] if part.ndim == 3 and part.shape[0] == 1 else part


def _cell(table: str, character: int, delimiter: str) -> tuple[int, int]:
    """Return row and column of a character; a line break or delimiter belongs to the row or cell that it ends."""
    row = table.count("\n", 0, character)
    line = table.rfind("\n", 0, character) + 1
    start = line + len(delimiter) if table.startswith(delimiter, line) else line
    return row, table.count(delimiter, start, max(start, character))
