"""CAPE against the official code, against loops over pairs, and what follows from a network across heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import moved
from official import about, golden, load, near, randn
from torch import Tensor

from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.operands import Block

pytestmark = pytest.mark.usefixtures("several_blocks")

VALUES, STATED = golden("cape"), about("cape")["atol"]
ATOL = {torch.float64: STATED["float64"], torch.float32: STATED["official_f32"]}
EXECUTORS = ("dense", "blocks")

# The options of each group of a golden, and the group that its network and base are from.
CASES: dict[str, tuple[dict[str, str], str, str]] = {
    "alibi": ({"base": "alibi"}, "alibi", "alibi"),
    "kerple_log": ({"base": "kerple"}, "kerple_log", "kerple_log"),
    "fire": ({"base": "fire"}, "fire", "fire"),
    "nope": ({"base": "nope"}, "nope", "nope"),
    "add": ({"base": "alibi", "form": "add"}, "add", "alibi"),
    "add_residual": ({"base": "alibi", "form": "add_residual"}, "add", "alibi"),
}
BASES = ("alibi", "kerple", "fire", "t5", "t5_clipped", "sandwich", "nope")
FORMS = ("concat_residual", "add", "add_residual")
CHOICES = [{"base": base, "form": form} for base in BASES for form in FORMS if base != "nope" or form == FORMS[0]]
every_choice = pytest.mark.parametrize("options", CHOICES, ids=lambda given: "-".join(given.values()))
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def geometry(direction: str = "causal", **changes: Any) -> Geometry:
    shape = {"heads": 4, "kv_heads": 4, "head_dim": 8, "hidden_size": 32, **changes}
    return Geometry(causal=direction == "causal", **shape)


# -- the official code -------------------------------------------------------------------------------------------------


def official(case: str, dtype: torch.dtype) -> Scheme:
    options, network, base = CASES[case]
    scheme = build("cape", geometry(), **options).to(dtype)
    values = {}
    for group, mine in ((network, True), (base, False)):
        for key, value in VALUES.items():
            name = key.removeprefix(f"{group}.param.")
            if name != key and name != "slopes" and name.startswith("mlp2.") == mine:
                values[name if mine else f"base_bias.{name}"] = value
    return load(scheme, values)


def logits_of(scheme: Scheme, given: Tensor, query: Tensor, key: Tensor) -> Tensor:
    block = Block(Positions(query[None], key[None]), reach=int(max(query.max(), key.max())))
    return scheme.score(given, given.new_zeros(0), given.new_zeros(0), block)


SEEN = torch.ones(11, 11).tril().bool()


@every_dtype
@pytest.mark.parametrize("rows", [slice(None), slice(9, 11)], ids=["all", "offset"])
@pytest.mark.parametrize("case", CASES)
def test_cape_is_the_official_code(case: str, rows: slice, dtype: torch.dtype) -> None:
    scheme = official(case, dtype)
    q, k, v = (VALUES[name].to(dtype) for name in "qkv")
    q, places = q[:, :, rows], torch.arange(11)
    got = logits_of(scheme, q @ k.mT / math.sqrt(8), places[rows], places)
    assert got.dtype == dtype
    want = {kind: VALUES[f"{case}.{kind}"][:, :, rows] for kind in ("logits", "probs", "out")}
    near("logits", got[..., SEEN[rows]], want["logits"][..., SEEN[rows]], ATOL[dtype])
    at = {"query_positions": places[None, rows], "key_positions": places[None]}
    _, weights = attend(scheme, q, k, v, need_weights=True, **at)
    near("probs", weights, want["probs"], ATOL[dtype])
    for executor in EXECUTORS:
        near("out", attend(scheme, q, k, v, executor=executor, **at), want["out"], ATOL[dtype])


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@every_choice
def test_cape_is_its_equations(options: dict[str, str], direction: str) -> None:
    """The formulas of the paper, over the base bias, which is compared as a scheme of its own."""
    scheme = moved(build("cape", geometry(direction), mlp_width=5, **options), 0.3).double()
    places = torch.tensor([0, 1, 2, 3, 5, 17, 600])
    a, block = randn(2, 4, 7, 7), Block(Positions(places[None], places[None]), reach=600)
    b = torch.zeros_like(a) if scheme.base_bias is None else scheme.base_bias.bias(block, torch.float64).expand_as(a)
    concatenated = options["form"] == "concat_residual" and options["base"] != "nope"
    x = torch.cat((a, b), dim=1) if concatenated else a + b
    (first, first_bias), (second, second_bias) = (layer() for layer in scheme.mlp2.layers)
    hidden = torch.nn.functional.leaky_relu(x.movedim(1, -1) @ first.T + first_bias, 0.01)
    f = (hidden @ second.T + second_bias).movedim(-1, 1)
    near("logits", logits_of(scheme, a, places, places), (a if options["form"] == "add" else a + b) + f, 1e-12)
