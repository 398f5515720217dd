"""The reference: all rows at once, straight from the seams. Every other executor must equal it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.call import Call, Executor
from hf_posenc.operands import Block
from hf_posenc.ops import grouped_matmul


class Dense(Executor):
    """All rows at once. It runs any call."""

    name = "dense"
    learns_masks = traces = True

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output `[B, H, Q, D]` and the weights `[B, H, Q, K]`, in the dtype of the values."""
        if torch.compiler.is_compiling():
            return all_rows(call)  # to cut keys would bind a graph to its lengths
        keys = call.mask.keys_needed(call.queries, call.keys)
        return all_rows(call if keys == call.keys else call.part(0, call.queries, keys))


def all_rows(call: Call) -> tuple[Tensor, Tensor]:
    """Return output and weights of all queries and keys of a call."""
    keep, bias = call.mask.seen(call.positions)
    block = call.block(keep)
    return from_logits(call, block, logits_of(call, block), bias)


def from_logits(
    call: Call, block: Block, found: tuple[Tensor, Tensor, Tensor], bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same, given the logits, queries and keys that `logits_of` found."""
    logits, q, k = found
    logits = call.scheme.score(logits, q, k, block)
    if bias is not None:
        # After the scheme, which may do more with logits than add to them.
        logits = logits + bias
    weights = call.scheme.weigh(logits, block)
    if call.sinks is not None:
        # A softmax with one more logit, whose weight is dropped. Weights by any other rule lose the same share.
        seen = logits if block.keep is None else logits.masked_fill(~block.keep, -torch.inf)
        weights = weights * torch.sigmoid(seen.logsumexp(-1, keepdim=True) - call.sinks[:, None, None])
    weights = weights.to(call.v.dtype)
    if call.dropout:
        weights = F.dropout(weights, call.dropout)
    keys = k.shape[2]
    seen = weights
    if weights.shape[-1] > keys:
        # `mix` must read what is returned, or no gradient reaches it.
        seen = weights[..., :keys]
        weights = torch.cat((seen, weights[..., keys:]), dim=-1)
    return call.scheme.mix(weights, call.v, block), seen


def logits_of(call: Call, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of `Scheme.score`: scaled logits `[B, H, Q, K]`, queries and keys."""
    q, k = call.q, call.k
    if call.upcast:
        q, k = q.to(call.precise), k.to(call.precise)
    logits = grouped_matmul(q, k.transpose(-1, -2)).to(call.precise) * call.scale
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    if call.native_score is not None:
        logits = call.native_score(logits, block)
    # With `upcast`, the scheme gets the widened operands, too.
    return logits, q if call.content_q is None else call.content_q, k if call.content_k is None else call.content_k
