"""Converted checkpoints on disk: they load correctly, or raise.

A converted model has a model type of its own, so that `AutoModel` without this package refuses it. A second lock is put
into config.json for those who name a stock class: one field holds a value that the class rejects, its true value is
kept under `posenc`. A small module of remote code leads `trust_remote_code=True` to this package. The header of every
file of weights holds the digest of the record, so that an edited record is noticed where all shapes still fit.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import _add_variant, str_to_torch_dtype
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_posenc.errors import CheckpointError
from hf_posenc.patches import record
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.atomic_files import reading
from hf_posenc.patches.surgery import is_of_scheme, parts

# Key of the record's digest in the metadata of safetensors files.
DIGEST = "hf_posenc_record"
# Key there, and in the index of shards, of what tells one save from another, and its value until that is known.
SAVE, UNSEALED = "hf_posenc_save", "0" * 16
# Key there of a digest of config.json and of the tensors that the file names; unsealed until both are written.
FILES = "hf_posenc_files"
# What may be changed in config.json: names, what says how to load or generate, the record, with its own digest, and
# how weights are quantised, which some tools add when all is saved.
_FREE = {
    *("_name_or_path", "dtype", "id2label", "label2id", "posenc", "quantization_config", "torch_dtype"),
    *("transformers_version", "use_cache"),
}
_WEIGHTS = re.compile(
    r"model(?P<weights>\.[^.]+?)?(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(?P<index>\.[^.]+)?\.json"
)
DAMAGED = " It is missing, truncated or damaged: download or save it again."


def seal(folder: Path) -> None:
    """Finish the weights that transformers has written: give the shards of an index, and it, the digest of them all.

    So shards of two saves never load together. Each file is bound to config.json, too. Metadata are sorted, since
    safetensors writes them in any order, and equal models give equal files.
    """
    files = [path for path in folder.iterdir() if variant(path.name) is not None]
    saves: dict[str, str] = {}
    for index in (path for path in files if path.suffix == ".json"):
        content = json.loads(index.read_bytes())
        shards = sorted(set(content["weight_map"].values()))
        for name in shards:
            sort_metadata(folder / name, UNSEALED)
        parts = [f"{name} {_checksum(folder / name)}" for name in shards]
        content["metadata"][SAVE] = hashlib.sha256(" ".join(parts).encode()).hexdigest()[: len(UNSEALED)]
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        saves |= dict.fromkeys(shards, content["metadata"][SAVE])
    for path in files:
        if path.suffix == ".safetensors":
            sort_metadata(path, saves.get(path.name))


def sort_metadata(path: Path, save: str | None = None) -> None:
    """Sort the metadata of a file of weights, and set its save, and its digest if it has none yet.

    The bytes are replaced in one write by as many.
    """
    start = b'{"__metadata__":'
    with path.open("rb") as file:
        size, begin = int.from_bytes(file.read(8), "little"), file.read(len(start))
        if begin != start:  # as in the pointers of Git LFS, whose size would be no number of bytes
            return
        text = (begin + file.read(size - len(start))).decode()
    found, end = json.JSONDecoder().raw_decode(text, len(start))
    if SAVE in found and save is not None:
        found[SAVE] = save
    if found.get(FILES) == UNSEALED:
        found[FILES] = _bound(path)
    ordered = json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if len(ordered) == end - len(start) and ordered != text[len(start) : end]:
        with path.open("r+b") as file:
            file.seek(8 + len(start))
            file.write(ordered.encode())


def _bound(path: Path, *, values: bool = True) -> str:
    """Return a digest that binds a file of weights to the config.json beside it.

    It covers all keys of config.json that are not free, the names, types and shapes of all tensors, and the values of
    the schemes' tensors, which are small.
    """
    with path.open("rb") as file:
        start = 8 + (size := int.from_bytes(file.read(8), "little"))
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors = {name: [tensor["dtype"], tensor["shape"]] for name, tensor in header.items()}
        for name in filter(is_of_scheme, header) if values else ():
            begin, end = header[name]["data_offsets"]
            file.seek(start + begin)
            tensors[name].append(zlib.crc32(file.read(end - begin)))
    config = path.with_name(CONFIG_NAME)
    facts = _facts(json.loads(config.read_bytes())) if config.is_file() else None
    return hashlib.sha256(json.dumps([facts, tensors], sort_keys=True).encode()).hexdigest()[: len(UNSEALED)]


def _facts(config: Any) -> Any:
    """Return a part of the JSON of a config without what is free."""
    if isinstance(config, dict):
        return {key: _facts(value) for key, value in config.items() if key not in _FREE}
    return [_facts(value) for value in config] if isinstance(config, list) else config


def _check_bound(path: Path) -> None:
    """Raise `CheckpointError` if config.json or the tensors of a file were changed after they were saved."""
    if not path.with_name(CONFIG_NAME).is_file():
        return
    with reading(str(path), advice=DAMAGED):
        bound = read_header(path)[0].get(FILES, UNSEALED)
        # Before 2026-11-29, digests covered no values.
        same = bound in (UNSEALED, _bound(path), _bound(path, values=False))
    if not same:
        raise CheckpointError(
            f"{path} was saved with another config.json, with tensors of other names, types or shapes, or with other "
            "weights of the scheme: one of both files was changed afterwards. Restore both from the original "
            "checkpoint. To change a setting on purpose, pass it to from_pretrained by its name; to change weights of "
            "the scheme, change them in the loaded model; then save it again with save_pretrained."
        )


def _checksum(path: Path) -> int:
    """Return a checksum of a file, which a chance difference changes but once in four billion times."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            found = zlib.crc32(piece, found)
    return found


def digests(config: Any) -> list[str]:
    """Return the digests that the weights of a config may have; the first one is written with them.

    A composite has those of all its converted parts. Another version of transformers may complete the locked field on
    reading, so the value in the file is accepted too.
    """
    each = []
    for part in record.converted(config):
        written = json.loads(part.to_json_string())["posenc"]
        kept = vars(part).get("posenc_locked", written["locked"])
        each.append([record.digest(written), record.digest({**written, "locked": kept})])
    return ["+".join(found) for found in itertools.product(*each)]


def check_index(folder: Path, variant: str | None) -> None:
    """Raise `CheckpointError` for an index of shards that is damaged, leads elsewhere, or is one of two checkpoints."""
    weights, index = (folder / _add_variant(name, variant) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    if not index.is_file():
        return
    if weights.is_file():
        _refuse_two(weights, index)
    with reading(str(index), advice=DAMAGED):
        content = json.loads(index.read_bytes())
        named, metadata = content["weight_map"], content["metadata"]
        if not (isinstance(named, dict) and named and isinstance(metadata, dict)):
            raise ValueError("no file of any tensor")
        shards = [str(Path(name)) for name in named.values()]
    for name in shards:
        if ".." in PurePosixPath(name.replace("\\", "/")).parts or PureWindowsPath(name).anchor:
            raise CheckpointError(
                f"The index of the weights names {name!r}, which is outside of the checkpoint. Restore {index.name}."
            )


def _refuse_two(weights: Path, index: Path) -> NoReturn:
    """Raise for weights in a file and in shards, too: transformers would take those of the file, old or new."""
    raise CheckpointError(
        f"{weights.parent} holds two checkpoints: {weights.name}, and the shards of {index.name}. Remove the older "
        "one, or save the model again."
    )


def read_header(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata of a safetensors file and its tensors, without values, by name, from its header alone."""
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        # Of types that transformers does not list, only the kind of number counts here.
        named = {name: part.get_dtype() for name, part in parts.items()}
        kinds = {
            name: str_to_torch_dtype.get(kind, torch.float8_e4m3fn if kind.startswith("F") else torch.uint8)
            for name, kind in named.items()
        }
        tensors = {n: torch.empty(part.get_shape(), dtype=kinds[n], device="meta") for n, part in parts.items()}
        return dict(file.metadata() or {}), tensors


def _read_headers(files: Iterable[str], config: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Return all tensors in the weight files of a converted checkpoint by name, and the files that name no record."""
    found: dict[str, Tensor] = {}
    stamps: dict[str, str | None] = {}
    saves: dict[str, str | None] = {}
    for path in map(str, files):
        if not path.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} is no safetensors file, and converted checkpoints are loaded from these only: others can be "
                "neither checked before they are read, nor told to belong to config.json. Save the model again with "
                "save_pretrained."
            )
        with reading(path, advice=DAMAGED):
            metadata, tensors = read_header(path)
        stamps[path], saves[path] = metadata.get(DIGEST), metadata.get(SAVE)
        found |= tensors
    known = digests(config)
    for path, stamp in stamps.items():
        if stamp is not None and stamp not in known:
            raise CheckpointError(
                f"{path} was saved with another record of the scheme than the entry 'posenc' of config.json is: one of "
                "both was changed or replaced after saving. Restore config.json and the weights from the original "
                "checkpoint, or convert the model again."
            )
    _check_save(saves)
    return found, [path for path, stamp in stamps.items() if stamp is None]


def _check_save(saves: dict[str, str | None]) -> None:
    """Raise unless all shards are of the save that their index is of."""
    first = Path(next(iter(saves)))
    of = variant(first.name)
    index = first.with_name(f"model.safetensors.index{of or ''}.json")
    if (of is not None and "-of-" not in first.name) or not index.is_file():
        return
    with reading(str(index), advice=DAMAGED):
        save = json.loads(index.read_bytes())["metadata"].get(SAVE)
    for path, own in saves.items():
        if own != save:
            raise CheckpointError(
                f"{path} and {index.name} are of two saves: one was interrupted, or a file was exchanged. Save the "
                "model again, or restore all files of one save."
            )


def check_stored(model: Any, state_dict: Any, files: Sequence[str] | None, load_config: Any) -> None:
    """Raise unless a checkpoint, or a `state_dict` instead, holds the tensors of a model; only headers are read."""
    source, mapping = load_config.pretrained_model_name_or_path, load_config.weight_mapping or ()
    if not record.converted(model.config):
        raise CheckpointError(
            f"The checkpoint {source} is not that of a converted model. Load it with "
            f"{type(model).__name__.removeprefix('Posenc')} and use hf_posenc.patch."
        )
    if not files and not state_dict:
        return  # That asks for a freshly initialised model.
    if files:  # of a name on the hub, too, whose folder is known only now
        weights, of = Path(files[0]), variant(Path(files[0]).name)
        index = weights.with_name(f"model.safetensors.index{of}.json")
        if of is not None and "-of-" not in weights.name and index.is_file():
            _refuse_two(weights, index)
    stored, unbound = _read_headers(files, model.config) if files else (state_dict, [])
    wanted = model.state_dict(keep_vars=True)
    targets = _targets(stored, model, wanted, mapping)
    found = {target: stored[name] for name, (target, _) in targets.items()}
    # Only one of several tied tensors has to be there.
    tied = getattr(model, "all_tied_weights_keys", {})
    present = {tied.get(name, name) for name in found}
    # An encoder alone leaves the decoder out.
    absent = tuple(
        f"{prefix}.{name}.".removeprefix(".")
        for prefix, part in parts(model).items()
        for name in of_model(part).other_stacks
        if name not in of_model(part).stacks(part)
    )
    left = SimpleNamespace(
        missing_keys={name for name in wanted if name not in found and tied.get(name, name) not in present},
        unexpected_keys={name for name in found if name not in wanted and not name.startswith(absent)},
    )
    model._adjust_missing_and_unexpected_keys(left)
    lists = [
        owed(model, left.missing_keys, mapping),
        _of_layers(model, left.unexpected_keys, wanted),
        [
            misshapen(name, tensor.shape, _shape(wanted[name]))
            for name, tensor in found.items()
            if name in wanted
            and (tensor.shape != _shape(wanted[name]) or wanted[name].is_floating_point() > tensor.is_floating_point())
        ],
    ]
    if load_config.hf_quantizer is not None or any(merged for _, merged in targets.values()):
        # Quantised and merged tensors have names and shapes of their own.
        lists = [[name for name in names if is_of_scheme(name)] for names in lists]
    check_complete(f"checkpoint {source}", *lists, accepts_misshapen=load_config.ignore_mismatched_sizes)
    if unbound:
        raise CheckpointError(
            f"{unbound[0]} does not say to which record of the scheme it belongs: a tool that does not know of "
            "hf_posenc wrote it. Restore the weights from the original checkpoint, or save the model again with "
            "save_pretrained."
        )
    for path in () if load_config.ignore_mismatched_sizes else files or ():
        _check_bound(Path(path))


def variant(name: str) -> str | None:
    """Return the variant of a model, with a dot, whose weights or index a file holds; `None` for other files."""
    found = _WEIGHTS.fullmatch(name)
    return None if found is None else found["weights"] or found["index"] or ""


def owed(model: Any, missing: Collection[str], mapping: Iterable[Any] = ()) -> list[str]:
    """Return the missing tensors that a checkpoint should have: those of schemes and of the class that it names."""
    if not missing:
        return []
    saved, wanted = model.config.architectures or (), model.state_dict(keep_vars=True)
    named: list[Any] = [getattr(sys.modules[type(model.config).__module__], str(name), None) for name in saved]
    kinds = [kind for kind in named if getattr(kind, "config_class", None) is type(model.config)]
    with torch.device("meta"):
        # Arguments of a class may ask for more than a config does, so the model itself will not do.
        other = kinds[0](copy.deepcopy(model.config)) if kinds else model
    had = {target for target, _ in _targets(other.state_dict(), model, wanted, mapping).values()}
    return [name for name in missing if name in had or is_of_scheme(name)]


def _of_layers(model: Any, unknown: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Return the unknown tensors that belong to schemes, or to layers beyond those of the model."""
    prefix = f"{model.base_model_prefix}."
    # Layers are modules in a list, so their names begin with that of the list and a number.
    lists = {found[0] for name in wanted if (found := re.match(r".*?\.(?=\d+\.)", name.removeprefix(prefix)))}
    return [n for n in unknown if is_of_scheme(n) or n.removeprefix(prefix).startswith(tuple(lists))]


def _targets(
    names: Iterable[str], model: Any, wanted: dict[str, Any], mapping: Iterable[Any]
) -> dict[str, tuple[str, bool]]:
    """Return each stored tensor's name in the model, and whether tensors are merged or split for it."""
    kinds = [[entry for entry in mapping if isinstance(entry, kind)] for kind in (WeightRenaming, WeightConverter)]
    found = {}
    for name in names:
        target, pattern = rename_source_key(name, *kinds, model.base_model_prefix, wanted)
        is_same = target not in wanted and name in wanted
        found[name] = (name, False) if is_same else (target, pattern is not None)
    return found


def _shape(wanted: Any) -> tuple[int, ...]:
    """Return the shape of a parameter. DeepSpeed keeps the full one of a partitioned parameter apart."""
    return tuple(getattr(wanted, "ds_shape", wanted.shape))


_FOREIGN = "config.json and the weights do not belong together: restore both"
_INCOMPLETE = (
    "Load it with the class that config.json names, since others may call its parts otherwise; if that fails, too, the "
    "file is incomplete, or the weights are those of an unconverted model: save it again"
)
_ACCEPT = "Restore both, or pass ignore_mismatched_sizes=True to start them from scratch"


def check_complete(
    source: str,
    missing: Sequence[str],
    unknown: Sequence[str] = (),
    misshapen: Sequence[str] = (),
    *,
    accepts_misshapen: bool = False,
    remedy: str | None = None,
) -> None:
    """Raise if a checkpoint or an adapter does not hold the tensors that its config asks for.

    transformers would initialise the missing parameters and drop the unknown ones.
    """
    for whose, is_ours, fitting in (("positional scheme", True, _FOREIGN), ("model", False, _ACCEPT)):
        taken = [] if accepts_misshapen and not is_ours else misshapen
        kinds = (
            ("misses", missing, _INCOMPLETE),
            ("has unknown", unknown, _FOREIGN),
            ("has misshapen", taken, fitting),
        )
        for what, names, advice in kinds:
            found = sorted(name for name in names if is_of_scheme(name) == is_ours)
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            if found:
                raise CheckpointError(
                    f"The {source} {what} weights of the {whose}: {', '.join(found[:3])}{more}. {remedy or advice}."
                )


def misshapen(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return the name of a tensor that does not fit, with the reason."""
    shape = f"{list(found)}, expected {list(expected)}"
    return f"{name} ({'whole numbers' if found == expected else shape})"
