from __future__ import annotations

import gc
import logging as python_logging
import os
import tempfile
from collections.abc import Iterator
from unittest import mock

import torch

# Read when Triton is imported, as some of the next modules do: without a GPU its kernels run in its interpreter.
os.environ["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

import grid
import pytest
from transformers.utils import logging

import hf_posenc
from hf_posenc import registry
from hf_posenc.attention import blocks

# Read when `datasets` is imported, also by the processes that tests start: nothing of a test stays in the user's home.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share that of the process that starts them
    _CACHE = tempfile.TemporaryDirectory(prefix="hf-posenc-tests-")
    os.environ["HF_DATASETS_CACHE"] = _CACHE.name
# Also for processes that tests start: the models are tiny, and the tests run in parallel.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.manual_seed notes for each of these who called it, and looks at every file on the stack to do so.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the grid before `-m` selects."""
    grid.mark(items)


def pytest_collection_finish() -> None:
    """Leave what is there to itself: each end of a training collects garbage, and would look at all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet_and_seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # whatever a test before left
    python_logging.getLogger("hf_posenc").setLevel(python_logging.NOTSET)  # the command line makes it quieter
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture
def plain_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw an empty picture: the true one has tests of its own, and takes a quarter of a short run."""
    from matplotlib.figure import Figure

    from hf_posenc.recipes.runs import report

    monkeypatch.setattr(report, "lines_figure", lambda *given: Figure(figsize=(1, 1)))


@pytest.fixture
def own_registry() -> Iterator[None]:
    """Forget schemes that a test registers."""
    hf_posenc.schemes()
    with mock.patch.dict(registry._SCHEMES):
        yield


@pytest.fixture
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the block executor take few rows at once, or short sequences would be one block."""
    monkeypatch.setattr(blocks, "rows_per_block", lambda *sizes: 4)
