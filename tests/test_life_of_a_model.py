"""Families as people use them: adapted by a recipe, pushed, loaded by name, evaluated, and with an adapter.

The windows of attention are shorter than the texts.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from hub import Hub, serving
from models import DIRECTORIES, moved
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run

pytestmark = pytest.mark.usefixtures("plain_pictures")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0,
}  # fmt: skip
KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "gemma3_text": (
        AutoModelForCausalLM, "fox", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "modernbert": (AutoModelForMaskedLM, "kerple", {"local_attention": 16, "global_attn_every_n_layers": 2}),
}  # fmt: skip


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(20, 110).view(2, 45)).logits
    return found


@pytest.mark.grid
@pytest.mark.parametrize("name", KINDS)
def test_from_a_stock_checkpoint_to_the_hub_and_back(name: str, tmp_path: Path) -> None:
    auto, scheme, facts = KINDS[name]
    base, text, tokenizer = (
        tmp_path / "stock",
        tmp_path / "text.txt",
        AutoTokenizer.from_pretrained(DIRECTORIES["llama"]),
    )
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    torch.manual_seed(0)
    auto.from_config(CONFIG_MAPPING[name](**{**SIZES, **facts, "vocab_size": len(tokenizer)})).save_pretrained(base)
    tokenizer.save_pretrained(base)
    text.write_text("\n\n".join(topics[topic] for topic in sorted(topics))[:30_000], encoding="utf-8")
    changes = f"""scheme={scheme} model={base} data.source={text} conversion.fit=null training.length=64
        training.batch_size=4 training.steps=2""".split()
    outcome = run.train(read_recipe("swap", [*changes, "evaluation={contexts: [64], windows: 4}"]), tmp_path / "run")
    trained = auto.from_pretrained(outcome.model)
    with serving(Hub(), tmp_path / "home"):
        trained.push_to_hub("me/model")
        AutoTokenizer.from_pretrained(outcome.model).push_to_hub("me/model")
        assert torch.equal(logits(auto.from_pretrained("me/model")), logits(trained))
        command = ["eval", "me/model", "--text", str(text), "--contexts", "64", "--samples", "2"]
        done = CliRunner().invoke(cli.app, [*command, "--out", str(tmp_path / "eval")])
        assert done.exit_code == 0, done.output
    # The adapter carries the scheme onto the stock model.
    patched = hf_posenc.patch(auto.from_pretrained(base), scheme)
    adapted = moved(get_peft_model(patched, hf_posenc.PosencLoraConfig(target_modules="all-linear")), 0.3, only="")
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(auto.from_pretrained(base), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))
