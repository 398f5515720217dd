"""The contracts of `hf_posenc.testing`: every scheme keeps them with all its options, and each mistake breaks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import TINY, Largest, tiny
from torch import Tensor, nn
from variants import VARIANTS, identify, variants

from hf_posenc import ArchitectureError, DirectionError, Geometry, Scheme, attend, register_scheme, schemes
from hf_posenc.facts import Facts
from hf_posenc.forms import Bias
from hf_posenc.operands import Block, Projection, Tokens
from hf_posenc.testing import SCHEME_CONTRACTS, Case, check_architecture, check_scheme, draw, run

pytestmark = pytest.mark.usefixtures("several_blocks")

HEADS, KV_HEADS, WIDTH = 4, 2, 4
operands = draw


def make(name: str, direction: str, options: dict[str, Any], **shape: Any) -> Scheme:
    """Return a scheme in float64 whose parameters are away from their start."""
    return Case(name, direction == "causal", options).make(**shape)


CASES = [Case(name, direction == "causal", options) for name, direction, options in variants()]
# By default each scheme with its first set of options.
MARKED = [
    pytest.param(case, marks=[] if case.options == VARIANTS.get(case.name, [{}])[0] else pytest.mark.grid)
    for case in CASES
]


@pytest.mark.parametrize("contract", SCHEME_CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("case", MARKED, ids=lambda c: f"{c.name}-{identify(c.options)}-{c.causal}")
def test_every_scheme_keeps_every_contract(case: Case, contract: Callable[[Case], None]) -> None:
    contract(case)


@pytest.mark.parametrize("name", [name for name, info in schemes().items() if info.directions == ("causal",)])
def test_schemes_of_one_direction_refuse_the_other(name: str) -> None:
    with pytest.raises(DirectionError, match=f"{name} is defined for causal attention, got Geometry\\(causal=False"):
        Case(name, causal=False).make()


@pytest.mark.parametrize("name", [name for name, info in schemes().items() if info.family in ("additive", "rotary")])
def test_as_many_queries_as_keys_may_stand_elsewhere(name: str) -> None:
    """Queries 5 to 9 on keys 0 to 4, against the same among all ten."""
    scheme = Case(name).make()
    (q, k, v, hidden), places = draw(scheme, 10), torch.arange(10)[None]
    mask = torch.eye(10).bool()
    mask[5:] = places < 5
    whole = run(scheme, [q, k, v, hidden], places, mask=mask[None, None])[:, :, 5:]
    at = {"query_positions": places[:, 5:], "key_positions": places[:, :5]}
    torch.testing.assert_close(attend(scheme, q[:, :, 5:], k[:, :, :5], v[:, :, :5], **at), whole, rtol=0, atol=1e-11)


BY_ORDER = [case for case in CASES if case.name in ("cope", "fox", "fox_pro", "nope", "path", "stick_breaking")]


@pytest.mark.parametrize("case", BY_ORDER, ids=str)
def test_positions_matter_by_their_order_only(case: Case) -> None:
    scheme = case.make()
    given, jumps = draw(scheme, 9), torch.tensor([[0, 1, 2, 9, 10, 40, 41, 300, 3000]])
    assert torch.equal(run(scheme, given, torch.arange(9)[None]), run(scheme, given, jumps))


# A network of pairs has hidden numbers for each; a table of 512 distances is larger than the matrix here.
SMALL = [
    case for case in CASES
    if schemes()[case.name].family != "additive" and (case.name, case.options) != ("disentangled", {})
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_no_tensor_has_a_row_per_query_key_and_channel(case: Case) -> None:
    length = 48
    scheme = case.make(heads=2, kv_heads=1, head_dim=64)
    given = [x.requires_grad_() for x in draw(scheme, length, batch=1)]
    with Largest() as largest:
        run(scheme, given, torch.arange(length)[None], executor="dense").sum().backward()
    assert 2 * length * length <= largest.size < length * length * 64 // 4


# -- mistakes ----------------------------------------------------------------------------------------------------------


class Right(Scheme):
    """A bias per head on later keys, from which each mistake derives."""

    neutral_options = {"start": 0.0}

    def __init__(self, geometry: Geometry, *, start: float = 0.0) -> None:
        super().__init__(geometry)
        self.start = start
        self.bias = nn.Parameter(torch.empty(geometry.heads))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, self.start)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits - self.bias.to(logits)[:, None, None] * block.distance().to(logits)[:, None]


class Detached(Right):
    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return super().score(logits, q, k, block).detach() + 0 * logits


class OfSlots(Right):
    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits - self.bias.to(logits)[:, None, None] * torch.arange(logits.shape[-1], 0, -1).to(logits)


class OfAllQueries(Right):
    neutral_options = None

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        return Projection(q + q.mean(2, keepdim=True), k, v)


class Resolved(Right):
    def __init__(self, geometry: Geometry, *, start: float = 0.0) -> None:
        super().__init__(geometry, start=2 * start + 1)


class WrongForm(Right):
    def added(self) -> Bias:
        return Bias(lambda block, like: -2 * self.bias.to(like)[:, None, None] * block.distance().to(like)[:, None])


class WrongGradient(Right):
    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        once = super().score(logits, q, k, block)
        return once + super().score(logits, q, k, block) - super().score(logits, q, k, block).detach()


class Kept(Right):
    def __init__(self, geometry: Geometry, *, start: float = 0.0) -> None:
        super().__init__(geometry, start=start)
        self.factor = torch.ones(geometry.heads)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return super().score(logits * self.factor.to(logits)[:, None, None], q, k, block)


class Unused(Right):
    def __init__(self, geometry: Geometry, *, start: float = 0.0) -> None:
        super().__init__(geometry, start=start)
        self.other = nn.Parameter(torch.zeros(1))


class NotNeutral(Right):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, self.start + 0.1)


class Unbounded(Right):
    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        return Facts(tolerance=0.1 if native_kept else None)


MISTAKES: dict[type[Scheme], str] = {
    Detached: "parameters_are_learned",
    OfSlots: "padding_changes_nothing",
    OfAllQueries: "padding_changes_nothing",
    Resolved: "options_make_it_again",
    WrongForm: "executors_agree",
    WrongGradient: "gradients_are_derivatives",
    Kept: "weights_can_be_loaded",
    Unused: "weights_can_be_loaded",
    NotNeutral: "neutral_options_start_as_stated",
    Unbounded: "neutral_options_start_as_stated",
}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("kind", [Right, *MISTAKES])
def test_each_mistake_breaks_the_contract_that_names_it(kind: type[Scheme]) -> None:
    register_scheme("own", paper="none", family="additive", directions=("causal",))(kind)
    if kind is Right:
        check_scheme("own", start=0.5)
        return
    with pytest.raises(AssertionError, match=f"own \\(causal\\) breaks {MISTAKES[kind]}: "):
        check_scheme("own")


# -- architectures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.grid) for name in TINY if name != "bert"] + ["llama", "bert"]
)
def test_an_architecture_keeps_its_contracts(name: str) -> None:
    check_architecture(name, tiny(name) if name in TINY else None)


def test_an_architecture_that_breaks_a_contract_is_named() -> None:
    model, bodies = tiny("llama"), []
    model.model.layers[0].register_forward_hook(lambda module, given, output: bodies.append(0) or output + len(bodies))
    with pytest.raises(AssertionError, match="llama breaks own_encoding_changes_nothing: "):
        check_architecture("llama", model)
    with pytest.raises(ArchitectureError, match="There is no architecture 'granites'"):
        check_architecture("granites")
    with pytest.raises(ArchitectureError, match=r"'gemma3' .*small sizes alone \(it has .* parameters\). Pass one"):
        check_architecture("gemma3")
