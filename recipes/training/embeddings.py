"""Distillation of embeddings: a converted encoder learns to embed texts as the original does, long ones by its pieces.

An original that embeds 512 tokens at most says of a longer text what it says of its parts: each token has the hidden
states of its part, and the text the mean of the parts' embeddings, by their tokens.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_posenc.errors import CheckpointError, OptionError
from hf_posenc.patches import surgery
from hf_posenc.patches.atomic_files import reading, write_text
from hf_posenc.recipes.loading import MODULES, trained_length
from hf_posenc.recipes.training.distillation import Teacher
from hf_posenc.recipes.training.features import Features, FeaturesResult, Samples, distil_features
from hf_posenc.recipes.training.starts import check_windows

# Files of a folder of sentence-transformers, besides the list of its modules: the settings of the encoder, and others.
_SETTINGS, _OTHER = "sentence_bert_config.json", "config_sentence_transformers.json"
# Poolings of hidden states `[B, S, E]`, by their names there; in older folders each is a key of its own.
_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda states: states.mean(1),
    "cls": lambda states: states[:, 0],
    "lasttoken": lambda states: states[:, -1],
    "max": lambda states: states.amax(1),
}
_OLD_NAMES = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
# Tokens of the shortest texts to learn from, and texts whose halves are read at once.
_SHORTEST, _AT_ONCE = 16, 8


@dataclass(frozen=True)
class Embedder:
    """The way from a text to its embedding: special tokens around it, the encoder, and pooling.

    Attributes:
        before: Special tokens before a text.
        after: Special tokens behind it.
        pooling: Name of the pooling: mean, cls, lasttoken or max.
        length: Tokens that the original reads at most, special ones included.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    pooling: str
    length: int

    @classmethod
    def of(cls, folder: str | Path, tokenizer: Any, config: Any) -> Embedder:
        """Read how a folder of sentence-transformers embeds texts.

        Raises:
            CheckpointError: It is no such folder, or a file is damaged.
            OptionError: It has other modules than an encoder and a pooling first, or pools in a way unknown here.
        """
        folder = Path(folder)
        if not (folder / MODULES).is_file():
            raise CheckpointError(
                f"There is no {MODULES} in {folder}. Give a folder of sentence-transformers: what its save writes, or "
                "what `hf download NAME --local-dir FOLDER` fetches."
            )
        with reading(str(folder)):
            modules = json.loads((folder / MODULES).read_text(encoding="utf-8"))
            kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
            if kinds[:2] != ["Transformer", "Pooling"] or modules[0]["path"]:
                raise OptionError(
                    f"{folder} has the modules {', '.join(kinds)}; expected a Transformer, in the folder itself, and "
                    "its Pooling first."
                )
            own = json.loads((folder / modules[1]["path"] / "config.json").read_text(encoding="utf-8"))
        named = [name for name in _POOLINGS if own.get(f"pooling_mode_{_OLD_NAMES.get(name, name)}")]
        found = str(own.get("pooling_mode", "+".join(named)))
        if found not in _POOLINGS:
            raise OptionError(f"{folder} pools by {found!r}; expected one of {', '.join(_POOLINGS)}.")
        bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        with reading(str(folder / _SETTINGS)):
            settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        limits = (trained_length(config), settings.get("max_seq_length"), tokenizer.model_max_length)
        length = min(limit for limit in limits if limit is not None)
        return cls(tuple(whole[:start]), tuple(whole[start + len(bare) :]), found, int(length))

    @property
    def room(self) -> int:
        """Tokens of a text that the original reads at once, without special ones."""
        return self.length - len(self.before) - len(self.after)

    def read(self, model: PreTrainedModel, ids: Tensor) -> Features:
        """Return embeddings of texts of one length, `[B, E]`, and the hidden states of their tokens, by layer."""
        before, after = (ids.new_tensor(part).expand(len(ids), -1) for part in (self.before, self.after))
        whole = torch.cat((before, ids, after), dim=1)
        found = model(input_ids=whole, attention_mask=torch.ones_like(whole), output_hidden_states=True)
        own = slice(before.shape[1], before.shape[1] + ids.shape[1])
        # The first states are what the scheme may have taken positions from.
        return _POOLINGS[self.pooling](found.last_hidden_state), tuple(x[:, own] for x in found.hidden_states[1:])

    @torch.no_grad()
    def read_in_pieces(self, model: PreTrainedModel, ids: Tensor) -> Features:
        """Return the same of an original, which reads texts longer than it was trained on in pieces of one size."""
        pieces = ids.tensor_split(math.ceil(ids.shape[1] / self.room), dim=1)
        found = [self.read(model, piece) for piece in pieces]
        parts = [
            embedding * (piece.shape[1] / ids.shape[1]) for (embedding, _), piece in zip(found, pieces, strict=True)
        ]
        layers = zip(*(states for _, states in found), strict=True)
        return torch.stack(parts).sum(0), tuple(torch.cat(layer, dim=1) for layer in layers)


class Texts(Samples):
    """Texts of one length, the windows `[N, S]`; a shorter one is the beginning of a window."""

    def __init__(self, embedder: Embedder, ids: Tensor) -> None:
        self._embedder, self._ids = embedder, ids
        shortest, longest = min(embedder.room, ids.shape[1]), ids.shape[1]
        # Each twice the one before.
        self.sizes = (*(shortest << power for power in range(32) if shortest << power < longest), longest)

    def __len__(self) -> int:
        return len(self._ids)

    def schedule(self, steps: int, draw: torch.Generator) -> list[int]:
        """Return lengths between 16 tokens and the whole, drawn on a log scale."""
        shares = torch.rand(steps, generator=draw).tolist()
        return [round(_SHORTEST * (self._ids.shape[1] / _SHORTEST) ** share) for share in shares]

    def tokens(self, size: int) -> int:
        return size

    def inputs(self, chosen: list[int], size: int) -> Tensor:
        """Return token ids without special ones, `[B, size]`."""
        return self._ids[chosen, :size]

    def read(self, model: PreTrainedModel, inputs: Tensor) -> Features:
        return self._embedder.read(model, inputs)

    def alone(self, original: PreTrainedModel, inputs: Tensor) -> Features:
        """Return the original's features of texts, which it cuts at its length."""
        return self._embedder.read(original, inputs[:, : self._embedder.room])

    def wanted(self, original: PreTrainedModel, chosen: list[int], size: int) -> Features:
        return self._embedder.read_in_pieces(original, self.inputs(chosen, size))

    def other_measures(self, read: Callable[[Tensor], Features], chosen: list[int], size: int) -> dict[str, float]:
        """Return the share of texts whose second half is nearer to their first half than all other second halves."""
        first, second = (
            F.normalize(torch.cat([read(row)[0] for row in torch.split(half, _AT_ONCE)]), dim=-1)
            for half in self.inputs(chosen, size).tensor_split(2, dim=1)
        )
        nearest = (first @ second.mT).argmax(1)
        return {"neighbours": float((nearest == torch.arange(len(chosen), device=nearest.device)).float().mean())}


def distil_embeddings(model: PreTrainedModel, ids: Tensor, embedder: Embedder, **options: Any) -> FeaturesResult:
    """Train a converted encoder, in place, to embed texts as the original does, also those longer than its own.

    Args:
        model: Converted encoder without a head, as `AutoModel` loads it.
        ids: Windows of text without special tokens, int64 `[N, S]`, at least 4 of at least 32 tokens. The texts of a
            step are the beginnings of some windows, of one length between 16 tokens and the whole.
        embedder: Special tokens, pooling and length of the original.
        **options: Keywords of `distil_features`.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: A number is out of range, or there is no room for text between special tokens.
        ShapeError: `ids` are not such windows.
    """
    surgery.check_patched("distil_embeddings", model)
    check_windows("distil_embeddings", model, ids, least=2 * _SHORTEST)
    if embedder.room < _SHORTEST:
        raise OptionError(f"distil_embeddings: the original reads {embedder.length} tokens; expected more.")
    original: Any = Teacher.copy_of(model).model
    return distil_features(model, original, Texts(embedder, ids.to(model.device)), **options)


def write_modules(source: str | Path, folder: Path, tokens: int) -> None:
    """Make a saved encoder a folder of sentence-transformers like another one, which reads so many tokens."""
    source = Path(source)
    with reading(str(source)):
        modules: Sequence[Any] = json.loads((source / MODULES).read_text(encoding="utf-8"))
        settings = json.loads((source / _SETTINGS).read_text(encoding="utf-8"))
    for path in (module["path"] for module in modules if module["path"]):
        if (source / path).is_dir():  # a normalisation has no files
            shutil.copytree(source / path, folder / path, dirs_exist_ok=True)
    for name in (MODULES, _OTHER):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    # Without this key, sentence-transformers would cut texts at the length in the encoder's config.
    write_text(folder / _SETTINGS, json.dumps({**settings, "max_seq_length": tokens}, indent=2) + "\n")
