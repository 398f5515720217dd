"""All that trains, measures and draws: data, training, runs, evaluation, comparison, plots, recipes.

What users call is here by name, and loads on first use: `read_recipe`, `train` and `resume` for whole runs, `evaluate`
and `compare` for measurements, `fit` and `transfer` for starts.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import require_recipes

if TYPE_CHECKING:
    from hf_posenc.recipes.comparison import compare as compare
    from hf_posenc.recipes.evaluation.measure import evaluate as evaluate
    from hf_posenc.recipes.goals import read_recipe as read_recipe
    from hf_posenc.recipes.runs.run import resume as resume
    from hf_posenc.recipes.runs.run import train as train
    from hf_posenc.recipes.schema.recipe import Recipe as Recipe
    from hf_posenc.recipes.training.fit_bias import fit as fit
    from hf_posenc.recipes.training.transfer import transfer as transfer

require_recipes()

_HOMES = {
    "Recipe": "schema.recipe",
    "compare": "comparison",
    "evaluate": "evaluation.measure",
    "fit": "training.fit_bias",
    "transfer": "training.transfer",
    "read_recipe": "goals",
    "resume": "runs.run",
    "train": "runs.run",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
