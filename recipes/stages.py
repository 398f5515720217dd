"""Training in stages: first the scheme's new weights alone, then everything."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hf_posenc.errors import OptionError
from hf_posenc.recipes.groups import is_scheme_parameter


class NewParametersFirst(TrainerCallback):
    """Leave the model's own weights alone for the first share of the steps.

    Their gradients are thrown away rather than not computed: which weights need gradients must not change under DDP, and an
    optimizer skips weights without one.

    Args:
        share: Of the steps, from 0 to 1.

    Raises:
        OptionError: The share is out of range.
    """

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share <= 1:
            raise OptionError(f"NewParametersFirst(share={share!r}): expected a number from 0 to 1.")
        self.share = share

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Throw away the gradients of the model's own weights, in the first stage."""
        if state.global_step < self.share * state.max_steps:
            for name, parameter in model.named_parameters():
                if not is_scheme_parameter(name):
                    parameter.grad = None
