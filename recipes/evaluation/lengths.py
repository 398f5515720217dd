"""Context lengths for an evaluation: limited by the text and by the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import ArchitectureError, PositionError, RecipeError
from hf_posenc.patches.architecture import of_config
from hf_posenc.patches.context import Switch
from hf_posenc.recipes.evaluation.curve import TARGETS, ContextCurve, context_curve, spread_windows


def contexts_for(
    trained_length: int, tokens: int, *, windows: int, contexts: Sequence[int] | None = None, targets: int = TARGETS
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the context lengths to measure, and the reasons for leaving out others.

    Args:
        trained_length: Tokens per window in the model's own training.
        tokens: Number of held-out tokens.
        windows: Number of windows.
        contexts: Requested context lengths; `None` means a quarter to eight times the trained length, in powers of two.
        targets: Scored tokens per window; a context is at least that long.

    Raises:
        RecipeError: A requested length is impossible, or all default ones are.
    """
    # `spread_windows` lets windows overlap, except in their targets.
    between = (windows - 1) * targets
    reasons = {
        context: f"shorter than the {targets} tokens that are scored"
        if context < targets
        else f"{windows} windows of it take {context + 1 + between:,} held-out tokens, there are {tokens:,}"
        for context in contexts or [trained_length * 2**power // 4 for power in range(6)]
    }
    possible = tuple(sorted(context for context in reasons if targets <= context < tokens - between))
    notes = tuple(
        f"not measured at {context} tokens: {reasons[context]}" for context in reasons if context not in possible
    )
    if (contexts and notes) or not possible:
        raise RecipeError(
            f"evaluation.contexts: {'; '.join(notes)}. Give other contexts, fewer evaluation.windows or more held-out "
            "text."
        )
    return possible, notes


def readable_curve(
    model: Any,
    ids: Tensor,
    contexts: Sequence[int],
    *,
    windows: int,
    targets: int = TARGETS,
    evaluate: Callable[..., ContextCurve] = context_curve,
    **options: Any,
) -> ContextCurve:
    """Measure a model at the contexts within its position table.

    The targets do not depend on the contexts left out, so the curves of different models can be compared window by
    window.

    Args:
        model: A language model of transformers.
        ids: Held-out token ids, int64 `[tokens]`.
        contexts: Context lengths in tokens.
        windows: Number of windows.
        targets: Scored tokens per window.
        evaluate: `context_curve`, or a function like it.
        **options: Further keywords of `evaluate`.

    Raises:
        PositionError: All contexts are too long for the model.
    """
    end = table_end(model)
    readable = sorted(context for context in contexts if end is None or context <= end)
    while readable:
        text = ids
        if readable[-1] < max(contexts):
            # `evaluate` cuts the concatenated ends of the windows back into these ends.
            text = spread_windows(ids, max(contexts) + 1, windows, targets=targets)[:, -readable[-1] - 1 :].flatten()
        try:
            return evaluate(model, text, readable, windows=windows, targets=targets, **options)
        except PositionError:
            readable.pop()
    raise PositionError(
        f"The {type(model).__name__} can read none of {', '.join(map(str, contexts))} tokens. Give shorter contexts."
    )


def table_end(model: nn.Module) -> int | None:
    """Return the number of positions in a model's own learned table, or `None` without an active one.

    Callers check before the forward, because a lookup beyond a table leaves a CUDA device unusable.
    """
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    try:
        architecture = of_config(getattr(inner, "config", None))
    except ArchitectureError:
        return None
    ends = []
    for body in architecture.stacks(model).values():
        for table in architecture.swapped(body):
            in_force = not vars(table).get("posenc_removed") or (isinstance(table, Switch) and table.is_disabled())
            if isinstance(table, nn.Embedding) and in_force:
                ends.append(table.num_embeddings)
    return min(ends, default=None)
