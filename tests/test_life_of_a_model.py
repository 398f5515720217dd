"""Families as people use them: adapted by a recipe, pushed, loaded by name, evaluated, and with an adapter.

The windows of attention are shorter than the texts.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from hub import Hub, serving
from models import DIRECTORIES
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.schema.recipe import Recipe

pytestmark = pytest.mark.usefixtures("plain_pictures")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0,
}  # fmt: skip
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("CausalLM", MIXED),
    "modernbert": ("MaskedLM", {"local_attention": 16, "global_attn_every_n_layers": 2}),
}


def make(name: str, folder: Path, characters: int) -> Any:
    """Save a random model with a tokenizer and a text, and return its Auto class."""
    head, facts = KINDS[name]
    auto, tokenizer = getattr(transformers, f"AutoModelFor{head}"), AutoTokenizer.from_pretrained(DIRECTORIES["llama"])
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    torch.manual_seed(0)
    kind = transformers.CONFIG_MAPPING[name]
    auto.from_config(kind(**{**SIZES, **facts, "vocab_size": len(tokenizer)})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = "\n\n".join(topics[topic] for topic in sorted(topics))
    (folder / "text.txt").write_text(text[:characters], encoding="utf-8")
    return auto


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(20, 110).view(2, 45)).logits
    return found


def live(name: str, scheme: str, folder: Path, steps: int = 2, characters: int = 30_000) -> tuple[float, ...]:
    """Take a model from its stock checkpoint to the hub and back; return its perplexity before and after."""
    auto, text = make(name, folder / "stock", characters), folder / "stock" / "text.txt"
    sources = (f"model={folder / 'stock'}", f"data.source={text}", "conversion.fit=null")
    size = ("training.length=64", "training.batch_size=4", f"training.steps={steps}")
    measured = "evaluation={contexts: [64], windows: 4}"
    outcome = run.train(Recipe.read("swap", [f"scheme={scheme}", *sources, *size, measured]), folder / "run")
    trained = auto.from_pretrained(outcome.model)
    with serving(Hub(), folder / "home"):
        trained.push_to_hub("me/model")
        AutoTokenizer.from_pretrained(outcome.model).push_to_hub("me/model")
        loaded = auto.from_pretrained("me/model")
        assert torch.equal(logits(loaded), logits(trained))
        command = ["eval", "me/model", "--text", str(text), "--contexts", "64", "--samples", "2"]
        done = CliRunner().invoke(cli.app, [*command, "--out", str(folder / "eval")])
        assert done.exit_code == 0, done.output
    # The adapter carries the scheme onto the stock model.
    base = hf_posenc.patch(auto.from_pretrained(folder / "stock"), scheme)
    adapted = get_peft_model(base, hf_posenc.PosencLoraConfig(target_modules="all-linear"))
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key or "hf_posenc" in key:
            torch.nn.init.uniform_(parameter.data, 0.1, 0.5)
    adapted.save_pretrained(folder / "adapter")
    again = PeftModel.from_pretrained(auto.from_pretrained(folder / "stock"), folder / "adapter")
    assert torch.equal(logits(again), logits(adapted))
    return tuple(outcome.measurements.curve(which).samples.mean().exp().item() for which in ("before", "after"))


@pytest.mark.grid
@pytest.mark.parametrize(("name", "scheme"), list(zip(KINDS, ("fox", "kerple"), strict=True)))
def test_from_a_stock_checkpoint_to_the_hub_and_back(name: str, scheme: str, tmp_path: Path) -> None:
    before, after = live(name, scheme, tmp_path)
    assert before != after
