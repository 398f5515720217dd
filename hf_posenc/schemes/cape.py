from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from hf_posenc.facts import Adaptation, Facts
from hf_posenc.operands import Block, Geometry
from hf_posenc.registry import get, register_scheme
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.additive import AdditiveBias
from hf_posenc.schemes.families.layers import PairNetwork
from hf_posenc.schemes.fire import FIRE
from hf_posenc.schemes.nope import NoPE

_SLOPE = 0.01


class LeakyFIRE(FIRE):
    """FIRE as in the official code of CAPE: its network has LeakyReLU."""

    _negative_slope = _SLOPE


@register_scheme("cape", paper="2405.14722", family="additive")
class CAPE(Scheme):
    """A bias of the distance, adapted to the content by a network across heads (Zheng et al. 2024; also called DAPE).

    With the scaled logits A and a base bias B, at each query and key, over all heads:

        logit = A + B + f([A; B])        f = Linear(2H, width), LeakyReLU(0.01), Linear(width, H)

    Masks come after f. A includes a kept native encoding. The computation is in float32 or wider.

    Parameters: `mlp2.0`, `mlp2.2` and those of the base (`base_bias`), one set per layer.

    Args:
        base: Scheme that gives B, with its default options: `"kerple"`, `"alibi"`, `"t5"`, `"t5_clipped"`,
            `"sandwich"`, `"fire"` (with LeakyReLU, as in the official code), or `"nope"`: no B, `logit = A + f(A)`.
        form: Combination of A, B and f: `"concat_residual"` is the formula above; the paper's ablations are `"add"`,
            `A + f(A + B)`, and `"add_residual"`, `A + B + f(A + B)`.
        mlp_width: Hidden width of f.
        init: Start: `"paper"` is torch's default for linear layers; `"zero"` sets the last layer to zero and, where B
            is added to the logits, gives the base its own neutral start: a no-op if the native encoding is kept.
    """

    neutral_options = {"init": "zero"}
    adaptation = Adaptation(native="keep", options={"init": "zero"}, elsewhere="handover")

    def __init__(
        self,
        geometry: Geometry,
        *,
        base: Literal["alibi", "kerple", "fire", "t5", "t5_clipped", "sandwich", "nope"] = "kerple",
        form: Literal["concat_residual", "add", "add_residual"] = "concat_residual",
        mlp_width: int = 32,
        init: Literal["paper", "zero"] = "paper",
    ) -> None:
        super().__init__(geometry)
        self.require(mlp_width >= 1, "mlp_width", mlp_width, "at least 1")
        self.require(base != "nope" or form == "concat_residual", "form", form, "'concat_residual' with base='nope'")
        self.base, self.form, self.mlp_width, self.init = base, form, mlp_width, init
        self.base_bias = self._make_base()
        heads = geometry.heads
        width = 2 * heads if form == "concat_residual" and base != "nope" else heads
        self.mlp2 = PairNetwork(width, mlp_width, heads, negative_slope=_SLOPE, residual=form != "add")

    def reset_parameters(self) -> None:
        self.mlp2.reset_parameters()
        if self.init == "zero":
            self.mlp2.silence()

    def _make_base(self) -> AdditiveBias | None:
        if self.base == "nope":
            return None
        kind: Any = LeakyFIRE if self.base == "fire" else get(self.base).cls
        # If B reaches the logits only through f, a neutral f suffices, and a neutral base could not learn behind it.
        neutral = self.init == "zero" and self.form != "add"
        made: AdditiveBias = kind(self.geometry, shared=False, **(kind.neutral_options if neutral else {}))
        return made

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            if self.base_bias is None:
                return self._network(logits)
            bias: Tensor = self.base_bias(type(self.base_bias).gated_bias, block, logits)  # [B|1, H, q, K]
            if self.form == "concat_residual":
                return self._network(logits, bias)
            biased = self._network(logits + bias)
            return logits + biased if self.form == "add" else biased

    def _network(self, *inputs: Tensor) -> Tensor:
        """Return f of all inputs `[B|1, H, q, K]`, plus their sum in the residual forms, `[B, H, q, K]`."""
        mixed: Tensor = self.mlp2(*(x.flatten(2) for x in inputs))
        return mixed.view(inputs[0].shape)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        found = super().facts(native_kept=native_kept, element=element)
        if self.base != "nope":
            return found
        return replace(found, cautions=NoPE(self.geometry).facts(native_kept=native_kept).cautions)

    def is_silent(self) -> bool:
        return self.mlp2.is_silent() and (self.base_bias is None or self.form == "add" or self.base_bias.is_silent())
