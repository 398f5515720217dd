"""Locks: what makes each wrong use of a converted model raise, where the stock model would compute something else.

Each stands on something of transformers (or torch, or PEFT) that is no promise. Where upstream offers a hook, such as
metadata in `save_pretrained` or a check of a config against a class, the trap can go.

| wrong use | trap | stands on |
|---|---|---|
| loading without this package | a `model_type` of its own | `Auto` classes go by it |
| loading with a stock class, by its name | a value that it refuses (`posenc_lock`) | its checks of fields |
| a converted config for a stock class | `OwnConfig.name_or_path` | `PreTrainedModel.__init__` reads it |
| a converted part in a stock config | `_tell_config_around` | parts are made in `__post_init__` |
| a stock loader for a composite | `PosencCompositeConfig.built` (composites) | its running `from_pretrained` |
| weights with another record's config | a digest in headers (`StampedWeights`) | quantizers give metadata |
| an edited config.json, or tensors of other types | a digest of both there (`FILES`) | the same |
| loading by its name after a patch | `UNSAVED`, a folder whose name says what to do | libraries read `name_or_path` |
| other weights into a patched model | `check_metadata`, `check_folder` | variables of `READERS` |
| a converted part saved by a stock model | `PosencModel.state_dict` (models) | its running `save_pretrained` |
| weights that do not fit | `check_stored` (checkpoint) | `_load_pretrained_model` |
| a converted type of any family | `_Types`, looked up on demand (architecture) | `CONFIG_MAPPING._extra_content` |
| LoRA without its scheme | a type that PEFT does not know (adapters) | PEFT's tables of types |
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils import CONFIG_NAME

from hf_posenc.errors import CheckpointError
from hf_posenc.patches import model_card, record
from hf_posenc.patches.architecture import of_config
from hf_posenc.patches.atomic_files import reading
from hf_posenc.patches.checkpoint import DAMAGED, DIGEST, FILES, SAVE, UNSEALED, digests

# Whether a converted model is being built, whose inside begins as stock classes.
BUILDING: ContextVar[bool] = ContextVar("building", default=False)
# What makes the config around that of a converted part one of ours, see `composites`.
ENCLOSE: list[Callable[[Any], None]] = []
# The functions of libraries that read weights from a folder, or a file in it, and the variable that names it.
READERS = {
    ("transformers.trainer", "_load_from_checkpoint"): "resume_from_checkpoint",
    ("transformers.trainer", "_load_best_model"): "best_model_path",
    ("transformers.trainer_utils", "load_sharded_checkpoint"): "folder",
    ("accelerate.checkpointing", "load_accelerator_state"): "input_dir",
    ("accelerate.utils.fsdp_utils", "load_fsdp_model"): "input_dir",
    ("accelerate.utils.modeling", "load_checkpoint_in_model"): "checkpoint",
    ("safetensors.torch", "load_model"): "filename",
    ("peft.peft_model", "load_adapter"): "model_id",
}


def running() -> Iterator[tuple[tuple[str, str], FrameType]]:
    """Yield each function that runs, by the names of its module and its own, with its frame; the caller first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield (frame.f_globals.get("__name__", ""), frame.f_code.co_name), frame
        frame = frame.f_back


# -- configs -----------------------------------------------------------------------------------------------------------


class OwnConfig:
    """Mixin of configs that this package writes."""

    _name_or_path: Any

    @property
    def name_or_path(self) -> Any:
        """The name of the model. All models read it when they are built: a stock one is told, see `built`."""
        for function, frame in running():
            if function == ("transformers.modeling_utils", "__init__"):
                self.built(frame.f_locals["self"])
            if function[1] not in ("name_or_path", "__getattribute__"):
                break  # only the reader itself counts
        return self._name_or_path

    @name_or_path.setter
    def name_or_path(self, name: Any) -> None:
        self._name_or_path = str(name)

    def built(self, model: Any) -> None:
        """Act on a model, stock or converted, that is about to be built from this config."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the data of config.json. That of the stock model, which PEFT asks for, is what it should be."""
        found, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        own: Any = cls
        if found.get("model_type") == own.posenc_stock.model_type:
            found = {**found, "model_type": own.model_type}
        return found, unused

    @property
    def auto_map(self) -> dict[str, str]:
        """The class in the stub for each `Auto` class; other libraries choose a class by it."""
        return model_card.auto_map(type(self))

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        for name in ("posenc_origin", "posenc_locked"):
            found.pop(name, None)
        return found

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: saving must write the stub, not a copy of this package's source."""


class PosencConfig(OwnConfig):
    """Mixin of the configs of converted models."""

    posenc: dict[str, Any] | None  # the record of the patch
    posenc_locked: Any  # the true value of the locked field, as config.json has it
    posenc_lock: ClassVar[tuple[str, Any]]  # that field, and a value of it that stock classes refuse

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("auto_map", "model_type"):
            kwargs.pop(name, None)  # the class has them, and `unpatch` changes the class
        self._refuse_shadows(kwargs)
        # A record in a file has both, one in memory neither.
        if isinstance(self.posenc, dict) and not {"digest", "locked"}.isdisjoint(self.posenc):
            self.posenc = dict(self.posenc)
            if self.posenc.pop("digest", None) != record.digest(self.posenc):
                raise CheckpointError(
                    "The entry 'posenc' of config.json was changed after it was written. Restore config.json from the "
                    "original checkpoint, or convert the model again."
                )
        record.from_config(self)  # Raises if it is damaged or newer.
        field, refused = self.posenc_lock
        # Some configs do not declare the field, and set it last.
        found = kwargs.get(field, getattr(self, field, None))
        if self.posenc and "locked" in self.posenc:
            self.posenc = dict(self.posenc)
            self.posenc_locked = self.posenc.pop("locked")
            if type(self.posenc_locked) is not type(refused):
                raise CheckpointError(
                    f"config.json has posenc.locked={self.posenc_locked!r:.60}, the true value of {field}, expected a "
                    f"{type(refused).__name__}. Restore config.json from the original checkpoint."
                )
            if found not in (refused, self.posenc_locked, None):
                raise CheckpointError(
                    f"config.json of a converted model has {field}={found!r}, expected {refused!r}: the true value is "
                    f"kept under 'posenc'. Restore config.json, and pass {field}=... to from_pretrained."
                )
        elif found == refused:
            raise CheckpointError(
                "config.json is that of a converted model, but its entry 'posenc' is gone or damaged. Restore "
                "config.json from the original checkpoint, or convert the model again."
            )
        if "posenc_locked" in vars(self):
            kwargs.pop(field, None)
            setattr(self, field, copy.deepcopy(self.posenc_locked))
        try:
            super().__post_init__(**kwargs)  # type: ignore[misc]
            # The decorator of stock configs does this for their own class alone.
            self.validate()  # type: ignore[attr-defined]
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"config.json is damaged: {type(self).__name__} cannot be made from it ({type(error).__name__}: "
                f"{str(error)[:200]}). Restore it from the original checkpoint."
            ) from error
        if self.posenc:
            _tell_config_around(self)

    def _refuse_shadows(self, given: Iterable[str]) -> None:
        """Raise for keys of config.json that would take the place of what the class itself has."""
        for name in given:
            own = inspect.getattr_static(type(self), name, property(fset=lambda *_: None))
            if name.startswith("posenc_") or not (isinstance(own, property) and own.fset):
                raise CheckpointError(
                    f"config.json has the key {name!r:.60}, which is no field of a {type(self).__name__}. Restore it "
                    "from the original checkpoint."
                )

    def built(self, model: Any) -> None:
        twin = None if BUILDING.get() or not self.posenc else of_config(self).twins.get(type(model))
        if twin is not None:
            raise CheckpointError(
                f"Got the config of a converted model for a {type(model).__name__}, which would ignore the positional "
                f"scheme. Use an Auto class or {twin.__name__}; then hf_posenc.unpatch gives the stock model."
            )

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return config.json, locked, and with `auto_map`, which leads to this package."""
        data = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        if self.posenc:
            field, refused = self.posenc_lock
            data["posenc"] = {**self.posenc, "locked": data.get(field, getattr(self, field))}
            data["posenc"]["digest"] = record.digest(data["posenc"])
            data[field] = refused
            data["auto_map"] = self.auto_map
        return json.dumps(data, indent=2, sort_keys=True) + "\n"


def _tell_config_around(config: Any) -> None:
    """Make the config that is about to take a converted part's config one that knows of it."""
    for function, frame in running():
        if function == ("transformers.configuration_utils", "__post_init__"):
            outer = frame.f_locals["self"]
            for enclose in ENCLOSE if outer is not config else ():
                enclose(outer)


# -- weights that are saved --------------------------------------------------------------------------------------------


class StampedWeights(HfQuantizer):
    """A stand-in for the quantizer that puts the record's digest into the headers of the weights on saving.

    transformers asks only a quantizer for such metadata.
    """

    def __init__(self, model: Any, state_dict: dict[str, Any] | None) -> None:
        self._true = getattr(model, "hf_quantizer", None)
        self._state_dict = state_dict
        self.quantization_config = getattr(self._true, "quantization_config", None)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Return the tensors to save, `None` for all of the model's, and the metadata to write with them."""
        state_dict, metadata = self._state_dict, {}
        if self._true is not None:
            state_dict, metadata = self._true.get_state_dict_and_metadata(model)
        return state_dict, {**metadata, DIGEST: digests(model.config)[0], SAVE: UNSEALED, FILES: UNSEALED}

    def is_serializable(self) -> bool:
        return self._true is None or self._true.is_serializable()

    @property
    def is_trainable(self) -> bool:
        return self._true is None or self._true.is_trainable


# -- names -------------------------------------------------------------------------------------------------------------


# The name of a model that was changed in memory. Other libraries load a model again by the name in its config, for a
# reference model or a tokenizer, and after `patch` the old name leads to another model. It is a folder, because
# libraries write names that are not folders into model cards, and says what to do, because some loaders show it only.
UNSAVED = str(Path(__file__).parent / "unsaved_model__save_it_or_pass_ref_model_and_processing_class")


class UnsavedConfig(PreTrainedConfig):
    """The config in that folder, which always raises."""

    model_type = "hf_posenc_unsaved"

    def __post_init__(self, **kwargs: Any) -> None:
        raise CheckpointError(
            "A model that hf_posenc changed in memory was to be loaded again by its name, and it has none, since it "
            "was not saved. Save it and load the folder, or pass the object that is missing: "
            "ref_model=copy.deepcopy(model) for a reference model, processing_class=tokenizer for a tokenizer."
        )


AutoConfig.register(UnsavedConfig.model_type, UnsavedConfig)


# -- weights that go into a model that is patched already --------------------------------------------------------------


# A state dict has no record, and other schemes and options may have the same names and shapes. So models put the digest
# of theirs into the metadata that torch keeps with a state dict. Files of safetensors lose these, and libraries that
# read a folder hand on the tensors alone; so the folder is looked up among the variables of their running functions.


def groups_digest(config: Any) -> str:
    """Return the digest of what a config, or its JSON, says of schemes, in composites of those of all parts.

    Strengths are left to callbacks, which set them again.
    """
    return " ".join(sorted(record.digest({"groups": posenc["groups"]}) for posenc in _records(config)))


def _records(config: Any) -> list[Any]:
    """Return the records in a config or its JSON: its own, or those of the parts of a composite."""
    if isinstance(config, Mapping):
        inside = [found for value in config.values() if isinstance(value, Mapping) for found in _records(value)]
        return [config["posenc"]] if config.get("posenc") else inside
    return [config.posenc] if getattr(config, "posenc", None) else [each.posenc for each in record.converted(config)]


def check_metadata(config: Any, metadata: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a state dict is that of a model with another record."""
    if metadata.get(DIGEST, groups_digest(config)) != groups_digest(config):
        raise CheckpointError(_message("The state dict", config))


def check_folder(config: Any, name: str = CONFIG_NAME) -> Path | None:
    """Raise `CheckpointError` if the folder that a library reads is that of a model or adapter with another record.

    Returns:
        The folder; `None` if no library reads one, or it has no config of that name.
    """
    place = _being_read()
    folder = place.parent if place is not None and place.is_file() else place
    if folder is None or not (folder / name).is_file():
        return None
    with reading(str(folder / name), advice=DAMAGED):
        same = groups_digest(json.loads((folder / name).read_text(encoding="utf-8"))) == groups_digest(config)
    if not same:
        raise CheckpointError(_message(str(folder), config))
    return folder


def _being_read() -> Path | None:
    """Return what the innermost of those functions that runs is reading."""
    for function, frame in running():
        found = frame.f_locals.get(READERS[function]) if function in READERS else None
        if isinstance(found, (str, os.PathLike)):
            return Path(found)
    return None


def _message(what: str, config: Any) -> str:
    names = ", ".join(repr(group["scheme"]) for posenc in _records(config) for group in posenc["groups"])
    return (
        f"{what} is that of a model with other schemes, options or layers than this one, which has {names}. Patch the "
        "model as that one was, or load the checkpoint with from_pretrained."
    )
