"""Training in stages: first the scheme's new weights alone, then everything."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from hf_posenc.errors import OptionError
from hf_posenc.recipes.training.optimizer import is_scheme_parameter


class NewParametersFirst(TrainerCallback):
    """Leave the model's own weights alone for the first share of the steps.

    Their gradients are thrown away rather than not computed: which weights need gradients must not change under DDP, and an
    optimizer skips weights without one. The clipping of gradients comes before that: for it they are zero (but not under FSDP).

    A context manager as well. `Trainer` tells its callbacks nothing of a training that raises or is interrupted, and whoever trains
    the same model on by other means would get no gradients of its own weights:
    `with NewParametersFirst(...) as first: Trainer(..., callbacks=[first]).train()`. Another training with the same callback goes on
    as it should.

    Args:
        share: Of the steps, from 0 to 1.

    Raises:
        OptionError: The share is out of range; at the begin of the training, no scheme has weights to train.
    """

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share <= 1:
            raise OptionError(f"NewParametersFirst(share={share!r}): expected a number from 0 to 1.")
        self.share = share
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> NewParametersFirst:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin with the first stage; raises if it would train nothing."""
        self._end()
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        own = [parameter for name, parameter in trained if not is_scheme_parameter(name)]
        if self.share and len(own) == len(trained):
            raise OptionError(
                f"NewParametersFirst(share={self.share!r}): no scheme of the {type(model).__name__} has weights to "
                "train, so the first stage would train nothing. Leave the callback out, or patch with a scheme that "
                "learns."
            )
        self._hooks = [parameter.register_hook(torch.zeros_like) for parameter in own]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the first stage, when it is over."""
        if not self._first(state):
            self._end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the first stage, if it took the whole training."""
        self._end()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Throw away the gradients of the model's own weights, in the first stage."""
        if self._first(state):
            for name, parameter in model.named_parameters():
                if not is_scheme_parameter(name):
                    parameter.grad = None

    def _first(self, state: Any) -> bool:
        # Divided, as in a handover: 0.55 * 100 is more than 55.
        return bool(state.global_step / max(1, state.max_steps) < self.share)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
