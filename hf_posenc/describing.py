"""`describe`: what a scheme is and which options it has."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from hf_posenc import registry


@dataclass(frozen=True)
class Option:
    """An option of a scheme: its name, type, default and what it does."""

    name: str
    type: str
    default: object
    text: str


@dataclass(frozen=True)
class Description:
    """All that is known of a scheme.

    Attributes:
        info: Its record in the registry.
        text: The documentation of its class, without the arguments.
        options: Its options.
    """

    info: registry.SchemeInfo
    text: str
    options: tuple[Option, ...]

    def __str__(self) -> str:
        paper = self.info.paper
        lines = [
            f"{self.info.name}: {self.text}",
            "",
            f"source:     {'https://arxiv.org/abs/' + paper if re.match(r'[0-9]{4}[.]', paper) else paper}",
            f"family:     {self.info.family}",
            f"directions: {', '.join(self.info.directions)}",
            f"start:      {self.info.start}",
            "options:" + ("" if self.options else "    none"),
            *(f"  {o.name}: {o.type} = {o.default!r}\n      {o.text}" for o in self.options),
        ]
        return "\n".join(lines)


def describe(scheme: str) -> Description:
    """Describe a scheme: what it does, its source, how it starts, its options.

    Args:
        scheme: A registered name.

    Raises:
        UnknownSchemeError: There is none of that name.
    """
    info = registry.get(scheme)
    text, arguments = _documentation(info.cls)
    for base in info.cls.__mro__[1:]:
        # A variant documents only what differs.
        for name, meaning in _documentation(base)[1].items():
            arguments.setdefault(name, meaning)
    hints = inspect.get_annotations(info.cls.__init__)
    options = tuple(
        Option(name, str(hints.get(name, "")), default, arguments.get(name, ""))
        for name, default in info.option_defaults().items()
    )
    return Description(info, text, options)


def _documentation(cls: type) -> tuple[str, dict[str, str]]:
    """Split a class's documentation into its text and its arguments."""
    text, _, rest = (inspect.getdoc(cls) or "").partition("\nArgs:\n")
    arguments: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if line.strip() and not line.startswith("    "):
            break
        start = re.match(r"    \*{0,2}(\w+): (.*)", line)
        if start:
            name = start.group(1)
            arguments[name] = start.group(2)
        elif name and line.strip():
            arguments[name] += " " + line.strip()
    return text.strip(), arguments
