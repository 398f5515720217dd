"""Fit of the converted model's start to its native encoding."""

from __future__ import annotations

import itertools

import torch

from hf_posenc.patches.patch import set_strength
from hf_posenc.recipes.runs import files
from hf_posenc.recipes.runs.stages.base import Case, Context, Stage, Work
from hf_posenc.recipes.training.fit_bias import check_fit, fit

# Windows of text that are read.
_WINDOWS = 16


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
