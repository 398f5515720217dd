"""transformers' own tests of models on patched classes, compared with the same tests on the stock classes.

python benchmarks/transformers_suite.py --all
python benchmarks/transformers_suite.py --scheme fire --architecture llama
python benchmarks/transformers_suite.py --own --tests transformers/tests --output OWN.md

The tests come from the sdist of the transformers that is installed, which pip downloads, or from `--tests`: an sdist
or a directory `tests` of a checkout. They are unpacked into a temporary folder. An sdist holds `ModelTesterMixin`
only; `GenerationTesterMixin` runs where the directory has it. Needs parameterized, of the extra `benchmarks`. Some
tests: `--test test_save_load`. Tests that a patched model passes do not run on the stock one.

`--own` runs the tests that transformers keeps for each model, `tests/models/<name>`, with the scheme that takes over
the model's own encoding. The classes of transformers are replaced in its modules before the tests import them.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from speed import machine
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, set_seed
from transformers.models import gpt2, t5, vit

import hf_posenc
from hf_posenc.patches.architecture import architectures, config_pair
from hf_posenc.scheme import Scheme

STOCK = "stock"

# Tests that ask of a model what a patched one is not meant to do, by the beginning of their names, each with the
# reason.
EXPECTED = {
    "test_inherits_generation_mixin": "asks for `GenerationMixin` among the direct bases of a class, which has the "
    "stock class there.",
    "test_model_rope_scaling_from_config": "asks that another rope type in the config changes the output. Schemes "
    "that replace the rotation do not read it. `rope` does, and fails for the dynamic type only, whose frequencies it "
    "keeps as they are at the start.",
    "test_model_rope_with_partial_rotation": "changes how many channels rotate in a config whose record has the old "
    "number, which is refused.",
    "test_model_weights_reload_no_missing_tied_weights": "loads a file that lacks every weight, and asks for a "
    "model. A converted checkpoint that is not whole is refused.",
}
# Failures by a part of their message.
EXPECTED_MESSAGES = {
    "hf_posenc.errors.PositionError": "is a refusal: padding without a mask, and positions from 0, where the stock "
    "model (RoBERTa) counts from 2 and leaves padding out. Tests draw such ids, or count from 0.",
    "multiple_choice_head.summary": "is named where a test leaves out a class (of GPT-2) by its name, which patched "
    "classes do not have.",
}


@dataclass(frozen=True)
class Family:
    """Models that are tested with one config and one kind of input.

    Attributes:
        architecture: Name of the architecture.
        classes: The stock classes; the first makes the record of the patch.
        config: Makes the config, given its class and what else goes into it.
        inputs: Makes the inputs of a forward.
        sizes: Values that the tests read from the config and the inputs.
        flags: Attributes of the test case.
    """

    architecture: str
    classes: tuple[type, ...]
    config: Callable[..., PreTrainedConfig]
    inputs: Callable[[], dict[str, torch.Tensor]]
    sizes: dict[str, int]
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chosen:
    """Tests that are to run: those with a part of their name in `having`, and none of `without`."""

    having: Sequence[str]
    without: Sequence[str] = ()

    def __contains__(self, name: str) -> bool:
        return any(part in name for part in self.having) and not any(part in name for part in self.without)


BATCH, LENGTH, VOCABULARY = 13, 7, 99


def tokens() -> torch.Tensor:
    """Return token ids, none of them special, int64 `[BATCH, LENGTH]`."""
    return torch.randint(5, VOCABULARY, (BATCH, LENGTH))


def padded() -> torch.Tensor:
    """Return a mask that pads the first rows on the right, int64 `[BATCH, LENGTH]`."""
    return (torch.arange(LENGTH) <= torch.arange(BATCH)[:, None]).long()


def text() -> dict[str, torch.Tensor]:
    """Return the inputs of a decoder."""
    return {"input_ids": tokens(), "attention_mask": padded()}


def pair() -> dict[str, torch.Tensor]:
    """Return the inputs of an encoder and a decoder."""
    return {**text(), "decoder_input_ids": tokens(), "decoder_attention_mask": padded()}


TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {
    **TEXT,
    "d_model": 32,
    "d_ff": 37,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
}
SIZES = {"batch_size": BATCH, "seq_length": LENGTH, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
IMAGE, PATCH = 30, 5
PATCHES = (IMAGE // PATCH) ** 2
FAMILIES = {
    "gpt2": Family(
        "gpt2",
        (
            gpt2.GPT2Model,
            gpt2.GPT2LMHeadModel,
            gpt2.GPT2ForSequenceClassification,
            gpt2.GPT2ForTokenClassification,
            gpt2.GPT2ForQuestionAnswering,
        ),
        lambda make, **more: make(**TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=512, **more),
        text,
        SIZES,
        {"test_missing_keys": False},
    ),
    "t5": Family(
        "t5",
        (t5.T5Model, t5.T5ForConditionalGeneration, t5.T5ForQuestionAnswering),
        lambda make, **more: make(**T5, decoder_start_token_id=0, **more),
        pair,
        {**SIZES, "encoder_seq_length": LENGTH, "decoder_seq_length": LENGTH},
        {"is_encoder_decoder": True},
    ),
    "t5-encoder": Family(
        "t5",
        (t5.T5EncoderModel, t5.T5ForTokenClassification),
        lambda make, **more: make(**T5, is_encoder_decoder=False, use_cache=False, **more),
        text,
        {**SIZES, "is_training": False},  # The bare encoder has no loss.
    ),
    "vit": Family(
        "vit",
        (vit.ViTModel, vit.ViTForImageClassification, vit.ViTForMaskedImageModeling),
        lambda make, **more: make(
            image_size=IMAGE,
            patch_size=PATCH,
            encoder_stride=PATCH,
            num_channels=3,
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            **more,
        ),
        lambda: {"pixel_values": torch.rand(BATCH, 3, IMAGE, IMAGE)},
        {
            **SIZES,
            "image_size": IMAGE,
            "patch_size": PATCH,
            "seq_length": PATCHES + 1,
            "mask_length": PATCHES,
            "num_masks": PATCHES // 2,
        },
        {"test_resize_embeddings": False},
    ),
}


# Sizes of all families that are read from the code of transformers. Configs take what they know; windows are shorter
# than the inputs, and experts have rows of 16 bytes, which their kernel wants.
FAMILY_SIZES = {
    **TEXT, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "sliding_window": 4,
    "use_sliding_window": True, "max_window_layers": 1, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip


# Families that are read, of all kinds.
READ = (
    "bert", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt_oss", "mistral", "mixtral", "modernbert", "mt5", "olmo2",
    "phi3", "qwen2", "qwen3", "qwen3_moe", "roberta", "smollm3", "umt5",
)  # fmt: skip


def add_families() -> None:
    """Add the families that have no entry of their own."""
    for name in READ:
        architecture = architectures()[name]
        stock = config_pair(architecture)[0]
        heads = [cls for cls in architecture.twins if issubclass(cls, PreTrainedModel)]
        bare = [cls for cls in heads if cls.__name__.endswith("Model") and not issubclass(cls, GenerationMixin)]
        if "encoder" in architecture.other_stacks or getattr(stock(), "is_encoder_decoder", False):
            config, inputs = functools.partial(make_config, {**T5, "decoder_start_token_id": 0}), pair
            sizes = {**SIZES, "encoder_seq_length": LENGTH, "decoder_seq_length": LENGTH}
            heads = [cls for cls in heads if cls.__name__.endswith(("Model", "ForConditionalGeneration"))]
            heads = [cls for cls in heads if "Encoder" not in cls.__name__]
            flags: dict[str, Any] = {"is_encoder_decoder": True}
            bare = [cls for cls in heads if cls.__name__.endswith("Model")]
        else:
            config, inputs, sizes, flags = functools.partial(make_config, FAMILY_SIZES), text, SIZES, {}
            # Inputs of these have one more dimension, or two sentences.
            heads = [cls for cls in heads if not cls.__name__.endswith(("MultipleChoice", "NextSentencePrediction"))]
        classes = (*bare, *(cls for cls in heads if cls not in bare))
        FAMILIES[name] = Family(name, classes, config, inputs, sizes, flags)


def make_config(sizes: dict[str, Any], make: Callable[..., PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    """Make a config of the sizes that its class knows."""
    known = {name: value for name, value in sizes.items() if hasattr(make(), name) or name in TEXT}
    return make(**known, **more)


add_families()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", nargs="+", choices=[STOCK, *hf_posenc.schemes()], default=[])
    parser.add_argument("--architecture", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--all", action="store_true", help="every scheme")
    parser.add_argument("--own", action="store_true", help="transformers' tests of each model, with an exact start")
    parser.add_argument("--test", nargs="+", default=[""], help="only tests with one of these in their name")
    parser.add_argument("--without", nargs="*", default=[], help="no tests with one of these in their name")
    parser.add_argument("--tests", type=Path, help="an sdist of transformers, or a directory of its tests")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.path.insert(0, str(arguments.tests.parent))
        tests = Chosen(arguments.test, arguments.without)
        found = outcomes(arguments.architecture[0], arguments.scheme[0], tests, own=arguments.own)
        arguments.output.write_text(json.dumps(found))
        return
    schemes = list(hf_posenc.schemes()) if arguments.all else arguments.scheme
    if not schemes and not arguments.own:
        parser.error("say which --scheme, or --all, or --own")
    with tempfile.TemporaryDirectory() as folder:
        place = unpacked(arguments.tests, Path(folder))
        names = [name for name in arguments.architecture if not arguments.own or name == FAMILIES[name].architecture]
        cases = [(name, scheme) for name in names for scheme in schemes if has(name, scheme)]
        if arguments.own and not schemes:
            cases = [(name, exact(name)) for name in names]
        start, tests = time.perf_counter(), Chosen(arguments.test, arguments.without)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = pool.map(lambda case: run(*case, tests, place, own=arguments.own), cases)
            runs = dict(zip(cases, found, strict=True))
            missed: dict[str, set[str]] = {name: set() for name in names}
            for (name, _), results in runs.items():
                missed[name] |= {test for test, (outcome, *_) in results.items() if outcome != "passed"}
            names = [name for name in names if missed[name]]
            found = pool.map(lambda name: run(name, STOCK, Chosen([*missed[name]]), place, own=arguments.own), names)
            runs |= {(name, STOCK): results for name, results in zip(names, found, strict=True)}
        generation = (place / "generation" / "test_utils.py").exists()
        minutes = (time.perf_counter() - start) / 60
    earlier = rows(arguments.output) if arguments.own and arguments.output else {}
    output = report(runs, cases, earlier, generation=generation, own=arguments.own, minutes=minutes)
    sys.stdout.write(output)
    if arguments.output:
        arguments.output.write_text(output)


def has(name: str, scheme: str) -> bool:
    """Whether a family of models can be given a scheme: those for decoders only leave encoders out."""
    return "bidirectional" in hf_posenc.schemes()[scheme].directions or "decoder" in stacks(FAMILIES[name])


def exact(name: str) -> str:
    """Return the scheme that takes over the encoding of an architecture."""
    config = config_pair(architectures()[name])[0]()
    return next(scheme for scheme in ("rope", "learned", "t5") if hf_posenc.plan(config, scheme).start == "exact")


def stacks(family: Family) -> set[str]:
    """Return the names of the stacks that the models of a family have."""
    architecture = architectures()[family.architecture]
    return set(architecture.stacks(family.classes[0](family.config(config_pair(architecture)[0]))))


def unpacked(given: Path | None, folder: Path) -> Path:
    """Return a directory `tests` with transformers' tests, as a package."""
    if given is not None and given.is_dir():
        return given.resolve()
    if given is None:
        what = f"transformers=={version('transformers')}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        subprocess.run([*pip, what, "--dest", str(folder)], check=True)
        given = next(folder.glob("*.tar.gz"))
    with tarfile.open(given) as archive:
        members = [member for member in archive.getmembers() if "tests" in Path(member.name).parts[1:2]]
        archive.extractall(folder, members, filter="data")
    found = next(folder.glob("*/tests"))
    (found / "__init__.py").touch()
    return found


def run(name: str, scheme: str, tests: Chosen, place: Path, *, own: bool) -> dict[str, list[Any]]:
    """Run the tests in a process of their own, and return the outcome of each."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes.json"
        command = [sys.executable, __file__, "--child", "--architecture", name, "--scheme", scheme]
        command += ["--tests", str(place), "--output", str(output), "--test", *tests.having]
        command += ["--without", *tests.without, *(["--own"] if own else [])]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if not output.exists():
            raise RuntimeError(f"{scheme} on {name} ended with {result.returncode}:\n{result.stderr[-4000:]}")
        found: dict[str, list[Any]] = json.loads(output.read_text())
    count = sum(outcome == "failed" for outcome, *_ in found.values())
    sys.stderr.write(f"{name} {scheme}: {len(found)} tests, {count} failed\n")
    return found


def outcomes(name: str, scheme: str, tests: Chosen, *, own: bool) -> dict[str, list[Any]]:
    """Run the tests here; return for each whether it passed, failed or was skipped, why, and if it is of generation."""
    torch.set_num_threads(1)
    cases = own_cases(name, scheme) if own else [test_case(name, scheme)]
    names = {
        f"{case.__name__}.{method}" if len(cases) > 1 else method: (case, method)
        for case in cases
        for method in unittest.TestLoader().getTestCaseNames(case)
    }
    found, mixin = {}, common_tests().GenerationTesterMixin
    for label, (case, method) in names.items():
        if label not in tests:
            continue
        generates = hasattr(mixin, method)
        result = unittest.TestResult()
        case(method).run(result)
        wrong = [message for _, message in result.failures + result.errors]
        if wrong:
            found[label] = ["failed", "\n".join(wrong), generates]
        else:
            reasons = [reason for _, reason in result.skipped]
            found[label] = ["skipped" if reasons else "passed", "; ".join(reasons), generates]
    return found


def test_case(name: str, scheme: str) -> type[unittest.TestCase]:
    """Make the class of tests of a family of models, stock or with a scheme."""
    family = FAMILIES[name]
    common = common_tests()
    architecture = architectures()[family.architecture]
    stock_config, twin_config = config_pair(architecture)
    classes, make, more = family.classes, stock_config, {}
    if scheme != STOCK:
        learn_names(common, stock_config, twin_config)
        causal = "bidirectional" not in hf_posenc.schemes()[scheme].directions
        options = {"stacks": "decoder"} if causal and len(stacks(family)) > 1 else {}
        model = hf_posenc.patch(classes[0](family.config(stock_config)), scheme, **options)
        seed_schemes()  # The patch has imported the scheme.
        more = {"posenc": model.config.posenc}
        classes, make = tuple(architecture.twins[cls] for cls in classes), twin_config

    class Tester:
        is_training = True

        def get_config(self) -> PreTrainedConfig:
            return family.config(make, **copy.deepcopy(more))

        def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
            return self.get_config(), family.inputs()

    for size, value in family.sizes.items():
        setattr(Tester, size, value)

    def set_up(case: unittest.TestCase) -> None:
        set_seed(0)
        case.model_tester = Tester()

    generates = any(cls.can_generate() for cls in classes)
    bases = (common.ModelTesterMixin, *([common.GenerationTesterMixin] if generates else []), unittest.TestCase)
    attributes = {
        "all_model_classes": classes,
        "test_can_init_all_missing_weights_before_2023": True,
        **family.flags,
        "setUp": set_up,
    }
    return type(f"{classes[0].__name__.removeprefix('Posenc')}Test", bases, attributes)


def own_cases(name: str, scheme: str) -> list[type[unittest.TestCase]]:
    """Import the tests that transformers has of a model, as they are or with a scheme in each model that they build."""
    common = common_tests()
    architecture = architectures()[name]
    if scheme != STOCK:
        learn_names(common, *config_pair(architecture))
        importlib.import_module("tests.test_pipeline_mixin")  # It imports transformers once more.
        put_twins(name, scheme)
        seed_schemes()
    module = importlib.import_module(f"tests.models.{name}.test_modeling_{name}")
    known = {*architecture.twins, *architecture.twins.values()}
    cases = [case for case in vars(module).values() if isinstance(case, type) and case.__module__ == module.__name__]
    suites = (
        case for case in cases if issubclass(case, common.ModelTesterMixin) and issubclass(case, unittest.TestCase)
    )
    cases = [case for case in suites if known & {*tested(case)}]
    for case in cases:
        case._prepare_for_class = with_stock_names(case._prepare_for_class)
    return cases


def with_stock_names(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes the inputs of a class, which tests choose by its name, for patched classes, too."""

    def call(case: Any, inputs: Any, model: type, *args: Any, **kwargs: Any) -> Any:
        own, model.__name__ = model.__name__, getattr(model, "posenc_stock", model).__name__
        try:
            return prepare(case, inputs, model, *args, **kwargs)
        finally:
            model.__name__ = own

    return call


def tested(case: Any) -> tuple[type, ...]:
    """Return model classes of a class of tests."""
    tester = getattr(case, "model_tester_class", None)
    return case.all_model_classes if tester is None else (tester.base_model_class,)


def put_twins(name: str, scheme: str) -> None:
    """Replace the classes of an architecture where tests import them; patched models get a scheme when they are built.

    Inside of transformers' models nothing changes.
    """
    architecture = architectures()[name]
    stock_config, _ = config_pair(architecture)
    hf_posenc.plan(stock_config(), scheme)  # imports the scheme
    for stock, twin in architecture.twins.items():
        if not issubclass(stock, PreTrainedModel | PreTrainedConfig):
            continue
        for place in ("transformers", f"transformers.models.{name}"):
            module = importlib.import_module(place)
            if hasattr(module, stock.__name__):
                setattr(module, stock.__name__, twin)
            setattr(module, twin.__name__, twin)  # Some tests look for classes by the name of another.
        if issubclass(stock, PreTrainedModel):
            # Tests of packed rows ask for this; patched models pack, but refuse attention functions of the user's own.
            twin._supports_attention_backend = stock._supports_attention_backend
            twin.__init__ = recording(twin.__init__, stock, stock_config, scheme)


def recording(build: Callable[..., None], stock: Any, stock_config: type, scheme: str) -> Callable[..., None]:
    """Return the constructor of a patched model, which writes the record into a config that has none."""

    @functools.wraps(build)
    def call(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.posenc is None:
            plain = stock_config.from_dict({**config.to_dict(), "model_type": stock_config.model_type})
            plain._attn_implementation = config._attn_implementation
            with torch.random.fork_rng():
                config.posenc = hf_posenc.patch(stock(plain, *args, **kwargs), scheme).config.posenc
        build(self, config, *args, **kwargs)

    return call


def common_tests() -> ModuleType:
    """Import transformers' common tests, without the mixins that an sdist does not have."""
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        package = name.split(".")[0]
        # Not imported here, since it may import the common tests itself.
        if f"tests.{package}" in sys.modules or importlib.util.find_spec(f"tests.{package}") is None:
            for module in (f"tests.{package}", f"tests.{name}"):
                sys.modules.setdefault(module, ModuleType(module))
            setattr(sys.modules[f"tests.{name}"], mixin, type(mixin, (), {}))
    return importlib.import_module("tests.test_modeling_common")


def learn_names(common: ModuleType, stock: type, twin: type) -> None:
    """Let the tests, which tell heads apart by the names of their classes, know those of patched ones."""
    for name, mapping in list(vars(common).items()):
        if name.endswith("MAPPING_NAMES") and stock.model_type in mapping:
            setattr(common, name, {**mapping, twin.model_type: f"Posenc{mapping[stock.model_type]}"})


def seed_schemes(base: type[Scheme] = Scheme) -> None:
    """Let schemes draw the same weights each time: the tests seed `_init_weights`, but schemes draw when built."""
    if "reset_parameters" in vars(base):
        base.reset_parameters = seeded(base.reset_parameters)
    for scheme in base.__subclasses__():
        seed_schemes(scheme)


def seeded(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that sets the seed first."""

    def call(*args: Any) -> None:
        set_seed(0)
        function(*args)

    return call


def is_expected(scheme: str, test: str, message: str) -> bool:
    """Whether a failure is expected by its name or message. Of the rope types, `rope` fails the dynamic one only."""
    test = test.rpartition(".")[2]
    known = test.startswith(tuple(EXPECTED)) and (scheme != "rope" or "rope_scaling" not in test or "dynamic" in test)
    return known or any(part in message for part in EXPECTED_MESSAGES)


def report(
    runs: dict[tuple[str, str], Any],
    cases: Iterable[tuple[str, str]],
    earlier: dict[str, str],
    *,
    generation: bool,
    own: bool,
    minutes: float,
) -> str:
    """Write what came out, and earlier rows of other models, Markdown."""
    mixins = "`ModelTesterMixin`" + (" and `GenerationTesterMixin`" if generation else "")
    mixins = f"tests of each model (with {mixins})" if own else mixins
    lines = [
        f"# transformers' {'tests of each model' if own else 'shared tests'} on patched classes",
        "",
        f"transformers' {mixins} on patched classes. Beyond stock is what the stock classes pass, or do not run.",
        "",
        "| models | scheme | passed | skipped | failed as stock | failed as expected | failed beyond stock | of "
        "generation | skipped beyond stock |",
        "|---|---|---:|---:|---:|---:|---|---|---|",
    ]
    earlier = dict(earlier)
    for name, scheme in cases:
        found, stock = runs[name, scheme], runs.get((name, STOCK), {})
        passed, skipped, failed = (
            [test for test, (outcome, *_) in found.items() if outcome == kind]
            for kind in ("passed", "skipped", "failed")
        )
        new = [test for test in failed if stock[test][0] != "failed"]
        beyond = [test for test in new if not is_expected(scheme, test, found[test][1])]
        hidden = [test for test in skipped if stock[test][0] == "passed"]
        for test in beyond + hidden:
            sys.stderr.write(f"{name} {scheme} {test}:\n{found[test][1]}\n")
        counts = (len(passed), len(skipped), len(failed) - len(new), len(new) - len(beyond))
        kinds = ([test for test in beyond if found[test][2] == generates] for generates in (False, True))
        cells = [name, scheme, *map(str, counts), *(", ".join(tests) or "none" for tests in (*kinds, hidden))]
        earlier[name if own else f"{name} {scheme}"] = f"| {' | '.join(cells)} |"
    reasons = (EXPECTED | EXPECTED_MESSAGES).items()
    lines += [*earlier.values(), "", "Expected:", "", *(f"- `{known}` {reason}" for known, reason in reasons)]
    command = " ".join(sys.argv)
    lines += ["", f"{machine()}; {minutes:.0f} minutes", "", f"Command: `python {command}`"]
    return "\n".join(lines) + "\n"


def rows(table: Path) -> dict[str, str]:
    """Return the rows of a table that `report` wrote, by models; none if there is no such file."""
    lines = table.read_text().splitlines() if table.exists() else []
    found = {line.split("|")[1].strip(): line for line in lines if line.count("|") == 10}
    return {name: line for name, line in found.items() if name in FAMILIES}


if __name__ == "__main__":
    main()
