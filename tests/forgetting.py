"""FoX and FoX (Pro) as layers of a small Llama: with the weights of the official code, or with random ones."""

from __future__ import annotations

from typing import Any

import torch
from models import moved
from official import about, golden
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LlamaConfig, LlamaModel, StaticCache

import hf_posenc

WIDTH, HEADS, HEAD_DIM = 32, 4, 8
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def case(scheme: str, name: str) -> dict[str, Tensor]:
    """Return the tensors of one golden."""
    return {key.removeprefix(f"{name}/"): value for key, value in golden(scheme).items() if key.startswith(f"{name}/")}


def check(scheme: str, got: Tensor, want: Tensor) -> None:
    """Compare at the tolerance that the json states for the dtype; goldens are float64."""
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == got.dtype)
    atol = about(scheme)["tolerance"][kind]
    # A bfloat16 is rounded in proportion to its size.
    torch.testing.assert_close(got.double(), want, rtol=atol if kind == "bf16" else 0, atol=atol)


def small_llama(
    scheme: str, *, kv_heads: int = 2, layers: int = 2, backend: str = "sdpa", seed: int = 0, **options: Any
) -> LlamaModel:
    """Return a patched Llama in float64, the parameters of its scheme away from their start."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    config = LlamaConfig(**sizes, num_key_value_heads=kv_heads, num_hidden_layers=layers, vocab_size=7)
    config.initializer_range = 0.3
    config._attn_implementation = backend
    torch.manual_seed(seed)
    return moved(hf_posenc.patch(LlamaModel(config), scheme, **options), 0.3).double()


def new_cache(model: LlamaModel, kind: str, slots: int = 32) -> Cache:
    """Return an empty `"dynamic"` or `"static"` cache."""
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=slots)


class OfficialLayer:
    """One attention layer with the weights of a golden, inside a Llama that hands it hidden states as they are."""

    def __init__(self, scheme: str, name: str, dtype: torch.dtype, backend: str = "eager", **options: Any) -> None:
        self.scheme, self.given = scheme, case(scheme, name)
        self.mask = self.given.get("attention_mask")
        # Rows of padding are compared nowhere.
        self.real = torch.ones(2, 13, dtype=torch.bool) if self.mask is None else self.mask.bool()
        weights = {key.removeprefix("param."): value for key, value in self.given.items() if key.startswith("param.")}
        kv_heads = next(value for key, value in weights.items() if key.startswith("k_proj.")).shape[0] // HEAD_DIM
        self.model = small_llama(scheme, kv_heads=kv_heads, layers=1, backend=backend, **options)
        self.model.layers[0].input_layernorm = nn.Identity()
        attention = self.model.layers[0].self_attn
        attention.load_state_dict({_our_name(key): value for key, value in weights.items()})
        self.model.to(dtype)
        attention.register_forward_hook(lambda module, args, output: self._results.append(output))
        self._results: list[Any] = []

    @torch.no_grad()
    def __call__(self, hidden: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Return the output `[B, S, E]` and the weights `[B, H, S, K]` (eager only)."""
        self._results.clear()
        call = {"attention_mask": mask, "past_key_values": cache, "use_cache": cache is not None}
        self.model(inputs_embeds=hidden.to(self.model.dtype), **call)
        output, weights = self._results[0]
        return output, weights

    def check_at_once(self) -> None:
        """Compare outputs, and weights if there are any, of all tokens at once."""
        output, weights = self(self.given["hidden_states"], self.mask)
        check(self.scheme, output[self.real], self.given["out"][self.real])
        assert (weights is None) == (self.model.config._attn_implementation != "eager")
        if weights is not None:
            check(self.scheme, weights.transpose(1, 2)[self.real], self.given["attn"].transpose(1, 2)[self.real])

    def check_decoding(self, kind: str) -> None:
        """Take the tokens as the golden's cache was made, nine at once and then one by one; compare that cache."""
        cache = new_cache(self.model, kind)
        hidden = self.given["hidden_states"]
        for start, stop in [(0, 9), *((i, i + 1) for i in range(9, 13))]:
            mask = None if self.mask is None else self.mask[:, :stop]
            output, _ = self(hidden[:, start:stop], mask, cache)
        check(self.scheme, output, self.given["out_decode_last"])
        layer: Any = cache.layers[0]
        sums = layer.token_state["log_forget_sums"][:, :13]
        log_gates = sums.diff(dim=1, prepend=torch.zeros_like(sums[:, :1]))  # [B, S, H]
        for got, name in ((layer.keys[:, :, :13], "k"), (layer.values[:, :, :13], "v")):
            check(self.scheme, got.transpose(1, 2)[self.real], self.given[f"cache.{name}"].transpose(1, 2)[self.real])
        # In float32 also where the layer is in bfloat16, whose hidden states they are made of.
        got = log_gates.to(self.model.dtype) if self.model.dtype == torch.bfloat16 else log_gates
        check(self.scheme, got[self.real], self.given["cache.log_fgate"].transpose(1, 2)[self.real])
        kept = {key.removeprefix("cache.") for key in self.given if key.endswith("_shift")}
        assert kept == {name for name in layer.recent_state if not name.endswith("_position")}
        for name in kept:
            check(self.scheme, layer.recent_state[name][:, -1].flatten(1), self.given[f"cache.{name}"])


def _our_name(official: str) -> str:
    """Translate the name of an official weight to that in a patched attention module."""
    for projection in ("k_proj", "v_proj"):
        if official == f"{projection}.shift_proj.weight":
            return f"hf_posenc.{projection[0]}_shift_proj.weight"
        if official == f"{projection}.linear.weight":
            return f"{projection}.weight"
    if official in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"):
        return official
    return f"hf_posenc.{official.replace('output_norm', 'o_norm')}"
