"""Patched models in the hands of trainers, adapters, servers and threads that know nothing of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments, ViTConfig, ViTModel

import hf_posenc
from hf_posenc import Geometry, attend, build
from hf_posenc.errors import CacheError, DirectionError, NotPatchedError, OptionError
from hf_posenc.recipes.annealing import Annealing
from hf_posenc.recipes.handover import Handover
from hf_posenc.recipes.saving import WholeCheckpoints
from hf_posenc.scheme import Block, Positions, Tokens

# Of PEFT.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXACT = {"llama": "rope", "gpt2": "learned"}
decoders = pytest.mark.parametrize("architecture", EXACT)


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Move the parameters of the schemes away from a start at which they do nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in models.new_parameters(model).values():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


# -- trainers ----------------------------------------------------------------------------------------------------------


@decoders
def test_a_smoothed_loss_is_that_of_the_stock_model(architecture: str, tmp_path: Path) -> None:
    ids = models.tokens(architecture, 2, 16)
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to="none", use_cpu=True)

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
    rows = [{"input_ids": row, "labels": row} for row in models.tokens("llama", 4, 8)]
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_steps": 1,
    }
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to="none", use_cpu=True, **best)
    model = hf_posenc.patch(models.stock("llama"), scheme, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
    with pytest.raises(OptionError, match=f"{type(callback).__name__} with load_best_model_at_end=True"):
        trainer.train()


@pytest.mark.parametrize("scheme", sorted(hf_posenc.schemes()))
def test_lora_on_all_linear_layers_runs_and_merges(scheme: str) -> None:
    ids = models.tokens("llama", 2, 20)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(moved(hf_posenc.patch(models.stock("llama"), scheme)), config).eval()
    with torch.no_grad():
        want = adapted(ids).logits
        got = adapted.merge_and_unload()(ids).logits
    # Of float32: adapters as large as the weights make logits above 10, and merging rounds their sum anew.
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# -- calls ---------------------------------------------------------------------------------------------------------------


@decoders
def test_causal_attention_only(architecture: str) -> None:
    ids = models.tokens(architecture, 1, 6)
    both_ways = models.stock(architecture)
    both_ways.config.is_causal = False
    with pytest.raises(DirectionError, match="is_causal=False"):
        hf_posenc.patch(both_ways, "alibi")
    model = hf_posenc.patch(models.stock(architecture), "alibi")
    with pytest.raises(DirectionError, match="is_causal=False"):
        model(ids, is_causal=False)
    model.config.is_causal = False
    with pytest.raises(DirectionError, match="is_causal=False"):
        model(ids)


@decoders
def test_continuous_batching_is_refused(architecture: str) -> None:
    model = hf_posenc.patch(models.stock(architecture), "alibi")
    for call in (model.generate_batch, model.init_continuous_batching):
        with pytest.raises(CacheError, match="continuous batching"):
            call([[1, 2, 3]])


@decoders
@pytest.mark.parametrize("number", [3, 255])
def test_every_number_but_0_in_a_mask_is_a_token(architecture: str, number: int) -> None:
    ids = models.tokens(architecture, 2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model = hf_posenc.patch(models.stock(architecture), EXACT[architecture]).eval()
    got, want = (models.logits(model, architecture, ids, given) for given in (number * mask, mask))
    assert torch.equal(got, want)


@pytest.mark.parametrize("nothing", [None, "model"])
def test_verify_takes_models(nothing: Any) -> None:
    with pytest.raises(NotPatchedError, match="verify: the"):
        hf_posenc.verify(nothing)


def test_keys_ahead_that_are_seen_are_at_no_distance_in_any_form_of_transformer_xl() -> None:
    """As where `generate` restarts the positions of a row padded on the right; one query takes another form than many."""
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
        block = Block(Positions(places[:, -1:], places), reach=6, tables=tables)
        logits.append(scheme.score(torch.zeros(1, 2, 1, 9, dtype=torch.float64), q[:, :, -1:], k, block))
    assert set(many.tables) != set(few.tables)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("scheme", ["cope", "cape", "shaw"])
def test_parameters_changed_before_the_backward_pass_are_noticed(scheme: str) -> None:
    geometry = Geometry(heads=2, kv_heads=2, head_dim=4, hidden_size=8)
    module = build(scheme, geometry)
    q, k, v = (torch.randn(1, 2, 40, 4, requires_grad=True) for _ in range(3))
    places = torch.arange(40)[None]
    output = attend(
        module, q, k, v, query_positions=places, key_positions=places, hidden=torch.randn(1, 40, 8), executor="blocks"
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# -- threads -------------------------------------------------------------------------------------------------------------


def vit(scheme: str) -> nn.Module:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
    )
    return moved(hf_posenc.patch(ViTModel(config), scheme))


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "tape"])
def test_threads_share_a_model(scheme: str) -> None:
    if scheme == "tape":
        model: nn.Module = moved(hf_posenc.patch(models.stock("llama"), scheme))
        given = [models.tokens("llama", 1, 24 + 8 * n, seed=n) for n in range(2)]
    else:
        model, given = vit(scheme), [torch.randn(1, 3, 32, 32) for _ in range(2)]
    with torch.no_grad():
        want = [model(x)[0] for x in given]
    wrong: list[Any] = []

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(40):
                try:
                    torch.testing.assert_close(model(given[index])[0], want[index])
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
