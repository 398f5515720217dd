"""Distillation of features: a converted encoder learns the original's features of each sample.

The original reads samples of one size, texts of 512 tokens or pictures of 224 pixels; the converted model learns larger
ones, too. `Samples` makes the features to learn for those, and is all that differs between texts and pictures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from hf_posenc.errors import OptionError
from hf_posenc.patches.patch import evaluating
from hf_posenc.recipes.training.callbacks import parameter_groups
from hf_posenc.recipes.training.distillation import hidden_distance
from hf_posenc.recipes.training.rates import rates
from hf_posenc.recipes.training.starts import check_counts, check_rates, held_out, kept, verdict

# Embeddings of samples, `[B, E]`, and the hidden states of their tokens or patches by layer, `[B, S, E]`.
Features = tuple[Tensor, tuple[Tensor, ...]]
# The most samples that judge the result, and how many are measured at once.
_JUDGED, _AT_ONCE = 32, 8
# Agreement from which on a start counts as exact. The rate of the model has this factor then, since only the samples
# that the original cannot read are new to it.
_EXACT, _CAREFUL = 0.99, 0.1
_WARMUP = 0.05


class Samples(ABC):
    """Samples to learn from, each of which can be had at several sizes.

    Attributes:
        sizes: Sizes to measure at: the original's own first, the largest last.
    """

    sizes: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def schedule(self, steps: int, draw: torch.Generator) -> list[int]:
        """Return the size of the samples of each step."""

    @abstractmethod
    def tokens(self, size: int) -> int:
        """Return the number of tokens of a sample of a size."""

    @abstractmethod
    def inputs(self, chosen: list[int], size: int) -> Any:
        """Return some samples at a size, as `read` takes them."""

    @abstractmethod
    def read(self, model: PreTrainedModel, inputs: Any) -> Features:
        """Return the features that a converted model has of samples."""

    @abstractmethod
    def wanted(self, original: PreTrainedModel, chosen: list[int], size: int) -> Features:
        """Return the features to learn for samples at a size, from the original's at its own."""

    def alone(self, original: PreTrainedModel, inputs: Any) -> Features:
        """Return the features that the original has of samples, at a size that need not be its own."""
        return self.read(original, inputs)

    def cosines(self, found: Features, wanted: Features) -> dict[str, Tensor]:
        """Return cosines of features, `[B]` each, by name."""
        return {"embedding": F.cosine_similarity(found[0].double(), wanted[0].double())}

    def other_measures(self, read: Callable[[Any], Features], chosen: list[int], size: int) -> dict[str, float]:
        """Return further measures of a function that returns features, by name."""
        return {}


@dataclass(frozen=True)
class Agreement:
    """Agreement with the original on held-out samples of a size: mean cosines, and other measures, by name.

    Attributes:
        size: Tokens of a text without special ones, or pixels of a side of a picture.
        original: Measures of the original, which reads samples of this size by itself.
        before: Measures of the converted model before the distillation.
        after: The same after it.
    """

    size: int
    original: Mapping[str, float]
    before: Mapping[str, float]
    after: Mapping[str, float]

    def row(self, unit: str) -> dict[str, float | None]:
        """Return all numbers as a row of a table, by its headers; `None` for what is not measured."""
        stages = {"original": self.original, "before": self.before, "after": self.after}
        names = {f"{name}, {stage}": found.get(name) for name in self.after for stage, found in stages.items()}
        return {unit: self.size, **names}


@dataclass(frozen=True)
class FeaturesResult:
    """Outcome of a distillation of features, by sizes from the original's to the largest."""

    rows: tuple[Agreement, ...]
    accepted: bool
    sentence: str


@torch.inference_mode(False)  # Gradients are needed, also where the caller wants none.
def distil_features(
    model: PreTrainedModel,
    original: PreTrainedModel,
    samples: Samples,
    *,
    steps: int = 300,
    batch_size: int = 8,
    learning_rate: float | None = None,
    scheme_learning_rate: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> FeaturesResult:
    """Train an encoder, in place, to have of samples of all sizes the features that the original has at its own.

    The loss is 1 minus the cosine of the embeddings, plus the distance of the hidden states of all layers. The caller's
    random state is unchanged.

    The last quarter of the samples (at most 32) is held out. If the features of these come no nearer to the original's,
    all weights stay as they were, and a warning says so.

    Args:
        model: Encoder, converted or made for another size.
        original: The encoder as it was, on the same device.
        samples: At least 4 samples.
        steps: Steps of Adam; the rates rise over the first twentieth, and then fall to 0 with a cosine.
        batch_size: Samples per step.
        learning_rate: Peak learning rate of the model's own weights; `None` follows from the model's size, and is a
            tenth of that where the start is exact at the original's size.
        scheme_learning_rate: Peak learning rate of the scheme's weights; `None` likewise.
        seed: Random seed of the sizes and samples of each step.
        progress: Function called after each step with the tokens of a sample in the steps so far, and in all steps.

    Raises:
        OptionError: A number is out of range, or there are fewer samples.
    """
    caller = "distil_features"
    check_counts(caller, steps=(steps, 1), batch_size=(batch_size, 1), seed=(seed, 0))
    check_rates(caller, learning_rate=learning_rate, scheme_learning_rate=scheme_learning_rate)
    if len(samples) < 4:
        raise OptionError(f"{caller}: got {len(samples)} samples; expected 4 at least, of which one is held out.")
    learned = len(samples) - held_out(len(samples), most=_JUDGED)
    own = rates(model, "training", batch_size * samples.tokens(samples.sizes[-1]) // 2, fitted=False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    draw = torch.Generator().manual_seed(seed)
    judged = list(range(learned, len(samples)))
    read, alone = partial(samples.read, model), partial(samples.alone, original)
    measure = partial(_measured, samples, original, judged)
    with evaluating(model), evaluating(original), kept(weights) as put_back:
        before = measure(read)
        groups = parameter_groups(model, scheme_learning_rate=scheme_learning_rate or own.scheme)
        careful = _CAREFUL if _agreement(before[samples.sizes[0]]) > _EXACT else 1.0
        optimizer = torch.optim.Adam(groups, lr=learning_rate or careful * own.model)
        schedule = get_cosine_schedule_with_warmup(optimizer, round(_WARMUP * steps), steps)
        sizes = samples.schedule(steps, draw)
        work = [samples.tokens(size) for size in sizes]
        for step, size in enumerate(sizes, 1):
            chosen = torch.randint(learned, (batch_size,), generator=draw).tolist()
            with torch.no_grad():
                wanted, wanted_states = samples.wanted(original, chosen, size)
            got, states = read(samples.inputs(chosen, size))
            loss = (1 - F.cosine_similarity(got, wanted)).mean() + hidden_distance(states, wanted_states)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            # Under autocast, the casts of the weights before the step would serve on.
            torch.clear_autocast_cache()
            if progress is not None:
                progress(sum(work[:step]), sum(work))
        after, control = measure(read), measure(alone)
        means = (1 - sum(map(_agreement, found.values())) / len(found) for found in (before, after))
        accepted, sentence = verdict("distillation", "distance from the features of the original", *means)
        if not accepted:
            put_back()
        with torch.no_grad():
            for way, found in ((alone, control), (read, after)):
                for size in samples.sizes:
                    found[size] |= samples.other_measures(way, judged, size)
    rows = (Agreement(size, control[size], before[size], after[size]) for size in samples.sizes)
    return FeaturesResult(tuple(rows), accepted, sentence)


@torch.no_grad()
def _measured(
    samples: Samples, original: PreTrainedModel, judged: list[int], read: Callable[[Any], Features]
) -> dict[int, dict[str, float]]:
    """Return the measures of a function that returns features, on the samples that judge, by size and name."""
    found, parts = {}, [judged[start : start + _AT_ONCE] for start in range(0, len(judged), _AT_ONCE)]
    for size in samples.sizes:
        pairs = ((read(samples.inputs(part, size)), samples.wanted(original, part, size)) for part in parts)
        each = [samples.cosines(*pair) for pair in pairs]
        found[size] = {name: float(torch.cat([part[name] for part in each]).mean()) for name in each[0]}
    return found


def _agreement(cosines: Mapping[str, float]) -> float:
    return sum(cosines.values()) / len(cosines)
