"""Train the tiny checkpoints that the demo and the tests run on.

Nothing is downloaded: the text is Python's own documentation (`hf_posenc.recipes.data.text`), and the tokenizer is
trained on it, too. A model takes some minutes on a CPU with two cores. The committed config.json of each checkpoint
gives its sizes, and all tokenizers have the settings of the tiny Llama's.

    python benchmarks/pretrain_tiny.py llama    # writes hf_posenc/tiny_llama/
    python benchmarks/pretrain_tiny.py gpt2     # writes tests/checkpoints/gpt2/
    python benchmarks/pretrain_tiny.py t5       # writes tests/checkpoints/t5/
    python benchmarks/pretrain_tiny.py llama gpt2 t5

Llama and GPT-2 see at most 128 positions while training and T5 at most 64, so they show what happens beyond them.
"""

import argparse
import hashlib
import math
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from hf_posenc.recipes.data.text import builtin_documents, builtin_text

ROOT = Path(__file__).resolve().parents[1]
SEED, BATCH, VOCABULARY = 0, 32, 1024
# Denoising for T5: the encoder reads a window in which some tokens are replaced by the first sentinel, and the decoder
# writes the whole window. To copy the next token, the decoder must find its place in the source, and only the
# encoder's positions say which token follows which there. With spans cut out and only these to be written, as T5 was
# first trained, a model of this size leaves its encoder's positions unused.
CORRUPTED = 0.15
# Copying is learnt sooner from short windows, so training starts with this share of its steps on windows of at most
# half the length, twice as many at a time.
SHORT_STEPS = 0.4
# Relative bias tables start near zero and must reach values of several units, so they get this many times the
# learning rate of the other parameters.
BIAS_RATE = 10.0


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made.

    Attributes:
        title: Title of the model card.
        folder: Folder of the checkpoint.
        steps: Optimizer steps.
        rate: Peak learning rate.
        shortest: Tokens of the shortest windows in training.
        window: Tokens of the longest windows in training, and of all windows in the held-out loss.
        denoises: Whether an encoder reads windows in which text is missing.
    """

    title: str
    folder: Path
    steps: int
    rate: float
    shortest: int = 128
    window: int = 128
    denoises: bool = False

    @property
    def task(self) -> str:
        if not self.denoises:
            return f"next-token prediction on windows of {self.window} tokens"
        return (
            f"denoising: the encoder reads a window in which {CORRUPTED:.0%} of the tokens are replaced by\n"
            f"  `<extra_id_0>`, the decoder writes the whole window; {self.shortest} to {self.window // 2} tokens"
            f" in the first {SHORT_STEPS:.0%} of the\n"
            f"  steps, {self.shortest} to {self.window} after"
        )


RECIPES = {
    "llama": Recipe("Tiny Llama", ROOT / "hf_posenc" / "tiny_llama", 3000, 4e-3),
    "gpt2": Recipe("Tiny GPT-2", ROOT / "tests" / "checkpoints" / "gpt2", 1200, 3e-3),
    "t5": Recipe("Tiny T5", ROOT / "tests" / "checkpoints" / "t5", 1500, 4e-3, shortest=16, window=64, denoises=True),
}


def token_stream(tokenizer: PreTrainedTokenizerFast, part: str) -> torch.Tensor:
    """Tokenize a part of the text into one row, with the end-of-text token after each document."""
    rows = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in builtin_documents(part))
    return torch.tensor([token for row in rows for token in (*row, tokenizer.eos_token_id)])


class Pretraining:
    """The training of one checkpoint.

    Args:
        recipe: Its recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(SEED)
        self.recipe, self._draws = recipe, torch.Generator().manual_seed(SEED)
        known = AutoTokenizer.from_pretrained(RECIPES["llama"].folder)
        self.tokenizer = known.train_new_from_iterator(builtin_documents("train"), VOCABULARY, show_progress=False)
        if recipe.denoises:
            sentinels = [f"<extra_id_{number}>" for number in range(16)]
            self.tokenizer.add_special_tokens({"extra_special_tokens": sentinels})
        for where in ("is_local", "local_files_only"):  # it would be saved
            self.tokenizer.init_kwargs.pop(where, None)
        self.text, self._held_out = (token_stream(self.tokenizer, part) for part in ("train", "heldout"))
        config = AutoConfig.from_pretrained(recipe.folder, vocab_size=len(self.tokenizer))
        self.model = getattr(transformers, config.architectures[0])(config)
        self.seen = 0

    def run(self) -> None:
        """Train the model."""
        recipe, model = self.recipe, self.model
        optimizer = torch.optim.AdamW(self._groups(), lr=recipe.rate, betas=(0.9, 0.98))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule)
        model.train()
        bar = tqdm(range(recipe.steps), desc=recipe.title)
        for step in bar:
            window = self._window(step)
            self.seen += window.numel()
            loss = model(**self._batch(window, self._draws)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 400 == 399:
                bar.set_postfix(held_out=f"{self.held_out_loss():.3f}")

    def _groups(self) -> list[dict[str, object]]:
        """Return weight decay for matrices, none for norms, biases and relative bias tables."""
        named = dict(self.model.named_parameters())
        tables = [named.pop(name) for name in [*named] if "relative_attention_bias" in name]
        return [
            {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
            {"params": tables, "weight_decay": 0.0, "lr": BIAS_RATE * self.recipe.rate},
        ]

    def _schedule(self, step: int) -> float:
        warmup = self.recipe.steps // 20
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.recipe.steps - warmup)))

    def _window(self, step: int) -> torch.Tensor:
        """Return random windows for one step, all of one length."""
        recipe, length, rows = self.recipe, self.recipe.window, BATCH
        if recipe.shortest < recipe.window:
            if step < SHORT_STEPS * recipe.steps:
                length, rows = length // 2, 2 * rows
            length = int(torch.randint(recipe.shortest, length + 1, (), generator=self._draws))
        starts = torch.randint(len(self.text) - length + 1, (rows,), generator=self._draws)
        return self.text[starts[:, None] + torch.arange(length)]

    def _batch(self, window: torch.Tensor, draws: torch.Generator) -> dict[str, torch.Tensor]:
        """Return the inputs of windows: as they are, or corrupted. A causal model shifts the labels itself."""
        if not self.recipe.denoises:
            return {"input_ids": window, "labels": window}
        corrupted = torch.rand(window.shape, generator=draws) < CORRUPTED
        sentinel = self.tokenizer.convert_tokens_to_ids("<extra_id_0>")
        return {"input_ids": window.masked_fill(corrupted, sentinel), "labels": window}

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss over all whole windows of the held-out text."""
        length, draws, total = self.recipe.window, torch.Generator().manual_seed(SEED), 0.0
        rows = self._held_out[: len(self._held_out) // length * length].view(-1, length)
        self.model.eval()
        for part in rows.split(BATCH):
            total += self.model(**self._batch(part, draws)).loss.item() * len(part)
        self.model.train()
        return total / len(rows)

    def save(self, minutes: float) -> None:
        """Write the model, its tokenizer and its card."""
        loss = self.held_out_loss()
        self.model.eval()
        folder = self.recipe.folder
        # Files that are still being written would break whoever loads the old checkpoint meanwhile.
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            self.model.save_pretrained(draft)
            self.tokenizer.save_pretrained(draft)
            (Path(draft) / "README.md").write_text(self._card(minutes, loss), encoding="utf-8")
            for file in Path(draft).iterdir():
                file.chmod(0o644)  # safetensors makes files that only their owner can read
                os.replace(file, folder / file.name)

    def _card(self, minutes: float, loss: float) -> str:
        recipe = self.recipe
        name = next(name for name, known in RECIPES.items() if known is recipe)
        rows = f"{BATCH} to {2 * BATCH}" if recipe.denoises else f"{BATCH}"
        return f"""# {recipe.title}

A very small `{type(self.model).__name__}` ({self.model.num_parameters():,} parameters, float32) for demos and tests. It
knows nothing worth asking; `tests/test_checkpoints.py` measures how much it uses its positions.

- Made by `python benchmarks/pretrain_tiny.py {name}`, seed {SEED}
- Task: {recipe.task}
- Text: the documentation inside Python {platform.python_version()},
  `hf_posenc.recipes.data.text.builtin_text("train")`, sha256
  `{hashlib.sha256(builtin_text("train").encode()).hexdigest()}`
- Tokens: {len(self.text):,} in the text, {self.seen:,} seen in training
  ({recipe.steps:,} steps of {rows} windows, {minutes:.1f} minutes on a CPU)
- Versions: torch {torch.__version__}, transformers {transformers.__version__}
- Held-out loss: {loss:.3f} nats per token (`builtin_text("heldout")`, windows of {recipe.window} tokens)
- Licence of the text: [PSF License](https://docs.python.org/3/license.html)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=RECIPES, help="which checkpoints to make")
    for name in parser.parse_args().models:
        training, begin = Pretraining(RECIPES[name]), time.monotonic()
        training.run()
        training.save((time.monotonic() - begin) / 60)


if __name__ == "__main__":
    main()
