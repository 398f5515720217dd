"""Architectures that are read from the code of transformers, on tiny random models with windows shorter than the texts.

The cases come from the registry: a family is tested by a line in `DECODERS` of tests/models.py. tests/grid.py says
which run by default.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from models import BOTH, DECODERS, EXPERTS, PART, SAME, WINDOW, moved
from models import tiny as make
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc
from hf_posenc import attention
from hf_posenc.attention import blocks, sdpa
from hf_posenc.errors import ArchitectureError
from hf_posenc.ops.rotations import turn_pairs
from hf_posenc.patches import probe
from hf_posenc.patches.architecture import architectures, of_model
from hf_posenc.patches.buckets import add_encoder_decoder
from hf_posenc.patches.family import Family, add_family

NAMES = list(DECODERS)


LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16}


def tokens(rows: int = 3, length: int = 29) -> Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(0))


def padding(ids: Tensor) -> Tensor:
    """Return a mask of left padding, as `generate` wants it, in two of three rows."""
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[1, :3] = 0
    return mask


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **call: Any) -> Tensor:
    return model(ids, use_cache=False, **call).logits


def same(got: Tensor, expected: Tensor) -> None:
    """Compare within 1e-4, relative to the largest number."""
    assert float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


RESHAPED = [name for name in NAMES if not cast(Any, architectures()[name]).body._supports_sdpa]


@pytest.mark.parametrize("name", RESHAPED)
def test_softcaps_and_sinks_on_blocks(name: str) -> None:
    """Against the stock model, which is dense, and against the reference; of odd length, padded, with a window."""
    assert blocks._DENSE_LOGITS < 2 * 2 * 391 * 391
    stock, ids = make(name), tokens(2, 391)
    mask = torch.ones_like(ids)
    mask[0, :57] = 0
    model = hf_posenc.patch(make(name), "rope")
    ran = [layer.sequence for layer in hf_posenc.explain(model, length=600).layers]
    assert ran == ["blocks"] * len(ran)

    def gradients(made: PreTrainedModel, **call: Any) -> dict[str, Tensor]:
        made.zero_grad()
        out = made(ids, attention_mask=mask, use_cache=False, **call).logits * mask[:, :, None]
        out.square().mean().backward()
        found = {key: weight.grad for key, weight in made.named_parameters() if weight.grad is not None}
        return {**found, "": out.detach()}

    with attention.recorded() as choices:
        got = gradients(model)
    assert {choice.executor for choice in choices} == {"blocks"}
    for key, expected in gradients(stock).items():
        same(got[key], expected)
    hf_posenc.patch(model, "kerple")
    got = gradients(model)
    with attention.recorded() as choices:
        reference = gradients(model, output_attentions=True)
    assert {choice.executor for choice in choices} == {"dense"}
    assert got.keys() == reference.keys()
    for key, expected in reference.items():
        same(got[key], expected)


def test_every_family_of_decoders_is_tested() -> None:
    found = [name for name, a in architectures().items() if isinstance(a, Family) and a.native.startswith("rotary")]
    # Other tests add families that are not in the package.
    packaged = {name for name in found if find_spec(f"hf_posenc.patches.{name}")}
    assert packaged - {"modernbert"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_rope_starts_exact(name: str) -> None:
    """The windows are shorter than the texts. (Trained lengths, sinks, softcaps and scales are the model's own.)"""
    stock, ids = make(name), tokens()
    model, mask = hf_posenc.patch(make(name), "rope"), padding(ids)
    assert hf_posenc.plan(stock, "rope").start == "exact"
    before = logits(stock, ids)
    same(logits(model, ids), before)
    same(logits(model, ids, attention_mask=mask)[mask.bool()], logits(stock, ids, attention_mask=mask)[mask.bool()])
    # Packed sequences do not see each other.
    places = torch.cat((torch.arange(13), torch.arange(16)))[None].expand(3, -1)
    alone = torch.cat((logits(stock, ids[:, :13]), logits(stock, ids[:, 13:])), dim=1)
    same(logits(model, ids, position_ids=places), alone)
    with torch.no_grad():
        cache = model(ids[:, :20], use_cache=True).past_key_values
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(20, 29)]
    same(torch.cat(steps, dim=1), before[:, 20:])
    settings = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), stock.generate(ids, **settings))


@pytest.mark.parametrize("scheme", list(hf_posenc.schemes()))
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_changes_nothing(name: str, scheme: str) -> None:
    """Rows have padding, also between tokens, the sequence outgrows the window, one forward takes several tokens."""
    torch.manual_seed(1)
    model, ids = moved(hf_posenc.patch(make(name), scheme)), tokens()
    mask = padding(ids)
    mask[-1, 14:18] = 0
    whole = logits(model, ids, attention_mask=mask)
    loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
        found = []
        for start, stop in ((0, 6), (6, 19), (19, 20), (20, 23), (23, 29)):
            call = {"attention_mask": mask[:, :stop], "past_key_values": cache}
            with torch.no_grad():
                found.append(model(ids[:, start:stop], **call).logits)
        torch.testing.assert_close(torch.cat(found, dim=1)[mask.bool()], whole[mask.bool()], **SAME)


@pytest.mark.parametrize("scheme", ["kerple", "fox", "fire", "rope", "shaw", "cope", "stick_breaking"])
def test_executors_agree_on_windows(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, ids = hf_posenc.patch(make("mistral"), scheme), tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :30] = mask[1, 70:75] = 0

    def run() -> list[Tensor]:
        model.zero_grad()
        output = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        output.square().mean().backward()
        plain = logits(model, ids)
        return [output.detach(), plain, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    monkeypatch.setattr(sdpa, "_FEWEST_ROWS", 16)
    chosen = run()
    monkeypatch.setattr(blocks, "_DENSE_LOGITS", 0)
    monkeypatch.setattr(blocks, "rows_per_block", lambda *sizes: 16)
    by_blocks = run()
    model.set_attn_implementation("eager")
    for got, other, expected in zip(chosen, by_blocks, run(), strict=True):
        torch.testing.assert_close(got, expected, **SAME)
        torch.testing.assert_close(other, expected, **SAME)


@pytest.mark.parametrize("name", NAMES)
def test_every_head(name: str) -> None:
    ids, config = tokens(), make(name).config
    for stock in of_model(make(name)).twins:
        if not issubclass(stock, PreTrainedModel):
            continue
        torch.manual_seed(0)
        model = stock(config).eval()
        with torch.no_grad():
            before = model(ids)[0]
            hf_posenc.patch(model, "rope")
            assert type(model).__name__ == f"Posenc{stock.__name__}"
            same(model(ids)[0], before)
            with hf_posenc.disabled(model):
                assert torch.equal(model(ids)[0], before)
            hf_posenc.unpatch(model)
            assert type(model) is stock
            assert torch.equal(model(ids)[0], before)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "phi3"])
def test_adapters(name: str, tmp_path: Path) -> None:
    """PEFT knows the projections of Qwen3, under another name those of Gemma 3, and none of Phi-3."""
    peft = pytest.importorskip("peft")
    make(name).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(hf_posenc.patch(base, "kerple"), hf_posenc.PosencLoraConfig(init_lora_weights=False))
    before = logits(model.eval(), tokens())
    model.save_pretrained(tmp_path / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(stock, tmp_path / "adapter"), tokens()), before)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_faded_out_is_as_what_is_dropped(name: str) -> None:
    model, ids = hf_posenc.patch(make(name), "tape", native="keep"), tokens()
    hf_posenc.set_strength(model, native=0.0)
    faded = logits(model, ids)
    hf_posenc.drop_native(model)
    torch.testing.assert_close(logits(model, ids), faded, **SAME)


@pytest.mark.grid
def test_torch_compile_gives_the_same_logits() -> None:
    model, ids = make("mistral"), tokens(1)
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    before = logits(hf_posenc.patch(model, "kerple"), ids)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager"), ids), before, **SAME)
    torch.compiler.reset()


def test_facts_are_those_of_the_stock_code() -> None:
    def geometries(name: str) -> list[hf_posenc.Geometry]:
        model = make(name)
        architecture = of_model(model)
        (body,) = architecture.stacks(model).values()
        return [architecture.geometry(body, layer) for layer in range(2)]

    rotated, plain = geometries("smollm3")
    assert rotated.inv_freq is not None
    assert rotated.inv_freq.any()
    assert not plain.inv_freq.any()
    local, whole = geometries("gemma3")
    assert not torch.equal(local.inv_freq, whole.inv_freq)
    assert hf_posenc.plan(make("gemma3"), "tape").start == "break"  # TaPE has one rotation for all layers
    assert [len(g.inv_freq) for g in geometries("phi3")] == [4, 4]  # of 8 pairs


def test_facts_follow_code_and_config_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read once for the same code and config, and a caller may write into them."""
    model, runs = make("olmo2"), []
    architecture, body = of_model(model), model.model
    modeling, rotary = inspect.getmodule(type(body)), type(body.rotary_emb)
    monkeypatch.setattr(probe, "_FOUND", {})  # What an earlier test has read.
    monkeypatch.setattr(probe, "_probe", lambda *given, found=probe._probe: runs.append(given) or found(*given))

    def read() -> hf_posenc.Geometry:
        return architecture.facts(body, 0).geometry

    with torch.inference_mode():
        read().inv_freq.zero_()
    assert (read().inv_freq.any(), len(runs)) == (True, 1)
    assert (read().head_dim, read().layout) == (16, "half")
    with monkeypatch.context() as patch:
        patch.setattr(body.config, "head_dim", 8)
        assert read().head_dim == 8
    with monkeypatch.context() as patch:
        patch.setattr(body.config, "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
        assert read().inv_freq[0] == 0.5
    assert len(runs) == 3

    def with_(thing: Any, name: str, value: Any) -> hf_posenc.Geometry:
        with monkeypatch.context() as patch:
            patch.setattr(thing, name, value)
            return read()

    assert with_(modeling, "apply_rotary_pos_emb", turn_neighbours).layout == "interleaved"
    assert with_(rotary, "compute_default_rope_parameters", ones).inv_freq.tolist() == [1.0] * 8
    with pytest.raises(ArchitectureError, match="in another way than in pairs"):
        with_(modeling.rotate_half, "__code__", (lambda x: -x).__code__)
    forward = architecture.attention.forward
    with pytest.raises(ArchitectureError, match="by another function"):
        with_(architecture.attention, "forward", lambda self, *given, **call: forward(self, *given, **call))
    with monkeypatch.context() as patch:
        patch.setattr(body.config, "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
        patch.setitem(ROPE_INIT_FUNCTIONS, "linear", ones)
        assert read().inv_freq.tolist() == [1.0] * 8
    assert (read().layout, len(runs)) == ("half", 8)


def ones(config: Any, *given: Any, **keywords: Any) -> tuple[Tensor, float]:
    return torch.ones(8), 1.0


def turn_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate as `apply_rotary_pos_emb` does, in pairs of neighbours."""
    half = cos.shape[-1] // 2
    return tuple(turn_pairs(x, cos[:, None, :, :half], sin[:, None, :, :half], "interleaved") for x in (q, k))


# Families that are not in the package, as a newcomer would add them. docs/own_architecture.md adds another.
STRANGERS = {
    "glm": {"rope_parameters": PART},
    "cohere2": BOTH,
    "phi": {"rope_parameters": PART, "num_key_value_heads": 2},
    "olmo3": BOTH,
    # These two do not tell the attention function of their windows.
    "qwen2_moe": {**EXPERTS, **BOTH, "shared_expert_intermediate_size": 24, "use_sliding_window": True},
    "phimoe": {**EXPERTS, "sliding_window": WINDOW},
    "afmoe": {**EXPERTS, **BOTH},  # takes a view of what the attention function returns
    "cohere2_moe": {**EXPERTS, **BOTH},  # its config does not declare the field that is locked
    "lfm2": {"layer_types": ["full_attention"] * 2},  # its layers have a part with the name feed_forward
    "persimmon": {},  # its attention does not hand on that weights are wanted
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 24},  # its attention says so of itself
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_newcomer_needs_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, name, STRANGERS[name])
    if name not in architectures():
        add_family(name, globals())
    test_rope_starts_exact(name)
    geometry = of_model(make(name))
    (body,) = geometry.stacks(make(name)).values()
    neighbours = ("glm", "cohere2", "cohere2_moe")
    assert geometry.geometry(body, 0).layout == ("interleaved" if name in neighbours else "half")
    for scheme in ("kerple", "fox_pro", "tape"):
        test_a_cache_changes_nothing(name, scheme)
    model = hf_posenc.patch(make(name), "kerple")
    assert [weights.shape[-1] for weights in model(tokens(), output_attentions=True).attentions] == [29, 29]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), tokens()), logits(model, tokens()))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hunyuan_v1_dense", "between the rotation of queries and the attention function"),
        ("nemotron", "no keywords from its layer"),
        ("biogpt", "from its config alone"),
        ("deepseek_v2", "cosines and sines"),
        ("hrm_text", r"layers of the same number \(0, 1, 0, 1\)"),
        ("deepseek_v3", "by hand"),
        ("beam", r"no rotation for layers like 1 \(KeyError"),
        ("diffllama", "calls the attention function 2 times"),
        ("gemma4", "does not rotate queries together with keys"),
        ("qwen3_next", r"is missing in some layers \(0, 1\)"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size_per_layer_input": 60, **LATENT, **EXPERTS}
    monkeypatch.setitem(DECODERS, name, small)
    add_family(name, globals())
    model = make(name)
    before = logits(model, tokens())
    with pytest.raises(ArchitectureError, match=why):
        hf_posenc.patch(model, "rope")
    assert torch.equal(logits(model, tokens()), before)
    assert not hasattr(model.config, "posenc")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", [*NAMES, "modernbert"])
def test_packed_sequences_keep_the_windows_of_stock_layers(name: str, layer: int) -> None:
    model, ids = hf_posenc.patch(make(name), "alibi", native="keep", layers=[layer]), tokens()
    call = {"position_ids": torch.cat((torch.arange(13), torch.arange(16)))[None]}
    alone = torch.cat((logits(model, ids[:, :13]), logits(model, ids[:, 13:])), dim=1)
    same(logits(model, ids, **call), alone)
    model.set_attn_implementation("eager")
    same(logits(model, ids, **call), alone)


def test_a_model_without_layers_is_refused() -> None:
    model = make("mistral")
    model.get_decoder().layers = torch.nn.ModuleList()
    with pytest.raises(ArchitectureError, match="Cannot patch MistralModel: it has no layers"):
        hf_posenc.patch(model, "rope")


def test_windows_that_masks_and_attention_do_not_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_FOUND", {})  # What an earlier test has read.
    model = make("gpt_oss")
    monkeypatch.setattr(model.config, "layer_types", ["sliding_attention", "chunked_attention"])
    with pytest.raises(ArchitectureError, match="has masks of the type chunked_attention"):
        hf_posenc.patch(model, "rope")
    model = make("mistral")
    monkeypatch.delattr(inspect.getmodule(type(model)), "create_sliding_window_causal_mask")
    with pytest.raises(ArchitectureError, match=f"of a window, {WINDOW}, that the masks do not have"):
        hf_posenc.patch(model, "rope")


def test_modules_that_are_no_family_are_refused() -> None:
    for name, add in (("bart", add_encoder_decoder), ("lama", add_encoder_decoder), ("lama", add_family)):
        with pytest.raises(ArchitectureError, match=f"Cannot add the architecture '{name}'"):
            add(name, {})
    for name in ("gptj", "jamba", "nemotron_h"):
        with pytest.raises(ArchitectureError, match=f"Cannot add the family ('{name}'|of NemotronHConfig)"):
            add_family(name, {})


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_run_as_in_the_stock_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_posenc.patch(make(name), "kerple")
    model.save_pretrained(tmp_path)
    for kind in type(model).__mro__:  # what transformers found out of the stock class, in a process that used it
        if "_can_set_experts_implementation_cached_value" in vars(kind):
            monkeypatch.delattr(kind, "_can_set_experts_implementation_cached_value")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="grouped_mm")
    assert loaded.config._experts_implementation == "grouped_mm"
    same(logits(loaded, tokens()), logits(model, tokens()))
