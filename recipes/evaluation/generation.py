"""What models write: greedy continuations compared with the first model's, and answers that stand in the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import PositionError
from hf_posenc.patches.inspection import table_end
from hf_posenc.recipes.data.windows import start_token
from hf_posenc.recipes.evaluation.grid import Grid, Quantity, share, successes
from hf_posenc.recipes.evaluation.measure import Corruption, Measure, Piece, Workers, answer_predictions, correct
from hf_posenc.recipes.evaluation.perplexity import spread_windows

# Tokens to write, and tokens of the prompts, which take turns, so that batches are padded at the left.
_WRITTEN, _PROMPTS = 64, (32, 48, 24, 40)
# Numbers of written tokens that figures are given for.
_UP_TO = (16, 32, 64)
_GRAM = 4
_WORDS = (
    *("apple", "river", "stone", "green", "table", "music", "window", "garden", "silver", "winter", "paper", "horse"),
    *("bridge", "candle", "forest", "mirror", "summer", "bottle", "cotton", "thunder", "island", "engine", "pepper"),
)
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack")


def _encoded(tokenizer: Any, prompt: str, answer: str) -> tuple[Tensor, Tensor]:
    """Return the token ids of prompt and answer; a token that spans both belongs to the answer."""
    begun, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + answer))
    shared = next((i for i, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), len(begun))
    start = start_token(tokenizer)
    return torch.tensor([*([] if start is None else [start]), *whole[:shared]]), torch.tensor(whole[shared:])


def copied(draw: random.Random) -> tuple[str, str]:
    """Return a list of words to copy, twice so far."""
    words = " ".join(draw.sample(_WORDS, 8))
    return f"List: {words}.\nThe same list: {words}.\nThe same list:", f" {words}."


def recalled(draw: random.Random) -> tuple[str, str]:
    """Return a code of several to recall by its name."""
    names = draw.sample(_NAMES, 4)
    codes = {name: " ".join(str(draw.randrange(1, 10)) for _ in range(3)) for name in names}
    facts = " ".join(f"The code of {name} is {code}." for name, code in codes.items())
    asked = draw.choice(names)
    return f"{facts} Again: The code of {asked} is", f" {codes[asked]}."


# Functions that draw a prompt and its answer, which begins with a space.
TASKS = {"copy": copied, "recall": recalled}


class Generation(Measure):
    """Greedy continuations of text, compared with those of the first measured model, and answers in the prompt.

    Agreement is the share of tokens that equal those of the first model, and the number of tokens before the first
    other one. Repetition is the share of 4-grams that were written before. An answer is right if all of its tokens are
    the most likely ones, which means that greedy decoding would begin with it; encoder-decoders are given none.

    Args:
        ids: Token ids of a text, int64 `[tokens]`; prompts of 24 to 48 tokens are cut out of it.
        tokenizer: Tokenizer of the models.
        samples: Prompts, and examples of each task.
        corrupt: Function that corrupts prompts `[B, n]` for an encoder; `None` for causal models.
        seed: Random seed of the examples.

    Raises:
        ShapeError: The text is too short.
    """

    name = "generation"
    title = "Greedy continuations and recall"
    hides = True

    def __init__(
        self, ids: Tensor, tokenizer: Any, *, samples: int = 50, corrupt: Corruption | None = None, seed: int = 0
    ) -> None:
        self._corrupt, self._start = corrupt, None if corrupt else start_token(tokenizer)
        self._windows = spread_windows(ids, max(_PROMPTS), samples, targets=1)
        self._examples: list[tuple[Tensor, Tensor]] = []
        for name, draw in TASKS.items():
            source = random.Random(f"{seed} {name}")
            self._examples += [_encoded(tokenizer, *draw(source)) for _ in range(samples)]
        self._first = torch.empty(0)
        self._end = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.note = (
            f"{samples} prompts of {min(_PROMPTS)} to {max(_PROMPTS)} tokens, padded at the left, and {_WRITTEN} "
            f"tokens that follow by greedy decoding. Agreement: with the first model. Repeated: {_GRAM}-grams "
            f"that were written before. Copy: a list of words; recall: one of four codes by its name."
        )

    def pieces(self) -> Sequence[Piece]:
        rows = [(window, torch.tensor(_PROMPTS[at % len(_PROMPTS)])) for at, window in enumerate(self._windows)]
        return [(max(_PROMPTS) + _WRITTEN, rows, self._continued)]

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        ((_, rows, _),) = self.pieces()
        written = workers.map(partial(self._continued, model), rows, _WRITTEN)
        if not len(self._first):
            self._first = written
        equal = (written == self._first).double().masked_fill(self._first.isnan(), torch.nan)
        inside = (written != self._end).double().cumprod(dim=1)
        figures: dict[Quantity, Callable[[int], Tensor]] = {
            share("agreement"): lambda n: equal[:, :n].mean(dim=1),
            Quantity("tokens before the first other one", "mean"): lambda n: equal.cumprod(dim=1)[:, :n].sum(dim=1),
            share("repeated"): lambda n: _repeated(written[:, :n], inside[:, :n]),
        }
        unknown = written.isnan()[:, 0]
        grids = [
            Grid(
                quantity,
                {"tokens written": _UP_TO},
                torch.stack([of(n).masked_fill(unknown, torch.nan) for n in _UP_TO]),
            )
            for quantity, of in figures.items()
        ]
        if not model.config.is_encoder_decoder:
            right = workers.map(partial(_right, model), self._examples, 1)
            grids.append(Grid(successes("right answers"), {"task": tuple(TASKS)}, right.view(len(TASKS), -1)))
        return tuple(grids)

    def _continued(self, model: Any, windows: Tensor, lengths: Tensor) -> Tensor:
        """Return the tokens that follow prompts, `[B, written]`, after its end the token that ends a text."""
        longest = int(lengths.max())
        windows = windows[:, -longest:] if self._corrupt is None else self._corrupt(windows[:, -longest:])
        first, places = longest - lengths[:, None], torch.arange(longest)
        mask = places >= first
        if self._start is not None:
            windows = windows.masked_fill(places == first, self._start)
        is_causal = not model.config.is_encoder_decoder
        table = table_end(model)
        if table is not None and longest * is_causal + _WRITTEN > table:
            raise PositionError(
                f"The {type(model).__name__} has {table} positions, too few to write {_WRITTEN} tokens."
            )
        out = model.generate(
            input_ids=windows.masked_fill(~mask, self._end).to(model.device),
            attention_mask=mask.long().to(model.device),
            max_new_tokens=_WRITTEN,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,  # checkpoints may have another one
            pad_token_id=self._end,
        )
        out = out[:, longest if is_causal else 1 :].cpu()
        return torch.nn.functional.pad(out, (0, _WRITTEN - out.shape[1]), value=self._end)


def _right(model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    return correct(answer_predictions(model, prompts, answers), answers).all(dim=1, keepdim=True)


def _repeated(written: Tensor, inside: Tensor) -> Tensor:
    """Return the share of the 4-grams of each text that were written before, `[B]`; `inside` is 0 after its end."""
    found = []
    for tokens, length in zip(written.tolist(), inside.sum(dim=1).long().tolist(), strict=True):
        grams = [tuple(tokens[at : at + _GRAM]) for at in range(length - _GRAM + 1)]
        found.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return torch.tensor(found, dtype=torch.float64)
