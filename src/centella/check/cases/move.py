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
