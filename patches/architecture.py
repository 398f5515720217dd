"""The description of an architecture, the table of known ones, and their registration with the `Auto` classes.

Most are read from the code of transformers when a model, a config or a checkpoint of theirs turns up, see `family`. So
nothing is imported before it is needed.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posenc import plugins
from hf_posenc.errors import ArchitectureError, OptionError
from hf_posenc.operands import Geometry

# Elements of an embedding table that are read at once.
_PIECE = 2**20


class Architecture(ABC):
    """Where the seams of a scheme sit in one family of models.

    A *stack* is a series of layers with one encoding (Llama and GPT-2 have one, T5 has two); its *body* is the module
    whose forward turns tokens into hidden states.

    Attributes:
        name: Short name; converted models get the model type `hf_posenc_<name>`.
        twins: Each stock class of the family and its patched subclass: configs, models with any head, bodies, layers,
            attentions and whatever else changes behaviour.
        attention: The stock class of the attention modules that can be patched.
        other_stacks: Names of stacks that some models of the family lack, and whose schemes their config names all the
            same.
        native: The family's own encoding, in words.
        native_per_layer: Whether that encoding can be removed from some layers only.
        native_fades: Whether it can be at part of its strength, see `set_strength`.
        native_shares: Whether a part of its rotary pairs can stay, see `share`.
        with_list: The model type that computes the same and has a list of the layers that rotate, if there is one.
    """

    name: ClassVar[str]
    twins: ClassVar[Mapping[type, type]]
    attention: ClassVar[type[nn.Module]]
    other_stacks: ClassVar[tuple[str, ...]] = ()
    native: ClassVar[str]
    native_per_layer: ClassVar[bool] = True
    native_fades: ClassVar[bool] = False
    native_shares: ClassVar[bool] = False
    with_list: ClassVar[str | None] = None

    @property
    def parts(self) -> tuple[type, ...]:
        """Stock model classes that occur inside of others only, with a config of their own."""
        return ()

    @abstractmethod
    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the bodies in a model, by the name of their stack, first things first."""

    @abstractmethod
    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        """Return the self-attention module of each layer of a body."""

    @abstractmethod
    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        """Return the layers of a body, each with its attention and its feed-forward."""

    @abstractmethod
    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        """Describe one layer of a body."""

    @abstractmethod
    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        """Return the submodules that the patched forward calls, by name; `None` marks a missing one."""

    def attributes(self, body: nn.Module, layer: int) -> Mapping[str, Any]:
        """Return what a patched attention needs to know besides its stock attributes; names begin with `posenc_`."""
        return {}

    def native_parameters(self, body: nn.Module) -> Sequence[nn.Parameter]:
        """Return the parameters of the family's own encoding, one for each layer or for all.

        They are unused, hence frozen, once no layer keeps it.
        """
        return ()

    def trained_length(self, config: Any) -> int | None:
        """Return the trained length in a config, in tokens; `None` if it states none."""
        return stated_length(config)

    def first_position(self, model: Any) -> int:
        """Return the number that the model gives to the first position in `position_ids`."""
        return 0

    def embedding_size(self, body: nn.Module) -> int:
        """Return the width of the embeddings that positions are added to."""
        return self.geometry(body, 0).hidden_size

    def check_native(self, body: nn.Module) -> None:  # noqa: B027 - there may be nothing to compare
        """Raise `ArchitectureError` if a body's own encoding is not what its config states, since schemes go by that.

        It was changed after loading, and a saved model would be loaded without the change.
        """

    def embedding_rms(self, body: nn.Module) -> float | None:
        """Return the root mean square of embedded inputs; `None` while the weights have no storage, or if unknown."""
        return None

    def swapped(self, body: nn.Module) -> Sequence[nn.Module]:
        """Return the modules, other than attentions, whose class changes while the body is patched."""
        return ()

    def example(self, body: nn.Module) -> dict[str, Tensor]:
        """Return the arguments of a short forward of a body."""
        assert isinstance(body, PreTrainedModel)
        weight: Any = body.get_input_embeddings().weight
        # The first ids are often padding and other special tokens.
        return {"input_ids": torch.arange(8, 16, device=weight.device)[None] % weight.shape[0]}


def stated_length(config: Any) -> int | None:
    names = ("max_position_embeddings", "n_positions")
    return next((int(length) for name in names if (length := getattr(config, name, None))), None)


def refuse_changed(body: object, what: str) -> NoReturn:
    """Raise `ArchitectureError` for an encoding that is not what the config states, which words say."""
    raise ArchitectureError(
        f"Cannot patch {type(body).__name__}: {what}, so the encoding or the config was changed after loading, and a "
        "saved model would lose that. Make the change in the config before the model is built or loaded."
    )


def outermost(module: nn.Module, kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Yield the modules of a kind in a module, itself included, each once, and none that is inside of another one."""
    seen: set[nn.Module | None] = {None}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        if isinstance(part, kind):
            yield part
        elif part is not None:
            waiting += reversed(part._modules.values())


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a parameter of a module, from where accelerate keeps it if it is offloaded."""
    weight: Any = module._parameters[name]  # what the module shows may be at part of its strength
    stored = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    if weight.is_meta and stored is not None:
        weight = stored[name]
    assert isinstance(weight, Tensor)
    return weight


def embedding_rms(weight: Tensor) -> float | None:
    """Return the root mean square of an embedding table, or `None` while it has no storage."""
    if weight.is_meta:
        return None
    # In pieces, since a whole table in float32 may be as large as the model.
    parts = torch.split(weight.detach(), max(1, _PIECE // max(1, weight[0].numel())))
    squares = torch.stack([part.float().square().sum() for part in parts])
    return math.sqrt(float(squares.sum()) / weight.numel())


class _Known(dict[str, Architecture]):
    """Architectures by their names; one that is asked for is read."""

    def __missing__(self, name: str) -> Architecture:
        try:
            importlib.import_module(f"{_PACKAGE}.{name}")
        except ModuleNotFoundError as error:
            raise KeyError(name) from error
        if name not in self:  # a module of ours that is no family
            raise KeyError(name)
        return self[name]


_PACKAGE = "hf_posenc.patches"
_ARCHITECTURES = _Known()


def register_architecture(architecture: Architecture) -> Architecture:
    """Make an architecture known to `patch`, and return it.

    Raises:
        OptionError: The argument is not an `Architecture`, or its name is taken.
    """
    if not isinstance(architecture, Architecture):
        raise OptionError(f"register_architecture: expected an instance of Architecture, got {architecture!r}.")
    if architecture.name in _ARCHITECTURES:
        raise OptionError(f"register_architecture: the name {architecture.name!r} is taken. Choose another name.")
    _ARCHITECTURES[architecture.name] = architecture
    for twin in architecture.twins.values():
        recorded: Any = getattr(twin, "_can_record_outputs", None)
        if issubclass(twin, PreTrainedModel):
            # transformers learns in a model's constructor which outputs it can record; a swapped class never runs one.
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(twin), recorded)
    stock, config = config_pair(architecture)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for name, model in auto_classes(stock).items():
        if model in architecture.twins:
            getattr(modeling_auto, name).register(config, architecture.twins[model], exist_ok=True)
    return architecture


def architectures() -> Mapping[str, Architecture]:
    """Return those that have a file, plugins register, or were read; any other is read when it is looked up."""
    # A file has the name of a family in transformers, and no other file here has.
    families = {family.name for family in pkgutil.iter_modules(transformers.models.__path__)}
    for module in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__):
        if module.name in families:
            importlib.import_module(f"{_PACKAGE}.{module.name}")
    plugins.load_installed()
    return MappingProxyType(_ARCHITECTURES)


# -- names -------------------------------------------------------------------------------------------------------------

_PREFIX = "hf_posenc_"


class _Types(dict[str, Any]):
    """The types in transformers' table of configs, and, when they are looked up, the types of converted models."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        is_ours = isinstance(name, str) and name.startswith(_PREFIX)
        return is_ours and config_named(str(name).removeprefix(_PREFIX)) is not None

    def __missing__(self, name: str) -> Any:
        return config_pair(_ARCHITECTURES[name.removeprefix(_PREFIX)])[1]


def own_type(model_type: str) -> str:
    """Return the type of the converted models of a type."""
    return _PREFIX + _name(model_type)


def _name(model_type: str) -> str:
    """Return the name of a family, which a module can have. The text part of a composite has the name of that."""
    name = re.sub(r"\W", "_", model_type)
    short = name.removesuffix("_text")
    return short if short in CONFIG_MAPPING._mapping else name


# Configs that no `Auto` class knows, by the name of their family, with the module of their models.
_STRANGERS: dict[str, tuple[type, str]] = {}


def config_named(name: str) -> tuple[type, str] | None:
    """Return the config class of the family of a name, and its modeling module; `None` if there is none."""
    types = {_name(kind): kind for kind in list(CONFIG_MAPPING) if not kind.startswith(_PREFIX)}
    types |= {_name(kind): kind for kind in types.values() if kind.endswith("_text")}
    if name not in types:
        return _STRANGERS.get(name)
    config: Any = CONFIG_MAPPING[types[name]]
    path = config.__module__.replace("configuration_", "modeling_")
    if not config.__module__.startswith("transformers."):
        path = next((kind.__module__ for kind in auto_classes(config).values()), path)
    return config, path


def register_all() -> None:
    """Make converted checkpoints known to the `Auto` classes, once these are there, see `hf_posenc._auto`."""
    table: Any = CONFIG_MAPPING
    if not isinstance(table._extra_content, _Types):
        table._extra_content = _Types(table._extra_content)
    importlib.import_module(f"{_PACKAGE}.composites")
    plugins.load_installed()


def config_pair(architecture: Architecture) -> tuple[Any, Any]:
    return next((stock, twin) for stock, twin in architecture.twins.items() if hasattr(stock, "model_type"))


def auto_classes(config_class: type) -> dict[str, type]:
    """Return the model class that each `Auto` class has for a config class, stock or patched."""
    found: dict[str, type] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and config_class in mapping:
            model = mapping[config_class]
            found[name] = model[0] if isinstance(model, tuple) else model
    return found


def auto_name(config_class: type, head: str) -> str | None:
    """Return the name of the `Auto` class that loads the patched model class of a name; `None` if none does."""
    names = [name for name, kind in auto_classes(config_class).items() if kind.__name__ == head]
    # The class for pretraining is a second name of a head that has a better known one.
    return min(names, key=lambda name: name == "AutoModelForPreTraining", default=None)


def of_model(model: object) -> Architecture:
    """Return the architecture of a model, patched or not."""
    kind = _unsharded(type(model)) if isinstance(model, PreTrainedModel) else None
    config = type(cast(Any, model).config) if kind else None
    return _of(kind, config, f"a {type(model).__module__}.{type(model).__qualname__}")


def of_config(config: object) -> Architecture:
    """Return the architecture that a config belongs to. The errors are those of `of_model`."""
    kind = type(config)
    return _of(kind, kind, f"models of type {getattr(config, 'model_type', kind.__name__)!r}")


def _unsharded(kind: type) -> type:
    """Return the class that a model had before FSDP2 put one of its own in front of it."""
    sharding = "torch.distributed.fsdp"
    return next(base for base in kind.__mro__ if not any(part.__module__.startswith(sharding) for part in base.__mro__))


def _of(kind: Any, config: Any, what: str) -> Architecture:
    plugins.load_installed()
    for architecture in _ARCHITECTURES.values():
        if kind in architecture.twins or kind in architecture.twins.values():
            return architecture
    if kind is None or config is None or not issubclass(config, PreTrainedConfig) or config is PreTrainedConfig:
        raise ArchitectureError(f"Cannot patch {what}: it is no model of transformers.")
    name = _name(config.model_type)
    if config_named(name) is None:
        _STRANGERS[name] = config, kind.__module__
    try:
        architecture = _ARCHITECTURES[name]
    except KeyError as error:
        raise ArchitectureError(
            f"Cannot patch {what}: its model_type {config.model_type!r} cannot be the name of a module. Give its "
            "config another."
        ) from error
    except ArchitectureError as error:
        raise ArchitectureError(f"Cannot patch {what}: {error}") from error
    if kind not in architecture.twins:
        raise ArchitectureError(
            f"Cannot patch {what}: it is no class of {architecture.attention.__module__}, as its model_type "
            f"{config.model_type!r} says. Use those classes, or give its config a type of its own."
        )
    return architecture
