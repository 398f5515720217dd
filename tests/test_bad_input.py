"""Every wrong use has one clear error, and leaves the model exactly as it was.

The table holds, by class of error: what makes a subject, what is done to it, and facts of the message in their order
(what was got, what is expected, what to do), separated by dots. A model is compared with itself before: types of
all modules, attributes, weights, frozen parameters, config and outputs.

More wrong options and operands are in tests/test_options.py, recipes in tests/test_recipe_files.py, files and records
in tests/test_checkpoints_checked.py, adapters in tests/test_adapters.py.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import CACHE, checkpoint
from peft import LoraConfig, PrefixTuningConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache, JambaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, QuantizedLayer

import hf_posenc
from hf_posenc import Geometry, PosencError, build, errors, patch
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import architectures

DOCS = Path(__file__).resolve().parents[1] / "docs"
IDS = torch.arange(20, 34).view(2, 7)
ONES, FOUR_D, CAUSAL = torch.ones_like(IDS), torch.zeros(2, 1, 7, 6), torch.ones(1, 1, 7, 7).tril()

# -- subjects ----------------------------------------------------------------------------------------------------------


def llama() -> Any:
    return checkpoint("llama")


def gpt2() -> Any:
    return checkpoint("gpt2")


def t5() -> Any:
    return checkpoint("t5")


def altered(change: Callable[[Any], object], make: Callable[[], Any] = llama) -> Callable[[], Any]:
    """A model to which something was done in place."""

    def made() -> Any:
        model = make()
        change(model)
        return model

    return made


def patched(make: Callable[..., Any], scheme: str, **options: Any) -> Callable[[], Any]:
    return lambda: patch(make(), scheme, **options)


def twice_patched() -> Any:
    return patch(patch(llama(), "alibi", layers=[0, 1]), "fire", layers=[2])


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)).eval()


def become(name: str, module: Any) -> None:
    """Give a module a subclass of its class, as users and quantisation libraries do."""
    module.__class__ = type(name, (type(module),), {})


def shard(module: nn.Module) -> Any:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def patch_sibling(model: Any) -> None:
    """Patch the inside of a model that was made from the same config."""
    sibling = LlamaForCausalLM(model.config)
    patch(sibling.model, "fire")


def own_forward(module: Any) -> None:
    """Replace a forward on the instance, as some libraries do."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def take_over(model: Any) -> None:
    """Patch, and then replace the forward of a layer, as another library does."""
    patch(model, "fire").model.layers[1].forward = lambda hidden, *args, **kwargs: hidden


alibi, gpt2_alibi, t5_alibi = patched(llama, "alibi"), patched(gpt2, "alibi"), patched(t5, "alibi")
gpt2_keeping = patched(gpt2, "alibi", native="keep")

# -- what is done to a subject -----------------------------------------------------------------------------------------

Act = Callable[[Any], object]
SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_size": 32}
GEOMETRY = Geometry(**SHAPE)


def to(scheme: Any, **arguments: Any) -> Act:
    """Patch it."""
    return lambda model: patch(model, scheme, **arguments)


def run(*ids: Any, **call: Any) -> Act:
    """Call it."""
    return lambda model: model(*(ids or [IDS]), **call)


def attending(scheme: Any, **changes: Any) -> Act:
    """Call `attend` with good operands but for some."""
    kv, places = torch.zeros(2, 2, 5, 8), torch.arange(5)[None]
    good: dict[str, Any] = {"q": torch.zeros(2, 4, 5, 8), "k": kv, "v": kv}
    good |= {"query_positions": places, "key_positions": places}
    return lambda folder: hf_posenc.attend(scheme, **(good | changes))


class QuantisedLayer(QuantizedLayer):
    """A quantised cache layer that needs no quantisation library."""

    _quantize = _dequantize = lambda self, tensor, axis=0: tensor


def with_cache(make: Callable[[], Any], **call: Any) -> Act:
    """Call it with a cache, which must be as before if that fails."""

    def act(model: Any) -> None:
        cache = make()
        own = getattr(cache, "self_attention_cache", cache)
        before = [(type(layer), int(layer.get_seq_length())) for layer in own.layers]
        try:
            model(IDS, **call, **{CACHE: cache}, use_cache=True)
        finally:
            assert [(type(layer), int(layer.get_seq_length())) for layer in own.layers] == before

    return act


def take_too_much_back(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    model(IDS, **{CACHE: cache})
    cache.crop(-3)


def half_way(model: Any) -> None:
    patch(model, "alibi", native="keep", layers=[0])
    hf_posenc.set_strength(model, native=0.25)


def while_disabled(act: Act) -> Act:
    def acting(model: Any) -> None:
        with hf_posenc.disabled(model):
            act(model)

    return acting


def go_on_disabled(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    model(IDS, **{CACHE: cache})
    with hf_posenc.disabled(model):
        model(IDS, **{CACHE: cache})


def tune_prefix(model: Any) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        # PEFT 0.21 gives the cache the name that transformers 5.24 deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))(IDS)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


# -- the table ---------------------------------------------------------------------------------------------------------

PLAIN_FIRST = "Patch the plain model first"
INSIDE = "the LlamaModel inside of a patched model"

# By error: what makes the subject, if there is one, what is done to it, facts.
# fmt: off
TABLE: dict[type[PosencError], list[tuple[Callable[[], Any] | None, Act, str]]] = {
    errors.UnknownSchemeError: [
        (llama, to("alibbi"), "no scheme 'alibbi' ... Did you mean 'alibi' ... kerple"),
    ],
    errors.OptionError: [
        (None, lambda _: build("sinusoidal", replace(GEOMETRY, embedding_rms=float("nan"))),
            "scale=None ... the model's token embeddings hold NaN"),
        (llama, to("alibi", native="drop"), "native='drop' ... 'remove' ... 'keep'"),
        (None, attending("alibi"), "hf_posenc.build ... 'alibi'"),
        (None, lambda _: hf_posenc.register_architecture(type(architectures()["llama"])()),
            "'llama' ... taken ... another name"),
        *((gpt2_keeping, lambda m, given=given: hf_posenc.set_strength(m, **given), "expected a number from 0 to 1")
            for given in ({"native": 1.5}, {"scheme": -0.1}, {"native": "half"}, {"scheme": True})),
        (alibi, lambda m: hf_posenc.set_strength(m, scheme=0.5), "nothing to hand over from ... native='keep'"),
        (altered(half_way), to("fox", native="keep", layers=[1]), "middle of a handover (native=0.25 ... set_strength"),
    ],
    errors.DirectionError: [
        (t5, to("fox_pro"), "causal attention ... stacks='decoder'"),
        (altered(lambda m: setattr(m.config, "is_causal", False)), to("alibi"), "is_causal=False ... earlier ones"),
        (alibi, run(is_causal=False), "is_causal=False ... Leave it out"),
        (lambda: transformers.T5EncoderModel(t5().config), to("fox_pro"),
            "causal attention, got Geometry(causal=False) ... Choose another scheme"),
    ],
    errors.ArchitectureError: [
        (lambda: transformers.JambaModel(JambaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32,
            attn_layer_period=2, attn_layer_offset=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=40,
            use_mamba_kernels=False, pad_token_id=0)).eval(), to("alibi"),
            "JambaModel ... no one class of layers ... own_architecture"),
        (lambda: "gpt2", to("alibi"), "transformers model ... str: 'gpt2'"),
        (None, lambda _: hf_posenc.plan(JambaConfig(), "alibi"), "'jamba' ... no one class of layers ... by hand"),
        # The inside of a model alone, and a config that is not the model's own.
        (alibi, lambda m: hf_posenc.unpatch(m.model), f"{INSIDE} ... Pass the whole model ... save and load"),
        (patched(t5, "alibi", native="keep"), lambda m: hf_posenc.set_strength(m.decoder),
            "a T5Stack ... Pass the whole model"),
        (altered(patch_sibling), to("alibi"),
            "names schemes for 4 layers, and 0 have one ... copy.deepcopy(config)"),
        # Models that something else has altered.
        (altered(lambda m: become("FusedAttention", m.model.layers[1].self_attn)), to("alibi"),
            "Layer 1 of the decoder ... FusedAttention ... patch it first"),
        (altered(lambda m: own_forward(m.model.layers[1].self_attn)), to("alibi"),
            "LlamaAttention has a forward of its own ... Patch with hf_posenc first"),
        (altered(lambda m: delattr(m.model.layers[2].self_attn, "q_proj")), to("alibi"),
            "Layer 2 of the decoder ... without q_proj ... patch it first"),
    ],
    errors.WrappedModelError: [
        (lambda: with_lora(llama()), to("alibi"), f"PEFT adapters ... {PLAIN_FIRST}"),
        # As `add_adapter` does. Itself, it wants a newer PEFT with transformers 5.24.
        (altered(lambda m: inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], r=2), m).eval()), to("alibi"),
            f"PEFT adapters ... {PLAIN_FIRST}"),
        (lambda: with_lora(alibi()), hf_posenc.unpatch, "PEFT adapters"),
        (lambda: DistributedDataParallel(llama()), to("alibi"), "inside DistributedDataParallel ... then wrap it"),
        (altered(lambda m: shard(m.model.layers[1])), to("alibi"), "sharded with FSDP ... then wrap it"),
        (lambda: torch.compile(llama(), backend="eager"), to("alibi"), "torch.compile ... then wrap it"),
    ],
    errors.LayerSelectionError: [
        (llama, to("alibi", layers=[]), "layers=[] ... matches none of the 4 layers"),
        (llama, to("alibi", layers="0:99"), "99 is out of range ... 4 layers"),
        (llama, to("alibi", layers="first"), "'first' ... 'every:N'"),
        (llama, to("alibi", layers=lambda layer: 1 / 0), "raised ZeroDivisionError: division by zero"),
        (llama, to("alibi", layers=[0, 4]), "4 is no layer ... 0 to 3"),
        (llama, to("alibi", layers=[3, -1]), "names a layer twice"),
        (twice_patched, to("kerple", layers=[1, 2]),
            "Layer 1 of the decoder already has the scheme 'alibi' ... unpatch first"),
        (llama, to("learned", layers=[0]), "takes all 4 layers, got 1 ... Leave out layers="),
        (t5, to("alibi", stacks="middle"), "'middle' ... encoder, decoder"),
        (patched(gpt2, "alibi", layers=[0], native="keep"), to("fire", layers=[1]),
            "native='keep', got native='remove' ... Use the same, or unpatch first"),
    ],
    errors.AttentionBackendError: [
        (altered(lambda m: m.set_attn_implementation("flex_attention")), to("alibi"),
            '"flex_attention" ... set_attn_implementation(\'sdpa\')'),
        (alibi, lambda m: m.set_attn_implementation("flex_attention"), "\"flex_attention\" ... 'eager'"),
        (alibi, lambda m: m.generate_batch([[1, 2, 3]]), "alibi (layer 0) changes the logits ... Use model.generate"),
    ],
    errors.ShapeError: [
        (patched(llama, "nope"), run(attention_mask=FOUR_D), "(2, 1, 7, 6) ... [2, 4, 7, 7]"),
        (None, attending(build("fox", GEOMETRY), q=torch.zeros(2, 4, 1, 8), query_positions=torch.tensor([[4]]),
            hidden=torch.zeros(2, 1, 32)), "fox reads the hidden states of the keys' tokens"),
    ],
    errors.PositionError: [
        (patched(gpt2, "learned", num_positions=8), run(torch.arange(9)[None]),
            "Position 8 is beyond the learned table of 8 ... larger num_positions"),
        (gpt2_keeping, run(torch.zeros(1, 129, dtype=torch.long)),
            "Position 128 is beyond the model's own table of 128 positions ... native='remove'"),
        (gpt2_keeping, lambda m: hf_posenc.explain(m, length=256),
            "length=256 and one more token ... pass a smaller length"),
    ],
    errors.CacheError: [
        (alibi, go_on_disabled, "tokens of the patched model, and the patch is disabled ... empty cache"),
        (alibi, with_cache(lambda: Cache(layer_class_to_replicate=QuantisedLayer)),
            "QuantisedLayer ... dynamic or a static cache"),
        (alibi, with_cache(lambda: Cache(layers=[DynamicLayer(), DynamicLayer(), DynamicLayer(), QuantisedLayer()])),
            "QuantisedLayer ... dynamic or a static cache"),
        (t5_alibi, with_cache(lambda: EncoderDecoderCache(Cache(layers=[QuantisedLayer()] * 2), DynamicCache()),
            decoder_input_ids=IDS), "QuantisedLayer ... dynamic or a static cache"),
        (alibi, with_cache(lambda: llama()(IDS, use_cache=True)[CACHE]),
            "holds 7 tokens without their positions ... Start with an empty cache"),
        (alibi, tune_prefix, "holds 2 tokens ... PEFT's prefix tuning ... use prompt tuning"),
        (patched(llama, "fox_pro", shift_history=2), take_too_much_back, "Cannot take 3 tokens back ... shift_history"),
    ],
    errors.NotPatchedError: [
        (llama, hf_posenc.drop_native, "drop_native: the LlamaForCausalLM is not patched"),
        (llama, lambda m: get_peft_model(m, hf_posenc.PosencLoraConfig(target_modules=["q_proj"])),
            "no scheme to carry ... hf_posenc.patch(model, ...) first"),
        (alibi, lambda m: m.model.layers[0].self_attn(torch.zeros(1, 2, 96)),
            "PosencLlamaAttention was called without the positions ... Call the model"),
        (llama, hf_posenc.unpatch, "LlamaForCausalLM is not patched"),
        (llama, hf_posenc.verify, "is not patched ... Call hf_posenc.patch"),
        (llama, lambda m: hf_posenc.disabled(m).__enter__(), "no patched model ... Patch it first"),
        (altered(take_over), hf_posenc.verify, "schemes ran 3 times for 4 patched layers ... Patch the plain model"),
        (alibi, while_disabled(hf_posenc.verify), "verify: the patch is disabled"),
        (alibi, while_disabled(hf_posenc.explain), "explain: the patch is disabled"),
    ],
}
# fmt: on
CASES = [(error, *row) for error, rows in TABLE.items() for row in rows]


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    """A process group of this process alone."""
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def outputs(model: Any) -> Any:
    """Return the logits of a model, or the class of the error if it was made so that it has none."""
    config = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation == "flex_attention":  # which would be compiled first
        config._attn_implementation = "sdpa"
    call = {"decoder_input_ids": IDS} if isinstance(model, transformers.T5ForConditionalGeneration) else {}
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return model(torch.ones(1, 2))[None] if isinstance(model, nn.Linear) else model(IDS, **call)[0]
    except AttributeError as error:
        return type(error)
    finally:
        if implementation == "flex_attention":
            config._attn_implementation = implementation


def state(model: nn.Module) -> list[Any]:
    """Return all that a failed call must not change, but for tensors."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return [
        list(model.state_dict()),  # first, as it shards again what FSDP has gathered
        [(name, type(module), set(vars(module))) for name, module in model.named_modules()],
        {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()},
        [(type(config), config.to_json_string(), sorted(vars(config))) for config in configs],
    ]


@contextlib.contextmanager
def unchanged(model: object) -> Iterator[None]:
    """Check that a block leaves a model as it was."""
    if not isinstance(model, nn.Module):
        yield
        return
    result, before = outputs(model), state(model)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    yield
    assert state(model) == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    again = outputs(model)
    assert torch.equal(result, again) if isinstance(result, torch.Tensor) else result is again, "outputs"


@pytest.mark.parametrize(("error", "make", "act", "facts"), CASES, ids=[case[3] for case in CASES])
def test_wrong_use_has_one_clear_error_and_changes_nothing(
    error: type[PosencError], make: Callable[[], Any] | None, act: Act, facts: str
) -> None:
    model = None if make is None else make()
    with unchanged(model), pytest.raises(PosencError) as caught:
        act(model)
    said = str(caught.value)
    assert type(caught.value) is error, said
    assert re.search(".*".join(map(re.escape, facts.split(" ... "))), said), said
    assert "\n" not in said


def test_the_page_on_loading_quotes_existing_messages() -> None:
    """docs/loading.md quotes messages in blocks, where dots stand for names and numbers of a call."""
    blocks = re.findall(r"^```text\n(.*?)^```", (DOCS / "loading.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(blocks) > 8
    product = [path for folder in ("hf_posenc", "patches", "recipes") for path in (DOCS.parent / folder).rglob("*.py")]
    nodes = [node for path in product for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    parts = [part.strip() for quote in "".join(blocks).splitlines() for part in quote.split("...")]
    assert [part for part in parts if not any(part in text for text in texts)] == []


# -- failures in the middle --------------------------------------------------------------------------------------------


class Failure(Exception):
    pass


def fail_at(patcher: pytest.MonkeyPatch, step: str, count: int) -> None:
    """Let a step of surgery raise when it is taken for the count-th time."""
    function, calls = getattr(surgery, step), iter(range(1, 1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            raise Failure
        return function(*args, **kwargs)

    patcher.setattr(surgery, step, failing)


# The count of each step is one that the least of the models takes.
STEPS_OF_PATCH = [("swap", 1), ("swap", 3), ("attach", 1), ("_placed", 1), ("drop_shared", 1), ("settle_native", 1)]
STEPS_OF_UNPATCH = [("drop_shared", 1), ("settle_native", 1), ("restore", 2), ("restore", 5)]
FAILURES = [
    *itertools.product((llama, t5, twice_patched), (to("fire"),), STEPS_OF_PATCH),
    *itertools.product((gpt2,), (to("learned"),), STEPS_OF_PATCH),
    (t5, to("learned"), ("_placed", 2)),  # after the first stack
    *itertools.product(
        (patched(llama, "fire"), patched(gpt2, "learned"), patched(t5, "fire_s"), twice_patched),
        (hf_posenc.unpatch,),
        STEPS_OF_UNPATCH,
    ),
]


@pytest.mark.parametrize(("make", "act", "step"), FAILURES)
def test_what_fails_half_way_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], act: Act, step: tuple[str, int]
) -> None:
    model = make()
    with unchanged(model), monkeypatch.context() as patcher:
        fail_at(patcher, *step)
        with pytest.raises(Failure):
            act(model)
    # And nothing is left that would stand in the way of the next attempt.
    act(model)
    assert surgery.is_patched(model) != (act is hf_posenc.unpatch)
    hf_posenc.verify(model if surgery.is_patched(model) else patch(model, "fire"))
