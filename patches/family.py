"""Architectures read from the code of transformers: models whose attention calls an attention function.

Such models differ in what comes before that function (norms of queries and keys, fused projections, partial rotation)
and in its keywords (window, softcap, sinks). So the stock forward does all of that here, too: a patched attention calls
it once, without rotation and cache, and with an attention function that runs the scheme. What a scheme
must know of a layer is read from the same forward, on the meta device.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.output_capturing import OutputRecorder

from hf_posenc.errors import ArchitectureError
from hf_posenc.operands import Geometry, NativeTable
from hf_posenc.patches.architecture import Architecture, embedding_rms, register_architecture, stated_length, weight_of
from hf_posenc.patches.checkpoint import PosencConfig
from hf_posenc.patches.context import Context
from hf_posenc.patches.models import PosencGenerator, PosencModel
from hf_posenc.patches.probe import (
    THEN,
    Facts,
    FamilyConfig,
    Then,
    blank_module,
    kinds,
    kinds_vary,
    masks_have_windows,
    read_facts,
    refuse,
    turned,
)
from hf_posenc.patches.rotary import later_frequencies, of_kind
from hf_posenc.patches.seams import LayerCall, PosencAttention, PosencBody, PosencLayer
from hf_posenc.patches.table import PosencPositionTable, TableBody, first_row, table_of

# Names that stock attentions give to the cache.
_CACHES = ("past_key_values", "layer_past")

# Fields of configs that name the activation.
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation", "activation_function")
# Ends of the names of heads, one of which tells the config of the family.
_HEADS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForImageClassification")


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
        return FamilyConfig(vars(self)["config"])

    @config.setter
    def config(self, config: Any) -> None:
        vars(self)["config"] = config

    def attend(self, context: Context, hidden: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        cache = None if self.posenc_cache is None else call.get(self.posenc_cache)
        rotation, rotate = context.native_rotation.get(self.posenc_kind, call.get("position_embeddings")), None
        if rotation is not None and self.posenc_rotates:
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
            **keywords: Any,
        ) -> tuple[Tensor, Tensor | None]:
            layer = LayerCall(
                context,
                hidden,
                mask,
                causal=self.is_causal,
                scale=scaling,
                dropout=dropout,
                need_weights=bool(call.get("output_attentions")),
                cache=cache,
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

    def by_stock_forward(self, hidden: Tensor, call: dict[str, Any], then: Then) -> tuple[Tensor, Tensor | None]:
        """Call the stock forward without rotation and cache, and with the next step after projection."""
        call = {**call, THEN: then}
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


class RotaryBody(PosencBody):
    """Mixin of patched bodies that rotate queries and keys."""

    def masks_of_packed(self, mask: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the masks for the layers. Layers that are not converted get the window in theirs."""
        config: Any = self.config
        window = getattr(config, "sliding_window", None)
        if window is None:
            return mask
        stock = next(each for each in self.modules() if isinstance(each, PosencAttention)).posenc_stock
        attentions = [each for each in self.modules() if isinstance(each, stock)]
        if all(isinstance(each, PosencAttention) for each in attentions) or not masks_have_windows(stock):
            return mask
        window = next(filter(None, (getattr(each, "sliding_window", None) for each in attentions)), window)
        slots = torch.arange(mask.shape[-1], device=mask.device)
        far = (slots[:, None] - slots).abs() >= window
        near = mask & ~far if mask.dtype == torch.bool else mask.masked_fill(far, torch.finfo(mask.dtype).min)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        masks = {kind: near if kind == "sliding_attention" else mask for kind in kinds}
        return masks if len(masks) > 1 else masks.popitem()[1]

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        native = self.strengths().native
        if native != 1:
            # Passed separately, since layers without a scheme need the rotation at full strength.
            assert context.positions is not None
            inputs, found = call.get("inputs_embeds"), {}
            if inputs is None:  # of these only device and dtype count, and some bodies take ids only
                inputs = self.get_input_embeddings().weight.new_empty(0, device=context.positions.device)
            for kind in kinds(self.config, type(self.rotary_emb)):
                cos, sin = self.rotary_emb(inputs, context.positions * native, **of_kind(kind))
                # Some types of rotation (YaRN) also make queries and keys longer.
                whole = getattr(self.rotary_emb, f"{kind}_attention_scaling" if kind else "attention_scaling")
                length = (1 + native * (whole - 1)) / whole
                found[kind] = (cos * length, sin * length)
            context = replace(context, native_rotation=found)
        return super().hand_down(call, context)


class Family(Architecture):
    """An architecture whose classes and facts are read from the modeling module of transformers."""

    body: ClassVar[type[PreTrainedModel]]
    layer: ClassVar[type[nn.Module]]
    # Mixins of attentions, and of bodies, which know the native encoding; twins of classes of others.
    attending: ClassVar[type[PosencAttention]] = FamilyAttention
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
        bodies = [module for module in model.modules() if isinstance(module, self.body)]
        for body in bodies:
            self.attentions(body)  # raises where a layer has none
        return {"decoder" if self._is_causal(body) else "encoder": body for body in bodies}

    def _is_causal(self, body: nn.Module) -> bool:
        # The first one alone: this is asked for each layer.
        attention: Any = next(module for module in body.modules() if isinstance(module, self.attention))
        if not hasattr(attention, "is_causal"):
            refuse(self.attention, "does not say whether it is causal")
        return bool(attention.is_causal)

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
            refuse(self.attention, f"is missing in some layers ({missing})")
        numbers = [number for module in found if (number := getattr(module, "layer_idx", None)) is not None]
        if len({*numbers}) < len(numbers):
            refuse(self.attention, f"has layers of the same number ({', '.join(map(str, numbers))})")
        return cast(list[nn.Module], found)

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        # The names are those of a new attention: this one may have been altered after loading.
        blank = blank_module(self.attention, vars(attention)["config"], getattr(attention, "layer_idx", None) or 0)
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
        limit, later = later_frequencies(config, facts.kind) if facts.rotates else (None, None)
        return replace(
            facts.geometry,
            layer=layer,
            causal=self._is_causal(body),
            max_positions=stated_length(config),
            rotary_limit=limit,
            inv_freq_long=later,
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
        if any(kinds_vary(kind) for kind in rotary):
            return super().lock(config, rotary)
        return "rope_parameters", {"rope_type": "hf_posenc", "rope_theta": 10000.0}

    def embedding_size(self, body: nn.Module) -> int:
        if "inputs_embeds" not in inspect.signature(self.body.forward).parameters:
            raise ArchitectureError(
                f"{self.body.__name__} takes no inputs_embeds, so no scheme can add positions to them. Choose a scheme "
                "that acts inside of attention."
            )
        return super().embedding_size(body)


class TableFamily(Family):
    """A family that adds a learned table of positions to the embeddings of tokens.

    It enters once, before the first layer: all layers have it, or none.
    """

    native = "learned table of positions"
    native_per_layer = False
    native_fades = True
    acting = TableBody
    shared = {nn.Embedding: PosencPositionTable}

    def native_parameters(self, body: nn.Module) -> Sequence[nn.Parameter]:
        return list(table_of(body).parameters())

    def first_position(self, model: Any) -> int:
        (body,) = self.stacks(model).values()
        return first_row(table_of(body))

    def embedding_size(self, body: nn.Module) -> int:
        embeddings = getattr(body, "embeddings", None)
        if embeddings is not None and any(isinstance(module, nn.Linear) for module in embeddings.modules()):
            raise ArchitectureError(
                f"{type(embeddings).__name__} projects the embeddings of tokens before positions are added, so no "
                "scheme can add others. Choose a scheme that acts inside of attention."
            )
        return table_of(body).embedding_dim

    def swapped(self, body: nn.Module) -> Sequence[nn.Module]:
        return [table_of(body)]

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
    modeling, models = classes_of(name)
    heads = [model for model in models if model.__name__.endswith(_HEADS)]
    if not heads:
        raise ArchitectureError(f"Cannot add the family {name!r}: it has no class ...{', ...'.join(_HEADS)}.")
    config = cast(Any, heads[0]).config_class
    models = [model for model in models if cast(Any, model).config_class is config]
    bodies = [model for model in models if model.__name__.endswith("Model") and not issubclass(model, GenerationMixin)]
    if len(bodies) != 1:
        raise ArchitectureError(
            f"Cannot add the family {name!r}: expected one class ...Model with the config {config.__name__}, "
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
    lock = kind.lock(config, rotary)
    return register_family(name, namespace, kind, models, lock, attention=attention, layer=layer, body=body)


def classes_of(name: str) -> tuple[ModuleType, list[type[PreTrainedModel]]]:
    """Return `transformers.models.<name>.modeling_<name>`, and its model classes but for their common base.

    Raises:
        ArchitectureError: transformers has no such module.
    """
    path = f"transformers.models.{name}.modeling_{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ArchitectureError(
            f"Cannot add the architecture {name!r}: there is no module {path}. Give the name of a folder in "
            "transformers/models."
        ) from error
    found = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, PreTrainedModel))
    own = (kind for kind in found if kind.__module__ == path)
    return module, [kind for kind in own if not kind.__name__.endswith("PreTrainedModel")]


def register_family(
    name: str,
    namespace: dict[str, Any],
    kind: type[Family],
    models: Sequence[type[PreTrainedModel]],
    lock: tuple[str, Any],
    **parts: Any,
) -> Family:
    """Make the patched twin of each class, put where pickle and checkpoints find it, and register the family.

    The parts are attributes of the family, its stock classes of attention, layer and body among them.
    """
    twins: dict[type, type] = {}

    def add(stock: type, *bases: type, **attributes: Any) -> type:
        attributes |= {"posenc_stock": stock, "__module__": namespace["__name__"]}
        twin = type(f"Posenc{stock.__name__}", (*bases, stock), attributes)
        namespace[twin.__name__] = twins[stock] = twin
        return twin

    config = add(
        parts["body"].config_class,
        PosencConfig,
        __annotations__={"posenc": dict[str, Any] | None},
        posenc=None,
        model_type=f"hf_posenc_{name}",
        posenc_lock=lock,
    )
    add(parts["attention"], kind.attending)
    add(parts["layer"], PosencLayer)
    add(parts["body"], kind.acting, PosencModel, config_class=config)
    for model in models:
        if model not in twins:
            head = PosencGenerator if issubclass(model, GenerationMixin) else PosencModel
            add(model, head, config_class=config)
    parts |= {"name": name, "twins": {**twins, **kind.shared}}
    made: Family = type(f"{name.title().replace('_', '')}Family", (kind,), parts)()
    register_architecture(made)
    return made


def _recorded(entry: Any) -> type[nn.Module] | None:
    found: Any = entry.target_class if isinstance(entry, OutputRecorder) else entry
    return found if isinstance(found, type) else None
