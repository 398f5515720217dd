"""Models that are made of several, with a converted part: they work, load as they were saved, or are refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composites
import peft
import pytest
import torch
import transformers
from grid import once
from safetensors.torch import load_file, save_file
from test_fresh_process import run
from torch import Tensor
from transformers import AutoConfig, EncoderDecoderModel, PreTrainedModel

import hf_posenc
from hf_posenc import CheckpointError
from hf_posenc.patches import record
from hf_posenc.patches.surgery import is_of_scheme

# The kinds that run by default come first; those behind are of the same making.
FIRST = ("llava", "gemma3", "shieldgemma2", "blip_2", "encoder_decoder", "vision_encoder_decoder")
KINDS = [*FIRST, *(pytest.param(name, marks=pytest.mark.grid) for name in composites.KINDS if name not in FIRST)]
# A scheme for each kind in turn: with weights of each layer, shared weights, state in the cache, and none at all.
SCHEMES = ("fire", "alibi", "fox", "kerple", "tape", "fire_s", "learned", "cope", "nope", "shaw")


def scheme_for(name: str, turn: int = 0) -> tuple[str, dict[str, Any]]:
    scheme = SCHEMES[(list(composites.KINDS).index(name) + turn) % len(SCHEMES)]
    return scheme, {"stacks": "decoder"} if name.endswith("t5") else {}


def make(name: str, turn: int = 0, **options: Any) -> PreTrainedModel:
    """Return a converted composite whose scheme has moved from its start."""
    scheme, stacks = scheme_for(name, turn)
    model = composites.make(name)
    torch.manual_seed(0)
    return move(hf_posenc.patch(model, scheme, **stacks, **options))


def move(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if is_of_scheme(key):
                parameter.add_(0.1)
    return model


def auto(model: PreTrainedModel) -> Any:
    """Return the Auto class that loads a composite with its head."""
    names = ("AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
    classes = [getattr(transformers, name) for name in names]
    return next(kind for kind in classes if type(model.config) in kind._model_mapping)


@torch.no_grad()
def logits(model: PreTrainedModel, name: str) -> Tensor:
    found: Tensor = model(**composites.inputs(name)).logits
    return found


def generated(model: PreTrainedModel, name: str, **options: Any) -> Tensor:
    call = {key: value for key, value in composites.inputs(name).items() if not key.startswith("decoder_")}
    found = model.generate(
        **call, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return torch.stack(found.logits)


@pytest.mark.parametrize("turn", once(range(4)))
@pytest.mark.parametrize("name", KINDS)
def test_a_composite_computes_and_loads_as_it_was_saved(name: str, turn: int, tmp_path: Path) -> None:
    stock = composites.make(name)
    model = make(name, turn)
    # Stock transformers cannot pickle a Wav2Vec2.
    pickled = copy.deepcopy(model) if name.startswith("speech") else pickle.loads(pickle.dumps(model))
    before, after = logits(stock, name), logits(model, name)
    assert not torch.equal(before, after)
    with hf_posenc.disabled(model):
        assert torch.equal(before, logits(model, name))
    assert hf_posenc.verify(model).calls
    assert hf_posenc.explain(model).layers
    model.save_pretrained(tmp_path)
    loaded = auto(model).from_pretrained(tmp_path)
    for other in (loaded, type(model).from_pretrained(tmp_path), copy.deepcopy(model), pickled):
        assert type(other) is type(model)
        assert torch.equal(after, logits(other, name))
    assert {key: value.dtype for key, value in loaded.state_dict().items() if is_of_scheme(key)} == {
        key: torch.float32 for key in model.state_dict() if is_of_scheme(key)
    }
    hf_posenc.unpatch(loaded)
    assert type(loaded) is type(stock)
    assert type(loaded.config) is type(stock.config)
    assert torch.equal(before, logits(loaded, name))
    loaded.save_pretrained(tmp_path / "stock")
    again, info = type(stock).from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert torch.equal(before, logits(again, name))
    assert not any(info.values()), info


@pytest.mark.parametrize("name", [name for name in KINDS if name != "vision_encoder_decoder"])
def test_generation_is_the_same_with_and_without_a_cache(name: str) -> None:
    model = make(name, 2)
    without = generated(model, name, use_cache=False)
    assert torch.allclose(without, generated(model, name), atol=1e-4)
    if not name.startswith(("encoder", "speech", "vision")):
        assert torch.allclose(without, generated(model, name, cache_implementation="static"), atol=1e-4)


def test_a_composite_is_made_of_converted_parts(tmp_path: Path) -> None:
    encoder = hf_posenc.patch(composites.make("encoder_decoder").encoder, "fire")
    decoder = hf_posenc.patch(composites.make("encoder_decoder_gpt2").decoder, "alibi")
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    assert [group[0] for group in hf_posenc.verify(model).groups] == ["fire", "alibi"]
    model.save_pretrained(tmp_path)
    loaded = auto(model).from_pretrained(tmp_path)
    assert torch.equal(logits(model, "encoder_decoder"), logits(loaded, "encoder_decoder"))
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "`fire` (arXiv" in card
    assert "`alibi` (arXiv" in card
    hf_posenc.unpatch(loaded.encoder)
    assert [group[0] for group in hf_posenc.verify(loaded).groups] == ["alibi"]
    hf_posenc.unpatch(loaded)
    assert type(loaded) is EncoderDecoderModel


# -- damage ------------------------------------------------------------------------------------------------------------


def edit_config(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a damage to config.json, given that of the whole and that of the part."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        change(config, next(part for part in config.values() if isinstance(part, dict) and "posenc" in part))
        path.write_text(json.dumps(config), encoding="utf-8")

    return damage


def edit_tensors(change: Callable[[dict[str, Tensor], str], Any], ours: bool | None) -> Callable[[Path], None]:
    """Return a damage to a tensor: of a scheme, of the part that has it, or of another part."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        with transformers.modeling_utils.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        scheme = next(key for key in tensors if is_of_scheme(key))
        own = scheme.partition("layers")[0].partition(".h.")[0].partition(".hf_")[0]
        same = [key for key in tensors if not is_of_scheme(key) and key.startswith(own) and tensors[key].ndim > 1]
        others = [key for key in tensors if not key.startswith(own) and tensors[key].ndim > 1]
        key = scheme if ours else (same if ours is None else others)[-1]
        change(tensors, key)
        save_file(tensors, path, metadata)

    return damage


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def redigest(part: dict[str, Any]) -> None:
    part["posenc"]["digest"] = record.digest(part["posenc"])


def other_options(part: dict[str, Any]) -> None:
    (stack,) = part["posenc"]["groups"][0]["stacks"].values()
    stack["options"]["threshold"] = 7.0


DAMAGES: dict[str, Callable[[Path], None]] = {
    "record edited": edit_config(lambda whole, part: other_options(part)),
    "record edited with its digest": edit_config(lambda whole, part: (other_options(part), redigest(part))),
    "digest of the record gone": edit_config(lambda whole, part: (other_options(part), part["posenc"].pop("digest"))),
    "record gone": edit_config(lambda whole, part: part.pop("posenc")),
    "record empty": edit_config(lambda whole, part: part.update(posenc={})),
    "type of the part": edit_config(lambda whole, part: part.update(model_type="llama")),
    "name of the part": edit_config(lambda whole, part: part.update(posenc_part="llama")),
    "name of the whole": edit_config(lambda whole, part: whole.update(posenc_composite="bert")),
    "no name of the whole": edit_config(lambda whole, part: whole.pop("posenc_composite")),
    "truncated": truncate,
    "scheme missing": edit_tensors(lambda tensors, key: tensors.pop(key), True),
    "scheme misshapen": edit_tensors(lambda tensors, key: tensors.update({key: tensors[key][..., None]}), True),
    "scheme whole numbers": edit_tensors(lambda tensors, key: tensors.update({key: tensors[key].int()}), True),
    "scheme unknown": edit_tensors(lambda tensors, key: tensors.update({f"{key}x": tensors[key].clone()}), True),
    "part missing": edit_tensors(lambda tensors, key: tensors.pop(key), None),
    "other part missing": edit_tensors(lambda tensors, key: tensors.pop(key), False),
    "other part misshapen": edit_tensors(lambda tensors, key: tensors.update({key: tensors[key][:-1].clone()}), False),
    "metadata gone": lambda folder: save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a converted composite of a kind."""
    folder = tmp_path_factory.mktemp("composites")

    def find(name: str) -> Path:
        if not (folder / name).exists():
            stacks = scheme_for(name)[1]
            hf_posenc.patch(composites.make(name), "fire", **stacks).save_pretrained(folder / name)
        return folder / name

    return find


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", once(composites.KINDS))
def test_a_damaged_composite_is_refused(name: str, damage: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in saved(name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    loader = auto(composites.make(name))
    DAMAGES[damage](folder)
    with pytest.raises((CheckpointError, ValueError)) as caught:
        loader.from_pretrained(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", once(composites.KINDS))
def test_a_stock_class_refuses_a_converted_composite(name: str, saved: Callable[[str], Path]) -> None:
    kind: Any = type(composites.make(name))
    with pytest.raises((CheckpointError, KeyError), match=r"Load it with an Auto class|hf_posenc"):
        kind.from_pretrained(saved(name))
    with pytest.raises(CheckpointError, match=rf"for {kind.__name__}\.from_pretrained, which would not check it"):
        kind.from_pretrained(saved(name), config=AutoConfig.from_pretrained(saved(name)))


def test_an_adapter_over_a_converted_composite(saved: Callable[[str], Path], tmp_path: Path) -> None:
    loader = auto(composites.make("llava"))
    targets = peft.LoraConfig(target_modules=r".*language_model.*q_proj", init_lora_weights=False)
    model = peft.get_peft_model(loader.from_pretrained(saved("llava")), targets)
    assert hf_posenc.verify(model).calls
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loader.from_pretrained(saved("llava")), tmp_path)
    assert torch.equal(logits(model, "llava"), logits(again, "llava"))
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(merged, "llava"), logits(loader.from_pretrained(tmp_path / "merged"), "llava"))


# -- processes of their own --------------------------------------------------------------------------------------------

_WITHOUT = """
import transformers
for name in NAMES:
    config = json.loads((folder / name / "config.json").read_text())
    stock = config["architectures"][0].removeprefix("Posenc").partition("__")[0]
    for kind in ("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", stock):
        attempt(f"{name} {kind}", lambda: getattr(transformers, kind).from_pretrained(folder / name))
    attempt(f"{name} misshapen",
        lambda: getattr(transformers, stock).from_pretrained(folder / name, ignore_mismatched_sizes=True))
assert "hf_posenc" not in sys.modules
"""
_REMOTE = """
import torch, transformers
for name in NAMES:
    config = transformers.AutoConfig.from_pretrained(folder / name, trust_remote_code=True)
    auto = next(x for x in ("AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
                if x in config.auto_map)
    model = getattr(transformers, auto).from_pretrained(folder / name, trust_remote_code=True)
    with torch.no_grad():
        logits[name] = model(**torch.load(folder / f"{name}.pt")).logits
"""


@pytest.mark.grid
def test_every_loader_refuses_a_composite_without_the_package_and_remote_code_leads_to_it(
    saved: Callable[[str], Path],
) -> None:
    folder = saved("llava").parent
    for name in composites.KINDS:
        saved(name)
        torch.save(composites.inputs(name), folder / f"{name}.pt")
    names = f"NAMES = {list(composites.KINDS)!r}\n"
    outcomes = run(names + _WITHOUT + _REMOTE, folder)
    assert outcomes
    assert not {name: kind for name, (kind, _) in outcomes.items() if kind == "loaded"}
    found = load_file(folder / "logits")
    for name in composites.KINDS:
        model = auto(composites.make(name)).from_pretrained(saved(name))
        assert torch.equal(found[name], logits(model, name)), name
