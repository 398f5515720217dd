"""Which converted models may leave their attention to a server.

A server hands tokens of several requests to a model, in one row, and an attention function that knows the keys before
them. So a scheme may change queries, keys, values and outputs, each token by itself, and the input of the first layer.
Some servers also take slopes, for a bias in proportion to the distance, and logits that take part in the softmax.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import AttentionBackendError
from hf_posenc.forms import DistanceTable
from hf_posenc.patches import record, surgery
from hf_posenc.patches.probe import FamilyAttention
from hf_posenc.patches.surgery import Sites
from hf_posenc.scheme import CHANGED, Scheme

# Seams that no server leaves room for, and those that it may fill itself.
_NEVER = ("recall", "mix", "carry", "feed")
_LOGITS = ("score", "weigh")
# Distances at which a bias must be that multiple of the distance, up to rounding in float64.
_DISTANCES = (0, 1, 2, 3, 5, 64, 1000, 4097)


@dataclass(frozen=True, eq=False)
class Terms:
    """What a server adds for the scheme of a layer.

    Attributes:
        slopes: Factor of each head on the distance, `[H]`, to be taken from the logits; `None` is no bias.
        sinks: Logit of each head that takes part in the softmax for no key, `[H]`; `None` is none.
    """

    slopes: Tensor | None = None
    sinks: Tensor | None = None


def layers_for(model: Any, server: str, takes: frozenset[str] = frozenset()) -> Mapping[int, Any]:
    """Return the patched attentions of a decoder by layer, if a server computes what their schemes do.

    Args:
        model: A converted model.
        server: Its name, for the error.
        takes: What it adds to the logits itself, `"slopes"` or `"sinks"`.

    Raises:
        AttentionBackendError: It does not.
    """
    sites, found = Sites.of(model), {}
    if list(sites.stacks) != ["decoder"]:
        _refuse(server, f"the {' and '.join(sites.stacks)} of a {type(model).__name__} is no lone decoder")
    strengths = record.strengths_from_config(model.config)
    if strengths != record.FULL:
        _refuse(server, "the model is in the middle of a handover (see hf_posenc.set_strength)")
    decoder: Any = sites.stacks["decoder"].body
    if decoder.is_disabled():
        _refuse(server, "its patch is disabled")
    for _, body, layer, attention in sites.patched():
        scheme = surgery.scheme_of(body, attention)
        wrong = _obstacle(scheme, attention, takes)
        if wrong is not None:
            _refuse(server, f"{scheme.name} (layer {layer}) {wrong}")
        found[layer] = attention
    return found


def _refuse(server: str, why: str) -> None:
    raise AttentionBackendError(
        f"{server} cannot serve this model: {why}. Use model.generate of transformers, or hf_posenc.export_stock where "
        "it has a stock form (docs/other_tools.md lists what is served)."
    )


def _obstacle(scheme: Scheme, attention: Any, takes: frozenset[str]) -> str | None:
    """Return why a server cannot compute a scheme, as the predicate of a sentence; `None` if it can."""
    if not isinstance(attention, FamilyAttention):
        return f"is in a {type(attention).__name__}, which calls no attention function"
    if scheme.window is not None:
        return f"hides keys beyond its window of {scheme.window}"
    if any(scheme.facts().state_bytes) or scheme.history:
        return "keeps a state for each token"
    acting = [seam for seam in (*_LOGITS, *_NEVER) if scheme.overrides(seam)]
    terms = terms_of(scheme) if "recall" not in acting else Terms()
    filled = {"score": "slopes" in takes and terms.slopes is not None}
    filled["weigh"] = "sinks" in takes and terms.sinks is not None
    left = [seam for seam in acting if not filled.get(seam)]
    return f"changes {', '.join(CHANGED.get(seam, 'later layers') for seam in left)}" if left else None


def terms_of(scheme: Scheme) -> Terms:
    """Return what a server would have to add for a scheme, with its current parameters; before loading, with noise."""
    if any(parameter.is_meta for parameter in scheme.parameters()):
        scheme = copy.deepcopy(scheme).to_empty(device="cpu")
        for parameter in scheme.parameters():
            nn.init.normal_(parameter)
    bias, slopes = scheme.added(), None
    if isinstance(bias, DistanceTable):
        distances = torch.tensor(_DISTANCES)
        with torch.no_grad():
            values = bias.at(distances, torch.float64)
        if values.allclose(values[:, 1:2] * distances, rtol=1e-12, atol=0.0):
            slopes = -values[:, 1]
    return Terms(slopes, scheme.sink())
