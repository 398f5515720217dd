"""Composites: models that are made of several, such as vision-language models, with converted parts inside.

The record of a part stands in its own config, inside of the config of the composite. The composite has a patched class,
too, which checks all of its parts when it is saved and loaded; it computes nothing of its own. Such classes are made
when they are needed, for whatever composite transformers has.

What this rests on in transformers:

| what is used | what for |
|---|---|
| `AutoConfig` asks the class of a `model_type` for the config (`from_dict`) | one type stands for all composites |
| configs around others take ready ones (`SubConfigSpec`) | the config of a part is unlocked before that of the whole |

`locks` lists how a stock composite, and its config, learn that they have a converted part.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posenc.errors import ArchitectureError, CheckpointError
from hf_posenc.patches import identity, locks, record, surgery
from hf_posenc.patches.architecture import Architecture, auto_classes, of_config, of_model
from hf_posenc.patches.locks import OwnConfig, PosencConfig, running
from hf_posenc.patches.models import PosencModel, attach_recorded
from hf_posenc.patches.surgery import is_patched, swap_class

# The type of all composites with a converted part, and the keys with their own; the type of a part inside of one.
COMPOSITE, OWN_TYPE = "hf_posenc_composite", "posenc_composite"
PART, PART_TYPE = "hf_posenc_part", "posenc_part"
# What stands between a model's name and the type of its config, where that is no config of the model's own code.
_OF = "__"


class PartConfig(PreTrainedConfig):
    """The config of a converted part, where the config around it does not know of it; it always raises."""

    model_type = PART

    def __post_init__(self, **kwargs: Any) -> None:
        raise CheckpointError(
            "Got the config of a model with a converted part for a stock class, which would not check it. Load it with "
            "an Auto class."
        )


class AnyComposite(PreTrainedConfig):
    """The config that `AutoConfig` finds for every composite with a converted part."""

    model_type = COMPOSITE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        name = config_dict.get(OWN_TYPE)
        if not isinstance(name, str) or name not in CONFIG_MAPPING or not CONFIG_MAPPING[name].sub_configs:
            raise CheckpointError(
                f"The entry {OWN_TYPE!r} of config.json is damaged: got {name!r:.60}, expected the type of a model "
                "that is made of several. Restore config.json from the original checkpoint."
            )
        return config_twin(CONFIG_MAPPING[name]).from_dict(config_dict, **kwargs)


AutoConfig.register(COMPOSITE, AnyComposite)
AutoConfig.register(PART, PartConfig)


class PosencComposite(PosencModel):
    """Mixin of models with converted parts."""

    posenc_encloses = True

    def attach_recorded(self) -> None:
        inside: list[str] = []
        for name, module in self.named_modules():  # type: ignore[attr-defined]
            if isinstance(module, PreTrainedModel) and record_of(module) and not name.startswith(tuple(inside)):
                inside.append(f"{name}.")
                attach_recorded(module, is_new=True)
        enclose(self)  # type: ignore[arg-type]

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        stock: Any = super(PosencModel, self)
        chosen: str = stock.get_correct_attn_implementation(requested_attention, is_init_check)
        return chosen


class PosencCompositeConfig(OwnConfig):
    """Mixin of the configs of models with converted parts."""

    posenc_stock: type

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        parts: list[Any] = []
        data = dict(unlocked(config_dict, parts))
        data.pop("auto_map", None)
        stock: Any = cls.posenc_stock
        if data.pop(OWN_TYPE, None) != stock.model_type:
            raise CheckpointError(
                f"config.json is not that of a {stock.model_type} with a converted part. Load it with an Auto class."
            )
        if not parts:
            raise CheckpointError(
                "config.json is that of a model with a converted part, and names none. Restore config.json from the "
                "original checkpoint, or convert the model again."
            )
        # Some configs decide by the types of their parts, of which they know the stock ones.
        kinds = [type(part) for part in parts]
        try:
            for part in parts:
                part.__class__ = type(part).posenc_stock
            return super().from_dict(data, **kwargs)  # type: ignore[misc]
        finally:
            for part, kind in zip(parts, kinds, strict=True):
                part.__class__ = kind

    def built(self, model: Any) -> None:
        if is_patched(model) or not record.converted(self):
            return
        name = ("transformers.modeling_utils", "from_pretrained")
        loaders = (frame for function, frame in running() if function == name)
        if (loader := next(loaders, None)) is not None:
            kind = loader.f_locals["cls"]
            if not issubclass(kind, PosencModel):
                raise CheckpointError(
                    f"Got the config of a model with a converted part for {kind.__name__}.from_pretrained, which "
                    f"would not check it. Use an Auto class or Posenc{kind.__name__}."
                )
        swap_class(model, model_twin(type(model), self.posenc_stock))

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return config.json with the locked configs of the parts, and with `auto_map`, which leads to this package."""
        stock: Any = super()
        data = locked(self, json.loads(stock.to_json_string(use_diff)))
        kind: Any = self.posenc_stock
        data |= {"auto_map": self.auto_map, OWN_TYPE: kind.model_type, "model_type": COMPOSITE}
        return json.dumps(data, indent=2, sort_keys=True) + "\n"


def record_of(model: Any) -> bool:
    return isinstance(model.config, PosencConfig) and bool(model.config.posenc)


def locked(config: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a config with those of converted parts locked, as they are in a file of their own."""
    for name, inner in vars(config).items():
        if isinstance(inner, PosencConfig) and inner.posenc:
            own = json.loads(inner.to_json_string())
            own.pop("auto_map", None)
            data[name] = {**own, "model_type": PART, PART_TYPE: own["model_type"]}
        elif isinstance(inner, PreTrainedConfig) and isinstance(data.get(name), dict):
            data[name] = locked(inner, data[name])
    return data


def unlocked(data: dict[str, Any], parts: list[Any]) -> Any:
    """Return the data of a config with those of converted parts replaced by their configs, which are listed, too."""
    found = {name: unlocked(value, parts) if isinstance(value, dict) else value for name, value in data.items()}
    if found.get("model_type") != PART:
        return found
    kind = found.pop(PART_TYPE, None)
    known = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    if known is None or not issubclass(known, PosencConfig):
        raise CheckpointError(
            f"The entry {PART_TYPE!r} of config.json is damaged or of a newer release: got {kind!r:.60}. Restore "
            "config.json from the original checkpoint, or upgrade: pip install -U hf-posenc."
        )
    parts.append(known(**found))
    return parts[-1]


# -- classes -----------------------------------------------------------------------------------------------------------


@functools.cache
def config_twin(stock: Any) -> Any:
    """Return the patched class of a composite's config, known to the `Auto` classes with that of each model."""
    attributes = {"posenc_stock": stock, "model_type": COMPOSITE, "__module__": __name__, "__annotations__": {}}
    twin = type(f"Posenc{_public(stock).__name__}", (PosencCompositeConfig, stock), attributes)
    for name, model in auto_classes(stock).items():
        getattr(modeling_auto, name).register(twin, _model_twin(model, twin), exist_ok=True)
    return twin


def model_twin(stock: Any, config: Any = None) -> Any:
    """Return the patched class of a composite, with a config of its own type, or of another: some types are no more."""
    return _model_twin(stock, config_twin(config or stock.config_class))


@functools.cache
def _model_twin(stock: Any, config: Any) -> Any:
    attributes = {"posenc_stock": stock, "config_class": config, "__module__": __name__}
    # What the stock class offers is offered: the parts refuse what they cannot do.
    names = ("_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    attributes |= {name: getattr(stock, name) for name in names}
    other = "" if config.posenc_stock is stock.config_class else f"{_OF}{config.posenc_stock.__name__}"
    twin = type(f"Posenc{_public(stock).__name__}{other}", (PosencComposite, stock), attributes)
    recorded: Any = getattr(twin, "_can_record_outputs", None)
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(twin), recorded)
    return twin


def _public(stock: Any) -> Any:
    """Return a class of transformers that checkpoints can name; raise for any other."""
    if getattr(transformers, stock.__name__, None) is not stock:
        raise ArchitectureError(
            f"Got a part of a {stock.__module__}.{stock.__name__}, which is no public class of transformers, so that a "
            "checkpoint could not name it. Convert and save the part alone."
        )
    return stock


def __getattr__(name: str) -> Any:
    # Pickle, the stub and `config.architectures` have these classes by name.
    head, _, other = name.removeprefix("Posenc").partition(_OF)
    stock: Any = getattr(transformers, head, None) if name.startswith("Posenc") else None
    is_config = isinstance(stock, type) and issubclass(stock, PreTrainedConfig)
    is_model = isinstance(stock, type) and issubclass(stock, PreTrainedModel)
    own: Any = stock if is_config else stock.config_class if is_model else None
    config: Any = getattr(transformers, other, None) if other else own
    if getattr(config, "sub_configs", None):
        return config_twin(stock) if is_config else model_twin(stock, config)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# -- models ------------------------------------------------------------------------------------------------------------


def known(model: object) -> Architecture | None:
    try:
        return of_model(model)
    except ArchitectureError:
        return None


def part_to_convert(model: nn.Module) -> Any:
    """Return the model that a patch changes: the model itself, or the language model of a composite."""
    if known(model) is not None or not isinstance(model, PreTrainedModel):
        return model
    config: Any = model.config
    texts = config.get_text_config(decoder=True)
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is texts]
    if texts is config or not inside:
        return model
    of_model(inside[0])
    return inside[0]


def config_to_convert(config: Any) -> Any:
    """Return the config of the model that a patch changes: that of the language model, if it is that of a composite."""
    try:
        of_config(config)
    except ArchitectureError:
        return config.get_text_config(decoder=True)
    return config


def enclose(outer: nn.Module) -> None:
    """Give the models that have a converted part their patched classes."""
    for module in outer.modules():
        if isinstance(module, PreTrainedModel) and not is_patched(module) and any(map(_is_converted, module.modules())):
            architecture = known(module)
            if architecture is not None:
                surgery.swap(architecture, module)
                continue
            swap_class(module, model_twin(type(module), surgery.stock_class(type(module.config))))
            _enclose_config(module.config)


def release(outers: Iterable[Any]) -> None:
    """Give models that have no converted part any more their stock classes."""
    for outer in outers:
        if is_patched(outer) and not any(_is_converted(module) for module in outer.modules() if module is not outer):
            surgery.restore(outer)
            if is_patched(outer.config):
                surgery.restore(outer.config)


def _is_converted(module: nn.Module) -> bool:
    return is_patched(module) and isinstance(module, PreTrainedModel) and not isinstance(module, PosencComposite)


def outers_of(part: nn.Module, model: nn.Module) -> list[Any]:
    """Return the models around a part of a model, innermost first."""
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not part]
    found = [outer for outer in inside if any(module is part for module in outer.modules())][::-1]
    return found or identity.around(part)


def _enclose_config(config: Any) -> None:
    kind: Any = type(config)
    if not is_patched(config):
        swap_class(config, config_twin(kind))


locks.ENCLOSE.append(_enclose_config)
