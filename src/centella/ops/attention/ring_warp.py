"""Keys and values of decoding in a ring of tiles that the copy engine fills (sm_90a).

A tile has as many keys as the warps of a group take at a time, sixteen each, and their values. One
thread asks for whole rows of the first tiles before anything else is done, and for a further one
when all warps have left a tile. So as many bytes are on their way as shared memory holds, whatever
the warps are at; in registers (`split_warp`) a warp has one step's alone. `ldmatrix` gives both
factors as the products want them, the values transposed.

A tile that has others than keys of memory that count is mended before it is read: a step's own keys
and values are put in their places, zeros in those of keys that no query sees, whatever memory has
there. A key that is hidden in between (`key_mask`) is not looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import u32
from centella.lang.ptx import Fragment
from centella.ops.attention.lines import BLOCK
from centella.ops.attention.parts import Work
from centella.ops.attention.problem import parameters
from centella.ops.attention.split_warp import CHUNK, Read
from centella.ops.attention.warp_sums import CHAINS, KEYS, WARP, SplitTile, WarpSums
from centella.ops.hopper import PANEL
from centella.ops.ring import Ring


class RingTile(Struct, frozen=True):
    """How a group works, and how many tiles of keys and values its ring has."""

    split: SplitTile
    stages: int

    @staticmethod
    def width(dim: int) -> int:
        """Elements of a row in shared memory."""
        return -(-dim // PANEL) * PANEL

    def stage_bytes(self, dim: int) -> int:
        """Bytes of a tile of keys and that of their values."""
        return 2 * 2 * self.split.step * self.width(dim)


class Fresh(Struct, frozen=True, eq=False):
    """Keys and values that are not in memory yet: those behind the ones that are."""

    keys: Read
    values: Read


class Tiles:
    """The ring of a group's part of the keys; the first tiles are asked for at once.

    Args:
        blocks: whether keys lie in blocks, which are whole tiles.
    """

    def __init__(
        self, tile: RingTile, work: Work, dim: int, keys: Any, values: Any, blocks: bool
    ) -> None:
        self.tile: RingTile = tile
        self.work: Work = work
        self.dim: int = dim
        self._blocks = blocks
        shape = (tile.stages, tile.split.step, tile.width(dim))
        self.keys: Any = lang.ptx.SharedTile(keys.dtype, shape)
        self.values: Any = lang.ptx.SharedTile(values.dtype, shape)
        names = "dim block pool kv_heads" if blocks else "dim lk kv_heads batch"
        axes = "lth" if blocks else "lhb"
        extents = tuple(parameters(names).values())
        self._maps = [
            lang.ptx.TensorMap(source, ring, extents, [lang.parameter(name + a, u32) for a in axes])
            for name, source, ring in (("k", keys, self.keys), ("v", values, self.values))
        ]
        self._full, self._empty = (lang.ptx.Barriers(tile.stages) for _ in range(2))
        self._leader = lang.local_id() == 0
        with lang.if_(self._leader):
            for stage in range(tile.stages):
                self._full.init(stage, 1)
                self._empty.init(stage, tile.split.warps)
            lang.ptx.init_fence()
            for stage in range(tile.stages):
                first = work.begin + stage * tile.split.step
                with lang.if_(first < work.end):
                    self._bring(first, lang.const(stage, u32))
        lang.barrier()
        self._ring = Ring(tile.stages)
        self._left = lang.var(0, u32)  # the tile before: its stage, and the parity of its phase
        self._parity = lang.var(0, u32)

    @property
    def stage(self) -> Any:
        """Where the present tile is."""
        return self._ring.stage

    def _bring(self, first: Any, stage: Any) -> None:
        """Start to copy the tile of a key and those behind it."""
        work = self.work
        at = [lang.const(0, u32), first, work.kv_head, work.b]
        if self._blocks:
            _, entry = work.lines.block(first)
            at = [lang.const(0, u32), first % BLOCK, entry, work.kv_head]
        self._full.expect(stage, lang.const(self.tile.stage_bytes(self.dim), u32))
        for source in self._maps:
            lang.ptx.tma_load(source, at, stage, self._full, stage)

    def wait(self, first: Any) -> None:
        """Wait for the tile of a key; ask for one in the place of the tile before."""
        step, further = self.tile.split.step, self.tile.stages - 1
        after = first + further * step
        with lang.if_(self._leader & (first > self.work.begin) & (after < self.work.end)):
            self._empty.wait(self._left, self._parity)
            self._bring(after, self._left.get())
        self._full.wait(self.stage, self._ring.parity)

    def leave(self) -> None:
        """This warp is done with the tile."""
        with lang.if_(lang.local_id() % WARP == 0):
            self._empty.arrive(self.stage)
        self._left.set(self.stage)
        self._parity.set(self._ring.parity)
        self._ring.advance()

    def mend(self, first: Any, past: Any, fresh: Fresh | None) -> None:
        """Where the tile of a key has others than keys of memory that count, make it whole.

        Args:
            past: where those of memory end; fresh: those behind them, else there are none.
        """
        work, step = self.work, self.tile.split.step
        partly = first + step > past
        if work.windowed:
            partly = partly | (first < work.all_begin)
        with lang.if_(partly):
            across, lane = self.dim // CHUNK, lang.local_id() % WARP
            rows = lang.local_id() // WARP * KEYS
            for base in range(0, KEYS * across, WARP):
                item = lane + base
                row, column = rows + item // across, item % across
                key = first + row
                other = key >= past
                if work.windowed:
                    other = other | (key < work.all_begin)
                with lang.if_(other):
                    self._replace(row, column, key, past, fresh)
            lang.ptx.async_fence()  # copies may follow in the same place
            lang.barrier()

    def _replace(self, row: Any, column: Any, key: Any, past: Any, fresh: Fresh | None) -> None:
        """Put a chunk of a fresh key and its value in a row; zeros, if there is no such key."""
        none = [lang.const(0, u32)] * 4
        at = self.keys.chunk(row, column, self.stage)  # of values too
        if fresh is None:
            self.values.memory.store_chunk(at, none)
            return
        brought = (key >= past) & (key < self.work.all_end)
        for tile, read in ((self.keys, fresh.keys), (self.values, fresh.values)):
            words = read(key, column * CHUNK)
            tile.memory.store_chunk(at, [lang.select(brought, w, 0) for w in words])


class RingWarp(WarpSums):
    """A warp's sixteen keys of each tile.

    Args:
        dim: elements of a head, a multiple of 16.
    """

    def __init__(self, work: Work, dim: int, dtype: Any, tiles: Tiles) -> None:
        super().__init__(work, dim, dtype, 1, dim)
        self.tiles: Tiles = tiles
        lane = lang.local_id() % WARP
        row = self.number * KEYS + lane // 16 * 8 + lane % 8
        self._mine: Any = tiles.keys.chunk(row, lane // 8 % 2)
        self._further: Fragment = Fragment(dtype, (16, 8))

    def load_queries(self, pair: Callable[[Any, Any], Any]) -> None:
        """Queries as the first factor, whose other eight rows are zeros; they stay in registers.

        Args:
            pair: two elements of a row, from one on: values, or the word of both.
        """
        for first in range(0, self.dim, KEYS):
            query = Fragment(self.dtype, (16, 16))
            query.fill(0)
            query[0] = pair(self.g, self.c * 2 + first)
            query[2] = pair(self.g, self.c * 2 + (first + 8))
            self.queries.append(query)

    def walk(self, past: Any, scale: Any, fresh: Fresh | None = None) -> None:
        """Take all tiles of the group; as of `Tiles.mend`."""
        work, tiles = self.tiles.work, self.tiles
        for first in lang.range(work.begin, work.end, tiles.tile.split.step):
            tiles.wait(first)
            tiles.mend(first, past, fresh)
            self.score()
            self.soften(first, scale)
            self.mix()
            tiles.leave()

    def _at(self, ring: Any, number: int) -> Any:
        """This lane's row of sixteen elements of the head, of keys as of values."""
        return ring.right(self._mine + ring.at_stage(self.tiles.stage), 2 * number)

    def score(self) -> None:
        """The products of the queries and the tile's keys."""
        ring = self.tiles.keys
        self.clear_scores()
        for number, query in enumerate(self.queries):
            lang.ptx.ldmatrix(ring, self._at(ring, number), self.keys_of, self._further)
            for n, keys in enumerate((self.keys_of, self._further)):
                lang.ptx.mma_sync(self.scores[n][number % CHAINS], query, keys)

    def mix(self) -> None:
        """Add up the tile's values; those of keys that do not count are zeros."""
        ring = self.tiles.values
        for weights in self.weights:
            lang.ptx.mma_sync(self.total, self.ones, weights)
        for number, sums in enumerate(self.out[0]):
            lang.ptx.ldmatrix(ring, self._at(ring, number), self.values_of, trans=True)
            for weights in self.weights:
                lang.ptx.mma_sync(sums, self.values_of, weights)

    def leave(self, memory: Any, line: Any, size: int, e: int) -> None:
        """As of `WarpSums`: of sixteen elements a thread has two, eight apart."""
        for number, sums in enumerate(self.out[0]):
            for half in range(2):
                memory[line + (number * KEYS + half * 8) + self.g] = sums[e + 2 * half]
