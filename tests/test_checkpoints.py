"""How much the tiny checkpoints use their positions: replacing an encoding must have something to change.

The held-out loss is compared with the loss after the positions are mixed up. The weights are files in this repository,
so the losses move only with the text of the running Python, by a few hundredths.
"""

from typing import Any

import pytest
import torch
from models import DIRECTORIES, auto
from transformers import AutoTokenizer

from hf_posenc.recipes.data.text import builtin_text

WINDOWS = 16


# Measured losses in nats, of windows of 128 tokens (64 for T5):
#   llama 3.34, shuffled 5.52 to 5.65; gpt2 3.55, 4.37 to 4.39; t5 0.75, encoder 5.45 to 6.48, decoder 3.13 to 4.81
@pytest.mark.slow  # these files do not change
@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_checkpoint_needs_its_positions(name: str) -> None:
    context = 64 if name == "t5" else 128
    model, tokenizer = auto(name).from_pretrained(DIRECTORIES[name]), AutoTokenizer.from_pretrained(DIRECTORIES[name])
    assert model.dtype == torch.float32
    ids = torch.tensor(tokenizer(builtin_text("heldout"))["input_ids"])
    step = (len(ids) - context) // WINDOWS
    window = torch.stack([ids[row * step : row * step + context] for row in range(WINDOWS)])
    draw = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def loss(**inputs: Any) -> float:
        return model(**{"input_ids": window, "labels": window, **inputs}).loss.item()

    if name != "t5":
        # A mask of ones makes the positions the only difference, see "Explicit positions" in docs/decisions.md.
        mask, positions = torch.ones_like(window), torch.randperm(context, generator=draw).expand_as(window)
        assert loss(attention_mask=mask) < 3.8
        assert loss(attention_mask=mask, position_ids=positions) > loss(attention_mask=mask) + 0.5
        return
    # In the inputs some tokens are missing, as in training.
    missing = torch.rand(window.shape, generator=draw) < 0.15
    inputs = window.masked_fill(missing, tokenizer.convert_tokens_to_ids("<extra_id_0>"))
    trained = loss(input_ids=inputs)
    assert trained < 1.1
    for stack in (model.encoder, model.decoder):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data
        kept = table.clone()
        table.copy_(kept[torch.randperm(len(kept), generator=draw)])
        assert loss(input_ids=inputs) > trained + 1.5
        table.copy_(kept)
