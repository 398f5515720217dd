"""LoRA on a patched model: the scheme's parameters train, are saved with the adapter, and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import ARCHITECTURES, logits, loss, new_parameters, stacks_for, stock, tokens
from peft import LoraConfig, PeftModel, get_peft_model

import hf_posenc

# PEFT 0.21 asks transformers 5.23 for a name that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GEOMETRY = hf_posenc.Geometry(heads=4, kv_heads=2, head_dim=4, hidden_size=16, max_positions=64, last=False)
TRAINED = [name for name in hf_posenc.schemes() if list(hf_posenc.build(name, GEOMETRY).parameters())]
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"]}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scheme", TRAINED)
def test_lora_and_scheme_in_one_adapter(architecture: str, scheme: str, tmp_path: Path) -> None:
    ids = tokens(architecture, 2, 19)

    def base() -> torch.nn.Module:
        torch.manual_seed(4)
        start = stock(architecture)
        torch.manual_seed(4)
        return hf_posenc.patch(start, scheme, **stacks_for(architecture, scheme))

    plain = logits(base(), architecture, ids)
    config = LoraConfig(
        target_modules=TARGETS[architecture],
        modules_to_save=["hf_posenc", "hf_posenc_shared"],
        fan_in_fan_out=architecture == "gpt2",
    )
    model = get_peft_model(base(), config)
    torch.testing.assert_close(logits(model, architecture, ids), plain)
    before = {name: p.detach().clone() for name, p in new_parameters(model).items() if p.requires_grad}
    assert before
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loss(model, architecture, ids).backward()
    optimizer.step()
    moved = [name for name, p in new_parameters(model).items() if name in before and not torch.equal(p, before[name])]
    assert moved
    trained = logits(model.eval(), architecture, ids)
    assert (trained - plain).abs().max() > 1e-4

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    assert torch.equal(logits(loaded, architecture, ids), trained)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged, architecture, ids), trained, atol=1e-4, rtol=1e-4)
    hf_posenc.verify(merged)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(
        logits(type(merged).from_pretrained(tmp_path / "merged"), architecture, ids), logits(merged, architecture, ids)
    )
