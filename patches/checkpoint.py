"""Converted checkpoints on disk: what is written beside the weights so that they load right, or not at all.

A converted model has a model type of its own, so that `AutoModel` without this package refuses it. A second lock is put
into config.json for those who name a stock class: one field holds a value that the class rejects, its true value is
kept under `posenc`. A small module of remote code leads `trust_remote_code=True` to this package. The header of every
file of weights holds the digest of the record, so that an edited record is noticed where all shapes still fit.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, NamedTuple

from safetensors import SafetensorError, safe_open

from hf_posenc import registry
from hf_posenc.errors import CheckpointError
from hf_posenc.patches import record
from hf_posenc.patches.directories import storing

STUB = "modeling_hf_posenc"
# Names the digest of the record in the metadata of safetensors files.
DIGEST = "hf_posenc_record"
_CARD_BEGIN = "<!-- hf_posenc begin -->"
_CARD_END = "<!-- hf_posenc end -->"


class PosencConfig:
    """Mixin of the configs of converted models.

    Attributes:
        posenc: The record of the patch, see `hf_posenc.patches.record`.
        posenc_locked: The true value of the locked field, as config.json has it.
        posenc_lock: A field of the config, and a value that makes stock classes refuse it.
    """

    posenc: dict[str, Any] | None
    posenc_locked: Any
    posenc_lock: ClassVar[tuple[str, Any]]

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # a property here
        if isinstance(self.posenc, dict) and "digest" in self.posenc:
            self.posenc = dict(self.posenc)
            if self.posenc.pop("digest") != record.digest(self.posenc):
                raise CheckpointError(
                    "The entry 'posenc' of config.json was changed after it was written. Restore config.json from the "
                    "original checkpoint, or convert the model again."
                )
        record.from_config(self)  # Raises if it is damaged or newer.
        field, refused = self.posenc_lock
        if self.posenc and "locked" in self.posenc:
            self.posenc = dict(self.posenc)
            self.posenc_locked = self.posenc.pop("locked")
        elif getattr(self, field) == refused:
            raise CheckpointError(
                "config.json is that of a converted model, but its entry 'posenc' is gone or damaged. Restore "
                "config.json from the original checkpoint, or convert the model again."
            )
        if "posenc_locked" in vars(self):
            setattr(self, field, copy.deepcopy(self.posenc_locked))
        super().__post_init__(**kwargs)  # type: ignore[misc]

    @property
    def auto_map(self) -> dict[str, str]:
        """What each `Auto` class loads from the stub; other libraries choose a class by it."""
        return auto_map(type(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as data, without what is known of this object in memory only."""
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        for name in ("posenc_origin", "posenc_locked"):
            found.pop(name, None)
        return found

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return config.json, locked and with the way to this package in it."""
        data = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        if self.posenc:
            field, refused = self.posenc_lock
            data["posenc"] = {**self.posenc, "locked": data.get(field, getattr(self, field))}
            data["posenc"]["digest"] = record.digest(data["posenc"])
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
    """Write the stub and the model card of a converted model, and order the headers of its weights.

    A card that is there already keeps its text; only the part that this package wrote earlier is replaced.

    Args:
        directory: Where the checkpoint is.
        config: Its config.
        head: Name of the model's class without "Posenc".
        starts: How each group started, by id.
        origin: Name of the model that was converted, if known.
    """
    folder = Path(directory)
    for weights in folder.glob("*.safetensors"):
        _order_metadata(weights)
    write_beside(folder / f"{STUB}.py", stub_source(type(config)))
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    write_beside(readme, card(text, config, head, starts, origin))


def _order_metadata(path: Path) -> None:
    """Sort the metadata of a file of ours: safetensors writes them in any order, and equal models should give equal
    files.

    The few bytes are replaced by as many, in one write near the beginning of the file, which is valid before and after.
    """
    start = b'{"__metadata__":'
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    if not header.startswith(start):
        return
    text = header.decode()
    found, end = json.JSONDecoder().raw_decode(text, len(start))
    ordered = json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if DIGEST in found and len(ordered) == end - len(start) and ordered != text[len(start) : end]:
        with path.open("r+b") as file:
            file.seek(8 + len(start))
            file.write(ordered.encode())


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


def digests(config: Any) -> list[str]:
    """Return the digests that weights of a config may bear, first the one that is written with them.

    Another version of transformers may complete the locked field when it reads it, so what the file holds is right too.
    """
    written = json.loads(config.to_json_string())["posenc"]
    kept = vars(config).get("posenc_locked", written["locked"])
    return [record.digest(written), record.digest({**written, "locked": kept})]


def unreadable(path: object, error: SafetensorError) -> CheckpointError:
    """Return the error that weights cannot be read."""
    return CheckpointError(
        f"Cannot read the weights in {path} ({error}): truncated or damaged. Download or save the checkpoint again."
    )


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        shape: Its shape.
        floating: Whether it holds floating-point numbers.
    """

    shape: tuple[int, ...]
    floating: bool


def read_headers(files: Iterable[str], shards: Iterable[str], config: Any) -> dict[str, Stored]:
    """Return all tensors in the weight files of a converted checkpoint by name, from the files' headers alone.

    Args:
        files: Their paths.
        shards: What the index calls them, if there is one.
        config: The config that came with them.

    Raises:
        CheckpointError: A file is none of safetensors, is missing, truncated or outside of the checkpoint, or was saved
            with another record than the config has.
    """
    for name in shards:
        if ".." in PurePosixPath(name.replace("\\", "/")).parts or PureWindowsPath(name).anchor:
            raise CheckpointError(
                f"The index of the weights names {name!r}, which is outside of the checkpoint. Restore "
                "model.safetensors.index.json."
            )
    found: dict[str, Stored] = {}
    stamps: dict[str, str | None] = {}
    for path in files:
        if not str(path).endswith(".safetensors"):
            raise CheckpointError(
                f"{path} is no safetensors file, and converted checkpoints are loaded from these only: others can be "
                "neither checked before they are read, nor told to belong to config.json. Save the model anew with "
                "save_pretrained."
            )
        try:
            with safe_open(path, framework="pt") as file:
                stamps[str(path)] = (file.metadata() or {}).get(DIGEST)
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(name)
                    found[name] = Stored(tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF")))
        except SafetensorError as error:
            raise unreadable(path, error) from error
        except OSError as error:
            raise CheckpointError(f"Cannot read the weights in {path} ({error}). Get the missing file.") from error
    # Checkpoints of earlier releases have no digest, and tools that write weights anew drop it from all files.
    known = digests(config) if any(stamps.values()) else [None]
    for path, stamp in stamps.items():
        if stamp not in known:
            raise CheckpointError(
                f"{path} was saved with another record of the scheme than the entry 'posenc' of config.json is: one of "
                "both was changed or replaced after saving. Restore config.json and the weights from the original "
                "checkpoint, or convert the model again."
            )
    return found


def check_complete(
    source: object, missing: Iterable[str], unknown: Iterable[str], misshapen: Iterable[str], *, accepts_misshapen: bool
) -> None:
    """Raise if a checkpoint does not hold what its config asks for.

    Args:
        source: Where the checkpoint is.
        missing: Tensors of the model that it should have and has not.
        unknown: Tensors that it has, and the model should have and has not.
        misshapen: Tensors of another shape, or no floating-point numbers.
        accepts_misshapen: Whether the user accepts that, other than in schemes (`ignore_mismatched_sizes`).

    Raises:
        CheckpointError: transformers would go on with parameters at their start, or without the rest.
    """
    for names, (what, remedy) in zip((missing, unknown, misshapen), _REMEDIES, strict=True):
        ours = [name for name in names if is_of_scheme(name)]
        if ours:
            raise CheckpointError(
                f"The checkpoint {source} {what} weights of the positional scheme: {_shown(ours)}. {remedy}."
            )
    for names, (what, remedy) in zip((missing, unknown), _REMEDIES[:2], strict=True):
        if names := list(names):
            raise CheckpointError(f"The checkpoint {source} {what} weights of the model: {_shown(names)}. {remedy}.")
    if not accepts_misshapen and (names := list(misshapen)):
        raise CheckpointError(
            f"The checkpoint {source} has weights of another shape than config.json says, or of whole numbers: "
            f"{_shown(names)}. Restore both, or pass ignore_mismatched_sizes=True to start these anew."
        )


_REMEDIES = (
    (
        "misses",
        "Load it with the class that config.json names, since others may call its parts otherwise; if that fails, "
        "too, the file is "
        "incomplete, or the weights are those of an unconverted model: save it anew",
    ),
    ("has unknown", "config.json and the weights do not belong together: restore both"),
    ("has misshapen", "config.json and the weights do not belong together: restore both"),
)


def is_of_scheme(name: str) -> bool:
    """Whether a tensor is a weight of a positional scheme, by its name."""
    return ".hf_posenc" in f".{name}"


def _shown(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
