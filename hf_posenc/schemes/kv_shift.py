from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, set_start


@register_scheme("kv_shift", paper="2411.19574", family="add-on", directions=("causal",))
class KVShift(Scheme):
    """Keys and values mixed with those of the token before, by learned numbers per kv head (Xu et al. 2024).

    `k_j <- a k_j + b k_{j-1}` before any rotation, and likewise for values with numbers of their own; the key before
    the first token of a sequence is zero. So a head can look for what stood before a token, which is the first half of
    looking up: one layer does what two layers do otherwise.

    It is added to another scheme, `patch(model, "kerple+kv_shift")`, or with `native="keep"` to the model's own
    encoding. The cache holds mixed keys and values; for the last tokens it also holds the projected ones.

    Parameters: `key_shift` and `value_shift`, `[2, G]`: a and b for each kv head. They start at 1 and 0: an exact
    no-op.

    Args:
        kv_shift_history: Number of tokens for which a cache keeps projected keys and values; fewer than that can be
            taken back (assisted decoding takes back wrong guesses). One is enough for generation.
    """

    neutral_options = {}
    projects_first = True

    def __init__(self, geometry: Geometry, *, kv_shift_history: int = 64) -> None:
        super().__init__(geometry)
        self.require(kv_shift_history >= 1, "kv_shift_history", kv_shift_history, "at least 1 token")
        self.history = self.kv_shift_history = kv_shift_history
        self.key_shift = nn.Parameter(torch.empty(2, geometry.kv_heads))
        self.value_shift = nn.Parameter(torch.empty(2, geometry.kv_heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for shares in (self.key_shift, self.value_shift):
            set_start(shares, torch.tensor([1.0, 0.0])[:, None].expand_as(shares))

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        recent: dict[str, Tensor] = {}
        mixed = []
        for name, x, shares in (("shifted_keys", k, self.key_shift), ("shifted_values", v, self.value_shift)):
            fresh = x.transpose(1, 2)  # [B, S, G, D]
            before, needed = tokens.previous(fresh, name)
            recent |= needed
            precise = torch.promote_types(x.dtype, torch.float32)
            here, there = shares.to(x.device, precise)[..., None]
            mixed.append((here * fresh.to(precise) + there * before.to(precise)).to(x.dtype).transpose(1, 2))
        keys, values = mixed
        return Projection(q, keys, values, recent=recent)

    def is_silent(self) -> bool:
        shares = torch.stack((self.key_shift, self.value_shift))
        return bool((shares[:, 0] == 1).all()) and not bool(shares[:, 1].any())

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        values = self.geometry.kv_heads * self.geometry.head_dim * element
        state = (0, self.history * 2 * (values + 8))
        return replace(super().facts(native_kept=native_kept, element=element), exact=native_kept, state_bytes=state)
