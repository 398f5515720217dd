"""A model's own rotary frequencies, rebuilt from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def native_frequencies(config: Any, rotary: Any, kind: str = "") -> tuple[Tensor, float]:
    """Return the frequencies `[D / 2]` in float32, and the factor on rotated queries and keys.

    They are computed from the config, since the live buffer is not saved, is rounded by `model.to(bfloat16)`, and is
    garbage after a load on the meta device. The types "dynamic" and "longrope" change theirs while a sequence grows,
    but cached keys cannot follow: theirs are frozen at the values for the original length.

    Args:
        config: Config of the model; `rope_parameters` is read.
        rotary: The model's rotary module class, which knows the default type.
        kind: Type of the layer, where each type has parameters of its own.

    Returns:
        Frequencies and factor.
    """
    name = _parameters(config, kind)["rope_type"]
    compute = rotary.compute_default_rope_parameters if name == "default" else ROPE_INIT_FUNCTIONS[name]
    with torch.device("cpu"):
        frequencies, scaling = compute(config, **_keywords(kind))
    return frequencies.float(), float(scaling)


def long_frequencies(config: Any, kind: str = "") -> Tensor | None:
    """Return the frequencies `[D / 2]` that a model uses beyond `frequency_limit`; `None` if they vary with length.

    Those of "dynamic" vary.
    """
    limit = frequency_limit(config, kind)
    if _parameters(config, kind)["rope_type"] != "longrope" or limit is None:
        return None
    with torch.device("cpu"):
        frequencies: Tensor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=limit + 1, **_keywords(kind))[0]
    return frequencies.float()


def frequency_limit(config: Any, kind: str = "") -> int | None:
    """Return the length beyond which a model changes its rotary frequencies; `None` if it never does."""
    parameters = _parameters(config, kind)
    limits = {
        "dynamic": config.max_position_embeddings,
        "longrope": parameters.get("original_max_position_embeddings", config.max_position_embeddings),
    }
    return limits.get(parameters["rope_type"])


def _parameters(config: Any, kind: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.rope_parameters[kind] if kind else config.rope_parameters
    return found


def _keywords(kind: str) -> dict[str, str]:
    return {"layer_type": kind} if kind else {}
