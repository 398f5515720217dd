"""What every scheme promises as a module, with all its options: derivatives, padding, order, memory, refusals."""

from typing import Any

import pytest
import torch
from models import Largest
from torch import Tensor
from variants import identify, variants

from hf_posenc import DirectionError, Geometry, Scheme, attend, build, schemes

pytestmark = pytest.mark.usefixtures("several_blocks")

CASES = variants()
every_case = pytest.mark.parametrize(("name", "direction", "options"), CASES, ids=identify)
HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 4, 7


def make(name: str, direction: str, options: dict[str, Any], **shape: Any) -> Scheme:
    """A scheme in float64 whose parameters are away from their start, and within any bounds."""
    torch.manual_seed(0)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH, "hidden_size": HIDDEN, "max_positions": 64}
    scheme = build(name, Geometry(**{**sizes, **shape}, causal=direction == "causal"), **options).double()
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter += 0.3 * torch.rand(parameter.shape, dtype=torch.float64)
    return scheme


def operands(scheme: Scheme, length: int, batch: int = 2) -> list[Tensor]:
    """Queries, keys, values and hidden states, float64."""
    shape, generator = scheme.geometry, torch.Generator().manual_seed(1)
    heads = [(batch, count, length, shape.head_dim) for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    sizes = [*heads, (batch, length, shape.hidden_size)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def run(scheme: Scheme, given: list[Tensor], places: Tensor, **call: Any) -> Tensor:
    q, k, v, hidden = given
    output: Tensor = attend(scheme, q, k, v, hidden=hidden, query_positions=places, key_positions=places, **call)
    return output


@every_case
def test_gradients_are_derivatives(name: str, direction: str, options: dict[str, Any]) -> None:
    scheme = make(name, direction, options, heads=2, kv_heads=1, head_dim=4, hidden_size=4)
    given = [x.requires_grad_() for x in operands(scheme, 4, batch=1)]
    places = torch.tensor([[0, 1, 2, 7]])

    def output(*given: Tensor) -> Tensor:
        return run(scheme, list(given[:4]), places, executor="dense")

    # The numerical derivative moves the parameters in place. It is taken along random directions.
    assert torch.autograd.gradcheck(output, (*given, *scheme.parameters()), eps=1e-7, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("mask", [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 1, 0]], ids=identify)
@every_case
def test_padding_changes_nothing(name: str, direction: str, options: dict[str, Any], mask: list[int]) -> None:
    """Padding to the left, in between and to the right, of any content, against the tokens alone."""
    scheme, real = make(name, direction, options), torch.tensor(mask).bool()
    given = operands(scheme, 5)
    alone = run(scheme, given, torch.arange(5)[None])
    wide = []
    for x in given:
        x_wide = 30 * torch.randn(*x.shape[:-2], len(mask), x.shape[-1], dtype=torch.float64)
        x_wide[..., real, :] = x
        wide.append(x_wide)
    places = (real.long().cumsum(-1) - 1).clamp_min(0)[None]
    for executor in ("dense", "blocks"):
        got = run(scheme, wide, places, mask=real.expand(2, -1), executor=executor)[:, :, real]
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", [name for name, info in schemes().items() if info.family in ("additive", "rotary")])
def test_as_many_queries_as_keys_may_stand_elsewhere(name: str) -> None:
    """Queries 5 to 9 on keys 0 to 4, against the same among all ten."""
    scheme = make(name, "causal", {})
    (q, k, v, hidden), places = operands(scheme, 10), torch.arange(10)[None]
    mask = torch.eye(10).bool()
    mask[5:] = places < 5
    whole = run(scheme, [q, k, v, hidden], places, mask=mask[None, None])[:, :, 5:]
    at = {"query_positions": places[:, 5:], "key_positions": places[:, :5]}
    torch.testing.assert_close(attend(scheme, q[:, :, 5:], k[:, :, :5], v[:, :, :5], **at), whole, rtol=0, atol=1e-11)


BY_ORDER = [case for case in CASES if case[0] in ("cope", "fox", "fox_pro", "nope", "path", "stick_breaking")]


@pytest.mark.parametrize(("name", "direction", "options"), BY_ORDER, ids=identify)
def test_positions_matter_by_their_order_only(name: str, direction: str, options: dict[str, Any]) -> None:
    scheme = make(name, direction, options)
    given, jumps = operands(scheme, 9), torch.tensor([[0, 1, 2, 9, 10, 40, 41, 300, 3000]])
    assert torch.equal(run(scheme, given, torch.arange(9)[None]), run(scheme, given, jumps))


# A network of pairs has hidden numbers for each; a table of 512 distances is larger than the matrix here.
SMALL = [case for case in CASES if schemes()[case[0]].family != "additive" and case[::2] != ("disentangled", {})]


@pytest.mark.parametrize(("name", "direction", "options"), SMALL, ids=identify)
def test_no_tensor_has_a_row_per_query_key_and_channel(name: str, direction: str, options: dict[str, Any]) -> None:
    length = 48
    scheme = make(name, direction, options, heads=2, kv_heads=1, head_dim=64)
    given = [x.requires_grad_() for x in operands(scheme, length, batch=1)]
    with Largest() as largest:
        run(scheme, given, torch.arange(length)[None], executor="dense").sum().backward()
    assert 2 * length * length <= largest.size < length * length * 64 // 4


@pytest.mark.parametrize("name", [name for name, info in schemes().items() if info.directions == ("causal",)])
def test_schemes_of_one_direction_refuse_the_other(name: str) -> None:
    with pytest.raises(DirectionError, match=f"{name} is defined for causal attention, got Geometry\\(causal=False"):
        make(name, "bidirectional", {})
