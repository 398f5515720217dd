"""Fit of an additive scheme to the native encoding: to its bias, or to its attention weights on a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import registry
from hf_posenc.addons import Composite
from hf_posenc.errors import OptionError
from hf_posenc.operands import Block, Geometry, Positions, Tokens
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.inspection import hooked
from hf_posenc.patches.patch import disabled, evaluating
from hf_posenc.recipes.loading import is_masked
from hf_posenc.recipes.training.starts import check_counts, check_windows, held_out, kept, mean_loss, verdict
from hf_posenc.schemes.families.additive import AdditiveBias, Buckets

# Number of query positions, evenly over the length, since some schemes depend on the query's position.
_ROWS = 16
_ITERATIONS_PER_STEP = 20
# A step that lowers the error by a smaller share is the last one.
_WORTH = 0.01
# Tokens of the text whose keys are kept for all layers.
_READ = 4096

# A function from the biases of a block, `[H, q, K]`, to an error in nats.
Error = Callable[[Tensor], Tensor]
# Maximum number of windows that judge a fit.
_JUDGED = 16


@dataclass(frozen=True)
class FitResult:
    """Result of a fit: errors of the schemes' biases, and the loss on held-out text.

    An error is in nats: the divergence of attention weights from the original's, if the schemes are fitted to a rotary
    encoding; or else the root mean square of the difference of biases.

    Attributes:
        before: Error before the fit.
        after: Error after the fit; equal to `before` if the schemes kept their weights.
        spread: Error of a zero bias.
        losses: Loss on held-out text before and after the fit, in nats per token; `None` if there is no text, or the
            model predicts no tokens.
        accepted: Whether the schemes have the fitted weights.
    """

    before: float
    after: float
    spread: float
    losses: tuple[float, float] | None
    accepted: bool
    sentence: str


@torch.inference_mode(False)  # Gradients are needed, also where the caller wants none.
def fit(
    model: PreTrainedModel,
    *,
    ids: Tensor | None = None,
    corrupt: Callable[[Tensor], Tensor] | None = None,
    length: int | None = None,
    steps: int = 20,
) -> FitResult:
    """Fit the biases of a converted model, in place, to the native encoding; return errors, losses and the verdict.

    Networks start from fresh weights and gates start open, unless some parameters are frozen. The last quarter of the
    text (at most 16 windows) is held out to judge the fit: if the loss on it does not fall, all schemes keep their
    weights, bit for bit, and a warning says so. Without text, or with a model that predicts no tokens, a scheme keeps
    its weights if the error of its bias does not fall. On an exception all schemes keep them.

    The native encoding of a rotary model is no bias. So queries and keys of a text are weighed as the original weighs
    them, and the divergence from that of the weights with the bias instead of the rotation is made small. This keeps
    the attention sink, the first token that many heads look at where they have nothing to do, as far as the scheme can.

    A bias, the table of T5, is fitted by least squares, on the keys of one query, since a constant per query does not
    change the softmax. Keys have the weight `1 / (1 + distance)`. A scheme shared by all layers is fitted to all of
    them.

    Args:
        model: Model patched with an additive scheme.
        ids: Text, int64 `[N, S]`, for a rotary model's queries and keys, and for the verdict; one window serves both.
        corrupt: Function from token ids to an encoder's inputs; `None` is the text itself.
        length: Maximum distance plus one; `None` is the trained length, at most 1,024.
        steps: Maximum number of steps (L-BFGS, 20 iterations each); the last is one that hardly lowers the error.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: A scheme is not additive or has no parameters, the native encoding acts on the model's inputs, or
            a number is out of range.
        ShapeError: `ids` are not windows of known tokens.
    """
    surgery.check_patched("fit", model)
    check_counts("fit", steps=(steps, 1), length=(2 if length is None else length, 2))
    judged = None
    if ids is not None:
        check_windows("fit", model, ids, least=1)
        apart = held_out(len(ids), most=_JUDGED)
        judged, ids = ids[-apart:].to(model.device), ids[: len(ids) - apart]
        if model.get_output_embeddings() is None or judged.shape[1] < 2:
            judged = None
    architecture = of_model(model)
    geometries = [architecture.geometry(body, 0) for body in architecture.stacks(model).values()]
    # Only of a rotary model is the text read.
    reads = ids is not None and any(geometry.inv_freq is not None for geometry in geometries)
    far = length or min(1024, *(geometry.max_positions or 1024 for geometry in geometries))
    far = min(far, ids.shape[1]) if ids is not None and reads else far
    # Some queries, evenly over the length, against all keys.
    rows = torch.arange(1, _ROWS + 1)[None] * (far - 1) // _ROWS
    block = Block(Positions(rows, torch.arange(far)[None]), reach=far - 1)
    # Check all schemes before changing one.
    found = _errors(model, ids if reads else None, block)
    sums = torch.zeros(3, dtype=torch.float64)
    with kept([parameter for scheme in found for parameter in scheme.parameters()]) as put_back:
        start = None if judged is None else _loss(model, judged, corrupt)
        for scheme, errors in found.items():
            # Operands are on the CPU: they are many, and the parameters few.
            home = next(scheme.parameters()).device
            try:
                sums += _minimise(scheme.cpu(), errors, block, steps)
            finally:
                scheme.to(home)
        before, after, spread = (sums / len(found) if reads else (sums / len(found)).sqrt()).tolist()
        if judged is None or start is None:
            accepted, sentence = after < before, f"fit: the error of the bias went from {before:.4g} to {after:.4g}."
            return FitResult(before, after, spread, None, accepted, sentence)
        losses = start, _loss(model, judged, corrupt)
        accepted, sentence = verdict("fit", "loss", *losses)
        if not accepted:
            put_back()
            after = before
    return FitResult(before, after, spread, losses, accepted, sentence)


def check_fit(model: PreTrainedModel) -> dict[AdditiveBias, list[tuple[Geometry, nn.Module]]]:
    """Return the schemes to fit, each with the geometries and modules of its attentions.

    Raises:
        OptionError: A scheme adds no bias of the distance, or has nothing to fit; or the native encoding is no bias.
    """
    found: dict[AdditiveBias, list[tuple[Geometry, nn.Module]]] = {}
    groups = {group.id: group.scheme for group in record.from_config(model.config)}
    sites = surgery.Sites.of(model)
    for stack, body, layer, attention in sites.patched():
        geometry, name = sites.architecture.geometry(body, layer), groups[attention.posenc_group]
        scheme = surgery.scheme_of(body, attention)
        scheme = scheme.base if isinstance(scheme, Composite) else scheme  # an add-on is no part of the bias
        if not isinstance(scheme, AdditiveBias):
            raise OptionError(f"fit: {name} adds no bias of the distance alone. Fit one of {', '.join(additive())}.")
        if not any(True for _ in scheme.parameters()):
            raise OptionError(f"fit: {name} has no parameters to fit with these options ({scheme.extra_repr()}).")
        if not any(p.requires_grad for p in scheme.parameters()):
            raise OptionError(
                f"fit: all parameters of {name} on layer {layer} of the {stack} are frozen. Unfreeze them."
            )
        if geometry.inv_freq is None and geometry.native_table("t5") is None:
            raise OptionError(
                "fit: the model's own encoding is no bias of the distance: it is added to the inputs. Train instead, "
                "with conversion.native=handover for instance."
            )
        found.setdefault(scheme, []).append((geometry, attention))
    return found


def additive() -> list[str]:
    """Return the names of the additive schemes, add-ons left out."""
    known = registry.schemes().items()
    return [name for name, info in known if issubclass(info.cls, AdditiveBias) and info.family != "add-on"]


def _errors(model: PreTrainedModel, ids: Tensor | None, block: Block) -> dict[AdditiveBias, list[Error]]:
    """Return the schemes to fit, each with the errors of its layers."""
    wanted = check_fit(model)
    heads = {} if ids is None else _heads(model, ids, block)
    return {
        scheme: [
            _divergence(geometry, block, *heads[module]) if module in heads else _distance(geometry, block)
            for geometry, module in layers
        ]
        for scheme, layers in wanted.items()
    }


def _loss(model: PreTrainedModel, ids: Tensor, corrupt: Callable[[Tensor], Tensor] | None) -> float:
    inputs = ids if corrupt is None else corrupt(ids)
    if corrupt is not None and is_masked(model):
        ids = ids.masked_fill(inputs == ids, -100)
    return mean_loss(model, {"input_ids": inputs, "labels": ids})


def _heads(model: PreTrainedModel, ids: Tensor, block: Block) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Return queries `[N, H, q, D]` and keys `[N, G, K, D]` of each patched attention in the stock model."""
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    rows = block.positions.query[0].to(model.device)
    ids = ids[: math.ceil(_READ / (block.reach + 1)), : block.reach + 1].to(model.device)

    def look(module: Any, args: Any, kwargs: Any) -> None:
        q, k, _ = module.project_heads(args[0] if args else kwargs["hidden_states"])
        found[module] = q[:, :, rows].float().cpu(), k.float().cpu()

    architecture = of_model(model)
    patched = [attention for *_, attention in surgery.Sites.of(model).patched()]
    with hooked(patched, look), evaluating(model), torch.no_grad(), disabled(model):
        for body in architecture.stacks(model).values():
            body(input_ids=ids)
    return found


def _distance(geometry: Geometry, block: Block) -> Error:
    """Return the mean square of the difference from the native bias."""
    if geometry.inv_freq is not None:
        raise OptionError("fit: a rotary model is fitted to what it does on a text. Pass ids=, int64 [batch, length].")
    table = geometry.native_table("t5")
    assert table is not None
    assert table.max_distance is not None
    distance, values = block.distance()[0], table.weight.detach().double().cpu()
    buckets = Buckets(num_buckets=len(values), max_distance=table.max_distance, causal=geometry.causal)
    target = values[buckets(distance)].permute(2, 0, 1)  # [H, q, K]
    weight = 1.0 / (1 + distance.abs().double())
    if geometry.causal:
        weight = weight * (distance >= 0)
    weight = weight / weight.sum(-1, keepdim=True)  # [q, K]

    def error(bias: Tensor) -> Tensor:
        difference = bias - target
        centred = difference - (weight * difference).sum(-1, keepdim=True)
        return (weight * centred.square()).sum(-1).mean()

    return error


@torch.no_grad()
def _divergence(geometry: Geometry, block: Block, q: Tensor, k: Tensor) -> Error:
    """Return the mean divergence from the attention weights of queries and keys with the native rotation."""
    assert geometry.scale is not None
    scale, shared = geometry.scale, geometry.heads // geometry.kv_heads
    hidden = block.distance()[0] < 0 if geometry.causal else block.distance()[0].isnan()

    def logits(q: Tensor, k: Tensor) -> Tensor:
        found = scale * q @ k.repeat_interleave(shared, dim=1).transpose(-1, -2)
        return found.masked_fill_(hidden, torch.finfo(found.dtype).min)

    turned = registry.build("rope", geometry).project(Tokens(positions=block.positions), q, k, k)
    log_weights = logits(turned.q, turned.k).log_softmax(-1)
    weights, plain = log_weights.exp(), logits(q, k)
    least = (weights * log_weights).sum(-1).mean()

    def error(bias: Tensor) -> Tensor:
        return least - (weights * (plain + bias.float()).log_softmax(-1)).sum(-1).mean()

    return error


def _minimise(scheme: AdditiveBias, errors: list[Error], block: Block, steps: int) -> Tensor:
    """Fit a scheme to its layers; return the mean errors before, after, and of a zero bias."""
    like = torch.zeros(1, dtype=torch.float64)

    def mean(bias: Tensor) -> Tensor:
        return torch.stack([error(bias) for error in errors]).mean()

    def current() -> Tensor:
        return mean(scheme.gated_bias(block, like)[0])

    with torch.no_grad():
        before, zero = current(), mean(torch.zeros_like(scheme.gated_bias(block, like)[0]))
    trained = [p for p in scheme.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(trained, max_iter=_ITERATIONS_PER_STEP, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = current()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with kept(trained) as put_back:
        if len(trained) == len(list(scheme.parameters())):
            scheme.begin_fit()
        last = math.inf
        for _ in range(steps):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                last, earlier = float(current()), last
            if not last < (1 - _WORTH) * earlier:
                break
        if not last <= before:
            put_back()
    with torch.no_grad():
        return torch.stack([before, current(), zero]).double()
