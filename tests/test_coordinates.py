"""Positions with several coordinates: from the helpers that make them, through every head, to generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import CACHE, SAME, inputs, loss, new_parameters, stock, tokens
from tiny import HEADS, call, first_output, make
from tiny import config as small
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc.coordinates import grid, join, stack
from hf_posenc.errors import PositionError

LANGUAGES = ("llama", "gpt2", "t5")

# -- helpers -----------------------------------------------------------------------------------------------------------


def test_grid_goes_row_by_row() -> None:
    assert grid(2, 3).tolist() == [[[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]]
    assert grid(2, 2, step=0.5).tolist() == [[[0, 0], [0, 0.5], [0.5, 0], [0.5, 0.5]]]
    for wrong in ((0, 3), (2, -1), (2.0, 3), (True, 3)):
        with pytest.raises(PositionError, match="expected a positive integer"):
            grid(*wrong)
    with pytest.raises(PositionError, match="expected a number above 0"):
        grid(2, 2, step=0.0)


def test_join_goes_on_behind_the_largest_coordinate() -> None:
    image = [[2, 2], [2, 3], [2, 4], [3, 2], [3, 3], [3, 4]]
    assert join(2, grid(2, 3), 2).tolist() == [[[0, 0], [1, 1], *image, [5, 5], [6, 6]]]
    assert join(grid(3, 1), 1, grid(1, 2)[0]).tolist() == [[[0, 0], [1, 0], [2, 0], [3, 3], [4, 4], [4, 5]]]
    assert join(2, 0, 1, axes=3).tolist() == [[[0] * 3, [1] * 3, [2] * 3]]
    for parts, message in (
        ((3,), "Give axes= for texts"),
        ((grid(1, 1), torch.zeros(1, 1, 3)), r"axes \[2, 3\]|\[2, 3\] axes"),
        ((torch.zeros(2, 1, 2),), r"got coordinates of shape \[2, 1, 2\]"),
        ((-1, grid(1, 1)), "got -1; expected a number of tokens"),
    ):
        with pytest.raises(PositionError, match=message):
            join(*parts)


def test_stack_pads_like_a_tokenizer() -> None:
    parts = [join(1, axes=2), join(3, axes=2)]
    assert stack(parts)[..., 0].tolist() == [[0, 0, 0], [0, 1, 2]]
    longer = [join(grid(1, 2)) + 5, grid(1, 1)]
    assert stack(longer)[..., 1].tolist() == [[5, 6], [0, 0]]
    assert stack(longer, padding_side="right")[..., 0].tolist() == [[5, 5], [0, 0]]
    assert stack([grid(1, 1) + 3, grid(1, 2)], padding_side="right")[..., 0].tolist() == [[3, 0], [0, 0]]
    with pytest.raises(PositionError, match="with one n"):
        stack([grid(1, 1), join(1, axes=3)])
    with pytest.raises(PositionError, match="expected 'left' or 'right'"):
        stack(parts, padding_side="top")


# -- forward -----------------------------------------------------------------------------------------------------------


def two_dimensional(architecture: str, **options: Any) -> PreTrainedModel:
    """A model whose mixed frequencies tell the axes apart clearly."""
    torch.manual_seed(0)
    return hf_posenc.patch(stock(architecture), "rope2d", init="official", unit=1.0, **options)


def with_coords(architecture: str, ids: Tensor, coords: Tensor) -> dict[str, Tensor]:
    return {**inputs(architecture, ids), "position_coords": coords}


@pytest.mark.parametrize("architecture", LANGUAGES)
def test_equal_coordinates_on_all_axes_are_positions(architecture: str) -> None:
    model, ids = two_dimensional(architecture), tokens(architecture, 2, 9)
    text = join(9, axes=2)
    with torch.no_grad():
        plain = model(**inputs(architecture, ids), use_cache=False).logits
        for coords in (text, text.long(), text.double(), text.expand(2, -1, -1)):
            got = model(**with_coords(architecture, ids, coords), use_cache=False).logits
            torch.testing.assert_close(got, plain, **SAME)
        image = model(**with_coords(architecture, ids, join(1, grid(2, 3), 2)), use_cache=False).logits
        assert (image - plain).abs().max() > 1e-2
        each = join(1, grid(2, 3), 2), text
        rows = model(**with_coords(architecture, ids, torch.cat(each)), use_cache=False).logits
    torch.testing.assert_close(rows[:1], image[:1], **SAME)
    torch.testing.assert_close(rows[1:], plain[1:], **SAME)


LANGUAGE_HEADS = [(name, head) for name, head in HEADS if name in LANGUAGES]


@pytest.mark.parametrize(("name", "head"), LANGUAGE_HEADS, ids=lambda value: getattr(value, "__name__", value))
def test_every_head_takes_coordinates(name: str, head: type) -> None:
    model = hf_posenc.patch(make(head, small(name)), "rope2d", init="official", unit=1.0)
    torch.manual_seed(1)
    ids = torch.randint(2, 60, (4, 10) if "DoubleHeads" in head.__name__ else (2, 10))
    ids[:, -1] = 1  # one head of T5 reads where this is
    arguments = call(model, ids)
    text, image = join(10, axes=2), join(2, grid(2, 3), 2)
    outputs = []
    for coords in (text, image):
        if "DoubleHeads" in head.__name__:
            coords = coords.expand(2, 2, -1, -1)
        with torch.no_grad():
            outputs.append(model(**arguments, position_coords=coords)[0])
    torch.testing.assert_close(outputs[0], first_output(model, ids), **SAME)
    assert (outputs[1] - outputs[0]).abs().max() > 1e-4
    short = {"position_coords": join(9, axes=2)}
    with pytest.raises(PositionError, match=r"position_coords of shape \[1, 9, 2\]; expected \[\d or 1, 10, 2\]"):
        model(**arguments, **short)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_chunks_with_their_own_coordinates_equal_one_forward(architecture: str) -> None:
    model, ids, coords = two_dimensional(architecture), tokens(architecture, 2, 11), join(3, grid(2, 3), 2)
    with torch.no_grad():
        once = model(ids, position_coords=coords).logits
        cache, parts = None, []
        for chunk, places in zip(ids.split((4, 2, 5), 1), coords.split((4, 2, 5), 1), strict=True):
            output = model(chunk, position_coords=places, **{CACHE: cache}, use_cache=True)
            cache = output[CACHE]
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), once, **SAME)


@pytest.mark.parametrize("architecture", LANGUAGES)
def test_gradient_checkpointing_sees_the_same_coordinates(architecture: str) -> None:
    model, ids, coords = two_dimensional(architecture), tokens(architecture, 2, 9), join(1, grid(2, 3), 2)
    model.train()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, position_coords=coords).loss.backward()
        return {name: p.grad.clone() for name, p in new_parameters(model).items() if p.grad is not None}

    plain = gradients()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-6, rtol=1e-4)
    model.zero_grad()
    loss(model, architecture, ids).backward()
    assert any((p.grad - plain[name]).abs().max() > 1e-5 for name, p in new_parameters(model).items())


@pytest.mark.parametrize(
    ("coords", "message"),
    [
        (torch.zeros(2, 9), r"shape \[2, 9\]; expected \[2 or 1, 9, 2\]"),
        (torch.zeros(2, 8, 2), r"shape \[2, 8, 2\]; expected \[2 or 1, 9, 2\]"),
        (torch.zeros(3, 9, 2), r"shape \[3, 9, 2\]; expected \[2 or 1, 9, 2\]"),
        (torch.zeros(2, 9, 3), r"shape \[2, 9, 3\]; expected \[2 or 1, 9, 2\]"),
        (torch.full((2, 9, 2), float("nan")), "not finite"),
    ],
)
def test_coordinates_that_do_not_fit_are_refused_at_the_door(coords: Tensor, message: str) -> None:
    model, ids = two_dimensional("llama"), tokens("llama", 2, 9)
    for run in (model, model.generate):
        with pytest.raises(PositionError, match=message):
            run(ids, position_coords=coords)
    with pytest.raises(PositionError, match=r"\[1, 8, 2\]; expected \[2 or 1, 9, 2\]"):
        two_dimensional("t5").generate(tokens("t5", 2, 9), position_coords=join(8, axes=2))
    with pytest.raises(PositionError, match="no scheme here reads coordinates"):
        hf_posenc.patch(stock("llama"), "rope")(ids, position_coords=torch.zeros(2, 9, 2))


# -- generation --------------------------------------------------------------------------------------------------------

PROMPT, NEW = 11, 10
COORDS = join(3, grid(2, 3), 2)


def prompt_of(architecture: str, rows: int = 2) -> dict[str, Any]:
    """Arguments of `generate`: ids, coordinates, and just as many new tokens as it is told."""
    ids = tokens(architecture, rows, PROMPT)
    settings = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "min_new_tokens": NEW}
    return settings | {"do_sample": False, "position_coords": COORDS}


def greedy_by_hand(model: PreTrainedModel, settings: dict[str, Any]) -> Tensor:
    """Choose tokens by whole forwards, each with coordinates for all its tokens."""
    ids = settings["inputs"]
    coords = settings["position_coords"].expand(len(ids), -1, -1)
    size, never = coords.shape[1], model.generation_config.eos_token_id
    for _ in range(NEW):
        places = text_after(coords, ids.shape[1] - size)
        with torch.no_grad():
            logits = model(ids, position_coords=places).logits[:, -1]
        logits[:, never] = float("-inf")  # as min_new_tokens has it
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
    return ids


def text_after(coords: Tensor, count: int) -> Tensor:
    following = torch.arange(1, count + 1)[None, :, None] + coords.amax(dim=(1, 2))[:, None, None]
    return torch.cat((coords, following.expand(-1, -1, coords.shape[2])), 1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_new_tokens_go_on_behind_the_largest_coordinate(architecture: str) -> None:
    model, settings = two_dimensional(architecture), prompt_of(architecture)
    want = greedy_by_hand(model, settings)
    assert torch.equal(model.generate(**settings, use_cache=False), want)
    assert torch.equal(model.generate(**settings), want)
    without = {name: value for name, value in settings.items() if "coords" not in name}
    assert not torch.equal(model.generate(**without), want)


@pytest.mark.parametrize("architecture", LANGUAGES)
def test_every_way_of_generating_sees_the_same_coordinates(architecture: str) -> None:
    model, settings = two_dimensional(architecture), prompt_of(architecture)
    plain = model.generate(**settings, use_cache=False)
    assert torch.equal(model.generate(**settings, cache_implementation="static"), plain)
    if architecture != "t5":
        assert torch.equal(model.generate(**settings, prefill_chunk_size=4), plain)
    for way in ({"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        without = model.generate(**settings, **way, use_cache=False)
        assert torch.equal(model.generate(**settings, **way), without)
    sampled = []
    for use_cache in (False, True):
        torch.manual_seed(5)
        sampled.append(
            model.generate(**{**settings, "do_sample": True}, num_return_sequences=2, top_k=0, use_cache=use_cache)
        )
    assert torch.equal(*sampled)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_assisted_decoding_sees_the_same_coordinates_or_refuses(architecture: str) -> None:
    model, settings = two_dimensional(architecture), prompt_of(architecture, rows=1)
    plain = model.generate(**settings)
    assert torch.equal(model.generate(**settings, prompt_lookup_num_tokens=3), plain)
    assistant = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        table = assistant.get_input_embeddings().weight
        table.mul_(1 + 0.2 * torch.randn_like(table))  # it must sometimes be wrong
    assert torch.equal(model.generate(**settings, assistant_model=assistant), plain)
    for blind in (stock(architecture), hf_posenc.patch(stock(architecture), "fire")):
        with pytest.raises(ValueError, match="position_coords"):
            model.generate(**settings, assistant_model=blind)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_left_padded_rows_equal_each_row_alone(architecture: str) -> None:
    model, settings = two_dimensional(architecture), prompt_of(architecture)
    pad, ids = 4, settings["inputs"].clone()
    ids[0, :pad] = 0
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    short = join(1, grid(2, 2), 2)
    # What stands at the padding must not count as the largest.
    coords = torch.cat((torch.cat((torch.full((1, pad, 2), 99.0), short), 1), COORDS))
    batch = {**settings, "inputs": ids, "attention_mask": mask, "position_coords": coords}
    got = model.generate(**batch)
    assert torch.equal(model.generate(**batch, use_cache=False), got)
    alone = {**settings, "inputs": ids[:1, pad:], "attention_mask": mask[:1, pad:], "position_coords": short}
    assert torch.equal(got[:1, -NEW:], model.generate(**alone)[:, -NEW:])


def test_attend_refuses_coordinates_that_do_not_fit() -> None:
    geometry = hf_posenc.Geometry(heads=2, kv_heads=2, head_dim=8, hidden_size=16)
    q, places = torch.randn(1, 2, 3, 8), torch.arange(3)[None]
    at = {"query_positions": places, "key_positions": places}
    with pytest.raises(hf_posenc.PositionError, match="Got key_coords, but no scheme here reads"):
        hf_posenc.attend(hf_posenc.build("kerple", geometry), q, q, q, **at, key_coords=torch.zeros(1, 3, 2))
    scheme = hf_posenc.build("rope2d", geometry)
    for wrong in (torch.zeros(1, 3, 3), torch.zeros(1, 2, 2), torch.zeros(3, 2)):
        with pytest.raises(hf_posenc.PositionError, match=r"query_coords of .* expected \[1 or 1, 3, 2\]"):
            hf_posenc.attend(scheme, q, q, q, **at, query_coords=wrong)
    two = q.expand(2, -1, -1, -1)  # of which each row has coordinates of its own, and both have one row of positions
    hf_posenc.attend(scheme, two, two, two, **at, query_coords=torch.zeros(2, 3, 2))
