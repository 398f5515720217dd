from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_posenc.facts import Facts
from hf_posenc.operands import Block, Geometry
from hf_posenc.ops import softmax_of_seen
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme


@register_scheme("attention_sinks", paper="2508.10925", family="add-on")
class AttentionSinks(Scheme):
    """A learned logit per head that takes part in the softmax for no key (gpt-oss, OpenAI 2025).

    The weight of key j is `exp(l_j) / (exp(s_h) + sum over keys of exp(l))`, so weights sum to less than 1. Positions
    do not enter: `patch(model, "rope+attention_sinks")` adds it to another scheme, and `native="keep"` to the model's
    own encoding. It is not defined for schemes without a softmax.

    Parameters: `sinks` `[H]`.

    Args:
        sink_start: Logit of all sinks at the start.
    """

    def __init__(self, geometry: Geometry, *, sink_start: float = 0.0) -> None:
        super().__init__(geometry)
        self.sink_start = sink_start
        self.sinks = nn.Parameter(torch.empty(geometry.heads))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.sinks, self.sink_start)

    def weigh(self, logits: Tensor, block: Block) -> Tensor:
        low = torch.finfo(logits.dtype).min
        seen = logits if block.keep is None else logits.masked_fill(~block.keep, low)
        share = torch.sigmoid(seen.logsumexp(-1, keepdim=True) - self.sinks.to(logits)[:, None, None])
        return softmax_of_seen(logits, block.keep) * share

    def sink(self) -> Tensor:
        return self.sinks

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        return replace(super().facts(native_kept=native_kept, element=element), sums_to_one=False)
