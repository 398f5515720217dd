"""The table of loaders: the page is that of its results, and nothing in it is silent."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hf_posenc


@pytest.fixture(scope="module")
def loaders() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_MODULES_CACHE"):
            patch.setenv(name, "")  # put back afterwards
        return importlib.import_module("loaders")


def test_the_page_is_that_of_the_results(loaders: ModuleType) -> None:
    stored = json.loads(loaders.RESULTS.read_text(encoding="utf-8"))
    assert loaders.PAGE.read_text(encoding="utf-8") == loaders.text(stored)
    assert set(stored["cells"]) <= {*hf_posenc.schemes(), *loaders.VARIANTS}
    for case, row in [*stored["cells"].items(), *stored["altered"].items()]:
        for loader, cell in row.items():
            assert cell == "equal" or cell.startswith("refused"), f"{case}, {loader}: {cell}"


def test_only_refusals_in_words_of_this_package_are_refusals(loaders: ModuleType, tmp_path: Path) -> None:
    for error, word in (
        (hf_posenc.ExportError(f"Cannot export {tmp_path}/x: no"), "refused: Cannot export … no"),
        (KeyError("hf_posenc"), "refused: 'hf_posenc'"),
        (ValueError("it contains custom code which must be executed"), "refused: it contains"),
        (RuntimeError("shapes differ"), "fault: RuntimeError: shapes differ"),
    ):
        assert loaders.said(error, tmp_path).startswith(word)
    inner = RuntimeError("the engine died")
    inner.__cause__ = hf_posenc.AttentionBackendError("vLLM cannot serve this model: no")
    assert loaders.said(inner, tmp_path) == "refused: vLLM cannot serve this model: no"
    assert sys.modules["hf_posenc"] is hf_posenc
