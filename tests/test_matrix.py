"""Every scheme on every architecture, through everything a user does with a model.

The cases come from the registry: a new scheme is tested by existing. Nothing is skipped: tests/grid.py says which cases
run by default, with the grid, or on demand.
"""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from grid import FIRSTS, WITH_GRID
from huggingface_hub.errors import StrictDataclassError
from models import (
    ARCHITECTURES,
    SAME,
    TINY,
    auto,
    in_turn,
    inputs,
    logits,
    loss,
    moved,
    new_parameters,
    stacks_for,
    tokens,
)
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel
from transformers.cache_utils import StaticLayer

import hf_posenc
from hf_posenc.attention import blocks

# What is tested here shows in two layers as in all of a checkpoint.
stock = functools.partial(models.stock, num_hidden_layers=2)

# The strengths of the model's own encoding and of a scheme, among options.
STRENGTHS = "strengths"
# What a model makes of options, and those of `patch`; each runs through the same tests as a scheme of its own.
IN_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("alibi", {"learned_slopes": True, "shared": False}),
    ("alibi", {"native": "keep", "gate": False}),
    ("cape", {"native": "keep"}),
    ("comrope_ld", {"axes": 2, "native": "keep"}),
    ("cope", {"npos": 6, "value_gates": True, "shared": True}),
    ("disentangled", {"max_distance": 6, "share_att_key": True, "share_bias": True, "p2c": False}),
    ("fire", {"directed": True, "threshold": 6.0}),
    ("fire+log_temperature+gated_output", {"temperature": "ssmax"}),
    ("fope", {"sigma": 0.3, "clip": True, "learnable": False, "anneal": True}),
    ("fox_pro", {"native": "keep", "share_qk_norm": True, "output_gate": False}),
    ("kerple", {"layers": [0], "native": "keep", "gate": False}),
    ("rope2d", {"axes": 1, "init": "official", "theta": 50.0, "layers": "every:2"}),
    ("shaw", {"max_distance": 5, "values": False, "init": "normal", "layers": [0]}),
    ("t5", {"num_buckets": 16, "max_distance": 40, "shared": False}),
    ("tape", {"head_mix": True, "position_size": 6}),
    ("tape", {"native": "keep"}),
    ("transformer_xl", {"native": "keep", "init": "normal"}),
]
DEFAULTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in hf_posenc.schemes()]
# Options change a scheme and nothing of an architecture: each set runs on one, in turn.
IN_TURN = [(architecture, *choice) for architecture, choice in in_turn(IN_MODELS)]
# Models on the way from their own encoding to each scheme, in turn.
HALF_WAY = [
    (a, name, {"native": "keep", STRENGTHS: (0.5, 0.25)}) for a, (name, _) in in_turn(DEFAULTS) if name in FIRSTS
]
CASES = [(architecture, *choice) for architecture in ARCHITECTURES for choice in DEFAULTS] + IN_TURN


def _id(case: tuple[str, str, dict[str, Any]]) -> str:
    architecture, name, options = case
    return "-".join([architecture, name, *(f"{key}={value}" for key, value in options.items())])


# test_attend.py and the schemes' own files have all options.
PARAMETERS = [pytest.param(case, id=_id(case), marks=[pytest.mark.grid] if case[2] else []) for case in CASES]
# Options change a scheme, not what generation does to a cache, what is done with a module as a whole, or recomputation.
DEFAULT = [p for p in PARAMETERS if not p.values[0][2]]
BETWEEN = PARAMETERS + [pytest.param(case, id=_id(case), marks=pytest.mark.grid) for case in HALF_WAY]
by_scheme = pytest.mark.parametrize("case", DEFAULT, indirect=True)


def _fits(architecture: str, name: str) -> bool:
    encodes = auto(architecture) is AutoModelForMaskedLM or architecture == "vit"
    return not encodes or "bidirectional" in hf_posenc.schemes()[name].directions


# What does not generate, on tiny models of the other architectures too: the pairs in tests/grid.py.
OTHERS = [
    pytest.param((a, *c), id=_id((a, *c)))
    for c in DEFAULTS
    for a in WITH_GRID.get(c[0], ())
    if a in TINY and _fits(a, c[0])
]
_SHARED: dict[str, tuple[PreTrainedModel, str]] = {}


def everywhere(cases: list[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by cases, and by those on other architectures."""
    return pytest.mark.parametrize("case", cases + OTHERS, indirect=True)


@pytest.fixture(params=PARAMETERS)
def case(request: pytest.FixtureRequest) -> tuple[str, str, dict[str, Any]]:
    architecture, name, options = request.param
    return architecture, name, {**stacks_for(architecture, name), **options}


def _patched(case: tuple[str, str, dict[str, Any]], **config: Any) -> tuple[PreTrainedModel, str]:
    """Return a model whose new parameters are away from a start at which many schemes do nothing."""
    model, architecture = _started(case, **config)
    return moved(model), architecture


def _shared(case: tuple[str, str, dict[str, Any]]) -> tuple[PreTrainedModel, str]:
    """Return the model of `_patched` that others get, too: a test must leave it as it is."""
    if (key := repr(case)) not in _SHARED:
        _SHARED[key] = _patched(case)
    return _SHARED[key]


def _started(case: tuple[str, str, dict[str, Any]], **config: Any) -> tuple[PreTrainedModel, str]:
    architecture, name, options = case
    torch.manual_seed(1)
    given = {key: value for key, value in options.items() if key != STRENGTHS}
    model = hf_posenc.patch(stock(architecture, **config), name, **given)
    if STRENGTHS in options:
        native, scheme = options[STRENGTHS]
        hf_posenc.set_strength(model, native=native, scheme=scheme)
    return model, architecture


def _decoded(model: PreTrainedModel, ids: Tensor, new: int = 8, **options: Any) -> Tensor:
    """Generate exactly `new` tokens, greedily unless told otherwise."""
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)


@everywhere(BETWEEN)
def test_gradients_reach_every_parameter(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _patched(case)
    model.train()
    fresh = new_parameters(model)
    loss(model, architecture, tokens(architecture, 2, 21)).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None] == []
    assert all(torch.isfinite(p.grad).all() for p in fresh.values())
    assert [name for name, p in fresh.items() if not p.grad.any()] == []
    # So that they can be sharded and loaded.
    assert all(p.ndim >= 1 for p in fresh.values())
    assert {name for name, _ in model.named_buffers() if "hf_posenc" in name} <= set(model.state_dict())


def test_training_moves_every_new_parameter(case: tuple[str, str, dict[str, Any]]) -> None:
    """From the start as it is: of a product that is zero, one factor moves in the first step, the others next."""
    model, architecture = _started(case)
    model.train()
    fresh = {name: p for name, p in new_parameters(model).items() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in fresh.items()}
    optimizer = torch.optim.Adam(fresh.values(), lr=1e-2) if fresh else None
    for step in range(2 if optimizer is not None else 0):
        model.zero_grad()
        loss(model, architecture, tokens(architecture, 2, 21, seed=step)).backward()
        optimizer.step()
    assert [name for name, p in fresh.items() if torch.equal(p, before[name])] == []


@pytest.mark.parametrize("case", BETWEEN, indirect=True)
def test_caches_equal_no_cache(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _shared(case)
    ids = tokens(architecture, 2, 11)
    without = _decoded(model, ids, use_cache=False)
    for options in ({}, {"cache_implementation": "static"}):
        assert torch.equal(_decoded(model, ids, **options), without), options


@pytest.mark.generic
@by_scheme
def test_beam_search(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _shared(case)
    ids = tokens(architecture, 2, 11)
    options = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    found, want = (_decoded(model, ids, 6, use_cache=cached, **options) for cached in (True, False))
    assert torch.equal(found.sequences, want.sequences)
    # With the state of other beams, the best text may be the same, and is less likely.
    torch.testing.assert_close(found.sequences_scores, want.sequences_scores, **SAME)


@pytest.mark.generic
@by_scheme
def test_assisted_decoding(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _shared(case)
    ids = tokens(architecture, 1, 7).repeat(1, 3)  # repetition gives prompt lookup something to find
    plain = _decoded(model, ids)
    assert torch.equal(_decoded(model, ids, prompt_lookup_num_tokens=3), plain)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        # The assistant must sometimes be wrong, or nothing would ever be cropped.
        assistant.get_input_embeddings().weight.mul_(
            1 + 0.2 * torch.randn_like(assistant.get_input_embeddings().weight)
        )
    assert torch.equal(_decoded(model, ids, assistant_model=assistant), plain)
    # From transformers 5.24 on, static caches can be cropped, but not those of encoder-decoders.
    if hasattr(StaticLayer, "crop") and architecture != "t5":
        found = _decoded(model, ids, assistant_model=assistant, cache_implementation="static")
        assert torch.equal(found, plain)


def test_left_padding_equals_each_row_alone(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _shared(case)
    ids, pad = tokens(architecture, 2, 17), 6
    ids[0, :pad] = 0
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    together = logits(model, architecture, ids, mask)
    short = logits(model, architecture, ids[:1, pad:], mask[:1, pad:])
    torch.testing.assert_close(together[:1, pad:], short, **SAME)
    torch.testing.assert_close(together[1:], logits(model, architecture, ids[1:], mask[1:]), **SAME)
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    alone = _decoded(model, ids[:1, pad:], 6)
    assert torch.equal(batch[:1, -6:], alone[:, -6:])


def test_positions_may_jump_ahead(case: tuple[str, str, dict[str, Any]]) -> None:
    """Position skipping: a jump is no boundary between sequences, with a mask as without one."""
    model, architecture = _shared(case)
    ids = tokens(architecture, 2, 16)
    positions = torch.cat([torch.arange(9), torch.arange(40, 47)])[None]
    call = {**inputs(architecture, ids), "position_ids": positions}
    mask = {"attention_mask": torch.ones_like(ids)}
    if architecture == "t5":
        call["decoder_position_ids"] = positions
        mask["decoder_attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        jumped = model(**call, use_cache=False).logits
        torch.testing.assert_close(jumped, model(**call, **mask, use_cache=False).logits, **SAME)
        changed = ids.clone()
        changed[:, 0] = ids[:, 0] + 1
        call |= inputs(architecture, changed)
        difference = (model(**call, use_cache=False).logits - jumped)[:, -1].abs().max()
        # In blocks, a query sees its own and the one before, and the jump is longer.
        assert (difference > 1e-6) == ("block_length" not in case[2]), "the first token is not seen, or hidden ones are"


@everywhere(PARAMETERS)
def test_half_precision_is_as_close_as_the_stock_model(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _patched(case)
    ids = tokens(architecture, 4, 40)
    original = stock(architecture)
    for router in (*model.modules(), *original.modules()):
        if hasattr(router, "top_k") and hasattr(router, "num_experts"):
            # All experts take part: a token that goes to another one is no error of rounding.
            router.top_k = router.num_experts

    def error(candidate: PreTrainedModel, dtype: torch.dtype) -> float:
        exact = logits(candidate, architecture, ids)
        half = copy.deepcopy(candidate).to(dtype)
        assert {p.dtype for p in new_parameters(half).values()} <= {torch.float32}
        rounded = logits(half, architecture, ids)
        return float((exact - rounded).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    assert error(model, torch.bfloat16) <= 2 * error(original, torch.bfloat16)
    assert error(model, torch.float16) < 0.05


@pytest.mark.generic
@everywhere(DEFAULT)
def test_gradient_checkpointing_gives_the_same_gradients(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _patched(case)
    ids = tokens(architecture, 2, 19)
    model.train()
    loss(model, architecture, ids).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    # The new name from transformers 5.23 on, where the old one warns.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    loss(model, architecture, ids).backward()
    again = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert again.keys() == plain.keys()
    # Relative to the largest gradient: sums over layers, such as that of a shared table, come in another order.
    atol = 1e-6 * max(1.0, *(float(gradient.abs().max()) for gradient in plain.values()))
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=atol, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.generic
@pytest.mark.grid
@everywhere(DEFAULT)
def test_copies_are_independent(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _patched(case)
    ids = tokens(architecture, 2, 15)
    before = logits(model, architecture, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, architecture, ids), before)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.1)
        assert not torch.equal(logits(twin, architecture, ids), before)
        hf_posenc.unpatch(twin)
        assert torch.equal(logits(model, architecture, ids), before)


@pytest.mark.generic
@everywhere(BETWEEN)
def test_save_and_load_are_bit_equal(case: tuple[str, str, dict[str, Any]], tmp_path: Path) -> None:
    model, architecture = _patched(case)
    ids = tokens(architecture, 2, 15)
    model.save_pretrained(tmp_path)
    loaded = auto(architecture).from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert type(loaded) is type(model)
    # Weights of a mapped file may be unaligned, and products then round otherwise.
    for weight in (*loaded.parameters(), *loaded.buffers()):
        weight.data = weight.data.clone()
    assert torch.equal(logits(loaded, architecture, ids), logits(model, architecture, ids))
    assert {n: p.requires_grad for n, p in loaded.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    seen = hf_posenc.verify(loaded)
    assert [(group[0], group[1]) for group in seen.groups] == [(case[1], case[2].get("native", "remove"))]
    with pytest.raises((KeyError, ValueError, StrictDataclassError)):
        type(stock(architecture)).from_pretrained(tmp_path)


@by_scheme
def test_attentions_of_all_layers_and_their_gradients(case: tuple[str, str, dict[str, Any]]) -> None:
    model, architecture = _patched(case, attn_implementation="eager")
    ids = tokens(architecture, 2, 13)
    out = model(**inputs(architecture, ids), output_attentions=True, use_cache=False)
    stacks = [out.encoder_attentions, out.decoder_attentions] if architecture == "t5" else [out.attentions]
    seen = [weights for layers in stacks for weights in layers]
    for weights in seen + list(out.get("cross_attentions") or ()):
        weights.retain_grad()
    out.logits.square().mean().backward()
    for layers in stacks:
        assert len(layers) == model.config.num_hidden_layers
    for weights in seen:
        assert weights.shape == (2, model.config.num_attention_heads, 13, 13)
        if all(scheme.facts().sums_to_one for scheme in model.modules() if isinstance(scheme, hf_posenc.Scheme)):
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, weights.shape[1], 13))
    for weights in seen + list(out.get("cross_attentions") or ()):
        assert weights.grad is not None
        assert weights.grad.abs().sum() > 0


@everywhere(BETWEEN)
def test_backends_agree(case: tuple[str, str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, architecture = _patched(case)
    ids = tokens(architecture, 2, 37)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def both() -> list[Tensor]:
        padded = [] if architecture == "vit" else [logits(model, architecture, ids, mask)[mask.bool()]]
        return [logits(model, architecture, ids), *padded]

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        loss(model, architecture, ids).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    chosen, wanted = both(), gradients()
    monkeypatch.setattr(blocks, "_DENSE_LOGITS", 0)
    monkeypatch.setattr(blocks, "rows_per_block", lambda *sizes: 16)
    for blocked, other in zip(both(), chosen, strict=True):
        torch.testing.assert_close(blocked, other, **SAME)
    got = gradients()
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # Some gradients are zero but for rounding: a constant added to all logits changes nothing.
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    model.zero_grad()
    model.set_attn_implementation("eager")
    for eager, other in zip(both(), chosen, strict=True):
        torch.testing.assert_close(eager, other, **SAME)


@everywhere(PARAMETERS)
def test_declared_exact_starts_are_exact(case: tuple[str, str, dict[str, Any]]) -> None:
    architecture, name, options = case
    original = stock(architecture)
    plan = hf_posenc.plan(original, name, **options)
    ids = tokens(architecture, 2, 33)
    before = logits(original, architecture, ids)
    after = logits(hf_posenc.patch(original, name, **options), architecture, ids)
    moved = (after - before).abs().max()
    if plan.start_tolerance is None:
        assert moved > 1e-3
    elif plan.start_tolerance:
        assert 0 < moved < 10 * plan.start_tolerance  # logits of attention within it; those of the model follow
    else:
        torch.testing.assert_close(after, before, **SAME)
    assert plan.parameters == sum(p.numel() for p in new_parameters(original).values())


@pytest.mark.generic
@everywhere(DEFAULT)
def test_unpatch_is_bit_identical_also_after_training(case: tuple[str, str, dict[str, Any]]) -> None:
    architecture, name, options = case
    model, other = stock(architecture), stock(architecture)
    ids = tokens(architecture, 2, 15)
    before = logits(model, architecture, ids)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    flags = {key: p.requires_grad for key, p in model.named_parameters()}
    config = model.config.to_json_string()
    kinds = {key: type(module) for key, module in model.named_modules()}
    whole = set(model._no_split_modules)

    hf_posenc.patch(model, name, **options)
    assert torch.equal(logits(other, architecture, ids), before), "a second model changed"
    with torch.no_grad(), hf_posenc.disabled(model):
        assert torch.equal(logits(model, architecture, ids), before)
    loss(model, architecture, ids).backward()
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.sub_(0.1 * parameter.grad)
    assert hf_posenc.unpatch(model) is model

    assert torch.equal(logits(model, architecture, ids), before)
    assert {key: type(module) for key, module in model.named_modules()} == kinds
    assert {key: p.requires_grad for key, p in model.named_parameters()} == flags
    assert model.config.to_json_string() == config
    assert set(model._no_split_modules) == whole
    assert [module for module in model.modules() if module._forward_pre_hooks] == []
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [key for module in model.modules() for key in vars(module) if "posenc" in key] == []
    assert torch.equal(logits(other, architecture, ids), before), "a second model changed"
