"""`push_to_hub` uploads everything that a converted model needs, in one commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import Hub, serving
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_posenc

THEIR_CARD = "---\nlicense: mit\ntags:\n- mine\n---\n\n# A model of mine\n\nText of mine.\n"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Hub:
    """The hub after four pushes, to repositories of which one has a card."""
    folder = tmp_path_factory.mktemp("push")
    with serving(Hub(files={"me/with-card": {"README.md": THEIR_CARD.encode()}}), folder) as hub:
        converted().push_to_hub("me/fresh")
        converted().push_to_hub("me/with-card", commit_message="Convert", tags=["more"])
        converted().push_to_hub("me/sharded", max_shard_size="20KB")
        (folder / "saved").mkdir()
        converted().save_pretrained(folder / "saved", push_to_hub=True, repo_id="me/saved")
    assert hub.unknown == []
    return hub


def converted() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    return hf_posenc.patch(LlamaForCausalLM(config), "fire", threshold=64.0).eval()


def test_each_push_is_one_commit(hub: Hub) -> None:
    assert [commit[0] for commit in hub.commits] == ["me/fresh", "me/with-card", "me/sharded", "me/saved"]
    assert hub.commits[1] == ("me/with-card", None, "Convert")
    card = hub.files["me/with-card"]["README.md"].decode()
    assert "# A model of mine\n\nText of mine.\n" in card
    assert all(part in card.split("---")[1] for part in ("license: mit", "- mine", "- more"))


@pytest.mark.parametrize("repo", ["me/fresh", "me/with-card", "me/sharded", "me/saved"])
def test_a_commit_holds_all_that_the_model_needs(hub: Hub, repo: str, tmp_path: Path) -> None:
    files = hub.files[repo]
    weights = set(files) - {"config.json", "generation_config.json", "modeling_hf_posenc.py", "README.md"}
    assert len(files) == len(weights) + 4
    assert len(weights) > 3 if repo == "me/sharded" else weights == {"model.safetensors"}
    config = json.loads(files["config.json"])
    assert (config["model_type"], config["rope_parameters"]["rope_type"]) == ("hf_posenc_llama", "hf_posenc")
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_hf_posenc.PosencLlamaForCausalLM"
    assert b"PosencLlamaForCausalLM" in files["modeling_hf_posenc.py"]
    card = files["README.md"].decode()
    assert card.count("<!-- hf_posenc begin -->") == 1
    for part in ("## Positional encoding", "`fire`", "threshold=64.0", "- start: break", "import hf_posenc"):
        assert part in card
    assert "- hf_posenc" in card.split("---")[1]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    ids = torch.arange(14).view(2, 7)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, converted()(ids).logits)
