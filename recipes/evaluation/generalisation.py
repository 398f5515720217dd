"""Length generalisation: accuracy on tasks within and beyond the trained lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError
from hf_posenc.recipes.evaluation.grid import Grid, Point, successes
from hf_posenc.recipes.evaluation.measure import Measure, different
from hf_posenc.recipes.evaluation.predictions import answer_predictions, correct
from hf_posenc.recipes.evaluation.tasks import TASKS, draw, encode
from hf_posenc.recipes.evaluation.workers import Workers


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
