"""A positional scheme with add-ons, as one scheme: `"fire+log_temperature"`.

An add-on is a scheme that changes queries, the softmax or the output of attention, and leaves positions to another.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_posenc.equivalents import Equivalent
from hf_posenc.errors import OptionError
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.scheme import Result, Scheme, option_names


def _of_base(name: str, *, softmax: bool = False) -> Any:
    """Return a method that calls that of the base; with `softmax`, it returns `None` where an add-on replaces that."""

    def call(self: "Composite", *args: Any, **kwargs: Any) -> Any:
        if softmax and any(part.overrides("weigh") for part in self.added_on):
            return None
        return getattr(self.base, name)(*args, **kwargs)

    return functools.wraps(getattr(Scheme, name))(call)


class Composite(Scheme):
    """A scheme and its add-ons in one layer; each add-on acts on what those before it return.

    Its options are those of all parts, but `shared`: every layer has a module of its own.
    """

    # The classes of the parts: the scheme, then its add-ons.
    kinds: ClassVar[tuple[type[Scheme], ...]]

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        super().__init__(geometry)
        parts = []
        for kind in self.kinds:
            own = {name: options[name] for name in option_names(kind) if name in options}
            if "shared" in option_names(kind):
                own["shared"] = False
            parts.append(kind(geometry, **own))
        self.parts = nn.ModuleList(parts)
        if self.base.shared:
            raise OptionError(
                f"{self.name}: {self.base.name} is one module for all layers, and add-ons belong to one layer each. "
                "Use them alone (native='keep'), or with another scheme."
            )
        self.reads_keys, self.axes, self.history = self.base.reads_keys, self.base.axes, self.base.history

    def schemes(self) -> list[Scheme]:
        """Return all parts, the base first."""
        return [part for part in self.parts if isinstance(part, Scheme)]

    @property
    def base(self) -> Scheme:
        """The scheme that the others are added to."""
        return self.schemes()[0]

    @property
    def added_on(self) -> list[Scheme]:
        """The add-ons."""
        return self.schemes()[1:]

    def reset_parameters(self) -> None:
        for part in self.schemes():
            part.reset_parameters()

    def make_common(self) -> Scheme | None:
        return self.base.make_common()

    # -- seams ---------------------------------------------------------------------------------------------------------

    # Not `embed`: a scheme that has it is one module for all layers.
    recall, score, mix = _of_base("recall"), _of_base("score"), _of_base("mix")
    carry, feed = _of_base("carry"), _of_base("feed")

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        there = self.base.project(tokens, q, k, v)
        for part in self.added_on:
            there = replace(there, q=part.project(tokens, there.q, there.k, there.v).q)
        return there

    def weigh(self, logits: Tensor, block: Block) -> Tensor:
        return next((part for part in self.added_on if part.overrides("weigh")), self.base).weigh(logits, block)

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        for part in self.schemes():
            output = part.finish(output, hidden)
        return output

    # -- what it says of itself ------------------------------------------------------------------------------------

    cautions, state_bytes, end_of_positions = map(_of_base, ("cautions", "state_bytes", "end_of_positions"))
    # Structures of a sum over keys by the softmax.
    added, folded = _of_base("added", softmax=True), _of_base("folded", softmax=True)
    locality, key_scan = _of_base("locality", softmax=True), _of_base("key_scan", softmax=True)

    def overrides(self, seam: str) -> bool:
        return any(part.overrides(seam) for part in self.schemes())

    def starts_exact(self, *, native_kept: bool) -> bool:
        return self._is_neutral() and self.base.starts_exact(native_kept=native_kept)

    def start_tolerance(self, *, native_kept: bool) -> float | None:
        return self.base.start_tolerance(native_kept=native_kept) if self._is_neutral() else None

    def _is_neutral(self) -> bool:
        """Whether no add-on does anything at the start."""
        return all(part.starts_exact(native_kept=True) for part in self.added_on)

    def stock_equivalent(self) -> Equivalent:
        for part in self.added_on:
            part.stock_equivalent()  # Nothing, or an error
        return self.base.stock_equivalent()

    def weights_sum_to_one(self) -> bool:
        return all(part.weights_sum_to_one() for part in self.schemes())

    def options(self) -> dict[str, Any]:
        found = {name: value for part in self.schemes() for name, value in part.options().items()}
        found.pop("shared", None)
        return found if self.window is None else {**found, "window": self.window}

    def forward(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        # Offloading gives each part its weights for the time of its own forward.
        inside: Callable[..., Result] = lambda *_: function(self, *args, **kwargs)  # noqa: E731
        for part in self.schemes():
            inside = functools.partial(part, inside)
        return inside()


@functools.cache
def compose(name: str, kinds: tuple[type[Scheme], ...]) -> type[Composite]:
    """Return the class of a scheme with add-ons, given those of its parts, the scheme first.

    Raises:
        OptionError: Two parts have an option of one name, or both replace the softmax.
    """
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    for kind in kinds:
        names = [option for option in option_names(kind) if option != "shared"]
        twice = next((option for option in names if option in parameters), None)
        if twice is not None:
            raise OptionError(f"{name}: two of its parts have an option {twice!r}. Use the add-on with another scheme.")
        given, types = inspect.signature(kind.__init__).parameters, typing.get_type_hints(kind.__init__)
        parameters |= {option: given[option] for option in names}
        hints |= {option: types[option] for option in names}
    if sum(kind.weigh is not Scheme.weigh for kind in kinds) > 1:
        raise OptionError(f"{name}: two of its parts replace the softmax. Use the add-on with another scheme.")

    def __init__(self: Composite, geometry: Geometry, **options: Any) -> None:
        Composite.__init__(self, geometry, **options)

    first = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in ("self", "geometry")]
    __init__.__signature__ = inspect.Signature([*first, *parameters.values()])  # type: ignore[attr-defined]
    __init__.__annotations__ = hints
    base, *others = ((inspect.getdoc(kind) or "").partition("\n")[0] for kind in kinds)
    advice = kinds[0].adaptation
    members: dict[str, Any] = {
        "__init__": __init__,
        "__doc__": "\n\n".join((base, *(f"And: {other}" for other in others))),
        # Where pickle looks a class up.
        "__module__": "hf_posenc.registry",
        "kinds": kinds,
        "name": name,
        "directions": tuple(way for way in kinds[0].directions if all(way in kind.directions for kind in kinds)),
        "reproduces": kinds[0].reproduces,
        "neutral_options": kinds[0].neutral_options,
        "adaptation": replace(advice, options={key: x for key, x in advice.options.items() if key != "shared"}),
    }
    if kinds[0].start_tolerance is Scheme.start_tolerance:
        members["start_tolerance"] = Scheme.start_tolerance
    return type(name, (Composite,), members)
