"""Built-in recipes, one YAML file for each goal, and configs for `accelerate launch`.

`hf_posenc.recipes.goals` fills in what follows from the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_posenc.errors import RecipeError, suggest
from hf_posenc.patches.atomic_files import reading
from hf_posenc.recipes.schema.fields import LARGEST_TEXT, parse

FOLDER = Path(__file__).parent
CONFIGS = FOLDER.parent / "configs"


def names(folder: Path = FOLDER) -> list[str]:
    """Return the names of the built-in recipes, or of the configs."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def content(source: str | Path) -> dict[str, Any]:
    """Return the content of a YAML file, or of a built-in recipe by its name; raise `RecipeError` if there is none."""
    path = Path(source) if is_file(source) else FOLDER / f"{source}.yaml"
    if not path.exists():
        raise RecipeError(f"There is no file {path}. Give a file that is there, or the name of a recipe.")
    # One character more than is read later, of a file that may be endless.
    with reading(f"The recipe {path}", kind=RecipeError), path.open(encoding="utf-8") as file:
        found = parse(file.read(LARGEST_TEXT + 1), str(source))
    if not isinstance(found, dict):
        kind = "empty" if found is None else f"a {type(found).__name__}"
        raise RecipeError(f"{source} is {kind}; expected keys, such as model and conversion.")
    return found


def is_file(source: str | Path) -> bool:
    return Path(source).suffix in (".yaml", ".yml")


def find_config(name: str) -> Path:
    """Return the file of a built-in config for `accelerate launch`; raise `RecipeError` if there is none."""
    if name not in names(CONFIGS):
        raise RecipeError(f"There is no config {name!r}. {suggest(name, names(CONFIGS))}")
    return CONFIGS / f"{name}.yaml"
