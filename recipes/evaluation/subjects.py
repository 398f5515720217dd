"""Models to evaluate by name: a checkpoint, an adapter, a run of a recipe, or one to be converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc import registry
from hf_posenc.errors import OptionError
from hf_posenc.patches import adapters
from hf_posenc.patches.patch import patch
from hf_posenc.recipes import loading
from hf_posenc.recipes.data.sources import BUILTIN, expanded
from hf_posenc.recipes.runs.directory import MODEL, RECIPE
from hf_posenc.recipes.schema.recipe import Data, Recipe


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: a directory, also of an adapter, or a name on the hub, and a scheme to convert it to."""

    name: str
    source: str
    scheme: str | None = None

    @property
    def base(self) -> str:
        """The base model of an adapter; for any other model, its source."""
        return adapters.base_of(self.source) if Path(self.source, "adapter_config.json").is_file() else self.source

    @property
    def data(self) -> Data | None:
        """The text of the run that the model comes from; `None` if it comes from none."""
        record = Path(self.source).parent / RECIPE
        return Recipe.parse(record).data if Path(self.source).name == MODEL and record.is_file() else None

    def has_trained_on(self, text: str) -> bool:
        """Whether the model comes from a run whose training text is in a file or folder, or around it."""
        data = self.data
        if data is None:
            return False
        here, there = (expanded(place).resolve() for place in (text, data.source))
        # The built-in text is read in its held-out part.
        return text not in (BUILTIN, data.held_out) and (here.is_relative_to(there) or there.is_relative_to(here))

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model; an adapter without one uses that of its base."""
        own = Path(self.source, "tokenizer_config.json").is_file()
        return loading.load_tokenizer(self.source if own else self.base)

    def load(self, device: torch.device, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """Return the model on a device, converted if requested, with the same weights in every process.

        The seed is that of an untrained scheme; without a dtype, it is that of the checkpoint.
        """
        # New parameters are drawn on the CPU. The caller's random state must not change.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model, _ = loading.load(self.base, **({} if dtype is None else {"dtype": dtype}))
            if self.base != self.source:
                model = adapters.merged(model, self.source)
            if self.scheme is not None:
                patch(model, self.scheme)
        return model.to(device).eval()


def subjects(given: Sequence[str]) -> tuple[Subject, ...]:
    """Return the models for paths or names on the hub, each alone or as `PATH:SCHEME`.

    The folder of a run of `hf-posenc train` stands for its model.

    Raises:
        OptionError: A model is given twice.
        UnknownSchemeError: A scheme is unknown.
    """
    if len(set(given)) < len(given):
        raise OptionError(f"Got the models {', '.join(given)}; each can be given once.")
    pairs = [_split(text) for text in given]
    names = (Path(source).resolve().name if Path(source).exists() else source for source, _ in pairs)
    short = [name + (f", {scheme} untrained" if scheme else "") for name, (_, scheme) in zip(names, pairs, strict=True)]
    return tuple(
        Subject(name if short.count(name) == 1 else text, model_in(source), scheme)
        for name, text, (source, scheme) in zip(short, given, pairs, strict=True)
    )


def _split(text: str) -> tuple[str, str | None]:
    source, colon, scheme = text.rpartition(":")
    # A path may contain a colon itself.
    if not colon or Path(text).exists():
        return text, None
    registry.get(scheme)
    return source, scheme


def model_in(source: str) -> str:
    """Return the folder of a built-in model or of the model in a run; other sources unchanged."""
    source = loading.place(source)
    return source if Path(source, "config.json").is_file() or not Path(source, MODEL).is_dir() else f"{source}/{MODEL}"
