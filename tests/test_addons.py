"""Add-ons: alone, with every other scheme, and in a model."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import FIRSTS
from test_contracts import make, operands, run
from tiny import auto, converted, ids, stock
from transformers import AutoModelForSeq2SeqLM

import hf_posenc
from hf_posenc import OptionError, registry, schemes
from hf_posenc.attention import attend, executors
from hf_posenc.errors import ExportError
from hf_posenc.operands import Block, Geometry, Positions, Tokens

# One module serves all layers.
ONE_FOR_ALL = {"fire_s", "learned", "sinusoidal"}
BASES = [
    (name, direction)
    for name, info in schemes().items()
    if name in FIRSTS and info.family != "add-on" and name not in ONE_FOR_ALL
    for direction in info.directions
]


@pytest.mark.parametrize(("base", "direction"), BASES)
def test_at_its_start_an_add_on_changes_nothing(base: str, direction: str) -> None:
    places = torch.tensor([[0, 1, 2, 5, 9]])
    alone = make(base, direction, {})
    for addon in ("gated_output", "kv_shift", "log_temperature", "near"):
        if direction not in schemes()[addon].directions:
            continue
        both = registry.build(f"{base}+{addon}", alone.geometry).double()
        own = {key: value for key, value in alone.state_dict().items() if not key.startswith("common.")}
        both.base.load_state_dict(own)
        both.common = alone.common
        given = operands(alone, 5)
        assert torch.equal(*(run(each, given, places, executor="dense") for each in (both, alone)))
        assert addon == "near" or executors(both) == executors(alone)


def test_kv_shift_mixes_each_key_and_value_with_those_of_the_token_before() -> None:
    """The paper's equations in loops: padding between tokens is passed over, and rows may hold several sequences."""
    geometry = Geometry(heads=4, kv_heads=2, head_dim=3, hidden_size=12, causal=True)
    scheme = registry.build("kv_shift", geometry).double()
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.normal_()
    places = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 1, 2]])
    real = torch.tensor([[True, True, False, True, True, True], [False, True, True, True, True, True]])
    before = ((None, 0, 1, 1, 3, 4), (None, None, 1, None, 3, 4))
    q, k, v = (torch.randn(2, heads, 6, 3, dtype=torch.float64) for heads in (4, 2, 2))
    made = scheme.project(Tokens(positions=Positions(places, places), real=real), q, k, v)
    assert made.q is q
    for got, x, (here, there) in (
        (made.k, k, scheme.get_parameter("key_shift")),
        (made.v, v, scheme.get_parameter("value_shift")),
    ):
        for row, head, slot in itertools.product(range(2), range(2), range(6)):
            earlier = before[row][slot]
            want = here[head] * x[row, head, slot]
            if earlier is not None:
                want = want + there[head] * x[row, head, earlier]
            if real[row, slot]:
                torch.testing.assert_close(got[row, head, slot], want)


def test_kv_shift_acts_before_the_rotation_of_another_scheme() -> None:
    geometry = Geometry(heads=2, kv_heads=1, head_dim=4, hidden_size=8, causal=True)
    both, rope = (registry.build(name, geometry).double() for name in ("rope+kv_shift", "rope"))
    with torch.no_grad():
        both.get_parameter("parts.1.key_shift").copy_(torch.tensor([[0.5], [2.0]]))
    tokens = Tokens(positions=Positions(*[torch.arange(5)[None]] * 2))
    q, k, v = (torch.randn(1, heads, 5, 4, dtype=torch.float64) for heads in (2, 1, 1))
    mixed = 0.5 * k + 2.0 * torch.cat((torch.zeros_like(k[:, :, :1]), k[:, :, :-1]), dim=2)
    torch.testing.assert_close(both.project(tokens, q, k, v).k, rope.project(tokens, q, mixed, v).k)


@pytest.mark.parametrize("addon", ["near", "first_key", "near+first_key"])
@pytest.mark.parametrize(("base", "direction"), BASES)
def test_offsets_join_any_scheme_on_every_executor(base: str, direction: str, addon: str) -> None:
    scheme = registry.build(f"{base}+{addon}", make(base, direction, {}).geometry).double()
    length, places = 40, torch.arange(40)[None]
    given = operands(scheme, length)
    alone = run(scheme, given, places, executor="dense")
    with torch.no_grad():
        for index in range(1, 2 + addon.count("+")):
            scheme.get_parameter(f"parts.{index}.offsets").normal_()
    results = []
    for executor in executors(scheme):
        output = run(scheme, given, places, executor=executor)
        results.append([output, *torch.autograd.grad(output.square().sum(), [*scheme.parameters()], allow_unused=True)])
    assert not torch.allclose(results[0][0], alone)
    for one in results[1:]:
        torch.testing.assert_close(one, results[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("base", "direction"), BASES)
def test_the_first_key_of_a_text_keeps_its_logit(base: str, direction: str) -> None:
    scheme = registry.build(f"{base}+first_key", make(base, direction, {}).geometry).double()
    with torch.no_grad():
        offsets = scheme.get_parameter("parts.1.offsets").normal_()
    places = torch.tensor([[0, 1, 2, 0, 1]])  # two texts
    q, k, v, hidden = operands(scheme, 5)
    tokens = Tokens(positions=Positions(places, places), hidden=hidden, common=scheme.common)
    there = scheme.project(tokens, q, k, v)
    block = Block(tokens.positions, reach=2, state=there.state, own=there.state, tables=there.tables)
    logits, keys = torch.randn(q.shape[0], q.shape[1], 5, 5).double(), scheme.recall(there.k, there.state)
    got, alone = (part.score(logits, there.q, keys, block) for part in (scheme, scheme.base))
    first = places[0] == 0
    assert torch.equal(got[..., first], logits[..., first] + offsets[:, None, None])
    assert torch.equal(got[..., ~first], alone[..., ~first])


@pytest.mark.parametrize("base", ["alibi", "fox", "kerple", "fire"])
def test_a_first_key_far_away_leaves_finite_logits_in_float16(base: str) -> None:
    """Channels hold what it lacks, also where it is no longer among the keys; float16 ends at 65,504."""
    geometry = Geometry(heads=8, kv_heads=4, head_dim=64, hidden_size=16, causal=True, max_positions=2**16)
    scheme, length = registry.build(f"{base}+first_key", geometry), 64
    if base == "fox":
        with torch.no_grad():
            scheme.get_parameter("parts.0.fgate_proj.bias").fill_(-300.0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 64).half() for heads in (8, 4, 4))
    places = torch.arange(length) + torch.tensor([[65_000], [40_000]])
    at = {"query_positions": places, "key_positions": places, "hidden": torch.randn(2, length, 16).half()}
    want = attend(scheme, q, k, v, executor="dense", **at)
    for executor in executors(scheme):
        torch.testing.assert_close(attend(scheme, q, k, v, executor=executor, **at), want, rtol=0, atol=0.01)


def test_no_stock_model_spares_the_first_key(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'t5\+first_key' on layer 0 .* leaves the first key without t5"):
        hf_posenc.export_stock(hf_posenc.patch(stock("t5"), "t5+first_key"), tmp_path / "out")


def test_near_offsets_are_exported_with_the_table_or_refused(tmp_path: Path) -> None:
    def moved_near(architecture: str, name: str) -> Any:
        model = hf_posenc.patch(stock(architecture), name)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("parts.1.offsets"):
                    parameter.fill_(0.5)
        return model

    model, inputs = moved_near("t5", "t5+near"), {"input_ids": ids(2), "decoder_input_ids": ids(2)}
    hf_posenc.export_stock(model, tmp_path / "out")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    assert not torch.allclose(loaded(**inputs).logits, stock("t5")(**inputs).logits, atol=1e-3)
    with pytest.raises(ExportError, match="adds numbers to the logits that no stock model has"):
        hf_posenc.export_stock(moved_near("llama", "rope+near"), tmp_path / "other")


def test_the_temperature_multiplies_queries_after_any_projection() -> None:
    name, places = "rope+log_temperature", torch.tensor([[0, 1, 2, 5, 9]])
    scheme = make(name, "causal", {"temperature": "ssmax", "slope": 0.5})
    q, k, v, hidden = operands(scheme, 5)
    tokens = Tokens(positions=Positions(places, places), hidden=hidden)
    there, turned = scheme.project(tokens, q, k, v), make("rope", "causal", {}).project(tokens, q, k, v)
    slopes = scheme.get_parameter("parts.1.slopes").double()
    torch.testing.assert_close(there.q, turned.q * slopes[:, None, None] * (places + 1).double().log()[..., None])
    assert torch.equal(there.k, turned.k)


def test_a_sink_beside_a_bias() -> None:
    """With a bias, and on the blocks, whose backward pass is their own."""
    scheme, places = make("kerple+attention_sinks", "causal", {}), torch.arange(9)[None]
    assert executors(scheme) == ("dense", "blocks")
    results = []
    for executor in ("dense", "blocks"):
        output = run(scheme, operands(scheme, 9), places, executor=executor)
        results.append([output, *torch.autograd.grad(output.square().sum(), list(scheme.parameters()))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    moved = registry.build("kerple+attention_sinks", scheme.geometry, sink_start=-40.0).double()
    moved.base.load_state_dict(scheme.base.state_dict())
    plain = make("kerple", "causal", {})
    plain.load_state_dict(scheme.base.state_dict())
    given = operands(scheme, 9)
    torch.testing.assert_close(run(moved, given, places), run(plain, given, places), rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_a_model_with_add_ons(architecture: str, tmp_path: Path) -> None:
    name = "kerple+log_temperature+gated_output+attention_sinks"
    model = converted(architecture, name, moved=True, layers=[0, 2])
    record = model.config.posenc["groups"][0]
    assert record["scheme"] == name
    assert "shared" not in next(iter(record["stacks"].values()))["options"]
    tokens = ids(2)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(tokens, **settings), model.generate(tokens, use_cache=False, **settings))
    model.save_pretrained(tmp_path)
    loaded = auto(architecture).from_pretrained(tmp_path)
    inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if architecture == "t5" else {})}
    want = model(**inputs).logits
    assert torch.equal(loaded(**inputs).logits, want)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**inputs).logits, want)
    hf_posenc.unpatch(model)
    assert torch.equal(model(**inputs).logits, stock(architecture)(**inputs).logits)


def test_add_ons_start_as_the_other_scheme_does() -> None:
    model = stock("llama")
    assert hf_posenc.plan(model, "rope+log_temperature+gated_output").start == "exact"
    assert hf_posenc.plan(model, "rope+attention_sinks").start == "break"
    assert hf_posenc.plan(model, "kerple+gated_output", native="keep").start == "exact with native kept"
    assert "exact on models with rotary encoding" in str(hf_posenc.describe("rope+gated_output"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("alibi+kerple", "kerple is no add-on to another scheme. These are: attention_sinks, first_key, gated_output"),
        ("stick_breaking+attention_sinks", "two of its parts replace the softmax"),
        ("rope+gated_output+gated_output", "two of its parts have an option 'gate_per'"),
        ("learned+gated_output", "learned is one module for all layers"),
        ("sinusoidal+gated_output", "sinusoidal is one module for all layers"),
        ("fire_s+gated_output", "fire_s: option shared=False: expected True or None"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, why: str) -> None:
    model = stock("llama")
    with pytest.raises(OptionError, match=why):
        hf_posenc.patch(model, name)
    assert not hasattr(model.config, "posenc")
