"""Gradual introduction of a scheme during training, as a callback of any `Trainer`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from hf_posenc.errors import OptionError
from hf_posenc.recipes.training.handover import patched_inside, refuse_best_at_end
from hf_posenc.schemes.families.rotary import Annealed


class Annealing(TrainerCallback):
    """Raise the `progress` of schemes with the option `anneal=True` linearly from 0 to 1.

    Progress depends only on the step, so a resumed run continues it, and is saved with the model.

    Args:
        share: Share of the steps it takes, above 0 and at most 1; the rest trains the full scheme.

    Raises:
        OptionError: The share is out of range, or (when training begins) no scheme has `anneal=True`.
    """

    def __init__(self, share: float = 0.3) -> None:
        if not 0 < share <= 1:
            raise OptionError(f"Annealing(share={share!r}): expected 0 < share <= 1.")
        self.share = share

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the progress of the first step; raise if no scheme is annealed."""
        refuse_best_at_end("Annealing", args)
        if not annealed_inside(model):
            raise OptionError(
                "Annealing: no scheme of the model has anything to bring in. Patch with a scheme that has the option "
                "anneal, and anneal=True: fope or xpos."
            )
        self._set(model, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the progress of the step."""
        self._set(model, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the progress after the last step."""
        self._set(model, state)

    def _set(self, model: Any, state: Any) -> None:
        progress = min(1.0, state.global_step / max(1, state.max_steps) / self.share)
        for scheme in annealed_inside(model):
            scheme.anneal_to(progress)


def annealed_inside(model: nn.Module) -> list[Annealed]:
    """Return the schemes of a patched model that are annealed."""
    found = (module for module in patched_inside(model).modules() if isinstance(module, Annealed))
    return [scheme for scheme in found if scheme.anneal]
