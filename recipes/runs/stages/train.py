"""Training of the converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posenc.recipes.runs.stages.base import Context
from hf_posenc.recipes.runs.stages.trained import Trained
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.training.rates import Name


class Train(Trained):
    """Training, in which the scheme is brought in, and the teacher restores what the model could do."""

    section = "training"
    words = "training"

    @property
    def rates(self) -> tuple[Name, bool]:
        conversion, transfers = self.recipe.conversion, "transfer" in self.recipe.stages()
        learned = conversion.scheme is None or conversion.fit is not None or transfers
        is_refining = transfers and self.recipe.moves_projections
        return "refining" if is_refining else self.section, learned or conversion.native == "keep"

    def plain(self, model: Any) -> Recipe:
        return self.recipe

    def folder(self, context: Context) -> Path:
        return context.checkpoints

    @property
    def saves_end(self) -> bool:
        return "lengthen" in self.recipe.stages()
