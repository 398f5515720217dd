"""Architectures read from the code of transformers: rotary decoders whose attention calls an attention function.

Such models differ in what comes before that function (norms of queries and keys, fused projections, partial rotation)
and in its keywords (window, softcap, sinks). So the stock forward does all of that here, too: a patched attention calls
it once, with a rotation that turns nothing, no cache, and an attention function that runs the scheme. What a scheme
must know of a layer is read from the same forward, on the meta device.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import OutputRecorder

from hf_posenc.errors import ArchitectureError
from hf_posenc.operands import Geometry
from hf_posenc.ops.rotations import Layout, turn_pairs
from hf_posenc.patches.architecture import Architecture, embedding_rms, register_architecture, weight_of
from hf_posenc.patches.checkpoint import PosencConfig
from hf_posenc.patches.context import Context
from hf_posenc.patches.generation import PosencGenerator
from hf_posenc.patches.models import PosencModel
from hf_posenc.patches.rotary import frequency_limit, long_frequencies, native_frequencies
from hf_posenc.patches.seams import LayerCall, PosencAttention, PosencBody, PosencLayer

# The attention function of patched layers, and the keyword under which it finds what to do with its operands.
_FUNCTION = "hf_posenc"
_THEN = "posenc_then"
# Names that stock attentions give to the cache, and stock layers to the feed-forward.
_CACHES = ("past_key_values", "layer_past")
_FEED_FORWARDS = ("mlp", "block_sparse_moe", "feed_forward")

Then = Callable[..., tuple[Tensor, Tensor | None]]


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    """Hand the operands to the patched attention, or to the user's function where the patch is disabled."""
    then: Then | None = keywords.pop(_THEN, None)
    if then is not None:
        return then(query, key, value, attention_mask, **keywords)
    eager = inspect.getmodule(type(module).posenc_stock).eager_attention_forward  # type: ignore[attr-defined]
    chosen = ALL_ATTENTION_FUNCTIONS.get_interface(vars(module)["config"]._attn_implementation, eager)
    return cast(tuple[Tensor, Tensor | None], chosen(module, query, key, value, attention_mask, **keywords))


ALL_ATTENTION_FUNCTIONS.register(_FUNCTION, _attention_function)


class _Config:
    """A config as the attention module of a patched layer sees it: it names our attention function."""

    _attn_implementation = _FUNCTION

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class FamilyAttention(PosencAttention):
    """Mixin of patched attentions that project by the stock forward."""

    posenc_stock: ClassVar[type[nn.Module]]
    # Names of the arguments of the stock forward behind the first, and of the cache among them.
    posenc_arguments: ClassVar[tuple[str, ...]]
    posenc_cache: ClassVar[str]
    # Type of the layer, where each type has a rotation of its own; whether the layer rotates; width of cosines.
    posenc_kind: str
    posenc_rotates: bool
    posenc_width: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            cls.posenc_arguments = tuple(inspect.signature(cls.posenc_stock.forward).parameters)[2:]
            cls.posenc_cache = next(name for name in _CACHES if name in cls.posenc_arguments)

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
        rotation = context.native_rotation.get(self.posenc_kind, call["position_embeddings"])
        then = functools.partial(self.attend_projected, context, hidden_states, rotation, call.get(self.posenc_cache))
        return self.by_stock_forward(hidden_states, call, then)

    def by_stock_forward(self, hidden: Tensor, call: dict[str, Any], then: Then) -> tuple[Tensor, Tensor | None]:
        """Call the stock forward with a rotation that turns nothing, no cache, and the next step after projection."""
        cos, sin = call["position_embeddings"]
        nothing = {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin)), self.posenc_cache: None}
        return super().forward(hidden, **{**call, **nothing, _THEN: then})  # type: ignore[misc, no-any-return]

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: list[Tensor] = []

        def take(query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple[Tensor, None]:
            found[:] = query, key, value
            return query.transpose(1, 2), None

        angles = hidden.new_empty(1, 1, self.posenc_width)
        self.by_stock_forward(hidden, {"attention_mask": None, "position_embeddings": (angles, angles)}, take)
        query, key, value = found
        return query, key, value

    def attend_projected(
        self,
        context: Context,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Any,
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
        turn = inspect.getmodule(self.posenc_stock).apply_rotary_pos_emb  # type: ignore[union-attr]
        layer = LayerCall(
            context,
            hidden,
            mask,
            causal=self.is_causal,
            scale=scaling,
            dropout=dropout,
            need_weights=bool(keywords.get("output_attentions")),
            cache=cache,
            index=self.layer_idx,
            rotate=(lambda q, k: turn(q, k, *rotation)) if self.posenc_rotates else None,
            operands=(query, key, value),
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return self.attend_with_scheme(layer)


class FamilyLayer(PosencLayer):
    """Mixin of patched layers."""

    def feed_forward(self) -> nn.Module:
        found = [module for name in _FEED_FORWARDS if (module := getattr(self, name, None)) is not None]
        if not found:
            raise ArchitectureError(f"Found no feed-forward in {type(self).__name__}: none of {_FEED_FORWARDS}.")
        return found[0]


class FamilyBody(PosencBody):
    """Mixin of patched bodies."""

    def is_causal_stack(self) -> bool:
        attention = next(module for module in self.modules() if hasattr(module, "is_causal"))
        return bool(attention.is_causal)

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        native = self.strengths().native
        if native != 1:
            # Passed separately, since layers without a scheme need the rotation at full strength.
            assert context.positions is not None
            inputs, found = self.inputs_of(call), {}
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
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [("", {}, "")]
    return [(kind, {"layer_type": kind}, f"{kind}_") for kind in dict.fromkeys(config.layer_types)]


@dataclass(frozen=True)
class Facts:
    """What the stock code of an attention layer says about it.

    Attributes:
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Channels per head.
        scale: Factor on products of queries and keys.
        causal: Whether keys ahead of a query are hidden.
        kind: Type of the layer, where each type has a rotation of its own, else empty.
        width: Width of the cosines that the layer gets.
        inv_freq: Frequencies of its rotation; zero if it does not rotate.
        scaling: Factor on rotated queries and keys.
        layout: Pairing of channels.
        rotates: Whether the layer rotates queries and keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    kind: str
    width: int
    inv_freq: Tensor
    scaling: float
    layout: Layout
    rotates: bool


# Keywords of attention functions that a patched attention honours, or that change nothing.
_KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "attention_mask", "position_ids", "is_causal"}


def read_facts(config: Any, attention: type[nn.Module], rotary: Any, layer: int) -> Facts:
    """Run the stock forward of a layer on the meta device, and return what it shows.

    Raises:
        ArchitectureError: A fact that a scheme needs does not show.
    """
    kinds = _kinds(config, rotary)
    kind, keywords, _ = (
        next((k for k in kinds if k[0] == config.layer_types[layer]), kinds[0]) if kinds[0][0] else kinds[0]
    )
    with torch.device("cpu"):
        cos, sin = rotary(config)(torch.zeros(1), torch.ones(1, 1, dtype=torch.long), **keywords)
    with torch.device("meta"):
        module: Any = attention(config, layer)  # type: ignore[call-arg]
        hidden, angles = torch.zeros(1, 1, config.hidden_size), torch.zeros(cos.shape, requires_grad=True)
    module.requires_grad_(False).config = _Config(config)
    found: dict[str, Any] = {}

    def take(query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple[Tensor, None]:
        found.update(keywords, query=query, key=key)
        return query.transpose(1, 2), None

    given = {"attention_mask": None, "position_embeddings": (angles, angles), _THEN: take}
    with torch.enable_grad():
        module(hidden, **given)
    if not found:
        _refuse(attention, "does not call the attention function of its config")
    query, key = found.pop("query"), found.pop("key")
    if set(found) - _KNOWN:
        _refuse(attention, f"passes {', '.join(sorted(set(found) - _KNOWN))} to its attention function")
    rotates = query.requires_grad
    inv_freq, scaling = native_frequencies(config, rotary, kind)
    turn = getattr(inspect.getmodule(attention), "apply_rotary_pos_emb", None)
    if turn is None or turn.__name__ not in inspect.unwrap(attention.forward).__code__.co_names:
        _refuse(attention, "rotates by another function than apply_rotary_pos_emb")
    return Facts(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        scale=query.shape[-1] ** -0.5 if found.get("scaling") is None else float(found["scaling"]),
        causal=bool(getattr(module, "is_causal", True)),
        kind=kind,
        width=cos.shape[-1],
        inv_freq=inv_freq if rotates else torch.zeros_like(inv_freq),
        scaling=scaling if rotates else 1.0,
        layout=_layout(attention, functools.partial(turn, cos=cos, sin=sin), inv_freq, scaling, query.shape[-1]),
        rotates=rotates,
    )


def _layout(attention: type, turn: Any, inv_freq: Tensor, scaling: float, size: int) -> Layout:
    """Return the pairing of channels that turns every channel at position 1 as the stock rotation does."""
    channels = torch.eye(size, device="cpu")[None, :, None]
    with torch.device("cpu"):
        stock = turn(channels, channels)[0]
    cos, sin = (part[None, None, None] * scaling for part in (inv_freq.cos(), inv_freq.sin()))
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    for layout in layouts:
        if torch.allclose(turn_pairs(channels, cos, sin, layout), stock, atol=1e-5):
            return layout
    _refuse(attention, "rotates channels in another way than in pairs (i, i + d/2) or (2i, 2i + 1)")


def _refuse(attention: type, why: str) -> NoReturn:
    raise ArchitectureError(
        f"Cannot patch {attention.__name__}: it {why}, which cannot be read as a family. Write its architecture as in "
        "hf_posenc/patches/gpt2.py."
    )


class Family(Architecture):
    """An architecture whose classes and facts are read from the modeling module of transformers."""

    native = "rotary encoding (RoPE)"
    native_fades = True
    body: ClassVar[type[PreTrainedModel]]
    layer: ClassVar[type[nn.Module]]

    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"decoder": next(module for module in model.modules() if isinstance(module, self.body))}

    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        return list(cast(Any, body).layers)

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        return [
            next(module for module in layer.children() if isinstance(module, self.attention))
            for layer in self.layers(body)
        ]

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        return {name: module for name, module in attention.named_children() if "proj" in name or "query" in name}

    def facts(self, body: Any, layer: int) -> Facts:
        """Return what the stock code says about a layer of a body."""
        return read_facts(body.config, self.attention, type(body.rotary_emb), layer)

    def attributes(self, body: nn.Module, layer: int) -> Mapping[str, Any]:
        facts = self.facts(body, layer)
        return {"posenc_kind": facts.kind, "posenc_rotates": facts.rotates, "posenc_width": facts.width}

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        facts, config = self.facts(body, layer), cast(Any, body).config
        embeddings = cast(PreTrainedModel, body).get_input_embeddings()
        rms = embedding_rms(weight_of(embeddings))
        return Geometry(
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            hidden_size=config.hidden_size,
            scale=facts.scale,
            layer=layer,
            causal=facts.causal,
            inv_freq=facts.inv_freq,
            layout=facts.layout,
            max_positions=config.max_position_embeddings,
            rotary_scaling=facts.scaling,
            rotary_limit=frequency_limit(config, facts.kind) if facts.rotates else None,
            inv_freq_long=long_frequencies(config, facts.kind) if facts.rotates else None,
            # Gemma's embeddings multiply by a factor of their own.
            embedding_rms=None if rms is None else rms * float(getattr(embeddings, "scalar_embed_scale", 1.0)),
        )


def add_family(name: str, namespace: dict[str, Any]) -> Family:
    """Register the rotary decoders of one module of transformers, with every head.

    Args:
        name: Name of the module, as in `transformers.models.<name>`.
        namespace: `globals()` of the caller, into which the patched classes go, where pickle and checkpoints find them.

    Raises:
        ArchitectureError: The module is not built like a family: it has no causal language model, no attention and
            layer classes whose outputs are recorded, or no rotary embedding.
    """
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    models = [kind for kind in _classes(modeling) if issubclass(kind, PreTrainedModel)]
    causal = [kind for kind in models if kind.__name__.endswith("ForCausalLM")]
    if len(causal) != 1:
        raise ArchitectureError(f"Cannot add the family {name!r}: it has {len(causal)} classes ...ForCausalLM.")
    stock_config = cast(Any, causal[0]).config_class
    models = [kind for kind in models if cast(Any, kind).config_class is stock_config]
    models = [kind for kind in models if not kind.__name__.endswith("PreTrainedModel")]
    (body,) = (kind for kind in models if kind.__name__.endswith("Model"))
    recorded: Any = body._can_record_outputs or {}
    if not {"attentions", "hidden_states"} <= set(recorded):
        raise ArchitectureError(f"Cannot add the family {name!r}: {body.__name__} does not record its attentions.")
    attention, layer = (_recorded(recorded[what]) for what in ("attentions", "hidden_states"))

    def twin(stock: type, *bases: type, **attributes: Any) -> Any:
        attributes |= {"posenc_stock": stock, "__module__": namespace["__name__"]}
        made = type(f"Posenc{stock.__name__}", (*bases, stock), attributes)
        namespace[made.__name__] = made
        return made

    config = twin(
        stock_config,
        PosencConfig,
        __annotations__={"posenc": dict[str, Any] | None},
        posenc=None,
        model_type=f"hf_posenc_{name}",
        posenc_lock=("rope_parameters", {"rope_type": "hf_posenc", "rope_theta": 10000.0}),
    )
    twins = {stock_config: config, attention: twin(attention, FamilyAttention), layer: twin(layer, FamilyLayer)}
    for kind in models:
        head = PosencGenerator if issubclass(kind, GenerationMixin) else PosencModel
        bases = (FamilyBody, PosencModel) if kind is body else (head,)
        twins[kind] = twin(kind, *bases, config_class=config)
    parts = {"name": name, "twins": twins, "attention": attention, "body": body, "layer": layer}
    made: Family = type(f"{name.title().replace('_', '')}Family", (Family,), parts)()
    register_architecture(made)
    return made


def _classes(modeling: ModuleType) -> list[type]:
    return [kind for kind in vars(modeling).values() if isinstance(kind, type) and kind.__module__ == modeling.__name__]


def _recorded(entry: Any) -> type[nn.Module]:
    found: Any = entry.target_class if isinstance(entry, OutputRecorder) else entry
    return cast(type[nn.Module], found)
