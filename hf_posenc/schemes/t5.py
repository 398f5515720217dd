from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.additive import Buckets, LearnedTable, learned_table_start


@register_scheme("t5", paper="1910.10683", family="additive")
class T5Bias(LearnedTable):
    """A learned bias per head for logarithmic buckets of the distance (Raffel et al. 2020, section 2.1).

    Parameter `weight` `[num_buckets, H]`. Half of the buckets hold single distances; the others grow up to
    `max_distance`, and distances beyond share the last one. Encoders split the buckets between both sides.

    Args:
        num_buckets: Rows of the table; `None` is the size of the model's own table, else 32.
        max_distance: Approximate begin of the last bucket; `None` is the model's own, else 128.
        init: Start: `"native"` copies the model's own table, `"normal"` draws N(0, 1 / sqrt(E)), `"zero"` is a no-op;
            `"auto"` is `"native"` if the model has such a table, else `"normal"`.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_buckets: int | None = None,
        max_distance: int | None = None,
        init: Literal["auto", "native", "normal", "zero"] = "auto",
        gate: bool = False,
        shared: bool | None = None,
    ) -> None:
        native = self.own_table(geometry)
        super().__init__(geometry, gate=gate, shared=shared)
        if num_buckets is None:
            num_buckets = 32 if native is None else native.weight.shape[0]
        if max_distance is None:
            max_distance = 128 if native is None else native.max_distance
        assert max_distance is not None
        least = 2 if geometry.causal else 4
        even = num_buckets >= least and num_buckets % 2 == 0
        self.require(even, "num_buckets", num_buckets, f"an even number, at least {least} in this direction")
        exact = num_buckets // (2 if geometry.causal else 4)
        self.require(max_distance > exact, "max_distance", max_distance, f"more than {exact}")
        fits = (
            native is not None
            and native.weight.shape == (num_buckets, geometry.heads)
            and native.max_distance == max_distance
        )
        if init == "auto":
            init = "native" if fits else "normal"
        self.require(init != "native" or fits, "init", init, "'normal' or 'zero': the model has no such table")
        self.num_buckets, self.max_distance, self.init = num_buckets, max_distance, init
        self._buckets = Buckets(num_buckets=num_buckets, max_distance=max_distance, causal=geometry.causal)
        self.weight = nn.Parameter(torch.empty(num_buckets, geometry.heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        learned_table_start(self.init, self.weight, self.geometry.native, std=self.geometry.hidden_size**-0.5)

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        index = self._buckets(distance).to(self.weight.device)
        return self.weight.to(dtype).index_select(0, index).T
