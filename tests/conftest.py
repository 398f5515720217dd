from __future__ import annotations

import os
import tempfile

import pytest
import torch
from transformers.utils import logging

# Read when `datasets` is imported, also by the processes that tests start: nothing of a test stays in the user's home.
_CACHE = tempfile.TemporaryDirectory(prefix="hf-posenc-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name


@pytest.fixture(autouse=True)
def _quiet_and_seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are tiny, and the tests run in parallel
    logging.set_verbosity_error()
    logging.disable_progress_bar()
