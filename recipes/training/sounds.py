"""Sounds that an encoder reads padded to its own length, and padded to a shorter one."""

from __future__ import annotations

import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoFeatureExtractor, PreTrainedModel

from hf_posenc.errors import OptionError
from hf_posenc.patches.added import shortened, sound_encoder
from hf_posenc.patches.atomic_files import reading
from hf_posenc.recipes.training.features import Features, Samples


class Heard(NamedTuple):
    """Sounds and what the original writes of them.

    Attributes:
        features: Input of the encoder, `[B, bins, frames]`.
        ids: Input of the decoder, int64 `[B, T]`.
        counted: 0 at padding of the ids, otherwise 1, float32 `[B, T, 1]`.
    """

    features: Tensor
    ids: Tensor
    counted: Tensor


class Sounds(Samples):
    """Files of sound, as feature extractors of two lengths prepare them. What is longer than the shorter one is cut.

    The features to learn are the states in each layer of the decoder, and their mean, at what the original writes. The
    encoder's own states would not do: cut to a shorter length, the original's decoder does not know them.

    Args:
        files: Files of sound, from `sound_files`.
        extractors: Feature extractors of the original and of the shorter length.
        original: Model as it was.

    Attributes:
        positions: Positions of the shorter length.
    """

    def __init__(self, files: Sequence[Path], extractors: Sequence[Any], original: PreTrainedModel) -> None:
        self._files, (self._own, self._shorter), self._original = files, extractors, original
        self.sizes = (self._shorter.chunk_length,)
        self.positions: int = original.config.max_source_positions * self.sizes[0] // self._own.chunk_length
        # What the original computes when its table is cut.
        self._cut = shortened(original, self.positions)
        self._written: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._files)

    def schedule(self, steps: int, draw: torch.Generator) -> list[int]:
        return [*self.sizes] * steps

    def tokens(self, size: int) -> int:
        return self.positions

    def inputs(self, chosen: list[int], size: int) -> Heard:
        """Return sounds of the shorter length."""
        return self._prepared(chosen, self._shorter)

    def _prepared(self, chosen: list[int], extractor: Any) -> Heard:
        features, ids = self._features(chosen, extractor), self._ids(chosen)
        most = max(map(len, ids))
        padded = torch.tensor([row + [0] * (most - len(row)) for row in ids])
        counted = torch.tensor([[1.0] * len(row) + [0.0] * (most - len(row)) for row in ids])[..., None]
        return Heard(features, padded.to(features.device), counted.to(features.device))

    def _features(self, chosen: list[int], extractor: Any) -> Tensor:
        rate, most = extractor.sampling_rate, self._shorter.n_samples
        waves = [read_sound(self._files[index], rate)[:most] for index in chosen]
        with torch.autocast("cpu", enabled=False):  # it goes through NumPy, which has no bfloat16
            found: Tensor = extractor(waves, sampling_rate=rate, return_tensors="pt")["input_features"]
        return found.to(self._original.device)

    def _ids(self, chosen: list[int]) -> list[list[int]]:
        """Return what the original's decoder reads when it writes of sounds, each of which is written once."""
        new = [index for index in dict.fromkeys(chosen) if index not in self._written]
        if new:
            settings = self._original.generation_config
            ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
            # Some models leave out the end, and pad behind it.
            stops = {*ends, settings.pad_token_id}
            written = self._original.generate(self._features(new, self._own), do_sample=False).tolist()
            for index, row in zip(new, written, strict=True):
                end = next((place for place, token in enumerate(row) if token in stops), len(row))
                self._written[index] = [settings.decoder_start_token_id, *row[:end]]
        return [self._written[index] for index in chosen]

    def read(self, model: PreTrainedModel, inputs: Heard) -> Features:
        encoded = sound_encoder(model)(inputs.features).last_hidden_state
        decoder: Any = model.get_decoder()
        found = decoder(input_ids=inputs.ids, encoder_hidden_states=encoded, output_hidden_states=True, use_cache=False)
        states = [each.float() * inputs.counted for each in (*found.hidden_states[1:], found.last_hidden_state)]
        return states[-1].sum(1) / inputs.counted.sum(1), tuple(states)

    def wanted(self, original: PreTrainedModel, chosen: list[int], size: int) -> Features:
        return self.read(original, self._prepared(chosen, self._own))

    def alone(self, original: PreTrainedModel, inputs: Heard) -> Features:
        """Return the features that the original has when its table is cut."""
        return self.read(self._cut, inputs)

    def cosines(self, found: Features, wanted: Features) -> dict[str, Tensor]:
        """Return the mean cosine over tokens."""
        got, target = (each[1][-1].double() for each in (found, wanted))
        # States are 0 where no token counts.
        counted = target.abs().amax(-1) > 0
        return {"states": (F.cosine_similarity(got, target, dim=-1) * counted).sum(-1) / counted.sum(-1)}

    def other_measures(self, read: Callable[[Heard], Features], chosen: list[int], size: int) -> dict[str, float]:
        """Return the share of sounds after which every next token is the original's, so that the same is written."""
        head: Any = self._original.get_output_embeddings()
        equal = 0
        for index in chosen:
            found, wanted = read(self.inputs([index], size)), self.wanted(self._original, [index], size)
            one, other = (head(each[1][-1]).argmax(-1) for each in (found, wanted))
            equal += torch.equal(one, other)
        return {"transcripts": equal / len(chosen)}


def sound_files(folder: Path, rate: int) -> list[Path]:
    """Return the files of sound in a folder and those below it, sorted.

    Args:
        folder: Folder with .wav files.
        rate: Samples per second that they have to have.

    Raises:
        OptionError: There is none, or one has another form.
        CheckpointError: One cannot be read.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".wav" and path.is_file())
    if not files:
        raise OptionError(f"There are no sounds in {folder}. Give a folder with .wav files.")
    for file in files:
        read_sound(file, rate)
    return files


def read_sound(file: Path, rate: int) -> np.ndarray[Any, Any]:
    """Return the samples of a file, float32 from -1 to 1; the errors are those of `sound_files`."""
    with reading(str(file), " Remove or replace it."), wave.open(str(file)) as opened:
        form = (opened.getnchannels(), 8 * opened.getsampwidth(), opened.getframerate())
        samples = opened.readframes(opened.getnframes())
    if form != (1, 16, rate):
        raise OptionError(
            f"{file} has {form[0]} channels of {form[1]} bits, {form[2]} times a second; expected one of 16 bits, "
            f"{rate} times. Convert it: ffmpeg -i {file.name} -ac 1 -ar {rate} -c:a pcm_s16le NEW.wav"
        )
    return np.frombuffer(samples, "<i2").astype(np.float32) / 32768


def load_extractor(folder: str) -> Any:
    """Return the feature extractor in a directory or on the hub.

    Raises:
        CheckpointError: It cannot be read.
        OptionError: It does not pad sound to one length.
    """
    with reading(f"The feature extractor of {folder}", " Expected is what its save_pretrained writes."):
        found = AutoFeatureExtractor.from_pretrained(folder)
    if not hasattr(found, "chunk_length"):
        raise OptionError(f"The {type(found).__name__} of {folder} does not pad sound to one length, chunk_length.")
    return found


def shorter(extractor: Any, seconds: int) -> Any:
    """Return a feature extractor that pads sound to so many seconds; raise `OptionError` unless these are fewer."""
    if not 0 < seconds < extractor.chunk_length:
        raise OptionError(
            f"Got {seconds} seconds; expected 1 to {extractor.chunk_length - 1}: the model pads to "
            f"{extractor.chunk_length}."
        )
    return type(extractor).from_dict({**extractor.to_dict(), "chunk_length": seconds})
