"""Conversion: the model gets another positional encoding, or other rope parameters."""

from __future__ import annotations

from typing import Any

from hf_posenc.errors import RecipeError
from hf_posenc.patches.patch import disabled, native_scheme, patch
from hf_posenc.patches.rotary import native_rope, set_rope
from hf_posenc.patches.surgery import Sites, is_patched
from hf_posenc.recipes.runs.stages.base import Case, Context, Stage, Work
from hf_posenc.recipes.schema import checks


class Convert(Stage):
    """Conversion of the model, which is the same with and without weights."""

    def check(self, case: Case, work: Work) -> None:
        checks.check_unconverted(self.recipe, case.config)
        self.convert(work)
        checks.check_tables(self.recipe, work.model, case.length)

    def run(self, context: Context, work: Work) -> None:
        self.convert(work)

    def convert(self, work: Work) -> None:
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
