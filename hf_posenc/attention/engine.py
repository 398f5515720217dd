"""The executors in order of preference, the choice between them, and `attend`: attention outside any model."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from hf_posenc.attention.blocks import Blocks, with_parameters
from hf_posenc.attention.call import Call, Executor
from hf_posenc.attention.channels import Channels
from hf_posenc.attention.cpu.fused import Fused
from hf_posenc.attention.cpu.locality import Local
from hf_posenc.attention.dense import Dense
from hf_posenc.attention.gpu.kernels import Triton
from hf_posenc.attention.mask import Mask, from_tensor, slots_tell_distances
from hf_posenc.attention.sdpa import Sdpa
from hf_posenc.derivatives import differentiable
from hf_posenc.errors import DirectionError, ExportError, OptionError, PositionError, ShapeError
from hf_posenc.operands import Positions, Tokens, check_coords, check_tensor
from hf_posenc.ops import transformed
from hf_posenc.scheme import Scheme

_BLOCKS = Blocks()
# The first that takes a call runs it; the last takes any, and alone returns weights.
EXECUTORS: tuple[Executor, ...] = (Sdpa(), Channels(), Triton(), Fused(), Local(), _BLOCKS, Dense())

_RECORD: ContextVar[list[str] | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Collect the executors of all calls in this context, with the form in which positions entered, if several."""
    found: list[str] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def executors(scheme: Scheme, device: torch.device | None = None) -> tuple[str, ...]:
    """Return the names of the executors that can run a scheme on a device (`None`: a CPU), the reference first."""
    device = device or torch.device("cpu")
    return tuple(executor.name for executor in reversed(EXECUTORS) if executor.knows(scheme, device))


def choose(call: Call) -> Executor:
    *others, reference = EXECUTORS
    if call.need_weights or transformed():
        return reference
    for executor in others:
        if (executor.traces or not torch.compiler.is_compiling()) and executor.takes(call):
            return executor
    return reference


def run(call: Call, *, executor: str | None = None) -> tuple[Tensor, Tensor | None]:
    """Run one attention call on projected operands.

    Args:
        call: The call.
        executor: Name of the executor; `None` chooses. A kernel that does not compute this call leaves it to the
            blocks, and transforms of `torch.func` take the dense one.

    Returns:
        The output `[B, H, Q, D]`; the weights `[B, H, Q, K]` if the call needs them, else `None`.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise ExportError(
            "Got torch.jit.trace (or torch.onnx.export without dynamo), whose graph is wrong for another length than "
            "it saw; expected a graph of any length. Use torch.export, torch.onnx.export(dynamo=True) or torch.compile."
        )
    if call.scheme.geometry.causal and "bidirectional" not in call.scheme.directions:
        _check_direction(call)
    used = choose(call) if executor is None or transformed() else _named(executor, call)
    # A context variable would break a graph that is being compiled.
    record = None if torch.compiler.is_compiling() else _RECORD.get()
    if record is not None:
        record.append(used.describe(call))
    output, weights = used.run(call)
    if used is not EXECUTORS[-1] and output.requires_grad:
        output = _differentiable(output, call)
    return output, weights if call.need_weights else None


def _check_direction(call: Call) -> None:
    # A graph that is traced has no numbers.
    if not (call.causal or torch.compiler.is_compiling() or transformed()):
        raise DirectionError(
            f"Got a mask that lets a query see keys at later positions; {call.scheme.name} is defined for keys up to "
            "the query's own. Use a causal mask, or another scheme."
        )


def _differentiable(output: Tensor, call: Call) -> Tensor:
    """Return the output of a call, with the derivatives of the dense form where a graph of gradients is asked for."""
    outline, own = call.outline(), tuple(call.scheme.parameters())
    masks = (call.mask.bias,) if call.mask.bias is not None and call.mask.learns else ()
    operands = (*call.operands(), *masks)
    count, lent, device = len(operands), slice(len(operands), len(operands) + len(own)), call.device.type
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def dense(*tensors: Tensor) -> tuple[Tensor]:
        if outline.dropout:
            raise OptionError(
                "Got a second derivative of attention with dropout, whose random numbers are gone; expected none. Set "
                "the dropout of attention to 0, or put the model in eval mode."
            )
        given = outline.with_operands(tensors[: count - len(masks)])
        if masks:
            given = replace(given, mask=replace(given.mask, bias=tensors[count - 1]))
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return (with_parameters(given.scheme, tensors[lent], lambda: EXECUTORS[-1].run(given)[0]),)

    return differentiable(output, dense, operands, (*own, *call.parameters))


def _named(name: str, call: Call) -> Executor:
    """Return the executor of a name, or the blocks where it does not compute this call."""
    executor = next(executor for executor in EXECUTORS if executor.name == name)
    if call.mask.learns and not executor.learns_masks:
        raise OptionError(
            f"Executor {name!r} has no gradient for a mask that requires one. Leave the executor out, or take 'dense'."
        )
    if executor.fits(call):
        return executor
    if executor.refusal is not None:
        raise OptionError(
            f"Executor {name!r} cannot run this call of {type(call.scheme).__name__}: {executor.refusal}. "
            "Leave the executor out, or take 'blocks'."
        )
    return _BLOCKS


# -- outside any model -----------------------------------------------------------------------------------------------


def attend(
    scheme: Scheme,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_positions: Tensor,
    key_positions: Tensor,
    hidden: Tensor | None = None,
    mask: Tensor | None = None,
    need_weights: bool = False,
    executor: str | None = None,
    host: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    query_coords: Tensor | None = None,
    key_coords: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with a scheme, outside any transformers model.

    The whole scheme is applied: its projection (rotations), scores, weights, mixing and finish. Queries may be the last
    rows of a longer sequence of keys; pass keys as they were projected, before any rotation.

    Args:
        scheme: From `build`. Its geometry says whether keys ahead of a query are hidden.
        q: Queries `[B, H, Q, D]`.
        k: Keys `[B, G, K, D]`.
        v: Values `[B, G, K, D]`.
        query_positions: Integers `[B|1, Q]`.
        key_positions: Integers `[B|1, K]`.
        hidden: Hidden states of all tokens `[B, K, E]`, the queries' being the last; `[B, Q, E]` will do for schemes
            that read those of the queries only.
        mask: Keys that may be seen, in addition to the causal rule: a bool or integer padding mask `[B, K]`; or a bool
            or float mask that broadcasts to `[B, H, Q, K]`. A float mask is added; less than -9,000 hides. A query that
            does not see its own key counts as padding, and its output means nothing.
        need_weights: Also return the weights `[B, H, Q, K]`; takes the dense executor.
        executor: Force one of `"dense"` (the reference), `"blocks"`, `"sdpa"`, `"channels"`, on a CPU `"fused"` and
            `"locality"`, on a GPU `"triton"`, where the scheme has it.
        host: Projects `[B, N, E]` to queries `[B, H, N, D]` and keys `[B, G, N, D]`, for schemes that use the layer's
            own projections.
        query_coords: Float coordinates of the queries `[B|1, Q, n]`, for schemes with axes; `None` gives every token
            its position on each axis.
        key_coords: The same of the keys, `[B|1, K, n]`.

    Returns:
        The output `[B, H, Q, D]`, or a pair with the weights.

    Raises:
        ShapeError: The shapes do not fit together or to the scheme's geometry, or an operand is no tensor.
        PositionError: A position is negative, or coordinates are not finite or do not fit the scheme or the positions.
        OptionError: The first argument is no scheme, or the executor cannot run it.
    """
    if not isinstance(scheme, Scheme):
        raise OptionError(f"attend: expected a scheme made by hf_posenc.build as first argument, got {scheme!r}.")
    geometry = scheme.geometry
    given = {"q": q, "k": k, "v": v, "query_positions": query_positions, "key_positions": key_positions}
    optional = {"hidden": hidden, "mask": mask, "query_coords": query_coords, "key_coords": key_coords}
    for name, tensor in {**given, **optional}.items():
        check_tensor(name, tensor, optional=name in optional)
        if tensor is not None and tensor.is_meta:
            raise ShapeError(f"Got {name} on the meta device; expected a dense tensor that has numbers.")
    if not torch.compiler.is_compiling() and detect_fake_mode((*given.values(), *optional.values())) is not None:
        raise ShapeError("Got fake tensors, or a mode that makes them; expected tensors that have numbers.")
    _check_shapes(scheme, given, hidden)
    if executor is not None and executor not in executors(scheme, q.device):
        available = ", ".join(executors(scheme, q.device))
        raise OptionError(f"Executor {executor!r} cannot run {type(scheme).__name__}. Available: {available}.")
    if executor not in (None, "dense") and need_weights:
        raise OptionError(f"need_weights=True takes the dense executor, got executor={executor!r}.")
    if query_coords is not None:
        query_coords = check_coords(query_coords, {scheme.axes}, len(q), q.shape[2], q.device, "query_coords")
    if key_coords is not None:
        key_coords = check_coords(key_coords, {scheme.axes}, len(k), k.shape[2], q.device, "key_coords")
    # Distances in a narrow type would overflow.
    query_positions, key_positions = query_positions.long(), key_positions.long()
    positions = Positions(query_positions, key_positions, query_coords, key_coords)
    real = None
    if mask is not None and mask.ndim == 2 and not mask.is_floating_point():
        real = mask = mask if mask.dtype == torch.bool else mask != 0
    complete = hidden is not None and hidden.shape[1] == k.shape[2]
    tokens = Tokens(
        positions=positions, hidden=hidden if complete else None, real=real, common=scheme.common, host=host
    )
    visible = replace(_visible(mask, q, positions, causal=geometry.causal), window=scheme.window)
    call = Call.of(scheme, tokens, q, k, v, mask=visible, need_weights=need_weights)
    output, weights = run(call, executor=executor)
    output = scheme.finish(output, None if hidden is None else hidden[:, -q.shape[2] :])
    return output if weights is None else (output, weights)


def _visible(mask: Tensor | None, q: Tensor, positions: Positions, *, causal: bool) -> Mask:
    keys = positions.key.shape[1]
    rule: Literal["all", "positions"] = "positions" if causal else "all"
    if mask is None and causal and keys >= q.shape[2] and slots_tell_distances(positions, Mask()):
        return Mask("slots", ahead=keys - q.shape[2])
    if mask is None:
        return Mask(rule)
    if mask.ndim == 2:
        if mask.is_floating_point():
            raise ShapeError(
                f"Got a 2-D attention mask of dtype {mask.dtype}; expected a bool or integer padding mask [batch, "
                "keys]. Pass a float mask that is added to the logits as [batch, heads or 1, queries, keys]."
            )
        mask = mask[:, None, None, :]
    elif mask.ndim == 3:
        mask = mask[:, None]
    return from_tensor(mask, rule, (*q.shape[:3], keys))


def _check_shapes(scheme: Scheme, given: dict[str, Tensor], hidden: Tensor | None) -> None:
    geometry = scheme.geometry
    for name in "qkv":
        if given[name].ndim != 4:
            raise ShapeError(
                f"Got {name} of shape {list(given[name].shape)}; expected [batch, heads, length, head_dim]."
            )
        if not given[name].is_floating_point():
            raise ShapeError(f"Got {name} of dtype {given[name].dtype}; expected a float type.")
    # Values may be wider: the reference and the blocks take them.
    if given["k"].dtype != given["q"].dtype:
        raise ShapeError(f"Got q of dtype {given['q'].dtype} and k of {given['k'].dtype}; expected the same of both.")
    batch, queries, keys = len(given["q"]), given["q"].shape[2], given["k"].shape[2]
    for name, heads, length in (("q", geometry.heads, queries), *((n, geometry.kv_heads, keys) for n in "kv")):
        got, expected = list(given[name].shape), [batch, heads, length, geometry.head_dim]
        if got != expected:
            raise ShapeError(f"Got {name} of shape {got}; the scheme's geometry expects {expected}.")
    for name, length in (("query_positions", queries), ("key_positions", keys)):
        tensor = given[name]
        if tensor.ndim != 2 or tensor.shape[1] != length or tensor.shape[0] not in (1, batch):
            raise ShapeError(f"Got {name} of shape {list(tensor.shape)}; expected [{batch} or 1, {length}].")
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise ShapeError(f"Got {name} of dtype {tensor.dtype}; expected integers.")
        if not tensor.numel():
            raise ShapeError(f"Got {name} of shape {list(tensor.shape)}; expected at least one query and one key.")
        if int(tensor.min()) < 0:
            raise PositionError(f"Got {int(tensor.min())} in {name}; positions count from 0.")
    if queries > keys and any(scheme.facts().state_bytes):
        raise ShapeError(
            f"Got {queries} queries and {keys} keys; expected no more queries than keys, of which they are the last: "
            f"{scheme.name} has a state for each key."
        )
    of_keys, of_queries = ([batch, length, geometry.hidden_size] for length in (keys, queries))
    if hidden is not None and list(hidden.shape) not in (of_keys, of_queries):
        raise ShapeError(
            f"Got hidden of shape {list(hidden.shape)}; expected {of_keys}, one row per key "
            f"(or per query: {of_queries})."
        )
    if hidden is not None and hidden.shape[1] < queries:
        raise ShapeError(
            f"Got {queries} queries, and hidden of {keys} keys; expected no more queries than keys, of which they are "
            "the last, or hidden of the queries."
        )
