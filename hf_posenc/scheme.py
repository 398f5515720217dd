"""A positional scheme: a module with nine seams, each the identity unless overridden.

See `hf_posenc.operands` for the letters in shape comments.
"""

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from hf_posenc.equivalents import Equivalent, Nothing
from hf_posenc.errors import ExportError, OptionError, shown
from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import FastForms
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.ops import grouped_matmul, softmax_of_seen
from hf_posenc.pictures import Picture

Result = TypeVar("Result")
Direction = Literal["causal", "bidirectional"]

# The part of the model that each seam changes, for messages.
CHANGED = {
    "embed": "the input of the first layer",
    "project": "queries, keys or values",
    "recall": "cached keys",
    "score": "the logits of attention",
    "weigh": "the softmax",
    "mix": "the sum of values",
    "finish": "the output of attention",
}


class _Started(ABCMeta):
    """Metaclass that calls `reset_parameters` on each scheme as soon as its `__init__` has returned.

    It derives from `ABCMeta`, so that a scheme can also be an abstract class.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of `__init__`, for `help` and editors, which would show that of `__call__`."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=[*own.parameters.values()][1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.reset_parameters()
        return made


class Scheme(FastForms, nn.Module, metaclass=_Started):
    """A positional scheme for one attention layer, or shared by all layers of a stack.

    A subclass overrides some of the seams `embed`, `project`, `recall`, `score`, `weigh`, `mix`, `carry`, `finish` and
    `feed`, which run in this order. Its options are the keyword-only arguments of `__init__`; each is stored, resolved,
    as an attribute of the same name.

    Parameters are float32 and stay so when the model is cast to half precision, where distances and tables lose their
    meaning: the first integer that bfloat16 cannot hold is 257.

    Args:
        geometry: Shape of the layer.
        gates: Number of learned factors for `gated`.
    """

    # The registered name.
    name: str = ""
    # The registered directions of attention.
    directions: tuple[Direction, ...] = ("causal", "bidirectional")
    # The kinds of native encoding that this scheme can reproduce: "rotary", or a kind of `NativeTable`.
    reproduces: ClassVar[tuple[str, ...]] = ()
    # Options that make the start a no-op when the native encoding is kept; None if no options do.
    neutral_options: Mapping[str, Any] | None = None
    # Whether that no-op is exact, and not only within `Facts.tolerance`.
    neutral_is_exact: ClassVar[bool] = True
    # The way to bring a trained model to the scheme, which recipes follow.
    adaptation: Adaptation = Adaptation()
    # Pictures of numbers that only this scheme computes.
    pictures: ClassVar[tuple[Picture, ...]] = ()
    # Whether, as an add-on, it takes what those before it add to the logits away from the first key of a text.
    spares_first: ClassVar[bool] = False
    # Whether `score` reads the content of keys; the cache then also stores them without the native rotation.
    reads_keys: bool = False
    # Whether, as an add-on, it changes projections before the scheme that it is added to, keys and values included.
    projects_first: ClassVar[bool] = False
    # Whether the scheme is one module for the whole stack rather than one per layer.
    shared: bool = False
    # Number of coordinates of a token that the scheme reads; 0 reads positions only.
    axes: int = 0
    # Number of tokens of `Projection.recent` that a cache keeps; a crop can remove no more than these.
    history: int = 0

    def __init__(self, geometry: Geometry, gates: int = 0) -> None:
        super().__init__()
        self.geometry = geometry
        # Learned factors on what the scheme does, if it has a gate; 0 at the start, which is an exact no-op.
        self.gate_weight = nn.Parameter(torch.empty(gates)) if gates else None
        # Distance from which keys are hidden, an option of every scheme that `build` sets; `None` hides none.
        self.window: int | None = None
        # The part that all layers share. `build` makes it; inside a model the body holds it.
        self.common: Scheme | None = None

    def require(self, condition: bool, option: str, got: object, expected: str) -> None:
        if not condition:
            raise OptionError(f"{self.name}: option {option}={shown(got)}: expected {expected}.")

    def reset_parameters(self) -> None:
        """Set the parameters to their start, with the functions of `torch.nn.init` only; called after `__init__`.

        Loading a checkpoint calls this for parameters missing in the file; transformers then guards `torch.nn.init`, so
        loaded values stay.
        """
        if self.gate_weight is not None:
            nn.init.zeros_(self.gate_weight)

    def gated(self, x: Tensor, broadcast: int = 0) -> Tensor:
        """Return x times the gate, with so many dimensions added behind it; x itself without a gate."""
        if self.gate_weight is None:
            return x
        return x * self.gate_weight.to(x).view(-1, *[1] * broadcast)

    def make_common(self) -> "Scheme | None":
        """Make the part that all layers of a stack share, in a scheme that also has parameters per layer."""
        return None

    # -- seams ---------------------------------------------------------------------------------------------------------

    def embed(self, inputs: Tensor, positions: Tensor, coords: Tensor | None = None) -> Tensor:
        """Return the input of the first layer, given the embeddings of the tokens."""
        return inputs

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        """Transform fresh queries, keys and values before they are cached; may add per-token state and tables."""
        return Projection(q, k, v)

    def recall(self, k: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return all keys as they enter the logits, `[B, G, K, D]` or `[B, H, K, D]`, given the cached ones."""
        return k

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        """Return the logits `[B, H, q, K]` with positions, given scaled logits in float32 or wider.

        `q` and `k` are the results of `project` and `recall`; a kept native rotation is in the logits only.
        """
        return logits

    def weigh(self, logits: Tensor, block: Block) -> Tensor:
        """Turn logits into weights `[B, H, q, K]`. Masking replaces logits, since `-inf + bias` could overflow or give
        NaN.

        Columns beyond K are weights of vectors other than keys, for `mix`.
        """
        return softmax_of_seen(logits, block.keep)

    def mix(self, weights: Tensor, v: Tensor, block: Block) -> Tensor:
        """Sum values `[B, G, K, D]` by weights `[B, H, q, K]`: `[B, H, q, D]`, or wider for `carry` and `finish`."""
        return grouped_matmul(weights, v)

    def carry(self, output: Tensor, tokens: Tokens) -> Tensor | None:
        """Return `Tokens.carried` of the next layer, given the whole output of `mix`."""
        return tokens.carried

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        """Return the input `[B, H, Q, D]` of the output projection."""
        return output

    def feed(self, carried: Tensor, fed: Tensor) -> Tensor:
        """Update the result of `carry`, given the output `[B, S, E]` of the feed-forward before its residual."""
        return carried

    # -- what a scheme says of itself ------------------------------------------------------------------------------

    def overrides(self, seam: str) -> bool:
        """Whether this scheme overrides `seam`."""
        return getattr(type(self), seam) is not getattr(Scheme, seam)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        """Return the facts of this scheme in a model.

        By default the start is exact with the native encoding kept, if the neutral options are set.
        """
        neutral = self.neutral_options
        exact = native_kept and neutral is not None and all(getattr(self, x) == value for x, value in neutral.items())
        return Facts(exact=exact)

    def hides_keys(self) -> bool:
        """Whether a window hides keys within the model's context."""
        context = self.geometry.max_positions
        return self.window is not None and (context is None or self.window < context)

    def is_silent(self) -> bool:
        """Whether the scheme changes nothing, with its current parameters; by default, whether its gate is closed."""
        return self.gate_weight is not None and not bool(self.gate_weight.any())

    def stock_equivalent(self) -> Equivalent:
        """Return what this scheme computes in a text, with its current parameters, in terms that stock models have.

        Raises:
            ExportError: Stock models have no such terms. The message is the predicate of a sentence with the scheme as
                its subject.
        """
        if self.is_silent():
            return Nothing()
        changed = ", ".join(what for seam, what in CHANGED.items() if self.overrides(seam))
        raise ExportError(f"changes {changed or 'the model'} in a way for which stock models have no weights")

    def options(self) -> dict[str, Any]:
        """Return the resolved options, with which `build` makes the same scheme again."""
        found = {name: getattr(self, name) for name in option_names(type(self))}
        return found if self.window is None else {**found, "window": self.window}

    # -- module behaviour --------------------------------------------------------------------------------------------

    def forward(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call `function(self, ...)` as this module's forward.

        Wrappers that load parameters just in time (offloading, FSDP) or choose between copies (PEFT) act on a module's
        `forward`, so every use of the scheme must go through it.
        """
        return function(self, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Scheme":
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(device=moved.device, dtype=torch.promote_types(tensor.dtype, torch.float32))
            return moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


@functools.cache
def option_names(scheme: type[Scheme]) -> tuple[str, ...]:
    """Return the names of the options of a scheme class, in order."""
    parameters = inspect.signature(scheme.__init__).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def draw_start(parameter: Tensor, init: str, std: float) -> None:
    """Set a parameter to zero at `init="zero"`, to normal noise otherwise."""
    if init == "zero":
        nn.init.zeros_(parameter)
    else:
        nn.init.normal_(parameter, std=std)


def set_start(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to a computed start, like the functions of `torch.nn.init`.

    A parameter that transformers has just loaded, or one on the meta device, stays as it is.
    """
    if getattr(parameter, "_is_hf_initialized", False) or parameter.is_meta:
        return
    with torch.no_grad():
        # A model that is built from nothing has no values to compute a start from; memory would stay as it was.
        parameter.copy_(torch.zeros_like(parameter) if value.is_meta else value)
