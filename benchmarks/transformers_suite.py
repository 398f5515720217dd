"""Run transformers' shared tests of models (`ModelTesterMixin`) on patched models, and on the stock ones.

    pip download --no-deps --no-binary transformers transformers==5.23.0 && tar xf transformers-5.23.0.tar.gz
    python benchmarks/transformers_suite.py transformers-5.23.0 llama gpt2 t5 vit
    python benchmarks/transformers_suite.py transformers-5.23.0 llama --schemes kerple fox

Models are the small ones of survey.py, with a scheme in place of their own encoding, by default the scheme that
computes the same. Give the sdist of the installed version. The extra `benchmarks` has the package parameterized, which
the tests need.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import survey
import torch
import transformers
from common import in_a_process, machine, table
from transformers import CONFIG_MAPPING, set_seed

import hf_posenc
from hf_posenc.patches.patch import native_scheme

# Failures that are meant, by a part of the test's name or of the message.
EXPECTED = (
    # It asks for `GenerationMixin` among the direct bases of a class, which has the stock class there.
    "test_inherits_generation_mixin",
    # Another rope type in the config is to change the output: schemes that replace the rotation do not read it.
    "test_model_rope_scaling_from_config",
    # It changes how many channels rotate in a config whose record has the old number, which is refused.
    "test_model_rope_with_partial_rotation",
    # It loads a file that lacks every weight: a converted checkpoint that is not whole is refused.
    "test_model_weights_reload_no_missing_tied_weights",
    # Padding without a mask, and positions from 0, are refused where the stock model (RoBERTa) counts from 2.
    "hf_posenc.errors.PositionError",
    # Some tests read the source of a class: families that are read from the code of transformers have none.
    "is a built-in",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="folder of the unpacked sdist, or of a checkout")
    parser.add_argument("types", nargs="+", help="model types")
    parser.add_argument("--schemes", nargs="+", help="default: the one of the model's own encoding")
    parser.add_argument("--tests", nargs="+", default=[""], help="only tests with one of these in their names")
    given = parser.parse_args()
    sys.path.insert(0, str(given.sdist.resolve()))
    (given.sdist / "tests" / "__init__.py").touch()
    rows = []
    for name in given.types:
        stock = in_a_process(outcomes, name, None, given.tests, start="fork")
        for scheme in given.schemes or ["own"]:
            found = in_a_process(outcomes, name, scheme, given.tests, start="fork")
            rows.append([name, scheme, *counted(found, stock)])
            sys.stderr.write(f"{name} {scheme}: {rows[-1]}\n")
    header = ["model", "scheme", "passed", "skipped", "failed as stock", "failed as expected", "failed beyond stock"]
    sys.stdout.write(f"{table(header, rows)}\n\n{machine()}\n")


def counted(found: dict[str, tuple[str, str]], stock: dict[str, tuple[str, str]]) -> list[object]:
    """Return how many tests came out in each way, and the names of those that pass on the stock model alone."""
    failed = [test for test, (came, _) in found.items() if came == "failed"]
    new = [test for test in failed if stock.get(test, ("passed", ""))[0] != "failed"]
    beyond = [test for test in new if not any(part in test + found[test][1] for part in EXPECTED)]
    for test in beyond:
        sys.stderr.write(f"{test}:\n{found[test][1]}\n")
    passed, skipped = (sum(came == kind for came, _ in found.values()) for kind in ("passed", "skipped"))
    return [passed, skipped, len(failed) - len(new), len(new) - len(beyond), ", ".join(beyond) or "none"]


def outcomes(name: str, scheme: str | None, chosen: list[str]) -> dict[str, tuple[str, str]]:
    """Return whether each test passed, failed or was skipped, and why."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    case, found = suite(name, scheme), {}
    for test in unittest.TestLoader().getTestCaseNames(case):
        if any(part in test for part in chosen):
            result = unittest.TestResult()
            case(test).run(result)
            wrong = "\n".join(message for _, message in result.failures + result.errors)
            came = "failed" if wrong else "skipped" if result.skipped else "passed"
            found[test] = (came, wrong or "; ".join(reason for _, reason in result.skipped))
    return found


def suite(name: str, scheme: str | None) -> type[unittest.TestCase]:
    """Return the tests of a model type, stock or with a scheme."""
    common = shared_tests()
    model = survey.build(survey.small(CONFIG_MAPPING[name]))
    call, stock = survey.inputs(model), type(model.config)
    if scheme is not None:
        hf_posenc.patch(model, native_scheme(model) if scheme == "own" else scheme)
        learn_names(common, stock, type(model.config))
        seed_schemes(hf_posenc.Scheme)
    config = model.config

    class Tester:
        batch_size, is_training = 2, True
        seq_length = encoder_seq_length = decoder_seq_length = survey.TOKENS
        num_masks, mask_length = 8, 16  # of an image

        def get_config(self) -> Any:
            return copy.deepcopy(config)

        def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
            return self.get_config(), copy.deepcopy(call)

        def __getattr__(self, size: str) -> Any:
            return getattr(config, size)

    def set_up(case: Any) -> None:
        set_seed(0)
        case.model_tester = Tester()

    facts = {"all_model_classes": (type(model),), "is_encoder_decoder": config.is_encoder_decoder, "setUp": set_up}
    return type("Suite", (common.ModelTesterMixin, unittest.TestCase), facts)


def shared_tests() -> ModuleType:
    """Import transformers' shared tests, without the mixins that an sdist lacks."""
    for package, part, mixin in (
        ("exporters", "test_export", "ExportTesterMixin"),
        ("generation", "test_utils", "GenerationTesterMixin"),
    ):
        if importlib.util.find_spec(f"tests.{package}") is None:
            module = ModuleType(f"tests.{package}.{part}")
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules |= {f"tests.{package}": ModuleType(f"tests.{package}"), module.__name__: module}
    return importlib.import_module("tests.test_modeling_common")


def learn_names(common: ModuleType, stock: Any, twin: Any) -> None:
    """Let the tests, which tell heads apart by the names of their classes, know those of patched ones."""
    for name, mapping in list(vars(common).items()):
        if name.endswith("MAPPING_NAMES") and stock.model_type in mapping:
            setattr(common, name, {**mapping, twin.model_type: f"Posenc{mapping[stock.model_type]}"})


def seed_schemes(base: Any) -> None:
    """Let schemes draw the same weights each time: the tests seed `_init_weights`, but schemes draw when built."""
    if "reset_parameters" in vars(base):
        draw = base.reset_parameters
        base.reset_parameters = lambda *given: (set_seed(0), draw(*given))
    for scheme in base.__subclasses__():
        seed_schemes(scheme)


if __name__ == "__main__":
    main()
