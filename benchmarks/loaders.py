"""Load a converted checkpoint of each scheme with each program that people use: equal, or refused with which words.

    python benchmarks/loaders.py                     # all loaders that this environment has
    python benchmarks/loaders.py vllm --cases alibi  # some loaders, some cases
    python benchmarks/loaders.py --altered           # each folder twice more: a number of config.json changed, a tensor
                                                     # renamed
    python benchmarks/loaders.py --table             # only writes the page of what is stored

The results are in results/loaders.json and docs/loaders.md; what other environments stored stays. The files
serve/*.txt install the environments. llama.cpp needs two folders: LLAMA_CPP, its source, for the converter, and
NODE_LLAMA, with node-llama-cpp.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

# Before transformers reads them; and for vLLM, whose numbers of memory nodes say nothing in a container.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{tempfile.gettempdir()}/loaders-{os.getpid()}"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import common
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, LlamaConfig

RESULTS = common.RESULTS / "loaders.json"
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "loaders.md"
WITHOUT = "no plugin"
LENGTHS = (5, 33, 70)
CONFIG = {"vocab_size": 259, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 4, "pad_token_id": 0}
LLAMA = {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 1024, "bos_token_id": 1}
# Besides each scheme as it is: hybrids, kept encodings, learned slopes, layers that stay as they were.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nope, every fourth layer": ("nope", {"layers": slice(3, None, 4)}),
    "nope, layer 1": ("nope", {"layers": [1]}),
    "rope, other frequencies": ("rope", {"theta": 500.0, "rotary_dim": 8}),
    "alibi, learned": ("alibi", {"learned_slopes": True, "shared": False}),
    "alibi, gated, native kept": ("alibi", {"native": "keep", "gate": True}),
    "alibi, layers 0 and 2": ("alibi", {"layers": [0, 2]}),
    "fire, layer 1, native kept": ("fire", {"layers": [1], "native": "keep"}),
    "rope+attention_sinks": ("rope+attention_sinks", {}),
    "log_temperature, native kept": ("log_temperature", {"native": "keep"}),
    "gated_output, native kept": ("gated_output", {"native": "keep"}),
    "alibi+first_key, fast pairs kept": ("alibi+first_key", {"native": "fast"}),
}
# What is done to folders after they are saved.
ALTERATIONS = ("a number in config.json", "a tensor")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def make_all(folder: Path, cases: list[str], tokens: int, source: str | None) -> None:
    """Write a folder for each case, with the checkpoints of a decoder and an encoder, and with what they compute."""
    for number, case in enumerate(cases):
        place = folder / f"{number:03}"
        for kind in ("encoder", "decoder")[source is not None :]:
            make(place, kind, case, tokens, source)
        (place / "case").write_text(case)


def make(folder: Path, kind: str, case: str, tokens: int, source: str | None) -> None:
    """Write a checkpoint and what it computes, or why there is none."""
    import hf_posenc

    case, _, altered = case.partition("; ")
    scheme, options = VARIANTS.get(case, (case, {}))
    torch.manual_seed(1)
    if source is not None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    elif kind == "decoder":
        model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG, **LLAMA, eos_token_id=None))
    else:
        model = AutoModel.from_config(BertConfig(**CONFIG, num_attention_heads=3))
    for parameter in model.base_model.parameters() if source is None else ():
        parameter.data *= 3 if parameter.ndim > 1 else 1
    if isinstance(layers := options.get("layers"), slice):
        options = {"layers": range(model.config.num_hidden_layers)[layers]}
    place = folder / kind
    place.mkdir(parents=True)
    try:
        hf_posenc.patch(model.eval(), scheme, **options)
    except hf_posenc.PosencError as error:
        (place / "refused").write_text(str(error))
        return
    for name, parameter in model.named_parameters():
        if "hf_posenc" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(place)
    (tokenizer() if source is None else AutoTokenizer.from_pretrained(source)).save_pretrained(place)
    size = model.config.vocab_size
    ids = drawn(2, 40, size, seed=0)
    with torch.no_grad():
        found = {"ids": ids, "output": model(ids)[0]}
    if kind == "decoder":
        found["prompts"] = [drawn(1, length, size, seed=length)[0].tolist() for length in LENGTHS]
        found["tokens"] = [greedy(model, row, tokens) for row in found["prompts"]]
    torch.save(found, folder / f"{kind}.pt")
    if altered:
        alter(place, altered)


def drawn(rows: int, length: int, size: int, seed: int) -> Tensor:
    """Return random tokens."""
    return torch.randint(3, size, (rows, length), generator=torch.Generator().manual_seed(seed))


def alter(place: Path, what: str) -> None:
    """Change a saved checkpoint so that it is another function, or none."""
    if what == ALTERATIONS[0]:
        text = (place / "config.json").read_text()
        (place / "config.json").write_text(re.sub(r'(?<=_norm_eps": )[^,]+', "0.5", text))
        return
    file = place / "model.safetensors"
    with safe_open(file, "pt") as stored:
        tensors, metadata = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()  # noqa: SIM118
    # One of the scheme, if it has any.
    name = max(tensors, key=lambda name: "hf_posenc" in name)
    tensors[f"{name}_"] = tensors.pop(name)
    save_file(tensors, file, metadata)


def tokenizer() -> Any:
    """Return a tokenizer of bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    given = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()


# -- loaders -----------------------------------------------------------------------------------------------------------


def same(model: Any, wanted: dict[str, Any], close: bool = False) -> str:
    with torch.no_grad():
        return compared(model(wanted["ids"])[0], wanted["output"], close)


def compared(found: Tensor, wanted: Tensor, close: bool = True) -> str:
    is_same = torch.allclose(found, wanted, atol=2e-4, rtol=1e-3) if close else torch.equal(found, wanted)
    return "equal" if is_same else f"fault: differs by {(found - wanted).abs().max():.1e}"


def same_tokens(found: list[list[int]], wanted: dict[str, Any]) -> str:
    equal = sum(one == other for one, other in zip(found, wanted["tokens"], strict=True))
    return "equal" if equal == len(found) else f"fault: {equal} of {len(found)} texts are equal"


def in_transformers(place: Path, wanted: dict[str, Any]) -> str:
    model = AutoModelForCausalLM.from_pretrained(place)
    if (found := same(model, wanted)) != "equal":
        return found
    return same_tokens([greedy(model, row, len(wanted["tokens"][0])) for row in wanted["prompts"]], wanted)


def without_plugin(place: Path, wanted: dict[str, Any]) -> str:
    for kind in (transformers.LlamaForCausalLM, transformers.LlamaModel):
        with contextlib.suppress(Exception):
            kind.from_pretrained(place)
            return f"fault: {kind.__name__} loads it"
    AutoModelForCausalLM.from_pretrained(place)
    return "fault: an Auto class loads it"


def remote_code(place: Path, wanted: dict[str, Any]) -> str:
    return same(AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True), wanted)


def exported(place: Path, wanted: dict[str, Any]) -> str:
    """A stock checkpoint, which the stock classes load."""
    out, _ = _export(place)
    model = AutoModelForCausalLM.from_pretrained(out)
    return same(model, wanted, close=True) if "Posenc" not in type(model).__name__ else "fault: no stock class"


def _export(place: Path) -> tuple[Path, str]:
    from hf_posenc.patches.export.stock import export_stock

    out = Path(tempfile.mkdtemp(dir=place)) / "exported"
    report = str(export_stock(AutoModelForCausalLM.from_pretrained(place), out))
    AutoTokenizer.from_pretrained(place).save_pretrained(out)
    return out, report


def in_peft(place: Path, wanted: dict[str, Any]) -> str:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(place), LoraConfig(r=2, init_lora_weights=False))
    model.save_pretrained(place / "adapter")
    with torch.no_grad():
        moved = model.eval()(wanted["ids"]).logits
    if torch.equal(moved, wanted["output"]):
        return "fault: the adapter changes nothing"
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place), place / "adapter")
    return same(again.eval(), {**wanted, "output": moved})


def in_trl(place: Path, wanted: dict[str, Any]) -> str:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_dict({"text": ["The quick brown fox jumps over the lazy dog."] * 8})
    settings = SFTConfig(
        str(place / "trl"), max_steps=1, max_length=32, packing=True, report_to="none", bf16=False, learning_rate=0.0,
        use_cpu=True, model_init_kwargs={"dtype": "float32"}, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = SFTTrainer(str(place), settings, train_dataset=texts)
    trainer.train()
    trainer.save_model(str(place / "trl"))
    return same(AutoModelForCausalLM.from_pretrained(place / "trl"), wanted)


def in_lm_eval(place: Path, wanted: dict[str, Any]) -> str:
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(str(place), device="cpu", dtype="float32", batch_size=2)
    rows = wanted["ids"].tolist()
    requests = [(("", str(cut)), row[:cut], row[cut:]) for row, cut in zip(rows, (11, 30), strict=True)]
    found = [answer[0] for answer in harness._loglikelihood_tokens(requests, disable_tqdm=True)]
    chances = wanted["output"][:, :-1].log_softmax(-1).gather(2, wanted["ids"][:, 1:, None])[..., 0]
    return compared(torch.tensor(found), torch.stack([chances[0, 10:].sum(), chances[1, 29:].sum()]))


def in_vllm(place: Path, wanted: dict[str, Any]) -> str:
    from vllm import LLM, SamplingParams

    server = LLM(
        str(place), dtype="float32", max_model_len=512, skip_tokenizer_init=True, enforce_eager=True,
        enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=64, max_num_seqs=4,
    )  # fmt: skip
    count = len(wanted["tokens"][0])
    settings = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": row} for row in wanted["prompts"]]
    # The second time, prompts are in the cache.
    rounds = [server.generate(prompts, settings, use_tqdm=False) for _ in range(2)]
    found = [same_tokens([list(one.outputs[0].token_ids) for one in each], wanted) for each in rounds]
    return next((cell for cell in found if cell != "equal"), "equal")


def in_llama_cpp(place: Path, wanted: dict[str, Any]) -> str:
    import hf_posenc
    from hf_posenc.errors import ExportError
    from hf_posenc.patches.export.gguf import complete_gguf

    model, complete = AutoModelForCausalLM.from_pretrained(place), True
    try:
        out, report = _export(place)
        if "llama.cpp reads no such list" in report:
            raise hf_posenc.PosencError("llama.cpp reads no such list of layers (a note of the export)")
        complete, model = "hf-posenc gguf" in report, AutoModelForCausalLM.from_pretrained(out)
    except ExportError:
        # What has slopes may do without: `complete_gguf` says so.
        out = place / "plain"
        hf_posenc.unpatch(AutoModelForCausalLM.from_pretrained(place)).save_pretrained(out)
        AutoTokenizer.from_pretrained(place).save_pretrained(out)
    file = place / "model.gguf"
    source = os.environ["LLAMA_CPP"]
    _run([sys.executable, f"{source}/convert_hf_to_gguf.py", str(out), "--outtype", "f32", "--outfile", str(file)])
    if complete:
        complete_gguf(model, file, place / "complete.gguf")
        file = place / "complete.gguf"
    job = {"file": str(file), "prompts": wanted["prompts"], "count": len(wanted["tokens"][0])}
    said = _run(["node", str(HERE / "serve" / "llama_cpp.mjs"), json.dumps(job)], cwd=os.environ["NODE_LLAMA"])
    return same_tokens(json.loads(said.splitlines()[-1]), wanted)


def in_mlx(place: Path, wanted: dict[str, Any]) -> str:
    """Prompts are read in pieces of 32 tokens."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    from hf_posenc.patches.export.mlx import export_mlx

    export_mlx(AutoModelForCausalLM.from_pretrained(place), place / "mlx")
    model, _ = load_model(place / "mlx", trust_remote_code=True)
    given = {"model": model, "max_tokens": len(wanted["tokens"][0]), "prefill_step_size": 32}
    steps = [generate_step(mx.array(row), **given) for row in wanted["prompts"]]
    return same_tokens([[int(token) for token, _ in each] for each in steps], wanted)


def _run(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    return done.stdout


def in_onnxruntime(place: Path, wanted: dict[str, Any]) -> str:
    """Prefill and step with a cache, as one graph."""
    import onnxruntime

    from hf_posenc.patches.export.onnx import export_onnx

    file = place / "model.onnx"
    export_onnx(AutoModelForCausalLM.from_pretrained(place), file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": torch.float32, "tensor(double)": torch.float64}
    empty = {
        given.name: torch.zeros([1 if n == 0 else x if isinstance(x, int) else 0 for n, x in enumerate(given.shape)],
                                dtype=kinds.get(given.type, torch.int64)).numpy()
        for given in session.get_inputs()[2:]
    }  # fmt: skip
    found = []
    for prompt in wanted["prompts"]:
        past, row, fresh = empty, list(prompt), [prompt]
        for _ in wanted["tokens"][0]:
            call = {"input_ids": fresh, "attention_mask": [[1] * len(row)]}
            logits, *held = session.run(None, {n: torch.tensor(x).numpy() for n, x in call.items()} | past)
            past, fresh = dict(zip(past, held, strict=True)), [[int(logits[0, -1].argmax())]]
            row += fresh[0]
        found.append(row[len(prompt) :])
    return same_tokens(found, wanted)


def in_sentence_transformers(place: Path, wanted: dict[str, Any]) -> str:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    inner = Transformer(str(place))
    SentenceTransformer(modules=[inner, Pooling(CONFIG["hidden_size"])], device="cpu").save(str(place / "sentences"))
    again = SentenceTransformer(str(place / "sentences"), device="cpu")
    texts = ["one", "a longer text, of several words"]
    batch = AutoTokenizer.from_pretrained(place)(texts, return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        hidden, mask = AutoModel.from_pretrained(place)(**batch)[0], batch["attention_mask"][..., None]
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    return compared(again.encode(texts, convert_to_tensor=True), pooled)


# By name: the module that it needs, and the checkpoint.
LOADERS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], str]]] = {
    "transformers": ("transformers", in_transformers),
    WITHOUT: ("transformers", without_plugin),
    "remote code": ("transformers", remote_code),
    "export": ("transformers", exported),
    "PEFT": ("peft", in_peft),
    "TRL": ("trl", in_trl),
    "lm-eval": ("lm_eval", in_lm_eval),
    "vllm": ("vllm", in_vllm),
    "llama.cpp": ("gguf", in_llama_cpp),
    "mlx-lm": ("mlx_lm", in_mlx),
    "onnxruntime": ("onnxruntime", in_onnxruntime),
    "sentence-transformers": ("sentence_transformers", in_sentence_transformers),
}


# -- the table ---------------------------------------------------------------------------------------------------------


def try_all(loader: str, folder: Path, source: str | None) -> None:
    """Record what a loader does with each checkpoint of a folder."""
    column = loader if source is None else f"{loader}, {Path(source).name}"
    if loader == WITHOUT:
        sys.modules["hf_posenc"] = None  # type: ignore[assignment]  # no import finds it then
    elif loader != "remote code":
        importlib.import_module("hf_posenc")
    importlib.import_module(LOADERS[loader][0])
    for place in sorted(folder.iterdir()):
        try:
            # vLLM changes classes of models for its first model in a process; any loader may crash.
            cell = common.in_a_process(cell_of, loader, place, start="fork")
        except BrokenProcessPool:
            cell = "fault: its process ended"
        store((place / "case").read_text(), column, cell)


def store(case: str, loader: str, cell: str) -> None:
    sys.stderr.write(f"{case} | {loader}: {cell}\n")
    stored = read()  # Another environment may write at the same time.
    if "; " in case:
        # The words of altered folders are few, and the same for all.
        stored["altered"].setdefault(case, {})[loader] = "refused" if cell.startswith("refused") else cell
    else:
        stored["cells"].setdefault(case, {})[loader] = cell
    stored["versions"][loader] = ", ".join(dict.fromkeys(map(installed, (loader.partition(",")[0], "transformers"))))
    common.write(RESULTS, json.dumps(stored, indent=1) + "\n")


def read() -> dict[str, Any]:
    empty: dict[str, Any] = {"versions": {}, "cells": {}, "altered": {}}
    return empty | (json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {})


def cell_of(loader: str, place: Path) -> str:
    for stream in (1, 2):  # they write much
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    kind = "encoder" if loader.startswith("sentence") else "decoder"
    refused = place / kind / "refused"
    if refused.exists():
        return f"refused: {brief(refused.read_text(), place)}"
    try:
        return LOADERS[loader][1](place / kind, torch.load(place / f"{kind}.pt"))
    except Exception as error:
        return said(error, place)


def said(error: Exception, place: Path) -> str:
    """Return the words of a refusal. Other errors are faults: they are no answer to what was asked."""
    chain: list[BaseException] = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    for each in chain:
        kinds = {kind.__name__ for kind in type(each).__mro__}
        words = re.search("hf[_-]posenc|cannot serve this model|contains custom code", str(each))
        if words or "PosencError" in kinds:
            lines = str(each).splitlines()
            return f"refused: {brief(next((x for x in lines if 'cannot serve' in x), lines[0]), place)}"
    return f"fault: {type(error).__name__}: {brief(str(error), place)}"


def brief(text: str, place: Path) -> str:
    words = re.sub(r"\S*" + re.escape(str(place)) + r"[^\s'\"]*", "…", " ".join(text.split()))
    return words if len(words) <= 110 else words[:110].rsplit(" ", 1)[0] + " …"


def scheme_names() -> list[str]:
    return list(importlib.import_module("hf_posenc").schemes())


def installed(loader: str) -> str:
    if loader == "llama.cpp":
        package = Path(os.environ["NODE_LLAMA"]) / "node_modules" / "node-llama-cpp" / "package.json"
        return f"node-llama-cpp {json.loads(package.read_text())['version']}"
    name = packages_distributions()[LOADERS[loader][0]][0]
    return f"{name} {version(name)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("loaders", nargs="*", help=f"of {', '.join(LOADERS)}; by default all that are installed")
    parser.add_argument("--cases", nargs="*", help="schemes and hybrids; all by default")
    parser.add_argument("--tokens", type=int, default=16, help="greedy tokens to compare, after each prompt")
    parser.add_argument("--altered", action="store_true", help="change the folders before they are loaded")
    parser.add_argument("--model", help="a folder with a Llama to convert, instead of the small random one")
    parser.add_argument("--table", action="store_true", help="write the page of what is stored, and load nothing")
    given = parser.parse_args()
    without = () if "LLAMA_CPP" in os.environ else ("llama.cpp",)
    has = [name for name, (module, _) in LOADERS.items() if name not in without and importlib.util.find_spec(module)]
    if missing := set(given.loaders) - set(has):
        parser.error(f"not installed, or no loader: {', '.join(sorted(missing))}; here are {', '.join(has)}")
    if not given.table:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        # This process imports transformers, and no more: each loader begins with a copy of it.
        cases = given.cases or [*common.in_a_process(scheme_names, start="fork"), *VARIANTS]
        if given.altered:
            cases = [f"{case}; {what}" for case in cases for what in ALTERATIONS]
        with tempfile.TemporaryDirectory() as folder:
            common.in_a_process(make_all, Path(folder), cases, given.tokens, given.model, start="fork")
            for loader in given.loaders or has:
                common.in_a_process(try_all, loader, Path(folder), given.model, start="fork")
    common.write(PAGE, text(read()))


# -- the page ----------------------------------------------------------------------------------------------------------

TEXT = """# Which loader takes which scheme

Made by `python benchmarks/loaders.py`, on the CPU. Each row is a small random Llama that was converted (of
sentence-transformers, a BERT), its scheme moved from its start, and saved; each column a program that loads the folder
in a process of its own. *Equal*: the same logits, bit for bit in transformers, PEFT and TRL, up to rounding elsewhere,
or in servers the same greedy tokens after three prompts. *Refused*: an error, in the words below.
Nothing else may occur; what is empty was not run yet. *No plugin* is a process in which hf_posenc cannot be imported;
*export* a stock class with what `hf-posenc export` wrote, which llama.cpp reads, too. Columns with the name of a model
convert that model. *Altered* folders have another number in config.json, or a tensor of another name (one of the
scheme, if it has any).
"""


def text(stored: dict[str, Any]) -> str:
    """Return the page of the documentation."""
    places, notes = [*LOADERS], {}
    loaders = sorted(stored["versions"], key=lambda name: places.index(name.partition(",")[0]))

    def cell(words: str) -> str:
        word, _, why = words.partition(": ")
        if word not in ("refused", "fault"):
            return words
        why = re.sub(r"'[^']*'|\b\w+ \(layer \d+\)|layer \d+|\d+", "…", why).replace("|", "/")
        return f"{word} [{notes.setdefault(why, len(notes) + 1)}]"

    def counts(loader: str) -> Iterator[int]:
        for rows in (stored["cells"], stored["altered"]):
            words = Counter(row[loader].partition(":")[0] for row in rows.values() if loader in row)
            yield from (words[word] for word in ("equal", "refused", "fault"))

    cells = [[case, *(cell(row.get(name, "")) for name in loaders)] for case, row in stored["cells"].items()]
    totals = ["equal", "refused", "faults"]
    tables = (
        common.table(["scheme", *loaders], cells),
        common.table(
            ["loader", "version", *totals, "altered: equal", *totals[1:]],
            ([name, stored["versions"][name], *counts(name)] for name in loaders),
        ),
        common.table(["", "in which words"], ([number, why] for why, number in notes.items())),
    )
    return TEXT + "".join(f"\n{each}\n" for each in tables)


if __name__ == "__main__":
    try:
        main()
    finally:
        shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)
