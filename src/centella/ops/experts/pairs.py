"""What `expert_linear` of many rows needs beside products: pairs by expert, and sums of picks.

    pair    a row and one of its picks, by number: row picks + pick
    order   the numbers of all pairs, by expert, then by row
    tiles   a table of (expert, first, end): a tile has the pairs order[first], order[first + 1], ..
            of one expert, up to `bm` of them and none from order[end] on, where the expert's end

Launches, of which the host knows the sizes before any id is known:

    expert_count   pairs of each expert in the rows of each group; not where one group has all rows
    expert_order   order and tiles
    a product      y[pair] = W[e] x[pair], tile by tile; act(W[e] x) (V[e] x) with a gate, whose
                   weight V shares a tile with W, so that neither product is written
    expert_sum     y[row], the sum of share y[pair], + residual; not with a gate

The products are those of `mma.py`, on tensor cores, and `tiled.py`. `rows.py` reads an expert's
weights for each pair, here they are read for each tile. What `expert_sum` adds up is f32, by pick:
no two groups add to one number, so that the bits depend on no order of groups. An id that names no
expert counts as 0 here; what is stored for its pair is NaN.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.ops.experts.op import ExpertAttrs, names_of
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.mma import MmaTile
from centella.ops.matmul.product import Constants
from centella.ops.matmul.table import Tile
from centella.specs import Caps, make_spec

NAN = float("nan")
THREADS = 1024  # at most, of a group that puts pairs in order: some for each expert
GROUP_ROWS = 64  # rows of such a group
SUM_THREADS = 256
UNIFORM = 48  # bytes of workgroup memory, as WebGPU counts it, for what a `PairTile` makes uniform


class Sizes(Struct, frozen=True):
    """Rows, picks of each, experts; outputs and depth of an expert; its tile.

    `threads`: of a group that puts pairs in order.
    """

    rows: int
    picks: int
    experts: int
    n: int
    k: int
    tile: MmaTile | Tile
    threads: int

    @property
    def pairs(self) -> int:
        """Products of a row with an expert."""
        return self.rows * self.picks

    @property
    def groups(self) -> int:
        """Groups that put pairs in order."""
        return -(-self.rows // GROUP_ROWS)

    @property
    def tiles(self) -> int:
        """Room in the table: full tiles, and of each expert one that is not full."""
        return self.pairs // self.tile.bm + min(self.experts, self.pairs)


def sizes_of(form: Form[ExpertAttrs], tile: MmaTile | Tile | None, caps: Caps) -> Sizes | None:
    """The sizes of a form in tiles; None without a tile, without rows, or with too many experts.

    Nor where no launch sees a row's products before they are added up: rows are the least parts.
    """
    (rows, picks), (experts, n, k) = form.inputs[2].shape, form.inputs[1].shape
    threads = min(THREADS, caps.max_workgroup)
    room = form.attrs.gate != "" or caps.has_room(make_spec((picks, n), f32, 16))
    if tile is None or rows == 0 or experts > threads or not room:
        return None
    return Sizes(rows, picks, experts, n, k, tile, threads)


# -- pairs by expert -------------------------------------------------------------------------------


class _Search:
    """What a thread looks for: pairs of one expert, in a part of the rows of its group.

    Thread t looks for expert t % experts in part t // experts; `parts` is how many parts there are.
    Threads that are left over, fewer than experts, are of no part and have no rows.

    Attributes:
        expert, part: of the thread; has_part: whether there is that part.
        begin, end: rows of the part.
        found: pairs that a thread found, by part and expert; the group shares it.
    """

    def __init__(self, ids: Argument, threads: int, experts: int, picks: int) -> None:
        rows, group_rows = lang.parameter("rows", u32), lang.parameter("group_rows", u32)
        self._ids, self._pitch, self._picks = ids, lang.parameter("ldi", u32), picks
        self.experts, self.parts = experts, threads // experts
        self.expert, self.part = lang.local_id() % experts, lang.local_id() // experts
        self.has_part = self.part < self.parts
        first = lang.group_id() * group_rows
        last = lang.minimum(first + group_rows, rows)
        length = (group_rows + (self.parts - 1)) // self.parts
        self.begin = lang.minimum(first + self.part * length, last)
        end = lang.minimum(self.begin + length, last)
        self.end = lang.select(self.has_part, end, self.begin)
        pairs = lang.var(0)
        for row in lang.range(self.begin, self.end):
            for hit in self.hits(row):
                pairs.set(pairs.get() + lang.select(hit, 1, 0))
        self.found = lang.shared(u32, self.parts * experts)
        with lang.if_(self.has_part):
            self.found[lang.local_id()] = pairs.get()
        lang.barrier()

    def hits(self, row: Operand) -> list[Expr]:
        """Whether each pick of a row is the expert; all are loaded before one is compared."""
        ids = [self._ids[row * self._pitch + pick] for pick in range(self._picks)]
        known = [lang.bitcast(i, u32) for i in ids]
        return [lang.select(i < self.experts, i, 0) == self.expert for i in known]

    def in_parts(self, parts: Any) -> Expr:
        """Pairs of the expert in so many parts of the group's rows, from the first on."""
        pairs = lang.var(0)
        for part in parts:
            pairs.set(pairs.get() + self.found[self.expert + part * self.experts])
        return pairs.get()

    def in_group(self) -> Expr:
        """Pairs of the expert in the rows of the group."""
        return self.in_parts(range(self.parts))


def _count(*, threads: int, experts: int, picks: int, ids: Argument, counts: Argument) -> None:
    """Pairs of each expert in the rows of a group."""
    search = _Search(ids, threads, experts, picks)
    with lang.if_(lang.local_id() < experts):
        counts[lang.group_id() * experts + search.expert] = search.in_group()


def _order(
    *, threads: int, experts: int, picks: int, size: int, ids: Argument, order: Argument,
    tiles: Argument, **extra: Argument,
) -> None:  # fmt: skip
    """A group puts the pairs of its rows where they belong; the first one lists the tiles.

    `counts`: of `_count`, where there are several groups; `size`: pairs of a full tile.
    """
    search = _Search(ids, threads, experts, picks)
    totals, earlier = _totals(search, extra.get("counts"))
    first, tiles_before = lang.var(0), lang.var(0)  # pairs, tiles of the experts before this one
    for other in lang.range(search.expert):
        first.set(first.get() + totals[other])
        tiles_before.set(tiles_before.get() + (totals[other] + (size - 1)) // size)
    with lang.if_(search.has_part):
        before = search.in_parts(lang.range(search.part))
        at = lang.var(first.get() + earlier[search.expert] + before)
        for row in lang.range(search.begin, search.end):
            for pick, hit in enumerate(search.hits(row)):
                with lang.if_(hit):
                    order[at.get()] = row * picks + pick
                    at.set(at.get() + 1)
    _list_tiles(search, totals, first.get(), tiles_before.get(), size, tiles)


def _totals(search: _Search, counts: Argument | None) -> tuple[Any, Any]:
    """Pairs of each expert: of all groups, and of those before this one; shared by the group."""
    experts, thread = search.experts, lang.local_id()
    totals, earlier = lang.shared(u32, experts), lang.shared(u32, experts)
    with lang.if_(thread < experts):
        if counts is None:  # there is one group
            totals[thread], earlier[thread] = search.in_group(), lang.const(0, u32)
        else:
            total, before = lang.var(0), lang.var(0)
            for group in lang.range(lang.num_groups()):
                count = counts[group * experts + thread]
                total.set(total.get() + count)
                before.set(before.get() + lang.select(group < lang.group_id(), count, 0))
            totals[thread], earlier[thread] = total.get(), before.get()
    lang.barrier()
    return totals, earlier


def _list_tiles(
    search: _Search, totals: Any, first: Expr, before: Expr, size: int, tiles: Argument
) -> None:
    """The first group writes the tiles; all of them empty ones in the rest of the table."""
    thread, end = lang.local_id(), first + totals[search.expert]
    needed = (totals[search.expert] + (size - 1)) // size
    with lang.if_((thread < search.experts) & (lang.group_id() == 0)):
        for number in lang.range(lang.parameter("count", u32)):  # which the host knows
            lang.break_if(number >= needed)
            _write(tiles, before + number, search.expert, first + number * size, end)
    used = lang.shared(u32, 1)
    with lang.if_(thread == search.experts - 1):
        used[0] = before + needed
    lang.barrier()
    zero, step = lang.const(0, u32), lang.workgroup_size() * lang.num_groups()
    for number in lang.range(used[0] + lang.global_id(), lang.parameter("count", u32), step):
        _write(tiles, number, zero, zero, zero)


def _write(tiles: Argument, number: Operand, *values: Operand) -> None:
    for i, value in enumerate(values):
        tiles[number * 3 + i] = value


count_kernel: Kernel = Kernel(_count, workgroup=THREADS, name="expert_count")
order_kernel: Kernel = Kernel(_order, workgroup=THREADS, name="expert_order")


# -- a tile of products ----------------------------------------------------------------------------


class PairTile:
    """The pairs whose products a group computes, and the first of its columns.

    Args:
        columns: of a tile, of each weight.
        gated: the rows of x are the tokens', not one for each pair.
    """

    def __init__(self, tiles: Argument, order: Argument, columns: int, gated: bool) -> None:
        self.p: dict[str, Expr] = {n: lang.parameter(n, u32) for n in (
            "n", "k", "ldx", "ldw", "ldy", "ldi", "picks", "experts", "count")}  # fmt: skip
        self._order, self._gated = order, gated
        number = lang.group_id() % self.p["count"]
        self.column0: Expr = lang.group_id() // self.p["count"] * columns
        expert, first, end = (lang.workgroup_uniform(tiles[number * 3 + i]) for i in range(3))
        self.expert: Expr = expert
        self.first: Expr = first
        self.end: Expr = end

    def pair(self, at: Operand) -> Expr:
        """The pair that a row of the tile is; past the last pair, that one."""
        pair: Expr = self._order[lang.minimum(self.first + at, self.end - 1)]
        return pair

    def line(self, at: Operand) -> Expr:
        """Its line of x, which has one for each row with a gate, else for each pair."""
        return self.pair(at) // self.p["picks"] if self._gated else self.pair(at)

    def row(self, at: Operand, ids: Argument) -> tuple[Expr, Expr, Expr]:
        """Whether a row is in the tile; its pair; whether there is its expert."""
        pair = self.pair(at)
        row = pair // self.p["picks"]
        pick = pair - row * self.p["picks"]
        chosen = lang.bitcast(ids[row * self.p["ldi"] + pick], u32)
        return self.first + at < self.end, pair, chosen < self.p["experts"]


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


def launches(
    form: Form[ExpertAttrs], sizes: Sizes, kernel: Kernel, constants: Constants = ()
) -> Lowered:
    """All launches; of the temporaries, which follow the result, `each` has y[pair] in f32.

    Args:
        kernel: of the products; constants: of it, beside its tile and gate.
    """
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
        _products(kernel, constants, named, pitch, (order, tiles, each), sizes, attrs.gate, lde),
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


def _ordered(ids: Ref, pitch: int, refs: tuple[Ref, Ref, Ref], sizes: Sizes) -> list[Call]:
    """`order` and `tiles`; where there are several groups, once all have counted their pairs."""
    order, tiles, counts = refs
    several = sizes.groups > 1
    scalars = ("rows", sizes.rows), ("group_rows", GROUP_ROWS), ("ldi", pitch)
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
    kernel: Kernel, constants: Constants, named: dict[str, Ref], pitch: dict[str, int],
    refs: tuple[Ref, Ref, Ref], sizes: Sizes, gate: str, ldy: int,
) -> Call:  # fmt: skip
    """The products of all pairs: a group for each tile that there may be, and for its columns."""
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
        (("tile", sizes.tile), ("gate", gate), *constants), sizes.tiles * columns,
        workgroup=sizes.tile.threads, signature=signature(dict.fromkeys(names, 1), {"y": 1}),
    )  # fmt: skip
