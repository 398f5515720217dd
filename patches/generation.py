"""Generation by patched models: coordinates for the prompt, and for each new token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import CacheError, PositionError
from hf_posenc.operands import check_coords
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.context import Mixin, real_tokens, resolve_positions
from hf_posenc.patches.models import PosencModel
from hf_posenc.patches.seams import REAL, tokens_in


def continued(prompt: Tensor, mask: Tensor | None, first: int, length: int) -> Tensor:
    """Return the coordinates of the tokens of the next forward, `[B, length, n]`, given those of the prompt.

    After the prompt they follow the rule for texts: one more than the largest, on every axis. The last entries of the
    padding mask, 2-D, are those of all tokens so far. `first` counts from the first token of the prompt.
    """
    count = first + length - prompt.shape[1]
    if count <= 0:
        return prompt[:, first : first + length]
    real = prompt
    if mask is not None:
        before = mask.shape[1] - prompt.shape[1] - count
        hidden = mask[:, before : before + prompt.shape[1], None].to(prompt.device) == 0
        real = prompt.masked_fill(hidden, float("-inf"))
    largest = real.amax(dim=(1, 2)).nan_to_num(neginf=-1.0)  # a prompt of padding alone has none
    following = largest[:, None] + torch.arange(1, count + 1).to(prompt)  # [B, count]
    return torch.cat((prompt, following[..., None].expand(-1, -1, prompt.shape[2])), dim=1)[:, first:]


class PosencGenerator(PosencModel, Mixin):
    """Mixin of patched models that generate."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the pages of its cache have no room for positions."""
        raise CacheError(
            "Patched models do not run with continuous batching: the pages of its cache have no room for positions. "
            "Use generate with a batch."
        )

    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        position_coords: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as `GenerationMixin.generate` does; tokens may have coordinates.

        Args:
            inputs: Token ids or other inputs of the prompt.
            *args: Other arguments of `GenerationMixin.generate`.
            position_coords: Coordinates of the prompt, `[B|1, S, n]`; in an encoder-decoder model, of the encoder's
                tokens, and those of the decoder have none. A new token gets one more than the largest coordinate so
                far, on every axis.
            **kwargs: Other keywords of `GenerationMixin.generate`.

        Raises:
            PositionError: Coordinates do not fit the inputs or the schemes, those of an assistant model included.
        """
        if position_coords is not None and "continuation" not in kwargs:  # else an assisted model calls its assistant
            kwargs |= self._check_generation_coords(inputs, position_coords, kwargs)
        elif position_coords is not None:
            kwargs["position_coords"] = position_coords
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_coords: Tensor | None = None,
        continuation: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of the next forward, as `GenerationMixin` does, with coordinates and padding."""
        call: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids,
            *args,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        sequence_to_sequence = self.config.is_encoder_decoder
        mask = kwargs.get("decoder_attention_mask") if sequence_to_sequence else attention_mask
        name = "decoder_" if sequence_to_sequence else ""
        inputs = call.get("inputs_embeds") if call.get(f"{name}input_ids") is None else call[f"{name}input_ids"]
        assert inputs is not None
        if mask is not None and mask.ndim == 2 and call.get(f"{name}attention_mask") is not mask:
            # For a static cache it is 4-D by now, which does not tell what is padding.
            (batch, length), past = inputs.shape[:2], tokens_in(past_key_values)
            real = real_tokens(mask, past, length)
            if real is not None:
                call[REAL] = real
            if call.get(f"{name}position_ids") is None:
                positions = resolve_positions(None, mask, past, batch, length, inputs.device)
                call[f"{name}position_ids"] = positions + of_model(self).first_position(self)
        if continuation is not None:
            assert position_coords is not None
            first = int(tokens_in(past_key_values)) - continuation
            call["position_coords"] = continued(position_coords, mask, first, inputs.shape[1])
        return call

    def _prepare_position_ids_for_generation(self, *args: Any) -> Tensor:
        # transformers counts from 0 in `generate`, also where the model does not.
        positions: Tensor = super()._prepare_position_ids_for_generation(*args)  # type: ignore[misc]
        first: int = of_model(self).first_position(self)
        return positions + first

    def _check_generation_coords(self, inputs: Tensor | None, coords: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return coordinates, and the number of tokens in the cache before them, as steps of generation need them."""
        sequence_to_sequence = self.config.is_encoder_decoder
        ids, embedded = inputs if inputs is not None else kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        tokens = next((given for given in (embedded, ids) if given is not None), None)
        if tokens is None:
            raise PositionError("Got coordinates without input_ids or inputs_embeds to which they belong.")
        model: Any = self
        body: Any = of_model(model).stacks(model)["encoder" if sequence_to_sequence else "decoder"]
        batch, length = tokens.shape[:2]
        coords = check_coords(coords, body.axes(), batch, length, tokens.device).expand(batch, -1, -1)
        if sequence_to_sequence:
            return {"position_coords": coords}
        begin, mask = 0, kwargs.get("attention_mask")
        if mask is not None and mask.shape[1] > length:
            begin = int(tokens_in(kwargs.get("past_key_values")))  # only new tokens were passed
        return {"position_coords": coords, "continuation": begin}
