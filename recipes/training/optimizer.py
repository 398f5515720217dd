"""Optimizer groups, which give the scheme's new weights a learning rate of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posenc.patches.surgery import OWN, SHARED


def parameter_groups(
    model: nn.Module, *, scheme_learning_rate: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return groups for an optimizer: the scheme's weights, the model's matrices, and its vectors.

    Args:
        model: Converted or stock model.
        scheme_learning_rate: Learning rate of the scheme's weights; the others take the optimizer's.
        weight_decay: Weight decay of the model's matrices. The scheme's weights get none, since their size has a
            meaning.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    new = [p for name, p in trained if is_scheme_parameter(name)]
    own = [p for name, p in trained if not is_scheme_parameter(name)]
    groups = [
        {"params": new, "lr": scheme_learning_rate, "weight_decay": 0.0},
        {"params": [p for p in own if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def is_scheme_parameter(name: str) -> bool:
    """Whether a parameter belongs to a positional scheme, by its name."""
    return not {OWN, SHARED}.isdisjoint(name.split("."))
