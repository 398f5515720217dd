"""Predictions of a language model for given tokens, from one forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.errors import PositionError, ShapeError
from hf_posenc.patches.inspection import table_end
from hf_posenc.recipes.loading import is_masked

# Positions per part: double-precision logits of all positions at once would take too much memory.
_PART = 256


def predictions(model: Any, read: Tensor, labels: Tensor, targets: int | None = None) -> Tensor:
    """Return the logits `[B, targets, vocabulary]` that predict the last labels, each given all tokens before it.

    Args:
        model: A language model of transformers.
        read: Token ids, int64 `[B, n]`: for a causal model, the text up to the last label but one; for an
            encoder-decoder, the encoder's input; for a masked language model, the labels with masked tokens.
        labels: Token ids that end the text or that the decoder writes, int64 `[B, m]`.
        targets: Number of labels to predict; `None` means all.

    Raises:
        PositionError: The model has no encoding for positions that far.
        ShapeError: A token is not in the vocabulary of the model.
    """
    targets, end = labels.shape[1] if targets is None else targets, table_end(model)
    unreadable = PositionError(
        f"The {type(model).__name__} cannot read {read.shape[1]} tokens: its position table is shorter. "
        "Leave out the longer inputs."
    )
    if end is not None and max(read.shape[1], labels.shape[1]) > end:
        raise unreadable
    read, labels = read.to(model.device), labels.to(model.device)
    logits: Tensor
    try:
        if model.config.is_encoder_decoder:
            written = model.prepare_decoder_input_ids_from_labels(labels)
            logits = model(input_ids=read, decoder_input_ids=written, use_cache=False).logits
        elif is_masked(model):
            logits = model(input_ids=read).logits
        else:
            logits = model(input_ids=read, use_cache=False, logits_to_keep=targets).logits
    except IndexError as error:
        known, high = getattr(model.get_input_embeddings(), "num_embeddings", None), int(max(read.max(), labels.max()))
        if known is not None and high >= known:
            raise ShapeError(
                f"The text has the token {high}; the {type(model).__name__} knows 0 to {known - 1}. Tokenise it with "
                "the model's own tokenizer, or resize the embeddings of the model."
            ) from error
        raise unreadable from error
    return logits[:, -targets:]


def answer_predictions(model: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    """Return the logits `[B, m, vocabulary]` of an answer `[B, m]`, given the prompt `[B, n]` and the answer so far.

    A causal model reads both. An encoder-decoder reads the prompt and writes the answer.
    """
    read = prompt if model.config.is_encoder_decoder else torch.cat([prompt, answer[:, :-1]], dim=1)
    return predictions(model, read, answer)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each label in nats, float64 `[B, m]` on the CPU, given logits `[B, m, vocabulary]`.

    A loss that is not a number, of a model that diverged, counts as infinite.
    """
    parts = zip(*(torch.split(tensor, _PART, dim=1) for tensor in (logits, labels.to(logits.device))), strict=True)
    # cross_entropy expects the vocabulary second.
    found = [F.cross_entropy(part.double().transpose(1, 2), label, reduction="none") for part, label in parts]
    return torch.cat(found, dim=1).cpu().nan_to_num(nan=torch.inf, posinf=torch.inf)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether each label is the most likely token, bool `[B, m]` on the CPU, given logits `[B, m, vocabulary]`.

    Where all labels are the most likely tokens, greedy decoding yields exactly these labels.
    """
    return (logits.argmax(dim=-1) == labels.to(logits.device)).cpu()
