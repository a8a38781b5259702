"""`expert_linear` of many rows in 16 bits: tiles of an expert's pairs on tensor cores."""

from __future__ import annotations

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.experts.op import ExpertAttrs
from centella.ops.experts.pairs import NAN, PairTile, Sizes, launches, sizes_of
from centella.ops.layout import rows_of
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.mma import Factor, M, MmaTile, N, multiplied, takes
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.tiled import store_words
from centella.specs import Caps

LARGE, SMALL = MmaTile(128, 128, 32, 64, 64, 4), MmaTile(64, 128, 32, 32, 64, 4)
TILES = (LARGE, SMALL, MmaTile(64, 64, 32, 32, 32, 2))
LEAST = 1.5  # pairs for each expert, from which on tiles are faster than rows


def _grouped(
    *, tile: MmaTile, gate: str, x: Argument, w: Argument, ids: Argument, order: Argument,
    tiles: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    """A group has a tile of the table and `bn` columns: with a gate, half of them of `up`."""
    halves = 1 + ("up" in extra)
    pairs = PairTile(tiles, order, tile.bn // halves, halves == 2)
    p, column0 = pairs.p, pairs.column0
    with lang.if_(pairs.first < pairs.end):
        left = Factor(
            x, tile.bm, tile, along_k=True, vector=True, start=lang.const(0, u32), pitch=p["ldx"],
            depth=p["k"], lines=pairs.line,
        )  # fmt: skip
        right = Factor(
            w, tile.bn, tile, along_k=True, vector=True, start=pairs.expert * p["n"] * p["ldw"],
            pitch=p["ldw"], depth=p["k"], first=column0, extent=p["n"], gated=halves == 2,
            other=extra.get("up"),
        )  # fmt: skip
        sums, down, across = multiplied(left, right, tile, p["k"], copies=True)
        rows: list[tuple[Expr, Expr, Expr]] = []  # of a thread
        for i in range(len(sums)):
            for half in (0, 2):  # a fragment has two rows of a thread, two neighbours of each
                rows.append(pairs.row(down + (sums[i][0].place(half)[0] + i * M), ids))
        for j in range(0, len(sums[0]), halves):
            column = column0 + across // halves + (sums[0][j].place(0)[1] + j // halves * N)
            with lang.if_(column < p["n"]):
                finish = Epilogue(gate, {}, column, 2, p["n"], gated=halves == 2)
                for i, (inside, pair, known) in enumerate(rows):
                    line, half = sums[i // 2][j : j + halves], i % 2 * 2
                    with lang.if_(inside):
                        out = finish([f[half + e] for f in line for e in range(2)], pair)
                        out = [lang.select(known, v, NAN) for v in out]
                        store_words(y, pair * p["ldy"] + column, out, column, p["n"])


kernel: Kernel = Kernel(_grouped, workgroup=128, name="expert_tiles")


def _sizes(form: Form[ExpertAttrs], caps: Caps) -> Sizes | None:
    """None where a weight is quantised or wide, or rows do not start on 16 bytes."""
    if form.attrs.format or not caps.tensor_cores:
        return None
    x, w, ids, *more = form.inputs
    factors = [x, w, *(more if form.attrs.gate else ())]
    whole = all(aligned(spec, rows_of(spec).strides[0], 0) for spec in factors)
    if not takes((x.dtype, w.dtype)) or not whole:
        return None
    tiles = TILES if ids.size >= LARGE.bm * w.shape[0] else TILES[1:]
    return sizes_of(form, next((t for t in tiles if t.shared_bytes <= caps.max_shared), None), caps)


def _launches(form: Form[ExpertAttrs], sizes: Sizes, caps: Caps) -> Lowered:
    return launches(form, sizes, kernel)


def _preferred(form: Form[ExpertAttrs], caps: Caps) -> bool:
    """Where experts have several rows each, so that reading their weights once saves the most."""
    return caps.fast_tensor_cores and form.inputs[2].size >= LEAST * form.inputs[1].shape[0]


GROUPED: Variant[Form[ExpertAttrs], Sizes] = Variant("grouped", _sizes, _launches, _preferred)
