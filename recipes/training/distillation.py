"""Learning from the model as it was before its conversion, in any `Trainer`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.errors import OptionError
from hf_posenc.patches.modes import evaluating
from hf_posenc.patches.patch import disabled, unpatch
from hf_posenc.recipes.evaluation.lengths import table_end
from hf_posenc.recipes.loading import trained_length
from hf_posenc.recipes.training.handover import patched_inside


class Teacher:
    """The function that a model computed before it was converted.

    A window longer than `length` it reads in pieces of that many tokens, each of which overlaps half of the one before: what
    it says of a token it says from at least half a piece of text before it. Read as a whole, the window would teach how the
    native encoding fails. Windows of packed documents none of which is longer it reads whole.

    Args:
        model: A model with weights of its own, such as `Teacher.copy_of` makes. (`disabled` alone would not do: it has the
            weights that are being trained.)
        length: Tokens that it reads at once, at least 2; `None` is the length that its config says it was trained on. Of
            encoder-decoders, whose windows are not cut, it has no effect.

    Raises:
        OptionError: The length is too small, or beyond the model's own table of positions.
    """

    def __init__(self, model: nn.Module, *, length: int | None = None) -> None:
        self.model = model.eval()
        self.length = _length_of(model, length)
        self._adapted: PeftModel | None = None

    @classmethod
    def copy_of(cls, model: Any, *, length: int | None = None) -> Teacher:
        """Make a teacher of a converted model that was not trained yet: a copy with its own encoding again.

        Raises:
            NotPatchedError: The model is not patched; pass the stock model itself.
        """
        twin = unpatch(copy.deepcopy(model))
        for parameter in twin.parameters():
            parameter.requires_grad_(False)
        return cls(twin, length=length)

    @classmethod
    def within(cls, adapted: PeftModel, *, length: int | None = None) -> Teacher:
        """Make a teacher of a model under an adapter, without a copy: adapter off and scheme off is the original.

        Raises:
            OptionError: There is no adapter, so the model's own weights are trained.
            NotPatchedError: There is no patched model under it.
        """
        if not isinstance(adapted, PeftModel):
            raise OptionError(
                f"Teacher.within: expected a model under a PEFT adapter, got a {type(adapted).__name__}, whose own "
                "weights are trained. Use Teacher.copy_of(model)."
            )
        patched_inside(adapted)
        teacher = cls.__new__(cls)
        teacher.model, teacher._adapted = adapted, adapted
        with disabled(adapted):
            teacher.length = _length_of(adapted, length)
        return teacher

    def __call__(self, inputs: dict[str, Any], **options: Any) -> Any:
        """Return the outputs on a batch, without gradients; of a window read in pieces `logits` and `hidden_states` alone.

        The teacher reads the tokens at their plain positions, also where the batch skips some: beyond its trained length it
        has nothing to teach. Where positions begin anew, so do its own: packed documents do not see each other.

        Args:
            inputs: Of the student.
            **options: More keywords of the forward.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._adapted is not None:
                stack.enter_context(evaluating(self.model))
                stack.enter_context(self._adapted.disable_adapter())
                stack.enter_context(disabled(self._adapted))
            if self.length is None or _reach(inputs) <= self.length:
                return self._read(inputs, options)
            tokens = _tokens(inputs)
            return _joined([(self._read(part, options), known) for part, known in _parts(inputs, tokens, self.length)])

    def _read(self, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
        given = dict(inputs)
        for name in [name for name in inputs if name.endswith("position_ids")]:
            restarting = without_jumps(given.pop(name))
            if restarting is not None:
                given[name] = restarting
        return self.model(**given, use_cache=False, **options)


def _length_of(model: Any, length: int | None) -> int | None:
    """Return how many tokens a teacher reads at once; `None` is as many as there are."""
    if length is not None and length < 2:
        raise OptionError(
            f"Teacher(length={length!r}): expected at least 2 tokens, so that a piece overlaps the one before."
        )
    config = getattr(model, "config", None)
    if config is None:
        return length
    if config.is_encoder_decoder:
        return None
    end = table_end(model)
    if length is not None and end is not None and length > end:
        raise OptionError(
            f"Teacher(length={length!r}): the {type(model).__name__} has a table of {end} positions. Give at most as "
            "many tokens."
        )
    return length or trained_length(config.get_text_config())


def _tokens(inputs: dict[str, Any]) -> int:
    """Return how many tokens the windows of a batch have; 0 of batches of something else, such as images."""
    names = ("input_ids", "inputs_embeds")
    return next((int(inputs[name].shape[1]) for name in names if inputs.get(name) is not None), 0)


def _reach(inputs: dict[str, Any]) -> int:
    """Return how far the teacher would have to see in a batch: over the windows, or over the longest of packed documents."""
    positions = inputs.get("position_ids")
    # Beside a mask, positions do not tell documents apart.
    if positions is None or inputs.get("attention_mask") is not None:
        return _tokens(inputs)
    restarting = without_jumps(positions)
    return _tokens(inputs) if restarting is None else int(restarting.max()) + 1


def _parts(inputs: dict[str, Any], tokens: int, length: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Return the batch in pieces of `length` tokens, and of how many the piece before has told already."""
    told = 0
    while told < tokens:
        start = max(0, min(told - length // 2, tokens - length))
        part = {name: _cut(given, tokens, slice(start, start + length)) for name, given in inputs.items()}
        yield part, told - start
        told = start + length


def _cut(given: Any, tokens: int, part: slice) -> Any:
    """Return the part of an input, `[B, S, ...]`, or of a mask `[B, 1, S, S]`; what has no tokens stays as it is."""
    if not isinstance(given, Tensor):
        return given
    if given.shape[-2:] == (tokens, tokens) and given.dim() == 4:
        return given[..., part, part]
    return given[:, part] if given.dim() > 1 and given.shape[1] == tokens else given


def _joined(pieces: list[tuple[Any, int]]) -> Any:
    """Return outputs on pieces as those on the whole; each with how many of its first tokens the one before has told."""
    first, _ = pieces[0]
    whole: dict[str, Any] = {"logits": torch.cat([outputs.logits[:, known:] for outputs, known in pieces], dim=1)}
    if first.hidden_states is not None:
        layers = zip(
            *([states[:, known:] for states in outputs.hidden_states] for outputs, known in pieces), strict=True
        )
        whole["hidden_states"] = tuple(torch.cat(layer, dim=1) for layer in layers)
    return type(first)(**whole)


class Distilling:
    """Mixin of a `Trainer`: mixes the loss with the distance from a teacher.

    Args:
        teacher: The teacher; `None` leaves the loss as it is.
        share: Share of the divergence from the teacher's predictions in the loss, from 0 to 1.
        hidden: Factor on the distance from the teacher's hidden states, added to the loss.
        until: Share of the steps after which both have faded to nothing, linearly; 0 keeps them to the end. A teacher brings
            a model back, and then holds it back where the text would take it further.
        **kwargs: Of the trainer.

    Raises:
        OptionError: A share is out of range, or the factor is negative.
    """

    def __init__(
        self, *, teacher: Teacher | None, share: float = 0.5, hidden: float = 0.0, until: float = 0.0, **kwargs: Any
    ) -> None:
        if not 0 <= share <= 1 or hidden < 0 or not 0 <= until <= 1:
            raise OptionError(
                f"Distilling(share={share!r}, hidden={hidden!r}, until={until!r}): expected 0 <= share <= 1, hidden >= "
                "0 and 0 <= until <= 1."
            )
        super().__init__(**kwargs)
        config = getattr(self.model, "config", None)  # type: ignore[attr-defined]
        if getattr(config, "is_encoder_decoder", False):
            # T5 takes the number of tokens in all accumulated batches, and means over one batch alone all the same.
            self.model_accepts_loss_kwargs = False
        self._teacher, self._share, self._hidden, self._until = teacher, share, hidden, until
        self._text_losses: list[Tensor] = []
        # To the end, also when the teacher has faded and was let go: who reads the log would take what was logged last.
        self._logs_text = teacher is not None
        if teacher is not None:
            teacher.model.to(self.args.device)  # type: ignore[attr-defined]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss on the text, mixed in training with the distance from the teacher if there is one."""
        if not model.training:
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        weight = self._weight()
        teacher = self._teacher if weight else None
        share, hidden = weight * self._share, weight * self._hidden
        wants = {"output_hidden_states": True} if teacher is not None and hidden else {}
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs | wants, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        parts = self._parts(num_items_in_batch)
        if self._logs_text:
            self._text_losses.append(parts * loss.detach())
        if teacher is not None:
            wanted = teacher(inputs, **wants)
            masks = _masks(inputs, outputs)
            loss = (1 - share) * loss + share / parts * divergence(outputs.logits, wanted.logits, masks.pop("logits"))
            for name, keep in masks.items() if wants else ():
                loss = loss + hidden / parts * hidden_distance(outputs[name], wanted[name], keep)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log `text_loss` beside the loss, which is a mixture: the part on the text, the mean since the last time."""
        if "loss" in logs and self._text_losses:
            losses = self.accelerator.gather(torch.stack(self._text_losses).mean())  # type: ignore[attr-defined]
            logs["text_loss"] = float(losses.mean())
            self._text_losses.clear()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _parts(self, num_items_in_batch: Any) -> int:
        """Return by how much the loss on the text is smaller than a mean, which distances from the teacher must be too.

        Over accumulated batches the trainer divides the loss that it gets, or has the model divide by all their tokens.
        """
        by_the_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return self.current_gradient_accumulation_steps if by_the_model else 1  # type: ignore[attr-defined]

    def _weight(self) -> float:
        """Return what is left of the teacher's influence at this step, from 1 to 0."""
        if not self._until:
            return 1.0
        state = self.state  # type: ignore[attr-defined]
        gone: float = state.global_step / max(1, state.max_steps)
        return max(0.0, 1 - gone / self._until)


def without_jumps(positions: Tensor) -> Tensor | None:
    """Return positions `[B, S]` that count on where those given jump ahead, and begin at 0 where those fall; or `None` if none fall."""
    falls = positions.diff(dim=-1, prepend=positions[:, :1] - 1) <= 0
    if not bool(falls.any()):
        return None
    slots = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return slots - torch.where(falls, slots, 0).cummax(dim=-1).values


def _masks(inputs: dict[str, Any], outputs: Any) -> dict[str, Tensor | None]:
    """Return which tokens count, `[B, S]` or `None` for all, by the name of the outputs that they belong to."""
    mask: Tensor | None = inputs.get("attention_mask")
    if "encoder_last_hidden_state" not in outputs:
        return {"logits": mask, "hidden_states": mask}
    # A decoder stands where its labels are, and they end where they are not to be predicted.
    labels: Tensor | None = inputs.get("labels")
    written = None if labels is None else labels != -100
    return {"logits": written, "decoder_hidden_states": written, "encoder_hidden_states": mask}


def divergence(logits: Tensor, wanted: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return the mean KL divergence of the predictions from those wanted.

    Args:
        logits: `[B, S, vocabulary]`.
        wanted: The teacher's, of the same shape.
        keep: Which tokens count, `[B, S]`; `None`, or a mask of other tokens than those predicted, means all.
    """
    # In float32: differences of log-probabilities are small against the log-probabilities.
    got, target = (F.log_softmax(x.float(), dim=-1) for x in (logits, wanted))
    return _mean(F.kl_div(got, target, reduction="none", log_target=True).sum(-1), keep)


def hidden_distance(hidden: tuple[Tensor, ...], wanted: tuple[Tensor, ...], keep: Tensor | None = None) -> Tensor:
    """Return the mean squared distance of hidden states, relative to the teacher's mean square, over all layers.

    Args:
        hidden: Of the layers, each `[B, S, E]`.
        wanted: The teacher's.
        keep: Which tokens count, as in `divergence`.
    """
    parts = []
    for got, target in zip(hidden, wanted, strict=True):
        size = _mean(target.float().square().mean(-1), keep)
        parts.append(_mean((got.float() - target.float()).square().mean(-1), keep) / size.clamp_min(1e-12))
    return torch.stack(parts).mean()


def _mean(values: Tensor, keep: Tensor | None) -> Tensor:
    """Return the mean of `[B, S]` over the tokens that count."""
    if keep is None or keep.shape != values.shape:
        return values.mean()
    weight = keep.to(values)
    return (values * weight).sum() / weight.sum().clamp_min(1)
