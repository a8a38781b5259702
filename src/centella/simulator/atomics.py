"""Atomic steps: those on one word happen one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from centella.lang.arithmetic import NUMPY
from centella.lang.ir import GLOBAL_ATOMICS, SHARED_ATOMICS
from centella.simulator.machine import Capability, Machine, over
from centella.simulator.memory import addresses, note, turns
from centella.simulator.race_check import Ids, RaceCheck

Values = NDArray[np.generic]  # i32 or u32

STEPS: dict[str, Callable[[Values, Values], Values]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exchange": lambda before, value: value,
}  # fmt: skip


def _atomic(space: str, machine: Machine, index: int) -> None:
    op, type_, args, position = machine.ir.body[index]
    region = machine.memory[space][position]
    words = addresses(machine, index, region, 1)
    if isinstance(region.race_check, RaceCheck):
        note(machine, index, region, words, region.race_check.change)
    here = np.flatnonzero(machine.here)
    here = here[turns(machine, here.size)]
    words, *operands = (
        over(x, machine.shape).ravel()[here]
        for x in (words, *(machine.values[a] for a in args[1:]))
    )
    memory, before = region.words.view(NUMPY[type_]), np.zeros(machine.shape, NUMPY[type_])
    before.ravel()[here] = take_turns(op.partition("_")[2], memory, words, operands)
    machine.values[index] = before


ATOMICS = Capability(
    dict.fromkeys(GLOBAL_ATOMICS, partial(_atomic, "global"))
    | dict.fromkeys(SHARED_ATOMICS, partial(_atomic, "shared"))
)


def take_turns(kind: str, memory: Values, words: Ids, operands: Sequence[Values]) -> Values:
    """Take a step on `memory[words[n]]` for each n, in order of n; the value before each step.

    Args:
        kind: one of `STEPS`, or "compare_exchange", whose operands are what is expected and what
            is stored in its place.
    """
    order = np.argsort(words, kind="stable")
    words, operands = words[order], [values[order] for values in operands]
    first = np.append(True, words[1:] != words[:-1])[: words.size]  # of each word
    if kind == "compare_exchange":
        sorted_before = _compare_exchange(memory, words, first, *operands)
    else:
        sorted_before = _scan(STEPS[kind], memory, words, first, operands[0])
    before = np.empty_like(sorted_before)
    before[order] = sorted_before
    return before


def _scan(
    step: Callable[[Values, Values], Values], memory: Values, words: Ids, first: NDArray[np.bool_],
    values: Values,
) -> Values:  # fmt: skip
    """All steps of an associative kind, by a scan over the steps of each word."""
    total, distance = values.copy(), 1
    nth = np.arange(words.size) - np.maximum.accumulate(np.where(first, np.arange(words.size), 0))
    while (nth >= distance).any():
        joined = step(total[:-distance], total[distance:])
        total[distance:] = np.where(nth[distance:] >= distance, joined, total[distance:])
        distance *= 2
    start = memory[words]
    before = start.copy()
    later = np.flatnonzero(~first)
    before[later] = step(start[later], total[later - 1])
    memory[words] = step(start, total)  # of equal words the last is stored
    return before


def _compare_exchange(
    memory: Values, words: Ids, first: NDArray[np.bool_], expected: Values, values: Values
) -> Values:
    """Only what is stored changes what others see: a round for each store to a word."""
    before = np.empty_like(values)
    segment = np.cumsum(first) - 1
    waiting = np.arange(words.size)
    while waiting.size:
        now = memory[words[waiting]]
        before[waiting] = now
        stores = waiting[expected[waiting] == now]
        earliest = np.full(words.size, words.size)
        np.minimum.at(earliest, segment[stores], stores)
        first_stores = earliest[earliest < words.size]
        memory[words[first_stores]] = values[first_stores]
        waiting = waiting[waiting > earliest[segment[waiting]]]
    return before
