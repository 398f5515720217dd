"""The loss on long windows in pieces, against the loss with all logits at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import DECODERS, Largest, arguments, moved, stock, tokens
from peft import get_peft_model
from transformers import Trainer

import hf_posenc
from hf_posenc.recipes.training import pieces
from hf_posenc.recipes.training.distillation import Distilling, Teacher
from hf_posenc.recipes.training.pieces import Readout

CAUSAL = [*DECODERS, "gpt2"]
# Their logits are bounded after the head.
BOUNDED = ("gemma2",)


class DistillingTrainer(Distilling, Trainer):
    pass


def converted(name: str) -> Any:
    torch.manual_seed(0)
    return moved(hf_posenc.patch(stock(name), "kerple", native="keep" if name == "gpt2" else "remove"))


def in_pieces(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let a piece be five tokens, and nothing be computed at once."""
    monkeypatch.setattr(pieces, "AT_ONCE", 5 * model.config.vocab_size)
    monkeypatch.setattr(Distilling, "_at_once", None)


def batch(name: str, length: int = 21) -> dict[str, Any]:
    ids = tokens(name, 2, length)
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model: Any, folder: Path, given: dict[str, Any], **options: Any) -> tuple[Any, Any, Any]:
    """Return loss, logged loss on the text, and gradients of a step."""
    run = DistillingTrainer(model=model, args=arguments(folder), **options)
    run.current_gradient_accumulation_steps = 1
    loss = run.compute_loss(model.train(), given, num_items_in_batch=torch.tensor(31))
    loss.backward()
    slopes = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    texts = [text.detach() for text in run._text_losses]
    return loss.detach(), texts, slopes


@pytest.mark.seams
@pytest.mark.parametrize("name", CAUSAL)
def test_what_reads_the_head_alone_is_known(name: str) -> None:
    assert (Readout.of(stock(name)) is None) == (name in BOUNDED)


@pytest.mark.parametrize("name", ["t5", "bert", "vit"])
def test_other_models_have_no_readout(name: str) -> None:
    assert Readout.of(stock(name)) is None


@pytest.mark.parametrize("teaching", [{}, {"share": 1.0}, {"share": 0.4, "hidden": 3.0}])
@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in BOUNDED])
def test_a_loss_in_pieces_is_the_loss(
    name: str, teaching: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = converted(name), batch(name)
    options = {"teacher": Teacher.copy_of(model) if teaching else None, **teaching}
    whole = trained(model, tmp_path, given, **options)
    in_pieces(monkeypatch, model)
    torch.testing.assert_close(trained(model, tmp_path, given, **options), whole)


def test_all_logits_are_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = converted("llama"), batch("llama", 256)
    del given["attention_mask"]
    logits, sizes = given["labels"].numel() * model.config.vocab_size, []
    for at_once in (logits, logits // 8):
        monkeypatch.setattr(pieces, "AT_ONCE", at_once)
        with Largest() as largest:
            trained(model, tmp_path, given, teacher=Teacher.copy_of(model), share=0.5)
        sizes.append(largest.size)
    assert sizes[0] == logits > 3 * sizes[1]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_a_teacher_under_an_adapter(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_posenc.PosencLoraConfig(target_modules=[target])
    model = moved(get_peft_model(converted("llama"), config), only="lora")
    whole = trained(model, tmp_path, batch("llama"), teacher=Teacher.within(model), share=0.5)
    in_pieces(monkeypatch, model)
    found = trained(model, tmp_path, batch("llama"), teacher=Teacher.within(model), share=0.5)
    torch.testing.assert_close(found, whole)


def test_what_is_read_afterwards_are_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = converted("llama"), batch("llama")
    monkeypatch.setattr(pieces, "AT_ONCE", 5 * model.config.vocab_size)
    run = DistillingTrainer(model=model, args=arguments(tmp_path), teacher=None)
    run.compute_loss(model.train(), given)
    _, outputs = run.compute_loss(model, given, return_outputs=True)
    assert outputs.logits.shape[-1] == model.config.vocab_size
    with torch.no_grad():
        assert model.eval()(**given).logits.shape[-1] == model.config.vocab_size
    assert "forward" not in vars(model.lm_head)
    assert "_loss_function" not in vars(model)
