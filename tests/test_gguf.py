"""Files for llama.cpp: what is added, by its own reader, and which files are refused. benchmarks/loaders.py runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import moved
from tiny import stock

import hf_posenc
from hf_posenc.errors import ExportError
from hf_posenc.patches.export.gguf import complete_gguf
from hf_posenc.patches.export.stock import export_stock

gguf = pytest.importorskip("gguf")


def llama(**changes: Any) -> Any:
    return stock("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=8, **changes)


def converted_by_llama_cpp(model: Any, path: Path, architecture: str = "llama", **fields: Any) -> Path:
    """Stands for the converter: some keys of each type, the last norm, and a tensor in half precision."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(len(model.base_model.layers))
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_token_list(["a", "é", "c"])
    writer.add_token_types([1, 1, 3])
    writer.add_tensor("output_norm.weight", model.base_model.norm.weight.detach().numpy())
    writer.add_tensor("token_embd.weight", model.get_input_embeddings().weight.detach().half().numpy())
    for name, value in fields.items():
        writer.add_tensor(name.replace("__", "."), torch.tensor(value).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: (tensor.data.tolist(), tensor.tensor_type) for tensor in reader.tensors}


def exported(folder: Path, scheme: str = "rope", **options: Any) -> Any:
    model = moved(hf_posenc.patch(llama(), scheme, **options), 0.2)
    export_stock(model, folder)
    return type(llama()).from_pretrained(folder)


def test_factors_are_added(tmp_path: Path) -> None:
    model = exported(tmp_path / "out", theta=50.0)
    source = converted_by_llama_cpp(model, tmp_path / "in.gguf")
    said = complete_gguf(model, source, tmp_path / "out.gguf")
    assert "rope_factors_short.weight and rope_factors_long.weight" in said
    (before, had), (after, has) = contents(source), contents(tmp_path / "out.gguf")
    assert after == before
    wanted = torch.tensor(model.config.rope_parameters["short_factor"]).tolist()
    added = {f"rope_factors_{name}.weight": (wanted, gguf.GGMLQuantizationType.F32) for name in ("short", "long")}
    assert has == {**had, **added}
    with pytest.raises(ExportError, match="has factors already"):
        complete_gguf(model, tmp_path / "out.gguf", tmp_path / "again.gguf")


@pytest.mark.parametrize("heads", [3, 4, 12])
def test_slopes_have_an_architecture(heads: int, tmp_path: Path) -> None:
    model = stock("llama", hidden_size=48, num_attention_heads=heads, num_key_value_heads=heads)
    source = converted_by_llama_cpp(model, tmp_path / "in.gguf", rope_freqs__weight=[1.0, 1.0])
    complete_gguf(hf_posenc.patch(model, "alibi"), source, tmp_path / "out.gguf")
    (before, had), (after, has) = contents(source), contents(tmp_path / "out.gguf")
    had.pop("rope_freqs.weight")
    assert has == had
    assert after.pop("general.architecture") == "refact"
    before.pop("general.architecture")
    assert after == {name.replace("llama.", "refact."): value for name, value in before.items()}


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "complete": (lambda folder: exported(folder, "nope"), {}, "'llama3', for which the file is complete"),
    "learned slopes": (lambda _: moved(hf_posenc.patch(llama(), "alibi", learned_slopes=True)), {}, "not the standard"),
    "kept": (lambda _: hf_posenc.patch(llama(), "alibi", native="keep"), {}, "rotation was kept"),
    "one layer": (lambda _: hf_posenc.patch(llama(), "alibi", layers=[1]), {}, "some layers are as they were"),
    "more": (lambda _: hf_posenc.patch(llama(), "alibi+gated_output"), {}, "does more than adding slopes"),
    "other bias": (lambda _: hf_posenc.patch(llama(), "kerple"), {}, "kerple .layer 0. changes the logits"),
    "activation": (lambda _: hf_posenc.patch(llama(hidden_act="gelu"), "alibi"), {}, "activation is 'gelu'"),
    "biases": (lambda _: hf_posenc.patch(llama(), "alibi"), {"blk__0__ffn_up__bias": [1.0]}, "feed-forward has biases"),
    "of another": (lambda _: hf_posenc.patch(llama(), "alibi"), {"architecture": "smollm3"}, "expected 'llama'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_compute_is_refused(case: str, tmp_path: Path) -> None:
    make, fields, message = REFUSED[case]
    model = make(tmp_path / "exported")
    source = converted_by_llama_cpp(model, tmp_path / "in.gguf", **fields)
    with pytest.raises(ExportError, match=message):
        complete_gguf(model, source, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("*out.gguf"))


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    model, other = hf_posenc.patch(llama(), "alibi"), llama()
    other.model.norm.weight.data += 0.1
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    for source, message in (
        (converted_by_llama_cpp(other, tmp_path / "other.gguf"), "of another model"),
        (tmp_path / "no.gguf", "cannot be read as a GGUF"),
        (tmp_path / "missing.gguf", "cannot be read as a GGUF"),
    ):
        with pytest.raises(ExportError, match=message):
            complete_gguf(model, source, tmp_path / "out.gguf")
