"""`plan`, a dry run of a patch; `verify`, the proof that it is active; `explain`, how its attention is computed."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc import attention
from hf_posenc.errors import NotPatchedError, OptionError, PositionError
from hf_posenc.operands import is_count
from hf_posenc.patches import composites, record, surgery
from hf_posenc.patches.architecture import of_config
from hf_posenc.patches.cache import NAMES, cache_of
from hf_posenc.patches.model_card import ranges
from hf_posenc.patches.models import describe_start
from hf_posenc.patches.patch import Kept, Layers, Preparation, Stacks, disabled, evaluating, prepare
from hf_posenc.patches.surgery import Sites
from hf_posenc.scheme import Scheme

# Positions are cached as int64.
_POSITION_BYTES = 8
# Warning of a start that is a break.
BREAK = "The patched model computes another function and must be adapted."


class Shown:
    """Mixin of results that programs can read, too."""

    def __repr__(self) -> str:
        # Notebooks show it as `print` does.
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(asdict(cast(Any, self)), default=str))
        return found


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """Result of a dry run of `patch`.

    Attributes:
        native: `"remove"` or `"keep"`.
        options: Resolved options by stack.
        layers: Layer indices by stack.
        start: `"exact"`, `"exact with native kept"`, `"near with native kept"` (within `start_tolerance`) or `"break"`
            (the model must be adapted).
        start_tolerance: Largest change of an attention logit, over the model's whole context; `None` for a break.
        executors: Executors that can run the scheme's attention, the reference first.
        cache_bytes_per_token: Bytes added to the key/value cache per token, over all layers.
        cache_bytes_per_sequence: Bytes added once per sequence, over all layers.
    """

    architecture: str
    scheme: str
    native: str
    options: dict[str, dict[str, Any]]
    layers: dict[str, tuple[int, ...]]
    parameters: int
    parameter_bytes: int
    start: str
    start_tolerance: float | None
    executors: tuple[str, ...]
    cache_bytes_per_token: int
    cache_bytes_per_sequence: int
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        within = f" (logits of attention within {self.start_tolerance:g})" if self.start_tolerance else ""
        per_sequence = f", {self.cache_bytes_per_sequence:,} per sequence" if self.cache_bytes_per_sequence else ""
        rows = [
            ("scheme", self.scheme),
            ("native encoding", self.native),
            *((f"layers ({name})", f"{len(layers)}: {ranges(layers)}") for name, layers in self.layers.items()),
            *(
                (f"options ({name})", ", ".join(f"{key}={value!r}" for key, value in options.items()) or "none")
                for name, options in self.options.items()
            ),
            ("parameters added", f"{self.parameters:,} ({self.parameter_bytes:,} bytes)"),
            ("start", self.start + within),
            ("executors", ", ".join(self.executors)),
            ("cache", f"{self.cache_bytes_per_token:,} bytes more per token{per_sequence}"),
            *(("warning", warning) for warning in self.warnings),
        ]
        return "\n".join(f"{name + ':':<20} {value}" for name, value in rows)


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """Result of `verify`.

    Attributes:
        groups: Scheme, native setting and number of layers of each group.
        calls: Number of layers whose scheme ran.
        difference: Largest difference between the hidden states with the patch and without.
    """

    groups: tuple[tuple[str, str, int], ...]
    calls: int
    difference: float

    def __str__(self) -> str:
        groups = "; ".join(f"{scheme} on {count} layers (native: {native})" for scheme, native, count in self.groups)
        return f"active: {groups}; largest difference from the unpatched hidden states {self.difference:.3g}"


def plan(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    scheme: str,
    *,
    native: Kept = "remove",
    layers: Layers = None,
    stacks: Stacks = None,
    **options: Any,
) -> Plan:
    """Say what `patch` would do, without doing it. The other arguments and the errors are those of `patch`.

    Raises:
        PosencError: `patch` would raise it.
    """
    model = model_or_config
    with contextlib.ExitStack() as where:
        if isinstance(model, PreTrainedConfig):
            model = skeleton(composites.config_to_convert(model))
            where.enter_context(torch.device("meta"))
        prepared = prepare(model, scheme, native=native, layers=layers, stacks=stacks, options=options)
    parameters = [p for module in prepared.schemes for p in module.parameters()]
    per_token, per_sequence = _cache_bytes(prepared, model)
    start, tolerance = describe_start(prepared.schemes, prepared.group.native)
    return Plan(
        architecture=prepared.sites.architecture.name,
        scheme=scheme,
        native=prepared.native,
        options={name: dict(part.options) for name, part in prepared.group.stacks.items()},
        layers={name: part.layers for name, part in prepared.group.stacks.items()},
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        start=start,
        start_tolerance=tolerance,
        # A skeleton lies nowhere.
        executors=attention.executors(prepared.schemes[0], model.device if model.device.type == "cuda" else None),
        cache_bytes_per_token=per_token,
        cache_bytes_per_sequence=per_sequence,
        warnings=(*prepared.warnings, *([_adaptation(prepared.schemes[0])] if start == "break" else [])),
    )


def verify(model: nn.Module) -> Verification:
    """Prove that a patch is active: each patched layer runs its scheme.

    Two short forwards of every stack are made, one with the patch and one without. A model inside a wrapper is found.

    Raises:
        NotPatchedError: The model is not patched, or a scheme that it should run does not run.
    """
    inside = surgery.parts(model) if isinstance(model, nn.Module) else {}
    if not inside:
        raise NotPatchedError(
            f"verify: the {type(model).__name__} is not patched: it computes its own encoding. Call hf_posenc.patch, "
            "or load the converted checkpoint with hf_posenc imported."
        )
    found = [_verify(part) for part in inside.values()]
    return Verification(
        groups=tuple(group for each in found for group in each.groups),
        calls=sum(each.calls for each in found),
        difference=max(each.difference for each in found),
    )


def _verify(model: Any) -> Verification:
    for outer in composites.outers_of(model, model):
        if not surgery.is_patched(outer):
            raise NotPatchedError(
                f"verify: the {type(outer).__name__} was put around a patched {type(model).__name__} later, and is not "
                "patched itself, so it would be saved without the scheme. Patch the whole model, or save the inside."
            )
    sites = Sites.of(model)
    _check_enabled("verify", sites)
    layers = Counter(module.posenc_group for _, _, _, module in sites.patched())
    # An encoder alone has layers of some groups only.
    groups = [group for group in record.from_config(model.config) if group.id in layers]
    if not groups:
        raise NotPatchedError(
            f"verify: the config names no scheme for any layer of the {type(model).__name__}, although its class is "
            "patched. Convert it, or verify the whole model that it is a part of."
        )
    with attention.recorded() as calls:
        active = _hidden_states(sites)
    if len(calls) != layers.total():
        raise NotPatchedError(
            f"verify: schemes ran {len(calls)} times for {layers.total()} patched layers: another library replaced a "
            "forward after patching. Patch the plain model before applying other libraries, then verify again."
        )
    with disabled(model):
        stock = _hidden_states(sites)
    difference = max(float((a - b).abs().max()) for a, b in zip(active, stock, strict=True))
    return Verification(
        groups=tuple((group.scheme, surgery.kept_native(sites, group), layers[group.id]) for group in groups),
        calls=len(calls),
        difference=difference,
    )


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    architecture = of_config(config)
    heads = {kind.__name__: kind for pair in architecture.twins.items() for kind in pair}
    named = [heads[name] for name in config.architectures or [] if name in heads]
    models = [kind for kind in architecture.twins if issubclass(kind, PreTrainedModel)]
    # Where the config names no class, prefer one that generates text.
    generates = sorted(models, key=lambda kind: not hasattr(kind, "prepare_inputs_for_generation"))
    kind: Any = (named or generates)[0]
    with torch.device("meta"):
        model: PreTrainedModel = kind(config)
    # Loading would give it this dtype, and the cache has the same. A config that was made by hand may have its name.
    dtype: Any = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    return model if dtype is None else model.to(dtype)


def _cache_bytes(prepared: Preparation, model: nn.Module) -> tuple[int, int]:
    """Return the bytes cached per token and per sequence, without keys and values, over all layers with a cache."""
    dtype = next(model.parameters()).dtype
    per_token = per_sequence = 0
    for schemes in prepared.built.values():
        for scheme in schemes.values():
            geometry = scheme.geometry
            if not geometry.causal:
                continue  # Encoders keep no cache.
            growing, fixed = scheme.facts(element=dtype.itemsize).state_bytes
            if scheme.reads_keys and prepared.group.keeps_native and geometry.inv_freq is not None:
                growing += geometry.kv_heads * geometry.head_dim * dtype.itemsize  # keys without the model's rotation
            per_token += growing + _POSITION_BYTES
            per_sequence += fixed
    return per_token, per_sequence


def _adaptation(scheme: Scheme) -> str:
    if scheme.neutral_options is None:
        return BREAK
    given = "".join(f", {key}={value!r}" for key, value in scheme.neutral_options.items())
    return f"{BREAK} An exact start: native='keep'{given}."


def _hidden_states(sites: Sites) -> list[torch.Tensor]:
    with evaluating(sites.model), torch.no_grad():
        bodies = [stack.body for stack in sites.stacks.values()]
        return [body(**sites.architecture.example(body))[0] for body in bodies]


@dataclass(frozen=True)
class LayerExecution:
    """The execution of one layer's attention.

    Attributes:
        sequence: The executor for a whole sequence, with the form in which positions enter in parentheses.
        step: The executor for one more token with a cache; `None` in encoders.
    """

    stack: str
    layer: int
    scheme: str
    sequence: str
    step: str | None


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """Result of `explain`."""

    layers: tuple[LayerExecution, ...]
    length: int

    def __str__(self) -> str:
        rows = [("layer", "scheme", f"{self.length} tokens", "one more token")]
        rows += [(f"{x.stack} {x.layer}", x.scheme, x.sequence, x.step or "-") for x in self.layers]
        return "\n".join("{:<16} {:<16} {:<28} {}".format(*row) for row in rows)


def _check_enabled(call: str, sites: Sites) -> None:
    bodies: list[Any] = [stack.body for stack in sites.stacks.values()]
    if any(body.is_disabled() for body in bodies if surgery.is_patched(body)):
        raise NotPatchedError(f"{call}: the patch is disabled. Call it outside of hf_posenc.disabled.")


def explain(model: PreTrainedModel, *, length: int | None = None) -> Explanation:
    """Say which executor computes the attention of each patched layer, by running the model once.

    The choice depends on the scheme, the length, the device, the dtype and the attention implementation of the model;
    padding, explicit positions or dropout may change it too. `model.set_attn_implementation("eager")` makes it dense,
    where the model has a choice.

    Args:
        model: A patched model.
        length: Tokens of the sequence to run; `None` is 256, or fewer if the model states less. Images have their own.

    Raises:
        NotPatchedError: The model is not patched, or the patch is disabled.
        OptionError: The length is no positive number.
        PositionError: The model has no positions for that many tokens and one more.
    """
    surgery.check_patched("explain", model)
    model = composites.part_to_convert(model)
    surgery.check_patched("explain", model)
    sites = Sites.of(model)
    architecture = sites.architecture
    if length is None:
        # One more token is run, too.
        length = max(1, min(256, (architecture.trained_length(model.config) or 257) - 1))
    if not is_count(length) or length < 1:
        raise OptionError(f"explain: length={length!r}: expected a positive number of tokens.")
    _check_enabled("explain", sites)
    names = {group.id: group.scheme for group in record.from_config(model.config)}
    layers = [(stack, i, names[x.posenc_group]) for stack, _, i, x in sites.patched()]
    choices: list[tuple[str, str | None]] = []
    try:
        with evaluating(model):
            for stack in sites.stacks.values():
                geometry = architecture.geometry(stack.body, 0)
                if geometry.axes > 1 and geometry.max_positions is not None:
                    length = geometry.max_positions  # that of an image
                choices += _choices(stack.body, architecture.example(stack.body), length)
    except PositionError as error:
        raise PositionError(
            f"explain: length={length} and one more token: {error} Or pass a smaller length."
        ) from error
    found = [LayerExecution(*layer, whole, step) for layer, (whole, step) in zip(layers, choices, strict=True)]
    return Explanation(tuple(found), length)


def _choices(body: Any, example: dict[str, Any], length: int) -> list[tuple[str, str | None]]:
    """Return what ran in each patched layer of a stack for a sequence, and for one more token."""
    tokens = example.get("input_ids")
    if tokens is not None:
        example = {**example, "input_ids": tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length]}
    with torch.no_grad(), attention.recorded() as sequence:
        body(**example, return_dict=True)
    if tokens is None or not body.is_causal_stack():
        return [(choice, None) for choice in sequence]
    with torch.no_grad():
        cache = cache_of(body(**example, use_cache=True, return_dict=True))
        name = next(name for name in NAMES if name in body.posenc_arguments)
        with attention.recorded() as step:
            body(input_ids=tokens[:, :1], use_cache=True, **{name: cache})
    return list(zip(sequence, step, strict=True))
