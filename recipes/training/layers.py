"""Costs of converting each layer alone, by perplexity and by copying and recalling, to choose the layers of a hybrid.

A few layers point at the previous token, and all copying rests on them, which perplexity hardly shows: without
positions in one such layer, a model that loses 10 % of its perplexity may copy nothing. Attention maps do not tell
which layers can be spared; to convert each alone does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from hf_posenc.errors import OptionError
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.patch import Kept, patch, unpatch
from hf_posenc.patches.surgery import SHARED, is_patched
from hf_posenc.recipes import durations
from hf_posenc.recipes.data.collation import Corruptor
from hf_posenc.recipes.evaluation.measure import Workers
from hf_posenc.recipes.evaluation.recall import InductionCopy, ordinary_tokens, recalls_for
from hf_posenc.recipes.loading import seeded, trained_length
from hf_posenc.recipes.training.starts import check_counts, check_windows, held_out, kept, mean_loss
from hf_posenc.recipes.training.transfer import places_of, transfer

# Tokens of a window, windows of a step of the transfer, and its steps, unless more is wanted.
LENGTH, BATCH, STEPS = 256, 2, 60
# Windows that are held out to measure on, and random sequences to copy and to recall from, with the tokens of each.
WINDOWS, _SEQUENCES, _TOKENS = 32, 32, 128
# Forwards of the model that a step of the transfer takes as long as.
_STEP = 4
# A layer carries an ability if less than this share of it is left without.
_LEFT = 0.5


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What held-out text shows of a model in which some layers are converted.

    Attributes:
        cost: Rise of the loss, in nats per token.
        abilities: Shares of random tokens that the model copies and recalls, by name, where the original is above
            guessing.
    """

    cost: float
    abilities: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LayerCost(Effect):
    """Effect of one layer, if it alone is converted.

    Attributes:
        layer: Index of the layer in its stack.
        distance: Distance of its attention from the original's after the transfer, see `TransferResult`; `None` without
            a transfer.
    """

    stack: str
    layer: int
    distance: float | None = None


@dataclass(frozen=True)
class LayerCosts:
    """Costs of all layers under one scheme.

    Attributes:
        loss: Loss of the original on the held-out windows, in nats per token.
        abilities: Shares of random tokens that the original copies and recalls, by name, where it is above guessing.
        layers: Cost of each layer alone.
        hybrids: Effect of the `cheapest` layers together, by the number of layers that are spared.
    """

    scheme: str
    loss: float
    abilities: Mapping[str, float]
    layers: tuple[LayerCost, ...]
    hybrids: Mapping[int, Effect] = field(default_factory=dict)

    def price(self, effect: Effect) -> float:
        """Return all measures in one number: the rise of the perplexity plus the mean loss of abilities, as shares.

        An apparent gain is chance, and counts for nothing.
        """
        lost = [1 - effect.abilities[name] / share for name, share in self.abilities.items()]
        return max(0.0, math.expm1(effect.cost)) + max(0.0, sum(lost) / max(1, len(lost)))

    def carrying(self, name: str) -> list[LayerCost]:
        """Return the layers without which less than half of an ability is left, the most important first."""
        found = [each for each in self.layers if each.abilities[name] < _LEFT * self.abilities[name]]
        return sorted(found, key=lambda each: each.abilities[name])

    def cheapest(self, spared: int) -> dict[str, list[int]]:
        """Return the layers to convert if the `spared` most expensive keep their encoding, by stack.

        Raises:
            OptionError: No layer would be converted.
        """
        if not 0 <= spared < len(self.layers):
            raise OptionError(
                f"cheapest(spared={spared}): the model has {len(self.layers)} layers; expected 0 to "
                f"{len(self.layers) - 1} of them to spare."
            )
        dear = sorted(self.layers, key=self.price, reverse=True)[:spared]
        found: dict[str, list[int]] = {}
        for layer in self.layers:
            found.setdefault(layer.stack, [])
            if layer not in dear:
                found[layer.stack].append(layer.layer)
        return found


def layer_costs(
    model: PreTrainedModel,
    scheme: str,
    ids: Tensor,
    *,
    native: Kept = "remove",
    options: Mapping[str, Any] | None = None,
    hides: Corruptor | None = None,
    special: Collection[int] = (),
    spared: Collection[int] = (),
    steps: int = STEPS,
    batch_size: int = BATCH,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    tell: Callable[[float], None] | None = None,
) -> LayerCosts:
    """Measure the cost of converting each layer alone, after a short attention transfer of all.

    Of a causal model that copies or recalls random tokens, that is measured, too. The model is stock again afterwards,
    with its weights bit for bit.

    Args:
        model: Stock model whose encoding acts in attention.
        scheme: Name of the scheme.
        ids: Windows of text, int64 `[N, S]`; the last quarter (at most 32) is held out to measure on.
        native: Fate of the model's own encoding in a converted layer, as for `patch`.
        options: Options of the scheme.
        hides: Collator of an encoder or an encoder-decoder, from `corruptor`; `None` for causal models.
        special: Special tokens, which no random sequence has.
        spared: Numbers of layers to spare whose hybrids are measured, too.
        steps: Steps of the transfer; 0 measures the conversion as it starts.
        batch_size: Windows per step.
        seed: Random seed of the scheme's start and of the order of windows.
        progress: Function called with the number of steps, layers and hybrids done.
        tell: Function called with an estimate of all seconds, before the first step.

    Raises:
        OptionError: The scheme does not act in attention or has nothing to learn there, the model's encoding does not
            act there or is kept, or the model is converted.
        ShapeError: `ids` are not windows of known tokens.
    """
    check_windows("layer_costs", model, ids, least=2)
    check_counts("layer_costs", steps=(steps, 0), batch_size=(batch_size, 1), seed=(seed, 0))
    if len(ids) < 2:
        raise OptionError(f"layer_costs: got {len(ids)} window; expected 2 or more, one of them to measure on.")
    if native == "keep":
        raise OptionError(
            "layer_costs(native='keep'): where every layer keeps its encoding, none costs "
            "anything. Give 'remove', or a share of the rotary pairs."
        )
    if is_patched(model):
        raise OptionError(
            f"layer_costs: the {type(model).__name__} is converted already, and its schemes would be lost. Give the "
            "original model."
        )
    apart = held_out(len(ids), most=WINDOWS)
    measuring = _Measuring(model, ids[-apart:], hides, special)
    converting: dict[str, Any] = {"native": native, **(options or {})}
    if tell is not None:
        tell(measuring.seconds(steps * batch_size, len(spared)))
    with kept(list(model.parameters())) as put_back:
        try:
            with seeded(seed):
                patch(model, scheme, **converting)
            places = places_of(model, of_model(model))
            distances: tuple[float | None, ...] = (None,) * len(places)
            if steps:
                corrupt = None if hides is None else hides.corrupt
                shared: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seed": seed, "progress": progress}
                distances = transfer(model, ids[:-apart], corrupt=corrupt, projections=True, **shared).after
            trained = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            unpatch(model)
            put_back()

            original = measuring.effect(is_original=True)

            def effect(chosen: Mapping[str, list[int]]) -> Effect:
                with _converted(model, scheme, chosen, trained, converting):
                    found = measuring.effect()
                put_back()
                return replace(found, cost=found.cost - original.cost)

            costs = []
            for index, ((stack, layer), distance) in enumerate(zip(places, distances, strict=True)):
                costs.append(LayerCost(stack=stack, layer=layer, distance=distance, **vars(effect({stack: [layer]}))))
                if progress is not None:
                    progress(steps + index + 1)
            found = LayerCosts(scheme, original.cost, original.abilities, tuple(costs))
            return replace(found, hybrids={count: effect(found.cheapest(count)) for count in spared})
        finally:
            if is_patched(model):
                unpatch(model)


def windows_for(
    tokens: Tensor, length: int | None = None, *, trained: int | None = None, start: int | None = None
) -> Tensor:
    """Return windows `[N, S]` of a text `[tokens]`, no more than `layer_costs` reads with its defaults.

    Args:
        length: Tokens per window; `None` is 256, or the `trained` length if that is less.
        start: Token that every window begins with, in the place of its first; `None` is none.
    """
    size = length or min(LENGTH, trained or LENGTH)
    count = min(len(tokens) // size, WINDOWS + STEPS * BATCH)
    windows = tokens[: count * size].clone().view(-1, size)
    if start is not None:
        windows[:, 0] = start
    return windows


def seconds_for(model: PreTrainedModel, windows: Tensor) -> float:
    """Estimate how long `layer_costs` takes for a causal model of these shapes on windows `[N, S]`."""
    measuring = _Measuring(model, windows[-held_out(len(windows), most=WINDOWS) :], None, ())
    return measuring.seconds(STEPS * BATCH, 1)


class _Measuring:
    """The measures of a model: its loss on windows `[N, S]`, and how a causal model copies and recalls.

    Attributes:
        inputs: Arguments of the forward.
        abilities: Measures of copying and recalling, by name.
    """

    def __init__(
        self, model: PreTrainedModel, windows: Tensor, hides: Corruptor | None, special: Collection[int]
    ) -> None:
        self._model, collate = model, hides or default_data_collator
        self.inputs = collate([{"input_ids": row, "labels": row} for row in windows])
        symbols = ordinary_tokens(windows.flatten().cpu(), special)
        length = min(_TOKENS, trained_length(model.config) or _TOKENS)
        self.abilities: dict[str, InductionCopy] = recalls_for(model.config, symbols, length, samples=_SEQUENCES)

    def effect(self, *, is_original: bool = False) -> Effect:
        """Return the loss of a model, and what it copies and recalls: from the original on, only what that does."""
        # Under autocast, casts of the weights that were measured before would serve on.
        torch.clear_autocast_cache()
        grids = {name: measure(self._model, Workers(alone=True))[0] for name, measure in self.abilities.items()}
        if is_original:  # Others cannot be told from chance.
            grids = {name: grid for name, grid in grids.items() if grid.quantity.shows(grid.samples)}
            self.abilities = {name: self.abilities[name] for name in grids}
        shares = {name: grid.at(grid.points[0]).mean for name, grid in grids.items()}
        return Effect(cost=mean_loss(self._model, self.inputs), abilities=shares)

    def seconds(self, windows: int, hybrids: int) -> float:
        """Estimate the time of a transfer of so many windows, and of measuring the original, all layers and hybrids."""
        one = {name: value[:1] for name, value in self.inputs.items()}
        window = durations.timed(lambda: mean_loss(self._model, one))
        each = window * len(next(iter(self.inputs.values())))
        each += sum(measure.seconds(self._model) for measure in self.abilities.values())
        architecture = of_model(self._model)
        layers = sum(len(architecture.attentions(body)) for body in architecture.stacks(self._model).values())
        return _STEP * windows * window + (1 + layers + hybrids) * each


@contextlib.contextmanager
def _converted(
    model: PreTrainedModel,
    scheme: str,
    chosen: Mapping[str, list[int]],
    trained: Mapping[str, Tensor],
    converting: Mapping[str, Any],
) -> Iterator[None]:
    """Convert some layers by stack, with the weights that all had after the transfer; afterwards the model is stock."""
    architecture = of_model(model)
    for stack, layers in chosen.items():
        if layers:
            stacks = [stack] if model.config.is_encoder_decoder else None
            patch(model, scheme, layers=layers, stacks=stacks, **converting)
    modules = {module: name for name, module in model.named_modules()}
    bodies = architecture.stacks(model)
    places = [architecture.attentions(bodies[stack])[layer] for stack, layers in chosen.items() for layer in layers]
    own = tuple(f"{modules[attention]}." for attention in places)
    names = [name for name in model.state_dict() if name.startswith(own) or SHARED in name.split(".")]
    model.load_state_dict({name: trained[name] for name in names}, strict=False)
    try:
        yield
    finally:
        unpatch(model)
