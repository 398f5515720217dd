"""The executors of a GPU, against the dense reference.

Without one, `flex` runs as it was traced, and kernels in Triton's interpreter, which has to be on before Triton is
imported:

    TRITON_INTERPRET=1 python -m pytest tests/test_gpu_executors.py -m slow

On a GPU, compiled:

    python -m pytest tests/test_gpu_executors.py -m gpu
"""

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import test_engine
import torch
from test_engine import compare, compare_errors, left_padded, packed, plain, skipped
from torch import Tensor

from hf_posenc import OptionError, Positions, Scheme, attend
from hf_posenc.attention import Call, Mask, choose, executors
from hf_posenc.attention.blocks import Blocks
from hf_posenc.attention.gpu import flex, trial
from hf_posenc.attention.once import Once
from hf_posenc.forms import Bias

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 24
TRITON = importlib.util.find_spec("triton") is not None
# Tracing looks at tensors in a way that torch itself warns about, and hides.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
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

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        found = [self.name, self.layout.__name__, *(f"{k}={v}" for k, v in self.options.items()), kind]
        return "-".join(found + [f"last{self.queries}"] * bool(self.queries) + ["encoder"] * (not self.causal))


LONG, SHORT = {"threshold": 20.0}, {"threshold": 900.0}
FLEX = [
    Case("kerple", left_padded),
    Case("kerple", packed, queries=21),
    Case("t5", packed, causal=False),
    Case("alibi", skipped, {"learned_slopes": True}),
    Case("fire", packed, SHORT),
    *(Case(name, options=SHORT if name == "fire" else {}, dtype=torch.bfloat16) for name in ("kerple", "fire")),
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


def make(case: Case) -> Scheme:
    return test_engine.make(case.name, causal=case.causal, head_dim=HEAD_DIM, **case.options)


def run(
    case: Case, executor: str | None, *, length: int = 43, device: str = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and gradients of a random call."""
    dtype = dtype or case.dtype
    scheme = make(case).to(device, torch.float64 if dtype == torch.float64 else None)
    call = {"queries": case.queries, "dtype": dtype, "device": device}
    return test_engine.one_attention(scheme, executor, *case.layout(length), **call)


def check(case: Case, executor: str, *, length: int = 43, device: str = "cpu") -> None:
    got, want = (run(case, which, length=length, device=device) for which in (executor, "dense"))
    if case.dtype == torch.float32:
        # The gradient of a slope sums distances of thousands: 3e-5 of the largest in float32.
        near = 4e-5 if "learned_slopes" in case.options else 2e-5
        compare(got, want, tolerance=1e-4 if device == "cuda" else near)
        return
    exact = run(case, "dense", length=length, device=device, dtype=torch.float64)
    # The backward pass of `flex` starts from the rounded output, which leaves something of sums that are zero.
    there = {what: x for what, x in exact.items() if executor != "flex" or float(x.abs().max()) >= 1e-9}
    compare_errors(got, want, there, slack=3e-2)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executors of a GPU run on the CPU, and nothing else in their place."""

    def missed(*args: object) -> None:
        raise AssertionError("went by blocks")

    monkeypatch.setattr(trial, "available", lambda device: True)
    monkeypatch.setattr(Blocks, "run", missed)
    # torch has no kernel for the backward pass on a CPU, but the graph is there.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)


# -- against the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FLEX, ids=str)
def test_flex_equals_the_reference(case: Case, forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda device: flex._attention)
    check(case, "flex")


def test_flex_is_one_graph(forced: None) -> None:
    check(Case("kerple", packed), "flex")


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_kernels_equal_the_reference(case: Case, forced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = importlib.import_module("hf_posenc.attention.gpu.tiles")
    monkeypatch.setattr(tiles, "ROWS_AND_COLUMNS", dict.fromkeys(tiles.ROWS_AND_COLUMNS, (16, 16)))
    check(case, "triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not TRITON, reason="needs Triton without its interpreter")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(KERNELS)} passed" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")
class TestCompiled:
    """The same on a GPU: odd lengths over many tiles, compiled."""

    @pytest.mark.parametrize("case", [*FLEX, *KERNELS], ids=str)
    def test_equals_the_reference(self, case: Case) -> None:
        check(case, "flex" if case in FLEX else "triton", length=301, device="cuda")

    @pytest.mark.parametrize("width", [16, 64, 80, 128])
    @pytest.mark.parametrize("name", ["stick_breaking", "cope"])
    def test_widths_of_heads(self, name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(globals(), "HEAD_DIM", width)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check(Case(name, dtype=dtype), "triton", length=301, device="cuda")

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
    ("kerple", {}, "flex"),
    ("fire", SHORT, "flex"),
    ("fire", LONG, "fused (straight pieces)"),  # on a GPU: blocks
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


@pytest.mark.parametrize(("name", "executor"), [("kerple", "flex"), ("cope", "triton")])
def test_a_mask_that_is_added_goes_by_blocks(monkeypatch: pytest.MonkeyPatch, name: str, executor: str) -> None:
    monkeypatch.setattr(trial, "available", lambda device: True)
    (places, _), operands = plain(5), (torch.randn(1, heads, 5, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    call = functools.partial(
        attend, make(Case(name)), *operands, query_positions=places, key_positions=places, mask=torch.randn(1, 1, 5, 5)
    )
    torch.testing.assert_close(call(executor=executor), call(executor="dense"))


def test_without_a_gpu_they_are_refused() -> None:
    for executor in ("flex", "triton"):
        message = rf"Executor '{executor}' cannot run FoX\. Available: dense, blocks, fused, channels\."
        with pytest.raises(OptionError, match=message):
            run(Case("fox"), executor)


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
