"""Encodings that were changed after loading: `plan` and `patch` go by the config, and refuse what differs from it."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, TINY, stock, tokens
from torch import nn

import hf_posenc
from hf_posenc import ArchitectureError
from hf_posenc.patches.architecture import of_model

ANY = [*ARCHITECTURES, *TINY]


def body_of(model: Any) -> Any:
    return next(iter(of_model(model).stacks(model).values()))


ROTATING = [name for name in ANY if hasattr(body_of(stock(name)), "rotary_emb")]


class Other(nn.Module):
    """A rotation of the user's."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return self.stock(x, position_ids * 0.5, *args, **kwargs)


def slower(body: Any) -> None:
    for name, buffer in body.rotary_emb.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)


def edited(body: Any) -> None:
    parameters = copy.deepcopy(body.config.rope_parameters)
    for part in [parameters, *parameters.values()]:
        if isinstance(part, dict) and "rope_theta" in part:
            part["rope_theta"] *= 4
    body.config.rope_parameters = parameters


def replaced(body: Any) -> None:
    body.rotary_emb = Other(body.rotary_emb)


def rotating_otherwise(body: Any) -> None:
    forward = body.rotary_emb.forward
    body.rotary_emb.forward = lambda x, position_ids, *args, **kwargs: forward(x, position_ids / 2, *args, **kwargs)


def far_away(body: Any) -> None:
    forward = body.rotary_emb.forward

    def later(self: Any, x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        far = position_ids.max() >= body.config.max_position_embeddings
        return forward(x, position_ids / 4 if far else position_ids, *args, **kwargs)

    body.rotary_emb.forward = types.MethodType(later, body.rotary_emb)


CHANGES = [slower, edited, replaced, rotating_otherwise, far_away]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ROTATING)
def test_a_rotation_that_was_changed_is_refused(name: str, change: Any) -> None:
    model = stock(name)
    change(body_of(model))
    for scheme in ("rope", "fire"):
        for act in (hf_posenc.plan, hf_posenc.patch):
            with pytest.raises(ArchitectureError, match="rot"):
                act(model, scheme)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        # The first two change their frequencies on long texts.
        *(("dynamic", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(("longrope", dtype) for dtype in (torch.float32, torch.float16)),
        *(("yarn", torch.bfloat16), ("linear", torch.float16), ("llama3", torch.bfloat16)),
    ],
)
def test_a_rotation_that_was_rounded_or_has_grown_is_accepted(kind: str, dtype: torch.dtype) -> None:
    pairs = stock("llama").config.head_dim // 2
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    more = {
        "longrope": {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs},
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    if kind in ("longrope", "llama3", "yarn"):
        parameters["original_max_position_embeddings"] = 32
    config = copy.deepcopy(stock("llama").config)
    config.rope_parameters, config.max_position_embeddings = {**parameters, **more.get(kind, {})}, 64
    model = type(stock("llama"))(config).to(dtype).eval()
    with torch.no_grad():
        model(tokens("llama", 1, 80))  # some types change their buffers then
    hf_posenc.patch(model.float(), "fire")


@pytest.mark.parametrize("name", [name for name in ANY if name not in ROTATING])
def test_a_table_of_another_size_is_refused(name: str) -> None:
    model = stock(name)
    body, change = body_of(model), {"t5": "relative_attention_max_distance", "gpt2": "n_positions"}
    field = change.get(name, "relative_attention_max_distance" if "t5" in name else "max_position_embeddings")
    field = "image_size" if name == "vit" else field
    setattr(body.config, field, getattr(body.config, field) * 2)
    with pytest.raises(ArchitectureError, match="config states"):
        hf_posenc.plan(model, "fire")
