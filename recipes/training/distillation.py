"""Distillation from the model before its conversion, in any `Trainer`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from hf_posenc.errors import OptionError, shown
from hf_posenc.operands import is_number
from hf_posenc.patches.inspection import table_end
from hf_posenc.patches.patch import disabled, evaluating, unpatch
from hf_posenc.recipes.loading import is_masked, trained_length
from hf_posenc.recipes.training import pieces
from hf_posenc.recipes.training.callbacks import patched_inside
from hf_posenc.recipes.training.pieces import PiecewiseLoss, Readout, divergences


class Teacher:
    """Function that a model computed before it was converted.

    The teacher reads a window longer than `length` in pieces of `length` tokens that overlap by half, so each
    prediction after the first piece has at least half a piece of context. A whole window would teach how the native
    encoding fails beyond its trained length.

    Args:
        model: Model with its own weights, for instance from `Teacher.copy_of`. (The trained model under `disabled`
            would not do, since its weights change.)

    Attributes:
        model: The model.
        length: Tokens to read at once: the trained length in the config, or what its own table of positions has; `None`
            for encoder-decoders, whose windows are not cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.length = _length_of(model)
        self._adapted: PeftModel | None = None

    @classmethod
    def copy_of(cls, model: Any) -> Teacher:
        """Return a teacher from a converted, untrained model: an unpatched copy.

        Raises:
            NotPatchedError: The model is not patched; pass a stock model to `Teacher` itself.
        """
        twin = unpatch(copy.deepcopy(model))
        for parameter in twin.parameters():
            parameter.requires_grad_(False)
        return cls(twin)

    @classmethod
    def within(cls, adapted: PeftModel) -> Teacher:
        """Return a teacher from a model under an adapter, without a copy: it turns adapter and scheme off.

        Raises:
            OptionError: The model has no adapter, so its own weights are trained.
            NotPatchedError: The model under the adapter is not patched.
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
            teacher.length = _length_of(adapted)
        return teacher

    def __call__(self, inputs: dict[str, Any], **options: Any) -> Any:
        """Return the outputs on a batch, without gradients; for cut windows only `logits` and `hidden_states`.

        The teacher sees consecutive positions even if the batch skips some, since it knows none beyond its trained
        length. Its positions restart where those of the batch do, so packed documents stay apart. The options are more
        keywords of the forward.
        """
        with self._alone():
            tokens = _tokens(inputs)
            if self.length is None or tokens <= self.length:
                return self._read(inputs, options)
            return _joined([(self._read(part, options), known) for part, known in _parts(inputs, tokens, self.length)])

    @cached_property
    def readout(self) -> Readout | None:
        """Head of the model, if its logits can be computed in pieces."""
        with self._alone():
            return Readout.of(self.model)

    def read_out(self, inputs: dict[str, Any], **options: Any) -> Any:
        """Return the outputs on a batch with the last states as logits, for `predict`."""
        assert self.readout is not None
        # Nobody reads the teacher's loss.
        with self.readout.withheld():
            return self({name: given for name, given in inputs.items() if name != "labels"}, **options)

    def predict(self, states: Tensor) -> Tensor:
        assert self.readout is not None
        with self._alone():
            return cast(Tensor, self.readout.head(states))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Turn gradients off, and what the trained model adds to the teacher."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._adapted is not None:
                stack.enter_context(evaluating(self.model))
                stack.enter_context(self._adapted.disable_adapter())
                stack.enter_context(disabled(self._adapted))
            yield

    def _read(self, inputs: dict[str, Any], options: dict[str, Any]) -> Any:
        given = {**inputs, **options, "use_cache": False}
        for name in [name for name in inputs if name.endswith("position_ids")]:
            restarting = without_jumps(given.pop(name))
            if restarting is not None:
                given[name] = restarting
        return self.model(**given)


def _length_of(model: Any) -> int | None:
    """Return the number of tokens a teacher reads at once; `None` means no limit."""
    config = getattr(model, "config", None)
    if config is None or config.is_encoder_decoder:
        return None
    limits = (trained_length(config.get_text_config()), table_end(model))
    return min((limit for limit in limits if limit is not None), default=None)


def _tokens(inputs: dict[str, Any]) -> int:
    """Return the tokens per window of a batch; 0 for other batches, such as images."""
    names = ("input_ids", "inputs_embeds")
    return next((int(inputs[name].shape[1]) for name in names if inputs.get(name) is not None), 0)


def _parts(inputs: dict[str, Any], tokens: int, length: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the batch in pieces of `length` tokens, each with its number of tokens that earlier pieces cover.

    Nobody reads the loss of a piece, so it comes without labels.
    """
    told = 0
    while told < tokens:
        start = max(0, min(told - length // 2, tokens - length))
        part = {name: _cut(given, tokens, slice(start, start + length)) for name, given in inputs.items()}
        part.pop("labels", None)
        yield part, told - start
        told = start + length


def _cut(given: Any, tokens: int, part: slice) -> Any:
    """Return a slice of an input `[B, S, ...]` or of a mask `[B, 1, S, S]`; inputs without tokens stay whole."""
    if not isinstance(given, Tensor):
        return given
    if given.shape[-2:] == (tokens, tokens) and given.dim() == 4:
        return given[..., part, part]
    return given[:, part] if given.dim() > 1 and given.shape[1] == tokens else given


def _joined(pieces: list[tuple[Any, int]]) -> Any:
    """Join the outputs on pieces; each comes with its number of tokens that earlier pieces cover."""
    first, _ = pieces[0]
    whole: dict[str, Any] = {"logits": torch.cat([outputs.logits[:, known:] for outputs, known in pieces], dim=1)}
    if first.hidden_states is not None:
        layers = zip(
            *([states[:, known:] for states in outputs.hidden_states] for outputs, known in pieces), strict=True
        )
        whole["hidden_states"] = tuple(torch.cat(layer, dim=1) for layer in layers)
    return type(first)(**whole)


class Distilling:
    """Mixin for a `Trainer` that adds the distance from a teacher to the loss.

    Args:
        teacher: Teacher; `None` leaves the loss unchanged.
        share: Weight of the divergence from the teacher's predictions in the loss, from 0 to 1.
        hidden: Weight of the distance from the teacher's hidden states, which is added to the loss.
        until: Share of the steps over which both fade to zero, linearly; 0 keeps them to the end. (A teacher restores
            a model first, and later keeps it from learning more from the text.)
        **kwargs: Arguments of the trainer.

    Raises:
        OptionError: A share is out of range, or `hidden` is negative.
    """

    def __init__(
        self, *, teacher: Teacher | None, share: float = 0.5, hidden: float = 0.0, until: float = 0.0, **kwargs: Any
    ) -> None:
        if not all(map(is_number, (share, hidden, until))) or not 0 <= share <= 1 or hidden < 0 or not 0 <= until <= 1:
            raise OptionError(
                f"Distilling(share={shown(share)}, hidden={shown(hidden)}, until={shown(until)}): expected 0 <= "
                "share <= 1, hidden >= 0 and 0 <= until <= 1."
            )
        super().__init__(**kwargs)
        config = getattr(self.model, "config", None)  # type: ignore[attr-defined]
        self._masked = config is not None and is_masked(self.model)  # type: ignore[attr-defined]
        if getattr(config, "is_encoder_decoder", False) or self._masked:
            # T5 and BERT accept `num_items_in_batch` but ignore it: their loss is the mean over one batch.
            self.model_accepts_loss_kwargs = False
        self._teacher, self._share, self._hidden, self._until = teacher, share, hidden, until
        self._text_losses: list[Tensor] = []
        # Log to the end, even after the teacher has faded, since readers of the log take the last entry.
        self._logs_text = teacher is not None
        if teacher is not None:
            teacher.model.to(self.args.device)  # type: ignore[attr-defined]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss on the text; in training, mixed with the distance from the teacher."""
        if not model.training:
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        weight = self._weight()
        if not weight:
            self._teacher = None  # One that has faded is as large as the model.
        teacher = self._teacher
        share, hidden = weight * self._share, weight * self._hidden
        wants = {"output_hidden_states": True} if teacher is not None and hidden else {}
        is_long = not return_outputs and self._is_long(inputs, teacher)
        mixed = self._in_pieces if is_long else self._at_once
        loss, outputs, wanted = mixed(model, inputs, wants, teacher, share, num_items_in_batch)
        if wants:
            masks = _masks(inputs, outputs, masked=self._masked)
            del masks["logits"]
            for name, keep in masks.items():
                distance = hidden_distance(outputs[name], wanted[name], keep)
                loss = loss + hidden / self._parts(num_items_in_batch) * distance
        return (loss, outputs) if return_outputs else loss

    def _at_once(
        self, model: nn.Module, inputs: Any, wants: Any, teacher: Teacher | None, share: float, items: Any
    ) -> tuple[Any, Any, Any]:
        """Return the loss on the text and on the teacher's predictions, and the outputs of both models."""
        loss, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs | wants, return_outputs=True, num_items_in_batch=items
        )
        parts = self._parts(items)
        if self._logs_text:
            self._text_losses.append(parts * loss.detach())
        if teacher is None:
            return loss, outputs, None
        wanted = teacher(inputs, **wants)
        keep = _masks(inputs, outputs, masked=self._masked)["logits"]
        # Without a weight, the gradient of the text would be computed for nothing.
        loss = (1 - share) * loss if share < 1 else 0.0
        return loss + share / parts * divergence(outputs.logits, wanted.logits, keep), outputs, wanted

    def _in_pieces(
        self, model: nn.Module, inputs: Any, wants: Any, teacher: Teacher | None, share: float, items: Any
    ) -> tuple[Any, Any, Any]:
        """Return what `_at_once` does, but last states as the logits of both outputs.

        The whole loss is computed in the forward of the model, as wrappers for several processes expect.
        """
        parts, wanted = self._parts(items), None
        # The trainer multiplies a loss that the model divided by the tokens of all processes.
        averages = self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs  # type: ignore[attr-defined]
        times = self.accelerator.num_processes if averages and items is not None else 1  # type: ignore[attr-defined]
        assert self._readout is not None
        loss_function = PiecewiseLoss(self._readout)
        if teacher is not None:
            wanted = teacher.read_out(inputs, **wants)
            told = {"keep": inputs.get("attention_mask"), "share": share, "weight": share / parts / times}
            loss_function = PiecewiseLoss(self._readout, wanted.logits, teacher.predict, **told)
        with loss_function.in_place():
            loss, outputs = super().compute_loss(  # type: ignore[misc]
                model, inputs | wants, return_outputs=True, num_items_in_batch=items
            )
        if self._logs_text:
            self._text_losses.append(parts * times * loss_function.text)
        return loss, outputs, wanted

    def _is_long(self, inputs: dict[str, Any], teacher: Teacher | None) -> bool:
        """Return whether the logits of a batch are many, and can be computed in pieces."""
        labels, config = inputs.get("labels"), getattr(self.model, "config", None)  # type: ignore[attr-defined]
        if labels is None or config is None:
            return False
        if labels.numel() * getattr(config.get_text_config(), "vocab_size", 0) <= pieces.AT_ONCE:
            return False
        if self.label_smoother is not None or self.compute_loss_func is not None:  # type: ignore[attr-defined]
            return False
        return self._readout is not None and (teacher is None or teacher.readout is not None)

    @cached_property
    def _readout(self) -> Readout | None:
        return Readout.of(self.model)  # type: ignore[attr-defined]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log also `text_loss`, the text's part of the mixed loss, as a mean since the last entry."""
        if "loss" in logs and self._text_losses:
            losses = self.accelerator.gather(torch.stack(self._text_losses).mean())  # type: ignore[attr-defined]
            logs["text_loss"] = float(losses.mean())
            self._text_losses.clear()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _parts(self, num_items_in_batch: Any) -> int:
        """Return the divisor from a batch's mean to its part of the loss on all accumulated batches.

        It is their number if the model divides its loss by the tokens of all batches, and 1 if the trainer divides
        later.
        """
        by_the_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return self.current_gradient_accumulation_steps if by_the_model else 1  # type: ignore[attr-defined]

    def _weight(self) -> float:
        """Return the weight of the teacher at this step, from 1 to 0."""
        if not self._until:
            return 1.0
        state = self.state  # type: ignore[attr-defined]
        gone: float = state.global_step / max(1, state.max_steps)
        return max(0.0, 1 - gone / self._until)


def without_jumps(positions: Tensor) -> Tensor | None:
    """Return positions `[B, S]` without skips: they restart at 0 wherever the given ones fall; `None` if none fall."""
    falls = positions.diff(dim=-1, prepend=positions[:, :1] - 1) <= 0
    if not bool(falls.any()):
        return None
    slots = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return slots - torch.where(falls, slots, 0).cummax(dim=-1).values


def _masks(inputs: dict[str, Any], outputs: Any, *, masked: bool) -> dict[str, Tensor | None]:
    """Return the mask of counted tokens, `[B, S]` or `None` for all, by output name."""
    mask: Tensor | None = inputs.get("attention_mask")
    # A decoder's tokens are those of its labels; padding, and what is not masked, is labelled -100.
    labels: Tensor | None = inputs.get("labels")
    written = None if labels is None else labels != -100
    if "encoder_last_hidden_state" not in outputs:
        return {"logits": written if masked else mask, "hidden_states": mask}
    return {"logits": written, "decoder_hidden_states": written, "encoder_hidden_states": mask}


def divergence(logits: Tensor, wanted: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return the mean KL divergence of logits `[B, S, vocabulary]` from those of the teacher.

    The mask of counted tokens is `[B, S]`; `None`, or a mask of another shape, counts all.
    """
    return mean_of_counted(divergences(logits, wanted), keep)


def hidden_distance(hidden: tuple[Tensor, ...], wanted: tuple[Tensor, ...], keep: Tensor | None = None) -> Tensor:
    """Return the mean squared distance of hidden states, relative to the teacher's mean square, over all layers.

    Those of a layer are `[B, S, E]`; the mask of counted tokens is that of `divergence`.
    """
    parts = []
    for got, target in zip(hidden, wanted, strict=True):
        size = mean_of_counted(target.float().square().mean(-1), keep)
        parts.append(mean_of_counted((got.float() - target.float()).square().mean(-1), keep) / size.clamp_min(1e-12))
    return torch.stack(parts).mean()


def mean_of_counted(values: Tensor, keep: Tensor | None) -> Tensor:
    """Return the mean of `[B, S]` over the counted tokens."""
    if keep is None or keep.shape != values.shape:
        return values.mean()
    weight = keep.to(values)
    return (values * weight).sum() / weight.sum().clamp_min(1)
