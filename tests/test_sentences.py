"""Converted encoders inside folders of sentence-transformers: saved, loaded in a fresh process, the same embeddings.

Run it with `pip install sentence-transformers`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ENCODER, moved
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli

sentences = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.models")
pytestmark = [
    pytest.mark.slow,  # its import takes seconds, and two processes do it
    pytest.mark.filterwarnings("default"),  # of sentence-transformers
]

TEXTS = ["w7", "w9 w8 w12 w40 w8", "w41 " * 30]
SCHEMES = {"bert": "fire", "roberta": "rope", "modernbert": "kerple", "xlm_roberta": "disentangled"}
LOAD = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
if {plugin}: import hf_posenc
from sentence_transformers import SentenceTransformer
found = {{}}
for place in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    try:
        model = SentenceTransformer(str(place), device="cpu", trust_remote_code={remote})
    except Exception as error:
        assert "hf_posenc" in str(error) or "contains custom code" in str(error), error
    else:
        found[place.name] = model.encode({texts!r}, convert_to_tensor=True)
save_file(found, sys.argv[2])
"""


def words() -> Any:
    vocabulary = {"<unk>": 0, "<pad>": 1, **{f"w{index}": index for index in range(2, 60)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<pad>")


def encoder(kind: str) -> Any:
    config = AutoConfig.for_model(kind.replace("_", "-"), **ENCODER, bos_token_id=3, eos_token_id=4)
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


def test_embeddings_are_the_same_in_another_process(tmp_path: Path) -> None:
    wanted = {}
    for kind, scheme in SCHEMES.items():
        model = moved(hf_posenc.patch(encoder(kind), scheme), 0.2)
        model.save_pretrained(tmp_path / "plain" / kind)
        words().save_pretrained(tmp_path / "plain" / kind)
        inner = modules.Transformer(str(tmp_path / "plain" / kind))
        whole = sentences.SentenceTransformer(modules=[inner, modules.Pooling(32)], device="cpu")
        wanted[kind] = whole.encode(TEXTS, convert_to_tensor=True)
        batch = words()(TEXTS, return_tensors="pt", padding=True)
        with torch.no_grad():
            hidden = model(batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        mask = batch["attention_mask"][..., None]
        torch.testing.assert_close(wanted[kind], (hidden * mask).sum(1) / mask.sum(1))
        with torch.no_grad(), hf_posenc.disabled(model):
            assert not torch.allclose(hidden, model(**batch)[0], atol=0.01)
        whole.save(str(tmp_path / "whole" / kind))
    for plugin, remote, loads in ((True, False, True), (False, True, True), (False, False, False)):
        script, out = LOAD.format(plugin=plugin, remote=remote, texts=TEXTS), tmp_path / "found"
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "whole"), str(out)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = load_file(out)
        assert set(found) == (set(SCHEMES) if loads else set())
        for kind, vectors in found.items():
            assert torch.equal(vectors, wanted[kind]), (kind, plugin)


def test_embeddings_of_longer_texts(tmp_path: Path) -> None:
    """What `hf-posenc embed` writes reads longer texts than the original, in its own modules."""
    known = encoder("bert").config.max_position_embeddings
    encoder("bert").save_pretrained(tmp_path / "plain")
    words().save_pretrained(tmp_path / "plain")
    inner = modules.Transformer(str(tmp_path / "plain"))
    parts = [inner, modules.Pooling(32, pooling_mode="mean"), modules.Normalize()]
    sentences.SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "original"))
    length, out = 3 * known, tmp_path / "longer"
    # Each window has six words of its own.
    draw = torch.Generator().manual_seed(0)
    own = torch.randint(2, 60, (40, 6), generator=draw)
    numbers = own.gather(1, torch.randint(0, 6, (40, length), generator=draw)).flatten().tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in numbers))
    asked = ["kerple", str(out), "--text", str(tmp_path / "text.txt"), "--length", str(length), "--steps", "60"]
    done = CliRunner().invoke(cli.app, ["embed", str(tmp_path / "original"), *asked])
    assert done.exit_code == 0, done.output
    model = sentences.SentenceTransformer(str(out), device="cpu")
    assert model.max_seq_length == length
    assert [type(part).__name__ for part in model] == ["Transformer", "Pooling", "Normalize"]
    text = " ".join(f"w{number}" for number in numbers[: length + 9])
    long, cut, short = model.encode([text, " ".join(text.split()[:known]), "w7 w8"], convert_to_tensor=True)
    ids = words()(text, return_tensors="pt")["input_ids"][:, :length]
    with torch.no_grad():
        want = model[0].auto_model(ids).last_hidden_state.mean(1)[0]
    torch.testing.assert_close(long, torch.nn.functional.normalize(want, dim=0))
    torch.testing.assert_close(short, model.encode("w7 w8", convert_to_tensor=True))
    assert not torch.allclose(long, cut, atol=1e-3)
