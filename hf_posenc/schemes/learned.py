import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.equivalents import Equivalent, Nothing, PositionTable
from hf_posenc.errors import PositionError
from hf_posenc.facts import Adaptation, Facts
from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, draw_start, set_start


@register_scheme("learned", paper="1705.03122", family="absolute")
class Learned(Scheme):
    """A learned vector per position, added to the token embeddings (Gehring et al. 2017; GPT-2).

    Args:
        num_positions: Rows of the table; `None` is the size of the model's own table, else its trained length.
        init: Start: `"native"` takes over the model's own table, `"normal"` draws N(0, 0.02), `"zero"` is a no-op;
            `"auto"` is `"native"` if the model has a learned table from which one of that size can be made, else
            `"normal"`.
        growth: Way to another size: `"extend"` keeps its rows and draws those behind them from N(0, 0.02), so that the
            start is exact within the old length; `"interpolate"` spreads it over the new length. The table of an image
            is interpolated on its grid, as in transformers, to another square, and cannot be extended.
    """

    reproduces = ("learned",)
    neutral_options = {"init": "zero"}
    adaptation = Adaptation(native="handover", options={"init": "zero"}, reach=0)
    shared = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_positions: int | None = None,
        init: Literal["auto", "native", "normal", "zero"] = "auto",
        growth: Literal["extend", "interpolate"] = "extend",
    ) -> None:
        super().__init__(geometry)
        native = geometry.native_table("learned")
        self._trained = 0 if native is None else native.weight.shape[0]
        if num_positions is None:
            num_positions = self._trained or geometry.max_positions
        some = num_positions is not None and num_positions >= 1
        expected = "a number of rows, at least 1 (needed where the model states no length of its own)"
        self.require(some, "num_positions", num_positions, expected)
        assert num_positions is not None
        grid = geometry.axes == 2
        fits = num_positions == self._trained or not grid
        if growth == "interpolate" and grid:
            fits = all(rows > 1 and math.isqrt(rows - 1) ** 2 == rows - 1 for rows in (num_positions, self._trained))
        fits = fits and self._trained > 0
        if init == "auto":
            init = "native" if fits else "normal"
        expected = f"'normal' or 'zero': the model has no learned table that can have {num_positions} positions"
        self.require(init != "native" or fits, "init", init, expected)
        self.num_positions, self.init, self.growth = num_positions, init, growth
        self.wpe = nn.Embedding(num_positions, geometry.hidden_size)

    def reset_parameters(self) -> None:
        native, new = self.geometry.native_table("learned"), self.wpe.weight
        if self.init != "native" or native is None or native.weight.is_meta:
            # A table on the meta device has no values: the start is noise, as the model's own table would be.
            draw_start(new, self.init, std=0.02)
        elif self.growth == "interpolate" and self._trained != self.num_positions:
            set_start(new, _interpolated(native.weight.detach(), len(new), grid=self.geometry.axes == 2))
        else:
            rows = native.weight.detach()[: len(new)].to(new)
            later = torch.empty(len(new) - len(rows), new.shape[1]).normal_(std=0.02)
            set_start(new, torch.cat((rows, later.to(rows))))

    def embed(self, inputs: Tensor, positions: Tensor, coords: Tensor | None = None) -> Tensor:
        # A traced graph has no numbers; the lookup refuses rows that are not there.
        traced = torch.compiler.is_compiling()
        if not traced and positions.numel() and int(positions.max()) >= self.num_positions:
            raise PositionError(
                f"Position {int(positions.max())} is beyond the learned table of {self.num_positions} positions. Use "
                "shorter inputs, or patch with a larger num_positions."
            )
        weight = self.wpe.weight
        # For an offloaded table (meta device), accelerate moves table and positions.
        table: Tensor = self.wpe((positions if weight.is_meta else positions.to(weight.device)).long())
        return inputs + table.to(inputs)

    def stock_equivalent(self) -> Equivalent:
        table = self.wpe.weight.detach()
        return Nothing() if self.is_silent() else PositionTable(lambda rows: table[:rows], self.num_positions)

    def is_silent(self) -> bool:
        return not bool(self.wpe.weight.any())

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        spread = self.growth == "interpolate"
        exact = self.init == "native" and not (spread and self._trained != self.num_positions)
        cautions: tuple[str, ...] = ()
        if self.init == "native" and self.num_positions > self._trained and not spread:
            new = f"{self._trained:,} to {self.num_positions - 1:,}"
            cautions = (
                f"The rows of positions {new} are new: the start is exact up to them, and they have to be trained.",
            )
        return Facts(exact=self.init == "zero" if native_kept else exact, cautions=cautions, end=self.num_positions)


def _interpolated(table: Tensor, count: int, *, grid: bool) -> Tensor:
    """Return a table `[count, E]` that has the first and last row of another, or its class token and grid."""
    columns = table.T[None].float()  # [1, E, N]
    if not grid:
        return F.interpolate(columns, size=count, mode="linear", align_corners=True)[0].T
    old, new = math.isqrt(len(table) - 1), math.isqrt(count - 1)
    patches = F.interpolate(columns[..., 1:].reshape(1, -1, old, old), size=(new, new), mode="bicubic")
    return torch.cat((table[:1].float(), patches.flatten(2)[0].T))
