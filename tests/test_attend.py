"""Attention with every scheme: slow references, executors against each other, properties, numerics, memory."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import moved
from torch import Tensor
from variants import identify, variants

from hf_posenc import Geometry, Positions, Scheme, attend, build, schemes
from hf_posenc.attention import Call, Mask, executors
from hf_posenc.attention import blocks as blocks_module
from hf_posenc.operands import Block, Tokens

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 6, 11

every_variant = pytest.mark.parametrize(("name", "direction", "options"), variants(), ids=identify)
every_causal_variant = pytest.mark.parametrize(("name", "direction", "options"), variants("causal"), ids=identify)
every_scheme = pytest.mark.parametrize("name", list(schemes()))
every_direction = pytest.mark.parametrize(
    ("name", "direction"), [(name, way) for name, info in schemes().items() for way in info.directions]
)


def make(name: str, direction: str = "causal", options: dict | None = None, **changes) -> Scheme:
    """A scheme whose parameters are all away from where they start, some beyond their bounds."""
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN, "max_positions": 6000}
    torch.manual_seed(0)
    geometry = Geometry(causal=direction == "causal", **{**shape, **changes})
    return moved(build(name, geometry, **(options or {})), 0.3)


@contextlib.contextmanager
def rows_per_block(rows: int) -> Iterator[None]:
    """Let the block executor take so many rows at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "rows_per_block", lambda *sizes: rows)
        yield


# -- scenarios ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scenario:
    """Queries are the last tokens of the keys' sequence."""

    queries: int
    positions: Tensor  # [B|1, K]
    mask: Tensor | None = None
    batch: int = 2


def padded(*first: int) -> tuple[Tensor, Tensor]:
    """Positions and mask of rows that begin with so much padding."""
    mask = torch.arange(21) >= torch.tensor(first)[:, None]
    return (mask.long().cumsum(-1) - 1).clamp_min(0), mask.long()


def packed(lengths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Positions `[B, K]` that start again in every document, and who may see whom `[B, K, K]`."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    document = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    return positions, document[:, :, None] == document[:, None, :]


def scenarios() -> dict[str, Scenario]:
    generator, places = torch.Generator().manual_seed(1), torch.arange(17)[None]
    skipping = torch.randperm(5000, generator=generator)[:23].sort().values
    by_head = torch.rand(2, HEADS, 11, 17, generator=generator) < 0.6
    by_head[..., 0] = True
    added = torch.randn(2, 1, 11, 17, generator=generator, dtype=torch.float64)
    added[0, :, :, 2] = torch.finfo(torch.float32).min
    added[1, :, 3:, 4] = -math.inf
    documents, same = packed([[9, 12, 4], [3, 1, 21]])
    return {
        "offset": Scenario(13, torch.arange(29)[None]),
        "left padding": Scenario(21, *padded(6, 0)),
        "rows differ": Scenario(9, torch.stack((torch.arange(23) + 3, skipping))),
        "packed documents": Scenario(13, documents, same[:, -13:]),
        "mask per head": Scenario(11, places, by_head),
        "float mask": Scenario(11, places, added),
    }


SCENARIOS = scenarios()


def layer(scheme: Scheme, inputs: Tensor, scenario: Scenario, executor: str | None, queries: int | None = None) -> dict:
    """An attention layer around a scheme: `inputs [B, K, E]` to q, k, v and the output, by fixed random projections."""
    geometry, positions = scheme.geometry, scenario.positions
    queries = scenario.queries if queries is None else queries
    hidden = scheme.embed(inputs, positions)
    generator = torch.Generator().manual_seed(5)

    def heads(x: Tensor, count: int) -> Tensor:
        weight = torch.randn(geometry.hidden_size, count * geometry.head_dim, generator=generator).to(x)
        projected = (x @ weight).unflatten(-1, (count, geometry.head_dim)).transpose(1, 2)
        if projected.requires_grad:
            projected.retain_grad()
        return projected

    rows, mask = hidden[:, hidden.shape[1] - queries :], scenario.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(hidden)
    q, k, v = heads(rows, geometry.heads), heads(hidden, geometry.kv_heads), heads(hidden, geometry.kv_heads)
    places = {"query_positions": positions[:, positions.shape[1] - queries :], "key_positions": positions}
    output = attend(scheme, q, k, v, **places, hidden=hidden, mask=mask, executor=executor)
    return {"inputs": inputs, "q": q, "k": k, "v": v, "output": output}


def random_inputs(scheme: Scheme, scenario: Scenario, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (scenario.batch, scenario.positions.shape[1], scheme.geometry.hidden_size)
    return 0.3 * torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


# -- slow references ---------------------------------------------------------------------------------------------------

# Each takes the scheme's parameters and one query and one key at positions i and j, and returns the logit of one head,
# straight from the papers. Nothing here is shared with the code under test.


def content(scheme: Scheme, x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y) / math.sqrt(len(x))


def plain(scheme, values, head, i, j, x, y) -> float:
    return content(scheme, x, y)


def additive(bias: Callable[..., float]) -> Callable[..., float]:
    def logit(scheme, values, head, i, j, x, y) -> float:
        gate = values["gate_weight"][head] if scheme.gate else 1.0
        return content(scheme, x, y) + gate * bias(scheme, values, head, i, j)

    return logit


def grape_a(scheme, values, head, i, j, x, y) -> float:
    u, omega = values["u"][head], values["omega"][head]
    opened = math.log1p(math.exp(u @ y / math.sqrt(u @ u) / math.sqrt(len(y))))
    rate = math.log1p(math.exp(omega)) * alibi_slope(head, scheme.geometry.heads) * opened
    gate = values["gate_weight"][head] if scheme.gate else 1.0
    return content(scheme, x, y) - gate * abs(i - j) * rate


def alibi_slope(head: int, heads: int) -> float:
    closest = 1
    while 2 * closest <= heads:
        closest *= 2
    if closest == heads:
        return (2.0 ** (-8.0 / heads)) ** (head + 1)
    return alibi_slope(head, closest) if head < closest else alibi_slope(2 * (head - closest), 2 * closest)


def alibi(scheme, values, head, i, j) -> float:
    if scheme.learned_slopes:
        return -math.exp(values["log_slopes"][head]) * abs(i - j)
    return -alibi_slope(head, scheme.geometry.heads) * abs(i - j)


def kerple(scheme, values, head, i, j, a="bias_a", p="bias_p") -> float:
    n, a, p = abs(i - j), max(values[a][head], 0.01), max(values[p][head], 0.01)
    return -p * math.log(1 + a * n) if scheme.kernel == "log" else -a * n ** min(p, 2.0)


def kerple_logit(scheme, values, head, i, j, x, y) -> float:
    gate = values["gate_weight"][head] if scheme.gate else 1.0
    weight = math.exp(kerple(scheme, values, head, i, j, "wei_a", "wei_p")) if scheme.weighted else 1.0
    return content(scheme, x, y) * (1 - gate + gate * weight) + gate * kerple(scheme, values, head, i, j)


def fire(scheme, values, head, i, j) -> float:
    c = values["c"][0]
    limit = abs(values["L_multiplier"][0] * values["init_L"][0])
    last = i if scheme.geometry.causal or scheme.normalizer == "query" else max(i, j)
    ratio = math.log(abs(c * (i - j)) + 1) / (math.log(abs(c * max(limit, last)) + 1) + 1e-6)
    total = values["mlp.2.bias"][head]
    for unit in range(scheme.width):
        total += values["mlp.2.weight"][head, unit] * max(
            0.0, values["mlp.0.weight"][unit, 0] * ratio + values["mlp.0.bias"][unit]
        )
    return total


def rope(scheme, values, head, i, j, x, y) -> float:
    width, theta = scheme.rotary_dim, scheme.theta or 10000.0
    total = float(x[width:] @ y[width:])
    for pair in range(width // 2):
        u, w = (pair, pair + width // 2) if scheme.layout == "half" else (2 * pair, 2 * pair + 1)
        frequency = theta ** (-2 * pair / width) * (values["gate_weight"][0] if scheme.gate else 1.0)
        frequency *= pair < int(scheme.proportion * (width // 2))
        # Two rotated complex numbers: the product depends on the difference of their angles.
        turned = complex(x[u], x[w]) * complex(y[u], -y[w]) * np.exp(1j * frequency * (i - j))
        total += turned.real
    return total / math.sqrt(len(x))


def disentangled_row(scheme: Scheme, n: int) -> int:
    """The row of the table for a distance, by the definition with logarithms."""
    span, far = scheme.span, scheme.max_distance
    if scheme.buckets is not None and abs(n) > scheme.buckets // 2:
        half = scheme.buckets // 2
        grown = math.log(abs(n) / half) / math.log((far - 1) / half) * (half - 1)
        n = int(math.copysign(math.ceil(grown - 1e-9) + half, n))
    return max(0, min(n + span, 2 * span - 1))


def disentangled(scheme, values, head, i, j, x, y) -> float:
    width = len(x)
    table, row = values["common.rel_embeddings"], disentangled_row(scheme, i - j)
    if scheme.normalize:
        centred = table - table.mean(-1, keepdims=True)
        table = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-7)
        table = table * values["common.LayerNorm.weight"] + values["common.LayerNorm.bias"]

    def projected(name: str) -> np.ndarray:
        rows = slice(head * width, (head + 1) * width)
        return values[f"{name}.weight"][rows] @ table[row] + values[f"{name}.bias"][rows]

    terms = [float(x @ y)]
    terms += [float(x @ projected("pos_key_proj"))] if scheme.c2p else []
    terms += [float(y @ projected("pos_query_proj"))] if scheme.p2c else []
    return sum(terms) / math.sqrt(width * (len(terms) if scheme.scale == "deberta" else 1))


def transformer_xl(scheme, values, head, i, j, x, y) -> float:
    width, where = scheme.geometry.hidden_size, "" if scheme.untie else "common."
    far = scheme.clamp_len or 10**9
    n = max(-far, min(i - j, far))
    angles = [n / 10000.0 ** (2 * t / width) for t in range(width // 2)]
    encoding = [math.sin(a) for a in angles] + [math.cos(a) for a in angles] + [0.0] * (width % 2)
    place = values["r_net.weight"][head * len(x) : (head + 1) * len(x)] @ np.array(encoding)
    u, v = values[f"{where}r_w_bias"][head], values[f"{where}r_r_bias"][head]
    return float((x + u) @ y + (x + v) @ place) / math.sqrt(len(x))


def near(scheme, values, head, i, j) -> float:
    places = values["offsets"].shape[1] if scheme.geometry.causal else (values["offsets"].shape[1] + 1) // 2
    index = i - j if scheme.geometry.causal else i - j + places - 1
    return values["offsets"][head, index] if abs(i - j) < places else 0.0


def first_key(scheme, values, head, i, j, x, y) -> float:
    return plain(scheme, values, head, i, j, x, y) + (values["offsets"][head] if j == 0 else 0.0)


def pope(scheme, values, head, i, j, x, y) -> float:
    gate, width = values["gate_weight"][head] if scheme.gate else 1.0, len(x)
    angles = [(i - j) * scheme.theta ** (-c / width) - values["phases"][head, c] for c in range(width)]
    total = float(np.log1p(np.exp(x)) * np.log1p(np.exp(y)) @ np.cos(angles))
    return gate * total / math.sqrt(width) + (1 - gate) * content(scheme, x, y)


REFERENCES: dict[str, Callable[..., float]] = {
    "alibi": additive(alibi),
    "disentangled": disentangled,
    "fire": additive(fire),
    "fire_s": additive(fire),
    "first_key": first_key,
    "grape_a": grape_a,
    "kerple": kerple_logit,
    "learned": plain,
    "near": additive(near),
    "nope": plain,
    "pope": pope,
    "rope": rope,
    "sinusoidal": plain,
    "transformer_xl": transformer_xl,
}


def slow_attention(scheme: Scheme, got: dict, positions: Tensor, keep: np.ndarray | None) -> np.ndarray:
    q, k, v = (got[name].detach().numpy() for name in "qkv")
    values = {name: value.numpy() for name, value in scheme.state_dict().items()}
    logit = REFERENCES[next(name for name, info in schemes().items() if info.cls is type(scheme))]
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    places = positions.expand(batch, -1).numpy()
    output = np.zeros_like(q)
    for b, h, row in itertools.product(range(batch), range(heads), range(queries)):
        shared = h // (heads // k.shape[1])
        i = int(places[b, keys - queries + row])
        weights, total = np.zeros(keys), 0.0
        for column in range(keys):
            j = int(places[b, column])
            if (scheme.geometry.causal and j > i) or (keep is not None and not keep[b, column]):
                continue
            weights[column] = math.exp(logit(scheme, values, h, i, j, q[b, h, row], k[b, shared, column]))
            total += weights[column]
        output[b, h, row] = weights @ v[b, shared] / total
    return output


reference_variants = [variant for variant in variants() if variant[0] in REFERENCES]


@pytest.mark.parametrize(("name", "direction", "options"), reference_variants, ids=identify)
def test_slow_reference(name: str, direction: str, options: dict) -> None:
    # Six heads, where ALiBi's slopes are not sorted, on two.
    scheme = make(name, direction, options, heads=6, head_dim=4).double()
    near_and_far = torch.tensor([[0, 1, 2, 3, 5, 17, 60, 130, 700], [0, 0, 0, 1, 2, 3, 4, 5, 6]], dtype=torch.int16)
    if name == "kerple":  # parameters on both sides of all bounds, and no distance whose power overflows
        near_and_far %= 19
        with torch.no_grad():
            for key, parameter in scheme.named_parameters():
                if key != "gate_weight":
                    parameter.copy_(torch.tensor([-1.0, 0.005, 0.4, 1.9, 2.5, 3.0]).roll(len(key)))
    keep = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 1, 1, 1, 1]]).bool()
    scenario = Scenario(5, near_and_far, keep)
    got = layer(scheme, random_inputs(scheme, scenario, torch.float64), scenario, executor=None)
    want = slow_attention(scheme, got, near_and_far, keep.numpy())
    np.testing.assert_allclose(got["output"].detach().numpy(), want, rtol=0, atol=1e-12)


@every_variant
def test_float_masks_hide_keys_or_are_added_after_the_scheme(name: str, direction: str, options: dict) -> None:
    scheme = make(name, direction, options).double()
    scenario = SCENARIOS["float mask"]
    visible = scenario.mask > torch.finfo(torch.float32).min
    got = layer(scheme, random_inputs(scheme, scenario, torch.float64), scenario, "dense")
    at = {"query_positions": scenario.positions[:, -11:], "key_positions": scenario.positions, "need_weights": True}

    def masked(mask: Tensor) -> tuple[Tensor, Tensor]:
        return attend(scheme, got["q"], got["k"], got["v"], hidden=got["inputs"], mask=mask, **at)

    want, plain = masked(visible)
    hidden = ~visible
    if direction == "causal":
        hidden = hidden | (at["key_positions"][:, None, None] > at["query_positions"][:, None, :, None])
    assert not plain[hidden.expand_as(plain)].any()
    assert (plain >= 0).all()
    for number in (-1e4, -65504.0, torch.finfo(torch.float32).min, -math.inf):
        # Through bfloat16, which rounds -1e4 up.
        hiding = torch.zeros(visible.shape).masked_fill(~visible, number).bfloat16().double()
        torch.testing.assert_close(masked(hiding)[0], want, rtol=0, atol=1e-12)
    if not scheme.overrides("weigh"):
        changed = plain * scenario.mask.exp()
        weights = changed / changed.sum(-1, keepdim=True)
        torch.testing.assert_close(masked(scenario.mask)[1], weights, rtol=0, atol=1e-12)


# -- executors ---------------------------------------------------------------------------------------------------------

# Relative to the largest element: gradients sum over all logits, some of which are in the thousands.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}
# Slopes that keys set multiply rounding by the distance: up to 3e-11 of the largest in float64.
LESS_CLOSE = {"grape_a": 50}


def assert_near(got: Tensor, want: Tensor, what: str, *, times: float = 1) -> None:
    assert got.dtype == want.dtype
    atol = times * CLOSE[want.dtype] * max(1.0, want.abs().max().item())
    torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=lambda message: f"{what}: {message}")


def outputs_and_gradients(scheme: Scheme, inputs: Tensor, scenario: Scenario, executor: str | None) -> dict:
    scheme.zero_grad(set_to_none=True)
    inputs = inputs.clone().requires_grad_()
    got = layer(scheme, inputs, scenario, executor)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(got["output"].shape, generator=generator, dtype=torch.float64).to(inputs)
    got["output"].backward(upstream)
    result = {"output": got["output"].detach()}
    result |= {f"gradient of {name}": got[name].grad for name in ("inputs", "q", "k", "v")}
    result |= {f"gradient of {name}": parameter.grad for name, parameter in scheme.named_parameters()}
    return result


AGREE = [(name, torch.float64) for name in SCENARIOS] + [("float mask", torch.float32)]


# What stands in channels next to a table, to straight pieces and to products.
SPARED = [(f"{base}+first_key", "causal", {}) for base in ("kerple", "fire", "fox", "t5+near")]


@pytest.mark.parametrize(("scenario", "dtype"), AGREE, ids=str)
@pytest.mark.parametrize(("name", "direction", "options"), [*variants(), *SPARED], ids=identify)
def test_executors_agree(name: str, direction: str, options: dict, scenario: str, dtype: torch.dtype) -> None:
    scheme, at = make(name, direction, options).to(dtype), SCENARIOS[scenario]
    inputs = random_inputs(scheme, at, dtype)
    want = outputs_and_gradients(scheme, inputs, at, "dense")
    for what, value in want.items():
        assert value is not None, f"{what} is None: a parameter that is not used"
        assert value.isfinite().all(), what
    with rows_per_block(5):
        for executor in executors(scheme)[1:]:
            got = outputs_and_gradients(scheme, inputs, at, executor)
            assert got.keys() == want.keys()
            for what, value in want.items():
                times = LESS_CLOSE.get(name, 1) if dtype == torch.float64 else 1
                assert_near(got[what], value, f"{executor}, {what}", times=times)


@pytest.mark.parametrize("groups", [1, 4])
@every_scheme
def test_kv_heads_are_shared_as_if_repeated(name: str, groups: int) -> None:
    """One scheme, applied with G kv heads and with each of them repeated for its query heads."""
    scenario = SCENARIOS["offset"]
    few, many = make(name, kv_heads=groups).double(), make(name, kv_heads=HEADS).double()
    state = few.state_dict()
    for key, value in many.state_dict().items():
        # Parameters of kv heads are repeated with them.
        for dim in (d for d, size in enumerate(value.shape) if state[key].shape[d] != size):
            by_head = state[key].unflatten(dim, (groups, -1))
            state[key] = by_head.repeat_interleave(HEADS // groups, dim=dim).flatten(dim, dim + 1)
    many.load_state_dict(state)
    inputs = random_inputs(few, scenario, torch.float64)
    for executor in executors(few):
        got = layer(few, inputs, scenario, executor)
        positions = {"query_positions": scenario.positions[:, -13:], "key_positions": scenario.positions}
        k, v = (got[kind].repeat_interleave(HEADS // groups, dim=1) for kind in "kv")
        want = attend(many, got["q"], k, v, hidden=inputs, executor=executor, **positions)
        assert_near(got["output"], want, executor)


@every_direction
def test_rows_that_see_nothing_stay_finite(name: str, direction: str) -> None:
    # What such a row holds is not defined (executors differ there); nobody may read it, but NaN would spread.
    scheme = make(name, direction).double()
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[0, 0, :4] = False
    kinds = [mask, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))]
    for kind, executor in itertools.product(kinds, executors(scheme)):
        scenario = Scenario(9, torch.arange(9)[None], kind)
        got = outputs_and_gradients(scheme, random_inputs(scheme, scenario, torch.float64), scenario, executor)
        for what, value in got.items():
            assert value.isfinite().all(), (executor, what)


# -- properties --------------------------------------------------------------------------------------------------------

few_examples = settings(max_examples=2, deadline=None, derandomize=True)


@every_causal_variant
@given(seen=st.integers(1, 12), seed=st.integers(0, 99))
@few_examples
def test_the_future_does_not_change_the_past(name: str, direction: str, options: dict, seen: int, seed: int) -> None:
    scheme = make(name, direction, options)
    scenario = Scenario(13, torch.arange(13)[None])
    inputs = random_inputs(scheme, scenario, torch.float32, seed)
    changed = inputs.clone()
    changed[:, seen:] = 100 * torch.randn(changed[:, seen:].shape, generator=torch.Generator().manual_seed(seed))
    with rows_per_block(5), torch.no_grad():
        for executor in executors(scheme):
            before = layer(scheme, inputs, scenario, executor)["output"]
            after = layer(scheme, changed, scenario, executor)["output"]
            assert torch.equal(before[:, :, :seen], after[:, :, :seen]), executor
            assert not torch.equal(before[:, :, seen:], after[:, :, seen:])


SEES_POSITIONS = {"cape", "fire", "fire_s", "first_key", "fope", "learned", "log_temperature", "sinusoidal", "tape"}
distance_variants = [variant for variant in variants() if variant[0] not in SEES_POSITIONS]


@pytest.mark.parametrize(("name", "direction", "options"), distance_variants, ids=identify)
@given(shift=st.integers(1, 5000), queries=st.integers(1, 11))
@few_examples
def test_a_shift_of_all_positions_changes_nothing(
    name: str, direction: str, options: dict, shift: int, queries: int
) -> None:
    scheme = make(name, direction, options).double()
    positions = torch.tensor([[0, 1, 2, 3, 9, 40, 41, 42, 300, 301, 700]])
    here, there = Scenario(queries, positions), Scenario(queries, positions + shift)
    inputs = random_inputs(scheme, here, torch.float64)
    with torch.no_grad():
        before, after = (layer(scheme, inputs, place, None)["output"] for place in (here, there))
    # The angles of a rotation at position 5,700 are rounded in the thirteenth digit.
    torch.testing.assert_close(after, before, rtol=0, atol=1e-11)


# -- numerics ----------------------------------------------------------------------------------------------------------

# Distances on both sides of the first integers that bfloat16 (257) and float16 (2,049) cannot hold.
FAR_KEYS = torch.tensor([[0, 1, 2045, 2046, 2047, 3838, 3839, 3840, 3841, 4093, 4094, 4095]])
FAR_QUERIES = torch.tensor([[2047, 4094, 4095, 4096]])


def bias_at_far_distances(scheme: Scheme, dtype: torch.dtype) -> Tensor:
    q = torch.zeros(1, HEADS, 4, HEAD_DIM, dtype=dtype)
    k = torch.zeros(1, KV_HEADS, 12, HEAD_DIM, dtype=dtype)
    places = Positions(FAR_QUERIES, FAR_KEYS)
    tokens = Tokens(positions=places, hidden=torch.zeros(1, 12, HIDDEN, dtype=dtype), common=scheme.common)
    made = scheme.project(tokens, q, k, k)
    own = {name: tensor[:, -4:] for name, tensor in made.state.items()} | dict(made.own)
    block = Block(places, reach=4096, values=made.v, state=made.state, own=own, tables=made.tables)
    return scheme.score(torch.zeros(1, HEADS, 4, 12), made.q, scheme.recall(made.k, made.state), block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_variant
def test_half_precision_inputs_do_not_touch_distances(
    name: str, direction: str, options: dict, dtype: torch.dtype
) -> None:
    scheme = make(name, direction, options)
    with torch.no_grad():
        want = bias_at_far_distances(scheme, torch.float32)
        assert want.dtype == torch.float32
        assert torch.equal(bias_at_far_distances(scheme, dtype), want)
        # The same through `attend`: values in float32 show the weights as they were before any rounding.
        k = torch.zeros(1, KV_HEADS, 12, 12)
        v = torch.eye(12).expand(1, KV_HEADS, 12, 12)
        q = torch.zeros(1, HEADS, 4, 12)
        scheme = make(name, direction, options, head_dim=12)
        at = {"query_positions": FAR_QUERIES, "key_positions": FAR_KEYS, "hidden": torch.zeros(1, 12, HIDDEN)}
        for executor in ("dense", "blocks"):
            want = attend(scheme, q, k, v, executor=executor, **at)
            assert torch.equal(attend(scheme, q.to(dtype), k.to(dtype), v, executor=executor, **at), want)


def fresh(scheme: Scheme, x: Tensor, hidden: Tensor) -> list[Tensor]:
    """What a scheme makes of the tokens of a call before its logits."""
    kv, places = x[:, :KV_HEADS], Positions(FAR_KEYS, FAR_KEYS)
    made = scheme.project(Tokens(positions=places, hidden=hidden, common=scheme.common), x, kv, kv)
    return [scheme.embed(hidden, FAR_KEYS), made.q, made.k, made.v]


@every_variant
def test_projections_are_rounded_once_and_not_by_autocast(name: str, direction: str, options: dict) -> None:
    scheme = make(name, direction, options)
    exact = torch.randn(1, HEADS, 12, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(1, 12, HIDDEN)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            x = exact.to(dtype)
            pairs = zip(fresh(scheme, x, hidden.to(dtype)), fresh(scheme, x.float(), hidden), strict=True)
            assert all(torch.equal(got, want.to(dtype)) for got, want in pairs)
        want = [bias_at_far_distances(scheme, torch.float32), *fresh(scheme, exact, hidden)[:3]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = [bias_at_far_distances(scheme, torch.float32), *fresh(scheme, exact, hidden)[:3]]
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


# -- blocks ------------------------------------------------------------------------------------------------------------


# Schemes whose logits depend on more than one pair of query and key, or that the official code has in every form, are
# compared elsewhere.
ELSEWHERE = {
    "cape": ["cape"],
    "addons": ["kv_shift"],
    "block_rotations": ["comrope_ap", "comrope_ld", "liere"],
    "content_relative": ["shaw"],
    "fox": ["fox", "fox_pro"],
    "goldens": [
        *("attention_sinks", "gated_output", "inkling", "log_temperature", "path", "repo", "sandwich"),
        *("selective_rope", "t5", "t5_clipped"),
    ],
    "rotary_family": ["fope", "rope2d", "xpos"],
    "tape": ["tape"],
    "walks": ["cope", "stick_breaking"],
}


def test_every_scheme_has_a_slow_reference() -> None:
    assert set(schemes()) <= set(REFERENCES) | {*itertools.chain(*ELSEWHERE.values())}
    assert all((Path(__file__).parent / f"test_{file}.py").exists() for file in ELSEWHERE)


def test_blocks_replay_dropout_in_the_backward_pass() -> None:
    scheme = build("kerple", Geometry(heads=2, kv_heads=1, head_dim=3, hidden_size=6)).double()
    places = torch.arange(7)[None]
    q, k, v = (torch.randn(1, heads, 7, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))

    def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        call = Call(scheme, q, k, v, Positions(places, places), reach=6, scale=0.5, mask=Mask("slots"), dropout=0.4)
        with rows_per_block(3):
            return blocks_module.Blocks().run(call)[0]

    assert torch.equal(dropped(q, k, v, scheme.bias_p), dropped(q, k, v, scheme.bias_p))
    state = torch.get_rng_state()
    dropped(q, k, v, scheme.bias_p).sum().backward()
    # The numerical derivative draws the same numbers only if the backward pass left the generator alone and replayed
    # it.
    assert torch.autograd.gradcheck(dropped, (q, k, v, scheme.bias_p))
    assert state.shape == torch.get_rng_state().shape
