"""A learned table of positions, which the embeddings of a model add to those of its tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_posenc.errors import ArchitectureError, PositionError
from hf_posenc.patches.context import Context, Switch
from hf_posenc.patches.seams import CONTEXT, PosencBody


class PosencPositionTable(Switch, nn.Embedding):
    """A position table at part of its strength; once a patch has removed it, it adds nothing, at any position."""

    posenc_stock = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        if self.is_disabled():
            return super().forward(input)
        if not vars(self).get("posenc_removed"):
            added, native = super().forward(input), self.strengths().native
            return added if native == 1 else added * native
        return torch.zeros(*input.shape, self.embedding_dim, dtype=self.weight.dtype, device=input.device)


class TableBody(PosencBody):
    """Mixin of patched bodies whose embeddings have a table of positions.

    Some tables begin with rows for padding: the first position is then at row `first_row`, and the positions that
    callers pass are rows, as in transformers.
    """

    def prepare(self, call: dict[str, Any], coords: Tensor | None) -> dict[str, Any]:
        table = table_of(self)
        ids: Any = call.get("input_ids")
        inputs = call.get("inputs_embeds") if ids is None else ids
        buffered = hasattr(getattr(self, "embeddings", None), "token_type_ids")
        if inputs is not None and buffered and call.get("token_type_ids") is None:
            # The stock model looks them up by position, in a buffer as long as the table.
            call["token_type_ids"] = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        counts = call.get("position_ids") is None and ids is not None and table.padding_idx is not None
        traced = torch.compiler.is_compiling()
        unmasked = counts and not traced and call.get("attention_mask") is None and self.embedders()
        if unmasked and bool((ids == table.padding_idx).any()):
            raise PositionError(
                f"Got input_ids with padding ({table.padding_idx}) and no attention_mask; expected one: padding has no "
                "position in the stock model, and would get one here. Pass the attention_mask of the tokenizer."
            )
        call = super().prepare(call, coords)
        if counts and CONTEXT in call:
            assert ids is not None
            call["position_ids"] = (
                call["position_ids"].expand(ids.shape).masked_fill(ids == table.padding_idx, table.padding_idx)
            )
        return call

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        rows, table = super().given_positions(call), table_of(self)
        if rows is None or not first_row(table):
            return rows
        first, padding = first_row(table), table.padding_idx
        below = (rows < first) & (rows != padding)
        if not torch.compiler.is_compiling() and bool(below.any()):
            raise PositionError(
                f"Got position_ids with {int(rows[below][0])} among them; this model counts from {first}, and "
                f"{padding} is padding. Leave position_ids out, or add {first}."
            )
        return (rows - first).clamp_min(0)

    def counted_positions(self, call: dict[str, Any], past: int | Tensor) -> Tensor | None:
        padding, ids = table_of(self).padding_idx, cast(Tensor | None, call.get("input_ids"))
        if padding is None:
            return None
        if ids is None:
            # Embeddings do not tell what is padding, so the stock model counts all.
            inputs: Tensor = call["inputs_embeds"]
            return torch.arange(inputs.shape[1], device=inputs.device)[None] + past
        # Positions count the tokens that are not padding, whatever the mask says.
        return ((ids != padding).long().cumsum(-1) - 1).clamp_min(0) + past

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        table, reach = table_of(self), context.reach
        rows = table.num_embeddings - first_row(table)
        # A traced graph has no numbers.
        if reach >= rows and not torch.compiler.is_compiling() and not vars(table).get("posenc_removed"):
            raise PositionError(
                f"Position {reach} is beyond the model's own table of {rows} positions, which was kept. Give shorter "
                "inputs, or remove it: patch with native='remove', or hf_posenc.drop_native(model)."
            )
        call = super().hand_down(call, context)
        return call | {"position_ids": call["position_ids"] + first_row(table)}


def table_of(body: object) -> nn.Embedding:
    """Return the table of positions of a body.

    Raises:
        ArchitectureError: There is none.
    """
    embeddings = getattr(body, "embeddings", None)
    table = getattr(body, "wpe", None) if embeddings is None else getattr(embeddings, "position_embeddings", None)
    if not isinstance(table, nn.Embedding):
        raise ArchitectureError(
            f"Cannot patch {type(body).__name__}: found neither a rotary embedding nor a table "
            "embeddings.position_embeddings or wpe. Write an architecture of its own, see CONTRIBUTING.md."
        )
    return table


def first_row(table: nn.Embedding) -> int:
    """Return the row of the first position: behind the row of padding, if there is one."""
    return 0 if table.padding_idx is None else table.padding_idx + 1
