"""Loss of a causal language model on long windows, whose head reads a few tokens at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_posenc.patches.inspection import replaced
from hf_posenc.patches.patch import evaluating

# Numbers of logits that there are at once: 0.5 GB of them in float32.
AT_ONCE = 2**27
# Numbers of logits that a divergence is computed of at once; on a GPU each piece costs launches of kernels.
_NUMBERS_AT_ONCE, _NUMBERS_ON_DEVICE = 2**20, 2**26
# Label of a token that does not count.
_IGNORED = -100


@dataclass(frozen=True)
class Readout:
    """A causal language model whose loss reads what its head writes, and nothing else.

    Such a loss can be computed piece by piece. All logits of 32,768 tokens, for a vocabulary of 49,152, would take 6 GB
    in float32, and a training step would hold them several times.

    Attributes:
        model: The model.
        head: Its output embeddings.
    """

    model: PreTrainedModel
    head: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> Readout | None:
        """Return the readout of a model, which may be wrapped; `None` if it has none.

        A forward of two tokens decides, since some models scale or bound their logits behind the head.
        """
        inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        head = None if inner is None else inner.get_output_embeddings()
        if inner is None or head is None or inner.loss_function is not ForCausalLMLoss:
            return None
        found, seen = cls(inner, head), list[Tensor]()
        ids = torch.zeros(1, 2, dtype=torch.long, device=inner.device)

        def loss(logits: Tensor, *others: Any, **more: Any) -> Tensor:
            seen.append(logits)
            return logits.sum()

        devices = [ids.device] if ids.device.type == "cuda" else []
        with contextlib.ExitStack() as stack:
            for each in (torch.random.fork_rng(devices), torch.no_grad(), evaluating(model), found.losing(loss)):
                stack.enter_context(each)
            read = stack.enter_context(found.withheld())
            with contextlib.suppress(Exception):
                inner(input_ids=ids, labels=ids, use_cache=False)
        return found if len(seen) == len(read) == 1 and seen[0] is read[0] else None

    @contextlib.contextmanager
    def withheld(self) -> Iterator[list[Tensor]]:
        """Let the head hand on the states `[B, S, E]` that it reads, so that they are the logits; yield their list."""
        read: list[Tensor] = []

        def forward(states: Tensor) -> Tensor:
            read.append(states)
            return states

        with replaced(self.head, "forward", forward):
            yield read

    def losing(self, loss: Callable[..., Tensor]) -> AbstractContextManager[None]:
        return replaced(self.model, "_loss_function", loss)


class PiecewiseLoss:
    """Loss function of a model whose head is withheld: on the text, and on the predictions of a teacher.

    The backward pass computes the logits of a piece again, so that no more than those of one piece are in memory.

    Args:
        readout: Model and head.
        taught: Last states of the teacher, `[B, S, E]`; `None` without one.
        predict: Function from these states to the teacher's logits.
        keep: Mask of the tokens that count for the teacher, `[B, S]`; `None` counts all.
        share: Share by which the loss on the text is reduced.
        weight: Weight of the mean divergence from the teacher.

    Attributes:
        text: Loss on the text alone, after a call.
    """

    def __init__(
        self,
        readout: Readout,
        taught: Tensor | None = None,
        predict: Callable[[Tensor], Tensor] | None = None,
        *,
        keep: Tensor | None = None,
        share: float = 0.0,
        weight: float = 0.0,
    ) -> None:
        self._readout, self._predict, self._share, self._weight = readout, predict, share, weight
        self._withheld = contextlib.ExitStack()
        self._wanted: tuple[Tensor, ...] = ()
        if taught is not None:
            every = torch.ones(taught.shape[:2], device=taught.device)
            self._wanted = (taught, every if keep is None or keep.shape != every.shape else keep.to(every))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Withhold the head up to the loss, and take the place of the model's loss function."""
        with self._readout.losing(self), self._withheld:
            self._withheld.enter_context(self._readout.withheld())
            yield

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Return the loss from the last states `[B, S, E]`, which stand where logits would; see `ForCausalLMLoss`."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        self._withheld.close()
        given = (logits, shift_labels.to(logits.device), *self._wanted)
        size = max(1, AT_ONCE // vocab_size)
        pieces = zip(*(torch.split(each.flatten(0, 1), size) for each in given), strict=True)
        sums: Any = sum(checkpoint(self._of_piece, *piece, use_reentrant=False) for piece in pieces)
        count = (given[1] != _IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        text: Tensor = sums[0] / count
        self.text = text.detach()
        if self._wanted:
            mean: Tensor = sums[1] / self._wanted[1].sum().clamp_min(1)
            text = (1 - self._share) * text + self._weight * mean
        return text

    def _of_piece(self, states: Tensor, targets: Tensor, *wanted: Tensor) -> Tensor:
        """Return the sums over the tokens of a piece: the loss on the text, and the divergence from the teacher."""
        logits = self._readout.head(states)
        # Without a weight, the gradient of the text would be computed for nothing.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._share < 1):
            text = F.cross_entropy(logits.float(), targets, ignore_index=_IGNORED, reduction="sum")
        far = torch.zeros_like(text)
        if wanted and self._predict is not None:
            there, keep = wanted
            far = (divergences(logits, self._predict(there)) * keep).sum()
        return torch.stack([text, far])


def divergences(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the KL divergence of the logits of each token from the teacher's, `[..., vocabulary]` twice to `[...]`."""
    return cast(Tensor, _Divergence.apply(logits, wanted))  # type: ignore[no-untyped-call]


class _Divergence(torch.autograd.Function):
    """KL divergence of each token, `[..., vocabulary]` twice to `[...]`, of which the first has a gradient.

    It goes through a few tokens at a time and keeps the gradient alone. All log-probabilities at once take several
    times the memory of the logits, and as long as a quarter of the training step of a model of 135M parameters.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        slopes, found = torch.empty_like(logits, memory_format=torch.contiguous_format), []
        at_once = _NUMBERS_AT_ONCE if logits.device.type == "cpu" else _NUMBERS_ON_DEVICE
        size = max(1, at_once // logits.shape[-1])
        pieces = (torch.split(x.flatten(0, -2), size) for x in (logits, wanted, slopes))
        for one, other, slope in zip(*pieces, strict=True):
            # At least float32, since the differences of log-probabilities are small.
            exact = torch.promote_types(one.dtype, torch.float32)
            got, target = (F.log_softmax(x, dim=-1, dtype=exact) for x in (one, other))
            probability = target.exp()
            found.append(target.sub_(got).mul_(probability).sum(-1))
            slope.copy_(got.exp_().sub_(probability))
        ctx.save_for_backward(slopes)
        return torch.cat(found).view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradients[0][..., None].to(slopes.dtype), None
