"""Which converted models may leave their attention to a server.

A server hands tokens of several requests to a model, in one row, and an attention function that knows the keys before
them. So a scheme may change queries, keys, values and outputs, each token by itself, and the input of the first layer.
Some servers also take slopes, for a bias in proportion to the distance, logits that take part in the softmax, and
wider queries and keys, whose product is the logit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.attention import Call
from hf_posenc.attention.channels import widened
from hf_posenc.errors import AttentionBackendError
from hf_posenc.forms import Bias, DistanceTable, KeyBias, Products, Spared
from hf_posenc.operands import Positions
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
        width: Channels of the queries and keys of `wider`, which do what else there is; `None` if nothing is.
        span: Largest position that these hold.
    """

    slopes: Tensor | None = None
    sinks: Tensor | None = None
    width: int | None = None
    span: float = math.inf


def layers_for(model: Any, server: str, takes: frozenset[str] = frozenset()) -> Mapping[int, Any]:
    """Return the patched attentions of a decoder by layer, if a server computes what their schemes do.

    Args:
        model: A converted model.
        server: Its name, for the error.
        takes: What it adds to the logits itself, `"slopes"` or `"sinks"`; or `"width"`, for wider heads.

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
    wanted = {"slopes": terms.slopes is not None, "width": terms.width is not None}
    if scheme.folded() is not None and attention.posenc_keeps_native:
        wanted = {}  # the folded product stands in the place of the model's own
    filled = {"score": any(wanted.values()) and all(name in takes for name, asked in wanted.items() if asked)}
    filled["weigh"] = "sinks" in takes and terms.sinks is not None
    left = [seam for seam in acting if not filled.get(seam)]
    return f"changes {', '.join(CHANGED.get(seam, 'later layers') for seam in left)}" if left else None


def terms_of(scheme: Scheme, dtype: torch.dtype = torch.float32) -> Terms:
    """Return what a server would have to add for a scheme, with its current parameters; before loading, with noise.

    Args:
        scheme: A scheme of a layer.
        dtype: Dtype of queries and keys, on which the width depends.
    """
    scheme = _with_values(scheme)
    bias, folded, slopes, width = scheme.added(), scheme.folded(), None, None
    table = bias.rest if isinstance(bias, Spared) else bias
    if isinstance(table, DistanceTable):
        distances = torch.tensor(_DISTANCES)
        with torch.no_grad():
            values = table.at(distances, torch.float64)
        if values.allclose(values[:, 1:2] * distances, rtol=1e-12, atol=0.0):
            slopes = -values[:, 1]
    if products_of(bias) is not None or (folded is not None and folded.alone is not None):
        shape, device = scheme.geometry, next((each.device for each in scheme.parameters()), torch.device("cpu"))
        place = torch.zeros(1, 1, dtype=torch.long, device=device)
        q, k = (
            torch.zeros(1, heads, 1, shape.head_dim, dtype=dtype, device=device)
            for heads in (shape.heads, shape.kv_heads)
        )
        width = wider(scheme, q, k, k, Positions(place, place))[0].shape[-1]
    return Terms(slopes, scheme.sink(), width, math.inf if folded is None else folded.span)


def _with_values(scheme: Scheme) -> Scheme:
    """Return the scheme, or one with noise on the CPU if it has no values yet."""
    if any(parameter.is_meta for parameter in scheme.parameters()):
        scheme = copy.deepcopy(scheme).to_empty(device="cpu")
        for parameter in scheme.parameters():
            nn.init.normal_(parameter)
    return scheme


def wider(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, places: Positions) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of tokens, each by itself, whose plain attention does all but slopes and sinks.

    Args:
        scheme: A scheme with `Terms.width`.
        q: Projected queries `[B, H, S, D]`.
        k: Projected keys `[B, G, S, D]`.
        v: Values `[B, G, S, D]`.
        places: Positions of these tokens.
    """
    folded, products = scheme.folded(), products_of(scheme.added())
    call = Call(scheme, q, k, v, places, reach=scheme.geometry.context, scale=scheme.geometry.scale)
    if products is not None:
        call = widened(call, products(call.block(None)))
        return call.q, call.k, call.v
    assert folded is not None
    assert folded.alone is not None
    q, k, v = folded.alone(q, k, v, call.block(None))
    return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1]))


def products_of(bias: Bias | None) -> Products | None:
    """Return the products of a bias that servers with slopes leave to do; `None` if there is more to do, or nothing."""
    if isinstance(bias, KeyBias):
        return bias.products
    if isinstance(bias, DistanceTable):
        return bias.products
    if isinstance(bias, Spared) and isinstance(bias.rest, DistanceTable):
        own, others = bias.rest.products, bias.products
        if bias.rest.slope is not None:
            return others
        if own is not None:
            return lambda block: [*own(block), *others(block)]
    return None
