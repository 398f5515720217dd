"""Stages of a run: attention transfer, training, long windows."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIRECTORIES, checkpoint, stock, text_file, tokens
from peft import LoraConfig, get_peft_model
from test_run import Stop, stop_after, weights
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.errors import OptionError, RecipeError
from hf_posenc.recipes import memory, storage
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import hybrids, run, stages
from hf_posenc.recipes.runs.case import Work
from hf_posenc.recipes.runs.stages import training
from hf_posenc.recipes.schema.recipe import Recipe, Training
from hf_posenc.recipes.training.layers import LayerCost, LayerCosts, layer_costs
from hf_posenc.recipes.training.rates import magnitude, rates, with_rates
from hf_posenc.recipes.training.transfer import AttentionTransfer, transfer

pytestmark = pytest.mark.usefixtures("plain_pictures")

SMALL = (
    *("fit=null", "distillation={share: 1.0}", "training.length=64", "training.batch_size=2"),
    *("evaluation.contexts=[64]", "evaluation.windows=4", "saving.every=2"),
    # The layers are checked every fourth step of the transfer, so it is also saved before the first check.
    *("transfer={steps: 8, length: 32, skip_to: 128, repeat: 0.4}", "training.steps=4"),
)
LONG = "lengthen={steps: 4, length: 128, batch_size: 1}"


def recipe_of(*changes: str, architecture: str = "llama") -> Recipe:
    given = ["scheme=kerple", f"model={DIRECTORIES[architecture]}", f"data.source={text_file()}", *SMALL]
    named = {pair.partition("=")[0] for pair in changes}
    return read_recipe("swap", [*(pair for pair in given if pair.partition("=")[0] not in named), *changes])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> run.Outcome:
    return run.train(recipe_of(LONG), tmp_path_factory.mktemp("whole") / "out")


def test_a_run_goes_on_in_each_stage_bit_for_bit(
    whole: run.Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within the transfer, within the training, between it and the long windows, and within these.

    From the second stop on, less memory is free: other micro batches would round otherwise. Rates follow from the
    weights before the run, so that no stage measures these again.
    """
    monkeypatch.setattr("hf_posenc.recipes.training.rates.magnitude", lambda model: pytest.fail("measured again"))
    out = tmp_path / "out"
    for stop, saves in enumerate((1, 3, 1, 1)):
        stop_after(monkeypatch, saves)
        with pytest.raises(Stop):
            run.resume(out) if stop else run.train(recipe_of(LONG), out)
        if stop:
            monkeypatch.setattr(memory, "available", lambda *given: 1)
    outcome = run.resume(out)
    expected, found = weights(whole.model), weights(outcome.model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    steps = [step for step, _ in outcome.measurements.course()]
    assert steps == [step for step, _ in whole.measurements.course()] == [0, 8, 12, 16]


@pytest.mark.grid
@pytest.mark.parametrize(("until", "taught"), [(0, [False, True, True]), (0.5, [False, True, False])])
def test_long_windows_are_mixed_with_short_ones_and_keep_a_teacher_that_has_not_faded(
    until: float, taught: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, found, longest = stages.go_on, [], list[set[int | None]]()

    def watched(trainer: Any, checkpoint: Path | None) -> None:
        found.append(trainer._teacher is not None)
        read = [batch.get("position_ids") for batch in itertools.islice(trainer.get_train_dataloader(), 12)]
        longest.append({None if places is None else 1 + int(places.max()) for places in read})
        go_on(trainer, checkpoint)

    monkeypatch.setattr(stages, "go_on", watched)
    changes = ("transfer={steps: 1}", "training.steps=1", f"distillation={{share: 1.0, until: {until}}}")
    run.train(recipe_of(LONG, *changes), tmp_path / "out")
    assert found == taught
    assert longest[1:] == [{None}, {64, 128}]


def test_long_windows_have_no_encoder_decoder_as_teacher() -> None:
    recipe = read_recipe("swap", ["scheme=fire", "distillation={share: 1.0}", "lengthen={steps: 1}"])
    for architecture, taught in (("llama", [True, True]), ("t5", [True, False])):
        plans = training(replace(recipe, transfer=replace(recipe.transfer, steps=0)))
        assert [plan.settled(Work(stock(architecture))).distillation.distils for plan in plans] == taught


def test_the_transfer_brings_attention_nearer(whole: run.Outcome) -> None:
    course = dict(whole.measurements.course())
    assert course[8].at(64).mean < course[0].at(64).mean
    record = json.loads((whole.folder / storage.RUN).read_text(encoding="utf-8"))
    assert record["transfer"]["accepted"]
    assert len(record["transfer"]["after"]) == 4
    assert [words.partition(":")[0] for words in record["stages"]] == ["attention transfer", "training", "long windows"]


@pytest.mark.grid
@pytest.mark.parametrize(("architecture", "changes"), [("llama", ["data.packing=documents"]), ("t5", [])])
def test_a_fit_of_attention_is_a_transfer_of_the_scheme(architecture: str, changes: list[str], tmp_path: Path) -> None:
    """Of packed documents, and of an encoder-decoder."""
    keys = ["scheme=disentangled", "native=remove", "fit=transfer", "transfer={steps: 12}", "training.steps=1"]
    recipe = recipe_of(*keys, *changes, architecture=architecture)
    outcome = run.train(recipe, tmp_path / "out")
    course = dict(outcome.measurements.course())
    assert course[12].at(64).mean < course[0].at(64).mean


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["lora", "scheme"])
def test_an_adapter_learns_in_place_of_the_base(kind: str, tmp_path: Path) -> None:
    outcome = run.train(recipe_of(f"adapter.kind={kind}", "conversion.native=remove"), tmp_path / "out")
    course = dict(outcome.measurements.course())
    assert course[8].at(64).mean < course[0].at(64).mean
    assert (outcome.model / "adapter_config.json").is_file()


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_projections_move_and_everything_else_stays(architecture: str) -> None:
    model = hf_posenc.patch(checkpoint(architecture), "kerple")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = tokens(architecture, 12, 33)
    alone = transfer(copy.deepcopy(model), ids, steps=20)
    found = transfer(model, ids, projections=True, steps=20)
    assert sum(found.after) < sum(alone.after) < sum(found.before)
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert any("hf_posenc" not in name for name in moved)
    assert all("attn" in name or "SelfAttention" in name or "hf_posenc" in name for name in moved), moved


def test_micro_batches_and_padding_give_one_loss() -> None:
    transfer = AttentionTransfer(hf_posenc.patch(stock("llama"), "kerple"))
    ids = tokens("llama", 4, 24)
    transfer.distances([{"input_ids": ids}])
    whole = transfer(input_ids=ids)["loss"]
    parts = [transfer(input_ids=part)["loss"] for part in ids.split(1)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
    padded = torch.cat([ids, torch.zeros_like(ids[:, :5])], dim=1)
    mask = (torch.arange(29) < 24).long().expand(4, 29)
    torch.testing.assert_close(transfer(input_ids=padded, attention_mask=mask)["loss"], whole)


def test_a_layer_that_gets_worse_keeps_its_weights() -> None:
    model = hf_posenc.patch(stock("llama"), "kerple", shared=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    # A rate at which only some layers learn.
    found = transfer(model, tokens("llama", 12, 33), steps=3, learning_rate=0.3)
    after = model.state_dict()
    for layer, (old, new) in enumerate(zip(found.before, found.after, strict=True)):
        own = [name for name in before if f"layers.{layer}.self_attn.hf_posenc" in name]
        assert all(torch.equal(after[name], before[name]) for name in own) == (new == old)


@pytest.mark.parametrize("scheme", ["kerple", "fire_s"])
def test_the_cost_of_each_layer_alone(scheme: str) -> None:
    model, ids = stock("llama").eval(), tokens("llama", 12, 33)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    found = layer_costs(model, scheme, ids, steps=6, batch_size=3)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert [each.layer for each in found.layers] == list(range(model.config.num_hidden_layers))
    # By hand, for one layer: the same transfer, and the other layers as they were.
    torch.manual_seed(0)
    whole = hf_posenc.patch(stock("llama").eval(), scheme)
    transfer(whole, ids[:-3], projections=True, steps=6, batch_size=3)
    alone = hf_posenc.patch(stock("llama").eval(), scheme, layers=[1])
    trained, here = whole.state_dict(), alone.state_dict()
    mine = [name for name in here if ".layers.1.self_attn." in name or "hf_posenc" in name]
    alone.load_state_dict({name: trained[name] for name in mine}, strict=False)
    with torch.no_grad():
        losses = [one(input_ids=ids[-3:], labels=ids[-3:]).loss.item() for one in (alone, model)]
    assert found.layers[1].cost == pytest.approx(losses[0] - losses[1], abs=1e-5)
    assert found.layers[1].distance is not None
    dearest = max(found.layers, key=lambda each: each.cost).layer
    [kept] = found.cheapest(1).values()
    assert kept == [layer for layer in range(model.config.num_hidden_layers) if layer != dearest]
    with pytest.raises(OptionError, match="expected 0 to"):
        found.cheapest(99)


def test_the_cost_of_the_layers_of_two_stacks() -> None:
    found = layer_costs(stock("t5"), "kerple", tokens("t5", 4, 17), steps=1, batch_size=2)
    assert [each.stack for each in found.layers] == ["encoder", "encoder", "decoder", "decoder"]


def test_the_price_of_a_layer_counts_perplexity_and_copying() -> None:
    """The layer that carries the copying costs no more perplexity than another, and is spared first."""
    lost = [(0.09, 0.01), (0.08, 0.59), (0.10, 0.61), (0.01, 0.55)]
    costs = LayerCosts(
        "nope",
        3.0,
        {"copy": 0.6},
        tuple(LayerCost(stack="decoder", layer=i, cost=c, abilities={"copy": a}) for i, (c, a) in enumerate(lost)),
    )
    assert [each.layer for each in costs.carrying("copy")] == [0]
    # A gain of copying, which is chance, does not make up for perplexity.
    assert costs.price(costs.layers[2]) == pytest.approx(math.expm1(0.10))
    assert costs.price(costs.layers[0]) == pytest.approx(math.expm1(0.09) + 1 - 1 / 60)
    assert [costs.cheapest(spared)["decoder"] for spared in (1, 2, 3)] == [[1, 2, 3], [1, 3], [3]]
    # Where the original copies nothing, perplexity alone decides.
    assert replace(costs, abilities={}).cheapest(1)["decoder"] == [0, 1, 3]


def test_hybrids_are_measured_as_they_would_be_converted() -> None:
    """All layers of a hybrid together have the weights of the transfer."""
    model, ids = stock("llama").eval(), tokens("llama", 12, 33)
    found = layer_costs(model, "kerple", ids, native=0.5, steps=2, batch_size=1, spared=[0, 1])
    whole = stock("llama").eval()
    torch.manual_seed(0)
    hf_posenc.patch(whole, "kerple", native=0.5)
    transfer(whole, ids[:-3], projections=True, steps=2, batch_size=1)
    with torch.no_grad():
        losses = [one(input_ids=ids[-3:], labels=ids[-3:]).loss.item() for one in (whole, model)]
    assert found.hybrids[0].cost == pytest.approx(losses[0] - losses[1], abs=1e-5)
    assert found.hybrids.keys() == {0, 1}
    assert found.loss == pytest.approx(losses[1], abs=1e-5)
    with pytest.raises(OptionError, match=r"native='keep'.*none costs anything"):
        layer_costs(model, "kerple", ids, native="keep")


def test_the_cheapest_layers_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, measure = [], hybrids.layer_costs

    def counted(*given: Any, **named: Any) -> LayerCosts:
        calls.append(named["native"])
        return measure(*given, steps=2, **named)

    monkeypatch.setattr(hybrids, "layer_costs", counted)
    asked, out = recipe_of("layers=auto:1", "native=0.5", "transfer={steps: 2}"), tmp_path / "out"
    stop_after(monkeypatch, 1)
    with pytest.raises(Stop):
        run.train(asked, out)
    chosen = read_recipe(out / storage.RECIPE).conversion.layers
    kept = json.loads((out / storage.RUN).read_text(encoding="utf-8"))["measured_layers"]
    assert (kept["asked"], kept["layers"]) == ("auto:1", chosen)
    prices = LayerCosts(**kept["costs"] | {"layers": tuple(LayerCost(**each) for each in kept["costs"]["layers"])})
    assert prices.cheapest(3)["decoder"] == chosen
    outcome = run.train(asked, out)
    assert calls == [0.5]
    again = run.train(replace(asked, conversion=replace(asked.conversion, layers=chosen)), tmp_path / "given")
    expected, found = weights(again.model), weights(outcome.model)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert run.train(asked, out).already
    with pytest.raises(RecipeError, match=r"conversion\.layers was"):
        run.train(recipe_of("layers=auto:2", "native=0.5", "transfer={steps: 2}"), out)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("llama", ["scheme=kerple", "layers=auto:4"], "the model has 4 layers"),
        ("llama", ["scheme=kerple", "layers=auto:2", "native=keep", "transfer.steps=0"], "native: keep"),
        ("llama", ["scheme=sinusoidal", "layers=auto:2", "transfer.steps=0"], "on the inputs"),
        ("t5", ["scheme=kerple", "layers=auto:1", "transfer.steps=0"], "t5 models are none"),
    ],
)
def test_layers_that_cannot_be_measured_are_refused_before(
    architecture: str, changes: list[str], words: str, tmp_path: Path
) -> None:
    recipe = read_recipe("swap", [*changes, f"model={DIRECTORIES[architecture]}", f"data.source={text_file()}"])
    with pytest.raises(RecipeError, match=rf"conversion.layers is 'auto:.*{words}.*every:N"):
        run.train(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_that_layers_will_be_measured() -> None:
    few = ["training.length=64", "evaluation.windows=2", "training.steps=1", f"data.source={text_file()}"]
    done = CliRunner().invoke(app, ["train", "swap", "scheme=kerple", "layers=auto:2", *few, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "2 decoder layers" in done.stdout
    assert "the 2 that cost least, measured before the run" in done.stdout
    assert re.search(r"\(layers \d+ \w+, ", done.stdout)


def test_layers_on_the_command_line() -> None:
    runner = CliRunner()
    few = ["layers", "tiny-llama", "kerple", "--steps", "1", "--length", "32"]
    done = runner.invoke(app, [*few, "--json"])
    assert done.exit_code == 0, done.output
    assert [row["layer"] for row in json.loads(done.stdout)["layers"]] == [0, 1, 2, 3]
    done = runner.invoke(app, ["layers", "tiny-llama", "nope", "--steps", "0", "--length", "32", "--spare", "2"])
    assert done.exit_code == 0, done.output
    assert re.search(r"Without the 2 most expensive layers, before training: perplexity [+]\d+%", done.stdout)
    assert re.search(r"--layers \d,\d$", done.stdout, re.M)
    for arguments, words in (
        ([*few, "--spare", "9"], "4 layers"),
        (["layers", "tiny-llama", "learned"], "on the inputs"),
    ):
        refused = runner.invoke(app, arguments)
        assert refused.exit_code != 0
        assert words in refused.output + str(refused.exception)


def test_rates_fall_with_size() -> None:
    small, large = (torch.nn.Linear(*size, device="meta") for size in ((400, 400), (40_000, 4_000)))
    for stage in ("transfer", "training", "lengthen"):
        assert rates(small, stage).model > 1.5 * rates(large, stage).model
        assert rates(large, stage).scheme > rates(large, stage).model
        few = rates(large, stage, tokens=2048 // 64).model / rates(large, stage).model
        assert few == pytest.approx(1 if stage == "transfer" else 1 / 8)
        assert rates(large, stage, tokens=4096) == rates(large, stage)
        assert rates(small, stage, tokens=32) == rates(small, stage)
    # A length of null is the trained one.
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    named, unnamed = (with_rates(Training(length=length, batch_size=1), model) for length in (1024, None))
    assert replace(named, length=None) == unnamed


def test_rates_are_as_large_as_the_weights_and_as_what_is_to_be_learned() -> None:
    model = stock("llama")
    before = {stage: rates(model, stage) for stage in ("transfer", "training")}
    near = rates(model, "transfer", distance=0.18 / 100)
    assert near.model == pytest.approx(before["transfer"].model / 10)
    assert near.scheme == pytest.approx(before["transfer"].scheme / 10)
    assert rates(model, "transfer", distance=0.5) == before["transfer"]
    known = magnitude(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.25
    for stage, (own, scheme) in before.items():
        assert rates(model, stage) == pytest.approx((own / 4, scheme))
        # A run that goes on has other weights than those with which it began.
        assert rates(model, stage, weights=known) == pytest.approx((own, scheme))
    adapted = get_peft_model(stock("llama"), LoraConfig(target_modules=["q_proj"]))
    assert rates(adapted, "training", weights=known) == rates(adapted, "training")


def test_what_a_transfer_cannot_do(tmp_path: Path) -> None:
    for goal, changes in (("swap", ["scheme=kerple", "native=keep"]), ("control", [])):
        with pytest.raises(RecipeError, match=r"transfer.steps is 4, but conversion\."):
            read_recipe(goal, [*changes, "transfer.steps=4"])
    with pytest.raises(RecipeError, match=r"transfer.projections is False, which does nothing without transfer.steps"):
        read_recipe("swap", ["scheme=kerple", "transfer={projections: false}"])
    assert read_recipe("swap", ["scheme=kerple", "fit=transfer", "transfer.batch_size=2"]).transfer.batch_size == 2
    with pytest.raises(OptionError, match="adds its own encoding"):
        run.train(recipe_of("conversion.native=remove", architecture="gpt2"), tmp_path / "out")
    assert not (tmp_path / "out" / storage.MEASUREMENTS).exists()
