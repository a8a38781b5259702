"""The products of warpgroups.

They are computed where they are started, but what they read is being read, and what they write may
not be touched, until their warpgroup has waited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from centella.dtypes import ALL, widen
from centella.lang.arithmetic import Array
from centella.lang.ir import Matrix
from centella.simulator.bulk import (
    Reads,
    active_threads,
    check_reads_over,
    retire,
    start_reading,
    swizzled,
)
from centella.simulator.fragments import add_products, get_register
from centella.simulator.group_ops import WARP, WARPGROUP, warpgroups
from centella.simulator.machine import Capability, Machine, over
from centella.simulator.race_check import Ids

DEPTH = 16  # k of one product


class Products:
    """The products of a group that are under way."""

    def __init__(self) -> None:
        # Of each warpgroup its groups of products, the last one open: what they read and write.
        self._reads: dict[int, Reads] = defaultdict(lambda: [[]])
        self._fragments: dict[int, list[set[int]]] = defaultdict(lambda: [set()])

    def capability(self) -> Capability:
        """The statements of products, and the read of a fragment, which they may still write."""
        return Capability({
            "wgmma": self._wgmma, "wgmma_held": self._wgmma_held, "wgmma_fence": _gather,
            "wgmma_commit": self._commit, "wgmma_wait": self._wait, "fragment_get": self._get,
            "setmaxnreg": _gather, "warpgroup_barrier": _barrier, "warpgroup_uniform": _same,
        }, end=lambda machine: check_reads_over(machine, self._reads))  # fmt: skip

    def _get(self, machine: Machine, index: int) -> None:
        _, _, (tile,), _ = machine.ir.body[index]
        for group in {thread // WARPGROUP for thread in active_threads(machine)}:
            if any(tile in fragments for fragments in self._fragments[group]):
                raise machine.fault_here(index, "a Fragment is read before wgmma_wait")
        get_register(machine, index)

    def _wgmma(self, machine: Machine, index: int) -> None:
        _, _, (left, right, tile, more), (a, b, dtype) = machine.ir.body[index]
        columns = 2 * len(machine.values[tile])

        def factors(group: int) -> Iterator[Array]:
            for operand, matrix, rows in ((left, a, 64), (right, b, columns)):
                yield self._factor(machine, index, group, operand, matrix, rows, dtype)

        self._multiply(machine, index, tile, more, factors)

    def _wgmma_held(self, machine: Machine, index: int) -> None:
        _, _, (right, tile, left, more), (b, dtype) = machine.ir.body[index]
        columns = 2 * len(machine.values[tile])

        def factors(group: int) -> Iterator[Array]:
            words = machine.values[left][:, 0, _threads_of(group)].T  # [thread, register]
            kind = ALL[dtype]
            pairs = np.asarray(widen(np.ascontiguousarray(words).view(kind.numpy), kind))
            factor = np.zeros((64, DEPTH), np.float32)
            factor[_spread(DEPTH)] = pairs.T  # a register's two are neighbours, as of sums
            yield factor
            yield self._factor(machine, index, group, right, b, columns, dtype)
            self._fragments[group][-1].add(left)

        self._multiply(machine, index, tile, more, factors)

    def _multiply(
        self, machine: Machine, index: int, tile: int, more: int,
        factors: Callable[[int], Iterator[Array]],
    ) -> None:  # fmt: skip
        """Sums of a tile, of each warpgroup, with its factors."""
        sums: Array = machine.values[tile]
        columns = 2 * len(sums)
        new = sums.copy()
        for group in warpgroups(machine, index):
            threads = _threads_of(group)
            left, right = factors(group)
            add = over(machine.values[more], machine.shape)[0, threads]
            if (add != add[0]).any():
                raise machine.fault_here(index, "accumulate differs within a warpgroup")
            elements = _spread(columns)
            total = np.zeros((64, columns), np.float32)
            if add[0]:
                total[elements] = sums[:, 0, threads]
            total = add_products(total[None], left[None], right.T[None])[0]
            new[:, 0, threads] = total[elements]
            self._fragments[group][-1].add(tile)
        machine.values[tile] = new

    def _factor(
        self, machine: Machine, index: int, group: int, operand: int, matrix: Matrix, rows: int,
        dtype: str,
    ) -> Array:  # fmt: skip
        """A factor [rows, 16] in f32, read as its descriptor says."""
        starts = over(machine.values[operand], machine.shape)[0, _threads_of(group)]
        if (starts != starts[0]).any():
            text = "a factor begins elsewhere in a thread of the warpgroup"
            raise machine.fault_here(index, text)
        words, places = _places_of(matrix, rows, int(starts[0]))
        start_reading(machine, index, matrix.array, words, group * WARPGROUP)
        if machine.check:
            self._reads[group][-1].append((matrix.array, words))
        memory = machine.memory["shared"][matrix.array].words.view(np.uint16)
        kind = ALL[dtype]
        return np.asarray(widen(memory[places].view(kind.numpy), kind))

    def _commit(self, machine: Machine, index: int) -> None:
        for group in warpgroups(machine, index):
            self._reads[group].append([])
            self._fragments[group].append(set())

    def _wait(self, machine: Machine, index: int) -> None:
        pending = machine.ir.body[index][3]
        for group in warpgroups(machine, index):
            retire(machine, self._reads[group], pending, group * WARPGROUP, group)
            fragments = self._fragments[group]
            del fragments[: max(len(fragments) - 1 - pending, 0)]


@lru_cache(maxsize=64)
def _spread(columns: int) -> tuple[Any, Any]:
    """Row and column of each register of each thread of a warpgroup (PTX ISA, wgmma's D)."""
    register = np.arange(columns // 2)[:, None]
    thread = np.arange(WARPGROUP)[None]
    row = thread // WARP * 16 + thread % WARP // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + thread % 4 * 2 + register % 2
    return row, column


@lru_cache(maxsize=256)
def _places_of(matrix: Matrix, rows: int, start: int) -> tuple[Ids, Ids]:
    """The words of a factor that begins at chunk `start`; where in them element [row, k] lies.

    Both are numbered from the begin of the array: its words, and its elements of 16 bits.
    """
    halves = _unswizzled(matrix, rows) + start * 8
    chunks = swizzled(halves // 8, matrix.swizzle)
    return np.unique(chunks[..., None] * 4 + np.arange(4)), chunks * 8 + halves % 8


def _unswizzled(matrix: Matrix, rows: int) -> Ids:
    """Where element [row, k] of a factor lies, in elements from its start, before the pattern.

    PTX ISA, "Strides": along k eight rows are `stride` apart; else a row of memory has the rows
    (m or n) of one k, `leading` is from one panel of them to the next, `stride` from eight of k to
    the next.
    """
    row, k = np.arange(rows)[:, None], np.arange(DEPTH)[None]
    if matrix.along_k:
        return row // 8 * (matrix.stride // 2) + row % 8 * (matrix.swizzle // 2) + k
    width = matrix.swizzle // 2
    across = row // width * (matrix.leading // 2) + row % width
    return across + k // 8 * (matrix.stride // 2) + k % 8 * width


def _threads_of(group: int) -> slice:
    return slice(group * WARPGROUP, (group + 1) * WARPGROUP)


def _gather(machine: Machine, index: int) -> None:
    """Whole warpgroups come here; nothing else is to be seen of it."""
    warpgroups(machine, index)


def _same(machine: Machine, index: int) -> None:
    """A number that the threads of each warpgroup have in common."""
    groups = warpgroups(machine, index)
    value = np.broadcast_to(machine.values[machine.ir.body[index][2][0]], machine.shape)
    for group in groups:
        threads = value[0, _threads_of(group)]
        if (threads.view(np.uint32) != threads[:1].view(np.uint32)).any():
            raise machine.fault_here(index, "a value differs within a warpgroup")
    machine.values[index] = value.copy()


def _barrier(machine: Machine, index: int) -> None:
    warpgroups(machine, index)
    machine.epoch = machine.epoch + machine.active
