"""The simulator's machine with what PTX alone has: matrices of a warp, asynchronous copies.

A fragment is an array (registers, groups, workgroup). Matrices are taken apart and put together as
the PTX ISA lays them over the lanes of a warp, whatever the simulated subgroup size. A copy lands
at its latest, when its thread has waited for it; until then its words are in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from centella.dtypes import ALL, widen
from centella.lang.arithmetic import NUMPY, Array
from centella.simulator.group_ops import GroupMachine
from centella.simulator.machine import UNDEFINED
from centella.simulator.race_check import NOBODY, Fault, Ids, Mask, Shadow

WARP = 32
SAID = ("resident", "fetch_lines", "cluster", "launch_dependents")  # to hardware alone
Words = NDArray[np.uint32]


class Flights(Shadow):
    """What is remembered of shared memory that copies land in."""

    def __init__(self, words: int, workgroup: int, known: Mask) -> None:
        super().__init__(words, workgroup, known)
        self._carrier = np.full(words, NOBODY, np.int64)
        self._group = np.zeros(words, np.int64)
        self._bits = np.zeros(words, np.uint32)

    def read(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread reads its word; the position and text of a fault, if any."""
        return self._in_flight(words, "read") or super().read(words, threads, epochs)

    def write(self, words: Ids, threads: Ids, epochs: Ids) -> Fault | None:
        """Note that each thread writes its word; the position and text of a fault, if any."""
        return self._in_flight(words, "written") or super().write(words, threads, epochs)

    def depart(
        self, words: Ids, threads: Ids, epochs: Ids, groups: Ids, bits: Words
    ) -> Fault | None:
        """Note that each thread starts a copy to its word, in its `groups`-th group."""
        fault = self.write(words, threads, epochs)
        self._carrier[words], self._group[words], self._bits[words] = threads, groups, bits
        return fault

    def landed(self, waited: Ids, first: int) -> tuple[Ids, Ids, Words]:
        """Words of groups below what each thread, from `first` on, has waited for; who, what."""
        words = np.flatnonzero(self._carrier != NOBODY)
        words = words[self._group[words] < waited[self._carrier[words] - first]]
        threads = self._carrier[words]
        self._carrier[words] = NOBODY
        return words, threads, self._bits[words]

    def _in_flight(self, words: Ids, what: str) -> Fault | None:
        flying = self._carrier[words] != NOBODY
        if not flying.any():
            return None
        at = int(flying.argmax())
        who = self._name(int(self._carrier[words[at]]))
        return at, f"{what} before {who} has waited for its copy"


class WarpMachine(GroupMachine):
    """One launch, of a kernel for any target."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._copies = any(s[0] == "cp_async" for s in self.ir.body)
        self.effects.update({
            "fragment": self._fragment, "fragment_fill": self._fill, "fragment_get": self._get,
            "fragment_set": self._put, "ldmatrix": self._ldmatrix, "mma": self._mma,
            "stmatrix": self._stmatrix, "cp_async": self._copy,
            "cp_async_commit": self._commit, "cp_async_wait": self._wait,
            **dict.fromkeys(SAID, lambda index: None),
        })  # fmt: skip

    def begin(self, first: int, count: int) -> None:
        """Take `count` groups from `first` on."""
        self._committed: Ids = np.zeros((count, self.ir.workgroup), np.int64)
        super().begin(first, count)

    def _shadow(self, words: int, known: Mask) -> Shadow:
        kind = Flights if self._copies else Shadow
        return kind(words, self.ir.workgroup, known)

    # -- fragments --------------------------------------------------------------------------------

    def _fragment(self, index: int) -> None:
        type_, registers = self.ir.body[index][3]
        undefined = np.full((registers, *self.shape), UNDEFINED, np.uint32)
        self.values[index] = undefined.view(NUMPY[type_])

    def _fill(self, index: int) -> None:
        _, _, (tile,), number = self.ir.body[index]
        self._assign(tile, np.full_like(self.values[tile], number))

    def _get(self, index: int) -> None:
        _, _, (tile,), register = self.ir.body[index]
        self.values[index] = self.values[tile][register]

    def _put(self, index: int) -> None:
        _, _, (tile, value), register = self.ir.body[index]
        new = self.values[tile].copy()
        new[register] = self.values[value]
        self._assign(tile, new)

    def _assign(self, tile: int, new: Array) -> None:
        self.values[tile] = new if self.full else np.where(self.active, new, self.values[tile])

    def _ldmatrix(self, index: int) -> None:
        self._meet(index)
        _, _, (_, *tiles), (position, transposed) = self.ir.body[index]
        region = self.memory["shared"][position]
        places = np.broadcast_to(self._words(index, region, 4), (4, *self.shape))
        count = sum(len(self.values[t]) for t in tiles)
        if region.shadow:  # threads past the matrices' rows give an address that is not used
            lanes = np.arange(self.ir.workgroup) % WARP < 8 * count
            self._note(index, region, places, region.shadow.read, lanes)
        registers = matrices(region.words.take(places), count, transposed)
        for tile in tiles:
            held = len(self.values[tile])
            self._assign(tile, registers[:held])
            registers = registers[held:]

    def _stmatrix(self, index: int) -> None:
        self._meet(index)
        _, _, (_, *tiles), (position, transposed) = self.ir.body[index]
        region = self.memory["shared"][position]
        places = np.broadcast_to(self._words(index, region, 4), (4, *self.shape))
        registers = np.concatenate([self.values[t] for t in tiles])
        lanes = np.arange(self.ir.workgroup) % WARP < 8 * len(registers)
        if isinstance(region.shadow, Shadow):
            self._note(index, region, places, region.shadow.write, lanes)
        stored = np.broadcast_to(self.active & lanes, places.shape)
        region.words[places[stored]] = rows_of(registers, transposed)[stored]

    def _mma(self, index: int) -> None:
        self._meet(index)
        _, _, (c, a, b), dtype = self.ir.body[index]
        self._assign(c, product(self.values[c], self.values[a], self.values[b], dtype))

    # -- copies -----------------------------------------------------------------------------------

    def _copy(self, index: int) -> None:
        _, _, (_, _, size), (array, argument) = self.ir.body[index]
        region, source = self.memory["shared"][array], self.memory["global"][argument]
        into = self._words(index, region, 4)
        places = self._words(index, source, 4, 1)
        asked = np.asarray(self.values[size]).astype(np.int64) - 4 * np.arange(4)[:, None, None]
        nbytes = np.clip(asked, 0, 4)
        if source.shadow:
            self._note(index, source, places, source.shadow.read, nbytes > 0)
        kept = np.asarray((1 << 8 * nbytes) - 1, np.uint32)
        shape = (4, *self.shape)
        active = np.broadcast_to(self.active, shape)
        bits: Words = np.broadcast_to(source.words.take(places) & kept, shape)[active]
        words = np.broadcast_to(into, shape)
        if not isinstance(region.shadow, Flights):
            region.words[words[active]] = bits
            return
        groups = np.broadcast_to(self._committed, shape)[active]
        flights = region.shadow
        region.words[words[active]] = UNDEFINED

        def depart(where: Ids, threads: Ids, epochs: Ids) -> Fault | None:
            return flights.depart(where, threads, epochs, groups, bits)

        self._note(index, region, words, depart)

    def _commit(self, index: int) -> None:
        self._committed = self._committed + self.active

    def _wait(self, index: int) -> None:
        pending = self.ir.body[index][3]
        waited = np.where(self.active, self._committed - pending, 0).reshape(-1)
        epochs = np.broadcast_to(self.epoch, self.shape).reshape(-1)
        first = self.first * self.ir.workgroup
        for region in self.memory["shared"]:
            if not isinstance(region.shadow, Flights):
                continue
            words, threads, bits = region.shadow.landed(waited, first)
            region.words[words] = bits
            fault = region.shadow.write(words, threads, epochs[threads - first])
            assert fault is None, "nobody touches what is in flight"


def matrices(rows: Words, count: int, transposed: bool) -> Words:
    """What `ldmatrix` gives each lane: (registers, groups, workgroup).

    Args:
        rows: the words (4, groups, workgroup) of the row that each lane points at.
        count: matrices: rows of the first `8 count` lanes.
    """
    words, groups, workgroup = rows.shape
    held = rows.reshape(words, groups, -1, 4, 8)[:, :, :, :count]  # word, group, warp, matrix, row
    held = held.transpose(3, 1, 2, 4, 0)  # matrix, group, warp, row, word
    if transposed:
        halves = np.ascontiguousarray(held).view(np.uint16)
        held = np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.uint32)
    return np.ascontiguousarray(held).reshape(count, groups, workgroup)


def rows_of(registers: Words, transposed: bool) -> Words:
    """The words (4, groups, workgroup) of the row that each lane points at for `stmatrix`.

    Lanes past the rows of the last matrix have zeros.
    """
    count, groups, workgroup = registers.shape
    held = registers.reshape(count, groups, -1, 8, 4)  # matrix, group, warp, row, word
    if transposed:
        halves = np.ascontiguousarray(held).view(np.uint16)
        held = np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.uint32)
    rows = np.zeros((4, groups, workgroup // WARP, 4, 8), np.uint32)
    rows[:, :, :, :count] = held.transpose(4, 1, 2, 0, 3)
    return rows.reshape(4, groups, workgroup)


def product(c: Array, a: Words, b: Words, dtype: str) -> Array:
    """`mma`: c + a b, whose products are exact, added to c one by one in f32, k ascending."""
    warps = c.shape[1] * c.shape[2] // WARP
    left = _halves(a, (2, 2, warps, 8, 4, 2), (2, 1, 3, 0, 4, 5), dtype).reshape(warps, 16, 16)
    right = _halves(b, (2, warps, 8, 4, 2), (1, 0, 3, 4, 2), dtype).reshape(warps, 16, 8)
    # Of c, register 2 r + h is row 8 r + lane / 4, column 2 (lane % 4) + h.
    held = c.reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)
    for k in range(16):
        held = held + left[:, :, k, None] * right[:, k, None, :]
    held = held.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(held).reshape(c.shape)


def _halves(words: Words, shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> Array:
    """The halves of a fragment's words as f32, with their axes in another order."""
    kind = ALL[dtype]
    halves = np.ascontiguousarray(words).view(kind.numpy).reshape(shape).transpose(order)
    return np.asarray(widen(halves, kind))
