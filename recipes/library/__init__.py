"""The recipes that come with the package, one YAML file each."""

from __future__ import annotations

from pathlib import Path

from hf_posenc.errors import RecipeError, suggest

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(source: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        source: A YAML file, or a name.

    Raises:
        RecipeError: There is neither.
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"There is no file {path}. Give a YAML file, or a name: {', '.join(names())}.")
        return path
    if str(source) not in names():
        raise RecipeError(f"There is no recipe {str(source)!r}. {suggest(str(source), names())} A file ends in .yaml.")
    return FOLDER / f"{source}.yaml"
