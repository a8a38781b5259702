"""Loads and stores: each address is checked, each access is told to the race check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from centella.errors import SimulationError
from centella.lang.arithmetic import NUMPY
from centella.lang.ir import INDICES
from centella.simulator.launch import Region
from centella.simulator.machine import Capability, Machine, over
from centella.simulator.race_check import Fault, Ids, Mask, RaceCheck

CHUNK = np.arange(4)[:, None, None]  # the words of a chunk
Access = Callable[[Ids, Ids, Ids], Fault | None]


def addresses(machine: Machine, index: int, region: Region, width: int, operand: int = 0) -> Ids:
    """Where in `region.words` each thread's access lies; four words in front for a chunk.

    Threads that are not active have places in the region, too, but of no meaning.
    """
    op, _, args, _ = machine.ir.body[index]
    words: Ids = np.asarray(machine.values[args[operand]]).astype(np.int64)
    most = region.size // width
    if np.maximum.reduce(words, axis=None) >= most:  # as a rule of threads that are not active
        outside = (words >= most) & machine.active
        if np.count_nonzero(outside):
            raise _outside(machine, index, region, words, width)
        words = np.where(machine.active, words, 0)
    if machine.check and index in machine.ir.starts and operand == INDICES[op] - 1:
        _check_start(machine, index, region)
    if width == 4:
        words = words * 4 + CHUNK
    return words if region.start is None else words + region.start


def _outside(
    machine: Machine, index: int, region: Region, words: Ids, width: int
) -> SimulationError:
    """The error of the first thread that reaches past the region."""
    if width == 4:
        words = words * 4 + CHUNK
    outside = (words >= region.size) & machine.active
    outside = np.broadcast_to(outside, (width, *machine.shape))
    at, thread = machine.first_of(outside)
    word = np.broadcast_to(words, outside.shape).flat[at]
    text = f"{region.name} word {word} is out of bounds, it has {region.size} words"
    return machine.fault(index, thread, text, _hint(machine, region))


def _hint(machine: Machine, region: Region) -> str:
    """How large the tensor is, and how an access is kept inside of it."""
    dtypes = {repr(arg.name): arg.dtype for arg in machine.ir.args}
    if region.name not in dtypes:
        return ""
    size = region.size * dtypes[region.name].per_word
    return (
        f"; {region.name} has room for {size} elements of {dtypes[region.name].name}, padding "
        f"included: guard the access by how many it has, as in `with lang.if_(i < n):`"
    )


def _check_start(machine: Machine, index: int, region: Region) -> None:
    """The tracer shifts an element index to that of its chunk: the low bits must be zero."""
    start, multiple = machine.ir.starts[index]
    element = machine.values[start]
    odd = element & (multiple - 1) if multiple & (multiple - 1) == 0 else element % multiple
    beside = machine.active & (odd != 0)
    if np.count_nonzero(beside):
        at, thread = machine.first_of(np.broadcast_to(beside, machine.shape))
        element = np.broadcast_to(element, machine.shape).flat[at]
        text = f"{region.name} element {element} is not a multiple of {multiple}"
        raise machine.fault(index, thread, text)


def note(
    machine: Machine, index: int, region: Region, words: Ids, access: Access,
    which: Mask | None = None,
) -> None:  # fmt: skip
    """Tell the race check which thread accesses which word, all active ones or `which` of them."""
    if words.shape[-2:] != machine.shape:
        words = over(words, np.broadcast_shapes(words.shape, machine.shape))
    active, threads, epochs = machine.accesses(words.shape)
    chosen = None if which is None else over(which, words.shape).ravel()[active]
    words = words.ravel()[active]
    if chosen is not None:
        words, threads, epochs = words[chosen], threads[chosen], epochs[chosen]
    fault = access(words, threads, epochs)
    if fault is not None:
        at, text = fault
        word = words[at] % region.size
        raise machine.fault(index, int(threads[at]), f"{region.name} word {word}: {text}")


def turns(machine: Machine, count: int) -> Ids | slice:
    """The order in which threads come to a word that several of them change."""
    if machine.launch.order == "shuffled":
        return machine.random.permutation(count)
    return slice(None, None, -1 if machine.launch.order == "reverse" else 1)


def _load(space: str, width: int, machine: Machine, index: int) -> None:
    _, type_, _, position = machine.ir.body[index]
    region = machine.memory[space][position]
    words = addresses(machine, index, region, width)
    if region.race_check:
        note(machine, index, region, words, region.race_check.read)
    machine.values[index] = region.words.take(words).view(NUMPY[type_[:3]])


def _store(space: str, width: int, machine: Machine, index: int) -> None:
    _, _, args, position = machine.ir.body[index]
    region = machine.memory[space][position]
    words = addresses(machine, index, region, width)
    if isinstance(region.race_check, RaceCheck):
        note(machine, index, region, words, region.race_check.write)
    lanes = [machine.values[a].view(np.uint32) for a in args[1:]]
    shape = np.broadcast(machine.active, *lanes).shape
    bits = np.empty((width, *shape), np.uint32)
    for at, lane in enumerate(lanes):
        bits[at] = lane
    shape = np.broadcast(words, bits).shape
    words, bits = (over(x, shape).ravel() for x in (words, bits))
    if not machine.full:
        active = over(machine.active, shape).ravel().nonzero()[0]
        words, bits = words[active], bits[active]
    turn = turns(machine, words.size)
    region.words[words[turn]] = bits[turn]


def _prefetch(machine: Machine, index: int) -> None:
    """Nothing but the check of where it is: no value is read, so nothing is told."""
    addresses(machine, index, machine.memory["global"][machine.ir.body[index][3]], 1)


MEMORY = Capability({
    f"{prefix}{op}{width}": partial(rule, space, int(width or 1))
    for prefix, space in (("", "global"), ("s", "shared"))
    for op, rule in (("load", _load), ("store", _store))
    for width in ("", "4")
} | {"prefetch": _prefetch})  # fmt: skip
