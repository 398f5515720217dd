"""Every wrong use has one clear error, and leaves the model exactly as it was.

Each case makes something, does something wrong with it, and names the error class and words of its message: what was
got, what was expected or what to do. If the thing made is a module, it is compared with itself before: the type of
every module, attributes, weights, frozen parameters, config and outputs.

docs/errors.md groups the errors by task and quotes what stays the same in their messages.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer, EncoderDecoderCache, QuantizedLayer
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_posenc
from hf_posenc import (
    ArchitectureError,
    AttentionBackendError,
    CacheError,
    CheckpointError,
    DirectionError,
    Geometry,
    LayerSelectionError,
    NotPatchedError,
    OptionError,
    PosencError,
    PositionError,
    RecipeError,
    ShapeError,
    UnknownSchemeError,
    WrappedModelError,
    registry,
)
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import architectures
from hf_posenc.patches.llama import PosencLlamaForCausalLM
from hf_posenc.recipes.schema.recipe import Recipe

DOCS = Path(__file__).resolve().parents[1] / "docs"
IDS = torch.arange(14).view(2, 7)

# PEFT's own.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning:transformers")


# -- models ------------------------------------------------------------------------------------------------------------


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()


def wide_llama() -> Any:
    return llama(head_dim=128)


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 48, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(shape | {"eos_token_id": 0} | changes))).eval()


def t5_config() -> T5Config:
    return T5Config(
        vocab_size=48,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )


def t5() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(t5_config()).eval()


def t5_encoder() -> Any:
    torch.manual_seed(0)
    return T5EncoderModel(t5_config()).eval()


def bert() -> Any:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    return BertModel(BertConfig(vocab_size=48, hidden_size=32, **shape)).eval()


def flex_llama() -> Any:
    model = llama()
    model.set_attn_implementation("flex_attention")
    return model


def patched(make: Callable[..., Any], scheme: str, **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        return hf_posenc.patch(make(), scheme, **options)

    return made


def twice_patched() -> Any:
    return hf_posenc.patch(hf_posenc.patch(llama(), "alibi", layers=[0, 1]), "fire", layers=[2])


def lora_wrapped() -> Any:
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], r=2)).eval()


def lora_base() -> Any:
    """The model inside a PEFT model, with the adapters in its layers."""
    return lora_wrapped().base_model.model


def lora_added() -> Any:
    """A model that was given adapters through the method of transformers."""
    model = llama()
    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=2))
    return model.eval()


def loopback() -> None:
    """Start a process group of this process alone, unless there is one."""
    if not torch.distributed.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module", autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def distributed() -> Any:
    loopback()
    return DistributedDataParallel(llama())


def sharded() -> Any:
    loopback()
    return fully_shard(llama(), mesh=init_device_mesh("cpu", (1,)))


def sharded_layer() -> Any:
    loopback()
    model = llama()
    fully_shard(model.model.layers[1], mesh=init_device_mesh("cpu", (1,)))
    return model


def compiled() -> Any:
    return torch.compile(llama(), backend="eager")


def compiled_in_place() -> Any:
    model = llama()
    model.compile(backend="eager")
    return model


def compiled_layer() -> Any:
    model = llama()
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


def layer_compiled_in_place() -> Any:
    model = llama()
    model.model.layers[1].compile(backend="eager")
    return model


class FusedAttention(LlamaAttention):
    """Stands for what quantisation libraries put where an attention was."""


class LocalLlama(LlamaForCausalLM):
    """A model class of the user's own."""


def local_llama() -> Any:
    torch.manual_seed(0)
    return LocalLlama(llama().config).eval()


def replaced_attention() -> Any:
    model = llama()
    model.model.layers[1].self_attn.__class__ = FusedAttention
    return model


def own_forward(choose: Callable[[Any], nn.Module]) -> Callable[[], Any]:
    """Stands for libraries that replace forwards on the instance."""

    def made() -> Any:
        model = llama()
        module: Any = choose(model)
        stock = module.forward
        module.forward = lambda *args, **kwargs: stock(*args, **kwargs)
        return model

    return made


def config_of_a_patched_one() -> Any:
    model = llama()
    other = LlamaForCausalLM(model.config)
    hf_posenc.patch(other.model, "fire")
    return model


def missing_projection() -> Any:
    model = llama()
    del model.model.layers[2].self_attn.q_proj
    return model


@contextlib.contextmanager
def causal_only() -> Iterator[str]:
    """Register a scheme for decoders, for a while."""
    name = "toy_causal"

    @hf_posenc.register_scheme(name, paper="test", family="absolute", directions=("causal",))
    class Toy(hf_posenc.Scheme):
        """Does nothing."""

    try:
        yield name
    finally:
        del registry._SCHEMES[name]


def on_encoder(model: Any, folder: Path) -> None:
    with causal_only() as name:
        hf_posenc.patch(model, name)


class QuantisedLayer(QuantizedLayer):
    """A quantised cache layer that needs no quantisation library."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor

    def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def with_cache(make: Callable[[], Cache], **more: Any) -> Callable[[Any, Path], None]:
    """Run a forward with a cache, which must be as before if that fails."""

    def act(model: Any, folder: Path) -> None:
        cache = make()
        before = [(type(layer), int(layer.get_seq_length())) for layer in cache.layers]
        try:
            model(IDS, past_key_values=cache, use_cache=True, **more)
        finally:
            assert [(type(layer), int(layer.get_seq_length())) for layer in cache.layers] == before

    return act


def mixed_cache() -> Cache:
    """A cache whose last layer is of a kind that cannot hold positions."""
    return Cache(layers=[DynamicLayer(), DynamicLayer(), DynamicIndexedLayer()])


def filled_cache() -> Cache:
    """A cache that an unpatched model has filled."""
    cache = DynamicCache()
    with torch.no_grad():
        llama()(IDS, past_key_values=cache, use_cache=True)
    return cache


def wrong_encoder_decoder_cache(model: Any, folder: Path) -> None:
    layers = [DynamicIndexedLayer() for _ in range(3)]
    cache = EncoderDecoderCache(Cache(layers=layers), DynamicCache())
    model(input_ids=IDS, decoder_input_ids=IDS, past_key_values=cache, use_cache=True)


def too_much_taken_back(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache)
    cache.crop(-3)


# -- operands for `attend` ---------------------------------------------------------------------------------------------

GEOMETRY = Geometry(heads=4, kv_heads=2, head_dim=8, hidden_size=32)


def attending(**changes: Any) -> Callable[[Any, Path], None]:
    """Call `attend` with good arguments but for some."""

    def act(model: Any, folder: Path) -> None:
        arguments: dict[str, Any] = {
            "scheme": hf_posenc.build("alibi", GEOMETRY),
            "q": torch.zeros(2, 4, 5, 8),
            "k": torch.zeros(2, 2, 5, 8),
            "v": torch.zeros(2, 2, 5, 8),
            "query_positions": torch.arange(5)[None],
            "key_positions": torch.arange(5)[None],
        }
        arguments |= changes
        operands = [arguments.pop(name) for name in ("scheme", "q", "k", "v")]
        hf_posenc.attend(*operands, **arguments)

    return act


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoint(spoil: Callable[[Path], object], *, scheme: str = "fire", **load: Any) -> Callable[[Any, Path], None]:
    """Save a converted model, spoil the files, load."""

    def act(model: Any, folder: Path) -> None:
        hf_posenc.patch(llama(), scheme).save_pretrained(folder)
        spoil(folder)
        AutoModelForCausalLM.from_pretrained(folder, **load)

    return act


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def cut_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5])


def cut_shard(folder: Path) -> None:
    hf_posenc.patch(llama(), "fire").save_pretrained(folder, max_shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def edit_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # A checkpoint of before there were digests, so that the record itself is looked at.
        data["posenc"].pop("digest", None)
        change(data)
        (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")

    return spoil


def edit_group(**changes: Any) -> Callable[[Path], None]:
    return edit_config(lambda data: data["posenc"]["groups"][0].update(changes))


def edit_part(**changes: Any) -> Callable[[Path], None]:
    return edit_config(lambda data: data["posenc"]["groups"][0]["stacks"]["decoder"].update(changes))


def pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def index_elsewhere(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {WEIGHT: "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model.safetensors").unlink()


def stock_weights(folder: Path) -> None:
    llama().save_pretrained(folder / "stock")
    os.replace(folder / "stock" / "model.safetensors", folder / "model.safetensors")


WEIGHT = "model.layers.1.self_attn.hf_posenc.mlp.0.weight"


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Something wrong.

    Attributes:
        call: Call as code.
        make: Makes what it is done to; `None` if there is nothing.
        act: Does it.
        error: The class of the error.
        words: Words that the message must hold.
    """

    call: str
    make: Callable[[], Any] | None
    act: Callable[[Any, Path], object]
    error: type[Exception]
    words: tuple[str, ...]


def patching(
    make: Callable[[], Any], scheme: Any, error: type[Exception], *words: str, of: str = "", **arguments: Any
) -> Case:
    """A case that calls `patch`."""
    given = "".join(f", {name}={value!r}" for name, value in arguments.items() if not callable(value))
    given += "".join(f", {name}=<function>" for name, value in arguments.items() if callable(value))
    subject = of or make.__name__.replace("_", " ")
    return Case(
        f"patch(<{subject}>, {scheme!r}{given})",
        make,
        lambda model, folder: hf_posenc.patch(model, scheme, **arguments),
        error,
        words,
    )


def loading(what: str, spoil: Callable[[Path], object], *words: str, **more: Any) -> Case:
    """A case that loads a spoilt checkpoint."""
    return Case(f"from_pretrained(DIR), {what}", None, checkpoint(spoil, **more), CheckpointError, words)


def adapting(what: str, spoil: Callable[[Path], object], *words: str, onto: Any = llama, **more: Any) -> Case:
    """A case that loads an adapter, spoilt or onto something else than it was trained on."""
    scheme, kind, error = more.get("scheme", "alibi"), more.get("kind", LoraConfig), more.get("error", CheckpointError)

    def load(model: Any, folder: Path) -> None:
        base = hf_posenc.patch(llama(), scheme)
        get_peft_model(base, kind(target_modules=["q_proj"], r=2)).save_pretrained(folder)
        spoil(folder)
        PeftModel.from_pretrained(model, folder)

    return Case(f"PeftModel.from_pretrained({what}", onto, load, error, words)


def other_llama() -> Any:
    model = llama()
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    return model


def as_saved(folder: Path) -> None:
    pass


def pickle_adapter(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()


def cut_adapter(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def edit_adapter(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        weights = load_file(file)
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        change(weights)
        save_file(weights, file, metadata)

    return edit


def scale_adapter(folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))


def reading(name: str, *words: str, given: Sequence[str] = ()) -> Case:
    """A case that reads a recipe."""
    call = f"Recipe.read({name!r}{f', {list(given)}' if given else ''})"
    return Case(call, None, lambda model, folder: Recipe.read(name, given), RecipeError, words)


def acting(
    call: str, make: Callable[[], Any] | None, act: Callable[[Any, Path], object], error: type[Exception], *words: str
) -> Case:
    """A case that does anything."""
    return Case(call, make, act, error, words)


def calling(what: str, make: Any, call: Callable[..., object], error: type[Exception], *words: str) -> Case:
    """A case that calls a model."""
    return Case(what, make, lambda model, folder: call(model), error, words)


class NotAScheme:
    pass


# fmt: off
def cases() -> list[Case]:
    four_d = torch.zeros(2, 1, 7, 6)
    ones = torch.ones_like(IDS)
    alibi, t5_alibi = patched(llama, "alibi"), patched(t5, "alibi")
    return [
        # Names of schemes.
        patching(llama, "alibbi", UnknownSchemeError, "no scheme 'alibbi'", "Did you mean 'alibi'", "kerple"),
        patching(llama, "xyzzy", UnknownSchemeError, "no scheme 'xyzzy'", "Known: alibi"),
        patching(llama, 7, UnknownSchemeError, "got 7", "Known: alibi"),
        acting("build('fier', geometry)", None, lambda m, f: hf_posenc.build("fier", GEOMETRY), UnknownSchemeError,
            "no scheme 'fier'", "Did you mean 'fire'"),
        acting("describe('sandwhich')", None, lambda m, f: hf_posenc.describe("sandwhich"), UnknownSchemeError,
            "no scheme 'sandwhich'", "Did you mean 'sandwich'"),
        acting("plan(<llama>, 'kerpel')", llama, lambda m, f: hf_posenc.plan(m, "kerpel"), UnknownSchemeError,
            "no scheme 'kerpel'", "Did you mean 'kerple'"),
        # Options: names and types.
        patching(llama, "fire", OptionError, "no option 'thresold'", "Did you mean 'threshold'", thresold=3.0),
        patching(llama, "nope", OptionError, "nope has no option 'base'", "Known: none", base=2.0),
        patching(llama, "alibi", OptionError, "learned_slopes=1", "expected bool", learned_slopes=1),
        patching(llama, "alibi", OptionError, "gate='yes'", "expected bool", gate="yes"),
        patching(llama, "kerple", OptionError, "kernel='cubic'", "expected 'log' or 'power'", kernel="cubic"),
        patching(llama, "fire", OptionError, "width=2.5", "expected int", width=2.5),
        patching(llama, "fire", OptionError, "width=10000", "int of at most 16,777,216", width=10**20),
        patching(llama, "fire", OptionError, "init_c=nan", "expected a finite number", init_c=float("nan")),
        patching(llama, "fire", OptionError, "threshold=1e+308", "from 1e-12 to 1e+12", threshold=1e308),
        patching(llama, "rope", OptionError, "theta=1000000", "from 1e-12 to 1e+12", theta=10**30),
        patching(llama, "xpos", OptionError, "scale_base=1e-320", "from 1e-12 to 1e+12", scale_base=1e-320),
        patching(llama, "fope", OptionError, "sigma=1000000", "from 1e-12 to 1e+12", sigma=10**30),
        patching(wide_llama, "cope", OptionError, "npos=16777216", "Choose smaller sizes", npos=2**24),
        acting("build('sinusoidal', <geometry of a model whose token embeddings hold NaN>)", None,
            lambda m, f: hf_posenc.build("sinusoidal", dataclasses.replace(GEOMETRY, embedding_rms=float("nan"))),
            OptionError, "scale=None", "token embeddings of the model hold NaN"),
        patching(llama, "sinusoidal", OptionError, "scale=inf", "finite number or None", scale=float("inf")),
        patching(llama, "t5", OptionError, "num_buckets='32'", "expected int or None", num_buckets="32"),
        patching(llama, "sandwich", OptionError, "freq_start=2", "expected 0 or 1", freq_start=2),
        # Options: ranges, for each scheme that has any.
        patching(llama, "fire", OptionError, "threshold=0", "a positive number", threshold=0),
        patching(llama, "fire", OptionError, "width=0", "at least 1", width=0),
        patching(llama, "tape", OptionError, "position_size=0", "at least 1", position_size=0),
        patching(llama, "cope", OptionError, "npos=1", "at least 2", npos=1),
        patching(llama, "cope", OptionError, "value_gates=True", "separate_keys", value_gates=True, separate_keys=True),
        patching(llama, "fox", OptionError, "horizon=8.0", "init='horizon'", horizon=8.0),
        patching(llama, "fox", OptionError, "decay_time_max=2.0", "at least", init="timescale", decay_time_min=4.0,
            decay_time_max=2.0),
        patching(llama, "fox_pro", OptionError, "gate_activation='silu'", "output_norm", gate_activation="silu"),
        patching(llama, "fox_pro", OptionError, "shift_history=0", "at least 1", shift_history=0),
        patching(llama, "stick_breaking", OptionError, "remainder='keep'", "'drop'", "'head_bias'", remainder="keep"),
        patching(llama, "shaw", OptionError, "max_distance=0", "at least 1", max_distance=0),
        patching(llama, "disentangled", OptionError, "p2c=False", "at least one", c2p=False, p2c=False),
        patching(llama, "disentangled", OptionError, "buckets=7", "an even number", buckets=7),
        patching(llama, "transformer_xl", OptionError, "clamp_len=0", "at least 1", clamp_len=0),
        patching(llama, "cape", OptionError, "base='shaw'", "'kerple'", base="shaw"),
        patching(llama, "cape", OptionError, "mlp_width=0", "at least 1", mlp_width=0),
        patching(t5, "fox_pro", DirectionError, "causal attention", "stacks='decoder'"),
        patching(t5, "stick_breaking", DirectionError, "causal attention", "stacks='decoder'"),
        patching(llama, "fire_s", OptionError, "threshold=-1.0", "a positive number", threshold=-1.0),
        patching(llama, "rope", OptionError, "theta=0.5", "above 1", theta=0.5),
        patching(llama, "rope", OptionError, "rotary_dim=7", "even number from 2 to head_dim = 8", rotary_dim=7),
        patching(llama, "rope", OptionError, "rotary_dim=16", "even number from 2 to head_dim = 8", rotary_dim=16),
        patching(lambda: gpt2(n_embd=20), "rope", OptionError, "rotary_dim=5", "even number", "pairs of channels",
            of="gpt2, head_dim 5"),
        patching(llama, "t5", OptionError, "num_buckets=3", "even number", num_buckets=3),
        patching(t5, "t5", OptionError, "num_buckets=2", "at least 4", num_buckets=2),
        patching(llama, "t5", OptionError, "max_distance=4", "more than 16", max_distance=4),
        patching(llama, "t5", OptionError, "init='native'", "'normal' or 'zero'", init="native"),
        patching(llama, "t5_clipped", OptionError, "max_distance=0", "at least 1", max_distance=0),
        patching(t5, "t5_clipped", OptionError, "init='native'", "max_distance", init="native", max_distance=3),
        patching(llama, "sandwich", OptionError, "dim=3", "an even number", dim=3),
        patching(llama, "sandwich", OptionError, "base=1", "above 1", base=1),
        patching(llama, "sinusoidal", OptionError, "base=1.0", "above 1", base=1.0),
        patching(llama, "learned", OptionError, "num_positions=0", "at least 1", num_positions=0),
        patching(llama, "learned", OptionError, "init='native'", "no learned table", init="native"),
        # Recipes; more in tests/test_recipe_files.py.
        reading("lama-fire", "no recipe 'lama-fire'", "Did you mean 'llama-fire'"),
        reading("mine.yaml", "There is no file mine.yaml"),
        reading("llama-fire", "'training.stpes'", "Did you mean 'steps'", given=["training.stpes=500"]),
        reading("llama-fire", "called 'learning_rate' here", given=["training.lr=1e-3"]),
        reading("llama-fire", "expected KEY=VALUE", given=["training.steps"]),
        reading("llama-fire", "training.steps is given twice", given=["training.steps=5", "training.steps=6"]),
        reading("llama-fire", "training.steps is 0", "expected at least 1", given=["training.steps=0"]),
        reading("llama-fire", "expected at most 1", given=["distillation.share=1.5"]),
        reading("llama-fire", "is {'more': 5}", "expected a whole number", given=["training.steps.more=5"]),
        reading("llama-fire", "no scheme 'fier'", "Did you mean 'fire'", given=["conversion.scheme=fier"]),
        reading("llama-fire", "Did you mean 'threshold'", given=["conversion.options.thresold=32"]),
        reading("llama-alibi", "alibi has no weights", given=["conversion.options={}"]),
        reading("llama-fire", "without adapter.kind: lora", given=["adapter.four_bit=true"]),
        reading("llama-fire", "a divisor of", given=["training.micro_batch_size=3"]),
        reading("llama-fire", "Give data.held_out", given=["data.source=wikitext", "data.streaming=true"]),
        # Geometry and `attend`.
        Case(
            "build('alibi', {'heads': 4})",
            None,
            lambda m, f: hf_posenc.build("alibi", {"heads": 4}),  # type: ignore[arg-type]
            OptionError,
            ("expected a Geometry", "{'heads': 4}"),
        ),
        acting("Geometry(heads=0, ...)", None, lambda m, f: Geometry(heads=0, kv_heads=1, head_dim=8, hidden_size=8),
            OptionError, "heads=0", "positive integer"),
        acting("Geometry(scale=nan, ...)", None,
            lambda m, f: Geometry(heads=4, kv_heads=2, head_dim=8, hidden_size=32, scale=float("nan")), OptionError,
            "scale=nan", "a positive number"),
        acting("Geometry(heads=4, kv_heads=3, ...)", None,
            lambda m, f: Geometry(heads=4, kv_heads=3, head_dim=8, hidden_size=32), OptionError, "kv_heads=3",
            "multiple of kv_heads"),
        acting("attend('alibi', q, k, v, ...)", None, attending(scheme="alibi"), OptionError, "'alibi'",
            "hf_posenc.build"),
        acting("attend(..., k as a list)", None, attending(k=[[0.0]]), ShapeError, "k of type list", "a torch.Tensor"),
        acting("attend(..., q of 3 dimensions)", None, attending(q=torch.zeros(4, 5, 8)), ShapeError,
            "q of shape [4, 5, 8]", "[batch, heads, length, head_dim]"),
        acting("attend(..., k with as many heads as q)", None, attending(k=torch.zeros(2, 4, 5, 8)), ShapeError,
            "k of shape [2, 4, 5, 8]", "expects [2, 2, 5, 8]"),
        acting("attend(..., key_positions of another length)", None, attending(key_positions=torch.arange(4)[None]),
            ShapeError, "key_positions of shape [1, 4]", "[2 or 1, 5]"),
        acting("attend(..., float query_positions)", None, attending(query_positions=torch.zeros(1, 5)), ShapeError,
            "query_positions of dtype torch.float32", "expected integers"),
        acting("attend(..., mask of another length)", None, attending(mask=torch.ones(2, 4, dtype=torch.bool)),
            ShapeError, "(2, 1, 1, 4)", "[2, 4, 5, 5]"),
        acting("attend(..., float mask of 2 dimensions)", None, attending(mask=torch.ones(2, 5)), ShapeError,
            "dtype torch.float32", "bool or integer padding mask"),
        acting("build('fox_pro', <geometry of an encoder>)", None,
            lambda model, folder: hf_posenc.build("fox_pro", dataclasses.replace(GEOMETRY, causal=False)),
            DirectionError, "defined for causal attention", "causal=False"),
        acting("attend(<fox>, ...) without hidden", None, attending(scheme=hf_posenc.build("fox", GEOMETRY)),
            ShapeError, "fox reads the hidden states", "hidden="),
        acting("attend(<fox>, ...) with the hidden states of the queries alone", None,
            attending(scheme=hf_posenc.build("fox", GEOMETRY), q=torch.zeros(2, 4, 1, 8),
                query_positions=torch.tensor([[4]]), hidden=torch.zeros(2, 1, 32)),
            ShapeError, "fox reads the hidden states of the keys' tokens"),
        acting("attend(..., hidden=<two rows for five keys>)", None, attending(hidden=torch.zeros(2, 2, 32)),
            ShapeError, "hidden of shape [2, 2, 32]", "[2, 5, 32]"),
        acting("attend(<disentangled, share_att_key>, ...) without host", None,
            attending(scheme=hf_posenc.build("disentangled", GEOMETRY, share_att_key=True)), ShapeError,
            "share_att_key=True", "host="),
        acting("attend(..., executor='flash')", None, attending(executor="flash"), OptionError, "'flash'",
            "Available: dense, blocks"),
        acting("attend(..., executor='blocks', need_weights=True)", None,
            attending(executor="blocks", need_weights=True), OptionError, "need_weights=True", "executor='blocks'"),
        # Models that cannot be patched.
        patching(bert, "alibi", ArchitectureError, "BertModel", "Supported: gpt2", "LlamaForCausalLM"),
        patching(lambda: nn.Linear(2, 2), "alibi", ArchitectureError, "Linear", "Supported: gpt2", of="a Linear"),
        patching(lambda: "gpt2", "alibi", ArchitectureError, "transformers model", "str: 'gpt2'", of="a string"),
        patching(lambda: LlamaForCausalLM, "alibi", ArchitectureError, "transformers model", "got type", of="a class"),
        patching(local_llama, "alibi", ArchitectureError, "LocalLlama", "Supported: gpt2"),
        acting("plan(BertConfig(), 'alibi')", None, lambda m, f: hf_posenc.plan(BertConfig(), "alibi"),
            ArchitectureError, "'bert'", "Supported: gpt2"),
        # Models that something else has hold of.
        patching(lora_wrapped, "alibi", WrappedModelError, "PEFT adapters", "Patch the plain model first"),
        patching(lora_base, "alibi", WrappedModelError, "PEFT adapters", "Patch the plain model first"),
        patching(lora_added, "alibi", WrappedModelError, "PEFT adapters", "Patch the plain model first"),
        patching(distributed, "alibi", WrappedModelError, "inside DistributedDataParallel", "then wrap it"),
        patching(lambda: nn.DataParallel(llama()), "alibi", WrappedModelError, "DataParallel", of="nn.DataParallel"),
        patching(sharded, "alibi", WrappedModelError, "sharded with FSDP", "then wrap it"),
        patching(sharded_layer, "alibi", WrappedModelError, "sharded with FSDP", "then wrap it"),
        patching(compiled, "alibi", WrappedModelError, "torch.compile", "then wrap it"),
        patching(compiled_in_place, "alibi", WrappedModelError, "torch.compile", "then wrap it"),
        patching(compiled_layer, "alibi", WrappedModelError, "model.layers.1 is compiled", "then wrap it"),
        patching(layer_compiled_in_place, "alibi", WrappedModelError, "model.layers.1 is compiled", "then wrap it"),
        acting("unpatch(<lora wrapped>)",
            lambda: get_peft_model(alibi(), LoraConfig(target_modules=["q_proj"], r=2)).eval(),
            lambda m, f: hf_posenc.unpatch(m), WrappedModelError, "PEFT adapters"),
        # The inside of a model alone.
        acting("unpatch(<alibi llama>.model)", alibi, lambda m, f: hf_posenc.unpatch(m.model), ArchitectureError,
            "the LlamaModel inside of a patched LlamaForCausalLM", "Pass the whole model", "copy.deepcopy"),
        acting("patch(<copy of an alibi llama>.model, 'fire')", lambda: copy.deepcopy(alibi()),
            lambda m, f: hf_posenc.patch(m.model, "fire"), ArchitectureError,
            "the LlamaModel inside of a patched LlamaForCausalLM"),
        acting("set_strength(<alibi t5, native kept>.decoder)", patched(t5, "alibi", native="keep"),
            lambda m, f: hf_posenc.set_strength(m.decoder), ArchitectureError, "a T5Stack", "Pass the whole model"),
        acting("patch(<t5>.encoder, 'alibi')", t5, lambda m, f: hf_posenc.patch(m.encoder, "alibi"),
            ArchitectureError, "a T5Stack", "stacks="),
        patching(config_of_a_patched_one, "alibi", ArchitectureError, "names schemes for 3 layers, and 0 have one",
            "copy.deepcopy(config)", of="llama, made from the config of one whose inside was patched"),
        # Models that were altered.
        patching(replaced_attention, "alibi", ArchitectureError, "Layer 1 of the decoder", "FusedAttention",
            "patch it first"),
        patching(own_forward(lambda m: m.model.layers[1].self_attn), "alibi", ArchitectureError,
            "LlamaAttention has a forward of its own", "Patch with hf_posenc first",
            of="llama, attention with another forward"),
        patching(own_forward(lambda m: m.model), "alibi", ArchitectureError, "LlamaModel has a forward of its own",
            "Patch with hf_posenc first", of="llama, body with another forward"),
        patching(missing_projection, "alibi", ArchitectureError, "Layer 2 of the decoder", "no q_proj",
            "patch it first"),
        # Directions.
        acting("patch(<t5>, <scheme for decoders only>)", t5, on_encoder, DirectionError,
            "defined for causal attention", "the encoder is bidirectional", "stacks='decoder'"),
        acting("patch(<t5 encoder>, <scheme for decoders only>)", t5_encoder, on_encoder, DirectionError,
            "defined for causal attention", "the encoder is bidirectional", "Choose another scheme"),
        # Layers and stacks.
        patching(llama, "alibi", LayerSelectionError, "layers=[]", "matches none of the 3 layers", layers=[]),
        patching(llama, "alibi", LayerSelectionError, "matches none", layers=lambda index: False),
        patching(llama, "alibi", LayerSelectionError, "matches none", layers=slice(5, 9)),
        patching(llama, "alibi", LayerSelectionError, "matches none", layers="every:4"),
        patching(llama, "alibi", LayerSelectionError, "3 is no layer", "0 to 2", layers=[0, 3]),
        patching(llama, "alibi", LayerSelectionError, "-4 is no layer", "0 to 2", layers=[-4]),
        patching(llama, "alibi", LayerSelectionError, "names a layer twice", layers=[2, -1]),
        patching(llama, "alibi", LayerSelectionError, "'every:0'", "'every:N'", layers="every:0"),
        patching(llama, "alibi", LayerSelectionError, "'each:2'", "'every:N'", layers="each:2"),
        patching(llama, "alibi", LayerSelectionError, "'every:²'", "'every:N'", layers="every:²"),
        patching(llama, "alibi", LayerSelectionError, "layers=1", "a list of indices", layers=1),
        patching(llama, "alibi", LayerSelectionError, "'1' is no layer", "0 to 2", layers=["1"]),
        patching(llama, "alibi", LayerSelectionError, "True is no layer", "0 to 2", layers=[True]),
        patching(llama, "alibi", LayerSelectionError, "slice(None, None, 0)", "'every:N'", layers=slice(None, None, 0)),
        patching(llama, "alibi", LayerSelectionError, "slice('a', None", "'every:N'", layers=slice("a", None)),
        patching(twice_patched, "kerple", LayerSelectionError,
            "Layer 1 of the decoder already has the scheme 'alibi'", "unpatch first", layers=[1, 2],
            of="llama, alibi on 0 and 1, fire on 2"),
        patching(llama, "learned", LayerSelectionError, "takes all 3 layers, got 1", "Leave out layers=", layers=[0]),
        patching(t5, "alibi", LayerSelectionError, "'middle'", "encoder, decoder", stacks="middle"),
        patching(llama, "alibi", LayerSelectionError, "'encoder'", "has the stacks decoder", stacks="encoder"),
        patching(t5, "alibi", LayerSelectionError, "stacks=[]", "encoder, decoder", stacks=[]),
        patching(t5, "alibi", LayerSelectionError, "stacks=3", "encoder, decoder", stacks=3),
        patching(patched(gpt2, "alibi", layers=[0], native="keep"), "fire", LayerSelectionError,
            "native='keep', got native='remove'", "Use the same, or unpatch first", layers=[1],
            of="gpt2, alibi on 0 with native kept"),
        patching(llama, "alibi", OptionError, "native='drop'", "'remove'", "'keep'", native="drop"),
        patching(llama, "alibi", OptionError, "native=True", "'remove'", native=True),
        # Attention implementations.
        patching(flex_llama, "alibi", AttentionBackendError, '"flex_attention"', "set_attn_implementation('sdpa')"),
        calling("<alibi llama>.set_attn_implementation('flex_attention')", alibi,
            lambda m: m.set_attn_implementation("flex_attention"), AttentionBackendError, '"flex_attention"',
            "'eager'"),
        acting("from_pretrained(DIR, attn_implementation='flex_attention')", None,
            checkpoint(lambda folder: None, attn_implementation="flex_attention"), AttentionBackendError,
            '"flex_attention"', "'eager'"),
        calling("<alibi llama>.config._attn_implementation = 'flex_attention', then a forward", alibi,
            forward_with_flex, AttentionBackendError, '"flex_attention"', "'eager'"),
        # Masks.
        calling("<alibi llama>(4-D mask)", alibi, lambda m: m(IDS, attention_mask=four_d), ShapeError, "(2, 1, 7, 6)",
            "2-D"),
        calling("<nope llama>(4-D mask)", patched(llama, "nope"), lambda m: m(IDS, attention_mask=four_d), ShapeError,
            "(2, 1, 7, 6)", "[2, 4, 7, 7]"),
        calling("<alibi gpt2>(4-D mask)", patched(gpt2, "alibi"), lambda m: m(IDS, attention_mask=four_d), ShapeError,
            "(2, 1, 7, 6)", "[2, 4, 7, 7]"),
        calling("<alibi llama>(2-D mask, too short)", alibi, lambda m: m(IDS, attention_mask=ones[:, :5]),
            PositionError, "attention_mask of shape [2, 5]", "expected [2, 7]"),
        calling("<alibi llama>(2-D mask, one row)", alibi, lambda m: m(IDS, attention_mask=ones[:1]), PositionError,
            "attention_mask of shape [1, 7]", "expected [2, 7]"),
        calling("<alibi llama>(2-D mask too short, position_ids)", alibi,
            lambda m: m(IDS, attention_mask=ones[:, :5], position_ids=torch.arange(7)[None]), PositionError,
            "attention_mask of shape [2, 5]", "expected [2, 7]"),
        calling("<alibi t5>(2-D mask, too short)", t5_alibi,
            lambda m: m(input_ids=IDS, decoder_input_ids=IDS, attention_mask=ones[:, :5]), PositionError,
            "attention_mask of shape [2, 5]", "expected [2, 7]"),
        calling("<fox_pro llama, shift_history=2>, then cache.crop(-3)", patched(llama, "fox_pro", shift_history=2),
            too_much_taken_back, CacheError, "Cannot take 3 tokens back", "shift_history"),
        # Strengths and adapters.
        calling("set_strength(<alibi llama, native kept>, native=2)", patched(llama, "alibi", native="keep"),
            lambda m: hf_posenc.set_strength(m, native=2), OptionError, "native=2", "from 0 to 1"),
        calling("set_strength(<alibi llama>, scheme=0.5)", alibi, lambda m: hf_posenc.set_strength(m, scheme=0.5),
            OptionError, "nothing to hand over from", "native='keep'"),
        calling("drop_native(<llama>)", llama, hf_posenc.drop_native, NotPatchedError,
            "drop_native: the LlamaForCausalLM is not patched"),
        calling("get_peft_model(<llama>, PosencLoraConfig())", llama,
            lambda m: get_peft_model(m, hf_posenc.PosencLoraConfig(target_modules=["q_proj"])), NotPatchedError,
            "no scheme to carry", "hf_posenc.patch(model, ...) first"),
        # Adapters.
        adapting("<llama>, DIR), one tensor missing", edit_adapter(dict.popitem), "misses", "save the adapter again"),
        adapting("<llama>, DIR), weights cut short", cut_adapter, "adapter_model.safetensors", "truncated",
            "Download or"),
        adapting("<llama>, DIR), pickled", pickle_adapter, "adapter_model.bin is pickled", "Save the adapter again"),
        adapting("<llama>, DIR), scale edited", scale_adapter, "adapter_config.json is not the one", "Restore both"),
        adapting("<another llama>, DIR)", as_saved, "other weights", "any_base=True", onto=other_llama),
        adapting("<nope llama>, DIR of alibi)", as_saved, "'alibi'", "stock", onto=patched(llama, "nope"),
            error=OptionError),
        adapting("<llama>, DIR of fire)", as_saved, "does not hold", "Load it", scheme="fire", error=OptionError),
        # Positions.
        calling("<alibi llama>(position_ids of another length)", alibi,
            lambda m: m(IDS, position_ids=torch.arange(5)[None]), PositionError, "position_ids of shape [1, 5]",
            "[2 or 1, 7]"),
        calling("<alibi gpt2>(position_ids of one dimension)", patched(gpt2, "alibi"),
            lambda m: m(IDS, position_ids=torch.arange(7)), PositionError, "position_ids of shape [7]",
            "[2 or 1, 7]"),
        calling("<alibi llama>(float position_ids)", alibi, lambda m: m(IDS, position_ids=torch.arange(7.0)[None]),
            PositionError, "dtype torch.float32", "expected int64"),
        calling("<alibi llama>(negative position_ids)", alibi,
            lambda m: m(IDS, position_ids=torch.arange(7)[None] - 1), PositionError, "position -1", "count from 0"),
        calling("<learned gpt2, 8 positions>(9 tokens)", patched(gpt2, "learned", num_positions=8),
            lambda m: m(torch.arange(9)[None]), PositionError, "Position 8 is beyond the learned table of 8",
            "larger num_positions"),
        calling("<learned llama, 8 positions>.generate(7 tokens, max_new_tokens=4)",
            patched(llama, "learned", num_positions=8),
            lambda m: m.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0),
            PositionError, "Position 8 is beyond the learned table of 8", "larger num_positions"),
        calling("<alibi gpt2, native kept>(65 tokens)", patched(gpt2, "alibi", native="keep"),
            lambda m: m(torch.zeros(1, 65, dtype=torch.long)), PositionError,
            "Position 64 is beyond the model's own table of 64 positions", "native='remove'"),
        calling("explain(<alibi gpt2, native kept>)", patched(gpt2, "alibi", native="keep"), hf_posenc.explain,
            PositionError, "length=256 and one more token", "pass a smaller length"),
        # Caches.
        acting("<alibi llama>(sliding cache)", alibi,
            with_cache(lambda: Cache(layers=[DynamicIndexedLayer() for _ in range(3)])),
            CacheError, "DynamicIndexedLayer", "dynamic or a static cache"),
        acting("<alibi llama>(quantised cache)", alibi,
            with_cache(lambda: Cache(layers=[QuantisedLayer() for _ in range(3)])), CacheError, "QuantisedLayer",
            "dynamic or a static cache"),
        acting("<alibi llama>(cache that makes quantised layers)", alibi,
            with_cache(lambda: Cache(layer_class_to_replicate=QuantisedLayer)), CacheError, "QuantisedLayer",
            "dynamic or a static cache"),
        acting("<alibi llama>(cache with one sliding layer, the last)", alibi, with_cache(mixed_cache), CacheError,
            "DynamicIndexedLayer", "dynamic or a static cache"),
        acting("<alibi t5>(sliding cache)", t5_alibi, wrong_encoder_decoder_cache, CacheError,
            "DynamicIndexedLayer", "dynamic or a static cache"),
        acting("<alibi llama>(cache filled by an unpatched model)", alibi, with_cache(filled_cache), CacheError,
            "holds 7 tokens without their positions", "Start with an empty cache"),
        calling("get_peft_model(<alibi llama>, PrefixTuningConfig(num_virtual_tokens=2))(ids)", alibi, prefix_tuning,
            CacheError, "holds 2 tokens", "PEFT's prefix tuning", "use prompt tuning"),
        # Calls on what is not there.
        calling("<alibi llama>.model.layers[0].self_attn(hidden)", alibi,
            lambda m: m.model.layers[0].self_attn(torch.zeros(1, 2, 32)), NotPatchedError,
            "PosencLlamaAttention was called without the positions", "Call the model"),
        calling("<alibi t5>.decoder.block[0].layer[0].SelfAttention(hidden)", t5_alibi,
            lambda m: m.decoder.block[0].layer[0].SelfAttention(torch.zeros(1, 2, 32)), NotPatchedError,
            "PosencT5Attention was called without the positions", "Call the model"),
        calling("unpatch(<llama>)", llama, hf_posenc.unpatch, NotPatchedError, "LlamaForCausalLM is not patched"),
        calling("unpatch(<alibi llama>) twice", lambda: hf_posenc.unpatch(alibi()), hf_posenc.unpatch,
            NotPatchedError, "LlamaForCausalLM is not patched"),
        calling("unpatch('gpt2')", lambda: "gpt2", hf_posenc.unpatch, ArchitectureError, "str: 'gpt2'"),
        calling("verify(<llama>)", llama, hf_posenc.verify, NotPatchedError, "is not patched", "Call hf_posenc.patch"),
        calling("with disabled(<llama>)", llama, enter_disabled, NotPatchedError, "no patched model", "Patch it first"),
        calling("with disabled('gpt2')", lambda: "gpt2", enter_disabled, NotPatchedError, "no patched model", "str"),
        calling("verify(<alibi llama whose layer another library took over>)", taken_over, hf_posenc.verify,
            NotPatchedError, "did not run", "Patch the plain model before"),
        # Checkpoints.
        loading("weights cut short", cut_weights, "model.safetensors", "truncated",
            "Download or save the checkpoint again"),
        loading("weights of 5 bytes", cut_header, "model.safetensors", "truncated",
            "Download or save the checkpoint again"),
        loading("one shard cut short", cut_shard_only, "model-00002-of-", "truncated", "Download or save"),
        loading("format_version 99", edit_config(lambda data: data["posenc"].update(format_version=99)),
            "posenc format 99", "formats up to 1", "pip install -U hf-posenc"),
        loading("format_version '1'", edit_config(lambda d: d["posenc"].update(format_version="1")), "damaged",
            "convert"),
        loading("no groups in the record", edit_config(lambda data: data["posenc"].pop("groups")), "'posenc'",
            "damaged"),
        loading("groups of a wrong type", edit_config(lambda data: data["posenc"].update(groups=[5])), "damaged",
            "Restore"),
        loading("record that is a list", edit_config(lambda data: data.update(posenc=[1])), "damaged", "Restore"),
        loading("no record", edit_config(lambda data: data.pop("posenc")), "'posenc'", "Restore config.json"),
        loading("scheme of another version", edit_group(scheme="fire_two"), "'fire_two'", "does not know",
            "Did you mean 'fire", "Upgrade hf-posenc"),
        loading("scheme that is no string", edit_group(scheme=5), "damaged", "Restore"),
        loading("native of another version", edit_group(native="half"), "damaged", "'half'"),
        loading("stack that the model lacks", edit_group(stacks={"middle": {"layers": [0], "options": {}}}),
            "the 'middle' of the model", "Restore"),
        loading("option that is not there", edit_part(options={"thresold": 3.0}), "no option 'thresold'",
            "config.json"),
        loading("option out of range", edit_part(options={"width": 0}), "width=0", "config.json"),
        loading("layer beyond the model", edit_part(layers=[0, 1, 7]), "layer 7 of the decoder", "has 3 layers",
            "Restore"),
        loading("negative layer", edit_part(layers=[0, 1, -1]), "damaged", "-1", "Restore"),
        loading("layer that is no number", edit_part(layers=[0, 1, "2"]), "damaged", "Restore"),
        loading("two schemes on one layer",
            edit_config(lambda d: d["posenc"]["groups"].append(d["posenc"]["groups"][0] | {"id": 1})), "damaged",
            "Restore"),
        loading("weights of a scheme missing", edit_weights(lambda tensors: tensors.pop(WEIGHT)), "misses weights",
            WEIGHT, "save it again"),
        loading("option of another value", edit_part(options={"threshold": 3.0}), "another record", "Restore"),
        loading("pickled weights", pickled_weights, "pytorch_model.bin is no safetensors file", "save_pretrained"),
        loading("index that leads elsewhere", index_elsewhere, "'../model.safetensors'", "outside of the checkpoint"),
        loading("weights of the stock model", stock_weights, "misses weights", "and 18 more", "unconverted model"),
        loading("weights of a scheme too many",
            edit_weights(lambda tensors: tensors.update({WEIGHT.replace("mlp", "extra"): torch.zeros(3)})),
            "unknown weights", WEIGHT.replace("mlp", "extra"), "do not belong together"),
        loading("weights of a scheme misshapen",
            edit_weights(lambda tensors: tensors.update({WEIGHT: torch.zeros(7, 1)})), "misshapen weights", WEIGHT,
            "do not belong together"),
        loading("weights of a scheme misshapen, ignore_mismatched_sizes=True",
            edit_weights(lambda tensors: tensors.update({WEIGHT: torch.zeros(7, 1)})), "misshapen weights", WEIGHT,
            "do not belong together", ignore_mismatched_sizes=True),
        acting("PosencLlamaForCausalLM.from_pretrained(<stock checkpoint>)", None, stock_checkpoint, CheckpointError,
            "not that of a converted model", "Load it with LlamaForCausalLM", "hf_posenc.patch"),
        acting("AutoModelForCausalLM.from_config(config of a newer format)", None, newer_config, CheckpointError,
            "posenc format 99", "pip install -U hf-posenc"),
        # Registering.
        acting("@register_scheme('alibi', ...)", None,
            lambda m, f: hf_posenc.register_scheme("alibi", paper="x", family="additive")(
                type("Mine", (hf_posenc.Scheme,), {})),
            OptionError, "'alibi'", "taken by hf_posenc.schemes.alibi.ALiBi", "another name"),
        Case(
            "@register_scheme('mine', ...) on another class",
            None,
            lambda m, f: hf_posenc.register_scheme("mine", paper="x", family="additive")(NotAScheme),  # type: ignore
            OptionError,
            ("subclass of hf_posenc.Scheme", "NotAScheme"),
        ),
        acting("register_architecture(<llama>) again", None,
            lambda m, f: hf_posenc.register_architecture(type(architectures()["llama"])()), OptionError, "'llama'",
            "taken", "another name"),
        Case(
            "register_architecture(LlamaForCausalLM)",
            None,
            lambda m, f: hf_posenc.register_architecture(LlamaForCausalLM),  # type: ignore[arg-type]
            OptionError,
            ("instance of Architecture", "LlamaForCausalLM"),
        ),
    ]
# fmt: on


def cut_shard_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    cut_shard(folder)


def forward_with_flex(model: Any) -> None:
    model.config._attn_implementation = "flex_attention"
    try:
        model(IDS)
    finally:
        model.config._attn_implementation = "sdpa"


def prefix_tuning(model: Any) -> None:
    frozen = {parameter for parameter in model.parameters() if parameter.requires_grad}
    try:
        get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))(IDS)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def enter_disabled(model: Any) -> None:
    with hf_posenc.disabled(model):
        pass


def taken_over() -> Any:
    """A patched model in which another library has replaced the forward of one layer."""
    model = hf_posenc.patch(llama(), "fire")
    layer: Any = model.model.layers[1]
    layer.forward = lambda hidden, *args, **kwargs: hidden
    return model


def stock_checkpoint(model: Any, folder: Path) -> None:
    llama().save_pretrained(folder)
    PosencLlamaForCausalLM.from_pretrained(folder)


def newer_config(model: Any, folder: Path) -> None:
    config = copy.deepcopy(hf_posenc.patch(llama(), "alibi").config)
    config.posenc["format_version"] = 99
    AutoModelForCausalLM.from_config(config)


CASES = cases()


# -- what must stay ----------------------------------------------------------------------------------------------------


def outputs(model: nn.Module) -> torch.Tensor | type[Exception]:
    if isinstance(model, nn.Linear):
        arguments: dict[str, Any] = {"input": torch.ones(1, model.in_features)}
    else:
        arguments = {"input_ids": IDS}
        if isinstance(model, T5ForConditionalGeneration):
            arguments["decoder_input_ids"] = IDS
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation == "flex_attention":
        config._attn_implementation = "sdpa"  # That one would be compiled first.
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            result = model(**arguments)
    except AttributeError as error:
        return type(error)  # The model was made so.
    finally:
        if implementation == "flex_attention":
            config._attn_implementation = implementation
    return result if isinstance(result, torch.Tensor) else result[0]


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a failed call must not change, but for tensors."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {
        "types": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": {name: set(vars(module)) for name, module in model.named_modules()},
        "keys": list(model.state_dict()),
        "trained": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "identities": {name: id(parameter) for name, parameter in model.named_parameters()},
        "configs": [(type(config), config.to_json_string(), sorted(vars(config))) for config in configs],
    }


@contextlib.contextmanager
def unchanged(model: object) -> Iterator[None]:
    """Check that a block leaves a model as it was."""
    if not isinstance(model, nn.Module):
        yield
        return
    result = outputs(model)
    before = state(model)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    yield
    after = state(model)
    for what, value in before.items():
        assert after[what] == value, what
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    again = outputs(model)
    same = torch.equal(result, again) if isinstance(result, torch.Tensor) else result is again
    assert same, "outputs"


@pytest.mark.parametrize("case", CASES, ids=[case.call for case in CASES])
def test_wrong_use_has_one_clear_error_and_changes_nothing(case: Case, tmp_path: Path) -> None:
    model = None if case.make is None else case.make()
    with unchanged(model), pytest.raises(PosencError) as caught:
        case.act(model, tmp_path)
    message = str(caught.value)
    assert type(caught.value) is case.error, message
    for words in case.words:
        assert words in message, message
    assert "\n" not in message


def test_there_are_enough_cases_each_once() -> None:
    calls = [case.call for case in CASES]
    assert len(set(calls)) == len(calls) >= 45


# -- failures in the middle --------------------------------------------------------------------------------------------


class Failure(Exception):
    pass


def failing_at(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function that does the same, but raises when it is called for the count-th time."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise Failure
        return function(*args, **kwargs)

    return wrapped


STEPS_OF_PATCH = [("swap", 5), ("attach", 1), ("_placed", 1), ("_placed", 2), ("drop_shared", 1), ("settle_native", 1)]


@pytest.mark.parametrize(("step", "count"), STEPS_OF_PATCH, ids=str)
@pytest.mark.parametrize("make", [llama, gpt2, t5, twice_patched])
@pytest.mark.parametrize("scheme", ["fire", "learned"])
def test_patch_that_fails_half_way_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], scheme: str, step: str, count: int
) -> None:
    model = make()
    if (step, count) == ("_placed", 2) and scheme == "learned" and make is not t5:
        count = 1  # One shared scheme for the one stack.
    if step == "swap" and make is twice_patched:
        count = 1
    with unchanged(model), monkeypatch.context() as patcher:
        patcher.setattr(surgery, step, failing_at(getattr(surgery, step), count))
        with pytest.raises(Failure):
            hf_posenc.patch(model, scheme)
    # And nothing is left that would stand in the way of the next attempt.
    hf_posenc.verify(hf_posenc.patch(model, scheme))


def test_patch_that_fails_after_the_first_stack_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = t5()

    def attach(undo: Any, architecture: Any, whole: Any, group: Any, built: Any) -> None:
        stock(undo, architecture, whole, group, {"encoder": built["encoder"]})
        assert surgery.OWN in whole.encoder.block[0].layer[0].SelfAttention._modules
        raise Failure

    stock = surgery.attach
    monkeypatch.setattr(surgery, "attach", attach)
    with unchanged(model), pytest.raises(Failure):
        hf_posenc.patch(model, "fire")


STEPS_OF_UNPATCH = [("release", 1), ("drop_shared", 1), ("settle_native", 1), ("restore", 2), ("restore", 5)]


@pytest.mark.parametrize(("step", "count"), STEPS_OF_UNPATCH, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        patched(llama, "fire"),
        patched(gpt2, "learned"),
        patched(t5, "fire_s"),
        twice_patched,
    ],
    ids=["llama", "gpt2", "t5", "two groups"],
)
def test_unpatch_that_fails_half_way_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], step: str, count: int
) -> None:
    model = make()
    with unchanged(model), monkeypatch.context() as patcher:
        patcher.setattr(surgery, step, failing_at(getattr(surgery, step), count))
        with pytest.raises(Failure):
            hf_posenc.unpatch(model)
    hf_posenc.verify(model)
    assert not surgery.is_patched(hf_posenc.unpatch(model))


@pytest.mark.parametrize("make", [llama, gpt2, t5])
def test_patching_again_leaves_nothing_of_the_first_scheme(make: Callable[[], Any]) -> None:
    once = hf_posenc.patch(make(), "fire")
    again = hf_posenc.patch(hf_posenc.patch(make(), "kerple"), "fire")
    assert list(again.state_dict()) == list(once.state_dict())
    hf_posenc.verify(again)
    back = hf_posenc.patch(again, "kerple")
    assert list(back.state_dict()) == list(hf_posenc.patch(make(), "kerple").state_dict())
    hf_posenc.verify(back)


def test_loading_that_fails_leaves_the_classes_usable(tmp_path: Path) -> None:
    spoilt, good = tmp_path / "spoilt", tmp_path / "good"
    with pytest.raises(CheckpointError):
        checkpoint(edit_weights(lambda tensors: tensors.pop(WEIGHT)))(None, spoilt)
    model = hf_posenc.patch(llama(), "fire")
    model.save_pretrained(good)
    assert AutoConfig.from_pretrained(good).model_type == "hf_posenc_llama"
    assert torch.equal(outputs(model), outputs(AutoModelForCausalLM.from_pretrained(good)))  # type: ignore[arg-type]


# -- the pages ---------------------------------------------------------------------------------------------------------


def message(case: Case, folder: Path) -> str:
    with pytest.raises(PosencError) as caught:
        case.act(None if case.make is None else case.make(), folder)
    return str(caught.value).replace(str(folder), "DIR")


def test_the_pages_quote_messages_that_there_are(tmp_path: Path) -> None:
    """What docs/errors.md has in its left columns, and docs/loading.md in blocks; dots stand for anything."""
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "errors.md").read_text(encoding="utf-8"), flags=re.M)
    blocks = re.findall(r"^```text\n(.*?)^```", (DOCS / "loading.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(rows) > 50
    assert lines
    messages = []
    for number, case in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        messages.append(message(case, tmp_path / str(number)))
    text = "\n".join(messages)
    patterns = {quote: ".*".join(map(re.escape, quote.split("..."))) for quote in rows + lines}
    assert [quote for quote, pattern in patterns.items() if not re.search(pattern, text)] == []
