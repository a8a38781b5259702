"""The row of `expert_linear`."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from centella.check.cases import planes
from centella.check.cases.case import FLOATS, LAYOUTS, Case, In, Row
from centella.ops.experts.op import up_planes


def expert_linear() -> Row:
    """Gates, and sums of picks; depths of one, odd, past a block; an id outside the experts."""
    cases = []
    for rows, picks, experts, n, k in ((1, 1, 1, 1, 1), (1, 2, 5, 7, 40), (3, 3, 4, 9, 67),
                                       (2, 8, 9, 130, 264), (0, 2, 3, 4, 8), (1, 2, 3, 5, 1030),
                                       (19, 2, 6, 33, 16)):  # fmt: skip
        ids, share = In((rows, picks), (0, experts), "i32"), In((rows, picks), "positive", "f32")
        w = In((experts, n, k), "positive")  # no two sums near 0
        up = {"extras": ("up",), "gate": "silu"}
        cases.append(Case((In((rows, k), "positive"), w, ids, w), up))
        down = (In((rows, picks, k), "positive"), w, ids, share)
        cases.append(Case(down, {"extras": ("shares",), "gate": ""}))
        cases.append(Case((*down, In((rows, n))), {"extras": ("shares", "residual"), "gate": ""}))
    outside, w = In((2, 3), (-1, 3), "i32"), In((2, 6, 24))
    cases.append(Case((In((2, 24)), w, outside, w), {"extras": ("up",), "gate": "gelu_tanh"}))
    for x in LAYOUTS[1:]:
        ids, w = In((4, 2), (0, 3), "i32", layout=x), In((3, 5, 36), layout=x)
        share, rest = In((4, 2), "positive", layout=x), In((4, 5), layout=x)
        attrs = {"extras": ("shares", "residual"), "gate": ""}
        cases.append(Case((In((4, 2, 36), layout=x), w, ids, share, rest), attrs))
    return Row(FLOATS, (*cases, *grouped_experts()), sums=True)


def grouped_experts() -> Iterator[Case]:
    """Tiles of one pair, full ones, experts that no row chose; rows in several groups; no id.

    On tensor cores, and by threads, where an operand may lie in any way.
    """
    for rows, picks, experts, n, k in ((1, 1, 1, 2, 8), (3, 2, 70, 9, 67), (70, 3, 4, 66, 40),
                                       (150, 2, 2, 130, 33)):  # fmt: skip
        x, w = In((rows, k), "positive"), In((experts, n, k), "positive")
        for least in (0, -1) if rows == 3 else (0,):
            ids = In((rows, picks), (least, experts), "i32")
            up = {"extras": ("up",), "gate": "silu", "variant": "grouped"}
            yield Case((x, w, ids, w), up, dtypes=("f16", "bf16"))
            down = {"extras": ("shares", "residual"), "gate": "", "variant": "grouped"}
            share = In((rows, picks), "positive", "f32")
            operands = In((rows, picks, k), "positive"), w, ids, share, In((rows, n))
            yield Case(operands, down, dtypes=("f16", "bf16"))
            if rows == 3:
                yield Case((x, w, ids, w), {**up, "variant": "tiles"})
    for lies in (name for name in LAYOUTS if name != "transposed"):  # which is copied
        down = {"extras": ("shares", "residual"), "gate": "", "variant": "tiles"}
        ids, w = In((9, 2), (-1, 3), "i32", layout=lies), In((3, 5, 35), "positive", layout=lies)
        share, rest = In((9, 2), "positive", "f32", layout=lies), In((9, 5), layout=lies)
        yield Case((In((9, 2, 35), "positive", layout=lies), w, ids, share, rest), down)
    for values in ("large", "hidden"):
        ids, w, share = In((9, 2), (0, 3), "i32"), In((3, 5, 35)), In((9, 2), "positive", "f32")
        outliers = In((9, 2, 35), values), w, ids, share
        yield Case(outliers, {"extras": ("shares",), "gate": "", "variant": "tiles"})
    numbers, factors = planes.planes("q8_0", 30, 16, "f16")
    weight = numbers, replace(factors, values=(1, 3))  # products that 16 bits hold
    ids, share = In((9, 2), (0, 3), "i32"), In((9, 2), "positive", "f32")
    forced = {"format": "q8_0", "experts": 3, "variant": "dequantized"}
    x = In((9, 512), "positive")
    gated = {**forced, "extras": up_planes(2), "gate": "silu"}
    yield Case((x, *weight, ids, *weight), gated, dtypes=("f16", "bf16"))
    summed = {**forced, "extras": ("shares",), "gate": ""}
    x = In((9, 2, 512), "positive")
    yield Case((x, *weight, ids, share), summed, dtypes=("f16", "bf16"))
    alone = {"extras": ("shares",), "gate": "", "variant": "rows"}
    ids, share = In((5, 2), (0, 3), "i32"), In((5, 2), "positive", "f32")
    yield Case((In((5, 2, 16), "positive"), In((3, 9, 16), "positive"), ids, share), alone)
