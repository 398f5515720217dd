"""Start a scheme where the model's attention is, whatever the scheme computes: layer by layer, by what attention writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.errors import NotPatchedError, OptionError, ShapeError
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.modes import evaluating
from hf_posenc.patches.patch import disabled
from hf_posenc.recipes.loading import trained_length
from hf_posenc.recipes.training.distillation import without_jumps
from hf_posenc.recipes.training.fit_bias import check_windows
from hf_posenc.recipes.training.restore import kept
from hf_posenc.scheme import Scheme

# By module, what an attention reads and what it writes, both `[B, S, E]`.
Traffic = dict[nn.Module, tuple[Tensor, Tensor]]
# What a model is given, and what goes through its attentions in the stock model then.
Part = tuple[dict[str, Tensor], Traffic]


@dataclass(frozen=True)
class Match:
    """How far the attention of the layers is from that of the stock model.

    Each number is the mean square of the difference of what it writes, relative to the mean square of what the stock one writes.

    Attributes:
        before: By layer, before the fit.
        after: By layer, after it.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]


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
    """Fit the schemes of a converted model, in place, so that each attention writes what it wrote in the stock model.

    Every layer is given what it reads in the stock model, so that all are fitted at once and none waits for those below it. The
    model's own weights stay as they are: what is found is the best that the scheme's weights can do alone. Unlike `fit`,
    which knows biases of the distance, this takes any scheme with weights in attention. It costs about as much as as many
    training steps, and draws nothing from the caller's random numbers.

    Args:
        model: A converted model whose own encoding was removed, and was one of attention (not a table added to the inputs).
        ids: Windows of text, int64 `[N, S]`; those longer than the trained length are cut.
        position_ids: Of the windows, `[N, S]`, where they hold packed documents, which begin anew and do not see each other.
        corrupt: What the encoder of an encoder-decoder reads in place of a text.
        steps: Steps of Adam, whose rate goes down to 0 along a cosine.
        batch_size: Windows per step.
        micro_batch_size: Windows per forward, to save memory; `None` is all of a step. The same fit, but for rounding.
        learning_rate: At first.
        seed: Of the order of the windows.
        progress: Called after each step with how many are done.

    Returns:
        How well it went, on the first windows. Where it did not get nearer, or something raises, the weights are as they were.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: The schemes have no weights in attention, the model's own encoding is none of attention, a number is
            out of range, or the model takes no positions and some are given.
        ShapeError: There is no window of at least two tokens that the model knows, or there are not as many positions.
    """
    if not surgery.is_patched(model):
        raise NotPatchedError(f"match: the {type(model).__name__} is not patched. Call hf_posenc.patch first.")
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
        some = parts(torch.arange(min(batch_size, len(ids)), device=ids.device))
        before = _distances(model, some)
        for step in range(steps):
            optimizer.zero_grad()
            chosen = torch.randint(len(ids), (batch_size,), generator=order).to(ids.device)
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
        after = _distances(model, some)
        if not after.sum() <= before.sum():
            after = before
            put_back()
    return Match(tuple(before.tolist()), tuple(after.tolist()))


def _matchable(model: PreTrainedModel) -> list[nn.Module]:
    """Return the patched attentions; raises if a stock attention does not say what positions do."""
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
    """Return windows `[N, S]` of at most the trained length."""
    if length is None or ids.shape[1] <= length:
        return ids
    return ids[:, : ids.shape[1] // length * length].reshape(-1, length)


def _positions(positions: Tensor, ids: Tensor, length: int | None, device: torch.device) -> Tensor | None:
    """Return the positions of the windows `[N, S]` that are read; a document that a window begins within begins there."""
    if positions.shape != ids.shape:
        raise ShapeError(
            f"match: position_ids has the shape {list(positions.shape)}; expected that of ids, {list(ids.shape)}."
        )
    return without_jumps(_windows(positions, length).to(device))


def _inputs(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None, corrupt: Callable[[Tensor], Tensor] | None
) -> dict[str, Tensor]:
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids} if positions is None else {"input_ids": ids, "position_ids": positions}
    first = torch.full_like(ids[:, :1], model.config.decoder_start_token_id)
    return {
        "input_ids": ids if corrupt is None else corrupt(ids),
        "decoder_input_ids": torch.cat([first, ids[:, :-1]], dim=1),
    }


@contextlib.contextmanager
def _training_only(model: nn.Module, weights: list[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Leave gradients to these weights, and dropout out; gives what puts the weights back, as is done when something raises."""
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
    """Return how far each attention is from the stock one where both read the same, `[layers]`; with gradients if wanted."""
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
    """Return the sum of the squared differences of what each attention writes, `[layers]`."""
    found: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden, _ = stock[module]
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        found[module] = (output[0].float() - stock[module][1].float()).square().sum()
        # Nothing after it is read, so nothing after it needs a graph.
        return (output[0].detach(), *output[1:])

    with _hooked(stock, before, after):
        model.base_model(**inputs, use_cache=False)
    return torch.stack([found[attention] for attention in stock])
