"""vLLM: converted checkpoints through its Transformers backend, `vllm serve DIR` and `LLM(DIR)`.

The entry point `vllm.general_plugins` of this package names `register`, which each process of vLLM calls. A converted
model then runs as in transformers, and each patched layer calls vLLM's attention: with slopes and sinks where its
scheme has them, or on wider queries and keys. vLLM builds its model without `from_pretrained`, so files are checked
here as they are there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.fusers import AttentionFuser

from hf_posenc.errors import AttentionBackendError
from hf_posenc.operands import Positions
from hf_posenc.patches import checkpoint, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.context import Kept
from hf_posenc.patches.serving.outside import Terms, layers_for, terms_of, wider
from hf_posenc.scheme import Scheme

_TAKES = frozenset({"slopes", "sinks", "width"})
# Its kernels take heads whose width is a multiple of this, up to the widest.
_STEP, _WIDEST = 32, 256
# What vLLM calls the attention that it puts into a module.
_OWN = ".attn"


@dataclass
class _Patched(AttentionFuser):
    """A patched attention, whose forward shows no call of an attention function to vLLM."""

    known_scale: float = 1.0

    def scale(self, module: Any) -> float:
        return self.known_scale

    def sinks(self, module: Any) -> None:
        return None


class PosencTransformersForCausalLM(TransformersForCausalLM):
    """A converted causal language model in vLLM."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        settings = vllm_config.model_config
        if vllm_config.parallel_config.world_size > 1:
            _refuse("got several devices for one model; expected one, since schemes are not split: start replicas")
        if settings.is_moe:
            _refuse("got a mixture of experts, which was never tried: use transformers")
        if getattr(settings, "quantization", None):
            _refuse("got a quantised model, which was never tried: load it without quantisation")
        self._check_files(settings)
        self._attentions: dict[str, Any] = {}
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @staticmethod
    def _check_files(settings: Any) -> None:
        """Raise if weights are not of the config, as `from_pretrained` does; a model without weights is not asked for.

        What vLLM reads is in the folder of config.json.
        """
        config = cached_file(settings.model, "config.json", revision=settings.revision)
        folder = Path(config).parent
        checkpoint.check_index(folder, None)
        files = sorted(str(path) for path in folder.glob("*.safetensors"))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings.hf_config, attn_implementation="sdpa")
        loading = SimpleNamespace(
            pretrained_model_name_or_path=settings.model,
            weight_mapping=None,
            hf_quantizer=None,
            ignore_mismatched_sizes=False,
        )
        checkpoint.check_stored(model, None, files, loading)

    def recursive_replace(self) -> None:
        """Replace the model's layers by vLLM's, but not those of schemes, which compute in float32."""
        attentions, architecture = layers_for(self.model, "vLLM", _TAKES), of_model(self.model)
        body: Any = architecture.stacks(self.model)["decoder"]
        self._scheme_of = functools.partial(surgery.scheme_of, body)
        dtype = self.model_config.dtype
        terms = {layer: terms_of(self._scheme_of(attention), dtype) for layer, attention in attentions.items()}
        self._width = self._width_for(terms)
        body.posenc_outside = {}
        if self._width is not None:
            body.posenc_outside = {
                layer: functools.partial(_kept, _as_they_are if each.width is None else wider, self._width)
                for layer, each in terms.items()
            }
        scales = {layer: architecture.geometry(body, layer).scale for layer in attentions}
        schemes = [
            (module, name, module._modules.pop(name))
            for module in list(self.model.modules())
            for name in (surgery.OWN, surgery.SHARED)
            if name in module._modules
        ]
        super().recursive_replace()
        for module, name, scheme in schemes:
            module._modules[name] = scheme
        names = {module: name for name, module in self.named_modules()}
        for layer, attention in attentions.items():
            name, fuser = names[attention], _Patched(type(attention).__name__, known_scale=scales[layer])
            self._attentions[name], self.attention_fusers[layer] = attention, (name, fuser)

    def _width_for(self, terms: Mapping[int, Terms]) -> int | None:
        """Return the width of all heads, which have one cache; `None` leaves them as they are."""
        settings, text = self.model_config, self.text_config
        wide = [each for each in terms.values() if each.width is not None]
        if not wide:
            return None
        widths, span = [each.width or 0 for each in wide], min(each.span for each in wide)
        width: int = -(-max(settings.get_head_size(), *widths) // _STEP) * _STEP
        if len(terms) < text.num_hidden_layers:
            _refuse("got a scheme that needs wider heads in some layers; expected it in all, since they have one cache")
        if width > _WIDEST:
            _refuse(f"got a scheme that needs {max(widths)} channels a head; expected at most {_WIDEST}")
        if getattr(text, "attn_logit_softcapping", None):
            _refuse("got a scheme in further channels of queries, in a model that bounds its logits; use transformers")
        if settings.max_model_len > span:
            _refuse(f"got max_model_len={settings.max_model_len}; expected at most {span} for this scheme")
        if span < math.inf and settings.dtype == torch.float16:
            _refuse("got float16, which is too small for the factors of this scheme; use dtype='bfloat16'")
        return width

    def _get_attn_cls(self) -> Any:
        """Return what makes the attention of a layer: vLLM's own class, with places for slopes and sinks."""
        kind = super()._get_attn_cls()
        if kind is not Attention:
            _refuse(f"got a model for {kind.__name__}; expected a decoder with plain attention")

        def make(*, num_heads: int, prefix: str, **settings: Any) -> Any:
            attention = self._attentions.get(prefix.removesuffix(_OWN))
            terms = Terms() if attention is None else terms_of(self._scheme_of(attention))
            if self._width is not None:
                settings["head_size"] = self._width
            if terms.slopes is not None:
                settings["alibi_slopes"] = [0.0] * num_heads
            if terms.sinks is not None:
                settings["sinks"] = torch.zeros(num_heads)
            return Attention(num_heads=num_heads, prefix=prefix, **settings)

        return make

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights, and tell vLLM's attention the slopes and sinks that they hold."""
        loaded: set[str] = super().load_weights(weights)
        layers_for(self.model, "vLLM", _TAKES)  # Before, no scheme had values.
        for attention in self._attentions.values():
            terms, inside = terms_of(self._scheme_of(attention)), attention.attn
            for name, value in (("alibi_slopes", terms.slopes), ("sinks", terms.sinks)):
                if value is not None:
                    setattr(inside.impl, name, value.detach().float().clone())
        return loaded


def _kept(make: Kept, width: int, *given: Any) -> tuple[Tensor, ...]:
    """Return what vLLM keeps, with zeros up to the width of all heads."""
    return tuple(F.pad(x, (0, width - x.shape[-1])) for x in make(*given))


def _as_they_are(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, places: Positions) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


def _refuse(why: str) -> None:
    raise AttentionBackendError(f"vLLM cannot serve this model: {why}.")
