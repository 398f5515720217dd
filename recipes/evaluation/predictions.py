"""Predictions of a language model for given tokens, from one forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.errors import PositionError
from hf_posenc.recipes.evaluation.curve import logits_of_targets
from hf_posenc.recipes.evaluation.lengths import table_end

# Positions per part: double-precision logits of all positions at once would take too much memory.
_PART = 256


def predictions(model: Any, read: Tensor, labels: Tensor) -> Tensor:
    """Return the logits that predict each label, given all tokens before it.

    Args:
        model: A language model of transformers.
        read: Token ids, int64 `[B, n]`: for a causal model, the text up to the last label but one; for an
            encoder-decoder, the encoder's input.
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
    """Return the logits that predict each token of an answer, given the prompt and the answer before it.

    Args:
        model: A causal model, which reads both; or an encoder-decoder, which reads the prompt and writes the answer.
        prompt: Token ids, int64 `[B, n]`.
        answer: Token ids, int64 `[B, m]`.

    Returns:
        Logits `[B, m, vocabulary]`.
    """
    read = prompt if model.config.is_encoder_decoder else torch.cat([prompt, answer[:, :-1]], dim=1)
    return predictions(model, read, answer)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each label in nats, float64 `[B, m]` on the CPU, given logits `[B, m, vocabulary]`."""
    parts = zip(*(torch.split(tensor, _PART, dim=1) for tensor in (logits, labels.to(logits.device))), strict=True)
    # cross_entropy expects the vocabulary second.
    found = [F.cross_entropy(part.double().transpose(1, 2), label, reduction="none") for part, label in parts]
    return torch.cat(found, dim=1).cpu()


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether each label is the most likely token, bool `[B, m]` on the CPU, given logits `[B, m, vocabulary]`.

    Where all labels are the most likely tokens, greedy decoding yields exactly these labels.
    """
    return (logits.argmax(dim=-1) == labels.to(logits.device)).cpu()
