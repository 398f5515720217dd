"""Architectures read from the code of transformers: models whose attention calls an attention function.

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
from hf_posenc.operands import Geometry, NativeTable
from hf_posenc.ops.rotations import Layout, turn_pairs
from hf_posenc.patches.architecture import Architecture, embedding_rms, register_architecture, weight_of
from hf_posenc.patches.checkpoint import PosencConfig
from hf_posenc.patches.context import Context
from hf_posenc.patches.generation import PosencGenerator
from hf_posenc.patches.models import PosencModel
from hf_posenc.patches.rotary import frequency_limit, long_frequencies, native_frequencies
from hf_posenc.patches.seams import LayerCall, PosencAttention, PosencBody, PosencLayer
from hf_posenc.patches.surgery import stock_class
from hf_posenc.patches.table import PosencPositionTable, TableArchitecture, TableBody, first_row, table_of

# The attention function of patched layers, and the keyword under which it finds what to do with its operands.
_FUNCTION = "hf_posenc"
_THEN = "posenc_then"
# Names that stock attentions give to the cache, and stock layers to the feed-forward.
_CACHES = ("past_key_values", "layer_past")
_FEED_FORWARDS = ("mlp", "block_sparse_moe", "feed_forward", "output.dense")

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
    posenc_cache: ClassVar[str | None]
    # Type of the layer, where each type has a rotation of its own; whether the layer rotates; width of cosines.
    posenc_kind: str
    posenc_rotates: bool
    posenc_width: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            cls.posenc_arguments = tuple(inspect.signature(cls.posenc_stock.forward).parameters)[2:]
            cls.posenc_cache = next((name for name in _CACHES if name in cls.posenc_arguments), None)

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
        then = functools.partial(self.attend_projected, context, hidden_states, rotation, cache)
        return self.by_stock_forward(hidden_states, call, then)

    def by_stock_forward(self, hidden: Tensor, call: dict[str, Any], then: Then) -> tuple[Tensor, Tensor | None]:
        """Call the stock forward with a rotation that turns nothing, no cache, and the next step after projection."""
        call = {**call, _THEN: then}
        if self.posenc_cache is not None:
            call[self.posenc_cache] = None
        if "position_embeddings" in call:
            cos, sin = call["position_embeddings"]
            call["position_embeddings"] = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(hidden, **call)  # type: ignore[misc, no-any-return]

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: list[Tensor] = []

        def take(query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple[Tensor, None]:
            found[:] = query, key, value
            return query.transpose(1, 2), None

        call: dict[str, Any] = {"attention_mask": None}
        if self.posenc_width:
            call["position_embeddings"] = (hidden.new_empty(1, 1, self.posenc_width),) * 2
        self.by_stock_forward(hidden, call, take)
        query, key, value = found
        return query, key, value

    def attend_projected(
        self,
        context: Context,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
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
        turn: Any = getattr(inspect.getmodule(self.posenc_stock), "apply_rotary_pos_emb", None)
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
            rotate=(lambda q, k: turn(q, k, *rotation)) if rotation is not None and self.posenc_rotates else None,
            operands=(query, key, value),
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return self.attend_with_scheme(layer)


class FamilyLayer(PosencLayer):
    """Mixin of patched layers."""

    def feed_forward(self) -> nn.Module:
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


class RotaryBody(FamilyBody):
    """Mixin of patched bodies that rotate queries and keys."""

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
        kind: Type of the layer, where each type has a rotation of its own, else empty.
        width: Width of the cosines that the layer gets; 0 if it gets none.
        inv_freq: Frequencies of its rotation; zero if it does not rotate, `None` if no layer of the model does.
        scaling: Factor on rotated queries and keys.
        layout: Pairing of channels.
        rotates: Whether the layer rotates queries and keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    kind: str = ""
    width: int = 0
    inv_freq: Tensor | None = None
    scaling: float = 1.0
    layout: Layout = "half"
    rotates: bool = False


# Keywords of attention functions that a patched attention honours, or that change nothing.
_KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "attention_mask", "position_ids", "is_causal"}
_KNOWN |= {"deterministic"}


def read_facts(config: Any, attention: nn.Module, rotary: type[nn.Module] | None, layer: int) -> Facts:
    """Run the stock forward of a layer on the meta device, and return what it shows.

    Args:
        config: Config of the model.
        attention: Attention module of the layer, patched or not.
        rotary: Class of the model's rotary module, if it has one.
        layer: Index of the layer.

    Raises:
        ArchitectureError: A fact that a scheme needs does not show.
    """
    stock: type[nn.Module] = stock_class(type(attention))
    given: dict[str, Any] = {"attention_mask": None}
    kind = ""
    if rotary is not None:
        kinds = _kinds(config, rotary)
        chosen = (
            next((found for found in kinds if found[0] == config.layer_types[layer]), None) if kinds[0][0] else None
        )
        kind, keywords, _ = chosen or kinds[0]
        with torch.device("cpu"):
            cos, sin = rotary(config)(torch.zeros(1), torch.ones(1, 1, dtype=torch.long), **keywords)
        given["position_embeddings"] = (torch.zeros(cos.shape, device="meta", requires_grad=True),) * 2
    wanted = {"layer_idx": layer, "is_causal": getattr(attention, "is_causal", True)}
    with torch.device("meta"):
        module: Any = stock(config, **{k: v for k, v in wanted.items() if k in inspect.signature(stock).parameters})
        hidden = torch.zeros(1, 1, config.hidden_size)
    module.requires_grad_(False).config = _Config(config)
    found: dict[str, Any] = {}

    def take(query: Tensor, key: Tensor, value: Tensor, mask: None, **keywords: Any) -> tuple[Tensor, None]:
        found.update(keywords, query=query, key=key)
        return query.transpose(1, 2), None

    with torch.enable_grad():
        module(hidden, **given, **{_THEN: take})
    if not found:
        _refuse(stock, "does not call the attention function of its config")
    query, key = found.pop("query"), found.pop("key")
    if set(found) - _KNOWN:
        _refuse(stock, f"passes {', '.join(sorted(set(found) - _KNOWN))} to its attention function")
    scale = query.shape[-1] ** -0.5 if found.get("scaling") is None else float(found["scaling"])
    facts = Facts(query.shape[1], key.shape[1], query.shape[-1], scale, kind)
    if rotary is None:
        return facts
    inv_freq, scaling = native_frequencies(config, rotary, kind)
    turn = getattr(inspect.getmodule(stock), "apply_rotary_pos_emb", None)
    if turn is None or turn.__name__ not in inspect.unwrap(stock.forward).__code__.co_names:
        _refuse(stock, "rotates by another function than apply_rotary_pos_emb")
    rotates = query.requires_grad
    return replace(
        facts,
        width=cos.shape[-1],
        inv_freq=inv_freq if rotates else torch.zeros_like(inv_freq),
        scaling=scaling if rotates else 1.0,
        layout=_layout(stock, functools.partial(turn, cos=cos, sin=sin), inv_freq, scaling, query.shape[-1]),
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
        f"Cannot patch {attention.__name__}: it {why}, which cannot be read as a family. Write an architecture of its own, "
        "see CONTRIBUTING.md."
    )


class Family(Architecture):
    """An architecture whose classes and facts are read from the modeling module of transformers."""

    body: ClassVar[type[PreTrainedModel]]
    layer: ClassVar[type[nn.Module]]

    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        body = next(module for module in model.modules() if isinstance(module, self.body))
        causal = bool(getattr(self.attentions(body)[0], "is_causal", True))
        return {"decoder" if causal else "encoder": body}

    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        return [module for module in body.modules() if isinstance(module, self.layer)]

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        return [
            next(module for module in layer.modules() if isinstance(module, self.attention))
            for layer in self.layers(body)
        ]

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        return {name: module for name, module in attention.named_children() if isinstance(module, nn.Linear)}

    def facts(self, body: nn.Module, layer: int) -> Facts:
        """Return what the stock code says about a layer of a body."""
        rotary: nn.Module | None = getattr(body, "rotary_emb", None)
        kind = None if rotary is None else type(rotary)
        return read_facts(cast(Any, body).config, self.attentions(body)[layer], kind, layer)

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
            causal="decoder" in self.stacks(body),
            inv_freq=facts.inv_freq,
            layout=facts.layout,
            max_positions=config.max_position_embeddings,
            rotary_scaling=facts.scaling,
            rotary_limit=frequency_limit(config, facts.kind) if facts.rotates else None,
            inv_freq_long=long_frequencies(config, facts.kind) if facts.rotates else None,
            # Gemma's embeddings multiply by a factor of their own.
            embedding_rms=None if rms is None else rms * float(getattr(embeddings, "scalar_embed_scale", 1.0)),
        )


class RotaryFamily(Family):
    """A family that rotates queries and keys."""

    native = "rotary encoding (RoPE)"
    native_fades = True


class TableFamily(TableArchitecture, Family):
    """A family that adds a learned table of positions to the embeddings of tokens."""

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        table = table_of(body)
        rows = weight_of(table)[first_row(table) :]
        return replace(super().geometry(body, layer), max_positions=rows.shape[0], native=NativeTable("learned", rows))


def add_family(name: str, namespace: dict[str, Any]) -> Family:
    """Register the models of one module of transformers, with every head.

    The models rotate queries and keys, or add a learned table of positions to the embeddings of tokens.

    Args:
        name: Name of the module, as in `transformers.models.<name>`.
        namespace: `globals()` of the caller, into which the patched classes go, where pickle and checkpoints find them.

    Raises:
        ArchitectureError: The module is not built like a family: it has no language model, no attention and layer
            classes whose outputs are recorded.
    """
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    models = [kind for kind in _classes(modeling) if issubclass(kind, PreTrainedModel)]
    models = [kind for kind in models if not kind.__name__.endswith("PreTrainedModel")]
    language = [kind for kind in models if kind.__name__.endswith(("ForCausalLM", "ForMaskedLM"))]
    if not language:
        raise ArchitectureError(f"Cannot add the family {name!r}: it has no class ...ForCausalLM or ...ForMaskedLM.")
    stock_config = cast(Any, language[0]).config_class
    models = [kind for kind in models if cast(Any, kind).config_class is stock_config]
    bodies = [kind for kind in models if kind.__name__.endswith("Model") and not issubclass(kind, GenerationMixin)]
    if len(bodies) != 1:
        raise ArchitectureError(
            f"Cannot add the family {name!r}: expected one class ...Model with the config {stock_config.__name__}, "
            f"found {len(bodies)}."
        )
    (body,) = bodies
    recorded: Any = body._can_record_outputs or {}
    if not {"attentions", "hidden_states"} <= set(recorded):
        raise ArchitectureError(f"Cannot add the family {name!r}: {body.__name__} does not record its attentions.")
    attention, layer = (_recorded(recorded[what]) for what in ("attentions", "hidden_states"))
    rotates = any(kind.__name__.endswith("RotaryEmbedding") for kind in _classes(modeling))
    lock: tuple[str, Any] = ("hidden_act", "requires hf_posenc")
    if rotates:
        lock = ("rope_parameters", {"rope_type": "hf_posenc", "rope_theta": 10000.0})

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
        posenc_lock=lock,
    )
    twins = {stock_config: config, attention: twin(attention, FamilyAttention), layer: twin(layer, FamilyLayer)}
    if not rotates:
        twins[nn.Embedding] = PosencPositionTable
    for kind in models:
        head = PosencGenerator if issubclass(kind, GenerationMixin) else PosencModel
        bases = (RotaryBody if rotates else TableBody, FamilyBody, PosencModel) if kind is body else (head,)
        twins[kind] = twin(kind, *bases, config_class=config)
    parts = {"name": name, "twins": twins, "attention": attention, "body": body, "layer": layer}
    base = RotaryFamily if rotates else TableFamily
    made: Family = type(f"{name.title().replace('_', '')}Family", (base,), parts)()
    register_architecture(made)
    return made


def _classes(modeling: ModuleType) -> list[type]:
    return [kind for kind in vars(modeling).values() if isinstance(kind, type) and kind.__module__ == modeling.__name__]


def _recorded(entry: Any) -> type[nn.Module]:
    found: Any = entry.target_class if isinstance(entry, OutputRecorder) else entry
    return cast(type[nn.Module], found)
