"""The report of a comparison: the recommendation first, then the figures behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_posenc.patches.directories import published, write_text
from hf_posenc.recipes.comparison import page, pictures
from hf_posenc.recipes.comparison.contestants import NATIVE, UNTRAINED
from hf_posenc.recipes.comparison.findings import Findings
from hf_posenc.recipes.comparison.page import Block, Cell, Heading, Picture, Points, Table, Text
from hf_posenc.recipes.comparison.verdict import Verdict
from hf_posenc.recipes.evaluation.grid import RATIO, Quantity
from hf_posenc.recipes.evaluation.intervals import Interval, of_mean

HTML, MARKDOWN, PICTURES = "report.html", "report.md", "pictures"
_CURVES, _TRADE = "length.png", "trade.png"
# Upper limits of good and fair cells, as multiples of the native model or of the value at the trained length.
_GOOD, _FAIR = 1.05, 1.5
# Estimates in files are in their units already.
_AS_IT_IS = Quantity("", of_mean)
# Multiples of the trained length on the report card.
_TIMES = (4, 8)


def write(
    folder: Path,
    found: Mapping[str, Findings],
    verdict: Verdict | None,
    failed: Mapping[str, str],
    *,
    trained: int,
    settings: Mapping[str, Any],
    overviews: Mapping[str, Path],
) -> None:
    """Write report.html, report.md and pictures/, each file whole or not at all.

    Args:
        folder: Output folder.
        found: Findings by name: the equally trained native model under `NATIVE`, the original one under `UNTRAINED`,
            and the schemes.
        verdict: The conclusions; `None` if no scheme is left.
        failed: Error messages by scheme.
        trained: The trained length, in tokens.
        settings: Settings of the comparison.
        overviews: Pictures of what schemes have learned, by name.
    """
    drawn = folder / PICTURES
    drawn.mkdir(exist_ok=True)
    farthest = max(found[NATIVE].contexts)
    _draw(drawn / _CURVES, lambda path: pictures.curves(path, found, trained))
    if farthest > trained:
        _draw(drawn / _TRADE, lambda path: pictures.trade(path, found, trained, farthest))
    for name, source in overviews.items():
        _draw(drawn / f"{name}.png", lambda path, source=source: path.write_bytes(source.read_bytes()))
    blocks = list(_blocks(drawn, found, verdict, failed, trained, farthest, settings, tuple(overviews)))
    title = f"Positional encodings for {settings['model']}"
    write_text(folder / MARKDOWN, page.markdown(title, blocks, folder))
    write_text(folder / HTML, page.html(title, blocks))


def _draw(path: Path, draw: Any) -> None:
    with published(path) as draft:
        draw(draft)


def _blocks(
    drawn: Path,
    found: Mapping[str, Findings],
    verdict: Verdict | None,
    failed: Mapping[str, str],
    trained: int,
    farthest: int,
    settings: Mapping[str, Any],
    overviews: tuple[str, ...],
) -> Iterator[Block]:
    marked = () if verdict is None else verdict.recommended
    schemes = {name: each for name, each in found.items() if name not in (NATIVE, UNTRAINED)}
    yield Text(
        f"{len(schemes)} scheme{'s' * (len(schemes) != 1)}, each after {settings['budget']:,} steps of "
        f"{settings['tokens per step']:,} tokens."
    )
    if verdict is None:
        yield Text("No scheme could be measured, so there is nothing to recommend.", leading=True)
    else:
        yield Text(verdict.headline, leading=True)
        yield Points(verdict.reasons)
    if failed:
        yield Heading("Failed")
        yield Points(tuple(f"{name}: {reason}" for name, reason in failed.items()))
    yield Heading("Quality by length")
    yield Picture("Perplexity by length", drawn / _CURVES)
    yield Text(
        f"Perplexity of the same tokens by context length, in % of the native model's at {trained:,} tokens after the "
        "same training, paired by window. The 95 % interval is in brackets."
    )
    keepers = [name for name, each in found.items() if each.keeps_native]
    if keepers:
        yield Text(f"These schemes keep the native encoding, and its limits on length: {', '.join(keepers)}.")
    yield _quality(found, trained, marked)
    if farthest > trained:
        yield Picture("Trade-off between the trained length and longer texts", drawn / _TRADE)
    yield Heading("Report card")
    yield Text(
        "Memory and time of a training step are multiples of the native model's. Length generalisation is the "
        "perplexity on a longer text as a multiple of the same model's at the trained length. Long-term decay is the "
        "difference that positions alone make between the logits of near and far keys on a text of "
        f"{_decay_length(found)} tokens, as a mean over heads and layers; near keys are at most a sixteenth of the "
        "text away, far keys at least half of it. A native encoding that is kept does not count. Decay is 0 for "
        f"schemes that do not act on logits. Green: up to {_GOOD:g}; yellow: up to {_FAIR:g}; red: above."
    )
    yield _card(found, trained, marked)
    yield Heading("Cost and start")
    yield Text(
        "Step time is that of forward, backward and optimizer without a teacher, alternating with the native model, "
        "with its 95 % interval. Step memory is the memory saved for the backward pass. Cache is keys and values plus "
        "the scheme's own bytes per token. Perplexity at the start is that after conversion and before training, as a "
        "multiple of the original model's."
    )
    yield _costs(found, marked)
    yield from _others(found, marked)
    if overviews:
        yield Heading("What each has learned")
        for name in overviews:
            yield Picture(name, drawn / f"{name}.png", folded=True)
    if verdict is not None:
        yield Heading("What the figures do not say")
        yield Points(verdict.cautions)
    yield Heading("How it was made")
    yield Points(tuple(f"{name}: {value}" for name, value in settings.items()))


def _quality(found: Mapping[str, Findings], trained: int, marked: tuple[str, ...]) -> Table:
    native = found[NATIVE]
    header = ("", *(f"{context:,}" for context in native.contexts), f"perplexity at {trained:,}")
    # The native rows come first, then the schemes from the best at the trained length on.
    order = sorted(found, key=lambda name: (name not in (UNTRAINED, NATIVE), float(found[name].at(trained).mean())))
    rows = [
        (
            Cell(name),
            *(
                # The reference itself needs no estimate.
                Cell("100")
                if (name, context) == (NATIVE, trained)
                else _ratio(found[name].ratio(context, native, trained))
                for context in native.contexts
            ),
            Cell(f"{math.exp(float(found[name].at(trained).mean())):.2f}"),
        )
        for name in order
    ]
    return Table(header, tuple(rows), marked)


def _ratio(interval: Interval) -> Cell:
    return Cell(RATIO.write(interval))


def _card(found: Mapping[str, Findings], trained: int, marked: tuple[str, ...]) -> Table:
    contexts = found[NATIVE].contexts
    times = [each for each in _TIMES if each * trained in contexts]
    header = (
        "",
        "memory it adds in training",
        "time it adds in training",
        *(f"length generalisation, {each} times ({each * trained:,} tokens)" for each in times),
        "long-term decay (nats)",
    )
    rows = []
    for name, each in found.items():
        growths = (each.growth(factor * trained, trained).mean for factor in times)
        decay = "0" if each.decay is None else f"{each.decay[0]:.2f}"
        rows.append((Cell(name), *map(_graded, (each.cost.memory_ratio, each.cost.time.mean, *growths)), Cell(decay)))
    return Table(header, tuple(rows), marked)


def _decay_length(found: Mapping[str, Findings]) -> str:
    return next((f"{each.decay[1]:,}" for each in found.values() if each.decay is not None), "as many")


def _graded(multiple: float) -> Cell:
    if not math.isfinite(multiple):
        return Cell("-")
    grade = "good" if multiple <= _GOOD else "fair" if multiple <= _FAIR else "poor"
    return Cell(f"{multiple:.2f}" if multiple < 100 else "over 100", grade)


def _costs(found: Mapping[str, Findings], marked: tuple[str, ...]) -> Table:
    header = (
        "",
        "step time",
        "step memory",
        "new parameters",
        "cache (bytes per token)",
        "perplexity at the start",
        "start",
    )
    rows = []
    for name, each in found.items():
        if name == UNTRAINED:
            continue
        time = each.cost.time
        cost = each.cost
        rows.append(
            (
                Cell(name),
                Cell("1" if name == NATIVE else f"{time.mean:.2f} [{time.low:.2f}, {time.high:.2f}]"),
                Cell("1" if name == NATIVE else f"{cost.memory_ratio:.2f}"),
                Cell(f"{cost.parameters:,}"),
                Cell(f"{cost.own_cache_bytes:,} + {cost.cache_bytes:,}"),
                Cell("-" if each.start_ratio is None else f"{each.start_ratio:.3g} times"),
                Cell(each.start),
            )
        )
    return Table(header, tuple(rows), marked)


def _others(found: Mapping[str, Findings], marked: tuple[str, ...]) -> Iterator[Block]:
    """Return the results of the other measures."""
    for number, section in enumerate(found[NATIVE].sections):
        if section["measure"] == "perplexity":
            continue
        yield Heading(section["title"])
        yield Text(section["note"])
        for index, quantity in enumerate(section["quantities"]):
            unit = f" ({quantity['unit']})" if quantity["unit"] else ""
            guess = "" if quantity["guess"] is None else f"; guessing gives {quantity['guess']:.3g}"
            *outer, (axis, points) = quantity["axes"].items()
            yield Text(f"{quantity['quantity'].capitalize()}{unit} by {axis}{guess}:")
            rows = []
            for name, each in found.items():
                (model,) = each.sections[number]["quantities"][index]["models"].values()
                estimates = model["estimates"]
                # Columns are points of the last axis; each combination of the others is a row.
                for start in range(0, len(estimates), len(points)):
                    row = estimates[start : start + len(points)]
                    places = [Cell(str(row[0][other])) for other, _ in outer]
                    rows.append((Cell(name), *places, *map(_estimate, row)))
            header = ("", *(other for other, _ in outer), *(f"{p:,}" if isinstance(p, int) else str(p) for p in points))
            yield Table(header, tuple(rows), marked)


def _estimate(found: Mapping[str, Any]) -> Cell:
    ends = (math.nan if found[end] is None else found[end] for end in ("mean", "low", "high"))
    return Cell(_AS_IT_IS.write(Interval(*ends)))
