"""ViT: patches of an image, with a learned table of positions that is added to their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.vit.modeling_vit import ViTEmbeddings

from hf_posenc.coordinates import grid
from hf_posenc.errors import PositionError, ShapeError
from hf_posenc.operands import Geometry, NativeTable, check_coords
from hf_posenc.patches.architecture import embedding_rms, refuse_changed, weight_of
from hf_posenc.patches.attention import CONTEXT
from hf_posenc.patches.body import COORDS, PosencBody
from hf_posenc.patches.context import Context, Inputs, Switch, is_this_thread, real_tokens, refuse_samples, this_thread
from hf_posenc.patches.family import Family, add_family


class PosencViTEmbeddings(Switch, ViTEmbeddings):
    """Embeddings with the position table at part of its strength; once a patch has removed it, images have any size."""

    posenc_stock = ViTEmbeddings

    def forward(
        self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None, interpolate_pos_encoding: bool | None = False
    ) -> Any:
        if not self.is_disabled():
            fits = self.posenc_removed or tuple(pixel_values.shape[-2:]) == tuple(self.image_size)
            interpolate_pos_encoding = interpolate_pos_encoding or fits
        return super().forward(pixel_values, bool_masked_pos, interpolate_pos_encoding)

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Any:
        if self.is_disabled():
            return super().interpolate_pos_encoding(embeddings, height, width)
        if self.posenc_removed:
            return embeddings.new_zeros(1)
        table: Tensor = self.position_embeddings
        if (height, width) != tuple(self.image_size):
            table = super().interpolate_pos_encoding(embeddings, height, width)
        native = self.posenc_strengths.native
        return table if native == 1 else table * native


class ViTBody(PosencBody):
    """Mixin of the patched body. The class token is at position 0, the patches follow row by row.

    The coordinates of a patch are its row and column on the grid, counted from 0; the class token has (0, 0), where
    nothing is rotated. The argument `position_coords` of the forward, `[B|1, 1 + patches, 2]`, replaces them; the class
    token comes first.
    """

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        pixels, coords = call.get("pixel_values"), call.pop(COORDS, None)
        if pixels is None:
            return call  # The stock forward says what is wrong.
        if call.get("position_ids") is not None:
            raise PositionError(
                "Got position_ids; the patches of an image have coordinates. Pass position_coords, or leave both out."
            )
        refuse_samples(call, "images are not packed into rows. Leave it out.")
        rows, columns = self.grid(pixels)
        batch, length = pixels.shape[0], 1 + rows * columns
        axes = self.axes()
        if coords is not None:
            coords = check_coords(coords, axes, batch, length, pixels.device)
        elif axes - {0, 1}:
            coords = grid_coords(rows, columns, pixels.device)
        positions = torch.arange(length, device=pixels.device)[None]
        real = real_tokens(call.get("attention_mask"), 0, length)
        return self.hand_down(call, self.context(call, Inputs(positions, length - 1, real, coords)))

    def grid(self, pixels: Tensor) -> tuple[int, int]:
        height, width = pixels.shape[-2:]
        patch: tuple[int, int] = tuple(self.embeddings.patch_embeddings.patch_size)
        rows, columns = height // patch[0], width // patch[1]
        # With the table, transformers checks the size.
        removed, trained = getattr(self.embeddings, "posenc_removed", False), tuple(self.embeddings.image_size)
        if removed and (height, width) not in (trained, (rows * patch[0], columns * patch[1])):
            raise ShapeError(
                f"Got images of {height} x {width} pixels; expected multiples of the patch size, {patch[0]} x "
                f"{patch[1]}. Resize or pad them."
            )
        return rows, columns

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        return call | {CONTEXT: context}

    def run(self, call: dict[str, Any]) -> Any:
        context, embedders = call.get(CONTEXT), self.embedders()
        if context is None or not embedders:
            return super().run(call)

        thread = this_thread()

        def embed(dropout: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
            # Other threads run the same module, with hooks of their own.
            return (self.embedded(inputs[0], context),) if is_this_thread(thread) else None

        # Nothing but the pixels goes into the embeddings of the stock model.
        handle = self.embeddings.dropout.register_forward_pre_hook(embed)
        try:
            return super().run(call)
        finally:
            handle.remove()


def grid_coords(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return row and column of the class token, (0, 0), and of each patch, float32 `[1, 1 + rows * columns, 2]`."""
    patches = grid(rows, columns).to(device)
    return torch.cat((patches.new_zeros(1, 1, 2), patches), dim=1)


class ViTFamily(Family):
    """ViT models with any head. The table enters once, before the first layer, so all layers have it or none.

    Without the table, images have any size that is a multiple of the patch size; with it, sizes other than the trained
    one need `interpolate_pos_encoding`, as in transformers.
    """

    native = "learned table of positions"
    native_per_layer = False
    native_fades = True
    acting = ViTBody
    shared = {ViTEmbeddings: PosencViTEmbeddings}

    def native_parameters(self, body: Any) -> Sequence[nn.Parameter]:
        return [body.embeddings.position_embeddings]

    def swapped(self, body: Any) -> Sequence[nn.Module]:
        return [body.embeddings]

    def check_native(self, body: Any) -> None:
        rows, config = body.embeddings.position_embeddings.shape[1], body.config
        with torch.device("meta"):
            stated = ViTEmbeddings(config).position_embeddings.shape[1]
        if rows != stated:
            refuse_changed(body, f"its table has {rows} rows, and its config states {stated}")

    def geometry(self, body: Any, layer: int) -> Geometry:
        table = weight_of(body.embeddings, "position_embeddings").detach()[0]
        return replace(
            super().geometry(body, layer),
            axes=2,
            max_positions=table.shape[0],
            native=NativeTable("learned", table),
        )

    def embedding_rms(self, body: Any) -> float | None:
        # The size of embedded patches depends on the images, so the size of the table stands for it.
        return embedding_rms(weight_of(body.embeddings, "position_embeddings"))

    def example(self, body: Any) -> dict[str, Tensor]:
        weight, size = body.embeddings.patch_embeddings.projection.weight, body.embeddings.image_size
        shape = (1, weight.shape[1], *size)
        return {"pixel_values": torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(weight)}


add_family("vit", globals(), ViTFamily)
