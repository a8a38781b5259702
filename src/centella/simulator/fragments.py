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
from centella.simulator.machine import UNDEFINED, Capability, Machine, over
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
    words = over(addresses(machine, index, region, 4), (4, *machine.shape))
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
    words = over(addresses(machine, index, region, 4), (4, *machine.shape))
    registers = np.concatenate([machine.values[t] for t in tiles])
    lanes = np.arange(machine.ir.workgroup) % WARP < 8 * len(registers)
    if isinstance(region.race_check, RaceCheck):
        note(machine, index, region, words, region.race_check.write, lanes)
    stored = over(machine.active & lanes, words.shape)
    region.words[words[stored]] = rows_of(registers, transposed)[stored]


def _mma(machine: Machine, index: int) -> None:
    meet(machine, index)
    _, _, (c, a, b), dtype = machine.ir.body[index]
    values, multiply = machine.values, product_of_bytes if dtype in ("i8", "u8") else product
    machine.assign(c, multiply(values[c], values[a], values[b], dtype))


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
    left, right = _factors(a, b, dtype, dtype)
    return _registers(add_products(_sums(c), left, right), c.shape)


def add_products(sums: Array, left: Array, right: Array) -> Array:
    """Sums [matrix, m, n] + left [matrix, m, k] right [matrix, k, n], in f32, k ascending.

    Along any axis but the last NumPy adds one by one, in order.
    """
    terms = np.empty((1 + left.shape[2], *sums.shape), np.float32)
    terms[0] = sums
    across, down = left.transpose(2, 0, 1)[..., None], right.transpose(1, 0, 2)[:, :, None]
    np.multiply(across, down, out=terms[1:])
    return np.asarray(np.add.reduce(terms, axis=0))


def product_of_bytes(c: Array, a: Words, b: Words, dtype: str) -> Array:
    """`mma` of integers: c + a b, which wraps around."""
    left, right = (factor.astype(np.int32) for factor in _factors(a, b, dtype, "i8"))
    return _registers(_sums(c) + left @ right, c.shape)


def _factors(a: Words, b: Words, *dtypes: str) -> tuple[Array, Array]:
    """The factors [warp, 16, k] and [warp, k, 8], of as many elements as words have."""
    warps, per = a.shape[1] * a.shape[2] // WARP, ALL[dtypes[0]].per_word
    left = _elements(a, (2, 2, warps, 8, 4, per), (2, 1, 3, 0, 4, 5), dtypes[0])
    right = _elements(b, (2, warps, 8, 4, per), (1, 0, 3, 4, 2), dtypes[1])
    return left.reshape(warps, 16, 8 * per), right.reshape(warps, 8 * per, 8)


def _sums(c: Array) -> Array:
    """Sums [warp, 16, 8]: register 2 r + h is row 8 r + lane / 4, column 2 (lane % 4) + h."""
    return c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)


def _registers(sums: Array, shape: tuple[int, ...]) -> Array:
    """The registers of sums."""
    registers = sums.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return np.ascontiguousarray(registers).reshape(shape)


def _elements(words: Words, shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> Array:
    """The elements of a fragment's words, those of 16 bits as f32, with their axes reordered."""
    kind = ALL[dtype]
    elements = np.ascontiguousarray(words).view(kind.numpy).reshape(shape).transpose(order)
    return np.asarray(widen(elements, kind) if kind.is_float else elements)
