"""The rows of weights in blocks: the product of few rows, and the weight made whole."""

from __future__ import annotations

from centella.check.cases.case import FLOATS, LAYOUTS, OWN, Case, In, Row

# Rows of x, outputs, blocks: one of each; outputs off every team; steps of all lanes and left over.
SIZES: tuple[tuple[int, int, int], ...] = (
    (1, 1, 1),
    (1, 7, 3),
    (1, 33, 70),
    (2, 5, 9),
    (3, 34, 4),
    (5, 9, 17),
    (16, 37, 3),
)

ONE = ("f32",)  # of x: its dtype changes how it is loaded and nothing else


def planes(n: int, blocks: int, four: bool, factors: str = "") -> tuple[In, In]:
    """Numbers and factors of a weight."""
    stored = In((n, blocks * 16), dtype="u8") if four else In((n, blocks * 32), dtype="i8")
    return stored, In((n, blocks), dtype=factors)


def linear_blocks() -> Row:
    """Numbers of 8 and of 4 bits; factors of each float; what follows; layouts; nothing to do."""
    plain = {"extras": (), "activation": "", "alpha": 1.0}
    every = {"extras": ("bias", "residual"), "activation": "silu", "alpha": 0.01}
    made = []
    for four in (False, True):
        for m, n, blocks in SIZES:
            operands = (In((m, blocks * 32)), *planes(n, blocks, four, "f16"))
            made.append(Case(operands, plain, () if (m, n) == (1, 33) else ONE))
        for kind in FLOATS:
            made.append(Case((In((2, 3, 64)), *planes(11, 2, four, kind)), plain, ONE))
        made.append(Case((In((3, 64), "large"), *planes(11, 2, four, "f16")), plain, ONE))
        more = (In((11,)), In((4, 11)))
        made.append(Case((In((4, 64)), *planes(11, 2, four), *more), every))
        for layout in LAYOUTS[1:]:
            stored, factors = planes(12, 2, four)
            made.append(Case((In((4, 64), layout=layout), stored, factors), plain, ONE))
            lies = In(stored.shape, dtype=stored.dtype, layout=layout)
            made.append(Case((In((4, 64)), lies, factors), plain, ONE))
            made.append(Case((In((4, 64)), stored, In(factors.shape, layout=layout)), plain, ONE))
        for m, n, blocks in ((0, 3, 1), (3, 0, 1), (2, 3, 0)):
            made.append(Case((In((m, blocks * 32)), *planes(n, blocks, four)), plain))
    return Row(FLOATS, tuple(made), sums=True)


def dequantize() -> Row:
    """Numbers of 8 and of 4 bits; to each float; layouts; nothing."""
    made = []
    for four in (False, True):
        for n, blocks in ((1, 1), (9, 3), (33, 20), (0, 2), (2, 0)):
            made.append(Case(planes(n, blocks, four, "f16"), {"dtype": OWN}))
        for layout in LAYOUTS[1:]:
            stored, factors = planes(12, 2, four)
            lies = In(stored.shape, dtype=stored.dtype, layout=layout)
            made.append(Case((lies, factors), {"dtype": OWN}, ONE))
            made.append(Case((stored, In(factors.shape, layout=layout)), {"dtype": OWN}, ONE))
    return Row(FLOATS, tuple(made))
