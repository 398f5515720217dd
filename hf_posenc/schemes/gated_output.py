from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.errors import ShapeError
from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.layers import AnyDtypeLinear


@register_scheme("gated_output", paper="2505.06708", family="add-on")
class GatedOutput(Scheme):
    """A gate on the output of each head, a sigmoid of the hidden state (Qiu et al. 2025).

    `output = sigmoid(W x) * attention`, where x is the hidden state of the query's token that the projections read
    (position G1, equation 5). Positions do not enter: `patch(model, "rope+gated_output")` adds it to another scheme,
    and `native="keep"` to the model's own encoding.

    Parameters: `gate_proj.weight` `[H, E]`, or `[H D, E]` for gates per channel, without bias as in the official code.

    Starts: W = 0, where every gate is 1/2. `"exact"` doubles the gate, so that the start is an exact no-op and a gate
    lies between 0 and 2. `"official"` does not, and draws W from N(0, 0.02).

    Args:
        gate_per: One gate per `"head"`, or per `"channel"` of each head.
        gate_start: Start, see above.
    """

    neutral_options = {}

    def __init__(
        self,
        geometry: Geometry,
        *,
        gate_per: Literal["head", "channel"] = "head",
        gate_start: Literal["exact", "official"] = "exact",
    ) -> None:
        super().__init__(geometry)
        self.gate_per, self.gate_start = gate_per, gate_start
        gates = geometry.heads * (geometry.head_dim if gate_per == "channel" else 1)
        self.gate_proj = AnyDtypeLinear(geometry.hidden_size, gates, bias=False)

    def reset_parameters(self) -> None:
        if self.gate_start == "exact":
            nn.init.zeros_(self.gate_proj.weight)
        else:
            nn.init.normal_(self.gate_proj.weight, std=0.02)

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            raise ShapeError(f"{self.name} reads the hidden states of the queries' tokens. Pass attend(..., hidden=).")
        precise = torch.promote_types(output.dtype, torch.float32)
        with torch.autocast(output.device.type, enabled=False):
            gates: Tensor = self.gate_proj(hidden.to(precise)).sigmoid() * (2 if self.gate_start == "exact" else 1)
            gates = gates.view(*gates.shape[:2], self.geometry.heads, -1).transpose(1, 2)  # [B, H, Q, 1 | D]
            return (output.to(precise) * gates).to(output.dtype)

    def is_silent(self) -> bool:
        return self.gate_start == "exact" and not bool(self.gate_proj.weight.any())

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        return replace(
            super().facts(native_kept=native_kept, element=element), exact=native_kept and self.gate_start == "exact"
        )
