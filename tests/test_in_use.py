"""Patched models in the hands of trainers, adapters, servers and threads that know nothing of them."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from grid import once
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    EncoderDecoderModel,
    LlamaModel,
    PreTrainedModel,
    Trainer,
)

import hf_posenc
from hf_posenc import Geometry, build
from hf_posenc.errors import ArchitectureError, NotPatchedError, OptionError
from hf_posenc.operands import Block, Positions, Tokens
from hf_posenc.patches import record
from hf_posenc.recipes.runs.files import WholeCheckpoints
from hf_posenc.recipes.training.callbacks import Annealing, Handover

EXACT = {"llama": "rope", "gpt2": "learned"}
decoders = pytest.mark.parametrize("architecture", EXACT)


# -- trainers ----------------------------------------------------------------------------------------------------------


@decoders
def test_a_smoothed_loss_is_that_of_the_stock_model(architecture: str, tmp_path: Path) -> None:
    ids = models.tokens(architecture, 2, 16)
    arguments = models.arguments(tmp_path, label_smoothing_factor=0.1)

    def smoothed(model: PreTrainedModel) -> Tensor:
        with torch.no_grad():
            return Trainer(model=model.eval(), args=arguments).compute_loss(
                model, {"input_ids": ids, "labels": ids.clone()}
            )

    want = smoothed(models.stock(architecture))
    got = smoothed(hf_posenc.patch(models.stock(architecture), EXACT[architecture]))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("callback", "scheme", "options"),
    [
        (Handover(0.5), "fire", {"native": "keep"}),
        (Annealing(0.5), "xpos", {"anneal": True}),
        (WholeCheckpoints(Path("nowhere")), "fire", {}),
    ],
    ids=["Handover", "Annealing", "WholeCheckpoints"],
)
def test_what_goes_with_the_step_does_not_go_with_the_best_weights(
    callback: Any, scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    rows, every_step = models.windows("llama", 4, 8), {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", **every_step}
    arguments = models.arguments(tmp_path, max_steps=2, **best)
    model = hf_posenc.patch(models.stock("llama"), scheme, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
    with pytest.raises(OptionError, match=f"{type(callback).__name__} with load_best_model_at_end=True"):
        trainer.train()


@pytest.mark.parametrize("scheme", sorted(hf_posenc.schemes()))
def test_lora_on_all_linear_layers_runs_and_merges(scheme: str) -> None:
    ids = models.tokens("llama", 2, 20)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    # In float64: adapters as large as the weights make logits above 10, and merging rounds their sum again.
    adapted = get_peft_model(models.moved(hf_posenc.patch(models.stock("llama"), scheme), 0.3), config).eval().double()
    with torch.no_grad():
        want = adapted(ids).logits
        got = adapted.merge_and_unload()(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_stack_that_was_left_out_has_a_cache_as_before() -> None:
    model = models.moved(hf_posenc.patch(models.stock("t5"), "alibi", stacks="encoder"), 0.3)
    ids = models.tokens("t5", 2, 7)
    got, want = (model.generate(ids, max_new_tokens=6, min_new_tokens=6, use_cache=use) for use in (True, False))
    assert torch.equal(got, want)


@decoders
@pytest.mark.parametrize("number", [3, 255])
def test_every_number_but_0_in_a_mask_is_a_token(architecture: str, number: int) -> None:
    ids = models.tokens(architecture, 2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model = hf_posenc.patch(models.stock(architecture), EXACT[architecture]).eval()
    got, want = (models.logits(model, architecture, ids, given) for given in (number * mask, mask))
    assert torch.equal(got, want)


@decoders
def test_weights_are_given_where_they_are_asked_for(architecture: str) -> None:
    """Also where the body, as that of GPT-2, does not hand the question to its layers."""
    model, ids = hf_posenc.patch(models.stock(architecture), "alibi"), models.tokens(architecture, 2, 9)
    given = model(ids, output_attentions=True).attentions
    assert [weights.shape[2:] for weights in given] == [(9, 9)] * 2
    model.set_attn_implementation("eager")
    want = model(ids, output_attentions=True).attentions
    assert all(map(torch.equal, given, want))


def test_keys_ahead_that_are_seen_are_the_same_in_any_form_of_transformer_xl() -> None:
    """As where `generate` restarts the positions of a row padded on the right. One query has a form of its own."""
    geometry = Geometry(heads=2, kv_heads=2, head_dim=4, hidden_size=8)
    torch.manual_seed(0)
    scheme = build("transformer_xl", geometry).double()
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.normal_()
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 3, 4]])
    # Only a mask with no causal rule of its own shows such keys: the logits of both forms are asked for.
    tokens = Tokens(positions=Positions(places, places), common=scheme.common)
    many = scheme.project(tokens, q, k, v)
    few = scheme.project(
        Tokens(positions=Positions(places[:, -1:], places), common=scheme.common), q[:, :, -1:], k[:, :, :1], v
    )
    logits = []
    for tables in (many.tables, few.tables):
        block = Block(Positions(places[:, -1:], places), reach=6, causal=False, tables=tables)
        logits.append(scheme.score(torch.zeros(1, 2, 1, 9, dtype=torch.float64), q[:, :, -1:], k, block))
    assert set(many.tables) != set(few.tables)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("scheme", ["fire", "learned", "fox_pro", "liere"])
def test_a_model_patched_in_inference_mode_can_be_trained(scheme: str) -> None:
    model = models.stock("llama")
    with torch.inference_mode():
        hf_posenc.patch(model, scheme)
        built = build(scheme, Geometry(heads=2, kv_heads=2, head_dim=4, hidden_size=8, max_positions=16))
    models.loss(model, "llama", models.tokens("llama", 1, 12)).backward()
    assert all(parameter.grad is not None for parameter in models.new_parameters(model).values())
    assert not any(parameter.is_inference() for parameter in built.parameters())


# -- copies, parts and devices -----------------------------------------------------------------------------------------


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_a_copy_made_while_a_model_is_disabled_has_its_schemes(architecture: str, copied: Any) -> None:
    ids = models.tokens(architecture, 2, 12)
    model = models.moved(hf_posenc.patch(models.stock(architecture), "fire"), 0.3)
    want = models.logits(model, architecture, ids)
    with hf_posenc.disabled(model):
        twin = copied(model)
        stock = models.logits(model, architecture, ids)
    assert torch.equal(models.logits(twin, architecture, ids), want)
    with hf_posenc.disabled(twin):
        assert torch.equal(models.logits(twin, architecture, ids), stock)


def in_a_thread(call: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.grid
@pytest.mark.parametrize("architecture", once(models.ARCHITECTURES))
def test_a_model_is_disabled_for_the_calling_thread_only(architecture: str) -> None:
    ids = models.tokens(architecture, 2, 12)
    model = models.moved(hf_posenc.patch(models.stock(architecture, num_hidden_layers=1), "fire"), 0.3)
    compiled = torch.compile(model, backend="eager")
    want = models.logits(model, architecture, ids)
    with hf_posenc.disabled(model):
        stock = models.logits(model, architecture, ids)
        # A replica computes a part of its caller's forward, in a thread of its own.
        replica = model.get_decoder() if architecture == "t5" else model.base_model
        assert replica._replicate_for_data_parallel().posenc_disabled
        assert torch.equal(in_a_thread(lambda: models.logits(model, architecture, ids)), want)
        torch.testing.assert_close(models.logits(compiled, architecture, ids), stock)
        torch.testing.assert_close(in_a_thread(lambda: models.logits(compiled, architecture, ids)), want)
        with hf_posenc.disabled(model):
            pass
        assert torch.equal(models.logits(model, architecture, ids), stock)
    torch.testing.assert_close(models.logits(compiled, architecture, ids), want)
    assert not replica._replicate_for_data_parallel().posenc_disabled
    assert torch.equal(models.logits(model, architecture, ids), want)
    torch.compiler.reset()


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_models_made_from_one_config_do_not_know_of_each_other(architecture: str, tmp_path: Path) -> None:
    config = models.stock(architecture).config
    before, stock = config.to_dict(), type(models.stock(architecture))
    first, second, third = stock(config), stock(config), stock(config)
    hf_posenc.patch(first, "fire")
    hf_posenc.patch(second, "cope")
    assert config.to_dict() == before
    assert all(vars(module).get("config") is not config for module in first.modules())
    for number, model in enumerate((first, second, third)):
        model.save_pretrained(tmp_path / str(number))
        loaded = models.auto(architecture).from_pretrained(tmp_path / str(number))
        assert type(loaded) is type(model)
        torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()))
    hf_posenc.patch(type(first)(first.config), "alibi")
    hf_posenc.unpatch(type(first)(first.config))
    hf_posenc.verify(first)
    assert [group.scheme for group in record.from_config(first.config)] == ["fire"]


def test_a_head_around_a_patched_body_knows_of_its_scheme(tmp_path: Path) -> None:
    whole, ids = models.stock("llama"), models.tokens("llama", 2, 9)
    config = whole.config
    hf_posenc.patch(whole.model, "alibi")
    assert whole.config is whole.model.config is config
    whole.save_pretrained(tmp_path)
    loaded = models.auto("llama").from_pretrained(tmp_path)
    assert torch.equal(models.logits(loaded, "llama", ids), models.logits(whole, "llama", ids))


def test_a_model_that_gets_a_converted_part_later_is_refused(tmp_path: Path) -> None:
    whole = EncoderDecoderModel(encoder=models.stock("llama").model, decoder=models.stock("gpt2"))
    whole.decoder = hf_posenc.patch(models.stock("gpt2"), "alibi")
    with pytest.raises(ArchitectureError, match="The EncoderDecoderModel was given a converted GPT2LMHeadModel after"):
        whole.save_pretrained(tmp_path)
    whole.config.decoder = whole.decoder.config
    with pytest.raises(NotPatchedError, match="the EncoderDecoderModel was put around a patched"):
        hf_posenc.verify(whole)
    with pytest.raises(ArchitectureError, match="The EncoderDecoderModel was given a converted GPT2LMHeadModel after"):
        whole.save_pretrained(tmp_path)


def test_the_inside_of_a_patched_model_is_no_model_of_its_own_until_it_is_saved(tmp_path: Path) -> None:
    model = hf_posenc.patch(models.stock("llama"), "fire")
    model.save_pretrained(tmp_path)
    for whole in (model, copy.deepcopy(model), pickled(model), type(model).from_pretrained(tmp_path)):
        for body in (whole.model, copy.deepcopy(whole.model), pickled(whole.model)):
            with pytest.raises(ArchitectureError, match="LlamaModel inside of a patched model"):
                hf_posenc.unpatch(body)
        hf_posenc.verify(whole)
    body.save_pretrained(tmp_path / "body")
    assert type(hf_posenc.unpatch(type(body).from_pretrained(tmp_path / "body"))) is LlamaModel


@pytest.mark.parametrize("scheme", sorted(hf_posenc.schemes()))
def test_patching_under_the_meta_device_gives_schemes_values(scheme: str) -> None:
    ids, found = models.tokens("llama", 2, 12), []
    for device in ("cpu", "meta"):
        model = models.stock("llama")
        torch.manual_seed(0)
        with torch.device(device):
            hf_posenc.patch(model, scheme)
        found.append(models.logits(model, "llama", ids))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore::UserWarning")
@pytest.mark.parametrize("scheme", ["rope", "fire"])
def test_a_model_that_was_quantised_dynamically_is_patched(scheme: str) -> None:
    ids = models.tokens("llama", 2, 12)
    model = torch.ao.quantization.quantize_dynamic(models.stock("llama"), {nn.Linear}, dtype=torch.qint8)
    before = models.logits(model, "llama", ids)
    hf_posenc.verify(hf_posenc.patch(model, scheme, native="keep" if scheme == "fire" else "remove"))
    torch.testing.assert_close(models.logits(model, "llama", ids), before)
    assert torch.equal(models.logits(hf_posenc.unpatch(model), "llama", ids), before)


@decoders
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_prompt_tuning_is_that_of_the_stock_model(architecture: str) -> None:
    ids = models.tokens(architecture, 2, 9)
    mask = torch.ones_like(ids)
    found = []
    for model in (models.stock(architecture), hf_posenc.patch(models.stock(architecture), EXACT[architecture])):
        torch.manual_seed(0)
        tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
        with torch.no_grad():
            found.append((tuned(ids).logits, tuned.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5)))
    torch.testing.assert_close(found[1][0], found[0][0], **models.SAME)
    assert torch.equal(found[1][1], found[0][1])


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "tape"])
def test_threads_share_a_model(scheme: str) -> None:
    architecture = "llama" if scheme == "tape" else "vit"
    model = models.moved(hf_posenc.patch(models.stock(architecture), scheme), 0.3)
    given = [models.inputs(architecture, models.tokens("llama", 1, 24 + 8 * n, seed=n)) for n in range(2)]
    with torch.no_grad():
        want = [model(**call)[0] for call in given]
    wrong: list[Any] = []

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(40):
                try:
                    torch.testing.assert_close(model(**given[index])[0], want[index])
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_patch_one_model_in_turn() -> None:
    model, wrong, interval = models.stock("llama"), [], sys.getswitchinterval()

    def work(scheme: str) -> None:
        try:
            for _ in range(3):
                hf_posenc.patch(model, scheme)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(scheme,)) for scheme in ("fire", "alibi", "kerple", "tape")]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    hf_posenc.verify(model)
    hf_posenc.unpatch(model)
    assert torch.equal(
        *(models.logits(m, "llama", models.tokens("llama", 1, 9)) for m in (model, models.stock("llama")))
    )


@pytest.mark.parametrize("layers", [np.arange(1, 3), torch.tensor([1, -2])], ids=["numpy", "torch"])
def test_layers_are_whole_numbers_of_any_library(layers: Any) -> None:
    (found,) = record.from_config(hf_posenc.patch(models.checkpoint("llama"), "kerple", layers=layers).config)
    assert found.stacks["decoder"].layers == (1, 2)


@pytest.mark.parametrize("case", ["restarted with a mask", "falling", "prefix"])
@pytest.mark.parametrize("scheme", ["t5", "fire", "fox"])
def test_keys_ahead_that_are_seen_are_the_same_in_every_form(scheme: str, case: str) -> None:
    model = models.moved(hf_posenc.patch(models.stock("llama"), scheme), 0.3)
    ids, places = models.tokens("llama", 2, 48), torch.arange(48)[None]
    seen = torch.ones(48, 48, dtype=torch.bool).tril()
    seen[:20, :20] = True
    call = {
        "restarted with a mask": {"position_ids": places % 24, "attention_mask": torch.ones_like(ids)},
        "falling": {"position_ids": places.flip(1), "attention_mask": torch.ones_like(ids)},
        "prefix": {"attention_mask": seen.expand(2, 1, -1, -1)},
    }[case]
    found = []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        model.zero_grad()
        logits = model(ids, **call).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients = {name: p.grad for name, p in models.new_parameters(model).items()}
        found.append((logits.detach(), gradients))
    torch.testing.assert_close(found[1][0], found[0][0], **models.SAME)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "scheme"), [("llama", "fox"), ("llama", "fox_pro"), ("t5", "alibi"), ("t5", "fox")]
)
def test_a_static_cache_knows_of_padding_inside_of_a_prompt(architecture: str, scheme: str) -> None:
    model = models.moved(hf_posenc.patch(models.stock(architecture), scheme), 0.3)
    ids = models.tokens(architecture, 2, 15)
    mask = torch.ones_like(ids)
    mask[0, 4:9] = 0
    prompt = {"attention_mask": mask}
    if architecture == "t5":
        ids[:, 0] = 0  # the start token
        prompt = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    without = model.generate(ids, **prompt, **settings, use_cache=False)
    static = model.generate(ids, **prompt, **settings, cache_implementation="static")
    torch.testing.assert_close(torch.stack(static.logits), torch.stack(without.logits), **models.SAME)
