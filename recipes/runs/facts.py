"""Facts of a run before its first step, and the header that says them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel

from hf_posenc.patches import record
from hf_posenc.patches.architecture import of_config
from hf_posenc.patches.plan import BREAK, Plan
from hf_posenc.recipes.reports import counted, versions
from hf_posenc.recipes.schema.recipe import Conversion, Recipe

# Last words on a start that was fitted.
_FITTED = ", after a fit to "


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a run that are known before its first step, for header, table, model card and run.json.

    `native`, `start`, `share` (of the native rotation that stays), `device`, `stages` and `memory` (of a step) are
    in words. The `trained_length` is that of the run if the model's config states
    none. New parameters are those of the scheme, whose options and number of layers are by stack. A model that was
    converted before `came_with` schemes. `other_tokens` are those of the stages before and after the training.
    """

    recipe: Recipe
    architecture: str
    native: str
    trained_length: int
    states_length: bool = True
    parameters: int
    new_parameters: int
    trained_parameters: int
    options: Mapping[str, Mapping[str, Any]]
    layers: Mapping[str, int]
    start: str
    cautions: tuple[str, ...]
    data_tokens: int | None
    processes: int = 1
    device: str
    command: str = ""
    versions: Mapping[str, str]
    came_with: tuple[str, ...] = ()
    share: str = ""
    stages: tuple[str, ...] = ()
    other_tokens: int = 0
    memory: str = ""

    def with_verdict(self, found: Mapping[str, Any] | None) -> Facts:
        """Return the facts after the verdict on a fit or a transfer, a caution if the start was not accepted."""
        if found is None or found["accepted"]:
            return self
        cautions = (*self.cautions, found["sentence"])
        return replace(self, start=self.start.partition(_FITTED)[0], cautions=cautions)

    @property
    def encoding(self) -> str | None:
        """Name of the new positional encoding; `None` for the model as it is."""
        conversion = self.recipe.conversion
        kind, base = conversion.rope.get("rope_type"), conversion.rope.get("rope_theta")
        if conversion.scheme is not None:
            return f"{conversion.scheme} over {self.share}" if self.share else conversion.scheme
        return f"{kind} rope" if kind else f"rope of base {base:,.0f}" if base else None

    @property
    def fate(self) -> str:
        conversion = self.recipe.conversion
        if self.came_with:
            return "unchanged since the earlier conversion"
        if conversion.rope:
            return f"kept, with {_listed(conversion.rope, '{}={}')}"
        if conversion.scheme is None or conversion.native == "keep":
            return "kept"
        if conversion.native == "handover":
            return f"faded out during the first {conversion.handover:.0%} of the steps, then removed"
        if conversion.keeps_share:
            return f"kept in part: {self.share}"
        return "removed" if conversion.window is None else f"removed; other layers see {conversion.window:,} tokens"

    @property
    def length(self) -> int:
        return self.recipe.training.length or self.trained_length

    @property
    def tokens(self) -> int:
        return self.recipe.training.steps * self.recipe.training.batch_size * self.length + self.other_tokens

    @property
    def epochs(self) -> float:
        """How often the text is read, to two digits; 0 if its tokens are unknown."""
        return float(f"{self.tokens / self.data_tokens:.2g}") if self.data_tokens else 0.0

    @property
    def reach(self) -> int:
        """Longest text whose positions are trained on."""
        return max(max(stage.length or self.length, stage.skip_to or 0) for stage in self.recipe.stages().values())

    @property
    def teacher(self) -> str | None:
        """Teacher and loss weights, in words; `None` without distillation."""
        wanted = self.recipe.distillation
        parts = [f"loss weight {wanted.share:g}"] * bool(wanted.share)
        parts += [f"hidden-state weight {wanted.hidden:g}"] * bool(wanted.hidden)
        parts += [f"fading to zero by {wanted.until:.0%} of training"] * bool(wanted.until)
        return f"{wanted.teacher or 'the original'} ({', '.join(parts)})" if wanted.distils else None

    @property
    def trained(self) -> str:
        adapter = self.recipe.adapter
        bits = ", on a model in 4 bits" * adapter.four_bit
        if adapter.kind == "lora":
            new = " and the scheme's weights" * bool(self.new_parameters)
            return f"LoRA of rank {adapter.rank}{new}{bits}"
        return "all weights" if adapter.kind == "none" else f"the scheme's weights alone{bits}"

    @classmethod
    def of(cls, model: Any, recipe: Recipe, plan: Plan | None, *, trained_length: int, **known: Any) -> Facts:
        """Collect the facts of a run from the converted model with its adapter, not yet sharded, and the plan of it."""
        inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
        architecture = of_config(inner.config)
        if isinstance(model, PeftModel):
            # PEFT's count is right for packed 4-bit weights.
            trained_parameters, parameters = model.get_nb_trainable_parameters()
        else:
            trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            parameters = sum(p.numel() for p in model.parameters())
        groups = record.from_config(inner.config) if recipe.conversion.scheme is None else ()
        warnings = () if plan is None else plan.warnings
        if recipe.conversion.native == "handover":  # It starts exact, whatever the scheme alone would do.
            warnings = tuple(warning for warning in warnings if not warning.startswith(BREAK))
        return cls(
            recipe=recipe,
            architecture=architecture.name,
            native=architecture.native,
            trained_length=trained_length,
            states_length=architecture.trained_length(inner.config) is not None,
            parameters=parameters,
            new_parameters=0 if plan is None else plan.parameters,
            trained_parameters=trained_parameters,
            options={} if plan is None else plan.options,
            layers={} if plan is None else {name: len(layers) for name, layers in plan.layers.items()},
            start=_start(recipe.conversion, plan),
            cautions=tuple(warnings),
            processes=PartialState().num_processes,
            device=_device(PartialState().device),
            versions=versions(),
            came_with=tuple(group.scheme for group in groups),
            share=plan.native if plan is not None and recipe.conversion.keeps_share else "",
            **known,
        )


def _start(conversion: Conversion, plan: Plan | None) -> str:
    if plan is None:
        return "exact: the model is not converted" if not conversion.rope else "break: other angles"
    if conversion.native == "handover":
        return "exact: the native encoding at full strength, the scheme at none"
    start = plan.start
    if plan.start_tolerance:
        start += f" (logits of attention within {plan.start_tolerance:g})"
    if conversion.fit is not None:
        known = {"native": "the native encoding", "transfer": "the original attention outputs"}
        start += f"{_FITTED}{known[conversion.fit]}"
    return start


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type.upper()} with {counted(torch.get_num_threads(), 'thread')}"


def _listed(values: Mapping[str, Any], form: str) -> str:
    return ", ".join(form.format(key, value) for key, value in values.items())


def header(facts: Facts) -> list[str]:
    return [line(*row) for row in rows(facts)]


def line(name: str, value: str) -> str:
    return f"{name:<10} {value}"


def rows(facts: Facts) -> Iterator[tuple[str, str]]:
    recipe, training = facts.recipe, facts.recipe.training
    trained_on = f", trained on {facts.trained_length:,} tokens" * facts.states_length
    yield "model", f"{recipe.model} ({facts.architecture}, {facts.parameters:,} parameters{trained_on})"
    came_with = ", ".join(facts.came_with)
    as_it_is = f"{came_with}, trained on as the model has it" if came_with else "none (the model's own encoding)"
    converted = " and ".join(counted(count, f"{name} layer") for name, count in facts.layers.items())
    yield "scheme", (facts.encoding or as_it_is) + f" on {converted}" * bool(converted)
    if recipe.conversion.layers is not None:
        count, chosen = recipe.conversion.measured_layers, recipe.conversion.layers
        known = chosen if isinstance(chosen, str) else ", ".join(map(str, chosen))
        yield "layers", known if count is None else f"the {count} that cost least, measured before the run"
    options = {name: _listed(given, "{}={!r}") for name, given in facts.options.items()}
    if len(set(options.values())) == 1:
        # One line is enough if all stacks have the same options.
        options = {"": next(iter(options.values()))}
    yield from ((f"options {name}".rstrip(), given) for name, given in options.items() if given)
    yield "native", f"{facts.native}: {facts.fate}"
    yield "start", facts.start
    yield "trained", f"{facts.trained}: {facts.trained_parameters:,} parameters, {facts.new_parameters:,} of them new"
    steps = f"{counted(training.steps, 'step')} x {counted(training.batch_size, 'window')} x {facts.length:,} tokens"
    yield "tokens", f"{facts.tokens:,} ({steps}{' and the other stages' * bool(facts.other_tokens)})"
    if training.skip_to is not None:
        yield "positions", f"up to {training.skip_to:,}, by skipping some (PoSE)"
    yield from (("stage", words) for words in facts.stages)
    epochs = f", {facts.data_tokens:,} training tokens, {facts.epochs:,g} epochs" if facts.data_tokens else ""
    yield "data", f"{recipe.data.read_from}{epochs}"
    if facts.teacher:
        yield "teacher", facts.teacher
    yield "compute", f"{facts.processes} x {facts.device}, {training.precision}"
    if facts.memory:
        yield "memory", facts.memory
    yield from (("caution", caution) for caution in facts.cautions)
    if facts.epochs > 1:
        yield (
            "caution",
            f"The text is read {facts.epochs:,g} times: it has {facts.data_tokens:,} tokens to train on. Give more "
            "text (data), or train on fewer tokens (steps), if the model should not learn it by heart.",
        )
