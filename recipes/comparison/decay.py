"""Long-term decay of a trained scheme: the effect of positions on the logits of far keys, on a real text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.recipes.plots.probe import asked
from hf_posenc.recipes.plots.subject import Subject, patched

# The logits of all heads of longer texts would take gigabytes.
_LONGEST = 1024
# Largest near distance and smallest far distance, as shares of the text.
_NEAR, _FAR = 1 / 16, 1 / 2


def decay(model: Any, ids: Tensor) -> tuple[float, int] | None:
    """Return the mean positional contribution to the logits of near keys minus that of far keys.

    Near keys are at most a sixteenth of the text away, far keys at least half of it. The positional contribution is the
    logit minus the scaled dot product of the projected query and key; for contextual schemes it depends on the text.
    The mean is over layers, heads and keys of causal attention, in an encoder-decoder those of the decoder.

    Args:
        model: A patched or stock model; it is not changed.
        ids: Token ids of a text, int64 `[tokens]`; only the beginning is read.

    Returns:
        The decay in nats, positive where far keys lose, and the number of tokens read; `None` if positions do not act
        on logits.
    """
    ids = ids[None, :_LONGEST].to(model.device)
    with patched(model) as native, torch.no_grad():
        call: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        subject = Subject(
            model,
            None,
            {"encoder": call, "decoder": call} if model.config.is_encoder_decoder else {"decoder": call},
            native,
        )
        drops = [
            _drop(found.logits - found.plain)
            for part in subject.parts
            if part.geometry.causal
            for layer in part.layers
            for found in [asked(part, layer)]
        ]
    mean = sum(drops) / len(drops) if drops else 0.0
    # A different order of summation leaves rounding errors.
    return (mean, ids.shape[1]) if any(abs(drop) > 1e-4 for drop in drops) else None


def _drop(added: Tensor) -> float:
    """Return the mean over near pairs minus the mean over far pairs of contributions `[1, H, S, S]`."""
    length = added.shape[-1]
    places = torch.arange(length, device=added.device)
    distance = places[:, None] - places
    near = (distance >= 0) & (distance <= max(1, int(length * _NEAR)))
    far = distance >= length * _FAR
    return float(added[..., near].mean() - added[..., far].mean())
