"""Copies of boxes between tensors and shared memory, by the copy engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from centella.lang.ir import HALF
from centella.simulator.barriers import Barriers, Box, barriers_of, check
from centella.simulator.bulk import (
    CHUNK,
    Asked,
    Boxes,
    Reads,
    active_threads,
    check_fault,
    check_inside,
    check_reads_over,
    operand_values,
    retire,
    start_reading,
    swizzled,
)
from centella.simulator.clocks import Clocks
from centella.simulator.group_ops import WARP
from centella.simulator.launch import Region, Words
from centella.simulator.machine import UNDEFINED, Capability, Machine
from centella.simulator.race_check import Ids, Mask, RaceCheck


class Target(NamedTuple):
    """A group that boxes are copied to: its shared arrays and its barriers."""

    shared: list[Region]
    barriers: Barriers


class Tma:
    """The copies of a group."""

    def __init__(self, barriers: Barriers) -> None:
        self._barriers = barriers
        # Of each thread its groups of stores, the last one open.
        self._stores: dict[int, Reads] = defaultdict(lambda: [[]])

    def capability(self) -> Capability:
        """The statements of copies, and the fence between them and stores of threads."""
        return Capability({
            "tma_load": self._load, "bulk_load": self._load_bytes, "tma_store": self._store,
            "tma_store_commit": self._commit, "tma_store_wait": self._wait, "async_fence": _fence,
        }, end=lambda machine: check_reads_over(machine, self._stores))  # fmt: skip

    def _load(self, machine: Machine, index: int) -> None:
        own = Target(machine.memory["shared"], self._barriers)
        targets = [[own] for _ in active_threads(machine)]
        copy_boxes(machine, index, 2, targets, self._barriers.clocks)

    def _load_bytes(self, machine: Machine, index: int) -> None:
        _, _, _, (array, argument, barriers) = machine.ir.body[index]
        source, own = machine.memory["global"][argument], machine.memory["shared"]
        numbers = barriers_of(machine, index, 2, barriers)
        starts, firsts, sizes = (operand_values(machine, index, i) for i in (0, 1, 3))
        threads = active_threads(machine)
        for start, first, number, nbytes, thread in zip(
            starts, firsts, numbers, sizes, threads, strict=True
        ):
            if nbytes % CHUNK or not nbytes:
                text = f"copies are of multiples of {CHUNK} bytes, got {nbytes}"
                raise machine.fault_here(index, text)
            count = nbytes // 4
            words, read = 4 * start + np.arange(count), 4 * first + np.arange(count)
            check_inside(machine, index, array, words)
            size = source.words.size
            if read[-1] >= size + -size % (CHUNK // 4):
                text = f"{source.name} word {read[-1]} is out of bounds, it has {size}"
                raise machine.fault_here(index, text)
            _check_known(machine, index, source, read[read < size])
            known = self._barriers.clocks.known[thread // WARP]
            bits = np.pad(source.words[read[0] :], (0, 3), constant_values=UNDEFINED)[:count]
            box = array, words, bits
            send(machine, index, Target(own, self._barriers), number, box, barriers, known)

    def _store(self, machine: Machine, index: int) -> None:
        _, _, _, (array, position) = machine.ir.body[index]
        source = machine.memory["shared"][array].words
        target = machine.memory["global"][machine.ir.maps[position].argument]
        starts = operand_values(machine, index, 0)
        for thread, first in zip(active_threads(machine), starts, strict=True):
            words, element, inside = _box(machine, index, first, 1, position)
            start_reading(machine, index, array, words, thread)
            halves = np.ascontiguousarray(source[words]).view(np.uint16)
            target.words.view(np.uint16)[element[inside]] = halves[inside]
            if isinstance(target.race_check, RaceCheck):
                # The engine writes elements: what shares a word with them stays as it is.
                written = element[inside] // 2
                target.race_check.known[written] = target.race_check.written[written] = True
            self._stores[thread][-1].append((array, words))

    def _commit(self, machine: Machine, index: int) -> None:
        for thread in active_threads(machine):
            self._stores[thread].append([])

    def _wait(self, machine: Machine, index: int) -> None:
        for thread in active_threads(machine):
            retire(machine, self._stores[thread], machine.ir.body[index][3], thread)


def copy_boxes(
    machine: Machine, index: int, operand: int, targets: Sequence[Sequence[Target]], clocks: Clocks
) -> None:
    """Have boxes on their way: of each active thread to its targets, at one address in each.

    Args:
        operand: the first one that is a coordinate; clocks: of the group that asks.
    """
    _, _, _, (array, barriers, position) = machine.ir.body[index]
    source = machine.memory["global"][machine.ir.maps[position].argument]
    numbers, starts = barriers_of(machine, index, 1, barriers), operand_values(machine, index, 0)
    threads = active_threads(machine)
    for first, number, groups, thread in zip(starts, numbers, targets, threads, strict=True):
        words, element, inside = _box(machine, index, first, operand, position)
        check_inside(machine, index, array, words)
        bits = _read(machine, index, source, element, inside)
        for group in groups:
            known = clocks.known[thread // WARP]
            send(machine, index, group, number, (array, words, bits), barriers, known)


def send(
    machine: Machine, index: int, group: Target, number: int, box: Box, barriers: int, known: Ids,
    engine: bool = True,
) -> None:  # fmt: skip
    """Have words on their way to a group, to be counted at one of its barriers.

    Args:
        known: what the warp that asks knows to come before; engine: as of `Asked`.
    """
    array, words, _ = box
    region = group.shared[array]
    barrier = group.barriers.at(barriers, number)
    if isinstance(region.race_check, Boxes):
        unit = group.barriers.clocks.units.barrier(barriers, number)
        fault = region.race_check.come(words, Asked(unit, barrier.over + 1, known, engine))
        check_fault(machine, index, array, words, fault)
    region.words[words] = UNDEFINED
    check(machine, index, barrier.copy(box, known))


def _read(machine: Machine, index: int, source: Region, element: Ids, inside: Mask) -> Words:
    """The words of a box: elements of 16 bits of its argument, zeros outside of it."""
    halves = np.zeros(element.size, np.uint16)
    halves[inside] = source.words.view(np.uint16)[element[inside]]
    _check_known(machine, index, source, element[inside] // 2)
    return halves.view(np.uint32)


def _check_known(machine: Machine, index: int, source: Region, read: Ids) -> None:
    """Raise where words of an argument are read that nobody has written."""
    if machine.check and source.race_check and (fault := source.race_check.unknown(read)):
        raise machine.fault_here(index, f"{source.name} word {read[fault[0]]}: {fault[1]}")


def _box(
    machine: Machine, index: int, first: int, operand: int, position: int
) -> tuple[Ids, Ids, Mask]:
    """Words of a box in shared memory, in its argument, and which of them are inside of it.

    Words have two elements of 16 bits; of one that is half inside the rest is zeros.
    """
    tensor_map = machine.ir.maps[position]
    extents, strides, box = tensor_map.layout(machine.launch.params)
    itemsize = machine.ir.args[tensor_map.argument].dtype.itemsize
    element: Any = int(machine.launch.params[tensor_map.offset]) * itemsize // HALF
    inside: Any = True
    for d, size in enumerate(box):  # the last dimension is outermost
        at = operand_values(machine, index, operand + d)[0]
        there = at + np.arange(size).reshape(size, *(1,) * d)
        element = element + there * strides[d]
        inside = inside & (there < extents[d])
    region = machine.memory["global"][tensor_map.argument]
    if (last := element[inside].max(initial=0) // 2) >= region.size:
        text = f"{region.name} word {last} is out of bounds, it has {region.size} words"
        raise machine.fault_here(index, f"a box has {text}")
    chunks = swizzled(first + np.arange(element.size // 8), tensor_map.swizzle)
    words = (chunks[:, None] * 4 + np.arange(4)).reshape(-1)
    return words, element.reshape(-1), inside.reshape(-1)


def _fence(machine: Machine, index: int) -> None:
    active = machine.here[0]
    for region in machine.memory["shared"]:
        if isinstance(region.race_check, Boxes):
            region.race_check.fence(active)
