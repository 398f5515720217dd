"""What looks at a model leaves each module in the mode that it was in."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIRECTORIES, stock, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.patches.patch import evaluating
from hf_posenc.recipes import plots

LOOKS: dict[str, Callable[[Any], object]] = {
    "verify": hf_posenc.verify,
    "explain": lambda model: hf_posenc.explain(model, length=16),
    "plots": lambda model: plots.figures(
        model, AutoTokenizer.from_pretrained(DIRECTORIES["llama"]), what=["attention"], layers=[0], heads=[0]
    ),
}


def fail(model: Any) -> None:
    with contextlib.suppress(RuntimeError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise RuntimeError


@pytest.mark.parametrize("look", [*LOOKS.values(), fail], ids=[*LOOKS, "an error"])
def test_what_looks_at_a_model(look: Callable[[Any], object]) -> None:
    model = hf_posenc.patch(stock("llama"), "kerple").train()
    model.get_output_embeddings().eval()  # as a frozen part may be
    before = [module.training for module in model.modules()]
    look(model)
    assert [module.training for module in model.modules()] == before


def test_another_default_dtype(tmp_path: Path) -> None:
    before = hf_posenc.patch(stock("llama"), "disentangled")
    before.save_pretrained(tmp_path)
    plain, ids = stock("llama"), tokens("llama", 2, 9)
    torch.set_default_dtype(torch.float64)
    try:
        models = [hf_posenc.patch(plain, "disentangled"), AutoModelForCausalLM.from_pretrained(tmp_path)]
        outputs = [model(ids).logits for model in models]
    finally:
        torch.set_default_dtype(torch.float32)
    for model in models:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(outputs[1], before(ids).logits)
