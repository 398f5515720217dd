"""Companions of the weights in a converted checkpoint: the stub, which leads to this package, and the model card."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_posenc import registry
from hf_posenc.patches import auto, record
from hf_posenc.patches.directories import write_text

STUB = "modeling_hf_posenc"
_CARD_BEGIN = "<!-- hf_posenc begin -->"
_CARD_END = "<!-- hf_posenc end -->"


def auto_map(config_class: type) -> dict[str, str]:
    """Return the class in the stub that each `Auto` class loads."""
    names = {name: kind.__name__ for name, kind in auto.classes_for(config_class).items()}
    return {name: f"{STUB}.{kind}" for name, kind in sorted({"AutoConfig": config_class.__name__, **names}.items())}


def stub_source(config_class: type) -> str:
    """Return the source of the stub, a module of remote code."""
    names = sorted({config_class.__name__, *(kind.__name__ for kind in auto.classes_for(config_class).values())})
    imports = "".join(f"    {name},\n" for name in names)
    return (
        '"""Leads `trust_remote_code=True` to the package that computes this model: pip install hf-posenc."""\n\n'
        f"from {config_class.__module__} import (  # noqa: F401\n{imports})\n"
    )


def write(directory: str | os.PathLike[str], config: Any, head: str, starts: Mapping[int, str], origin: str) -> None:
    """Write the stub and the model card of a converted model.

    A card that is there already keeps its text; only the part that this package wrote earlier is replaced.

    Args:
        directory: Folder of the checkpoint.
        config: Config of the model.
        head: Name of the model's class without "Posenc".
        starts: Start of each group, by id: `"exact"`, `"break"` and so on.
        origin: Name of the model that was converted, if known.
    """
    folder = Path(directory)
    write_text(folder / f"{STUB}.py", stub_source(type(config)))
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    write_text(readme, card(text, config, head, starts, origin))


def card(existing: str, config: Any, head: str, starts: Mapping[int, str], origin: str = "") -> str:
    """Return the text of the model card with this package's section; `origin` names the model that was converted."""
    groups = record.from_config(config)
    if existing.strip():
        model_card = ModelCard(existing)
    else:
        model_card = ModelCard(f"---\n{ModelCardData().to_yaml()}\n---\n\n# {origin or head}\n")
    data: Any = model_card.data
    tags = list(data.tags or [])
    tags += [tag for tag in ("hf_posenc", *(group.scheme for group in groups)) if tag not in tags]
    data.tags = list(dict.fromkeys(tags))
    data.library_name = data.library_name or "transformers"
    section = f"{_CARD_BEGIN}\n{_card_section(config, groups, head, starts)}{_CARD_END}\n"
    body = model_card.text
    if _CARD_BEGIN in body and _CARD_END in body:
        before, rest = body.split(_CARD_BEGIN, 1)
        body = before + section + rest.split(_CARD_END, 1)[1].removeprefix("\n")
    else:
        body = body.rstrip("\n") + "\n\n" + section
    model_card.text = body
    return str(model_card.content)


def encoding_section(text: str) -> str:
    """Return this package's section of a model card; empty if there is none."""
    if _CARD_BEGIN not in text or _CARD_END not in text:
        return ""
    return _CARD_BEGIN + text.split(_CARD_BEGIN, 1)[1].split(_CARD_END, 1)[0] + _CARD_END


def _card_section(config: Any, groups: list[record.Group], head: str, starts: Mapping[int, str]) -> str:
    lines = ["## Positional encoding", ""]
    for group in groups:
        info = registry.get(group.scheme)
        source = f"arXiv {info.paper}" if info.paper[:4].isdigit() else info.paper
        under = "over the model's own encoding" if group.native == "keep" else "instead of the model's own encoding"
        lines.append(f"`{group.scheme}` ({source}), {under}. {info.summary}")
        lines.append("")
        # Sorted as in config.json, so that loading and saving again changes nothing.
        for name, part in sorted(group.stacks.items()):
            options = ", ".join(f"{key}={value!r}" for key, value in sorted(part.options.items())) or "none"
            lines.append(f"- {name}, layers {_ranges(part.layers)}; options: {options}")
        lines.append(f"- start: {starts.get(group.id, info.start)}")
        lines.append("")
    autos = [name for name, kind in auto_map(type(config)).items() if kind == f"{STUB}.Posenc{head}"]
    # A model class for pretraining has a better known `Auto` class, too.
    loader = next((name for name in autos if name != "AutoModelForPreTraining"), f"Posenc{head}")
    home = "transformers" if autos else type(config).__module__
    note = "  # or, without the import: trust_remote_code=True" if autos else ""
    lines += [
        "The model runs with transformers and the `hf-posenc` package; without it, loading raises.",
        "",
        "```python",
        "import hf_posenc  # pip install hf-posenc",
        f"from {home} import {loader}",
        "",
        f'model = {loader}.from_pretrained("path/or/repo"){note}',
        "```",
        "",
    ]
    return "\n".join(lines)


def _ranges(layers: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
