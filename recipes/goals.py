"""Recipes by goal: what a built-in recipe leaves out follows from the model, the scheme and the machine."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_posenc import registry
from hf_posenc.errors import PosencError, RecipeError, shown, suggest
from hf_posenc.patches import record, rotary
from hf_posenc.patches.architecture import of_config
from hf_posenc.patches.plan import plan
from hf_posenc.recipes import library
from hf_posenc.recipes.evaluation.perplexity import TARGETS
from hf_posenc.recipes.loading import auto_class, load_config, trained_length
from hf_posenc.recipes.processes import bfloat16_pays
from hf_posenc.recipes.schema import checks, fields
from hf_posenc.recipes.schema.recipe import MOST, Evaluation, Recipe
from hf_posenc.registry import SchemeInfo
from hf_posenc.scheme import Scheme

# Longest windows that a goal trains on; longer texts are reached by skipping positions.
WINDOW = 1024
# Assumed trained length of a model whose config states none.
_LENGTH = 512
_FACTOR = 4
# Width from which a model is no toy, and tokens of the attention transfer there (benchmarks/results/README.md).
_REAL, _TRANSFER = 512, 500_000
# Tokens of the training for each token of the longest windows to measure on: three measurements then read fewer tokens
# than the training. The length that an extension is for is measured if they read at most three times as many.
_MEASURED, _WANTED = 8, 2
# Ways of `extend` that are no scheme, in the order in which the field tries them.
ROPES = ("yarn", "dynamic", "linear", "llama3", "longrope", "base", "proportional")
WINDOWS = "windows"

# Sections on which it depends what a goal leaves out.
_READ = ("conversion", "training", "data", "adapter", "transfer")

# Family of schemes that are added to another encoding.
_ADDED = "add-on"

Content = dict[str, Any]


@dataclass(frozen=True)
class Recommendation:
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
    case = _Case(config, {})
    measured, found = _data()["measured"][case.native], []
    for row in measured["recipes"]:
        found.append(Recommendation(row["recipe"], row.get("quality"), row.get("far"), measured["model"]))
    suited = [name for name, info in registry.schemes().items() if case.suits(info) and info.family != _ADDED]
    far = [name for name in suited if registry.get(name).adaptation.reach]
    ways = ["extend", "remove", *(f"extend by={name}" for name in (*case.ways, *far))]
    ways += [*(f"swap scheme={name}" for name in suited), "control"]
    known = {each.words for each in found}
    found = [each for each in found if each.words in ways]
    return [*found, *(Recommendation(words) for words in ways if words not in known)]


@functools.cache
def _data() -> Content:
    found: Content = fields.parse((Path(__file__).parent / "goals.yaml").read_text(encoding="utf-8"), "goals.yaml")
    return found


def read_recipe(source: str | Path, overrides: Sequence[str] = (), *, config: Any = None) -> Recipe:
    """Read and validate a recipe.

    Args:
        source: YAML file, or name of a built-in recipe, which follows from the config of the model.
        overrides: Strings `section.key=value`, with values in YAML; they take precedence over the file. The section
            may be left out where that is clear.
        config: Config of the model, if it is at hand.

    Raises:
        RecipeError: The recipe does not exist, is not YAML or does not match the schema, its keys contradict each
            other, or its scheme or options do not exist.
        CheckpointError: The config of the model cannot be read.
    """
    if library.is_file(source):
        content = fields.parse(library.content(source), str(source))
        if not isinstance(content, dict):
            kind = "empty" if content is None else f"a {type(content).__name__}"
            raise RecipeError(f"{source} is {kind}; expected keys, such as model and conversion.")
    else:
        content, overrides = resolve(Recipe, str(source), overrides, config)
    recipe = fields.build(Recipe, content, where=str(source), overrides=overrides)
    checks.check(recipe, str(source))
    return recipe


def resolve(
    kind: type[Any], source: str, overrides: Sequence[str], config: Any = None
) -> tuple[Content, tuple[str, ...]]:
    """Return the content of a built-in recipe for a model, and the overrides that are keys of it.

    `kind` is the class of recipes. `extend` has two keys more, `factor` and `by`. A config of `None` is read.
    """
    if source not in library.names():
        raise RecipeError(f"There is no recipe {shown(source)}. {_instead(source)} A file ends in .yaml.")
    content: Content = fields.parse(library.content(source), source)
    ways: Content = {}
    of_extend = [pair for pair in overrides if source == "extend" and pair.partition("=")[0] in ("factor", "by")]
    fields.override(kind, ways, of_extend)
    overrides = tuple(pair for pair in overrides if pair not in of_extend)
    given = copy.deepcopy(content)
    paths = fields.override(kind, given, overrides)
    config = load_config(str(given["model"])) if config is None else config
    sections = {name: given.get(name, {}) for name in _READ}
    if not all(isinstance(section, dict) for section in sections.values()):
        return content, overrides  # An error of the user, which validation names.
    case = _Case(config, content, **sections)
    scheme = case.conversion.get("scheme")
    if source == "extend":
        case.extend(**ways)
    elif scheme is not None:
        case.swap(str(scheme))
    elif source == "swap" and not {("conversion",), ("conversion", "scheme")} & set(paths):
        raise RecipeError(
            "swap needs a scheme: give scheme=NAME. `hf-posenc recipes --for MODEL` recommends some, and `hf-posenc "
            "schemes` lists all."
        )
    case.size()
    return content, overrides


def _instead(source: str) -> str:
    """Return what to take in the place of a recipe that does not exist."""
    scheme = source.partition("-")[2]
    now = _data()["earlier"].get(source) or (f"swap scheme={scheme}" if scheme in registry.schemes() else None)
    return suggest(source, library.names()) if now is None else f"Take {now} model=DIR."


class _Case:
    """A model and a goal, whose `content` is filled in; the sections are there as the user gave them."""

    def __init__(self, config: Any, content: Content, **given: Content) -> None:
        self.config, self.content = config, content
        self.conversion, self.training, data, adapter, self.transfer = (given.get(name, {}) for name in _READ)
        self.exact = self.extends = False
        # Whether only the scheme's weights are trained.
        self.alone = adapter.get("kind") == "scheme"
        self.rotary = bool(getattr(config, "rope_parameters", None))
        self.relative = hasattr(config, "relative_attention_num_buckets")
        self.causal = auto_class(config) is AutoModelForCausalLM
        self.own = self.reach = trained_length(config) or _LENGTH
        length = self.training.get("length")
        self.length = length if isinstance(length, int) and 0 < length <= MOST else min(self.own, WINDOW)
        # Windows of which positions are skipped hold one long text.
        self.skips = self.causal and data.get("packing") != "documents" and "skip_to" not in self.training

    def set(self, section: str, **keys: Any) -> None:
        """Set keys of a section."""
        self.content.setdefault(section, {}).update(keys)

    def swap(self, name: str) -> None:
        """Bring in a scheme as its `adaptation` says."""
        try:
            info = registry.get(name)
        except PosencError:
            return  # Validation says why.
        self.set("conversion", scheme=name, **self._suited(info))
        self._transfer(info)
        if info.adaptation.reach > 1:
            self._train_to(max(self.own, info.adaptation.reach * min(self.own, WINDOW)))

    def _transfer(self, info: SchemeInfo) -> None:
        """Begin with the attention transfer in a model of real size, instead of a fit or a handover."""
        conversion = self.content["conversion"]
        hidden = self.config.get_text_config().hidden_size
        # The original's positions must act in attention, and so must the scheme.
        if not self.rotary or info.cls.embed is not Scheme.embed or self.exact:
            return
        if not self.causal or hidden < _REAL:
            return
        if conversion["native"] == "keep" or {"native", "fit"} & set(self.conversion):
            return
        if self.transfer.get("steps") == 0:
            return
        conversion |= {"native": "remove", "fit": None}
        self.content["distillation"] = {"share": 1.0}
        # No more tokens than a short training has, in as many steps as there can be: one window for each process.
        windows = int(os.environ.get("WORLD_SIZE", "1"))
        steps = max(1, min(_TRANSFER, self._tokens()) // (windows * self.length))
        self.set("transfer", steps=steps, batch_size=windows)

    def _suited(self, info: SchemeInfo) -> Content:
        """Return the keys of the conversion to a scheme."""
        advice, options = info.adaptation, {}
        behind_only = self.config.is_encoder_decoder and (advice.symmetric or "bidirectional" not in info.directions)
        stacks = ["decoder"] if behind_only else None
        native, fit = advice.elsewhere, None
        self.exact = False
        if info.cls.reproduces is not None and self._starts_exact(info.name, stacks):
            native, self.exact = "remove", True
        elif info.family == _ADDED:
            native, options = "keep", dict(info.cls.neutral_options or {})
        elif self.rotary or (self.relative and (advice.fit or advice.native == "handover")):
            # A bias that was fitted to a table of both directions is poor in one.
            native, fit = advice.native, "attention" if advice.fit and behind_only else advice.fit
            options = dict(advice.options)
        # Without the model's own weights, nothing learns to do without its encoding.
        wanted = self.conversion.get("native", "keep" if self.alone and not self.exact else native)
        if wanted != native:
            native, fit, options = wanted, None, dict(info.cls.neutral_options or {}) if wanted == "keep" else {}
        # All layers fade alike, also those that are made local.
        if native == "handover" and ("window" in self.conversion or not of_config(self.config).native_fades):
            native = "remove"
        if native == "handover" and "gate" in (info.cls.neutral_options or {}):
            options["gate"] = False  # The handover brings the scheme in, and a gate that starts at 0 would keep it out.
        if not self.causal and not behind_only:
            options |= advice.encoder
        for option, windows in advice.windows.items():
            options[option] = max(1, round(self.length * windows))
        return {"native": native, "fit": fit, "options": options, "stacks": stacks}

    def _starts_exact(self, name: str, stacks: list[str] | None) -> bool:
        try:
            # One layer of a rotary model tells, and is faster to look at than all.
            return plan(self.config, name, stacks=stacks, layers=[0] if self.rotary else None).start == "exact"
        except PosencError:
            return False  # Patching says why.

    def extend(self, factor: Any = _FACTOR, by: Any = None) -> None:
        """Reach texts of a multiple of the trained length, by one of `ways` or a scheme, which the model may choose."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor <= MOST // self.own:
            raise RecipeError(
                f"factor is {shown(factor)}; expected a number above 1, such as factor=4, and at most "
                f"{MOST // self.own:,}."
            )
        far, self.extends = int(self.own * factor), True
        ways = [*self.ways, *registry.schemes()]
        if by is None:
            by = self.ways[0] if self.ways else self._measured_scheme()
        if by not in ways:
            why = "the model has no rotary encoding" if by in ROPES else suggest(str(by), ways)
            raise RecipeError(f"by is {shown(by)}: {why}; expected {', '.join(ways)}.")
        if by in ROPES:
            self.set("conversion", rope=rotary.rescaled(self.config, by, far / self.own, self.own))
        elif by != WINDOWS:
            self.content["distillation"] = fields.parse(library.content("swap"), "swap")["distillation"]
            if not (self.rotary or self.relative):
                self.conversion.setdefault("native", "remove")  # A table has no rows for what is wanted.
            self.set("conversion", **{"scheme": by, **self._suited(registry.get(by))})
        if self.causal:
            self._train_to(far)
        elif "length" not in self.training:
            self.length = self.reach = far
            self.set("training", length=far, batch_size=max(1, 8 * self.own // far))

    @property
    def ways(self) -> tuple[str, ...]:
        """Ways to extend the native encoding, best first; a table of positions has none."""
        return (*(ROPES if self.rotary else ()), *((WINDOWS,) if self.rotary or self.relative else ()))

    @property
    def native(self) -> str:
        """Kind of the native encoding in what was measured."""
        return "rotation" if self.rotary else "buckets" if self.relative else "table"

    def suits(self, info: SchemeInfo) -> bool:
        """Whether a scheme is defined for the model, and tells its directions apart."""
        advice, one_way = info.adaptation, self.causal or self.config.is_encoder_decoder
        return one_way or ("bidirectional" in info.directions and (not advice.symmetric or bool(advice.encoder)))

    def _measured_scheme(self) -> str:
        """Return the best scheme of which long texts were measured."""
        rows = _data()["measured"][self.native]["recipes"]
        rows = sorted((row for row in rows if "far" in row), key=lambda row: row["quality"] * row["far"])
        names = (str(row["recipe"]).rpartition("=")[2] for row in rows)
        return next(name for name in names if self.suits(registry.get(name)))

    def _train_to(self, far: int) -> None:
        """Spread the positions of windows over a longer text."""
        table_stays = not (self.rotary or self.relative) and self.content["conversion"].get("native") != "remove"
        if self.skips and far > self.length and not (table_stays and far > self.own):
            self.reach = far
            self.set("training", skip_to=far)

    def _tokens(self) -> int:
        """Return the tokens of the training."""
        steps, windows = (self.training.get(name) for name in ("steps", "batch_size"))
        steps, windows = (given if isinstance(given, int) else usual for given, usual in ((steps, 300), (windows, 8)))
        return steps * windows * self.length

    def size(self) -> None:
        """Set lengths and precision where those of the model would cost too much."""
        if "length" not in self.training and self.length != trained_length(self.config):
            self.set("training", length=self.length)
        if trained_length(self.config) is None and self.reach > self.own:
            # Nothing else knows how long the texts of the model's own training were.
            longest = self.reach * 2
            self.set("evaluation", contexts=[each for power in range(9) if (each := self.own << power) <= longest])
        elif self.own > _LENGTH:
            contexts = {self.length // 4, self.length, 4 * self.length, self.own, self.reach}
            affordable = self._tokens() // Evaluation.windows
            most = min(max(4 * self.length, self.reach), max(self.length, affordable // _MEASURED))
            fitting = {each for each in contexts if TARGETS <= each <= most}
            if self.extends and self.reach <= affordable // _WANTED:
                fitting.add(self.reach)
            self.set("evaluation", contexts=sorted(fitting) or [TARGETS])
        # On CPUs the gain is as large for a model that was saved in float32, and its loss is the same.
        is_half = self.config.dtype in (torch.bfloat16, torch.float16)
        if (is_half or not torch.cuda.is_available()) and bfloat16_pays(self.config.get_text_config().hidden_size):
            self.set("training", precision="bfloat16")
