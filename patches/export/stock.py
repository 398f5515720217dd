"""`export_stock`: a converted model as an ordinary checkpoint, where a stock model computes the same function."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from hf_posenc.equivalents import Nothing
from hf_posenc.errors import ExportError
from hf_posenc.operands import LARGEST_COUNT, Geometry, is_count
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.atomic_files import OutputError, whole_directory
from hf_posenc.patches.export.restating import Draft, read_stack, restate
from hf_posenc.patches.patch import refuse_wrapped


@dataclass(frozen=True)
class Export:
    """Result of `export_stock`.

    Attributes:
        model: Name of the stock class.
        changes: Differences from the stock model that was converted, in words; empty if there are none.
        positions: Longest input for which the outputs agree; `None` if there is no limit.
    """

    model: str
    changes: tuple[str, ...]
    positions: int | None

    def __str__(self) -> str:
        changes = self.changes or ("nothing: it computes its own encoding",)
        rows = [("model", self.model), *(("changed", change) for change in changes)]
        if self.positions is not None:
            rows.append(("equal up to", f"{self.positions:,} tokens"))
        return "\n".join(f"{name + ':':<20} {value}" for name, value in rows)

    # Notebooks show it as `print` does.
    __repr__ = __str__


def export_stock(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    max_positions: int | None = None,
) -> Export:
    """Write a converted model as an ordinary checkpoint of its stock class, which loads without this package.

    It computes the same function, up to rounding. The model in memory stays as it is. docs/export.md
    lists which schemes can be exported from which architectures.

    Args:
        model: A patched model, not wrapped by anything.
        directory: Where to write; must not exist, or be empty.
        max_positions: Rows of an exported table of positions, where the scheme has no limit; `None` keeps the model's
            own length.

    Raises:
        ExportError: No stock model computes this function, or it cannot be written. Nothing is written then.
        NotPatchedError: The model is not patched.
        WrappedModelError: It is inside of a wrapper.
    """
    try:
        with whole_directory(Path(directory)) as folder:
            architecture = check_model(model)
            stacks = [read_stack(architecture, model, name) for name in architecture.stacks(model)]
            layers = [layer for stack in stacks for layer in stack.layers]
            _check_positions(layers[0].geometry, max_positions)
            draft = Draft(model, architecture)
            own = all(one.native and one.kept is one.geometry and isinstance(one.added, Nothing) for one in layers)
            if max_positions is not None or not own:
                restate(draft, stacks, max_positions=max_positions)
            draft.build().save_pretrained(folder)
    except OutputError as error:
        raise ExportError(str(error)) from error
    return Export(draft.kind.__name__, tuple(draft.changes), draft.positions)


def check_model(model: object) -> Architecture:
    """Return the architecture of a model that can be exported, or raise."""
    refuse_wrapped(
        model,
        "Take it out before an export: merge PEFT adapters with model.merge_and_unload(), take .module of DDP and "
        "._orig_mod of torch.compile, save and load what FSDP has sharded.",
    )
    architecture = of_model(model)
    assert isinstance(model, PreTrainedModel)
    surgery.check_patched("export_stock", model, "It is a stock model already: use save_pretrained.")
    strengths = record.strengths_from_config(model.config)
    if strengths != record.FULL:
        raise ExportError(
            f"Cannot export: the model is in the middle of a handover (native={strengths.native:g}, "
            f"scheme={strengths.scheme:g}). Bring both strengths to 1 (hf_posenc.set_strength), or use "
            "hf_posenc.drop_native or unpatch."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ExportError(
            "Cannot export a quantised model: its weights are rounded. Load the model without quantisation."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ExportError(
            "Cannot export: some weights are not in memory (device_map has moved them to disk, or the model was built "
            "on the meta device). Load the model without device_map."
        )
    return architecture


def _check_positions(geometry: Geometry, max_positions: int | None) -> None:
    """Raise if the number of positions is no count, or has no effect on the model."""
    if max_positions is None:
        return
    if not is_count(max_positions) or max_positions < 1:
        raise ExportError(f"Got max_positions={max_positions!r}; expected an integer from 1 to {LARGEST_COUNT:,}.")
    if geometry.native is None or geometry.native.max_distance is not None:
        raise ExportError(f"Got max_positions={max_positions}, but the stock model has no table of positions.")
