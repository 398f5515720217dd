"""Attention transfer: each converted attention learns to write what the original attention wrote, layer by layer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from hf_posenc.errors import OptionError
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.atomic_files import reading
from hf_posenc.patches.inspection import hooked, replaced
from hf_posenc.patches.patch import disabled, evaluating, unpatch
from hf_posenc.recipes.loading import trained_length
from hf_posenc.recipes.training.callbacks import parameter_groups, patched_inside
from hf_posenc.recipes.training.distillation import mean_of_counted, without_jumps
from hf_posenc.recipes.training.rates import rates
from hf_posenc.recipes.training.starts import check_counts, check_rates, check_windows, held_out, kept, verdict
from hf_posenc.scheme import Scheme

Inputs = dict[str, Any]

# Checks of the held-out distances during a transfer.
_CHECKS = 5
# Maximum number of windows that judge a fit.
JUDGED = 8
# File of the best layers in a checkpoint.
BEST = "best_layers.safetensors"


@dataclass(frozen=True)
class TransferResult:
    """Distance of each layer's attention output from the original's, on held-out windows.

    A distance is the mean square of the difference, relative to the mean square of the original output.

    Attributes:
        before: Distances by layer before the transfer.
        after: Distances by layer after it; a layer that got worse has its weights, and its distance, from before.
        accepted: Whether any layer has new weights.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    accepted: bool
    sentence: str


class AttentionTransfer(nn.Module):
    """Loss of a transfer, for any `Trainer` or training loop: `AttentionTransfer(model)(input_ids=ids)["loss"]`.

    Every attention gets the input that it has in the original model, so all layers learn at once and none inherits the
    errors of another. Feed-forwards are skipped. Parameters of this module are those of the converted attentions; the
    original shares all other weights with the model, so only attentions are in memory twice. Under a PEFT adapter even
    they are not.

    Args:
        model: Converted model without its own encoding, which must have acted in attention; or a `PeftModel` of it,
            whose adapter then learns.
        projections: Whether to train the whole attention; False trains the scheme alone.
        original: The model before its conversion, for instance that of a `Teacher`; `None` makes one where needed.

    Attributes:
        attentions: Converted attentions.
        trained: Weights that learn.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: There is nothing to train, or scheme or native encoding do not act in attention.
    """

    # The loss is a mean; the trainer divides it among accumulated batches.
    accepts_loss_kwargs = False

    def __init__(self, model: PreTrainedModel | PeftModel, *, projections: bool = True, original: Any = None) -> None:
        super().__init__()
        inner = patched_inside(model)
        architecture = of_model(inner)
        places = places_of(inner, architecture)
        # Behind a list, so that they are no submodules: only attentions are trained and saved.
        self._model, self._inner, self._architecture = [model], [inner], architecture
        self._stacks = [stack for stack, _ in places]
        self.attentions = nn.ModuleList(_attentions(inner, architecture, places))
        for body in architecture.stacks(inner).values():
            if surgery.SHARED in body._modules:
                self.add_module(surgery.SHARED, body._modules[surgery.SHARED])
        schemes = [module for module in self.modules() if isinstance(module, Scheme)]
        if any(scheme.overrides("embed") for scheme in schemes):
            raise OptionError(
                f"transfer: {schemes[0].name} acts on the inputs of the model, not in its attention, so attention says "
                "nothing of it. Train it."
            )
        own = {id(weight) for scheme in schemes for weight in scheme.parameters()}
        self.trained = [w for w in self.parameters() if w.requires_grad and (projections or id(w) in own)]
        if not self.trained:
            raise OptionError(
                "transfer: the schemes of this model have no weights to train: none with these options, or all are "
                "frozen. Unfreeze them, or patch with options that have some."
            )
        self._original = list(self.attentions)
        self._twin: list[Any] = []
        if projections and not isinstance(model, PeftModel):
            self._twin = [original if original is not None else original_of(inner, architecture)]
            self._original = _attentions(self._twin[0], architecture, places)
        self._length = trained_length(inner.config.get_text_config())
        self._scale: Tensor | None = None

    def train(self, mode: bool = True) -> AttentionTransfer:
        """Stay in evaluation mode: dropout would only blur what is learned."""
        super().train(False)
        return self

    @contextlib.contextmanager
    def training_only(self) -> Iterator[None]:
        """Restrict gradients to the trained weights and turn dropout off; afterwards restore both."""
        own = {id(weight) for weight in self.trained}
        others = [p for p in self._inner[0].parameters() if p.requires_grad and id(p) not in own]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            with evaluating(self._inner[0]):
                yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> dict[str, Tensor]:
        """Return the loss; and by layer the squares of the error and of the original output, both means, `[layers]`.

        Windows `[B, S]` longer than the trained length are cut. Positions of packed documents, `[B, S]`, restart at
        each. The labels of encoder-decoders are what the decoder writes, `[B, T]`. Other inputs do not reach attention.
        """
        for model in (*self._model, *self._twin):
            if model.device != input_ids.device:
                model.to(input_ids.device)  # A trainer moves what it trains alone.
        errors, sizes = self._errors(input_ids, attention_mask, position_ids, labels)
        # A scale of each batch would let the loss depend on how the batch is divided.
        scale = sizes if self._scale is None else self._scale
        distances = errors / scale.to(errors.device)
        return {"loss": distances.mean(), "errors": errors.detach(), "sizes": sizes}

    def distances(self, batches: Iterable[Inputs]) -> Tensor:
        """Return the distance of each attention over batches, `[layers]`; the losses that follow use its scale."""
        errors = sizes = torch.zeros(len(self.attentions))
        tokens = 0
        with torch.no_grad():
            for batch in batches:
                found, count = self(**batch), batch["input_ids"].numel()
                errors, sizes = errors + count * found["errors"].cpu(), sizes + count * found["sizes"].cpu()
                tokens += count
        self._scale = sizes / max(1, tokens)
        return errors / sizes

    def _errors(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean squares of the difference from the original's outputs, and of these, both `[layers]`."""
        given, masks = self._given(*inputs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            model = self._twin[0] if self._twin else self._inner[0]
            if not self._twin:
                stack.enter_context(disabled(model))
                if isinstance(self._model[0], PeftModel):
                    stack.enter_context(self._model[0].disable_adapter())
            read, wanted = _traffic(model, self._original, _with_windows_by_position(model.config, given))
        with self._without_feed_forwards():
            _, written = _traffic(self._inner[0], list(self.attentions), given, read)

        def mean_square(index: int, values: Tensor) -> Tensor:
            return mean_of_counted(values.square().mean(-1), masks.get(self._stacks[index]))

        # What is written is let go one by one, before the next difference takes memory.
        errors = [mean_square(index, written.pop(0).float() - there.float()) for index, there in enumerate(wanted)]
        sizes = [mean_square(index, there.float()).clamp_min(1e-12) for index, there in enumerate(wanted)]
        return torch.stack(errors), torch.stack(sizes)

    def _given(
        self, ids: Any, mask: Tensor | None, positions: Tensor | None, labels: Tensor | None
    ) -> tuple[Inputs, dict[str, Tensor | None]]:
        """Return the inputs of the model without its head, and the mask of counted tokens `[B, S]` by stack."""
        inner = self._inner[0]
        if inner.config.is_encoder_decoder:
            labels = ids if labels is None else labels
            given = {"input_ids": ids, "decoder_input_ids": inner._shift_right(labels)}
            masks: dict[str, Tensor | None] = {"encoder": mask, "decoder": labels != -100}
        else:
            positions = None if positions is None else _cut(positions, self._length)
            # The original was trained on no positions beyond: jumps to these are taken out.
            if positions is not None and (self._length is None or not bool((positions < self._length).all())):
                positions = without_jumps(positions)
            given = {"input_ids": _cut(ids, self._length), "position_ids": positions}
            mask = None if mask is None else _cut(mask, self._length)
            masks = dict.fromkeys(self._stacks, mask)
        # Without a mask, transformers would take each gap between positions for the start of another document.
        has_gaps = given.get("position_ids") is not None and bool((given["position_ids"].diff(dim=-1) > 1).any())
        if mask is not None and (has_gaps or not bool(mask.all())):
            given["attention_mask"] = mask
        return given, masks

    @contextlib.contextmanager
    def _without_feed_forwards(self) -> Iterator[None]:
        """Replace feed-forwards by zeros: no attention reads what they write."""
        with contextlib.ExitStack() as stack:
            for body in self._architecture.stacks(self._inner[0]).values():
                for layer in self._architecture.layers(body):
                    if surgery.is_patched(layer):
                        continue  # A scheme that is carried through the layers reads them.
                    twin: Any = self._architecture.twins[type(layer)]
                    module = twin.posenc_feed_forward(layer)
                    zeros = replaced(module, "forward", lambda hidden, *args, **kwargs: torch.zeros_like(hidden))
                    stack.enter_context(zeros)
            yield


class BestLayers(TrainerCallback):
    """Weights of each layer at its least distance so far, on held-out batches.

    Layers that share a scheme are one: their weights belong together. As the callback of a `Trainer` this checks the
    layers at intervals, and is saved with each checkpoint. Batches are inputs of `AttentionTransfer`.
    """

    def __init__(self, transfer: AttentionTransfer, batches: Sequence[Inputs]) -> None:
        self._transfer, self._batches = transfer, batches
        trained = {id(weight): index for index, weight in enumerate(transfer.trained)}
        own = [[trained[id(p)] for p in a.parameters() if id(p) in trained] for a in transfer.attentions]
        apart = sum(map(len, own)) == len(transfer.trained)
        layers = range(len(own))
        # Layers and weights of each group.
        self._groups = [([i], own[i]) for i in layers] if apart else [(list(layers), list(trained.values()))]
        self.before = transfer.distances(batches)
        self.after = self.before.clone()
        self._best = [weight.detach().clone() for weight in transfer.trained]

    def check(self) -> None:
        """Measure the layers, and keep the weights of those that are better than ever."""
        found, after = self._transfer.distances(self._batches), self.after.clone()
        for layers, weights in self._groups:
            # A distance that is no number is not less.
            if float(found[layers].mean()) < float(self.after[layers].mean()):
                after[layers] = found[layers]
                for index in weights:
                    self._best[index].copy_(self._transfer.trained[index].detach())
        self.after = after

    @torch.no_grad()
    def restore(self) -> TransferResult:
        """Give every layer its best weights, and return the verdict."""
        for weight, best in zip(self._transfer.trained, self._best, strict=True):
            weight.copy_(best)
        accepted, sentence = verdict(
            "transfer", "distance from the original attention", float(self.before.mean()), float(self.after.mean())
        )
        left = sum(after == before for after, before in zip(self.after.tolist(), self.before.tolist(), strict=True))
        if accepted and left:
            sentence += f" {left} of {len(self.after)} layers got no better and keep their weights."
        return TransferResult(tuple(self.before.tolist()), tuple(self.after.tolist()), accepted, sentence)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        interval = max(1, state.max_steps // _CHECKS)
        if state.global_step % interval == 0 or state.global_step == state.max_steps:
            self.check()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / BEST)

    def save(self, path: Path) -> None:
        """Write the best weights and all distances to a file."""
        best = {str(index): weight.cpu() for index, weight in enumerate(self._best)}
        save_file({**best, "before": self.before, "after": self.after}, path)

    def load(self, path: Path) -> None:
        with reading(str(path), " Remove it to go on from before the attention transfer."):
            stored = load_file(path)
            before, after = stored.pop("before"), stored.pop("after")
            shapes = {str(index): weight.shape for index, weight in enumerate(self._best)}
            if before.shape != self.before.shape or {name: found.shape for name, found in stored.items()} != shapes:
                raise ValueError("it holds other tensors than those of the attentions")
        self.before, self.after = before, after
        for index, weight in stored.items():
            self._best[int(index)].copy_(weight)


@torch.inference_mode(False)  # Gradients are needed, also where the caller wants none.
def transfer(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    corrupt: Callable[[Tensor], Tensor] | None = None,
    projections: bool = False,
    steps: int = 150,
    batch_size: int = 8,
    learning_rate: float | None = None,
    scheme_learning_rate: float | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> TransferResult:
    """Fit the attention of a converted model, in place, to what the original wrote; return distances and the verdict.

    Unlike `fit`, which needs additive schemes, this works for any scheme in attention, and with `projections` also for
    one without weights. A step costs less than a training step. The caller's random state is unchanged.

    The last quarter of the windows (at most 8) is held out to judge the fit: layers whose distance on it does
    not fall, or all on an exception, keep their weights bit for bit; a warning says so if that is every layer.

    Args:
        model: Converted model without its own encoding, which must have acted in attention (not a table of positions
            added to the inputs).
        ids: Windows of text, int64 `[N, S]`; windows longer than the trained length are cut. One window serves both
            the fit and the verdict.
        corrupt: Function from token ids to an encoder's inputs; `None` is the text itself.
        projections: Whether to train the projections of attention, too; by default only the scheme learns.
        steps: Steps of Adam, with a cosine schedule to 0.
        batch_size: Windows per step.
        learning_rate: Initial learning rate of the projections; `None` follows from the model, see
            `rates`.
        scheme_learning_rate: Initial learning rate of the scheme; `None` is `learning_rate`, or follows from the model.
        seed: Random seed of the order of windows.
        progress: Function called after each step with the number of steps done.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: There is nothing to train in attention, the native encoding does not act in attention, or a number
            is out of range.
        ShapeError: `ids` are not windows of at least two known tokens.
    """
    surgery.check_patched("transfer", model)
    check_counts("transfer", steps=(steps, 1), batch_size=(batch_size, 1), seed=(seed, 0))
    check_rates("transfer", learning_rate=learning_rate, scheme_learning_rate=scheme_learning_rate)
    attention = AttentionTransfer(model, projections=projections)
    check_windows("transfer", model, ids, least=2)
    ids = _cut(ids, trained_length(model.config.get_text_config())).to(model.device)
    order = torch.Generator().manual_seed(seed)

    def inputs(windows: Tensor) -> Inputs:
        return {"input_ids": windows if corrupt is None else corrupt(windows), "labels": windows}

    with attention.training_only(), kept(attention.trained):
        apart = held_out(len(ids), most=JUDGED)
        learned = len(ids) - apart
        best = BestLayers(attention, [inputs(part) for part in torch.split(ids[learned if apart else 0 :], batch_size)])
        found = rates(model, "transfer" if projections else "fit", distance=float(best.before.mean()))
        groups = parameter_groups(attention, scheme_learning_rate=scheme_learning_rate or learning_rate or found.scheme)
        optimizer = torch.optim.Adam(groups, lr=learning_rate or found.model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            optimizer.zero_grad()
            chosen = torch.randint(learned, (batch_size,), generator=order).to(ids.device)
            (len(attention.attentions) * attention(**inputs(ids[chosen]))["loss"]).backward()
            optimizer.step()
            schedule.step()
            # Under autocast, the casts of the weights before the step would serve on.
            torch.clear_autocast_cache()
            if progress is not None:
                progress(step + 1)
        best.check()
        return best.restore()


def places_of(model: PreTrainedModel, architecture: Architecture) -> list[tuple[str, int]]:
    """Return stack and layer of each converted attention; raise if the native encoding does not act in attention."""
    found = []
    for stack, body, layer, _ in surgery.Sites.of(model).patched():
        geometry = architecture.geometry(body, layer)
        if geometry.axes > 1 or (geometry.inv_freq is None and geometry.native_table("t5") is None):
            raise OptionError(
                f"The {type(model).__name__} adds its own encoding to what it reads, so its attention does not show "
                "what positions do in it, and cannot be transferred layer by layer. Convert it without that, or in a "
                "run with conversion.native: handover."
            )
        found.append((stack, layer))
    return found


def _traffic(
    model: Any, attentions: list[Any], given: Inputs, inputs: list[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what each attention reads and writes, `[B, S, E]`; with `inputs`, it reads these instead."""
    read: dict[nn.Module, Tensor] = {} if inputs is None else dict(zip(attentions, inputs, strict=True))
    written: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if inputs is None:
            read[module] = args[0] if args else kwargs["hidden_states"]
        return ((read[module], *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": read[module]})

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        written[module] = output[0]
        # Later modules need no graph: the next attention gets an input of its own, or nothing has a gradient.
        return (output[0].detach(), *output[1:])

    with hooked(attentions, before, after):
        model.base_model(**given, use_cache=False)
    return [read[each] for each in attentions], [written[each] for each in attentions]


def _with_windows_by_position(config: Any, given: Inputs) -> Inputs:
    """Let windows of the original end by positions, as those of a converted model do; transformers counts tokens.

    Behind a gap, layers with a window would else see what is farther away than all that they were trained for.
    """
    positions, window = given.get("position_ids"), getattr(config.get_text_config(), "sliding_window", None)
    if window is None or positions is None or not bool((positions.diff(dim=-1) > 1).any()):
        return given
    distance = (positions[:, :, None] - positions[:, None])[:, None]  # [B, 1, S, S]
    mask = torch.zeros(distance.shape, device=distance.device).masked_fill_(distance < 0, -torch.inf)
    near = mask.masked_fill(distance >= window, -torch.inf)
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    masks = {kind: near if kind == "sliding_attention" else mask for kind in kinds}
    return given | {"attention_mask": masks if len(masks) > 1 else next(iter(masks.values()), near)}


def _attentions(model: Any, architecture: Architecture, places: Sequence[tuple[str, int]]) -> list[nn.Module]:
    bodies = architecture.stacks(model)
    return [architecture.attentions(bodies[stack])[layer] for stack, layer in places]


def original_of(model: PreTrainedModel, architecture: Architecture) -> Any:
    """Return the model before its conversion, with attentions of its own and all other weights shared."""
    apart = {
        id(tensor)
        for body in architecture.stacks(model).values()
        for tensor in (
            *architecture.native_parameters(body),
            *(tensor for attention in architecture.attentions(body) for tensor in attention.parameters()),
        )
    }
    shared = {id(weight): weight for weight in model.parameters() if id(weight) not in apart}
    return unpatch(copy.deepcopy(model, shared)).eval()


def _cut(windows: Tensor, length: int | None) -> Tensor:
    """Cut windows `[N, S]` to at most the trained length."""
    if length is None or windows.shape[1] <= length:
        return windows
    return windows[:, : windows.shape[1] // length * length].reshape(-1, length)
