"""A model's own rotary frequencies, rebuilt from its config."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from hf_posenc.errors import OptionError, UnknownSchemeError, shown

# Parameters that every rope type has.
_OF_ANY_TYPE = ("rope_theta", "partial_rotary_factor")


def native_frequencies(config: Any, rotary: Any, kind: str = "") -> tuple[Tensor, float]:
    """Return the frequencies `[D / 2]` in float32, and the factor on rotated queries and keys, by the rotary class.

    They are computed from the config, since the live buffer is not saved, is rounded by `model.to(bfloat16)`, and is
    garbage after a load on the meta device. The types "dynamic" and "longrope" change theirs while a sequence grows,
    but cached keys cannot follow: theirs are frozen at the values for the original length.
    """
    name = _parameters(config, kind)["rope_type"]
    compute = rotary.compute_default_rope_parameters if name == "default" else ROPE_INIT_FUNCTIONS[name]
    with torch.device("cpu"):
        frequencies, scaling = compute(config, **of_kind(kind))
    return frequencies.float(), float(scaling)


def later_frequencies(config: Any, kind: str = "") -> tuple[int | None, Tensor | None]:
    """Return the length beyond which a model changes its frequencies, and those `[D / 2]` that it uses then.

    The length is `None` if it never does, the frequencies are if they vary with length, as those of "dynamic" do.
    """
    parameters = _parameters(config, kind)
    if parameters["rope_type"] == "dynamic":
        return config.max_position_embeddings, None
    limit = parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    if parameters["rope_type"] != "longrope" or limit is None:
        return None, None
    with torch.device("cpu"):
        frequencies: Tensor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=limit + 1, **of_kind(kind))[0]
    return limit, frequencies.float()


def changed_at(live: Any, stock: Any, config: Any, kind: str, length: int) -> int | None:
    """Return a position at which a rotary module turns otherwise than a config states, `None` if at none.

    `model.to(bfloat16)` rounds the frequencies, and training goes on with these, so rounded ones pass.
    """
    buffer = next(iter(live.buffers()), torch.empty(0))
    if buffer.is_meta:
        return None
    # Some types change their frequencies with the length, also those of a module that is called here.
    live = copy.deepcopy(live)
    expected = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with torch.device("cpu"):
            expected.append(stock(config).to(dtype).float().to(buffer.device))
    for most in (127, length - 1, 2 * length):
        positions = torch.tensor([[0, 1, 2, 17, most]], device=buffer.device)
        given = (torch.zeros(1, device=buffer.device), positions.clamp(max=most))
        found = torch.stack(live(*given, **of_kind(kind))).float()
        wanted = [torch.stack(each(*given, **of_kind(kind))) for each in expected]
        # The angle of a frequency that another device computed is off by so much.
        apart = [((found - each).abs().amax(dim=(0, 1, 3)) > 1e-5 + 1e-6 * positions[0]).tolist() for each in wanted]
        if all(map(any, apart)):
            return int(positions[0, apart[0].index(True)])
    return None


def check_scheme(name: object) -> None:
    """Raise `UnknownSchemeError` for a rope type of transformers, which is no scheme, with the way to it."""
    if isinstance(name, str) and name in ROPE_INIT_FUNCTIONS:
        raise UnknownSchemeError(
            f"{name!r} is a rope type of transformers, which a rotary model has in its config, and no scheme. "
            f"`hf-posenc train extend by={name} model=MODEL --out DIR` sets it and adapts the model to longer texts."
        )


def rescaled(config: Any, way: str, factor: float, length: int) -> dict[str, Any]:
    """Return changes of `rope_parameters` for texts of several times the trained length."""
    parameters = _parameters(config, _kind(config))
    theta, share = parameters["rope_theta"], parameters.get("partial_rotary_factor") or 1.0
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(width * share) // 2
    if way == "proportional" and share != 1:
        raise OptionError("proportional: the model rotates only a part of its channels already. Choose another way.")
    known = {
        "base": {"rope_theta": theta * 2 * factor},
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        # Channels that never turned round in training stop turning.
        "proportional": {"partial_rotary_factor": min(1.0, math.log(length / math.tau) / math.log(theta))},
        # The slowest channel is slowed down by the factor, and the fastest one is not (NTK-aware).
        "longrope": {
            "short_factor": [1.0] * pairs,
            "long_factor": [factor ** (pair / max(1, pairs - 1)) for pair in range(pairs)],
        },
    }
    changes = known.get(way, {})
    if way != "base":
        changes["rope_type"] = way
    if way in ("linear", "dynamic", "yarn", "llama3", "longrope"):
        changes["factor"] = factor
    if way in ("yarn", "llama3", "longrope"):
        changes["original_max_position_embeddings"] = length
    return changes


def set_rope(model: PreTrainedModel, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change the rope parameters of a stock model in place, in layers that read the whole text; return all it had.

    A new rope type leaves only base and rotated share of the old one. A model whose change is refused stays as it was.
    """
    config: Any = model.config
    before: dict[str, Any] | None = copy.deepcopy(getattr(config, "rope_parameters", None))
    if not before:
        raise OptionError(f"The {type(model).__name__} has no rotary encoding to change.")
    kind = _kind(config)
    own = _parameters(config, kind)
    left = own if "rope_type" not in changes else {key: own[key] for key in _OF_ANY_TYPE if own.get(key) is not None}
    new = {**left, **changes}
    rope_type = new.get("rope_type", "default")
    # transformers ignores all others.
    known = {*own, "rope_type", *(_OF_ANY_TYPE if rope_type == "default" else RopeParameters.__annotations__)}
    if unknown := changes.keys() - known:
        raise OptionError(
            f"The rope parameters {', '.join(sorted(unknown))} do nothing with rope_type {rope_type!r}. Give another "
            f"rope_type, or some of {', '.join(sorted(known))}."
        )
    try:
        _rebuild(model, {**before, kind: new} if kind else new)
    except OptionError:
        _rebuild(model, before)
        raise
    return before


@contextlib.contextmanager
def native_rope(model: PreTrainedModel, parameters: Mapping[str, Any]) -> Iterator[None]:
    """Give a stock model the rope parameters that `set_rope` returned, for a while."""
    changed: Any = model.config
    changed = changed.rope_parameters
    _rebuild(model, parameters)
    try:
        yield
    finally:
        _rebuild(model, changed)


def _rebuild(model: PreTrainedModel, parameters: Mapping[str, Any]) -> None:
    config: Any = model.config
    config.rope_parameters = copy.deepcopy(dict(parameters))
    try:
        config.validate_rope()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if any(key.endswith("inv_freq") for key, _ in child.named_buffers(recurse=False)):
                    new = type(child)(child.config)
                    if not all(each.isfinite().all() for each in new.buffers()):
                        raise OptionError(f"The rope parameters {parameters} give angles that are no numbers.")
                    setattr(module, name, new.to(model.device))
    except OptionError:
        raise
    # Numbers that are too large, texts or lists fail wherever transformers computes with them first.
    except Exception as error:
        raise OptionError(
            f"The rope parameters {shown(dict(parameters))} are refused by transformers: {error}"
        ) from error


def _kind(config: Any) -> str:
    """Return the type of the layers that read the whole text, where each type has parameters of its own."""
    nested = [key for key, value in config.rope_parameters.items() if isinstance(value, dict)]
    return next((key for key in nested if key == "full_attention"), nested[0] if nested else "")


def _parameters(config: Any, kind: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.rope_parameters[kind] if kind else config.rope_parameters
    return found


def of_kind(kind: str) -> dict[str, str]:
    """Return the keywords that functions of transformers take for a type of layer."""
    return {"layer_type": kind} if kind else {}
