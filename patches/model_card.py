"""Companions of the weights in a converted checkpoint: the stub, which leads to this package, and the model card."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import ModelCard, try_to_load_from_cache

from hf_posenc import registry
from hf_posenc.errors import CheckpointError
from hf_posenc.patches import record
from hf_posenc.patches.architecture import auto_classes, auto_name
from hf_posenc.patches.atomic_files import published, reading

logger = logging.getLogger(__name__)

STUB = "modeling_hf_posenc"
CARD = "README.md"
# The hub's name of the task of each `Auto` class.
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForImageClassification": "image-classification",
}

_STUB = '''"""Leads `trust_remote_code=True` to the package that computes this model: pip install hf-posenc."""

from {{ module }} import (  # noqa: F401
{% for name in names %}    {{ name }},
{% endfor %})
'''
# For each group of layers: the encoding that the scheme is over or instead of, and how it starts.
Starts = Sequence[tuple[str, str]]
_BEGIN, _END = "<!-- hf_posenc begin -->", "<!-- hf_posenc end -->"
_SECTION = (
    _BEGIN
    + """
## Positional encoding

{% for group, info, base, start in groups %}
`{{ group.scheme }}` ({{ "arXiv " if info.paper[:4].isdigit() }}{{ info.paper }}), \
{{ "over" if group.keeps_native else "instead of" }} {{ base }}. {{ info.summary }}

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
_OURS = re.compile(f"{_BEGIN}(?:(?!{_BEGIN}).)*?{_END}\r?\n?", re.DOTALL)
_METADATA = re.compile(r"\A\ufeff?\s*---\r?\n(?P<data>.*?)(?:^|\r?\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


@functools.cache
def _template(text: str) -> jinja2.Template:
    return _TEMPLATES.from_string(text)


def auto_map(config_class: type) -> dict[str, str]:
    """Return the class in the stub that each `Auto` class loads."""
    kinds = {"AutoConfig": config_class, **auto_classes(config_class)}
    return {name: f"{STUB}.{kind.__name__}" for name, kind in sorted(kinds.items())}


def write(folder: Path, target: Path, config: Any, head: str, starts: Starts, origin: str) -> None:
    """Write the stub, a module of remote code, and the model card of a converted model to a folder.

    A card that is in the target already keeps its text; only the part that this package wrote earlier is replaced. One
    that cannot be read is left alone; a warning says so. `head` is the name of the model's class without "Posenc",
    `starts` has words for each group, and `origin` the name of the model that was converted, if known.
    """
    names = sorted({name.partition(".")[2] for name in auto_map(type(config)).values()})
    stub = _template(_STUB).render(module=type(config).__module__, names=names)
    _write(folder / f"{STUB}.py", stub, in_place=folder == target)
    readme = target / CARD
    try:
        with reading(str(readme)):
            existing = readme.read_bytes().decode("utf-8") if os.path.lexists(readme) else ""
            text = card(existing, config, head, starts, origin)
    except CheckpointError as error:
        logger.warning("%s is left as it is: %s", readme, error)
        return
    _write(folder / CARD, text, in_place=folder == target)


def _write(path: Path, text: str, *, in_place: bool) -> None:
    # As bytes, which keep the ends of lines.
    with published(path) if in_place else contextlib.nullcontext(path) as draft:
        draft.write_bytes(text.encode("utf-8"))


@contextlib.contextmanager
def adapter_card(folder: Path, target: Path, origin: str) -> Iterator[None]:
    """Let PEFT complete the card of a target in another folder, and take local paths and lost tags out of the result.

    A card that cannot be read is left alone; a warning says so.
    """
    old, new, tags, is_readable = target / CARD, folder / CARD, [], True
    try:
        if os.path.lexists(old):
            with reading(str(old)):
                ModelCard.load(old)  # as PEFT will do
                text = old.read_bytes()
                tags = _words(_metadata(text.decode("utf-8")).get("tags"))
                new.write_bytes(text)
    except CheckpointError as error:
        logger.warning("%s is left as it is: %s", old, error)
        is_readable = False
    yield
    if not is_readable and folder != target:
        new.unlink(missing_ok=True)
    if not new.is_file():  # as in a process that is not the main one
        return
    page = ModelCard.load(new)
    data: Any = page.data
    base, licence = base_and_licence(origin)
    data.base_model, data.license = base, data.license or licence
    tags = [tag for tag in (*tags, *_words(data.tags), "hf_posenc") if not tag.startswith("base_model:")]
    data.tags = list(dict.fromkeys([*tags, *([f"base_model:adapter:{base}"] if base else [])]))
    page.save(new)


def _metadata(text: str) -> dict[str, Any]:
    found = _METADATA.match(text)
    data = yaml.safe_load(found["data"]) if found else None
    if not isinstance(data or {}, dict):
        raise ValueError("the metadata are no mapping")
    return data or {}


def _words(tags: Any) -> list[str]:
    found = [tags] if isinstance(tags, str) else tags or []
    if not (isinstance(found, list) and all(isinstance(tag, str) for tag in found)):
        raise ValueError("the tags are no list of words")
    return found


def card(existing: str, config: Any, head: str, starts: Starts, origin: str = "") -> str:
    """Return the text of the model card with this package's section; `origin` names the model that was converted."""
    groups = [group for part in record.converted(config) for group in record.from_config(part)]
    known = auto_name(type(config), f"Posenc{head}")
    section = _template(_SECTION).render(
        groups=[(group, registry.get(group.scheme), *words) for group, words in zip(groups, starts, strict=True)],
        loader=known or f"Posenc{head}",
        home="transformers" if known else type(config).__module__,
        note="  # or, without the import: trust_remote_code=True" if known else "",
        ranges=ranges,
        # Sorted as in config.json, so that loading and saving again changes nothing.
        options=lambda given: ", ".join(f"{key}={value!r}" for key, value in sorted(given.items())) or "none",
    )
    base, licence = base_and_licence(origin)
    facts = {
        "library_name": "transformers",
        "pipeline_tag": TASKS.get(known or ""),
        "base_model": base,
        "license": licence,
    }
    tags = ["hf_posenc", *(group.scheme for group in groups)]
    text = _described(existing if existing.strip() else f"\n# {name_of(origin) or head}\n", facts, tags)
    found = _OURS.search(text)
    if found is None:
        return text.rstrip("\r\n") + "\n\n" + section
    # Of several, as in two cards that were joined, the first is renewed. The user's text between them stays.
    return text[: found.start()] + section + _OURS.sub("", text[found.end() :])


def _described(text: str, facts: Mapping[str, str | None], tags: Sequence[str]) -> str:
    """Return a card with the metadata that it does not have yet; if none is missing, it stays as it is."""
    data, found = _metadata(text), _METADATA.match(text)
    own = _words(data.get("tags"))
    new: dict[str, Any] = {key: value for key, value in facts.items() if value and not data.get(key)}
    wanted = {**data, **new, "tags": [*(tag for tag in dict.fromkeys(tags) if tag not in own), *own]}
    if wanted == data:
        return text
    end = "\r\n" if found and "\r\n" in found[0] else "\n"
    written = yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True).replace("\n", end)
    return f"---{end}{written}---{end}{text[found.end() :] if found else text}"


def base_and_licence(origin: str) -> tuple[str | None, str | None]:
    """Return the name on the hub of a converted model and its licence, as far as its card is at hand.

    For a local folder, which no card names, these are what its own card says.
    """
    cached = re.search(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]", origin)
    name = f"{cached[1]}/{cached[2]}" if cached else origin if on_the_hub(origin) else None
    local = Path(origin, CARD)
    card = local if origin and local.is_file() else name and try_to_load_from_cache(name, CARD)
    if not isinstance(card, (str, Path)):
        return name, None
    try:
        with reading(str(card)):
            data = ModelCard.load(card, ignore_metadata_errors=True).data
    except CheckpointError:  # The card of another model is nobody's error here.
        return name, None
    base, licence = (value if isinstance(value, str) else None for value in (data.base_model, data.license))
    return name or (base if base and on_the_hub(base) else None), licence


def on_the_hub(source: str) -> bool:
    """Whether a source looks like a name on the hub, and is no local file or folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not Path(source).exists()


def name_of(source: str) -> str:
    return source if on_the_hub(source) else Path(source).name


def encoding_section(text: str) -> str:
    found = _OURS.search(text)
    return found[0].removesuffix("\n") if found else ""


def ranges(layers: tuple[int, ...]) -> str:
    """Return layers in words: `0-3, 7`."""
    runs = [
        [layer for _, layer in run]
        for _, run in itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
