"""Measurements of a run: the native model, and the converted one before, during and after training.

One file in the run's folder keeps them, so a resumed run measures nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from hf_posenc.errors import CheckpointError
from hf_posenc.patches.directories import write_text
from hf_posenc.recipes.evaluation.curve import ContextCurve

# Names of the model as loaded and of the trained model.
NATIVE, CONVERTED = "native", "converted"

_FORMAT_VERSION = 1
_LABEL, _CELL = 16, 9

Measure = Callable[[Any], ContextCurve]


class Measurements:
    """Context curves by model name and step.

    Args:
        path: File to write at every record; `None` keeps the curves in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._curves: dict[tuple[str, int], ContextCurve] = {}

    @classmethod
    def load(cls, path: Path, *, writes: bool = True) -> Measurements:
        """Return the measurements in a file, or none if there is no file.

        Args:
            path: Path of measurements.json.
            writes: Whether this process, the main one, writes. Other processes keep new curves in memory.

        Raises:
            CheckpointError: The file is damaged, or was written by a newer version of this package.
        """
        measurements = cls(path if writes else None)
        if path.exists():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                version = content["format_version"]
                for entry in content["curves"] if version == _FORMAT_VERSION else ():
                    losses = torch.tensor(entry["losses"], dtype=torch.float64)
                    if losses.ndim != 2 or len(losses) != len(entry["contexts"]):
                        raise ValueError(f"losses of shape {list(losses.shape)} at {len(entry['contexts'])} contexts")
                    curve = ContextCurve(tuple(entry["contexts"]), losses)
                    measurements._curves[entry["name"], entry["step"]] = curve
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"The measurements {path} cannot be read ({type(error).__name__}: {error}). Remove the file to "
                    "measure again what can still be measured."
                ) from error
            if version != _FORMAT_VERSION:
                raise CheckpointError(
                    f"The measurements {path} have format_version {version!r}; this package reads {_FORMAT_VERSION}. "
                    "Update hf-posenc, or train into another folder."
                )
        return measurements

    def save(self) -> None:
        """Write the file atomically; `record` calls this."""
        if self._path is None:
            return
        curves = [
            {"name": name, "step": step, "contexts": list(curve.contexts), "losses": curve.losses.tolist()}
            for (name, step), curve in self._curves.items()
        ]
        write_text(self._path, json.dumps({"format_version": _FORMAT_VERSION, "curves": curves}, indent=1) + "\n")

    def record(self, name: str, step: int, curve: ContextCurve) -> None:
        """Keep a curve, and write the file.

        Args:
            name: `NATIVE` or `CONVERTED`.
            step: Optimizer steps before it; 0 for the native model.
            curve: Measured curve.
        """
        self._curves[name, step] = curve
        self.save()

    def at(self, name: str, step: int = 0) -> ContextCurve | None:
        """Return the curve of a model after a step; `None` if not measured."""
        return self._curves.get((name, step))

    def course(self) -> list[tuple[int, ContextCurve]]:
        """Return the steps and curves of the converted model, by step."""
        return sorted(
            ((step, curve) for (name, step), curve in self._curves.items() if name == CONVERTED),
            key=lambda entry: entry[0],
        )

    def curve(self, name: str) -> ContextCurve | None:
        """Return the curve "native", "before" (converted, step 0) or "after" (last step); `None` if not measured."""
        if name == "after":
            return next((curve for step, curve in reversed(self.course()) if step > 0), None)
        return self.at({"native": NATIVE, "before": CONVERTED}[name])


class Measuring(TrainerCallback):
    """Callback that measures the model before the first step, at intervals and after the last step.

    A step that was measured before is not measured again. All processes measure, since the forward of a sharded model
    needs all of them. Add the callback after `Handover`, which sets the strengths of a step. Measuring leaves the
    random state of the training unchanged.

    Args:
        measurements: Store of the curves.
        measure: Function that measures a model, for instance with `readable_curve`.
        every: Steps between measurements; 0 measures before and after only.
        contexts: Columns of the printed table; a curve with more contexts starts a new table.
        console: Console for the table, one row per measurement; `None` is silent.
    """

    def __init__(
        self,
        measurements: Measurements,
        measure: Measure,
        *,
        every: int = 0,
        contexts: Sequence[int] = (),
        console: Console | None = None,
    ) -> None:
        self._measurements, self._measure, self._every, self._console = measurements, measure, every, console
        self._columns, self._has_heading = tuple(contexts), False

    def take(self, name: str, step: int, model: Any) -> ContextCurve:
        """Measure a model unless it was measured before; print and return the curve.

        For the model as loaded, call it with `NATIVE` and step 0 before training.
        """
        curve = self._measurements.at(name, step)
        if curve is None:
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            with torch.random.fork_rng(devices=devices):
                curve = self._measure(model)
            self._measurements.record(name, step, curve)
        self._print(name if name == NATIVE else f"step {step}", curve)
        return curve

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure before the first step; in a resumed run, print the earlier measurements."""
        if state.global_step == 0:
            self.take(CONVERTED, 0, model)
            return
        for step, curve in self._measurements.course():
            if step <= state.global_step:
                self._print(f"step {step}", curve)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure at intervals."""
        if self._every and state.global_step % self._every == 0 and state.global_step < state.max_steps:
            self.take(CONVERTED, state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure after the last step."""
        self.take(CONVERTED, state.global_step, model)

    def _print(self, label: str, curve: ContextCurve) -> None:
        if self._console is None:
            return
        columns = tuple(sorted({*self._columns, *curve.contexts}))
        if columns != self._columns or not self._has_heading:
            self._columns, self._has_heading = columns, True
            self._row("tokens read", [f"{context:,}" for context in self._columns], "bold")
        cells = [f"{curve.perplexity(c).mean:.4g}" if c in curve.contexts else "-" for c in self._columns]
        self._row(label, cells, "")

    def _row(self, label: str, cells: Sequence[str], style: str) -> None:
        assert self._console is not None
        line = f"{label:<{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
        self._console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
