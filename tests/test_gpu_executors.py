"""The kernels of a GPU, against the dense reference.

Without one they run in Triton's interpreter, where Triton is installed. On a GPU, compiled:

    python -m pytest tests/test_gpu_executors.py -m gpu
"""

import functools
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import test_engine
import torch
from test_engine import compare, compare_errors, left_padded, packed, plain, skipped, skipped_apart
from torch import Tensor

from hf_posenc import OptionError, Positions, Scheme, attend, attention, schemes
from hf_posenc.attention import Call, Mask, choose, executors
from hf_posenc.attention.blocks import Blocks
from hf_posenc.attention.gpu import trial
from hf_posenc.attention.gpu.kernels import Triton
from hf_posenc.attention.once import Once
from hf_posenc.forms import Bias

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 24
TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Case:
    """One call: a scheme with options, and how tokens lie."""

    name: str
    layout: Callable[[int], tuple[Tensor, Tensor | None]] = plain
    options: dict = field(default_factory=dict)
    queries: int | None = None
    causal: bool = True
    dtype: torch.dtype = torch.float32
    width: int = HEAD_DIM
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        found = [self.name, self.layout.__name__, *(f"{k}={v}" for k, v in self.options.items()), kind]
        found += [f"last{self.queries}"] * bool(self.queries) + ["encoder"] * (not self.causal)
        found += [f"{self.width}wide"] * (self.width != HEAD_DIM) + [f"window{self.window}"] * bool(self.window)
        return "-".join(found + ["softcap"] * bool(self.softcap) + ["sinks"] * self.sinks)


LAYOUTS = (plain, left_padded, packed, skipped, skipped_apart)
OPTIONS = {
    "alibi": {"learned_slopes": True},
    "fire": {"threshold": 20.0},
    "fire_s": {"threshold": 900.0},
    "t5": {"max_distance": 30},
}
# Every scheme with a bias of the distance.
BIASED = [
    (name, direction == "causal")
    for name, info in schemes().items()
    for direction in info.directions
    if isinstance(
        Triton().structure(test_engine.make(name, causal=direction == "causal", **OPTIONS.get(name, {}))), Bias
    )
]


def biased(name: str, layout: Callable[[int], tuple[Tensor, Tensor | None]] = plain, **others) -> Case:
    return Case(name, layout, OPTIONS.get(name, {}), **others)


# Kernels know the form of a bias alone: by default one scheme of each, a table and straight pieces, meets each layout.
DISTANCES = [
    *(
        biased(name, layout, causal=causal)
        for name, layout, causal in zip(
            itertools.cycle(("kerple", "fire")), LAYOUTS, itertools.cycle((True, True, False)), strict=False
        )
    ),
    biased("kerple", left_padded, softcap=3.0, sinks=True, queries=21),
    biased("kerple", packed, window=9, sinks=True, width=17),
    biased("t5", packed, causal=False, window=9, softcap=3.0),
    biased("fire", skipped_apart, window=11, softcap=3.0, sinks=True),
    biased("kerple", dtype=torch.bfloat16, sinks=True),
    biased("fire", packed, dtype=torch.bfloat16, softcap=3.0),
]
AROUND = [
    {"dtype": dtype, "width": width, **others}
    for dtype, width in ((torch.float32, 40), (torch.bfloat16, 17))
    for others in ({}, {"window": 9, "sinks": True}, {"softcap": 3.0, "queries": 21})
]
# Every scheme in one layout, in turn.
IN_TURN = [
    biased(name, layout, causal=causal)
    for (name, causal), layout in zip(BIASED, itertools.cycle(LAYOUTS), strict=False)
]
# Each scheme meets each layout, and most of what may be around them.
GRID = [
    biased(name, layout, causal=causal, **others)
    for ((name, causal), layout), others in zip(
        itertools.product(BIASED, LAYOUTS), itertools.cycle(AROUND), strict=False
    )
]
SELF = {"remainder": "self", "start_bias": True, "attend_current": True}
VECTOR = {"remainder": "head_bias"}
NEAR, FAR = {"npos": 50}, {"npos": 6}
KERNELS = [
    Case("stick_breaking", options=VECTOR),
    Case("stick_breaking", left_padded, SELF),
    Case("stick_breaking", packed, VECTOR),
    Case("stick_breaking", options=SELF, queries=21),
    Case("stick_breaking", dtype=torch.bfloat16),
    Case("cope", options=FAR),
    Case("cope", left_padded, FAR),
    Case("cope", packed, {**NEAR, "value_gates": True}),
    Case("cope", options={**FAR, "separate_keys": True}, queries=21),
    Case("cope", options=FAR, dtype=torch.bfloat16),
]
STICK, COUNT = {"CURRENT": False, "HAS_BIAS": True}, {"N": 64, "OWN_GATES": True}


def make(case: Case, **others) -> Scheme:
    return test_engine.make(case.name, causal=case.causal, head_dim=case.width, **case.options, **others)


def run(
    case: Case, executor: str | None, *, length: int = 43, device: str = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and gradients of a random call."""
    dtype = dtype or case.dtype
    scheme = make(case).to(device, torch.float64 if dtype == torch.float64 else None)
    call = {"queries": case.queries, "dtype": dtype, "device": device}
    return test_engine.one_attention(scheme, executor, *case.layout(length), **call)


def run_distances(
    case: Case, executor: str, *, length: int = 43, device: str = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and gradients of a random call, which may have a window, a softcap and sinks."""
    dtype, random = dtype or case.dtype, torch.Generator().manual_seed(3)
    scheme = make(case, kv_heads=1).to(device, torch.float64 if dtype == torch.float64 else None)
    queries, heads = case.queries or length, scheme.geometry.heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(case.dtype).to(device, dtype)

    q, k, v, weight = (
        draw(2, n, size, case.width) for n, size in [(heads, queries), *[(1, length)] * 2, (heads, queries)]
    )
    sinks = draw(heads) if case.sinks else None
    places, keep = (None if x is None else x.to(device) for x in case.layout(length))
    mask = Mask("positions" if keep is None else "slots", ahead=length - queries)
    if case.layout is plain:
        mask = replace(mask, rule="slots")
    if keep is not None:
        if keep.ndim == 2:
            keep = keep[:, None, None]
        else:
            keep = (keep if case.causal else keep | keep.mT)[:, None, length - queries :]
        weight = weight * keep.expand(-1, -1, queries, -1).diagonal(length - queries, -2, -1)[..., None]
    mask = replace(mask, rule=mask.rule if case.causal else "all", keep=keep, window=case.window)
    at = Positions(places[:, length - queries :], places)
    leaves = {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}
    call = Call(
        scheme, *(x.requires_grad_() for x in (q, k, v)), at, int(places.max()), scheme.geometry.scale, mask,
        softcap=case.softcap, sinks=None if sinks is None else sinks.requires_grad_(),
        parameters=() if sinks is None else (sinks,),
    )  # fmt: skip
    output, _ = attention.run(call, executor=executor)
    leaves |= dict(scheme.named_parameters())
    grads = torch.autograd.grad(output, list(leaves.values()), weight, allow_unused=True, materialize_grads=True)
    return {"output": output.detach() * weight.ne(0), **dict(zip(leaves, grads, strict=True))}


def check(case: Case, *, length: int = 43, device: str = "cpu", run: Callable[..., dict[str, Tensor]] = run) -> None:
    got, want = (run(case, which, length=length, device=device) for which in ("triton", "dense"))
    if case.dtype == torch.float32:
        # The gradient of a slope sums distances of thousands: 3e-5 of the largest in float32.
        near = 4e-5 if "learned_slopes" in case.options else 2e-5
        compare(got, want, tolerance=1e-4 if device == "cuda" else near)
        return
    exact = run(case, "dense", length=length, device=device, dtype=torch.float64)
    # Weights are rounded for the output, from which the backward pass starts: that leaves something of sums of zero.
    there = {what: x for what, x in exact.items() if float(x.abs().max()) >= 1e-9}
    compare_errors(got, want, there, slack=3e-2)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executors of a GPU run on the CPU, and nothing else in their place."""

    def missed(*args: object) -> None:
        raise AssertionError("went by blocks")

    monkeypatch.setattr(trial, "available", lambda device: True)
    monkeypatch.setattr(Blocks, "run", missed)


@pytest.fixture
def small_tiles(forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = importlib.import_module("hf_posenc.attention.gpu.tiles")
    monkeypatch.setattr(tiles, "ROWS_AND_COLUMNS", dict.fromkeys(tiles.ROWS_AND_COLUMNS, (32, 16)))
    monkeypatch.setattr(test_engine, "HEADS", 2)


# -- against the reference ---------------------------------------------------------------------------------------------


interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and no GPU")


@interpreted
@pytest.mark.parametrize("case", DISTANCES, ids=str)
def test_biases_of_the_distance_equal_the_reference(case: Case, small_tiles: None) -> None:
    check(case, run=run_distances)


# The interpreter takes a second for each.
@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("case", GRID, ids=str)
def test_all_biases_with_all_that_is_around_them(case: Case, small_tiles: None) -> None:
    check(case, run=run_distances, length=52)


@pytest.mark.grid
@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_scans_equal_the_reference(case: Case, forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = importlib.import_module("hf_posenc.attention.gpu.tiles")
    monkeypatch.setattr(tiles, "ROWS_AND_COLUMNS", dict.fromkeys(tiles.ROWS_AND_COLUMNS, (16, 16)))
    check(case, length=29)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")
class TestCompiled:
    """The same on a GPU: odd lengths over many tiles, compiled."""

    @pytest.mark.parametrize("case", [*DISTANCES, *IN_TURN, *KERNELS], ids=str)
    def test_equals_the_reference(self, case: Case) -> None:
        check(case, length=301, device="cuda", run=run if case in KERNELS else run_distances)

    @pytest.mark.parametrize("width", [16, 64, 80, 128])
    @pytest.mark.parametrize("name", ["stick_breaking", "cope", "kerple", "fire"])
    def test_widths_of_heads(self, name: str, width: int) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check(Case(name, options=OPTIONS.get(name, {}), dtype=dtype, width=width), length=301, device="cuda")

    @pytest.mark.parametrize("name", ["stick_breaking", "cope", "fox", "kerple", "fire"])
    def test_memory_does_not_grow_with_the_square(self, name: str) -> None:
        peaks = []
        for length in (4096, 8192):
            torch.cuda.reset_peak_memory_stats()
            run(Case(name, dtype=torch.bfloat16), None, length=length, device="cuda")
            peaks.append(torch.cuda.max_memory_allocated())
        assert peaks[1] < 2.5 * peaks[0]


# -- what runs ---------------------------------------------------------------------------------------------------------


CHOICES = [
    ("rope", {}, "sdpa"),
    ("kerple", {}, "triton (distance table)"),
    ("fire", {}, "triton (straight pieces)"),
    ("fox", {}, "channels"),
    ("cope", {}, "triton (gate count)"),
    ("stick_breaking", {}, "triton (stick)"),
    ("shaw", {}, "dense"),
]


def test_the_structure_of_a_scheme_decides(forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.CompiledExecutor, "passed", lambda *call: True)
    for name, options, want in CHOICES:
        scheme = make(Case(name, options=options))
        q, kv = torch.zeros(1, HEADS, 40, HEAD_DIM), torch.zeros(1, KV_HEADS, 40, HEAD_DIM)
        places = torch.arange(40)[None]
        call = Call(scheme, q, kv, kv, Positions(places, places), 39, 1.0, Mask("slots"))
        executor = choose(call)
        assert executor.name in executors(scheme)
        assert executor.describe(call) == want
        # A few queries are not worth a kernel.
        assert choose(call.part(0, 8, 40)).name in ("dense", "sdpa")


@pytest.mark.parametrize("name", ["kerple", "cope"])
def test_a_mask_that_is_added_goes_by_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(trial, "available", lambda device: True)
    (places, _), operands = plain(5), (torch.randn(1, heads, 5, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    call = functools.partial(
        attend, make(Case(name)), *operands, query_positions=places, key_positions=places, mask=torch.randn(1, 1, 5, 5)
    )
    torch.testing.assert_close(call(executor="triton"), call(executor="dense"))


def test_without_a_gpu_they_are_refused() -> None:
    message = r"Executor 'triton' cannot run KERPLE\. Available: dense, blocks, fused\."
    with pytest.raises(OptionError, match=message):
        run(Case("kerple"), "triton")


# -- the trial ---------------------------------------------------------------------------------------------------------


class Tried(trial.CompiledExecutor):
    """A kernel that does as it is told."""

    name = "tried"

    def __init__(self, change: Callable[[Call], Call] = lambda call: call, factor: float = 1.0) -> None:
        self.change, self.factor = change, factor

    def structure(self, scheme: Scheme) -> Bias | None:
        return scheme.added()

    def run(self, call: Call) -> tuple[Tensor, None]:
        return self.factor * Blocks().run(self.change(call))[0], None


def fail(call: Call) -> Call:
    raise RuntimeError("PTX version too new")


RIGHT, FAILING = Tried(), Tried(fail)
WRONG = [
    (Tried(factor=1.1), "is off by 1.0e-01 in its output"),
    (Tried(lambda call: replace(call, k=call.k.detach() + 0 * call.k)), "is off by 1.0e\\+00 in its gradient of k"),
    (FAILING, "does not run \\(RuntimeError: PTX version too new\\)"),
]


def padded_call() -> Call:
    scheme, (places, mask) = make(Case("kerple")), left_padded(83)
    q, k, v = torch.randn(2, HEADS, 83, HEAD_DIM), *torch.randn(2, 2, KV_HEADS, 83, HEAD_DIM)
    at = Positions(places, places)
    return Call(scheme, q, k, v, at, reach=82, scale=0.2, mask=Mask("slots", keep=mask[:, None, None]))


@pytest.mark.parametrize("inference", [False, True])
def test_a_kernel_that_does_as_the_reference_is_used(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    monkeypatch.setattr(trial, "_PASSED", Once())
    with torch.inference_mode(inference):
        call = padded_call()
        assert RIGHT.passed(call)
        assert FAILING.passed(call), "it is tried once"
        monkeypatch.setattr(FAILING, "form", lambda call: "another form")
        with pytest.warns(UserWarning, match="does not run"):
            assert not FAILING.passed(call), "each form is tried"


@pytest.mark.parametrize(("kernel", "problem"), WRONG)
def test_any_other_is_not_used_and_says_so(monkeypatch: pytest.MonkeyPatch, kernel: Tried, problem: str) -> None:
    monkeypatch.setattr(trial, "_PASSED", Once())
    call = padded_call()
    with pytest.warns(UserWarning, match=f"The tried kernel for KERPLE {problem} on cpu. Attention goes by blocks"):
        assert not kernel.passed(call)
    assert not RIGHT.passed(call), "it is tried once"
