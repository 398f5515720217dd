"""Stages that make the model to train: conversion, fit, adapter and teacher."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch

from hf_posenc.errors import RecipeError
from hf_posenc.patches.patch import disabled, native_scheme, patch, set_strength
from hf_posenc.patches.rotary import native_rope, set_rope
from hf_posenc.patches.surgery import Sites, is_patched
from hf_posenc.recipes.runs import files
from hf_posenc.recipes.runs.stages.base import Case, Context, Stage, Work
from hf_posenc.recipes.schema import checks
from hf_posenc.recipes.training.adapter import attach, check_targets, quantization
from hf_posenc.recipes.training.fit_bias import check_fit, fit
from hf_posenc.recipes.training.trainer import check_teacher, teacher_of

# Windows of text that a fit reads.
_WINDOWS = 16


class Convert(Stage):
    """Conversion of the model, which is the same with and without weights."""

    def check(self, case: Case, work: Work) -> None:
        checks.check_unconverted(self.recipe, case.config)
        self.run(None, work)
        checks.check_tables(self.recipe, work.model, case.length)

    def run(self, context: Context | None, work: Work) -> None:
        conversion, model = self.recipe.conversion, work.model
        if conversion.scheme is not None:
            own = native_scheme(model) if conversion.window is not None else None
            patch(model, conversion.scheme, **conversion.keywords)
            if conversion.window is not None:
                _narrow(model, own, conversion.window)
            work.original = disabled
        elif conversion.rope:
            stock = set_rope(model, conversion.rope)
            work.original = lambda model: native_rope(model, stock)


def _narrow(model: Any, scheme: str | None, window: int) -> None:
    """Hide tokens far behind from the layers that keep the model's own encoding, which the scheme computes."""
    if scheme is None:
        raise RecipeError("conversion.window needs a model whose own encoding a scheme computes. Leave it out.")
    for name, stack in Sites.of(model).stacks.items():
        others = [layer for layer, attention in enumerate(stack.attentions) if not is_patched(attention)]
        if len(others) < len(stack.attentions):
            patch(model, scheme, layers=others, stacks=name, window=window)


class Fit(Stage):
    """Fit of an additive scheme before anything is trained."""

    def check(self, case: Case, work: Work) -> None:
        check_fit(work.model)

    def finished(self, context: Context) -> bool:
        return context.checkpoint is not None

    def run(self, context: Context, work: Work) -> None:
        model, text = work.model, context.case.text(self.recipe.training)
        # A handover ends without the native encoding, so the fit is judged without it.
        fades = self.recipe.conversion.native == "handover"
        if fades:
            set_strength(model, native=0)
        ids = torch.stack([window["input_ids"] for window in itertools.islice(iter(text.train), _WINDOWS)])
        result = fit(model, ids=ids.to(model.device), corrupt=text.corrupt)
        if fades:
            set_strength(model)
        context.judged(work, files.FIT, {"accepted": result.accepted, "sentence": result.sentence})


class Adapt(Stage):
    """Adapter of the recipe, and the teacher that the model is before it is trained."""

    def check(self, case: Case, work: Work) -> None:
        check_teacher(self.recipe, case.config)
        check_targets(work.model, self.recipe.adapter)
        quantization(self.recipe.adapter)
        work.model = attach(work.model, self.recipe.adapter)

    def run(self, context: Context | None, work: Work) -> None:
        """Attach the adapter, and make the teacher unless the recipe names one."""
        work.model = attach(work.model, self.recipe.adapter)
        if self.recipe.distillation.teacher is None:
            # A copy of a converted model is unpatched; other rope parameters are taken back for a moment.
            is_rope = self.recipe.conversion.scheme is None
            with work.original(work.model) if is_rope else contextlib.nullcontext():
                work.teacher = teacher_of(work.model, self.recipe)
