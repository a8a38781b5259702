"""`expert_linear` of many rows in 16 bits: products of each expert's rows, tile by tile.

    pair     a row and one of its picks: row picks + pick
    order    the pairs, those of an expert next to one another
    tiles    (expert, first, end): of `order`, up to `bm` pairs of one expert
    y[pair]  W[e] x[pair] on tensor cores (`mma.py`), the rows of x gathered by `order`

`expert_kernel.py` reads an expert's weights for each pair, here they are read for each tile. A gate
is a second weight whose columns are in the same tile, so neither product is written by itself. The
weighed sum of a row's picks is a launch of its own: its products are f32, and no two groups add to
one number, so the bits do not depend on the order.
"""

from __future__ import annotations

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.experts import ExpertAttrs, names_of
from centella.ops.matmul.mma import Factor, M, MmaTile, N, multiplied, takes
from centella.ops.matmul.problem import aligned
from centella.ops.matmul.tiled import store_words
from centella.specs import Caps, make_spec

NAN = float("nan")
LARGE, SMALL = MmaTile(128, 128, 32, 64, 64, 4), MmaTile(64, 128, 32, 32, 64, 4)
TILES = (LARGE, SMALL, MmaTile(64, 64, 32, 32, 32, 2))
THREADS = 1024  # at most, that put pairs in order: some for each expert
SOME = 64  # rows of a group of these
SUM_THREADS = 256
LEAST = 1.5  # pairs for each expert, from which on tiles are faster than rows


class _Sizes(Struct, frozen=True):
    """Rows, picks, experts; outputs and depth of an expert; threads that put pairs in order."""

    rows: int
    picks: int
    experts: int
    n: int
    k: int
    tile: MmaTile
    threads: int

    @property
    def pairs(self) -> int:
        """Products of a row with an expert."""
        return self.rows * self.picks

    @property
    def groups(self) -> int:
        """Groups that put pairs in order."""
        return -(-self.rows // SOME)

    @property
    def tiles(self) -> int:
        """Tiles that there may be: each expert may have one that is not full."""
        return self.pairs // self.tile.bm + min(self.experts, self.pairs)


# -- pairs by expert -------------------------------------------------------------------------------


class _Rows:
    """The rows of a group, and those of them in which a thread looks for its expert.

    Several threads, the `parts`, look for one expert. Threads of no part have no rows.
    """

    def __init__(self, ids: Argument, threads: int, experts: int, picks: int) -> None:
        rows, some = lang.parameter("rows", u32), lang.parameter("some", u32)
        self._ids, self._pitch, self._picks = ids, lang.parameter("ldi", u32), picks
        self.experts, self.parts = experts, threads // experts
        self.expert, self.part = lang.local_id() % experts, lang.local_id() // experts
        first = lang.group_id() * some
        last = lang.minimum(first + some, rows)
        length = (some + (self.parts - 1)) // self.parts
        self.begin = lang.minimum(first + self.part * length, last)
        end = lang.minimum(self.begin + length, last)
        self.end = lang.select(self.part < self.parts, end, self.begin)
        mine = lang.var(0)
        for row in lang.range(self.begin, self.end):
            for own in self.chosen(row):
                mine.set(mine.get() + lang.select(own, 1, 0))
        self.counts = lang.shared(u32, self.parts * experts)  # by part and expert
        with lang.if_(self.part < self.parts):
            self.counts[lang.local_id()] = mine.get()
        lang.barrier()

    def chosen(self, row: Operand) -> list[Expr]:
        """Which picks of a row are this thread's expert; all are loaded before one is compared."""
        ids = [self._ids[row * self._pitch + pick] for pick in range(self._picks)]
        known = [lang.bitcast(i, u32) for i in ids]
        return [lang.select(i < self.experts, i, 0) == self.expert for i in known]

    def total(self) -> Expr:
        """Pairs of this thread's expert in the rows of the group."""
        total = lang.var(0)
        for part in range(self.parts):
            total.set(total.get() + self.counts[self.expert + part * self.experts])
        return total.get()


def _count(*, threads: int, experts: int, picks: int, ids: Argument, counts: Argument) -> None:
    """Pairs of each expert in the rows of a group."""
    rows = _Rows(ids, threads, experts, picks)
    with lang.if_(lang.local_id() < experts):
        counts[lang.group_id() * experts + rows.expert] = rows.total()


def _order(
    *, threads: int, experts: int, picks: int, size: int, ids: Argument, order: Argument,
    tiles: Argument, **extra: Argument,
) -> None:  # fmt: skip
    """A group writes the pairs of its rows; the first one the tiles."""
    rows, thread = _Rows(ids, threads, experts, picks), lang.local_id()
    totals, starts = lang.shared(u32, experts), lang.shared(u32, experts)
    with lang.if_(thread < experts):
        if "counts" in extra:
            total, start = lang.var(0), lang.var(0)  # of all groups, of those before this one
            for group in lang.range(lang.num_groups()):
                count = extra["counts"][group * experts + thread]
                total.set(total.get() + count)
                start.set(start.get() + lang.select(group < lang.group_id(), count, 0))
            totals[thread], starts[thread] = total.get(), start.get()
        else:
            totals[thread], starts[thread] = rows.total(), lang.const(0, u32)
    lang.barrier()
    first, before = lang.var(0), lang.var(0)  # pairs and tiles of the experts before this one
    for other in lang.range(rows.expert):
        first.set(first.get() + totals[other])
        before.set(before.get() + (totals[other] + (size - 1)) // size)
    with lang.if_(rows.part < rows.parts):
        at = lang.var(first.get() + starts[rows.expert])
        for part in lang.range(rows.part):
            at.set(at.get() + rows.counts[part * experts + rows.expert])
        for row in lang.range(rows.begin, rows.end):
            for pick, own in enumerate(rows.chosen(row)):
                with lang.if_(own):
                    order[at.get()] = row * picks + pick
                    at.set(at.get() + 1)
    own_total = totals[rows.expert]
    needed = (own_total + (size - 1)) // size
    with lang.if_((thread < experts) & (lang.group_id() == 0)):
        for number in lang.range(needed):
            _write(tiles, before.get() + number, rows.expert, first.get() + number * size,
                   first.get() + own_total)  # fmt: skip
    used = lang.shared(u32, 1)
    with lang.if_(thread == experts - 1):
        used[0] = before.get() + needed
    lang.barrier()
    zero, step = lang.const(0, u32), lang.workgroup_size() * lang.num_groups()
    for number in lang.range(used[0] + lang.global_id(), lang.parameter("count", u32), step):
        _write(tiles, number, zero, zero, zero)


def _write(tiles: Argument, number: Operand, *values: Operand) -> None:
    for i, value in enumerate(values):
        tiles[number * 3 + i] = value


count_kernel: Kernel = Kernel(_count, workgroup=THREADS, name="expert_count")
order_kernel: Kernel = Kernel(_order, workgroup=THREADS, name="expert_order")


# -- products --------------------------------------------------------------------------------------


def _grouped(
    *, tile: MmaTile, gate: str, x: Argument, w: Argument, ids: Argument, order: Argument,
    tiles: Argument, y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    halves = 1 + ("up" in extra)
    p = {n: lang.parameter(n, u32) for n in (
        "n", "k", "ldx", "ldw", "ldy", "ldi", "picks", "experts", "count")}  # fmt: skip
    number = lang.group_id() % p["count"]
    column0 = lang.group_id() // p["count"] * (tile.bn // halves)
    expert, first, end = (lang.workgroup_uniform(tiles[number * 3 + i]) for i in range(3))

    def pair_of(at: Operand) -> Expr:
        pair: Expr = order[lang.minimum(first + at, end - 1)]
        return pair

    def line_of(at: Operand) -> Expr:
        return pair_of(at) // p["picks"] if halves == 2 else pair_of(at)

    with lang.if_(first < end):
        zero = lang.const(0, u32)
        left = Factor(
            x, tile.bm, tile, True, True, zero, p["ldx"], zero, p["count"], p["k"], lines=line_of
        )
        right = Factor(
            w, tile.bn, tile, True, True, expert * p["n"] * p["ldw"], p["ldw"], column0, p["n"],
            p["k"], halves == 2, extra.get("up"),
        )  # fmt: skip
        sums, down, across = multiplied(left, right, tile, p["k"], True)
        rows: list[tuple[Expr, Expr, Expr]] = []  # of a thread: inside the tile; pair; known expert
        for i in range(len(sums)):
            for half in (0, 2):
                at = down + (sums[i][0].place(half)[0] + i * M)
                pair = pair_of(at)
                row = pair // p["picks"]
                pick = pair - row * p["picks"]
                chosen = lang.bitcast(ids[row * p["ldi"] + pick], u32)
                rows.append((first + at < end, pair, chosen < p["experts"]))
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


# -- sums of picks ---------------------------------------------------------------------------------


def _sum(*, each: Argument, shares: Argument, y: Argument, **extra: Argument) -> None:
    """A group a row, a word of the result a thread."""
    n, picks, lde, lds, ldy = (lang.parameter(n, u32) for n in ("n", "picks", "lde", "lds", "ldy"))
    row, per = lang.group_id(), y.dtype.per_word
    for word in lang.range(lang.local_id(), (n + (per - 1)) // per, lang.workgroup_size()):
        columns = [lang.minimum(word * per + j, n - 1) for j in range(per)]
        sums = lang.vars(f32, per, init=0.0)
        for pick in lang.range(picks):
            share, start = shares[row * lds + pick], (row * picks + pick) * lde
            for total, column in zip(sums, columns, strict=True):
                total.set(lang.fma(each[start + column], share, total.get()))
        out = [total.get() for total in sums]
        if "residual" in extra:
            start = row * lang.parameter("ldr", u32)
            out = [v + extra["residual"][start + c] for v, c in zip(out, columns, strict=True)]
        y.store(row * ldy + word * per, out)


sum_kernel: Kernel = Kernel(_sum, workgroup=SUM_THREADS, name="expert_sum")


# -- how it is launched ----------------------------------------------------------------------------


def _sizes(form: Form[ExpertAttrs], caps: Caps) -> _Sizes | None:
    """None where a weight is quantised or wide, or rows do not start on 16 bytes."""
    attrs = form.attrs
    if attrs.format or not caps.tensor_cores:
        return None
    x, w, ids, *more = form.inputs
    (rows, picks), (experts, n, k) = ids.shape, w.shape
    factors = [x, w, *(more if attrs.gate else ())]
    whole = all(aligned(spec, rows_of(spec).strides[0], 0) for spec in factors)
    if not takes((x.dtype, w.dtype)) or not whole or rows == 0:
        return None
    threads = min(THREADS, caps.max_workgroup)
    tiles = TILES if rows * picks >= LARGE.bm * experts else TILES[1:]
    tile = next((t for t in tiles if t.shared_bytes <= caps.max_shared), None)
    if tile is None or experts > threads:
        return None
    return _Sizes(rows, picks, experts, n, k, tile, threads)


def _launches(form: Form[ExpertAttrs], sizes: _Sizes, caps: Caps) -> Lowered:
    attrs, y = form.attrs, Ref(len(form.inputs), form.outputs[0])
    named = {name: Ref(i, flat(form.inputs[i])) for i, name in enumerate(names_of(attrs))}
    pitch = {name: rows_of(form.inputs[ref.index]).strides[0] for name, ref in named.items()}
    order = Ref(y.index + 1, make_spec((sizes.pairs,), u32, 16))
    tiles = Ref(y.index + 2, make_spec((3 * sizes.tiles,), u32, 16))
    counts = Ref(y.index + 3, make_spec((sizes.groups * sizes.experts,), u32, 16))
    each = y if attrs.gate else Ref(y.index + 4, make_spec((sizes.pairs, sizes.n), f32, 16))
    lde = rows_of(each.spec).strides[0]
    calls = [
        *_ordered(named["ids"], pitch["ids"], (order, tiles, counts), sizes),
        _products(named, pitch, (order, tiles, each), sizes, attrs.gate, lde),
    ]
    spaces = order.spec, tiles.spec, counts.spec
    if attrs.gate:
        return Lowered(tuple(calls), spaces)
    names = [name for name in ("shares", "residual") if name in named]
    scalars = (
        ("n", sizes.n), ("picks", sizes.picks), ("lde", lde), ("lds", pitch["shares"]),
        ("ldy", rows_of(y.spec).strides[0]),
        *((("ldr", pitch["residual"]),) if "residual" in named else ()),
    )  # fmt: skip
    refs = (Ref(each.index, flat(each.spec)), *(named[name] for name in names), y)
    kinds = signature(dict.fromkeys(("each", *names), 1), {"y": 1})
    calls.append(Call(sum_kernel, refs, scalars, (), sizes.rows, signature=kinds))
    return Lowered(tuple(calls), (*spaces, each.spec))


def _ordered(ids: Ref, pitch: int, refs: tuple[Ref, Ref, Ref], sizes: _Sizes) -> list[Call]:
    """Several groups know where their pairs begin once all have counted them."""
    order, tiles, counts = refs
    several = sizes.groups > 1
    scalars = ("rows", sizes.rows), ("some", SOME), ("ldi", pitch)
    constants = ("experts", sizes.experts), ("picks", sizes.picks), ("threads", sizes.threads)
    more = ("counts",) if several else ()
    call = Call(
        order_kernel, (ids, *((counts,) if several else ()), order, tiles),
        (*scalars, ("count", sizes.tiles)), (*constants, ("size", sizes.tile.bm)), sizes.groups,
        workgroup=sizes.threads,
        signature=signature(dict.fromkeys(("ids", *more), 1), {"order": 1, "tiles": 1}),
    )  # fmt: skip
    if not several:
        return [call]
    count = Call(
        count_kernel, (ids, counts), scalars, constants, sizes.groups, workgroup=sizes.threads,
        signature=signature({"ids": 1}, {"counts": 1}),
    )  # fmt: skip
    return [count, call]


def _products(
    named: dict[str, Ref], pitch: dict[str, int], refs: tuple[Ref, Ref, Ref], sizes: _Sizes,
    gate: str, ldy: int,
) -> Call:  # fmt: skip
    """Groups for each tile, and for its columns."""
    order, tiles, y = refs
    both = ("up",) if gate else ()
    names = ("x", "w", "ids", "order", "tiles", *both)
    own = named | {"order": order, "tiles": tiles}
    scalars = (
        ("n", sizes.n), ("k", sizes.k), ("ldx", pitch["x"]), ("ldw", pitch["w"]), ("ldy", ldy),
        ("ldi", pitch["ids"]), ("picks", sizes.picks), ("experts", sizes.experts),
        ("count", sizes.tiles), ("alpha", 1.0),
    )  # fmt: skip
    columns = -(-sizes.n // (sizes.tile.bn // (1 + len(both))))
    return Call(
        kernel, (*(own[name] for name in names), y), scalars,
        (("tile", sizes.tile), ("gate", gate)), sizes.tiles * columns,
        workgroup=sizes.tile.threads, signature=signature(dict.fromkeys(names, 1), {"y": 1}),
    )  # fmt: skip


def _preferred(form: Form[ExpertAttrs], caps: Caps) -> bool:
    """Where experts have several rows each, so that reading their weights once saves the most."""
    (rows, picks), experts = form.inputs[2].shape, form.inputs[1].shape[0]
    return caps.fast_tensor_cores and rows * picks >= LEAST * experts


GROUPED: Variant[Form[ExpertAttrs], _Sizes] = Variant("grouped", _sizes, _launches, _preferred)
