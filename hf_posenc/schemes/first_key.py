from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import Bias, KeyBias, first_of
from hf_posenc.operands import Block, Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme


@register_scheme("first_key", paper="2309.17453", family="add-on")
class FirstKey(Scheme):
    """No bias on the first key of a text, where models put the attention that they do not need (an attention sink).

    It is added to another scheme: `patch(model, "kerple+first_key")`. What that one adds to the logits of the key at
    position 0 is left out, whatever the distance; a learned number per head is added instead. A bias that falls with
    the distance would else take the sink away from later tokens.

    Alone, with `native="keep"`, it is that number only.

    Parameters: `offsets` `[H]`.
    """

    neutral_options = {}
    adaptation = Adaptation(rate=8)
    spares_first = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.offsets = nn.Parameter(torch.empty(geometry.heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.offsets)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self._bias(block, logits)

    def added(self) -> Bias | None:
        return KeyBias(self._bias, self._products) if self.geometry.causal else Bias(self._bias)

    def _bias(self, block: Block, like: Tensor) -> Tensor:
        first = first_of(block.positions.key).to(like.device)[:, None, None]
        return (self.offsets.to(like)[:, None, None] * first).expand(-1, -1, block.positions.query.shape[1], -1)

    def _products(self, block: Block) -> list[tuple[Tensor | None, Tensor | None]]:
        first = first_of(block.positions.key)[:, None].to(self.offsets.device)
        return [(self.offsets[:, None].expand(-1, block.positions.query.shape[1])[None], first)]

    def is_silent(self) -> bool:
        return not bool(self.offsets.any())

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        return replace(super().facts(native_kept=native_kept, element=element), exact=native_kept)
