"""`learned` tables of another size than the model's own: rows kept, spread over more positions, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import SAME, auto, inputs, stock, tokens
from torch import Tensor

import hf_posenc
from hf_posenc.errors import OptionError, PositionError
from hf_posenc.patches.family import first_row, table_of

TABLES = ("gpt2", "bert", "roberta")


def body(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def own_rows(model: Any) -> Tensor:
    table = table_of(body(model))
    return table.weight.detach()[first_row(table) :].clone()


def rows(model: Any) -> Tensor:
    (found,) = (
        p.detach() for name, p in model.named_parameters() if name.endswith("wpe.weight") and "hf_posenc" in name
    )
    return found


@torch.no_grad()
def forward(model: Any, architecture: str, ids: Tensor) -> Tensor:
    return model(**inputs(architecture, ids)).logits


@pytest.mark.parametrize("architecture", TABLES)
def test_a_table_that_is_extended_keeps_its_rows(architecture: str, tmp_path: Path) -> None:
    model = stock(architecture)
    own = own_rows(model)
    length, ids = len(own), tokens(architecture, 2, len(own))
    want = forward(model, architecture, ids)
    plan = hf_posenc.plan(model, "learned", num_positions=2 * length)
    assert str(plan.start) == "exact"
    assert any(f"positions {length} to {2 * length - 1} are new" in warning for warning in plan.warnings)
    hf_posenc.patch(model, "learned", num_positions=2 * length)
    assert torch.equal(rows(model)[:length], own)
    assert 0.01 < rows(model)[length:].std() < 0.03
    torch.testing.assert_close(forward(model, architecture, ids), want, **SAME)
    model.save_pretrained(tmp_path)
    loaded = auto(architecture).from_pretrained(tmp_path).eval()
    longer = tokens(architecture, 1, 2 * length)
    assert torch.equal(forward(loaded, architecture, longer), forward(model, architecture, longer))
    # The key is the size of the model's own table, which is still there: a stock model is loaded with it.
    assert loaded.config.max_position_embeddings == table_of(body(model)).num_embeddings
    with pytest.raises(PositionError, match=f"beyond the learned table of {2 * length} positions"):
        forward(loaded, architecture, tokens(architecture, 1, 2 * length + 1))
    hf_posenc.unpatch(loaded)
    assert torch.equal(own_rows(loaded), own)
    torch.testing.assert_close(forward(loaded, architecture, ids), want, **SAME)


@pytest.mark.parametrize("architecture", TABLES)
def test_a_table_that_is_interpolated_has_its_ends(architecture: str) -> None:
    model = stock(architecture)
    own = own_rows(model)
    count = 2 * len(own) - 1
    assert hf_posenc.plan(model, "learned", num_positions=count, growth="interpolate").start == "break"
    hf_posenc.patch(model, "learned", num_positions=count, growth="interpolate")
    torch.testing.assert_close(rows(model)[::2], own)
    torch.testing.assert_close(rows(model)[1::2], (own[1:] + own[:-1]) / 2)


@torch.no_grad()
def test_the_table_of_images_grows_on_its_grid(tmp_path: Path) -> None:
    model = stock("vit")
    larger = torch.randn(2, 2, 24, 24, generator=torch.Generator().manual_seed(0))
    want = model.vit(larger, interpolate_pos_encoding=True).last_hidden_state
    hf_posenc.patch(model, "learned", num_positions=37, growth="interpolate")
    torch.testing.assert_close(model.vit(larger).last_hidden_state, want, **SAME)
    model.save_pretrained(tmp_path)
    loaded = auto("vit").from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded.vit(larger).last_hidden_state, want, **SAME)
    for options in ({"num_positions": 37}, {"num_positions": 38, "growth": "interpolate"}):
        with pytest.raises(OptionError, match="no learned table that can have"):
            hf_posenc.patch(stock("vit"), "learned", init="native", **options)
