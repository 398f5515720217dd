"""Try every model type of the installed transformers: which work, and why the others do not.

    python benchmarks/survey.py                    # all types; goes on where it was stopped
    python benchmarks/survey.py llama clip         # these alone
    python benchmarks/survey.py --table            # only writes the page of what is stored

The results are in results/survey.json and in docs/survey.md, which says what each type must do.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import re
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, table, write
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

import hf_posenc
from hf_posenc.errors import PosencError
from hf_posenc.patches.architecture import of_config, of_model
from hf_posenc.patches.composites import part_to_convert
from hf_posenc.patches.patch import native_scheme
from hf_posenc.patches.surgery import is_of_scheme

PAGE = Path(__file__).parents[1] / "docs" / "survey.md"
# Of each kind, and of each way that encodings are built; the tests try these.
SAMPLE = (
    "granite", "cohere2", "muse_spark_text", "cosmos3_edge_text", "electra", "layoutlm", "xlm-roberta",
    "eurobert", "clip_text_model", "switch_transformers", "pop2piano", "bart", "opt", "dinov2", "siglip_vision_model",
    "clip_vision_model", "beit", "voxtral_encoder", "audio-spectrogram-transformer", "llava",
)  # fmt: skip
TOKENS, VOCABULARY = 21, 64
# Inputs of the encoder of an encoder-decoder.
ENCODED = ("input_ids", "input_features", "input_values")
# What a number of a config becomes, by a pattern of its name; the first that fits counts.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"type_vocab_size|num_labels|num_channels|in_channels|tubelet_size", None),
    (r"(.*_)?vocab_size(_.*)?|max_2d_position_embeddings", VOCABULARY),
    (r"max_position_embeddings|n_positions|max_(source|target)_positions|max_seq_len(gth)?|n_ctx", 66),
    (r"(sliding|attention)_window(_size)?|attention_chunk_size|local_attention", 8),
    (r"max_window_layers|num_dense_layers|first_k_dense_replace|num_kv_shared_layers", 0),
    (r"num_(encoder_|decoder_)?(hidden_)?layers|n_layers?|(encoder|decoder)_layers|depth|num_blocks", 2),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)", 2),
    (r"(num_)?(encoder_|decoder_)?(attention_heads|heads)|n_heads?|num_attn_heads", 4),
    (r"(attention_)?head_dim|d_kv|kv_channels|head_size|global_head_dim", 8),
    (r"qk_(rope|nope)_head_dim|v_head_dim|kv_lora_rank|q_lora_rank|qk_head_dim", 8),
    (r"num_experts_per_tok|moe_topk|top_k_experts|moe_k|num_selected_experts|num_experts_per_token", 2),
    (r"(num|n)_.*experts|moe_num_experts", 4),
    (r"n_group|topk_group", 1),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|ffn_size)", 48),
    (r".*_size_per_layer_input", 8),
    (r"hidden_size|d_model|n_embd|embed_dim|dim|embedding_size|d_embed|word_embed_proj_dim|projection_dim|out_hidden_size"
     r"|embedding_dim|encoder_hidden_size", 32),
    (r"image_size|img_size|crop_size", 16),
    (r"(.*_)?patch_size", 4),
)  # fmt: skip


class Skip(Exception):
    """A type that cannot be tried, with the reason."""


def small(kind: Any) -> Any:
    """Return a config of a class with small sizes."""
    try:
        default = kind()
    except Exception as error:
        raise Skip(f"its config has no defaults ({_line(error)})") from error
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name in kind.sub_configs:
            changes[name] = None if value is None else small(type(value))
        elif isinstance(value, float) and "drop" in name:
            changes[name] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            changes |= _smaller(name, value, changes)
    _fit(values, changes)
    try:
        return kind(**changes)
    except Exception as error:
        raise Skip(f"its config cannot be shrunk ({_line(error)})") from error


def _smaller(name: str, value: int, changes: dict[str, Any]) -> dict[str, int]:
    found = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
    if found is not None:
        return {name: min(found, value) if value > 0 else value}
    if name.endswith(("token_id", "token_index")) and value >= VOCABULARY:
        return {name: VOCABULARY - 1 - len([each for each in changes if each.startswith(name[:3])])}
    return {}


def _fit(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Add to the changes of a config what must fit several of its numbers, or is no number."""
    if values.get("layer_types"):
        changes["layer_types"] = (list(dict.fromkeys(values["layer_types"])) * 2)[:2]
    for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if isinstance(values.get(name), list) or (values.get(name) or 0) >= VOCABULARY:
            changes[name] = number
    for name, size in (("image_size", 16), ("patch_size", 4)):
        if isinstance(values.get(name), (list, tuple)):
            changes[name] = [size] * len(values[name])
    changes |= {name: 0.2 for name in ("initializer_range", "init_std") if name in values}
    changes |= {name: True for name in ("use_relative_position_bias",) if name in values}  # as published models have it
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        changes["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    if changes.get("num_key_value_heads") and values.get("num_key_value_heads") == values.get("num_attention_heads"):
        changes["num_key_value_heads"] = changes["num_attention_heads"]


# The likeliest head first.
_AUTO = [
    vars(modeling_auto)[f"AutoModel{head}"]
    for head in ("ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForImageTextToText", "")
]


def build(config: Any) -> PreTrainedModel:
    """Return a random model with the likeliest head."""
    heads = [auto._model_mapping for auto in _AUTO]
    if config.is_encoder_decoder:
        heads = heads[2:]
    elif "is_decoder" in vars(config) and type(config) in heads[1]:
        heads = heads[1:]  # encoders also have heads that generate
    kind = next((heads[type(config)] for heads in heads if type(config) in heads), None)
    if kind is None:
        try:
            kind = of_config(config).body
        except (PosencError, AttributeError) as error:
            raise Skip("no Auto class has a model for it") from error
    kind = kind[0] if isinstance(kind, tuple) else kind
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(copy.deepcopy(config)).parameters())
    if count > 2e7:
        raise Skip(f"it has {count:,} weights when it is shrunk")
    torch.manual_seed(0)
    model: PreTrainedModel = kind(config).eval().float()
    # Norms and biases start at numbers that hide mistakes. What is frozen is computed, and may not be saved.
    return moved(model, lambda name, weight: weight.requires_grad, 0.05, seed=1)


@torch.no_grad()
def moved(model: PreTrainedModel, which: Callable[[str, Tensor], bool], by: float, seed: int) -> PreTrainedModel:
    """Return a model whose weights are away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if which(name, weight):
            weight.copy_(weight.nan_to_num()).add_(by * torch.randn(weight.shape, generator=generator))
    return model


def inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the arguments of a forward."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(2)
    names = inspect.signature(model.forward).parameters

    def tokens(size: int) -> Tensor:
        return torch.randint(6, min(size, VOCABULARY) - 8, (2, TOKENS), generator=generator)

    if "input_ids" in names:
        ids = tokens(config.get_text_config(decoder=True).vocab_size)
        return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if config.is_encoder_decoder else {})
    if "input_features" in names and hasattr(config, "max_source_positions"):
        sound = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        decoded = {"decoder_input_ids": tokens(config.vocab_size)} if "decoder_input_ids" in names else {}
        if "input_features_mask" in names:
            decoded["input_features_mask"] = torch.ones(2, sound.shape[-1], dtype=torch.long)
        return {"input_features": sound} | decoded
    if "pixel_values" in names:
        size = getattr(config, "image_size", 16)
        shape = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), *shape, generator=generator)}
    if "input_values" in names and hasattr(config, "max_length"):
        return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins, generator=generator)}
    raise Skip(f"no inputs are known for a forward with {', '.join(list(names)[:3])}")


@torch.no_grad()
def output(model: PreTrainedModel, call: dict[str, Tensor]) -> Tensor:
    uncached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    found: Any = model(**call, **uncached)
    tensors = [value for value in found.values() if isinstance(value, Tensor) and value.ndim > 1]
    return tensors[0].float()


def apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-9))


class Broken(Exception):
    """A contract that does not hold, with what was measured."""


def hold(what: str, got: float, limit: float) -> float:
    if not got <= limit:
        raise Broken(f"{what}: differs by {got:.2g}, at most {limit:.0e} expected")
    return got


def cached(model: Any, call: dict[str, Tensor]) -> Tensor | None:
    """Return the output of the tokens in several forwards, with a cache; `None` if the model gives none."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    ids, found, cache = call[f"{prefix}input_ids"], [], None
    rest: dict[str, Any] = {key: value for key, value in call.items() if prefix and key != f"{prefix}input_ids"}
    if prefix:
        # As in generation: some encoders refuse `use_cache`, which a forward of both stacks passes on.
        rest["encoder_outputs"] = model.get_encoder()(**{key: rest.pop(key) for key in [*rest] if key in ENCODED})
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for start, stop in ((0, 9), (9, 10), (10, 14), (14, TOKENS)):
        given = {} if cache is None else {name: cache}
        with torch.no_grad():
            made = model(**rest, **{f"{prefix}input_ids": ids[:, start:stop]}, use_cache=True, **given)
        cache = made.get(name)
        if cache is None:
            return None
        found.append(made.logits.float())
    return torch.cat(found, dim=1)


def padded(model: PreTrainedModel, call: dict[str, Tensor], causal: bool) -> float | None:
    """Return how far a row with padding is from the row alone; `None` if the output is none of tokens."""
    config: Any = model.config
    ids = call["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, slice(0, 7) if causal else slice(TOKENS - 7, TOKENS)] = 0  # as generation and encoders have it
    pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    given = {**call, "attention_mask": mask}
    given["input_ids"] = ids.masked_fill(mask == 0, pad if isinstance(pad, int) and pad >= 0 else 0)
    got = output(model, given)
    if "attention_mask" not in inspect.signature(model.forward).parameters or got.ndim != 3 or got.shape[1] != TOKENS:
        return None
    real = mask[0] != 0
    alone = {name: value[:1] for name, value in call.items()}
    want = output(model, {**alone, "input_ids": ids[:1, real], "attention_mask": mask[:1, real]})
    return apart(got[:1] if config.is_encoder_decoder else got[:1, real], want)


def check_text(
    stock: PreTrainedModel, ours: PreTrainedModel, call: dict[str, Tensor], causal: bool
) -> dict[str, float]:
    """Check cache and padding of a patched model; return the largest differences."""
    found = {}
    # Some stock models do not take padding, and some see it: these may stay as they are.
    with contextlib.suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        apart_by, control = (padded(model, call, causal) for model in (ours, stock))
        if apart_by is not None:
            is_as_stock = control is None or apart_by <= 2 * control
            found["padded"] = apart_by if is_as_stock else hold("padded", apart_by, 1e-3)
    if (causal or ours.config.is_encoder_decoder) and ours.can_generate():
        got = cached(ours, call)
        if got is not None:
            found["cached"] = hold("cached", apart(got, output(ours, call)), 1e-3)
        elif cached(stock, call) is not None:
            raise Broken("cached: no cache, and the stock model has one")
    return found


def check(model: PreTrainedModel) -> dict[str, Any]:
    """Return what was measured on a stock model; raise for the first contract that does not hold."""
    call = inputs(model)
    before = output(model, call)
    if not before.isfinite().all():
        raise Skip("the random stock model computes no numbers")
    part: Any = part_to_convert(model)
    architecture, own = of_model(part), native_scheme(part)
    causal = all(architecture.geometry(body, 0).causal for body in architecture.stacks(part).values())
    found: dict[str, Any] = {"own": own or "kerple, native kept", "native": architecture.native}
    ours = copy.deepcopy(model)
    hf_posenc.patch(ours, own or "kerple", **({} if own else {"native": "keep"}))
    found["start"] = hold("start", apart(output(ours, call), before), 1e-4)
    for scheme in ("kerple", "fox" if causal else "fire"):
        ours = hf_posenc.patch(copy.deepcopy(model), scheme)
        whole = output(moved(ours, lambda name, _: is_of_scheme(name), 0.1, seed=3), call)
        if apart(whole, before) < 1e-6:
            raise Broken(f"{scheme} changes nothing")
        if "input_ids" in call or "decoder_input_ids" in call:
            for name, value in check_text(model, ours, call, causal).items():
                found[name] = max(value, found.get(name, 0.0))
        hold("removed", apart(output(_without(copy.deepcopy(ours)), call), whole), 0.0)
        with tempfile.TemporaryDirectory() as folder:
            ours.save_pretrained(folder)
            try:
                again = load(type(ours), folder)
            except PosencError as error:  # a model that was converted and cannot come back is no refusal
                raise Broken(f"saved: it does not load again ({_line(error)})") from error
            found["saved"] = hold("saved", apart(output(again, call), whole), 0.0)
            if scheme == "kerple" and loads(type(model), folder):
                raise Broken("locked: the stock class loads a converted checkpoint")
        found["unpatched"] = hold("unpatched", apart(output(hf_posenc.unpatch(ours), call), before), 0.0)
    return found


def _without(ours: PreTrainedModel) -> PreTrainedModel:
    """Return a model with other parameters of its own encoding, which should not count any more."""
    part = part_to_convert(ours)
    architecture = of_model(part)
    own = [x for body in architecture.stacks(part).values() for x in architecture.native_parameters(body)]
    return moved(ours, lambda _, weight: any(weight is each for each in own), 1.0, seed=4)


def load(kind: Any, folder: str) -> PreTrainedModel:
    """Load a model by the Auto class that has its class, if there is one."""
    config = type(transformers.AutoConfig.from_pretrained(folder))
    known = (auto for auto in _AUTO if config in auto._model_mapping and auto._model_mapping[config] is kind)
    return next(known, kind).from_pretrained(folder).eval()


def loads(stock: Any, folder: str) -> bool:
    """Whether a stock class takes a checkpoint."""
    try:
        stock.from_pretrained(folder)
    except Exception:  # of any kind: the code is not ours
        return False
    return True


def kind_of(model: PreTrainedModel) -> str:
    config, names = model.config, inspect.signature(model.forward).parameters
    if config.sub_configs:
        return "composite"
    if config.is_encoder_decoder and "decoder_input_ids" in names:
        return "encoder-decoder"
    if "input_ids" in names:
        return "decoder" if model.can_generate() else "encoder"
    return "vision" if "pixel_values" in names else "audio"


def survey(name: str) -> dict[str, Any]:
    """Return what came of a model type: `works`, `refused`, `broken`, or `not tried`, with the reason."""
    begin, found = time.perf_counter(), {"type": name, "kind": "unknown"}
    try:
        model = build(small(CONFIG_MAPPING[name]))
        found["kind"] = kind_of(model)
        if not any("attention" in type(module).__name__.lower() for module in model.modules()):
            raise Skip("it has no attention")
        output(model, inputs(model))
        model.config._name_or_path = ""
        found |= came(model)
    except Skip as error:
        found |= {"came": "not tried", "why": str(error)}
    except Exception as error:
        found |= {"came": "not tried", "why": f"the stock model does not run ({type(error).__name__}: {_line(error)})"}
    return found | {"seconds": round(time.perf_counter() - begin, 2)}


def came(model: PreTrainedModel) -> dict[str, Any]:
    """Return what came of a stock model that runs."""
    try:
        return {"came": "works", **check(model)}
    except Skip:
        raise
    except PosencError as error:
        return {"came": "refused", "why": _line(error)}
    except Broken as error:
        return {"came": "broken", "why": str(error)}
    except Exception as error:
        return {"came": "broken", "why": f"{type(error).__name__}: {_line(error)}"}


def _line(error: BaseException) -> str:
    # Where packages lie is this machine's business.
    text = str(error).replace(str(Path(transformers.__file__).parents[1]), "")
    return " ".join(text.split())[:300]


# -- the page ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--table", action="store_true", help="write the page of what is stored, and measure nothing")
    parser.add_argument("--again", action="store_true", help="try types again that are stored")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = RESULTS / "survey.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    rows = stored["types"] if stored["transformers"] == transformers.__version__ else {}
    names = given.types or [name for name in CONFIG_MAPPING if not name.startswith("hf_posenc")]
    for number, name in enumerate(() if given.table else names, 1):
        if name in rows and not (given.again or given.types):
            continue
        rows[name] = row = survey(name)
        sys.stderr.write(f"{number}/{len(names)} {name}: {row['came']} {row.get('why', '')}\n")
        stored = {"torch": torch.__version__, "transformers": transformers.__version__, "types": rows}
        write(path, dumped(stored))
    write(PAGE, text(stored))


def dumped(stored: dict[str, Any]) -> str:
    """Return the results as JSON, with a line for each type."""
    types = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(stored["types"].items()))
    head = json.dumps({**stored, "types": {}}, indent=1).removesuffix("{}\n}")
    return f"{head}{{\n{types}\n }}\n}}\n"


def text(stored: dict[str, Any]) -> str:
    """Return the page of the documentation."""
    rows = stored["types"]
    untried = Counter(row["came"] for row in rows.values())["not tried"]
    return f"""# Which models work

Made by `python benchmarks/survey.py`, with transformers {stored["transformers"]} and torch {stored["torch"]}, on the
CPU. Each model type is a random model, made from the defaults of its config with small sizes. It gets the scheme that
computes its own encoding (or `kerple` over it), `kerple`, and `fox` (if it is causal) or `fire`. It works if all of
these hold: it starts exact; tokens one by one with a cache give what they give at once; a row with padding gives what
it gives alone; the parameters of its own encoding change nothing once that is removed; a saved and loaded model
computes the same bit for bit; the stock class refuses it; `unpatch` gives back the stock model bit for bit. A composite
is a model of several, whose language model is converted; it reads text here.

Of {len(rows)} types, {untried} were not tried: no model of theirs has attention, or runs with small sizes and plain
inputs.

{tables(rows)}
"""


def tables(rows: dict[str, Any]) -> str:
    """Return the tables of the documentation."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    works, reasons = defaultdict(list), defaultdict(list)
    for name, row in rows.items():
        if row["came"] != "not tried":
            counts[row["kind"]][row["came"]] += 1
            (works[row["kind"]] if row["came"] == "works" else reasons[reason(row)]).append(f"`{name}`")
    every = [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]
    numbers = (
        [kind, count.total(), *(count[came] for came in ("works", "refused", "broken"))] for kind, count in every
    )
    joined = ([kind, ", ".join(works[kind])] for kind in sorted(counts))
    why = ([why, ", ".join(names)] for why, names in sorted(reasons.items(), key=lambda item: -len(item[1])))
    return "\n\n".join(
        [
            table(["kind", "tried", "work", "refused", "broken"], numbers),
            table(["kind", "types that work"], joined),
            table(["why not", "types"], why),
        ]
    )


def reason(row: dict[str, Any]) -> str:
    """Return a reason without the names of classes, which differ from type to type."""
    why = row["why"].replace("|", "/")
    why = re.sub(r"^Cannot patch [^:]*: ", "", why)
    why = re.sub(r", so (it is|they are) no family.*", "", why)
    return re.sub(r"'[^']*'|\b[A-Z]\w*[a-z]\w*[A-Z]\w*\b|\d+(\.\d+)?(e-?\d+)?", "…", why)[:160]


if __name__ == "__main__":
    main()
