"""Vision transformers: every bidirectional scheme, through all that a user does with a model that does not generate.

The cases come from the registry, as in test_matrix.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import IMAGES, SAME, moved
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    ASTConfig,
    ASTModel,
    AutoModel,
    AutoModelForImageClassification,
    BeitConfig,
    BeitModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

import hf_posenc
from hf_posenc.errors import ArchitectureError
from hf_posenc.operands import Block, Geometry, Positions
from hf_posenc.patches.images import grid_coords, resized
from hf_posenc.patches.patch import native_scheme
from hf_posenc.scheme import Scheme

SCHEMES = [name for name, info in hf_posenc.schemes().items() if "bidirectional" in info.directions]
SIDE, PATCH = 16, 4
# Larger than the trained size, and with more columns than rows.
WIDE = (20, 32)


def make(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**{**IMAGES, **changes})).eval()


def images(height: int = SIDE, width: int = SIDE, rows: int = 2) -> Tensor:
    return torch.randn(rows, 2, height, width, generator=torch.Generator().manual_seed(0))


def patched(name: str, **options: Any) -> PreTrainedModel:
    """Return a model whose new parameters are away from a start at which many schemes do nothing."""
    return moved(hf_posenc.patch(make(), name, **options))


@torch.no_grad()
def states(model: PreTrainedModel, pixels: Tensor | None = None, **call: Any) -> Tensor:
    """Return the hidden states of all tokens, `[B, 1 + patches, E]`."""
    return model.vit(images() if pixels is None else pixels, **call).last_hidden_state


def test_a_checkpoint_with_the_names_of_old_releases_is_converted(tmp_path: Path) -> None:
    """transformers writes the names that ViT checkpoints on the hub have, and renames them on loading."""
    make().save_pretrained(tmp_path / "stock")
    assert any("encoder.layer.0" in name for name in load_file(tmp_path / "stock" / "model.safetensors"))
    stock = ViTForImageClassification.from_pretrained(tmp_path / "stock")
    before = states(stock)
    assert torch.equal(before, states(make()))
    hf_posenc.patch(stock, "fire").save_pretrained(tmp_path / "converted")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "converted")
    assert torch.equal(states(loaded), states(stock))
    hf_posenc.unpatch(loaded).save_pretrained(tmp_path / "back")
    assert torch.equal(states(ViTForImageClassification.from_pretrained(tmp_path / "back")), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_converted_model_is_loaded_in_half_precision(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched("kerple").save_pretrained(tmp_path)
    monkeypatch.setattr("hf_posenc.patches.images._KNOWN", {})  # as in a process that has read no family yet
    assert AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("scheme", SCHEMES)
def test_images_of_any_size(scheme: str) -> None:
    model = patched(scheme, **({"num_positions": 60} if scheme == "learned" else {}))
    pixels = images(*WIDE)
    wide = states(model, pixels)
    assert wide.shape == (2, 1 + 5 * 8, 64)
    assert torch.equal(states(model, pixels, interpolate_pos_encoding=True), wide)
    torch.testing.assert_close(states(model, pixels[:1]), wide[:1], **SAME)
    with pytest.raises(hf_posenc.ShapeError, match=r"18 x 16 pixels; expected multiples of the patch size, 4 x 4"):
        states(model, images(18, 16))


def test_the_size_rule_of_transformers_holds_while_the_table_is_kept() -> None:
    stock = make()
    model = hf_posenc.patch(make(), "fire", native="keep")  # an exact start
    pixels = images(24, 32)
    for candidate in (stock, model):
        with pytest.raises(ValueError, match="doesn't match model"):
            states(candidate, pixels)
    wanted = states(stock, pixels, interpolate_pos_encoding=True)
    torch.testing.assert_close(states(model, pixels, interpolate_pos_encoding=True), wanted, **SAME)
    tall = make(image_size=[SIDE, 2 * SIDE])
    before = states(tall, images(SIDE, 2 * SIDE))
    assert torch.equal(states(hf_posenc.patch(tall, "nope", native="keep"), images(SIDE, 2 * SIDE)), before)


def test_the_table_fades() -> None:
    model, gone = (hf_posenc.patch(make(), "kerple", native=native, gate=False) for native in ("keep", "remove"))
    gone.load_state_dict(dict(model.state_dict()))  # without the record, which differs
    whole = states(model)
    hf_posenc.set_strength(model, native=0.5)
    half = states(model)
    assert (half - whole).abs().max() > 1e-3
    hf_posenc.set_strength(model, native=0)
    torch.testing.assert_close(states(model), states(gone), **SAME)
    hf_posenc.drop_native(model)
    assert torch.equal(states(model), states(gone))
    assert states(model, images(*WIDE)).shape[1] == 41


def test_coordinates_may_be_given() -> None:
    model = patched("alibi")
    grid = grid_coords(4, 4, torch.device("cpu"))
    assert grid_coords(2, 3, grid.device).tolist() == [[[0, 0], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]]
    before = states(model)
    assert torch.equal(states(model, position_coords=grid), before)
    each = torch.cat((grid, 2 * grid))
    both = states(model, position_coords=each)
    torch.testing.assert_close(both[:1], before[:1], **SAME)
    torch.testing.assert_close(both[1:], states(model, position_coords=2 * grid)[1:], **SAME)
    assert (both[1] - before[1]).abs().max() > 1e-3
    with torch.no_grad():
        assert model(images(), labels=torch.zeros(2, dtype=torch.long), position_coords=grid).loss.isfinite()
    with hf_posenc.disabled(model):
        assert torch.equal(states(model, position_coords=grid), states(make()))


# -- biases of offsets -------------------------------------------------------------------------------------------------


def beit(**changes: Any) -> Any:
    """Return a BEiT with a bias for each offset between patches, in each layer by default."""
    torch.manual_seed(0)
    how = {"use_relative_position_bias": True, "vocab_size": 9, **changes}
    model = BeitModel(BeitConfig(**{**IMAGES, **how})).eval()
    return moved(model, 0.5, only="position")


@pytest.mark.parametrize(
    "changes", [{}, {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}]
)
def test_biases_of_offsets_are_taken_over(changes: dict[str, Any], tmp_path: Path) -> None:
    stock, pixels = beit(**changes), images()
    with torch.no_grad():
        before = stock(pixels).last_hidden_state
        assert native_scheme(stock) == "t5_clipped"
        assert hf_posenc.plan(stock, "t5_clipped").start == "exact"
        model = hf_posenc.patch(beit(**changes), "t5_clipped")
        torch.testing.assert_close(model(pixels).last_hidden_state, before, **SAME)
        moved(model, 1.0, only="first")
        assert (model(pixels).last_hidden_state - before).abs().max() > 1e-3
        assert model(images(*WIDE)).last_hidden_state.shape[1] == 41
        # Padding is seen no more, now that no bias is in the way of its mask.
        mask = torch.ones(2, 17).index_fill(1, torch.tensor([15, 16]), 0)
        other = pixels.index_fill(3, torch.arange(8, 16), 7.0).where(torch.arange(16)[:, None] >= 12, pixels)
        got = [model(each, attention_mask=mask).last_hidden_state[:, :15] for each in (pixels, other)]
        torch.testing.assert_close(*got, **SAME)
        model.save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path).eval()
        assert torch.equal(again(pixels).last_hidden_state, model(pixels).last_hidden_state)
        assert torch.equal(hf_posenc.unpatch(again)(pixels).last_hidden_state, before)


@pytest.mark.parametrize("table", [False, True])
def test_biases_of_offsets_are_kept_and_fade(table: bool) -> None:
    stock = beit(use_absolute_position_embeddings=table)
    model = hf_posenc.patch(beit(use_absolute_position_embeddings=table), "kerple", native="keep")
    gone = hf_posenc.patch(beit(use_absolute_position_embeddings=table), "kerple", gate=True)
    with torch.no_grad():
        for size in ((SIDE, SIDE), WIDE):  # transformers interpolates the biases
            pixels = images(*size)
            torch.testing.assert_close(model(pixels).last_hidden_state, stock(pixels).last_hidden_state, **SAME)
        whole = model(pixels).last_hidden_state
        hf_posenc.set_strength(model, native=0.5)
        assert (model(pixels).last_hidden_state - whole).abs().max() > 1e-3
        hf_posenc.set_strength(model, native=0)
        torch.testing.assert_close(model(pixels).last_hidden_state, gone(pixels).last_hidden_state, **SAME)
        with hf_posenc.disabled(gone):
            assert torch.equal(gone(pixels).last_hidden_state, stock(pixels).last_hidden_state)
    assert not any(x.requires_grad for name, x in gone.named_parameters() if "bias_table" in name)
    assert hf_posenc.plan(stock, "t5_clipped").start == ("break" if table else "exact")  # no scheme has both


# -- sound -------------------------------------------------------------------------------------------------------------


def test_patches_of_a_spectrogram_lie_in_rows_of_frequencies(tmp_path: Path) -> None:
    """They overlap, there are 5 frequencies and 9 times, and two tokens come before them."""
    sizes = {"max_length": 30, "num_mel_bins": 16, "frequency_stride": 3, "time_stride": 3, **IMAGES}
    torch.manual_seed(0)
    stock = moved(ASTModel(ASTConfig(**sizes)).eval(), 0.5, only="position")
    sound = torch.randn(2, 30, 16)
    with torch.no_grad():
        before = stock(sound).last_hidden_state
        model = hf_posenc.patch(copy.deepcopy(stock), "learned")
        assert torch.equal(model(sound).last_hidden_state, before)
        model = hf_posenc.patch(model, "alibi")
        found = model(sound).last_hidden_state
        ways = [(5, 9), (9, 5)]
        given = [model(sound, position_coords=grid_coords(*way, sound.device, 2)).last_hidden_state for way in ways]
        assert torch.equal(given[0], found)
        assert (given[1] - found).abs().max() > 1e-3
        with pytest.raises(hf_posenc.ShapeError, match=r"\[31, 16\] frames and bins; expected \[30, 16\]"):
            model(torch.randn(2, 31, 16))
        model.save_pretrained(tmp_path)
        assert torch.equal(AutoModel.from_pretrained(tmp_path)(sound).last_hidden_state, found)
        assert torch.equal(hf_posenc.unpatch(model)(sound).last_hidden_state, before)
    with pytest.raises(ArchitectureError, match="read no images"):
        resized(stock, 32)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("yolos", "have 3 more tokens behind the patches"),
        ("vit_mae", "choose patches by chance"),
        ("pixtral", r"Pixtral\w*RotaryEmbedding, which is given \(x, position_ids\) and not the image itself"),
        ("data2vec-vision", "computes attention by itself"),
    ],
)
def test_images_that_cannot_be_read_are_refused(name: str, why: str) -> None:
    changes = {"num_detection_tokens": 3, "image_size": [SIDE, SIDE]} if name == "yolos" else {}
    model = AutoModel.from_config(CONFIG_MAPPING[name](**{**IMAGES, **changes}))
    with pytest.raises(ArchitectureError, match=why):
        hf_posenc.patch(model, "kerple")
    assert not hasattr(model.config, "posenc")


# -- forms for images --------------------------------------------------------------------------------------------------


def image_geometry(**changes: Any) -> Geometry:
    sizes = {"heads": 4, "kv_heads": 4, "head_dim": 8, "hidden_size": 32, "max_positions": 17}
    return Geometry(**{**sizes, "causal": False, "axes": 2, **changes})


def image_bias(scheme: Any, rows: int, columns: int) -> np.ndarray:
    """Return the bias of an image, `[H, S, S]`."""
    coords = grid_coords(rows, columns, torch.device("cpu"))
    places = torch.arange(coords.shape[1])[None]
    block = Block(Positions(places, places, coords, coords), reach=int(places.max()))
    zeros = torch.zeros(1, 4, coords.shape[1], coords.shape[1], dtype=torch.float64)
    return scheme.score(zeros, None, None, block)[0].detach().numpy()


def test_biases_of_an_image_go_by_offsets_on_the_grid() -> None:
    """ALiBi takes the distance, clipped T5 has a number for each offset; the class token, at the front, has none."""
    alibi = hf_posenc.build("alibi", image_geometry())
    t5 = hf_posenc.build("t5_clipped", image_geometry(), init="normal")
    assert (t5.max_distance, t5.r.shape) == (3, (4, 49))
    assert hf_posenc.build("t5_clipped", image_geometry(), max_distance=1).r.shape == (4, 9)
    table, slopes = t5.r.detach().numpy().reshape(4, 7, 7), 1 / np.array([4, 16, 64, 256])
    by_distance, by_offset = image_bias(alibi, 3, 6), image_bias(t5, 3, 6)
    places = [divmod(token, 6) for token in range(18)]
    for (query, (y, x)), (key, (v, u)) in itertools.product(enumerate(places, start=1), repeat=2):
        assert by_distance[:, query, key] == pytest.approx(-slopes * np.hypot(y - v, x - u))
        row, column = (min(max(offset, -3), 3) + 3 for offset in (y - v, x - u))
        assert by_offset[:, query, key] == pytest.approx(table[:, row, column])
    for bias in (by_distance, by_offset):
        assert not bias[:, 0].any()
        assert not bias[:, :, 0].any()


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_sinusoidal_of_an_image_is_that_of_column_and_row(layout: str) -> None:
    """MAE's `get_2d_sincos_pos_embed`, whose first half is that of the column."""
    scheme = hf_posenc.build("sinusoidal", image_geometry(), layout=layout, scale=0.5)
    coords, inputs = grid_coords(3, 5, torch.device("cpu")), torch.ones(1, 16, 32, dtype=torch.float64)
    got = scheme.embed(inputs, torch.arange(16)[None], coords)[0].numpy() - 1
    column_row = coords[0].numpy()[1:, ::-1, None] * 1e4 ** -(np.arange(8) / 8)  # [15, 2, 8]
    angles = 0.5 * np.stack((np.sin(column_row), np.cos(column_row)), axis=-2 if layout == "concat" else -1)
    np.testing.assert_allclose(got[1:], angles.reshape(15, 32), atol=1e-12)
    assert not got[0].any()


@pytest.mark.parametrize("scheme", ["alibi", "t5_clipped"])
def test_forms_for_images_act_in_the_model(scheme: str) -> None:
    """Through every executor: with queries of zero the weights are the softmax of the bias alone."""
    model = hf_posenc.patch(make(), scheme, **({"init": "normal"} if scheme == "t5_clipped" else {}))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model.vit.layers:
            layer.attention.q_proj.weight.zero_()
            layer.attention.q_proj.bias.zero_()
        weights = model(images(*WIDE), output_attentions=True).attentions
    own = next(module for module in model.modules() if isinstance(module, Scheme))
    wanted = torch.from_numpy(image_bias(own, 5, 8)).softmax(-1).float()
    for of_layer in weights:
        torch.testing.assert_close(of_layer, wanted.expand_as(of_layer), atol=1e-6, rtol=1e-5)
