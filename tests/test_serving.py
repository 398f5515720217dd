"""Servers that attend by themselves: transformers' continuous batching, run; and what is told to vLLM."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import once
from models import moved, stacks_for, stock, tokens
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posenc
from hf_posenc.errors import AttentionBackendError, ExportError, PositionError
from hf_posenc.patches import serving
from hf_posenc.patches.export.mlx import export_mlx
from hf_posenc.patches.serving.outside import layers_for, terms_of, wider
from hf_posenc.patches.surgery import SHARED

SERVER = "A server"
ALL = frozenset({"slopes", "sinks", "width"})


def admitted(model: Any, takes: frozenset[str] = frozenset()) -> bool:
    try:
        layers_for(model, SERVER, takes)
    except AttentionBackendError:
        return False
    return True


# What is between the logits and the output is a server's own, and it keeps nothing but keys and values.
SERVED = [
    name
    for name, info in hf_posenc.schemes().items()
    if not any(getattr(info.cls, seam) is not getattr(hf_posenc.Scheme, seam) for seam in ("score", "weigh", "mix"))
    and name not in ("kv_shift", "path", "selective_rope", "tape")
]

# Products of queries and keys, each of its own token.
WIDE = ["first_key", "pope", "sandwich", "xpos"]


def converted(architecture: str, scheme: str, **options: Any) -> Any:
    model = stock(architecture)
    return moved(hf_posenc.patch(model, scheme, **stacks_for(architecture, scheme), **options), size=0.2)


def continued_in_batches(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default the pages fill the memory, which takes seconds.
    pages = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate_batch(
        inputs=prompts, generation_config=settings, continuous_batching_config=pages, progress_bar=False
    )
    return [each.generated_tokens for each in found.values()]


def continued(model: Any, prompt: list[int]) -> list[int]:
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")  # of transformers, about its own preparations
@pytest.mark.parametrize("scheme", once(SERVED))
def test_continuous_batching_is_generation(scheme: str) -> None:
    model = converted("llama", scheme)
    prompts = [tokens("llama", 1, length, seed=length)[0].tolist() for length in (3, 21, 1, 8)]
    before = [continued(model, prompt) for prompt in prompts]
    assert len({token for row in before for token in row}) > 8
    assert continued_in_batches(model, prompts) == before
    assert [continued(model, prompt) for prompt in prompts] == before


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("architecture", "implementation", "scheme", "options"),
    [
        ("gpt2", "eager", "learned", {}),
        ("gpt2", "sdpa", "gated_output", {"native": "keep"}),
        ("mistral", "sdpa", "log_temperature", {"native": "keep"}),  # with a window
        ("qwen3", "eager", "nope", {"layers": [1]}),  # and a layer that stays as it was
        ("smollm3", "sdpa", "fope", {}),
        ("gemma3", "sdpa", "log_temperature", {"native": "keep"}),
    ],
)
def test_continuous_batching_on_other_architectures(
    architecture: str, implementation: str, scheme: str, options: dict[str, Any]
) -> None:
    model = converted(architecture, scheme, **options)
    model.set_attn_implementation(implementation)
    prompts = [tokens(architecture, 1, length, seed=length)[0].tolist() for length in (3, 21, 8)]
    assert continued_in_batches(model, prompts) == [continued(model, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("alibi", {}),
        ("alibi", {"learned_slopes": True, "shared": False}),
        ("alibi", {"gate": True, "native": "keep"}),
        ("attention_sinks", {}),
        ("nope+attention_sinks", {}),
        ("rope2d", {}),
        ("pope", {}),
        ("xpos", {}),
        ("sandwich", {"gate": True, "native": "keep"}),
        ("first_key", {"native": "keep"}),
        ("sandwich+first_key", {}),
        ("alibi+first_key", {"native": "fast"}),
    ],
)
def test_a_server_with_slopes_sinks_and_wide_heads_computes_the_same(scheme: str, options: dict[str, Any]) -> None:
    """A stand-in for vLLM: one row of two requests, whose attention function gets what `terms_of` says."""
    model = converted("llama", scheme, **options)
    ids = tokens("llama", 2, 17)
    with torch.no_grad():
        wanted = model(ids).logits
    terms = [terms_of(_scheme(model, attention)) for attention in layers_for(model, SERVER, ALL).values()]
    assert all((found.slopes is None) == ("alibi" not in scheme) for found in terms)
    assert all((found.sinks is None) == ("sinks" not in scheme) for found in terms)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, *, scaling: float, **_: Any) -> Any:
        assert mask is None
        found, rows = terms[module.layer_idx], []
        for request in (slice(0, 17), slice(17, 34)):
            query, key, value = q[:, :, request], k[:, :, request], v[:, :, request]
            key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (key, value))
            logits, places = query @ key.transpose(-1, -2) * scaling, torch.arange(17)
            assert query.shape[-1] == (found.width or 24)
            if found.slopes is not None:
                logits = logits - found.slopes.float()[:, None, None] * (places[:, None] - places)
            logits = logits.masked_fill(places[:, None] < places, float("-inf"))
            if found.sinks is not None:
                logits = torch.cat((logits, found.sinks[None, :, None, None].expand(1, -1, 17, 1)), dim=-1)
            rows.append(logits.softmax(-1)[..., :17] @ value)
        return torch.cat(rows, dim=2).transpose(1, 2).flatten(0, 1).flatten(1), None  # as vLLM returns it

    ALL_ATTENTION_FUNCTIONS.register("vllm", attend)
    try:
        model.set_attn_implementation("vllm")
        places = torch.arange(17).repeat(2)[None]
        with pytest.raises(AttentionBackendError, match="would ignore"):
            model(ids.view(1, -1), position_ids=places)
        model.model.posenc_outside = {layer: wider for layer, each in enumerate(terms) if each.width is not None}
        with torch.no_grad():
            found = model(ids.view(1, -1), position_ids=places, use_cache=False).logits
            with pytest.raises(PositionError, match="without position_ids"):
                model(ids.view(1, -1), use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]
    torch.testing.assert_close(found.view(wanted.shape), wanted, atol=2e-4, rtol=1e-4)


def _scheme(model: Any, attention: Any) -> Any:
    own = attention._modules.get("hf_posenc")
    return getattr(model.model._modules[SHARED], str(attention.posenc_group)) if own is None else own


def test_what_a_server_takes() -> None:
    for name in hf_posenc.schemes():
        model = converted("llama", name)
        assert admitted(model) == (name in SERVED), name
        if name not in SERVED:
            with pytest.raises(AttentionBackendError, match=rf"batching .*: {name} \(layer 0\) .*generate"):
                model.generate_batch([[1, 2]])
        for takes, more in (("slopes", ["alibi"]), ("sinks", ["attention_sinks"]), ("width", WIDE)):
            assert admitted(model, frozenset({takes})) == (name in SERVED or name in more), (name, takes)
    # Before weights are loaded, a gate at its start must not hide what the bias is.
    for name in ("alibi", "kerple"):
        with torch.device("meta"):
            model = hf_posenc.patch(LlamaForCausalLM(stock("llama").config), name, gate=True, native="keep")
        assert model.get_submodule("model.hf_posenc_shared.0").gate_weight.is_meta
        assert admitted(model, ALL) == (name == "alibi")


def test_other_models_are_refused() -> None:
    def words(model: Any) -> str:
        with pytest.raises(AttentionBackendError) as caught:
            layers_for(model, SERVER, ALL)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "window of 8" in words(converted("llama", "nope", window=8))
    assert "encoder" in words(converted("bert", "nope"))
    assert "encoder and decoder" in words(converted("t5", "nope"))
    model = converted("llama", "nope", native="keep")
    hf_posenc.set_strength(model, scheme=0.5)
    assert "handover" in words(model)
    model = converted("llama", "nope")
    with hf_posenc.disabled(model):
        assert "disabled" in words(model)


def test_a_folder_for_mlx_holds_tables_and_no_other_program_takes_it(tmp_path: Path) -> None:
    """`benchmarks/loaders.py mlx-lm` runs such folders."""
    model = converted("llama", "t5", layers=[0])
    export_mlx(model, tmp_path / "out")
    tables = load_file(tmp_path / "out" / "model-posenc.safetensors")
    attention = "model.layers.{}.self_attn.{}".format
    assert tables[attention(0, "rope.periods")].min() > 1e20  # no rotation
    assert torch.equal(tables[attention(1, "rope.periods")], 1 / model.model.rotary_emb.inv_freq)
    bias = _scheme(model, model.model.layers[0].self_attn).added().at(torch.tensor([2]), torch.float32)
    torch.testing.assert_close(tables[attention(0, "bias")][:, 2:3], bias.detach())
    assert not tables[attention(1, "bias")].any()
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        with pytest.raises((KeyError, ValueError), match="hf_posenc"):
            kind.from_pretrained(tmp_path / "out")
    for other, words in (
        (converted("llama", "liere"), "other pairs"),
        (converted("llama", "fire"), "changes the logits"),
        (converted("qwen3", "nope"), "Llamas"),
    ):
        with pytest.raises(ExportError, match=words):
            export_mlx(other, tmp_path / "other")


def test_vllm_knows_every_family_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, str] = {}
    registry = types.SimpleNamespace(register_model=known.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=registry))
    serving.register()
    assert {"PosencLlamaForCausalLM", "PosencMistralForCausalLM", "PosencQwen3ForCausalLM"} <= set(known)
