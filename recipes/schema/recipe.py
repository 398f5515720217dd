"""A recipe: a model, its scheme, the text and the training. Every field is a key of its YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AllowInfNan, ConfigDict, Strict, StringConstraints

from hf_posenc.errors import RecipeError
from hf_posenc.recipes import library
from hf_posenc.recipes.schema import consistency, fields, plain_yaml

Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Switch = Annotated[bool, Strict()]
Count = Annotated[Whole, Ge(1)]
Length = Annotated[Whole, Ge(2)]
CountOrNone = Annotated[Whole, Ge(0)]
Seed = Annotated[Whole, Ge(0), Lt(2**32)]
Amount = Annotated[Number, Ge(0)]
Positive = Annotated[Number, Gt(0)]
Share = Annotated[Number, Ge(0), Le(1)]
SomeShare = Annotated[Number, Gt(0), Le(1)]
PartialShare = Annotated[Number, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]
Names = Annotated[list[Name], MinLen(1)]
Counts = Annotated[list[Count], MinLen(1)]
Indices = Annotated[list[Whole], MinLen(1)]
Pattern = Annotated[str, StringConstraints(pattern="^every:[1-9][0-9]*$")]
Stacks = Annotated[list[Literal["encoder", "decoder"]], MinLen(1)]
Schedule = Literal[
    "cosine", "linear", "polynomial", "inverse_sqrt", "cosine_with_restarts", "constant_with_warmup", "constant"
]


class Section:
    """Base of the sections: an unknown key is an error."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Conversion(Section):
    """The swap itself.

    Attributes:
        scheme: A registered scheme; null trains the model as it is, which makes the control of an experiment.
        options: Options of the scheme.
        native: What becomes of the model's own encoding: removed at once, kept, or handed over from during training.
        handover: With `native: handover`, the share of the steps that the way takes.
        anneal: With `anneal: true` among the options, the share of the steps over which the whole scheme comes in.
        layers: Which layers; a list of indices or a pattern like "every:4"; null is all.
        stacks: Of an encoder-decoder, "encoder" and/or "decoder"; null is all.
        fit: Start an additive scheme by regression on the native encoding ("native") or on another scheme of this name; or any
            scheme with weights in attention by what attention wrote in the original, layer by layer ("attention").
    """

    scheme: Name | None
    options: dict[str, Any] = field(default_factory=dict)
    native: Literal["remove", "keep", "handover"] = "remove"
    handover: SomeShare = 0.3
    anneal: SomeShare = 0.3
    layers: Indices | Pattern | None = None
    stacks: Stacks | None = None
    fit: Name | None = None


@dataclass(frozen=True, kw_only=True)
class Data(Section):
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

    source: Name = "builtin"
    config: Name | None = None
    split: Name = "train"
    column: Name = "text"
    held_out: Name | None = None
    held_out_share: Annotated[Number, Gt(0), Lt(1)] = 0.1
    streaming: Switch = False
    packing: Literal["windows", "documents"] = "windows"
    limit: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Training(Section):
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
        schedule: How the rates go down after that, by the names of transformers.
        max_grad_norm: Gradients are scaled down to this norm; 0 leaves them.
        new_parameters_first: Share of the steps at the beginning in which the scheme's weights alone are trained.
        mixed_lengths: Cut the batch of each step into windows of one of these lengths, drawn at random; null is off.
        skip_to: Train at the positions of texts of this length, by skipping some (PoSE); null is off.
        precision: Of the forward; the weights stay as loaded.
        gradient_checkpointing: Whether to recompute activations in the backward pass, to save memory.
        seed: Of everything that is drawn.
    """

    steps: Count = 300
    length: Length | None = None
    batch_size: Count = 8
    micro_batch_size: Count | None = None
    learning_rate: Amount = 1e-3
    scheme_learning_rate: Amount = 5e-3
    weight_decay: Amount = 0.0
    warmup: Share = 0.05
    schedule: Schedule = "cosine"
    max_grad_norm: Amount = 1.0
    new_parameters_first: Share = 0.0
    mixed_lengths: Counts | None = None
    skip_to: Count | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    gradient_checkpointing: Switch = False
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Distillation(Section):
    """Learning from the model as it was, or from another.

    Attributes:
        share: Share of the loss that is the divergence from the teacher's predictions, from 0 to 1; 0 is off.
        hidden: Factor on the distance from the teacher's hidden states; 0 is off.
        until: Share of the steps after which both have faded to nothing, linearly; 0 keeps them to the end.
        teacher: Another model of the same vocabulary to learn from, as for `model`: the original after some training on the
            same text, for instance, which is a better goal. Null is the original.
        length: Tokens that the teacher reads at once, in pieces of longer windows; null is the length it was trained on.
    """

    share: Share = 0.0
    hidden: Amount = 0.0
    until: Share = 0.0
    teacher: Name | None = None
    length: Length | None = None


@dataclass(frozen=True, kw_only=True)
class Adapter(Section):
    """Training a small adapter instead of all weights.

    Attributes:
        kind: "none" trains all weights, "lora" LoRA and the scheme's weights, "scheme" the scheme's weights alone.
        rank: Of LoRA.
        alpha: Of LoRA.
        dropout: Of LoRA.
        targets: Modules that get LoRA, by the end of their name; null is all linear layers but the head.
        four_bit: Whether to load the model's own weights in 4 bits, under LoRA or the scheme alone (needs bitsandbytes).
    """

    kind: Literal["none", "lora", "scheme"] = "none"
    rank: Count = 8
    alpha: Positive = 16.0
    dropout: PartialShare = 0.0
    targets: Names | None = None
    four_bit: Switch = False


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """What is measured before, during and after.

    Attributes:
        contexts: Context lengths; null is a quarter of the trained length up to eight times it.
        windows: Held-out windows.
        every: Steps between measurements; 0 measures before and after only.
    """

    contexts: Counts | None = None
    windows: Count = 16
    every: CountOrNone = 0


@dataclass(frozen=True, kw_only=True)
class Saving(Section):
    """What is kept while it runs.

    Attributes:
        every: Steps between checkpoints to resume from.
        keep: How many of them are kept.
        loggers: Where the trainer reports to: "tensorboard", "trackio", "wandb".
    """

    every: Count = 100
    keep: Count = 2
    loggers: list[Literal["tensorboard", "trackio", "wandb"]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """A conversion and its adaptation.

    Attributes:
        summary: One sentence for the list of recipes.
        model: A local directory, a name on the hub, or "tiny-llama", which comes with the package.
        conversion: The swap.
        data: The text.
        training: How long and how fast.
        distillation: Learning from the model as it was, or from another.
        adapter: Training a small adapter instead.
        evaluation: What is measured.
        saving: What is kept while it runs.
    """

    summary: str = ""
    model: Name
    conversion: Conversion
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    distillation: Distillation = field(default_factory=Distillation)
    adapter: Adapter = field(default_factory=Adapter)
    evaluation: Evaluation = field(default_factory=Evaluation)
    saving: Saving = field(default_factory=Saving)

    @classmethod
    def read(cls, source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe, all of it checked.

        Args:
            source: A YAML file, or the name of a recipe that comes with the package.
            overrides: `section.key=value` each, the value as in YAML; they win over the file.

        Raises:
            RecipeError: There is no such recipe, it is not YAML, a key or value is not as the schema says, keys contradict
                each other, or the scheme does not exist or cannot be had like this.
        """
        recipe = cls.parse(source, overrides)
        consistency.check_scheme(recipe, str(source))
        return recipe

    @classmethod
    def parse(cls, source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe without looking its scheme up, which needs no torch; otherwise like `read`."""
        path = library.find(source)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"The recipe {path} cannot be read: {' '.join(str(error).split())}.") from error
        content = plain_yaml.parse(text, str(source))
        if not isinstance(content, dict):
            raise RecipeError(f"{source} is {_kind(content)}; expected keys, such as model and conversion.")
        recipe = fields.build(cls, content, where=str(source), overrides=overrides)
        consistency.check(recipe, str(source))
        return recipe

    def text(self) -> str:
        """Return the recipe as YAML, every key written out."""
        return plain_yaml.write(asdict(self))


def _kind(content: Any) -> str:
    return "empty" if content is None else f"a {type(content).__name__}"
