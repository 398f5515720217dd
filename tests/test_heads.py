"""Every head class of every architecture, and the shapes that configs can ask for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from tiny import HEADS, KINDS, first_output, ids, make
from tiny import config as small
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5
from transformers.models.vit import modeling_vit

import hf_posenc
from hf_posenc.patches import seams
from hf_posenc.patches.architecture import architectures, config_pair

every_head = pytest.mark.parametrize(("name", "stock"), HEADS, ids=[stock.__name__ for _, stock in HEADS])


@every_head
@pytest.mark.parametrize("scheme", ["fire", "t5", "learned", "rope"])
def test_every_head(name: str, stock: type, scheme: str) -> None:
    model = make(stock, small(name))
    before = first_output(model, ids())
    assert hf_posenc.patch(model, scheme) is model
    assert type(model).__name__ == f"Posenc{stock.__name__}"
    assert isinstance(model, stock)
    after = first_output(model, ids())
    assert after.shape == before.shape
    start = hf_posenc.plan(make(stock, small(name)), scheme).start
    assert (start == "exact") == bool(torch.allclose(after, before, atol=1e-5))
    hf_posenc.verify(model)
    with hf_posenc.disabled(model):
        assert torch.equal(first_output(model, ids()), before)
    hf_posenc.unpatch(model)
    assert type(model) is stock
    assert torch.equal(first_output(model, ids()), before)


@every_head
def test_new_weights_are_drawn_as_in_the_stock_class(name: str, stock: type) -> None:
    patched = hf_posenc.patch(make(stock, small(name)), "alibi")
    found = []
    for kind, config in [(stock, small(name)), (type(patched), patched.config)]:
        torch.manual_seed(0)
        found.append(kind.from_pretrained(None, config=config, state_dict={}).state_dict())
    for key, weight in found[0].items():
        assert torch.equal(found[1][key], weight), key


def test_every_head_class_of_transformers_is_known() -> None:
    for module in (modeling_llama, modeling_gpt2, modeling_t5, modeling_vit):
        public = {getattr(module, name) for name in module.__all__}
        models = {kind for kind in public if hasattr(kind, "forward") and "PreTrained" not in kind.__name__}
        known = {stock for architecture in architectures().values() for stock in architecture.twins}
        assert models <= known


SHAPES = [
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"attention_bias": True}),
    ("llama", {"head_dim": 12}),
    ("llama", {"tie_word_embeddings": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("t5", {"d_kv": 6, "num_decoder_layers": 3}),
]


@pytest.mark.parametrize(("name", "changes"), SHAPES)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_config_shapes(name: str, changes: dict[str, Any], backend: str) -> None:
    config = small(name, **changes)
    config._attn_implementation = backend
    model = make(getattr(transformers, KINDS[name][1]), config)
    before = first_output(model, ids())
    reproduced = {"llama": "rope", "gpt2": "learned", "t5": "t5"}[name]
    torch.testing.assert_close(first_output(hf_posenc.patch(model, reproduced), ids()), before, atol=1e-5, rtol=1e-5)
    hf_posenc.patch(model, "kerple")
    assert (first_output(model, ids()) - before).abs().max() > 1e-4
    hf_posenc.verify(model)


def test_gpt2_cross_attention_is_left_alone() -> None:
    model = make(modeling_gpt2.GPT2LMHeadModel, small("gpt2", add_cross_attention=True))
    memory = torch.randn(4, 6, 32)
    run = {"input_ids": ids(), "encoder_hidden_states": memory}
    with torch.no_grad():
        before = model(**run).logits
        hf_posenc.patch(model, "learned")
        torch.testing.assert_close(model(**run).logits, before, atol=1e-5, rtol=1e-5)
        hf_posenc.patch(model, "alibi")
        assert all(type(block.crossattention) is modeling_gpt2.GPT2Attention for block in model.transformer.h)
        full = model(**run, use_cache=False).logits
        cached = model(**{**run, "input_ids": ids()[:, :7]}, use_cache=True)
        rest = model(input_ids=ids()[:, 7:], encoder_hidden_states=memory, past_key_values=cached.past_key_values)
    torch.testing.assert_close(torch.cat([cached.logits, rest.logits], 1), full, atol=1e-5, rtol=1e-5)


def test_every_architecture_has_one_config() -> None:
    for architecture in architectures().values():
        stock, twin = config_pair(architecture)
        assert twin.model_type == f"hf_posenc_{architecture.name}"
        assert issubclass(twin, stock)


def test_signatures_stay_those_of_the_stock_classes() -> None:
    """Trainers and `generate` look up arguments by name."""
    for architecture in architectures().values():
        for stock, twin in architecture.twins.items():
            if issubclass(stock, PreTrainedModel):
                assert inspect.signature(twin.forward) == inspect.signature(stock.forward)
                assert inspect.signature(twin.__init__) == inspect.signature(stock.__init__)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_rows_with_the_same_positions_share_one_bias(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a cache, whose layers hold positions for every row: a bias per row would cost a batch times as much."""
    seen: list[int] = []

    def spy(call: Any) -> Any:
        seen.append(call.positions.query.shape[0] * call.positions.key.shape[0])
        return run(call)

    run = seams.run
    monkeypatch.setattr(seams, "run", spy)
    model = hf_posenc.patch(make(modeling_llama.LlamaForCausalLM, small("llama")), "fire")
    dynamic = kind == "dynamic"
    cache = DynamicCache(config=model.config) if dynamic else StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        model(input_ids=ids(), attention_mask=torch.ones_like(ids()), past_key_values=cache)
    assert seen == [1] * model.config.num_hidden_layers
