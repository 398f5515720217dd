"""Encoders, and models like T5, read from the code of transformers: tiny random models, padded on the right."""

from __future__ import annotations

import copy

import pytest
import torch
from models import ENCODER, ENCODERS, PADDING, SAME, moved
from models import tiny as make
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    RobertaForCausalLM,
)

import hf_posenc
from hf_posenc.errors import ArchitectureError, PositionError
from hf_posenc.patches.architecture import architectures, of_model
from hf_posenc.patches.buckets import add_encoder_decoder
from hf_posenc.patches.family import add_family

EXACT = {"bert": "learned", "roberta": "learned", "modernbert": "rope"}
NAMES = list(ENCODERS)


def inputs(name: str, length: int = 29) -> dict[str, Tensor]:
    """Return a batch whose first row is padded on the right."""
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    found = {"input_ids": ids.masked_fill(mask == 0, PADDING), "attention_mask": mask}
    return found if name in EXACT else {**found, "decoder_input_ids": ids[:, :17]}


def logits(model: PreTrainedModel, **call: Tensor) -> Tensor:
    """Return the logits of the tokens that are not padding."""
    with torch.no_grad():
        found: Tensor = model(**call).logits
    return found if "decoder_input_ids" in call or "attention_mask" not in call else found[call["attention_mask"] == 1]


def test_every_family_that_is_no_decoder_is_tested() -> None:
    modules = {name: next(iter(a.twins.values())).__module__ for name, a in architectures().items()}
    built_in = {name: architectures()[name] for name, module in modules.items() if module.startswith("hf_posenc.")}
    others = {name for name, a in built_in.items() if not a.native.startswith("rotary")} | {"modernbert"}
    assert others - {"gpt2", "vit"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_s_own_encoding_starts_exact(name: str) -> None:
    stock, scheme = make(name), EXACT.get(name, "t5")
    model = hf_posenc.patch(make(name), scheme)
    assert hf_posenc.plan(stock, scheme).start == "exact"
    padded = inputs(name)
    plain = {key: value for key, value in padded.items() if key != "attention_mask"}
    plain["input_ids"] = plain["input_ids"].masked_fill(plain["input_ids"] == PADDING, 9)
    for call in (padded, plain):
        torch.testing.assert_close(logits(model, **call), logits(stock, **call), **SAME)
    if name not in EXACT:
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": padded["attention_mask"]}
        ids = padded["input_ids"]
        assert torch.equal(model.generate(ids, **settings), stock.generate(ids, **settings))
        return
    places = torch.arange(29)[None] + (PADDING + 1 if name == "roberta" else 0)
    torch.testing.assert_close(logits(model, **plain, position_ids=places), logits(stock, **plain), **SAME)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model, **padded), logits(stock, **padded), **SAME)


@pytest.mark.parametrize("scheme", list(hf_posenc.schemes()))
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_row_equals_the_row_alone(name: str, scheme: str) -> None:
    one_way = "bidirectional" not in hf_posenc.schemes()[scheme].directions
    if one_way and name in EXACT:
        with pytest.raises(hf_posenc.DirectionError):
            hf_posenc.patch(make(name), scheme)
        return
    torch.manual_seed(1)
    model = moved(hf_posenc.patch(make(name), scheme, **({"stacks": "decoder"} if one_way else {})))
    call = inputs(name)
    output = logits(model, **call)
    alone = {key: value[:1, : 29 // 2] for key, value in call.items() if key != "decoder_input_ids"}
    if name not in EXACT:
        alone["decoder_input_ids"] = call["decoder_input_ids"][:1]
    got = logits(model, **alone)
    # Without padding, the tokens of all rows are in one dimension.
    row = output[: len(got)] if output.dim() == 2 else output[:1, : got.shape[1]]
    torch.testing.assert_close(got, row, **SAME)


@pytest.mark.parametrize("name", NAMES)
def test_every_head(name: str) -> None:
    for stock in of_model(make(name)).twins:
        if issubclass(stock, PreTrainedModel) and not stock.__name__.endswith("Stack"):
            head = stock(make(name).config).eval()
            hf_posenc.patch(head, "kerple")
            assert type(head).__name__ == f"Posenc{stock.__name__}"
            assert type(hf_posenc.unpatch(head)) is stock


@pytest.mark.parametrize("native", ["remove", "keep"])
def test_a_table_is_trained_while_a_layer_reads_it(native: str) -> None:
    """A parameter that is trained but unused makes distributed training fail; UMT5 has a table for each layer."""
    model = hf_posenc.patch(make("umt5"), "kerple", layers=[0], native=native)
    model(**inputs("umt5")).logits.sum().backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    tables = [p for key, p in model.named_parameters() if "relative_attention_bias" in key]
    assert [p.requires_grad for p in tables] == [native == "keep", True] * 2
    assert all(p.requires_grad for p in hf_posenc.unpatch(model).parameters())


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_inputs_beyond_the_table(name: str) -> None:
    long = {"input_ids": inputs(name, 80)["input_ids"].clamp_min(5)}
    kept = hf_posenc.patch(make(name), "alibi", native="keep")
    with pytest.raises(PositionError, match="beyond the model's own table of 64 positions"):
        kept(**long)
    hf_posenc.set_strength(kept, native=0.0)
    faded = logits(kept, **inputs(name))
    hf_posenc.drop_native(kept)
    assert torch.equal(logits(kept, **inputs(name)), faded)
    assert logits(kept, **long).isfinite().all()


def test_positions_of_roberta_count_from_the_row_after_padding() -> None:
    model, call = hf_posenc.patch(make("roberta"), "fire"), inputs("roberta")
    with pytest.raises(PositionError, match=r"counts from 2.* Leave position_ids out, or add 2"):
        model(**call, position_ids=torch.arange(29)[None])
    # It would have a position here, and has none in the stock model.
    call.pop("attention_mask")
    with pytest.raises(PositionError, match=r"padding \(1\) and no attention_mask"):
        hf_posenc.patch(model, "learned")(**call)
    kept = hf_posenc.patch(model, "kerple", native="keep")
    torch.testing.assert_close(logits(kept, **call), logits(make("roberta"), **call), **SAME)


def test_a_decoder_of_encoder_classes_caches() -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["roberta"](**ENCODERS["roberta"], is_decoder=True, eos_token_id=2, bos_token_id=0)
    stock, ids = RobertaForCausalLM(config).eval(), inputs("roberta")["input_ids"].clamp_min(5)
    model = hf_posenc.patch(copy.deepcopy(stock), "learned")
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    found = model.generate(ids, **settings)
    # The stock model is right without `generate`, which counts its positions from 0.
    torch.testing.assert_close(logits(model, input_ids=found), logits(stock, input_ids=found), **SAME)
    assert torch.equal(found[:, 29:], logits(stock, input_ids=found)[:, 28:-1].argmax(-1))
    for scheme in ("learned", "fox"):
        hf_posenc.patch(model, scheme)
        assert torch.equal(model.generate(ids, **settings), model.generate(ids, **settings, use_cache=False))


@pytest.mark.parametrize(
    ("name", "why"),
    [("albert", "uses one layer several times"), ("layoutlm", "does not say whether it is causal")],
)
def test_encoders_that_cannot_be_read_are_refused(name: str, why: str) -> None:
    if name not in architectures():
        add_family(name, globals())
    model = AutoModel.from_config(CONFIG_MAPPING[name](**ENCODER)).eval()
    with pytest.raises(ArchitectureError, match=why):
        hf_posenc.patch(model, "rope")
    assert not hasattr(model.config, "posenc")


@pytest.mark.parametrize(
    ("name", "why"), [("longt5", "LongT5LocalAttention makes"), ("udop", "RelativePositionBias1D makes")]
)
def test_biases_outside_of_the_attention_are_refused(name: str, why: str) -> None:
    add_encoder_decoder(name, globals())
    model = AutoModel.from_config(CONFIG_MAPPING[name](**ENCODERS["t5"]))
    with pytest.raises(ArchitectureError, match=why):
        hf_posenc.patch(model, "t5")
    assert not hasattr(model.config, "posenc")


def test_experts_of_models_like_t5_feed_what_is_carried() -> None:
    add_encoder_decoder("switch_transformers", globals())
    config = CONFIG_MAPPING["switch_transformers"](**ENCODERS["t5"], num_experts=2, num_sparse_encoder_layers=1)
    stock = AutoModelForSeq2SeqLM.from_config(config).eval()
    call = inputs("t5")
    before = logits(stock, **call)
    torch.testing.assert_close(logits(hf_posenc.patch(stock, "t5"), **call), before, **SAME)
    assert logits(hf_posenc.patch(stock, "tape"), **call).isfinite().all()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("electra", "width 32 to the embeddings, and those of ElectraModel have 16"),
        ("mobilebert", "MobileBertEmbeddings projects the embeddings of tokens before positions are added"),
        ("esmc", "EsmcModel takes no inputs_embeds"),
    ],
)
def test_embeddings_that_take_no_positions_from_outside(name: str, why: str) -> None:
    if name not in architectures():
        add_family(name, globals())
    model = AutoModel.from_config(CONFIG_MAPPING[name](**ENCODER, embedding_size=16)).eval()
    for scheme in ("sinusoidal", "learned"):
        with pytest.raises(ArchitectureError, match=why):
            hf_posenc.patch(model, scheme)
    ids = inputs("bert")["input_ids"]
    hf_posenc.set_strength(hf_posenc.patch(model, "kerple", native="keep"), native=0.5)
    assert model(ids).last_hidden_state.isfinite().all()
