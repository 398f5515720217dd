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

    def run(self, context: Context, work: Work) -> None:
        found = files.record_of(context.folder).get(files.FIT)
        if not self.finished(context):
            found = self._fit(context, work)
            context.say(found["sentence"])
        assert work.facts is not None
        if found is not None and not found["accepted"]:
            work.facts = work.facts.unfitted(found["sentence"])
        context.record(work.facts, **{files.FIT: found})

    def finished(self, context: Context) -> bool:
        """Whether the weights of a checkpoint will replace the fitted ones."""
        return context.checkpoint is not None

    def _fit(self, context: Context, work: Work) -> files.Fitted:
        model, text = work.model, context.case.text(self.recipe.training)
        # A handover ends without the native encoding, so the fit is judged without it.
        fades = self.recipe.conversion.native == "handover"
        if fades:
            set_strength(model, native=0)
        ids = torch.stack([window["input_ids"] for window in itertools.islice(iter(text.train), _WINDOWS)])
        result = fit(model, ids=ids.to(model.device), corrupt=text.corrupt)
        if fades:
            set_strength(model)
        return {"accepted": result.accepted, "sentence": result.sentence}
