"""Fit of an additive scheme to the native encoding or to another scheme, by regression."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import registry
from hf_posenc.errors import OptionError
from hf_posenc.operands import Block, Geometry, Positions, Tokens
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.patch import disabled, evaluating
from hf_posenc.recipes.evaluation.predictions import table_end
from hf_posenc.recipes.loading import is_masked
from hf_posenc.recipes.training.starts import check_model, check_windows, held_out, kept, verdict
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.additive import AdditiveBias, Buckets

# Number of query positions, evenly over the length, since some schemes depend on the query's position.
_ROWS = 16
_ITERATIONS_PER_STEP = 20
# Maximum number of windows that judge a fit.
_JUDGED = 16


@dataclass(frozen=True)
class Fit:
    """Result of a regression: root mean square errors of the schemes' biases, and the loss on held-out text.

    Attributes:
        before: Error before the regression, in nats.
        after: Error after the regression; equal to `before` if the schemes kept their weights.
        spread: Size of the target bias, which is the error of a zero bias.
        losses: Loss on held-out text before and after the regression, in nats per token; `None` if there is no text,
            or the model predicts no tokens.
        accepted: Whether the schemes have the fitted weights.
        sentence: Verdict in one sentence.
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
    like: str = "native",
    *,
    ids: Tensor | None = None,
    corrupt: Callable[[Tensor], Tensor] | None = None,
    length: int | None = None,
    steps: int = 20,
    **options: Any,
) -> Fit:
    """Fit the biases of a converted model, in place, to the native encoding or to another scheme.

    Networks start from fresh weights and gates start open, unless some parameters are frozen. The last quarter of the
    text (at most 16 windows) is held out to judge the fit: if the loss on it does not fall, all schemes keep their
    weights, bit for bit, and a warning says so. Without text, or with a model that predicts no tokens, a scheme keeps
    its weights if the error of its bias does not fall. On an exception all schemes keep them.

    The error compares the keys of one query, since a constant per query does not change the softmax. Keys have the
    weight `1 / (1 + distance)`. A scheme shared by all layers is fitted to the mean target.

    The native bias of T5 is its table. The native bias of a rotary model is what the rotation adds to the logit of a
    head's mean query and mean key over some text, which explain most of a head's preference for distances.

    Args:
        model: Model patched with an additive scheme.
        like: `"native"`, or the name of an additive scheme.
        ids: Text for the means of a rotary model and for the verdict, int64 `[N, S]`; one window serves both.
        corrupt: Function from token ids to an encoder's inputs; `None` is the text itself.
        length: Maximum distance plus one; `None` is the trained length, at most 1,024.
        steps: Steps of the regression (L-BFGS, 20 iterations each).
        **options: Options of the scheme `like`.

    Returns:
        Errors, losses and verdict.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: A scheme is not additive or has no parameters, the target does not exist, a number is out of range,
            or there are options for `like="native"`.
        ShapeError: `ids` are not windows of known tokens.
    """
    check_model("fit", model)
    if steps < 1 or (length is not None and length < 2):
        raise OptionError(f"fit({length=}, {steps=}): expected at least 2 tokens to look at, and at least 1 step.")
    if like == "native" and options:
        raise OptionError(
            f"fit({', '.join(f'{name}={value!r}' for name, value in options.items())}): options are those of the "
            "scheme to fit to, and the native encoding has none. Leave them out, or name a scheme: fit(model, "
            "'kerple')."
        )
    judged = None
    if ids is not None:
        check_windows("fit", model, ids, least=1)
        apart = held_out(len(ids), most=_JUDGED)
        # A table of positions that is in force cannot read further.
        judged, ids = ids[-apart:, : table_end(model)].to(model.device), ids[: len(ids) - apart]
        if model.get_output_embeddings() is None or judged.shape[1] < 2:
            judged = None
    # Check all schemes before changing one.
    found = _wanted(model, like, ids, options)
    sums = torch.zeros(3, dtype=torch.float64)
    with kept([parameter for scheme in found for parameter in scheme.parameters()]) as put_back:
        start = None if judged is None else _loss(model, judged, corrupt)
        for scheme, targets in found.items():
            far = min(scheme.geometry.max_positions or 1024, 1024) if length is None else length
            sums += _regress(scheme, targets, far, steps)
        before, after, spread = (sums / len(found)).sqrt().tolist()
        if judged is None or start is None:
            accepted, sentence = after < before, f"fit: the error of the bias went from {before:.4g} to {after:.4g}."
            return Fit(before, after, spread, None, accepted, sentence)
        losses = start, _loss(model, judged, corrupt)
        accepted, sentence = verdict("fit", "loss", *losses)
        if not accepted:
            put_back()
            after = before
    return Fit(before, after, spread, losses, accepted, sentence)


def _wanted(
    model: PreTrainedModel, like: str, ids: Tensor | None, options: dict[str, Any]
) -> dict[AdditiveBias, list[Callable[[Block], Tensor]]]:
    """Return the schemes to fit, each with the target biases of its layers; raise if one cannot be fitted."""
    architecture = of_model(model)
    # Only rotary models need the means; a model with a table of positions may be unable to read the text.
    rotary = any(architecture.geometry(body, 0).inv_freq is not None for body in architecture.stacks(model).values())
    means = _mean_heads(model, ids) if ids is not None and like == "native" and rotary else {}
    wanted: dict[AdditiveBias, list[Callable[[Block], Tensor]]] = {}
    for group in record.from_config(model.config):
        for name, stack in group.stacks.items():
            body = architecture.stacks(model)[name]
            for layer in stack.layers:
                geometry, attention = architecture.geometry(body, layer), architecture.attentions(body)[layer]
                if geometry.axes > 1:
                    raise OptionError(
                        f"fit: the {type(model).__name__} reads images, in which biases depend on {geometry.axes} "
                        "coordinates; only models of text are fitted."
                    )
                scheme = attention._modules.get(surgery.OWN)
                if not isinstance(scheme, Scheme):
                    scheme = getattr(body._modules.get(surgery.SHARED), str(group.id), None)
                if not isinstance(scheme, AdditiveBias):
                    raise OptionError(
                        f"fit: {group.scheme} adds no bias of the distance alone. Fit one of {', '.join(additive())}."
                    )
                if not any(p.requires_grad for p in scheme.parameters()):
                    if any(True for _ in scheme.parameters()):
                        raise OptionError(
                            f"fit: all parameters of {group.scheme} on layer {layer} of the {name} are frozen. "
                            "Unfreeze them."
                        )
                    raise OptionError(
                        f"fit: {group.scheme} has no parameters to fit with these options ({scheme.extra_repr()})."
                    )
                wanted.setdefault(scheme, []).append(_target(like, geometry, options, means.get(attention)))
    return wanted


@torch.no_grad()
def _loss(model: PreTrainedModel, ids: Tensor, corrupt: Callable[[Tensor], Tensor] | None) -> float:
    """Return the loss per token on windows of text, read one at a time to save memory."""
    inputs = ids if corrupt is None else corrupt(ids)
    if corrupt is not None and is_masked(model):
        ids = ids.masked_fill(inputs == ids, -100)
    with evaluating(model):
        losses = [
            model(input_ids=given[None], labels=window[None], use_cache=False).loss
            for given, window in zip(inputs, ids, strict=True)
        ]
    return float(torch.stack(losses).mean())


def additive() -> list[str]:
    """Return the names of the additive schemes."""
    return [name for name, info in registry.schemes().items() if issubclass(info.cls, AdditiveBias)]


def _mean_heads(model: PreTrainedModel, ids: Tensor) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Return the mean query `[H, D]` and key `[G, D]` of each patched attention over a text, in the stock model."""
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def look(module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        q, k, _ = module.project_heads(hidden)
        found[module] = q.double().mean((0, 2)), k.double().mean((0, 2))

    bodies = of_model(model).stacks(model).values()
    attentions = [attention for body in bodies for attention in of_model(model).attentions(body)]
    with contextlib.ExitStack() as stack:
        for attention in filter(surgery.is_patched, attentions):
            stack.callback(attention.register_forward_pre_hook(look, with_kwargs=True).remove)
        for context in (evaluating(model), torch.no_grad(), disabled(model)):
            stack.enter_context(context)
        for body in bodies:
            body(input_ids=ids)
    return found


def _target(
    like: str, geometry: Geometry, options: dict[str, Any], means: tuple[Tensor, Tensor] | None
) -> Callable[[Block], Tensor]:
    """Return a function from a block to the target bias, float64 `[H, q, K]`."""
    if like != "native":
        scheme = registry.build(like, geometry, **options).double()
        if not isinstance(scheme, AdditiveBias):
            raise OptionError(f"fit: like={like!r}: expected 'native' or one of {', '.join(additive())}.")
        return lambda block: scheme.bias(block, torch.float64)[0].detach()
    table = geometry.native_table("t5")
    if table is not None:
        assert table.max_distance is not None
        weight = table.weight.detach().double()
        buckets = Buckets(num_buckets=len(weight), max_distance=table.max_distance, causal=geometry.causal)
        return lambda block: weight[buckets(block.distance()[0])].permute(2, 0, 1)
    if geometry.inv_freq is None:
        raise OptionError(
            "fit: the model's own encoding is no bias of the distance (it is added to the inputs). Fit to a scheme: "
            "fit(model, 'kerple')."
        )
    if means is None:
        raise OptionError("fit: a rotary model is fitted to what it does on a text. Pass ids=, int64 [batch, length].")
    return _rotary_bias(geometry, *means)


def _rotary_bias(geometry: Geometry, q: Tensor, k: Tensor) -> Callable[[Block], Tensor]:
    rope = registry.build("rope", geometry)
    k = k.repeat_interleave(geometry.heads // geometry.kv_heads, dim=0)
    assert geometry.scale is not None
    scale = geometry.scale

    def bias(block: Block) -> Tensor:
        distance = block.distance()[0].clamp_min(0)
        places = torch.arange(int(distance.max()) + 1)[None]
        count = places.shape[1]
        zero = Positions(places, torch.zeros(1, 1, dtype=torch.long))
        many = q[None, :, None].expand(1, -1, count, -1)
        turned = rope.project(Tokens(positions=zero), many, k[None, :, None], k[None, :, None])
        table = scale * ((turned.q * turned.k).sum(-1)[0] - (q * k).sum(-1, keepdim=True))  # [H, count]
        return table[:, distance]

    return bias


def _regress(scheme: AdditiveBias, wanted: list[Callable[[Block], Tensor]], length: int, steps: int) -> Tensor:
    """Fit a scheme to the mean of target biases; return the mean squared errors before, after, and of a zero bias."""
    rows = torch.arange(1, _ROWS + 1)[None] * (length - 1) // _ROWS
    block = Block(Positions(rows, torch.arange(length)[None]), reach=length - 1)
    distance = block.distance()[0]
    weight = 1.0 / (1 + distance.abs().double())
    if scheme.geometry.causal:
        weight = weight * (distance >= 0)
    weight = weight / weight.sum(-1, keepdim=True)  # [q, K]
    target = torch.stack([bias(block) for bias in wanted]).mean(0).to("cpu")
    like = torch.zeros(1, dtype=torch.float64)

    def square(difference: Tensor) -> Tensor:
        centred = difference - (weight * difference).sum(-1, keepdim=True)
        return (weight * centred.square()).sum(-1).mean()

    def error() -> Tensor:
        return square(scheme.gated_bias(block, like)[0] - target)

    with torch.no_grad():
        before = error()
    trained = [p for p in scheme.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(trained, max_iter=_ITERATIONS_PER_STEP, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = error()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with kept(trained) as put_back:
        if len(trained) == len(list(scheme.parameters())):
            scheme.begin_fit()
        for _ in range(steps):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if not error() <= before:
                put_back()
    with torch.no_grad():
        return torch.stack([before, error(), square(target)]).double()
