"""Adapter and teacher: what stands around the converted model before it is trained."""

from __future__ import annotations

import contextlib

from hf_posenc.recipes.runs.stages.base import Case, Context, Stage, Work
from hf_posenc.recipes.training.adapter import attach, check_targets, quantization
from hf_posenc.recipes.training.trainer import check_teacher, teacher_of


class Adapt(Stage):
    """Adapter of the recipe, and the teacher that the model is before it is trained."""

    def check(self, case: Case, work: Work) -> None:
        check_teacher(self.recipe, case.config)
        check_targets(work.model, self.recipe.adapter)
        quantization(self.recipe.adapter)
        work.model = attach(work.model, self.recipe.adapter)

    def run(self, context: Context, work: Work) -> None:
        self.adapt(work)

    def adapt(self, work: Work) -> None:
        """Attach the adapter, and make the teacher unless the recipe names one."""
        work.model = attach(work.model, self.recipe.adapter)
        if self.recipe.distillation.teacher is None:
            # A copy of a converted model is unpatched; other rope parameters are taken back for a moment.
            is_rope = self.recipe.conversion.scheme is None
            with work.original(work.model) if is_rope else contextlib.nullcontext():
                work.teacher = teacher_of(work.model, self.recipe)
