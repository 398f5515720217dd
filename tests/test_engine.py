"""The executors for long sequences: against the dense reference across many blocks, their choice, their limits."""

import contextlib
import functools
from dataclasses import replace

import models
import pytest
import torch
from grid import once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hf_posenc
from hf_posenc import (
    Geometry,
    NotPatchedError,
    OptionError,
    Positions,
    Scheme,
    ShapeError,
    attend,
    attention,
    build,
    schemes,
)
from hf_posenc.attention import EXECUTORS, Call, Mask, channels, executors
from hf_posenc.attention import blocks as blocks_module
from hf_posenc.attention.cpu import kernel
from hf_posenc.attention.once import Once
from hf_posenc.operands import Tokens

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 6, 11
FORMS = {
    "alibi": {"learned_slopes": True, "gate": True},
    "cope": {"npos": 9},
    "fire": {"threshold": 70.0},
    "shaw": {"max_distance": 5},
    "stick_breaking": {"remainder": "head_bias"},
    "t5": {"max_distance": 50},
}


def make(name: str, *, causal: bool = True, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, **options) -> Scheme:
    sizes = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": head_dim, "hidden_size": HIDDEN, "max_positions": 64}
    torch.manual_seed(0)
    return models.moved(build(name, Geometry(causal=causal, **sizes), **{**FORMS.get(name, {}), **options}), 0.3)


# Vectors per distance that end near, far, not at all, or on one side only.
PRODUCTS = [
    ("transformer_xl", {}),
    ("transformer_xl", {"clamp_len": 40}),
    ("transformer_xl", {"untie": True, "clamp_len": 128}),
    ("disentangled", {"max_distance": 1}),
    ("disentangled", {"max_distance": 40}),
    ("disentangled", {"max_distance": 170, "buckets": 16}),
    ("disentangled", {"max_distance": 64, "p2c": False}),
    ("disentangled", {"max_distance": 65, "c2p": False}),
    ("inkling", {"extent": 64}),
]
FAST = [
    (name, direction, {}, executor)
    for name, info in schemes().items()
    for direction in info.directions
    for executor in executors(make(name, causal=direction == "causal"))
    if executor in ("channels", "fused", "locality")
]
FAST += [(name, "causal", options, "fused") for name, options in PRODUCTS]
# One scheme for each form of a bias, and for each kind of locality.
FORM_OF_EACH = [
    ("kerple", "fused"), ("fire", "fused"), ("fox", "channels"), ("disentangled", "fused"), ("cope", "locality"),
    ("stick_breaking", "locality"), ("shaw", "locality"),
]  # fmt: skip
# One scheme for each backward pass of our own.
SOME = [
    ("kerple", "fused"),
    ("grape_a", "channels"),
    ("cope", "locality"),
    ("stick_breaking", "locality"),
    ("cope", "blocks"),
]
BY_BLOCKS = ["kerple", "cape", "cope", "fox_pro", "tape", "transformer_xl", "attention_sinks"]
every_form = pytest.mark.parametrize(("name", "executor"), FORM_OF_EACH)


def left_padded(length: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, : length // 3] = False
    return (mask.cumsum(-1) - 1).clamp_min(0), mask


def packed(length: int) -> tuple[Tensor, Tensor]:
    first = length // 3
    places = torch.cat((torch.arange(first), torch.arange(length - first)))[None]
    number = (torch.arange(length) >= first)[None]
    return places, (number[:, :, None] == number[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()


def skipped(length: int) -> tuple[Tensor, None]:
    return torch.cat((torch.arange(length // 2), 900 + torch.arange(length - length // 2)))[None], None


def skipped_apart(length: int) -> tuple[Tensor, Tensor]:
    first, _ = skipped(length)
    second = torch.cat((torch.arange(length // 5), 40 + torch.arange(length - length // 5)))[None]
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, :7] = False
    return torch.cat((first, second)), mask


def plain(length: int) -> tuple[Tensor, None]:
    return torch.arange(length)[None], None


def draw(length: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values."""
    return [torch.randn(batch, heads, length, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def on(places: Tensor, executor: str | None = None, **others: object) -> dict[str, object]:
    """Arguments of `attend`."""
    return {"query_positions": places, "key_positions": places, "executor": executor, **others}


def one_attention(
    scheme: Scheme,
    executor: str | None,
    places: Tensor,
    mask: Tensor | None,
    *,
    queries: int | None = None,
    dtype: torch.dtype = torch.float64,
    autocast: bool = False,
    device: str = "cpu",
    rounded: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Output and gradients of the same random call on the CPU, those of queries that are padding left out.

    Operands may be `rounded` to another dtype first.
    """
    geometry, length = scheme.geometry, places.shape[1]
    queries = queries or length
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(rounded or dtype).to(device, dtype).requires_grad_()

    q = random(2, geometry.heads, queries, geometry.head_dim)
    k, v = (random(2, geometry.kv_heads, length, geometry.head_dim) for _ in range(2))
    hidden, weight = random(2, length, HIDDEN), random(*q.shape).detach()
    places = places.to(device)
    if mask is not None:
        mask = mask.to(device)
        if mask.ndim == 2:
            weight = weight * mask[:, None, length - queries :, None]
        else:
            mask = (mask if geometry.causal else mask | mask.mT)[:, length - queries :]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        at = {"query_positions": places[:, length - queries :], "key_positions": places}
        output = attend(scheme, q, k, v, **at, hidden=hidden, mask=mask, executor=executor)
    inputs = {"q": q, "k": k, "v": v, "hidden": hidden, **dict(scheme.named_parameters())}
    grads = torch.autograd.grad(output, list(inputs.values()), weight.to(output.dtype), allow_unused=True)
    found = {name: torch.zeros(()) if g is None else g.cpu() for name, g in zip(inputs, grads, strict=True)}
    return {"output": (output.detach() * weight.ne(0)).cpu(), **found}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        # Gradients that are sums of many numbers of both signs may be next to nothing themselves.
        atol = tolerance * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            got[name].double(), expected.double(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def check(scheme: Scheme, executor: str, places: Tensor, mask: Tensor | None, **call) -> None:
    got, want = (one_attention(scheme, which, places, mask, **call) for which in (executor, "dense"))
    compare(got, want, tolerance=1e-9)


@pytest.mark.parametrize(
    ("layout", "groups"),
    [(plain, 1), (left_padded, 2), (packed, 4), (skipped, 2), (skipped_apart, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize(("name", "direction", "options", "executor"), FAST, ids=str)
def test_equals_the_reference_over_many_blocks(
    name: str, direction: str, options: dict, executor: str, layout, groups: int
) -> None:
    # More than one block of 256 forwards, of 128 and of 64, none of them full.
    check(make(name, causal=direction == "causal", kv_heads=groups, **options).double(), executor, *layout(270))


def compare_errors(got: dict[str, Tensor], want: dict[str, Tensor], exact: dict[str, Tensor], slack: float) -> None:
    """Both against float64, by the rms of the error: in half precision single numbers may fall to either side."""
    for what, expected in exact.items():
        size = max(1.0, float(expected.square().mean().sqrt()))
        mine, reference = (float((x[what].double() - expected).square().mean().sqrt()) for x in (got, want))
        assert mine <= 2 * reference + slack * size, what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [plain, skipped], ids=lambda f: f.__name__)
@every_form
def test_is_as_exact_as_the_reference_in_lower_precision(name: str, executor: str, layout, dtype: torch.dtype) -> None:
    exact = one_attention(make(name).double(), "dense", *layout(140))
    got, want = (one_attention(make(name), which, *layout(140), dtype=dtype) for which in (executor, "dense"))
    compare_errors(got, want, exact, slack={torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "executor"), [*SOME, ("cope", "dense"), ("liere", "sdpa")])
def test_gradient_checkpointing_around_any_executor(name: str, executor: str, reentrant: bool) -> None:
    scheme, inputs = make(name), [x.requires_grad_() for x in draw(150)]
    call = functools.partial(attend, scheme, **on(plain(150)[0], executor))

    def gradients(output: Tensor) -> list[Tensor]:
        leaves = [*inputs, *scheme.parameters()]
        for x in leaves:
            x.grad = None
        output.square().sum().backward()
        return [x.grad for x in leaves if x.grad is not None]

    want, got = gradients(call(*inputs)), gradients(checkpoint(call, *inputs, use_reentrant=reentrant))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["alibi", "cope", "rope"])
def test_a_mask_that_is_added_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "_DENSE_LOGITS", 0)
    scheme, operands = make(name), draw(70)
    added = torch.randn(1, HEADS, 70, 70).masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril(), -1e9)

    def gradient(executor: str | None) -> Tensor:
        mask = added.clone().requires_grad_()
        output = attend(scheme, *operands, **on(plain(70)[0], executor, mask=mask))
        (found,) = torch.autograd.grad(output.square().sum(), mask)
        return found

    torch.testing.assert_close(gradient(None), gradient("dense"), atol=1e-4, rtol=1e-4)
    with pytest.raises(OptionError, match="'blocks' has no gradient for a mask"):
        gradient("blocks")


@pytest.mark.parametrize("executor", ["blocks", "locality"])
def test_parameters_that_change_before_the_backward_pass_are_noticed(executor: str) -> None:
    scheme = make("cope")
    output = attend(scheme, *draw(150), **on(plain(150)[0], executor))
    with torch.no_grad():
        scheme.pos_emb.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from(FAST),
    length=st.integers(33, 420),
    queries=st.integers(1, 420),
    padding=st.integers(0, 90),
    groups=st.sampled_from([1, 2, 4]),
    start=st.integers(0, 300),
)
def test_equals_the_reference_for_any_shape(
    case: tuple[str, str, dict, str], length: int, queries: int, padding: int, groups: int, start: int
) -> None:
    name, direction, options, executor = case
    mask, places = None, torch.arange(length)[None] + start
    if 0 < padding < length:
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, :padding] = False
        places = (mask.cumsum(-1) - 1).clamp_min(0) + start
    scheme = make(name, causal=direction == "causal", kv_heads=groups, **options).double()
    check(scheme, executor, places, mask, queries=min(queries, length))


def call_and_leaves(scheme: Scheme, places: Tensor, mask: Mask) -> tuple[Call, list[Tensor]]:
    """A call, and what its gradients are taken for: queries, keys, values and parameters."""
    length, at = places.shape[1], Positions(places, places)
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in draw(length, 1, torch.float64)]
    hidden = torch.randn(1, length, HIDDEN).double()
    made = scheme.project(Tokens(positions=at, hidden=hidden, common=scheme.common), *leaves)
    state = {"state": dict(made.state), "own": dict(made.state), "tables": made.tables}
    call = Call(scheme, made.q, made.k, made.v, at, int(places.max()), scheme.geometry.scale, mask, **state)
    return call, [*leaves, *scheme.parameters()]


@pytest.mark.parametrize("window", [1, 290])
@pytest.mark.parametrize("layout", [plain, skipped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["kerple", "fire", "fox", "disentangled", "cope"])
def test_keys_beyond_a_window_are_hidden(name: str, layout, window: int) -> None:
    for executor in ("blocks", *{"cope": [], "fox": ["channels", "fused"]}.get(name, ["fused"])):
        check(make(name, window=window).double(), executor, *layout(301))


def test_keys_beyond_a_window_of_slots_are_hidden() -> None:
    call, _ = call_and_leaves(make("kerple").double(), skipped(90)[0], Mask("slots", span=40))
    assert [executor.name for executor in EXECUTORS if executor.fits(call)] == ["fused", "blocks", "dense"]
    seen = torch.ones(90, 90, dtype=torch.bool).tril().triu(-39)
    output, weights = attention.run(replace(call, need_weights=True))
    assert torch.equal(weights != 0, seen.expand_as(weights))
    for executor in ("fused", "blocks"):
        torch.testing.assert_close(attention.run(call, executor=executor)[0], output, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "executor"),
    [("kerple", "fused"), ("alibi", "fused"), ("fox", "channels"), ("fire", "fused"), ("cope", "locality")],
)
def test_queries_that_see_nothing_pass_no_gradient_on(name: str, executor: str) -> None:
    # The last token of left padding, whose output predicts the first real one.
    scheme = make(name, **({"learned_slopes": False} if name == "alibi" else {})).double()
    real = (torch.arange(200) >= 60)[None]
    call, operands = call_and_leaves(scheme, torch.arange(200)[None], Mask("slots", keep=real[:, None, None]))
    weight = torch.randn_like(call.q)
    found = []
    for which, weighted in ((executor, weight), ("dense", weight * real[:, None, :, None])):
        output, _ = attention.run(call, executor=which)
        found.append(torch.autograd.grad(output, operands, weighted, retain_graph=True))
    torch.testing.assert_close(*found, rtol=0, atol=1e-8)


# -- channels ----------------------------------------------------------------------------------------------------------

# Weak and steep ones, of tokens and of heads; with fixed gates nothing of the bias learns.
PRODUCTS_OF_NUMBERS = [
    ("fox", {"init": "horizon"}),
    ("fox", {"init": "official"}),
    ("fox", {"forget_gate": "fixed", "decay_time_min": 0.5}),
    ("alibi", {}),
    ("grape_a", {"gate": True}),
]

SLOPES = {"gate_weight", "log_slopes", "omega", "u"}


@pytest.fixture(params=["of torch alone", "with a backward pass of our own"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which a CPU runs channels; a GPU has the first."""
    monkeypatch.setattr(kernel, "works", lambda: "own" in request.param)


@pytest.mark.parametrize(("groups", "head_dim", "queries"), [(2, 6, None), (4, 16, 90)], ids=str)
@pytest.mark.parametrize("layout", [plain, left_padded, packed, skipped], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "options"), PRODUCTS_OF_NUMBERS, ids=str)
def test_channels_equal_the_reference(
    name: str, options: dict, layout, groups: int, head_dim: int, queries: int | None, passes: None
) -> None:
    """Also where the softmax scale is no power of two, which float32 channels are divided by."""
    scheme, call = make(name, kv_heads=groups, head_dim=head_dim, **options), {"queries": queries}
    with attention.recorded() as record:
        got, want = (
            one_attention(scheme, way, *layout(301), **call, dtype=torch.float32) for way in ("channels", "dense")
        )
    assert record == ["channels", "dense"]
    # Gradients of slopes are differences of sums over positions, which float32 rounds.
    slopes = {name: (got.pop(name), want.pop(name)) for name in SLOPES & got.keys()}
    compare(got, want, tolerance=5e-5)
    compare(*({name: pair[i] for name, pair in slopes.items()} for i in (0, 1)), tolerance=3e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), PRODUCTS_OF_NUMBERS, ids=str)
def test_channels_are_as_exact_in_half_precision(name: str, options: dict, dtype: torch.dtype, passes: None) -> None:
    """Sums of hundreds of gates have fewer bits there than their differences need."""
    if name == "alibi":
        options = {"learned_slopes": False, "gate": False}  # else it goes by blocks
    exact = one_attention(make(name, **options).double(), "dense", *plain(400), rounded=dtype)
    got, want = (one_attention(make(name, **options), way, *plain(400), dtype=dtype) for way in ("channels", "dense"))
    for what, expected in exact.items():
        errors = [float((x[what].double() - expected).square().mean().sqrt()) for x in (got, want)]
        assert errors[0] <= 1.5 * errors[1] + 1e-12, (what, errors)


def test_channels_of_many_heads_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (32, 3):
        monkeypatch.setattr(channels, "_MOST", most)
        check(make("grape_a", kv_heads=1).double(), "channels", *left_padded(90))


# -- what runs ---------------------------------------------------------------------------------------------------------


CHOICES = [
    ("rope", {}, plain, 520, {}, "sdpa"),
    ("alibi", {}, plain, 520, {}, "fused (distance table)"),
    ("kerple", {}, plain, 520, {}, "fused (distance table)"),
    ("fire", {"threshold": 2000.0}, plain, 520, {}, "fused (distance table)"),
    ("fire", {"threshold": 50.0}, plain, 520, {}, "fused (straight pieces)"),
    ("disentangled", {}, plain, 520, {}, "fused (products by distance)"),
    ("fox", {}, plain, 520, {}, "channels"),
    ("grape_a", {}, packed, 120, {}, "channels"),
    ("alibi", {}, skipped, 120, {}, "channels"),
    ("cope", {}, plain, 520, {}, "locality"),
    ("stick_breaking", {}, plain, 520, {}, "locality"),
    ("kerple", {"weighted": True}, plain, 520, {}, "blocks"),
    # Padding and packing leave distances to the slots.
    ("kerple", {}, left_padded, 120, {}, "fused (distance table)"),
    ("kerple", {}, packed, 120, {}, "fused (distance table)"),
    ("kerple", {}, skipped, 120, {}, "fused (bias by blocks)"),
    ("fire", {}, skipped, 120, {}, "fused (bias by blocks)"),
    # A named executor that does not fit: the nearest keys are not the last ones.
    ("cope", {}, packed, 70, {"executor": "locality"}, "blocks"),
    # Among few keys all are near.
    ("cope", {}, plain, 120, {}, "dense"),
    ("shaw", {}, plain, 120, {}, "dense"),
    ("kerple", {}, plain, 120, {"queries": 1}, "dense"),
    ("cape", {}, plain, 320, {}, "blocks"),
]


@pytest.mark.parametrize(("name", "options", "layout", "length", "call", "want"), CHOICES)
def test_the_structure_of_a_scheme_decides(
    name: str, options: dict, layout, length: int, call: dict, want: str
) -> None:
    with attention.recorded() as record:
        one_attention(make(name, **options), call.get("executor"), *layout(length), queries=call.get("queries"))
    assert record == [want]


@pytest.mark.parametrize("only_causal", [False, True])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_blocks_run_where_the_kernel_of_torch_fails_its_trial(
    name: str, only_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel.works()
    right = getattr(kernel, name)

    def wrong(*operands: object, causal: bool = False) -> list[Tensor]:
        return [found + 0.1 * (causal or not only_causal) for found in right(*operands, causal=causal)]

    monkeypatch.setattr(kernel, name, wrong)
    monkeypatch.setattr(kernel, "_TRIED", Once())
    for scheme in ("kerple", "cope"):
        with attention.recorded() as record:
            one_attention(make(scheme), None, *plain(520))
        assert record == ["blocks"]


def test_explain_names_the_executor_of_each_layer() -> None:
    model = models.stock("llama")
    with pytest.raises(NotPatchedError, match=r"explain: .*is not patched\. Call hf_posenc\.patch first"):
        hf_posenc.explain(model)
    hf_posenc.patch(model, "fox", layers=[0])
    hf_posenc.patch(model, "cope", layers=[1])
    found = hf_posenc.explain(model, length=64)
    assert [(x.layer, x.scheme, x.sequence, x.step) for x in found.layers] == [
        (0, "fox", "channels", "dense"),
        (1, "cope", "dense", "dense"),
    ]
    assert "channels" in str(found)
    model.set_attn_implementation("eager")
    assert {x.sequence for x in hf_posenc.explain(model, length=64).layers} == {"dense"}
    with pytest.raises(OptionError, match=r"explain: length=0: expected a positive number"):
        hf_posenc.explain(model, length=0)
    # No more tokens run than a table has.
    model = hf_posenc.patch(models.stock("gpt2"), "alibi", native="keep")
    assert hf_posenc.explain(model).length == min(256, model.config.n_positions - 1)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", once([plain, skipped]), ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "executor"), [*FORM_OF_EACH, *((name, "blocks") for name in BY_BLOCKS)])
def test_no_tensor_grows_with_the_square(name: str, executor: str, layout) -> None:
    sizes = []
    for length in (320, 640):
        with models.Largest() as largest:
            one_attention(make(name), executor, *layout(length), dtype=torch.float32)
        sizes.append(largest.size)
    assert sizes[1] <= 2.1 * sizes[0]


# -- products with one vector per distance -----------------------------------------------------------------------------


@pytest.mark.parametrize(("native", "strength"), [("remove", 1.0), ("keep", 1.0), ("keep", 0.3)])
@pytest.mark.parametrize(("name", "options"), PRODUCTS[::3], ids=str)
def test_products_in_a_model_that_keeps_its_rotation(name: str, options: dict, native: str, strength: float) -> None:
    """Queries and keys of the logits are rotated there, and those of the vectors are not."""
    model = models.moved(hf_posenc.patch(models.stock("llama"), name, native=native, **options), seed=3)
    if native == "keep":
        hf_posenc.set_strength(model, scheme=strength)
    ids, found = models.tokens("llama", 2, 121), []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with attention.recorded() as record:
            models.loss(model, "llama", ids).backward()
        found.append({key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None})
        assert set(record) == {"dense" if implementation == "eager" else "fused (products by distance)"}
    assert found[0].keys() == found[1].keys()
    for key, want in found[0].items():
        torch.testing.assert_close(found[1][key], want, rtol=0, atol=2e-4 * max(1e-3, float(want.abs().max())), msg=key)


@pytest.mark.parametrize("name", schemes())
def test_more_queries_than_keys(name: str) -> None:
    """As in the reference, or one error."""
    scheme, queries, (_, k, v) = make(name), 40, draw(33)
    q, hidden = draw(queries)[0], torch.randn(2, queries, HIDDEN)
    at = {"query_positions": torch.arange(queries)[None], "key_positions": torch.arange(33)[None]}
    for of_queries in (None, hidden):
        found = []
        for executor in (None, "dense"):
            with contextlib.suppress(ShapeError):
                found.append(attend(scheme, q, k, v, **at, hidden=of_queries, executor=executor))
        assert len(found) != 1
        torch.testing.assert_close(found[:1], found[1:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["on the meta device", "of layout torch.sparse_coo", "fake tensors"])
@pytest.mark.parametrize("name", ["q", "query_positions", "mask"])
def test_tensors_without_numbers_are_refused(name: str, kind: str) -> None:
    given: dict[str, Tensor] = dict(zip("qkv", draw(5), strict=True))
    given |= {"query_positions": torch.arange(5)[None], "mask": torch.ones(2, 5, dtype=torch.bool)}
    made = {"on the meta device": lambda x: x.to("meta"), "of layout torch.sparse_coo": Tensor.to_sparse}
    given[name] = made.get(kind, FakeTensorMode().from_tensor)(given[name])
    with pytest.raises(ShapeError, match=f"{kind}.*expected .*numbers"):
        attend(make("alibi"), **given, key_positions=torch.arange(5)[None])
