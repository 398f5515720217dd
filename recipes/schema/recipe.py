"""Recipe of a conversion: model, scheme, text and training. Every field is a key of the YAML file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, StringConstraints

from hf_posenc.recipes.schema import fields

# The largest count: of steps, tokens or documents; and the largest of other numbers, rates included.
MOST, _LARGEST = 2**31 - 1, 1e12

Number = Annotated[float, AllowInfNan(False)]
Count = Annotated[int, Ge(1), Le(MOST)]
Length = Annotated[int, Ge(2), Le(MOST)]
CountOrNone = Annotated[int, Ge(0), Le(MOST)]
Options = dict[str, Annotated[Any, BeforeValidator(fields.typed)]]
Seed = Annotated[int, Ge(0), Lt(2**32)]
Amount = Annotated[Number, Ge(0), Le(_LARGEST)]
Positive = Annotated[Number, Gt(0), Le(_LARGEST)]
Share = Annotated[Number, Ge(0), Le(1)]
SomeShare = Annotated[Number, Gt(0), Le(1)]
PartialShare = Annotated[Number, Ge(0), Lt(1)]
Name = Annotated[str, MinLen(1)]
Names = Annotated[list[Name], MinLen(1)]
Counts = Annotated[list[Count], MinLen(1)]
Indices = Annotated[list[Annotated[int, Ge(-MOST), Le(MOST)]], MinLen(1)]
Pattern = Annotated[str, StringConstraints(pattern="^(every|auto):[1-9][0-9]*$")]
Stacks = Annotated[list[Literal["encoder", "decoder"]], MinLen(1)]
Schedule = Literal["cosine", "linear", "inverse_sqrt", "cosine_with_restarts", "constant_with_warmup", "constant"]
StageName = Literal["transfer", "training", "lengthen"]

# Steps of a transfer that `conversion.fit: transfer` asks for.
_FITTING = 150


class Section:
    """Base of the sections; unknown keys are errors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class Conversion(Section):
    """Replacement of the positional encoding.

    Attributes:
        scheme: Name of the scheme; null trains the unconverted model, as the control of an experiment.
        options: Options of the scheme.
        rope: Parameters to change in the model's `rope_parameters`, such as a rope type of transformers.
        native: Fate of the model's own encoding: "remove" it, "keep" it, or fade it out in training ("handover"). Of a
            rotation, a share of the pairs can stay, from the fastest on: 0.375, or "fast" for those that turn at least
            16 times within the trained length.
        handover: Share of the steps for `native: handover`.
        anneal: Share of the steps over which a scheme with the option `anneal: true` is brought in.
        layers: Layer indices, or a pattern like "every:4"; null is all. "auto:7" measures before the run which 7 layers
            cost least, by perplexity and by copying, and takes these.
        window: Tokens that the other layers, which keep the model's own encoding, see at most; null is all. With
            `scheme: nope` and `layers: every:4` this is SWAN (arXiv 2504.08719).
        stacks: List of "encoder" and "decoder", for encoder-decoders; null is both.
        fit: Target of a fit before training. "native": fit the bias of an additive scheme to the native encoding.
            "transfer": fit any scheme in attention to the original attention outputs, layer by layer.
    """

    scheme: Name | None
    options: Options = field(default_factory=dict)
    rope: Options = field(default_factory=dict)
    native: Literal["remove", "keep", "handover", "fast"] | SomeShare = "remove"
    handover: SomeShare = 0.3
    anneal: SomeShare = 0.3
    layers: Indices | Pattern | None = None
    window: Count | None = None
    stacks: Stacks | None = None
    fit: Literal["native", "transfer"] | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        native = "keep" if self.native == "handover" else self.native
        return {"native": native, "layers": self.layers, "stacks": self.stacks, **self.options}

    @property
    def measured_layers(self) -> int | None:
        """How many layers are to be measured and chosen; `None` if they are given."""
        is_auto = isinstance(self.layers, str) and self.layers.startswith("auto:")
        return int(str(self.layers).partition(":")[2]) if is_auto else None

    @property
    def keeps_share(self) -> bool:
        """Whether a share of the model's own rotation stays."""
        return self.native not in ("remove", "keep", "handover")

    @property
    def anneals(self) -> bool:
        return self.scheme is not None and self.options.get("anneal") is True


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Text for training and evaluation.

    Attributes:
        source: A local file or folder of text, jsonl or parquet, or, where none has its name, a dataset on the hub, or
            "builtin" (Python's documentation, offline), which null is for the built-in model; others need a source.
        config: Configuration of a dataset on the hub.
        split: Split to train on.
        column: Column that holds the text.
        held_out: Split or local file to measure on; null takes the last `held_out_share` of the training text.
        held_out_share: Share of the documents to hold out without a `held_out`.
        streaming: Whether to read during training, without downloading all; needs `held_out`.
        packing: "windows" cuts the concatenated documents into windows of the training length; in those of "documents"
            no document sees another.
        limit: Maximum number of documents; null is all.
    """

    source: Name | None = None
    config: Name | None = None
    split: Name = "train"
    column: Name = "text"
    held_out: Name | None = None
    held_out_share: Annotated[Number, Gt(0), Lt(1)] = 0.1
    streaming: bool = False
    packing: Literal["windows", "documents"] = "windows"
    limit: Count | None = None

    @property
    def read_from(self) -> str:
        return self.source or "builtin"


@dataclass(frozen=True, kw_only=True)
class Training(Section):
    """Training settings.

    Attributes:
        steps: Optimizer steps.
        length: Tokens per window; null is the model's trained length.
        batch_size: Windows per optimizer step, over all processes; the training is the same on any number of them.
        micro_batch_size: Windows per forward of one process, to save memory; null is its whole share of the batch.
        learning_rate: Peak learning rate of the model's own weights; null follows from the model's size, and from
            the tokens of a step where they are few.
        scheme_learning_rate: Peak learning rate of the scheme's weights, which are new; null likewise.
        weight_decay: Weight decay of the model's own matrices.
        warmup: Share of the steps over which the learning rates rise.
        schedule: Learning rate schedule after the warmup, by its name in transformers.
        max_grad_norm: Maximum gradient norm, by clipping; 0 is off.
        skip_to: Text length whose positions are trained on by skipping some (PoSE); null is off.
        precision: Precision of the forward; the weights keep their dtype.
        gradient_checkpointing: Whether to recompute activations in the backward pass, to save memory.
        seed: Random seed.
    """

    steps: Count = 300
    length: Length | None = None
    batch_size: Count = 8
    micro_batch_size: Count | None = None
    learning_rate: Amount | None = None
    scheme_learning_rate: Amount | None = None
    weight_decay: Amount = 0.0
    warmup: Share = 0.05
    schedule: Schedule = "cosine"
    max_grad_norm: Amount = 1.0
    skip_to: Count | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    gradient_checkpointing: bool = False
    seed: Seed = 0

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup * self.steps)


@dataclass(frozen=True, kw_only=True)
class Transfer(Section):
    """Attention transfer, before training: each attention learns to write what the original attention wrote.

    Attributes:
        steps: Optimizer steps; 0 is off.
        length: Tokens per window; null is that of the training.
        skip_to: Text length whose positions half of the windows show by skipping some; at most the trained length,
            since the original reads the same positions; null is off.
        repeat: Share of the windows of a causal model whose second half repeats the first: they teach copying.
        batch_size: Windows per optimizer step; null is that of the training.
        micro_batch_size: Windows per forward of one process; null is that of the training, or its share of the batch.
        projections: Whether to train the whole attention; false trains the scheme alone.
        learning_rate: Peak learning rate of the projections; null follows from the model's size.
        scheme_learning_rate: Peak learning rate of the scheme's weights; null likewise.
    """

    steps: CountOrNone = 0
    length: Length | None = None
    skip_to: Count | None = None
    repeat: Share = 0.0
    batch_size: Count | None = None
    micro_batch_size: Count | None = None
    projections: bool = True
    learning_rate: Amount | None = None
    scheme_learning_rate: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class Lengthening(Section):
    """Long windows, after training.

    They keep its teacher, unless that fades (`distillation.until`) or is an encoder-decoder.

    Attributes:
        steps: Optimizer steps; 0 is off.
        length: Tokens per window; null is that of the training.
        short: Share of the windows of a causal model to read as texts as long as those of the training, so that it does
            not unlearn short ones; 0 is off.
        skip_to: Text length whose positions are trained on by skipping some (PoSE); null is off.
        batch_size: Windows per optimizer step; null is that of the training.
        micro_batch_size: Windows per forward of one process; null is its whole share of the batch.
        learning_rate: Peak learning rate of the model's own weights; null follows from the model's size.
        scheme_learning_rate: Peak learning rate of the scheme's weights; null likewise.
    """

    steps: CountOrNone = 0
    length: Length | None = None
    short: Share = 0.5
    skip_to: Count | None = None
    batch_size: Count | None = None
    micro_batch_size: Count | None = None
    learning_rate: Amount | None = None
    scheme_learning_rate: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class Distillation(Section):
    """Distillation from the original model, or from another one.

    Attributes:
        share: Weight of the divergence from the teacher's predictions in the loss, from 0 to 1; 0 is off.
        hidden: Weight of the distance from the teacher's hidden states; 0 is off.
        until: Share of the steps over which both fade to zero, linearly; 0 keeps them to the end.
        teacher: Model to learn from, with the same vocabulary, given like `model`; null is the original. The original
            after some training on the same text is a better teacher.
    """

    share: Share = 0.0
    hidden: Amount = 0.0
    until: Share = 0.0
    teacher: Name | None = None

    @property
    def distils(self) -> bool:
        return self.share > 0 or self.hidden > 0


@dataclass(frozen=True, kw_only=True)
class Adapter(Section):
    """Adapter to train instead of all weights.

    Attributes:
        kind: "none" trains all weights, "lora" LoRA and the scheme's weights, "scheme" the scheme's weights alone.
        rank: Rank of LoRA.
        alpha: Scale of LoRA.
        dropout: Dropout of LoRA.
        targets: Modules that get LoRA, by the end of their name; null is all linear layers but the head.
        four_bit: Whether to load the model's own weights in 4 bits (needs bitsandbytes and an adapter).
    """

    kind: Literal["none", "lora", "scheme"] = "none"
    rank: Count = 8
    alpha: Positive = 16.0
    dropout: PartialShare = 0.0
    targets: Names | None = None
    four_bit: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Evaluation before, during and after training.

    Attributes:
        contexts: Context lengths; null is a quarter of the trained length up to eight times it.
        windows: Number of held-out windows, 2 or more: one has no confidence interval. A short text has fewer. As many
            sequences tell how a causal model copies and recalls.
        every: Steps between measurements; 0 measures before and after only.
        prompts: Number of prompts that the trained model and the original continue, to compare what they write; 0 is
            off.
    """

    contexts: Counts | None = None
    windows: Annotated[Count, Ge(2)] = 32
    every: CountOrNone = 0
    prompts: CountOrNone = 0


@dataclass(frozen=True, kw_only=True)
class Saving(Section):
    """Checkpoints and logs during training.

    Attributes:
        every: Steps between checkpoints to resume from.
        keep: Number of checkpoints to keep.
        loggers: List of "tensorboard", "trackio" and "wandb".
    """

    every: Count = 100
    keep: Count = 2
    loggers: list[Literal["tensorboard", "trackio", "wandb"]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """Conversion of a model and its training.

    Attributes:
        summary: One sentence for lists and reports.
        plugins: Installed modules with schemes or architectures of your own, which are imported first.
        model: Local directory, name on the hub, or "tiny-llama", the built-in model.
        conversion: Replacement of the positional encoding.
        data: Text for training and evaluation.
        transfer: Attention transfer, before training.
        training: Training settings.
        lengthen: Long windows, after training.
        distillation: Distillation from the original model, or from another one.
        adapter: Adapter to train instead of all weights.
        evaluation: Evaluation before, during and after training.
        saving: Checkpoints and logs during training.
    """

    summary: str = ""
    plugins: list[Name] = field(default_factory=list)
    model: Name
    conversion: Conversion
    data: Data = field(default_factory=Data)
    transfer: Transfer = field(default_factory=Transfer)
    training: Training = field(default_factory=Training)
    lengthen: Lengthening = field(default_factory=Lengthening)
    distillation: Distillation = field(default_factory=Distillation)
    adapter: Adapter = field(default_factory=Adapter)
    evaluation: Evaluation = field(default_factory=Evaluation)
    saving: Saving = field(default_factory=Saving)

    def stages(self) -> dict[StageName, Training]:
        """Return the settings of each stage by its section, in their order."""
        training, transfer, found = self.training, self.transfer, dict[StageName, Training]()
        if transfer.steps or self.conversion.fit == "transfer":
            micro = transfer.micro_batch_size or (None if transfer.batch_size else training.micro_batch_size)
            steps = transfer.steps or _FITTING
            found["transfer"] = self._of(transfer, steps=steps, micro_batch_size=micro, gradient_checkpointing=False)
        found["training"] = training
        if self.lengthen.steps:
            found["lengthen"] = self._of(self.lengthen)
        return found

    def _of(self, stage: Transfer | Lengthening, **others: Any) -> Training:
        """Return the settings of a stage: its own, and those of the training where it has none."""
        own = {key: value for key, value in vars(stage).items() if key in vars(self.training)}
        usual = {key: own[key] or getattr(self.training, key) for key in ("length", "batch_size")}
        return replace(self.training, **own | usual | others)

    @property
    def moves_projections(self) -> bool:
        """Whether the attention transfer trains the whole attention, and not the scheme alone."""
        return self.transfer.projections and self.conversion.fit != "transfer"

    def checked(self) -> Recipe:
        """Return a recipe that was made in Python as its file says it; raise `RecipeError` as `read_recipe` does."""
        from hf_posenc.recipes.schema import checks

        recipe = fields.build(type(self), fields.parse(self.text(), "the recipe"), where="the recipe")
        checks.check(recipe, "the recipe")
        return recipe

    def flat(self) -> dict[str, Any]:
        """Return all values by their keys, such as `training.steps`."""
        sections = {name: value if isinstance(value, dict) else {"": value} for name, value in asdict(self).items()}
        return {f"{name}.{key}".rstrip("."): value for name, own in sections.items() for key, value in own.items()}

    def text(self) -> str:
        return fields.write(asdict(self))
