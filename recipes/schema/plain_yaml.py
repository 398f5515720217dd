"""YAML 1.2 core schema for recipes: `1e-3` is a number, `no`, `0:8` and `2024-01-01` are text; no duplicate keys."""

from __future__ import annotations

import re
from typing import Any

import yaml

from hf_posenc.errors import RecipeError

_TAG = "tag:yaml.org,2002:"
_WHOLE = r"[-+]?(?:0|[1-9][0-9_]*)"
_FLOAT = re.compile(
    rf"{_WHOLE}(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?$|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_FIRST_OF_NUMBER = list("-+.0123456789")


def parse(text: str, what: str) -> Any:
    """Read one YAML document.

    Args:
        text: Document.
        what: Name of the document, for errors.

    Raises:
        RecipeError: The text is not YAML, or has a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise RecipeError(f"{what} is not a recipe's YAML: {error.problem}{place}.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError(f"{what} is not a recipe's YAML: {' '.join(str(error).split())}.") from error


def write(content: Any) -> str:
    """Return a YAML document that `parse` and YAML 1.1 readers read alike."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Loader(yaml.SafeLoader):
    """Loader with the core schema of YAML 1.2."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a dict; raise for duplicate keys, of which PyYAML would take the last."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which YAML 1.1 or 1.2 would read as something else."""


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"{_WHOLE}$"), _FIRST_OF_NUMBER)
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST_OF_NUMBER)
_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST_OF_NUMBER)
