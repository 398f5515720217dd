"""LoRA that carries its positional scheme: a small file that converts a stock model.

LoRA on a converted model is saved under a type of its own, which PEFT without this package does not know. All other
kinds of adapters on converted models are PEFT's own, in memory and on disk; the base that they name is the converted
model, or `locks.UNSAVED`, which raises. Adapters on stock models have the classes of PEFT.

What `register_all` changes in PEFT:

| place | change |
|---|---|
| types of configurations | new entries: the types in our files lead to `PosencLoraConfig`, or to a refusal |
| tuner of LoRA | `PosencLoraModel`, which makes PEFT's own tuner unless a scheme is there |
| targets by the type of a model | new entries: converted types have the targets of the stock types |
| keys that hotswapping compares | `posenc` and `base_weights`, too |
| `PeftModel.save_pretrained` | adapters on converted models are saved whole or not at all |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import LoraConfig, LoraModel, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, PeftType, constants
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.hotswap import CONFIG_KEYS_TO_CHECK
from torch import nn

from hf_posenc.errors import CheckpointError, NotPatchedError, OptionError
from hf_posenc.patches import adapter_files, composites, identity, locks, model_card, record, surgery
from hf_posenc.patches.architecture import auto_name, config_pair, of_model, own_type
from hf_posenc.patches.atomic_files import reading, saving
from hf_posenc.patches.checkpoint import DAMAGED
from hf_posenc.patches.context import Switch
from hf_posenc.patches.models import attach_recorded
from hf_posenc.patches.patch import refuse_wrapped, unpatch

# Begins the names of types; also a task type, which PEFT's own classes refuse if somebody changes the type.
_LOCK = "HF_POSENC"
# Ends both in files: without this package, PEFT raises an error that consists of a name that it does not know.
_REMEDY = ": run `import hf_posenc` (pip install hf-posenc) before this adapter is loaded"
_SCHEMES = {surgery.OWN, surgery.SHARED}


@dataclass
class PosencLoraConfig(LoraConfig):
    """LoRA on a converted model, with the scheme's own weights in the same adapter.

    Use it as `LoraConfig`, on a patched model. The saved adapter converts the stock model that it is loaded onto;
    merging gives a converted model. All weights of the schemes are trained, through `modules_to_save`, without LoRA on
    them. With `target_modules=[]` there is no LoRA, and only the schemes are trained.
    """

    posenc: dict[str, Any] | None = field(default=None, metadata={"help": "The schemes; taken from the model."})
    base_weights: dict[str, Any] | None = field(
        default=None, metadata={"help": "Fingerprint of the weights under the adapter; taken from the model."}
    )
    any_base: bool = field(default=False, metadata={"help": "Accept other base weights."})

    # In memory only, for an adapter that is read: whether its weights are still to come, and their path if known.
    _pending = False
    _weights = cast("Path | None", None)

    def __post_init__(self) -> None:
        stock: Any = super()
        if self.posenc is not None:
            self._pending = True
            if not record.from_config(self):
                raise CheckpointError(
                    f"The entry 'posenc' of adapter_config.json is damaged ({self.posenc!r}). Restore the file "
                    "from the original adapter, or save the adapter again."
                )
            self.posenc = dict(self.posenc)
            self.task_type = self.posenc.pop("locked", self.task_type)
        stock.__post_init__()
        if not self._pending:
            self.modules_to_save = sorted({*self.saved, *_SCHEMES})

    @classmethod
    def of(cls, config: LoraConfig) -> PosencLoraConfig:
        """Return a copy of a configuration, which may be PEFT's own, with room for schemes."""
        found = object.__new__(cls)
        for name, value in vars(config).items():
            setattr(found, name, value)
        return found

    @property
    def saved(self) -> list[str]:
        """Suffixes of the names of modules that are trained and saved as a whole."""
        return list(self.modules_to_save or ())

    @property
    def has_schemes(self) -> bool:
        return not _SCHEMES.isdisjoint(self.saved)

    @property
    def scheme_only(self) -> bool:
        """Whether the weights of the schemes are all that is trained."""
        targets = self.target_modules
        return targets is not None and not targets and not self.target_parameters and self.has_schemes

    def check_weights(self, model: Any, name: str) -> None:
        """Raise unless the weights that are still to come fit a model, which has the adapter of this name in it."""
        if self._pending and self._weights is None:
            raise CheckpointError(
                "An adapter of a converted model is checked as a whole, which only PEFT does. Load it with "
                "PeftModel.from_pretrained(model, folder), and leave out config=."
            )
        if self._pending:
            expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
            adapter_files.check(cast("Path", self._weights), expected)
            self._pending = False

    def to_dict(self) -> dict[str, Any]:
        stock: Any = super()
        found: dict[str, Any] = stock.to_dict()
        found["peft_type"] = f"{_LOCK}_{PeftType.LORA.value}{_REMEDY}"
        del found["any_base"]
        if self.posenc is not None:
            found["posenc"]["locked"] = found["task_type"]
            found["task_type"] = _LOCK + _REMEDY
        return found

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json`, and bind the weights in the folder to it."""
        if named := kwargs.get("auto_mapping_dict"):
            # By this entry `AutoPeftModel` loads the base, stock or converted.
            base: Any = getattr(sys.modules[named["parent_library"]], named["base_model_class"])
            if name := auto_name(base.config_class, base.__name__):
                kwargs["auto_mapping_dict"] = {"base_model_class": name, "parent_library": "transformers"}
        super().save_pretrained(save_directory, **kwargs)
        adapter_files.bind(Path(save_directory))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any) -> Any:
        """Read the configuration of a saved adapter.

        Raises:
            CheckpointError: Its weights are pickled, damaged, or not those of this configuration.
        """
        any_base = kwargs.pop("any_base", False)
        split: Any = cls._split_kwargs
        weights = _find_weights(pretrained_model_name_or_path, subfolder, **split(kwargs)[0])
        adapter_files.refuse_pickled(weights.parent)
        if weights.exists():
            adapter_files.read(weights)
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder, **kwargs)
        config._weights, config.any_base = weights, any_base
        return config


class OtherKind(PeftConfig):
    """The configuration of an adapter of another kind than LoRA, with a scheme, as earlier releases wrote it."""

    def __init__(self, **entries: Any) -> None:
        kind = str(entries.get("peft_type")).partition(":")[0].removeprefix(f"{_LOCK}_")
        raise CheckpointError(
            f"An earlier release of hf_posenc saved this adapter of type {kind} with its scheme, and only LoRA has one "
            "now. Merge it into its model with that release, or train it again: on a converted model, it is PEFT's own."
        )


class PosencLoraModel(LoraModel):
    """PEFT's tuner of LoRA, for converted models and for stock ones that adapters convert; all or nothing.

    A stock model stays the base of the adapters that convert it: where none of them is active, it computes what it did,
    with plain adapters or without any; and unloading takes the schemes away.
    """

    # Whether the base is a stock model, and whether adapters are disabled.
    _stock_base = _off = False

    def __new__(cls, model: Any = None, peft_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Make this tuner if a scheme is there; a copy comes without arguments."""
        configs = peft_config.values() if isinstance(peft_config, dict) else [peft_config]
        if model is None or surgery.is_patched(model) or any(map(_ours, configs)):
            return super().__new__(cls)
        return LoraModel(model, peft_config, *args, **kwargs)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Put an adapter into the model; all adapters with schemes have the same ones."""
        self._stock_base = self._stock_base or not surgery.is_patched(model)
        with surgery.all_or_nothing(model):
            # A copy, since the one that was given may go into other models, too.
            given = self.peft_config[adapter_name]
            if self._stock_base and not _ours(given):
                config: Any = copy.copy(given)
                config.base_model_name_or_path = config.base_model_name_or_path or identity.origin(self.model.config)
            else:
                config = PosencLoraConfig.of(given)
                agree(model, config)
            self.peft_config[adapter_name] = config
            part: Any = composites.part_to_convert(model)
            owner = part.config
            # By the type of a stock model PEFT knows how names of projections lead to parameters of experts.
            owner.model_type = config_pair(of_model(part))[0].model_type
            try:
                super().inject_adapter(model, adapter_name, *args, **kwargs)
            finally:
                del owner.model_type
            if _ours(config):
                outer: Any = model
                outer.peft_config = self.peft_config  # as PEFT does when all of it is done
                config.check_weights(model, adapter_name)
            self._settle()

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().set_adapter(*args, **kwargs)
        self._settle()

    def delete_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().delete_adapter(*args, **kwargs)
        self._settle()

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        super()._enable_adapter_layers(enabled)
        self._off = not enabled
        self._settle()

    def _settle(self, *, unloaded: bool = False) -> None:
        """Switch the schemes of a stock base on or off, as the active adapters ask for."""
        active = [self.peft_config[name] for name in self.active_adapters if name in self.peft_config]
        is_off = self._stock_base and not unloaded and (self._off or not any(map(_ours, active)))
        for module in self.model.modules():
            if isinstance(module, Switch) and surgery.is_patched(module):
                module.posenc_disabled = is_off

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        names = kwargs.get("adapter_names")
        merged = [self.peft_config[name] for name in (self.active_adapters if names is None else names) if merge]
        model: Any = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        self._settle(unloaded=True)
        return unpatch(model) if self._stock_base and not any(map(_ours, merged)) else model

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Raise `OptionError`: PEFT would leave the weights of schemes at their start in silence."""
        raise OptionError(
            "add_weighted_adapter: PEFT does not combine the weights of positional schemes. Merge each adapter into a "
            "model of its own, and average the models."
        )

    # Weights of schemes may have names like those of projections. They are trained as a whole, or not at all.
    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:  # type: ignore[override]
        return not surgery.is_of_scheme(key) and super()._check_target_module_exists(peft_config, key)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        if not surgery.is_of_scheme(kwargs.get("current_key") or args[5]):  # as `target_parameters` may lead to
            super()._create_and_replace(*args, **kwargs)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if _ours(peft_config) and peft_config.scheme_only:
            # PEFT accepts an adapter without targets under this name; the saved config keeps the given targets.
            peft_config = copy.copy(peft_config)
            peft_config.target_modules = DUMMY_TARGET_MODULES
        # PEFT chooses the projections to adapt by the model type; where it knows none, all of attention are.
        part = composites.part_to_convert(self.model)
        architecture = of_model(part)
        stock = config_pair(architecture)[0].model_type
        if stock not in self.target_module_mapping and not (
            peft_config.target_modules or peft_config.target_parameters
        ):
            body = next(iter(architecture.stacks(part).values()))
            peft_config.target_modules = set(architecture.projections(architecture.attentions(body)[0]))
        prepare: Any = super()._prepare_adapter_config
        return prepare(peft_config, {**model_config, "model_type": stock})

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        ours = [config for config in self.peft_config.values() if _ours(config)]
        if kwargs.get("adapter_names") is not None and any(self._stock_base or config.has_schemes for config in ours):
            raise OptionError(
                "adapter_names: the adapters bring a positional scheme, or weights of their own for it, and it is one "
                "for a whole batch. Run one batch for each adapter, after set_adapter."
            )
        return super()._enable_peft_forward_hooks(*args, **kwargs)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Any]
    ) -> Any:
        """Return the weights of an adapter under the names that they have in the model, if they fit it."""
        if _ours(config) and config._pending:
            model.delete_adapter(adapter_name)
            raise NotPatchedError(
                f"The adapter was trained with the schemes {_names(config.posenc)}, and the model has none. Load it "
                "with PeftModel.from_pretrained onto the stock model alone, or onto one converted in the same way."
            )
        if _ours(config) and config._weights is not None:
            config._weights = None  # it was checked before it went into the model
        elif _ours(config) and (folder := locks.check_folder(config, CONFIG_NAME)) is not None:
            # The adapter was there before its weights, as where training is resumed.
            saved = PosencLoraConfig.from_pretrained(str(folder))
            if not config.any_base:
                _check_base(saved, _base(model))
            saved.check_weights(model, adapter_name)
        state_dict = {name: tensor for name, tensor in state_dict.items() if not adapter_files.is_of_base(name)}
        remap: Any = super()._remap_adapter_state_dict_for_load
        return remap(model, config, adapter_name, state_dict)


def agree(model: Any, config: PosencLoraConfig) -> None:
    """Convert a stock model to an adapter's schemes, or record a converted model's schemes in the adapter."""
    part = composites.part_to_convert(model)
    own, wanted = getattr(getattr(part, "config", None), "posenc", None), config.posenc
    if own is not None:
        surgery.check_record(surgery.Sites.of(part))
        if config._pending and any((wanted or {}).get(key) != own.get(key) for key in ("groups", "strengths")):
            raise OptionError(
                f"The adapter was trained with the schemes {_names(wanted)}, and the model has {_names(own)}, or other "
                "options, layers or strengths. Load it onto the stock model, which it converts, or onto one converted "
                "in the same way, with the same hf_posenc.set_strength."
            )
    elif wanted is None:
        raise NotPatchedError(
            f"{type(config).__name__}: the {type(model).__name__} is not patched, so there is no scheme to carry. Call "
            "hf_posenc.patch(model, ...) first, or use a configuration of PEFT."
        )
    else:
        _convert(part, wanted, composites.outers_of(part, model))
        if _has_parameters(model) and not config.has_schemes:
            raise OptionError(
                f"The adapter was trained on a model with the schemes {_names(wanted)}, whose weights it does not "
                "hold, and the model has none. Load it onto the converted model."
            )
    if config.has_schemes:
        config.modules_to_save = sorted({*config.saved, *_SCHEMES})  # own ones and shared ones go together
    if config.scheme_only and not _has_parameters(model):
        raise OptionError(
            f"{type(config).__name__}(target_modules=[]): {_names(part.config.posenc)} has no parameters, so without "
            "LoRA there is nothing to train. Leave out target_modules, or name the projections to adapt."
        )
    if not config._pending or config.any_base:
        config.base_weights = adapter_files.fingerprint(model, config.saved)
    else:
        _check_base(config, model)
    config.posenc = copy.deepcopy(part.config.posenc)
    if config.base_model_name_or_path == locks.UNSAVED:
        config.base_model_name_or_path = identity.origin(model.config)  # the adapter makes of it what the model is


def _check_base(config: PosencLoraConfig, model: Any) -> None:
    """Raise `CheckpointError` if an adapter that is read was trained over other weights than those of a model."""
    if parts := adapter_files.differing(config.base_weights, model, config.saved):
        base = config.base_model_name_or_path
        raise CheckpointError(
            f"The adapter was trained over other weights than those of this {surgery.stock_class(type(model)).__name__}"
            f" ({' and '.join(parts)} differ). Load it onto its own base{f', {base!r}' if base else ''}; or pass "
            "any_base=True to PeftModel.from_pretrained, if you mean this one."
        )


def _convert(model: Any, schemes: dict[str, Any], outers: list[Any]) -> None:
    """Patch a stock model, in place, with the record of a converted one; the models around it learn of it."""
    refuse_wrapped(model)
    architecture = of_model(model)
    identity.refuse_part(architecture, model)
    identity.own_configs(architecture, model, outers)
    identity.rename(model, outers)
    for config in surgery.configs(model):
        config.posenc = copy.deepcopy(schemes)
    attach_recorded(model)
    identity.mark_parts(model)
    for outer in outers:
        composites.enclose(outer)


def base_of(folder: str) -> str:
    """Return the path or name of the base model of a saved adapter, or raise `CheckpointError`."""
    with reading(f"The adapter in {folder}", advice=DAMAGED):
        base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base:
        raise CheckpointError(
            f"The adapter in {folder} does not say which model it goes onto. Give base_model_name_or_path in its "
            "adapter_config.json."
        )
    return str(base)


def merged(model: Any, folder: str) -> Any:
    """Load a saved adapter, of any type that PEFT has, onto its model, and merge it; raise if it does not fit."""
    with reading(f"The adapter in {folder}", advice=DAMAGED):
        return PeftModel.from_pretrained(model, folder).merge_and_unload()


def _has_parameters(model: nn.Module) -> bool:
    return any(surgery.is_of_scheme(name) for name, _ in model.named_parameters())


def _names(schemes: Any) -> str:
    return ", ".join(repr(group["scheme"]) for group in schemes["groups"])


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _find_weights(name: str, subfolder: str | None, **download: Any) -> Path:
    folder = Path(name, subfolder or "")
    if not folder.is_dir():
        with contextlib.suppress(EntryNotFoundError):
            return Path(hf_hub_download(name, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, **download))
    return folder / SAFETENSORS_WEIGHTS_NAME


def _ours(config: Any) -> bool:
    return isinstance(config, PosencLoraConfig)


def _saving_whole(stock: Any) -> Any:
    """Return a function that saves adapters as PEFT's own does; those on converted models whole or not at all."""

    @functools.wraps(stock)
    def save_pretrained(model: Any, save_directory: str, *args: Any, **kwargs: Any) -> None:
        base, target = _base(model), Path(save_directory)
        ours = {name: config for name, config in model.peft_config.items() if _ours(config)}
        if not ours and not surgery.is_patched(base):
            stock(model, save_directory, *args, **kwargs)
            return
        for config in ours.values():
            # As they are in the model by now: training may fade and drop its native encoding.
            config.posenc = copy.deepcopy(composites.part_to_convert(base).config.posenc)
        origin = identity.origin(base.config)
        unsaved = [name for name, one in model.peft_config.items() if one.base_model_name_or_path == locks.UNSAVED]
        with saving(target) as folder:
            for name in ours:
                adapter_files.refuse_pickled(_folder(target, name))
            # PEFT asks the base for the size of its vocabulary. The files then name the converted model again.
            with _bases(model, unsaved, origin), model_card.adapter_card(folder, target, "" if unsaved else origin):
                stock(model, str(folder), *args, **kwargs)
            for file in (_folder(folder, name) / CONFIG_NAME for name in unsaved):
                if file.exists():  # an adapter that is left out has none
                    content = {**json.loads(file.read_text()), "base_model_name_or_path": locks.UNSAVED}
                    file.write_text(json.dumps(content, indent=2, sort_keys=True))

    return save_pretrained


@contextlib.contextmanager
def _bases(model: Any, names: list[str], base: str) -> Iterator[None]:
    """Let adapters of unsaved models name another base for a while."""
    for name in names:
        model.peft_config[name].base_model_name_or_path = base
    try:
        yield
    finally:
        for name in names:
            model.peft_config[name].base_model_name_or_path = locks.UNSAVED


def _folder(target: Path, name: str) -> Path:
    return target / ("" if name == "default" else name)


def register_all() -> None:
    types = cast("dict[str, Any]", PEFT_TYPE_TO_CONFIG_MAPPING)
    for kind in PeftType:
        for ending in ("", _REMEDY):  # the first adapters had the name alone
            types[f"{_LOCK}_{kind.value}{ending}"] = PosencLoraConfig if kind == PeftType.LORA else OtherKind
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = PosencLoraModel
    tables = [table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
    for table in tables:
        table |= {own_type(kind): targets for kind, targets in table.items()}
    if "posenc" not in CONFIG_KEYS_TO_CHECK[PeftType.LORA]:
        CONFIG_KEYS_TO_CHECK[PeftType.LORA] += ["posenc", "base_weights"]  # must agree before weights are swapped
    if not hasattr(PeftModel.save_pretrained, "__wrapped__"):
        PeftModel.save_pretrained = _saving_whole(PeftModel.save_pretrained)  # type: ignore[method-assign]


register_all()
