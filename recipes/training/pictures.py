"""Pictures that an image encoder reads at its own size and at a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoImageProcessor, PreTrainedModel

from hf_posenc.errors import OptionError
from hf_posenc.patches.atomic_files import reading
from hf_posenc.patches.images import body_of, others, stretched
from hf_posenc.recipes.training.features import Features, Samples


class Pictures(Samples):
    """Files of pictures, as image processors of two sizes prepare them.

    The features of a larger picture are those that the original has of it at its own size: the pooled output (that of
    the first token or the mean, if there is none), and in each layer the means of the patches that lie in one of the
    original's.

    Args:
        files: Files of pictures, from `picture_files`.
        processors: Image processors of the original and of the converted model.
        original: Image encoder as it was.
    """

    def __init__(self, files: Sequence[Path], processors: Sequence[Any], original: PreTrainedModel) -> None:
        self._files, self._processors = files, {side(processor): processor for processor in processors}
        self.sizes = tuple(self._processors)
        body = body_of(original)
        self._device, self._stretched, self._others = original.device, stretched(body), others(body)
        patch = original.config.patch_size
        self._patch = patch if isinstance(patch, int) else patch[0]

    def __len__(self) -> int:
        return len(self._files)

    def schedule(self, steps: int, draw: torch.Generator) -> list[int]:
        """Return the original's size and the larger one in turn.

        One after the other, an exact start has steps of noise at its own size, and then gradients new to Adam.
        """
        return [self.sizes[step % 2] for step in range(steps)]

    def tokens(self, size: int) -> int:
        return self._others + (size // self._patch) ** 2

    def inputs(self, chosen: list[int], size: int) -> Tensor:
        """Return pixel values, `[B, C, size, size]`."""
        shown = []
        for file in (self._files[index] for index in chosen):
            with reading(str(file), " Remove or replace it."), Image.open(file) as picture:
                shown.append(picture.convert("RGB"))
        pixels: Tensor = self._processors[size](images=shown, return_tensors="pt")["pixel_values"]
        return pixels.to(self._device)

    def read(self, model: PreTrainedModel, inputs: Tensor) -> Features:
        found = body_of(model)(inputs, output_hidden_states=True, **self._stretched)
        last, pooled = found.last_hidden_state, found.get("pooler_output")
        if pooled is None:
            pooled = last[:, 0] if self._others else last.mean(1)
        # A norm may come between the last layer and what users take.
        return pooled, tuple(self._as_own(states) for states in (*found.hidden_states[1:], last))

    def _as_own(self, states: Tensor) -> Tensor:
        """Return states `[B, S, E]` on the original's grid."""
        before, patches = states[:, : self._others], states[:, self._others :]
        width = round(patches.shape[1] ** 0.5)
        grid = patches.mT.reshape(len(patches), -1, width, width)
        own = self.sizes[0] // self._patch
        return torch.cat((before, F.adaptive_avg_pool2d(grid, own).flatten(2).mT), dim=1)

    def wanted(self, original: PreTrainedModel, chosen: list[int], size: int) -> Features:
        return self.read(original, self.inputs(chosen, self.sizes[0]))

    def cosines(self, found: Features, wanted: Features) -> dict[str, Tensor]:
        """Return cosines of the pooled output, and the mean over patches."""
        got, target = (each[1][-1][:, self._others :].double() for each in (found, wanted))
        return {**super().cosines(found, wanted), "patches": F.cosine_similarity(got, target, dim=-1).mean(-1)}


def picture_files(folder: Path) -> list[Path]:
    """Return the pictures in a folder and those below it, sorted.

    Raises:
        OptionError: There is no picture.
        CheckpointError: One cannot be read.
    """
    known = Image.registered_extensions()
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in known and path.is_file())
    if not files:
        raise OptionError(f"There are no pictures in {folder}. Give a folder with files such as .jpg or .png.")
    for file in files:
        with reading(str(file), " Remove or replace it."), Image.open(file) as picture:
            picture.verify()
    return files


def load_processor(folder: str) -> Any:
    """Return the image processor in a directory or on the hub; raise `CheckpointError` if it cannot be read."""
    with reading(f"The image processor of {folder}", " Expected is what its save_pretrained writes."):
        return AutoImageProcessor.from_pretrained(folder)


def side(processor: Any) -> int:
    """Return the pixels of a side of the squares that an image processor makes of all pictures.

    Raises:
        OptionError: It makes something else.
    """
    made = [processor(Image.new("RGB", size), return_tensors="pt")["pixel_values"] for size in ((64, 48), (48, 80))]
    sides = [length for pixels in made for length in pixels.shape[-2:]]
    if len(set(sides)) != 1:
        raise OptionError(
            f"The image processor makes {sides[0]} x {sides[1]} pixels of one picture and {sides[2]} x {sides[3]} of "
            "another; expected squares of one size. Set its size or crop_size."
        )
    return int(sides[0])


def enlarged(processor: Any, size: int) -> Any:
    """Return an image processor that shows the same part of a picture in squares of `size` pixels.

    Raises:
        OptionError: The size is not above that of the processor, or its settings allow no other.
    """
    own, settings = side(processor), processor.to_dict()
    if size <= own:
        raise OptionError(f"Got a size of {size} pixels; expected more than {own}, the size of the model's pictures.")
    for name in ("size", "crop_size"):
        if settings.get(name):
            settings[name] = {key: round(value * size / own) for key, value in settings[name].items()}
    made = type(processor).from_dict(settings)
    if side(made) != size:
        raise OptionError(
            f"The image processor makes {side(made)} pixels of a side; expected {size}. Give another size."
        )
    return made
