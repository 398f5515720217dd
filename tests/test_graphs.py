"""Compiled and exported models: one graph, the numbers of the eager model, and few compilations."""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from grid import FIRSTS
from models import CACHE
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

import hf_posenc
from hf_posenc.patches.export.onnx import export_onnx


def _schemes(names: Iterable[str], default: tuple[str, ...], turn: int) -> pytest.MarkDecorator:
    """Parametrise a test by schemes. Beyond one for each set of seams they take minutes together, so only on demand.

    Of the tests with turns 0, 1 and 2, each has every third of these in the grid.
    """
    ours = sorted(FIRSTS)[turn::3]
    marks = {name: () if name in default else pytest.mark.grid if name in ours else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("scheme", [pytest.param(name, marks=marks[name]) for name in marks])


# A bias, and a state that layers hand on.
training_step = _schemes(hf_posenc.schemes(), ("kerple", "tape"), 0)
decoding = _schemes(hf_posenc.schemes(), ("kerple", "tape"), 1)
SAME = {"atol": 2e-5, "rtol": 1e-4}
# torch says so of its own tracing.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    # pytest would record every step of the tracing.
    logging.getLogger("torch.__trace").propagate = False
    yield
    torch.compiler.reset()


def patched(scheme: str) -> PreTrainedModel:
    """Return a model of one layer, since tracing takes seconds for each; of two if a state goes from layer to layer."""
    model = models.tiny("llama")
    if hf_posenc.schemes()[scheme].cls.carry is hf_posenc.Scheme.carry:
        del model.model.layers[1:]
        model.config.num_hidden_layers = 1
    return hf_posenc.patch(model, scheme).eval()


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, 58, (rows, length), generator=torch.Generator().manual_seed(length))


def step(model: Any, call: nn.Module) -> list[Tensor]:
    """Return the loss and all gradients of a training step."""
    torch.manual_seed(0)
    model.zero_grad()
    loss = call(input_ids=ids(2, 12), labels=ids(2, 12), use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


@training_step
def test_a_training_step_is_one_graph(scheme: str) -> None:
    model = patched(scheme).train()
    for got, expected in zip(step(model, compiled(model)), step(model, model), strict=True):
        torch.testing.assert_close(got, expected, **SAME)


def plain(length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(2, length), "attention_mask": torch.ones(2, length, dtype=torch.long)}


PADDED, PACKED = plain(12), {"input_ids": ids(2, 12)}
PADDED["attention_mask"][0, :3] = 0
PACKED["position_ids"] = torch.tensor([[*range(5), *range(7)], [*range(8), *range(4)]])
# The compiler has a symbol for the length from the second on.
LENGTHS = [{"input_ids": ids(2, n)} if bare else plain(n) for n in (12, 9, 5) for bare in (True, False)]


@pytest.mark.parametrize(
    ("scheme", "calls"),
    [("t5", [PADDED]), ("t5", [PACKED]), pytest.param("rope", LENGTHS, marks=pytest.mark.grid)],
    ids=["padded", "packed", "other lengths"],
)
def test_forwards_are_one_graph(scheme: str, calls: list[dict[str, Tensor]]) -> None:
    model = patched(scheme)
    whole = compiled(model)
    with torch.no_grad():
        for call in calls:
            real = call.get("attention_mask", torch.ones(call["input_ids"].shape)).bool()
            got, want = (run(**call, use_cache=False).logits[real] for run in (whole, model))
            torch.testing.assert_close(got, want, **SAME)


@decoding
def test_decoding_with_a_static_cache(scheme: str) -> None:
    """One graph for all steps, since lengths are in tensors; and one more while recent state grows to its history."""
    model, tokens, graphs = patched(scheme), ids(2, 16), []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    whole: Any = torch.compile(model, backend=count, fullgraph=True)
    with torch.no_grad():
        want = model(tokens).logits
        cache = StaticCache(model.config, max_cache_len=20)
        model(tokens[:, :6], **{CACHE: cache})
        steps = [
            whole(tokens[:, at : at + 1], **{CACHE: cache}, position_ids=torch.full((1, 1), at)).logits
            for at in range(6, 16)
        ]
    torch.testing.assert_close(torch.cat(steps, dim=1), want[:, 6:], **SAME)
    grows = any(module.history for module in model.modules() if isinstance(module, hf_posenc.Scheme))
    assert len(graphs) == (2 if grows else 1)


class Logits(nn.Module):
    """A model as exporters want it: tensors in, one tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return found


def operands(rows: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :2] = 0
    return {"input_ids": ids(rows, length), "attention_mask": mask}


def any_size() -> dict[str, dict[int, Any]]:
    sizes = {0: torch.export.Dim("rows", min=1, max=16), 1: torch.export.Dim("length", min=2, max=128)}
    return {name: dict(sizes) for name in operands(1, 2)}


def check(model: nn.Module, got: Callable[[dict[str, Tensor]], Tensor]) -> None:
    for rows, length in ((3, 40), (1, 2)):
        call = operands(rows, length)
        real = call["attention_mask"].bool()
        with torch.no_grad():
            torch.testing.assert_close(got(call)[real], model(**call)[real], **SAME)


@_schemes(hf_posenc.schemes(), ("t5",), 2)
def test_export(scheme: str) -> None:
    model = Logits(patched(scheme))
    program = torch.export.export(model, (), operands(2, 12), dynamic_shapes=any_size(), strict=False)
    check(model, lambda call: program.module()(**call))


@pytest.mark.generic
@pytest.mark.filterwarnings("ignore")  # of the tracer
@pytest.mark.parametrize("scheme", hf_posenc.schemes())
def test_a_trace_of_one_length_is_refused(scheme: str) -> None:
    with pytest.raises(hf_posenc.ExportError, match=r"Use torch\.export"):
        torch.jit.trace(Logits(patched(scheme)), example_kwarg_inputs=operands(2, 12))


# A sum that a graph may lose, what is refused, a bias, and a state of each token; the others on demand.
ONNX = {"fope": (), "kv_shift": (), "kerple": pytest.mark.grid, "fox": pytest.mark.grid}
# A state of the last tokens, and what ONNX has no operation for.
WITHOUT_ONNX = dict.fromkeys(("fox_pro", "kv_shift", "path", "selective_rope"), "last tokens only")
WITHOUT_ONNX |= dict.fromkeys(("comrope_ap", "comrope_ld", "liere"), r"torch\.onnx says")


@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=ONNX.get(name, pytest.mark.slow)) for name in hf_posenc.schemes()]
)
def test_an_onnx_file_generates(scheme: str, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="torch.onnx.export needs it")
    runtime = pytest.importorskip("onnxruntime", reason="nothing else runs the file")
    model, file = models.moved(patched(scheme), 0.1), tmp_path / "model.onnx"
    if scheme in WITHOUT_ONNX:
        with pytest.raises(hf_posenc.ExportError, match=WITHOUT_ONNX[scheme]):
            export_onnx(model, file)
        return
    names = export_onnx(model, file)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    given = operands(2, 9)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
    tokens, mask, past = given["input_ids"], given["attention_mask"], {}
    for value in session.get_inputs()[2:]:
        kind = {"tensor(float)": torch.float32, "tensor(double)": torch.float64, "tensor(int64)": torch.int64}[
            value.type
        ]
        shape = [2, *(0 if isinstance(size, str) else size for size in value.shape[1:])]
        past[value.name] = torch.zeros(shape, dtype=kind)
    for logits in wanted.logits:
        call = dict(zip(names, (tokens, mask, *past.values()), strict=True))
        found = [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in call.items()})]
        torch.testing.assert_close(found[0][:, -1], logits, **SAME)
        tokens, past = found[0][:, -1:].argmax(-1), dict(zip(past, found[1:], strict=True))
        mask = torch.cat((mask, torch.ones_like(tokens)), 1)
