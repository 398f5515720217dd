"""Models with every scheme on a GPU: they compute what they do on the CPU.

python -m pytest tests/test_gpu_models.py -m gpu
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import FIRSTS
from models import ARCHITECTURES, auto, inputs, logits, loss, moved, stacks_for, stock, text_file, tokens
from test_matrix import DEFAULT, OTHERS
from torch import Tensor

import hf_posenc
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run as runs
from hf_posenc.recipes.training.fit_bias import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),
]
# Sums of float32 in another order, through all layers.
NEAR = {"atol": 1e-3, "rtol": 1e-3}
RECIPE = """
model: tiny-llama
conversion: {native: remove}
transfer: {steps: 10}
distillation: {share: 1.0}
training: {steps: 10, length: 64, batch_size: 4}
evaluation: {contexts: [64], windows: 4}
"""
# As long as kernels pay.
LONG = 150


@pytest.fixture(autouse=True)
def _convolutions_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # they round to 10 bits otherwise


def pair(case: tuple[str, str, dict[str, Any]]) -> tuple[Any, Any]:
    """Return a model that was converted on the CPU, and one with the same weights that was converted on the GPU."""
    architecture, name, options = case
    options = {**stacks_for(architecture, name), **options}
    there = moved(hf_posenc.patch(stock(architecture), name, **options))
    here = hf_posenc.patch(stock(architecture).cuda(), name, **options)
    here.load_state_dict(there.state_dict())
    return there, here.eval()


def on_gpu(architecture: str, model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    given = {name: value.cuda() for name, value in inputs(architecture, ids, mask).items()}
    with torch.no_grad():
        return model(**given, **({} if architecture == "vit" else {"use_cache": False}))[0].float().cpu()


@pytest.mark.parametrize("case", [*DEFAULT, *OTHERS])
def test_a_model_computes_what_it_does_on_the_cpu(case: Any) -> None:
    architecture = case[0]
    there, here = pair(case)
    ids = tokens(architecture, 2, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    for keep in (None, mask):
        want, got = logits(there, architecture, ids, keep), on_gpu(architecture, here, ids, keep)
        shown = slice(None) if keep is None or architecture == "vit" else keep.bool()
        torch.testing.assert_close(got[shown], want[shown], **NEAR)
    if architecture == "vit":
        return
    loss(there, architecture, ids).backward()
    loss(here, architecture, ids.cuda()).backward()
    wanted = {name: p.grad for name, p in there.named_parameters() if p.grad is not None}
    for name, parameter in here.named_parameters():
        if name in wanted:
            size = max(1.0, float(wanted[name].abs().max()))
            torch.testing.assert_close(parameter.grad.cpu() / size, wanted[name] / size, **NEAR)
    # What a move leaves behind shows now.
    torch.testing.assert_close(logits(here.cpu(), architecture, ids), logits(there, architecture, ids), **NEAR)


@pytest.mark.parametrize("case", DEFAULT)
def test_generation(case: Any) -> None:
    _, here = pair(case)
    ids = tokens(case[0], 2, 11).cuda()
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    fixed = {"cache_implementation": "static", "disable_compile": True}
    without, growing, static = (
        here.generate(ids, attention_mask=torch.ones_like(ids), **settings, **cache)
        for cache in ({"use_cache": False}, {}, fixed)
    )
    assert torch.equal(growing, without)
    assert torch.equal(static, without)


@pytest.mark.parametrize("name", sorted(FIRSTS))
def test_a_static_cache_is_compiled(name: str) -> None:
    _, here = pair(("llama", name, {}))
    ids = tokens("llama", 2, 11).cuda()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(here.generate(ids, **settings, cache_implementation="static"), here.generate(ids, **settings))


@pytest.mark.parametrize("name", ["kerple", "fire", "fox", "cope", "stick_breaking", "rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_texts(name: str, dtype: torch.dtype) -> None:
    there, here = pair(("llama", name, {}))
    ids = tokens("llama", 2, LONG)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        got = on_gpu("llama", here, ids, mask)
        loss(here, "llama", ids.cuda()).backward()
    want = logits(there, "llama", ids, mask)
    if dtype == torch.float32:
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **NEAR)
    else:
        error = (got - want)[mask.bool()].square().mean().sqrt() / want[mask.bool()].square().mean().sqrt()
        assert error < 0.05
    assert all(torch.isfinite(p.grad).all() for p in here.parameters() if p.grad is not None)


def test_the_default_device_may_be_a_gpu() -> None:
    with torch.device("cuda"):
        model = hf_posenc.patch(auto("llama").from_config(stock("llama").config), "kerple").eval()
        ids = torch.randint(20, 99, (1, LONG))
        assert torch.isfinite(model(input_ids=ids).logits).all()


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("scheme", ["kerple", "cope"])
def test_a_run(scheme: str, precision: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    changes = [f"data.source={text_file()}", f"conversion.scheme={scheme}", f"training.precision={precision}"]
    outcome = runs.train(read_recipe(file, changes), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))["transfer"]["accepted"]
    native, before, after = (outcome.measurements.curve(name).at(64).mean for name in ("original", "before", "after"))
    assert native < after < before


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_a_fit_is_that_of_the_cpu(architecture: str) -> None:
    there, here = pair((architecture, "kerple", {}))
    ids = tokens(architecture, 8, 40)
    wanted, found = fit(there, ids=ids, steps=2), fit(here, ids=ids.cuda(), steps=2)
    assert abs(found.after - wanted.after) < 1e-3 * abs(wanted.before)
    assert {p.device.type for p in here.parameters()} == {"cuda"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_is_loaded_onto_the_gpu(architecture: str, tmp_path: Path) -> None:
    model = moved(hf_posenc.patch(stock(architecture), "fire", **stacks_for(architecture, "fire")))
    model.save_pretrained(tmp_path)
    loaded = auto(architecture).from_pretrained(tmp_path, device_map="cuda").eval()
    assert {p.device.type for p in [*loaded.parameters(), *loaded.buffers()]} == {"cuda"}
    ids = tokens(architecture, 2, 15)
    torch.testing.assert_close(on_gpu(architecture, loaded, ids), logits(model, architecture, ids), **NEAR)
