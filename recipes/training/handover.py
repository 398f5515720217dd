"""Handing over from a model's own encoding to a scheme during training, as a callback of any `Trainer`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_posenc.errors import NotPatchedError, OptionError
from hf_posenc.patches.strength import drop_native, set_strength
from hf_posenc.patches.surgery import is_patched


class Handover(TrainerCallback):
    """Lower the native encoding from full strength to none and raise the scheme from none to full, linearly.

    The strengths are a function of the step, so a resumed run goes on where it was; they are saved with the model, so a
    checkpoint from the middle computes what the model computed. At the end of the training the native encoding, by then
    without effect, is dropped.

    Args:
        share: The share of the steps that the way takes, above 0 and up to 1; the rest is trained on the scheme alone.
        start: The share of the steps before it begins.

    Raises:
        OptionError: The shares leave no way, or do not fit into the training.
    """

    def __init__(self, share: float = 0.3, *, start: float = 0.0) -> None:
        # With room for rounding: 1 - 0.8 is less than 0.2.
        if not 0 < share <= 1 or not 0 <= start <= 1 - share + 1e-9:
            raise OptionError(
                f"Handover(share={share!r}, start={start!r}): expected 0 < share <= 1 and 0 <= start <= 1 - share."
            )
        self.share, self.start = share, start

    def progress(self, step: int, steps: int) -> float:
        """Return how far the way is gone before a step, from 0 to 1."""
        # Rounded, or some ways would end a rounding error before 1.
        return min(1.0, max(0.0, round((step / max(1, steps) - self.start) / self.share, 9)))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the strengths of the first step; raises if there is nothing to hand over, or with `load_best_model_at_end`."""
        refuse_best_at_end("Handover", args)
        self._set(model, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the strengths of the step."""
        self._set(model, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Drop the native encoding, if the way was gone to its end."""
        if self.progress(state.global_step, state.max_steps) == 1:
            drop_native(patched_inside(model))

    def _set(self, model: Any, state: Any) -> None:
        gone = self.progress(state.global_step, state.max_steps)
        set_strength(patched_inside(model), native=1 - gone, scheme=gone)


def refuse_best_at_end(callback: str, args: Any) -> None:
    """Raise if the `Trainer` would put weights of an earlier step into the function of the last one."""
    if getattr(args, "load_best_model_at_end", False):
        raise OptionError(
            f"{callback} with load_best_model_at_end=True: Trainer would restore the weights of an earlier step, but "
            "not what the model computed with them then. Leave it out, and load the best checkpoint from its "
            "directory."
        )


def patched_inside(model: nn.Module) -> PreTrainedModel:
    """Return the patched model inside of whatever wraps it (PEFT, DDP, a compiler).

    Raises:
        NotPatchedError: There is none.
    """
    for module in model.modules():
        if is_patched(module) and isinstance(module, PreTrainedModel):
            return module
    raise NotPatchedError(f"There is no patched model in the {type(model).__name__}. Call hf_posenc.patch first.")
