"""YAML as a recipe means it: no key twice, `1e-3` is a number, and `no`, `0:8` and `2024-01-01` are words."""

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
        text: The document.
        what: What it is, for errors.

    Raises:
        RecipeError: It is not YAML, or has a key twice.
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
    """Return a document that `parse`, and any other reader of YAML, reads as the content."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Loader(yaml.SafeLoader):
    """Reads plain words as the core schema of YAML 1.2 does."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a dict; PyYAML alone would take the last of equal keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either reading would not take for text."""


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"{_WHOLE}$"), _FIRST_OF_NUMBER)
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST_OF_NUMBER)
_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST_OF_NUMBER)
