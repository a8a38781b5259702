"""One table of ops: for each op in the registry the cases it is tested with, on every device.

A case is inputs (shape, values, layout in memory) and attributes; `test_ops.py` runs it in each
dtype of its row against the op's NumPy formula in float64.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

import centella as ct
from centella.dtypes import dtype_of, narrow, widen
from centella.ops.matmul.choice import TILES, mma_tile_of, tile_of
from centella.ops.steps import Step
from centella.specs import Caps

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

FLOATS = ("f32", "f16", "bf16")
INTEGERS = ("i32", "u32", "i8", "u8")
NUMBERS = (*FLOATS, *INTEGERS)
ALL = (*NUMBERS, "bool")

# sum((got - ref)^2) / sum(ref^2) at most: elementwise, then products, sums and attention.
TOLERANCE = {"f32": (1e-12, 1e-11), "f16": (2e-7, 2e-7), "bf16": (5e-6, 5e-6)}
# Fewer values than this do not average the rounding of a 16-bit store: each may be half a step off.
MANY = 64
OWN = "own"  # as an attribute: the dtype of the case

LAYOUTS = ("plain", "pads", "offset", "strided", "transposed", "rows")
EXTREMES = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 800.0, -800.0, 6e4, -6e4, 1e-3),
    *(-1e-3, 20.0, -20.0, 0.5, -0.5, 4.0, -4.0, 1e-8, -1e-8),
)


@dataclass(frozen=True)
class In:
    """One input: how it is shaped, filled and laid out.

    Attributes:
        dtype: "" for the case's own.
        values: normal, positive, extremes, large (800 among normal values), ties, bools, hidden
            (0 and -inf), or `(low, high)` for whole numbers.
        layout: plain; pads (NaN after each row); offset (a slice that starts off every boundary);
            strided (every second element); transposed (a view of the last two axes swapped);
            rows (every second row, from the second); state (a State's memory).
    """

    shape: Shape
    values: Any = "normal"
    dtype: str = ""
    layout: str = "plain"


@dataclass(frozen=True)
class Case:
    """Inputs and attributes of one call.

    Attributes:
        dtypes: those it runs in, of its row's; () for all.
        small: False where the simulator would take too long.
    """

    inputs: tuple[In, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    small: bool = True

    def __str__(self) -> str:
        operands = " ".join(f"{list(i.shape)}:{i.values}:{i.layout}" for i in self.inputs)
        return f"{operands} {self.attrs}"


@dataclass(frozen=True)
class Row:
    """An op's dtypes and cases; `sums` for the wider tolerance, `exact` for moves."""

    dtypes: tuple[str, ...]
    cases: tuple[Case, ...]
    sums: bool = False
    exact: bool = False


# -- values ---------------------------------------------------------------------------------------


def values_of(spec: In, dtype: str, rng: np.random.Generator) -> Array:
    """Host values of an input, as its dtype stores them and computed with (bf16 as float32)."""
    kind = dtype_of(spec.dtype or dtype)
    made = _values(spec, kind.kind, rng)
    if not kind.is_float and kind.kind != "bool" and spec.values == "normal":
        info = np.iinfo(kind.numpy)
        made = rng.integers(info.min, info.max, spec.shape, np.int64, endpoint=True)
    with np.errstate(over="ignore"):
        return widen(narrow(np.asarray(made), kind), kind)


def _values(spec: In, kind: str, rng: np.random.Generator) -> Any:
    if isinstance(spec.values, tuple):
        low, high = spec.values
        return rng.integers(low, high, spec.shape)
    if kind == "bool" or spec.values == "bools":
        return rng.random(spec.shape) < 0.6
    normal = np.asarray(rng.standard_normal(spec.shape) * 2, np.float32)
    if spec.values == "positive":
        return np.abs(normal) + np.float32(1e-3)
    if spec.values == "extremes":
        return np.array(EXTREMES[: math.prod(spec.shape)], np.float32).reshape(spec.shape)
    if spec.values == "large":
        return np.where(rng.random(spec.shape) < 0.3, np.float32(800), normal)
    if spec.values == "ties":
        return np.round(normal)
    if spec.values == "hidden":
        return np.where(rng.random(spec.shape) < 0.4, np.float32(-np.inf), normal)
    return normal


def tensor_of(spec: In, value: Array, dtype: str, device: ct.Device) -> ct.Tensor:
    """The value on a device, lying as `spec` says; what surrounds it is NaN (or -1, or True)."""
    kind = dtype_of(spec.dtype or dtype)
    stored = narrow(value, kind)
    if spec.layout == "plain":
        return ct.asarray(stored, dtype=kind, device=device)
    if spec.layout == "transposed":
        turned = np.ascontiguousarray(np.swapaxes(stored, -1, -2))
        return ct.asarray(turned, dtype=kind, device=device).T
    if spec.layout == "state":
        return ct.State(stored, kind, device).value
    place, whole = _place(spec.layout, stored.shape, kind.per_chunk)
    around = np.full(math.prod(whole) * kind.itemsize, 0xFF, np.uint8)
    if kind.name == "bool":
        around[:] = 1
    base = around.view(kind.numpy).reshape(whole)
    base[place] = stored
    return ct.asarray(base, dtype=kind, device=device)[place]


def _place(layout: str, shape: Shape, chunk: int) -> tuple[tuple[Any, ...], Shape]:
    """Where a layout puts a value inside a larger array, and that array's shape."""
    if layout == "pads":
        wide = -(-shape[-1] // chunk) * chunk + chunk
        return (..., slice(0, shape[-1])), (*shape[:-1], wide)
    if layout == "strided":
        return (..., slice(1, None, 2)), (*shape[:-1], 2 * shape[-1] + 1)
    if layout == "rows":
        places = (slice(None),) * (len(shape) - 2) + (slice(1, None, 2), slice(None))
        return places, (*shape[:-2], 2 * shape[-2] + 1, shape[-1])
    assert layout == "offset", layout
    return tuple(slice(1, 1 + n) for n in shape), tuple(n + 2 for n in shape)


def rng_of(*names: object) -> np.random.Generator:
    """Random numbers that depend on what is tested, not on what was tested before."""
    return np.random.default_rng(zlib.crc32(" ".join(map(str, names)).encode()))


# -- cases ----------------------------------------------------------------------------------------

# Rank 0 to 4; 0-size, size 1, odd, prime; rows that are no whole words or chunks.
SHAPES: tuple[Shape, ...] = (
    *((), (1,), (0,), (5,), (127,), (3, 0), (0, 3), (7, 1), (1, 7), (3, 5), (5, 8), (2, 3, 7)),
    (3, 1, 2, 9),
)
BRIEF: tuple[Shape, ...] = ((), (0,), (33,), (3, 5))
BROADCASTS: tuple[tuple[Shape, Shape], ...] = (
    *(((3, 5), ()), ((), (4,)), ((3, 8), (8,)), ((3, 1), (1, 5)), ((3, 8), (3, 1))),
    *(((2, 3, 4), (3, 1)), ((2, 1, 3, 5), (4, 1, 5)), ((0, 3), (1, 3)), ((6, 1), (6, 1))),
)


def cases(
    shapes: Iterable[Shape], values: Any = "normal", attrs: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Case, ...]:  # fmt: skip
    """A case of one input for each shape."""
    return tuple(Case((In(s, values),), attrs or {}, **options) for s in shapes)


def laid_out(case: Case, *layouts: str) -> tuple[Case, ...]:
    """The case with its first input laid out otherwise."""
    first, *rest = case.inputs
    return tuple(replace(case, inputs=(replace(first, layout=x), *rest)) for x in layouts)


def floats_of(values: str = "normal", **attrs: Any) -> Row:
    """The row of an elementwise op of one float operand, briefly: `exp` is tested at length."""
    plain = cases(BRIEF, values, attrs)
    odd = laid_out(Case((In((3, 5), values),), attrs), "offset")
    return Row(FLOATS, (*plain, *odd, Case((In((21,), "extremes"),), attrs)))


def numbers_of(**attrs: Any) -> Row:
    """The same for an op that takes integers too."""
    row = floats_of(**attrs)
    extremes = replace(row.cases[-1], dtypes=FLOATS)
    return replace(row, dtypes=NUMBERS, cases=(*row.cases[:-1], extremes))


def at_length(dtypes: tuple[str, ...], values: str = "normal", **attrs: Any) -> tuple[Case, ...]:
    """Every shape, every layout, of one operand."""
    plain = cases(SHAPES, values, attrs)
    odd = [
        case
        for shape in ((6, 5), (2, 4, 8))
        for case in laid_out(Case((In(shape, values),), attrs), *LAYOUTS[1:])
    ]
    rank1 = laid_out(Case((In((13,), values),), attrs), "offset", "strided")
    extremes = Case((In((21,), "extremes"),), attrs, tuple(d for d in dtypes if d in FLOATS))
    return (*plain, *odd, *rank1, extremes) if extremes.dtypes else (*plain, *odd, *rank1)


def two(dtypes: tuple[str, ...], brief: bool = True) -> Row:
    """The row of an elementwise op of two operands, or one and a number."""
    pairs = BROADCASTS[:4] if brief else BROADCASTS
    made = [Case((In(a), In(b))) for a, b in (((3, 5), (3, 5)), *pairs)]
    number = {"second": 3} if "i8" in dtypes else {"second": 2.5}
    made += [
        Case((In((33,)),), number),
        Case((In((33,)),), {"first": number["second"]}),
        Case((In((21,), "extremes"), In((21,), "extremes", layout="offset")), dtypes=FLOATS),
        Case((In((21, 1), "extremes"), In((21,), "extremes")), dtypes=FLOATS),
    ]
    if not brief:
        both = Case((In((6, 5)), In((6, 5), layout="transposed")))
        made += [both, *laid_out(both, *LAYOUTS[1:]), Case((In((6, 8)), In((8,), layout="offset")))]
    return Row(dtypes, tuple(made))


def where() -> Row:
    """Conditions that broadcast; numbers on either side."""
    shapes = [
        ((3, 5), (3, 5), (3, 5)),
        ((5,), (3, 1), ()),
        ((3, 1), (8,), (3, 8)),
        ((0,), (1,), ()),
    ]
    made = [Case((In(c, "bools", "bool"), In(a), In(b))) for c, a, b in shapes]
    some = (In((3, 5), "bools", "bool"), In((3, 5)))
    made += [Case(some, {"first": 1}), Case(some, {"second": 0})]
    made += laid_out(made[0], "offset", "strided", "transposed")
    made += [Case((In((21,), "bools", "bool"), In((21,), "extremes"), In((21,))), dtypes=FLOATS)]
    return Row(ALL, tuple(made), exact=True)


def cast() -> Row:
    """From every dtype to every other; saturation, NaN and wrap."""
    made = [
        Case((In(shape),), {"dtype": target}) for target in ALL for shape in ((3, 5), (33,), (7, 1))
    ]
    made += [Case((In((21,), "extremes"),), {"dtype": t}, FLOATS) for t in ALL]
    made += laid_out(Case((In((3, 8)),), {"dtype": "f16"}), "offset", "transposed")
    return Row(ALL, tuple(made), exact=True)


def reshape() -> Row:
    """Reshapes that cross pads."""
    pairs: list[tuple[Shape, Shape]] = [
        *(((3, 5), (15,)), ((15,), (5, 3)), ((3, 5), (5, 3)), ((2, 3, 7), (6, 7))),
        *(((2, 3, 7), (2, 21)), ((4, 1, 3), (3, 4)), ((12,), (2, 1, 3, 2)), ((6, 2), (4, 3, 1))),
    ]
    made = [Case((In(a),), {"shape": b}) for a, b in pairs]
    made += laid_out(Case((In((6, 5)),), {"shape": (10, 3)}), *LAYOUTS[1:])
    made += [Case((In((7, 3), "extremes"),), {"shape": (21,)}, FLOATS)]
    return Row(("f32", "f16", "bf16", "i8", "bool"), tuple(made), exact=True)


def concat() -> Row:
    """Along each axis; empty operands; words that two operands share; the most operands."""
    groups: list[tuple[int, tuple[Shape, ...]]] = [
        (0, ((3,), (5,), (1,))), (0, ((3, 5), (2, 5))), (1, ((3, 5), (3, 2), (3, 1))),
        (1, ((2, 1, 3), (2, 4, 3))), (0, ((0, 3), (2, 3))), (0, ((5,),) * 7), (1, ((2, 0), (2, 0))),
    ]  # fmt: skip
    made = [Case(tuple(map(In, shapes)), {"axis": axis}) for axis, shapes in groups]
    made += laid_out(made[2], "offset", "transposed")
    made += [Case((In((21,), "extremes"), In((3,))), {"axis": 0}, FLOATS)]
    return Row(("f32", "f16", "i32", "u8", "bool"), tuple(made), exact=True)


def fill() -> Row:
    """Any shape, any dtype; numbers that only some can hold."""
    shapes = ((), (0,), (5,), (3, 5), (7, 1), (2, 3, 8))
    own = {"dtype": OWN}
    made = [Case((), {"shape": s, "value": 1, **own}) for s in shapes]
    made += [
        Case((), {"shape": (3,), "value": v, **own}, FLOATS) for v in (-0.5, math.inf, math.nan)
    ]
    made += [Case((), {"shape": (2, 3), "value": -7, **own}, ("i8", "i32", *FLOATS))]
    return Row(ALL, tuple(made), exact=True)


ROWS_OF: tuple[Shape, ...] = (
    *((1,), (5,), (3, 5), (5, 8), (7, 1), (2, 3, 7), (2, 67), (3, 260), (0, 4)),
)
FEW = ((21, 1), (7, 3), (21,))  # rows of extremes


def reduce() -> Row:
    """Rows short and long, split among groups; sums of integers wrap in 32 bits."""
    made: list[Case] = []
    for op in ("sum", "mean", "max", "min"):
        dtypes = FLOATS if op == "mean" else ()
        made += cases(ROWS_OF, attrs={"op": op}, dtypes=dtypes)
        made += laid_out(Case((In((6, 5)),), {"op": op}, dtypes), *LAYOUTS[1:])
        few = FEW if op in ("max", "min") else FEW[:1]  # 6e4 - 6e4 + 1e-3 is no sum to compare
        made += cases(few, "extremes", {"op": op}, dtypes=FLOATS)
        made += cases([(3, 16385)], attrs={"op": op}, dtypes=dtypes)
        made.append(Case((In((3, 16385), layout="transposed"),), {"op": op}, dtypes, small=False))
        made += cases([(2, 3, 33000)], attrs={"op": op}, dtypes=dtypes, small=False)
    made += [Case((In((3, 0)),), {"op": "sum"}), Case((In((3, 0)),), {"op": "mean"}, FLOATS)]
    return Row(NUMBERS, tuple(made), sums=True)


def argmax() -> Row:
    """Ties, NaN, infinities; long rows."""
    made = [*cases(ROWS_OF), *cases([(3, 40), (64,)], "ties", dtypes=FLOATS)]
    made += laid_out(Case((In((6, 5)),)), *LAYOUTS[1:])
    made += cases(FEW, "extremes", dtypes=FLOATS)
    made += cases([(3, 16385)])
    made += cases([(2, 3, 33000)], "ties", dtypes=FLOATS, small=False)
    made += [Case((In((2, 300), (0, 2)),), dtypes=INTEGERS)]
    return Row(NUMBERS, tuple(made))


def dot() -> Row:
    """Vectors short and long."""
    made = [Case((In((n,)), In((n,)))) for n in (0, 1, 7, 255, 257)]
    made += laid_out(made[3], "offset", "strided")
    made += [Case((In((n,)), In((n,)))) for n in (16385, 50021)]
    made += [Case((In((257,), "large"), In((257,), "large")), dtypes=FLOATS)]
    made += [Case((In((9,), "hidden"), In((9,))), dtypes=FLOATS)]
    return Row(NUMBERS, tuple(made), sums=True)


def softmax() -> Row:
    """Both forms; values of 800; rows of one value."""
    made: list[Case] = []
    for attrs in ({}, {"log": True}):
        made += cases(ROWS_OF, attrs=attrs)
        made += cases([(5, 33), (3, 8)], "large", attrs)
        made += cases(FEW, "extremes", attrs)
        made += cases([(3, 2100)], attrs=attrs)
    made += laid_out(Case((In((6, 5)),)), *LAYOUTS[1:])
    return Row(FLOATS, tuple(made), sums=True)


def norm() -> Row:
    """Each kind, with and without vectors; values of 800 among small ones."""
    made: list[Case] = []
    for kind, vectors in (
        *(("layer", ()), ("layer", ("weight", "bias")), ("layer", ("bias",))),
        *(("rms", ()), ("rms", ("weight",)), ("l2", ())),
    ):
        attrs = {"kind": kind, "eps": 1e-5, "vectors": vectors}
        rows = ROWS_OF if len(vectors) < 2 and vectors != ("bias",) else ROWS_OF[2:5]
        for shape in (*rows, (3, 2100)):
            made.append(Case((In(shape), *(In(shape[-1:]) for _ in vectors)), attrs))
        made.append(Case((In((7, 3), "extremes"), *(In((3,)) for _ in vectors)), attrs))
        both = tuple(In((33,)) for _ in vectors)
        made.append(Case((In((5, 33), "large"), *both), attrs))
    attrs = {"kind": "rms", "eps": 1e-6, "vectors": ("weight",)}
    some = Case((In((6, 5)), In((5,), layout="offset")), attrs)
    made += [some, *laid_out(some, *LAYOUTS[1:])]
    made += [Case((In((6, 5)), In((5,), dtype="f32")), attrs)]
    return Row(FLOATS, tuple(made), sums=True)


def mean_pool() -> Row:
    """Lengths of 0, within, beyond."""
    made = [
        Case((In((b, n, d)), In((b,), (-1, n + 3), "i32")))
        for b, n, d in ((1, 1, 1), (3, 5, 7), (4, 7, 8), (2, 33, 67), (2, 0, 3), (0, 3, 4))
    ]
    made += laid_out(made[1], *LAYOUTS[1:])
    made += [Case((In((7, 1, 3), "extremes"), In((7,), (0, 3), "i32")))]
    return Row(FLOATS, tuple(made), sums=True)


def embedding() -> Row:
    """Ids of every rank; some outside the table, whose rows are NaN."""
    made = [
        Case((In(shape, (0, 9), "i32"), In((9, d))))
        for shape, d in (((), 5), ((1,), 1), ((7,), 8), ((2, 3), 5), ((2, 1, 4), 33), ((0,), 4))
    ]
    made += [
        Case((In((9,), (-2, 11), "i32"), In((9, 5)))),
        Case((In((0,), (0, 1), "i32"), In((0, 5)))),
    ]
    made += laid_out(made[3], "offset", "strided", "transposed")
    made += [Case((In((5,), (0, 9), "i32"), In((9, 5), layout=x))) for x in LAYOUTS[1:]]
    made += [Case((In((9,), (0, 7), "i32"), In((7, 3), "extremes")))]
    return Row(FLOATS, tuple(made), exact=True)


MATRICES = ((1, 1, 1), (5, 7, 3), (17, 33, 9), (33, 40, 64), (64, 16, 65), (130, 20, 70))
VARIANTS = ("large", "medium", "small", "mma")
# Rows, depth, columns of thin products: depths of 1, prime, 1 more than whole chunks, whole blocks.
GEMV = ((1, 1, 1), (1, 7, 3), (1, 65, 33), (1, 257, 5), (1, 1024, 6), (1, 2048, 131))
SKINNY = (
    (2, 67, 33),
    (3, 1, 5),
    (4, 256, 9),
    (5, 13, 130),
    (8, 515, 7),
    (13, 61, 37),
    (16, 264, 8),
)


def variant_fits(case: Case, dtype: str, caps: Caps) -> bool:
    """Whether a device can run the variant that a case forces."""
    variant = case.attrs.get("variant")
    dtypes = [dtype_of(i.dtype or dtype) for i in case.inputs[:2]]
    if variant == "mma":
        return mma_tile_of((dtypes[0], dtypes[1]), caps) is not None
    least = min((d.itemsize for d in dtypes), default=0)
    return variant not in TILES or tile_of(variant, least, caps) is not None


def tensor_cores() -> list[Case]:
    """`matmul` on tensor cores: depths around a stage and past the ring, layouts, batches."""
    forced = {"variant": "mma", "alpha": 0.5}
    made = [Case((In((9, k)), In((k, 11))), forced) for k in (0, 2, 31, 32, 33, 63, 64, 129)]
    for la, lb in product(LAYOUTS, ("plain", "transposed", "offset")):
        made.append(Case((In((33, 40), layout=la), In((40, 18), layout=lb)), forced))
    for x in LAYOUTS[3:]:
        made.append(Case((In((20, 35)), In((35, 17), layout=x)), forced))
    for a, b in (((2, 3, 5, 7), (2, 3, 7, 4)), ((3, 5, 40), (40, 4)), ((5, 7), (3, 7, 4)),
                 ((2, 1, 3, 4), (3, 4, 2)), ((0, 3), (3, 2)), ((2, 3, 0), (2, 0, 5))):  # fmt: skip
        made.append(Case((In(a), In(b)), forced))
    made += [Case((In((5, 19), values), In((19, 9))), forced) for values in ("large", "hidden")]
    made.append(Case((In((300, 200)), In((200, 260))), forced, small=False))
    return made


def fused_on_tensor_cores() -> list[Case]:
    """`linear` on tensor cores: what follows the product, odd columns, rows off 16 bytes."""
    forced = {"variant": "mma", "alpha": 0.5}
    every = {**forced, "extras": ("scale", "bias", "residual"), "activation": "gelu"}
    made = []
    for m, n, k in ((5, 10, 24), (66, 33, 40), (17, 7, 9)):
        operands = (In((m, k)), In((n, k)), In((n,), "positive"), In((n,)), In((m, n)))
        made.append(Case(operands, every))
    mixed = {**forced, "extras": ("bias", "residual"), "activation": "silu"}
    made.append(Case((In((2, 3, 24)), In((5, 24)), In((5,), dtype="f32"), In((2, 3, 5))), mixed))
    plain = {**forced, "extras": (), "activation": ""}
    for x in LAYOUTS[1:]:
        made.append(Case((In((20, 36), layout=x), In((5, 36))), plain))
        made.append(Case((In((20, 36)), In((5, 36), layout=x)), plain))
    return made


def matmul() -> Row:
    """Every variant; transposed operands; batches that broadcast; no depth."""
    made = [
        Case((In((m, k)), In((k, n))), {"variant": v}, small=m < 100 or v != "small")
        for m, k, n in MATRICES
        for v in VARIANTS
    ]
    for variant, sizes in (("gemv", GEMV), ("skinny", SKINNY), ("columns", GEMV + SKINNY)):
        lies = "plain" if variant == "columns" else "transposed"
        for m, k, n in sizes:
            if k > 1 and n > 1:  # else B is contiguous both ways
                made.append(Case((In((m, k)), In((k, n), layout=lies)), {"variant": variant}))
    thin = {"alpha": 0.5}
    for lies in ("plain", "transposed"):  # the depth split among groups; batches; values of 800
        made.append(Case((In((3, 600)), In((600, 33), layout=lies)), thin))
        made.append(Case((In((2, 3, 9, 600)), In((3, 600, 5), layout=lies)), thin))
        made.append(Case((In((2, 1, 40)), In((40, 34), layout=lies)), thin))
        made.append(Case((In((5, 33), "large"), In((33, 20), layout=lies)), thin))
        made.append(Case((In((2, 0)), In((0, 5), layout=lies)), thin))
        made.append(Case((In((1, 5)), In((5, 8193), layout=lies)), small=False))
        for x in LAYOUTS[1:]:
            made.append(Case((In((6, 36), layout=x), In((36, 10), layout=lies)), thin))
    for x in ("offset", "strided", "pads", "rows"):
        made.append(Case((In((6, 36)), In((36, 10), layout=x)), thin))
    made.append(Case((In((1500, 33)), In((33, 130))), small=False))
    for la, lb in (("transposed", "plain"), ("plain", "transposed"), ("transposed", "transposed"),
                   ("offset", "strided"), ("pads", "pads"), ("rows", "offset")):  # fmt: skip
        made.append(Case((In((33, 20), layout=la), In((20, 18), layout=lb)), {"alpha": 0.5}))
    for a, b in (((2, 3, 5, 7), (2, 3, 7, 4)), ((3, 5, 7), (7, 4)), ((5, 7), (3, 7, 4)),
                 ((1, 5, 8), (3, 8, 4)), ((2, 1, 3, 4), (3, 4, 2)), ((2, 1, 1, 9), (1, 3, 9, 1)),
                 ((3, 0), (0, 4)), ((0, 3), (3, 2)), ((2, 3, 0), (2, 0, 5))):  # fmt: skip
        made.append(Case((In(a), In(b))))
    made += [Case((In((5, 19), values), In((19, 9)))) for values in ("large", "hidden")]
    made.append(Case((In((300, 64)), In((64, 200))), small=False))
    made += tensor_cores()
    return Row(FLOATS, tuple(made), sums=True)


def linear() -> Row:
    """Every variant and activation; bias and residual; weights of another dtype."""
    plain = {"extras": (), "activation": "", "alpha": 1.0}
    made = [
        Case((In((m, k)), In((n, k))), {**plain, "variant": v}, small=m < 100 or v != "small")
        for m, k, n in MATRICES[1:]
        for v in VARIANTS
    ]
    for variant, sizes in (("gemv", GEMV), ("skinny", SKINNY)):
        for m, k, n in sizes:
            made.append(Case((In((m, k)), In((n, k))), {**plain, "variant": variant}))
    made.append(Case((In((1500, 33)), In((65, 33))), plain, small=False))
    made.append(Case((In((1, 5)), In((151_936, 5))), plain, ("f32", "f16"), small=False))
    made.append(Case((In((5, 33), "large"), In((20, 33))), plain))
    made += quantised()
    made += fused_on_tensor_cores()
    both = {"extras": ("bias", "residual"), "alpha": 1.0}
    for activation in ("", "relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh"):
        operands = (In((5, 24)), In((10, 24)), In((10,)), In((5, 10)))
        made.append(Case(operands, {**both, "activation": activation}))
        far = (replace(operands[0], values="large"), *operands[1:])
        made.append(Case(far, {**both, "activation": activation}))
    some = {"extras": ("bias",), "activation": "", "alpha": 0.25}
    for shape, n in (((24,), 7), ((2, 3, 24), 5), ((0, 24), 3), ((3, 0), 5), ((3, 24), 0),
                     ((0, 0), 0)):  # fmt: skip
        made.append(Case((In(shape), In((n, shape[-1])), In((n,))), some))
    for m in (5, 17):
        for kind in FLOATS:
            weights = (In((10, 24), dtype=kind), In((10,), dtype="f32"))
            made.append(Case((In((m, 24)), *weights), some))
    residual = {"extras": ("residual",), "activation": "", "alpha": 1.0}
    for x in LAYOUTS[1:]:
        made.append(Case((In((6, 9), layout=x), In((5, 9)), In((6, 5), layout=x)), residual))
        made.append(Case((In((6, 9)), In((5, 9), layout=x), In((5,), layout="offset")), some))
        made.append(Case((In((20, 36), layout=x), In((5, 36)), In((20, 5), layout=x)), residual))
        made.append(Case((In((20, 36)), In((5, 36), layout=x), In((5,), layout="offset")), some))
    return Row(FLOATS, tuple(made), sums=True)


def quantised() -> list[Case]:
    """`linear` with i8 weights and a factor for each output, in every variant and layout."""
    scale = In((33,), "positive", "f32")
    plain = {"extras": ("scale",), "activation": "", "alpha": 1.0}
    made = []
    for m, k, v in ((1, 67, "gemv"), (1, 1025, "gemv"), (3, 40, "skinny"), (16, 129, "skinny"),
                    (1, 5, "small"), (40, 67, "small"), (70, 35, "medium"), (130, 33, "large"),
                    (40, 64, None), (2, 0, None)):  # fmt: skip
        attrs = plain if v is None else {**plain, "variant": v}
        made.append(Case((In((m, k)), In((33, k), dtype="i8"), scale), attrs, small=m < 100))
    whole = {"extras": ("scale", "bias", "residual"), "activation": "silu", "alpha": 0.01}
    for m in (1, 5, 18):
        more = (scale, In((33,)), In((m, 33)))
        made.append(Case((In((m, 40)), In((33, 40), (-9, 9), "i8"), *more), whole))
        for x in LAYOUTS[1:]:
            weight = In((33, 40), dtype="i8", layout=x)
            made.append(Case((In((m, 40)), weight, scale), plain))
    made.append(Case((In((5, 24)), In((33, 24)), scale), plain))  # a float weight may have them
    return made


def attend(
    b: int, h: int, kv: int, lq: int, lk: int, d: int, *masks: str, values: str = "normal",
    causal: bool = False, layout: str = "plain", added: Shape | None = None, hidden: bool = False,
    variant: str = "", **options: Any,
) -> Case:  # fmt: skip
    """One attention case; `added` is the shape of the additive mask."""
    q, k, v = (
        In(s, values, layout=layout) for s in ((b, h, lq, d), (b, kv, lk, d), (b, kv, lk, d))
    )
    extra = {
        "lengths": In((b,), (0, lk + 2), "i32"),
        "key_mask": In((b, lk), "bools", "bool"),
        "mask": In(added or (b, h, lq, lk), "hidden" if hidden else "normal", "f32"),
        "starts": In((b,), (-2, lk + 2), "i32"),
    }
    attrs = {"causal": causal, "masks": masks, "scale": 1 / math.sqrt(d)}
    attrs |= {"variant": variant} if variant else {}
    return Case((q, k, v, *(extra[m] for m in masks)), attrs, **options)


def attention() -> Row:
    """Self, cross, causal, grouped, each mask; rows with no key are zeros."""
    return Row(
        FLOATS,
        (
            attend(1, 1, 1, 1, 1, 4),
            attend(2, 3, 3, 5, 5, 5),
            attend(1, 2, 2, 2, 37, 8, causal=True),
            attend(1, 4, 2, 66, 66, 16, causal=True, small=False),
            attend(2, 4, 1, 3, 9, 32, "lengths"),
            attend(2, 2, 2, 5, 5, 3, "key_mask", causal=True),
            attend(2, 2, 1, 4, 20, 8, "mask"),
            attend(2, 2, 1, 4, 6, 8, "mask", added=(1, 2, 1, 6), hidden=True),
            attend(1, 1, 1, 3, 5, 4, "mask", added=(1, 1, 3, 1), hidden=True),
            attend(2, 2, 2, 4, 9, 8, "lengths", "key_mask", "mask", causal=True),
            attend(1, 1, 1, 3, 5, 8, values="large"),
            attend(1, 1, 1, 3, 0, 4),
            attend(1, 2, 2, 0, 3, 4),
            attend(1, 2, 1, 70, 19, 67, small=False),
            attend(1, 1, 1, 3, 9, 128, small=False),
            attend(1, 1, 1, 130, 33, 32, small=False),
            *(attend(2, 2, 1, 6, 7, 5, layout=x) for x in LAYOUTS[1:]),
            *(attend(1, 2, 2, 5, 9, 8, layout=x) for x in ("transposed", "rows", "offset")),
            attend(3, 2, 1, 4, 20, 8, "starts"),
            attend(2, 2, 2, 70, 80, 5, "lengths", "starts", small=False),
            attend(2, 2, 1, 4, 9, 8, "lengths", "key_mask", "mask", "starts"),
            *split_keys(),
            *(attend(2, 4, 2, 3, 70, d, "starts", variant=v)
              for d in (1, 5, 16, 17, 40, 64, 80, 96, 128, 192, 256) for v in ("stream", "split")),
        ),
        sums=True,
    )  # fmt: skip


def split_keys() -> list[Case]:
    """The variant for few queries: parts with no key, groups of heads, every mask and layout."""
    shapes: list[tuple[tuple[int, int, int, int, int, int], tuple[str, ...], dict[str, Any]]] = [
        ((1, 1, 1, 1, 1, 4), (), {}),
        ((1, 1, 1, 1, 700, 8), (), {}),
        ((3, 2, 2, 1, 300, 16), ("lengths",), {}),
        ((3, 6, 2, 1, 260, 8), ("lengths", "starts"), {}),
        ((2, 8, 1, 2, 200, 8), ("key_mask",), {"causal": True}),
        ((2, 5, 1, 1, 130, 8), ("mask",), {"hidden": True}),
        ((2, 2, 1, 4, 6, 8), ("mask",), {"added": (1, 2, 1, 6), "hidden": True}),
        ((2, 3, 3, 9, 140, 8), ("mask",), {"added": (2, 1, 9, 1)}),
        ((1, 2, 2, 8, 3, 8), (), {"causal": True}),
        ((2, 2, 2, 4, 90, 8), ("lengths", "key_mask", "mask"), {"causal": True}),
        ((2, 4, 2, 2, 90, 8), ("lengths", "key_mask", "mask", "starts"), {}),
        ((1, 1, 1, 3, 150, 8), (), {"values": "large"}),
        ((1, 1, 1, 3, 0, 4), (), {}),
        ((1, 2, 2, 0, 3, 4), (), {}),
        ((0, 2, 2, 1, 70, 4), (), {}),
        ((1, 4, 2, 1, 9000, 32), ("lengths",), {"small": False}),
    ]
    made = [attend(*shape, *masks, variant="split", **more) for shape, masks, more in shapes]
    made += [attend(2, 2, 1, 6, 77, 5, layout=x, variant="split") for x in LAYOUTS[1:]]
    return [*made, *(attend(1, 2, 2, 5, 70, 8, layout=x, variant="split") for x in LAYOUTS[1:])]


def compared(dtypes: tuple[str, ...] = NUMBERS) -> Row:
    """Small whole numbers, of which many are equal; a number on either side; every extreme."""
    few = (0, 2) if "bool" in dtypes else (0, 4)
    made = [Case((In(a, few), In(b, few))) for a, b in (((3, 5), (3, 5)), *BROADCASTS)]
    made += laid_out(made[0], *LAYOUTS[1:])
    made += [Case((In((33,), few),), {n: 1}) for n in ("first", "second")]
    floats = tuple(d for d in dtypes if d in FLOATS)
    made += [
        Case((In((21, 1), "extremes"), In((21,), "extremes")), dtypes=floats),
        Case((In((21,), "extremes"),), {"second": 0.5}, floats),
        Case((In((33,)), In((33,))), dtypes=tuple(d for d in dtypes if d != "bool")),
    ]
    return Row(dtypes, tuple(made))


def logical(operands: int) -> Row:
    """Bools of every layout."""
    made = [Case((In(s, "bools"),) * operands) for s in ((), (0,), (33,), (3, 5))]
    made += laid_out(made[-1], *LAYOUTS[1:])
    return Row(("bool",), tuple(made))


def divided() -> Row:
    """Both signs, zero divisors, the least number by -1; a number on either side."""
    made = [Case((In(a), In(b))) for a, b in (((3, 5), (3, 5)), *BROADCASTS[:4])]
    made += laid_out(made[0], *LAYOUTS[1:])
    signed, small = ("i32", "i8"), (0, 5)
    made += [Case((In((64,)), In((64,), small))), Case((In((64,), small), In((64,), small)))]
    made += [Case((In((65,), (-9, 9)), In((65,), (-3, 4))), dtypes=signed)]
    made += [Case((In((33,)),), {n: v}) for n in ("first", "second") for v in (0, 7)]
    made += [Case((In((9,), (-9, 9)),), {"second": -4}, signed)]
    made += [
        Case((In((3,), (low, low + 1)), In((3,), (-1, 0))), dtypes=(dtype,))
        for dtype, low in (("i32", -(2**31)), ("i8", -128))
    ]
    return Row(INTEGERS, tuple(made), exact=True)


def gated() -> Row:
    """Halves of one packed tensor and tensors of their own; broadcasts; extremes."""
    made = [Case((In(a), In(b))) for a, b in (((3, 5), (3, 5)), *BROADCASTS)]
    made += [Case((In((6, 8), layout=x), In((6, 8), layout=x))) for x in LAYOUTS[1:]]
    made += [Case((In((5, 33), "large"), In((5, 33), "large")))]
    made += [Case((In((21,), "extremes"), In((21,), "extremes", layout="offset")))]
    return Row(FLOATS, tuple(made))


def arange() -> Row:
    """Up, down, nothing; whole chunks and none."""
    made = [
        Case((), {"start": a, "step": b, "size": n, "dtype": OWN})
        for a, b, n in ((0, 1, 0), (0, 1, 1), (3, 2, 5), (0, 1, 64), (100, -3, 33), (7, 1, 120))
    ]
    floats = {"dtype": OWN}
    made += [Case((), {"start": -0.5, "step": 0.1, "size": 41, **floats}, FLOATS)]
    made += [Case((), {"start": -7, "step": 3, "size": 21, **floats}, (*FLOATS, "i32", "i8"))]
    made += [Case((), {"start": 2**32 - 1, "step": -5, "size": 300, **floats}, ("u32",))]
    return Row(NUMBERS, tuple(made))


PICKS: tuple[tuple[Shape, Shape, int], ...] = (
    *(((9,), (5,), 0), ((9, 5), (7,), 0), ((9, 8), (2, 3), 0), ((3, 9), (4,), 1), ((3, 9), (), 1)),
    *(((2, 9, 8), (3,), 1), ((9, 2, 3), (), 0), ((2, 3, 9), (2, 2), 2), ((9, 33), (1,), 0)),
    *(((9, 1), (6,), 0), ((2, 9), (33,), 1), ((9, 4), (0,), 0), ((9, 0), (3,), 0)),
)


def gather() -> Row:
    """Along each axis, indices of every rank; some outside; views of either operand."""
    made = [
        Case((In(shape), In(indices, (0, 9), "i32")), {"axis": axis})
        for shape, indices, axis in PICKS
    ]
    made += [
        Case((In((9, 8)), In((33,), (-2, 12), "i32")), {"axis": 0}),
        Case((In((3, 9)), In((33,), (-2, 12), "i32")), {"axis": 1}),
        Case((In((2, 0, 3)), In((0,), (0, 1), "i32")), {"axis": 1}),
    ]
    for x in LAYOUTS[1:]:
        made.append(Case((In((9, 8), layout=x), In((5,), (0, 9), "i32")), {"axis": 0}))
        made.append(Case((In((8, 9), layout=x), In((5,), (0, 9), "i32")), {"axis": 1}))
        made.append(Case((In((9, 5)), In((4, 6), (0, 9), "i32", x)), {"axis": 0}))
    return Row(ALL, tuple(made), exact=True)


def scatter() -> Row:
    """Few indices and many, so that some are equal; some outside; rows of one element."""
    made = [
        Case((In((n, *rest)), In((k,), (-1, n + 1), "i32"), In((k, *rest))))
        for n, rest, k in (
            *((9, (), 5), (33, (), 40), (9, (5,), 4), (9, (8,), 30), (7, (1,), 3), (3, (2, 7), 5)),
            *((5, (3,), 0), (0, (3,), 4), (4, (0,), 3), (1, (), 1), (300, (3,), 290)),
        )
    ]
    for x in LAYOUTS[1:]:
        some = (In((9, 8), layout=x), In((5,), (0, 9), "i32"), In((5, 8), layout=x))
        made.append(Case(some))
    made += [
        Case((In((9, 5)), In((6,), (0, 9), "i32", x), In((6, 5)))) for x in ("offset", "strided")
    ]
    return Row(ALL, tuple(made), exact=True)


def rope() -> Row:
    """Both pairings; some columns pass; positions of each kind, some outside the tables."""
    made = []
    for (b, h, s, d), half in (
        *(((1, 1, 1, 2), 1), ((2, 3, 5, 16), 8), ((2, 2, 3, 24), 8), ((1, 2, 7, 10), 3)),
        *(((2, 1, 3, 20), 8), ((1, 1, 2, 67), 33), ((2, 4, 3, 64), 32), ((0, 2, 3, 8), 4)),
        *(((2, 2, 0, 8), 2), ((1, 2, 3, 5), 2)),
    ):
        tables = (In((9, half), dtype="f32"),) * 2
        for interleaved in (False, True):
            attrs = {"interleaved": interleaved}
            made.append(Case((In((b, h, s, d)), *tables), attrs))
            made.append(Case((In((b, h, s, d)), *tables, In((b,), (-2, 9), "i32")), attrs))
            made.append(Case((In((b, h, s, d)), *tables, In((b, s), (-2, 12), "i32")), attrs))
    plain = Case(
        (In((2, 2, 5, 16)), *(In((9, 8), dtype="f32"),) * 2, In((2, 5), (0, 9), "i32")),
        {"interleaved": False},
    )
    other = replace(plain, attrs={"interleaved": True})
    made += [*laid_out(plain, *LAYOUTS[1:]), *laid_out(other, *LAYOUTS[1:])]
    x, cos, sin, positions = plain.inputs
    for layout in LAYOUTS[1:]:
        views = (replace(t, layout=layout) for t in (cos, sin, positions))
        made.append(replace(plain, inputs=(x, *views)))
    made += [replace(plain, inputs=(In((2, 2, 5, 16), "large"), cos, sin, positions))]
    made += [replace(plain, inputs=(In((1, 1, 1, 21), "extremes"), cos, sin))]
    return Row(FLOATS, tuple(made), sums=True)


def conv1d() -> Row:
    """Every variant; strides, padding, one tap and many; what lies for the product already."""
    made = []
    for (b, c, n), (out, taps), stride, padding in (
        *(((1, 1, 1), (1, 1), 1, 0), ((2, 3, 9), (5, 3), 1, 1), ((2, 16, 12), (8, 3), 2, 1)),
        *(((1, 1, 17), (3, 7), 1, 0), ((2, 8, 10), (4, 3), 2, 0), ((1, 5, 4), (2, 1), 1, 0)),
        *(((1, 3, 0), (2, 3), 1, 2), ((2, 0, 5), (3, 3), 1, 0), ((0, 2, 5), (3, 3), 1, 0)),
        *(((2, 4, 5), (1, 2), 3, 4), ((1, 8, 70), (33, 3), 1, 1), ((3, 5, 11), (0, 2), 1, 0)),
    ):
        attrs = {"stride": stride, "padding": padding, "activation": ""}
        made.append(Case((In((b, c, n)), In((out, c, taps))), attrs))
        made.append(Case((In((b, c, n)), In((out, c, taps)), In((out,))), attrs))
    three = (In((2, 8, 21)), In((6, 8, 3)), In((6,)))
    attrs = {"stride": 1, "padding": 1, "activation": ""}
    for variant, n in (*((v, 21) for v in VARIANTS), ("gemv", 1), ("skinny", 13)):
        made.append(Case((In((2, 8, n)), *three[1:]), {**attrs, "variant": variant}))
    made += [Case(three, {**attrs, "activation": a}) for a in ("relu", "gelu", "silu", "tanh")]
    bare = {"stride": 2, "padding": 0, "activation": ""}
    for layout in LAYOUTS[1:]:
        made.append(Case((replace(three[0], layout=layout), *three[1:]), attrs))
        made.append(Case((replace(three[0], layout=layout), *three[1:]), bare))
        views = (replace(three[1], layout=layout), replace(three[2], layout="offset"))
        made.append(Case((three[0], *views), attrs))
    made.append(Case((three[0], In((6, 8, 3), dtype="bf16"), In((6,), dtype="f32")), attrs))
    made.append(Case((In((2, 8, 21), "large"), *three[1:]), attrs))
    return Row(FLOATS, tuple(made), sums=True)


def assign() -> Row:
    """What broadcasts to a State; views; every dtype."""
    pairs: list[tuple[Shape, Shape]] = [
        *(((), ()), ((1,), (1,)), ((0, 3), (0, 3)), ((33,), (33,)), ((33,), ()), ((3, 5), (5,))),
        *(((5, 8), (5, 8)), ((2, 3, 17), (3, 1)), ((7, 1), (7, 1)), ((2, 3, 7), (2, 1, 7))),
    ]
    made = [Case((In(a, layout="state"), In(b))) for a, b in pairs]
    state = In((6, 5), layout="state")
    made += [Case((state, In((6, 5), layout=x))) for x in LAYOUTS[1:]]
    made += [Case((In((21,), layout="state"), In((21,), "extremes")), dtypes=FLOATS)]
    return Row(ALL, tuple(made), exact=True)


def cache_write() -> Row:
    """One token and many; rows in chunks, in words, odd; what passes the capacity is dropped."""

    def case(shape: Shape, tokens: int, high: int, layout: str = "plain") -> Case:
        caches = (In(shape, layout="state"),) * 2
        new = In((*shape[:2], tokens, shape[3]), layout=layout)
        return Case((*caches, new, replace(new, layout="plain"), In(shape[:1], (0, high), "i32")))

    made = [case((2, 3, 7, d), t, 8 - t) for d in (1, 5, 16, 64) for t in (1, 3)]
    made += [case((3, 1, 4, 8), 4, 1), case((3, 2, 5, 6), 3, 7), case((1, 2, 5, 8), 0, 5)]
    made += [case((2, 2, 9, 8), 4, 5, x) for x in LAYOUTS[1:]]
    extremes = In((1, 1, 21, 1), "extremes")
    made += [
        Case(
            (
                *(In((1, 1, 23, 1), layout="state"),) * 2,
                extremes,
                extremes,
                In((1,), (0, 2), "i32"),
            ),
            dtypes=FLOATS,
        )
    ]
    return Row((*FLOATS, "i8"), tuple(made), exact=True)


def cache_step() -> Row:
    """A step's begin; positions set to lengths."""
    made = [Case((In((2, b), (0, 50), layout="state"),), {"tokens": n})
            for b in (1, 3, 67) for n in (1, 5)]  # fmt: skip
    steps = In((2, 67), (0, 50), layout="state")
    lengths = In((67,), (0, 50))
    made += [Case((steps, replace(lengths, layout=x)), {"tokens": 0}) for x in ("plain", "offset")]
    return Row(("i32",), tuple(made), exact=True)


def fused() -> Row:
    """A chain with numbers of two types, a comparison, a cast and an operand that broadcasts."""
    made: list[Case] = []
    for dtype in FLOATS:
        steps = (
            Step("mul", (0, 1), (), (), dtype),
            Step("gelu", (2,), (("kind", "tanh"),), (), dtype),
            Step("cast", (3,), (("dtype", "f32"),), (), "f32"),
            Step("lt", (4,), (), ("second",), "bool"),
            Step("where", (5, 2), (), ("first",), dtype),
        )
        attrs = {"steps": steps, "3.second": 0.7, "4.first": -1.5}
        shapes: list[tuple[Shape, Shape]] = [
            *(((), ()), ((0,), ()), ((33,), (33,)), ((3, 5), (5,)), ((5, 8), (5, 8))),
            *(((5, 8), (5, 1)), ((2, 3, 7), (3, 1))),
        ]
        made += [Case((In(a), In(b)), attrs, (dtype,)) for a, b in shapes]
        made += laid_out(Case((In((6, 5)), In((5,))), attrs, (dtype,)), *LAYOUTS[1:])
        made += [Case((In((21,), "extremes"), In((21,), "ties")), attrs, (dtype,))]
    wrap = (
        Step("mul", (0,), (), ("second",), "i8"),
        Step("remainder", (1, 0), (), (), "i8"),
    )
    made += [Case((In((3, 37)),), {"steps": wrap, "0.second": 3}, ("i8",))]
    return Row((*FLOATS, "i8"), tuple(made))


TABLE: dict[str, Row] = {
    "add": two(NUMBERS, brief=False),
    "sub": two(NUMBERS),
    "mul": two(NUMBERS),
    "div": two(FLOATS),
    "maximum": two(NUMBERS),
    "minimum": two(NUMBERS),
    "neg": numbers_of(),
    "abs": numbers_of(),
    "relu": numbers_of(),
    "clip": numbers_of(low=2, high=100),
    "sqrt": floats_of("positive"),
    "exp": Row(FLOATS, at_length(FLOATS)),
    "log": floats_of("positive"),
    "tanh": floats_of(),
    "sigmoid": floats_of(),
    "swish": floats_of(),
    "elu": floats_of(alpha=0.7),
    "gelu": Row(
        FLOATS, tuple(c for k in ("none", "tanh", "quick") for c in floats_of(kind=k).cases)
    ),
    "scale": floats_of(factor=-1.5),
    "leaky_relu": floats_of(slope=0.01),
    "where": where(),
    "copy": Row(ALL, at_length(ALL), exact=True),
    "cast": cast(),
    "reshape": reshape(),
    "concat": concat(),
    "fill": fill(),
    "reduce": reduce(),
    "dot": dot(),
    "argmax": argmax(),
    "softmax": softmax(),
    "norm": norm(),
    "mean_pool": mean_pool(),
    "embedding": embedding(),
    "matmul": matmul(),
    "linear": linear(),
    "attention": attention(),
    "silu_gate": gated(),
    "sin": floats_of(),
    "cos": floats_of(),
    "rsqrt": floats_of("positive"),
    "square": numbers_of(),
    "floor_divide": divided(),
    "remainder": divided(),
    "eq": compared(ALL),
    "ne": compared(ALL),
    "lt": compared(),
    "le": compared(),
    "gt": compared(),
    "ge": compared(),
    "logical_and": logical(2),
    "logical_or": logical(2),
    "logical_not": logical(1),
    "arange": arange(),
    "gather": gather(),
    "scatter": scatter(),
    "rope": rope(),
    "conv1d": conv1d(),
    "assign": assign(),
    "cache_write": cache_write(),
    "cache_step": cache_step(),
    "fused": fused(),
}
