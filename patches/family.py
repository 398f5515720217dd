"""Architectures read from the code of transformers, see `probe`: models that rotate, or have a table of positions.

`add_family` finds the classes of a family and chooses how its own encoding is handled; both need no file, see the
imports of `hf_posenc.patches`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_posenc.errors import ArchitectureError, PositionError
from hf_posenc.operands import Geometry, NativeTable
from hf_posenc.patches.architecture import (
    Architecture,
    config_named,
    embedding_rms,
    outermost,
    own_type,
    refuse_changed,
    register_architecture,
    stated_length,
    weight_of,
)
from hf_posenc.patches.attention import CONTEXT, PosencAttention
from hf_posenc.patches.body import PosencBody
from hf_posenc.patches.context import Context, Native, Switch
from hf_posenc.patches.layer import PosencLayer
from hf_posenc.patches.locks import PosencConfig
from hf_posenc.patches.models import PosencGenerator, PosencModel
from hf_posenc.patches.probe import (
    Facts,
    FamilyAttention,
    blank_module,
    calls_functions,
    hides_ahead,
    kinds_vary,
    masks_have_windows,
    read_facts,
    refuse,
    rotated,
    without_rotation,
)
from hf_posenc.patches.rotary import changed_at, later_frequencies, of_kind

# Fields of configs that name the activation.
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation", "activation_function", "dense_act_fn")


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
        body: Any = self.posenc_stock
        if len(masks) > 1 and "dict" not in inspect.unwrap(body.forward).__code__.co_names:
            raise PositionError(
                f"Got packed sequences, and {body.__name__} takes one mask for all layers: those not converted would "
                "lose their windows. Give each sequence a row of its own, or convert all layers."
            )
        return masks if len(masks) > 1 else masks.popitem()[1]

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        native = self.posenc_strengths.native
        if native != 1:
            # Passed separately, since layers without a scheme need the rotation at full strength.
            assert context.inputs is not None
            positions, inputs, found = context.inputs.positions, call.get("inputs_embeds"), {}
            kinds = dict.fromkeys(self.config.layer_types if kinds_vary(type(self.rotary_emb)) else [""])
            if inputs is None:  # of these only device and dtype count, and some bodies take ids only
                inputs = self.get_input_embeddings().weight.new_empty(0, device=positions.device)
            for kind in kinds:
                cos, sin = self.rotary_emb(inputs, positions * native, **of_kind(kind))
                # Some types of rotation (YaRN) also make queries and keys longer.
                whole = getattr(self.rotary_emb, f"{kind}_attention_scaling" if kind else "attention_scaling")
                length = (1 + native * (whole - 1)) / whole
                found[kind] = (cos * length, sin * length)
            context = replace(context, native=Native(rotation=found, strength=native))
        return super().hand_down(call, context)


class PosencPositionTable(Switch, nn.Embedding):
    """A position table at part of its strength; once a patch has removed it, it adds nothing, at any position."""

    posenc_stock = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        if self.is_disabled():
            return super().forward(input)
        if not self.posenc_removed:
            added, native = super().forward(input), self.posenc_strengths.native
            return added if native == 1 else added * native
        return torch.zeros(*input.shape, self.embedding_dim, dtype=self.weight.dtype, device=input.device)


class TableBody(PosencBody):
    """Mixin of patched bodies whose embeddings have a table of positions.

    Some tables begin with rows for padding: the first position is then at row `first_row`, and the positions that
    callers pass are rows, as in transformers.
    """

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        table = table_of(self)
        ids: Any = call.get("input_ids")
        inputs = call.get("inputs_embeds") if ids is None else ids
        buffered = hasattr(getattr(self, "embeddings", None), "token_type_ids")
        if inputs is not None and buffered and call.get("token_type_ids") is None:
            # The stock model looks them up by position, in a buffer as long as the table.
            call["token_type_ids"] = torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        counts = call.get("position_ids") is None and ids is not None and table.padding_idx is not None
        traced = torch.compiler.is_compiling()
        unmasked = counts and not traced and call.get("attention_mask") is None and self.embedders()
        if unmasked and bool((ids == table.padding_idx).any()):
            raise PositionError(
                f"Got input_ids with padding ({table.padding_idx}) and no attention_mask; expected one: padding has no "
                "position in the stock model, and would get one here. Pass the attention_mask of the tokenizer."
            )
        call = super().prepare(call)
        if counts and CONTEXT in call:
            assert ids is not None
            call["position_ids"] = (
                call["position_ids"].expand(ids.shape).masked_fill(ids == table.padding_idx, table.padding_idx)
            )
        return call

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        rows, table = super().given_positions(call), table_of(self)
        if rows is None or not first_row(table):
            return rows
        first, padding = first_row(table), table.padding_idx
        below = (rows < first) & (rows != padding)
        if not torch.compiler.is_compiling() and bool(below.any()):
            raise PositionError(
                f"Got position_ids with {int(rows[below][0])} among them; this model counts from {first}, and "
                f"{padding} is padding. Leave position_ids out, or add {first}."
            )
        return (rows - first).clamp_min(0)

    def counted_positions(self, call: dict[str, Any], past: int | Tensor) -> Tensor | None:
        padding, ids = table_of(self).padding_idx, cast(Tensor | None, call.get("input_ids"))
        if padding is None:
            return None
        if ids is None:
            # Embeddings do not tell what is padding, so the stock model counts all.
            inputs: Tensor = call["inputs_embeds"]
            return torch.arange(inputs.shape[1], device=inputs.device)[None] + past
        # Positions count the tokens that are not padding, whatever the mask says.
        return ((ids != padding).long().cumsum(-1) - 1).clamp_min(0) + past

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        assert context.inputs is not None
        table = table_of(self)
        check_reach(table, context.inputs.reach, table.num_embeddings - first_row(table))
        call = super().hand_down(call, context)
        return call | {"position_ids": call["position_ids"] + first_row(table)}


def check_reach(table: nn.Module, reach: int, rows: int) -> None:
    """Raise if a table was kept and has no row for a position."""
    # A traced graph has no numbers.
    if reach >= rows and not torch.compiler.is_compiling() and not getattr(table, "posenc_removed", False):
        raise PositionError(
            f"Position {reach} is beyond the model's own table of {rows} positions, which was kept. Give shorter "
            "inputs, or remove it: patch with native='remove', or hf_posenc.drop_native(model)."
        )


# Names that stock embeddings, and bodies, give to the table.
TABLES = ("position_embeddings", "position_embedding")


def table_of(body: object) -> nn.Embedding:
    inside = [getattr(getattr(body, "embeddings", None), name, None) for name in TABLES]
    table = next((each for each in (getattr(body, "wpe", None), *inside) if isinstance(each, nn.Embedding)), None)
    if table is None:
        raise ArchitectureError(
            f"Cannot patch {type(body).__name__}: found neither a rotary embedding nor a table "
            f"embeddings.{' or '.join(TABLES)} or wpe. Write an architecture of its own, see CONTRIBUTING.md."
        )
    return table


def first_row(table: nn.Embedding) -> int:
    """Return the row of the first position: behind the row of padding, if there is one."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


class Family(Architecture):
    """An architecture whose classes and facts are read from the modeling module of transformers."""

    body: ClassVar[type[PreTrainedModel]]
    # The class of the layers of each body: an encoder and a decoder may differ.
    layered: ClassVar[Mapping[type[PreTrainedModel], type[nn.Module]]]
    rotary: ClassVar[type[nn.Module] | None] = None
    # Whether the body says so to the attention function; else the attention modules do.
    causal: ClassVar[bool]
    # Mixins of attentions, and of bodies, which know the native encoding; twins of classes of others.
    attending: ClassVar[type[PosencAttention]] = FamilyAttention
    acting: ClassVar[type[PosencBody]]
    shared: ClassVar[Mapping[type, type]] = {}

    @classmethod
    def fits(cls, code: Code) -> bool:
        """Whether this kind handles the encoding of a family."""
        return False

    @classmethod
    def read(cls, code: Code) -> Code:
        """Return the classes of a family, as this kind needs them."""
        return code

    @classmethod
    def holders(cls, code: Code) -> Mapping[type, tuple[type, dict[str, Any]]]:
        """Return the stock classes of modules that hold the native encoding, with mixins and attributes of twins."""
        return {}

    @classmethod
    def lock(cls, config: type, rotary: type | None) -> tuple[str, Any]:
        """Return a field of the config, and a value that stock classes refuse."""
        field = next((name for name in _ACTIVATIONS if hasattr(config, name)), None)
        if field is None:
            raise ArchitectureError(
                f"Cannot add the family of {config.__name__}: it has none of the fields {', '.join(_ACTIVATIONS)}, by "
                "which stock classes refuse converted checkpoints."
            )
        return field, "requires hf_posenc"

    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        bodies = list(outermost(model, tuple(self.layered)))
        found = {"decoder" if self._is_causal(body) else "encoder": body for body in bodies}
        if len(found) < len(bodies) and getattr(model.config, "is_encoder_decoder", False):
            # As in transformers 5.16, where the decoder of one model sees later tokens.
            refuse(self.attention, "is causal in all of its stacks or in none")
        return found

    def _is_causal(self, body: nn.Module) -> bool:
        # The first one alone: this is asked for each layer.
        attention: Any = next(outermost(body, self.attention), None)
        if attention is None:
            self.attentions(body)  # which says where it is missing
            refuse(self.attention, "is missing")
        if not self.causal and not hasattr(attention, "is_causal"):
            if not calls_functions(self.attention):
                refuse(self.attention, "computes attention by itself, not by the attention functions of transformers")
            kind, layer = next(each for each in self.layered.items() if isinstance(body, each[0]))
            return hides_ahead(kind, layer, body.config)
        return self.causal or bool(attention.is_causal)

    def layer_of(self, body: nn.Module) -> type[nn.Module]:
        """Return the stock class of the layers of a body."""
        return next(layer for kind, layer in self.layered.items() if isinstance(body, kind))

    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        found, config = list(outermost(body, self.layer_of(body))), cast(Any, body).config
        if not found:
            raise ArchitectureError(f"Cannot patch {type(body).__name__}: it has no layers.")
        # Configs of encoders with decoders state the layers of either.
        stated = config.decoder_layers if len(self.layered) > 1 and self._is_causal(body) else config.num_hidden_layers
        if len(found) == 1 < stated:
            raise ArchitectureError(
                f"Cannot patch {type(body).__name__}: it uses one layer several times, which schemes cannot tell apart."
            )
        return found

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        found = [next(outermost(layer, self.attention), None) for layer in self.layers(body)]
        if None in found:
            missing = ", ".join(str(number) for number, module in enumerate(found) if module is None)
            refuse(self.attention, f"is missing in some layers ({missing})")
        numbers = [number for module in found if (number := getattr(module, "layer_idx", None)) is not None]
        if len({*numbers}) < len(numbers):
            refuse(self.attention, f"has layers of the same number ({', '.join(map(str, numbers))})")
        return cast(list[nn.Module], found)

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        # The names are those of a new attention: this one may have been altered after loading.
        config, number = vars(attention)["config"], getattr(attention, "layer_idx", None) or 0
        if next(iter(inspect.signature(self.attention).parameters)) == "config":
            blank = blank_module(self.attention, config, number)
        else:  # one that is told its sizes
            blank = next(outermost(blank_module(next(iter(self.layered.values())), config, number), self.attention))
        names = [name for name, module in blank.named_children() if isinstance(module, nn.Linear | Conv1D)]
        return {name: getattr(attention, name, None) for name in names}

    def facts(self, body: nn.Module, layer: int) -> Facts:
        rotary: nn.Module | None = getattr(body, "rotary_emb", None)
        kind = None if rotary is None else type(rotary)
        config: Any = cast(Any, body).config
        facts = read_facts(config, self.layer_of(body), self.attention, kind, layer)
        if not facts.may_not_rotate:
            return facts
        stock = copy.copy(config)
        stock.__class__ = getattr(type(config), "posenc_stock", type(config))
        return facts if rotated(self.body, self.layer_of(body), stock)[layer] else without_rotation(facts)

    def attributes(self, body: nn.Module, layer: int) -> Mapping[str, Any]:
        facts = self.facts(body, layer)
        found = {"kind": facts.kind, "rotates": facts.rotates, "step": facts.step, "window": facts.window}
        found |= {"carries": facts.carries, "causal": self._is_causal(body)}  # of some, their masks alone say it
        return {f"posenc_{name}": value for name, value in found.items()}

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        facts, config = self.facts(body, layer), cast(Any, body).config
        limit, later = later_frequencies(config, facts.kind) if facts.rotates else (None, None)
        own = facts.geometry.inv_freq
        return replace(
            facts.geometry,
            inv_freq=None if own is None else own.clone(),  # a scheme may write into what it gets
            layer=layer,
            causal=self._is_causal(body),
            max_positions=stated_length(config),
            rotary_limit=limit,
            inv_freq_long=later,
        )

    def embedding_rms(self, body: nn.Module) -> float | None:
        try:
            embeddings = cast(PreTrainedModel, body).get_input_embeddings()
        except NotImplementedError:
            refuse(self.body, "does not say where its embeddings are")
        rms = embedding_rms(weight_of(embeddings))
        # Gemma's embeddings multiply by a factor of their own.
        return None if rms is None else rms * float(getattr(embeddings, "scalar_embed_scale", 1.0))


class RotaryFamily(Family):
    """A family that rotates queries and keys."""

    native = "rotary encoding (RoPE)"
    native_fades = True
    native_shares = True
    acting = RotaryBody

    def check_native(self, body: Any) -> None:
        config, live = body.config, getattr(body, "rotary_emb", None)
        if live is None:
            return
        stock: Any = self.rotary
        for kind in dict.fromkeys(config.layer_types if kinds_vary(stock) else [""]):
            try:
                place = changed_at(live, stock, config, kind, stated_length(config) or 2048)
            except Exception as error:  # of any kind: the code may be the user's
                for layer in range(len(self.attentions(body))):
                    self.geometry(body, layer)  # A family that cannot be read says so itself.
                refuse_changed(body, f"its rotation does not run like that of its config ({error})")
            if place is not None:
                refuse_changed(body, f"at position {place} it rotates otherwise than its config states")

    @classmethod
    def fits(cls, code: Code) -> bool:
        return code.rotary is not None

    @classmethod
    def lock(cls, config: type, rotary: type | None) -> tuple[str, Any]:
        # Configs with a rotation for each type of layer take any other for that of all types.
        if rotary is None or kinds_vary(rotary):
            return super().lock(config, rotary)
        return "rope_parameters", {"rope_type": "hf_posenc", "rope_theta": 10000.0}


class TableFamily(Family):
    """A family that adds a learned table of positions to the embeddings of tokens.

    It enters once, before the first layer: all layers have it, or none.
    """

    native = "learned table of positions"
    native_per_layer = False
    native_fades = True
    acting = TableBody
    shared = {nn.Embedding: PosencPositionTable}

    @classmethod
    def fits(cls, code: Code) -> bool:
        return code.rotary is None

    def native_parameters(self, body: nn.Module) -> Sequence[nn.Parameter]:
        return list(table_of(body).parameters())

    def first_position(self, model: Any) -> int:
        (body,) = self.stacks(model).values()
        return first_row(table_of(body))

    def embedding_size(self, body: nn.Module) -> int:
        embeddings = getattr(body, "embeddings", None)
        if embeddings is not None and any(isinstance(module, nn.Linear) for module in embeddings.children()):
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

    def check_native(self, body: nn.Module) -> None:
        table, stated = table_of(body), self.trained_length(cast(Any, body).config)
        if table.num_embeddings - first_row(table) != stated:
            refuse_changed(body, f"its table has {table.num_embeddings} rows, and its config states {stated} positions")

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        table = table_of(body)
        # Detached, since a slice with a gradient cannot be copied, and teachers are copies.
        rows = weight_of(table)[first_row(table) :].detach()
        geometry = super().geometry(body, layer)
        # Some embeddings are narrower than the layers.
        native = NativeTable("learned", rows) if rows.shape[1] == geometry.hidden_size else None
        return replace(geometry, max_positions=rows.shape[0], native=native)


def add_family(name: str, namespace: dict[str, Any], kind: type[Family] | None = None) -> Family:
    """Register the models of one type, with every head.

    Args:
        name: The type of the models, as in `config.model_type`.
        namespace: `globals()` of the caller, into which the patched classes go, where pickle and checkpoints find them.
        kind: Handles the native encoding; by default what fits the code.

    Raises:
        ArchitectureError: There is no such type, or its code does not tell which classes have the layers.
    """
    found = config_named(name)
    if found is None:
        raise ArchitectureError(
            f"There is no model type {name!r}. Give a type of transformers: the model_type of its config."
        )
    code = Code.of(*found)
    kind = kind or kind_of(code)
    code = kind.read(code)
    twins: dict[type, type] = {}

    def add(stock: type, *bases: type, **attributes: Any) -> type:
        attributes |= {"posenc_stock": stock, "__module__": namespace["__name__"]}
        twin = type(f"Posenc{stock.__name__}", (*bases, stock), attributes)
        namespace[twin.__name__] = twins[stock] = twin
        return twin

    config = add(
        code.config,
        PosencConfig,
        __annotations__={"posenc": dict[str, Any] | None},
        posenc=None,
        model_type=own_type(name),
        posenc_lock=kind.lock(code.config, code.rotary),
    )
    causal = len(code.stacks) == 1 and _says_causal(code.body)
    add(code.attention, kind.attending, posenc_causal=causal)
    for body, layer in code.stacks:
        add(layer, PosencLayer)
        add(body, kind.acting, PosencModel, config_class=config, posenc_causal=causal)
    for model in code.models:
        if model not in twins:
            head = PosencGenerator if issubclass(model, GenerationMixin) else PosencModel
            add(model, head, config_class=config)
    for stock, (mixin, attributes) in kind.holders(code).items():
        add(stock, mixin, **attributes)
    parts: dict[str, Any] = {
        "attention": code.attention,
        "layered": dict(code.stacks),
        "body": code.body,
        "rotary": code.rotary,
    }
    parts |= {"name": name, "causal": causal, "twins": {**kind.shared, **twins}}
    made: Family = type(f"{name.title().replace('_', '')}Family", (kind,), parts)()
    register_architecture(made)
    return made


@dataclass(frozen=True)
class Code:
    """The classes of a family, as its modeling module has them.

    Attributes:
        models: All model classes with the config, the body among them.
        stacks: The bodies, each with the class of its layers; most families have one.
        rotary: The class of its rotary module, if there is one.
    """

    config: Any
    models: list[type[PreTrainedModel]]
    stacks: tuple[tuple[type[PreTrainedModel], type[nn.Module]], ...]
    attention: type[nn.Module]
    rotary: type[nn.Module] | None

    @property
    def body(self) -> type[PreTrainedModel]:
        return self.stacks[0][0]

    @classmethod
    def of(cls, config: Any, path: str) -> Code:
        def lacks(what: str) -> NoReturn:
            raise ArchitectureError(
                f"the code of {config.model_type!r} {what}, so it is no family that can be read from it. Write an "
                "architecture by hand, see docs/own_architecture.md."
            )

        if config.sub_configs:
            lacks(f"is made of several ({', '.join(config.sub_configs)})")
        try:
            known = vars(importlib.import_module(path)).values()
        except ImportError as error:
            lacks(f"cannot be imported ({error})")
        kinds: Any = (kind for kind in known if isinstance(kind, type) and issubclass(kind, PreTrainedModel))
        models: list[Any] = [
            kind
            for kind in dict.fromkeys(kinds)
            if kind.__module__ == path and kind.config_class is config and "pretrained" not in kind.__name__.lower()
        ]
        # Some models have one or two bodies inside that add a table of positions by themselves.
        bodies = [kind for kind in models if "embed_positions" in names_of(kind)]
        several = len(bodies) == 2
        for ends in () if bodies else _BODIES:
            bodies = [kind for kind in models if kind.__name__.endswith(ends) and not issubclass(kind, GenerationMixin)]
            bodies = [kind for kind in bodies if not any(other in kind.__mro__[1:] for other in bodies)]
            if bodies:
                break
        if len(bodies) != 1 and not several:
            found = ", ".join(kind.__name__ for kind in bodies) or "none"
            lacks(f"has no one class with the embeddings and all layers (found: {found})")
        kinds, stacks = {}, {}
        for body in bodies:
            recorded = body._can_record_outputs or {}
            layer, attention = (_recorded(recorded.get(what), body) for what in ("hidden_states", "attentions"))
            if (attention is None or layer is None) and not calls_functions(body):
                lacks("computes attention by itself, not by the attention functions of transformers")
            if attention is None or layer is None:
                lacks(f"has no one class of {'layers' if layer is None else 'attention'} that {body.__name__} records")
            stacks[body], kinds[attention] = layer, None
        if len(kinds) > 1:
            lacks(f"has other attentions in its encoder than in its decoder ({', '.join(x.__name__ for x in kinds)})")
        rotary = next((kind for kind in built_by(bodies[0]) if kind.__name__.endswith("RotaryEmbedding")), None)
        return cls(config, models, tuple(stacks.items()), next(iter(kinds)), rotary)


# Ends of the names of bodies, the likeliest first.
_BODIES = ("Stack",), ("Model",), ("Encoder", "Decoder", "Transformer")


def built_by(kind: type) -> list[type[nn.Module]]:
    """Return the classes of modules that the constructor of a class names, and those that their constructors name."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [kind]
    while waiting:
        for base in waiting.pop().__mro__:
            make: Any = inspect.unwrap(vars(base).get("__init__", object))
            if isinstance(make, FunctionType) and base not in (nn.Module, PreTrainedModel):
                named = (make.__globals__.get(name) for name in _names(make.__code__))
                new = [each for each in named if isinstance(each, type) and issubclass(each, nn.Module)]
                waiting += [each for each in new if each not in found]
                found |= dict.fromkeys(new)
    return list(found)


def names_of(kind: Any) -> set[str]:
    """Return the names in the constructor of a class, attributes among them."""
    make = inspect.unwrap(kind.__init__)
    return {*_names(make.__code__)} if isinstance(make, FunctionType) else set()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def kind_of(code: Code) -> type[Family]:
    """Return how the native encoding of a family is handled."""
    for name in ("buckets", "images", "added"):  # they derive from this module, and what they handle is more special
        importlib.import_module(f"hf_posenc.patches.{name}")
    kinds = [kind for general in Family.__subclasses__() for kind in (general, *general.__subclasses__())]
    return next(kind for kind in reversed(kinds) if "fits" in vars(kind) and kind.fits(code))


def _says_causal(body: Any) -> bool:
    """Whether the forward of a body makes causal masks, and tells the attention function."""
    code = inspect.unwrap(body.forward).__code__
    keywords = {word for constant in code.co_consts if isinstance(constant, tuple) for word in constant}
    return "is_causal" in keywords and any(name.endswith("causal_mask") for name in code.co_names)


def _recorded(entry: Any, body: type) -> type[nn.Module] | None:
    """Return the class that a body records; of several, the one that it builds itself."""
    found = [getattr(each, "target_class", each) for each in (entry if isinstance(entry, list) else [entry])]
    found = [kind for kind in found if isinstance(kind, type) and (len(found) == 1 or kind in built_by(body))]
    return found[0] if len(found) == 1 else None
