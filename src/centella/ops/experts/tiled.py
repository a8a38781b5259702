"""`expert_linear` of many rows on any device: tiles of an expert's pairs, see `matmul/tiled.py`."""

from __future__ import annotations

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.experts.op import ExpertAttrs
from centella.ops.experts.pairs import NAN, UNIFORM, PairTile, Sizes, launches, sizes_of
from centella.ops.layout import rows_of
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.table import Tile, row_of
from centella.ops.matmul.tiled import Factor, multiplied, store_words
from centella.specs import Caps, Spec

# A thread's columns are fours of both weights where there is a gate.
LARGE = (Tile(64, 128, 16, 8, 8), Tile(64, 64, 8, 8, 8))
SMALL = (Tile(32, 128, 16, 4, 8), Tile(32, 64, 16, 4, 8))
ROLLED = (Tile(32, 64, 8, 8, 8, rolled=True),)
LEAST = 4  # pairs for each expert, from which on tiles are faster than rows
FOUR = 4  # neighbouring columns of a thread


def _tiles(
    *, tile: Tile, gate: str, vector_x: bool, vector_w: bool, exact_k: bool, x: Argument,
    w: Argument, ids: Argument, order: Argument, tiles: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    weights = (w, extra["up"]) if "up" in extra else (w,)
    columns = tile.bn // len(weights)
    pairs = PairTile(tiles, order, columns, len(weights) == 2)
    p, column0, zero = pairs.p, pairs.column0, lang.const(0, u32)
    with lang.if_(pairs.first < pairs.end):
        left = Factor(x, tile.bm, tile, True, vector_x, exact_k, zero, p["ldx"], zero, p["count"],
                      p["k"], lines=pairs.line)  # fmt: skip
        start = pairs.expert * p["n"] * p["ldw"]
        rights = tuple(
            Factor(weight, columns, tile, True, vector_w, exact_k, start, p["ldw"], column0,
                   p["n"], p["k"])
            for weight in weights
        )  # fmt: skip
        sums, ty, tx = multiplied(left, rights, tile, p["k"])
        fours = tile.tn // FOUR // len(weights)  # of a thread, of each weight
        for i in range(tile.tm):
            at = ty * FOUR + (i // FOUR * (tile.bm * FOUR // tile.tm) + i % FOUR)
            inside, pair, known = pairs.row(at, ids)
            with lang.if_(inside):
                for four in range(fours):
                    column = column0 + (tx * FOUR + four * (columns // fours))
                    with lang.if_(column < p["n"]):
                        finish = Epilogue(gate, {}, column, FOUR, p["n"], gated=len(weights) == 2)
                        own = [sums[i][FOUR * (four + fours * half) + j]
                               for half in range(len(weights)) for j in range(FOUR)]  # fmt: skip
                        out = [lang.select(known, v, NAN) for v in finish(own, pair)]
                        store_words(y, pair * p["ldy"] + column, out, column, p["n"])


kernel: Kernel = Kernel(_tiles, workgroup=128, name="expert_tiled", rewritable=True)


# -- how it is launched ----------------------------------------------------------------------------


def _factors(form: Form[ExpertAttrs]) -> list[Spec]:
    x, w, _, *more = form.inputs
    return [x, w, *(more if form.attrs.gate else ())]


def _vectors(form: Form[ExpertAttrs]) -> tuple[bool, bool]:
    """Whether rows of x, and of weights, are loaded by 16 bytes."""
    x, *weights = (aligned(spec, rows_of(spec).strides[0], 0) for spec in _factors(form))
    return x, all(weights)


def _sizes(form: Form[ExpertAttrs], caps: Caps) -> Sizes | None:
    """None where a weight is quantised."""
    if form.attrs.format:
        return None
    ids, w = form.inputs[2], form.inputs[1]
    large = ids.size >= LARGE[0].bm * w.shape[0]
    tiles = ROLLED if row_of(caps).rolled else (*LARGE, *SMALL) if large else SMALL
    return sizes_of(form, next((t for t in tiles if _fits(t, form, caps)), None), caps)


def _fits(tile: Tile, form: Form[ExpertAttrs], caps: Caps) -> bool:
    """Whether a device has room for a tile, and its threads share the loads evenly."""
    x, *weights = _factors(form)
    even = tile.rolled or all(
        rows * tile.bk % (spec.dtype.per_chunk * tile.threads) == 0
        for rows, spec in [(tile.bm, x), *((tile.bn // len(weights), w) for w in weights)]
    )
    room = tile.shared_bytes + UNIFORM <= caps.max_shared
    return even and room and tile.threads <= caps.max_workgroup


def _launches(form: Form[ExpertAttrs], sizes: Sizes, caps: Caps) -> Lowered:
    tile, (vector_x, vector_w) = sizes.tile, _vectors(form)
    assert isinstance(tile, Tile)
    exact = sizes.k % (tile.bk * tile.unroll) == 0
    constants = ("vector_x", vector_x), ("vector_w", vector_w), ("exact_k", exact)
    return launches(form, sizes, kernel, constants)


def _preferred(form: Form[ExpertAttrs], caps: Caps) -> bool:
    """Where experts have several rows each, and tiles are enough to keep a device busy."""
    row, sizes = row_of(caps), _sizes(form, caps)
    if row.rolled or sizes is None or sizes.pairs < LEAST * sizes.experts:
        return False
    columns = -(-sizes.n // (sizes.tile.bn // (2 if form.attrs.gate else 1)))
    return sizes.tiles * columns >= row.enough


TILED: Variant[Form[ExpertAttrs], Sizes] = Variant("tiles", _sizes, _launches, _preferred)
