"""What a recipe says: which model gets which scheme, on which text, trained how. Every field is a key of its YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from hf_posenc.errors import RecipeError
from hf_posenc.recipes import library, schema


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The swap itself.

    Attributes:
        scheme: A registered scheme; null trains the model as it is, which makes the control of an experiment.
        options: Options of the scheme.
        native: What becomes of the model's own encoding: removed at once, kept, or handed over from during training.
        handover: With `native: handover`, the share of the steps that the way takes.
        layers: Which layers; a list of indices or a pattern like "every:4"; null is all.
        stacks: Of an encoder-decoder, "encoder" and/or "decoder"; null is all.
        fit: Start an additive scheme by regression on the native encoding ("native") or on another scheme of this name.
    """

    scheme: str | None
    options: dict[str, Any] = field(default_factory=dict)
    native: Literal["remove", "keep", "handover"] = "remove"
    handover: float = 0.3
    layers: list[int] | str | None = None
    stacks: list[str] | None = None
    fit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text to train and to measure on.

    Attributes:
        source: "builtin" (Python's own documentation, offline), a local file or folder of text, jsonl or parquet, or the name
            of a dataset on the hub.
        config: Configuration of a dataset on the hub.
        split: Split to train on.
        column: Column that holds the text.
        held_out: Split or local file to measure on; null takes the last `held_out_share` of the training text.
        held_out_share: Share of the documents that is set aside where there is no split for it.
        streaming: Read as the training goes, without downloading or storing the whole; then `held_out` must be given.
        packing: "windows" cuts the documents, one after the other, into windows of the training length; "documents" fills
            windows with whole documents that do not see each other.
        limit: Use at most this many documents; null is all.
    """

    source: str = "builtin"
    config: str | None = None
    split: str = "train"
    column: str = "text"
    held_out: str | None = None
    held_out_share: float = 0.1
    streaming: bool = False
    packing: Literal["windows", "documents"] = "windows"
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long and how fast.

    Attributes:
        steps: Optimizer steps.
        length: Tokens per window; null is the model's trained length.
        batch_size: Windows per optimizer step, over all processes: the same training on any number of them.
        micro_batch_size: Windows per forward of one process, to save memory; null is as many as its share of the batch.
        learning_rate: Peak, for the model's own weights.
        scheme_learning_rate: Peak, for the weights of the scheme, which start from nothing.
        weight_decay: On the model's own matrices.
        warmup: Share of the steps over which the rates rise.
        schedule: Name of a schedule of transformers, for instance "cosine", "linear", "constant_with_warmup".
        max_grad_norm: Gradients are scaled down to this norm; 0 leaves them.
        new_parameters_first: Share of the steps at the beginning in which the scheme's weights alone are trained.
        mixed_lengths: Cut each batch into windows of one of these lengths, drawn at random; null is off.
        skip_to: Train at the positions of texts of this length, by skipping some (PoSE); null is off.
        precision: Of the forward; the weights stay as loaded.
        gradient_checkpointing: Whether to recompute activations in the backward pass, to save memory.
        seed: Of everything that is drawn.
    """

    steps: int = 300
    length: int | None = None
    batch_size: int = 8
    micro_batch_size: int | None = None
    learning_rate: float = 1e-3
    scheme_learning_rate: float = 5e-3
    weight_decay: float = 0.0
    warmup: float = 0.05
    schedule: str = "cosine"
    max_grad_norm: float = 1.0
    new_parameters_first: float = 0.0
    mixed_lengths: list[int] | None = None
    skip_to: int | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    gradient_checkpointing: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Learning from the model as it was.

    Attributes:
        share: Share of the loss that is the divergence from the original's predictions, from 0 to 1; 0 is off.
        hidden: Factor on the distance from the original's hidden states; 0 is off.
        until: Share of the steps after which both have faded to nothing, linearly; 0 keeps them to the end.
    """

    share: float = 0.0
    hidden: float = 0.0
    until: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Training a small adapter instead of all weights.

    Attributes:
        kind: "none" trains all weights, "lora" LoRA and the scheme's weights, "scheme" the scheme's weights alone.
        rank: Of LoRA.
        alpha: Of LoRA.
        dropout: Of LoRA.
        targets: Modules that get LoRA, by the end of their name; null is what PEFT knows for the architecture.
        four_bit: Whether to load the model's own weights in 4 bits (QLoRA; needs bitsandbytes).
    """

    kind: Literal["none", "lora", "scheme"] = "none"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] | None = None
    four_bit: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured before, during and after.

    Attributes:
        contexts: Context lengths; null is a quarter of the trained length up to eight times it.
        windows: Held-out windows.
        every: Steps between measurements; 0 measures before and after only.
    """

    contexts: list[int] | None = None
    windows: int = 16
    every: int = 0


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What is kept while it runs.

    Attributes:
        every: Steps between checkpoints to resume from.
        keep: How many of them are kept.
        loggers: Where the trainer reports to: "tensorboard", "trackio", "wandb".
    """

    every: int = 100
    keep: int = 2
    loggers: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A conversion and its adaptation.

    Attributes:
        summary: One sentence for the list of recipes.
        model: A local directory, a name on the hub, or "tiny-llama", which comes with the package.
        conversion: The swap.
        data: The text.
        training: How long and how fast.
        distillation: Learning from the model as it was.
        adapter: Training a small adapter instead.
        evaluation: What is measured.
        saving: What is kept while it runs.
    """

    summary: str = ""
    model: str
    conversion: Conversion
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    distillation: Distillation = field(default_factory=Distillation)
    adapter: Adapter = field(default_factory=Adapter)
    evaluation: Evaluation = field(default_factory=Evaluation)
    saving: Saving = field(default_factory=Saving)

    @classmethod
    def read(cls, source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe.

        Args:
            source: A YAML file, or the name of a recipe that comes with the package.
            overrides: `section.key=value` each, the value as in YAML; they win over the file.

        Raises:
            RecipeError: There is no such recipe, it is not YAML, or a key or value is not as the schema says.
        """
        path = library.find(source)
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RecipeError(f"The recipe {path} cannot be read: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise RecipeError(
                f"The recipe {path} holds a {type(content).__name__}; expected keys such as model and conversion."
            )
        for override in overrides:
            schema.override(content, override)
        return schema.build(cls, content, where=str(path))

    def text(self) -> str:
        """Return the recipe as YAML, every key written out."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=100)
