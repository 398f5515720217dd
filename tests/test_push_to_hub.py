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

OUR_SECTION = "<!-- hf_posenc begin -->"
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


REPOS = ["me/fresh", "me/with-card", "me/sharded", "me/saved"]


def test_each_push_is_one_authorised_commit(hub: Hub) -> None:
    assert [repo for repo, _ in hub.commits] == REPOS
    assert hub.commits[1] == ("me/with-card", "Convert")
    assert hub.unauthorised == []


@pytest.mark.parametrize("repo", REPOS)
def test_the_commit_holds_a_locked_config_weights_stub_and_card(hub: Hub, repo: str) -> None:
    files = hub.files[repo]
    assert {"config.json", "generation_config.json", "modeling_hf_posenc.py", "README.md"} <= set(files)
    weights = [name for name in files if name not in {"config.json", "generation_config.json", "README.md"}]
    weights.remove("modeling_hf_posenc.py")
    if repo == "me/sharded":
        weights.remove("model.safetensors.index.json")
        assert len(weights) > 2
        assert all(name.endswith(".safetensors") for name in weights)
    else:
        assert weights == ["model.safetensors"]
    config = json.loads(files["config.json"])
    assert config["model_type"] == "hf_posenc_llama"
    assert config["rope_parameters"]["rope_type"] == "hf_posenc"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_hf_posenc.PosencLlamaForCausalLM"
    assert b"PosencLlamaForCausalLM" in files["modeling_hf_posenc.py"]


@pytest.mark.parametrize("repo", REPOS)
def test_the_card_has_our_section_and_keeps_what_was_there(hub: Hub, repo: str) -> None:
    card = hub.files[repo]["README.md"].decode()
    assert card.count(OUR_SECTION) == 1
    for part in ("## Positional encoding", "`fire`", "threshold=64.0", "- start: break", "import hf_posenc"):
        assert part in card
    head = card.split("---")[1]
    assert "- hf_posenc" in head
    if repo == "me/with-card":
        assert "# A model of mine\n\nText of mine.\n" in card
        assert "license: mit" in head
        assert "- mine" in head
        assert "- more" in head


@pytest.mark.parametrize("repo", REPOS)
def test_what_was_pushed_loads_bit_equal(hub: Hub, repo: str, tmp_path: Path) -> None:
    for name, content in hub.files[repo].items():
        (tmp_path / name).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(14).view(2, 7)
    assert torch.equal(loaded(ids).logits, converted()(ids).logits)
