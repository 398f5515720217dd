from __future__ import annotations

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True)
def _quiet_and_seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are tiny, and the tests run in parallel
    logging.set_verbosity_error()
    logging.disable_progress_bar()
