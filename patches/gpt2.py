"""GPT-2: a learned table of positions, and a head that reads several choices per example."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_posenc.patches.family import TableBody, TableFamily, add_family


class ChoiceBody(TableBody):
    """Mixin of the patched body: positions and caches see one row per choice (the double heads model)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        ids = call.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim <= 2:
            return super().forward(**call)
        leading = ids.shape[:-1]
        for name, value in call.items():
            if isinstance(value, Tensor) and value.ndim > len(leading) and value.shape[: len(leading)] == leading:
                call[name] = value.flatten(0, len(leading) - 1)
        output = super().forward(**call)
        hidden = output[0].view(*leading, -1, output[0].shape[-1])
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output


class ChoiceFamily(TableFamily):
    """A family with such a body."""

    acting = ChoiceBody


add_family("gpt2", globals(), ChoiceFamily)
