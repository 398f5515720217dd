"""Fit of any scheme in attention, layer by layer, to the outputs of the stock model's attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import OptionError, ShapeError
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.patch import disabled, evaluating
from hf_posenc.recipes.loading import trained_length
from hf_posenc.recipes.training.distillation import without_jumps
from hf_posenc.recipes.training.starts import check_model, check_windows, held_out, kept, verdict
from hf_posenc.scheme import Scheme

# Input and output of each attention, both `[B, S, E]`.
Traffic = dict[nn.Module, tuple[Tensor, Tensor]]
# Inputs of a model, and the resulting traffic in the stock model.
Part = tuple[dict[str, Tensor], Traffic]


@dataclass(frozen=True)
class Match:
    """Distance of each layer's attention output from the stock model's, on held-out windows.

    A distance is the mean square of the difference, relative to the mean square of the stock output.

    Attributes:
        before: Distances by layer before the fit.
        after: Distances by layer after the fit; equal to `before` if the schemes kept their weights.
        accepted: Whether the schemes have the fitted weights.
        sentence: Verdict in one sentence.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    accepted: bool
    sentence: str


@torch.inference_mode(False)  # Gradients are needed, also where the caller wants none.
def match(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    corrupt: Callable[[Tensor], Tensor] | None = None,
    steps: int = 150,
    batch_size: int = 8,
    micro_batch_size: int | None = None,
    learning_rate: float = 1e-2,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Match:
    """Fit the schemes of a converted model, in place, to the attention outputs of the stock model.

    Every layer gets the input it has in the stock model, so all layers are fitted at once. Only the schemes' weights
    change. Unlike `fit`, which needs additive schemes, this works for any scheme with weights in attention. A step
    costs about as much as a training step. The caller's random state is unchanged.

    The last quarter of the windows (at most one batch) is held out to judge the fit: if the distances on it do not
    fall, or on an exception, the schemes keep their weights, bit for bit; a warning says so.

    Args:
        model: Converted model without its own encoding, which must have acted in attention (not a table of positions
            added to the inputs).
        ids: Windows of text, int64 `[N, S]`; windows longer than the trained length are cut. One window serves both
            the fit and the verdict.
        position_ids: Positions of packed documents, `[N, S]`, which restart at each document.
        corrupt: Function from token ids to an encoder's inputs; `None` is the text itself.
        steps: Steps of Adam, with a cosine schedule to 0.
        batch_size: Windows per step.
        micro_batch_size: Windows per forward, to save memory; `None` is the whole batch. The result is the same up to
            rounding.
        learning_rate: Initial learning rate.
        seed: Random seed of the order of windows.
        progress: Function called after each step with the number of steps done.

    Returns:
        Distances and verdict.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: The schemes have no weights in attention, the native encoding does not act in attention, a number
            is out of range, or `position_ids` are given for a model without positions.
        ShapeError: `ids` are not windows of at least two known tokens, or `position_ids` has another shape.
    """
    check_model("match", model)
    if min(steps, batch_size, micro_batch_size or 1) < 1 or learning_rate <= 0:
        raise OptionError(
            f"match({steps=}, {batch_size=}, {micro_batch_size=}, {learning_rate=}): expected steps and windows of at "
            "least 1, and a positive learning rate."
        )
    attentions = _matchable(model)
    schemes = nn.ModuleList(module for module in model.modules() if isinstance(module, Scheme))
    weights = [weight for weight in schemes.parameters() if weight.requires_grad]  # each once
    if not weights:
        raise OptionError(
            "match: the schemes of this model have no weights to train: none with these options, or all are frozen. "
            "Unfreeze them, or patch with options that have some."
        )
    if position_ids is not None and model.config.is_encoder_decoder:
        raise OptionError(
            f"match(position_ids=...): the {type(model).__name__} takes no positions, so documents in a window cannot "
            "be told apart. Give windows of one document each."
        )
    check_windows("match", model, ids, least=2)
    longest = trained_length(model.config.get_text_config())
    places = None if position_ids is None else _positions(position_ids, ids, longest, model.device)
    ids = _windows(ids, longest).to(model.device)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(weights, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def parts(chosen: Tensor) -> list[Part]:
        batches = [
            _inputs(model, ids[part], None if places is None else places[part], corrupt)
            for part in torch.split(chosen, micro_batch_size or batch_size)
        ]
        return [(inputs, _stock_traffic(model, attentions, inputs)) for inputs in batches]

    with _training_only(model, weights) as put_back:
        apart = held_out(len(ids), most=batch_size)
        learned = len(ids) - apart
        judged = parts(torch.arange(learned if apart else 0, len(ids), device=ids.device))
        before = _distances(model, judged)
        for step in range(steps):
            optimizer.zero_grad()
            chosen = torch.randint(learned, (batch_size,), generator=order).to(ids.device)
            _distances(model, parts(chosen), learn=True)
            if all(weight.grad is None for weight in weights):
                raise OptionError(
                    "match: the weights of these schemes act on the inputs of the model, not in its attention, so "
                    "attention says nothing of them. Train them."
                )
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(step + 1)
        after = _distances(model, judged)
        accepted, sentence = verdict(
            "match", "distance from the original attention", float(before.mean()), float(after.mean())
        )
        if not accepted:
            after = before
            put_back()
    return Match(tuple(before.tolist()), tuple(after.tolist()), accepted, sentence)


def _matchable(model: PreTrainedModel) -> list[nn.Module]:
    """Return the patched attentions; raise if the native encoding does not act in attention."""
    architecture = of_model(model)
    found = []
    for body in architecture.stacks(model).values():
        for layer, attention in enumerate(architecture.attentions(body)):
            if not surgery.is_patched(attention):
                continue
            geometry = architecture.geometry(body, layer)
            if geometry.axes > 1 or (geometry.inv_freq is None and geometry.native_table("t5") is None):
                raise OptionError(
                    f"match: the {type(model).__name__} adds its own encoding to what it reads, so its attention does "
                    "not show what positions do in it. Start without; a handover takes such a model over."
                )
            found.append(attention)
    return found


def _windows(ids: Tensor, length: int | None) -> Tensor:
    """Cut windows `[N, S]` to at most the trained length."""
    if length is None or ids.shape[1] <= length:
        return ids
    return ids[:, : ids.shape[1] // length * length].reshape(-1, length)


def _positions(positions: Tensor, ids: Tensor, length: int | None, device: torch.device) -> Tensor | None:
    """Return the positions of the cut windows, `[N, S]`; a document that was cut restarts at the window's start."""
    if positions.shape != ids.shape:
        raise ShapeError(
            f"match: position_ids has the shape {list(positions.shape)}; expected that of ids, {list(ids.shape)}."
        )
    return without_jumps(_windows(positions, length).to(device))


def _inputs(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None, corrupt: Callable[[Tensor], Tensor] | None
) -> dict[str, Tensor]:
    read = ids if corrupt is None else corrupt(ids)
    if not model.config.is_encoder_decoder:
        return {"input_ids": read} if positions is None else {"input_ids": read, "position_ids": positions}
    first = torch.full_like(ids[:, :1], model.config.decoder_start_token_id)
    return {"input_ids": read, "decoder_input_ids": torch.cat([first, ids[:, :-1]], dim=1)}


@contextlib.contextmanager
def _training_only(model: nn.Module, weights: list[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Restrict gradients to these weights and turn dropout off; yield the function that restores the weights."""
    own = {id(weight) for weight in weights}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        with kept(weights) as put_back, evaluating(model):
            yield put_back
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _hooked(attentions: Any, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for attention in attentions:
            stack.callback(attention.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(attention.register_forward_hook(after).remove)
        yield


def _stock_traffic(model: PreTrainedModel, attentions: list[nn.Module], inputs: dict[str, Tensor]) -> Traffic:
    read: dict[nn.Module, Tensor] = {}
    written: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        read[module] = args[0] if args else kwargs["hidden_states"]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        written[module] = output[0]

    with torch.no_grad(), disabled(model), _hooked(attentions, before, after):
        model.base_model(**inputs, use_cache=False)
    return {attention: (read[attention], written[attention]) for attention in attentions}


def _distances(model: PreTrainedModel, parts: list[Part], *, learn: bool = False) -> Tensor:
    """Return the distance of each attention from the stock one, `[layers]`; with `learn`, compute gradients too."""
    squares = [torch.stack([wrote.float().square().sum() for _, wrote in stock.values()]) for _, stock in parts]
    sizes = torch.stack(squares).sum(0).clamp_min(1e-12)
    found = torch.zeros(len(parts[0][1]))
    for inputs, stock in parts:
        with torch.set_grad_enabled(learn):
            shares = _errors(model, stock, inputs) / sizes
            if shares.requires_grad:
                shares.sum().backward()  # type: ignore[no-untyped-call]
        found += shares.detach().cpu()
    return found


def _errors(model: PreTrainedModel, stock: Traffic, inputs: dict[str, Tensor]) -> Tensor:
    """Return the squared error of each attention's output, summed, `[layers]`."""
    found: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden, _ = stock[module]
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        found[module] = (output[0].float() - stock[module][1].float()).square().sum()
        # Later modules need no graph, since the next attention gets the stock input.
        return (output[0].detach(), *output[1:])

    with _hooked(stock, before, after):
        model.base_model(**inputs, use_cache=False)
    return torch.stack([found[attention] for attention in stock])
