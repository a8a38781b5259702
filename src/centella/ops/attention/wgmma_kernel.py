"""The kernel of attention by warpgroups: groups that stay, a producer and consumers in each.

A group stays on its multiprocessor and takes tiles of queries in turn (`wgmma_work.py`). Its first
warpgroup is the producer: one thread has queries copied into two slots, keys and values tile by
tile into two rings, from the last keys to the first, of the next queries as soon as there is room.
A consumer has 64 of the queries. It starts the scores of a tile, then the products of the last
tile's weights with its values; while those are under way it turns scores into weights. So it does
from one tile of queries to the next: the first scores of the next are under way with the last
products of this one, whose results then leave through shared memory while the next weights are
multiplied. Behind the last tile the scores of its keys are computed once more, for nobody.

Weights are the first factor in the registers where they were computed. Consumers start their
products by turns, so that one multiplies while the other computes weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.ops.attention.masks import Scoring, sink_of
from centella.ops.attention.problem import parameters
from centella.ops.attention.rows import UNSEEN, K, M, Rows
from centella.ops.attention.scaled import SLAB
from centella.ops.attention.weights import LOG2E
from centella.ops.attention.wgmma_tile import REGISTERS, SLOTS, WARPGROUP, WgmmaTile
from centella.ops.attention.wgmma_work import Turns, Work
from centella.ops.ring import Ring

SIZES = "batch heads kv_heads share lq lk dim qb qh ql kb kh kl vb vh vl yb yh yl blocks"


class _Shared:
    """What both roles see: tiles in shared memory, their maps and barriers."""

    def __init__(
        self, tile: WgmmaTile, dim: int, scoring: Scoring, staged: bool, q: Any, k: Any, v: Any,
        y: Any, masks: dict[str, Any],
    ) -> None:  # fmt: skip
        self.tile, self.dim, self.width = tile, dim, tile.width(dim)
        self.scoring, self.masks, self.y = scoring, masks, y
        self.p: dict[str, Any] = parameters(SIZES)
        self.turns = Turns(masks, scoring)
        self.asked = lang.ptx.SharedTile(q.dtype, (SLOTS, tile.queries, self.width))
        ring = (tile.stages, tile.keys, self.width)
        self.keys = lang.ptx.SharedTile(k.dtype, ring)
        self.values = lang.ptx.SharedTile(v.dtype, ring)
        self.of_q = self._map("q", q, self.asked, "lq", "heads")
        self.of_k = self._map("k", k, self.keys, "lk", "kv_heads")
        self.of_v = self._map("v", v, self.values, "lk", "kv_heads")
        self.results: Any = None  # on their way to y
        if staged:
            self.results = lang.ptx.SharedTile(y.dtype, (tile.consumers, M, self.width))
            self.of_y = self._map("y", y, self.results, "lq", "heads")
        self.full_q, self.empty_q = lang.ptx.Barriers(SLOTS), lang.ptx.Barriers(SLOTS)
        self.full_k, self.full_v = lang.ptx.Barriers(tile.stages), lang.ptx.Barriers(tile.stages)
        self.empty_k, self.empty_v = lang.ptx.Barriers(tile.stages), lang.ptx.Barriers(tile.stages)
        self.order = lang.ptx.Barriers(tile.consumers)
        self.clean = lang.ptx.Barriers(1)
        with lang.if_(lang.local_id() == 0):
            self.clean.init(0, tile.consumers * WARPGROUP)
            for count, full, empty in (
                (SLOTS, self.full_q, self.empty_q), (tile.stages, self.full_k, self.empty_k),
                (tile.stages, self.full_v, self.empty_v),
            ):  # fmt: skip
                for stage in range(count):
                    full.init(stage, 1)
                    empty.init(stage, tile.consumers)
            for consumer in range(tile.consumers):
                self.order.init(consumer, 1)
            lang.ptx.init_fence()
        lang.barrier()

    def _map(self, name: str, source: Any, tile: Any, length: str, heads: str) -> Any:
        """How boxes of a tensor come to a tile and leave it."""
        p = self.p
        extents = (p["dim"], p[length], p[heads], p["batch"])
        return lang.ptx.TensorMap(source, tile, extents, tuple(p[name + axis] for axis in "lhb"))

    def work(self, turn: Any, same: Any = lang.ptx.warpgroup_uniform) -> Work:
        """The tile of queries of a turn."""
        block = self.turns.block(turn)
        return Work(self.masks, self.scoring, self.tile, block, same)


def _attention_wgmma(
    *, tile: WgmmaTile, dim: int, scoring: Scoring, staged: bool, q: Argument, k: Argument,
    v: Argument, y: Argument, scales: Argument | None = None, **masks: Argument,
) -> None:  # fmt: skip
    shared = _Shared(tile, dim, scoring, staged, q, k, v, y, masks)
    fewer, more = REGISTERS[tile.consumers]
    with lang.ptx.role(0, WARPGROUP, registers=fewer), lang.if_(lang.local_id() == 0):
        _Producer(shared).run()
    with lang.ptx.role(WARPGROUP, tile.consumers * WARPGROUP, registers=more):
        _Consumer(shared, scales).run()


class _Producer:
    """Has queries, keys and values copied in the order in which consumers need them."""

    def __init__(self, shared: _Shared) -> None:
        stages = shared.tile.stages
        self.shared = shared
        self.ring_q, self.ring_k, self.ring_v = Ring(SLOTS), Ring(stages), Ring(stages)

    def run(self) -> None:
        """The last keys of a tile of queries come before the first values of the one before it.

        Behind the last one its queries and last keys come again.
        """
        shared, count = self.shared, self.shared.turns.count
        before = lang.vars(u32, 3)  # where the first values of the tile before are
        for turn in lang.range(count + 1):
            work = shared.work(turn, lambda x: x)
            rows = shared.tile.queries
            self._load(shared.of_q, shared.full_q, shared.empty_q, self.ring_q, rows,
                       work.queries_at())  # fmt: skip
            self._load_keys(work.keys_at(work.last))
            with lang.if_(turn > 0):
                self._load_values(tuple(x.get() for x in before))
            for x, now in zip(before, work.keys_at(lang.const(0, u32)), strict=True):
                x.set(now)
            for step in lang.range(lang.select(turn < count, work.last, 0)):
                self._load_keys(work.keys_at(work.last - 1 - step))
                self._load_values(work.keys_at(work.last - step))

    def _load_keys(self, at: tuple[Any, Any, Any]) -> None:
        s = self.shared
        self._load(s.of_k, s.full_k, s.empty_k, self.ring_k, s.tile.keys, at)

    def _load_values(self, at: tuple[Any, Any, Any]) -> None:
        s = self.shared
        self._load(s.of_v, s.full_v, s.empty_v, self.ring_v, s.tile.keys, at)

    def _load(
        self, source: Any, full: Any, empty: Any, ring: Ring, rows: int, at: tuple[Any, Any, Any]
    ) -> None:
        """So many rows, once their place is free."""
        stage = ring.stage.get()
        empty.wait(stage, ring.parity ^ 1)
        full.expect(stage, 2 * rows * self.shared.width)
        lang.ptx.tma_load(source, (0, *at), stage, full, stage)
        ring.advance()


class _Consumer:
    """A warpgroup's 64 queries, and where it is in the rings."""

    def __init__(self, shared: _Shared, scales: Argument | None) -> None:
        self.shared, self.scales, tile = shared, scales, shared.tile
        self.mine = lang.ptx.warpgroup() - 1
        self.rows = Rows(shared.values.dtype, tile.keys, shared.width, tile.parts, shared.scoring)
        self.leader = lang.local_id() % WARPGROUP == 0
        self.ring_q, self.ring_k, self.ring_v = Ring(SLOTS), Ring(tile.stages), Ring(tile.stages)
        self.turn = lang.var(lang.cast(self.mine == 0, u32))  # the first one's turn is at once
        self.cleaned = lang.var(lang.const(0, u32))  # the parity of the next meeting

    def run(self) -> None:
        """All tiles of queries: the first softmax of each belongs to the step that leads to it."""
        shared, count = self.shared, self.shared.turns.count
        self._ask()
        self._score()
        lang.ptx.wgmma_wait(0)
        self._release(shared.empty_k, self.ring_k)
        work, more = shared.work(lang.const(0, u32)), lang.const(0, u32) < count
        self._soften(work, more)
        self._settle(work, more)
        for turn in lang.range(count):
            work = shared.work(turn)
            self._take_keys(work)
            self._cross(work, turn + 1)
        self._pass_turn()
        if shared.results is not None:
            with lang.if_(self.leader):
                lang.ptx.tma_store_wait(0)

    def _take_keys(self, work: Work) -> None:
        """The steps from a tile's last keys to its first."""
        whole, cut = work.whole(work.first + self.mine * M, M)
        if whole is not None:
            self.rows.see(work.sight, work.first + self.mine * M)
            for i in lang.range(work.last - whole):
                self._step(work.key(work.last - 1 - i))
        below = work.last if whole is None else whole
        for _ in lang.range(below if cut is None else below - cut):
            self._step(None)
        if cut is not None:
            for i in lang.range(cut):
                self._step(work.key(cut - 1 - i))

    def _step(self, key0: Any) -> None:
        """Scores and weights of a tile, and the products of the last one's weights."""
        shared = self.shared
        self._start(release=not shared.tile.kept)
        self.rows.bound()
        if key0 is not None:
            self.rows.hide(key0)
        grown, shrinks = self.rows.soften()
        if shared.tile.kept:
            self._release(shared.empty_k, self.ring_k, self.rows.nothing())
        if shared.tile.late:
            self._take_turn()
        lang.ptx.wgmma_wait(0)
        self._release(shared.empty_v, self.ring_v)
        self.rows.round()
        self.rows.shrink(grown, shrinks)
        if not shared.tile.late:
            self._take_turn()

    def _cross(self, work: Work, following: Any) -> None:
        """The same from one tile of queries to the next, where the results of this one leave."""
        shared, more = self.shared, following < self.shared.turns.count
        self._release(shared.empty_q, self.ring_q)
        self._ask()
        self._start()
        totals, coming = self.rows.totals(), shared.work(following)
        self._soften(coming, more)
        lang.ptx.wgmma_wait(0)
        self._release(shared.empty_v, self.ring_v)
        self._finish(work, totals)
        self._settle(coming, more)

    def _soften(self, work: Work, more: Any) -> None:
        """Weights of a tile's last keys, whose scores are there; nothing behind the last tile."""
        rows = self.rows
        rows.start(*sink_of(self.shared.masks, work.head, LOG2E, UNSEEN))
        with lang.if_(more):
            rows.see(work.sight, work.first + self.mine * M)
            rows.bound()
            if work.sight.ordered:
                rows.hide(work.key(work.last))
            else:
                with lang.if_(work.partly):
                    rows.hide(work.key(work.last))
            rows.soften()

    def _settle(self, work: Work, more: Any) -> None:
        """Nothing has been summed; weights and their values are ready for the first products."""
        self.rows.out.fill(0.0)
        self.rows.round()
        dirty = work.dirty(self.shared.masks)
        if dirty is not None:
            with lang.if_(more & dirty):
                self._clean(work)
        self._take_turn()

    def _finish(self, work: Work, totals: list[Any]) -> None:
        """Results leave: a box at a time, or word by word where a box would reach too far."""
        shared, p = self.shared, self.shared.p
        scale_of = None
        if self.scales is not None:
            slab = work.scale_slab(shared.dim // SLAB)
            scale_of = partial(_scale, self.scales, slab)
        first = work.first + self.mine * M
        if shared.results is None:
            start = work.at.row(work.at.b * p["yb"] + work.head * p["yh"], p["yl"])
            self.rows.finish(
                shared.y, start, p["yl"], first, work.at.lq, shared.dim, totals, scale_of
            )
            return
        with lang.if_(self.leader):
            lang.ptx.tma_store_wait(0)
        lang.ptx.warpgroup_barrier()
        self.rows.stage(shared.results, self.mine, shared.dim, totals, scale_of)
        lang.ptx.async_fence()
        lang.ptx.warpgroup_barrier()
        with lang.if_(self.leader):
            lang.ptx.tma_store(shared.of_y, (0, first, work.head, work.at.b), self.mine)
            lang.ptx.tma_store_commit()

    def _take_turn(self) -> None:
        """Wait until the others have started their products."""
        self.shared.order.wait(self.mine, self.turn)
        self.turn.set(self.turn ^ 1)

    def _pass_turn(self) -> None:
        """The next consumer may start its products."""
        with lang.if_(self.leader):
            self.shared.order.arrive((self.mine + 1) % self.shared.tile.consumers)

    def _release(self, empty: Any, ring: Ring, behind: Expr | int = 0) -> None:
        """Give a stage back, on to the next; `behind`: 0, known when it may be given back."""
        with lang.if_(self.leader):
            empty.arrive(ring.stage + behind)
        ring.advance()

    def _ask(self) -> None:
        """Wait for the queries."""
        self.shared.full_q.wait(self.ring_q.stage.get(), self.ring_q.parity)

    def _start(self, *, release: bool = True) -> None:
        """Start the next scores, then products of weights; the scores are there."""
        self._score()
        self._mix()
        self._pass_turn()
        lang.ptx.wgmma_wait(1)
        if release:
            self._release(self.shared.empty_k, self.ring_k)

    def _score(self) -> None:
        """Start the scores of the next keys."""
        shared, stage, slot = self.shared, self.ring_k.stage.get(), self.ring_q.stage.get()
        shared.full_k.wait(stage, self.ring_k.parity)
        lang.ptx.wgmma_fence()
        for k in range(0, shared.width, K):
            lang.ptx.wgmma(
                self.rows.scores, shared.asked, shared.asked.start(self.mine * M, k, slot),
                shared.keys, shared.keys.start(0, k, stage), accumulate=k > 0,
            )  # fmt: skip
        lang.ptx.wgmma_commit()

    def _mix(self) -> None:
        """Start the products of the weights with their values."""
        shared, stage = self.shared, self.ring_v.stage.get()
        shared.full_v.wait(stage, self.ring_v.parity)
        lang.ptx.wgmma_fence()
        for i, parts in enumerate(self.rows.weights):
            for part in parts:
                at = shared.values.start(i * K, 0, stage)
                lang.ptx.wgmma_held(self.rows.out, part, shared.values, at, b_along_k=False)
        lang.ptx.wgmma_commit()

    def _clean(self, work: Work) -> None:
        """Zeros for the rows of values past the last key that counts, once they are there."""
        shared, tile, stage = self.shared, self.shared.tile, self.ring_v.stage.get()
        key0 = work.key(work.last)
        shared.full_v.wait(stage, self.ring_v.parity)
        across = shared.width // 8
        threads = tile.consumers * WARPGROUP
        thread = lang.local_id() - WARPGROUP
        for i in lang.range(thread, tile.keys * across, threads):
            row = i // across
            with lang.if_(key0 + row >= work.sight.end):
                shared.values.store(shared.values.chunk(row, i % across, stage), [0.0] * 8)
        lang.ptx.async_fence()
        shared.clean.arrive(0)
        shared.clean.wait(0, self.cleaned)
        self.cleaned.set(self.cleaned ^ 1)


def _scale(scales: Argument, slab: Operand, column: int) -> Any:
    """What a column of scaled values is multiplied by."""
    return scales[slab + column // SLAB]


kernel: Kernel = Kernel(_attention_wgmma, workgroup=384, name="attention_wgmma")
