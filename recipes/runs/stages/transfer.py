"""Attention transfer: each converted attention learns to write what the original attention wrote."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from torch.utils.data import Subset
from transformers import default_data_collator

from hf_posenc.patches.atomic_files import published
from hf_posenc.recipes.data.collation import Collator, Repetition
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.runs import files
from hf_posenc.recipes.runs.stages.base import Case, Context, Work
from hf_posenc.recipes.runs.stages.trained import Trained
from hf_posenc.recipes.schema.recipe import Distillation, Recipe, Training
from hf_posenc.recipes.training.rates import Name
from hf_posenc.recipes.training.starts import held_out
from hf_posenc.recipes.training.transfer import BEST, AttentionTransfer, BestLayers

# Tokens that judge the transfer.
_JUDGED = 2048


class Transfer(Trained):
    """Transfer of all attentions, or of their schemes alone, before the training."""

    section = "transfer"
    words = "attention transfer"
    skipping = 0.5

    @property
    def rates(self) -> tuple[Name, bool]:
        return "transfer" if self.recipe.moves_projections else "fit", True

    def plain(self, model: Any) -> Recipe:
        return replace(super().plain(model), distillation=Distillation())

    def windows(self, case: Case) -> Any:
        return set_aside(super().windows(case), self.settings)[1]

    def collate(self, case: Case) -> Collator | None:
        found, share = super().collate(case), self.recipe.transfer.repeat
        # Positions are skipped in what is repeated, too.
        return Repetition(share, seed=self.settings.seed, collate=found or default_data_collator) if share else found

    def check(self, case: Case, work: Work) -> None:
        AttentionTransfer(work.model, projections=self.recipe.moves_projections)
        super().check(case, work)

    def finished(self, context: Context) -> bool:
        return context.checkpoint is not None

    def done(self, context: Context) -> int:
        is_over = self.finished(context) or (self.folder(context) / files.TRANSFERRED).is_file()
        return self.settings.steps if is_over else super().done(context)

    @contextmanager
    def module(self, work: Work) -> Iterator[AttentionTransfer]:
        is_original = work.teacher is not None and self.recipe.distillation.teacher is None
        original = work.teacher.model if work.teacher is not None and is_original else None
        transfer = AttentionTransfer(work.model, projections=self.recipe.moves_projections, original=original)
        with transfer.training_only():
            yield transfer

    def run(self, context: Context, work: Work) -> None:
        """Train, unless the result is there, and measure before it."""
        folder, text = self.folder(context), context.case.text(self.settings)
        result, collate = folder / files.TRANSFERRED, self.collate(context.case) or default_data_collator
        with self.module(work) as transfer:
            self.measuring(context, work).begin(work.model)
            parts = (collate(part) for part in set_aside(text.train, self.settings)[0])
            device = processes().device
            batches = [{name: value.to(device) for name, value in part.items()} for part in parts]
            with context.case.precise():
                best = BestLayers(transfer, batches)
            last = files.last(folder)
            if result.is_file():
                best.load(result)
            elif last is not None:
                best.load(last / BEST)
            if not result.is_file():
                self.train(context, work, transfer, [best])
            found = best.restore()
        if processes().is_main_process and not result.is_file():
            folder.mkdir(exist_ok=True)
            with published(result) as unfinished:
                best.save(unfinished)
        processes().wait_for_everyone()
        context.judged(work, files.TRANSFER, asdict(found))


def set_aside(windows: Any, training: Training) -> tuple[list[list[Any]], Any]:
    """Return windows that judge the transfer, in micro batches, and the others to train on."""
    first = next(iter(windows))
    most, has_end = max(2, math.ceil(_JUDGED / len(first["input_ids"]))), hasattr(windows, "__len__")
    count = held_out(len(windows), most=most) if has_end else most
    # One window serves both.
    judged = list(itertools.islice(iter(windows), max(1, count)))
    size = training.micro_batch_size or training.batch_size
    parts = [judged[start : start + size] for start in range(0, len(judged), size)]
    others = Subset(windows, range(count, len(windows))) if has_end else windows.skip(count)
    return parts, others
