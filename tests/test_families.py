"""Every architecture, on tiny random models with windows shorter than the texts: heads, starts, caches, packed rows.

The cases come from the registry: a family is tested by a line in tests/models.py. tests/grid.py says which run by
default.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any, cast

import pytest
import tiny as heads
import torch
import transformers
from grid import once
from models import (
    BOTH,
    CACHE,
    DECODERS,
    ENCODER,
    ENCODERS,
    EXPERTS,
    PADDING,
    PART,
    SAME,
    WINDOW,
    moved,
    stock,
)
from models import tiny as make
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc
from hf_posenc import attention
from hf_posenc.attention import blocks
from hf_posenc.errors import ArchitectureError, PositionError
from hf_posenc.ops import turn_pairs
from hf_posenc.patches import probe, surgery
from hf_posenc.patches.architecture import architectures, config_pair, of_model
from hf_posenc.patches.family import add_family

NAMES = list(DECODERS)
# The scheme that computes a model's own encoding.
OWN = {
    "rotary encoding (RoPE)": "rope",
    "learned table of positions": "learned",
    "learned bias of distance buckets": "t5",
}
HEADS = [
    (name, stock)
    for name, read in architectures().items()
    if name in (*DECODERS, *ENCODERS, "gpt2", "vit")
    for stock in read.twins
    if issubclass(stock, PreTrainedModel) and stock not in read.parts
]
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


def alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits of two sequences, of 13 tokens and the others, each in a row of its own."""
    return torch.cat((logits(model, ids[:, :13]), logits(model, ids[:, 13:])), dim=1)


# -- heads -------------------------------------------------------------------------------------------------------------

every_head = pytest.mark.parametrize(("name", "stock"), HEADS, ids=[stock.__name__ for _, stock in HEADS])


def config_of(name: str) -> Any:
    return copy.deepcopy(make(name).config) if name in DECODERS or name in ENCODERS else heads.config(name)


@every_head
def test_every_head(name: str, stock: type) -> None:
    model, ids = heads.make(stock, config_of(name)), heads.ids()
    ids[:, -1] = getattr(model.config, "eos_token_id", None) or 2
    before = heads.outputs(model, ids)
    assert hf_posenc.patch(model, OWN[architectures()[name].native]) is model
    assert type(model).__name__ == f"Posenc{stock.__name__}"
    assert isinstance(model, stock)
    for method in ("forward", "__init__"):  # Trainers and `generate` look up arguments by name.
        assert inspect.signature(getattr(type(model), method)) == inspect.signature(getattr(stock, method))
    for got, expected in zip(heads.outputs(model, ids), before, strict=True):
        same(got, expected)
    hf_posenc.verify(hf_posenc.patch(model, "fire"))
    after = heads.outputs(model, ids)
    assert not all(torch.allclose(got, expected, atol=1e-5) for got, expected in zip(after, before, strict=True))
    with hf_posenc.disabled(model):
        assert all(map(torch.equal, heads.outputs(model, ids), before))
    assert type(hf_posenc.unpatch(model)) is stock
    assert all(map(torch.equal, heads.outputs(model, ids), before))


def test_every_class_of_an_architecture_has_a_twin() -> None:
    for name in {name for name, _ in HEADS}:
        architecture = architectures()[name]
        stock, twin = config_pair(architecture)
        assert (twin.model_type, issubclass(twin, stock)) == (f"hf_posenc_{name}", True)
        module = inspect.getmodule(architecture.attention)
        public = [getattr(module, name) for name in module.__all__]
        models = {kind for kind in public if hasattr(kind, "forward") and "PreTrained" not in kind.__name__}
        own = {kind for kind in models if getattr(kind, "config_class", None) is stock}
        assert own <= architecture.twins.keys()


SHAPES = [
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"head_dim": 12}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("t5", {"d_kv": 6, "num_decoder_layers": 3}),
]


@pytest.mark.parametrize(("name", "changes"), SHAPES)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_shapes_that_configs_can_ask_for(name: str, changes: dict[str, Any], backend: str) -> None:
    config = heads.config(name, **changes)
    config._attn_implementation = backend
    model = heads.make(getattr(transformers, heads.KINDS[name][1]), config)
    before = heads.first_output(model, heads.ids())
    reproduced = {"llama": "rope", "gpt2": "learned", "t5": "t5"}[name]
    torch.testing.assert_close(
        heads.first_output(hf_posenc.patch(model, reproduced), heads.ids()), before, atol=1e-5, rtol=1e-5
    )
    hf_posenc.patch(model, "kerple")
    assert (heads.first_output(model, heads.ids()) - before).abs().max() > 1e-4
    hf_posenc.verify(model)


# -- decoders ----------------------------------------------------------------------------------------------------------


RESHAPED = [name for name in NAMES if not cast(Any, architectures()[name]).body._supports_sdpa]


@pytest.mark.parametrize("name", RESHAPED)
def test_softcaps_and_sinks_on_blocks(name: str) -> None:
    """Against the stock model, which is dense; of odd length, padded, with a window."""
    assert blocks._DENSE_LOGITS < 2 * 2 * 391 * 391
    stock, ids = make(name), tokens(2, 391)
    mask = torch.ones_like(ids)
    mask[0, :57] = 0
    model = hf_posenc.patch(make(name), "rope")
    ran = [layer.sequence for layer in hf_posenc.explain(model, length=600).layers]
    assert ran == ["blocks"] * len(ran)

    def gradients(made: PreTrainedModel) -> dict[str, Tensor]:
        made.zero_grad()
        out = made(ids, attention_mask=mask, use_cache=False).logits * mask[:, :, None]
        out.square().mean().backward()
        found = {key: weight.grad for key, weight in made.named_parameters() if weight.grad is not None}
        return {**found, "": out.detach()}

    with attention.recorded() as choices:
        got = gradients(model)
    assert set(choices) == {"blocks"}
    for key, expected in gradients(stock).items():
        same(got[key], expected)


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
    same(logits(model, ids, position_ids=places), alone(stock, ids))
    with torch.no_grad():
        cache = model(ids[:, :20], use_cache=True)[CACHE]
        steps = [model(ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(20, 29)]
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
            call = {"attention_mask": mask[:, :stop], CACHE: cache}
            with torch.no_grad():
                found.append(model(ids[:, start:stop], **call).logits)
        torch.testing.assert_close(torch.cat(found, dim=1)[mask.bool()], whole[mask.bool()], **SAME)


def test_facts_follow_code_and_config_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read once for the same code and config, and a scheme may write into what it gets."""
    model, runs = make("olmo2"), []
    architecture, body = of_model(model), model.model
    modeling, rotary = inspect.getmodule(type(body)), type(body.rotary_emb)
    monkeypatch.setattr(probe, "_FOUND", {})  # What an earlier test has read.
    monkeypatch.setattr(probe, "_probe", lambda *given, found=probe._probe: runs.append(given) or found(*given))

    def read(*replaced: tuple[Any, str, Any]) -> hf_posenc.Geometry:
        with monkeypatch.context() as patch:
            for thing, name, value in replaced:
                (patch.setitem if isinstance(thing, dict) else patch.setattr)(thing, name, value)
            return architecture.geometry(body, 0)

    with torch.inference_mode():
        read().inv_freq.zero_()
    assert (read().inv_freq.any(), len(runs)) == (True, 1)
    assert (read().head_dim, read().layout) == (16, "half")
    assert read((body.config, "head_dim", 8)).head_dim == 8
    linear = (body.config, "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    assert read(linear).inv_freq[0] == 0.5
    assert read(linear, (ROPE_INIT_FUNCTIONS, "linear", ones)).inv_freq.tolist() == [1.0] * 8
    assert read((modeling, "apply_rotary_pos_emb", turn_neighbours)).layout == "interleaved"
    assert read((rotary, "compute_default_rope_parameters", ones)).inv_freq.tolist() == [1.0] * 8
    with pytest.raises(ArchitectureError, match="in another way than in pairs"):
        read((modeling.rotate_half, "__code__", (lambda x: -x).__code__))
    forward = architecture.attention.forward
    with pytest.raises(ArchitectureError, match="by another function"):
        read((architecture.attention, "forward", lambda self, *given, **call: forward(self, *given, **call)))
    assert (read().layout, len(runs)) == ("half", 10)  # refused twice each


def ones(config: Any, *given: Any, **keywords: Any) -> tuple[Tensor, float]:
    return torch.ones(8), 1.0


def turn_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate as `apply_rotary_pos_emb` does, in pairs of neighbours."""
    half = cos.shape[-1] // 2
    return tuple(turn_pairs(x, cos[:, None, :, :half], sin[:, None, :, :half], "interleaved") for x in (q, k))


# Families that nothing in the package names.
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


@pytest.mark.parametrize("name", once(STRANGERS))
def test_a_newcomer_needs_no_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, name, STRANGERS[name])
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


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", [*NAMES, "modernbert"])
def test_packed_sequences_keep_the_windows_of_stock_layers(name: str, layer: int) -> None:
    model, ids = hf_posenc.patch(make(name), "alibi", native="keep", layers=[layer]), tokens()
    call = {"position_ids": torch.cat((torch.arange(13), torch.arange(16)))[None]}
    separate = alone(model, ids)
    same(logits(model, ids, **call), separate)
    model.set_attn_implementation("eager")
    same(logits(model, ids, **call), separate)


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


# -- encoders, and models like T5, padded on the right -----------------------------------------------------------------

EXACT = {"bert": "learned", "roberta": "learned", "modernbert": "rope"}


def inputs(name: str, length: int = 29) -> dict[str, Tensor]:
    """Return a batch whose first row is padded on the right."""
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    found = {"input_ids": ids.masked_fill(mask == 0, PADDING), "attention_mask": mask}
    return found if name in EXACT else {**found, "decoder_input_ids": ids[:, :17]}


def real_logits(model: PreTrainedModel, **call: Tensor) -> Tensor:
    """Return the logits of the tokens that are not padding."""
    with torch.no_grad():
        found: Tensor = model(**call).logits
    return found if "decoder_input_ids" in call or "attention_mask" not in call else found[call["attention_mask"] == 1]


@pytest.mark.parametrize("name", ENCODERS)
def test_the_model_s_own_encoding_starts_exact(name: str) -> None:
    stock, scheme = make(name), EXACT.get(name, "t5")
    model = hf_posenc.patch(make(name), scheme)
    assert hf_posenc.plan(stock, scheme).start == "exact"
    padded = inputs(name)
    plain = {key: value for key, value in padded.items() if key != "attention_mask"}
    plain["input_ids"] = plain["input_ids"].masked_fill(plain["input_ids"] == PADDING, 9)
    for call in (padded, plain):
        torch.testing.assert_close(real_logits(model, **call), real_logits(stock, **call), **SAME)
    if name not in EXACT:
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": padded["attention_mask"]}
        ids = padded["input_ids"]
        assert torch.equal(model.generate(ids, **settings), stock.generate(ids, **settings))
        return
    places = torch.arange(29)[None] + (PADDING + 1 if name == "roberta" else 0)
    torch.testing.assert_close(real_logits(model, **plain, position_ids=places), real_logits(stock, **plain), **SAME)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(real_logits(model, **padded), real_logits(stock, **padded), **SAME)


@pytest.mark.parametrize("scheme", list(hf_posenc.schemes()))
@pytest.mark.parametrize("name", ENCODERS)
def test_a_padded_row_equals_the_row_alone(name: str, scheme: str) -> None:
    one_way = "bidirectional" not in hf_posenc.schemes()[scheme].directions
    if one_way and name in EXACT:
        with pytest.raises(hf_posenc.DirectionError):
            hf_posenc.patch(make(name), scheme)
        return
    torch.manual_seed(1)
    model = moved(hf_posenc.patch(make(name), scheme, **({"stacks": "decoder"} if one_way else {})))
    call = inputs(name)
    output = real_logits(model, **call)
    row = {key: value[:1, : 29 // 2] for key, value in call.items() if key != "decoder_input_ids"}
    if name not in EXACT:
        row["decoder_input_ids"] = call["decoder_input_ids"][:1]
    got = real_logits(model, **row)
    # Without padding, the tokens of all rows are in one dimension.
    expected = output[: len(got)] if output.dim() == 2 else output[:1, : got.shape[1]]
    torch.testing.assert_close(got, expected, **SAME)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_inputs_beyond_the_table(name: str) -> None:
    long = {"input_ids": inputs(name, 80)["input_ids"].clamp_min(5)}
    kept = hf_posenc.patch(make(name), "alibi", native="keep")
    with pytest.raises(PositionError, match="beyond the model's own table of 64 positions"):
        kept(**long)
    hf_posenc.set_strength(kept, native=0.0)
    faded = real_logits(kept, **inputs(name))
    hf_posenc.drop_native(kept)
    assert torch.equal(real_logits(kept, **inputs(name)), faded)
    assert real_logits(kept, **long).isfinite().all()


def test_positions_of_roberta_count_from_the_row_after_padding() -> None:
    model, call = hf_posenc.patch(make("roberta"), "fire"), inputs("roberta")
    with pytest.raises(PositionError, match=r"counts from 2.* Leave position_ids out, or add 2"):
        model(**call, position_ids=torch.arange(29)[None])
    # It would have a position here, and has none in the stock model.
    call.pop("attention_mask")
    with pytest.raises(PositionError, match=r"padding \(1\) and no attention_mask"):
        hf_posenc.patch(model, "learned")(**call)
    kept = hf_posenc.patch(model, "kerple", native="keep")
    torch.testing.assert_close(real_logits(kept, **call), real_logits(make("roberta"), **call), **SAME)


# -- what is refused ---------------------------------------------------------------------------------------------------

# What cannot be read from the code, by how a family is added: its name, a scheme, and the reason.
_DECODER = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size_per_layer_input": 60, **LATENT, **EXPERTS}
REFUSED = [
    ("decoder", "hunyuan_v1_dense", "rope", "between the rotation of queries and the attention function"),
    ("decoder", "deepseek_v2", "rope", "cosines and sines"),
    ("decoder", "diffllama", "rope", "calls the attention function 2 times"),
    # From transformers 5.24 on, its attention does not run alone any more.
    ("decoder", "gemma4", "rope", "does not rotate queries together with keys|does not run without a model around it"),
    ("decoder", "qwen3_next", "rope", r"is missing in some layers \(0, 1\)"),
    ("encoder", "albert", "rope", "uses one layer several times"),
    ("decoder", "doge", "rope", "makes a mask of its own"),
    ("encoder", "megatron-bert", "rope", "computes attention by itself"),
    ("encoder", "electra", "learned", "width 32 to the embeddings, and those of ElectraModel have 16"),
    ("encoder", "mobilebert", "sinusoidal", "projects the embeddings of tokens before positions are added"),
    ("both", "longt5", "t5", "no one class of layers that LongT5Stack records"),
]


@pytest.mark.parametrize(("kind", "name", "scheme", "why"), REFUSED)
def test_what_cannot_be_read_is_refused(
    kind: str, name: str, scheme: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "decoder":
        monkeypatch.setitem(DECODERS, name, _DECODER)
    sizes = ENCODERS["t5"] if kind == "both" else {**ENCODER, "embedding_size": 16}
    model = make(name) if kind == "decoder" else AutoModel.from_config(CONFIG_MAPPING[name](**sizes)).eval()
    ids = tokens(2) if kind == "both" else tokens()
    call: dict[str, Any] = {"decoder_input_ids": ids} if kind == "both" else {}
    if kind == "decoder":  # a cache of linear attention alone has no length
        call["use_cache"] = False
    with torch.no_grad():
        before = model(ids, **call)[0] if name != "udop" else None
        with pytest.raises(ArchitectureError, match=why):
            hf_posenc.patch(model, scheme)
        assert before is None or torch.equal(model(ids, **call)[0], before)
    assert not hasattr(model.config, "posenc")
    if scheme != "rope" and kind == "encoder":  # Schemes that act inside of attention do not need the embeddings.
        hf_posenc.set_strength(hf_posenc.patch(model, "kerple", native="keep"), native=0.5)
        assert model(ids).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(("name", "causal"), [("llama", True), ("layoutlm", False)])
def test_masks_say_which_attentions_are_causal(name: str, causal: bool) -> None:
    """LayoutLM's attention does not say; Llama's says what its masks say."""
    model: Any = make(name).model if causal else AutoModel.from_config(CONFIG_MAPPING[name](**ENCODER)).eval()
    (kind, layer), *_ = of_model(model).layered.items()
    assert probe.hides_ahead(kind, layer, model.config) is causal
    hf_posenc.patch(model, "kerple")
    assert next(each.is_causal_stack() for each in model.modules() if hasattr(each, "is_causal_stack")) is causal


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


def test_two_stacks_of_one_direction_are_refused() -> None:
    """One of them would be left as it is."""
    model = stock("umt5")
    for module in model.decoder.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(ArchitectureError, match="is causal in all of its stacks or in none"):
        hf_posenc.patch(model, "t5")
    assert not surgery.is_patched(model)


def test_types_that_are_no_family_are_refused() -> None:
    for name, why in (
        ("lama", "no model type"),
        ("jamba", "no one class of"),
        ("clip", "made of several"),
    ):
        with pytest.raises(ArchitectureError, match=why):
            add_family(name, {})
