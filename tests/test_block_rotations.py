"""LieRE and ComRoPE: values of the official code, gradients, starts, distances, and the plain rotation they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import moved
from official import golden
from torch import Tensor

from hf_posenc import Geometry, Positions, Scheme, build
from hf_posenc.equivalents import Rotation
from hf_posenc.operands import Projection, Tokens
from hf_posenc.schemes.families.block_rotary import find_planes, plane_generators, rotate, rotate_blocks

SCHEMES = ("liere", "comrope_ap", "comrope_ld")
DTYPES = [torch.float32, torch.float64]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def geometry(heads: int = 4, kv_heads: int | None = None, head_dim: int = 16, **changes: Any) -> Geometry:
    return Geometry(heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, hidden_size=64, **changes)


def project(scheme: Scheme, q: Tensor, k: Tensor, positions: Tensor, coords: Tensor | None = None) -> Projection:
    """Project tokens at positions `[S]`, or at coordinates `[S, n]`."""
    places = positions[None]
    where = None if coords is None else coords[None]
    return scheme.project(Tokens(positions=Positions(places, places, where, where)), q, k, k)


def heads(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def grid(rows: int, columns: int) -> Tensor:
    """Row and column of each cell, float64 `[rows * columns, 2]`."""
    return torch.cartesian_prod(torch.arange(rows).double(), torch.arange(columns).double())


# -- values of the official code ---------------------------------------------------------------------------------------

CASES = {"n1": ("base", "offset", "long"), "n2": ("grid4x4", "base_xx")}
PLACES = [(axes, place) for axes, places in CASES.items() for place in places]
# As the json files say in words.
LIERE_ATOL = {"base": (3e-5, 1e-10), "offset": (1e-4, 1e-10), "long": (1e-1, 1e-7)}
COMROPE_ATOL = {"long": (None, 1e-6)}


def check_golden(scheme: Scheme, values: dict[str, Tensor], case: str, dtype: torch.dtype, atol: float) -> None:
    coords, axes = values[f"{case}.coords"], scheme.axes
    q, k = values[f"{case}.q_in"].to(dtype), values[f"{case}.k_in"].to(dtype)
    calls = [project(scheme, q, k, torch.zeros(len(coords), dtype=torch.long), coords * scheme.unit)]
    positions = (coords[:, 0] * 16).round()
    if scheme.unit == 16 and torch.equal(positions[:, None].expand(-1, axes) / 16, coords):
        calls.append(project(scheme, q, k, positions.long()))
    for projected in calls:
        for got, name in ((projected.q, "q"), (projected.k, "k")):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), values[f"{case}.{name}"], rtol=0, atol=atol)
        logits = projected.q.double() @ projected.k.double().mT
        torch.testing.assert_close(logits, values[f"{case}.logits"], rtol=0, atol=16 * atol)
    assert len(calls) == (1 if case.endswith("grid4x4") or scheme.unit != 16 else 2)


@both_dtypes
@pytest.mark.parametrize("unit", [1.0, 16.0])
@pytest.mark.parametrize(("axes", "place"), PLACES)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_liere_is_the_official_one(size: int, axes: str, place: str, unit: float, dtype: torch.dtype) -> None:
    values, options = golden(f"liere_b{size}"), {"axes": int(axes[1]), "unit": unit, "init": "official"}
    scheme = build("liere", geometry(), block_size=size, **options)
    scheme.load_state_dict({"generator_raw_params": values[f"{axes}.raw"]})
    atol = LIERE_ATOL.get(place, LIERE_ATOL["base"])[dtype == torch.float64]
    check_golden(scheme, values, f"{axes}.{place}", dtype, atol)


@both_dtypes
@pytest.mark.parametrize("unit", [1.0, 16.0])
@pytest.mark.parametrize(("axes", "place"), PLACES)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["comrope_ap", "comrope_ld"])
def test_comrope_is_the_official_one(
    name: str, size: int, axes: str, place: str, unit: float, dtype: torch.dtype
) -> None:
    values, options = golden(name), {"axes": int(axes[1]), "unit": unit, "init": "official"}
    scheme = build(name, geometry(), block_size=size, **options).to(torch.float64)
    case = f"b{size}.{axes}"
    scheme.load_state_dict({key: values[f"{case}.{key}"] for key in scheme.state_dict()})
    # The official code ran in float64, with parameters that float32 does not hold.
    atol = COMROPE_ATOL.get(place, (2e-5, 1e-10))[dtype == torch.float64] or 2e-5
    check_golden(scheme, values, f"{case}.{place}", dtype, atol)


STARTS = {"base": torch.arange(13), "offset": torch.arange(100, 113), "long": torch.arange(100000, 100013)}


def pretrained(name: str, kind: str, **options: Any) -> Scheme:
    values = golden("rotary_funcpres")
    scaling = values[f"{kind}.attention_scaling"].item()
    return build(name, geometry(inv_freq=values[f"{kind}.inv_freq"], rotary_scaling=scaling), **options)


@both_dtypes
@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
@every_scheme
def test_the_start_on_a_rotary_model_is_its_rotation(name: str, kind: str, dtype: torch.dtype) -> None:
    values = golden("rotary_funcpres")
    for size in (2, 8, 16):
        scheme = pretrained(name, kind, block_size=size)
        assert scheme.facts(native_kept=False).exact
        assert not scheme.facts(native_kept=True).exact
        for place, positions in STARTS.items():
            projected = project(scheme, values["q"].to(dtype), values["k"].to(dtype), positions)
            # As the json says in words; where it is silent (float32, long), no worse than elsewhere.
            atol = 1e-9 if dtype == torch.float64 else 2e-5
            for got, part in ((projected.q, "q"), (projected.k, "k")):
                torch.testing.assert_close(got.double(), values[f"{kind}.{place}.{part}"], rtol=0, atol=atol)


# -- with the model's own rotation -------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("coords", [None, grid(1, 13)])
def test_channels_left_over_by_liere_keep_the_models_rotation(coords: Tensor | None, dtype: torch.dtype) -> None:
    inv_freq, positions = 100.0 ** -(torch.arange(12) / 12), torch.arange(13)
    shape = geometry(4, 2, 24, inv_freq=inv_freq, rotary_scaling=1.5)
    # The last coordinate of the grid is the position, and the base is on the first axis.
    coords = None if coords is None else coords.flip(-1)
    scheme = build("liere", shape, axes=2, block_size=16, unit=1.0)
    assert scheme.generator_raw_params.shape == (2, 1, 2, 16, 16)
    q, k = heads(1, 4, 13, 24, dtype=dtype), heads(1, 2, 13, 24, dtype=dtype, seed=1)
    rope = project(build("rope", shape), q, k, positions)
    got = project(scheme, q, k, positions, coords)
    torch.testing.assert_close(got.q, rope.q)
    torch.testing.assert_close(got.k, rope.k)
    got = project(moved(scheme, 1.0), q, k, positions, coords)
    # Planes 8 to 11 are in no block.
    turned = torch.tensor([0, 7, 12, 19])
    still = torch.tensor([8, 11, 20, 23])
    torch.testing.assert_close(got.q[..., still], rope.q[..., still])
    assert (got.q[..., turned] - rope.q[..., turned]).abs().amax((0, 1, 2)).min() > 0.1


# -- gradients ---------------------------------------------------------------------------------------------------------


def by_exponentials(scheme: Scheme, x: Tensor, coords: Tensor) -> Tensor:
    """Rotate `[B, H, S, D]` at coordinates `[S, n]` by exponentials of the generators, straight from the formula."""
    if "generator_raw_params" in scheme.state_dict():
        exponents = torch.einsum("sk,kgmij->sgmij", coords, scheme.generators())
    elif "multiplier" in scheme.state_dict():
        exponents = torch.einsum("sk,km,gmij->sgmij", coords, scheme.factors(), scheme.generators())
    else:
        blocks = scheme.generators().shape[1]
        exponents = torch.einsum(
            "sm,gmij->sgmij", coords[:, [j % scheme.axes for j in range(blocks)]], scheme.generators()
        )
    groups, blocks, size = exponents.shape[1:4]
    rotations = torch.matrix_exp(exponents)
    native = scheme.geometry.inv_freq is not None and scheme.init == "native"
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if native else x
    split = pairs.unflatten(-1, (blocks, size)).unflatten(1, (groups, -1))
    turned = torch.einsum("sgmij,bgrsmj->bgrsmi", rotations, split).flatten(1, 2).flatten(-2)
    turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if native else turned
    return turned * (scheme.geometry.rotary_scaling if native else 1.0)


@both_dtypes
@pytest.mark.parametrize("start", [False, True], ids=["moved", "start"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "zero"])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("given", [False, True], ids=["text", "coords"])
@pytest.mark.parametrize("size", [2, 8])
@every_scheme
def test_outputs_and_gradients_are_those_of_matrix_exponentials(
    name: str, size: int, given: bool, axes: int, native: bool, start: bool, dtype: torch.dtype
) -> None:
    frequencies = 10000.0 ** -(torch.arange(8) / 8) if native else None
    shape = geometry(4, 2, inv_freq=frequencies, rotary_scaling=1.25, max_positions=32)
    scheme = build(name, shape, axes=axes, block_size=size).to(dtype)
    if not start:
        moved(scheme, 3.0)
    length = 21
    q = heads(2, 4, length, 16, dtype=dtype).requires_grad_()
    k = heads(2, 2, length, 16, dtype=dtype, seed=1).requires_grad_()
    positions = torch.arange(5, 5 + length)
    coords = positions.double()[:, None].expand(-1, axes)
    if given:
        coords = torch.rand(length, axes, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    projected = project(scheme, q, k, positions, coords if given else None)
    twin = copy.deepcopy(scheme).double()
    exact_q, exact_k = (x.detach().double().requires_grad_() for x in (q, k))
    wanted = by_exponentials(twin, exact_q, coords), by_exponentials(twin, exact_k, coords)
    tight = {"rtol": 0, "atol": 1e-11 if dtype == torch.float64 else 2e-5}
    torch.testing.assert_close(projected.q.double(), wanted[0], **tight)
    torch.testing.assert_close(projected.k.double(), wanted[1], **tight)
    upstream = heads(2, 4, length, 16, seed=2), heads(2, 2, length, 16, seed=3)
    got = torch.autograd.grad(
        (projected.q, projected.k), (q, k, *scheme.parameters()), [up.to(dtype) for up in upstream], allow_unused=True
    )
    want = torch.autograd.grad(wanted, (exact_q, exact_k, *twin.parameters()), upstream, allow_unused=True)
    for one, other in zip(got, want, strict=True):
        # Without anything to turn, the factors of a linear dependence have no gradient, or one of zero.
        assert one is not None
        size_of_it = max(float(other.abs().max()), 1e-3)
        torch.testing.assert_close(one.double() / size_of_it, other / size_of_it, **tight)


SPECTRA = {
    "zero": [0.0, 0.0, 0.0, 0.0],
    "equal": [0.7, 0.7, 0.7, 0.7],
    "nearly equal": [0.7, 0.7 + 1e-9, 0.7 + 1e-5, 0.7 + 1e-3],
    "far apart": [1.0, 1e-4, 1e-8, 1e-13],
    "some still": [1.0, 0.3, 0.0, 0.0],
}


@both_dtypes
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gradients_where_planes_turn_alike(spectrum: str, mixed: bool, layout: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    generators = plane_generators(torch.tensor(SPECTRA[spectrum], dtype=torch.float64), 8)[None]
    if mixed:
        axes = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
        generators = axes @ generators @ axes.mT
    generators = ((generators - generators.mT) / 2).requires_grad_()
    times = (torch.arange(17) * 30.0).double()[None, :, None].requires_grad_()
    x = torch.randn(2, 1, 3, 17, 8, dtype=dtype, requires_grad=True)
    planes = find_planes(generators, 8, layout)
    eye = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(planes.axes.mT @ planes.axes, eye.expand(1, 1, 8, 8), rtol=0, atol=1e-14)
    diagonal = plane_generators(planes.frequencies.flatten(), 8)
    torch.testing.assert_close(
        planes.axes @ diagonal @ planes.axes.mT, generators[None].detach()[0], rtol=0, atol=1e-14
    )
    angles = (times.detach()[:, None, :, :, None] * planes.frequencies[:, None]).flatten(3)
    got = rotate(x, generators, times, planes, angles.cos().to(dtype), angles.sin().to(dtype))
    want = rotate_blocks(x.double(), torch.matrix_exp(times[..., None, None, None] * generators), layout)
    tight = {"rtol": 0, "atol": 1e-11 if dtype == torch.float64 else 3e-5}
    torch.testing.assert_close(got.double(), want, **tight)
    upstream = torch.randn_like(x)
    for one, other in zip(
        torch.autograd.grad(got, (x, generators, times), upstream),
        torch.autograd.grad(want, (x, generators, times), upstream.double()),
        strict=True,
    ):
        size = max(float(other.abs().max()), 1e-3)
        torch.testing.assert_close(one.double() / size, other.double() / size, **tight)


# -- without gradients -------------------------------------------------------------------------------------------------


@both_dtypes
@every_scheme
def test_what_is_remembered_without_gradients_follows_the_parameters(name: str, dtype: torch.dtype) -> None:
    scheme = moved(build(name, geometry(4, 2, max_positions=20)), 1.0)
    q, k, positions = heads(2, 4, 9, 16, dtype=dtype), heads(2, 2, 9, 16, dtype=dtype), torch.arange(3, 12)

    def check(scheme: Scheme) -> Tensor:
        wanted = project(scheme, q, k, positions)
        with torch.no_grad():
            got = [project(scheme, q, k, positions) for _ in range(2)]
            with pytest.MonkeyPatch.context() as patch:  # The third time, nothing is decomposed.
                patch.delattr("hf_posenc.schemes.families.block_rotary.find_planes")
                got.append(project(scheme, q, k, positions))
        assert all(torch.equal(one.q, wanted.q) and torch.equal(one.k, wanted.k) for one in got)
        return wanted.q

    first = check(scheme)
    twin = copy.deepcopy(scheme)
    # Optimizers and wrappers also write past autograd's count of changes.
    next(scheme.parameters()).data.mul_(1.5)
    assert not torch.equal(check(scheme), first)
    assert torch.equal(check(twin), first)
    # What inference mode leaves behind cannot be used in a graph.
    fresh = copy.deepcopy(scheme)
    with torch.inference_mode():
        project(fresh, q, k, positions)
    project(fresh, q.requires_grad_(), k, positions).q.sum().backward()


# -- distances ---------------------------------------------------------------------------------------------------------


def shift_error(scheme: Scheme, shift: Tensor) -> float:
    """How much logits change when all coordinates are shifted, as a share of their root mean square."""
    width, axes = scheme.geometry.head_dim, scheme.axes
    coords = torch.rand(25, axes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, positions = heads(2, 4, 25, width), heads(2, 4, 25, width, seed=1), torch.zeros(25, dtype=torch.long)
    with torch.no_grad():
        here, there = (project(scheme, q, k, positions, where) for where in (coords, coords + shift))
    before, after = here.q @ here.k.mT, there.q @ there.k.mT
    return float((after - before).square().mean().sqrt() / before.square().mean().sqrt())


@pytest.mark.parametrize(
    ("name", "size", "axes"),
    [
        *(("comrope_" + form, size, axes) for form in ("ap", "ld") for size in (2, 4) for axes in (1, 2, 3)),
        *(("liere", size, 1) for size in (2, 8, 24)),
        *(("liere", 2, axes) for axes in (2, 3)),
    ],
)
def test_only_differences_of_coordinates_count(name: str, size: int, axes: int) -> None:
    scheme = build(name, geometry(head_dim=24), axes=axes, block_size=size, init="official", unit=1.0)
    assert shift_error(scheme, torch.tensor([0.25, 0.1, -0.4][:axes]).double()) < 1e-13
    assert not any("shift" in text for text in scheme.facts(native_kept=False).cautions)


# -- a plain rotation in another basis ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("init", ["native", "zero", "official"])
@pytest.mark.parametrize("size", [2, 4, 8])
@every_scheme
def test_the_spectrum_says_what_happens_in_a_text(name: str, size: int, init: Any, axes: int) -> None:
    shape = geometry(4, 2, inv_freq=100.0 ** -(torch.arange(8) / 8), rotary_scaling=1.25, max_positions=9)
    scheme = moved(build(name, shape, axes=axes, block_size=size, init=init), 1.0)
    factor = 1.25 if init == "native" else 1.0
    found = scheme.stock_equivalent()
    assert isinstance(found, Rotation)
    frequencies, basis = found.frequencies, found.basis.mT / factor
    assert (frequencies.shape, basis.shape) == ((2, 8), (2, 16, 16))
    torch.testing.assert_close(basis.mT @ basis, torch.eye(16).double().expand(2, -1, -1))
    if name != "comrope_ld":  # whose factors may be negative
        in_blocks = frequencies.unflatten(-1, (-1, size // 2))
        assert in_blocks.min() >= 0
        assert in_blocks.diff(dim=-1).le(0).all()
    check_plain_rotation(scheme, found)


def check_plain_rotation(scheme: Scheme, rotation: Rotation) -> None:
    width, positions = scheme.geometry.head_dim, torch.tensor([0, 1, 7, 1000])
    groups = scheme.geometry.kv_heads
    q = heads(1, groups, 4, width)
    got = project(scheme, q.repeat_interleave(scheme.geometry.heads // groups, dim=1), q, positions).k
    angles = positions[:, None] * rotation.frequencies[:, None]
    u, w = (q @ rotation.basis.mT).chunk(2, dim=-1)
    turned = torch.cat((u * angles.cos() - w * angles.sin(), w * angles.cos() + u * angles.sin()), dim=-1)
    torch.testing.assert_close(got, turned @ torch.nn.functional.normalize(rotation.basis, dim=-1), rtol=0, atol=1e-9)
