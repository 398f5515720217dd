"""Parts for any `Trainer`: callbacks that bring a scheme in gradually, and optimizer groups for its new weights."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from hf_posenc import registry
from hf_posenc.errors import NotPatchedError, OptionError, shown
from hf_posenc.operands import is_number
from hf_posenc.patches.patch import drop_native, set_strength
from hf_posenc.patches.surgery import is_of_scheme, is_patched
from hf_posenc.schemes.families.rotary import Annealed


def patched_inside(model: nn.Module) -> PreTrainedModel:
    """Return the patched model inside wrappers such as PEFT, DDP or a compiler.

    Raises:
        NotPatchedError: No module is a patched model.
    """
    for module in model.modules():
        if is_patched(module) and isinstance(module, PreTrainedModel):
            return module
    raise NotPatchedError(f"There is no patched model in the {type(model).__name__}. Call hf_posenc.patch first.")


class _Gradual(TrainerCallback):
    """Callback that brings something in over the first share of the steps, linearly.

    It depends only on the step, so runs can be resumed.
    """

    def __init__(self, share: float = 0.3) -> None:
        if not (is_number(share) and 0 < share <= 1):
            raise OptionError(f"{type(self).__name__}(share={shown(share)}): expected 0 < share <= 1.")
        self.share = share

    def progress(self, step: int, steps: int) -> float:
        """Return how much is brought in at a step, from 0 to 1."""
        # Without rounding, some would end just below 1.
        return min(1.0, round(step / max(1, steps) / self.share, 9))

    def set_progress(self, model: nn.Module, progress: float) -> None:
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the progress of the first step; raise for `load_best_model_at_end`, or if there is nothing to set."""
        # It would combine weights of an earlier step with the last progress.
        if getattr(args, "load_best_model_at_end", False):
            raise OptionError(
                f"{type(self).__name__} with load_best_model_at_end=True: Trainer would restore the weights of an "
                "earlier step, but not what the model computed with them then. Leave it out, and load the best "
                "checkpoint from its directory."
            )
        self.on_step_begin(args, state, control, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.set_progress(model, self.progress(state.global_step, state.max_steps))


class Handover(_Gradual):
    """Lower the strength of the native encoding from 1 to 0 and raise the scheme's from 0 to 1, linearly.

    The strengths are saved with the model, so a checkpoint computes what the model computed. At the end of training the
    native encoding, now without effect, is removed.

    Args:
        share: Share of the steps for the handover, above 0 and at most 1; the rest trains the scheme alone.

    Raises:
        OptionError: The share is out of range.
    """

    def set_progress(self, model: nn.Module, progress: float) -> None:
        set_strength(patched_inside(model), native=1 - progress, scheme=progress)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.progress(state.global_step, state.max_steps) == 1:
            drop_native(patched_inside(model))


class Annealing(_Gradual):
    """Raise the `progress` of schemes with the option `anneal=True` linearly from 0 to 1; it is saved with the model.

    Args:
        share: Share of the steps it takes, above 0 and at most 1; the rest trains the full scheme.

    Raises:
        OptionError: The share is out of range, or (when training begins) no scheme has `anneal=True`.
    """

    def set_progress(self, model: nn.Module, progress: float) -> None:
        schemes = (module for module in patched_inside(model).modules() if isinstance(module, Annealed))
        annealed = [scheme for scheme in schemes if scheme.anneal]
        if not annealed:
            known = [name for name, info in registry.schemes().items() if "anneal" in info.option_defaults()]
            raise OptionError(
                "Annealing: no scheme of the model has anything to bring in. Patch with a scheme that has the option "
                f"anneal, and anneal=True: {' or '.join(known)}."
            )
        for scheme in annealed:
            scheme.anneal_to(progress)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.on_step_begin(args, state, control, model)


def parameter_groups(
    model: nn.Module, *, scheme_learning_rate: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return groups for an optimizer: the scheme's weights, the model's matrices, and its vectors.

    Args:
        scheme_learning_rate: Learning rate of the scheme's weights; the others take the optimizer's.
        weight_decay: Weight decay of the model's matrices. The scheme's weights get none, since their size has a
            meaning.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    new = [p for name, p in trained if is_of_scheme(name)]
    own = [p for name, p in trained if not is_of_scheme(name)]
    groups = [
        {"params": new, "lr": scheme_learning_rate, "weight_decay": 0.0},
        {"params": [p for p in own if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
