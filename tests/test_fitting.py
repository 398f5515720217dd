"""Fitting a scheme to the model's own encoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import SAME, checkpoint, logits, stock, tokens

import hf_posenc
from hf_posenc import Geometry, NotPatchedError, OptionError, ShapeError
from hf_posenc.operands import Block, Positions
from hf_posenc.recipes.data.text import builtin_text
from hf_posenc.recipes.evaluation import context_curve
from hf_posenc.recipes.loading import load_tiny_llama
from hf_posenc.recipes.training.fit_bias import additive, fit


def patched(architecture: str, scheme: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return hf_posenc.patch(checkpoint(architecture), scheme, **options)


def text_windows(count: int) -> torch.Tensor:
    """Return windows of 128 tokens of the text that the small Llama was trained on."""
    _, tokenizer = load_tiny_llama()
    return torch.tensor(tokenizer(builtin_text("train")[:100_000])["input_ids"][: count * 128]).view(count, 128)


@pytest.mark.grid
def test_the_table_of_t5() -> None:
    for name in ("t5", "umt5"):  # the latter has a table in each layer
        ids, model = tokens(name, 2, 40), hf_posenc.patch(stock(name), "t5", init="normal", shared=name == "t5")
        found = fit(model)
        assert found.before > 0.1
        assert found.after < 1e-4
        torch.testing.assert_close(logits(model, name, ids), logits(stock(name), name, ids), **SAME)
    # What is the same in both directions, and flat from some distance on, cannot say all of it.
    for scheme, options, share in (
        ("fire", {}, 0.45),
        ("fire", {"gate": True}, 0.45),
        ("t5_clipped", {"init": "zero"}, 0.5),
    ):
        found = fit(patched("t5", scheme, **options), steps=4)
        assert found.after < share * found.spread


def test_keys_ahead_have_parameters_of_their_own_in_encoders_only() -> None:
    for scheme in ("fire", "fire_s", "kerple"):
        encoder = hf_posenc.build(
            scheme, Geometry(heads=4, kv_heads=4, head_dim=8, hidden_size=32, causal=False), directed=True
        )
        decoder = hf_posenc.build(scheme, Geometry(heads=4, kv_heads=4, head_dim=8, hidden_size=32), directed=True)
        one_sided = hf_posenc.build(scheme, Geometry(heads=4, kv_heads=4, head_dim=8, hidden_size=32))
        count = sum(p.numel() for p in one_sided.parameters())
        assert sum(p.numel() for p in encoder.parameters()) == 2 * count
        assert sum(p.numel() for p in decoder.parameters()) == count
        places = Positions(torch.arange(9)[None], torch.arange(9)[None])
        bias = encoder.bias(Block(places, reach=8), torch.float64)
        torch.testing.assert_close(bias, bias.transpose(-1, -2))  # what `score` has behind the query
        full = encoder.gated_bias(Block(places, reach=8), torch.zeros(1, dtype=torch.float64))
        torch.testing.assert_close(full.tril(), bias.tril())
        assert not torch.allclose(full.triu(1), bias.triu(1))


@pytest.mark.parametrize(
    ("scheme", "share"),
    [
        ("t5", 0.4),
        pytest.param("t5_clipped", 0.4, marks=pytest.mark.grid),
        ("fire", 0.5),
        pytest.param("kerple", 0.6, marks=pytest.mark.grid),
    ],
)
def test_a_fitted_swap_starts_much_nearer_to_a_rotary_model(scheme: str, share: float) -> None:
    """Perplexity on held-out text, without any training (measured: 205 to 51, 207 to 51, 205 to 65, 143 to 67)."""
    _, tokenizer = load_tiny_llama()
    heldout = torch.tensor(tokenizer(builtin_text("heldout")[:20_000])["input_ids"])

    def perplexity(model: Any) -> float:
        return context_curve(model, heldout, (128,), windows=8).at(128).mean

    model = patched("llama", scheme, **({"threshold": 64.0} if scheme == "fire" else {"shared": False}))
    before = perplexity(model)
    fit(model, ids=text_windows(16), steps=10)
    assert perplexity(model) < share * before


def test_fitting_leaves_the_model_as_it_was_otherwise() -> None:
    model = patched("llama", "fire").train()
    model.get_output_embeddings().eval()
    modes = [module.training for module in model.modules()]
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "hf_posenc" not in name}
    fit(model, ids=tokens("llama", 2, 32), steps=2)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_fit_that_raises_the_loss_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    """The regression succeeds, but on a text of random tokens, and the start that it found is better."""
    ids, model = text_windows(12), patched("llama", "t5_clipped", shared=False)
    good = fit(model, ids=ids)
    assert good.accepted
    assert good.losses is not None
    assert good.losses[1] < good.losses[0] - 1
    assert not caplog.records
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = fit(model, ids=torch.cat((tokens("llama", 9, 128), ids[9:])))
    assert not bad.accepted
    assert bad.losses is not None
    assert bad.losses[1] > bad.losses[0]
    assert bad.after == bad.before
    assert [record.message for record in caplog.records] == [bad.sentence]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(NotPatchedError, match="is not patched"):
        fit(stock("llama"))
    for architecture, scheme, said in (
        ("llama", "cope", r"no bias of the distance alone\. Fit one of alibi"),
        ("llama", "alibi", r"alibi has no parameters to fit.*learned_slopes=False"),
        ("llama", "fire", "Pass ids="),
        ("gpt2", "fire", "added to the inputs"),
    ):
        with pytest.raises(OptionError, match=said):
            fit(patched(architecture, scheme))
    with pytest.raises(OptionError, match="added to the inputs"):
        fit(hf_posenc.patch(stock("vit"), "fire"))
    assert {"alibi", "fire", "fire_s", "kerple", "sandwich", "t5", "t5_clipped"} == set(additive())


def test_bad_input() -> None:
    model, ids = patched("llama", "fire"), tokens("llama", 2, 32)
    for given in ({"length": 1}, {"length": -3}, {"length": 2.5}, {"steps": 0}, {"steps": "x"}):
        with pytest.raises(OptionError, match=r"expected a whole number of at least [12]"):
            fit(model, ids=ids, **given)
    for wrong, said in (
        (ids[0], "shape"),
        (ids[:, :0], "shape"),
        (ids.tolist(), "type list"),
        (ids - 10**6, "token -"),
    ):
        with pytest.raises(ShapeError, match=f"fit: ids (is of|has) .*{said}"):
            fit(model, ids=wrong)
    model.model.layers[1].self_attn.hf_posenc.requires_grad_(False)
    with pytest.raises(OptionError, match="all parameters of fire on layer 1 of the decoder are frozen"):
        fit(model, ids=ids)


def test_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is the second call of `patch` whose scheme cannot be fitted, or it is interrupted."""
    ids = tokens("llama", 2, 32)
    model = hf_posenc.patch(patched("llama", "kerple", layers=[0, 1]), "alibi", layers=[2])

    def unchanged() -> bool:
        return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OptionError, match="alibi has no parameters"):
        fit(model, ids=ids)
    assert unchanged()
    model = patched("llama", "kerple", shared=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls, step = [], torch.optim.LBFGS.step

    def interrupted(optimizer: Any, closure: Any) -> Any:
        calls.append(step(optimizer, closure))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(torch.optim.LBFGS, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model, ids=ids, steps=2)
    assert unchanged()
    assert all(parameter.grad is None for parameter in model.parameters())
