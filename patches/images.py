"""Images: a learned table of positions that is added to the embeddings of their patches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_posenc.coordinates import grid
from hf_posenc.errors import ArchitectureError, PositionError, ShapeError
from hf_posenc.operands import Geometry, NativeTable, check_coords
from hf_posenc.patches.architecture import embedding_rms, of_config, of_model, refuse_changed, weight_of
from hf_posenc.patches.atomic_files import reading
from hf_posenc.patches.attention import CONTEXT, arguments_of
from hf_posenc.patches.body import COORDS, PosencBody
from hf_posenc.patches.context import Context, Inputs, Switch, real_tokens, refuse_samples
from hf_posenc.patches.family import TABLES, Code, Family, built_by, names_of
from hf_posenc.patches.probe import OFFSETS, Facts, blank_module, read_facts
from hf_posenc.patches.surgery import stock_class

# The argument that asks for an interpolated table.
_STRETCH = "interpolate_pos_encoding"


class PosencHolder(Switch):
    """Mixin of modules with a position table as their parameter: it has its strength, and is zero once removed."""

    posenc_holds: ClassVar[str] = "weight"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            setattr(cls, cls.posenc_holds, property(cls.posenc_table))

    def posenc_table(self) -> Tensor:
        table: Tensor = self._parameters[self.posenc_holds]
        native = 0.0 if self.posenc_removed else self.posenc_strengths.native
        if native == 1 or self.is_disabled():
            return table
        return torch.zeros_like(table) if native == 0 else table * native


class PosencOffsets(Switch):
    """Mixin of modules that make biases of offsets between patches, at part of their strength, and none once removed.

    Stock layers add them to the mask of padding, or take them for the mask.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.posenc_removed and not self.is_disabled():
            return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self._parameters[OFFSETS].device)
        bias: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        native = self.posenc_strengths.native
        return bias if native == 1 or self.is_disabled() else bias * native


class ImageBody(PosencBody):
    """Mixin of patched bodies. The patches follow row by row, behind the class token and others, at position 0 and on.

    The coordinates of a patch are its row and column on the grid, counted from 0; other tokens have (0, 0), where
    nothing is rotated. The argument `position_coords` of the forward, `[B|1, tokens, 2]`, replaces them.
    """

    # Number of tokens before the patches; `None` if it was not read yet.
    posenc_others: int | None = None
    # The argument with what is cut into patches.
    posenc_input: ClassVar[str] = "pixel_values"

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        pixels, coords = call.get(self.posenc_input), call.pop(COORDS, None)
        if pixels is None:
            return call  # The stock forward says what is wrong.
        if call.get("position_ids") is not None:
            raise PositionError(
                "Got position_ids; the patches of an image have coordinates. Pass position_coords, or leave both out."
            )
        refuse_samples(call, "images are not packed into rows. Leave it out.")
        (rows, columns), first = self.grid(pixels), others(self) if self.posenc_others is None else self.posenc_others
        batch, length = pixels.shape[0], first + rows * columns
        axes = self.axes()
        if coords is not None:
            coords = check_coords(coords, axes, batch, length, pixels.device)
        elif axes - {0, 1}:
            coords = grid_coords(rows, columns, pixels.device, first)
        positions = torch.arange(length, device=pixels.device)[None]
        real = real_tokens(call.get("attention_mask"), 0, length)
        return self.hand_down(call, self.context(call, Inputs(positions, length - 1, real, coords)))

    def grid(self, pixels: Tensor) -> tuple[int, int]:
        height, width = pixels.shape[-2:]
        patch, trained = sizes(self.config)
        rows, columns = height // patch[0], width // patch[1]
        # With the table, transformers checks the size.
        if removed(self) and (height, width) not in (trained, (rows * patch[0], columns * patch[1])):
            raise ShapeError(
                f"Got images of {height} x {width} pixels; expected multiples of the patch size, {patch[0]} x "
                f"{patch[1]}. Resize or pad them."
            )
        return rows, columns

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        # Of a table of zeros; images of the trained size need none.
        if _STRETCH in self.posenc_arguments and removed(self):
            size = tuple(call["pixel_values"].shape[-2:])
            call = call | {_STRETCH: call.get(_STRETCH) or size != sizes(self.config)[1]}
        return call | {CONTEXT: context}

    def hook_embeddings(self, embed: Callable[[Tensor], Tensor]) -> RemovableHandle:
        embeddings = embeddings_of(self)
        dropout = getattr(embeddings, "dropout", None)
        if isinstance(dropout, nn.Module):
            return dropout.register_forward_pre_hook(lambda module, args: (embed(args[0]),))

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return embed(output) if isinstance(output, Tensor) else (embed(output[0]), *output[1:])

        handle: RemovableHandle = embeddings.register_forward_hook(after)
        return handle


class SpectrogramBody(ImageBody):
    """Mixin of patched bodies of sound. Rows of patches are frequencies, and columns are times."""

    posenc_input = "input_values"

    def grid(self, pixels: Tensor) -> tuple[int, int]:
        shape, *_ = cut(self.config)
        if tuple(pixels.shape[-2:]) != shape:
            raise ShapeError(f"Got sound of {list(pixels.shape[-2:])} frames and bins; expected {list(shape)}. Pad it.")
        return patches_of(self.config)


class TurnedImageBody(ImageBody):
    """Mixin of patched bodies that rotate queries and keys by the places of patches, for images of any size."""

    def grid(self, pixels: Tensor) -> tuple[int, int]:
        (height, width), patch = pixels.shape[-2:], sizes(self.config)[0]
        return height // patch[0], width // patch[1]

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        return call | {CONTEXT: context}


def grid_coords(rows: int, columns: int, device: torch.device, first: int = 1) -> Tensor:
    """Return row and column of the tokens before the patches, (0, 0), and of each patch, float32 `[1, tokens, 2]`."""
    patches = grid(rows, columns).to(device)
    return torch.cat((patches.new_zeros(1, first, 2), patches), dim=1)


def embeddings_of(body: Any) -> Any:
    found = (module for module in body.modules() if any(hasattr(module, name) for name in TABLES))
    return next(found, getattr(body, "embeddings", None))


def holder_of(body: Any) -> tuple[nn.Module, str]:
    """Return the module with the table as its parameter, and its name."""
    embeddings = embeddings_of(body)
    name = next((name for name in TABLES if hasattr(embeddings, name)), "")
    table = embeddings._modules.get(name) if embeddings is not None else None
    holder, name = (embeddings, name) if table is None else (table, "weight")
    if holder is None or holder._parameters.get(name) is None:
        rotary = next((kind for kind in built_by(type(body)) if kind.__name__.endswith("RotaryEmbedding")), None)
        if rotary is not None:
            given = ", ".join(arguments_of(rotary))
            refuse_images(type(body), f"rotate by {rotary.__name__}, which is given ({given}) and not the image itself")
        refuse_images(type(body), f"have no table {' or '.join(TABLES)}")
    return holder, name


def removed(body: Any) -> bool:
    return next(
        (each.posenc_removed for each in body.modules() if isinstance(each, PosencHolder | PosencOffsets)), False
    )


def sizes(config: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of patches and of images in a config, as height and width."""
    found = [getattr(config, name, None) for name in ("patch_size", "image_size")]
    pairs = [(each, each) if isinstance(each, int) else tuple(each or ()) for each in found]
    if any(len(pair) != 2 for pair in pairs):
        refuse_images(type(config), f"state sizes of patches and images of {found[0]} and {found[1]}")
    return pairs[0], pairs[1]


def cut(config: Any) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]:
    """Return the shape of one image in training, `[C, H, W]`, or of a spectrogram, `[frames, bins]`; the sizes of
    patches along its last two axes, and the steps from one patch to the next.
    """
    if hasattr(config, "frequency_stride"):
        steps = config.time_stride, config.frequency_stride
        return (config.max_length, config.num_mel_bins), (config.patch_size,) * 2, steps
    patch, size = sizes(config)
    return (getattr(config, "num_channels", 3), *size), patch, patch


def patches_of(config: Any) -> tuple[int, int]:
    """Return the rows and columns of patches in training; the rows of a spectrogram are its bins."""
    shape, patch, steps = cut(config)
    one, other = ((size - each) // step + 1 for size, each, step in zip(shape[-2:], patch, steps, strict=True))
    return (one, other) if len(shape) == 3 else (other, one)


def refuse_images(kind: type, why: str) -> NoReturn:
    raise ArchitectureError(
        f"Models of {kind.__name__} {why}, so they are no family of images that can be read from its code. Write an "
        "architecture by hand, see docs/own_architecture.md."
    )


def others(body: Any) -> int:
    """Return the number of tokens before the patches, such as the class token."""
    stated = {key: value for key, value in vars(body.config).items() if not key.startswith(("posenc", "_name_or_path"))}
    if embeddings_of(body) is None:
        holder_of(body)  # which says so
    kind = type(embeddings_of(body))
    return _others(getattr(kind, "posenc_stock", kind), body.config, repr(stated))


_KNOWN: dict[tuple[type, str], int] = {}


@torch.inference_mode()
def _others(kind: type, config: Any, stated: str) -> int:
    if (kind, stated) not in _KNOWN:
        (rows, columns), (shape, *sides) = patches_of(config), cut(config)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            try:
                blank = blank_module(kind, config, 0).to_empty(device="cpu").float().eval()
                for parameter in blank.parameters():
                    nn.init.normal_(parameter)
                for name, buffer in blank.named_buffers():
                    if name.endswith("position_ids"):
                        buffer.copy_(torch.arange(buffer.shape[-1]))
                pixels = torch.randn(1, *shape, dtype=torch.float32)  # loading changes the default
                last = pixels.clone()
                # What the last patch alone sees, where patches overlap.
                each = zip(shape[-2:], *sides, strict=True)
                top, left = ((size - patch) // step * step + patch - step for size, patch, step in each)
                last[..., top:, left:] += 1.0
                made = [blank(x) for x in (pixels, pixels + 1, last, pixels)]
            except ArchitectureError:
                raise
            except Exception as error:  # of any kind: the code is not ours
                refuse_images(kind, f"do not embed an image of {' x '.join(map(str, shape))} ({error})")
        whole, moved, end, again = (x if isinstance(x, Tensor) else x[0] for x in made)
        if not torch.equal(whole, again):
            refuse_images(kind, "embed the same image in other ways each time, since they choose patches by chance")
        changed = [(whole - x).abs().amax(-1)[0].nonzero().flatten().tolist() for x in (moved, end)]
        count = whole.shape[1]
        first = count - rows * columns
        if changed[0] and changed[0][-1] < count - 1:
            refuse_images(kind, f"have {count - 1 - changed[0][-1]} more tokens behind the patches of an image")
        if changed != [list(range(first, count)), [count - 1]]:
            refuse_images(kind, f"make other tokens of an image than {rows} x {columns} patches in rows, behind others")
        _KNOWN[kind, stated] = first
    return _KNOWN[kind, stated]


class ImageFamily(Family):
    """Models of images with any head. The table enters once, before the first layer, so all layers have it or none.

    Without the table, images have any size that is a multiple of the patch size; with it, sizes other than the trained
    one need `interpolate_pos_encoding`, as in transformers.
    """

    native = "learned table of positions"
    native_per_layer = False
    native_fades = True
    acting: ClassVar[type[ImageBody]] = ImageBody

    @classmethod
    def fits(cls, code: Code) -> bool:
        return "pixel_values" in arguments_of(code.body)

    @classmethod
    def holders(cls, code: Code) -> Mapping[type, tuple[type, dict[str, Any]]]:
        found: dict[type, tuple[type, dict[str, Any]]] = {}
        for kind in built_by(code.body):
            held = next((name for name in TABLES if name in names_of(kind)), None)
            if held is not None:
                found |= {kind: (PosencHolder, {"posenc_holds": held}), nn.Embedding: (PosencHolder, {})}
        return found

    def native_parameters(self, body: Any) -> Sequence[nn.Parameter]:
        holder, name = holder_of(body)
        return [holder._parameters[name]]  # type: ignore[list-item]

    def swapped(self, body: Any) -> Sequence[nn.Module]:
        return [holder_of(body)[0]]

    def attributes(self, body: Any, layer: int) -> Mapping[str, Any]:
        body.posenc_others = others(body)
        return super().attributes(body, layer)

    def table(self, body: Any) -> Tensor:
        return weight_of(*holder_of(body)).detach().flatten(0, -2)

    def check_native(self, body: Any) -> None:
        holder_of(body)  # refuses a body without one
        kind = type(embeddings_of(body))
        blank = blank_module(getattr(kind, "posenc_stock", kind), body.config, 0)
        rows, wanted = (len(weight_of(*holder_of(each)).flatten(0, -2)) for each in (body, blank))
        if rows != wanted:
            refuse_changed(body, f"its table has {rows} rows, and its config states {wanted}")

    def geometry(self, body: Any, layer: int) -> Geometry:
        tokens = others(body) + math.prod(patches_of(body.config))
        native = self.native_table(body, layer, tokens)
        return replace(super().geometry(body, layer), axes=2, max_positions=tokens, native=native)

    def native_table(self, body: Any, layer: int, tokens: int) -> NativeTable | None:
        """Return what schemes may start from, given the tokens of an image."""
        table = self.table(body)
        # Some tokens have no row in the table.
        return NativeTable("learned", table) if len(table) == tokens else None

    def embedding_rms(self, body: Any) -> float | None:
        # The size of embedded patches depends on the images, so the size of the table stands for it.
        return embedding_rms(self.table(body))

    def example(self, body: Any) -> dict[str, Tensor]:
        weight, shape = next(body.parameters()), (1, *cut(body.config)[0])
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(weight)
        return {self.acting.posenc_input: drawn}


class SpectrogramFamily(ImageFamily):
    """Models of sound whose spectrogram is cut into patches, of one length."""

    acting = SpectrogramBody

    @classmethod
    def fits(cls, code: Code) -> bool:
        return SpectrogramBody.posenc_input in arguments_of(code.body) and hasattr(code.config, "frequency_stride")


@torch.no_grad()
def resized(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Return a copy of a stock model for images of `size` x `size` pixels. A table is what transformers interpolates.

    Raises:
        ArchitectureError: The model reads no images, or none of that size.
        ShapeError: The size is no multiple of the patch size.
    """
    check_encoder(model.config)
    body, (patch, _) = body_of(model), sizes(model.config)
    if size % patch[0] or size % patch[1]:
        raise ShapeError(f"Got {size} pixels; expected a multiple of the patch size, {patch[0]} x {patch[1]}.")
    config = copy.deepcopy(model.config)
    config.image_size = size if isinstance(config.image_size, int) else [size, size]
    with torch.random.fork_rng(devices=[]):
        made = type(model)(config).to(model.device, model.dtype).eval()
    weights = model.state_dict()
    pixels = torch.zeros(1, getattr(config, "num_channels", 3), size, size, device=model.device, dtype=model.dtype)
    with reading(f"An image of {size} pixels", kind=ArchitectureError):
        for name, parameter in made.named_parameters():
            if parameter.shape != weights[name].shape and name.endswith(OFFSETS):
                old, new = (each.get_submodule(name.removesuffix(f".{OFFSETS}")) for each in (model, made))
                weights[name] = _offsets_for(old, new, size // patch[0])
            elif parameter.shape != weights[name].shape:
                weights[name] = _table_for(body, pixels).view(parameter.shape)
        made.load_state_dict(weights)
        one, other = (body_of(each)(pixels, **stretched(body))[0] for each in (model.eval(), made))
    if not torch.allclose(one, other, atol=1e-3, rtol=1e-3):
        refuse_images(type(model), f"compute something else once they are made for {size} pixels")
    return made


def check_encoder(config: Any) -> None:
    """Raise `ArchitectureError` unless a config is that of an image encoder known here."""
    if hasattr(config, "vision_config"):
        raise ArchitectureError(
            f"A {config.model_type!r} has an image encoder and more; expected the encoder alone. Save it first: "
            "AutoModel.from_pretrained(MODEL, config=config.vision_config).save_pretrained(FOLDER), with its image "
            "processor."
        )
    family = of_config(config)
    if not isinstance(family, ImageFamily) or isinstance(family, SpectrogramFamily):
        raise ArchitectureError(f"Models of type {config.model_type!r} read no images; expected an image encoder.")


def body_of(model: Any) -> Any:
    """Return the module of an image encoder, patched or not, that takes `pixel_values` and returns their states."""
    return next(iter(of_model(model).stacks(model).values()))


def stretched(body: Any) -> dict[str, bool]:
    """Return the keywords with which the body of an image encoder reads images of any size."""
    return {_STRETCH: True} if _STRETCH in arguments_of(type(body)) else {}


def _table_for(body: Any, pixels: Tensor) -> Tensor:
    """Return the table of a body for images `[1, C, H, W]`, `[rows, E]`, as its embeddings interpolate it."""
    holder, name = holder_of(body)
    table, embeddings = holder._parameters[name], embeddings_of(body)
    alone = copy.deepcopy(embeddings).eval()
    for (_, old), new in zip(embeddings.named_parameters(), alone.parameters(), strict=True):
        if old is not table:
            new.zero_()
    found = alone(pixels, **stretched(embeddings))
    tokens = (found if isinstance(found, Tensor) else found[0])[0]
    patch, (height, width) = sizes(body.config)[0], pixels.shape[-2:]
    # Some tokens before the patches may have no row.
    first = len(weight_of(holder, name).flatten(0, -2)) - math.prod(patches_of(body.config))
    return torch.cat((tokens[:first], tokens[-(height // patch[0]) * (width // patch[1]) :]))


def _offsets_for(old: Any, new: Any, side: int) -> Tensor:
    """Return the table of biases for images of `side` x `side` patches, as the module of another size makes them."""
    table = torch.empty_like(new._parameters[OFFSETS])
    table[_numbers(new, side).flatten()] = old((side, side))[0].flatten(1).T
    return table


def _numbers(module: Any, side: int) -> Tensor:
    """Return the row of its table that a module of biases takes for each query and key, `[S, S]`."""
    table = module._parameters[OFFSETS]
    numbered = copy.deepcopy(module).double()
    numbered._parameters[OFFSETS] = torch.arange(len(table)).to(table.device).double()[:, None].expand(table.shape)
    return cast(Tensor, numbered((side, side))[0, 0].round().long())


def _in_order(kind: Any, config: Any) -> bool:
    """Whether the table of a module of biases has the order that `NativeTable` states."""
    side, other = patches_of(config)
    if (kind, side, other) not in _ORDERED:
        with torch.device("cpu"):
            places, module = grid_coords(side, side, torch.device("cpu"))[0].long(), kind(config)
        offset = places[:, None] - places + side - 1
        expected, count = (2 * side - 1) * offset[..., 0] + offset[..., 1], (2 * side - 1) ** 2
        expected[0], expected[:, 0], expected[0, 0] = count, count + 1, count + 2
        _ORDERED[kind, side, other] = side == other and torch.equal(_numbers(module, side), expected)
    return _ORDERED[kind, side, other]


_ORDERED: dict[tuple[type, int, int], bool] = {}


class OffsetImageFamily(ImageFamily):
    """Models with biases of the offsets between patches, in each layer or shared; some have a table, too, or nothing.

    A module makes them, for the layers to add to the mask of padding.
    """

    native = "learned biases of offsets between patches"

    @classmethod
    def fits(cls, code: Code) -> bool:
        return ImageFamily.fits(code) and bool(_making(code.body))

    @classmethod
    def holders(cls, code: Code) -> Mapping[type, tuple[type, dict[str, Any]]]:
        return {**super().holders(code), **dict.fromkeys(_making(code.body), (PosencOffsets, {}))}

    def _has_table(self, body: Any) -> bool:
        return any(getattr(embeddings_of(body), name, None) is not None for name in TABLES)

    def _biases(self, body: Any) -> list[Any]:
        return [module for module in body.modules() if OFFSETS in module._parameters]

    def native_parameters(self, body: Any) -> Sequence[nn.Parameter]:
        own = super().native_parameters(body) if self._has_table(body) else ()
        return [*own, *(module._parameters[OFFSETS] for module in self._biases(body))]

    def swapped(self, body: Any) -> Sequence[nn.Module]:
        return [*(super().swapped(body) if self._has_table(body) else ()), *self._biases(body)]

    def check_native(self, body: Any) -> None:
        if self._has_table(body):
            super().check_native(body)
        stated = {len(weight_of(blank_module(kind, body.config, 0), OFFSETS)) for kind in _making(self.body)}
        for module in self._biases(body):
            if len(rows := weight_of(module, OFFSETS)) not in stated:
                refuse_changed(body, f"it has biases of {len(rows)} offsets, and its config states {stated}")

    def native_table(self, body: Any, layer: int, tokens: int) -> NativeTable | None:
        biases, layers = self._biases(body), len(self.layers(body))
        if not biases and self._has_table(body):
            return super().native_table(body, layer, tokens)
        if self._has_table(body) or len(biases) not in (1, layers):
            return None  # nothing, or the sum of two
        bias, shared = biases[layer % len(biases)], len(biases) == 1
        known = _in_order(stock_class(type(bias)), body.config)
        return NativeTable("offsets", weight_of(bias, OFFSETS).detach(), shared=shared) if known else None

    def embedding_rms(self, body: Any) -> float | None:
        return super().embedding_rms(body) if self._has_table(body) else None


def _making(body: type) -> list[type[nn.Module]]:
    """Return the classes of modules that make biases of offsets between patches."""
    return [kind for kind in built_by(body) if OFFSETS in names_of(kind) and "window_size" in arguments_of(kind)]


class TurnedImageFamily(ImageFamily):
    """Models of images that have no table, and rotate by the places of patches. The model makes the angles itself."""

    native = "rotation by the places of patches"
    native_per_layer = True
    native_fades = False
    acting = TurnedImageBody

    @classmethod
    def fits(cls, code: Code) -> bool:
        return ImageFamily.fits(code) and bool(_turning(code.body))

    @classmethod
    def holders(cls, code: Code) -> Mapping[type, tuple[type, dict[str, Any]]]:
        return {}

    def native_parameters(self, body: Any) -> Sequence[nn.Parameter]:
        return ()

    def swapped(self, body: Any) -> Sequence[nn.Module]:
        return ()

    def facts(self, body: Any, layer: int) -> Facts:
        return read_facts(body.config, self.layer_of(body), self.attention, _turning(self.body)[0], layer)

    def check_native(self, body: Any) -> None:
        kind = _turning(self.body)[0]
        with torch.device("cpu"):
            stated: Any = kind(body.config)
        live = next(module for module in body.modules() if isinstance(module, kind))
        for name, buffer in live.named_buffers():
            if not buffer.is_meta and not torch.allclose(buffer.float().cpu(), stated.get_buffer(name), rtol=1e-2):
                refuse_changed(body, "it rotates otherwise than its config states")

    def geometry(self, body: Any, layer: int) -> Geometry:
        tokens = others(body) + math.prod(patches_of(body.config))
        return replace(self.facts(body, layer).geometry, layer=layer, causal=False, axes=2, max_positions=tokens)

    def embedding_rms(self, body: Any) -> float | None:
        return None


def _turning(body: type) -> list[type[nn.Module]]:
    """Return the class of the rotary module of a body, whose forward takes images."""
    takes = (kind for kind in built_by(body) if arguments_of(kind) == ("pixel_values",))
    return [kind for kind in takes if "rope" in kind.__name__.lower() or "rotary" in kind.__name__.lower()][:1]
