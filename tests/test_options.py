"""Every wrong option, geometry, name and operand is refused at the door, in words that say what to do."""

import inspect
import re
import typing

import pytest
import torch
from torch import nn

from hf_posenc import (
    Geometry,
    OptionError,
    PosencError,
    PositionError,
    Scheme,
    ShapeError,
    UnknownSchemeError,
    attend,
    build,
    describe,
    register_scheme,
    schemes,
)
from hf_posenc.attention import executors
from hf_posenc.operands import LARGEST_COUNT, NativeTable

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 6, 11


def geometry(**changes) -> Geometry:
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN, "max_positions": 64}
    return Geometry(**{**shape, **changes})


def refused(error: type[PosencError], *parts: str):
    """Expect an error whose message has these parts, in this order."""
    assert issubclass(error, ValueError)
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(part) for part in parts))


every_scheme = pytest.mark.parametrize("name", list(schemes()))

# -- names -------------------------------------------------------------------------------------------------------------


def test_names_of_schemes() -> None:
    known = schemes()
    assert list(known) == sorted(known)
    for got, meant in (("alibbi", "alibi"), ("Fire", "fire"), ("sinusiodal", "sinusoidal"), ("xyz", None)):
        hint = "" if meant is None else f"Did you mean {meant!r}? "
        with refused(UnknownSchemeError, f"There is no scheme {got!r}. {hint}Known: {', '.join(known)}."):
            build(got, geometry())
    for got in (None, 3, ["fire"]):
        with refused(UnknownSchemeError, f"Expected the name of a scheme, got {got!r}.", "Known: alibi, "):
            build(got, geometry())


# -- options -----------------------------------------------------------------------------------------------------------


@every_scheme
def test_unknown_option(name: str) -> None:
    known = ", ".join(sorted(schemes()[name].option_defaults())) or "none"
    with refused(OptionError, f"{name} has no option 'nonsense'. ", f"Known: {known}."):
        build(name, geometry(), nonsense=1)


def flat(hint: object) -> list[object]:
    inside = typing.get_args(hint)
    return [x for part in inside for x in flat(part)] if inside else [hint]


# Values that no annotation of a kind takes. True is no number, 1 is no bool.
WRONG_TYPES = {
    bool: [1, "yes", None],
    int: [True, 2.0, "2", None],
    float: [True, "2", None, float("nan"), float("inf")],
    str: ["nonsense", 1, True, None],
}
HINTS = [
    (name, option, hint)
    for name, info in schemes().items()
    for option, hint in typing.get_type_hints(info.cls.__init__).items()
    if option in info.option_defaults()
]


@pytest.mark.parametrize(("name", "option", "hint"), HINTS)
def test_option_of_a_wrong_type(name: str, option: str, hint: object) -> None:
    kinds = flat(hint)
    kind = next(kind if isinstance(kind, type) else type(kind) for kind in kinds)
    expected = "None" if type(None) in kinds else repr(kinds[0]) if kind is str else ""
    values = [True, 2, 1.0, "0"] if kinds == [0, 1] else WRONG_TYPES[kind]
    for got in values:
        if got is not None or type(None) not in kinds:
            with refused(OptionError, f"{name}: option {option}={got!r}: expected ", expected):
                build(name, geometry(), **{option: got})


CAUSAL, BOTH_WAYS, WIDE = geometry(), geometry(causal=False), geometry(head_dim=16)
OWN = geometry(inv_freq=torch.ones(3))
OWN_T5 = geometry(native=NativeTable("t5", torch.randn(32, HEADS), 128))
BLOCKS = ("liere", "comrope_ap", "comrope_ld")
OUT_OF_RANGE = [
    ("fire", CAUSAL, "init_c", 0, {}, "another number than 0, from which c never learns"),
    ("learned", CAUSAL, "num_positions", 0, {}, "at least 1"),
    ("learned", geometry(max_positions=None), "num_positions", None, {}, "a number of rows, at least 1"),
    ("learned", CAUSAL, "init", "native", {}, "'normal' or 'zero': the model has no learned table that can have 64"),
    ("sandwich", CAUSAL, "dim", 7, {}, "an even number, at least 2"),
    ("t5", CAUSAL, "num_buckets", 7, {}, "an even number, at least 2 in this direction"),
    ("t5", OWN_T5, "init", "native", {"num_buckets": 16}, "'normal' or 'zero': the model has no such table"),
    ("t5_clipped", OWN_T5, "init", "native", {"max_distance": 112}, "reaches further than max_distance"),
    ("cape", CAUSAL, "form", "add", {"base": "nope"}, "'concat_residual' with base='nope'"),
    ("cape", CAUSAL, "base", "shaw", {}, "'alibi' or 'kerple' or 'fire' or 't5'"),
    ("cope", CAUSAL, "npos", 1, {}, "at least 2"),
    ("cope", CAUSAL, "value_gates", True, {"separate_keys": True}, "False with separate_keys"),
    ("disentangled", CAUSAL, "max_distance", 5, {"buckets": 8}, "more than buckets / 2 + 1 = 5"),
    ("disentangled", CAUSAL, "p2c", False, {"c2p": False}, "True with c2p=False"),
    ("disentangled", CAUSAL, "share_bias", True, {}, "False unless share_att_key=True"),
    ("fope", CAUSAL, "official_layout", True, {}, "False, unless clip=True"),
    ("fope", CAUSAL, "fourier_dim", 4, {"official_layout": True, "clip": True}, "an even number of at least head_dim"),
    ("fope", CAUSAL, "max_length", 6, {"clip": True}, "a length within which one frequency has a whole turn"),
    ("fox", CAUSAL, "horizon", 10.0, {"init": "timescale"}, "None unless init='horizon' is given"),
    ("fox", CAUSAL, "decay_time_max", 1.0, {"init": "timescale"}, "at least decay_time_min = 2.0"),
    ("fox", CAUSAL, "init", "official", {"forget_gate": "fixed"}, "'horizon' or 'timescale' for fixed gates"),
    ("fox_pro", CAUSAL, "gate_activation", "silu", {}, "'sigmoid', unless output_norm=False"),
    *((name, CAUSAL, "block_size", size, {}, "an even ") for name in BLOCKS for size in (3, 18)),
    *((name, CAUSAL, "block_size", 2.0, {}, "int or None") for name in BLOCKS),
    ("comrope_ld", CAUSAL, "block_size", 4, {"axes": 2}, "an even divisor of the 6 channels of a head."),
    ("comrope_ap", WIDE, "block_size", 4, {"axes": 3}, "an even divisor of the 16 channels of a head cut into 3"),
    ("liere", geometry(head_dim=1), "block_size", None, {}, "an even number from 2 to 1"),
    ("rope2d", OWN, "theta", 5.0, {}, "None where the frequencies are the model's own"),
    ("rope2d", CAUSAL, "section", 1, {}, "None, or for kind='axial' a number from 1 to 1"),
    ("transformer_xl", CAUSAL, "clamp_len", 0, {}, "None or at least 1"),
]


@pytest.mark.parametrize(("name", "shape", "option", "got", "others", "expected"), OUT_OF_RANGE)
def test_option_out_of_range(name: str, shape: Geometry, option: str, got: object, others: dict, expected: str) -> None:
    with refused(OptionError, f"{name}: option {option}={got!r}: expected ", expected):
        build(name, shape, **{option: got}, **others)


@pytest.mark.parametrize("init", ["auto", "native"])
def test_a_native_table_is_the_start(init: str) -> None:
    table = torch.randn(32, HIDDEN)
    scheme = build("learned", geometry(native=NativeTable("learned", table)), init=init)
    assert scheme.options() == {"num_positions": 32, "init": "native", "growth": "extend"}
    assert torch.equal(scheme.wpe.weight, table)
    table = torch.randn(16, HEADS)
    scheme = build("t5", geometry(native=NativeTable("t5", table, 40)), init=init)
    assert scheme.options() | {"num_buckets": 16, "max_distance": 40, "init": "native"} == scheme.options()
    assert torch.equal(scheme.weight, table)


def test_no_scheme_takes_all_memory() -> None:
    with refused(
        OptionError, "learned with num_positions=16777216 needs a tensor of [16777216, 4096], 256 GiB", "at most 4"
    ):
        build("learned", geometry(hidden_size=4096), num_positions=LARGEST_COUNT)
    with refused(OptionError, "cope with npos=16777216 needs a tensor of "):
        build("cope", geometry(head_dim=128), npos=LARGEST_COUNT)


# -- geometry ----------------------------------------------------------------------------------------------------------

FREQUENCIES = 100.0 ** -(torch.arange(HEAD_DIM // 2) / 3)
WRONG_FREQUENCIES = (FREQUENCIES * float("nan"), FREQUENCIES[:0], FREQUENCIES.repeat(2), FREQUENCIES[None], [1.0])
# By field: what it may not be, and what it has to be.
WRONG: dict[str, tuple[tuple[object, ...], str]] = {
    **{
        field: ((0, -2, 2.0, "4", None, 10**30), "a positive integer of at most 16,777,216.")
        for field in ("heads", "kv_heads", "head_dim", "hidden_size", "axes")
    },
    "layer": ((-1, 1.0), "an integer of at least 0."),
    "scale": ((float("nan"), float("inf"), 0.0, -1.0, 1e-320, 1e308, "1", True), "a positive number"),
    "rotary_scaling": ((float("nan"), 0, None), "a positive number"),
    "max_positions": ((0, -1, 64.5, True), "None or a positive integer"),
    "rotary_limit": ((0,), "None or a positive integer"),
    "layout": (("neighbours",), "'half' or 'interleaved'"),
    "inv_freq": ((*WRONG_FREQUENCIES, torch.arange(3)), "None or 1 to 3 finite frequencies, a float tensor"),
    "inv_freq_long": (WRONG_FREQUENCIES, "None or 1 to 3 finite frequencies, a float tensor of one dimension"),
}


@pytest.mark.parametrize("field", WRONG)
def test_geometry(field: str) -> None:
    values, expected = WRONG[field]
    for got in values:
        with refused(OptionError, f"Geometry({field}={got!r}): expected ", expected):
            geometry(**{field: got})


def test_geometry_is_given_by_name_and_knows_its_scale() -> None:
    with pytest.raises(TypeError, match="positional"):
        Geometry(4, 2, 16, 64)
    assert geometry(head_dim=16).scale == 0.25
    for heads in (2, 6):
        with refused(OptionError, f"Geometry(heads={heads}, kv_heads=4): heads must be a multiple of kv_heads."):
            geometry(heads=heads, kv_heads=4)
    with torch.device("meta"):
        assert geometry(inv_freq=torch.empty(3)).inv_freq.is_meta
    with refused(OptionError, "build('alibi'): expected a Geometry as second argument, got {'heads': 4}."):
        build("alibi", {"heads": 4})


# -- registering -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_registry")
def test_register_a_scheme_of_ones_own() -> None:
    sources = "https://arxiv.org/abs/2410.06205, 1234.5678"

    @register_scheme("constant", paper=sources, family="additive", directions=("causal",))
    class Constant(Scheme):
        """A constant."""

        def __init__(self, geometry: Geometry, *, value: float = 1.0) -> None:
            super().__init__(geometry)
            self.value = value

        def score(self, logits, q, k, block):
            return logits + self.value

    info = schemes()["constant"]
    assert (info.cls, info.directions, info.summary) == (Constant, ("causal",), "A constant.")
    assert info.option_defaults() == {"value": 1.0}
    assert list(inspect.signature(Constant).parameters) == ["geometry", "value"]
    written = str(describe("constant"))
    assert "source:     https://arxiv.org/abs/2410.06205, https://arxiv.org/abs/1234.5678\n" in written
    assert "value: float = 1.0" in written
    scheme = build("constant", geometry(), value=2)
    assert scheme.options() == {"value": 2}
    assert repr(scheme) == "Constant(value=2)"
    with refused(OptionError, "constant: option value='2': expected a finite number."):
        build("constant", geometry(), value="2")

    for got in (nn.Linear, Scheme(geometry()), lambda geometry: None, None):
        with refused(OptionError, "register_scheme('odd'): expected a subclass of hf_posenc.Scheme, got "):
            register_scheme("odd", paper="none", family="additive")(got)
    for name, owner in (("fire", "hf_posenc.schemes.fire.FIRE."), ("constant", "")):
        with refused(OptionError, f"register_scheme('{name}'): the name is taken by {owner}", "Choose another name."):
            register_scheme(name, paper="none", family="additive")(type("Second", (Scheme,), {}))


class _Sized(Scheme):
    def __init__(self, geometry: Geometry, *, size: int = 1) -> None:
        super().__init__(geometry)
        self.size = size
        self.weight = nn.Parameter(torch.empty(geometry.heads))


class Untyped(Scheme):
    def __init__(self, geometry: Geometry, *, size=1) -> None:
        super().__init__(geometry)


class Required(Scheme):
    def __init__(self, geometry: Geometry, *, size: int) -> None:
        super().__init__(geometry)


class Unstored(_Sized):
    def __init__(self, geometry: Geometry, *, size: int = 1, other: int = 2) -> None:
        super().__init__(geometry, size=size)


class ReadsNumbers(_Sized):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.constant_(self.weight, float(self.weight.sum()))


REFUSED = {
    Untyped: "the option 'size' has no type, by which its values are checked. Write it as name: type = value.",
    Required: "the option 'size' has no default. Write it as name: type = value.",
    Unstored: "__init__ does not store the option 'other', so that it could not be saved. Set self.other.",
    ReadsNumbers: "it cannot be made on the meta device, on which checkpoints are loaded: ",
}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_class_that_could_not_be_built_or_saved_is_refused_at_registration(kind: type[Scheme]) -> None:
    with refused(OptionError, "register_scheme('odd'): ", REFUSED[kind]):
        register_scheme("odd", paper="none", family="additive")(kind)
    with refused(OptionError, "there is no family 'addtive'. Did you mean 'additive'?"):
        register_scheme("odd", paper="none", family="addtive")(_Sized)


# -- operands ----------------------------------------------------------------------------------------------------------

QUERIES, KEYS = 3, 5


def call(name: str = "alibi", **changes):
    scheme = build(name, geometry())
    generator = torch.Generator().manual_seed(0)
    operands = {
        "q": torch.randn(2, HEADS, QUERIES, HEAD_DIM, generator=generator),
        "k": torch.randn(2, KV_HEADS, KEYS, HEAD_DIM, generator=generator),
        "v": torch.randn(2, KV_HEADS, KEYS, HEAD_DIM, generator=generator),
        "query_positions": torch.arange(KEYS - QUERIES, KEYS)[None],
        "key_positions": torch.arange(KEYS)[None],
    }
    return attend(scheme, **{**operands, **changes})


Q, KV = (2, HEADS, QUERIES, HEAD_DIM), (2, KV_HEADS, KEYS, HEAD_DIM)
PLACES = (("query_positions", QUERIES), ("key_positions", KEYS))
HALF, WHOLE = torch.zeros(KV).half(), torch.ones(KV, dtype=torch.int64)
# By operand: what is given, or a tensor of which shape, and what the message says.
WRONG_OPERANDS: list[tuple[str, object, str]] = [
    *((name, 1.0, f"Got {name} of type float; expected a torch.Tensor.") for name in ("q", "v", "key_positions")),
    *((name, "x", f"Got {name} of type str; expected a torch.Tensor or None.") for name in ("hidden", "mask")),
    ("query_coords", [[1.0]], "Got query_coords of type list; expected a torch.Tensor or None."),
    ("q", None, "Got q of type NoneType; expected a torch.Tensor."),
    ("v", WHOLE, "Got v of dtype torch.int64; expected a float type."),
    ("k", HALF, "Got q of dtype torch.float32 and k of torch.float16; expected the same of both."),
    ("q", Q[1:], "expected [batch, heads, length, head_dim]"),
    ("v", (*KV, 1), "expected [batch, heads, length, head_dim]"),
    ("q", (2, KV_HEADS, *Q[2:]), "the scheme's geometry expects [2, 4, 3, 6]"),
    ("q", (*Q[:3], HEAD_DIM + 2), "the scheme's geometry expects [2, 4, 3, 6]"),
    ("k", (2, HEADS, *KV[2:]), "the scheme's geometry expects [2, 2, 5, 6]"),
    ("k", (1, *KV[1:]), "the scheme's geometry expects [2, 2, 5, 6]"),
    ("v", (2, KV_HEADS, KEYS - 1, HEAD_DIM), "the scheme's geometry expects [2, 2, 5, 6]"),
    ("hidden", (2, KEYS - 1, HIDDEN), "expected [2, 5, 11]"),
    *(("query_positions", torch.zeros(shape).long(), "expected [2 or 1, 3]") for shape in ((3,), (1, KEYS), (3, 3))),
    *(("key_positions", torch.zeros(shape).long(), "expected [2 or 1, 5]") for shape in ((5,), (2, 1, 5))),
    *((name, (1, length), f"Got {name} of dtype torch.float32; expected integers.") for name, length in PLACES),
    # Is 0 a hidden key (padding mask), or is nothing added to its logit (additive mask)?
    ("mask", (2, KEYS), "Got a 2-D attention mask of dtype torch.float32; expected a bool or integer padding mask"),
    *(
        ("mask", torch.ones(shape).bool(), f"Got an attention mask of shape {seen}; expected ")
        for shape, seen in (
            ((KEYS,), (KEYS,)),
            ((2, QUERIES), (2, 1, 1, QUERIES)),
            ((3, KEYS), (3, 1, 1, KEYS)),
            ((2, KEYS, QUERIES), (2, 1, KEYS, QUERIES)),
            ((2, HEADS, QUERIES, KEYS + 1), (2, HEADS, QUERIES, KEYS + 1)),
            ((1, *Q[:3], KEYS), (1, *Q[:3], KEYS)),
        )
    ),
]


@pytest.mark.parametrize(("operand", "got", "expected"), WRONG_OPERANDS)
def test_operands_that_do_not_fit(operand: str, got: object, expected: str) -> None:
    with refused(ShapeError, expected):
        call(**{operand: torch.zeros(got) if isinstance(got, tuple) else got})


def test_queries_of_hidden_states_are_the_last_keys() -> None:
    more = KEYS + 1
    positions = torch.arange(more)[None]
    queries = {"q": torch.zeros(2, HEADS, more, HEAD_DIM), "query_positions": positions}
    with refused(ShapeError, f"Got {more} queries, and hidden of {KEYS} keys; expected no more queries than keys"):
        call("gated_output", **queries, hidden=torch.zeros(2, KEYS, HIDDEN))
    assert call("gated_output", **queries, hidden=torch.zeros(2, more, HIDDEN)).shape[2] == more


def test_positions_and_coordinates_that_do_not_fit() -> None:
    coords = torch.zeros(1, KEYS, 1)
    coords[0, 1] = float("nan")
    with refused(PositionError, "Got key_coords that are not finite; expected a number"):
        call("comrope_ap", key_coords=coords)
    with refused(PositionError, "Got -1 in query_positions; positions count from 0"):
        call(query_positions=torch.arange(-1, 2)[None])
    with refused(ShapeError, "at least one query"):
        call(q=torch.zeros(2, HEADS, 0, HEAD_DIM), query_positions=torch.zeros(1, 0, dtype=torch.int64))


@pytest.mark.parametrize(
    "shape", [(2, KEYS), (1, KEYS), (2, QUERIES, KEYS), (2, 1, QUERIES, KEYS), (1, HEADS, 1, KEYS), (2, 1, QUERIES, 1)]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask_of_a_right_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if dtype.is_floating_point and len(shape) == 2:
        shape = (shape[0], 1, 1, shape[1])
    everything = torch.full(shape, 0 if dtype.is_floating_point else 1, dtype=dtype)
    assert torch.equal(call(mask=everything), call())
    but_the_first = everything.clone()
    but_the_first[..., 0] = float("-inf") if dtype.is_floating_point else 0
    assert not torch.equal(call(mask=but_the_first), call())


@pytest.mark.parametrize("name", ["alibi", "fire"])
@pytest.mark.parametrize("executor", ["sdpa", ""])
def test_an_executor_that_cannot_run_the_scheme(executor: str, name: str) -> None:
    scheme = build(name, geometry())
    which, available = type(scheme).__name__, ", ".join(executors(scheme))
    with refused(OptionError, f"Executor {executor!r} cannot run {which}. Available: {available}."):
        call(name, executor=executor)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("fox", {}, "fox reads the hidden states of the keys' tokens. Pass attend(..., hidden=)"),
        ("cope", {"separate_keys": True}, "cope reads the hidden states"),
        ("fox_pro", {"forget_gate": "fixed", "k_shift": False, "v_shift": False}, "fox_pro reads the hidden states"),
        ("disentangled", {"share_att_key": True}, "uses the layer's own projections. Pass attend(..., host=)"),
    ],
)
def test_schemes_ask_for_what_they_read(name: str, options: dict, expected: str) -> None:
    places = torch.arange(3)[None]
    q, kv = torch.zeros(1, HEADS, 3, HEAD_DIM), torch.zeros(1, KV_HEADS, 3, HEAD_DIM)
    with refused(ShapeError, expected):
        attend(build(name, CAUSAL, **options), q, kv, kv, query_positions=places, key_positions=places)


@pytest.mark.parametrize(("name", "executor"), [("alibi", "blocks"), ("nope", "blocks"), ("nope", "sdpa")])
def test_weights_take_the_dense_executor(name: str, executor: str) -> None:
    with refused(OptionError, f"need_weights=True takes the dense executor, got executor={executor!r}."):
        call(name, executor=executor, need_weights=True)
    assert call(name, executor="dense", need_weights=True)[1].shape == (2, HEADS, QUERIES, KEYS)


@pytest.mark.parametrize("last", [64, 1000])
def test_a_position_beyond_a_learned_table(last: int) -> None:
    scheme = build("learned", geometry())
    inputs = torch.zeros(1, 2, HIDDEN)
    expected = f"Position {last} is beyond the learned table of 64 positions."
    with refused(PositionError, expected, "Use shorter inputs, or patch with a larger num_positions."):
        scheme.embed(inputs, torch.tensor([[0, last]]))
    got = scheme.embed(inputs, torch.tensor([[0, 63]]))
    assert torch.equal(got[0], scheme.wpe.weight[[0, 63]])


@pytest.mark.parametrize("name", ["t5", "t5_clipped", "t5+gated_output"])
def test_a_table_has_a_start_where_the_own_table_of_the_model_has_no_values(name: str) -> None:
    # Models built from a config see such tables, on any device: two that are built with one seed are equal.
    own = NativeTable("t5", torch.zeros(32, 4, device="meta"), 128)
    scheme = build(name, Geometry(heads=4, kv_heads=4, head_dim=8, hidden_size=32, native=own))
    for parameter in scheme.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    scheme.reset_parameters()
    assert all(bool(parameter.isfinite().all()) for parameter in scheme.parameters())
