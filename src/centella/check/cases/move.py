"""The rows of operations that move elements, look them up or make them of nothing."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from centella.check.cases import planes
from centella.check.cases.case import (
    ALL,
    DEPTH,
    FLOATS,
    LAYOUTS,
    NUMBERS,
    OWN,
    Case,
    In,
    Row,
    Shape,
    laid_out,
)


def reshape() -> Row:
    """Reshapes that cross pads."""
    pairs: list[tuple[Shape, Shape]] = [
        *(((3, 5), (15,)), ((15,), (5, 3)), ((3, 5), (5, 3)), ((2, 3, 7), (6, 7))),
        *(((2, 3, 7), (2, 21)), ((4, 1, 3), (3, 4)), ((12,), (2, 1, 3, 2)), ((6, 2), (4, 3, 1))),
    ]
    all_cases = [Case((In(a),), {"shape": b}) for a, b in pairs]
    all_cases += laid_out(Case((In((6, 5)),), {"shape": (10, 3)}), *LAYOUTS[1:])
    all_cases += [Case((In((7, 3), "extremes"),), {"shape": (21,)}, FLOATS)]
    return Row(("f32", "f16", "bf16", "i8", "bool"), tuple(all_cases), exact=True)


def concat() -> Row:
    """Along each axis; empty operands; words that two operands share; the most operands."""
    groups: list[tuple[int, tuple[Shape, ...]]] = [
        (0, ((3,), (5,), (1,))), (0, ((3, 5), (2, 5))), (1, ((3, 5), (3, 2), (3, 1))),
        (1, ((2, 1, 3), (2, 4, 3))), (0, ((0, 3), (2, 3))), (0, ((5,),) * 7), (1, ((2, 0), (2, 0))),
    ]  # fmt: skip
    all_cases = [Case(tuple(map(In, shapes)), {"axis": axis}) for axis, shapes in groups]
    all_cases += laid_out(all_cases[2], "offset", "transposed")
    all_cases += [Case((In((21,), "extremes"), In((3,))), {"axis": 0}, FLOATS)]
    return Row(("f32", "f16", "i32", "u8", "bool"), tuple(all_cases), exact=True)


def fill() -> Row:
    """Any shape, any dtype; numbers that only some can hold."""
    shapes = ((), (0,), (5,), (3, 5), (7, 1), (2, 3, 8))
    own = {"dtype": OWN}
    all_cases = [Case((), {"shape": s, "value": 1, **own}) for s in shapes]
    all_cases += [
        Case((), {"shape": (3,), "value": v, **own}, FLOATS) for v in (-0.5, math.inf, math.nan)
    ]
    all_cases += [Case((), {"shape": (2, 3), "value": -7, **own}, ("i8", "i32", *FLOATS))]
    return Row(ALL, tuple(all_cases), exact=True)


def arange() -> Row:
    """Up, down, nothing; whole chunks and none."""
    all_cases = [
        Case((), {"start": a, "step": b, "size": n, "dtype": OWN})
        for a, b, n in ((0, 1, 0), (0, 1, 1), (3, 2, 5), (0, 1, 64), (100, -3, 33), (7, 1, 120))
    ]
    floats = {"dtype": OWN}
    all_cases += [Case((), {"start": -0.5, "step": 0.1, "size": 41, **floats}, FLOATS)]
    all_cases += [Case((), {"start": -7, "step": 3, "size": 21, **floats}, (*FLOATS, "i32", "i8"))]
    all_cases += [Case((), {"start": 2**32 - 1, "step": -5, "size": 300, **floats}, ("u32",))]
    return Row(NUMBERS, tuple(all_cases))


def embedding() -> Row:
    """Ids of every rank; some outside the table, whose rows are NaN."""
    all_cases = [
        Case((In(shape, (0, 9), "i32"), In((9, d))))
        for shape, d in (((), 5), ((1,), 1), ((7,), 8), ((2, 3), 5), ((2, 1, 4), 33), ((0,), 4))
    ]
    all_cases += [
        Case((In((9,), (-2, 11), "i32"), In((9, 5)))),
        Case((In((0,), (0, 1), "i32"), In((0, 5)))),
    ]
    all_cases += laid_out(all_cases[3], "offset", "strided", "transposed")
    all_cases += [Case((In((5,), (0, 9), "i32"), In((9, 5), layout=x))) for x in LAYOUTS[1:]]
    all_cases += [Case((In((9,), (0, 7), "i32"), In((7, 3), "extremes")))]
    return Row(FLOATS, (*all_cases, *planes.embedding()), exact=True)


PICKS: tuple[tuple[Shape, Shape, int], ...] = (
    *(((9,), (5,), 0), ((9, 5), (7,), 0), ((9, 8), (2, 3), 0), ((3, 9), (4,), 1), ((3, 9), (), 1)),
    *(((2, 9, 8), (3,), 1), ((9, 2, 3), (), 0), ((2, 3, 9), (2, 2), 2), ((9, 33), (1,), 0)),
    *(((9, 1), (6,), 0), ((2, 9), (33,), 1), ((9, 4), (0,), 0), ((9, 0), (3,), 0)),
)


def gather() -> Row:
    """Along each axis, indices of every rank; some outside; views of either operand."""
    all_cases = [
        Case((In(shape), In(indices, (0, 9), "i32")), {"axis": axis})
        for shape, indices, axis in PICKS
    ]
    all_cases += [
        Case((In((9, 8)), In((40,), (-12, 12), "i32")), {"axis": 0}),
        Case((In((3, 9)), In((40,), (-12, 12), "i32")), {"axis": 1}),
        Case((In((2, 0, 3)), In((0,), (0, 1), "i32")), {"axis": 1}),
    ]
    for x in LAYOUTS[1:]:
        all_cases.append(Case((In((9, 8), layout=x), In((5,), (0, 9), "i32")), {"axis": 0}))
        all_cases.append(Case((In((8, 9), layout=x), In((5,), (0, 9), "i32")), {"axis": 1}))
        all_cases.append(Case((In((9, 5)), In((4, 6), (0, 9), "i32", x)), {"axis": 0}))
    return Row(ALL, tuple(all_cases), exact=True)


def scatter() -> Row:
    """Few indices and many, so that some are equal; some outside; rows of one element."""
    all_cases = [
        Case((In((n, *rest)), In((k,), (-n - 1, n + 1), "i32"), In((k, *rest))))
        for n, rest, k in (
            *((9, (), 5), (33, (), 40), (9, (5,), 4), (9, (8,), 30), (7, (1,), 3), (3, (2, 7), 5)),
            *((5, (3,), 0), (0, (3,), 4), (4, (0,), 3), (1, (), 1), (300, (3,), 290)),
        )
    ]
    for x in LAYOUTS[1:]:
        some = (In((9, 8), layout=x), In((5,), (0, 9), "i32"), In((5, 8), layout=x))
        all_cases.append(Case(some))
    all_cases += [
        Case((In((9, 5)), In((6,), (0, 9), "i32", x), In((6, 5)))) for x in ("offset", "strided")
    ]
    many = (In((9, 4)), In((DEPTH,), (0, 7), "i32"), In((DEPTH, 4)))
    all_cases.append(Case(many, {}, ("f32",), small=False))
    return Row(ALL, tuple(all_cases), exact=True)


TAKEN: tuple[tuple[Shape, Shape, int], ...] = (
    *(((9,), (5,), 0), ((3, 9), (3, 4), 1), ((3, 9), (4, 9), 0), ((2, 5, 8), (2, 7, 8), 1)),
    *(((2, 5, 3), (1, 7, 1), 1), ((1, 5, 3), (4, 2, 3), 1), ((3, 33), (3, 0), 1)),
    *(((4, 1), (4, 9), 1), ((2, 2, 67), (2, 2, 40), 2)),
)


def take_along_axis() -> Row:
    """Along each axis; other extents that broadcast; some outside; views of either operand."""
    all_cases = [
        Case((In(shape), In(indices, (-n - 1, n + 1), "i32")), {"axis": axis})
        for shape, indices, axis in TAKEN
        for n in (shape[axis],)
    ]
    for x in LAYOUTS[1:]:
        all_cases.append(Case((In((9, 8), layout=x), In((9, 5), (0, 8), "i32")), {"axis": 1}))
        all_cases.append(Case((In((9, 5)), In((4, 5), (0, 9), "i32", x)), {"axis": 0}))
    return Row(ALL, tuple(all_cases), exact=True)


def scatter_reduce() -> Row:
    """Each way to combine, an index a slice or an element; many equal, some outside; views."""

    def case(
        shape: Shape, k: int, axis: int, reduce: str, each: bool, x: str = "plain", **more: Any
    ) -> Case:
        n, values = shape[axis], (*shape[:axis], k, *shape[axis + 1 :])
        at = In(values if each else (k,), (-n - 1, n + 1), "i32", x if each else "plain")
        inputs = (In(shape, (-3, 4), layout=x), at, In(values, (-3, 4), layout=x))
        return Case(inputs, {"axis": axis, "reduce": reduce}, **more)

    shapes: tuple[tuple[Shape, int, int], ...] = (
        *(((9,), 5, 0), ((9, 5), 30, 0), ((3, 33), 40, 1), ((2, 5, 3), 7, 1), ((0, 3), 4, 0)),
        *(((5, 3), 0, 0), ((4, 0), 3, 0), ((2, 7, 8), 1, 1)),
    )
    all_cases = [
        case(*s, r, each) for s in shapes for r in ("add", "set") for each in (False, True)
    ]
    all_cases += [case((9, 5), 4, axis, r, each) for axis in (0, 1) for r in ("mul", "max", "min")
             for each in (False, True)]  # fmt: skip
    all_cases += [
        case((9, 8), 6, 0, "add", False, x) for x in ("pads", "offset", "strided", "rows")
    ]
    all_cases += [case((9, 8), 6, 1, "max", True, x) for x in LAYOUTS[1:]]
    all_cases += [case((300, 5), 5000, 0, "add", False, small=False)]
    return Row(NUMBERS, tuple(all_cases), exact=True)


def rope() -> Row:
    """Both pairings; some columns pass; positions of each kind, some outside the tables."""
    all_cases = []
    for (b, h, s, d), half in (
        *(((1, 1, 1, 2), 1), ((2, 3, 5, 16), 8), ((2, 2, 3, 24), 8), ((1, 2, 7, 10), 3)),
        *(((2, 1, 3, 20), 8), ((1, 1, 2, 67), 33), ((2, 4, 3, 64), 32), ((0, 2, 3, 8), 4)),
        *(((2, 2, 0, 8), 2), ((1, 2, 3, 5), 2)),
    ):
        tables = (In((9, half), dtype="f32"),) * 2
        for interleaved in (False, True):
            attrs = {"interleaved": interleaved}
            all_cases.append(Case((In((b, h, s, d)), *tables), attrs))
            all_cases.append(Case((In((b, h, s, d)), *tables, In((b,), (-2, 9), "i32")), attrs))
            all_cases.append(Case((In((b, h, s, d)), *tables, In((b, s), (-2, 12), "i32")), attrs))
    plain = Case(
        (In((2, 2, 5, 16)), *(In((9, 8), dtype="f32"),) * 2, In((2, 5), (0, 9), "i32")),
        {"interleaved": False},
    )
    other = replace(plain, attrs={"interleaved": True})
    all_cases += [*laid_out(plain, *LAYOUTS[1:]), *laid_out(other, *LAYOUTS[1:])]
    x, cos, sin, positions = plain.inputs
    for layout in LAYOUTS[1:]:
        views = (replace(t, layout=layout) for t in (cos, sin, positions))
        all_cases.append(replace(plain, inputs=(x, *views)))
    all_cases += [replace(plain, inputs=(In((2, 2, 5, 16), "large"), cos, sin, positions))]
    all_cases += [replace(plain, inputs=(In((1, 1, 1, 21), "extremes"), cos, sin))]
    return Row(FLOATS, tuple(all_cases), sums=True)


def assign() -> Row:
    """What broadcasts to a State; views; every dtype."""
    pairs: list[tuple[Shape, Shape]] = [
        *(((), ()), ((1,), (1,)), ((0, 3), (0, 3)), ((33,), (33,)), ((33,), ()), ((3, 5), (5,))),
        *(((5, 8), (5, 8)), ((2, 3, 17), (3, 1)), ((7, 1), (7, 1)), ((2, 3, 7), (2, 1, 7))),
    ]
    all_cases = [Case((In(a, layout="state"), In(b))) for a, b in pairs]
    state = In((6, 5), layout="state")
    all_cases += [Case((state, In((6, 5), layout=x))) for x in LAYOUTS[1:]]
    all_cases += [Case((In((21,), layout="state"), In((21,), "extremes")), dtypes=FLOATS)]
    return Row(ALL, tuple(all_cases), exact=True)


def cache_write() -> Row:
    """One token and many; rows in chunks, in words, odd; what passes the capacity is dropped."""

    def case(shape: Shape, tokens: int, high: int, layout: str = "plain") -> Case:
        caches = (In(shape, layout="state"),) * 2
        new = In((*shape[:2], tokens, shape[3]), layout=layout)
        return Case((*caches, new, replace(new, layout="plain"), In(shape[:1], (0, high), "i32")))

    all_cases = [case((2, 3, 7, d), t, 8 - t) for d in (1, 5, 16, 64) for t in (1, 3)]
    all_cases += [case((3, 1, 4, 8), 4, 1), case((3, 2, 5, 6), 3, 7), case((1, 2, 5, 8), 0, 5)]
    all_cases += [case((2, 2, 9, 8), 4, 5, x) for x in LAYOUTS[1:]]
    all_cases += [
        Case((*(In((2, blocks, 4, d), layout="state"),) * 2, *(In((1, 2, t, d), layout=x),) * 2,
              In((1, 1 + width), "apart", "i32")))
        for blocks, width, t, d, x in (
            (6, 5, 7, 8, "plain"), (3, 4, 9, 5, "plain"), (4, 3, 3, 16, "pads"),
            (9, 7, 1, 8, "plain"),
        )
    ]  # fmt: skip
    extremes = In((1, 1, 21, 1), "extremes")
    all_cases += [
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
    return Row((*FLOATS, "i8"), tuple(all_cases), exact=True)


def rope_cache_write() -> Row:
    """Both pairings, with norms and without; chunks, words, odd; past the capacity, the tables."""

    def case(
        b: int, heads: int, kv: int, tokens: int, d: int, half: int, norm: bool = False,
        high: int = 5, interleaved: bool = False, layout: str = "plain", values: Any = "normal",
        **more: Any,
    ) -> Case:  # fmt: skip
        caches = (In((b, kv, 7, d), layout="state"),) * 2
        x = In((b, heads + 2 * kv, tokens, d), values, layout=layout)
        tables = (In((9, half), dtype="f32"),) * 2
        norms = (In((2, d), dtype="" if d % 8 else "f32"),) if norm else ()
        attrs = {"interleaved": interleaved, "eps": 1e-3}
        return Case((*caches, x, *tables, In((b,), (0, high), "i32"), *norms), attrs, **more)

    all_cases = [case(2, 4, 2, t, d, half, norm) for d, half in ((16, 8), (6, 2), (5, 2))
            for t in (1, 3) for norm in (False, True)]  # fmt: skip
    all_cases += [case(2, 6, 3, 3, d, 4, norm, interleaved=True) for d in (16, 10)
             for norm in (False, True)]  # fmt: skip
    all_cases += [case(2, 6, 3, 3, d, 4, True, interleaved=True, layout="pads") for d in (10, 20)]
    all_cases += [
        case(1, 8, 8, 1, 64, 32),
        case(3, 1, 1, 4, 24, 8, True, 9),
        case(0, 2, 1, 1, 8, 4),
    ]
    all_cases += [case(2, 2, 1, 3, 8, 4, True, layout=x, sweep=True) for x in LAYOUTS[1:]]
    all_cases += [case(2, 4, 2, 3, 16, 8, norm, values="large") for norm in (False, True)]
    attrs = {"interleaved": False, "eps": 1e-3}
    for d, norm in ((16, True), (6, False)):
        pools, tables = (In((2, 5, 4, d), layout="state"),) * 2, (In((9, 2), dtype="f32"),) * 2
        table = In((1, 7), "apart", "i32")  # two sequences may not have one block
        norms = (In((2, d), dtype="f32"),) if norm else ()
        all_cases += [Case((*pools, In((1, 8, 5, d)), *tables, table, *norms), attrs)]
    return Row(FLOATS, tuple(all_cases), sums=True)


def rope_attend() -> Row:
    """Both ways: parts without a key, several tokens, shared keys, norms, windows, blocks."""

    def case(
        b: int, heads: int, kv: int, tokens: int, d: int, half: int, variant: str,
        capacity: int = 150, norm: bool = False, interleaved: bool = False, **more: Any,
    ) -> Case:  # fmt: skip
        caches = (In((b, kv, capacity, d), layout="state"),) * 2
        x = In((b, heads + 2 * kv, tokens, d), layout=more.pop("layout", "plain"))
        tables = (In((capacity, half), dtype="f32"),) * 2
        norms = (In((2, d), dtype="f32"),) if norm else ()
        sight: dict[str, Any] = {
            name: more.pop(name) for name in ("window", "softcap") if name in more
        }
        attrs: dict[str, Any] = {"interleaved": interleaved, "eps": 1e-3, "scale": 0.02 * d**-0.5}
        starts = In((b,), (0, capacity - tokens + 1), "i32")
        attrs |= {"variant": variant, **sight}
        return Case((*caches, x, *tables, starts, *norms), attrs, **more)

    def table(d: int, tokens: int, variant: str, **sight: Any) -> Case:
        pools, tables = (In((2, 5, 64, d), layout="state"),) * 2, (In((200, d // 2), dtype="f32"),)
        attrs = {
            "interleaved": False,
            "eps": 1e-3,
            "scale": 0.02 * d**-0.5,
            "variant": variant,
            **sight,
        }
        return Case((*pools, In((1, 8, tokens, d)), *tables * 2, In((1, 4), (1, 5), "i32"),
                     In((2, d), dtype="f32")), attrs)  # fmt: skip

    sixteen: dict[str, Any] = {"dtypes": ("f16", "bf16")}
    all_cases = [case(2, 4, 2, 1, 16, 8, "apart"), case(1, 2, 1, 5, 6, 2, "apart", 9, norm=True),
            case(2, 4, 2, 3, 8, 4, "apart", window=4, softcap=2.0),
            table(8, 3, "apart")]  # fmt: skip
    all_cases += [
        case(2, 4, 2, 1, 16, 8, "cluster", **sixteen),
        case(3, 4, 1, 2, 64, 32, "cluster", 700, norm=True, **sixteen),
        case(2, 2, 2, 7, 24, 8, "cluster", 90, norm=True, **sixteen),
        case(1, 6, 2, 1, 40, 20, "cluster", 300, interleaved=True, **sixteen),
        case(2, 4, 2, 2, 16, 8, "cluster", window=20, softcap=2.0, norm=True, **sixteen),
        case(1, 2, 1, 1, 128, 64, "cluster", 60, layout="pads", norm=True, **sixteen),
        case(70, 4, 2, 1, 16, 8, "cluster", 70, sweep=True, **sixteen),
    ]
    all_cases += [replace(table(d, n, "cluster", **sight), dtypes=("f16", "bf16"))
             for d, n, sight in ((16, 1, {}), (128, 2, {"window": 70}))]  # fmt: skip
    return Row(FLOATS, tuple(all_cases), sums=True)


def _in_i8(shape: Shape) -> tuple[In, ...]:
    """The States of a cache in i8."""
    rows = In(shape, (-127, 128), "i8", layout="state")
    return rows, rows, In((*shape[:-1], 2), dtype="f32", layout="state")


def cache_attend() -> Row:
    """Heads in chunks; caches empty, filled in part, full, and longer than a group has threads."""
    all_cases = []
    for b, h, capacity, d, high in (
        (1, 1, 1, 8, 1), (2, 3, 7, 16, 7), (2, 2, 40, 64, 40), (3, 1, 300, 32, 300),
        (1, 2, 448, 128, 448), (2, 1, 5, 24, 9),
    ):  # fmt: skip
        caches = (In((b, h, capacity, d), layout="state"),) * 2
        row = In((b, h, 1, d))
        case = Case((*caches, row, row, row, In((b,), (0, high), "i32")), {"scale": d**-0.5})
        all_cases.append(case)
    turned = In((2, 3, 1, 16), layout="transposed")
    all_cases.append(
        replace(all_cases[1], inputs=(*all_cases[1].inputs[:2], turned, *all_cases[1].inputs[3:]))
    )
    return Row(FLOATS, tuple(all_cases), sums=True)


def cache_write_i8() -> Row:
    """One token and many; rows in chunks, in words, odd; past the capacity; blocks; zeros."""

    def case(shape: Shape, tokens: int, high: int, layout: str = "plain", **more: Any) -> Case:
        new = In((*shape[:2], tokens, shape[3]), layout=layout)
        starts = In(shape[:1], (0, high), "i32")
        return Case((*_in_i8(shape), new, replace(new, layout="plain"), starts), **more)

    all_cases = [case((2, 3, 7, d), t, 8 - t) for d in (1, 6, 16, 20, 64) for t in (1, 3)]
    all_cases += [case((2, 2, 9, 8), 4, 5, x, sweep=True) for x in LAYOUTS[1:]]
    all_cases += [
        Case((*_in_i8((2, blocks, 4, d)), *(In((1, 2, t, d)),) * 2,
              In((1, 1 + width), "apart", "i32")))
        for blocks, width, t, d in ((6, 5, 7, 8), (3, 4, 9, 5), (9, 7, 1, 32))
    ]  # fmt: skip
    return Row(FLOATS, tuple(all_cases), sums=True)


def rope_cache_write_i8() -> Row:
    """As `rope_cache_write`."""

    def case(
        b: int, kv: int, tokens: int, d: int, half: int, norm: bool = False, high: int = 5
    ) -> Case:
        x = In((b, 3 * kv, tokens, d))
        tables = (In((9, half), dtype="f32"),) * 2
        attrs = {"interleaved": half % 2 == 1, "eps": 1e-3}
        starts = In((b,), (0, high), "i32")
        norms = (In((2, d), dtype="f32"),) if norm else ()
        return Case((*_in_i8((b, kv, 7, d)), x, *tables, starts, *norms), attrs)

    all_cases = [case(2, 2, t, d, half, t == 3) for t in (1, 3)
            for d, half in ((16, 8), (6, 2), (5, 2), (24, 5), (64, 32))]  # fmt: skip
    all_cases += [case(3, 1, 4, 24, 8, high=9), case(0, 1, 1, 8, 4)]
    return Row(FLOATS, tuple(all_cases), sums=True)


def cache_step() -> Row:
    """A step's begin; positions set to lengths."""
    all_cases = [Case((In((2, b), (0, 50), layout="state"),), {"tokens": n})
            for b in (1, 3, 67) for n in (1, 5)]  # fmt: skip
    steps = In((2, 67), (0, 50), layout="state")
    lengths = In((67,), (0, 50))
    all_cases += [
        Case((steps, replace(lengths, layout=x)), {"tokens": 0}) for x in ("plain", "offset")
    ]
    return Row(("i32",), tuple(all_cases), exact=True)
