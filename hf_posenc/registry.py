"""The registry of schemes: names and classes; checks of classes and options; descriptions."""

import functools
import importlib
import inspect
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from hf_posenc import plugins
from hf_posenc.addons import Composite, options_of
from hf_posenc.errors import DirectionError, OptionError, PosencError, UnknownSchemeError, shown, suggest
from hf_posenc.facts import Adaptation
from hf_posenc.operands import LARGEST_COUNT, LARGEST_NUMBER, SMALLEST_NUMBER, Geometry, is_count, is_number
from hf_posenc.scheme import Direction, Scheme, option_names

# The largest number of elements in one tensor of a scheme: 4 GiB in float32.
_LARGEST_TENSOR = 2**30
# The option of every scheme that none has to declare.
_WINDOW = "window"
FAMILIES = ("absolute", "add-on", "additive", "content-relative", "contextual", "rotary")
_FILLS = {"uniform_", "normal_", "constant_", "kaiming_uniform_", "fill_", "zero_"}
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


@dataclass(frozen=True)
class SchemeInfo:
    """The record of a scheme in the registry.

    Attributes:
        name: The name that `patch` takes.
        cls: The class of the scheme.
        paper: arXiv id, or another short reference.
        family: `"absolute"`, `"additive"`, `"content-relative"`, `"contextual"`, `"rotary"`, or `"add-on"`: a scheme
            without positions that others can be combined with, as in `"rope+gated_output"`.
        directions: Directions the scheme is defined for: `"causal"` (decoders), `"bidirectional"` (encoders).
        usual: Whether `hf-posenc compare` takes the scheme by default.
        addons: Records of the add-ons, which `name` lists, too; the other fields describe the scheme itself.
    """

    name: str
    cls: type[Scheme]
    paper: str
    family: str
    directions: tuple[Direction, ...]
    usual: bool = False
    addons: "tuple[SchemeInfo, ...]" = ()

    @property
    def summary(self) -> str:
        """The first paragraph of the class's documentation."""
        return (inspect.getdoc(self.cls) or "").split("\n\n")[0].replace("\n", " ")

    @property
    def summary_line(self) -> str:
        return (inspect.getdoc(self.cls) or "").partition("\n")[0]

    @property
    def headline(self) -> str:
        # The full stop of "et al. 2024" does not end a sentence.
        return re.split(r"(?<=[.])\s(?=[A-Z`])", self.summary, maxsplit=1)[0]

    @property
    def start(self) -> str:
        """The start of a model patched with the default options, in words."""
        parts = []
        if self.cls.reproduces:
            parts.append(f"exact on models with {' or '.join(self.cls.reproduces)} encoding")
        if self.cls.neutral_options is not None:
            given = ", ".join(f"{key}={value!r}" for key, value in self.cls.neutral_options.items())
            start = "exact" if self.cls.neutral_is_exact else "near"
            parts.append(f"{start} with native='keep'{f' and {given}' if given else ''}")
        return "; ".join([*parts, "otherwise a break"]) if parts else "break"

    @property
    def adaptation(self) -> Adaptation:
        """The way to bring a trained model to the scheme."""
        found = self.cls.adaptation
        if not self.addons:
            return found
        return replace(found, options={key: x for key, x in found.options.items() if key != "shared"})

    @property
    def kinds(self) -> tuple[type[Scheme], ...]:
        return (self.cls, *(addon.cls for addon in self.addons))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of other projects that register the scheme and its add-ons."""
        return tuple(sorted({kind.__module__ for kind in self.kinds if not plugins.is_built_in(kind.__module__)}))

    def option_defaults(self) -> dict[str, Any]:
        return {name: default for name, (_, default) in self.typed_options().items()}

    def typed_options(self) -> dict[str, tuple[Any, Any]]:
        if not self.addons:
            return _typed_options(self.cls)
        return {name: _typed_options(kind)[name] for name, kind in options_of(self.name, self.kinds).items()}


@functools.cache
def _typed_options(cls: type[Scheme]) -> dict[str, tuple[Any, Any]]:
    parameters, hints = inspect.signature(cls.__init__).parameters, typing.get_type_hints(cls.__init__)
    return {name: (hints[name], parameters[name].default) for name in option_names(cls)}


# The registered schemes by name; `hf_posenc.schemes()` has the built-in ones, too.
_SCHEMES: dict[str, SchemeInfo] = {}


SchemeClass = TypeVar("SchemeClass", bound=type[Scheme])


def register_scheme(
    name: str,
    *,
    paper: str,
    family: str,
    directions: tuple[Direction, ...] = ("causal", "bidirectional"),
    usual: bool = False,
) -> Callable[[SchemeClass], SchemeClass]:
    """Class decorator that puts a `Scheme` into the registry.

    Args:
        name: The name that `patch` and `build` take; must be new.
        paper: arXiv id of the source, or another short reference.
        family: Family under which the scheme is listed.
        directions: Directions the scheme is defined for.
        usual: Whether `hf-posenc compare` takes the scheme by default; for good results after short trainings.

    Raises:
        OptionError: The name is taken, there is no such family, the class is not a `Scheme`, an option has no type or
            default or is not stored, or the start reads numbers.
    """

    def decorate(cls: SchemeClass) -> SchemeClass:
        if not (isinstance(cls, type) and issubclass(cls, Scheme)):
            raise OptionError(f"register_scheme({name!r}): expected a subclass of hf_posenc.Scheme, got {cls!r}.")
        if family not in FAMILIES:
            known = suggest(str(family), FAMILIES)
            raise OptionError(f"register_scheme({name!r}): there is no family {shown(family)}. {known}")
        _check_class(name, cls, causal="causal" in directions)
        taken = _SCHEMES.get(name)
        if taken is not None:
            raise OptionError(
                f"register_scheme({name!r}): the name is taken by {taken.cls.__module__}.{taken.cls.__qualname__}. "
                "Choose another name."
            )
        cls.name, cls.directions = name, directions
        _SCHEMES[name] = SchemeInfo(name, cls, paper, family, directions, usual)
        return cls

    return decorate


def _check_class(name: str, cls: type[Scheme], *, causal: bool) -> None:
    """Raise `OptionError` if the options of a class, or its start, are not as `build` and checkpoints need them."""
    for option in option_names(cls):
        parameter = inspect.signature(cls.__init__).parameters[option]
        for what, field in (("type, by which its values are checked", "annotation"), ("default", "default")):
            if getattr(parameter, field) is inspect.Parameter.empty:
                raise OptionError(
                    f"register_scheme({name!r}): the option {option!r} has no {what}. Write it as name: type = value."
                )
    geometry = Geometry(heads=4, kv_heads=4, head_dim=16, hidden_size=64, causal=causal, max_positions=64)
    try:
        # As transformers does, which loads the weights afterwards.
        with torch.device("meta"), _Making(name, {}):
            scheme = cls(geometry)
    except PosencError:
        return  # It is for layers of another shape.
    except RuntimeError as error:
        raise OptionError(
            f"register_scheme({name!r}): it cannot be made on the meta device, on which checkpoints are loaded: "
            f"{str(error).splitlines()[0]} Set a start with torch.nn.init or hf_posenc.scheme.set_start."
        ) from error
    lost = next((option for option in option_names(cls) if not hasattr(scheme, option)), None)
    if lost is not None:
        raise OptionError(
            f"register_scheme({name!r}): __init__ does not store the option {lost!r}, so that it could not be saved. "
            f"Set self.{lost}."
        )


@functools.cache
def _load_builtin() -> None:
    # Every module of the package is a scheme; packages within hold shared code.
    package = importlib.import_module("hf_posenc.schemes")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            importlib.import_module(f"hf_posenc.schemes.{module.name}")


class Schemes(dict[str, SchemeInfo]):
    """Schemes by name; shown as a list with what they are."""

    def __repr__(self) -> str:
        return "\n".join(f"{name:<18} {info.family:<17} {info.headline}" for name, info in self.items())


def schemes() -> Schemes:
    """Return all registered schemes by name, sorted."""
    _load_builtin()
    plugins.load_installed()
    return Schemes(sorted(_SCHEMES.items()))


def get(name: str) -> SchemeInfo:
    """Return the record of a scheme, or of one with add-ons: `"rope+gated_output"`.

    Raises:
        UnknownSchemeError: No scheme has that name; the message suggests the nearest one.
        OptionError: The parts of a name do not go together.
    """
    known = schemes()
    if not isinstance(name, str):
        raise UnknownSchemeError(f"Expected the name of a scheme, got {shown(name)}. {suggest('', known)}")
    if "+" in name:
        return _combined(name, [get(part) for part in name.split("+")])
    if name not in known:
        raise UnknownSchemeError(f"There is no scheme {shown(name)}. {suggest(name, known)}")
    return known[name]


def _combined(name: str, parts: list[SchemeInfo]) -> SchemeInfo:
    base, *others = parts
    for other in others:
        if other.family != "add-on":
            addons = ", ".join(known.name for known in schemes().values() if known.family == "add-on")
            raise OptionError(f"{name}: {other.name} is no add-on to another scheme. These are: {addons}.")
    options_of(name, [part.cls for part in parts])
    directions = tuple(way for way in base.directions if all(way in other.directions for other in others))
    papers = ", ".join(part.paper for part in parts)
    return replace(base, name=name, paper=papers, directions=directions, usual=False, addons=tuple(others))


def build(name: str, geometry: Geometry, **options: Any) -> Scheme:
    """Make a scheme for an attention layer of the given geometry, without any transformers model.

    Args:
        name: A registered name, see `schemes()`.
        geometry: The layer's shape.
        **options: The scheme's options, see `describe(name)`; and for every scheme `window`, the distance from which
            keys are hidden.

    Returns:
        The module, with float32 parameters at their start.

    Raises:
        UnknownSchemeError: No scheme has that name.
        OptionError: An option is unknown, its value has a wrong type or range, or a tensor would be too large.
        DirectionError: The scheme is not defined for the geometry's direction.
    """
    info = get(name)
    if not isinstance(geometry, Geometry):
        raise OptionError(f"build({name!r}): expected a Geometry as second argument, got {shown(geometry)}.")
    return make(info, geometry, options)


def make(info: SchemeInfo, geometry: Geometry, options: Mapping[str, Any]) -> Scheme:
    """Make a scheme whose record is at hand; otherwise as `build`."""
    check_options(info, options)
    direction: Direction = "causal" if geometry.causal else "bidirectional"
    if direction not in info.directions:
        raise DirectionError(
            f"{info.name} is defined for {' and '.join(info.directions)} attention, got "
            f"Geometry(causal={geometry.causal}). Choose another scheme, or leave an encoder out with stacks='decoder'."
        )
    # Parameters made in inference mode can never be trained.
    given = dict(options)
    window = None if _WINDOW in info.typed_options() else given.pop(_WINDOW, None)
    with torch.inference_mode(False), _Making(info.name, options):
        scheme = Composite(geometry, info.name, info.kinds, given) if info.addons else info.cls(geometry, **given)
        scheme.window = window
        scheme.common = scheme.make_common()
    # Values taken from the model can be wrong too, and could then not be read back from a config.
    check_options(info, scheme.options())
    return scheme


class _Making(TorchFunctionMode):
    """A mode that makes all tensors of a scheme in float32, for any default dtype, and allocates no huge one."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.name, self.options = name, options

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            if math.prod(size) > _LARGEST_TENSOR:
                given = ", ".join(f"{key}={value!r}" for key, value in self.options.items()) or "the default options"
                raise OptionError(
                    f"{self.name} with {given} needs a tensor of {list(size)}, {math.prod(size) / 2**28:,.0f} GiB; "
                    f"expected at most {_LARGEST_TENSOR / 2**28:,.0f} GiB. Choose smaller sizes."
                )
            if kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        filled = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", None) in _FILLS and isinstance(filled, torch.Tensor) and filled.is_meta:
            return filled  # It has no values; a checkpoint brings them.
        return func(*args, **kwargs)


def check_options(info: SchemeInfo, options: Mapping[str, Any]) -> None:
    """Raise `OptionError` unless every option exists and has the annotated type."""
    known = info.typed_options()
    for name, value in options.items():
        if name == _WINDOW and name not in known:
            if value is not None and not (is_count(value) and value >= 1):
                raise OptionError(
                    f"{info.name}: option window={shown(value)}: expected None or a distance of at least 1."
                )
            continue
        if name not in known:
            raise OptionError(f"{info.name} has no option {shown(name)}. {suggest(name, known)}")
        hint, _ = known[name]
        if not _matches(value, hint):
            raise OptionError(f"{info.name}: option {name}={shown(value)}: expected {_expected(value, hint)}.")


def _matches(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, choice) for choice in typing.get_args(hint))
    if hint is type(None):
        return value is None
    if hint is float:
        # nan and infinity cannot be written into a config, and no option has a use for them.
        return is_number(value)
    if hint is int:
        return is_count(value)
    return isinstance(value, hint)


def _expected(value: Any, hint: Any) -> str:
    """Return the expected type in words, with the bound that a number of the right type violates."""
    bound = ""
    if type(value) in (int, float) and not is_number(value) and -math.inf < value < math.inf and _matches(0.5, hint):
        bound = f", 0 or of a size from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}"
    elif type(value) is int and not is_count(value) and _matches(0, hint):
        bound = f" of at most {LARGEST_COUNT:,}"
    return _readable(hint) + bound


def _readable(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_readable(choice) for choice in typing.get_args(hint))
    if hint is float:
        return "a finite number"
    return "None" if hint is type(None) else str(getattr(hint, "__name__", hint))


# -- descriptions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """An option of a scheme: name, type, default, and its line of documentation."""

    name: str
    type: str
    default: object
    text: str


@dataclass(frozen=True)
class Description:
    """The description of a scheme: its record, the documentation of its class without the arguments, its options."""

    info: SchemeInfo
    text: str
    options: tuple[Option, ...]

    def __str__(self) -> str:
        sources = re.sub(r"(?<![^\s,])(?=\d{4}[.]\d)", "https://arxiv.org/abs/", self.info.paper)
        lines = [
            f"{self.info.name}: {self.text}",
            "",
            f"source:     {sources}",
            f"family:     {self.info.family}",
            f"directions: {', '.join(self.info.directions)}",
            f"start:      {self.info.start}",
            "options:" + ("" if self.options else "    none"),
            *(f"  {o.name}: {o.type} = {o.default!r}\n      {o.text}" for o in self.options),
        ]
        return "\n".join(lines)

    # Notebooks show it as `print` does.
    __repr__ = __str__


def describe(scheme: str) -> Description:
    """Describe a scheme: what it does, its source, how it starts, its options.

    Raises:
        UnknownSchemeError: No scheme has that name.
    """
    info = get(scheme)
    # A variant documents only the options that differ from its base.
    texts: dict[str, str] = {}
    for base in (base for kind in info.kinds for base in kind.__mro__):
        texts = _documentation(base)[1] | texts
    options = tuple(
        Option(name, _in_code(hint), default, texts.get(name, ""))
        for name, (hint, default) in info.typed_options().items()
    )
    text = _documentation(info.cls)[0]
    if info.addons:
        text = "\n\n".join((info.summary_line, *(f"And: {addon.summary_line}" for addon in info.addons)))
    return Description(info, text, options)


def _in_code(hint: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(_in_code(choice) for choice in typing.get_args(hint))
    return "None" if hint is type(None) else inspect.formatannotation(hint).replace("typing.", "")


def _documentation(cls: type) -> tuple[str, dict[str, str]]:
    """Split a class's documentation into its text and its arguments."""
    text, _, rest = (inspect.getdoc(cls) or "").partition("\nArgs:\n")
    arguments = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", rest, re.MULTILINE)
    return text.strip(), {name: " ".join(meaning.split()) for name, meaning in arguments}
