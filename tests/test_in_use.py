"""Patched models in the hands of trainers, adapters, servers and threads that know nothing of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from grid import once
from torch import Tensor
from transformers import (
    EncoderDecoderModel,
    LlamaModel,
    Trainer,
)

import hf_posenc
from hf_posenc import Geometry, build
from hf_posenc.errors import ArchitectureError, NotPatchedError, OptionError
from hf_posenc.patches import record
from hf_posenc.recipes.runs.files import WholeCheckpoints
from hf_posenc.recipes.training.callbacks import Annealing, Handover

# -- trainers ----------------------------------------------------------------------------------------------------------


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


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_stack_that_was_left_out_has_a_cache_as_before() -> None:
    model = models.moved(hf_posenc.patch(models.stock("t5"), "alibi", stacks="encoder"), 0.3)
    ids = models.tokens("t5", 2, 7)
    got, want = (model.generate(ids, max_new_tokens=6, min_new_tokens=6, use_cache=use) for use in (True, False))
    assert torch.equal(got, want)


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


def in_a_thread(call: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor() as pool:
        return pool.submit(call).result()


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


@pytest.mark.generic
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


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "tape"])
def test_threads_share_a_model(scheme: str) -> None:
    architecture = "llama" if scheme == "tape" else "vit"
    model = models.moved(hf_posenc.patch(models.stock(architecture), scheme), 0.3)
    given = [models.inputs(architecture, models.tokens("llama", 1, 24 + 8 * n, seed=n)) for n in range(2)]
    with torch.no_grad():
        want = [model(**call)[0] for call in given]

    @torch.no_grad()
    def work(index: int) -> None:
        for _ in range(40):
            torch.testing.assert_close(model(**given[index])[0], want[index])

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(2)))


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
