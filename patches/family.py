"""Architectures read from the code of transformers: models whose attention calls an attention function.

Such models differ in what comes before that function (norms of queries and keys, fused projections, partial rotation)
and in its keywords (window, softcap, sinks). So the stock forward does all of that here, too: a patched attention calls
it once, without rotation and cache, and with an attention function that runs the scheme. What a scheme
must know of a layer is read from the same forward, on the meta device.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils.output_capturing import OutputRecorder

from hf_posenc.errors import ArchitectureError, CacheError
from hf_posenc.operands import Geometry, NativeTable
from hf_posenc.ops.rotations import Layout, turn_pairs
from hf_posenc.patches.architecture import Architecture, embedding_rms, register_architecture, stated_length, weight_of
from hf_posenc.patches.context import Context
from hf_posenc.patches.rotary import frequency_limit, long_frequencies, native_frequencies
from hf_posenc.patches.seams import LayerCall, PosencAttention, PosencBody, PosencLayer
from hf_posenc.patches.table import PosencPositionTable, TableArchitecture, TableBody, first_row, table_of
from hf_posenc.patches.twins import Twins, modeling_module, models_in

# The attention function of patched layers, and the keyword under which it finds what to do with its operands.
_FUNCTION = "hf_posenc"
_THEN = "posenc_then"
# Names that stock attentions give to the cache, and stock layers to the feed-forward.
_CACHES = ("past_key_values", "layer_past")
_FEED_FORWARDS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "output.dense")

# Fields of configs that name the activation.
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation", "activation_function")
# Ends of the names of heads, one of which tells the config of the family.
_HEADS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForImageClassification")

Then = Callable[..., tuple[Tensor, Tensor | None]]


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    """Hand the operands to the patched attention, or to the user's function where the patch is disabled."""
    then: Then | None = keywords.pop(_THEN, None)
    if then is not None:
        return then(query, key, value, attention_mask, **keywords)
    stock = getattr(type(module), "posenc_stock", type(module))
    eager = inspect.getmodule(stock).eager_attention_forward  # type: ignore[union-attr]
    config = vars(module)["config"]
    config = config.stock if isinstance(config, _Config) else config
    chosen = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    return cast(tuple[Tensor, Tensor | None], chosen(module, query, key, value, attention_mask, **keywords))


ALL_ATTENTION_FUNCTIONS.register(_FUNCTION, _attention_function)


class _Config:
    """A config as the attention module of a patched layer sees it: it names our attention function."""

    _attn_implementation = _FUNCTION

    def __init__(self, config: PreTrainedConfig) -> None:
        self.stock = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


class FamilyAttention(PosencAttention):
    """Mixin of patched attentions that project by the stock forward."""

    posenc_stock: ClassVar[type[nn.Module]]
    # Name of the cache among the arguments of the stock forward.
    posenc_cache: ClassVar[str | None]
    # The stock forward without its rotation.
    posenc_projecting: ClassVar[Callable[..., tuple[Tensor, Tensor | None]]]
    # Type of the layer, where each type has a rotation of its own; whether the layer rotates.
    posenc_kind: str
    posenc_rotates: bool
    # Window of the model's masks of which the stock forward does not tell the attention function.
    posenc_window: int | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            cls.posenc_cache = next((name for name in _CACHES if name in cls.posenc_arguments), None)
            cls.posenc_projecting = _without_rotation(cls.posenc_stock.forward)

    @property
    def config(self) -> Any:
        return _Config(vars(self)["config"])

    @config.setter
    def config(self, config: Any) -> None:
        vars(self)["config"] = config

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        context = self.take_context(call)
        if context.positions is None:
            return super().forward(hidden_states, **call)  # type: ignore[misc, no-any-return]
        rotation = context.native_rotation.get(self.posenc_kind, call.get("position_embeddings"))
        cache = None if self.posenc_cache is None else call.get(self.posenc_cache)
        need_weights = bool(call.get("output_attentions"))
        then = functools.partial(self.attend_projected, context, hidden_states, rotation, cache, need_weights)
        return self.by_stock_forward(hidden_states, call, then)

    def by_stock_forward(self, hidden: Tensor, call: dict[str, Any], then: Then) -> tuple[Tensor, Tensor | None]:
        """Call the stock forward without rotation and cache, and with the next step after projection."""
        call = {**call, _THEN: then}
        if self.posenc_cache is not None:
            call[self.posenc_cache] = None
        if "position_embeddings" in call:
            call["position_embeddings"] = (None, None)  # nothing that could rotate in silence
        return self.posenc_projecting(hidden, **call)

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: list[Tensor] = []

        def take(query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple[Tensor, None]:
            found[:] = query, key, value
            return query.transpose(1, 2), None

        given: dict[str, Any] = dict.fromkeys({"attention_mask", "position_embeddings"} & {*self.posenc_arguments})
        self.by_stock_forward(hidden, given, take)
        query, key, value = found
        return query, key, value

    def attend_projected(
        self,
        context: Context,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        cache: Any,
        need_weights: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the scheme. The last arguments are those of an attention function."""
        turn = None
        if rotation is not None and self.posenc_rotates:
            turn = functools.partial(turned, self.posenc_stock, cos_sin=rotation)
        layer = LayerCall(
            context,
            hidden,
            mask,
            causal=self.is_causal,
            scale=scaling,
            dropout=dropout,
            need_weights=need_weights,
            cache=cache,
            index=getattr(self, "layer_idx", None),  # models without a cache do not number their layers
            upcast=getattr(self, "reorder_and_upcast_attn", False) and context.dense,
            rotate=turn,
            operands=(query, key, value),
            window=self.posenc_window if sliding_window is None else sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return self.attend_with_scheme(layer)


def _without_rotation(forward: Any) -> Any:
    """Return a function with the code of a stock forward, for which rotated queries and keys are what they were."""
    stock = inspect.unwrap(forward)
    # By `__name__`, torch.compile would look up the rotation in the module of transformers.
    names = {name: value for name, value in stock.__globals__.items() if name != "__name__"}
    names["apply_rotary_pos_emb"] = lambda q, k, *angles, **keywords: (q, k)
    found = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
    found.__kwdefaults__ = stock.__kwdefaults__
    return found


class FamilyLayer(PosencLayer):
    """Mixin of patched layers."""

    def posenc_feed_forward(self) -> nn.Module:
        parts: dict[str, nn.Module] = dict(self.named_modules())
        found = [parts[name] for name in _FEED_FORWARDS if name in parts]
        if not found:
            raise ArchitectureError(f"Found no feed-forward in {type(self).__name__}: none of {_FEED_FORWARDS}.")
        return found[0]


class FamilyBody(PosencBody):
    """Mixin of patched bodies."""

    def is_causal_stack(self) -> bool:
        attention = next(module for module in self.modules() if hasattr(module, "is_causal"))
        return bool(attention.is_causal)

    def masks_of_packed(self, mask: Tensor, *, goes_on: bool) -> Tensor | dict[str, Tensor]:
        """Return the masks for the layers. Layers that are not converted get the window in theirs."""
        config: Any = self.config
        window = getattr(config, "sliding_window", None)
        if window is None:
            return mask
        stock = next(each for each in self.modules() if isinstance(each, PosencAttention)).posenc_stock
        attentions = [each for each in self.modules() if isinstance(each, stock)]
        if all(isinstance(each, PosencAttention) for each in attentions) or not _masks_have_windows(stock):
            return mask
        if goes_on:
            raise CacheError(
                "Packed sequences cannot go on from a cache in a model with windows of which only some layers are "
                "converted. Convert all layers, or use a row for each sequence."
            )
        window = next(filter(None, (getattr(each, "sliding_window", None) for each in attentions)), window)
        slots = torch.arange(mask.shape[-1], device=mask.device)
        far = (slots[:, None] - slots).abs() >= window
        near = mask & ~far if mask.dtype == torch.bool else mask.masked_fill(far, torch.finfo(mask.dtype).min)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        masks = {kind: near if kind == "sliding_attention" else mask for kind in kinds}
        return masks if len(masks) > 1 else masks.popitem()[1]


class RotaryBody(FamilyBody):
    """Mixin of patched bodies that rotate queries and keys."""

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        native = self.strengths().native
        if native != 1:
            # Passed separately, since layers without a scheme need the rotation at full strength.
            assert context.positions is not None
            inputs, found = call.get("inputs_embeds"), {}
            if inputs is None:  # of these only device and dtype count, and some bodies take ids only
                inputs = self.get_input_embeddings().weight.new_empty(0, device=context.positions.device)
            for kind, keywords, prefix in _kinds(self.config, type(self.rotary_emb)):
                cos, sin = self.rotary_emb(inputs, context.positions * native, **keywords)
                # Some types of rotation (YaRN) also make queries and keys longer.
                whole = getattr(self.rotary_emb, f"{prefix}attention_scaling")
                length = (1 + native * (whole - 1)) / whole
                found[kind] = (cos * length, sin * length)
            context = replace(context, native_rotation=found)
        return super().hand_down(call, context)


def _kinds(config: Any, rotary: Any) -> list[tuple[str, dict[str, str], str]]:
    """Return the types of layers with a rotation of their own: name, keywords and prefix of attributes of its module.

    There is one, without a name, if all layers rotate alike.
    """
    if not _kinds_vary(rotary):
        return [("", {}, "")]
    return [(kind, {"layer_type": kind}, f"{kind}_") for kind in dict.fromkeys(config.layer_types)]


def _kinds_vary(rotary: Any) -> bool:
    return "layer_type" in inspect.signature(rotary.forward).parameters


@dataclass(frozen=True)
class Facts:
    """What the stock code of an attention layer says about it.

    Attributes:
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Channels per head.
        scale: Factor on products of queries and keys.
        kind: Type of the layer, where each type has a rotation of its own, else empty.
        inv_freq: Frequencies of its rotation; zero if it does not rotate, `None` if no layer of the model does.
        scaling: Factor on rotated queries and keys.
        layout: Pairing of channels.
        rotates: Whether the layer rotates queries and keys.
        window: Window of the masks that the model makes for the layer, where it does not tell the attention function.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    kind: str = ""
    inv_freq: Tensor | None = None
    scaling: float = 1.0
    layout: Layout = "half"
    rotates: bool = False
    window: int | None = None


# Keywords of attention functions that a patched attention honours, or that change nothing.
_KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache", "is_causal"}
_KNOWN |= {"deterministic", "output_attentions"}


class _Projected(Exception):
    """Ends the forward of a probe, once the attention is done."""


def read_facts(
    config: Any, layer: type[nn.Module], attention: type[nn.Module], rotary: type[nn.Module] | None, index: int
) -> Facts:
    """Run the stock forward of a layer on the meta device, once for the same code and config; return what it shows.

    Raises:
        ArchitectureError: A fact that a scheme needs does not show.
    """
    code = (layer, attention, rotary, *_code(layer, attention, rotary), *ROPE_INIT_FUNCTIONS.values())
    said = (index, type(config), repr(vars(config)), code)
    if said not in _FOUND:
        if len(_FOUND) == _MOST_FOUND:
            del _FOUND[next(iter(_FOUND))]
        _FOUND[said] = _probe(config, layer, attention, rotary, index)
    facts = _FOUND[said]
    # A scheme may write into what it gets.
    return facts if facts.inv_freq is None else replace(facts, inv_freq=facts.inv_freq.clone())


# Facts by all that they are read from, since a probe takes as long as the rest of a patch several times over.
_FOUND: dict[tuple[Any, ...], Facts] = {}
_MOST_FOUND = 1024


def _code(*classes: type | None) -> Iterator[Any]:
    """Yield the functions of the modules of some classes, and their code: somebody may replace either."""
    names = {kind.__module__ for given in classes if given for kind in given.__mro__ if issubclass(kind, nn.Module)}
    for name in sorted(names):
        for thing in vars(sys.modules[name]).values():
            own = isinstance(thing, type) and thing.__module__ == name
            for found in (thing, *vars(thing).values()) if own else (thing,):
                function = getattr(found, "__func__", found)
                if isinstance(function, FunctionType):
                    yield function, function.__code__


def _probe(
    config: Any, layer: type[nn.Module], attention: type[nn.Module], rotary: type[nn.Module] | None, index: int
) -> Facts:
    given: dict[str, Any] = {"attention_mask": None}
    kind = ""
    if rotary is not None:
        kind = config.layer_types[index] if _kinds_vary(rotary) else ""
        keywords = {"layer_type": kind} if kind else {}
        try:
            with torch.device("cpu"):
                turn = rotary(config)(torch.zeros(1), torch.ones(1, 1, dtype=torch.long), **keywords)
        except Exception as error:  # of any kind: the code is not ours
            _refuse(attention, f"has no rotation for layers like {index} ({type(error).__name__}: {error})")
        if len(turn) != 2:
            _refuse(attention, "rotates by something else than cosines and sines")
        cos, sin = turn
        angles = torch.zeros(cos.shape, device="meta", requires_grad=True)
        given["position_embeddings"] = (angles, angles)
    module = _blank(layer, config, index)
    hidden = torch.zeros(1, 1, config.hidden_size, requires_grad=True, device="meta")
    inner: Any = next(child for child in module.modules() if isinstance(child, attention))
    inner.config = _Config(config)
    calls: list[dict[str, Any]] = []

    def take(query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple[Tensor, None]:
        calls.append(keywords | {"query": query, "key": key, "value": value})
        return query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None

    def end(*args: Any) -> NoReturn:
        raise _Projected

    inner.register_forward_hook(end)
    try:
        with torch.enable_grad():
            module(hidden, **given, **{_THEN: take})
    except _Projected:
        pass
    except Exception as error:  # of any kind: the code is not ours
        _refuse(attention, f"does not run without a model around it ({type(error).__name__}: {error})")
    if not calls:
        _refuse(attention, "gets no keywords from its layer, or hands none to the attention function of its config")
    if len(calls) > 1:
        _refuse(attention, f"calls the attention function {len(calls)} times")
    (found,) = calls
    query, key, value = (found.pop(name) for name in ("query", "key", "value"))
    unknown = sorted(name for name in found if name not in _KNOWN and found[name] is not None)
    if unknown or query.shape[-1] != key.shape[-1] or value.shape != key.shape:
        _refuse(attention, f"passes {', '.join(unknown) or 'values of another shape than keys'} to attention")
    size = query.shape[-1]
    scale = size**-0.5 if found.get("scaling") is None else float(found["scaling"])
    window = _window(config, attention, index, found.get("sliding_window"))
    facts = Facts(query.shape[1], key.shape[1], size, scale, kind, window=window)
    if rotary is None:
        return facts
    rotates = _depends(query.grad_fn, angles)
    if rotates:
        _check_rotation(attention, query, angles)
    inv_freq, scaling = native_frequencies(config, rotary, kind)
    if not rotates:
        return replace(facts, inv_freq=torch.zeros_like(inv_freq))
    layout = _layout(attention, (cos, sin), inv_freq, scaling, size)
    return replace(facts, inv_freq=inv_freq, scaling=scaling, layout=layout, rotates=True)


def _blank(kind: type[nn.Module], config: Any, index: int) -> Any:
    """Return a stock module of a layer, on the meta device."""
    numbered = {"layer_idx": index} if "layer_idx" in inspect.signature(kind).parameters else {}
    try:
        with torch.device("meta"):
            return kind(config, **numbered)
    except TypeError as error:
        _refuse(kind, f"is not built from its config alone ({error})")


def _masks_have_windows(attention: type[nn.Module]) -> bool:
    """Whether models with this attention make sliding-window masks."""
    makers = [name for name in vars(inspect.getmodule(attention)) if name.startswith("create_")]
    return any("sliding" in name or "chunked" in name for name in makers)


def _window(config: Any, attention: type[nn.Module], index: int, told: int | None) -> int | None:
    """Return the window of the masks that a model makes for a layer, unless its attention function is told."""
    if not _masks_have_windows(attention):
        if told is not None:
            _refuse(attention, f"tells the attention function of a window, {told}, that the masks do not have")
        return None
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    kind = "sliding_attention" if kinds is None else kinds[index]
    if kind not in ("full_attention", "sliding_attention"):
        _refuse(attention, f"has masks of the type {kind}")
    return None if told is not None or kind == "full_attention" else getattr(config, "sliding_window", None)


def turned(attention: type, q: Tensor, k: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys `[B, H, S, D]` as a stock attention does."""
    turn: Any = inspect.getmodule(attention).apply_rotary_pos_emb  # type: ignore[union-attr]
    if not _cuts(attention):
        found: tuple[Tensor, Tensor] = turn(q, k, *cos_sin)
        return found
    # The attention itself takes the first channels and leaves the others.
    width = cos_sin[0].shape[-1]
    of_q, of_k = turn(q[..., :width], k[..., :width], *cos_sin)
    return torch.cat((of_q, q[..., width:]), dim=-1), torch.cat((of_k, k[..., width:]), dim=-1)


@functools.cache
def _cuts(attention: type) -> bool:
    """Whether an attention rotates a part of the channels that it cuts off itself."""
    return "rotary_ndims" in inspect.unwrap(attention.forward).__code__.co_names  # type: ignore[attr-defined]


def _check_rotation(attention: type, query: Tensor, angles: Tensor) -> None:
    """Raise unless queries come straight from the rotation that `turned` repeats, as autograd has it on record."""
    if "apply_rotary_pos_emb" not in inspect.unwrap(attention.forward).__code__.co_names:  # type: ignore[attr-defined]
        _refuse(attention, "rotates by another function than apply_rotary_pos_emb")
    with torch.enable_grad():
        channels = torch.zeros(query.shape, device="meta", requires_grad=True)
        try:
            expected = turned(attention, channels, channels, (angles, angles))[0]
        except Exception as error:  # of any kind: the code is not ours
            _refuse(attention, f"does not rotate queries together with keys ({type(error).__name__}: {error})")
    if not _same_steps(query.grad_fn, expected.grad_fn):
        _refuse(attention, "does something between the rotation of queries and the attention function")


def _same_steps(found: Any, expected: Any) -> bool:
    """Whether the operations that led to a tensor end in the expected ones."""
    if expected is None or hasattr(expected, "variable"):
        return True
    if found is None or found.name() != expected.name():
        return False
    return all(
        _same_steps(one, other)
        for (one, _), (other, _) in zip(found.next_functions, expected.next_functions, strict=False)
    )


def _depends(step: Any, leaf: Tensor) -> bool:
    """Whether an operation depends on a leaf of autograd's graph."""
    open_steps, seen = [step], set()
    while open_steps:
        step = open_steps.pop()
        if step is None or step in seen:
            continue
        if getattr(step, "variable", None) is leaf:
            return True
        seen.add(step)
        open_steps += [other for other, _ in step.next_functions]
    return False


def _layout(attention: type, cos_sin: tuple[Tensor, Tensor], inv_freq: Tensor, scaling: float, size: int) -> Layout:
    """Return the pairing of channels that turns every channel at position 1 as the stock rotation does."""
    with torch.device("cpu"):
        channels = torch.eye(size)[None, :, None]
        stock = turned(attention, channels, channels, cos_sin)[0]
    own = (part[None, None, None] * scaling for part in (inv_freq.cos(), inv_freq.sin()))
    of_cos, of_sin = own
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    for layout in layouts:
        if torch.allclose(turn_pairs(channels, of_cos, of_sin, layout), stock, atol=1e-5):
            return layout
    _refuse(attention, "rotates channels in another way than in pairs (i, i + d/2) or (2i, 2i + 1)")


def _refuse(attention: type, why: str) -> NoReturn:
    raise ArchitectureError(
        f"Cannot patch {attention.__name__}: it {why}, so it is no family that can be read from its code. Write its "
        "architecture by hand, see docs/own_architecture.md."
    )


class Family(Architecture):
    """An architecture whose classes and facts are read from the modeling module of transformers."""

    body: ClassVar[type[PreTrainedModel]]
    layer: ClassVar[type[nn.Module]]
    # Mixin of the body that knows the native encoding, and twins of classes that are not the family's own.
    acting: ClassVar[type[PosencBody]]
    shared: ClassVar[Mapping[type, type]] = {}

    @classmethod
    def lock(cls, config: type, rotary: Sequence[type]) -> tuple[str, Any]:
        """Return a field of the config, and a value that stock classes refuse."""
        field = next((name for name in _ACTIVATIONS if hasattr(config, name)), None)
        if field is None:
            raise ArchitectureError(
                f"Cannot add the family of {config.__name__}: it has none of the fields {', '.join(_ACTIVATIONS)}, by "
                "which stock classes refuse converted checkpoints."
            )
        return field, "requires hf_posenc"

    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        body = next(module for module in model.modules() if isinstance(module, self.body))
        attention: Any = self.attentions(body)[0]
        if not hasattr(attention, "is_causal"):
            _refuse(self.attention, "does not say whether it is causal")
        return {"decoder" if attention.is_causal else "encoder": body}

    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        found = [module for module in body.modules() if isinstance(module, self.layer)]
        if not found:
            raise ArchitectureError(f"Cannot patch {type(body).__name__}: it has no layers.")
        if len(found) == 1 < cast(Any, body).config.num_hidden_layers:
            raise ArchitectureError(
                f"Cannot patch {type(body).__name__}: it uses one layer several times, which schemes cannot tell apart."
            )
        return found

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        found = [
            next((module for module in layer.modules() if isinstance(module, self.attention)), None)
            for layer in self.layers(body)
        ]
        if None in found:
            missing = ", ".join(str(number) for number, module in enumerate(found) if module is None)
            _refuse(self.attention, f"is missing in some layers ({missing})")
        numbers = [number for module in found if (number := getattr(module, "layer_idx", None)) is not None]
        if len({*numbers}) < len(numbers):
            _refuse(self.attention, f"has layers of the same number ({', '.join(map(str, numbers))})")
        return cast(list[nn.Module], found)

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        # The names are those of a new attention: this one may have been altered after loading.
        blank = _blank(self.attention, vars(attention)["config"], getattr(attention, "layer_idx", None) or 0)
        names = [name for name, module in blank.named_children() if isinstance(module, nn.Linear | Conv1D)]
        return {name: getattr(attention, name, None) for name in names}

    def facts(self, body: nn.Module, layer: int) -> Facts:
        """Return what the stock code says about a layer of a body."""
        rotary: nn.Module | None = getattr(body, "rotary_emb", None)
        kind = None if rotary is None else type(rotary)
        return read_facts(cast(Any, body).config, self.layer, self.attention, kind, layer)

    def attributes(self, body: nn.Module, layer: int) -> Mapping[str, Any]:
        facts = self.facts(body, layer)
        return {"posenc_kind": facts.kind, "posenc_rotates": facts.rotates, "posenc_window": facts.window}

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        facts, config = self.facts(body, layer), cast(Any, body).config
        return Geometry(
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            hidden_size=config.hidden_size,
            scale=facts.scale,
            layer=layer,
            causal="decoder" in self.stacks(body),
            inv_freq=facts.inv_freq,
            layout=facts.layout,
            max_positions=stated_length(config),
            rotary_scaling=facts.scaling,
            rotary_limit=frequency_limit(config, facts.kind) if facts.rotates else None,
            inv_freq_long=long_frequencies(config, facts.kind) if facts.rotates else None,
            embedding_rms=self.embedding_rms(body),
        )

    def embedding_rms(self, body: nn.Module) -> float | None:
        """Return the root mean square of embedded inputs; `None` while the weights have no storage."""
        embeddings = cast(PreTrainedModel, body).get_input_embeddings()
        rms = embedding_rms(weight_of(embeddings))
        # Gemma's embeddings multiply by a factor of their own.
        return None if rms is None else rms * float(getattr(embeddings, "scalar_embed_scale", 1.0))


class RotaryFamily(Family):
    """A family that rotates queries and keys."""

    native = "rotary encoding (RoPE)"
    native_fades = True
    acting = RotaryBody

    @classmethod
    def lock(cls, config: type, rotary: Sequence[type]) -> tuple[str, Any]:
        # Configs with a rotation for each type of layer take any other for that of all types.
        if any(_kinds_vary(kind) for kind in rotary):
            return super().lock(config, rotary)
        return "rope_parameters", {"rope_type": "hf_posenc", "rope_theta": 10000.0}

    def embedding_size(self, body: nn.Module) -> int:
        if "inputs_embeds" not in inspect.signature(self.body.forward).parameters:
            raise ArchitectureError(
                f"{self.body.__name__} takes no inputs_embeds, so no scheme can add positions to them. Choose a scheme "
                "that acts inside of attention."
            )
        return super().embedding_size(body)


class TableFamily(TableArchitecture, Family):
    """A family that adds a learned table of positions to the embeddings of tokens."""

    acting = TableBody
    shared = {nn.Embedding: PosencPositionTable}

    def trained_length(self, config: Any) -> int:
        # Some configs count rows for padding, too. A body of one layer has the whole table.
        small = copy.deepcopy(config)
        small.num_hidden_layers = 1
        small.posenc = None  # The table of a converted model is that of the stock one.
        with torch.device("meta"):
            table = table_of(self.body(small))
        return table.num_embeddings - first_row(table)

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        table = table_of(body)
        # Detached, since a slice with a gradient cannot be copied, and teachers are copies.
        rows = weight_of(table)[first_row(table) :].detach()
        geometry = super().geometry(body, layer)
        # Some embeddings are narrower than the layers.
        native = NativeTable("learned", rows) if rows.shape[1] == geometry.hidden_size else None
        return replace(geometry, max_positions=rows.shape[0], native=native)


def add_family(name: str, namespace: dict[str, Any], kind: type[Family] | None = None) -> Family:
    """Register the models of one module of transformers, with every head.

    The models rotate queries and keys, or add a learned table of positions to the embeddings of tokens.

    Args:
        name: Name of the module, as in `transformers.models.<name>`.
        namespace: `globals()` of the caller, into which the patched classes go, where pickle and checkpoints find them.
        kind: Reads the native encoding; by default `RotaryFamily`, or `TableFamily` if nothing rotates.

    Raises:
        ArchitectureError: There is no such module, or it is not built like a family: it has no head of a common kind,
            or does not record the outputs of one class of attention and one of layers.
    """
    modeling = modeling_module(name)
    models = models_in(modeling)
    heads = [model for model in models if model.__name__.endswith(_HEADS)]
    if not heads:
        raise ArchitectureError(f"Cannot add the family {name!r}: it has no class ...{', ...'.join(_HEADS)}.")
    stock_config = cast(Any, heads[0]).config_class
    models = [model for model in models if cast(Any, model).config_class is stock_config]
    bodies = [model for model in models if model.__name__.endswith("Model") and not issubclass(model, GenerationMixin)]
    if len(bodies) != 1:
        raise ArchitectureError(
            f"Cannot add the family {name!r}: expected one class ...Model with the config {stock_config.__name__}, "
            f"found {len(bodies)}."
        )
    (body,) = bodies
    recorded: Any = cast(Any, body)._can_record_outputs or {}
    attention, layer = (_recorded(recorded.get(what)) for what in ("attentions", "hidden_states"))
    if attention is None or layer is None:
        raise ArchitectureError(
            f"Cannot add the family {name!r}: {body.__name__} records no single class of attention."
        )
    classes = [part for part in vars(modeling).values() if isinstance(part, type)]
    rotary = [x for x in classes if x.__module__ == modeling.__name__ and x.__name__.endswith("RotaryEmbedding")]
    kind = kind or (RotaryFamily if rotary else TableFamily)
    twins = Twins(name, namespace, stock_config, kind.lock(stock_config, rotary))
    twins.add(attention, FamilyAttention)
    twins.add(layer, FamilyLayer)
    twins.add_body(body, kind.acting, FamilyBody)
    twins.add_heads(models)
    parts = {"name": name, "twins": {**twins, **kind.shared}, "attention": attention, "body": body, "layer": layer}
    made: Family = type(f"{name.title().replace('_', '')}Family", (kind,), parts)()
    register_architecture(made)
    return made


def _recorded(entry: Any) -> type[nn.Module] | None:
    found: Any = entry.target_class if isinstance(entry, OutputRecorder) else entry
    return found if isinstance(found, type) else None
