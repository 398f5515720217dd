"""What runs once, on first use, in every mode of torch: each case in a process of its own, with nothing before it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, graph
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import hf_posenc
from hf_posenc import Geometry, attend, build
from hf_posenc.attention.cpu import kernel

# One scheme for each form of an executor, with the number of tokens from which on that runs.
CALLS = {"alibi": 64, "fox": 64, "transformer_xl": 64, "cope": 520, "cape": 300, "liere": 64, "tape": 64}
Loss = Callable[..., Tensor]


def one_call(name: str) -> tuple[Loss, list[Tensor]]:
    """Return the loss of a call, and its operands."""
    length = CALLS[name]
    scheme = models.moved(build(name, Geometry(heads=4, kv_heads=2, head_dim=6, hidden_size=11, max_positions=64)))
    shapes = [(2, 4, length, 6), (2, 2, length, 6), (2, 2, length, 6), (2, length, 11)]
    operands, places = [torch.randn(shape, requires_grad=True) for shape in shapes], torch.arange(length)[None]

    def loss(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        found: Any = attend(scheme, q, k, v, query_positions=places, key_positions=places, hidden=hidden)
        return found.square().mean()

    return loss, operands


def counting(kept: list[int]) -> Any:
    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    return graph.saved_tensors_hooks(keep, lambda x: x)


def by_hooks(loss: Loss, operands: list[Tensor]) -> None:
    counts: tuple[list[int], list[int]] = ([], [])
    for kept in counts:
        with counting(kept):
            loss(*operands)
    assert counts[0] == counts[1], "the first forward keeps what any other does"


def by_selection(loss: Loss, operands: list[Tensor]) -> None:
    def chosen(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = operation in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, chosen)
    checkpoint(loss, *operands, use_reentrant=False, context_fn=contexts).backward()


def by_dual_numbers(loss: Loss, operands: list[Tensor]) -> None:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in operands]
        assert forward_ad.unpack_dual(loss(*duals)).tangent is not None


def by_fake_tensors(loss: Loss, operands: list[Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, contextlib.suppress(hf_posenc.ShapeError):
        loss(*(mode.from_tensor(x) for x in operands))


def by_threads(loss: Loss, operands: list[Tensor]) -> None:
    def run(number: int) -> None:
        with torch.set_grad_enabled(number % 2 == 0), torch.inference_mode(number % 3 == 0):
            found.append(float(loss(*operands)))

    found: list[float] = []
    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert max(found) - min(found) < 1e-5


def within(context: Callable[[], Any], loss: Loss, operands: list[Tensor]) -> None:
    with context():
        loss(*operands)


def trained(context: Callable[[], Any], loss: Loss, operands: list[Tensor]) -> None:
    with context():
        loss(*operands).backward()


MODES: dict[str, Callable[[Loss, list[Tensor]], object]] = {
    "checkpoint": lambda loss, given: checkpoint(loss, *given, use_reentrant=False).backward(),
    "reentrant checkpoint": lambda loss, given: checkpoint(loss, *given, use_reentrant=True).backward(),
    "selective checkpoint": by_selection,
    "hooks": by_hooks,
    "saved on the CPU": functools.partial(trained, graph.save_on_cpu),
    "counted": functools.partial(within, lambda: FlopCounterMode(display=False)),
    "anomalies": functools.partial(trained, torch.autograd.detect_anomaly),
    "no gradients": functools.partial(within, torch.no_grad),
    "inference": functools.partial(within, torch.inference_mode),
    "autocast": functools.partial(within, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "another device": functools.partial(within, lambda: torch.device("meta")),
    "func.grad": lambda loss, given: torch.func.grad(loss)(*(x.detach() for x in given)),
    "dual numbers": by_dual_numbers,
    "fake tensors": by_fake_tensors,
    "compiled": lambda loss, given: torch.compile(loss, backend="eager")(*given),
    "threads": by_threads,
}


def check_call(mode: str, name: str) -> None:
    """Run a call in a mode, and then any other way."""
    assert not kernel._TRIED._found
    loss, operands = one_call(name)
    MODES[mode](loss, operands)
    if name in ("alibi", "cope"):
        assert kernel.works(), "the trial is the same in any mode"
    # What inference mode or fake tensors left behind could not be part of a graph.
    found = torch.autograd.grad(loss(*operands), operands[:3])
    assert all(bool(x.isfinite().all()) and bool(x.any()) for x in found)
    with torch.no_grad():
        loss(*operands)


# -- processes ---------------------------------------------------------------------------------------------------------


def outcome(function: Callable[..., None], *arguments: str) -> str:
    """Return what came of a call in a copy of this process, which has imported everything and run nothing."""
    reader, writer = os.pipe()
    if not os.fork():
        try:
            function(*arguments)
            said = "right"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        os.write(writer, said.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.wait()
    return said or "the process died"


def check(*cases: tuple[str, str, str]) -> None:
    """Check cases, each first in its process: the function, and its arguments."""
    code = (
        "import json, sys, warnings; warnings.simplefilter('ignore'); import test_first_use as here\n"
        "print(json.dumps([here.outcome(getattr(here, name), *case) for name, *case in json.loads(sys.argv[1])]))"
    )
    paths = [str(Path(__file__).parent), str(Path(hf_posenc.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True)
    wrong = [f"{case}: {said}" for case, said in found if said != "right"]
    assert not wrong, "\n".join(wrong)


CALL = check_call.__name__
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are copies of one fresh process")


# Each process takes half a minute.
@pytest.mark.parametrize(
    "names",
    [pytest.param(("alibi", "fox"), marks=pytest.mark.grid), pytest.param(tuple(CALLS)[2:], marks=pytest.mark.slow)],
)
def test_first_uses(names: tuple[str, ...]) -> None:
    check(*((CALL, mode, name) for name in names for mode in MODES))
