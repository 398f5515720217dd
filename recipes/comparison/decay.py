"""Long-term decay of a trained scheme: how far positions lower the logits of far keys on a real text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.recipes.plots.probe import asked
from hf_posenc.recipes.plots.subject import Subject, patched

# Longer texts would take gigabytes in all heads.
_LONGEST = 1024
# Distances up to this share of the text are near, those from the other on are far.
_NEAR, _FAR = 1 / 16, 1 / 2


def decay(model: Any, ids: Tensor) -> tuple[float, int] | None:
    """Return the mean over layers, heads and keys of what positions add to near keys, less what they add to far ones.

    Near is up to a sixteenth of the text, far from half of it on. What positions add is the logit less the scaled product of
    query and key as they were projected; of contextual schemes it depends on the text. The decoder is looked at.

    Args:
        model: Patched or stock; left as it was.
        ids: Token ids of a text, int64 `[tokens]`; the beginning is read.

    Returns:
        Nats, above 0 where far keys lose, and the tokens read; `None` where positions do not act on logits.
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
    # Sums in another order leave something like rounding.
    return (mean, ids.shape[1]) if any(abs(drop) > 1e-4 for drop in drops) else None


def _drop(added: Tensor) -> float:
    """Return near less far of `[1, H, S, S]`, over causal pairs."""
    length = added.shape[-1]
    places = torch.arange(length, device=added.device)
    distance = places[:, None] - places
    near = (distance >= 0) & (distance <= max(1, int(length * _NEAR)))
    far = distance >= length * _FAR
    return float(added[..., near].mean() - added[..., far].mean())
