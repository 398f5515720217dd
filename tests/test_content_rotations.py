"""Rotations by content: slow references, and the start on top of positions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_contracts import HEADS, KV_HEADS, WIDTH, make, operands, run
from torch import Tensor

from hf_posenc.scheme import Scheme

PLACES = torch.tensor([[0, 1, 2, 7, 0, 1]])  # two packed sequences


def repo_places(scheme: Scheme, values: dict[str, np.ndarray], hidden: np.ndarray) -> np.ndarray:
    """`[S, G, M]`."""
    gate, content = hidden @ values["gate_map.weight"].T, hidden @ values["content_map.weight"].T
    found = (gate / (1 + np.exp(-gate)) * content) @ values["final_map.weight"].T
    return np.repeat(found[:, :, None], WIDTH // 2, axis=2)


def selective_places(scheme: Scheme, values: dict[str, np.ndarray], hidden: np.ndarray) -> np.ndarray:
    units = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)  # 4 heads are no divisor of 7 channels
    phi = units @ values["phi_proj.0.weight"].T @ values["phi_proj.1.weight"].T
    steps = np.zeros_like(phi)
    for t, back in np.ndindex(len(phi), scheme.kernel):
        first = 0 if t < 4 else 4
        if t - back >= first:
            steps[t] += values["phi_conv1d"][:, -1 - back] * phi[t - back]
    return steps.cumsum(0).reshape(len(phi), KV_HEADS, -1)


@pytest.mark.parametrize(
    ("name", "options", "places_of"),
    [
        ("repo", {"theta": 100.0}, repo_places),
        ("repo", {"init": "official"}, repo_places),
        ("selective_rope", {"kernel": 2}, selective_places),
        ("selective_rope", {"init": "official", "kernel": 4, "rank": 3}, selective_places),
    ],
    ids=["theta", "official", "kernel", "rank"],
)
def test_slow_reference(name: str, options: dict[str, Any], places_of: Any) -> None:
    scheme = make(name, "causal", options)
    given = operands(scheme, PLACES.shape[1])
    mask = (torch.arange(6) < 4)[:, None] == (torch.arange(6) < 4)
    mask &= torch.ones(6, 6).tril().bool()
    got = run(scheme, given, PLACES, mask=mask[None, None]).detach().numpy()
    values = {key: value.numpy() for key, value in scheme.state_dict().items()}
    q, k, v, hidden = (x.numpy() for x in given)
    frequencies = (scheme.theta or 1e4) ** (-2 * np.arange(WIDTH // 2) / WIDTH)
    for b, h in np.ndindex(len(q), HEADS):
        g = h // (HEADS // KV_HEADS)
        places = places_of(scheme, values, hidden[b])[:, g]
        if scheme.init == "native":
            places = places + PLACES[0].numpy()[:, None]
        turn = np.exp(1j * places * frequencies)
        of_q, of_k = ((x[:, : WIDTH // 2] + 1j * x[:, WIDTH // 2 :]) * turn for x in (q[b, h], k[b, g]))
        logits = (of_q @ of_k.conj().T).real / math.sqrt(WIDTH)
        weights = np.exp(logits) * mask.numpy()
        want = weights / weights.sum(-1, keepdims=True) @ v[b, g]
        np.testing.assert_allclose(got[b, h], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["repo", "selective_rope"])
def test_the_start_is_a_rotation_by_positions(name: str) -> None:
    own = {"inv_freq": torch.tensor([0.7]), "layout": "interleaved", "rotary_scaling": 1.3}
    given = operands(make("rope", "causal", {}), 5)
    places = torch.tensor([[0, 1, 2, 9, 300]])
    start: list[Tensor] = []
    for each in ("rope", name):
        scheme = make(each, "causal", {}, **own)
        scheme.reset_parameters()
        assert scheme.facts(native_kept=False).exact
        start.append(run(scheme, given, places))
    torch.testing.assert_close(*start, rtol=0, atol=1e-7)
