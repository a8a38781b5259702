"""Matrices of a warp: register tiles, and what loads, stores and multiplies them.

A fragment is an array (registers, groups, workgroup). Matrices are taken apart and put together as
the PTX ISA lays them over the lanes of a warp, whatever the simulated subgroup size.
"""

from __future__ import annotations

import numpy as np

from centella.dtypes import ALL, widen
from centella.lang.arithmetic import NUMPY, Array
from centella.simulator.group_ops import WARP, meet
from centella.simulator.launch import Words
from centella.simulator.machine import UNDEFINED, Capability, Machine
from centella.simulator.memory import addresses, note
from centella.simulator.race_check import RaceCheck


def _fragment(machine: Machine, index: int) -> None:
    type_, registers = machine.ir.body[index][3]
    undefined = np.full((registers, *machine.shape), UNDEFINED, np.uint32)
    machine.values[index] = undefined.view(NUMPY[type_])


def _fill(machine: Machine, index: int) -> None:
    _, _, (tile,), number = machine.ir.body[index]
    machine.assign(tile, np.full_like(machine.values[tile], number))


def get_register(machine: Machine, index: int) -> None:
    """One register of a fragment as a value."""
    _, _, (tile,), register = machine.ir.body[index]
    machine.values[index] = machine.values[tile][register]


def _set_register(machine: Machine, index: int) -> None:
    _, _, (tile, value), register = machine.ir.body[index]
    new = machine.values[tile].copy()
    new[register] = machine.values[value]
    machine.assign(tile, new)


def _ldmatrix(machine: Machine, index: int) -> None:
    meet(machine, index)
    _, _, (_, *tiles), (position, transposed) = machine.ir.body[index]
    region = machine.memory["shared"][position]
    words = np.broadcast_to(addresses(machine, index, region, 4), (4, *machine.shape))
    count = sum(len(machine.values[t]) for t in tiles)
    if region.race_check:  # threads past the matrices' rows give an address that is not used
        lanes = np.arange(machine.ir.workgroup) % WARP < 8 * count
        note(machine, index, region, words, region.race_check.read, lanes)
    registers = matrices(region.words.take(words), count, transposed)
    for tile in tiles:
        size = len(machine.values[tile])
        machine.assign(tile, registers[:size])
        registers = registers[size:]


def _stmatrix(machine: Machine, index: int) -> None:
    meet(machine, index)
    _, _, (_, *tiles), (position, transposed) = machine.ir.body[index]
    region = machine.memory["shared"][position]
    words = np.broadcast_to(addresses(machine, index, region, 4), (4, *machine.shape))
    registers = np.concatenate([machine.values[t] for t in tiles])
    lanes = np.arange(machine.ir.workgroup) % WARP < 8 * len(registers)
    if isinstance(region.race_check, RaceCheck):
        note(machine, index, region, words, region.race_check.write, lanes)
    stored = np.broadcast_to(machine.active & lanes, words.shape)
    region.words[words[stored]] = rows_of(registers, transposed)[stored]


def _mma(machine: Machine, index: int) -> None:
    meet(machine, index)
    _, _, (c, a, b), dtype = machine.ir.body[index]
    values = machine.values
    machine.assign(c, product(values[c], values[a], values[b], dtype))


FRAGMENTS = Capability({
    "fragment": _fragment, "fragment_fill": _fill, "fragment_get": get_register,
    "fragment_set": _set_register, "ldmatrix": _ldmatrix, "mma": _mma, "stmatrix": _stmatrix,
})  # fmt: skip


def matrices(rows: Words, count: int, transposed: bool) -> Words:
    """What `ldmatrix` gives each lane: (registers, groups, workgroup).

    Args:
        rows: the words (4, groups, workgroup) of the row that each lane points at.
        count: matrices: rows of the first `8 count` lanes.
    """
    words, groups, workgroup = rows.shape
    matrices = rows.reshape(words, groups, -1, 4, 8)[
        :, :, :, :count
    ]  # word, group, warp, matrix, row
    matrices = matrices.transpose(3, 1, 2, 4, 0)  # matrix, group, warp, row, word
    if transposed:
        halves = np.ascontiguousarray(matrices).view(np.uint16)
        matrices = np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.uint32)
    return np.ascontiguousarray(matrices).reshape(count, groups, workgroup)


def rows_of(registers: Words, transposed: bool) -> Words:
    """The words (4, groups, workgroup) of the row that each lane points at for `stmatrix`.

    Lanes past the rows of the last matrix have zeros.
    """
    count, groups, workgroup = registers.shape
    matrices = registers.reshape(count, groups, -1, 8, 4)  # matrix, group, warp, row, word
    if transposed:
        halves = np.ascontiguousarray(matrices).view(np.uint16)
        matrices = np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.uint32)
    rows = np.zeros((4, groups, workgroup // WARP, 4, 8), np.uint32)
    rows[:, :, :, :count] = matrices.transpose(4, 1, 2, 0, 3)
    return rows.reshape(4, groups, workgroup)


def product(c: Array, a: Words, b: Words, dtype: str) -> Array:
    """`mma`: c + a b, whose products are exact, added to c one by one in f32, k ascending."""
    warps = c.shape[1] * c.shape[2] // WARP
    left = _halves(a, (2, 2, warps, 8, 4, 2), (2, 1, 3, 0, 4, 5), dtype).reshape(warps, 16, 16)
    right = _halves(b, (2, warps, 8, 4, 2), (1, 0, 3, 4, 2), dtype).reshape(warps, 16, 8)
    # Of c, register 2 r + h is row 8 r + lane / 4, column 2 (lane % 4) + h.
    matrices = c.reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)
    for k in range(16):
        matrices = matrices + left[:, :, k, None] * right[:, k, None, :]
    matrices = matrices.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(matrices).reshape(c.shape)


def _halves(words: Words, shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> Array:
    """The halves of a fragment's words as f32, with their axes in another order."""
    kind = ALL[dtype]
    halves = np.ascontiguousarray(words).view(kind.numpy).reshape(shape).transpose(order)
    return np.asarray(widen(halves, kind))
