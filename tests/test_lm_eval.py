"""A converted checkpoint in lm-evaluation-harness, on a local task.

Run it with `pip install lm-eval; pytest -m slow tests/test_lm_eval.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIRECTORIES, stock
from transformers import AutoTokenizer

import hf_posenc

pytestmark = [
    pytest.mark.slow,
    # Of the harness and of what it imports.
    pytest.mark.filterwarnings("default"),
]

TASK = """
task: posenc_topics
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Questions whose answers are of different lengths, and a folder `tasks` that asks them."""
    found = [
        {"question": "The return value is a", "choices": [" string", " list of strings", " dog"]},
        {"question": "This function raises", "choices": [" an exception", " the roof"]},
        {"question": "If the argument is not given,", "choices": [" the default is used", " bananas"]},
    ]
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "tasks" / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in found), encoding="utf-8")
    (tmp_path / "tasks" / "posenc_topics.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    return found


def save(model: Any, folder: Path, tokenizer: Any) -> str:
    """Save a converted model with its tokenizer, and return its path."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def log_likelihoods(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[float]]:
    """The log-likelihood of every choice after its question, in a plain loop."""
    found = []
    for row in rows:
        scores = []
        for choice in row["choices"]:
            whole = tokenizer(row["question"] + choice, return_tensors="pt", add_special_tokens=False)["input_ids"]
            asked = len(tokenizer(row["question"], add_special_tokens=False)["input_ids"])
            likely = model(whole).logits.log_softmax(dim=-1)[0, asked - 1 : -1]
            scores.append(likely.gather(1, whole[0, asked:, None]).sum().item())
        found.append(scores)
    return found


@pytest.mark.parametrize("scheme", ["alibi", "fox"])
def test_a_converted_checkpoint_runs_in_lm_eval(scheme: str, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES["llama"])
    converted = hf_posenc.patch(stock("llama"), scheme)
    path = save(converted, tmp_path / "converted", tokenizer)
    expected = log_likelihoods(converted, tokenizer, rows)

    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    for model in (
        HFLM(pretrained=path, device="cpu", batch_size=2, dtype="float32"),
        HFLM(pretrained=converted, tokenizer=tokenizer, device="cpu", batch_size=2),
    ):
        assert type(model.model).__name__ == "PosencLlamaForCausalLM"
        found = lm_eval.simple_evaluate(model=model, tasks=["posenc_topics"], task_manager=manager, bootstrap_iters=0)
        samples = sorted(found["samples"]["posenc_topics"], key=lambda sample: sample["doc_id"])
        for sample, scores in zip(samples, expected, strict=True):
            assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(scores, abs=1e-3)
        right = sum(max(scores) == scores[0] for scores in expected)
        assert found["results"]["posenc_topics"]["acc,none"] == pytest.approx(right / len(rows))
