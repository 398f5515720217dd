"""Handover from a model's own encoding to a scheme during training, as a callback of any `Trainer`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_posenc.errors import NotPatchedError, OptionError
from hf_posenc.patches.strength import drop_native, set_strength
from hf_posenc.patches.surgery import is_patched


class Handover(TrainerCallback):
    """Lower the strength of the native encoding from 1 to 0 and raise the scheme's from 0 to 1, linearly.

    The strengths depend only on the step, so a resumed run continues them, and are saved with the model, so a
    checkpoint computes what the model computed. At the end of training the native encoding, now without effect, is
    removed.

    Args:
        share: Share of the steps for the handover, above 0 and at most 1; the rest trains the scheme alone.
        start: Share of the steps before the handover.

    Raises:
        OptionError: A share is out of range.
    """

    def __init__(self, share: float = 0.3, *, start: float = 0.0) -> None:
        # The tolerance is for rounding: 1 - 0.8 is less than 0.2.
        if not 0 < share <= 1 or not 0 <= start <= 1 - share + 1e-9:
            raise OptionError(
                f"Handover(share={share!r}, start={start!r}): expected 0 < share <= 1 and 0 <= start <= 1 - share."
            )
        self.share, self.start = share, start

    def progress(self, step: int, steps: int) -> float:
        """Return the strength of the scheme at a step, from 0 to 1."""
        # Without rounding, some handovers would end just below 1.
        return min(1.0, max(0.0, round((step / max(1, steps) - self.start) / self.share, 9)))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the strengths of the first step; raise if there is nothing to hand over, or `load_best_model_at_end`."""
        refuse_best_at_end("Handover", args)
        self._set(model, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the strengths of the step."""
        self._set(model, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Remove the native encoding if the handover is complete."""
        if self.progress(state.global_step, state.max_steps) == 1:
            drop_native(patched_inside(model))

    def _set(self, model: Any, state: Any) -> None:
        gone = self.progress(state.global_step, state.max_steps)
        set_strength(patched_inside(model), native=1 - gone, scheme=gone)


def refuse_best_at_end(callback: str, args: Any) -> None:
    """Raise for `load_best_model_at_end`, which would combine weights of an earlier step with the last strengths."""
    if getattr(args, "load_best_model_at_end", False):
        raise OptionError(
            f"{callback} with load_best_model_at_end=True: Trainer would restore the weights of an earlier step, but "
            "not what the model computed with them then. Leave it out, and load the best checkpoint from its "
            "directory."
        )


def patched_inside(model: nn.Module) -> PreTrainedModel:
    """Return the patched model inside wrappers such as PEFT, DDP or a compiler.

    Raises:
        NotPatchedError: No module is a patched model.
    """
    for module in model.modules():
        if is_patched(module) and isinstance(module, PreTrainedModel):
            return module
    raise NotPatchedError(f"There is no patched model in the {type(model).__name__}. Call hf_posenc.patch first.")
