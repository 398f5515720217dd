"""Recipes by goal: what follows from model, scheme and machine, and that none refuses the model that it is for."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import once
from models import DIRECTORIES, checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    ModernBertConfig,
    PreTrainedConfig,
)

import hf_posenc
from hf_posenc import OptionError, RecipeError, UnknownSchemeError
from hf_posenc.patches.plan import skeleton
from hf_posenc.patches.rotary import native_rope, set_rope
from hf_posenc.recipes import goals, memory
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.loading import auto_class
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.schema import checks
from hf_posenc.recipes.schema.recipe import Recipe, Training

pytestmark = pytest.mark.usefixtures("plain_pictures")

SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    **{name: AutoConfig.from_pretrained(folder) for name, folder in DIRECTORIES.items()},
    "bert": BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=512),
    "modernbert": ModernBertConfig(
        **SIZES,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        intermediate_size=64,
        max_position_embeddings=512,
    ),
}


def replaced(config: Any, **keys: Any) -> Any:
    """Return a copy of a config with other values."""
    return type(config).from_dict({**config.to_dict(), **keys})


def read(name: str, source: str, *overrides: str, length: int | None = None) -> Recipe:
    """Read a goal for a model, which may have another trained length."""
    config: PreTrainedConfig = CONFIGS[name]
    if length is not None:
        config = replaced(config, max_position_embeddings=length)
    text = [] if any(pair.startswith("data") for pair in overrides) else ["data=builtin"]
    return read_recipe(source, ["model=here", *text, *overrides], config=config)


@pytest.mark.parametrize("name", once(CONFIGS))
def test_no_recipe_refuses_a_model_that_it_is_recommended_for(name: str) -> None:
    layers = {"gpt2": "n_layer", "t5": "num_layers", "modernbert": "max_position_embeddings"}
    config = replaced(CONFIGS[name], **{layers.get(name, "num_hidden_layers"): 512 if name == "modernbert" else 4})
    found = [each.words.split() for each in goals.recommended(config)]
    assert len(found) > 40
    for source, *pairs in found:
        if source == "extend" and pairs and pairs[0].removeprefix("by=") in hf_posenc.schemes():
            continue  # As in a swap.
        recipe = read_recipe(source, ["model=here", "data=builtin", *pairs], config=config)
        length, own = checks.lengths(recipe, config)
        conversion = recipe.conversion
        if conversion.scheme is not None and source != "extend":
            hf_posenc.plan(config, conversion.scheme, **conversion.keywords)
        # A table of positions that stays has no rows beyond.
        if goals.Facts.of(config).native == "table" and conversion.native != "remove":
            assert max(length, recipe.training.skip_to or 0) <= own


@pytest.mark.parametrize(
    ("name", "pairs", "wanted"),
    [
        ("llama", ["scheme=kerple"], ("remove", "native", {"shared": False}, None)),
        ("llama", ["scheme=fire"], ("remove", "native", {"threshold": 64.0}, None)),
        ("llama", ["scheme=fire", "length=32"], ("remove", "native", {"threshold": 16.0}, None)),
        ("llama", ["scheme=shaw", "length=32"], ("remove", "transfer", {"max_distance": 24}, None)),
        # Add-ons go the way of the other scheme, which then has a module in each layer.
        ("llama", ["scheme=kerple+gated_output"], ("remove", "native", {}, None)),
        ("llama", ["scheme=cope+gated_output"], ("keep", None, {}, None)),
        ("llama", ["scheme=fox"], ("keep", None, {"init": "horizon"}, None)),
        ("llama", ["scheme=fox", "native=remove"], ("remove", None, {}, None)),
        ("llama", ["scheme=kerple", "native=keep"], ("keep", None, {"gate": True}, None)),
        ("llama", ["scheme=kerple", "native=0.5"], (0.5, None, {"shared": False, "gate": True}, None)),
        ("llama", ["scheme=fox", "native=fast"], ("fast", None, {"init": "horizon"}, None)),
        # The scheme alone cannot make up for an encoding that is gone.
        ("llama", ["scheme=kerple", "adapter=scheme"], ("keep", None, {"gate": True}, None)),
        ("llama", ["scheme=liere", "adapter=scheme"], ("remove", None, {}, None)),
        ("gpt2", ["scheme=kerple", "adapter=scheme"], ("keep", None, {"gate": True}, None)),
        ("llama", ["scheme=liere"], ("remove", None, {}, None)),
        # A handover brings a scheme in by its strength, so a gate that starts at 0 would keep it out.
        ("gpt2", ["scheme=kerple"], ("handover", None, {"gate": False}, None)),
        ("gpt2", ["scheme=alibi", "native=handover"], ("handover", None, {"gate": False}, None)),
        ("t5", ["scheme=kerple"], ("remove", "transfer", {"shared": False}, ["decoder"])),
        ("t5", ["scheme=stick_breaking"], ("remove", None, {}, ["decoder"])),
        ("t5", ["scheme=t5"], ("remove", None, {}, None)),
        ("bert", ["scheme=kerple"], ("handover", None, {"gate": False, "directed": True}, None)),
    ],
)
def test_a_swap_follows_from_the_scheme_and_the_model(name: str, pairs: list[str], wanted: tuple[Any, ...]) -> None:
    conversion = read(name, "swap", *pairs).conversion
    assert (conversion.native, conversion.fit, conversion.options, conversion.stacks) == wanted


def test_what_a_goal_needs_and_how_layers_leave_their_encoding() -> None:
    # Layers that are made local must not fade with the others.
    assert read("llama", "remove", "layers=every:2").conversion.native == "handover"
    assert read("llama", "remove", "layers=every:2", "window=8").conversion.native == "remove"
    with pytest.raises(RecipeError, match="swap needs a scheme"):
        read_recipe("swap")


@pytest.mark.parametrize(
    ("pairs", "key", "value"),
    [
        (["steps=7"], "training.steps", 7),
        (["length=64"], "training.length", 64),
        (["windows=3"], "evaluation.windows", 3),
        (["adapter=scheme"], "adapter.kind", "scheme"),
        (["data=text.txt"], "data.source", "text.txt"),
        (["adapter={kind: lora}", "rank=16"], None, "rank"),
        (["every=5"], None, "evaluation.every or saving.every"),
        (["stepz=5"], None, "'stepz'.*'steps'"),
        (["steps=5", "training.steps=6"], None, "training.steps is given twice"),
        (["scheme.threshold=5", "options.threshold=6"], None, "conversion.options.threshold is given twice"),
    ],
)
def test_keys_may_leave_out_a_section_that_is_clear(pairs: list[str], key: str | None, value: Any) -> None:
    if key is None:
        with pytest.raises(RecipeError, match=value):
            read("llama", "swap", "scheme=kerple", *pairs)
        return
    section, _, name = key.partition(".")
    assert getattr(getattr(read("llama", "swap", "scheme=kerple", *pairs), section), name) == value


def test_a_long_model_is_trained_in_windows_that_a_machine_can_hold() -> None:
    recipe = read("llama", "swap", "scheme=kerple", length=8192)
    assert (recipe.training.length, recipe.evaluation.contexts) == (1024, [256, 1024, 4096, 8192])
    # Less than what is scored cannot be read.
    assert read("llama", "swap", "scheme=kerple", "length=128", length=8192).evaluation.contexts == [128, 512]
    # A short training is not measured for longer than it lasts, nor where it cannot be.
    for steps, contexts in (("32", [256, 1024, 4096]), ("1", [256, 1024])):
        assert read("llama", "swap", "scheme=kerple", f"steps={steps}", length=8192).evaluation.contexts == contexts
    short = read("llama", "swap", "scheme=kerple", "steps=2", "training.length=32", length=2048)
    assert short.evaluation.contexts == [64]
    far = read("llama", "extend", length=8192)
    assert (far.training.skip_to, max(far.evaluation.contexts)) == (32768, 32768)  # what is asked for is measured
    assert read("llama", "swap", "scheme=fire", length=512).training.skip_to == 4096
    # What is given wins.
    assert read("llama", "swap", "scheme=kerple", "length=8192", length=8192).training.length == 8192


def test_a_model_of_real_size_begins_with_the_attention_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replaced(CONFIGS["llama"], hidden_size=512, max_position_embeddings=1024)

    def size(*overrides: str, scheme: str = "kerple") -> tuple[int, int | None]:
        transfer = read_recipe(
            "swap", ["model=here", "data=builtin", f"scheme={scheme}", *overrides], config=config
        ).transfer
        return transfer.steps, transfer.batch_size

    whole = read_recipe("swap", ["model=here", "data=builtin", "scheme=kerple"], config=config)
    assert (whole.transfer.length, whole.transfer.skip_to, whole.transfer.repeat) == (None, None, 0.4)
    assert size() == (250_000 // 1024, 1)
    # A fifth of its tokens follow in the training.
    assert (whole.training.steps, whole.training.batch_size) == (250_000 // 1024 // 5, 1)
    assert size("steps=4") == (4 * 5, 1)
    # Documents are no long text, and an extension is taught by its training.
    packed = read("llama", "swap", "scheme=kerple", "native=fast", "data=builtin", "data.packing=documents").transfer
    assert (packed.skip_to, packed.repeat, packed.steps > 0) == (None, 0, True)
    longer = read("llama", "extend", "by=kerple", "native=fast")
    assert (longer.transfer.steps > 0, longer.training.steps, longer.training.batch_size) == (True, 300, 8)
    short = read_recipe("swap", ["model=here", "data=builtin", "scheme=kerple", "transfer.length=64"], config=config)
    assert (short.transfer.steps, short.transfer.skip_to) == (250_000 // 64, 512)
    assert size("native=keep") == size("fit=native") == size("transfer.steps=0") == (0, None)
    assert size(scheme="kerple+gated_output") == size()
    assert read("llama", "swap", "scheme=kerple").transfer.steps == 0
    # A share of the rotation that stays is what a transfer begins from, whatever the size.
    assert read("llama", "swap", "scheme=kerple", "native=fast").transfer.steps > 0
    assert size("native=remove") == size("native=0.25") == size()
    with pytest.raises(RecipeError, match=r"length is '0'.*greater than or equal to 2"):
        size("length=0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert size("steps=4") == (4 * 5, 4)  # one window for each process


def test_extending_takes_what_the_native_encoding_has() -> None:
    yarn = read("llama", "extend", "factor=2")
    assert yarn.conversion.rope == {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    assert (yarn.conversion.scheme, yarn.training.skip_to) == (None, 256)
    # Encoders restore windows, of which no positions are skipped.
    rotary = read("modernbert", "extend")
    assert (rotary.training.length, rotary.training.batch_size, rotary.training.skip_to) == (2048, 2, None)
    assert read("t5", "extend", "by=windows").conversion.scheme is None
    # The config of a T5 states no trained length; its longest measured text is twice what it trains on.
    assert read("t5", "extend").evaluation.contexts == [512, 1024, 2048, 4096]
    for scheme in ("kerple", "fox"):
        # A share of the rotation needs the transfer here, too; and positions are still trained as far as is asked.
        fast, plain = (read("llama", "extend", f"by={scheme}", *more) for more in (["native=fast"], []))
        assert (fast.conversion.native, fast.conversion.fit, fast.distillation.share) == ("fast", None, 1.0)
        assert fast.transfer.steps > 0 == plain.transfer.steps
        assert fast.training.skip_to == plain.training.skip_to == 512
    table = read("gpt2", "extend")
    assert (table.conversion.scheme, table.conversion.native, table.training.skip_to) == ("alibi", "remove", 512)
    for pairs, said in (
        (["factor=1"], "factor is '1': Input should be greater than 1"),
        (["factor=1e9"], "factor is 1000000000.0; expected .* at most"),
        (["by=yarm"], "'yarn'"),
        (["factor=4", "factor=8"], "twice"),
    ):
        with pytest.raises(RecipeError, match=said):
            read("llama", "extend", *pairs)
    with pytest.raises(RecipeError, match="no rotary encoding"):
        read("gpt2", "extend", "by=yarn")


@pytest.mark.parametrize("way", goals.ROPES)
def test_rope_parameters_change_a_model_as_its_config_would(way: str) -> None:
    model, ids = checkpoint("llama"), torch.arange(20, 320)[None]
    before = model(ids).logits
    original = set_rope(model, read("llama", "extend", f"by={way}").conversion.rope)
    changed = model(ids).logits
    assert not torch.allclose(before, changed)
    again = AutoModelForCausalLM.from_config(model.config).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(ids).logits, changed)
    with native_rope(model, original):
        assert torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids).logits, changed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nosuch": 1}, "nosuch do nothing with rope_type 'default'"),
        ({"factor": 4.0}, "factor do nothing with rope_type 'default'.*another rope_type"),
        ({"rope_type": "linear", "factor": 4.0, "nosuch": 1}, "nosuch do nothing with rope_type 'linear'"),
        ({"rope_theta": 0.0}, "angles that are no numbers"),
        ({"rope_type": "linear"}, "are refused by transformers"),
    ],
)
def test_rope_parameters_are_refused_and_nothing_changes(changes: dict[str, Any], said: str) -> None:
    model = checkpoint("llama")
    before, angles = model.config.to_json_string(), model.model.rotary_emb.inv_freq.clone()
    with pytest.raises(OptionError, match=said):
        set_rope(model, changes)
    assert model.config.to_json_string() == before
    assert torch.equal(model.model.rotary_emb.inv_freq, angles)


def test_an_extended_model_is_a_stock_one_that_says_its_length(tmp_path: Path) -> None:
    small = ["steps=1", "batch_size=2", "data.limit=400", "windows=2", "evaluation.contexts=[64]", "length=64"]
    recipe = read_recipe("extend", small)
    outcome = run.train(recipe, tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(outcome.model)
    assert type(model).__module__.startswith("transformers.")
    assert model.config.max_position_embeddings == 512
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert read_recipe(tmp_path / "run" / "recipe.yaml") == recipe
    # The native model was measured with its own rotation.
    native, first = (outcome.measurements.curve(name) for name in ("original", "before"))
    assert native is not None
    assert first is not None
    assert native.at(64).mean != first.at(64).mean


def test_rope_types_are_no_schemes_and_lead_to_extend() -> None:
    with pytest.raises(UnknownSchemeError, match="extend by=yarn"):
        hf_posenc.plan(CONFIGS["llama"], "yarn")
    with pytest.raises(RecipeError, match=r"conversion.rope changes the config.*adapter"):
        read("llama", "extend", "adapter=lora")


def test_micro_batches_fit_the_memory() -> None:
    recipe, model = read("llama", "control"), checkpoint("llama")
    need = memory.need(model, recipe, 128)
    weights = sum(weight.numel() for weight in model.parameters())
    table = model.get_input_embeddings().weight.numel()
    assert model.config.tie_word_embeddings
    assert need.fixed == 12 * weights + memory._SLACK  # weights and two moments in float32
    assert need.gradients == 4 * (weights + 2 * table)  # the head's, and the sum of both
    taught = read("llama", "swap", "scheme=fire")
    assert memory.need(model, taught, 128).fixed == 16 * weights + memory._SLACK  # and a teacher
    # An adapter needs no copy of the original, but a teacher of its own is one.
    tuned = [
        memory.need(model.requires_grad_(False), read("llama", "swap", "scheme=fire", "adapter=lora", *of), 128).fixed
        for of in ((), ("distillation.teacher=other",))
    ]
    assert tuned == [4 * weights + memory._SLACK, 8 * weights + memory._SLACK]
    model.requires_grad_(True)
    assert memory.need(skeleton(CONFIGS["llama"]), recipe, 128) == need
    # Gradients come when activations go, unless those of an earlier forward are there.
    assert need.of(2) == need.fixed + 2 * (need.window + need.logits)
    # The logits of long windows are never all there.
    assert replace(need, logits=10**15).of(2) == need.fixed + 2 * need.window + need.at_once
    assert need.of(2, accumulates=True) == need.of(2) + need.gradients
    plenty, tight = 2 * need.of(8), int(1.01 * need.of(2, accumulates=True) / 0.8)
    assert memory.micro_batch(Training(), need, plenty)[0] is None
    assert memory.micro_batch(Training(batch_size=2), need, int(1.01 * need.of(2) / 0.8))[0] is None
    found, words = memory.micro_batch(Training(), need, tight)
    assert found == 2
    assert "2 of 8 windows" in words
    # What no text is long enough for is refused later, and not counted down to.
    assert memory.micro_batch(Training(batch_size=10**20), need, tight)[0] == 2
    assert memory.micro_batch(Training(micro_batch_size=4), need, tight)[0] == 4
    assert "may not fit" in memory.micro_batch(Training(), need, need.fixed)[1]


@pytest.mark.parametrize(
    ("name", "scheme", "precision"),
    [
        *((name, None, ("float32", "bfloat16")[turn % 2]) for turn, name in enumerate(CONFIGS)),
        ("llama", "kerple", "bfloat16"),
        ("bert", "fire", "float32"),
    ],
)
def test_activations_are_what_a_backward_pass_keeps(name: str, scheme: str | None, precision: str) -> None:
    config = copy.deepcopy(CONFIGS[name])
    model = auto_class(config).from_config(config, dtype=torch.float32)
    stock = copy.deepcopy(model).train()
    if scheme is not None:
        hf_posenc.patch(model, scheme)
    count, is_piecewise = memory._activations(model, halves=precision == "bfloat16")
    assert is_piecewise == (auto_class(config) is AutoModelForCausalLM)
    ids, own = torch.ones(1, 61, dtype=torch.long), {id(weight) for weight in stock.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in own and 61 in tensor.shape:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    given = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"),
    ):
        stock.base_model(input_ids=ids, use_cache=False, **given)
    real = sum(storage.nbytes() for storage in kept.values()) / 61
    # Without memory, a mask is made that windows without padding do not need.
    assert 0.95 * real < count < 1.1 * real


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_measured_is_recommended_first(name: str) -> None:
    found = goals.recommended(CONFIGS[name])
    assert len({each.words for each in found}) == len(found)
    measured = [each.quality is not None for each in found]
    assert measured == sorted(measured, reverse=True), name
    # A converted model is trained on as it is.
    converted = hf_posenc.patch(checkpoint("llama"), "alibi").config
    assert [each.words for each in goals.recommended(converted)] == ["control"]
