"""Recipes by goal: what a built-in recipe leaves out follows from the model, the scheme and the machine.

A recipe is validated first, without a look at the model. Then `resolve` gives each key that is left out the value of
its rule; `RULES` has them in their order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Gt, Le
from transformers import AutoModelForCausalLM

from hf_posenc import plugins, registry
from hf_posenc.errors import PosencError, RecipeError, shown, suggest
from hf_posenc.patches import record, rotary
from hf_posenc.patches.architecture import of_config
from hf_posenc.patches.plan import plan
from hf_posenc.recipes import library
from hf_posenc.recipes.loading import auto_class, load_config, trained_length
from hf_posenc.recipes.processes import bfloat16_pays
from hf_posenc.recipes.schema import checks, fields
from hf_posenc.recipes.schema.recipe import MOST, Distillation, Evaluation, Number, Recipe, Section
from hf_posenc.registry import SchemeInfo
from hf_posenc.scheme import Scheme

# Longest windows that a goal trains on; longer texts are reached by skipping positions.
WINDOW = 1024
# Assumed trained length of a model whose config states none.
_LENGTH = 512
# Width from which a model is no toy.
_REAL = 512
# Tokens of an attention transfer; positions that its windows show by skipping some, in lengths of them; the share of
# windows that repeat themselves; and tokens of the transfer for each token of the training
# (benchmarks/results/README.md).
_TRANSFER, _TRANSFER_REACH, _REPEAT, _TRANSFER_SHARE = 250_000, 8, 0.4, 5
# Tokens of a run for each token of the longest windows to measure on: three measurements then read about as many tokens
# as the run, and only forward. The length that an extension is for is measured if they read three times as many.
_MEASURED = 2
# RoPE scaling methods for `extend`, most common first; and long windows alone.
ROPES = ("yarn", "dynamic", "linear", "llama3", "longrope", "base", "proportional")
WINDOWS = "windows"
# Family of schemes that are added to another encoding.
_ADDED = "add-on"
# Family of schemes that add a bias of the distance.
_ADDITIVE = "additive"


def read_recipe(source: str | Path, overrides: Sequence[str] = (), *, config: Any = None) -> Recipe:
    """Read, validate and resolve a recipe.

    Args:
        source: YAML file, or name of a built-in recipe, whose keys follow from the config of the model.
        overrides: Strings `section.key=value`, with values in YAML; they take precedence over the file. The section
            may be left out where that is clear.
        config: Config of the model, if it is at hand.

    Raises:
        RecipeError: The recipe does not exist, is not YAML or does not match the schema, its keys contradict each
            other, or its scheme or options do not exist.
        CheckpointError: The config of the model cannot be read.
    """
    if library.is_file(source):
        recipe = fields.build(Recipe, library.content(source), where=str(source), overrides=overrides)
        plugins.load(recipe.plugins)
    else:
        asked = ask(str(source), overrides)
        plugins.load(asked.recipe.plugins)
        recipe = resolve(asked, Facts.of(load_config(asked.recipe.model) if config is None else config))
    checks.check(recipe, str(source))
    return recipe


# -- what is asked, and what is known ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Extension(Section):
    """The keys that `extend` has besides those of a recipe: how many trained lengths to reach, and how."""

    factor: Annotated[Number, Gt(1), Le(MOST)] = 4
    by: str | None = None


@dataclass(frozen=True)
class Asked:
    """A built-in recipe as a user asks for it: `recipe` is validated, and what is not `given` follows."""

    goal: str
    recipe: Recipe
    given: frozenset[fields.Path]
    extension: Extension

    def gives(self, key: str) -> bool:
        """Whether a key, such as `training.length`, is given, or its whole section."""
        path = tuple(key.split("."))
        return any(path[: len(given)] == given for given in self.given)


def ask(goal: str, overrides: Sequence[str]) -> Asked:
    """Validate a built-in recipe with overrides; raise `RecipeError` if there is none of the name, or it is wrong."""
    if goal not in library.names():
        raise RecipeError(f"There is no recipe {shown(goal)}. {suggest(goal, library.names())} A file ends in .yaml.")
    own = [pair for pair in overrides if goal == "extend" and pair.partition("=")[0] in ("factor", "by")]
    content = library.content(goal)
    given = fields.override(Recipe, content, [pair for pair in overrides if pair not in own])
    extension = fields.build(Extension, {}, where=goal, overrides=own)
    asked = Asked(goal, fields.build(Recipe, content, where=goal), frozenset(given), extension)
    if goal == "swap" and not asked.gives("conversion.scheme"):
        raise RecipeError(
            "swap needs a scheme: give scheme=NAME. `hf-posenc recipes --for MODEL` recommends some, and `hf-posenc "
            "schemes` lists all."
        )
    return asked


@dataclass(frozen=True)
class Facts:
    """What is known of a model and its machine.

    Its own encoding is `rotary`, or `relative`: a bias from buckets of the distance. It was `trained` on windows of so
    many tokens; `None` if the config does not say.
    """

    config: Any
    rotary: bool
    relative: bool
    causal: bool
    trained: int | None
    width: int
    layers: int
    processes: int
    precision: str

    @classmethod
    def of(cls, config: Any) -> Facts:
        width = config.get_text_config().hidden_size
        # On CPUs the gain is as large for a model that was saved in float32, and its loss is the same.
        is_half = config.dtype in (torch.bfloat16, torch.float16)
        pays = (is_half or not torch.cuda.is_available()) and bfloat16_pays(width)
        return cls(
            config=config,
            rotary=bool(getattr(config, "rope_parameters", None)),
            relative=hasattr(config, "relative_attention_num_buckets"),
            causal=auto_class(config) is AutoModelForCausalLM,
            trained=trained_length(config),
            width=width,
            layers=config.get_text_config().num_hidden_layers,
            processes=int(os.environ.get("WORLD_SIZE", "1")),
            precision="bfloat16" if pays else "float32",
        )

    @property
    def own(self) -> int:
        """The trained length, or what is assumed for it."""
        return self.trained or _LENGTH

    @property
    def native(self) -> str:
        """Kind of the native encoding in goals.yaml."""
        return "rotation" if self.rotary else "buckets" if self.relative else "table"

    @property
    def ways(self) -> tuple[str, ...]:
        """Ways to extend the native encoding, best first; a table of positions has none."""
        return (*(ROPES if self.rotary else ()), *((WINDOWS,) if self.rotary or self.relative else ()))

    def suits(self, info: SchemeInfo) -> bool:
        """Whether a scheme is defined for the model, and tells its directions apart."""
        advice, one_way = info.adaptation, self.causal or self.config.is_encoder_decoder
        return one_way or ("bidirectional" in info.directions and (not advice.symmetric or bool(advice.encoder)))

    def starts_exact(self, name: str, stacks: Any) -> bool:
        """Whether a scheme starts by computing what the native encoding computes."""
        try:
            # One layer of a rotary model tells, and is faster to look at than all.
            return plan(self.config, name, stacks=stacks, layers=[0] if self.rotary else None).start == "exact"
        except PosencError:
            return False  # Patching says why.


@dataclass(frozen=True)
class Start:
    """How a scheme begins in a model if nothing else is asked for."""

    native: str = "remove"
    fit: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False

    @classmethod
    def of(cls, info: SchemeInfo, facts: Facts, *, decodes_only: bool) -> Start:
        advice, stacks = info.adaptation, ["decoder"] if decodes_only else None
        if info.cls.reproduces and facts.starts_exact(info.name, stacks):
            return cls(exact=True)
        if info.family == _ADDED:
            return cls("keep", options=info.cls.neutral_options or {})
        if facts.rotary or (facts.relative and (advice.fit or advice.native == "handover")):
            # A bias that was fitted to a table of both directions is poor in one.
            return cls(advice.native, "transfer" if advice.fit and decodes_only else advice.fit, advice.options)
        return cls(advice.elsewhere)


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What the rules read: `recipe` has the values of all earlier ones."""

    asked: Asked
    facts: Facts
    recipe: Recipe

    @functools.cached_property
    def info(self) -> SchemeInfo | None:
        """The scheme; `None` if there is none, or the goal does not choose for it."""
        name = self.recipe.conversion.scheme
        return None if name is None or (self.extends and name != self.way) else registry.get(name)

    @functools.cached_property
    def start(self) -> Start:
        """How the scheme begins in the model."""
        return Start() if self.info is None else Start.of(self.info, self.facts, decodes_only=self.decodes_only)

    @property
    def decodes_only(self) -> bool:
        """Whether an encoder would not tell its two directions apart, so that the decoder alone is converted."""
        info = self.info
        if info is None or not self.facts.config.is_encoder_decoder:
            return False
        return info.adaptation.symmetric or "bidirectional" not in info.directions

    @property
    def extends(self) -> bool:
        return self.asked.goal == "extend"

    @property
    def extends_by_scheme(self) -> bool:
        """Whether a scheme reaches them."""
        return self.extends and self.way not in (*ROPES, WINDOWS)

    @functools.cached_property
    def way(self) -> str:
        facts, by = self.facts, self.asked.extension.by
        ways = [*facts.ways, *registry.schemes()]
        if by is None:
            return facts.ways[0] if facts.ways else _measured_scheme(facts)
        if by not in ways:
            why = "the model has no rotary encoding" if by in ROPES else suggest(by, ways)
            raise RecipeError(f"by is {shown(by)}: {why}; expected {', '.join(ways)}.")
        return by

    @property
    def far(self) -> int:
        """The length that an extension is for."""
        factor, most = self.asked.extension.factor, MOST // self.facts.own
        if factor > most:
            raise RecipeError(f"factor is {factor}; expected a number above 1 and at most {most:,}.")
        return int(self.facts.own * factor)

    @property
    def length(self) -> int:
        return self.recipe.training.length or min(self.facts.own, WINDOW)

    @property
    def training_tokens(self) -> int:
        return self.recipe.training.steps * self.recipe.training.batch_size * self.length

    @property
    def transfers_text(self) -> bool:
        """Whether the attention transfer reads windows that are one text each."""
        return self.transfers and self.recipe.data.packing != "documents"

    @property
    def transfer_window(self) -> int:
        return self.recipe.transfer.length or self.length

    @property
    def wanted(self) -> str | float | None:
        """The fate of the model's own encoding that is asked for: by its key, by the goal, or for want of rows."""
        if self.asked.gives("conversion.native") or self.asked.goal == "remove":
            return self.asked.recipe.conversion.native
        return "remove" if self.extends and self.facts.native == "table" else None

    @property
    def fate(self) -> str | float:
        """The fate of the model's own encoding that suits, whether all layers can take it or not."""
        # Without the model's own weights, nothing learns to do without its encoding.
        alone = self.recipe.adapter.kind == "scheme" and not self.start.exact
        return self.wanted or ("keep" if alone else self.start.native)

    @property
    def untransferred(self) -> str | float:
        """`conversion.native` where no attention transfer comes first."""
        # All layers fade alike, also those that are made local.
        fades = of_config(self.facts.config).native_fades and not self.asked.gives("conversion.window")
        return "remove" if self.fate == "handover" and not fades else self.fate

    @functools.cached_property
    def transfers(self) -> bool:
        """Whether the attention transfer comes first, instead of a fit or a handover.

        It does in a model of real size, and wherever a share of the rotation stays.
        """
        is_free = self.wanted in (None, "remove") and not self.asked.gives("conversion.fit")
        is_free = is_free and self.untransferred != "keep"
        has_share = self.asked.recipe.conversion.keeps_share
        is_off = self.asked.gives("transfer.steps") and self.recipe.transfer.steps == 0
        # The original's positions must act in attention, and so must the scheme.
        acts = self.info is not None and self.info.cls.embed is Scheme.embed and not self.start.exact
        suits = self.facts.rotary and self.facts.causal and (has_share or self.facts.width >= _REAL)
        return acts and suits and (has_share or (is_free and not self.extends)) and not is_off


def _rope(case: Case) -> Any:
    if not case.extends or case.way not in ROPES:
        return case.recipe.conversion.rope
    return rotary.rescaled(case.facts.config, case.way, case.far / case.facts.own, case.facts.own)


def _length(case: Case) -> int | None:
    if case.extends and not case.facts.causal:
        return case.far
    found = min(case.facts.own, WINDOW)
    return None if found == case.facts.trained else found


def _batch_size(case: Case) -> int:
    if case.transfers and not case.extends:
        return case.facts.processes  # A teacher's predictions are no noise: small steps, as in the transfer.
    if case.extends and not case.facts.causal and not case.asked.gives("training.length"):
        return max(1, 8 * case.facts.own // case.far)
    return case.recipe.training.batch_size


def _transfer_steps(case: Case) -> int:
    if not case.transfers:
        return case.recipe.transfer.steps
    # A short training has a short transfer.
    most = _TRANSFER_SHARE * case.training_tokens if case.asked.gives("training.steps") else _TRANSFER
    return max(1, min(_TRANSFER, most) // (case.facts.processes * case.transfer_window))


def _transfer_skip_to(case: Case) -> int | None:
    far = min(case.facts.own, _TRANSFER_REACH * case.transfer_window)
    return far if case.transfers_text and far > case.transfer_window else case.recipe.transfer.skip_to


def _steps(case: Case) -> int:
    # What lies beyond the trained length only the training of an extension teaches.
    if not case.transfers or case.extends:
        return case.recipe.training.steps
    transfer = case.recipe.transfer.steps * case.facts.processes * case.transfer_window
    return max(1, transfer // (_TRANSFER_SHARE * case.recipe.training.batch_size * case.length))


def _native(case: Case) -> str | float:
    if case.info is None:
        return case.recipe.conversion.native
    if not case.transfers:
        return case.untransferred
    # A bias that only falls with the distance cannot point at the previous token; fast rotary pairs can.
    return "fast" if case.info.family == _ADDITIVE else "remove"


def _options(case: Case) -> dict[str, Any]:
    given = case.recipe.conversion.options
    if case.info is None:
        return given
    advice, neutral = case.info.adaptation, case.info.cls.neutral_options or {}
    found = dict(case.start.options)
    if case.recipe.conversion.keeps_share:
        found |= neutral
    elif case.fate != case.start.native:
        found = dict(neutral) if case.fate == "keep" else {}
    if case.untransferred == "handover" and "gate" in neutral:
        found["gate"] = False  # The handover brings the scheme in, and a gate that starts at 0 would keep it out.
    if not case.facts.causal and not case.decodes_only:
        found |= advice.encoder
    for option, windows in advice.windows.items():
        found[option] = max(1, round(case.length * windows))
    return found | given


def _teacher(case: Case) -> Distillation:
    if case.transfers:
        return Distillation(share=1.0)
    changes = case.asked.goal in ("swap", "remove") or case.extends_by_scheme
    return Distillation(share=1.0, hidden=2.0, until=0.8) if changes else case.recipe.distillation


def _skip_to(case: Case) -> int | None:
    own, far = case.facts.own, 0
    if case.extends:
        far = case.far
    elif case.info is not None and case.info.adaptation.reach > 1:
        far = max(own, case.info.adaptation.reach * min(own, WINDOW))
    # A table of positions that stays has no rows beyond.
    ends = case.facts.native == "table" and case.recipe.conversion.native != "remove"
    # Windows of which positions are skipped hold one long text.
    can = case.facts.causal and case.recipe.data.packing != "documents" and not (ends and far > own)
    return far if can and far > case.length else None


def _contexts(case: Case) -> list[int] | None:
    """Return contexts that cost no more than the training."""
    # It brings datasets and matplotlib, for which `recipes --for` need not wait.
    from hf_posenc.recipes.evaluation.perplexity import TARGETS

    own, length, skip_to = case.facts.own, case.length, case.recipe.training.skip_to
    reach = max(own, length if case.extends else 0, 0 if case.asked.gives("training.skip_to") else skip_to or 0)
    if case.facts.trained is None and reach > own:
        # Nothing else knows how long the texts of the model's own training were.
        return [each for power in range(9) if (each := own << power) <= reach * 2]
    if own <= _LENGTH:
        return None
    transfer = case.recipe.transfer.steps * (case.recipe.transfer.batch_size or 1) * case.transfer_window
    affordable = (case.training_tokens + transfer) // Evaluation.windows // _MEASURED
    most = min(max(4 * length, reach), max(length, affordable))
    found = {each for each in (length // 4, length, 4 * length, own, reach) if TARGETS <= each <= most}
    if case.extends and reach <= affordable:
        found.add(reach)
    return sorted(found) or [TARGETS]


# Each rule may read the values of those above it.
RULES: dict[str, Callable[[Case], Any]] = {
    "conversion.scheme": lambda case: case.way if case.extends_by_scheme else case.recipe.conversion.scheme,
    "conversion.rope": _rope,
    "conversion.stacks": lambda case: ["decoder"] if case.decodes_only else None,
    "training.precision": lambda case: case.facts.precision,
    "training.length": _length,
    "training.batch_size": _batch_size,
    "transfer.skip_to": _transfer_skip_to,
    "transfer.repeat": lambda case: _REPEAT if case.transfers_text else case.recipe.transfer.repeat,
    "transfer.steps": _transfer_steps,
    # One window for each process: small steps are worth more than tokens.
    "transfer.batch_size": lambda case: case.facts.processes if case.transfers else case.recipe.transfer.batch_size,
    "training.steps": _steps,
    "conversion.native": _native,
    "conversion.fit": lambda case: case.start.fit if case.fate == case.start.native and not case.transfers else None,
    "conversion.options": _options,
    "distillation.share": lambda case: _teacher(case).share,
    "distillation.hidden": lambda case: _teacher(case).hidden,
    "distillation.until": lambda case: _teacher(case).until,
    "training.skip_to": _skip_to,
    "evaluation.contexts": _contexts,
}


def resolve(asked: Asked, facts: Facts) -> Recipe:
    """Return the recipe in which each key of `RULES` that is not given has the value of its rule."""
    checks.check_scheme_name(asked.recipe, asked.goal)
    case = Case(asked, facts, asked.recipe)
    for path, rule in RULES.items():
        if not asked.gives(path):
            section, _, key = path.partition(".")
            changed = replace(getattr(case.recipe, section), **{key: rule(case)})
            case.recipe = replace(case.recipe, **{section: changed})
    return case.recipe


# -- what was measured -------------------------------------------------------------------------------------------------


class Recommendation(NamedTuple):
    """A recipe for a model, in the words that `hf-posenc train` takes, and what was measured on which model.

    `quality` and `far` are those of goals.yaml; `None` is not measured.
    """

    words: str
    quality: float | None = None
    far: float | None = None
    model: str | None = None


def recommended(config: Any) -> list[Recommendation]:
    """Return the recipes that suit a model: those that were measured first, best first."""
    if record.from_config(config):
        return [Recommendation("control")]  # It is converted already.
    facts = Facts.of(config)
    suited = [name for name, info in registry.schemes().items() if facts.suits(info) and info.family != _ADDED]
    far = [name for name in suited if registry.get(name).adaptation.reach]
    ways = ["extend", "remove", *(f"extend by={name}" for name in (*facts.ways, *far))]
    ways += [*(f"swap scheme={name}" for name in suited), "control"]
    measured = _data()["measured"][facts.native]
    found = [
        Recommendation(row["recipe"], row.get("quality"), row.get("far"), measured["model"])
        for row in measured["recipes"]
        # An add-on may follow a scheme.
        if any(f"{row['recipe']} ".replace("+", " ").startswith(f"{way} ") for way in ways)
        if facts.layers >= row.get("layers", 1)
    ]
    known = {each.words for each in found}
    return [*found, *(Recommendation(words) for words in ways if words not in known)]


def _measured_scheme(facts: Facts) -> str:
    """Return the best scheme of which long texts were measured."""
    rows = [row for row in _data()["measured"][facts.native]["recipes"] if "far" in row]
    rows.sort(key=lambda row: row["quality"] * row["far"])
    names = (str(row["recipe"]).rpartition("=")[2] for row in rows)
    return next(name for name in names if facts.suits(registry.get(name)))


@functools.cache
def _data() -> dict[str, Any]:
    text = (Path(__file__).parent / "goals.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = fields.typed(fields.parse(text, "goals.yaml"))
    return found
