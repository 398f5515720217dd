"""Facts that a scheme states about itself, and its advice to recipes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a scheme in one layer, see `Scheme.facts`.

    Attributes:
        exact: Whether a freshly patched model computes the same function as before.
        tolerance: If not exact, a bound on how far logits of attention move at the start, over the model's whole
            context; `None` is a break without a bound.
        cautions: Warnings for a user who is about to give a model this scheme.
        state_bytes: Bytes cached per token, and once per sequence, for `Projection.state` and `recent`.
        end: First position that the scheme does not cover; `None` if it covers all.
        sums_to_one: Whether each row of the attention weights sums to 1.
    """

    exact: bool = False
    tolerance: float | None = None
    cautions: tuple[str, ...] = ()
    state_bytes: tuple[int, int] = (0, 0)
    end: int | None = None
    sums_to_one: bool = True

    @property
    def start(self) -> float | None:
        """The bound on how far logits move at the start: 0 is exact, `None` a break without a bound."""
        return 0.0 if self.exact else self.tolerance


@dataclass(frozen=True, eq=False, kw_only=True)
class Adaptation:
    """The way to bring a trained model to a scheme that does not start with what the model computes.

    Attributes:
        native: Fate of a native encoding of distances (a rotation): `"remove"`, `"keep"` or `"handover"`.
        fit: Target of a fit before training, if that is removed: `"native"`, `"transfer"` or none.
        options: Options of such a start.
        elsewhere: Fate of any other native encoding, such as a table of positions.
        windows: Options that are lengths, in training windows; they are rounded to whole tokens.
        reach: Trained lengths over which positions are to be spread in training, by skipping some; 0 is a scheme that
            knows the trained positions only.
        symmetric: Whether an encoder cannot tell its two directions apart.
        encoder: Options for encoders.
        rate: Factor of the learning rate of the scheme's weights in an attention transfer, and in a training that
            follows no fit. Numbers that are added to logits have far to go; weights that read hidden states have not.
        rate_width: Hidden size beyond which the rate falls in proportion, in every training; `None` is no fall. For
            matrices whose inputs hardly differ from token to token: each step of Adam moves all products alike.
    """

    native: Literal["remove", "keep", "handover"] = "remove"
    fit: Literal["native", "transfer"] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Literal["remove", "keep", "handover"] = "remove"
    windows: Mapping[str, float] = field(default_factory=dict)
    reach: int = 1
    symmetric: bool = False
    encoder: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1.0
    rate_width: int | None = None
