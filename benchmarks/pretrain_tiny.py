"""Train the tiny checkpoints that the demo and the tests run on.

Nothing is downloaded: the text is Python's own documentation (`hf_posenc.recipes.data.text`), the tokenizer is
trained on it too, and a CPU with two cores needs some minutes per model.

    python benchmarks/pretrain_tiny.py llama    # writes hf_posenc/tiny_llama/
    python benchmarks/pretrain_tiny.py gpt2     # writes tests/checkpoints/gpt2/
    python benchmarks/pretrain_tiny.py t5       # writes tests/checkpoints/t5/
    python benchmarks/pretrain_tiny.py all

Llama and GPT-2 see at most 128 positions while training and T5 at most 64, so they show what happens beyond them.
"""

import argparse
import hashlib
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_posenc.recipes.data.text import builtin_documents, builtin_text

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
CONTEXT = 128
BATCH = 32
VOCAB = 1024
EOS, PAD = "<|endoftext|>", "<pad>"

# Denoising for T5: the encoder reads a window in which some tokens are replaced by the first sentinel, and the decoder
# writes the whole window. To copy the next token, the decoder must find its place in the source, and only the
# encoder's positions say which token follows which there. With spans cut out and only these to be written, as T5 was
# first trained, a model of this size leaves its encoder's positions unused.
SENTINELS = 16
T5_WINDOW, T5_SHORTEST = 64, 16
CORRUPTED = 0.15

# Copying is learnt sooner from short windows, so training starts with this share of its steps on windows of at most
# half the length, twice as many at a time.
SHORT_STEPS = 0.4
# Relative bias tables start near zero and must reach values of several units, so they get this many times the
# learning rate of the other parameters.
BIAS_RATE = 10.0

Batch = dict[str, torch.Tensor]


def train_tokenizer(sentinels: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the training documents.

    Args:
        sentinels: Number of `<extra_id_N>` tokens to add after the vocabulary, to mark missing text.

    Returns:
        The tokenizer, ready for `save_pretrained`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(builtin_documents("train"), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[f"<extra_id_{number}>" for number in range(sentinels)],
        clean_up_tokenization_spaces=False,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """Tokenize documents into one long row of token ids, with the end-of-text token after each document.

    Args:
        tokenizer: The tokenizer.
        documents: The texts.

    Returns:
        A one-dimensional tensor of token ids.
    """
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document, add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids)


def windows(stream: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Cut windows of `length` tokens out of a stream, one row per start."""
    return stream[starts[:, None] + torch.arange(length)]


def causal_batch(window: torch.Tensor, tokenizer: PreTrainedTokenizerFast, rng: torch.Generator) -> Batch:
    """Next-token prediction: the model shifts the labels itself."""
    return {"input_ids": window, "labels": window}


def denoising_batch(window: torch.Tensor, tokenizer: PreTrainedTokenizerFast, rng: torch.Generator) -> Batch:
    """Denoising: some tokens of the input become the sentinel, and the labels are the window as it was."""
    sentinel = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    corrupted = torch.rand(window.shape, generator=rng) < CORRUPTED
    return {"input_ids": window.masked_fill(corrupted, sentinel), "labels": window}


def llama(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Llama with rotary positions and grouped-query attention."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=224,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def gpt2(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A GPT-2 with a learned table of 128 absolute positions."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=CONTEXT,
            n_embd=96,
            n_layer=4,
            n_head=4,
            n_inner=264,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def t5(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A T5 with bucketed relative biases in its encoder and its decoder."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=96,
            d_kv=24,
            d_ff=192,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=128,
            dropout_rate=0.0,
            feed_forward_proj="relu",
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made.

    Attributes:
        build: Makes the untrained model for a tokenizer.
        batch: Turns windows of tokens into the model's inputs and labels.
        shortest: Tokens of the shortest windows in training.
        window: Tokens of the longest windows in training, and of all windows in the held-out loss.
        sentinels: Sentinel tokens that the tokenizer needs.
        steps: Optimizer steps.
        learning_rate: Peak learning rate.
        directory: Where the checkpoint goes.
        title: Title of the model card.
    """

    build: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    batch: Callable[[torch.Tensor, PreTrainedTokenizerFast, torch.Generator], Batch]
    shortest: int
    window: int
    sentinels: int
    steps: int
    learning_rate: float
    directory: Path
    title: str


RECIPES = {
    "llama": Recipe(llama, causal_batch, CONTEXT, CONTEXT, 0, 3000, 4e-3, ROOT / "hf_posenc/tiny_llama", "Tiny Llama"),
    "gpt2": Recipe(gpt2, causal_batch, CONTEXT, CONTEXT, 0, 1200, 3e-3, ROOT / "tests/checkpoints/gpt2", "Tiny GPT-2"),
    "t5": Recipe(
        t5, denoising_batch, T5_SHORTEST, T5_WINDOW, SENTINELS, 1500, 4e-3, ROOT / "tests/checkpoints/t5", "Tiny T5"
    ),
}


def training_windows(recipe: Recipe, step: int, stream: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Random windows for one step, all of one length."""
    length, rows = recipe.window, BATCH
    if recipe.shortest < recipe.window:
        if step < SHORT_STEPS * recipe.steps:
            length, rows = length // 2, 2 * rows
        length = int(torch.randint(recipe.shortest, length + 1, (), generator=rng))
    return windows(stream, torch.randint(len(stream) - length + 1, (rows,), generator=rng), length)


def heldout_loss(
    model: PreTrainedModel, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, stream: torch.Tensor
) -> float:
    """Mean loss over all whole windows of the held-out stream."""
    starts = torch.arange(0, len(stream) - recipe.window + 1, recipe.window)
    rng = torch.Generator().manual_seed(SEED)
    total = 0.0
    model.eval()
    with torch.no_grad():
        for part in starts.split(BATCH):
            batch = recipe.batch(windows(stream, part, recipe.window), tokenizer, rng)
            total += model(**batch).loss.item() * len(part)
    model.train()
    return total / len(starts)


def optimizer_groups(model: PreTrainedModel, learning_rate: float) -> list[dict[str, object]]:
    """Parameter groups for AdamW: weight decay for matrices, none for norms, biases and relative bias tables."""
    tables = [p for name, p in model.named_parameters() if "relative_attention_bias" in name]
    others = [p for name, p in model.named_parameters() if "relative_attention_bias" not in name]
    return [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        {"params": tables, "weight_decay": 0.0, "lr": BIAS_RATE * learning_rate},
    ]


def pretrain(recipe: Recipe) -> None:
    """Train one checkpoint and write it, its tokenizer and its model card.

    Args:
        recipe: Recipe of the checkpoint.
    """
    torch.manual_seed(SEED)
    rng = torch.Generator().manual_seed(SEED)
    tokenizer = train_tokenizer(recipe.sentinels)
    train = token_stream(tokenizer, builtin_documents("train"))
    heldout = token_stream(tokenizer, builtin_documents("heldout"))
    model = recipe.build(tokenizer)
    optimizer = torch.optim.AdamW(
        optimizer_groups(model, recipe.learning_rate), lr=recipe.learning_rate, betas=(0.9, 0.98)
    )
    warmup = recipe.steps // 20

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (recipe.steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    seen = 0
    began = time.monotonic()
    model.train()
    bar = tqdm(range(recipe.steps), desc=recipe.title)
    for step in bar:
        window = training_windows(recipe, step, train, rng)
        seen += window.numel()
        loss = model(**recipe.batch(window, tokenizer, rng)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
        if step % 400 == 399:
            tqdm.write(f"step {step + 1}: held-out {heldout_loss(model, recipe, tokenizer, heldout):.3f}")
    minutes = (time.monotonic() - began) / 60
    loss = heldout_loss(model, recipe, tokenizer, heldout)
    model.eval()
    # Files that are still being written would break whoever loads the old checkpoint meanwhile.
    recipe.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=recipe.directory.parent) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        card = model_card(recipe, model, len(train), seen, minutes, loss)
        (Path(folder) / "README.md").write_text(card, encoding="utf-8")
        for file in Path(folder).iterdir():
            file.chmod(0o644)  # safetensors makes files that only their owner can read
            os.replace(file, recipe.directory / file.name)
    tqdm.write(f"{recipe.directory}: held-out loss {loss:.3f} after {minutes:.1f} minutes")


def model_card(
    recipe: Recipe, model: PreTrainedModel, stream_tokens: int, seen: int, minutes: float, loss: float
) -> str:
    """The README that says how a checkpoint was made."""
    name = next(name for name, known in RECIPES.items() if known is recipe)
    text = hashlib.sha256(builtin_text("train").encode()).hexdigest()
    rows = f"{BATCH}"
    if recipe.batch is denoising_batch:
        task = (
            f"denoising: the encoder reads a window in which {CORRUPTED:.0%} of the tokens are replaced by\n"
            f"  `<extra_id_0>`, the decoder writes the whole window; {recipe.shortest} to {recipe.window // 2} tokens"
            f" in the first {SHORT_STEPS:.0%} of the\n"
            f"  steps, {recipe.shortest} to {recipe.window} after"
        )
        rows = f"{BATCH} to {2 * BATCH}"
    else:
        task = f"next-token prediction on windows of {CONTEXT} tokens"
    return f"""# {recipe.title}

A very small `{type(model).__name__}` ({model.num_parameters():,} parameters, float32) for demos and tests. It
knows nothing worth asking; `tests/test_checkpoints.py` measures how much it uses its positions.

- Made by `python benchmarks/pretrain_tiny.py {name}`, seed {SEED}
- Task: {task}
- Text: the documentation inside Python {platform.python_version()},
  `hf_posenc.recipes.data.text.builtin_text("train")`, sha256
  `{text}`
- Tokens: {stream_tokens:,} in the text, {seen:,} seen in training
  ({recipe.steps:,} steps of {rows} windows, {minutes:.1f} minutes on a CPU)
- Versions: torch {torch.__version__}, transformers {transformers.__version__}
- Held-out loss: {loss:.3f} nats per token (`builtin_text("heldout")`, windows of {recipe.window} tokens)
- Licence of the text: [PSF License](https://docs.python.org/3/license.html)
"""


def main() -> None:
    """Read the command line and train what it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*RECIPES, "all"], help="which checkpoint to make")
    chosen = parser.parse_args().model
    for name, recipe in RECIPES.items():
        if chosen in (name, "all"):
            pretrain(recipe)


if __name__ == "__main__":
    main()
