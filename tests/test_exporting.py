"""Converted models as ordinary checkpoints: what they compute, where there are none, and what is left on the disk."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import moved, tiny
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import KINDS, stock
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    SmolLM3ForCausalLM,
    T5EncoderModel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli
from hf_posenc.errors import ExportError, NotPatchedError, WrappedModelError
from hf_posenc.patches.export.stock import export_stock

TINY_LLAMA = Path(hf_posenc.__file__).parent / "tiny_llama"
PAGE = Path(__file__).parent.parent / "docs" / "export.md"
IDS = torch.randint(0, 48, (2, 30), generator=torch.Generator().manual_seed(0))


# -- models ------------------------------------------------------------------------------------------------------------


def llama(**changes: Any) -> Any:
    """A Llama with grouped queries, biases, and large weights, so that attention is not uniform."""
    return moved(stock("llama", attention_bias=True, **{"initializer_range": 0.2, **changes}), 0.2, only="bias")


def gpt2() -> Any:
    return stock("gpt2", n_layer=2, n_positions=40, initializer_range=0.2)


def t5() -> Any:
    return stock("t5", num_layers=2)


def vit() -> Any:
    return stock("vit", hidden_size=64, image_size=16, initializer_range=0.2)


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "llama": (llama, AutoModelForCausalLM),
    "gpt2": (gpt2, AutoModelForCausalLM),
    "t5": (t5, AutoModelForSeq2SeqLM),
    "vit": (vit, AutoModelForImageClassification),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def trained(make: Callable[[], Any], scheme: str, **options: Any) -> Any:
    """A converted model whose scheme has moved from its start."""
    return moved(hf_posenc.patch(make(), scheme, **options), 0.2)


def strengths(model: Any, **values: float) -> Any:
    hf_posenc.set_strength(model, **values)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    kind = model.config.model_type
    if kind.endswith("vit"):
        return model(pixel_values=torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))).logits
    return model(input_ids=IDS, **({"decoder_input_ids": IDS.flip(1)} if kind.endswith("t5") else {})).logits


def state_of(model: Any) -> tuple[Any, ...]:
    """Everything of a model that an export must leave alone."""
    kinds = [type(module) for module in model.modules()]
    return kinds, model.config.to_dict(), [p.requires_grad for p in model.parameters()], id(model.config)


# -- what can be exported ----------------------------------------------------------------------------------------------

EXPORTS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "no positions": (lambda: trained(llama, "nope"), {}),
    "own frequencies": (lambda: trained(llama, "rope"), {}),
    "other frequencies": (lambda: trained(llama, "rope", theta=500.0), {}),
    "partial": (lambda: trained(llama, "rope", theta=100.0, rotary_dim=4, layout="interleaved"), {}),
    "kept, nothing added": (lambda: hf_posenc.patch(llama(), "fire", native="keep"), {}),
    "yarn, interleaved": (lambda: trained(lambda: llama(rope_parameters=YARN), "rope", layout="interleaved"), {}),
    "rope2d, axial": (lambda: trained(llama, "rope2d", kind="axial"), {}),
    "fope, not begun": (lambda: hf_posenc.patch(llama(), "fope"), {}),
    "tape, not begun": (lambda: hf_posenc.patch(llama(), "tape"), {}),
    "gpt2, no positions, longer": (lambda: trained(gpt2, "nope"), {"max_positions": 100}),
    "gpt2, some layers": (lambda: trained(gpt2, "nope", layers=[1]), {}),
    "gpt2, learned over own": (lambda: trained(gpt2, "learned", native="keep"), {}),
    "gpt2, sinusoidal over own": (lambda: trained(gpt2, "sinusoidal", native="keep"), {}),
    "t5, one stack without": (lambda: trained(t5, "nope", stacks="encoder"), {}),
    "t5, trained table": (lambda: trained(t5, "t5"), {}),
    "t5, gated table over own": (lambda: trained(t5, "t5", native="keep", gate=True, init="normal"), {}),
    "umt5, a table for each layer": (lambda: trained(lambda: tiny("umt5"), "t5", layers=[1]), {}),
    "vit, learned": (lambda: trained(vit, "learned"), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPORTS)
def test_the_stock_model_computes_the_same(case: str, tmp_path: Path) -> None:
    make, options = EXPORTS[case]
    model = make()
    before, weights, expected = state_of(model), copy.deepcopy(model.state_dict()), logits(model)
    export = export_stock(model, tmp_path / "out", **options)
    assert state_of(model) == before
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert not {"posenc", "auto_map"} & set(config)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".safetensors"}
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "posenc" in name]
    found = MODELS[config["model_type"].removeprefix("um")][1].from_pretrained(tmp_path / "out").eval()
    assert type(found).__name__ == export.model == type(model).__name__.removeprefix("Posenc")
    assert type(found).__module__.startswith("transformers.")
    torch.testing.assert_close(logits(found), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["own frequencies", "kept, nothing added", "tape, not begun"])
def test_what_computes_its_own_encoding_is_the_stock_model_itself(case: str, tmp_path: Path) -> None:
    export = export_stock(EXPORTS[case][0](), tmp_path / "out")
    assert export.changes == ()
    llama().save_pretrained(tmp_path / "stock")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()


def test_no_positions_means_none_at_a_million(tmp_path: Path) -> None:
    export_stock(hf_posenc.patch(llama(), "nope"), tmp_path / "out")
    config = LlamaConfig.from_pretrained(tmp_path / "out")
    assert config.head_dim == 8
    # Of longrope, llama.cpp's converter for Llama writes the name and drops the factors.
    assert config.rope_parameters["rope_type"] == "llama3"
    positions = torch.cat((torch.arange(1000), torch.arange(1000, 1_000_001, 997), torch.tensor([1_000_000])))[None]
    for length in (1, 8192):  # llama.cpp's converter does not find the length, and takes 8,192
        config.rope_parameters["original_max_position_embeddings"] = length
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        assert bool((cos == 1).all())
        assert 0 < float(sin.abs().max()) < 1e-20
    # No weight had to change.
    before = llama().state_dict()
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize(
    ("layers", "options", "rope"),
    [
        ([1], {}, None),
        ([0, 2], {"rope_parameters": DYNAMIC}, None),  # the others keep frequencies that change
        ([3], {"rope_parameters": YARN, "tie_word_embeddings": True}, {"layout": "interleaved", "theta": 50.0}),
        ([0], {"head_dim": 16, "mlp_bias": True}, {"theta": 50.0}),
    ],
)
def test_some_layers_without_positions(layers: list[int], options: dict[str, Any], rope: Any, tmp_path: Path) -> None:
    model = trained(lambda: llama(num_hidden_layers=4, **options), "nope", layers=layers)
    if rope:
        hf_posenc.patch(model, "rope", layers=[i for i in range(4) if i not in layers], **rope)
    expected = logits(model)
    export = export_stock(model, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(found) is SmolLM3ForCausalLM
    assert export.model == "SmolLM3ForCausalLM"
    assert found.config.no_rope_layers == [int(i not in layers) for i in range(4)]
    torch.testing.assert_close(logits(found), expected, atol=1e-4 if rope else 0.0, rtol=1e-4 if rope else 0.0)
    # llama.cpp leaves out every fourth layer, whatever the list is.
    assert ("would leave out every fourth" in str(export)) == (layers != [3])
    assert sum(p.numel() for p in found.parameters()) == sum(p.numel() for p in model.parameters())
    if not rope:
        assert found.config.rope_parameters == llama(**options).config.rope_parameters


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", LlamaModel),
        ("llama", LlamaForSequenceClassification),
        ("t5", T5EncoderModel),
    ],
)
def test_other_heads(name: str, kind: Any, tmp_path: Path) -> None:
    model = hf_posenc.patch(stock(name, kind), "nope")
    assert export_stock(model, tmp_path / "out").model == kind.__name__
    with torch.no_grad():
        torch.testing.assert_close(kind.from_pretrained(tmp_path / "out")(IDS)[0], model(IDS)[0], atol=1e-4, rtol=1e-4)


# Facts of other families: a scale of their own, norms behind the projections, layers that do not rotate, several tables
# of frequencies, rows for padding. The last entry is why a case is refused.
FAMILIES: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("gemma2", "rope", {"layout": "interleaved"}, None),
    ("gemma2", "comrope_ap", {}, "one table for all heads"),
    ("qwen3", "rope", {"theta": 50.0}, None),
    ("qwen3", "rope", {"layout": "interleaved"}, "between these and the rotation the model has q_norm, k_norm"),
    ("smollm3", "nope", {}, None),
    ("smollm3", "rope", {"theta": 50.0}, None),  # in layer 3, too
    ("smollm3", "nope", {"layers": [0, 2]}, None),
    ("qwen3", "nope", {"layers": [1]}, "layer 1 of the decoder turns none .* this layer of the stock model does"),
    ("gemma3_text", "nope", {}, "several tables"),
    ("roberta", "sinusoidal", {}, None),
]


@pytest.mark.parametrize(("family", "scheme", "options", "refusal"), FAMILIES)
def test_families(family: str, scheme: str, options: dict[str, Any], refusal: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {**KINDS["llama"][3], "vocab_size": 48, "num_hidden_layers": 4, "head_dim": 8, "initializer_range": 0.2}
    config = AutoConfig.for_model(family, **shape, pad_token_id=1)
    loader = AutoModel if family == "roberta" else AutoModelForCausalLM
    # Other implementations of transformers leave out the soft cap of Gemma.
    model = trained(lambda: loader.from_config(config, attn_implementation="eager").eval(), scheme, **options)
    if refusal is not None:
        with pytest.raises(ExportError, match=refusal):
            export_stock(model, tmp_path / "out")
        return
    export_stock(model, tmp_path / "out")
    found = loader.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(IDS.clamp(2))[0], model(IDS.clamp(2))[0], atol=1e-4, rtol=1e-4)


# -- what cannot ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "bias": (lambda: trained(llama, "fire"), {}, "'fire' on layer 0 of the decoder changes the logits .* hf-posenc is"),
    "softmax": (lambda: trained(llama, "stick_breaking"), {}, "'stick_breaking' on layer 0 .* the softmax"),
    "table on llama": (lambda: trained(llama, "learned"), {}, "vector per position .* rotary encoding has no table"),
    "spectra": (lambda: trained(llama, "comrope_ld"), {}, "other frequencies than others, .* one table for all"),
    "turned twice": (lambda: trained(llama, "rope", native="keep"), {}, "besides the model's own .* native='remove'"),
    "changing frequencies": (
        lambda: trained(lambda: llama(rope_parameters=DYNAMIC), "rope", theta=50.0, layers=[0]), {},
        r"layer 1 of the decoder \(without a scheme\) keeps frequencies that change beyond 64 tokens",
    ),
    "rotation on gpt2": (lambda: trained(gpt2, "rope"), {}, "turns queries and keys .* table of positions only"),
    "tables of layers": (lambda: trained(t5, "t5", shared=False), {}, "layer 1 of the encoder .* another bias"),
    "no end": (lambda: trained(t5, "kerple"), {}, "goes on changing beyond 128 tokens"),
    "factor": (lambda: trained(t5, "kerple", weighted=True), {}, "changes the logits"),
    "distances of t5": (lambda: trained(t5, "nope"), {"max_positions": 30}, "no table of positions"),
    "patches": (lambda: trained(vit, "learned", num_positions=16), {}, "ViTForImageClassification has 17"),
    "more than there are": (lambda: trained(gpt2, "learned"), {"max_positions": 41}, "41 positions .* at most 40"),
    "adapters": (lambda: adapted(), {}, r"merge PEFT adapters with model.merge_and_unload"),
    "altered": (lambda: altered(), {}, "layer 0 of the decoder needs other projections, and q_proj is a Altered"),
    "elsewhere": (lambda: trained(llama, "nope").to("meta"), {}, "not in memory"),
    "handover": (
        lambda: strengths(trained(llama, "rope", native="keep"), native=0.5), {},
        r"handover \(native=0.5, scheme=1\).*drop_native",
    ),
    "stock": (llama, {}, "a stock model already"),
}  # fmt: skip


def adapted() -> Any:
    return get_peft_model(hf_posenc.patch(llama(), "nope"), LoraConfig(target_modules=["q_proj"], r=2))


def altered() -> Any:
    class Altered(torch.nn.Linear):
        pass

    model = trained(llama, "rope", layout="interleaved")
    model.model.layers[0].self_attn.q_proj.__class__ = Altered
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_stock_model_computes_is_refused(case: str, tmp_path: Path) -> None:
    make, options, message = REFUSED[case]
    model = make()
    with pytest.raises((ExportError, NotPatchedError, WrappedModelError), match=message):
        export_stock(model, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


# -- the directory ----------------------------------------------------------------------------------------------------


def test_nothing_that_is_there_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_posenc.patch(gpt2(), "nope")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine", encoding="utf-8")
    for target, message in (("full", "not empty"), ("full/mine", "is a file"), ("nowhere/out", "no directory")):
        with pytest.raises(ExportError, match=message):
            export_stock(model, tmp_path / target)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "mine"]
    # An empty directory stays the same one, and so does its link.
    for empty in ("linked", "here"):
        (tmp_path / empty).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    export_stock(model, tmp_path / "link")
    monkeypatch.chdir(tmp_path / "here")
    export_stock(model, ".")
    names = {path.name for path in (tmp_path / "linked").iterdir()}
    assert {path.name for path in Path().iterdir()} == names >= {"model.safetensors"}
    assert {path.stat().st_mode & 0o777 for path in Path().iterdir()} == {0o644}


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])

    source, out = tmp_path / "in", tmp_path / "out"
    hf_posenc.patch(AutoModelForCausalLM.from_pretrained(TINY_LLAMA), "nope").save_pretrained(source)
    AutoTokenizer.from_pretrained(TINY_LLAMA).save_pretrained(source)
    refused = run("export", source, out, "--max-positions", 9)
    assert (refused.exit_code, "no table of positions" in refused.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    done = run("export", source, out)
    assert done.exit_code == 0, done.stderr
    for part in (f'LlamaForCausalLM.from_pretrained("{out}")', "AutoTokenizer.from_pretrained"):
        assert part in done.stdout
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(TINY_LLAMA))
    assert type(AutoModelForCausalLM.from_pretrained(out)) is LlamaForCausalLM
    again = run("export", out, tmp_path / "twice")
    assert (again.exit_code, "not a converted checkpoint" in again.stderr) == (1, True)


# -- the page ---------------------------------------------------------------------------------------------------------


def outcome(scheme: str, architecture: str, folder: Path) -> str:
    """Return what comes of exporting a trained scheme, as the page has it."""
    make = MODELS[architecture][0]
    causal_only = "bidirectional" not in hf_posenc.schemes()[scheme].directions
    stacks = {"stacks": "decoder"} if architecture == "t5" and causal_only else {}
    if architecture == "vit" and causal_only:
        return "-"
    model = trained(make, scheme, **stacks)
    try:
        export_stock(model, folder / architecture)
    except ExportError:
        return "no"
    return "yes"


@pytest.mark.parametrize("scheme", hf_posenc.schemes())
def test_the_table_is_true(scheme: str, tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(encoding="utf-8").split("## How")[0], flags=re.M)
    assert [name for name, _ in rows] == list(hf_posenc.schemes())
    written = [cell.strip() for cell in dict(rows)[scheme].split("|")]
    assert written == [outcome(scheme, architecture, tmp_path) for architecture in MODELS]
