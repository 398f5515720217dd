"""Report of a run: a table, a picture and the model card."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from hf_posenc.patches.companions import encoding_section
from hf_posenc.patches.directories import published, write_text
from hf_posenc.recipes.data.sources import BUILTIN
from hf_posenc.recipes.evaluation.curve import TARGETS, ContextCurve
from hf_posenc.recipes.evaluation.grid import LOSS, PERPLEXITY, RATIO, Quantity
from hf_posenc.recipes.evaluation.intervals import Interval
from hf_posenc.recipes.plots.curves import plot_run
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.runs.progress import Pace
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.training.callbacks import Handover

TABLE, PICTURE = "table.md", "perplexity.png"

Log = Sequence[Mapping[str, Any]]


def write(
    folder: Path,
    recipe: Recipe,
    measurements: Measurements,
    facts: Facts,
    *,
    log: Log = (),
    pace: Pace | None = None,
) -> None:
    """Write table.md and perplexity.png, each atomically.

    Args:
        folder: Folder of the run.
        recipe: Recipe of the run.
        measurements: Measurements of the run.
        facts: Facts of the run.
        log: Log of the trainer (`trainer.state.log_history`), for the loss by step.
        pace: Speed of the run (`Progress.pace`).
    """
    _draw(folder / PICTURE, recipe, measurements, facts, log)
    lines = [
        f"# {_title(facts)}: perplexity on held-out text",
        "",
        *_results(measurements, facts),
        *_details(measurements, facts),
        *_training(facts, log, pace),
        f"![perplexity by context length, and the course of the training]({PICTURE})",
        "",
    ]
    write_text(folder / TABLE, "\n".join(lines))


# -- tables ------------------------------------------------------------------------------------------------------------


def _title(facts: Facts) -> str:
    return f"{_name(facts.model)} {f'with {facts.scheme}' if facts.scheme else 'trained as it is'}"


def _name(source: str) -> str:
    """Return the name of a model or text; for a local path, its last part."""
    return source if on_the_hub(source) else Path(source).name


def on_the_hub(source: str) -> bool:
    """Whether a source looks like a name on the hub, and is no local file or folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not Path(source).exists()


def _subjects(measurements: Measurements, facts: Facts) -> dict[str, ContextCurve]:
    """Return the measured curves by their name in table and picture."""
    name = facts.scheme or "native"
    last = max((step for step, _ in measurements.course()), default=0)
    found = {
        "native": measurements.curve("native"),
        f"{name}, before training": measurements.curve("before"),
        f"{name}, after {last:,} steps": measurements.curve("after"),
    }
    if facts.scheme is None:
        del found[f"{name}, before training"]  # It is the native model again.
    return {name: curve for name, curve in found.items() if curve is not None}


def _results(measurements: Measurements, facts: Facts) -> list[str]:
    """Return the Markdown tables of perplexity by context length."""
    subjects = _subjects(measurements, facts)
    if not subjects:
        return ["Nothing was measured.", ""]
    contexts = _contexts(subjects)
    windows = next(iter(subjects.values())).windows
    unread = [
        f"{name} cannot read more than {max(curve.contexts):,} tokens"
        for name, curve in subjects.items()
        if len(curve.contexts) < len(contexts)
    ]
    notes = f" Note: {'; '.join(unread)}." if unread else ""
    lines = [
        f"Perplexity per token of the same {TARGETS} tokens in each of {windows} held-out windows (with 95 % "
        f"interval), by number of tokens read. Trained on {facts.tokens:,} tokens in windows of {facts.length:,}; the "
        f"model's trained length is {facts.trained_length:,}.{notes}",
        "",
        *_by_context(contexts, subjects, _perplexity),
    ]
    reference, others = _compared(subjects)
    if reference is not None and others:
        lines += [
            "As a percentage of the native model's perplexity, window by window:",
            "",
            *_by_context(contexts, others, lambda curve, context: _ratio(curve, reference, context)),
        ]
    return lines


def _details(measurements: Measurements, facts: Facts) -> list[str]:
    """Return the Markdown tables in nats per token, and by step if measured during training."""
    subjects = _subjects(measurements, facts)
    contexts = _contexts(subjects)
    reference, others = _compared(subjects)
    lines = []
    if reference is not None and others:
        lines += [
            "Difference from the native model in nats per token, window by window:",
            "",
            *_by_context(contexts, others, lambda curve, context: _difference(curve, reference, context)),
        ]
    if subjects:
        lines += ["Loss in nats per token:", "", *_by_context(contexts, subjects, _loss)]
    course = {f"{step:,}": curve for step, curve in measurements.course()}
    if len(course) > 2:
        lines += [
            "Perplexity by optimizer step:",
            "",
            *_by_context(contexts, course, _perplexity, corner="steps \\ tokens read"),
        ]
    return lines


def _contexts(curves: Mapping[str, ContextCurve]) -> list[int]:
    return sorted({context for curve in curves.values() for context in curve.contexts})


def _compared(subjects: Mapping[str, ContextCurve]) -> tuple[ContextCurve | None, dict[str, ContextCurve]]:
    """Return the native model's curve, and those to compare with it."""
    return subjects.get("native"), {name: curve for name, curve in subjects.items() if name != "native"}


def _by_context(
    contexts: Sequence[int],
    curves: Mapping[str, ContextCurve],
    cell: Callable[[ContextCurve, int], str],
    *,
    corner: str = "tokens read",
) -> list[str]:
    """Return a Markdown table with a column for each context length."""
    return [
        _line(corner, *(f"{context:,}" for context in contexts)),
        _line("---", *("---:" for _ in contexts)),
        *(_line(name, *(cell(curve, context) for context in contexts)) for name, curve in curves.items()),
        "",
    ]


def _training(facts: Facts, log: Log, pace: Pace | None) -> list[str]:
    """Return the lines on training loss and speed."""
    losses = [loss for _, loss in _losses(log)]
    lines = (
        [f"Training loss on the text, first and last logged: {losses[0]:.4f} and {losses[-1]:.4f} nats per token.", ""]
        if losses
        else []
    )
    where = f"{facts.processes} x {facts.device}, {facts.precision}"
    if pace is None:
        return [*lines, f"Speed: not measured ({where}).", ""]
    memory = "" if pace.memory is None else f", {pace.memory / 2**20:,.0f} MiB of memory at most"
    return [
        *lines,
        f"Speed on the machine of this run ({where}), over {pace.steps:,} steps: {pace.seconds:.3g} s per step, "
        f"{pace.tokens:,.0f} tokens/s{memory}.",
        "",
    ]


def _losses(log: Log) -> list[tuple[int, float]]:
    """Return steps and losses on the text; a mixed loss would rise while its teacher fades."""
    return [(entry["step"], entry.get("text_loss", entry["loss"])) for entry in log if "loss" in entry]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _perplexity(curve: ContextCurve, context: int) -> str:
    return _write(PERPLEXITY, curve.perplexity, context, curve)


def _loss(curve: ContextCurve, context: int) -> str:
    return _write(LOSS, curve.loss, context, curve)


def _ratio(curve: ContextCurve, reference: ContextCurve, context: int) -> str:
    return _write(RATIO, partial(curve.ratio, reference), context, curve, reference)


def _difference(curve: ContextCurve, reference: ContextCurve, context: int) -> str:
    return _write(LOSS, partial(curve.minus, reference), context, curve, reference)


def _write(quantity: Quantity, estimate: Callable[[int], Interval], context: int, *curves: ContextCurve) -> str:
    """Return a cell with an estimate and its interval; a dash where one of the curves was not measured."""
    if any(context not in curve.contexts for curve in curves):
        return "-"
    found = estimate(context)
    # A model that diverged must not look like one that was not measured.
    return quantity.write(found) if found.is_known else str(found.mean)


# -- the picture -------------------------------------------------------------------------------------------------------


def _draw(path: Path, recipe: Recipe, measurements: Measurements, facts: Facts, log: Log) -> None:
    subjects = _subjects(measurements, facts)
    if not subjects:
        return
    # The measured length nearest to the trained length.
    length = min(_contexts(subjects), key=lambda context: abs(math.log(context / facts.trained_length)))
    native = measurements.curve("native")
    strength = []
    if recipe.conversion.native == "handover" and recipe.conversion.scheme is not None:
        way = Handover(recipe.conversion.handover)
        strength = [(step, way.progress(step, facts.steps)) for step in range(facts.steps + 1)]
    with published(path) as unfinished:
        plot_run(
            unfinished,
            subjects,
            trained_length=facts.trained_length,
            title=f"{_title(facts)}: perplexity on held-out text",
            losses=_losses(log),
            course=[(at, curve.perplexity(length)) for at, curve in measurements.course() if length in curve.contexts],
            native=native.perplexity(length) if native is not None and length in native.contexts else None,
            course_length=length,
            strength=strength,
        )


# -- the model card ----------------------------------------------------------------------------------------------------


def model_card(
    recipe: Recipe,
    measurements: Measurements,
    facts: Facts,
    *,
    existing: str = "",
    log: Log = (),
    pace: Pace | None = None,
) -> str:
    """Return the model's README.md: loading, measurements and origin.

    Args:
        recipe: Recipe of the run.
        measurements: Measurements of the run.
        facts: Facts of the run.
        existing: Card that `save_pretrained` wrote. Its metadata and its section on the positional encoding are kept;
            PEFT's empty form is not.
        log: Log of the trainer.
        pace: Speed of the run.
    """
    card = ModelCard(existing) if existing.strip() else ModelCard(f"---\n{ModelCardData().to_yaml()}\n---\n")
    _describe(card.data, recipe)
    parts = [
        f"# {_title(facts)}",
        _introduction(recipe, facts),
        encoding_section(card.text) or _loading(recipe, facts),
        "\n".join(["## Results", "", *_results(measurements, facts), *_training(facts, log, pace)]),
        "\n".join(_origin(recipe, facts)),
    ]
    card.text = "\n" + "\n\n".join(part.strip("\n") for part in parts) + "\n"
    return str(card.content)


def _describe(data: Any, recipe: Recipe) -> None:
    """Fill in the hub's metadata, except the licence, which the user chooses."""
    adapter, scheme = recipe.adapter.kind, recipe.conversion.scheme
    data.library_name = "transformers" if adapter == "none" else "peft"
    # The hub accepts only names on the hub, and local paths are private.
    data.base_model = recipe.model if on_the_hub(recipe.model) else None
    data.datasets = [recipe.data.source] if recipe.data.source != BUILTIN and on_the_hub(recipe.data.source) else None
    tags = [tag for tag in data.tags or [] if not tag.startswith("base_model:")]
    tags += [*(["lora"] if adapter == "lora" else []), "hf_posenc", *([scheme] if scheme else [])]
    data.tags = list(dict.fromkeys(tags))


def _introduction(recipe: Recipe, facts: Facts) -> str:
    what = f"{facts.trained} ({facts.trained_parameters:,} parameters, {facts.new_parameters:,} of them new)"
    how = f"Trained for {facts.steps:,} steps, {facts.tokens:,} tokens of {_text(recipe, facts)}: {what}."
    if facts.teacher:
        how += f" Distilled from {facts.teacher}."
    if facts.scheme is None:
        return (
            f"{_name(facts.model)} with its own positional encoding, the {facts.native}, after further training. {how}"
        )
    way = "over" if recipe.conversion.native == "keep" else "instead of"
    return f"{_name(facts.model)} with `{facts.scheme}` {way} its {facts.native}. {how}"


def _text(recipe: Recipe, facts: Facts) -> str:
    if recipe.data.source == BUILTIN:
        return "the documentation that comes with Python"
    name = recipe.data.source if on_the_hub(recipe.data.source) else _name(recipe.data.source)
    return f"`{name}`" + (f" ({recipe.data.config})" if recipe.data.config else "")


def _loading(recipe: Recipe, facts: Facts) -> str:
    """Return the section on loading for an adapter, or a model without a scheme; others have a section already."""
    has_encoder = facts.architecture in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    auto = "AutoModelForSeq2SeqLM" if has_encoder else "AutoModelForCausalLM"
    needs_us = facts.scheme is not None
    lines = ["## How to load it", "", "```python"]
    lines += ["import hf_posenc  # pip install hf-posenc"] * needs_us
    if recipe.adapter.kind == "none":
        lines += [f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("path/or/repo")']
    else:
        base = recipe.model if on_the_hub(recipe.model) else f"path/of/{_name(recipe.model)}"
        lines += [
            "from peft import PeftModel",
            f"from transformers import {auto}",
            "",
            f'base = {auto}.from_pretrained("{base}")' + "  # as it is; the adapter converts it" * needs_us,
            'model = PeftModel.from_pretrained(base, "path/or/repo")',
        ]
    return "\n".join([*lines, "```"])


def _origin(recipe: Recipe, facts: Facts) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    command = ["The command:", "", "```bash", facts.command, "```", ""] if facts.command else []
    return [
        "## How it was made",
        "",
        *command,
        "The recipe, every key written out:",
        "",
        "```yaml",
        recipe.text().strip(),
        "```",
        "",
        f"Versions: {versions}.",
    ]
