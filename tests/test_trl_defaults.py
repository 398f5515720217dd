"""Trainers of TRL with default arguments, which turn on gradient checkpointing, in processes that computed nothing yet.

Each trainer runs in a fork of one process that has imported all and computed nothing, which is what a user's script has
done by then.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import DIRECTORIES

import hf_posenc

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl, of the extra test"),
    pytest.mark.skipif(sys.platform == "win32", reason="processes are not forked there"),
]

SCRIPT = r"""
import json, math, os, sys, tempfile, warnings
warnings.simplefilter("ignore")
import hf_posenc, torch, trl
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging
from hf_posenc.patches import patch
import hf_posenc.attention

model_name, cases = sys.argv[1], json.loads(sys.argv[2])
logging.set_verbosity_error()
disable_progress_bar()
torch.set_num_threads(1)
WORDS = "Once upon a time a quick brown fox jumped over a lazy dog, and the dog said nothing at all. "
PAIR = {"prompt": [WORDS], "chosen": [3 * WORDS], "rejected": [2 * WORDS + "xyz"]}
ROWS = {
    "SFT": {"text": [2 * WORDS]},
    "DPO": PAIR,
    "Reward": {key: PAIR[key] for key in ("chosen", "rejected")},
    "GRPO": {"prompt": [2 * WORDS]},
}


def train(trainer, scheme, folder):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no"}
    sizes = {"max_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1}
    if trainer == "GRPO":
        sizes |= {"num_generations": 2, "max_completion_length": 40}
    kind = AutoModelForSequenceClassification if trainer == "Reward" else AutoModelForCausalLM
    head = {"num_labels": 1} if trainer == "Reward" else {}
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # The reference of DPO is loaded by name.
    model = hf_posenc.patch(kind.from_pretrained(model_name, num_hidden_layers=2, **head), scheme)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = kind.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.pad_token_id
    arguments = getattr(trl, trainer + "Config")(folder + "/out", **quiet, **sizes)
    assert arguments.gradient_checkpointing
    given = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    run = getattr(trl, trainer + "Trainer")(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({key: 4 * value for key, value in ROWS[trainer].items()}),
        processing_class=tokenizer,
        **(given if trainer == "GRPO" else {}),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.train()
    if trainer == "DPO":  # the reference is the converted model, or the first loss would be another one
        assert abs(run.state.log_history[0]["loss"] - math.log(2)) < 1e-4, run.state.log_history[0]
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert moved, "no weight has moved"


for trainer, scheme in cases:
    child = os.fork()
    if not child:
        try:
            with tempfile.TemporaryDirectory() as folder:
                train(trainer, scheme, folder)
            print(json.dumps([trainer, scheme, ""]), flush=True)
        except BaseException as error:
            print(json.dumps([trainer, scheme, f"{type(error).__name__}: {error}"[:300]]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def trained(*cases: tuple[str, str]) -> dict[tuple[str, str], str]:
    """Train each scheme by a trainer, and return the errors."""
    command = [sys.executable, "-c", SCRIPT, str(DIRECTORIES["llama"]), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=Path(__file__).parent)
    found: Any = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert [(trainer, scheme) for trainer, scheme, _ in found] == list(cases), done.stderr[-3000:]
    return {(trainer, scheme): error for trainer, scheme, error in found if error}


@pytest.mark.grid
def test_trainers_with_default_arguments() -> None:
    assert trained(("SFT", "alibi"), ("SFT", "tape"), ("DPO", "fire")) == {}


@pytest.mark.slow
def test_every_scheme_with_default_arguments() -> None:
    others = [(trainer, scheme) for trainer in ("DPO", "GRPO", "Reward") for scheme in ("kerple", "fox_pro")]
    assert trained(*(("SFT", scheme) for scheme in hf_posenc.schemes()), *others) == {}
