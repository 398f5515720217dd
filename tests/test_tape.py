"""TaPE against the official code: whole stacks of layers, since states pass along them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import ARCHITECTURES, loss, moved, new_parameters, stock, tokens
from official import about, golden
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

import hf_posenc
from hf_posenc.operands import Geometry, Positions, Tokens

VALUES, ABOUT = golden("tape"), about("tape")
ATOL = ABOUT["tolerance"]["float64"]


def official(case: str) -> LlamaModel:
    """A Llama with the layers of a case, patched. The last layer's update is not there: nothing reads its result."""
    kv_heads = 2 if case == "gqa" else 4
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 7, "head_dim": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=kv_heads, rms_norm_eps=1e-5)
    # theta is given, since the model's own frequencies have float32 only.
    model = hf_posenc.patch(LlamaModel(config), "tape", theta=10000.0).double().eval()
    given = {k.removeprefix(f"{case}/param."): v for k, v in VALUES.items() if k.startswith(f"{case}/param.")}
    state = model.state_dict()
    unused = [name for name in given if name.startswith(("2.pe.", "2.post_attention_linear."))]
    assert len(unused) == 4
    for name, value in given.items():
        layer, _, rest = name.partition(".")
        path = f"self_attn.hf_posenc.{rest}" if rest.startswith(("pe.", "post_attention_linear.")) else rest
        if name not in unused:
            state[f"layers.{layer}.{path}"].copy_(value)
    return model


class Trace:
    """Records what each layer returns: hidden states, and position states `[B, S, H, D]` if it hands some on."""

    def __init__(self, model: Any) -> None:
        self.hidden: list[Tensor] = []
        self.states: list[Tensor | None] = []
        for layer in getattr(model, "layers", getattr(model, "block", None)):
            layer.register_forward_hook(self._record)

    def _record(self, module: Any, args: Any, output: Any) -> None:
        self.hidden.append(output[0].detach())
        self.states.append(None if output[-1] is None else output[-1].detach())

    def run(self, model: Any, **call: Any) -> Tensor:
        """Return the hidden states of the last layer before the final norm."""
        self.hidden.clear()
        self.states.clear()
        with torch.no_grad():
            model(**call)
        return self.hidden[-1]


def both_halves(states: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine as the official code stores them, `[B, H, S, D]`, each twice."""
    cos, sin = states.transpose(1, 2).chunk(2, dim=-1)
    return cos.repeat(1, 1, 1, 2), sin.repeat(1, 1, 1, 2)


def agree(got: Tensor, want: str, atol: float = ATOL) -> None:
    torch.testing.assert_close(got, VALUES[want].to(got.dtype), rtol=0, atol=atol)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("case", ["mha_random", "gqa", "official_init_equals_rope"])
def test_all_layers(case: str, backend: str) -> None:
    model = official(case)
    model.set_attn_implementation(backend)
    trace, eager = Trace(model), backend == "eager"
    found: list[Any] = []
    call = {"inputs_embeds": VALUES[f"{case}/hidden_states"], "use_cache": False, "output_attentions": eager}
    model.register_forward_hook(lambda module, args, output: found.append(output.attentions))
    agree(trace.run(model, **call), f"{case}/out")
    for layer in range(3):
        if eager:
            agree(found[0][layer], f"{case}/attn.{layer}")
        if case != "official_init_equals_rope":
            agree(trace.hidden[layer], f"{case}/hidden.{layer}")
    for layer in range(2 if case != "official_init_equals_rope" else 0):
        for got, name in zip(both_halves(trace.states[layer]), ("cos", "sin"), strict=True):
            agree(got, f"{case}/{name}.{layer}")
    assert trace.states[2] is None
    out = trace.run(model.float(), **call | {"inputs_embeds": call["inputs_embeds"].float()})
    agree(out, f"{case}/out", ABOUT["tolerance"]["float32"])


def test_shifted_positions() -> None:
    model = official("mha_random")
    trace = Trace(model)
    place = torch.arange(17, 30)[None]
    call = {"inputs_embeds": VALUES["shift17/hidden_states"], "use_cache": False}
    agree(trace.run(model, position_ids=place, **call), "shift17/out")
    cos, sin = both_halves(trace.states[1])
    unshifted = torch.view_as_complex(torch.stack(both_halves_of_case("mha_random", 1), dim=-1))
    turn = torch.exp(17j * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)).repeat(2)
    torch.testing.assert_close(torch.complex(cos, sin), unshifted * turn, rtol=0, atol=1e-9)


def both_halves_of_case(case: str, layer: int) -> tuple[Tensor, Tensor]:
    return VALUES[f"{case}/cos.{layer}"], VALUES[f"{case}/sin.{layer}"]


def one_layer(**options: Any) -> Any:
    # In these two cases the official code got halves that differ: each channel is a frequency of its own.
    geometry = Geometry(heads=4, kv_heads=4, head_dim=16, hidden_size=32, last=False)
    return hf_posenc.build("tape", geometry, **options).double()


@pytest.mark.parametrize(("head_mix", "want"), [(False, "official_rowsum"), (True, "true_head_mix")])
def test_update_after_the_attention(head_mix: bool, want: str) -> None:
    scheme = one_layer(head_mix=head_mix)
    attended = VALUES["post_attention_mix/cos_in"]  # [B, H, S, 8]
    output = torch.cat((torch.zeros(2, 4, 13, 16, dtype=torch.float64), attended, 0 * attended), dim=-1)
    place = torch.zeros(2, 13, dtype=torch.long)
    with torch.no_grad():
        scheme.post_attention_linear.weight.copy_(VALUES["post_attention_mix/W"])
        nothing = torch.zeros(2, 13, 4, 16, dtype=torch.float64)
        got = scheme.carry(output, Tokens(positions=Positions(place, place), carried=nothing))
    agree(got.transpose(1, 2)[..., :8], f"post_attention_mix/{want}")


# -- how states pass from layer to layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reentrant_gradient_checkpointing(architecture: str) -> None:
    model = moved(hf_posenc.patch(stock(architecture), "tape"), 0.05).train()
    ids = tokens(architecture, 2, 13)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        loss(model, architecture, ids).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    # Its name from transformers 5.23 on, and before.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": True})
    model.enable_input_require_grads()
    again = gradients()
    assert again.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_without_the_scheme_pass_states_on(architecture: str) -> None:
    """States skip a layer that is not patched; the last patched one has no update that nothing would read."""
    model = hf_posenc.patch(stock(architecture), "tape", layers=[0])
    assert {name.rpartition("hf_posenc.")[2] for name in new_parameters(model)} <= {"gate_weight"}
    count = model.config.num_hidden_layers
    model = hf_posenc.patch(hf_posenc.unpatch(model), "tape", layers=[0, count - 1])
    updated = {name.partition(".hf_posenc")[0] for name in new_parameters(model)}
    assert all(f".{0}." in name for name in updated)
    loss(model, architecture, tokens(architecture, 2, 9)).backward()
    hf_posenc.verify(model)


def test_a_layer_alone_has_no_positions() -> None:
    model = hf_posenc.patch(stock("llama").model, "tape")
    with pytest.raises(hf_posenc.NotPatchedError, match="Call the model, not a layer of it"):
        model.layers[0](torch.zeros(1, 3, model.config.hidden_size))
