"""Length-generalisation tasks of Kazemnejad et al. 2023 (arXiv 2305.19466, table 1), for any tokenizer.

The length of an example is its number of symbols, terms or steps. Examples are text of single letters and digits, each
after a space, so that the number of tokens grows with the length for every tokenizer. SCAN and PCFG, datasets that the
paper adopts from others, are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from string import ascii_letters, ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, suggest
from hf_posenc.recipes.evaluation.grid import Grid, Point, successes
from hf_posenc.recipes.evaluation.measure import Measure, Workers, different
from hf_posenc.recipes.evaluation.predictions import answer_predictions, correct


class Example(NamedTuple):
    """A question and its answer, which begins with a space."""

    prompt: str
    answer: str


def draw(task: str, length: int, count: int, seed: int = 0) -> list[Example]:
    """Return examples of a task, the same for the same arguments on any machine.

    Args:
        task: A name in `TASKS`.
        length: Symbols, terms or steps, at least 1.
        count: Number of examples.
        seed: Random seed. Use different seeds for training and measuring; few short examples exist, so some appear in
            both.

    Raises:
        OptionError: The task is unknown, or has no examples of that length.
    """
    if task not in TASKS:
        raise OptionError(f"There is no task {task!r}. {suggest(task, TASKS)}")
    if length < 1:
        raise OptionError(f"draw({task!r}, length={length}): expected at least 1.")
    source = random.Random(f"{seed} {task} {length}")
    return [TASKS[task](source, length) for _ in range(count)]


def encode(example: Example, tokenizer: Any, shown: Sequence[Example] = ()) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and of its answer.

    Together they are the tokens of the whole text. A token that spans the end of the prompt and the beginning of the
    answer belongs to the answer.

    Args:
        example: The question.
        tokenizer: Any tokenizer.
        shown: Solved examples before the question, for models not trained on the task.
    """
    before = "".join(f"{one.prompt}{one.answer}\n\n" for one in shown)
    prompt, whole = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (before + example.prompt, before + example.prompt + example.answer)
    )
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    return whole[:shared], whole[shared:]


def training_example(example: Example, tokenizer: Any) -> dict[str, list[int]]:
    """Return a training example for a causal model: `input_ids`, and `labels` for the answer and its end only."""
    prompt, answer = encode(example, tokenizer)
    answer = [*answer, tokenizer.eos_token_id]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


# -- the tasks ---------------------------------------------------------------------------------------------------------


def _copy(source: random.Random, length: int) -> Example:
    symbols = source.choices(ascii_lowercase, k=length)
    return Example(f"Copy: {_spaced(symbols)} . Answer:", f" {_spaced(symbols)}")


def _reverse(source: random.Random, length: int) -> Example:
    symbols = source.choices(ascii_lowercase, k=length)
    return Example(f"Reverse: {_spaced(symbols)} . Answer:", f" {_spaced(symbols[::-1])}")


def _sort(source: random.Random, length: int) -> Example:
    digits = source.choices(range(10), k=length)
    return Example(f"Sort: {_spaced(digits)} . Answer:", f" {_spaced(sorted(digits))}")


def _addition(source: random.Random, length: int) -> Example:
    # Numbers have no leading zeros.
    first, second = (source.randrange(10 ** (length - 1) if length > 1 else 0, 10**length) for _ in range(2))
    return Example(
        f"Compute: {_spaced(str(first))} + {_spaced(str(second))} . Answer:", f" {_spaced(str(first + second))}"
    )


def _summation(source: random.Random, length: int) -> Example:
    digits = source.choices(range(10), k=length)
    return Example(f"Compute: ( {' + '.join(map(str, digits))} ) % 10 . Answer:", f" {sum(digits) % 10}")


def _polynomial(source: random.Random, length: int) -> Example:
    x, factors = source.randrange(10), source.choices(range(10), k=length)
    terms = " + ".join(f"{factor} x ^ {_spaced(str(power))}" for power, factor in enumerate(factors))
    value = sum(factor * x**power for power, factor in enumerate(factors)) % 10
    return Example(f"Evaluate: x = {x} in ( {terms} ) % 10 . Answer:", f" {value}")


def _parity(source: random.Random, length: int) -> Example:
    bits = source.choices(range(2), k=length)
    return Example(f"Is the number of 1 s even in {_spaced(bits)} ? Answer:", f" {'no' if sum(bits) % 2 else 'yes'}")


def _lego(source: random.Random, length: int) -> Example:
    if length > len(ascii_letters):
        raise OptionError(f"The task 'lego' has {len(ascii_letters)} variables; got the length {length}.")
    names, signs = source.sample(ascii_letters, k=length), source.choices("+-", k=length)
    values = ["1", *names[:-1]]
    steps = " ; ".join(f"{name} = {sign} {value}" for name, sign, value in zip(names, signs, values, strict=True))
    return Example(f"If {steps} then {names[-1]} = . Answer:", f" {'-' if signs.count('-') % 2 else '+'}")


def _spaced(symbols: Sequence[object]) -> str:
    return " ".join(map(str, symbols))


# In each, the length is the number of symbols, digits, terms, bits or steps.
TASKS: dict[str, Callable[[random.Random, int], Example]] = {
    "copy": _copy,
    "reverse": _reverse,
    "addition": _addition,
    "polynomial": _polynomial,
    "sort": _sort,
    "summation": _summation,
    "parity": _parity,
    "lego": _lego,
}


# -- the measure -------------------------------------------------------------------------------------------------------


class LengthGeneralisation(Measure):
    """Accuracy on the tasks of Kazemnejad et al. 2023 by length.

    Each token of the answer is predicted after the correct tokens before it. The whole answer counts as right if all of
    its tokens are, which means that greedy decoding would begin with it; the end of the answer is not tested. The
    encoder of an encoder-decoder reads the question, and its decoder predicts the answer.

    Args:
        tokenizer: Tokenizer of the models.
        tasks: Names in `hf_posenc.recipes.evaluation.tasks.TASKS`; by default all of them.
        lengths: Lengths of the examples.
        trained: The longest length in training; shown in table and picture.
        samples: Examples per task and length.
        shots: Solved examples before each question, no longer than `trained`; for models not trained on the tasks.
        seed: Random seed of the examples.

    Raises:
        OptionError: A task is unknown or has no examples of a length; tasks or lengths are empty or repeated.
    """

    name = "tasks"
    title = "Length-generalisation tasks"

    def __init__(
        self,
        tokenizer: Any,
        tasks: Sequence[str] = tuple(TASKS),
        *,
        lengths: Sequence[int] = (5, 10, 15, 20, 25, 30, 35, 40),
        trained: int = 20,
        samples: int = 32,
        shots: int = 0,
        seed: int = 0,
    ) -> None:
        self._tasks, self._lengths = different("tasks", tasks), tuple(sorted(different("lengths", lengths)))
        self._samples = samples
        within = [length for length in self._lengths if length <= trained]
        if shots and not within:
            raise OptionError(f"lengths={self._lengths}: none is within trained={trained} to take {shots} shots from.")
        self._rows = []
        for task in self._tasks:
            solved = [draw(task, within[shot % len(within)], 1, seed=seed + 1 + shot)[0] for shot in range(shots)]
            for length in self._lengths:
                for example in draw(task, length, samples, seed):
                    prompt, answer = encode(example, tokenizer, solved)
                    self._rows.append((torch.tensor(prompt), torch.tensor(answer)))
        self.tokens = sum(part.numel() for row in self._rows for part in row)
        self.mark = (trained, f"trained up to {trained}")
        given = f", after {shots} solved examples" if shots else ""
        self.note = (
            f"{samples} generated examples per length{given}; lengths above {trained} are longer than in training. "
            "Whole answer: all of its tokens are the most likely ones. Tokens: share of its tokens that are."
        )

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        def score(prompts: Tensor, answers: Tensor) -> Tensor:
            right = correct(answer_predictions(model, prompts, answers), answers)
            return torch.stack([right.all(dim=1).double(), right.double().mean(dim=1)], dim=1)

        found = workers.map(score, self._rows, 2).view(len(self._tasks), len(self._lengths), self._samples, 2)
        axes: dict[str, tuple[Point, ...]] = {"task": self._tasks, "length": self._lengths}
        return Grid(successes("whole answer"), axes, found[..., 0]), Grid(successes("tokens"), axes, found[..., 1])
