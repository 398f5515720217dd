"""The contracts of schemes and architectures as functions, for the tests of your own ones.

`check_scheme("window")` and `check_architecture("granite")` raise an `AssertionError` that names the broken contract.
`SCHEME_CONTRACTS` has the contracts one by one, for a test runner that parametrizes over them.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_posenc.attention import attend, executors
from hf_posenc.errors import ArchitectureError
from hf_posenc.operands import Geometry
from hf_posenc.patches.architecture import architectures
from hf_posenc.patches.patch import native_scheme, patch, unpatch
from hf_posenc.patches.plan import plan
from hf_posenc.registry import build, get, schemes
from hf_posenc.scheme import Scheme

_SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden_size": 7, "max_positions": 128}
# Sizes of a random model, in the words of several configs.
_SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 66, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_heads": 4, "image_size": 8, "patch_size": 4, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
# Parameters of a model that is made for a check.
_MOST = 2**20
_HEADS = (
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,  # first: encoders also have heads that generate
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING,
)


@dataclass(frozen=True)
class Case:
    """A scheme with options, in one direction of attention."""

    name: str
    causal: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, **shape: Any) -> Scheme:
        torch.manual_seed(0)
        return build(self.name, Geometry(**{**_SHAPE, **shape}, causal=self.causal), **self.options)

    def make(self, **shape: Any) -> Scheme:
        """Return the scheme in float64 with parameters away from their start."""
        scheme = self.build(**shape).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in scheme.parameters():
                parameter.add_(0.3 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
        return scheme


def draw(scheme: Scheme, length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shape, generator = scheme.geometry, torch.Generator().manual_seed(2)
    heads = [(batch, count, length, shape.head_dim) for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    sizes = [*heads, (batch, length, shape.hidden_size)]
    return [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]


def run(scheme: Scheme, given: list[Tensor], places: Tensor, **call: Any) -> Any:
    """Return the result of `attend`, with a projection for schemes that use the layer's own."""
    q, k, v, hidden = given
    shape, generator = scheme.geometry, torch.Generator().manual_seed(3)
    count = shape.heads + shape.kv_heads
    weight = torch.randn(shape.hidden_size, count * shape.head_dim, generator=generator, dtype=hidden.dtype)

    def host(x: Tensor) -> tuple[Tensor, Tensor]:
        both = (x.to(weight) @ weight).view(*x.shape[:2], count, -1).transpose(1, 2)
        return both[:, : shape.heads], both[:, shape.heads :]

    last = places[:, places.shape[1] - q.shape[2] :]
    return attend(scheme, q, k, v, hidden=hidden, query_positions=last, key_positions=places, host=host, **call)


def positions(scheme: Scheme, length: int) -> Tensor:
    """Return positions `[1, length]` that the scheme covers."""
    return torch.arange(length)[None].clamp_max((scheme.facts().end or length) - 1)


def _close(got: Tensor, want: Tensor, atol: float) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


# -- contracts of a scheme ---------------------------------------------------------------------------------------------


def gradients_are_derivatives(case: Case) -> None:
    """Gradients equal numerical derivatives, for operands, hidden states and parameters."""
    scheme = case.make(heads=2, kv_heads=1, hidden_size=4)
    given = [x.requires_grad_() for x in draw(scheme, 4, batch=1)]
    places = torch.tensor([[0, 1, 2, 7]])

    def output(*given: Tensor) -> tuple[Tensor, Tensor]:
        *operands, hidden = given[:4]
        hidden = scheme.embed(hidden, places)
        return run(scheme, [*operands, hidden], places, executor="dense"), hidden

    # The numerical derivative moves the parameters in place. It is taken along random directions.
    assert torch.autograd.gradcheck(output, (*given, *scheme.parameters()), eps=1e-7, atol=1e-5, fast_mode=True)


def padding_changes_nothing(case: Case) -> None:
    """Padding of any content to the left, in between and to the right leaves the output of other tokens as it is."""
    scheme = case.make()
    given, alone = draw(scheme, 5), torch.arange(5)[None]
    want = run(scheme, given, alone)
    for mask in ([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 1, 0]):
        real, wide = torch.tensor(mask).bool(), []
        for x in given:
            x_wide = 30 * torch.randn(*x.shape[:-2], len(mask), x.shape[-1], dtype=x.dtype)
            x_wide[..., real, :] = x
            wide.append(x_wide)
        places = (real.long().cumsum(-1) - 1).clamp_min(0)[None]
        for executor in ("dense", "blocks"):
            got = run(scheme, wide, places, mask=real.expand(2, -1), executor=executor)[:, :, real]
            _close(got, want, 1e-11)


def last_rows_equal_the_whole(case: Case) -> None:
    """The last queries alone have the output that they have among all."""
    scheme = case.make()
    (q, *others), places = draw(scheme, 12), positions(scheme, 12)
    _close(run(scheme, [q[:, :, -2:], *others], places), run(scheme, [q, *others], places)[:, :, -2:], 1e-10)


def executors_agree(case: Case) -> None:
    """Every executor has the output and the gradients of the dense reference."""
    scheme, found = case.make(), {}
    places = positions(scheme, 150)
    for executor in executors(scheme):
        given = [x.requires_grad_() for x in draw(scheme, 150)]
        output = run(scheme, given, places, executor=executor)
        leaves = [*given, *scheme.parameters()]
        gradients = torch.autograd.grad(output.sin().sum(), leaves, allow_unused=True, materialize_grads=True)
        found[executor] = (output.detach(), *gradients)
    for got in found.values():
        for mine, want in zip(got, found["dense"], strict=True):
            _close(mine, want, 1e-9 * max(1.0, float(want.abs().max())))


def options_make_it_again(case: Case) -> None:
    """The resolved options build the same scheme again."""
    scheme = case.build()
    torch.manual_seed(0)
    again = build(case.name, scheme.geometry, **scheme.options())
    assert again.options() == scheme.options(), "options() changed"
    want = scheme.state_dict()
    assert all(torch.equal(x, want[key]) for key, x in again.state_dict().items()), "the start differs"


def weights_can_be_loaded(case: Case) -> None:
    """A scheme that is built without memory computes the same with the weights of another, and has a finite start."""
    scheme = case.make()
    with torch.device("meta"):
        empty = case.build()
    empty.load_state_dict(scheme.state_dict(), strict=True, assign=True)
    given, places = draw(scheme, 6), positions(scheme, 6)
    assert torch.equal(run(empty.double(), given, places), run(scheme, given, places)), "a constant has no values"
    for parameter in empty.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in empty.modules():
        if isinstance(module, Scheme):
            module.reset_parameters()
    assert all(bool(x.isfinite().all()) for x in empty.parameters()), "reset_parameters leaves a parameter out"


def parameters_are_learned(case: Case) -> None:
    """Every parameter has a gradient, at least one dimension, and float32 in a model of half precision."""
    scheme = case.make()
    (*operands, hidden), places = draw(scheme, 9), positions(scheme, 9)
    hidden = scheme.embed(hidden, places)
    loss = run(scheme, [*operands, hidden], places).sin().sum() + hidden.sin().sum()
    own = dict(scheme.named_parameters())
    gradients = torch.autograd.grad(loss, [*own.values()], allow_unused=True) if own else ()
    unused = [name for name, gradient in zip(own, gradients, strict=True) if gradient is None]
    assert not unused, f"no gradient for {', '.join(unused)}"
    assert all(x.ndim for x in own.values()), "a parameter without dimensions"
    assert all(x.dtype == torch.float32 for x in case.build().bfloat16().parameters()), "a parameter in half precision"


def neutral_options_start_as_stated(case: Case) -> None:
    """With `neutral_options` the start is the no-op that `facts` states, and can be learned."""
    neutral = get(case.name).cls.neutral_options
    if neutral is None:
        return
    scheme = Case(case.name, case.causal, dict(neutral)).build()
    bound = scheme.facts(native_kept=True).start
    assert bound is not None, "facts(native_kept=True) has neither exact nor tolerance"
    given, places = draw(scheme, 5, dtype=torch.float32), torch.tensor([[0, 1, 2, 9, 120]])
    hidden = scheme.embed(given[3], places)
    assert torch.equal(hidden, given[3]), "the embeddings change"
    plain = build("nope", scheme.geometry)
    got, weights = run(scheme, given, places, need_weights=True)
    want, plain_weights = run(plain, given, places, need_weights=True)
    if bound == 0:
        assert torch.equal(got, want), "the start is not exact"
    else:
        moved = (weights.log() - plain_weights.log())[plain_weights > 0]
        assert 0 < float(moved.detach().abs().max()) <= bound, "logits move by more than the tolerance, or not at all"
    parameters = list(scheme.parameters())
    if parameters:
        loss = got.sin().sum() + hidden.sin().sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        assert any(x is not None and bool(x.any()) for x in gradients), "no parameter has a gradient at the start"


def attention_is_finite(case: Case) -> None:
    """Parameters far from their start, as an adaptation may leave them, give finite outputs and gradients."""
    neutral = None if case.options else get(case.name).cls.neutral_options
    for options in (case.options, dict(neutral or {})):
        for distance in (-1.5, 1.5):
            scheme = Case(case.name, case.causal, options).build(max_positions=1024)
            with torch.no_grad():
                for parameter in scheme.parameters():
                    parameter.add_(distance)
            (*operands, hidden), places = draw(scheme, 300, batch=1, dtype=torch.float32), positions(scheme, 300)
            output = run(scheme, [*operands, scheme.embed(hidden, places)], places)
            leaves = list(scheme.parameters()) if output.requires_grad else []
            gradients = torch.autograd.grad(output.sin().sum(), leaves, allow_unused=True) if leaves else ()
            for found in (output, *gradients):
                assert found is None or bool(found.isfinite().all()), f"{options}, parameters moved by {distance}"


SCHEME_CONTRACTS: tuple[Callable[[Case], None], ...] = (
    options_make_it_again,
    weights_can_be_loaded,
    parameters_are_learned,
    neutral_options_start_as_stated,
    attention_is_finite,
    gradients_are_derivatives,
    padding_changes_nothing,
    last_rows_equal_the_whole,
    executors_agree,
)


def check_scheme(name: str, **options: Any) -> None:
    """Check all contracts of a registered scheme, in each direction of attention that it declares.

    Raises:
        AssertionError: A contract is broken; the message names it.
    """
    for direction in get(name).directions:
        case = Case(name, direction == "causal", options)
        for contract in SCHEME_CONTRACTS:
            _hold(f"{name} ({direction})", contract, case)


def _hold(subject: str, contract: Callable[..., None], *given: Any) -> None:
    try:
        contract(*given)
    except Exception as error:  # whatever a scheme of somebody else raises
        raise AssertionError(f"{subject} breaks {contract.__name__}: {error}\n{contract.__doc__}") from error


# -- contracts of an architecture --------------------------------------------------------------------------------------


def own_encoding_changes_nothing(model: PreTrainedModel) -> None:
    """The model computes the same with its own encoding as a scheme, where there is such a scheme."""
    scheme = native_scheme(model)
    if scheme is None:
        return
    patched = patch(copy.deepcopy(model), scheme)
    for given in _texts(model):
        want = _output(model, given)
        real = given.get("attention_mask", torch.ones(want.shape[:2])).bool() if want.ndim == 3 else ...
        got = _output(patched, given)
        _close(got[real], want[real], 1e-4 * float(want.abs().max()))


def stock_model_comes_back(model: PreTrainedModel, scheme: str) -> None:
    """A model with a start that is a break computes something else; `unpatch` gives the stock model back exactly."""
    given = next(_texts(model))
    want, patched = _output(model, given), patch(copy.deepcopy(model), scheme)
    if plan(model, scheme).start == "break":
        assert not torch.equal(_output(patched, given), want), "the patched model computes what the stock model does"
    assert torch.equal(_output(unpatch(patched), given), want), "the stock model has changed"


def cache_changes_nothing(model: PreTrainedModel, scheme: str) -> None:
    """Generated tokens are the same with and without a cache, also next to a padded row."""
    if not model.can_generate():
        return
    patched = patch(copy.deepcopy(model), scheme)
    prompt = next(_texts(model))["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    call = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached, uncached = (patched.generate(prompt, **call, use_cache=use) for use in (True, False))
    assert torch.equal(cached, uncached), "tokens differ"


def checkpoint_is_exact(model: PreTrainedModel, scheme: str) -> None:
    """A saved and loaded model computes the same, bit for bit."""
    patched = patch(copy.deepcopy(model), scheme)
    given = next(_texts(model))
    with tempfile.TemporaryDirectory() as folder:
        patched.save_pretrained(folder)
        loaded = type(patched).from_pretrained(folder).eval()
    assert torch.equal(_output(loaded, given), _output(patched, given)), "outputs differ"


ARCHITECTURE_CONTRACTS: tuple[Callable[[PreTrainedModel, str], None], ...] = (
    stock_model_comes_back,
    cache_changes_nothing,
    checkpoint_is_exact,
)


def check_architecture(name: str, model: PreTrainedModel | None = None) -> None:
    """Check all contracts of a registered architecture, with one scheme of each family.

    Args:
        name: The name of a family, as `transformers` has it.
        model: A small stock model of it, with a head; `None` makes one of random weights with small sizes.

    Raises:
        ArchitectureError: There is no such architecture, or no model can be made of small sizes alone.
        AssertionError: A contract is broken; the message names it.
    """
    try:
        architectures()[name]
    except KeyError as error:
        raise ArchitectureError(
            f"There is no architecture {name!r}. Give a model type, such as {next(iter(architectures()))!r}, or import "
            "the module that registers it."
        ) from error
    model = (_model(name) if model is None else model).eval()
    _hold(name, own_encoding_changes_nothing, model)
    causal = model.can_generate() and not model.config.is_encoder_decoder
    direction = "causal" if causal else "bidirectional"
    one_of_each = {info.family: scheme for scheme, info in schemes().items() if direction in info.directions}
    for scheme in one_of_each.values():
        for contract in ARCHITECTURE_CONTRACTS:
            _hold(f"{name} with {scheme}", contract, model, scheme)


def _model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    try:
        config = CONFIG_MAPPING[name](**_SIZES)
        kind = next(heads[type(config)] for heads in _HEADS if type(config) in heads)
        with torch.device("meta"):
            size = sum(x.numel() for x in kind(config).parameters())
        if size > _MOST:
            raise ValueError(f"it has {size:,} parameters")
        made: PreTrainedModel = kind(config)
    except (KeyError, StopIteration, ValueError, TypeError, RuntimeError) as error:
        raise ArchitectureError(
            f"No model of {name!r} can be made of small sizes alone ({error}). Pass one: check_architecture(name, "
            "model)."
        ) from error
    return made


def _texts(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Return the arguments of a forward, and for texts the same with padding on the right."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        yield {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
        return
    tokens = torch.randint(5, config.vocab_size - 5, (2, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    for given in ({"input_ids": tokens}, {"input_ids": tokens, "attention_mask": mask}):
        yield {**given, "decoder_input_ids": tokens} if config.is_encoder_decoder else given


@torch.no_grad()
def _output(model: PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(0)
    found: Tensor = model(**given)[0]
    return found
