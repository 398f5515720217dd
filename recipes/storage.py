"""Files of runs, evaluations and comparisons: their names, and JSON that is written with numbers that any reader knows.

OUT/recipe.yaml          full recipe
OUT/run.json             command, versions, machine, counts, and the recipe again, to detect changes of recipe.yaml
OUT/measurements.json    measurements so far
OUT/checkpoints/         complete checkpoints to resume from
OUT/logs/                TensorBoard logs by stage, if requested
OUT/table.md, OUT/perplexity.png, OUT/report.html
OUT/model/               final model or adapter, with tokenizer and card; it appears last, and marks the run as finished
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hf_posenc.errors import cut
from hf_posenc.patches.atomic_files import reading, write_text

RECIPE, RUN, MEASUREMENTS = "recipe.yaml", "run.json", "measurements.json"
CHECKPOINTS, LOGS, MODEL = "checkpoints", "logs", "model"


def save(found: Any, path: Path) -> None:
    """Write an object to a JSON file, whole or not at all; a number that JSON lacks, such as infinity, becomes null."""
    write_text(path, TypeAdapter(type(found)).dump_json(found, indent=1).decode("utf-8") + "\n")


def load(kind: Any, path: Path, remedy: str) -> Any:
    """Return the content of a JSON file as a type, such as a dataclass that `save` wrote.

    Raise `CheckpointError`, which ends with the remedy, if the file cannot be read or has other content.
    """
    with reading(str(path), f" {remedy}"):
        try:
            return TypeAdapter(kind).validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = cut(".".join(map(str, first["loc"])))
            raise ValueError(f"{place}: {first['msg']}".removeprefix(": ")) from None
