"""Nothing warns where nothing is wrong: converting, saving, loading, adapters and the command line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import models
import peft
import pytest
import transformers
from grid import once
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli.application import app


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Fail if transformers, PEFT or this package logs a warning, or Python shows one."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("transformers", "peft", "hf_posenc", "huggingface_hub")]
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_warning()
    for logger in loggers:
        logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    transformers.utils.logging.set_verbosity(level)
    for logger in loggers:
        logger.removeHandler(handler)
    assert not said + [str(warning.message) for warning in caught if "hf_posenc" in str(warning.filename)]


def stock(name: str, folder: Path) -> PreTrainedModel:
    models.tiny(name).save_pretrained(folder)
    return models.auto(name).from_pretrained(folder)


@pytest.mark.parametrize("name", once(models.TINY))
def test_converting_and_loading_say_nothing(name: str, tmp_path: Path) -> None:
    model = hf_posenc.patch(stock(name, tmp_path / "stock"), "kerple")
    model.save_pretrained(tmp_path / "converted")
    loaded = models.auto(name).from_pretrained(tmp_path / "converted")
    AutoConfig.from_pretrained(tmp_path / "converted")
    # Other libraries, PEFT among them, read the config of the base again, by the class of the one that they have.
    type(model.config).from_pretrained(tmp_path / "stock")
    hf_posenc.unpatch(loaded).save_pretrained(tmp_path / "again")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "stock")
    adapted.save_pretrained(tmp_path / "adapter")


def test_the_command_line_says_nothing(tmp_path: Path) -> None:
    folder = str(models.DIRECTORIES["llama"])
    for call in (
        ["plan", folder, "kerple"],
        ["convert", folder, "kerple", str(tmp_path / "x")],
        ["verify", str(tmp_path / "x")],
    ):
        assert CliRunner().invoke(app, call).exit_code == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "x")
