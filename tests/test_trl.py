"""TRL trains a converted model with no code beyond `patch`, and finds the right reference model; on demand.

python -m pytest tests/test_trl.py -m slow
"""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from models import DIRECTORIES, logits, tokens
from peft import PeftConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc import PosencLoraConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl, of the extra test"),
    # PEFT and TRL ask transformers 5.23 for names that are deprecated there.
    pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|FSDP).* is deprecated:FutureWarning"),
]

SENTENCES = ["The quick brown fox jumps over the lazy dog.", "A loop runs.", "Numbers are added in order, one by one."]
# What all trainers here are told.
QUIET: dict[str, Any] = {
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    "bf16": False, "dataloader_pin_memory": False,
}  # fmt: skip


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORIES["llama"])


def converted(scheme: str) -> Any:
    torch.manual_seed(0)
    return hf_posenc.patch(AutoModelForCausalLM.from_pretrained(DIRECTORIES["llama"]), scheme)


def logged(trainer: Any, key: str) -> list[float]:
    """Train, and return what was logged under a key."""
    trainer.train()
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def sft(model: Any, folder: Path, config: PeftConfig | None = None, **changes: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    sizes: dict[str, Any] = {"max_steps": 30, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_length": 48}
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(folder / "run"), **sizes, **changes, **QUIET),
        train_dataset=Dataset.from_dict({"text": 40 * SENTENCES}),
        processing_class=tokenizer(),
        peft_config=config,
    )


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], []])
def test_an_adapter_carries_what_sft_trained(targets: list[str], tmp_path: Path) -> None:
    config = PosencLoraConfig(target_modules=targets, task_type="CAUSAL_LM")
    trainer = sft(converted("fire"), tmp_path, config)
    losses = logged(trainer, "loss")
    assert sum(losses[-5:]) < sum(losses[:5])
    wanted = logits(trainer.model.eval(), "llama", tokens("llama", 2, 15))
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded.eval(), "llama", tokens("llama", 2, 15)), wanted)


@pytest.mark.parametrize("scheme", list(hf_posenc.schemes()))
def test_packed_texts_do_not_see_each_other(scheme: str, tmp_path: Path) -> None:
    trainer = sft(converted(scheme), tmp_path, packing=True)
    model = trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 4
    assert (batch.pop("labels")[0, starts] == -100).all()
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            alone = model(batch["input_ids"][:, start:end], use_cache=False).logits[0]
            torch.testing.assert_close(together[start:end], alone, atol=2e-4, rtol=1e-4)


TWO_STEPS: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-6, **QUIET}


def preferences(model: Any, folder: Path, reference: Any = None) -> list[float]:
    """Return the losses of two DPO steps."""
    from trl import DPOConfig, DPOTrainer

    rows = {"prompt": ["Once upon a time"], "chosen": [" there was a dog."], "rejected": [" xyz abc."]}
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(output_dir=str(folder / "dpo"), max_length=48, **TWO_STEPS),
        train_dataset=Dataset.from_dict({key: 8 * value for key, value in rows.items()}),
        processing_class=tokenizer(),
    )
    return logged(trainer, "loss")


def rewards(model: Any, folder: Path) -> list[float]:
    """Return the divergences from the reference of two GRPO steps."""
    from trl import GRPOConfig, GRPOTrainer

    sizes: dict[str, Any] = {"num_generations": 2, "max_completion_length": 8, "beta": 0.04}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(output_dir=str(folder / "grpo"), **sizes, **TWO_STEPS),
        train_dataset=Dataset.from_dict({"prompt": ["Once upon a time"] * 8}),
        processing_class=tokenizer(),
    )
    return logged(trainer, "kl")


@pytest.mark.parametrize(("train", "start"), [(preferences, math.log(2)), (rewards, 0.0)])
def test_the_reference_is_the_patched_model_or_an_error(train: Any, start: float, tmp_path: Path) -> None:
    with pytest.raises(hf_posenc.CheckpointError, match=r"was not saved\. Save it and load the folder"):
        train(converted("fire"), tmp_path)
    converted("fire").save_pretrained(tmp_path / "saved")
    tokenizer().save_pretrained(tmp_path / "saved")
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), str(tmp_path / "saved")):
        assert train(model, tmp_path)[0] == pytest.approx(start, abs=1e-5)
    model = converted("fire")
    assert preferences(model, tmp_path, copy.deepcopy(model))[0] == pytest.approx(math.log(2), abs=1e-5)
