"""Image encoders at another size: what the table becomes, what is learned and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import DIRECTORIES
from PIL import Image
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    BeitConfig,
    BitImageProcessor,
    CLIPConfig,
    CLIPVisionConfig,
    Dinov2WithRegistersConfig,
    SiglipVisionConfig,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)
from typer.testing import CliRunner

from hf_posenc import cli
from hf_posenc.errors import ArchitectureError, OptionError
from hf_posenc.patches.images import body_of, check_encoder, resized, stretched
from hf_posenc.recipes.training.pictures import Pictures, enlarged, picture_files, side

OWN, PATCH = 16, 4
SIZES = {
    "image_size": OWN, "patch_size": PATCH, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 smooth pictures of several shapes, some of them in a folder inside."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    (folder / "inside").mkdir()
    for index in range(40):
        coarse = Image.fromarray(draw.integers(0, 256, (6, 5, 3), dtype=np.uint8))
        place = folder / ("inside" if index % 2 else ".") / f"{index:02}.{'jpg' if index % 3 else 'png'}"
        coarse.resize((60 + index, 70), Image.Resampling.BICUBIC).save(place)
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a classifier of images with its processor; not to be changed."""
    found = tmp_path_factory.mktemp("original")
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SIZES, num_labels=3))
    with torch.no_grad():
        body_of(model).embeddings.position_embeddings.normal_(std=0.5)
    model.save_pretrained(found)
    ViTImageProcessor(size={"height": OWN, "width": OWN}).save_pretrained(found)
    return found


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["enlarge", *map(str, arguments)])


def beit(**sizes: Any) -> BeitConfig:
    return BeitConfig(**sizes, vocab_size=9, use_relative_position_bias=True)


@pytest.mark.parametrize("kind", [ViTConfig, CLIPVisionConfig, SiglipVisionConfig, Dinov2WithRegistersConfig, beit])
def test_the_table_is_the_one_that_transformers_interpolates(kind: Any) -> None:
    """With a class token, without one, and with registers, which have no row in the table; and biases of offsets."""
    torch.manual_seed(0)
    stock = AutoModel.from_config(kind(**SIZES)).eval()
    for name, parameter in stock.named_parameters():
        if "bias_table" in name:
            parameter.data.normal_()
    pixels, larger = torch.randn(2, 3, 24, 24), resized(stock, 24)
    with torch.no_grad():
        wanted = stock(pixels, **stretched(stock)).last_hidden_state
        assert torch.equal(larger(pixels).last_hidden_state, wanted)
        assert not torch.equal(larger(pixels[..., :OWN, :OWN], **stretched(stock))[0], wanted)
    assert (stock.config.image_size, larger.config.image_size) == (OWN, 24)


def test_what_a_larger_picture_is_compared_with(pictures: Path) -> None:
    """The mean of the patches that lie in one of the original's, which sees the same picture at its own size."""
    torch.manual_seed(0)
    original = AutoModel.from_config(ViTConfig(**SIZES), add_pooling_layer=False).eval()
    processor = BitImageProcessor(size={"shortest_edge": 20}, crop_size={"height": OWN, "width": OWN})
    larger = enlarged(processor, 2 * OWN)
    assert (side(processor), side(larger), larger.size["shortest_edge"]) == (OWN, 2 * OWN, 40)
    files = picture_files(pictures)
    assert len(files) == 40
    samples = Pictures(files, (processor, larger), original)
    assert samples.schedule(5, torch.Generator()) == [OWN, 2 * OWN, OWN, 2 * OWN, OWN]
    shown = [Image.open(file).convert("RGB") for file in files[:2]]
    with torch.no_grad():
        pooled, states = samples.wanted(original, [0, 1], 2 * OWN)
        one = original(processor(shown, return_tensors="pt")["pixel_values"], output_hidden_states=True)
        pixels = samples.inputs([0, 1], 2 * OWN)
        found, own = samples.read(original, pixels)
        other = original(pixels, interpolate_pos_encoding=True).last_hidden_state
    assert torch.equal(pooled, one.last_hidden_state[:, 0])
    assert len(states) == len(own) == 3
    torch.testing.assert_close(states[-1], one.last_hidden_state)
    torch.testing.assert_close(states[0], one.hidden_states[1])
    torch.testing.assert_close(found, other[:, 0])
    grid = other[:, 1:].view(2, 4, 2, 4, 2, 32).mean((2, 4)).flatten(1, 2)
    torch.testing.assert_close(own[-1], torch.cat((other[:, :1], grid), dim=1))
    by_hand = F.cosine_similarity(grid, one.last_hidden_state[:, 1:], dim=-1).mean(-1).double()
    torch.testing.assert_close(samples.cosines((found, own), (pooled, states))["patches"], by_hand, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("scheme", "bfloat16"), [(None, False), ("rope2d", True)])
def test_the_command_writes_a_checkpoint_for_larger_images(
    folder: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str | None, bfloat16: bool
) -> None:
    monkeypatch.setattr("hf_posenc.recipes.processes.bfloat16_pays", lambda width: bfloat16)
    out = tmp_path / "larger"
    asked = [
        "--images",
        pictures,
        "--steps",
        60,
        "--learning-rate",
        1e-3,
        "--json",
        *(["--scheme", scheme] if scheme else []),
    ]
    done = run(folder, out, *asked)
    assert done.exit_code == 0, done.output
    own, larger = json.loads(done.stdout)
    assert (own["pixels"], larger["pixels"]) == (OWN, 2 * OWN)
    for name in ("embedding", "patches"):
        assert own[f"{name}, original"] == pytest.approx(1, abs=1e-3)
        assert larger[f"{name}, before"] < larger[f"{name}, after"] <= 1
        if scheme is None:  # begins as the original does with an interpolated table
            assert larger[f"{name}, before"] == pytest.approx(larger[f"{name}, original"])
            assert own[f"{name}, before"] > 0.99
        else:
            assert own[f"{name}, before"] < own[f"{name}, after"]
    # Loaded again, the whole classifier reads the new size, and its features are nearer to the original's.
    model, processor = (
        AutoModelForImageClassification.from_pretrained(out).eval(),
        AutoImageProcessor.from_pretrained(out),
    )
    assert type(model).__name__ == ("PosencViTForImageClassification" if scheme else "ViTForImageClassification")
    original = ViTForImageClassification.from_pretrained(folder).eval()
    assert model.config.image_size == side(processor) == 2 * OWN
    assert torch.equal(model.classifier.weight, original.classifier.weight)
    samples = Pictures(picture_files(pictures)[-10:], (AutoImageProcessor.from_pretrained(folder), processor), original)
    with torch.no_grad():
        pixels = samples.inputs(list(range(10)), 2 * OWN)
        assert model(pixels).logits.shape == (10, 3)
        wanted = samples.wanted(original, list(range(10)), 2 * OWN)
        cosines = samples.cosines(samples.read(model, pixels), wanted)
    for name, found in cosines.items():
        assert float(found.mean()) == pytest.approx(larger[f"{name}, after"], abs=3e-3 if bfloat16 else 1e-5)
    if scheme:
        again = run(out, tmp_path / "again", *asked)
        assert "is converted already" in again.output


def test_what_is_refused(folder: Path, pictures: Path, tmp_path: Path) -> None:
    broken, empty, out = tmp_path / "broken", tmp_path / "empty", tmp_path / "out"
    for place in (broken, empty):
        place.mkdir()
    (broken / "a.png").write_bytes(b"no picture")
    for model, arguments, expected in (
        (folder, (out, "--images", empty), "There are no pictures in"),
        (folder, (out, "--images", broken), "a.png cannot be read"),
        (folder, (out, "--images", pictures, "--size", 0), "equal to 1"),
        (folder, (out, "--images", pictures, "--size", OWN), f"expected more than {OWN}"),
        (folder, (out, "--images", pictures, "--size", 30), "multiple of the patch size, 4 x 4"),
        (folder, (out, "--images", pictures, "-o", "base=3"), "Give --scheme"),
        (folder, (out, "--images", pictures, "--scheme", "learned"), "learned is a table for one size"),
        (folder, (broken, "--images", pictures), "broken"),
        (DIRECTORIES["llama"], (out, "--images", pictures), "'llama' read no images"),
    ):
        done = run(model, *arguments)
        assert done.exit_code, arguments
        assert expected in " ".join(done.output.split()), (expected, done.output)
        assert not out.exists()
    with pytest.raises(ArchitectureError, match="'clip' has an image encoder and more"):
        check_encoder(CLIPConfig())
    free = ViTImageProcessor(size={"height": OWN, "width": 2 * OWN})
    with pytest.raises(OptionError, match="expected squares of one size"):
        side(free)
