"""The patched behaviour of bodies: from the arguments of a forward to the context of its layers."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posenc.blend import Blended
from hf_posenc.errors import DirectionError, OptionError, PositionError
from hf_posenc.operands import LARGEST_COUNT, check_coords
from hf_posenc.patches import cache as token_cache
from hf_posenc.patches.attention import CONTEXT, PosencAttention, arguments_of, check_backend
from hf_posenc.patches.context import (
    RUNNING,
    Context,
    Inputs,
    Kept,
    Native,
    Request,
    Switch,
    check_tensors,
    is_this_thread,
    read,
    resolve_positions,
    same_sequence,
    sequences,
    this_thread,
)
from hf_posenc.patches.surgery import SHARED, stock_class
from hf_posenc.scheme import Scheme

# The keyword under which a step of generation says which of its tokens are no padding, where the mask does not.
REAL = "posenc_real"
# Keywords that stock modules hand on to attention functions, which read some of them.
FUNCTION_ARGUMENTS = frozenset(inspect.signature(sdpa_attention_forward).parameters) - {"attention_mask", "is_causal"}
FUNCTION_ARGUMENTS |= {"mask", "sliding_window", "softcap", "s_aux"}
# The argument of stock forwards that takes embeddings; a few take token ids only.
_EMBEDDED = "inputs_embeds"
# The keyword under which callers pass coordinates.
COORDS = "position_coords"


def with_signature_of(stock: type, twin: type, name: str) -> None:
    """Give a method of a patched class the signature of the stock one."""
    method = getattr(twin, name)

    @functools.wraps(getattr(stock, name))
    def with_stock_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    setattr(twin, name, with_stock_signature)


class PosencBody(Switch):
    """Mixin of patched bodies: finds out positions, applies `embed`, and hands the context down."""

    # Names of the arguments of the stock forward, in order.
    posenc_arguments: ClassVar[tuple[str, ...]]
    # Whether the stock forward tells the attention function that it is causal; else the attention modules say so.
    posenc_causal: ClassVar[bool] = False
    # Whether the stock forward uses its keywords, which then come to the layers.
    posenc_hands_on: ClassVar[bool]
    # Whether schemes reach the embeddings by a hook, even where the forward takes embeddings.
    posenc_hooks: ClassVar[bool] = False
    # What a server that was admitted, and attends by itself, keeps of each layer, see `Context`; `None` is no server.
    posenc_outside: Mapping[int, Kept] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" not in vars(cls):
            return  # FSDP derives classes of its own from ours.
        stock = vars(cls)["posenc_stock"]
        cls.posenc_arguments = arguments_of(stock)
        cls.posenc_hands_on = _uses_keywords(inspect.unwrap(stock.forward).__code__)
        # Trainers read from the signature which columns of a dataset a model takes.
        with_signature_of(stock, cls, "forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        if self.is_disabled():
            token_cache.check_disabled(token_cache.cache_of(call))
            call = {name: value for name, value in call.items() if name not in (REAL, COORDS)}
            return self.stock_forward(call | {CONTEXT: Context(None, Native())})
        if self.posenc_outside is not None or isinstance(token_cache.cache_of(call), PagedAttentionCache):
            return self.run(self.prepare_outside(call))
        check_backend(self.config._attn_implementation)
        check_tensors(call)
        self.check_keywords(call)
        call = self.prepare(call)
        output = self.run(call)
        context: Context | None = call.get(CONTEXT)
        if context is not None and context.inputs is not None and context.inputs.packed is not None:
            token_cache.mark_packed(output)
        return output

    def prepare_outside(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the stock forward for a server: one row of tokens, with the position of each."""
        ids, embeds, given = call.get("input_ids"), call.get("inputs_embeds"), self.given_positions(call)
        if call.get(COORDS) is not None or given is None:
            raise PositionError(
                "Got a call of a server with coordinates or without position_ids; expected these alone."
            )
        tokens: Any = ids if embeds is None else embeds
        request = Request(tokens.shape[0], tokens.shape[1], tokens.device, given=given)
        context = replace(self.context(call, self.inputs_of(call, request, None)), outside=self.posenc_outside or {})
        return self.hand_down(self.embed(call, context), context)

    def check_keywords(self, call: Mapping[str, Any]) -> None:
        """Raise if a keyword would go through all modules to the attention function, and change what that computes."""
        for name in FUNCTION_ARGUMENTS - {*self.posenc_arguments}:
            if call.get(name) is not None:
                raise OptionError(
                    f"Got {name}, an argument of attention functions; patched models take it from their config. Leave "
                    "it out."
                )
        given, stated = call.get("is_causal"), getattr(self.config, "is_causal", None)
        if given is None and stated is False and self.is_causal_stack():
            given = stated
        if given is not None and bool(given) != self.is_causal_stack():
            kind = "encoders are not" if given else "decoders are"
            raise DirectionError(f"Got is_causal={given}; patched {kind} causal. Leave it out, or use the stock model.")

    def run(self, call: dict[str, Any]) -> Any:
        """Call the stock forward with the arguments that `prepare` returned."""
        context = call.get(CONTEXT)
        if context is None or not self.hooks() or not self.embedders():
            return self.stock_forward(call)

        thread = this_thread()

        def embed(inputs: Tensor) -> Tensor:
            # Other threads run the same module, with hooks of their own.
            return self.embedded(inputs, context) if is_this_thread(thread) else inputs

        handle = self.hook_embeddings(embed)
        try:
            return self.stock_forward(call)
        finally:
            handle.remove()

    def stock_forward(self, call: dict[str, Any]) -> Any:
        """Call the stock forward. Where it keeps its keywords, layers find the context in their thread."""
        forward = super().forward  # type: ignore[misc]
        if self.posenc_hands_on:
            return forward(**call)
        if self.training and any(getattr(each, "gradient_checkpointing", False) for each in self.modules()):
            raise OptionError(
                f"{stock_class(type(self)).__name__} gives its layers no keywords, so gradient checkpointing could not "
                "run them again with their positions. Call model.gradient_checkpointing_disable()."
            )
        outer, RUNNING.context = RUNNING.context, call.get(CONTEXT)
        try:
            return forward(**call)
        finally:
            RUNNING.context = outer

    def hooks(self) -> bool:
        """Whether schemes reach the embeddings by a hook only."""
        return self.posenc_hooks or _EMBEDDED not in self.posenc_arguments

    def hook_embeddings(self, embed: Callable[[Tensor], Tensor]) -> Any:
        """Let a function act on the embeddings where the forward takes none; return what `remove` ends."""
        inner: nn.Module = self.get_input_embeddings()
        return inner.register_forward_hook(lambda module, args, output: embed(output))

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the stock forward, with positions, embedded inputs and the context in them."""
        coords: Tensor | None = call.pop(COORDS, None)
        ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
        if (ids is None) == (embeds is None):
            return call  # The stock forward says what is wrong.
        cache = token_cache.cache_of(call)
        if not token_cache.is_known(cache) and any(isinstance(module, PosencAttention) for module in self.modules()):
            token_cache.check(cache)  # not of a stack that was left out
        given = self.given_positions(call)
        tokens: Any = ids if embeds is None else embeds
        request = read(call, tokens, tokens_in(cache), given, call.pop(REAL, None))
        inputs = self.inputs_of(call, request, coords)
        token_cache.refuse_packed(cache)
        if request.may_be_packed():
            inputs = self.keep_apart(call, request, inputs)
        context = self.context(call, inputs)
        return self.hand_down(self.embed(call, context), context)

    def inputs_of(self, call: dict[str, Any], request: Request, coords: Tensor | None) -> Inputs:
        counted = None if request.placed else self.counted_positions(call, request.past)
        positions = resolve_positions(request, counted)
        if coords is not None:
            coords = check_coords(coords, self.axes(), request.batch, request.length, request.device)
        # A graph has no numbers: none exceeds the largest count.
        traced = torch.compiler.is_compiling()
        reach = LARGEST_COUNT if traced else int(positions.max()) if positions.numel() else 0
        return Inputs(positions, reach, request.real, coords, ruled=request.ruled)

    def keep_apart(self, call: dict[str, Any], request: Request, inputs: Inputs) -> Inputs:
        """Mask sequences that are packed into one row from each other; return the inputs with their numbers."""
        packed = sequences(inputs.positions, inputs.real, request.samples)
        if packed is not None:
            mask = same_sequence(packed, packed, causal=self.is_causal_stack(), float_dtype=self.mask_dtype())
            call["attention_mask"] = self.masks_of_packed(mask)
            return replace(inputs, packed=packed, ruled=False)
        if request.mask is None and bool((inputs.positions.diff(dim=-1) != 1).any()):
            # transformers takes any jump for the start of a sequence, unless there is a mask.
            call["attention_mask"] = torch.ones(request.batch, request.length, dtype=torch.long, device=request.device)
        return inputs

    def context(self, call: Mapping[str, Any], inputs: Inputs) -> Context:
        config = self.config
        # A model that has no other implementation than eager was not asked to be dense.
        eager = config._attn_implementation == "eager" and bool(self._supports_sdpa or config.output_attentions)
        # Some bodies do not pass `output_attentions` on to their layers.
        dense = eager or bool(call.get("output_attentions"))
        return Context(inputs, Native(), self._modules.get(SHARED), self.posenc_strengths.scheme, dense)

    def embedders(self) -> list[Scheme]:
        """Return the schemes that act on the input of the first layer."""
        shared: Any = self._modules.get(SHARED)
        return [] if shared is None else [scheme for scheme in shared.schemes() if scheme.overrides("embed")]

    def embed(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        """Return the arguments of a forward, with embeddings of the tokens if these schemes change them."""
        if self.embedders() and not self.hooks():
            inputs = call.get(_EMBEDDED)
            if inputs is None:
                inputs = self.get_input_embeddings()(call.pop("input_ids"))
            call[_EMBEDDED] = self.embedded(inputs, context)
        return call

    def embedded(self, inputs: Tensor, context: Context) -> Tensor:
        """Return what these schemes make of the embeddings of the tokens, `[B, S, E]`."""
        for scheme in self.embedders():
            inputs = scheme(_embed, inputs, context)
        return inputs

    def axes(self) -> set[int]:
        """Return how many coordinates of a token the schemes of this body read."""
        return {module.axes for module in self.modules() if isinstance(module, Scheme)}

    def mask_dtype(self) -> torch.dtype | None:
        """Return the dtype of the masks that the attention implementation adds; `None` if it takes booleans."""
        dtype: torch.dtype = self.get_input_embeddings().weight.dtype
        return dtype if self.config._attn_implementation == "eager" else None

    def masks_of_packed(self, mask: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the masks for the layers, given that of packed sequences, `[B|1, 1, S, S]`."""
        return mask

    def is_causal_stack(self) -> bool:
        says: Any = next(
            each for each in self.modules() if hasattr(each, "is_causal") or isinstance(each, PosencAttention)
        )
        return self.posenc_causal or bool(getattr(says, "is_causal", getattr(says, "posenc_causal", False)))

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        return call.get("position_ids")

    def counted_positions(self, call: dict[str, Any], past: int | Tensor) -> Tensor | None:
        """Return the positions of the new tokens, where the model counts them in a way of its own."""
        return None

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        """Put positions and context into the arguments of the stock forward."""
        assert context.inputs is not None
        return call | {"position_ids": context.inputs.positions, CONTEXT: context}


def _embed(scheme: Scheme, inputs: Tensor, context: Context) -> Tensor:
    assert context.inputs is not None
    acting = scheme if context.strength == 1 else Blended(scheme, context.strength)
    return acting.embed(inputs, context.inputs.positions, context.inputs.coords)


def _uses_keywords(code: CodeType) -> bool:
    """Whether a function reads its `**` argument."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    names = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]
    name = names[1 if code.co_flags & inspect.CO_VARARGS else 0]
    return any(name in step.argrepr.split(", ") for step in dis.get_instructions(code))


def tokens_in(cache: Cache | None) -> int | Tensor:
    if cache is None:
        return 0
    held: int | Tensor = token_cache.self_attention(cache).get_seq_length()
    # A static cache counts in a tensor that its layers are about to change.
    return held.clone() if isinstance(held, torch.Tensor) else held
