"""The cases of quantised weights: products, the dequantised weight, rows of a table."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from centella.check.cases.case import FLOATS, LAYOUTS, OWN, Case, In, Row
from centella.ops.quant.table import FORMATS

# Rows of x, outputs, blocks: one of each; outputs off every team; steps of all lanes and left over.
SIZES: tuple[tuple[int, int, int], ...] = (
    (1, 1, 1),
    (1, 7, 3),
    (1, 33, 70),
    (2, 5, 9),
    (3, 34, 4),
    (5, 9, 17),
    (16, 37, 3),
    (17, 9, 3),
)

ONE = ("f32",)  # of x: its dtype changes how it is loaded and nothing else
BLOCKS: tuple[str, ...] = tuple(f.name for f in FORMATS.values() if not f.by_row)
WELL = ("q8_0", "q4_0")  # for these every layout: the others are read by the same code


def planes(format: str, n: int, blocks: int, factors: str = "") -> tuple[In, ...]:
    """The planes of a weight; factors of a dtype; exponents of numbers near 1."""
    return tuple(
        In(
            p.shape(n, blocks), (120, 132) if p.name == "exponents" else "normal",
            factors if p.dtype is None else p.dtype.name,
        )
        for p in FORMATS[format].planes
    )  # fmt: skip


def laid_out(operands: tuple[In, ...]) -> list[tuple[In, ...]]:
    """The same planes, one after the other lying otherwise."""
    return [
        (*operands[:i], replace(plane, layout=layout), *operands[i + 1 :])
        for layout in LAYOUTS[1:]
        for i, plane in enumerate(operands)
        if len(plane.shape) == 2
    ]


def linear() -> list[Case]:
    """Factors of each float; what follows; layouts; nothing to do; more rows than are thin."""
    cases = []
    for name in BLOCKS:
        plain: dict[str, Any] = {"extras": (), "activation": "", "alpha": 1.0, "format": name}
        every = {**plain, "extras": ("bias", "residual"), "activation": "silu", "alpha": 0.01}
        k = FORMATS[name].block
        for m, n, small in SIZES:
            blocks = -(-32 * small // k)
            operands = (In((m, blocks * k)), *planes(name, n, blocks, "f16"))
            wide = (m, n) == (1, 33) and name in WELL
            cases.append(Case(operands, plain, () if wide else ONE))
        for kind in FLOATS:
            cases.append(Case((In((2, 3, 2 * k)), *planes(name, 11, 2, kind)), plain, ONE))
        cases.append(Case((In((3, 2 * k), "large"), *planes(name, 11, 2, "f16")), plain, ONE))
        more = (In((11,)), In((4, 11)))
        cases.append(Case((In((4, 2 * k)), *planes(name, 11, 2), *more), every))
        more = (In((11,)), In((18, 11)))
        cases.append(Case((In((18, 2 * k)), *planes(name, 11, 2), *more), every, ONE))
        if FORMATS[name].cores is not None:  # runs of columns, blocks of outputs, rows of x
            for m, n, width in ((1, 300, 1280), (8, 38, 1024), (16, 530, 1280)):
                blocks = width // k
                blocks += blocks * FORMATS[name].planes[-1].length % 2  # factors in whole words
                operands = (In((m, blocks * k)), *planes(name, n, blocks, "f16"))
                cases.append(Case(operands, plain, ("f16", "bf16"), sweep=m == 16))
        for m, n, blocks in ((0, 3, 1), (3, 0, 1), (2, 3, 0)):
            cases.append(Case((In((m, blocks * k)), *planes(name, n, blocks)), plain))
        if name in WELL:
            x, weight = In((4, 2 * k)), planes(name, 12, 2)
            cases += [Case((replace(x, layout=y), *weight), plain, ONE) for y in LAYOUTS[1:]]
            cases += [Case((x, *other), plain, ONE) for other in laid_out(weight)]
    return cases


def dequantize() -> Row:
    """Each format to each float; layouts; nothing; rows that end within a step."""
    cases = []
    for name, format in FORMATS.items():
        attrs = {"dtype": OWN, "format": name}
        for n, blocks in ((1, 1), (9, 3), (33, 20), (0, 2), (2, 0)):
            cases.append(Case(planes(name, n, blocks, "f16"), attrs))
        if format.by_row:
            cases += [Case(planes(name, 5, k, "f16"), attrs) for k in (17, 33, 64)]
        cases += [Case(p, attrs, ONE) for p in laid_out(planes(name, 12, 2 + 38 * format.by_row))]
    return Row(FLOATS, tuple(cases))


def embedding() -> list[Case]:
    """Rows of a table in each format; ids outside of it; layouts."""
    cases = []
    for name, format in FORMATS.items():
        attrs = {"dtype": OWN, "format": name}
        blocks = 19 if format.by_row else 3
        for shape in ((), (7,), (2, 3), (0,)):
            ids = In(shape, (-2, 11), "i32")
            cases.append(Case((ids, *planes(name, 9, blocks, "f16")), attrs))
        for table in laid_out(planes(name, 9, blocks, "f16")):
            cases.append(Case((In((5,), (0, 9), "i32"), *table), attrs, ONE))
    return cases
