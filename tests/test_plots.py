"""Pictures show the schemes' own numbers, with axes that say what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from models import DIRECTORIES, moved, stock
from peft import get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.pictures import Picture
from hf_posenc.recipes.plots import figures, kinds

HEADS, LENGTH, TOKENS = 4, 32, 9
IDS = {"input_ids": torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])}


def llama(scheme: str | None = None, *, layers: int = 2, **options: Any) -> Any:
    """Return a tiny Llama with random weights, and a scheme away from its start."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    lengths = {"num_hidden_layers": layers, "vocab_size": 11, "max_position_embeddings": LENGTH}
    config = LlamaConfig(**shape, **lengths, initializer_range=0.3)
    model = LlamaModel(config).eval()
    return model if scheme is None else moved(hf_posenc.patch(model, scheme, **options), 0.3)


def only(model: Any, kind: str, **options: Any) -> list[Axes]:
    """Return the panels of the only figure of a kind."""
    (figure,) = draw(model, kind, **options).values()
    return panels(figure)


def draw(model: Any, *what: str, **options: Any) -> dict[str, Figure]:
    return figures(model, what=what, **{"inputs": IDS, **options})


def panels(figure: Figure) -> list[Axes]:
    """Return the panels that are there to be seen, without colour bars."""
    return [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]


def lines(axes: Axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return what the legend's lines show, by label."""
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }


def heights(axes: Axes) -> np.ndarray:
    """Return the values of all heads, `[H, N]`."""
    return np.stack([y for _, y in lines(axes).values()])


def image(axes: Axes) -> np.ndarray:
    return np.ma.filled(axes.images[0].get_array().astype(float), np.nan)


def below_largest(values: Tensor) -> np.ndarray:
    return (values - values.amax(-1, keepdim=True)).detach().double().numpy()


def operands(model: Any, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states of a layer, and its queries and keys as projected."""
    found: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        found.append(kwargs["hidden_states"])

    attention = model.layers[layer].self_attn
    handle = attention.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(**IDS)
        handle.remove()
        q, k, _ = attention.project_heads(found[0])
    return found[0], q.double(), k.double()


def scheme_of(model: Any, layer: int = 0) -> Any:
    return model.layers[layer].self_attn.hf_posenc


# -- every scheme ------------------------------------------------------------------------------------------------------


@pytest.mark.grid  # a figure takes half a second
@pytest.mark.generic
@pytest.mark.parametrize("name", hf_posenc.schemes())
def test_every_scheme_has_pictures_with_labels_and_a_title_that_fits(name: str) -> None:
    made = figures(llama(name, layers=1), inputs=IDS, heads=[1], queries=[7])
    *others, attention = made
    assert attention == f"attention-decoder-{name}"
    # There is nothing else to see without any encoding, of weights alone, or where hidden states decide.
    alone = (
        "nope tape stick_breaking attention_sinks gated_output kv_shift log_temperature near first_key repo "
        "selective_rope inkling"
    )
    assert bool(others) == (name not in alone.split())
    for figure in made.values():
        assert figure.get_suptitle().startswith(f"{name}, decoder: ")
        figure.draw_without_rendering()
        assert figure._suptitle.get_window_extent().x1 <= figure.bbox.width
        for axes in panels(figure):
            assert axes.lines or axes.images
            assert all(np.isfinite(y).all() for _, y in lines(axes).values())
            assert axes.get_xlabel()
            assert axes.get_ylabel()
        assert all(axes.get_ylabel() for axes in figure.axes if axes.get_label() == "<colorbar>")


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_fire_is_drawn_for_each_query() -> None:
    model = llama("fire", threshold=16.0)
    titles = [axes.get_title(loc="left") for axes in only(model, "bias")]
    assert titles == [f"layer {layer}, query at {query}" for query in (32, 128) for layer in (0, 1)]
    for layer, axes in enumerate(only(model, "bias", queries=[128], heads=[3, 1])):
        scheme, n = scheme_of(model, layer), torch.arange(129)
        limit = (scheme.L_multiplier * 16).abs().clamp_min(128)
        ratio = torch.log1p((scheme.c * n).abs()) / (torch.log1p((scheme.c * limit).abs()) + 1e-6)
        want = scheme.mlp(ratio[None, None])[0, [3, 1]]
        np.testing.assert_allclose(heights(axes), below_largest(want), atol=1e-5)
        assert list(lines(axes)) == ["3", "1"]


def test_a_stock_t5_shows_its_own_tables() -> None:
    model = stock("t5")
    before, kind = {name: p.clone() for name, p in model.named_parameters()}, type(model)
    model.train()
    made = figures(model, AutoTokenizer.from_pretrained(DIRECTORIES["t5"]), what="bias", queries=[200])
    for stack, figure in zip(("encoder", "decoder"), made.values(), strict=True):
        (axes,) = panels(figure)
        attention = getattr(model, stack).block[0].layer[0].SelfAttention
        with torch.no_grad():
            bias = attention.compute_bias(401, 401)[0, :, 200]  # [H, K]
        if stack == "decoder":
            bias = bias[:, :201]
        np.testing.assert_allclose(heights(axes), below_largest(bias.flip(-1)), atol=1e-6)
        assert f"t5 (native encoding), {stack}" in figure.get_suptitle()
    assert type(model) is kind
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_rope_decay_is_the_mean_over_all_pairs() -> None:
    model = llama("rope")
    for layer, axes in enumerate(only(model, "decay", queries=[20])):
        _, q, k = operands(model, layer)
        k = k.repeat_interleave(2, dim=1)
        want = []
        for distance in range(21):
            cos, sin = model.rotary_emb(q, torch.tensor([[distance]]))
            far, _ = apply_rotary_pos_emb(q, q, cos, sin)
            want.append((far @ k.mT).mean((0, 2, 3)) * scheme_of(model).geometry.scale)
        np.testing.assert_allclose(heights(axes), below_largest(torch.stack(want, -1)), atol=1e-5)


def test_a_table_is_drawn_with_the_likeness_of_its_rows() -> None:
    model = llama("learned")
    left, right = only(model, "table")
    rows = model.hf_posenc_shared.get_submodule("0").wpe.weight.detach()
    np.testing.assert_allclose(image(left), rows.T)
    np.testing.assert_allclose(image(right), torch.cosine_similarity(rows[:, None], rows[None], dim=-1), atol=1e-6)
    assert left.get_xlabel() == "position (tokens)"


def test_a_scheme_declares_a_picture_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find it; no room of pictures knows the scheme."""
    model = llama("shaw", layers=1)
    own = Picture("first", "a title", "first channel", lambda scheme, logits, q, k, block: q[..., 0])
    monkeypatch.setattr(type(scheme_of(model)), "pictures", (own,))
    assert kinds()["first"] == "a title, over a text"
    (axes,) = only(model, "first")
    np.testing.assert_allclose(image(axes), operands(model, 0)[1][0, :, :, 0].detach(), rtol=1e-6)
    with pytest.raises(hf_posenc.OptionError, match="no picture 'first' of kerple"):
        draw(llama("kerple"), "first")


def test_gates_are_those_of_the_model() -> None:
    model = llama("fox")
    for layer, axes in enumerate(only(model, "gates")):
        gate = scheme_of(model, layer).fgate_proj(operands(model, layer)[0])[0].sigmoid().T.detach()  # [H, S]
        np.testing.assert_allclose(image(axes), gate, rtol=1e-5)
        assert axes.get_title(loc="left") == f"layer {layer}"


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_attention_is_what_the_model_used(backend: str) -> None:
    model = llama("stick_breaking")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**IDS, output_attentions=True).attentions
    model.set_attn_implementation(backend)
    model.train()
    made = draw(model, "attention")
    assert model.training
    assert model.config._attn_implementation == backend
    hidden = np.triu(np.ones((TOKENS, TOKENS), dtype=bool), 1)
    shown = np.stack([image(axes)[~hidden] for axes in panels(made["attention-decoder-stick_breaking"])])
    want = torch.cat([each[0] for each in weights]).numpy()[:, ~hidden]
    np.testing.assert_allclose(shown, want, rtol=1e-5)


# -- models ------------------------------------------------------------------------------------------------------------


def test_layers_with_different_schemes_have_pictures_of_their_own() -> None:
    model = llama(layers=4)
    hf_posenc.patch(model, "alibi", layers=[0, 2])
    hf_posenc.patch(model, "fox", layers=[1])
    made = figures(model, inputs=IDS)
    attention = {f"attention-decoder-{name}" for name in ("alibi", "fox")}
    assert set(made) == attention | {"bias-decoder-alibi", "gates-decoder-fox"}
    hf_posenc.patch(model, "alibi", layers=[3], gate=True)
    assert set(draw(model, "bias")) == {"bias-decoder-alibi-0", "bias-decoder-alibi-2"}


def test_what_cannot_be_drawn_is_said() -> None:
    model = llama("kerple")
    for kinds_asked, words in (
        (["bais"], "no kind of picture 'bais'.*mean.*'bias'"),
        (["bias", "gates"], "no picture 'gates' of kerple"),
        ([], "no kind of picture to draw"),
    ):
        with pytest.raises(hf_posenc.OptionError, match=words):
            draw(model, *kinds_asked)
    for query in (0, -3, 1.5, 2**30 + 1):
        with pytest.raises(hf_posenc.OptionError, match="positions of queries"):
            draw(model, "bias", queries=[query])
    for options in ({"layers": [2]}, {"layers": []}, {"heads": [4]}, {"heads": []}, {"heads": [-1]}):
        with pytest.raises(hf_posenc.LayerSelectionError):
            draw(model, "bias", **options)
    for ids in (torch.zeros(2, 4), torch.zeros(1, 1), torch.zeros(1, 1025)):
        with pytest.raises(hf_posenc.OptionError, match="tokens to draw"):
            draw(model, "attention", inputs={"input_ids": ids.long()})
    with pytest.raises(hf_posenc.ArchitectureError):
        draw(torch.nn.Linear(2, 2), "bias")


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plot", *arguments])


def test_the_command_draws_a_run_and_an_adapter(tmp_path: Path) -> None:
    run_folder, base = tmp_path / "run", tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES["llama"])
    plain = LlamaForCausalLM(LlamaConfig(**{**llama().config.to_dict(), "vocab_size": len(tokenizer)}))
    plain.save_pretrained(base)
    tokenizer.save_pretrained(base)
    converted = hf_posenc.patch(LlamaForCausalLM.from_pretrained(base), "kerple")
    converted.save_pretrained(run_folder / "model")
    (run_folder / "recipe.yaml").write_text("", encoding="utf-8")
    done = run(str(run_folder), "--what", "bias", "--query", "20", "--out", str(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["bias-decoder-kerple.png"]
    assert f"wrote {tmp_path / 'a'}: bias-decoder-kerple.png" in done.output

    converted.name_or_path = str(base)
    adapted = get_peft_model(
        converted, hf_posenc.PosencLoraConfig(target_modules=["q_proj"], base_model_name_or_path=str(base))
    )
    with pytest.raises(hf_posenc.WrappedModelError, match=r"merge_and_unload\(\)"):
        figures(adapted)
    moved(adapted, 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    options = ("--prompt", "Once upon a time", "--layers", "1", "--heads", "0,2", "--format", "svg")
    done = run(
        str(tmp_path / "adapter"), *options, "--what", "attention", "--what", "bias", "--out", str(tmp_path / "b")
    )
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"attention-decoder-kerple.svg", "bias-decoder-kerple.svg"}


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    folder = str(DIRECTORIES["gpt2"])
    for arguments, message in (
        ((folder, "--what", "gates"), "There is no picture 'gates' of learned."),
        ((folder, "--layers", "first"), "--layers 'first': expected"),
    ):
        done = run(*arguments, "--out", str(tmp_path / "out"))
        assert (done.exit_code, done.output.count("\n")) == (1, 1)
        assert message in done.output
    assert not any(tmp_path.iterdir())
