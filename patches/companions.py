"""Companions of the weights in a converted checkpoint: the stub, which leads to this package, and the model card."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData

from hf_posenc import registry
from hf_posenc.patches import record
from hf_posenc.patches.architecture import auto_classes, auto_name
from hf_posenc.patches.directories import write_text

logger = logging.getLogger(__name__)

STUB = "modeling_hf_posenc"

_STUB = '''"""Leads `trust_remote_code=True` to the package that computes this model: pip install hf-posenc."""

from {{ module }} import (  # noqa: F401
{% for name in names %}    {{ name }},
{% endfor %})
'''
_BEGIN, _END = "<!-- hf_posenc begin -->", "<!-- hf_posenc end -->"
_SECTION = (
    _BEGIN
    + """
## Positional encoding

{% for group, info, start in groups %}
`{{ group.scheme }}` ({{ "arXiv " if info.paper[:4].isdigit() }}{{ info.paper }}), \
{{ "over" if group.native == "keep" else "instead of" }} the model's own encoding. {{ info.summary }}

{% for name, part in group.stacks | dictsort %}
- {{ name }}, layers {{ ranges(part.layers) }}; options: {{ options(part.options) }}
{% endfor %}
- start: {{ start }}

{% endfor %}
The model runs with transformers and the `hf-posenc` package; without it, loading raises.

```python
import hf_posenc  # pip install hf-posenc
from {{ home }} import {{ loader }}

model = {{ loader }}.from_pretrained("path/or/repo"){{ note }}
```
"""
    + _END
    + "\n"
)
_TEMPLATES = jinja2.Environment(autoescape=False, trim_blocks=True, keep_trailing_newline=True)
_OURS = re.compile(f"{_BEGIN}.*{_END}\n?", re.DOTALL)


def auto_map(config_class: type) -> dict[str, str]:
    """Return the class in the stub that each `Auto` class loads."""
    kinds = {"AutoConfig": config_class, **auto_classes(config_class)}
    return {name: f"{STUB}.{kind.__name__}" for name, kind in sorted(kinds.items())}


def write(directory: str | os.PathLike[str], config: Any, head: str, starts: Sequence[str], origin: str) -> None:
    """Write the stub, a module of remote code, and the model card of a converted model.

    A card that is there already keeps its text; only the part that this package wrote earlier is replaced. One that
    cannot be read is left alone; a warning says so. `head` is the name of the model's class without "Posenc", `starts`
    the start of each group, and `origin` the name of the model that was converted, if known.
    """
    folder = Path(directory)
    names = sorted({name.partition(".")[2] for name in auto_map(type(config)).values()})
    stub = _TEMPLATES.from_string(_STUB).render(module=type(config).__module__, names=names)
    write_text(folder / f"{STUB}.py", stub)
    readme = folder / "README.md"
    try:
        text = readme.read_text(encoding="utf-8") if readme.exists() else ""
        text = card(text, config, head, starts, origin)
    except (yaml.YAMLError, ValueError) as error:
        # The weights are there already, and the card is the user's.
        logger.warning("%s is left as it is, since it cannot be read: %s", readme, " ".join(str(error).split()))
        return
    write_text(readme, text)


def card(existing: str, config: Any, head: str, starts: Sequence[str], origin: str = "") -> str:
    """Return the text of the model card with this package's section; `origin` names the model that was converted."""
    groups = [group for part in record.converted(config) for group in record.from_config(part)]
    model_card = ModelCard(
        existing if existing.strip() else f"---\n{ModelCardData().to_yaml()}\n---\n\n# {origin or head}\n"
    )
    data: Any = model_card.data
    data.tags = list(dict.fromkeys([*(data.tags or []), "hf_posenc", *(group.scheme for group in groups)]))
    data.library_name = data.library_name or "transformers"
    known = auto_name(type(config), f"Posenc{head}")
    section = _TEMPLATES.from_string(_SECTION).render(
        groups=[(group, registry.get(group.scheme), start) for group, start in zip(groups, starts, strict=True)],
        loader=known or f"Posenc{head}",
        home="transformers" if known else type(config).__module__,
        note="  # or, without the import: trust_remote_code=True" if known else "",
        ranges=ranges,
        # Sorted as in config.json, so that loading and saving again changes nothing.
        options=lambda given: ", ".join(f"{key}={value!r}" for key, value in sorted(given.items())) or "none",
    )
    body = model_card.text
    model_card.text = _OURS.sub(lambda _: section, body) if _OURS.search(body) else body.rstrip("\n") + "\n\n" + section
    return str(model_card.content)


def encoding_section(text: str) -> str:
    """Return this package's section of a model card; empty if there is none."""
    found = _OURS.search(text)
    return found[0].removesuffix("\n") if found else ""


def ranges(layers: tuple[int, ...]) -> str:
    """Return layers in words: `0-3, 7`."""
    runs = [
        [layer for _, layer in run]
        for _, run in itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
