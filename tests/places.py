"""Where 13 tokens may stand and what they may see, for schemes that count or walk over keys: [B|1, K] and [B, K, K]."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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
