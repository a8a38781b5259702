"""The simulator's machine with what warpgroups do together: they meet, and multiply.

Products are computed where they are started, but what they read is being read, and what they write
may not be touched, until their warpgroup has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from centella.dtypes import ALL, widen
from centella.errors import SimulationError
from centella.lang.arithmetic import Array
from centella.lang.ir import SUBGROUP, Matrix
from centella.simulator.bulk import Boxes
from centella.simulator.factors import DEPTH, WARPGROUP, places_of, spread
from centella.simulator.race_check import Ids
from centella.simulator.warps import WarpMachine

CHUNK = 16  # bytes
OF_WARPS = SUBGROUP | {"ldmatrix", "stmatrix", "mma"}  # in a role, too


class WarpgroupMachine(WarpMachine):
    """One launch, group by group, of a kernel whose warpgroups work by themselves."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.effects.update({
            "wgmma": self._wgmma, "wgmma_held": self._wgmma_held, "wgmma_fence": self._gather,
            "wgmma_commit": self._wgmma_commit, "wgmma_wait": self._wgmma_wait,
            "setmaxnreg": self._gather, "warpgroup_barrier": self._warpgroup_barrier,
        })  # fmt: skip

    def begin(self, first: int, count: int) -> None:
        """Take group `first`."""
        # Groups of products by warpgroup, and the fragments they have; the last one is open.
        self.products: dict[int, list[list[tuple[int, Ids]]]] = {}
        self.pending: dict[int, list[set[int]]] = {}
        super().begin(first, count)

    # -- what is reported -------------------------------------------------------------------------

    def _bad(self, index: int, text: str) -> SimulationError:
        _, thread = self._first(self.active)
        return self._fault(index, thread, text)

    def _inside(self, index: int, array: int, words: Ids) -> None:
        """Raise where a box or a factor reaches past its array."""
        most = self.ir.shared[array].words
        if words.max() >= most:
            text = f"shared array {array} word {words.max()} is out of bounds, it has {most} words"
            raise self._bad(index, text)

    def _tell(self, index: int, array: int, words: Ids, fault: tuple[int, str] | None) -> None:
        if fault is not None:
            raise self._bad(index, f"shared array {array} word {words[fault[0]]}: {fault[1]}")

    def _who(self, words: Ids, thread: int) -> tuple[Ids, Ids]:
        """A thread, numbered over the launch, and its epoch, for each word."""
        epoch = np.broadcast_to(self.epoch, self.shape)[0, thread]
        number = self.first * self.ir.workgroup + thread
        return np.full(words.size, number, np.int64), np.full(words.size, epoch, np.int64)

    def _retire(self, groups: list[list[tuple[int, Ids]]], pending: int, thread: int) -> None:
        """What all groups but the latest ones read, they have read, as this thread knows."""
        done = max(len(groups) - 1 - pending, 0)
        for array, words in (read for group in groups[:done] for read in group):
            shadow = self.memory["shared"][array].shadow
            if isinstance(shadow, Boxes):
                shadow.stop_reading(words, *self._who(words, thread))
        del groups[:done]

    # -- meetings and products ---------------------------------------------------------------------

    def _together(self, index: int) -> list[int]:
        """The warpgroups that are here, each of them whole."""
        here = np.broadcast_to(self.active, self.shape).reshape(-1, WARPGROUP).sum(axis=1)
        split = (here > 0) & (here < WARPGROUP)
        if split.any():
            op = self.ir.body[index][0]
            raise self._bad(index, f"{op} reached by {here[split][0]} of {WARPGROUP} threads")
        return [int(g) for g in np.flatnonzero(here)]

    def _meet(self, index: int) -> None:
        whole = self.ir.workgroup % WARPGROUP == 0  # as where there are roles
        if whole and self.ir.body[index][0] in OF_WARPS:
            self._together(index)
        else:
            super()._meet(index)

    def _gather(self, index: int) -> None:
        """Whole warpgroups come here; nothing else is to be seen of it."""
        self._together(index)

    def _warpgroup_barrier(self, index: int) -> None:
        self._together(index)
        epoch = np.broadcast_to(self.epoch, self.shape).copy()
        epoch[np.broadcast_to(self.active, self.shape)] += 1
        self.epoch = epoch

    def _get(self, index: int) -> None:
        _, _, (tile,), _ = self.ir.body[index]
        for group in self._present():
            if any(tile in held for held in self.pending.get(group, ())):
                raise self._bad(index, "a Fragment is read before wgmma_wait")
        super()._get(index)

    def _present(self) -> list[int]:
        threads = np.flatnonzero(np.broadcast_to(self.active, self.shape)[0])
        return sorted({int(t) // WARPGROUP for t in threads})

    def _wgmma(self, index: int) -> None:
        _, _, (left, right, tile, more), (a, b, dtype) = self.ir.body[index]
        columns = 2 * len(self.values[tile])

        def factors(group: int) -> Iterator[Array]:
            for operand, matrix, rows in ((left, a, 64), (right, b, columns)):
                yield self._factor(index, group, operand, matrix, rows, dtype)

        self._multiply(index, tile, more, factors)

    def _wgmma_held(self, index: int) -> None:
        _, _, (right, tile, held, more), (b, dtype) = self.ir.body[index]
        columns = 2 * len(self.values[tile])

        def factors(group: int) -> Iterator[Array]:
            mine = slice(group * WARPGROUP, (group + 1) * WARPGROUP)
            words = np.ascontiguousarray(self.values[held][:, 0, mine].T)  # [thread, register]
            kind = ALL[dtype]
            pairs = np.asarray(widen(words.view(kind.numpy), kind))
            factor = np.zeros((64, DEPTH), np.float32)
            factor[spread(DEPTH)] = pairs.T  # a register's two are neighbours, as of sums
            yield factor
            yield self._factor(index, group, right, b, columns, dtype)
            self.pending.setdefault(group, [set()])[-1].add(held)

        self._multiply(index, tile, more, factors)

    def _multiply(
        self, index: int, tile: int, more: int, factors: Callable[[int], Iterator[Array]]
    ) -> None:
        """Sums of a tile, of each warpgroup, with its factors."""
        sums: Array = self.values[tile]
        columns = 2 * len(sums)
        made = sums.copy()
        for group in self._together(index):
            mine = slice(group * WARPGROUP, (group + 1) * WARPGROUP)
            left, right = factors(group)
            add = np.broadcast_to(self.values[more], self.shape)[0, mine]
            if (add != add[0]).any():
                raise self._bad(index, "accumulate differs within a warpgroup")
            c = spread(columns)
            held = np.zeros((64, columns), np.float32)
            if add[0]:
                held[c] = sums[:, 0, mine]
            for k in range(DEPTH):
                held = held + left[:, k, None] * right[None, :, k]
            made[:, 0, mine] = held[c]
            self.pending.setdefault(group, [set()])[-1].add(tile)
        self.values[tile] = made

    def _factor(
        self, index: int, group: int, operand: int, matrix: Matrix, rows: int, dtype: str
    ) -> Array:
        """A factor [rows, 16] in f32, found as its descriptor says."""
        mine = slice(group * WARPGROUP, (group + 1) * WARPGROUP)
        reads = self.products.setdefault(group, [[]])[-1]
        places = np.broadcast_to(self.values[operand], self.shape)[0, mine]
        if (places != places[0]).any():
            raise self._bad(index, "a factor begins elsewhere in a thread of the warpgroup")
        start = int(places[0])
        region = self.memory["shared"][matrix.array]
        halves = places_of(matrix, rows) + start * 8  # before the pattern
        chunks = halves // 8
        chunks = chunks ^ ((chunks >> 3) & (matrix.swizzle // CHUNK - 1))
        words = np.unique(chunks[..., None] * 4 + np.arange(4))
        self._inside(index, matrix.array, words)
        if isinstance(region.shadow, Boxes):
            who = self._who(words, group * WARPGROUP)
            self._tell(index, matrix.array, words, region.shadow.start_reading(words, *who))
            reads.append((matrix.array, words))
        start_of = int(np.asarray(region.start).flat[0])
        held = region.words[start_of : start_of + region.size].view(np.uint16)
        kind = ALL[dtype]
        return np.asarray(widen(held[chunks * 8 + halves % 8].view(kind.numpy), kind))

    def _wgmma_commit(self, index: int) -> None:
        for group in self._together(index):
            self.products.setdefault(group, [[]]).append([])
            self.pending.setdefault(group, [set()]).append(set())

    def _wgmma_wait(self, index: int) -> None:
        left = self.ir.body[index][3]
        for group in self._together(index):
            self._retire(self.products.setdefault(group, [[]]), left, group * WARPGROUP)
            held = self.pending.setdefault(group, [set()])
            del held[: max(len(held) - 1 - left, 0)]
