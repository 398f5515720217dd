from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionError
from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.additive import learned_table_start
from hf_posenc.structures import Adaptation, Equivalent, Nothing, PositionTable


@register_scheme("learned", paper="1705.03122", family="absolute")
class Learned(Scheme):
    """A learned vector per position, added to the token embeddings (Gehring et al. 2017; GPT-2).

    Args:
        num_positions: Rows of the table; `None` is the size of the model's own table, else its trained length.
        init: Start: `"native"` copies the model's own table, `"normal"` draws N(0, 0.02), `"zero"` is a no-op; `"auto"`
            is `"native"` if the model has a learned table of that size, else `"normal"`.
    """

    reproduces = "learned"
    neutral_options = {"init": "zero"}
    adaptation = Adaptation(native="handover", options={"init": "zero"}, reach=0)
    shared = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_positions: int | None = None,
        init: Literal["auto", "native", "normal", "zero"] = "auto",
    ) -> None:
        super().__init__(geometry)
        native = geometry.native_table("learned")
        if num_positions is None:
            num_positions = native.weight.shape[0] if native is not None else geometry.max_positions
        some = num_positions is not None and num_positions >= 1
        expected = "a number of rows, at least 1 (needed where the model states no length of its own)"
        self.require(some, "num_positions", num_positions, expected)
        assert num_positions is not None
        fits = native is not None and native.weight.shape[0] == num_positions
        if init == "auto":
            init = "native" if fits else "normal"
        expected = f"'normal' or 'zero': the model has no learned table of {num_positions} positions"
        self.require(init != "native" or fits, "init", init, expected)
        self.num_positions, self.init = num_positions, init
        self.wpe = nn.Embedding(num_positions, geometry.hidden_size)

    def reset_parameters(self) -> None:
        learned_table_start(self.init, self.wpe.weight, self.geometry.native, std=0.02)

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

    def end_of_positions(self) -> int:
        return self.num_positions

    def stock_equivalent(self) -> Equivalent:
        table = self.wpe.weight.detach()
        return Nothing() if self.is_silent() else PositionTable(lambda rows: table[:rows], self.num_positions)

    def is_silent(self) -> bool:
        return not bool(self.wpe.weight.any())

    def starts_exact(self, *, native_kept: bool) -> bool:
        return self.init == ("zero" if native_kept else "native")
