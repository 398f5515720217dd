"""The share of a model's own rotation that stays under a scheme: its fastest pairs go on turning, the others stop.

Fast pairs tell neighbours apart, which a bias that falls with the distance cannot do: they are what copies and looks
up. Slow pairs carry far distances, and turn to angles that were never trained beyond the trained length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, shown
from hf_posenc.operands import Geometry
from hf_posenc.patches.record import NativeSetting

# `native="fast"` keeps the pairs that turn round at least so often within the trained length: YaRN leaves these as
# they are, too.
TURNS = 16


def resolve(native: Any, layers: Iterable[tuple[str, Geometry]], *, what: str, shares: bool) -> NativeSetting:
    """Return a setting as it is recorded.

    Args:
        native: `"remove"`, `"keep"`, `"fast"`, a share from 0 to 1, or a share for each type of layer.
        layers: Type and geometry of each chosen layer.
        what: The model's own encoding, in words.
        shares: Whether it can stay in part.
    """
    if native in ("remove", "keep"):
        return cast("NativeSetting", native)
    is_mapping = isinstance(native, Mapping) and all(map(_is_share, native.values()))
    if not (native == "fast" or _is_share(native) or is_mapping):
        raise OptionError(
            f"native={shown(native)}: expected 'remove' (the model's own encoding goes), 'keep', a share of its rotary "
            "pairs such as 0.375 (the fastest go on turning, the others stop), or 'fast' (those that turn at least "
            f"{TURNS} times within the trained length)."
        )
    rotating = {kind: geometry for kind, geometry in layers if _turning(geometry)}
    if not shares or not rotating:
        raise OptionError(
            f"native={shown(native)}: a share of the rotary pairs, and here positions come from a {what}. Use 'remove' "
            "or 'keep'."
        )
    if is_mapping and native.keys() != rotating.keys():
        kinds = ", ".join(map(repr, rotating)) if "" not in rotating else "only one, for which a number is enough"
        raise OptionError(f"native={shown(dict(native))}: the types of layers with a rotation are {kinds}.")
    found = {}
    for kind, geometry in rotating.items():
        assert geometry.inv_freq is not None
        pairs = len(geometry.inv_freq)
        if bool((geometry.inv_freq.diff() > 0).any()):
            raise OptionError(
                f"native={shown(native)}: the pairs of this model's rotation do not go from fast to slow. Use 'keep'."
            )
        count = _fast(geometry) if native == "fast" else round(pairs * (native[kind] if is_mapping else native))
        found[kind] = count / pairs
    return _plain(found)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _plain(shares: dict[str, float]) -> NativeSetting:
    """Return shares by type of layer in their shortest form."""
    if len({*shares.values()}) > 1:
        return shares
    share = next(iter(shares.values()))
    return "remove" if share == 0 else "keep" if share == 1 else share


def _turning(geometry: Geometry) -> bool:
    return geometry.inv_freq is not None and bool(geometry.inv_freq.any())


def _fast(geometry: Geometry) -> int:
    assert geometry.inv_freq is not None
    if geometry.max_positions is None:
        raise OptionError("native='fast': the config states no trained length. Give a share, such as native=0.375.")
    turns = geometry.inv_freq * geometry.max_positions / math.tau
    return int((turns >= TURNS).sum())


@dataclass(frozen=True)
class Share:
    """The rotation of a layer in which some pairs stand still.

    Attributes:
        turning: Number of pairs that turn, from the fastest on.
        pairs: Number of pairs that turn in the stock model.
        scaling: Factor of the rotation on queries and keys, which pairs that stand still have, too.
    """

    turning: int
    pairs: int
    scaling: float

    @property
    def words(self) -> str:
        """The share in words."""
        return f"{self.turning} of {self.pairs} rotary pairs"

    def of(self, cos: Tensor, sin: Tensor, step: int, strength: float) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B|1, S, columns]` of a stock rotation, in which the slow pairs stand still."""
        columns = torch.arange(cos.shape[-1], device=cos.device)
        still = (columns // step) % self.pairs >= self.turning
        return cos.masked_fill(still, 1 + strength * (self.scaling - 1)), sin.masked_fill(still, 0)


def share_of(native: NativeSetting, kind: str, geometry: Geometry) -> Share | None:
    """Return the share of a layer's rotation that stays; `None` if all of it does, or there is none."""
    if isinstance(native, str) or not _turning(geometry):
        return None
    assert geometry.inv_freq is not None
    if isinstance(native, Mapping) and kind not in native:
        raise OptionError(f"native={shown(dict(native))} has no share for layers of the type {kind!r}.")
    share, pairs = native[kind] if isinstance(native, Mapping) else native, len(geometry.inv_freq)
    return None if share == 1 else Share(round(share * pairs), pairs, geometry.rotary_scaling)


def with_share(geometry: Geometry, native: NativeSetting, kind: str) -> Geometry:
    """Return the geometry of a layer in which the slow pairs stand still."""
    share = share_of(native, kind, geometry)
    if share is None:
        return geometry
    still = torch.arange(share.pairs) >= share.turning
    own, later = geometry.inv_freq, geometry.inv_freq_long
    assert own is not None
    later = None if later is None else later.masked_fill(still, 0)
    return replace(geometry, inv_freq=own.masked_fill(still, 0), inv_freq_long=later)


def described(native: NativeSetting, layers: Iterable[tuple[str, Geometry]]) -> str:
    """Return a setting in words, such as "12 of 32 rotary pairs"."""
    if isinstance(native, str):
        return native
    found = {kind: share.words for kind, geometry in layers if (share := share_of(native, kind, geometry))}
    if len({*found.values()}) == 1 and (len(found) == 1 or not isinstance(native, Mapping)):
        return next(iter(found.values()))
    return ", ".join(f"{words} in {kind}" for kind, words in found.items())
