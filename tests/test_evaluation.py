"""Perplexity by context length: the same targets at every length, for causal models and encoder-decoders."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import DIRECTORIES, stock
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc import OptionError, PositionError, ShapeError
from hf_posenc.recipes.data.collation import Denoising
from hf_posenc.recipes.data.text import builtin_text
from hf_posenc.recipes.evaluation.curve import ContextCurve, context_curve, spread_windows

VOCABULARY = 50


def small(kind: str) -> Any:
    """A small random model."""
    if kind == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape)).eval()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape)).eval()


def heldout(architecture: str) -> Tensor:
    """Text that the checkpoints have not seen."""
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES[architecture])
    found = tokenizer(builtin_text("heldout")[:60_000], add_special_tokens=False, return_tensors="pt", verbose=False)
    ids: Tensor = found["input_ids"][0]
    return ids


@pytest.fixture
def ids() -> Tensor:
    """A random text."""
    return torch.randint(VOCABULARY, (1000,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", [None, "fire"])
def test_curve_equals_a_plain_loop(kind: str, scheme: str | None, ids: Tensor) -> None:
    model = small(kind)
    if scheme:
        hf_posenc.patch(model, scheme)
    windows, targets = 5, 16
    curve = context_curve(model, ids, (16, 40, 64), windows=windows, targets=targets, batch_size=2)
    for row, window in enumerate(spread_windows(ids, 65, windows, targets=targets)):
        for column, context in enumerate(curve.contexts):
            read = window[-context - 1 : -1]
            # transformers shifts labels itself: the last target is that of a token which is not read.
            labels = torch.full((1, context + 1), -100)
            labels[0, -targets:] = window[-targets:]
            with torch.no_grad():
                logits = model(input_ids=read[None]).logits
            padded = torch.cat([logits, torch.zeros(1, 1, VOCABULARY)], dim=1)
            loss = model.loss_function(logits=padded, labels=labels, vocab_size=VOCABULARY)
            assert curve.losses[column, row].item() == pytest.approx(loss.item(), abs=1e-6)


def test_estimates(ids: Tensor) -> None:
    ours = ContextCurve((8, 16), torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64))
    theirs = ContextCurve((8, 16), ours.losses + torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 3.0]]))
    perplexity = ours.perplexity(8)
    # Student's quantile for two degrees of freedom, times the standard error of the mean loss.
    half = 4.302653 / math.sqrt(3)
    assert (perplexity.mean, perplexity.low, perplexity.high) == pytest.approx(
        (math.exp(2.0), math.exp(2.0 - half), math.exp(2.0 + half))
    )
    loss = ours.loss(8)
    assert (loss.mean, *loss.arms) == pytest.approx((2.0, half, half))
    # Windows that differ by the same amount leave no doubt about it, however different they are.
    paired = theirs.minus(ours, 8)
    assert (paired.mean, paired.low, paired.high) == (0.5, 0.5, 0.5)
    assert theirs.ratio(ours, 8).high == pytest.approx(math.exp(0.5))
    assert theirs.minus(ours, 16).arms == pytest.approx((4.302653, 4.302653))
    assert math.isnan(ContextCurve((8,), ours.losses[:1, :1]).perplexity(8).low)
    assert ContextCurve((8,), 400 * ours.losses[:1]).perplexity(8).mean == math.inf
    for paired in (ours.minus, ours.ratio):
        with pytest.raises(ShapeError, match="takes the same"):
            paired(ContextCurve((8,), ours.losses[:1, :2]), 8)
    with pytest.raises(ShapeError, match="measured were 8, 16"):
        ours.perplexity(9)


def test_more_context_helps_a_model_that_can_use_it() -> None:
    curve = context_curve(stock("llama"), heldout("llama"), (32, 128), windows=16, targets=32)
    assert curve.perplexity(128).mean < 0.95 * curve.perplexity(32).mean


@pytest.mark.parametrize("scheme", [None, "fire"])
def test_curve_of_an_encoder_decoder_equals_a_plain_loop(scheme: str | None, ids: Tensor) -> None:
    model = stock("t5")
    if scheme:
        hf_posenc.patch(model, scheme)
    corrupted: list[Tensor] = []

    def corrupt(rows: Tensor) -> Tensor:
        corrupted.append(rows.masked_fill(torch.rand(rows.shape) < 0.3, 1024))
        return corrupted[-1]

    curve = context_curve(model, ids, (16, 40, 64), windows=5, targets=16, batch_size=2, corrupt=corrupt)
    # Drawn once: a longer context adds tokens, and changes none.
    assert [rows.shape for rows in corrupted] == [(5, 64)]
    for row, window in enumerate(spread_windows(ids, 65, 5, targets=16)):
        kept = corrupted[0][row] != 1024
        assert torch.equal(corrupted[0][row][kept], window[1:][kept])
        for column, context in enumerate(curve.contexts):
            labels = window[None, -context:].clone()
            labels[:, :-16] = -100
            # The decoder reads all labels, also those that are not scored.
            written = model.prepare_decoder_input_ids_from_labels(window[None, -context:])
            with torch.no_grad():
                read = corrupted[0][row, -context:]
                loss = model(input_ids=read[None], decoder_input_ids=written, labels=labels).loss
            assert curve.losses[column, row].item() == pytest.approx(loss.item(), abs=1e-5)


def test_an_encoder_decoder_knows_what_it_was_trained_on() -> None:
    corrupt = Denoising(AutoTokenizer.from_pretrained(DIRECTORIES["t5"])).corrupt
    curve = context_curve(stock("t5"), heldout("t5"), (64, 256), windows=8, targets=32, corrupt=corrupt)
    assert curve.perplexity(64).mean < 3
    assert curve.perplexity(256).mean > 1.5 * curve.perplexity(64).mean


def test_what_is_corrupted_goes_with_an_encoder(ids: Tensor) -> None:
    with pytest.raises(OptionError, match="encoder of T5ForConditionalGeneration must not read"):
        context_curve(stock("t5"), ids, (32,), windows=2, targets=16)
    with pytest.raises(OptionError, match="LlamaForCausalLM has no encoder"):
        context_curve(small("llama"), ids, (32,), windows=2, targets=16, corrupt=lambda rows: rows)


def test_windows_overlap_in_no_target() -> None:
    ids = torch.arange(1000)
    apart = spread_windows(ids, 100, 10, targets=20)
    assert apart.unique().numel() == 1000
    # Without overlap there would be two.
    close = spread_windows(ids, 400, 31, targets=20)
    assert close.shape == (31, 400)
    assert (close.diff(dim=1) == 1).all()
    assert close[:, -20:].unique().numel() == 31 * 20
    assert (close[:, 0].diff() == 20).all()
    assert spread_windows(ids, 1000, 1, targets=20).tolist() == [ids.tolist()]
    with pytest.raises(ShapeError, match=r"32 windows of 400 tokens with 20 targets each take at least \[1020\]"):
        spread_windows(ids, 400, 32, targets=20)


def test_evaluation_leaves_the_mode_and_refuses_the_impossible(ids: Tensor) -> None:
    model = small("gpt2").train()
    context_curve(model, ids, (32,), windows=2, targets=16)
    assert model.training
    with pytest.raises(PositionError, match="cannot read 128 tokens"):
        context_curve(model, ids, (128,), windows=2, targets=16)
    with pytest.raises(ShapeError, match="at least 16 tokens"):
        context_curve(model, ids, (8, 32), windows=2, targets=16)
    with pytest.raises(ShapeError, match="take at least"):
        context_curve(model, ids, (1000,), windows=2, targets=16)
