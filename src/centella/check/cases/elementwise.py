"""The rows of operations that make each element of the same element of each operand."""

from __future__ import annotations

from typing import Any

from centella.check.cases.case import (
    ALL,
    BRIEF,
    BROADCASTS,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    NUMBERS,
    SHAPES,
    Case,
    In,
    Row,
    Shape,
    cases,
    laid_out,
)
from centella.ops.elementwise import BOOLS, TABLE, WHOLE, Expression
from centella.ops.steps import step_of


def expressions() -> dict[str, Row]:
    """The row of each element-wise op, as its line says; some are tested at length."""
    kinds = [floats_of(kind=k).cases for k in ("none", "tanh", "quick")]
    return {
        **{e.name: _row_of(e) for e in TABLE},
        "add": two(NUMBERS, brief=False),
        "exp": Row(FLOATS, at_length(FLOATS)),
        "gelu": Row(FLOATS, tuple(case for some in kinds for case in some)),
        "where": where(),
        "copy": Row(ALL, at_length(ALL), exact=True),
    }


def _row_of(e: Expression) -> Row:
    if e.compares:
        return compared(ALL if "bool" in e.kinds else NUMBERS)
    if e.kinds in (BOOLS, WHOLE):
        return logical(len(e.operands)) if e.kinds == BOOLS else divided()
    dtypes = NUMBERS if "int" in e.kinds else FLOATS
    if len(e.operands) > 1:
        return two(dtypes, e.domain) if "first" in e.operands else gated()
    return floats_of(e.domain, dtypes, **e.example)


def floats_of(values: str = "normal", dtypes: tuple[str, ...] = FLOATS, **attrs: Any) -> Row:
    """The row of an op of one operand, briefly; extremes of floats."""
    plain = cases(BRIEF, values, attrs)
    odd = laid_out(Case((In((3, 5), values),), attrs), "offset")
    extremes = Case((In((21,), "extremes"),), attrs, () if dtypes == FLOATS else FLOATS)
    return Row(dtypes, (*plain, *odd, extremes))


def at_length(dtypes: tuple[str, ...], **attrs: Any) -> tuple[Case, ...]:
    """Every shape, every layout, of one operand."""
    plain = cases(SHAPES, attrs=attrs)
    odd = [
        case
        for shape in ((6, 5), (2, 4, 8))
        for case in laid_out(Case((In(shape),), attrs), *LAYOUTS[1:])
    ]
    rank1 = laid_out(Case((In((13,)),), attrs), "offset", "strided")
    extremes = Case((In((21,), "extremes"),), attrs, tuple(d for d in dtypes if d in FLOATS))
    return (*plain, *odd, *rank1, extremes) if extremes.dtypes else (*plain, *odd, *rank1)


def two(dtypes: tuple[str, ...], values: str = "normal", brief: bool = True) -> Row:
    """The row of an op of two operands, the first with these values, or one and a number."""
    pairs = BROADCASTS[:4] if brief else BROADCASTS
    listed = [Case((In(a, values), In(b))) for a, b in (((3, 5), (3, 5)), *pairs)]
    number = {"second": 3} if "i8" in dtypes else {"second": 2.5}
    listed += [
        Case((In((33,), values),), number),
        Case((In((33,)),), {"first": number["second"]}),
        Case((In((21,), "extremes"), In((21,), "extremes", layout="offset")), dtypes=FLOATS),
        Case((In((21, 1), "extremes"), In((21,), "extremes")), dtypes=FLOATS),
    ]
    if not brief:
        both = Case((In((6, 5)), In((6, 5), layout="transposed")))
        listed += [
            both,
            *laid_out(both, *LAYOUTS[1:]),
            Case((In((6, 8)), In((8,), layout="offset"))),
        ]
    return Row(dtypes, tuple(listed))


def where() -> Row:
    """Conditions that broadcast; numbers on either side."""
    shapes = [
        ((3, 5), (3, 5), (3, 5)),
        ((5,), (3, 1), ()),
        ((3, 1), (8,), (3, 8)),
        ((0,), (1,), ()),
    ]
    listed = [Case((In(c, "bools", "bool"), In(a), In(b))) for c, a, b in shapes]
    some = (In((3, 5), "bools", "bool"), In((3, 5)))
    listed += [Case(some, {"first": 1}), Case(some, {"second": 0})]
    listed += laid_out(listed[0], "offset", "strided", "transposed")
    listed += [Case((In((21,), "bools", "bool"), In((21,), "extremes"), In((21,))), dtypes=FLOATS)]
    return Row(ALL, tuple(listed), exact=True)


def cast() -> Row:
    """From every dtype to every other; saturation, NaN and wrap."""
    listed = [
        Case((In(shape),), {"dtype": target}) for target in ALL for shape in ((3, 5), (33,), (7, 1))
    ]
    listed += [Case((In((21,), "extremes"),), {"dtype": t}, FLOATS) for t in ALL]
    listed += laid_out(Case((In((3, 8)),), {"dtype": "f16"}), "offset", "transposed")
    return Row(ALL, tuple(listed), exact=True)


def compared(dtypes: tuple[str, ...] = NUMBERS) -> Row:
    """Small whole numbers, of which many are equal; a number on either side; every extreme."""
    few = (0, 2) if "bool" in dtypes else (0, 4)
    listed = [Case((In(a, few), In(b, few))) for a, b in (((3, 5), (3, 5)), *BROADCASTS)]
    listed += laid_out(listed[0], *LAYOUTS[1:])
    listed += [Case((In((33,), few),), {n: 1}) for n in ("first", "second")]
    floats = tuple(d for d in dtypes if d in FLOATS)
    listed += [
        Case((In((21, 1), "extremes"), In((21,), "extremes")), dtypes=floats),
        Case((In((21,), "extremes"),), {"second": 0.5}, floats),
        Case((In((33,)), In((33,))), dtypes=tuple(d for d in dtypes if d != "bool")),
    ]
    return Row(dtypes, tuple(listed))


def logical(operands: int) -> Row:
    """Bools of every layout."""
    listed = [Case((In(s, "bools"),) * operands) for s in ((), (0,), (33,), (3, 5))]
    listed += laid_out(listed[-1], *LAYOUTS[1:])
    return Row(("bool",), tuple(listed))


def divided() -> Row:
    """Both signs, zero divisors, the least number by -1; a number on either side."""
    listed = [Case((In(a), In(b))) for a, b in (((3, 5), (3, 5)), *BROADCASTS[:4])]
    listed += laid_out(listed[0], *LAYOUTS[1:])
    signed, small = ("i32", "i8"), (0, 5)
    listed += [Case((In((64,)), In((64,), small))), Case((In((64,), small), In((64,), small)))]
    listed += [Case((In((65,), (-9, 9)), In((65,), (-3, 4))), dtypes=signed)]
    listed += [Case((In((33,)),), {n: v}) for n in ("first", "second") for v in (0, 7)]
    listed += [Case((In((9,), (-9, 9)),), {"second": -4}, signed)]
    listed += [
        Case((In((3,), (low, low + 1)), In((3,), (-1, 0))), dtypes=(dtype,))
        for dtype, low in (("i32", -(2**31)), ("i8", -128))
    ]
    return Row(INTEGERS, tuple(listed), exact=True)


def gated() -> Row:
    """Halves of one packed tensor and tensors of their own; broadcasts; extremes."""
    listed = [Case((In(a), In(b))) for a, b in (((3, 5), (3, 5)), *BROADCASTS)]
    listed += [Case((In((6, 8), layout=x), In((6, 8), layout=x))) for x in LAYOUTS[1:]]
    listed += [Case((In((5, 33), "large"), In((5, 33), "large")))]
    listed += [Case((In((21,), "extremes"), In((21,), "extremes", layout="offset")))]
    return Row(FLOATS, tuple(listed))


def fused() -> Row:
    """A chain with numbers of two types, a comparison, a cast and an operand that broadcasts."""
    listed: list[Case] = []
    for dtype in FLOATS:
        steps = (
            step_of("mul", (0, 1), dtype),
            step_of("gelu", (2,), dtype, kind="tanh"),
            step_of("cast", (3,), "f32", dtype="f32"),
            step_of("lt", (4,), "bool", second=0.7),
            step_of("where", (5, 2), dtype, first=-1.5),
        )
        attrs = {"steps": steps}
        shapes: list[tuple[Shape, Shape]] = [
            *(((), ()), ((0,), ()), ((33,), (33,)), ((3, 5), (5,)), ((5, 8), (5, 8))),
            *(((5, 8), (5, 1)), ((2, 3, 7), (3, 1))),
        ]
        listed += [Case((In(a), In(b)), attrs, (dtype,)) for a, b in shapes]
        listed += laid_out(Case((In((6, 5)), In((5,))), attrs, (dtype,)), *LAYOUTS[1:])
        listed += [Case((In((21,), "extremes"), In((21,), "ties")), attrs, (dtype,))]
    wrap = (step_of("mul", (0,), "i8", second=3), step_of("remainder", (1, 0), "i8"))
    listed += [Case((In((3, 37)),), {"steps": wrap}, ("i8",))]
    return Row((*FLOATS, "i8"), tuple(listed))
