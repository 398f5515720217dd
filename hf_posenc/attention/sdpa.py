"""Plain scaled dot-product attention, for schemes that change only its inputs (rotations, input encodings)."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.call import FEWEST_QUERIES, Call, Executor
from hf_posenc.derivatives import ending
from hf_posenc.forms import Folded
from hf_posenc.scheme import Scheme

# Minimum number of queries of a call, where a window leaves many keys out.
_FEWEST_ROWS = 256


class Sdpa(Executor):
    """torch's own function, on operands that the scheme has folded its positions into where it acts on the matrix."""

    name = "sdpa"
    learns_masks = traces = True
    refusal = "the model's own encoding is in the logits, or queries are too far apart"

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        return not touches_the_matrix(scheme) or scheme.folded() is not None

    def pays(self, call: Call) -> bool:
        # To fold all keys and values again takes longer than a few queries gain.
        # A graph of any length has one form.
        one = torch.compiler.is_exporting()
        return one or call.scheme.folded() is None or call.queries >= FEWEST_QUERIES

    def computes(self, call: Call) -> bool:
        if call.native_score is not None or call.reshaped:
            return False
        folded = call.scheme.folded() if touches_the_matrix(call.scheme) else None
        return folded is None or _folds(folded, call)

    def run(self, call: Call) -> tuple[Tensor, None]:
        folded, dtype = call.scheme.folded(), call.v.dtype
        if folded is not None:
            # Factors that overflow half precision are folded in float32.
            q, k, v = folded.of(call.q, call.k, call.v, call.block(None))
            call = replace(call, q=q, k=k, v=v)
        return plain(call).to(dtype), None


def plain(call: Call) -> Tensor:
    """Return the output of torch's own function on the operands of a call."""
    mask = call.mask
    if mask.window is None or call.queries <= mask.window or torch.compiler.is_compiling():
        return _rows(call)
    # So many rows as a window has keys see the keys of two windows.
    blocks = call.blocks(max(mask.window, _FEWEST_ROWS))
    return torch.cat([_rows(call.part(*rows)) for rows in blocks], dim=2)


def _rows(call: Call) -> Tensor:
    q, k, v = call.q, call.k, call.v
    length, width = q.shape[2], v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))  # the fast kernels take operands of one width
    if call.mask.only_ahead and (length == 1 or not call.mask.ahead):
        mask, causal = None, False
        # While torch compiles, `length > 1` is a symbol, which torch's attention does not take for a bool.
        if length > 1:
            causal = True
    else:
        (keep, bias), causal = call.mask.seen(call.positions), False
        if bias is None:
            mask = keep
        else:
            low = q.new_full((), float("-inf"))
            mask = bias.to(q.dtype) if keep is None else bias.to(q.dtype).where(keep, low)
    if not torch.compiler.is_compiling():
        q, k, v = map(ending, (q, k, v))
        mask = None if mask is None else ending(mask)
    output = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return output[..., :width].to(call.v.dtype)


def touches_the_matrix(scheme: Scheme) -> bool:
    """Whether the scheme does anything between `q @ k.T` and the output."""
    return any(scheme.overrides(seam) for seam in ("score", "weigh", "mix"))


def _folds(folded: Folded, call: Call) -> bool:
    """Whether plain attention over the folded operands is all that the scheme does in this call."""
    if call.content_q is not None:
        return False
    if call.queries == 1 or call.reach <= folded.span:
        return True
    # A graph that is being compiled has no numbers.
    query = call.positions.query
    return not torch.compiler.is_compiling() and int((query.amax(1) - query.amin(1)).max()) <= folded.span
