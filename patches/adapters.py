"""Adapters that carry their positional scheme, with or without LoRA: a small file that converts a stock model.

PEFT finds a kind of adapter by its type. On a converted model every adapter is saved under a type of its own, which
PEFT without this package does not know; with it, PEFT's tables lead from there to a configuration class of this module.
Stock models, and adapters on them, have the classes of PEFT.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, PeftType
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.hotswap import CONFIG_KEYS_TO_CHECK
from torch import nn

from hf_posenc.errors import CheckpointError, NotPatchedError, OptionError
from hf_posenc.patches import adapter_files, composites, identity, model_card, record, reloading, surgery
from hf_posenc.patches.architecture import auto_name, config_pair, of_model
from hf_posenc.patches.atomic_files import reading, saving
from hf_posenc.patches.checkpoint import DAMAGED
from hf_posenc.patches.context import Switch
from hf_posenc.patches.models import attach_recorded
from hf_posenc.patches.patch import refuse_wrapped, unpatch

# Begins the names of types; also a task type, which PEFT's own classes refuse if somebody changes the type.
_LOCK = "HF_POSENC"
# Asks for the configuration of an adapter to swap in, and fails later over weights that are not those of LoRA.
_HOTSWAP = ("peft.utils.hotswap", "hotswap_adapter")
# Ends both in files: without this package, PEFT raises an error that consists of a name that it does not know.
_REMEDY = ": run `import hf_posenc` (pip install hf-posenc) before this adapter is loaded"
_SCHEMES = {surgery.OWN, surgery.SHARED}


@dataclass
class PosencAdapter:
    """Mixin of the configurations of adapters on converted models."""

    posenc: dict[str, Any] | None = field(default=None, metadata={"help": "The schemes; taken from the model."})
    base_weights: dict[str, Any] | None = field(
        default=None, metadata={"help": "Fingerprint of the weights under the adapter; taken from the model."}
    )
    any_base: bool = field(default=False, metadata={"help": "Accept other base weights."})

    # In memory only: the model's config, and for an adapter that is read, whether its weights are still to come, and
    # their path if known.
    _model_config = _weights = cast("Any", None)
    _pending = False

    def __post_init__(self) -> None:
        if self.posenc is not None:
            self._pending = True
            if not record.from_config(self):
                raise CheckpointError(
                    f"The entry 'posenc' of adapter_config.json is damaged ({self.posenc!r}). Restore the file "
                    "from the original adapter, or save the adapter again."
                )
            self.posenc = dict(self.posenc)
            vars(self)["task_type"] = self.posenc.pop("locked", vars(self)["task_type"])
        super().__post_init__()  # type: ignore[misc]
        if not self._pending:
            self.modules_to_save: Any = sorted({*self.saved, *_SCHEMES})

    @property
    def saved(self) -> list[str]:
        """Suffixes of the names of modules that are trained and saved as a whole."""
        return list(getattr(self, "modules_to_save", None) or ())

    @property
    def has_schemes(self) -> bool:
        """Whether the schemes' own weights are in the adapter."""
        return not _SCHEMES.isdisjoint(self.saved)

    @property
    def scheme_only(self) -> bool:
        """Whether the weights of the schemes are all that is trained."""
        targets, parameters = (getattr(self, name, None) for name in ("target_modules", "target_parameters"))
        return targets is not None and not targets and not parameters and self.has_schemes

    def check_weights(self, model: Any, name: str) -> None:
        """Raise unless the weights that are still to come fit a model, which has the adapter of this name in it."""
        if not self._pending:
            return
        if self._weights is None:
            raise CheckpointError(
                "An adapter of a converted model is checked as a whole, which only PEFT does. Load it with "
                "PeftModel.from_pretrained(model, folder), and leave out config=."
            )
        expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        adapter_files.check(self._weights, expected)
        self._pending = False

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `adapter_config.json`, with the current schemes."""
        now = getattr(self._model_config, "posenc", None)
        if now is not None:
            self.posenc = copy.deepcopy(now)
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        found["peft_type"] = _type_name(found["peft_type"]) + _REMEDY
        del found["any_base"]
        if self.posenc is not None:
            found["posenc"]["locked"] = found["task_type"]
            found["task_type"] = _LOCK + _REMEDY
        return found

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json`, and bind the weights in the folder to it."""
        found = kwargs.get("auto_mapping_dict")
        # By this entry `AutoPeftModel` loads the base, stock or converted.
        if found and (name := auto_name(type(self._model_config), found["base_model_class"])):
            kwargs["auto_mapping_dict"] = {"base_model_class": name, "parent_library": "transformers"}
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        adapter_files.bind(Path(save_directory))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any) -> Any:
        """Read the configuration of a saved adapter.

        Raises:
            CheckpointError: Its weights are pickled, damaged, or not those of this configuration.
            OptionError: It is to be swapped into another adapter, and has weights of schemes.
        """
        any_base = kwargs.pop("any_base", False)
        download = cls._split_kwargs(kwargs)[0]  # type: ignore[attr-defined]
        weights = _find_weights(pretrained_model_name_or_path, subfolder, **download)
        if any(weights.with_name(file).exists() for file in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
            adapter_files.read(weights)
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder, **kwargs)  # type: ignore[misc]
        if config.has_schemes and any(function == _HOTSWAP for function, _ in reloading.running()):
            raise OptionError(
                "hotswap_adapter: PEFT swaps weights of LoRA alone, and the adapter has some of a positional scheme, "
                "too. Use model.load_adapter(folder, name) and model.set_adapter(name)."
            )
        config._weights, config.any_base = weights, any_base
        return config


@dataclass
class PosencLoraConfig(PosencAdapter, LoraConfig):
    """LoRA on a converted model, with the scheme's own weights in the same adapter.

    Use it as `LoraConfig`, on a patched model. The saved adapter converts the stock model that it is loaded onto;
    merging gives a converted model. All weights of the schemes are trained, through `modules_to_save`, without LoRA on
    them. With `target_modules=[]` there is no LoRA, and only the schemes are trained.
    """


class PosencTuner:
    """Mixin of PEFT's tuners: adapters go into a converted model, or convert a stock one; all or nothing.

    A stock model stays the base of the adapters that convert it: where none of them is active, it computes what it did,
    with plain adapters or without any; and unloading takes the schemes away.
    """

    model: Any
    peft_config: dict[str, Any]
    active_adapters: list[str]
    # Whether the base is a stock model, and whether adapters are disabled.
    _stock_base = _off = False

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Put an adapter into the model; all adapters with schemes have the same ones."""
        self._stock_base = self._stock_base or not surgery.is_patched(model)
        with surgery.all_or_nothing(model):
            # A copy, since the one that was given may go into other models, too.
            config = self.peft_config[adapter_name] = copy.copy(self.peft_config[adapter_name])
            if not self._stock_base or _ours(config):
                agree(model, config)
            else:
                config.base_model_name_or_path = config.base_model_name_or_path or identity.origin(self.model.config)
            part: Any = composites.part_to_convert(model)
            owner = part.config
            # By the type of a stock model PEFT knows how names of projections lead to parameters of experts.
            owner.model_type = config_pair(of_model(part))[0].model_type
            try:
                super().inject_adapter(model, adapter_name, *args, **kwargs)  # type: ignore[misc]
            finally:
                del owner.model_type
            if _ours(config):
                config.check_weights(_whole(self, adapter_name), adapter_name)
            self._settle()

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Activate adapters."""
        super().set_adapter(*args, **kwargs)  # type: ignore[misc]
        self._settle()

    def delete_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Delete an adapter."""
        super().delete_adapter(*args, **kwargs)  # type: ignore[misc]
        self._settle()

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        super()._enable_adapter_layers(enabled)  # type: ignore[misc]
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
        model = super()._unload_and_optionally_merge(merge, *args, **kwargs)  # type: ignore[misc]
        self._settle(unloaded=True)
        return unpatch(model) if self._stock_base and not any(map(_ours, merged)) else model

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Raise `OptionError`: PEFT would leave the weights of schemes at their start in silence."""
        raise OptionError(
            "add_weighted_adapter: PEFT does not combine the weights of positional schemes. Merge each adapter into a "
            "model of its own, and average the models."
        )

    # Weights of schemes may have names like those of projections. They are trained as a whole, or not at all.
    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:
        stock: Any = super()
        return not surgery.is_of_scheme(key) and stock._check_target_module_exists(peft_config, key)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        if not surgery.is_of_scheme(kwargs.get("current_key") or args[5]):  # as `target_parameters` may lead to
            super()._create_and_replace(*args, **kwargs)  # type: ignore[misc]

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if getattr(peft_config, "scheme_only", False):
            # PEFT accepts an adapter without targets under this name; the saved config keeps the given targets.
            peft_config = copy.copy(peft_config)
            peft_config.target_modules = DUMMY_TARGET_MODULES
        # PEFT chooses the projections to adapt by the model type; where it knows none, all of attention are.
        part = composites.part_to_convert(self.model)
        architecture = of_model(part)
        stock = config_pair(architecture)[0].model_type
        chosen = (getattr(peft_config, name, None) for name in ("target_modules", "target_parameters"))
        if stock not in getattr(self, "target_module_mapping", {stock}) and not any(chosen):
            body = next(iter(architecture.stacks(part).values()))
            peft_config.target_modules = set(architecture.projections(architecture.attentions(body)[0]))
        return super()._prepare_adapter_config(peft_config, {**model_config, "model_type": stock})  # type: ignore[misc]

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        ours = [config for config in self.peft_config.values() if _ours(config)]
        if kwargs.get("adapter_names") is not None and any(self._stock_base or config.has_schemes for config in ours):
            raise OptionError(
                "adapter_names: the adapters bring a positional scheme, or weights of their own for it, and it is one "
                "for a whole batch. Run one batch for each adapter, after set_adapter."
            )
        enable = getattr(super(), "_enable_peft_forward_hooks", lambda *args, **kwargs: contextlib.nullcontext())
        return enable(*args, **kwargs)


class Kind:
    """The entry of one kind of adapter in PEFT's table of tuners: PEFT's own class, and another for converted models.

    The latter is `None` if the kind puts nothing into the model.
    """

    def __init__(self, stock: Any, tuner: Any) -> None:
        self.stock = stock
        self.tuner = tuner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tuner, of the class for converted models if any argument is one, or its configuration."""
        given = (*args, *kwargs.values())
        patched = any(map(surgery.is_patched, given))
        if self.tuner is None and patched:
            raise OptionError(
                f"{self.stock.__name__} replaces attentions by layers of its own, which would lose the positional "
                "scheme. Use another kind of adapter, LoRA for instance."
            )
        ours = self.tuner is not None and (patched or any(map(_ours, given)))
        return (self.tuner if ours else self.stock)(*args, **kwargs)

    def _get_adapter_state_dict(self, model: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the weights to save of an adapter, after giving its configuration the class for the model.

        That of an adapter inside the model has the class already. That of a prompt may be shared by several models.
        """
        base = _base(model)
        if config.is_prompt_learning and surgery.is_patched(base):
            agree(base, config)
        elif config.is_prompt_learning and _ours(config):
            config.__class__ = PEFT_TYPE_TO_CONFIG_MAPPING[config.peft_type]
        return self.stock._get_adapter_state_dict(model, config, *args, **kwargs)

    def _remap_adapter_state_dict_for_load(
        self, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Any]
    ) -> Any:
        """Return the weights of an adapter under the names that they have in the model, if they fit it."""
        if getattr(config, "_pending", False):
            try:
                if not surgery.is_patched(_base(model)):
                    raise NotPatchedError(
                        f"The adapter was trained with the schemes {_names(config.posenc)}, and the model has none. "
                        "Load the converted model under it, or patch it first."
                    )
                agree(_base(model), config)
                config.check_weights(model, adapter_name)
            except BaseException:
                if not config.is_prompt_learning:
                    model.delete_adapter(adapter_name)
                raise
        elif _ours(config) and config._weights is not None:
            config._weights = None  # it was checked before it went into the model
        elif _ours(config) and (folder := reloading.check_folder(config, CONFIG_NAME)) is not None:
            # The adapter was there before its weights, as where training is resumed.
            saved = type(config).from_pretrained(folder)
            if not config.any_base:
                _check_base(saved, _base(model))
            saved.check_weights(model, adapter_name)
        state_dict = {name: tensor for name, tensor in state_dict.items() if not adapter_files.is_of_base(name)}
        return self.stock._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)


def agree(model: Any, config: Any) -> Any:
    """Convert a stock model to an adapter's schemes, or record a converted model's schemes in the adapter.

    It returns the adapter's configuration, which gets the class for converted models.

    Raises:
        NotPatchedError: Neither has a scheme.
        OptionError: They differ, or there is nothing to train.
        CheckpointError: The adapter's schemes cannot be followed, or it was trained over other weights.
    """
    if not isinstance(config, PosencAdapter):
        config.__class__ = _configs()[_type_name(config.peft_type)]
    part = composites.part_to_convert(model)
    own, wanted = getattr(getattr(part, "config", None), "posenc", None), config.posenc
    if own is not None:
        surgery.check_record(surgery.Sites.of(part))
        if config._pending and any(wanted.get(key) != own.get(key) for key in ("groups", "strengths")):
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
    # The schemes are saved as they are in the model by then: training may fade and drop its native encoding.
    config.posenc, config._model_config = copy.deepcopy(part.config.posenc), part.config
    if config.base_model_name_or_path == identity.UNSAVED:
        config.base_model_name_or_path = identity.origin(model.config)  # the adapter makes of it what the model is
    return config


def _check_base(config: Any, model: Any) -> None:
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


def _names(schemes: dict[str, Any]) -> str:
    return ", ".join(repr(group["scheme"]) for group in schemes["groups"])


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _whole(tuner: Any, adapter_name: str) -> PeftModel:
    """Wrap a tuner in a `PeftModel`, since the names of saved weights begin there."""
    found = PeftModel.__new__(PeftModel)
    nn.Module.__init__(found)
    found._is_prompt_learning = False
    found.active_adapter = adapter_name
    found.base_model = tuner
    return found


def _find_weights(name: str, subfolder: str | None, **download: Any) -> Path:
    """Return the path of an adapter's weights, even if the file is missing."""
    folder = Path(name, subfolder or "")
    if not folder.is_dir():
        with contextlib.suppress(EntryNotFoundError):
            return Path(hf_hub_download(name, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, **download))
    return folder / SAFETENSORS_WEIGHTS_NAME


def _ours(config: Any) -> bool:
    """Whether a configuration, or one of several by name, is that of an adapter on a converted model."""
    return any(isinstance(one, PosencAdapter) for one in (config.values() if isinstance(config, dict) else [config]))


def _type_name(kind: PeftType) -> str:
    return f"{_LOCK}_{kind.value}"


def _configs() -> dict[str, Any]:
    """Return PEFT's table of configuration classes by the type in a file."""
    return cast("dict[str, Any]", PEFT_TYPE_TO_CONFIG_MAPPING)


def _saving_whole(stock: Any) -> Any:
    """Return a function that saves adapters as PEFT's own does; those of converted models whole or not at all."""

    @functools.wraps(stock)
    def save_pretrained(model: Any, save_directory: str, *args: Any, **kwargs: Any) -> None:
        if not (_ours(model.peft_config) or surgery.is_patched(_base(model))):
            stock(model, save_directory, *args, **kwargs)
            return
        target = Path(save_directory)
        with saving(target) as folder:
            for name in ("", *model.peft_config):
                adapter_files.refuse_pickled(target / name)
            with model_card.adapter_card(folder, target, identity.origin(_base(model).config)):
                stock(model, str(folder), *args, **kwargs)

    return save_pretrained


def register_all() -> None:
    """Register types of adapters for converted models in PEFT, one for each of its own types."""
    if not hasattr(PeftModel.save_pretrained, "__wrapped__"):
        PeftModel.save_pretrained = _saving_whole(PeftModel.save_pretrained)  # type: ignore[method-assign]
    for kind, stock in list(PEFT_TYPE_TO_CONFIG_MAPPING.items()):
        tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(kind)
        # PEFT needs the tuner for several tasks as a class, to ask for its bases.
        if tuner is None or isinstance(tuner, Kind) or kind == PeftType.MULTITASK_PROMPT_TUNING:
            continue
        config = PosencLoraConfig if stock is LoraConfig else dataclass(_twin(PosencAdapter, stock))
        for ending in ("", _REMEDY):  # the first adapters had the name alone
            _configs()[_type_name(kind) + ending] = config
        own = _twin(PosencTuner, tuner) if issubclass(tuner, BaseTuner) else None
        PEFT_TYPE_TO_TUNER_MAPPING[kind] = cast("Any", Kind(tuner, own))
    if "posenc" not in CONFIG_KEYS_TO_CHECK[PeftType.LORA]:
        CONFIG_KEYS_TO_CHECK[PeftType.LORA] += ["posenc", "base_weights"]  # must agree before weights are swapped


def _twin(mixin: type, stock: type) -> type:
    """Return a class of PEFT with a mixin; it is stored in this module, so that it can be pickled."""
    name = f"Posenc{stock.__name__}"
    found = globals()[name] = type(name, (mixin, stock), {"__module__": __name__, "__doc__": stock.__doc__})
    return found


register_all()
