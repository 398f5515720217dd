"""What looks at a model leaves each module in the mode that it was in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from models import DIRECTORIES, stock
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.patches.modes import evaluating
from hf_posenc.recipes import plots

LOOKS: dict[str, Callable[[Any], object]] = {
    "verify": hf_posenc.verify,
    "explain": lambda model: hf_posenc.explain(model, length=16),
    "plots": lambda model: plots.figures(
        model, AutoTokenizer.from_pretrained(DIRECTORIES["llama"]), what=["attention"], layers=[0], heads=[0]
    ),
}


def partly_trained() -> tuple[Any, list[bool]]:
    """A model whose head is in evaluation mode, as a frozen part may be."""
    model = hf_posenc.patch(stock("llama"), "kerple").train()
    model.get_output_embeddings().eval()
    return model, [module.training for module in model.modules()]


@pytest.mark.parametrize("look", LOOKS)
def test_what_looks_at_a_model(look: str) -> None:
    model, before = partly_trained()
    LOOKS[look](model)
    assert [module.training for module in model.modules()] == before


def test_also_after_an_error() -> None:
    model, before = partly_trained()

    def fail() -> None:
        assert not any(module.training for module in model.modules())
        raise RuntimeError

    with pytest.raises(RuntimeError), evaluating(model):
        fail()
    assert [module.training for module in model.modules()] == before
