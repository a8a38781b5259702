"""The machine of the simulator: registers, masks and control flow of many groups, in NumPy.

A value is an array that broadcasts to (groups, workgroup): constants and launch parameters have no
axes, group ids one column, thread ids one row; a chunk has four words in front. Divergent control
flow is a mask over the same two axes. What is no arithmetic is a rule of a `Capability`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from centella.errors import SimulationError
from centella.host.interrupts import GRACE, checkpoint
from centella.lang.arithmetic import TYPED, Array
from centella.lang.ir import FROM_90, HOPPER, SUBGROUP
from centella.lang.structure import OPENS
from centella.simulator.launch import LEAVES, Region, SimulatedLaunch
from centella.simulator.race_check import Ids, Mask, RaceCheck

COLLECTIVE = frozenset({"barrier", "grid_barrier", "workgroup_uniform", "ldmatrix", "mma"}) | (
    (SUBGROUP | FROM_90 | HOPPER) - LEAVES
)
MOST_ITERATIONS = 1 << 20
DONE = object()  # what `next` of an iterator that is over gives
UNDEFINED = 0x7FC0DEAD  # shared memory before the first store: a NaN that is easy to recognise

Rule = Callable[["Machine", int], None]
Wait = Callable[["Machine", int], Iterator[None]]
NewCheck = Callable[[int, int, Mask], RaceCheck]  # of words and threads of a group, what is known


def over(x: Array, shape: tuple[int, ...]) -> Array:
    """x along these axes: as `np.broadcast_to`, which takes longer than to copy so few elements."""
    if x.shape == shape:
        return x
    out = np.empty(shape, x.dtype)
    out[...] = x
    return out


class Capability(Struct, frozen=True):
    """Statements that a machine can run: a rule each.

    `waits`: those that others run during; a role is named "role". `end` looks at what the groups
    leave behind.
    """

    rules: Mapping[str, Rule]
    waits: Mapping[str, Wait] = {}
    end: Callable[[Machine], None] | None = None


class Machine:
    """Groups of a launch that run together: registers, masks, control flow and memory."""

    def __init__(
        self, launch: SimulatedLaunch, first: int, count: int, race_check: NewCheck
    ) -> None:
        ir = launch.ir
        self.launch: SimulatedLaunch = launch
        self.ir = ir
        self.check: bool = launch.check
        self.first: int = first
        self.shape: tuple[int, int] = (count, ir.workgroup)
        ids = np.arange(first * ir.workgroup, (first + count) * ir.workgroup, dtype=np.int64)
        self.threads: Ids = ids.reshape(self.shape)
        self.epoch: Ids = np.zeros((count, 1), np.int64)
        self.values: list[Any] = launch.values(first, count)
        self.memory: dict[str, list[Region]] = {
            "global": launch.buffers, "shared": self._shared_arrays(count, race_check)
        }  # fmt: skip
        self.random: np.random.Generator = launch.random[first % ir.cluster]
        self.halved: bool = launch.order != "shuffled"
        self.rules: dict[str, Rule] = {"set": _set}
        self.waits: dict[str, Wait] = {}
        self.end_checks: list[Callable[[Machine], None]] = []
        self._accesses: dict[tuple[int, ...], tuple[Any, Ids, Ids]] = {}
        self.passed: int = 0  # waits that are over
        self.waits_at: int = 0  # the statement at which a thread waited last
        self._epoch_of_ids: Ids | None = None
        self._ids: dict[tuple[int, ...], tuple[Ids, Ids]] = {}
        self._here: Mask | None = None
        self.narrow(np.ones((1, 1), np.bool_))

    def _shared_arrays(self, count: int, race_check: NewCheck) -> list[Region]:
        regions = []
        for k, array in enumerate(self.ir.shared):
            total = count * array.words
            nobody = np.zeros(total, np.bool_)
            record = race_check(total, self.ir.workgroup, nobody) if self.check else None
            start = np.arange(0, total, array.words)[:, None] if count > 1 else None
            words = np.full(total, UNDEFINED, np.uint32)
            regions.append(Region(f"shared array {k}", words, array.words, start, record))
        return regions

    def use(self, *capabilities: Capability) -> None:
        """Take the capabilities that the kernel's statements need; of two rules the later holds."""
        for capability in capabilities:
            if self.launch.ops & (capability.rules.keys() | capability.waits.keys()):
                self.rules |= capability.rules
                self.waits |= capability.waits
                if capability.end is not None:
                    self.end_checks.append(capability.end)

    def steps(self) -> Iterator[None]:
        """Run the kernel; yields where all threads wait."""
        yield from self.run(0, len(self.ir.body))
        for end_check in self.end_checks:
            end_check(self)

    # -- what is reported -------------------------------------------------------------------------

    def stuck(self) -> SimulationError:
        """The error where nobody gets further."""
        text = "deadlock: nobody gets further than this wait"
        return self.fault(self.waits_at, self.first * self.ir.workgroup, text)

    def fault(self, index: int, thread: int, text: str, hint: str = "") -> SimulationError:
        """The error of a statement in a thread, numbered over the launch."""
        group, local = divmod(thread, self.ir.workgroup)
        where = f"thread {local} of group {group}, {self.ir.line_of(index)}"
        return SimulationError(f"kernel {self.ir.name!r}: {text} ({where}){hint}")

    def fault_here(self, index: int, text: str) -> SimulationError:
        """The error of a statement in the first active thread."""
        return self.fault(index, self.first_of(self.active)[1], text)

    def first_of(self, bad: Mask) -> tuple[int, int]:
        """Position of the first True among threads (or chunks of them), and its thread."""
        at = int(np.broadcast_to(bad, np.broadcast_shapes(bad.shape, self.shape)).argmax())
        return at, int(self.threads.flat[at % self.threads.size])

    @property
    def here(self) -> Mask:
        """The mask of running threads, one for each."""
        if self._here is None:
            self._here = over(self.active, self.shape)
        return self._here

    # -- registers --------------------------------------------------------------------------------

    def assign(self, register: int, new: Array) -> None:
        """Change a register, or the registers of a fragment, in the active threads."""
        self.values[register] = (
            new if self.full else np.where(self.active, new, self.values[register])
        )

    def ids(self, shape: tuple[int, ...]) -> tuple[Ids, Ids]:
        """Thread and epoch of accesses of this shape: computed once between two barriers."""
        if self._epoch_of_ids is not self.epoch:
            self._epoch_of_ids, self._ids, self._accesses = self.epoch, {}, {}
        if shape not in self._ids:
            threads, epochs = (over(x, shape).ravel() for x in (self.threads, self.epoch))
            self._ids[shape] = threads, epochs
        return self._ids[shape]

    def accesses(self, shape: tuple[int, ...]) -> tuple[Any, Ids, Ids]:
        """Which accesses of this shape active threads make, with their threads and epochs."""
        threads, epochs = self.ids(shape)
        if self.full:
            return slice(None), threads, epochs
        if shape not in self._accesses:
            here = over(self.active, shape).ravel().nonzero()[0]
            self._accesses[shape] = here, threads[here], epochs[here]
        return self._accesses[shape]

    # -- control flow -----------------------------------------------------------------------------

    def narrow(self, active: Mask) -> bool:
        """Set the mask of running threads; False when it is empty."""
        self.active: Mask = active
        self._accesses = {}
        self._here = None
        running = np.count_nonzero(active)  # several times as fast as `all` and `any`
        self.full: bool = running == active.size
        return bool(running)

    def run(self, start: int, stop: int) -> Iterator[None]:
        """Run statements; "shuffled": collective ones apart, in two halves of threads."""
        if self.halved:
            yield from self._pass(start, stop)
            return
        for low, high, meets in self._segments(start, stop):
            if meets:
                yield from self._pass(low, high)
            else:
                yield from self._halves(low, high)
            if not self.active.any():
                return

    def _segments(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Cut a range at the statements and blocks where threads of a group meet."""
        low = i = start
        while i < stop:
            role = self.ir.body[i][0] == "if" and self.ir.body[i][3] is not None
            end = self.beside(i)[1] - 1 if role else self._end_of(i)
            if any(s[0] in COLLECTIVE for s in self.ir.body[i : end + 1]):
                if low < i:
                    yield low, i, False
                yield i, end + 1, True
                low = end + 1
            i = end + 1
        if low < stop:
            yield low, stop, False

    def beside(self, start: int) -> tuple[list[int], int]:
        """The role at `start`, those that run beside it and what is computed between; the end."""
        statements, i = [], start
        while i < len(self.ir.body):
            op, _, _, attr = self.ir.body[i]
            if op not in self.launch.plain and op not in LEAVES and (op != "if" or attr is None):
                break
            statements.append(i)
            i = self._end_of(i) + 1
        return statements, i

    def _halves(self, start: int, stop: int) -> Iterator[None]:
        reached, left = self.active, np.zeros((1, 1), np.bool_)
        merged: dict[int, Array] = {}
        self.halved = True
        for half in (self.launch.half, ~self.launch.half):
            if not self.narrow(reached & half):
                continue
            yield from self._pass(start, stop)
            left = left | self.active
            for i in range(start, stop):
                value: Array | None = self.values[i]
                if value is not None and self.ir.body[i][0] not in LEAVES:
                    merged[i] = np.where(half, value, merged.get(i, value))
        for i, both in merged.items():
            self.values[i] = both
        self.halved = False
        self.narrow(left)

    def _pass(self, start: int, stop: int) -> Iterator[None]:
        values, body, plain = self.values, self.ir.body, self.launch.plain
        i = start
        while i < stop:
            op, type_, args, attr = body[i]
            if op in plain:  # most are
                values[i] = plain[op](*map(values.__getitem__, args))
                i += 1
                continue
            if op in LEAVES:
                i += 1
                continue
            if op in TYPED:
                values[i] = TYPED[op](type_, attr, *[values[a] for a in args])
            elif op == "if":
                if attr is not None:
                    yield from self.waits["role"](self, i)
                    i = self.beside(i)[1]
                    continue
                yield from self._if(i, values[args[0]])
            elif op in OPENS:
                yield from self._loop(i, [values[a] for a in args])
            elif op == "break_if":
                if not self.narrow(self.active & ~values[args[0]]):
                    return
            elif op in self.waits:
                yield from self.waits[op](self, i)
            else:
                self.rules[op](self, i)
            i = self._end_of(i) + 1

    def _end_of(self, index: int) -> int:
        """The last statement of what starts at `index`: itself, or the `end` of its block."""
        while index in self.launch.ends:
            index = self.launch.ends[index]
        return index

    def _if(self, index: int, condition: Mask) -> Iterator[None]:
        ends = self.launch.ends
        outer, middle = self.active, ends[index]
        if self.narrow(outer & condition):
            yield from self.run(index + 1, middle)
        if middle in ends and self.narrow(outer & ~condition):
            yield from self.run(middle + 1, ends[middle])
        self.narrow(outer)

    def _loop(self, index: int, bounds: Sequence[Array]) -> Iterator[None]:
        outer = live = self.active
        counter = bounds[0] if bounds else None
        rounds = 0
        while self.narrow(live if counter is None else live & (counter < bounds[1])):
            checkpoint(GRACE)
            if self.check and rounds == MOST_ITERATIONS:
                raise self.fault(index, self.first * self.ir.workgroup, f"{rounds} iterations")
            self.values[index] = counter
            yield from self.run(index + 1, self.launch.ends[index])
            live = self.active
            counter = None if counter is None else counter + bounds[2]
            rounds += 1
        self.narrow(outer)


def _set(machine: Machine, index: int) -> None:
    register, value = machine.ir.body[index][2]
    machine.assign(register, machine.values[value])
