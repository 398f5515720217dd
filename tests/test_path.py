"""PaTH against a product of matrices, one after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_contracts import HEADS, KV_HEADS, WIDTH, make, operands, run


@pytest.mark.parametrize("options", [{}, {"kernel": 2, "rank": 3, "gate": True}], ids=str)
@pytest.mark.parametrize("chunk", [2, 64])
def test_slow_reference(options: dict, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posenc.schemes.path._CHUNK", chunk)
    scheme, begins = make("path", "causal", options), [0, 0, 0, 0, 4, 4, 4]  # two packed sequences
    places = torch.arange(7) - torch.tensor(begins)
    mask = torch.tensor([[begins[i] <= j <= i for j in range(7)] for i in range(7)])
    given = operands(scheme, 7)
    got = run(scheme, given, places[None], mask=mask[None, None]).detach().numpy()
    values = {key: value.numpy() for key, value in scheme.state_dict().items()}
    q, k, v, hidden = (x.numpy() for x in given)
    for b, h in np.ndindex(len(q), HEADS):
        g = h // (HEADS // KV_HEADS)
        matrices = [reflection(scheme, values, hidden[b], begins[t], t, g) for t in range(7)]
        for i in range(7):
            weights = np.zeros(7)
            for j in range(begins[i], i + 1):
                x = q[b, h, i]
                for t in range(i, j, -1):
                    x = matrices[t] @ x
                weights[j] = math.exp(k[b, g, j] @ x / math.sqrt(WIDTH))
            want = weights @ v[b, g] / weights.sum()
            np.testing.assert_allclose(got[b, h, i], want, rtol=0, atol=1e-12)


def reflection(scheme, values, hidden: np.ndarray, first: int, t: int, g: int) -> np.ndarray:
    w = np.zeros(KV_HEADS * WIDTH)
    for back in range(scheme.kernel):
        if t - back >= first:
            projected = values["w_proj.1.weight"] @ values["w_proj.0.weight"] @ hidden[t - back]
            w += values["w_conv1d"][:, -1 - back] * projected
    w = (w / (1 + np.exp(-w))).reshape(KV_HEADS, WIDTH)[g]
    w /= np.linalg.norm(w)
    beta = 2 / (1 + math.exp(-(values["bt_proj.weight"][g] @ hidden[t] + values["bt_proj.bias"][g])))
    return np.eye(WIDTH) - beta * (values["gate_weight"][g] if scheme.gate else 1) * np.outer(w, w)
