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
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from hf_posenc.errors import CheckpointError, OptionError
from hf_posenc.patches import surgery
from hf_posenc.patches.atomic_files import reading, write_text
from hf_posenc.patches.patch import evaluating
from hf_posenc.recipes.loading import MODULES, trained_length
from hf_posenc.recipes.training.callbacks import parameter_groups
from hf_posenc.recipes.training.distillation import Teacher, hidden_distance
from hf_posenc.recipes.training.rates import rates
from hf_posenc.recipes.training.starts import check_counts, check_rates, check_windows, held_out, kept, verdict

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
# Tokens of the shortest texts to learn from, and the most windows that judge the result.
_SHORTEST, _JUDGED = 16, 32
# Agreement from which on a start counts as exact. The rate of the model has this factor then, since only the texts that
# the original cannot read are new to it.
_EXACT, _CAREFUL = 0.999, 0.1
# Texts that are measured at once.
_AT_ONCE = 8
_WARMUP = 0.05


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

    def read(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return embeddings of texts of one length, `[B, E]`, and the hidden states of their tokens, by layer."""
        before, after = (ids.new_tensor(part).expand(len(ids), -1) for part in (self.before, self.after))
        whole = torch.cat((before, ids, after), dim=1)
        found = model(input_ids=whole, attention_mask=torch.ones_like(whole), output_hidden_states=True)
        own = slice(before.shape[1], before.shape[1] + ids.shape[1])
        # The first states are what the scheme may have taken positions from.
        return _POOLINGS[self.pooling](found.last_hidden_state), tuple(x[:, own] for x in found.hidden_states[1:])

    @torch.no_grad()
    def read_in_pieces(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the same of an original, which reads texts longer than it was trained on in pieces of one size."""
        pieces = ids.tensor_split(math.ceil(ids.shape[1] / self.room), dim=1)
        found = [self.read(model, piece) for piece in pieces]
        parts = [
            embedding * (piece.shape[1] / ids.shape[1]) for (embedding, _), piece in zip(found, pieces, strict=True)
        ]
        layers = zip(*(states for _, states in found), strict=True)
        return torch.stack(parts).sum(0), tuple(torch.cat(layer, dim=1) for layer in layers)


@dataclass(frozen=True)
class Agreement:
    """Embeddings of held-out texts of a length, in tokens without special ones.

    Attributes:
        before: Mean cosine with the original's embeddings, before the distillation.
        after: The same after it.
        cut: Share of the texts whose other half is the most similar of all other halves, by the original, which cuts
            texts at its length.
        whole: The same by the converted model.
    """

    tokens: int
    before: float
    after: float
    cut: float
    whole: float


@dataclass(frozen=True)
class EmbeddingResult:
    """Outcome of a distillation of embeddings, by lengths from the original's to the windows'."""

    rows: tuple[Agreement, ...]
    accepted: bool
    sentence: str


@torch.inference_mode(False)  # Gradients are needed, also where the caller wants none.
def distil_embeddings(
    model: PreTrainedModel,
    ids: Tensor,
    embedder: Embedder,
    *,
    steps: int = 300,
    batch_size: int = 8,
    learning_rate: float | None = None,
    scheme_learning_rate: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> EmbeddingResult:
    """Train a converted encoder, in place, to embed texts as the original does, also those longer than its own.

    The loss is 1 minus the cosine of the embeddings, plus the distance of the hidden states of all layers. The texts of
    a step are the beginnings of some windows, of one length between 16 tokens and the whole, drawn on a log scale. The
    caller's random state is unchanged.

    The last quarter of the windows (at most 32) is held out. If the embeddings of these come no nearer to the
    original's, all weights stay as they were, and a warning says so.

    Args:
        model: Converted encoder without a head, as `AutoModel` loads it.
        ids: Windows of text without special tokens, int64 `[N, S]`, at least 4 of at least 32 tokens.
        embedder: Special tokens, pooling and length of the original.
        steps: Steps of Adam; the rates rise over the first twentieth, and then fall to 0 with a cosine.
        batch_size: Windows per step.
        learning_rate: Peak learning rate of the model's own weights; `None` follows from the model's size, and is a
            tenth of that where the start is exact up to the original's length.
        scheme_learning_rate: Peak learning rate of the scheme's weights; `None` likewise.
        seed: Random seed of the texts of each step.
        progress: Function called after each step with the tokens of a text in the steps so far, and in all steps.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: A number is out of range, or there is no room for text between special tokens.
        ShapeError: `ids` are not such windows.
    """
    surgery.check_patched("distil_embeddings", model)
    check_counts("distil_embeddings", steps=(steps, 1), batch_size=(batch_size, 1), seed=(seed, 0))
    check_rates("distil_embeddings", learning_rate=learning_rate, scheme_learning_rate=scheme_learning_rate)
    check_windows("distil_embeddings", model, ids, least=2 * _SHORTEST)
    if len(ids) < 4:
        raise OptionError(f"distil_embeddings: got {len(ids)} windows; expected 4 at least, of which one is held out.")
    if embedder.room < _SHORTEST:
        raise OptionError(f"distil_embeddings: the original reads {embedder.length} tokens; expected more.")
    ids, original = ids.to(model.device), Teacher.copy_of(model).model
    apart = held_out(len(ids), most=_JUDGED)
    texts, judged = ids[:-apart], ids[-apart:]
    own = rates(model, "training", batch_size * ids.shape[1] // 2, fitted=False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    draw = torch.Generator().manual_seed(seed)
    with evaluating(model), kept(weights) as put_back:
        before = _cosines(model, original, embedder, judged)
        groups = parameter_groups(model, scheme_learning_rate=scheme_learning_rate or own.scheme)
        careful = _CAREFUL if next(iter(before.values())) > _EXACT else 1.0
        optimizer = torch.optim.Adam(groups, lr=learning_rate or careful * own.model)
        schedule = get_cosine_schedule_with_warmup(optimizer, round(_WARMUP * steps), steps)
        shares = torch.rand(steps, generator=draw).tolist()
        lengths = [round(_SHORTEST * (ids.shape[1] / _SHORTEST) ** share) for share in shares]
        for step, length in enumerate(lengths, 1):
            chosen = texts[torch.randint(len(texts), (batch_size,), generator=draw).to(ids.device), :length]
            wanted, states = embedder.read_in_pieces(original, chosen)
            got, own_states = embedder.read(model, chosen)
            loss = (1 - F.cosine_similarity(got, wanted)).mean() + hidden_distance(own_states, states)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(sum(lengths[:step]), sum(lengths))
        after = _cosines(model, original, embedder, judged)
        means = (1 - sum(found.values()) / len(found) for found in (before, after))
        accepted, sentence = verdict("distillation", "distance from the embeddings of the original", *means)
        if not accepted:
            put_back()
        rows = [
            Agreement(
                tokens,
                before[tokens],
                after[tokens],
                cut=_matched(lambda text: embedder.read(original, text[:, : embedder.room]), judged[:, :tokens]),
                whole=_matched(lambda text: embedder.read(model, text), judged[:, :tokens]),
            )
            for tokens in before
        ]
    return EmbeddingResult(tuple(rows), accepted, sentence)


def _lengths(shortest: int, longest: int) -> list[int]:
    """Return lengths from the original's on, each twice the one before, and the longest."""
    found = [shortest << power for power in range(32) if shortest << power < longest]
    return [*found, longest]


@torch.no_grad()
def _cosines(model: PreTrainedModel, original: Any, embedder: Embedder, ids: Tensor) -> dict[int, float]:
    """Return the mean cosine of the embeddings of both models by length."""
    found = {}
    for tokens in _lengths(min(embedder.room, ids.shape[1]), ids.shape[1]):
        pairs = (
            (embedder.read(model, row), embedder.read_in_pieces(original, row))
            for row in torch.split(ids[:, :tokens], _AT_ONCE)
        )
        cosines = [F.cosine_similarity(one[0].double(), other[0].double()) for one, other in pairs]
        found[tokens] = float(torch.cat(cosines).mean())
    return found


@torch.no_grad()
def _matched(read: Callable[[Tensor], tuple[Tensor, Any]], ids: Tensor) -> float:
    """Return the share of texts whose second half is nearer to their first half than all other second halves."""
    halves = ids.tensor_split(2, dim=1)
    first, second = (
        F.normalize(torch.cat([read(row)[0] for row in torch.split(half, _AT_ONCE)]), dim=-1) for half in halves
    )
    return float(((first @ second.mT).argmax(1) == torch.arange(len(ids), device=ids.device)).float().mean())


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
