"""Where 13 tokens may stand and what they may see, for schemes that count or walk over keys: [B|1, K] and [B, K, K]."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posenc import Scheme, attend


def everything() -> tuple[Tensor, np.ndarray]:
    return torch.arange(13)[None], np.ones((2, 13, 13), dtype=bool)


def packed_documents() -> tuple[Tensor, np.ndarray]:
    """Positions and visibility of two rows of documents behind each other."""
    lengths = [[5, 1, 7], [3, 10]]
    document = [np.repeat(range(len(row)), row) for row in lengths]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return positions, np.stack([d[:, None] == d[None] for d in document])


def padded(side: str) -> tuple[Tensor, np.ndarray]:
    mask = np.ones((2, 13), dtype=bool)
    mask[1, :4] = False
    if side == "right":
        mask = mask[:, ::-1].copy()
    positions = torch.from_numpy((mask.cumsum(-1) - 1).clip(0))
    return positions, np.repeat(mask[:, None], 13, axis=1)


def skipping() -> tuple[Tensor, np.ndarray]:
    return torch.tensor([[0, 1, 2, 9, 10, 11, 12, 40, 41, 42, 300, 301, 1000]]), np.ones((2, 13, 13), dtype=bool)


def window() -> tuple[Tensor, np.ndarray]:
    near = np.abs(np.arange(13)[:, None] - np.arange(13)) < 4
    return torch.arange(13)[None], np.stack([near, near])


PLACES = {
    "everything": everything,
    "packed": packed_documents,
    "left padding": lambda: padded("left"),
    "right padding": lambda: padded("right"),
    "skipping": skipping,
    "window": window,
}


def same_as_loops(
    scheme: Scheme,
    operands: tuple[Tensor, ...],
    positions: Tensor,
    visible: np.ndarray,
    expected: np.ndarray,
    **call: Any,
) -> None:
    """Compare a scheme on all tokens, on the last six and on the last one, by each executor, with loops on all."""
    q, k, v = operands
    # A row of padding, which does not see itself, means nothing.
    seen = np.broadcast_to(visible.diagonal(axis1=1, axis2=2)[:, None], expected.shape[:3])
    for queries, executor in itertools.product((13, 6, 1), ("dense", "blocks")):
        rows, mask = slice(13 - queries, None), torch.from_numpy(visible[:, -queries:])
        at = {"query_positions": positions[:, rows], "key_positions": positions, "mask": mask, "executor": executor}
        got = attend(scheme, q[:, :, rows], k, v, **at, **call).detach().numpy()
        some = seen[:, :, rows]
        np.testing.assert_allclose(got[some], expected[:, :, rows][some], rtol=0, atol=1e-12)
