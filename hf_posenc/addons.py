"""A positional scheme with add-ons, as one scheme: `"fire+log_temperature"`.

An add-on is a scheme that changes projections, the softmax, the output of attention, or the logits of near or first
keys. The other scheme carries the positions.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.equivalents import Equivalent, Nothing
from hf_posenc.errors import ExportError, OptionError
from hf_posenc.facts import Facts
from hf_posenc.forms import Bias, DistanceTable, first_of, total, without_first
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.scheme import Result, Scheme, option_names


def _of_base(name: str, *, alone: bool = False) -> Any:
    """Return a method that calls the base's method of this name.

    With `alone`, it returns `None` if an add-on changes the logits or the softmax: the form holds for the base alone.
    """

    def call(self: "Composite", *args: Any, **kwargs: Any) -> Any:
        if alone and any(part.overrides(seam) for part in self.added_on for seam in ("score", "weigh")):
            return None
        return getattr(self.base, name)(*args, **kwargs)

    return functools.wraps(getattr(Scheme, name))(call)


class Composite(Scheme):
    """A scheme and its add-ons in one layer; each add-on acts on what those before it return.

    Its options are those of all parts, but `shared`: every layer has a module of its own.
    """

    def __init__(
        self, geometry: Geometry, name: str, kinds: Sequence[type[Scheme]], options: Mapping[str, Any]
    ) -> None:
        super().__init__(geometry)
        self.name = name
        parts = []
        for kind in kinds:
            own = {option: options[option] for option in option_names(kind) if option in options}
            if "shared" in option_names(kind):
                own["shared"] = False
            parts.append(kind(geometry, **own))
        self.parts = nn.ModuleList(parts)
        if self.base.shared:
            raise OptionError(
                f"{self.name}: {self.base.name} is one module for all layers, and add-ons belong to one layer each. "
                "Use them alone (native='keep'), or with another scheme."
            )
        self.reads_keys, self.axes = self.base.reads_keys, self.base.axes
        self.history = max(part.history for part in self.schemes())
        self.directions = tuple(way for way in self.base.directions if all(way in kind.directions for kind in kinds))
        self.neutral_options, self.adaptation = self.base.neutral_options, self.base.adaptation

    def schemes(self) -> list[Scheme]:
        """Return all parts, the base first."""
        return [part for part in self.parts if isinstance(part, Scheme)]

    @property
    def base(self) -> Scheme:
        """The scheme that the others are added to."""
        return self.schemes()[0]

    @property
    def added_on(self) -> list[Scheme]:
        return self.schemes()[1:]

    def reset_parameters(self) -> None:
        for part in self.schemes():
            part.reset_parameters()

    def make_common(self) -> Scheme | None:
        return self.base.make_common()

    # -- seams ---------------------------------------------------------------------------------------------------------

    # Not `embed`: a scheme that has it is one module for all layers.
    recall, mix = _of_base("recall"), _of_base("mix")
    carry, feed = _of_base("carry"), _of_base("feed")

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        there = Projection(q, k, v)
        for part in sorted(self.schemes(), key=lambda part: not part.projects_first):
            new = part.project(tokens, there.q, there.k, there.v)
            if part is self.base or part.projects_first:
                there = replace(new, recent={**there.recent, **new.recent})
            else:
                there = replace(there, q=new.q)
        return there

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        plain = logits
        for part in self.schemes():
            if part.spares_first:
                first = first_of(block.positions.key).to(logits.device)
                logits = torch.where(first[:, None, None], plain, logits)
            logits = part.score(logits, q, k, block)
        return logits

    def weigh(self, logits: Tensor, block: Block) -> Tensor:
        return next((part for part in self.added_on if part.overrides("weigh")), self.base).weigh(logits, block)

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        for part in self.schemes():
            output = part.finish(output, hidden)
        return output

    # -- what it says of itself ------------------------------------------------------------------------------------

    folded, locality, key_scan = (_of_base(name, alone=True) for name in ("folded", "locality", "key_scan"))

    def added(self) -> Bias | None:
        found: list[Bias] = []
        for part in self.schemes():
            if not any(map(part.overrides, ("score", "weigh", "mix"))):
                continue
            bias = part.added()
            if bias is None:
                return None
            if part.spares_first and found:
                found = [without_first(total(found))]
            found.append(bias)
        return total(found) if found else None

    def sink(self) -> Tensor | None:
        return next((part for part in self.schemes() if part.overrides("weigh")), self.base).sink()

    def overrides(self, seam: str) -> bool:
        return any(part.overrides(seam) for part in self.schemes())

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        found = self.base.facts(native_kept=native_kept, element=element)
        others = [part.facts(native_kept=True, element=element) for part in self.added_on]
        neutral = all(other.exact for other in others)
        if not native_kept and any(part.spares_first for part in self.added_on):
            # What stands for the native encoding would be gone from the first key.
            neutral = neutral and not self.base.overrides("score")
        per_token, per_sequence = (sum(part.state_bytes[index] for part in (found, *others)) for index in (0, 1))
        return replace(
            found,
            exact=found.exact and neutral,
            tolerance=found.tolerance if neutral else None,
            state_bytes=(per_token, per_sequence),
            sums_to_one=found.sums_to_one and all(other.sums_to_one for other in others),
        )

    def stock_equivalent(self) -> Equivalent:
        if all(isinstance(part.stock_equivalent(), Nothing) for part in self.added_on):
            if any(part.spares_first for part in self.added_on) and self.base.overrides("score"):
                raise ExportError(f"leaves the first key without {self.base.name}, which no stock model does")
            return self.base.stock_equivalent()
        # Tables of the distance are one table.
        bias = self.added() if self.base.added() is not None else None
        if isinstance(bias, DistanceTable):
            return bias
        raise ExportError("adds numbers to the logits that no stock model has next to the rest")

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

    def _get_name(self) -> str:
        return self.name


def options_of(name: str, kinds: Sequence[type[Scheme]]) -> dict[str, type[Scheme]]:
    """Return the part that takes each option of a scheme with add-ons, given the classes of its parts."""
    found: dict[str, type[Scheme]] = {}
    for kind in kinds:
        for option in option_names(kind):
            if option in found:
                raise OptionError(
                    f"{name}: two of its parts have an option {option!r}. Use the add-on with another scheme."
                )
            if option != "shared":
                found[option] = kind
    if sum(kind.weigh is not Scheme.weigh for kind in kinds) > 1:
        raise OptionError(f"{name}: two of its parts replace the softmax. Use the add-on with another scheme.")
    return found
