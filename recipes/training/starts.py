"""Parts that all fits of a start share: windows of text, restoring of weights, and the verdict."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import OptionError, ShapeError, shown
from hf_posenc.operands import LARGEST_COUNT, is_count, is_number
from hf_posenc.patches.patch import evaluating

logger = logging.getLogger(__name__)


def check_windows(caller: str, model: PreTrainedModel, ids: object, *, least: int) -> None:
    """Raise `ShapeError` unless `ids` are windows `[N, S]`, S >= `least`, of tokens in the model's vocabulary."""
    expected = f"expected [windows, tokens], integers, at least 1 of at least {least}"
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        got = f"is of dtype {ids.dtype}" if isinstance(ids, Tensor) else f"is of type {type(ids).__name__}"
        raise ShapeError(f"{caller}: ids {got}; {expected}.")
    if ids.dim() != 2 or ids.shape[1] < least or not len(ids):
        raise ShapeError(f"{caller}: ids has the shape {list(ids.shape)}; {expected}.")
    known = model.get_input_embeddings().weight.shape[0]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= known:
        raise ShapeError(
            f"{caller}: ids has token {low if low < 0 else high}; expected 0 to {known - 1}, the vocabulary of the "
            "model. Tokenise the text with its own tokenizer."
        )


def check_counts(caller: str, **given: tuple[object, int]) -> None:
    """Raise `OptionError` unless each argument, given with its least value, is a whole number that is not huge."""
    for name, (value, least) in given.items():
        if not (is_count(value) and isinstance(value, int) and value >= least):
            raise OptionError(
                f"{caller}({name}={shown(value)}): expected a whole number of at least {least} and at most "
                f"{LARGEST_COUNT:,}."
            )


def check_rates(caller: str, **given: object) -> None:
    """Raise `OptionError` unless each argument is a learning rate or `None`."""
    for name, value in given.items():
        if not (value is None or (is_number(value) and isinstance(value, int | float) and value > 0)):
            raise OptionError(f"{caller}({name}={shown(value)}): expected a positive learning rate, or None.")


def held_out(windows: int, *, most: int) -> int:
    """Return how many windows at the end judge a fit: a quarter, at most `most`; 0 of a single window."""
    return min(most, math.ceil(windows / 4)) if windows > 1 else 0


def verdict(fitted: str, measure: str, before: float, after: float) -> tuple[bool, str]:
    """Judge a fit: whether it lowered a measure on held-out samples, and the sentence that says so.

    A start that is not accepted is also logged, since the caller gets its model back as it was.
    """
    # A measure that is no number is no improvement.
    accepted = after < before
    change = f"the {measure} on held-out samples went from {before:.4g} to {after:.4g}"
    if accepted:
        return True, f"{fitted}: the start is fitted; {change}."
    sentence = f"{fitted}: the start was not changed, since fitting did not improve it: {change}."
    logger.warning("%s", sentence)
    return False, sentence


@torch.no_grad()
def mean_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Return the mean loss of windows, read one at a time to save memory; `inputs` are arguments of the forward."""
    device = next(model.parameters()).device
    with evaluating(model):
        rows = zip(*(tensor.to(device) for tensor in inputs.values()), strict=True)
        losses = [model(**{name: x[None] for name, x in zip(inputs, row, strict=True)}).loss for row in rows]
    return float(torch.stack(losses).float().mean())


@contextlib.contextmanager
def kept(weights: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Yield a function that restores the weights bit for bit, which an error does too; leave no gradients on them."""
    values = [weight.detach().clone() for weight in weights]

    def put_back() -> None:
        with torch.no_grad():
            for weight, value in zip(weights, values, strict=True):
                weight.copy_(value)

    try:
        yield put_back
    except BaseException:
        put_back()
        raise
    finally:
        for weight in weights:
            weight.grad = None
