"""Bodies that add a table of positions by themselves: of decoders, of encoders, and of models that have both.

Such a table is a module with a forward of its own: some begin with rows that no position has, some count tokens, some
are waves in a buffer. What its forward makes of positions is read from it, with a table of the numbers of its rows.
"""

from __future__ import annotations

import copy
import dis
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import ArchitectureError, PositionError
from hf_posenc.operands import Geometry, NativeTable
from hf_posenc.patches.architecture import embedding_rms, of_model, refuse_changed, weight_of
from hf_posenc.patches.attention import CONTEXT, arguments_of
from hf_posenc.patches.body import COORDS, PosencBody
from hf_posenc.patches.context import RUNNING, Context, Inputs, Switch, refuse_samples
from hf_posenc.patches.family import Code, Family, PosencPositionTable, built_by, check_reach, names_of
from hf_posenc.patches.images import PosencHolder
from hf_posenc.patches.probe import refuse
from hf_posenc.patches.surgery import stock_class

# The name that bodies give to the table, and the argument of those that embed sound.
TABLE = "embed_positions"
_SOUND = "input_features"
# The key of a config with the positions of sound that a body reads.
_LENGTH = "max_source_positions"
# The arguments of a forward, or of that of the model around two bodies, with positions.
_POSITIONS = ("position_ids", "decoder_position_ids")


class PosencAdded(Switch):
    """Mixin of tables with a lookup of their own: at part of their strength, and a zero for all once removed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.posenc_removed and not self.is_disabled():
            rows: Tensor = self.weight if isinstance(self, nn.Embedding) else self.weights
            return rows.new_zeros(1, 1, rows.shape[1])
        added: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        native = self.posenc_strengths.native
        return added if native == 1 or self.is_disabled() else added * native


class PosencRead(PosencHolder):
    """Mixin of tables whose rows the body reads, and never looks up: schemes add to what it reads."""

    def posenc_table(self) -> Tensor:
        rows, embed = super().posenc_table(), RUNNING.embed
        return rows if embed is None else rows + embed(rows.new_zeros(1, 1, rows.shape[1]))[0]


class AddedBody(PosencBody):
    """Mixin of patched bodies. Schemes that act on embeddings add to what the table gives, before any norm."""

    posenc_hooks = True

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        if self.config.is_encoder_decoder:
            refuse_samples(call, "expected one sequence in each row, for two stacks.")
        if self.is_causal_stack() and self.config.is_encoder_decoder:
            call.pop(COORDS, None)  # those of the encoder's tokens
        if _SOUND not in self.posenc_arguments:
            return super().prepare(call)
        table, sound = table_of(self), call.get(_SOUND)
        if sound is None:
            return call  # The stock forward says what is wrong.
        if call.pop(COORDS, None) is not None:
            raise PositionError("Got position_coords; sound has one dimension. Leave them out.")
        positions = torch.arange(table.num_embeddings, device=sound.device)[None]
        return self.hand_down(call, self.context(call, Inputs(positions, table.num_embeddings - 1)))

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        both = self.config.is_encoder_decoder and self.is_causal_stack()
        name = _POSITIONS[1] if both and _POSITIONS[0] not in self.posenc_arguments else _POSITIONS[0]
        return call.get(name)

    def inputs_of(self, call: dict[str, Any], request: Any, coords: Tensor | None) -> Inputs:
        given, table = request.given, table_of(self)
        fixed = _POSITIONS[0] not in self.posenc_arguments and not getattr(table, "posenc_removed", False)
        if given is not None and fixed and not torch.compiler.is_compiling():
            counted = torch.arange(request.length, device=given.device) + request.past
            real = torch.ones_like(given, dtype=torch.bool) if request.real is None else request.real
            if bool(((given != counted) & real).any()):
                raise PositionError(
                    f"Got positions; {stock_class(type(self)).__name__} counts the rows of its own table by itself, "
                    "and it was kept. Leave them out, or remove it: patch with native='remove'."
                )
        return super().inputs_of(call, request, coords)

    def keep_apart(self, call: dict[str, Any], request: Any, inputs: Inputs) -> Inputs:
        inputs = super().keep_apart(call, request, inputs)
        if inputs.packed is not None and self.config.is_encoder_decoder:
            raise PositionError(
                "Got packed sequences, which would see each other's through cross-attention. Use a row for each."
            )
        return inputs

    def counted_positions(self, call: dict[str, Any], past: int | Tensor) -> Tensor | None:
        padding, ids = getattr(table_of(self), "padding_idx", None), call.get("input_ids")
        if padding is None or ids is None:
            return None
        return cast(Tensor, ((ids != padding).long().cumsum(-1) - 1).clamp_min(0) + past)

    def hook_embeddings(self, embed: Callable[[Tensor], Tensor]) -> Any:
        table = table_of(self)
        if isinstance(table, PosencRead):
            RUNNING.embed = embed
            return SimpleNamespace(remove=lambda: setattr(RUNNING, "embed", None))

        def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            found: Tensor = embed(output.new_zeros(1, 1, output.shape[-1]))
            return output + found

        return table.register_forward_hook(add)

    def embedded(self, inputs: Tensor, context: Context) -> Tensor:
        assert context.inputs is not None
        # One vector for all: the schemes add the same to any.
        places = context.inputs.positions
        inputs = inputs.expand(*places.shape, -1)
        if not torch.compiler.is_compiling() and "posenc_additive" not in vars(self):
            with torch.no_grad():
                one, other = (super(AddedBody, self).embedded(inputs.float() + x, context) for x in (0.0, 1.0))
            if not torch.allclose(other, one + 1, atol=1e-3):
                raise ArchitectureError(
                    f"Cannot run {stock_class(type(self)).__name__}: its scheme does not add to the embeddings of "
                    "tokens, and this model adds positions by itself. Choose a scheme that acts inside of attention."
                )
            self.posenc_additive = True
        return super().embedded(inputs, context)

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        assert context.inputs is not None
        table, inputs = table_of(self), context.inputs
        if isinstance(table, nn.Embedding):
            check_reach(table, inputs.reach, table.num_embeddings - first_row(table))
        call = {name: value for name, value in call.items() if name not in _POSITIONS} | {CONTEXT: context}
        return call | ({_POSITIONS[0]: inputs.positions} if _POSITIONS[0] in self.posenc_arguments else {})


def table_of(body: object) -> Any:
    table = getattr(body, TABLE, None)
    if not isinstance(table, nn.Embedding) and not isinstance(getattr(table, "weights", None), Tensor):
        refuse(type(body), f"has no table {TABLE}, or one without weights")
    return table


def first_row(table: nn.Module) -> int:
    """Return the row of the first position."""
    kind: Any = stock_class(type(table))
    if kind is nn.Embedding:
        return 0
    stated = {name: value for name, value in vars(table).items() if isinstance(value, int)}
    key = (kind, repr(sorted(stated.items())))
    if key not in _KNOWN:
        _KNOWN[key] = _looked_up(kind, stated)
    return _KNOWN[key]


_KNOWN: dict[tuple[type, str], int] = {}


@torch.inference_mode()
def _looked_up(kind: Any, stated: dict[str, int]) -> int:
    """Run the lookup of a table whose rows hold their numbers."""
    table, count = kind.__new__(kind), 3
    nn.Module.__init__(table)
    lookup = {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
    vars(table).update(lookup | stated)
    rows = torch.arange(32.0, device="cpu")[:, None]
    table._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
    table._buffers["weights"] = rows
    padding = table.padding_idx
    ids = torch.full((1, count), 1 if padding is None else padding + 1, device="cpu")
    names = list(inspect.signature(kind.forward).parameters)[1:]
    places = torch.arange(count, device="cpu")
    try:
        if names[0] == _POSITIONS[0]:
            found = table(places[None])
        else:
            found = table(ids, position_ids=places) if _POSITIONS[0] in names else table(ids)
    except Exception as error:  # of any kind: the code is not ours
        refuse(kind, f"looks up rows in an unknown way ({type(error).__name__}: {error})")
    numbers = found.flatten().tolist()
    if numbers != [numbers[0] + step for step in range(count)]:
        refuse(kind, f"gives the first positions the rows {numbers}")
    return int(numbers[0])


def rows_of(table: Any) -> Tensor:
    """Return the rows of positions, from the first."""
    weight = weight_of(table) if isinstance(table, nn.Embedding) else cast(Tensor, table.weights)
    return weight[first_row(table) :].detach()


def _reads_rows(body: type) -> bool:
    """Whether the forward of a body reads the weight of its table, and does not call the table."""
    steps = dis.get_instructions(inspect.unwrap(body.forward).__code__)  # type: ignore[attr-defined]
    names = [str(step.argval) for step in steps]
    return (TABLE, "weight") in pairwise(names)


class AddedFamily(Family):
    """Models whose bodies add such tables: all layers of a body have its table, or none."""

    native = "table of positions"
    native_per_layer = False
    native_fades = True
    acting = AddedBody
    shared = {nn.Embedding: PosencPositionTable}

    @classmethod
    def fits(cls, code: Code) -> bool:
        return code.rotary is None and TABLE in names_of(code.body)

    @classmethod
    def holders(cls, code: Code) -> Mapping[type, tuple[type, dict[str, Any]]]:
        if any(_reads_rows(body) for body, _ in code.stacks):
            return {nn.Embedding: (PosencRead, {})}
        parts = [part for body, _ in code.stacks for part in built_by(body)]
        tables = [part for part in dict.fromkeys(parts) if re.search("Position.*Embedding", part.__name__)]
        return {part: (PosencAdded, {}) for part in tables}

    @property
    def parts(self) -> tuple[type, ...]:
        return tuple(self.layered) if len(self.layered) > 1 else ()

    def native_parameters(self, body: nn.Module) -> Sequence[nn.Parameter]:
        return list(table_of(body).parameters())

    def embedding_size(self, body: nn.Module) -> int:
        return int(rows_of(table_of(body)).shape[1])

    def swapped(self, body: nn.Module) -> Sequence[nn.Module]:
        return [table_of(body)]

    def trained_length(self, config: Any) -> int:
        return len(self._stated_rows(list(self.layered)[-1], config))

    def _stated_rows(self, kind: Any, config: Any) -> Tensor:
        """Return the table of a body of one layer."""
        small = copy.deepcopy(config)
        for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"):
            if hasattr(small, name):
                setattr(small, name, 1)
        small.posenc = None  # The table of a converted model is that of the stock one.
        with torch.device("meta"):
            return rows_of(table_of(kind(small)))

    def _kind(self, body: nn.Module) -> Any:
        return next(kind for kind in self.layered if isinstance(body, kind))

    def check_native(self, body: nn.Module) -> None:
        table = table_of(body)
        rows, stated = len(rows_of(table)), len(self._stated_rows(self._kind(body), cast(Any, body).config))
        if isinstance(table, nn.Embedding) and rows != stated:
            refuse_changed(body, f"its table has {rows} rows, and its config states {stated} positions")

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        table = table_of(body)
        if _SOUND in arguments_of(self._kind(body)) and stock_class(type(table)) is not nn.Embedding:
            refuse(self._kind(body), "embeds sound of any length")
        rows = rows_of(table)
        if not isinstance(table, nn.Embedding):  # it may have grown
            rows = rows[: len(self._stated_rows(self._kind(body), cast(Any, body).config))]
        geometry = super().geometry(body, layer)
        native = NativeTable("learned", rows) if rows.shape[1] == geometry.hidden_size else None
        return replace(geometry, max_positions=len(rows), native=native)

    def embedding_rms(self, body: Any) -> float | None:
        if _SOUND in arguments_of(self._kind(body)):
            # The size of embedded sound depends on it, so the size of the table stands for it.
            return embedding_rms(rows_of(table_of(body)))
        embeddings, rms = body.get_input_embeddings(), super().embedding_rms(body)
        scale = getattr(embeddings, "embed_scale", getattr(body, "embed_scale", 1.0))
        return None if rms is None else rms * float(scale)

    def example(self, body: Any) -> dict[str, Tensor]:
        if _SOUND not in arguments_of(self._kind(body)):
            return super().example(body)
        first = [part for part in body.children() if isinstance(part, nn.Conv1d)]
        frames = table_of(body).num_embeddings * math.prod(part.stride[0] for part in first)
        shape = (1, first[0].in_channels, frames)
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu")
        return {_SOUND: drawn.to(first[0].weight)}


def sound_encoder(model: Any) -> Any:
    """Return the module of a model, patched or not, that takes `input_features` of one length and returns their states.

    Raises:
        ArchitectureError: The model reads no sound, or sound of any length.
    """
    family = of_model(model)
    if isinstance(family, AddedFamily):
        for body in family.stacks(model).values():
            is_heard, table = _SOUND in arguments_of(family._kind(body)), table_of(body)
            if is_heard and isinstance(table, nn.Embedding) and getattr(body.config, _LENGTH, 0) == len(table.weight):
                return body
    raise ArchitectureError(
        f"Models of type {model.config.model_type!r} do not read sound of one length, with a table of its positions; "
        "expected one that does."
    )


def shortened(model: PreTrainedModel, positions: int) -> PreTrainedModel:
    """Return a copy of a stock model that reads sound of fewer positions: its table is the first rows.

    Raises:
        ArchitectureError: The model does not read sound of one length.
    """
    rows = table_of(sound_encoder(model)).weight
    config = copy.deepcopy(model.config)
    setattr(config, _LENGTH, positions)
    with torch.random.fork_rng(devices=[]):
        made: PreTrainedModel = type(model)(config).to(model.device, model.dtype).eval()
    made.generation_config = copy.deepcopy(model.generation_config)
    cut = {name for name, weight in model.named_parameters() if weight is rows}
    weights = {name: weight[:positions] if name in cut else weight for name, weight in model.state_dict().items()}
    made.load_state_dict(weights)
    return made
