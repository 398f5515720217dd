"""Values of the official implementations, and how close one has to come."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_posenc import Scheme

GOLDENS = Path(__file__).parent / "goldens"


@functools.cache
def golden(name: str) -> dict[str, Tensor]:
    """Return the tensors of a golden, float64 unless its json says otherwise."""
    return load_file(GOLDENS / f"{name}.safetensors")


@functools.cache
def about(name: str) -> dict[str, Any]:
    """Return what the tensors of a golden are, and how close one has to come."""
    loaded: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text())
    return loaded


def load(scheme: Scheme, values: dict[str, Tensor]) -> Scheme:
    """Set every parameter and buffer; scalars of the official code have shape [1] here."""
    state = scheme.state_dict()
    assert set(values) == set(state)
    scheme.load_state_dict({name: value.reshape(state[name].shape) for name, value in values.items()})
    return scheme


def near(what: str, got: Tensor, want: Tensor, atol: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
