"""Costs of converting each layer alone, to choose the layers of a hybrid."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from hf_posenc.errors import OptionError
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.patch import patch, unpatch
from hf_posenc.patches.surgery import SHARED, is_patched
from hf_posenc.recipes import durations
from hf_posenc.recipes.data.collation import Corruptor
from hf_posenc.recipes.loading import seeded
from hf_posenc.recipes.training.starts import check_counts, check_windows, held_out, kept, mean_loss
from hf_posenc.recipes.training.transfer import JUDGED, places_of, transfer


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer: rise of the loss on held-out windows where it alone is converted, in nats per token.

    `distance` is that of its attention from the original's after the transfer, see `TransferResult`.
    """

    stack: str
    layer: int
    distance: float
    cost: float


@dataclass(frozen=True)
class LayerCosts:
    """Costs of all layers under one scheme, and the loss of the original on the held-out windows, in nats per token."""

    scheme: str
    loss: float
    layers: tuple[LayerCost, ...]

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
        dear = sorted(self.layers, key=lambda layer: layer.cost, reverse=True)[:spared]
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
    options: Mapping[str, Any] | None = None,
    hides: Corruptor | None = None,
    steps: int = 60,
    batch_size: int = 4,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    tell: Callable[[float], None] | None = None,
) -> LayerCosts:
    """Measure the cost of converting each layer alone, after a short attention transfer of all.

    The model is stock again afterwards, with its weights bit for bit.

    Args:
        model: Stock model whose encoding acts in attention.
        scheme: Name of the scheme.
        ids: Windows of text, int64 `[N, S]`; the last quarter (at most 8 or a batch) is held out to measure on.
        options: Options of the scheme.
        hides: Collator of an encoder or an encoder-decoder, from `corruptor`; `None` for causal models.
        steps: Steps of the transfer.
        batch_size: Windows per step.
        seed: Random seed of the scheme's start and of the order of windows.
        progress: Function called with the number of steps and layers done.
        tell: Function called with an estimate of all seconds when one step is timed.

    Raises:
        OptionError: The scheme has nothing to learn in attention, the model's encoding does not act there, or the model
            is converted.
        ShapeError: `ids` are not windows of known tokens.
    """
    check_windows("layer_costs", model, ids, least=2)
    check_counts("layer_costs", steps=(steps, 1), batch_size=(batch_size, 1), seed=(seed, 0))
    if len(ids) < 2:
        raise OptionError(f"layer_costs: got {len(ids)} window; expected 2 or more, one of them to measure on.")
    if is_patched(model):
        raise OptionError(
            f"layer_costs: the {type(model).__name__} is converted already, and its schemes would be lost. Give the "
            "original model."
        )
    architecture, encodes = of_model(model), model.config.is_encoder_decoder
    collate, held = hides or default_data_collator, ids[-held_out(len(ids), most=min(batch_size, JUDGED)) :]
    measured = collate([{"input_ids": row, "labels": row} for row in held])
    one = {name: value[:1] for name, value in measured.items()}
    of_layer = len(held) * durations.timed(lambda: mean_loss(model, one))
    begun: list[float] = []

    def stepped(done: int) -> None:
        begun.append(time.monotonic())
        if done == 2 and tell is not None:
            layers = sum(len(architecture.attentions(body)) for body in architecture.stacks(model).values())
            tell(steps * (begun[1] - begun[0]) + (layers + 1) * of_layer)
        if progress is not None:
            progress(done)

    with kept(list(model.parameters())) as put_back:
        try:
            with seeded(seed):
                patch(model, scheme, **(options or {}))
            found = transfer(
                model,
                ids,
                corrupt=None if hides is None else hides.corrupt,
                projections=True,
                steps=steps,
                batch_size=batch_size,
                seed=seed,
                progress=stepped,
            )
            trained = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            places, costs = places_of(model, architecture), []
            unpatch(model)
            put_back()
            native = mean_loss(model, measured)
            for index, (stack, layer) in enumerate(places):
                patch(model, scheme, layers=[layer], stacks=[stack] if encodes else None, **(options or {}))
                attention = architecture.attentions(architecture.stacks(model)[stack])[layer]
                prefix = next(name for name, module in model.named_modules() if module is attention)
                names = [n for n in model.state_dict() if n.startswith(f"{prefix}.") or SHARED in n.split(".")]
                model.load_state_dict({name: trained[name] for name in names}, strict=False)
                costs.append(LayerCost(stack, layer, found.after[index], mean_loss(model, measured) - native))
                unpatch(model)
                put_back()
                if progress is not None:
                    progress(steps + index + 1)
        finally:
            if is_patched(model):
                unpatch(model)
    return LayerCosts(scheme, native, tuple(costs))
