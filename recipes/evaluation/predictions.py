"""One forward of a language model: what it predicts for given tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.errors import PositionError
from hf_posenc.recipes.evaluation.curve import logits_of_targets
from hf_posenc.recipes.evaluation.lengths import table_end

# Positions whose logits are in double precision at a time.
_PART = 256


def predictions(model: Any, read: Tensor, labels: Tensor) -> Tensor:
    """Return the logits with which a model predicts each label, given all tokens before it.

    Args:
        model: A language model of transformers.
        read: Token ids. Of a causal model, what is read before the last label, so that it ends with the last label but one;
            of an encoder-decoder, what the encoder reads. int64 `[B, n]`.
        labels: Token ids to predict, int64 `[B, m]`.

    Returns:
        Logits `[B, m, vocabulary]`, on the model's device.

    Raises:
        PositionError: The model has no encoding for positions that far.
    """
    end = table_end(model)
    message = (
        f"The {type(model).__name__} cannot read {read.shape[1]} tokens: its position table is shorter. "
        "Leave out the longer inputs."
    )
    if end is not None and max(read.shape[1], labels.shape[1]) > end:
        raise PositionError(message)
    try:
        return logits_of_targets(model, read.to(model.device), labels.to(model.device), labels.shape[1])
    except IndexError as error:
        raise PositionError(message) from error


def answer_predictions(model: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    """Return the logits with which a model predicts each token of an answer, given the prompt and the answer before it.

    Args:
        model: Causal: it reads both, one after the other. Encoder-decoder: it reads the prompt, and writes the answer.
        prompt: int64 `[B, n]`.
        answer: int64 `[B, m]`.

    Returns:
        Logits `[B, m, vocabulary]`.
    """
    read = prompt if model.config.is_encoder_decoder else torch.cat([prompt, answer[:, :-1]], dim=1)
    return predictions(model, read, answer)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each label in nats, float64 `[B, m]` on the CPU, given logits `[B, m, vocabulary]`."""
    parts = zip(*(torch.split(tensor, _PART, dim=1) for tensor in (logits, labels.to(logits.device))), strict=True)
    # The vocabulary goes where cross_entropy wants it.
    found = [F.cross_entropy(part.double().transpose(1, 2), label, reduction="none") for part, label in parts]
    return torch.cat(found, dim=1).cpu()


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether each label is the most likely token, bool `[B, m]` on the CPU, given logits `[B, m, vocabulary]`.

    A greedy continuation equals the labels where all of them are: up to the first that is not, it reads the same tokens.
    """
    return (logits.argmax(dim=-1) == labels.to(logits.device)).cpu()
