"""transformers' own tests of models on patched classes, compared with the same tests on the stock classes.

python benchmarks/transformers_suite.py --all --output benchmarks/results/transformers_suite.md
python benchmarks/transformers_suite.py --scheme fire --architecture llama

The tests come from the sdist of the transformers that is installed, which pip downloads, or from `--tests`: an sdist
or a directory `tests` of a checkout. They are unpacked into a temporary folder. An sdist holds `ModelTesterMixin`
only; `GenerationTesterMixin` runs where the directory has it. Needs parameterized, of the extra `benchmarks`. A
single test: `--test test_save_load`.
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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from memory import machine
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, set_seed
from transformers.models import gpt2, llama, t5, vit

import hf_posenc
from hf_posenc.patches.architecture import architectures
from hf_posenc.patches.auto import config_pair
from hf_posenc.scheme import Scheme

STOCK = "stock"

# Tests that ask of a model what a patched one is not meant to do, by the beginning of their names, each with the
# reason.
EXPECTED = {
    "test_model_rope_scaling_from_config": "asks that another rope type in the config changes the output. Schemes "
    "that replace "
    "the rotation do not read it; `rope` reads it, but keeps the frequencies of the dynamic type at its start.",
    "test_model_rope_with_partial_rotation": "changes how many channels rotate in a config whose record has the old "
    "number, which is refused.",
    "test_model_weights_reload_no_missing_tied_weights": "loads a file that lacks every weight, and asks for a "
    "model. A converted "
    "checkpoint that is not whole is refused.",
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
    "llama": Family(
        "llama",
        (
            llama.LlamaModel,
            llama.LlamaForCausalLM,
            llama.LlamaForSequenceClassification,
            llama.LlamaForTokenClassification,
            llama.LlamaForQuestionAnswering,
        ),
        lambda make, **more: make(
            **TEXT,
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            **more,
        ),
        text,
        SIZES,
    ),
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
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


def add_families() -> None:
    """Add the families that have no entry of their own."""
    for name, architecture in architectures().items():
        if any(family.architecture == name for family in FAMILIES.values()):
            continue
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
    parser.add_argument("--test", help="only tests with this in their name")
    parser.add_argument("--tests", type=Path, help="an sdist of transformers, or a directory of its tests")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.path.insert(0, str(arguments.tests.parent))
        found = outcomes(arguments.architecture[0], arguments.scheme[0], arguments.test or "")
        arguments.output.write_text(json.dumps(found))
        return
    schemes = list(hf_posenc.schemes()) if arguments.all else arguments.scheme
    if not schemes:
        parser.error("say which --scheme, or --all")
    with tempfile.TemporaryDirectory() as folder:
        place = unpacked(arguments.tests, Path(folder))
        cases = [(name, scheme) for name in arguments.architecture for scheme in schemes if has(name, scheme)]
        stock = [(name, STOCK) for name in arguments.architecture]
        start = time.perf_counter()
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = pool.map(lambda case: run(*case, arguments.test, place), stock + cases)
            runs = dict(zip(stock + cases, found, strict=True))
        generation = (place / "generation" / "test_utils.py").exists()
        minutes = (time.perf_counter() - start) / 60
    output = report(runs, cases, generation=generation, minutes=minutes)
    sys.stdout.write(output)
    if arguments.output:
        arguments.output.write_text(output)


def has(name: str, scheme: str) -> bool:
    """Whether a family of models can be given a scheme: those for decoders only leave encoders out."""
    return "bidirectional" in hf_posenc.schemes()[scheme].directions or "decoder" in stacks(FAMILIES[name])


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


def run(name: str, scheme: str, test: str | None, place: Path) -> dict[str, list[str]]:
    """Run the tests in a process of their own, and return the outcome of each."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes.json"
        command = [sys.executable, __file__, "--child", "--architecture", name, "--scheme", scheme]
        command += ["--tests", str(place), "--output", str(output), *(["--test", test] if test else [])]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        if not output.exists():
            raise RuntimeError(f"{scheme} on {name} ended with {result.returncode}:\n{result.stderr[-4000:]}")
        found: dict[str, list[str]] = json.loads(output.read_text())
    count = sum(outcome == "failed" for outcome, _ in found.values())
    sys.stderr.write(f"{name} {scheme}: {len(found)} tests, {count} failed\n")
    return found


def outcomes(name: str, scheme: str, test: str) -> dict[str, list[str]]:
    """Run the tests here; return for each whether it passed, failed or was skipped, and why."""
    torch.set_num_threads(1)
    case = test_case(name, scheme)
    names = [found for found in unittest.TestLoader().getTestCaseNames(case) if test in found]
    found = {}
    for method in names:
        result = unittest.TestResult()
        case(method).run(result)
        wrong = [message for _, message in result.failures + result.errors]
        if wrong:
            found[method] = ["failed", "\n".join(wrong)]
        else:
            reasons = [reason for _, reason in result.skipped]
            found[method] = ["skipped" if reasons else "passed", "; ".join(reasons)]
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


def common_tests() -> ModuleType:
    """Import transformers' common tests, without the mixins that an sdist does not have."""
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        package = name.split(".")[0]
        # Not imported here, since it may import the common tests itself.
        if importlib.util.find_spec(f"tests.{package}") is None:
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


def is_expected(scheme: str, test: str) -> bool:
    """Whether a failure is one of `EXPECTED`. Of the rope types, `rope` fails the dynamic one only."""
    return test.startswith(tuple(EXPECTED)) and (scheme != "rope" or "rope_scaling" not in test or "dynamic" in test)


def report(
    runs: dict[tuple[str, str], Any], cases: Iterable[tuple[str, str]], *, generation: bool, minutes: float
) -> str:
    """Write what came out, Markdown."""
    mixins = "`ModelTesterMixin`" + (" and `GenerationTesterMixin`" if generation else "")
    lines = [
        f"transformers' {mixins} on patched classes. Beyond stock is what the stock classes pass, or do not run.",
        "",
        "| models | scheme | passed | skipped | failed as stock | failed as expected | failed beyond stock | skipped "
        "beyond stock |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for name, scheme in cases:
        found, stock = runs[name, scheme], runs[name, STOCK]
        passed, skipped, failed = (
            [test for test, (outcome, _) in found.items() if outcome == kind]
            for kind in ("passed", "skipped", "failed")
        )
        new = [test for test in failed if stock[test][0] != "failed"]
        beyond = [test for test in new if not is_expected(scheme, test)]
        hidden = [test for test in skipped if stock[test][0] == "passed"]
        for test in beyond + hidden:
            sys.stderr.write(f"{name} {scheme} {test}:\n{found[test][1]}\n")
        counts = (len(passed), len(skipped), len(failed) - len(new), len(new) - len(beyond))
        cells = [name, scheme, *map(str, counts), ", ".join(beyond) or "none", ", ".join(hidden) or "none"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Expected:", "", *(f"- `{test}` {reason}" for test, reason in EXPECTED.items())]
    command = " ".join(sys.argv)
    lines += ["", f"{machine()}; {minutes:.0f} minutes", "", f"Command: `python {command}`"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
