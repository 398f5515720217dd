from hf_posenc.registry import register_scheme
from hf_posenc.schemes.fire import FIRE


@register_scheme("fire_s", paper="2310.04418", family="additive")
class SharedFIRE(FIRE):
    """FIRE with one network for all layers of a stack (FIRE-S); the function is the same."""

    _shared = True
