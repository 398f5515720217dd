"""Built-in recipes, one YAML file each, and configs for `accelerate launch`."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from hf_posenc.errors import RecipeError, suggest

FOLDER = Path(__file__).parent
CONFIGS = FOLDER.parent / "configs"
SUFFIXES = (".yaml", ".yml")


def names() -> list[str]:
    """Return the names of the built-in recipes."""
    return _names(FOLDER)


def find(source: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        source: YAML file, or name of a built-in recipe.

    Raises:
        RecipeError: There is no such file or recipe.
    """
    near = get_close_matches(str(source), names(), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return _find(source, FOLDER, "recipe", f"{hint}All names: hf-posenc recipes.")


def find_config(source: str | Path) -> Path:
    """Return the file of a config for `accelerate launch`.

    Args:
        source: YAML file, or name of a built-in config.

    Raises:
        RecipeError: There is no such file or config.
    """
    return _find(source, CONFIGS, "config", suggest(str(source), _names(CONFIGS)))


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _find(source: str | Path, folder: Path, what: str, hint: str) -> Path:
    path = Path(source)
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise RecipeError(f"There is no file {path}. Give a file that is there, or the name of a {what}.")
        return path
    if str(source) not in _names(folder):
        raise RecipeError(f"There is no {what} {str(source)!r}. {hint} A file ends in .yaml.")
    return folder / f"{source}.yaml"
