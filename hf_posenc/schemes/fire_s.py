from __future__ import annotations

from typing import Literal

from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.fire import FIRE


@register_scheme("fire_s", paper="2310.04418", family="additive")
class SharedFIRE(FIRE):
    """FIRE with one network for all layers of a stack (FIRE-S); the function is the same.

    Args:
        geometry: Shape of the layer.
        **options: Options of FIRE; `shared` is on by default.
    """

    _name = "fire_s"

    def __init__(
        self,
        geometry: Geometry,
        *,
        init_c: float = 0.1,
        threshold: float = 512.0,
        width: int = 32,
        init: Literal["paper", "zero"] = "paper",
        normalizer: Literal["both", "query"] = "both",
        directed: bool = False,
        gate: bool = False,
        shared: bool = True,
    ) -> None:
        super().__init__(
            geometry,
            init_c=init_c,
            threshold=threshold,
            width=width,
            init=init,
            normalizer=normalizer,
            directed=directed,
            gate=gate,
            shared=shared,
        )
