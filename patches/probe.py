"""Attentions of transformers that call an attention function: their patched forward, and facts read from the stock one.

Such attentions differ in what comes before that function (norms of queries and keys, fused projections, partial
rotation) and in its keywords (window, softcap, sinks). So the stock forward does all of that here, too: a patched
attention calls it once, without rotation and cache, and with an attention function of our own, which runs the scheme.
What a scheme must know of a layer is read from the same forward, on the meta device.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.attention import from_tensor
from hf_posenc.errors import ArchitectureError
from hf_posenc.operands import Geometry
from hf_posenc.ops import Layout, turn_pairs
from hf_posenc.patches.attention import LayerCall, PosencAttention, arguments_of
from hf_posenc.patches.cache import NAMES
from hf_posenc.patches.context import Context
from hf_posenc.patches.rotary import native_frequencies, of_kind

# The attention function of patched layers, and the keyword under which it finds what to do with its operands.
_FUNCTION = "hf_posenc"
_THEN = "posenc_then"
# Names that stock attentions give to the cache.
_CACHES = (*NAMES, "layer_past")

# The name of the parameter of modules that make biases for a layer to add to its mask, or to take for one.
OFFSETS = "relative_position_bias_table"

_Then = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class _Carrier:
    """A mask with what to do with the operands, for attentions that hand no keywords to the attention function."""

    then: _Then
    mask: Any


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    """Hand the operands to the patched attention, or to the user's function where the patch is disabled."""
    then: _Then | None = keywords.pop(_THEN, None)
    if isinstance(attention_mask, _Carrier):
        then, attention_mask = attention_mask.then, attention_mask.mask
    if then is not None:
        return then(query, key, value, attention_mask, **keywords)
    return _users_function(module)(module, query, key, value, attention_mask, **keywords)


def _users_function(module: Any) -> _Then:
    stock = getattr(type(module), "posenc_stock", type(module))
    eager = inspect.getmodule(stock).eager_attention_forward  # type: ignore[union-attr]
    config = vars(module)["config"]
    config = config.stock if isinstance(config, FamilyConfig) else config
    return cast(_Then, ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager))


ALL_ATTENTION_FUNCTIONS.register(_FUNCTION, _attention_function)


class FamilyConfig:
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
    # Step between the columns of one pair and the next in the model's cosines.
    posenc_step: int
    posenc_causal: bool = False
    # Whether the mask carries what keywords do not.
    posenc_carries: bool = False
    # Window of the model's masks of which the stock forward does not tell the attention function.
    posenc_window: int | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            cls.posenc_cache = next((name for name in _CACHES if name in cls.posenc_arguments), None)
            cls.posenc_projecting = _without_rotation(cls.posenc_stock.forward)

    @property
    def config(self) -> Any:
        return FamilyConfig(vars(self)["config"])

    @config.setter
    def config(self, config: Any) -> None:
        vars(self)["config"] = config

    def attend(self, context: Context, hidden: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        cache: Any = None if self.posenc_cache is None else call.get(self.posenc_cache)
        causal = self.posenc_causal if vars(self).get("is_causal") is None else self.posenc_causal or self.is_causal
        rotation, rotate = context.native.rotation.get(self.posenc_kind, call.get("position_embeddings")), None
        if rotation is not None and self.posenc_rotates:
            if self.posenc_share is not None:
                rotation = self._shared_rotation(context, rotation)
            rotate = functools.partial(turned, self.posenc_stock, cos_sin=rotation)

        def then(
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
            is_causal: bool | None = None,
            **keywords: Any,
        ) -> tuple[Tensor, Tensor | None]:
            if mask is not None and mask.numel() == 1:
                mask = None  # of biases that were removed; and a lone key is always seen
            is_own = is_causal is not None and context.outside is None
            if is_own and query.shape[2] > 1 and bool(is_causal) != causal:
                refuse(self.posenc_stock, f"says to the attention function is_causal={is_causal} and is not")

            def outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                given = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, "is_causal": is_causal}
                given = {name: value for name, value in given.items() if value is not None}
                if cache is not None:  # Else the function fills it.
                    k, v = cache.update(k, v, self.layer_idx, kwargs=keywords)
                output = _users_function(self)(self, q, k, v, mask, scaling=scaling, **given, **keywords)[0]
                return output.reshape(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)

            layer = LayerCall(
                context,
                hidden,
                mask,
                causal=causal,
                scale=scaling,
                dropout=dropout,
                outside=None if context.outside is None else outside,
                cache=cache if context.outside is None else None,
                index=getattr(self, "layer_idx", None),  # models without a cache do not number their layers
                upcast=getattr(self, "reorder_and_upcast_attn", False) and context.dense,
                rotate=rotate,
                operands=(query, key, value),
                window=self.posenc_window if sliding_window is None else sliding_window,
                softcap=softcap,
                sinks=s_aux,
            )
            return self.attend_with_scheme(layer)

        return self.by_stock_forward(hidden, call, then)

    def _shared_rotation(self, context: Context, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the share that stays, computed once for the layers that have the same."""
        key = (self.posenc_share, self.posenc_kind, rotation[0].device)
        if key not in context.native.shares:
            assert self.posenc_share is not None
            context.native.shares[key] = self.posenc_share.of(*rotation, self.posenc_step, context.native.strength)
        return context.native.shares[key]

    def by_stock_forward(self, hidden: Tensor, call: dict[str, Any], then: _Then) -> tuple[Tensor, Tensor | None]:
        """Call the stock forward without rotation and cache, and with the next step after projection."""
        call = dict(call)
        if self.posenc_carries:
            call["attention_mask"] = _Carrier(then, call.get("attention_mask"))
        else:
            call[_THEN] = then
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


def _without_rotation(forward: Any) -> Any:
    """Return a function with the code of a stock forward, for which rotated queries and keys are what they were."""
    stock = inspect.unwrap(forward)
    # By `__name__`, torch.compile would look up the rotation in the module of transformers.
    names = {name: value for name, value in stock.__globals__.items() if name != "__name__"}
    names["apply_rotary_pos_emb"] = lambda q, k, *angles, **keywords: (q, k)
    found = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
    found.__kwdefaults__ = stock.__kwdefaults__
    return found


def kinds_vary(rotary: Any) -> bool:
    return "layer_type" in inspect.signature(rotary.forward).parameters


@dataclass(frozen=True)
class Facts:
    """Facts about an attention layer, read from its stock code.

    Attributes:
        geometry: Shape and rotation of the layer; other fields have their defaults.
        kind: Type of the layer, where each type has a rotation of its own, else empty.
        step: Step between the columns of one pair and the next in the model's cosines and sines.
        window: Window of the masks that the model makes for the layer, where it does not tell the attention function.
        carries: Whether the mask must carry what the attention does not hand on to the attention function.
        may_not_rotate: Whether the attention runs without a rotation, too, so that the model decides.
    """

    geometry: Geometry
    kind: str = ""
    rotates: bool = False
    step: int = 1
    window: int | None = None
    carries: bool = False
    may_not_rotate: bool = False


# Keywords of attention functions that a patched attention honours, or that change nothing.
_KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache", "is_causal"}
_KNOWN |= {"deterministic", "output_attentions"}


def calls_functions(kind: type) -> bool:
    """Whether the file of a class imports the attention functions of transformers."""
    return hasattr(inspect.getmodule(kind), "ALL_ATTENTION_FUNCTIONS")


class _Projected(Exception):
    """Ends the forward of a probe, once the attention is done."""


def read_facts(
    config: Any, layer: type[nn.Module], attention: type[nn.Module], rotary: type[nn.Module] | None, index: int
) -> Facts:
    """Run the stock forward of a layer on the meta device, once for the same code and config; return what it shows."""
    kinds = (layer, attention, rotary)
    # A patch changes the class of a config, its name and its record, of which no stock code knows.
    stated = {key: value for key, value in vars(config).items() if not key.startswith(("posenc", "_name_or_path"))}
    code = (*kinds, *_code(*kinds), *ROPE_INIT_FUNCTIONS.values())
    said = (index, getattr(type(config), "posenc_stock", type(config)), repr(stated), code)
    if said not in _FOUND:
        _FOUND[said] = _of_any_alike(config, layer, attention, rotary, said)
    return _FOUND[said]


# Facts by all that they are read from, since a probe takes as long as the rest of a patch several times over.
_FOUND: dict[tuple[Any, ...], Facts] = {}


# Gradients tell what rotates, also where the caller has switched them off.
@torch.inference_mode(False)
@torch.enable_grad()
def _of_any_alike(
    config: Any, layer: type[nn.Module], attention: type[nn.Module], rotary: type[nn.Module] | None, said: Any
) -> Facts:
    """Return the facts about a layer; layers that differ in their numbers only, which their code never reads, share."""
    index, *others = said
    module = blank_module(layer, config, index)
    for part in module.modules():
        vars(part).pop("layer_idx", None)
    parts = [
        (name, type(part), {key: value for key, value in vars(part).items() if key[0] != "_" and value is not config})
        for name, part in module.named_modules()
    ]
    shapes = [(name, parameter.shape) for name, parameter in module.named_parameters()]
    kind = (getattr(config, "layer_types", None) or [])[index : index + 1]
    alike = (repr(parts), repr(shapes), *kind, *others)
    if alike not in _FOUND:
        try:
            _FOUND[alike] = _probe(config, module, attention, rotary, index)
        except ArchitectureError:
            return _probe(config, blank_module(layer, config, index), attention, rotary, index)
    return _FOUND[alike]


def _code(*classes: type | None) -> Iterator[Any]:
    """Yield the functions of the modules of some classes, and their code: another library may replace either."""
    names = {kind.__module__ for given in classes if given for kind in given.__mro__ if issubclass(kind, nn.Module)}
    for name in sorted(names):
        for thing in vars(sys.modules[name]).values():
            own = isinstance(thing, type) and thing.__module__ == name
            for found in (thing, *vars(thing).values()) if own else (thing,):
                function = getattr(found, "__func__", found)
                if isinstance(function, FunctionType):
                    yield function, function.__code__


def _probe(config: Any, module: Any, attention: type[nn.Module], rotary: type[nn.Module] | None, index: int) -> Facts:
    for part in module.modules():
        part._modules.update({name: None for name, child in part._modules.items() if hasattr(child, OFFSETS)})
    inner: Any = next((child for child in module.modules() if isinstance(child, attention)), None)
    if inner is None:
        refuse(attention, f"is missing in layer {index}")
    inner.config = FamilyConfig(config)
    given: dict[str, Any] = {}
    kind = ""
    if rotary is not None:
        kind = config.layer_types[index] if kinds_vary(rotary) else ""
        of_images = "pixel_values" in inspect.signature(rotary.forward).parameters
        cos, sin = _turn(config, attention, rotary, index, kind) if not of_images else _turn_patch(config, rotary)
        angles = torch.zeros(cos.shape, device="meta", requires_grad=True)
        given["position_embeddings"] = (angles, angles)
    given["hidden_states"] = torch.zeros(1, 1, config.hidden_size, requires_grad=True, device="meta")
    found, carries = _projected(module, attention, given)
    query, key, value = (found.pop(name) for name in ("query", "key", "value"))
    unknown = sorted(name for name in found if name not in _KNOWN and found[name] is not None)
    if unknown or query.shape[-1] != key.shape[-1] or value.shape != key.shape:
        refuse(attention, f"passes {', '.join(unknown) or 'values of another shape than keys'} to attention")
    size = query.shape[-1]
    window = _window(config, attention, index, found.get("sliding_window"))
    shape = {"heads": query.shape[1], "kv_heads": key.shape[1], "head_dim": size, "hidden_size": config.hidden_size}
    geometry = Geometry(**shape, scale=size**-0.5 if found.get("scaling") is None else float(found["scaling"]))
    facts = Facts(geometry, kind, window=window, carries=carries)
    if rotary is None:
        return facts
    rotates = torch.autograd.grad(query.sum(), angles, allow_unused=True)[0] is not None
    if rotates:
        _check_rotation(attention, query, angles)
    if of_images:  # Where a patch is depends on the image; the model says it.
        return replace(facts, rotates=rotates)
    inv_freq, scaling = native_frequencies(config, rotary, kind)
    if not rotates:
        return without_rotation(replace(facts, geometry=replace(geometry, inv_freq=inv_freq)))
    layout = _layout(attention, (cos, sin), inv_freq, scaling, size)
    # At position 1; in half precision, where that is the default dtype.
    first = cos[0, -1, : len(inv_freq)].float()
    step = 1 if torch.allclose(first, inv_freq.cos() * scaling, atol=1e-2) else 2
    geometry = replace(geometry, inv_freq=inv_freq, rotary_scaling=scaling, layout=layout)
    free = _calls(module, attention, {**given, "position_embeddings": None}, carries)
    return replace(facts, geometry=geometry, rotates=True, step=step, may_not_rotate=isinstance(free, list))


def _turn(config: Any, attention: type, rotary: type[nn.Module], index: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of a rotary module at position 1."""
    try:
        with torch.device("cpu"):
            turn: tuple[Tensor, ...] = rotary(config)(
                torch.zeros(1), torch.ones(1, 1, dtype=torch.long), **of_kind(kind)
            )
    except Exception as error:  # of any kind: the code is not ours
        refuse(attention, f"has no rotation for layers like {index} ({type(error).__name__}: {error})")
    if len(turn) != 2:
        refuse(attention, "rotates by something else than cosines and sines")
    return turn


def _turn_patch(config: Any, rotary: type[nn.Module]) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of a rotary module for an image of one patch, `[1, D]`."""
    size = config.patch_size if isinstance(config.patch_size, int) else max(config.patch_size)
    with torch.device("cpu"):
        turn: tuple[Tensor, Tensor] = rotary(config)(torch.zeros(1, config.num_channels, size, size))
    return turn


def _projected(module: Any, attention: type[nn.Module], given: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of the attention function in a layer, and whether only its mask leads there."""
    for carries in (False, True):
        calls = _calls(module, attention, given, carries)
        if isinstance(calls, Exception):
            refuse(attention, f"does not run without a model around it ({type(calls).__name__}: {calls})")
        if len(calls) > 1:
            refuse(attention, f"calls the attention function {len(calls)} times")
        if calls:
            return calls[0], carries
    refuse(attention, "hands neither keywords nor its mask to the attention function of its config")


def _calls(
    module: Any, attention: type[nn.Module], given: dict[str, Any], carries: bool
) -> list[dict[str, Any]] | Exception:
    """Return the arguments of each call of the attention function in a layer, or what the stock code raises."""
    calls: list[dict[str, Any]] = []
    masks: list[Any] = []

    def take(query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any) -> tuple[Tensor, None]:
        if not carries and mask is not masks[-1]:
            refuse(attention, "makes a mask of its own, from more than positions")
        calls.append(keywords | {"query": query, "key": key, "value": value})
        return query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None

    def begin(module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        if _THEN not in keywords:
            refuse(attention, "gets no keywords from its layer")
        masks.append((dict(zip(arguments_of(attention), args, strict=False)) | keywords).get("attention_mask"))

    def end(*args: Any) -> NoReturn:
        raise _Projected

    hidden = given["hidden_states"]
    rest = {name: value for name, value in given.items() if name != "hidden_states"}
    inner = next(child for child in module.modules() if isinstance(child, attention))
    hooks = [inner.register_forward_pre_hook(begin, with_kwargs=True), inner.register_forward_hook(end)]
    try:
        module(hidden, attention_mask=_Carrier(take, None) if carries else None, **rest, **{_THEN: take})
    except _Projected:
        pass
    except ArchitectureError:
        raise
    except Exception as error:  # of any kind: the code is not ours
        return error
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def without_rotation(facts: Facts) -> Facts:
    """Return the facts about a layer that could rotate, for one that does not."""
    assert facts.geometry.inv_freq is not None
    still = replace(facts.geometry, inv_freq=torch.zeros_like(facts.geometry.inv_freq))
    return Facts(still, facts.kind, window=facts.window, carries=facts.carries)


def rotated(body: type[nn.Module], layer: type[nn.Module], config: Any) -> list[bool]:
    """Return which layers of a body get a rotation."""
    model = blank_module(body, config, 0)
    try:
        with torch.device("meta"):
            calls = _past_layers(model, layer, attention_mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))
    except Exception as error:  # of any kind: the code is not ours
        refuse(layer, f"may run without a rotation, and its model does not tell when ({error})")
    return [call.get("position_embeddings") is not None for call in calls]


def hides_ahead(body: type[nn.Module], layer: type[nn.Module], config: Any) -> bool:
    """Return whether the mask that a body makes hides the second of two tokens from the first."""
    small = copy.deepcopy(config)
    small.__class__ = getattr(type(config), "posenc_stock", type(config))
    small.num_hidden_layers, small._attn_implementation = 1, "eager"  # which takes no mask for "all"
    stated = {key: value for key, value in vars(small).items() if not key.startswith(("posenc", "_name_or_path"))}
    if (body, repr(stated)) not in _HIDES:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.inference_mode():
            try:
                masks = [call.get("attention_mask") for call in _past_layers(body(small), layer)]
            except Exception as error:  # of any kind: the code is not ours
                refuse(layer, f"does not say whether it is causal, and its model does not run to show it ({error})")
        seen = [from_tensor(mask, "all", (1, 1, 2, 2)).keep for mask in masks if mask is not None]
        _HIDES[body, repr(stated)] = any(keep is not None and not keep[..., 0, -1].all() for keep in seen)
    return _HIDES[body, repr(stated)]


_HIDES: dict[tuple[type, str], bool] = {}


def _past_layers(model: nn.Module, layer: type[nn.Module], **given: Any) -> list[dict[str, Any]]:
    """Run a body of text with two tokens past its layers; return the arguments of these, by name."""
    found: list[dict[str, Any]] = []
    names = arguments_of(layer)[1:]

    def passed(hidden_states: Tensor, *args: Any, **call: Any) -> Tensor:
        found.append(dict(zip(names, args, strict=False)) | call)
        return hidden_states

    for module in model.modules():
        if isinstance(module, layer):
            module.forward = passed
    model(torch.zeros(1, 2, dtype=torch.long), use_cache=False, **given)
    return found


def blank_module(kind: type[nn.Module], config: Any, index: int) -> Any:
    numbered = {"layer_idx": index} if "layer_idx" in inspect.signature(kind).parameters else {}
    try:
        with torch.device("meta"):
            return kind(config, **numbered)
    except TypeError as error:
        refuse(kind, f"is not built from its config alone ({error})")


def masks_have_windows(attention: type[nn.Module]) -> bool:
    makers = [name for name in vars(inspect.getmodule(attention)) if name.startswith("create_")]
    return any("sliding" in name or "chunked" in name for name in makers)


def _window(config: Any, attention: type[nn.Module], index: int, told: int | None) -> int | None:
    """Return the window of the masks that a model makes for a layer, unless its attention function is told."""
    if not masks_have_windows(attention):
        if told is not None:
            refuse(attention, f"tells the attention function of a window, {told}, that the masks do not have")
        return None
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    kind = "sliding_attention" if kinds is None else kinds[index]
    if kind not in ("full_attention", "sliding_attention"):
        refuse(attention, f"has masks of the type {kind}")
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
    """Whether an attention rotates a part of the channels of each head, as its code splits them."""
    return "rotary_ndims" in inspect.unwrap(attention.forward).__code__.co_names  # type: ignore[attr-defined]


def _check_rotation(attention: type, query: Tensor, angles: Tensor) -> None:
    """Raise unless queries come straight from the rotation that `turned` repeats, as autograd has it on record."""
    if "apply_rotary_pos_emb" not in inspect.unwrap(attention.forward).__code__.co_names:  # type: ignore[attr-defined]
        refuse(attention, "rotates by another function than apply_rotary_pos_emb")
    channels = torch.zeros(query.shape, device="meta", requires_grad=True)
    try:
        expected = turned(attention, channels, channels, (angles, angles))[0]
    except Exception as error:  # of any kind: the code is not ours
        refuse(attention, f"does not rotate queries together with keys ({type(error).__name__}: {error})")
    if not _same_steps(query.grad_fn, expected.grad_fn):
        refuse(attention, "does something between the rotation of queries and the attention function")


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
    refuse(attention, "rotates channels in another way than in pairs (i, i + d/2) or (2i, 2i + 1)")


def refuse(attention: type, why: str) -> NoReturn:
    raise ArchitectureError(
        f"Cannot patch {attention.__name__}: it {why}, so it is no family that can be read from its code. Write its "
        "architecture by hand, see docs/own_architecture.md."
    )
