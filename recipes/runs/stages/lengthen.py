"""Long windows, after the training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_posenc.recipes.data.collation import Collator, MixedLengths
from hf_posenc.recipes.runs.stages.base import Case
from hf_posenc.recipes.runs.stages.trained import Trained
from hf_posenc.recipes.schema.recipe import Distillation, Recipe


class Lengthen(Trained):
    """Training on long windows, mixed with short ones so that these are not unlearned.

    It keeps the teacher, or would undo a part of what that taught; but not one that has faded, nor an encoder-decoder,
    which would read the windows whole, beyond its trained length.
    """

    section = "lengthen"
    words = "long windows"

    def plain(self, model: Any) -> Recipe:
        has_teacher = not self.recipe.distillation.until and not model.config.is_encoder_decoder
        plain = super().plain(model)
        return plain if has_teacher else replace(plain, distillation=Distillation())

    def collate(self, case: Case) -> Collator | None:
        # Encoders as they were cannot tell the parts apart.
        found = super().collate(case)
        seed, share = self.recipe.training.seed, self.recipe.lengthen.short
        return MixedLengths(case.length, share=share, seed=seed) if found is None else found
