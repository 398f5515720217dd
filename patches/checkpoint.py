"""Converted checkpoints on disk: what is written beside the weights so that they load right, or not at all.

A converted model has a model type of its own, so that `AutoModel` without this package refuses it. A second lock is put
into config.json for those who name a stock class: one field holds a value that the class rejects, its true value is kept
under `posenc`. A small module of remote code leads `trust_remote_code=True` to this package.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open

from hf_posenc import registry
from hf_posenc.errors import CheckpointError
from hf_posenc.patches import record
from hf_posenc.patches.directories import storing

STUB = "modeling_hf_posenc"
_CARD_BEGIN = "<!-- hf_posenc begin -->"
_CARD_END = "<!-- hf_posenc end -->"


class PosencConfig:
    """Mixin of the configs of converted models.

    Attributes:
        posenc: The record of the patch, see `hf_posenc.patches.record`.
        posenc_lock: A field of the config, and a value that makes stock classes refuse it.
    """

    posenc: dict[str, Any] | None
    posenc_lock: ClassVar[tuple[str, Any]]

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # a property here
        record.from_config(self)  # Raises if it is damaged or newer.
        if self.posenc and "locked" in self.posenc:
            self.posenc = dict(self.posenc)
            setattr(self, self.posenc_lock[0], self.posenc.pop("locked"))
        elif getattr(self, self.posenc_lock[0]) == self.posenc_lock[1]:
            raise CheckpointError(
                "config.json is that of a converted model, but its entry 'posenc' is gone or damaged. Restore config.json "
                "from the original checkpoint, or convert the model again."
            )
        super().__post_init__(**kwargs)  # type: ignore[misc]

    @property
    def auto_map(self) -> dict[str, str]:
        """What each `Auto` class loads from the stub; other libraries choose a class by it."""
        return auto_map(type(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as data, without what is known of this object in memory only."""
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        found.pop("posenc_origin", None)
        return found

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return config.json, locked and with the way to this package in it."""
        data = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        if self.posenc:
            field, refused = self.posenc_lock
            data["posenc"] = {**self.posenc, "locked": data.get(field, getattr(self, field))}
            data[field] = refused
            data["auto_map"] = auto_map(type(self))
        return json.dumps(data, indent=2, sort_keys=True) + "\n"

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: saving must write the stub, not a copy of this package's source."""


def auto_map(config_class: type) -> dict[str, str]:
    """Return, for each `Auto` class, where the stub has what it should load."""
    from hf_posenc.patches import auto

    names = {name: kind.__name__ for name, kind in auto.classes_for(config_class).items()}
    return {name: f"{STUB}.{kind}" for name, kind in sorted({"AutoConfig": config_class.__name__, **names}.items())}


def stub_source(config_class: type) -> str:
    """Return the module of remote code that goes beside the weights."""
    from hf_posenc.patches import auto

    names = sorted({config_class.__name__, *(kind.__name__ for kind in auto.classes_for(config_class).values())})
    imports = "".join(f"    {name},\n" for name in names)
    return (
        '"""Leads `trust_remote_code=True` to the package that computes this model: pip install hf-posenc."""\n\n'
        f"from {config_class.__module__} import (  # noqa: F401\n{imports})\n"
    )


def write_beside(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    with storing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp makes files private; a checkpoint is as readable as the user's other files.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_companions(
    directory: str | os.PathLike[str], config: Any, head: str, starts: Mapping[int, str], origin: str
) -> None:
    """Write the stub and the model card of a converted model.

    A card that is there already keeps its text; only the part that this package wrote earlier is replaced.

    Args:
        directory: Where the checkpoint is.
        config: Its config.
        head: Name of the model's class without "Posenc".
        starts: How each group started, by id.
        origin: Name of the model that was converted, if known.
    """
    folder = Path(directory)
    write_beside(folder / f"{STUB}.py", stub_source(type(config)))
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    write_beside(readme, card(text, config, head, starts, origin))


def card(existing: str, config: Any, head: str, starts: Mapping[int, str], origin: str = "") -> str:
    """Return the text of the model card, with this package's part in it; `origin` names the model it was made of."""
    from huggingface_hub import ModelCard, ModelCardData

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
    """Return this package's part of a model card, or nothing if the card has none."""
    if _CARD_BEGIN not in text or _CARD_END not in text:
        return ""
    return _CARD_BEGIN + text.split(_CARD_BEGIN, 1)[1].split(_CARD_END, 1)[0] + _CARD_END


def _card_section(config: Any, groups: list[record.Group], head: str, starts: Mapping[int, str]) -> str:
    lines = ["## Positional encoding", ""]
    for group in groups:
        info = registry.get(group.scheme)
        source = f"arXiv {info.paper}" if info.paper[:4].isdigit() else info.paper
        under = "over the model's own encoding" if group.native == "keep" else "in place of the model's own encoding"
        lines.append(f"`{group.scheme}` ({source}), {under}. {info.summary}")
        lines.append("")
        # Sorted as in config.json, so that loading and saving again changes nothing.
        for name, part in sorted(group.stacks.items()):
            options = ", ".join(f"{key}={value!r}" for key, value in sorted(part.options.items())) or "none"
            lines.append(f"- {name}, layers {_ranges(part.layers)}; options: {options}")
        lines.append(f"- start: {starts.get(group.id, info.start)}")
        lines.append("")
    autos = [name for name, kind in auto_map(type(config)).items() if kind == f"{STUB}.Posenc{head}"]
    # The one for pretraining is another name for a head that has a better one.
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


def unreadable(source: object) -> str:
    """Return the paths of the weight files of a directory that cannot be read; the source itself if that finds none."""
    found = []
    for path in sorted(Path(str(source)).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            found.append(str(path))
    return ", ".join(found) or str(source)


def check_loaded(source: object, info: Mapping[str, Any], *, accepts_misshapen: bool) -> None:
    """Raise unless every parameter of every scheme was in the checkpoint, and none was left over.

    Args:
        source: Where the checkpoint is.
        info: What transformers says of the loading.
        accepts_misshapen: Whether the user accepts other parameters of another shape (`ignore_mismatched_sizes`).

    Raises:
        CheckpointError: transformers would go on with parameters at their start, or without the rest.
    """
    ours = {key: [name for name in _names(info, key) if ".hf_posenc" in f".{name}"] for key in _REMEDIES}
    for key, (what, remedy) in _REMEDIES.items():
        if ours[key]:
            raise CheckpointError(
                f"The checkpoint {source} {what} weights of the positional scheme: {_shown(ours[key])}. {remedy}."
            )
    if not accepts_misshapen and _names(info, "mismatched_keys"):
        raise CheckpointError(
            f"The checkpoint {source} has weights of another shape than config.json says: "
            f"{_shown(_names(info, 'mismatched_keys'))}. Restore both, or pass ignore_mismatched_sizes=True to start these anew."
        )


_REMEDIES = {
    "missing_keys": (
        "misses",
        "Load it with the class that config.json names, since others may call its parts otherwise; if that fails, too, the file is "
        "incomplete, or the weights are those of an unconverted model: save it anew",
    ),
    "unexpected_keys": ("has unknown", "config.json and the weights do not belong together: restore both"),
    "mismatched_keys": ("has misshapen", "config.json and the weights do not belong together: restore both"),
}


def _names(info: Mapping[str, Any], key: str) -> list[str]:
    return sorted(name if isinstance(name, str) else name[0] for name in info.get(key, ()))


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
