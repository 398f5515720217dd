"""How much the tiny checkpoints use their positions: replacing an encoding must have something to change.

Each test compares the held-out loss with the loss after the positions are taken away or mixed up. The weights are
files in this repository, so the losses move only with the text of the running Python, by a few hundredths.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import DIRECTORIES, auto
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from hf_posenc.recipes.data.text import builtin_text

WINDOWS, CONTEXT, T5_CONTEXT = 16, 128, 64


def heldout_windows(directory: Path, length: int) -> torch.Tensor:
    """Evenly spaced windows of the held-out text, one per row."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer(builtin_text("heldout"))["input_ids"])
    step = (len(ids) - length) // WINDOWS
    return torch.stack([ids[row * step : row * step + length] for row in range(WINDOWS)])


def causal_loss(model: PreTrainedModel, window: torch.Tensor, position_ids: torch.Tensor) -> float:
    """Next-token loss under the given positions."""
    # Without an attention mask, transformers takes positions that do not count up by one for the seams between
    # packed sequences and stops attention there; the mask of ones makes the positions the only difference.
    with torch.no_grad():
        output = model(
            window,
            labels=window,
            position_ids=position_ids.expand_as(window),
            attention_mask=torch.ones_like(window),
        )
    return output.loss.item()


# Measured losses in nats (in place / all zero / shuffled):
#   llama 3.34 / 5.20 / 5.52 to 5.65
#   gpt2  3.55 / 4.41 / 4.37 to 4.39
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_decoder_needs_its_positions(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(DIRECTORIES[name]).eval()
    window = heldout_windows(DIRECTORIES[name], CONTEXT)
    positions = torch.arange(CONTEXT)
    shuffled = torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(0))
    trained = causal_loss(model, window, positions)
    assert trained < 3.8
    assert causal_loss(model, window, torch.zeros_like(positions)) > trained + 0.5
    assert causal_loss(model, window, shuffled) > trained + 0.5


def t5_and_batch() -> tuple[PreTrainedModel, torch.Tensor, torch.Tensor]:
    """The T5 with its inputs and labels for the held-out windows, in which some tokens are missing as in training."""
    directory = DIRECTORIES["t5"]
    model = AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    window = heldout_windows(directory, T5_CONTEXT)
    missing = torch.rand(window.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    sentinel = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids("<extra_id_0>")
    return model, window.masked_fill(missing, sentinel), window


# Measured losses in nats (in place / zeroed / shuffled):
#   encoder 0.75 / 5.19 / 5.45 to 6.48
#   decoder 0.75 / 3.60 / 3.13 to 4.81
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_t5_needs_its_positions(stack: str) -> None:
    model, inputs, labels = t5_and_batch()
    shuffled = torch.randperm(model.config.relative_attention_num_buckets, generator=torch.Generator().manual_seed(0))

    def loss(change: Callable[[torch.Tensor], torch.Tensor]) -> float:
        changed = copy.deepcopy(model)
        table = getattr(changed, stack).block[0].layer[0].SelfAttention.relative_attention_bias.weight
        with torch.no_grad():
            table.copy_(change(table))
            return changed(input_ids=inputs, labels=labels).loss.item()

    trained = loss(torch.clone)
    assert trained < 1.1
    assert loss(torch.zeros_like) > trained + 1.5
    assert loss(lambda table: table[shuffled]) > trained + 1.5


@pytest.mark.parametrize("name", DIRECTORIES)
def test_checkpoint_is_small_single_precision_and_complete(name: str) -> None:
    directory = DIRECTORIES[name]
    assert auto(name).from_pretrained(directory).dtype == torch.float32
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 2_000_000
    assert (directory / "README.md").is_file()


@pytest.mark.parametrize("name", DIRECTORIES)
def test_tokenizer_gives_text_back(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES[name])
    text = "  def f(x):\n\treturn 'é 日本'  # two  spaces , kept .\n\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
