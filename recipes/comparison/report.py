"""The report of a comparison: what to take first, then the figures that say so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_posenc.recipes.comparison import page, pictures
from hf_posenc.recipes.comparison.contestants import NATIVE, UNTRAINED
from hf_posenc.recipes.comparison.findings import Findings
from hf_posenc.recipes.comparison.page import Block, Cell, Heading, Picture, Points, Table, Text
from hf_posenc.recipes.comparison.verdict import Verdict
from hf_posenc.recipes.evaluation.grid import RATIO, Quantity
from hf_posenc.recipes.evaluation.intervals import Interval, of_mean
from hf_posenc.recipes.runs.files import published, write_text

HTML, MARKDOWN, PICTURES = "report.html", "report.md", "pictures"
_CURVES, _TRADE = "length.png", "trade.png"
# Up to these, as shares of the native model or of the same at the trained length, a cell is good, or fair.
_GOOD, _FAIR = 1.05, 1.5
# What a file holds is in its unit already.
_AS_IT_IS = Quantity("", of_mean)
# Times the trained length, on the report card.
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
    """Write report.html, report.md and pictures/, each whole or not at all.

    Args:
        folder: Where they go.
        found: The native model with the same training under `NATIVE`, as it was given under `UNTRAINED`, and the schemes.
        verdict: What follows from it; `None` if no scheme is left.
        failed: What went wrong, by scheme.
        trained: The trained length, in tokens.
        settings: How it was made.
        overviews: Pictures of what schemes have learned.
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
    with published(path) as beside:
        draw(beside)


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
        f"{len(schemes)} scheme{'s' * (len(schemes) != 1)}, each after {settings['budget']:,} steps of {settings['tokens per step']:,} tokens."
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
        f"Perplexity of the same tokens by how many were read, as a share (%) of that of the native model at {trained:,} tokens "
        "after the same training, window by window. In brackets, the 95 % interval."
    )
    keepers = [name for name, each in found.items() if each.keeps_native]
    if keepers:
        yield Text(f"With the native encoding kept beside the scheme, and what it cannot read: {', '.join(keepers)}.")
    yield _quality(found, trained, marked)
    if farthest > trained:
        yield Picture("What is paid for what", drawn / _TRADE)
    yield Heading("Report card")
    yield Text(
        "Memory and time of a training step are multiples of the native model's. Length generalisation is the perplexity on a "
        "longer text as a multiple of the same model's at the trained length. Decay is by how much positions alone lower the logits "
        f"of far keys below those of near ones on a text of {_decay_length(found)} tokens (mean of heads and layers; near is up to "
        "a sixteenth of the text, far from half of it on), without a native encoding that is kept; 0 of schemes that do not act on "
        f"logits. Green: up to {_GOOD:g}; yellow: "
        f"up to {_FAIR:g}; red: above."
    )
    yield _card(found, trained, marked)
    yield Heading("Cost and start")
    yield Text(
        "Step time with its 95 % interval: forward, backward and optimizer without a teacher, in turns with the native model. Memory "
        "is what a forward keeps for its backward. Cache is what is stored per token beside keys and values. The start is what the "
        "conversion alone does to the perplexity, before any training."
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
    # The best at the trained length first; what was there before above all.
    order = sorted(found, key=lambda name: (name not in (UNTRAINED, NATIVE), float(found[name].at(trained).mean())))
    rows = [
        (
            Cell(name),
            *(
                # Itself: nothing is estimated.
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
    """Return what other measures found."""
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
                # The last axis is the one across; a row for each place on the others.
                for start in range(0, len(estimates), len(points)):
                    row = estimates[start : start + len(points)]
                    places = [Cell(str(row[0][other])) for other, _ in outer]
                    rows.append((Cell(name), *places, *map(_estimate, row)))
            header = ("", *(other for other, _ in outer), *(f"{p:,}" if isinstance(p, int) else str(p) for p in points))
            yield Table(header, tuple(rows), marked)


def _estimate(found: Mapping[str, Any]) -> Cell:
    ends = (math.nan if found[end] is None else found[end] for end in ("mean", "low", "high"))
    return Cell(_AS_IT_IS.write(Interval(*ends)))
