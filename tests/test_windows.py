"""A window as an option of any scheme, and hybrids of local and global layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_contracts import make, operands, run
from tiny import auto, converted, ids, outputs, stock

import hf_posenc
from hf_posenc import ExportError, OptionError, build, describe
from hf_posenc.patches.export.stock import export_stock


@pytest.mark.parametrize("name", ["kerple", "rope", "nope+gated_output", "shaw"])
def test_keys_from_the_window_on_are_hidden(name: str) -> None:
    places = torch.tensor([[0, 1, 2, 3, 7, 8, 9]])
    near = (places[0, :, None] - places[0]).abs() < 3
    whole, local = make(name, "causal", {}), make(name, "causal", {"window": 3})
    given = operands(whole, places.shape[1])
    want = run(whole, given, places, mask=near[None, None])
    torch.testing.assert_close(run(local, given, places), want, rtol=0, atol=1e-13)
    assert local.options() == {**whole.options(), "window": 3}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_local_and_global_layers(architecture: str, tmp_path: Path) -> None:
    """Generation with a cache, a checkpoint, and the stock model again."""
    layers: dict[str, Any] = {"layers": [0, 1], "window": 4, "native": "keep"}
    model = converted(architecture, "nope", **layers)
    hf_posenc.patch(model, "nope", layers=[2], native="keep")
    tokens = ids(2)
    want = outputs(stock(architecture), tokens)
    assert not torch.equal(outputs(model, tokens)[0], want[0])
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(tokens, **settings), model.generate(tokens, use_cache=False, **settings))
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(auto(architecture).from_pretrained(tmp_path), tokens)[0], outputs(model, tokens)[0])
    hf_posenc.patch(model, "nope", layers=[0, 1], native="keep", window=len(tokens[0]))  # hides nothing
    torch.testing.assert_close(outputs(model, tokens)[0], want[0])
    hf_posenc.unpatch(model)
    assert torch.equal(outputs(model, tokens)[0], want[0])


def test_a_window_within_the_trained_length_is_a_break() -> None:
    model = stock("llama")  # of 64 positions
    assert hf_posenc.plan(model, "rope", window=64).start == "exact"
    assert hf_posenc.plan(model, "rope", window=63).start == "break"
    hf_posenc.patch(model, "rope", window=8)
    with pytest.raises(ExportError, match="layer 0 of the decoder hides keys from a distance of 8 on"):
        export_stock(model, "nowhere")


@pytest.mark.parametrize("window", [0, -1, 2.0, True, "8"])
def test_a_bad_window(window: object) -> None:
    with pytest.raises(OptionError, match=r"fire: option window=.*: expected None or a distance of at least 1"):
        build("fire", hf_posenc.Geometry(heads=1, kv_heads=1, head_dim=4, hidden_size=4), window=window)
    assert "window" not in {option.name for option in describe("fire").options}
