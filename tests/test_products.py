"""Products with one vector per distance, block by block: against the dense reference, with vectors that end and that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import loss, new_parameters, stock, tokens
from test_engine import compare, left_padded, make, one_attention, packed, plain, skipped
from torch import Tensor, nn

import hf_posenc
from hf_posenc import Geometry, Scheme
from hf_posenc.attention.cpu import fused, kernel
from hf_posenc.attention.cpu.products import ProductsBias
from hf_posenc.operands import Block
from hf_posenc.structures import RelativeProducts, Vectors

CASES: list[tuple[str, dict[str, Any]]] = [
    ("transformer_xl", {}),
    ("transformer_xl", {"clamp_len": 40}),
    ("transformer_xl", {"untie": True, "clamp_len": 128}),
    ("disentangled", {}),
    ("disentangled", {"max_distance": 1}),
    ("disentangled", {"max_distance": 40}),
    ("disentangled", {"max_distance": 170, "buckets": 16}),
    ("disentangled", {"max_distance": 64, "p2c": False}),
    ("disentangled", {"max_distance": 65, "c2p": False}),
]
every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[ProductsBias]:
    """Those that are made."""
    found: list[ProductsBias] = []
    made = ProductsBias.__init__

    def noted(self: ProductsBias, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(ProductsBias, "__init__", noted)
    return found


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layout", [plain, left_padded, packed], ids=lambda f: f.__name__)
@every_case
def test_equals_the_reference(name: str, options: dict[str, Any], layout: Any, groups: int, used: list) -> None:
    scheme = make(name, kv_heads=groups, **options).double()
    # Three blocks, the last of which is not full.
    places, mask = layout(301)
    got, want = (one_attention(scheme, executor, places, mask) for executor in ("fused", "dense"))
    compare(got, want, tolerance=1e-9)
    assert len(used) == 1


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from(CASES),
    length=st.integers(16, 420),
    queries=st.integers(16, 420),
    padding=st.integers(0, 90),
    start=st.integers(0, 300),
)
def test_equals_the_reference_behind_a_cache(
    case: tuple[str, dict[str, Any]], length: int, queries: int, padding: int, start: int
) -> None:
    scheme = make(case[0], **case[1]).double()
    mask, places = None, torch.arange(length)[None] + start
    if 0 < padding < length:
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, :padding] = False
        places = (mask.cumsum(-1) - 1).clamp_min(0) + start
    got, want = (one_attention(scheme, e, places, mask, queries=min(queries, length)) for e in ("fused", "dense"))
    compare(got, want, tolerance=1e-9)


@pytest.mark.parametrize("max_distance", [1, 2, 3])
def test_ends_next_to_a_query(max_distance: int) -> None:
    """What is near begins at a tile of keys, which must not be the one after the first query's own key."""
    scheme = make("disentangled", max_distance=max_distance).double()
    for before in (62, 63, 64, 127, 191):
        places = torch.arange(before + 16)[None]
        got, want = (one_attention(scheme, executor, places, None, queries=16) for executor in ("fused", "dense"))
        compare(got, want, tolerance=1e-9)


@pytest.mark.parametrize("numbers", [1, 2**15], ids=["pairs of heads", "rows of the batch"])
@every_case
def test_how_much_is_in_cache_at_once_makes_no_difference(
    name: str, options: dict[str, Any], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_IN_CACHE", numbers)
    scheme, (places, mask) = make(name, **options).double(), left_padded(97)
    got, want = (one_attention(scheme, executor, places, mask) for executor in ("fused", "dense"))
    compare(got, want, tolerance=1e-9)


@every_case
def test_positions_with_gaps_go_another_way(name: str, options: dict[str, Any], used: list) -> None:
    scheme, (places, mask) = make(name, **options).double(), skipped(150)
    got, want = (one_attention(scheme, executor, places, mask) for executor in ("fused", "dense"))
    compare(got, want, tolerance=1e-9)
    assert not used


@pytest.mark.parametrize(("native", "strength"), [("remove", 1.0), ("keep", 1.0), ("keep", 0.3)])
@every_case
def test_in_a_model_that_keeps_its_rotation(
    name: str, options: dict[str, Any], native: str, strength: float, used: list
) -> None:
    """Queries and keys of the logits are rotated there, and those of the vectors are not."""
    model = hf_posenc.patch(stock("llama"), name, native=native, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    if native == "keep":
        hf_posenc.set_strength(model, scheme=strength)
    ids, found = tokens("llama", 2, 121), []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss(model, "llama", ids).backward()
        found.append({key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None})
        assert bool(used) == (implementation == "sdpa")
    assert found[0].keys() == found[1].keys()
    for key, want in found[0].items():
        torch.testing.assert_close(found[1][key], want, rtol=0, atol=2e-4 * max(1e-3, float(want.abs().max())), msg=key)


@every_case
def test_without_the_private_kernel(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_kernel_works", lambda: False)
    scheme, (places, mask) = make(name, **options).double(), left_padded(150)
    got, want = (one_attention(scheme, executor, places, mask) for executor in ("fused", "dense"))
    compare(got, want, tolerance=1e-9)


class _Everything(Scheme):
    """All that the structure has, which no scheme of the registry does."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        shape = (geometry.heads, 30, geometry.head_dim)
        self.of_queries, self.of_keys = (nn.Parameter(torch.randn(shape[0] // n, *shape[1:])) for n in (2, 1))
        self.offset, self.always = (nn.Parameter(torch.randn(shape[0], shape[2])) for _ in range(2))

    def reset_parameters(self) -> None:
        pass

    def added(self) -> RelativeProducts:
        tables = Vectors(self.of_queries, self.of_keys, self.offset, self.always)
        return RelativeProducts(self._bias, lambda _: tables)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self._bias(block, logits, q, k)

    def _bias(self, block: Block, like: Tensor, q: Tensor, k: Tensor) -> Tensor:
        index = 29 - block.distance().clamp(0, 29)
        scale, shared = self.geometry.scale, self.geometry.heads // self.geometry.kv_heads
        k = k.repeat_interleave(shared, dim=1)
        by_query = self.of_queries.repeat_interleave(2, dim=0)[:, index]  # [H, B, q, K, D]
        found = torch.einsum("bhqd,hbqkd->bhqk", q + self.offset[:, None], by_query.expand(-1, len(q), -1, -1, -1))
        by_key = (self.of_keys[:, index] + self.always[:, None, None, None]).expand(-1, len(q), -1, -1, -1)
        return scale * (found + torch.einsum("bhkd,hbqkd->bhqk", k, by_key))


@pytest.mark.parametrize("layout", [plain, left_padded], ids=lambda f: f.__name__)
def test_all_vectors_together(layout: Any, used: list) -> None:
    torch.manual_seed(0)
    scheme = _Everything(Geometry(heads=4, kv_heads=2, head_dim=6, hidden_size=11)).double()
    places, mask = layout(170)
    got, want = (one_attention(scheme, executor, places, mask) for executor in ("fused", "dense"))
    compare(got, want, tolerance=1e-9)
    assert len(used) == 1


def test_what_is_far_passes_no_products(used: list) -> None:
    scheme = make("disentangled", max_distance=20)
    one_attention(scheme, "fused", *plain(400))
    (bias,) = used
    assert bias.far == 19  # that of 20 has a row of its own no more
    assert all(
        x.shape[1] < 400 for name, x in zip(bias.names, bias.inputs, strict=True) if name in ("falling", "rising")
    )
