"""The machine of the simulator: registers, masks and memory of many groups, in NumPy.

A value is an array that broadcasts to (groups, workgroup): constants and launch parameters have no
axes, group ids one column, thread ids one row; a chunk has four words in front. Divergent control
flow is a mask over the same two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from centella.errors import SimulationError
from centella.host.interrupts import GRACE, checkpoint
from centella.lang.arithmetic import FUSED, NUMPY, PLAIN, TYPED, UNFUSED, Array
from centella.lang.ir import FROM_90, HOPPER, INDICES, OPENS, SUBGROUP, KernelIR, matching
from centella.simulator.race_check import Buffer, Fault, Ids, Known, Mask, Shadow

Words = NDArray[np.uint32]
Rule = Callable[[Ids, Ids, Ids], Fault | None]
Order = Literal["forward", "reverse", "shuffled"]

LEAVES = frozenset(
    "const param thread group groups lane subgroup_size grid warpgroup cluster_rank".split()
)
MEETINGS = frozenset({"barrier", "workgroup_uniform", "ldmatrix", "mma"}) | (
    (SUBGROUP | FROM_90 | HOPPER) - LEAVES
)
REGISTERS: dict[str, Callable[..., Any]] = dict.fromkeys(("var", "get"), lambda x: x)
MOST_ITERATIONS = 1 << 20
UNDEFINED = 0x7FC0DEAD  # shared memory before the first store: a NaN that is easy to recognise


class Region(Struct, frozen=True):
    """Words that threads address: a buffer, or a shared array of every group, end to end."""

    name: str
    words: Words
    size: int
    start: Ids | int
    shadow: Known | None


class Machine:
    """One launch: registers, masks and memory of the groups that run together."""

    def __init__(
        self, ir: KernelIR, groups: int, check: bool, order: Order, subgroup: int, fused: bool
    ) -> None:
        self.ir: KernelIR = ir
        self.launched: int = groups
        self.resident: int = groups  # that run at a time
        self.check: bool = check
        self.order: Order = order
        self.subgroup: int = subgroup
        self.random: np.random.Generator = np.random.default_rng(0)
        self.half: Mask = self.random.permutation(ir.workgroup)[None] < (ir.workgroup + 1) // 2
        self.halved: bool = order != "shuffled"
        self.ends: dict[int, int] = matching(ir.body)
        self.plain: dict[str, Callable[..., Any]] = PLAIN | (FUSED if fused else UNFUSED)
        self.plain |= REGISTERS
        self.leaves: list[Any] = [None] * len(ir.body)
        self.values: list[Any] = self.leaves
        self._of: Ids | None = None  # the epochs that `_made` is of
        self._made: dict[tuple[int, ...], tuple[Ids, Ids]] = {}
        self.memory: dict[str, list[Region]] = {}
        # Of kernels for Hopper, whose machine fills them: what runs roles up to a statement and
        # gives the one behind them, and what others run during.
        self.roles: dict[str, Callable[[int, int], Generator[None, None, int]]] = {}
        self.waits: dict[str, Callable[[int], Iterator[None]]] = {}
        self.waits_at: int = 0  # the statement at which somebody waited last
        self.effects: dict[str, Callable[[int], None]] = {
            f"{short}{op}{width}": partial(effect, place, int(width or 1))
            for short, place in (("", "global"), ("s", "shared"))
            for op, effect in (("load", self._load), ("store", self._store))
            for width in ("", "4")
        }
        self.effects["set"] = self._set

    def bind(
        self, buffers: Sequence[Words], params: Words, initialised: Sequence[Mask | None] | None
    ) -> None:
        """Take the launch's buffers and parameters."""
        known = initialised or [None] * len(buffers)
        self.memory["global"] = []
        for arg, words, mask in zip(self.ir.args, buffers, known, strict=True):
            shadow: Known | None = None
            if self.check and arg.writable:
                given = np.full(words.size, arg.mode == "inout") if mask is None else mask
                shadow = Buffer(words.size, self.ir.workgroup, given)
            elif self.check and mask is not None:
                shadow = Known(mask)
            region = Region(repr(arg.name), words, words.size, 0, shadow)
            self.memory["global"].append(region)
        self.params: Words = params
        bits = [p.view(NUMPY[d.type]) for p, d in zip(params, self.ir.params, strict=True)]
        threads = np.arange(self.ir.workgroup, dtype=np.uint32)[None]
        for i, (op, type_, _, attr) in enumerate(self.ir.body):
            if op == "const":
                self.leaves[i] = NUMPY[type_](attr)
            elif op == "param":
                self.leaves[i] = bits[attr]
            elif op in ("thread", "lane"):
                self.leaves[i] = threads if op == "thread" else threads % self.subgroup
            elif op in ("groups", "subgroup_size"):
                self.leaves[i] = np.uint32(self.launched if op == "groups" else self.subgroup)
            elif op == "grid":
                self.leaves[i] = np.uint32(self.resident)
            elif op == "warpgroup":
                self.leaves[i] = threads // 128

    def run(self, first: int, count: int) -> None:
        """Run `count` groups from `first` on."""
        self.begin(first, count)
        for _ in self.steps():
            raise self.stuck()

    def stuck(self) -> SimulationError:
        """What there is to say when nobody gets further."""
        text = "deadlock: nobody gets further than this wait"
        return self._fault(self.waits_at, self.first * self.ir.workgroup, text)

    def steps(self) -> Iterator[None]:
        """Run the groups that were taken; yields where they wait."""
        yield from self._run(0, len(self.ir.body))
        self.end()

    def end(self) -> None:
        """Look at what groups leave behind."""

    def begin(self, first: int, count: int) -> None:
        """Take `count` groups from `first` on: registers and shared memory of their own."""
        ir = self.ir
        self.first: int = first
        self.shape: tuple[int, int] = (count, ir.workgroup)
        ids = np.arange(first * ir.workgroup, (first + count) * ir.workgroup, dtype=np.int64)
        self.threads: Ids = ids.reshape(self.shape)
        self.epoch: Ids = np.zeros((count, 1), np.int64)
        groups = np.arange(first, first + count, dtype=np.uint32)[:, None]
        given = {"group": groups, "cluster_rank": groups % np.uint32(ir.cluster)}
        self.values = [given.get(s[0], v) for s, v in zip(ir.body, self.leaves, strict=True)]
        self.memory["shared"] = []
        for k, array in enumerate(ir.shared):
            total = count * array.words
            nobody = np.zeros(total, np.bool_)
            shadow = self._shadow(total, nobody) if self.check else None
            start = np.arange(0, total, array.words, dtype=np.int64)[:, None]
            words = np.full(total, UNDEFINED, np.uint32)
            region = Region(f"shared array {k}", words, array.words, start, shadow)
            self.memory["shared"].append(region)
        self._narrow(np.ones((1, 1), np.bool_))

    def _shadow(self, words: int, known: Mask) -> Shadow:
        """What is remembered of a shared array."""
        return Shadow(words, self.ir.workgroup, known)

    def _fault(self, index: int, thread: int, text: str) -> SimulationError:
        group, local = divmod(thread, self.ir.workgroup)
        where = f"thread {local} of group {group}, {self.ir.line_of(index)}"
        return SimulationError(f"kernel {self.ir.name!r}: {text} ({where})")

    def _first(self, bad: Mask) -> tuple[int, int]:
        """Position of the first True among threads (or chunks of them), and its thread."""
        at = int(np.broadcast_to(bad, np.broadcast_shapes(bad.shape, self.shape)).argmax())
        return at, int(self.threads.flat[at % self.threads.size])

    # -- control flow -----------------------------------------------------------------------------

    def _narrow(self, active: Mask) -> bool:
        """Set the mask of running threads; False when it is empty."""
        self.active: Mask = active
        running = np.count_nonzero(active)  # several times as fast as `all` and `any`
        self.full: bool = running == active.size
        return bool(running)

    def _run(self, start: int, stop: int) -> Iterator[None]:
        """Run statements, "shuffled" in two halves of threads between meetings; yields to wait."""
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
            end = self._beside(i, stop)[1] - 1 if role else self._end_of(i)
            if any(s[0] in MEETINGS for s in self.ir.body[i : end + 1]):
                if low < i:
                    yield low, i, False
                yield i, end + 1, True
                low = end + 1
            i = end + 1
        if low < stop:
            yield low, stop, False

    def _beside(self, start: int, stop: int) -> tuple[list[int], int]:
        """The role at `start`, those that run beside it and what is computed between; the end."""
        found, i = [], start
        while i < stop:
            op, _, _, attr = self.ir.body[i]
            if op not in self.plain and op not in LEAVES and (op != "if" or attr is None):
                break
            found.append(i)
            i = self._end_of(i) + 1
        return found, i

    def _halves(self, start: int, stop: int) -> Iterator[None]:
        reached, left = self.active, np.zeros((1, 1), np.bool_)
        kept: dict[int, Array] = {}
        self.halved = True
        for half in (self.half, ~self.half):
            if not self._narrow(reached & half):
                continue
            yield from self._pass(start, stop)
            left = left | self.active
            for i in range(start, stop):
                value: Array | None = self.values[i]
                if value is not None and self.ir.body[i][0] not in LEAVES:
                    kept[i] = np.where(half, value, kept.get(i, value))
        for i, both in kept.items():
            self.values[i] = both
        self.halved = False
        self._narrow(left)

    def _pass(self, start: int, stop: int) -> Iterator[None]:
        values, body, plain = self.values, self.ir.body, self.plain
        i = start
        while i < stop:
            op, type_, args, attr = body[i]
            if op in plain:
                values[i] = plain[op](*[values[a] for a in args])
            elif op in TYPED:
                values[i] = TYPED[op](type_, attr, values[args[0]])
            elif op == "if":
                if attr is not None:
                    i = yield from self.roles[op](i, stop)
                    continue
                yield from self._if(i, values[args[0]])
            elif op in OPENS:
                yield from self._loop(i, [values[a] for a in args])
            elif op == "break_if":
                if not self._narrow(self.active & ~values[args[0]]):
                    return
            elif op in self.waits:
                yield from self.waits[op](i)
            elif op not in LEAVES:
                self.effects[op](i)
            i = self._end_of(i) + 1

    def _end_of(self, index: int) -> int:
        """The last statement of what starts at `index`: itself, or the `end` of its block."""
        while index in self.ends:
            index = self.ends[index]
        return index

    def _if(self, index: int, condition: Mask) -> Iterator[None]:
        outer, middle = self.active, self.ends[index]
        if self._narrow(outer & condition):
            yield from self._run(index + 1, middle)
        if middle in self.ends and self._narrow(outer & ~condition):
            yield from self._run(middle + 1, self.ends[middle])
        self._narrow(outer)

    def _loop(self, index: int, bounds: list[Array]) -> Iterator[None]:
        outer = live = self.active
        counter = bounds[0] if bounds else None
        rounds = 0
        while self._narrow(live if counter is None else live & (counter < bounds[1])):
            checkpoint(GRACE)
            if self.check and rounds == MOST_ITERATIONS:
                raise self._fault(index, self.first * self.ir.workgroup, f"{rounds} iterations")
            self.values[index] = counter
            yield from self._run(index + 1, self.ends[index])
            live = self.active
            counter = None if counter is None else counter + bounds[2]
            rounds += 1
        self._narrow(outer)

    # -- memory -----------------------------------------------------------------------------------

    def _words(self, index: int, region: Region, width: int, operand: int = 0) -> Ids:
        """Where in `region.words` each thread's access lies; four words in front for a chunk."""
        op, _, args, _ = self.ir.body[index]
        words: Ids = np.asarray(self.values[args[operand]]).astype(np.int64)
        if not self.full:
            words = np.where(self.active, words, 0)
        if width == 4:
            words = words * 4 + np.arange(4)[:, None, None]
        if np.maximum.reduce(words, axis=None) >= region.size:
            outside = np.broadcast_to((words >= region.size) & self.active, (width, *self.shape))
            at, thread = self._first(outside)
            word = np.broadcast_to(words, outside.shape).flat[at]
            text = f"{region.name} word {word} is out of bounds, it has {region.size} words"
            raise self._fault(index, thread, text)
        if self.check and index in self.ir.starts and operand == INDICES[op] - 1:
            self._check_start(index, region)
        return words + region.start

    def _check_start(self, index: int, region: Region) -> None:
        """The tracer shifts an element index to that of its chunk: the low bits must be zero."""
        start, multiple = self.ir.starts[index]
        element = self.values[start]
        odd = element & (multiple - 1) if multiple & (multiple - 1) == 0 else element % multiple
        beside = self.active & (odd != 0)
        if np.count_nonzero(beside):
            at, thread = self._first(np.broadcast_to(beside, self.shape))
            element = np.broadcast_to(element, self.shape).flat[at]
            text = f"{region.name} element {element} is not a multiple of {multiple}"
            raise self._fault(index, thread, text)

    def _note(
        self, index: int, region: Region, words: Ids, rule: Rule, which: Mask | None = None
    ) -> None:
        """Tell a shadow which thread accesses which word, all active ones or `which` of them."""
        shape = np.broadcast_shapes(words.shape, self.shape)
        threads, epochs = self._accesses(shape)
        words = (words if words.shape == shape else np.broadcast_to(words, shape)).ravel()
        if which is not None or not self.full:
            here = np.broadcast_to(self.active if which is None else self.active & which, shape)
            active = np.flatnonzero(here)
            words, threads, epochs = words[active], threads[active], epochs[active]
        fault = rule(words, threads, epochs)
        if fault is not None:
            at, text = fault
            word = words[at] % region.size
            raise self._fault(index, int(threads[at]), f"{region.name} word {word}: {text}")

    def _accesses(self, shape: tuple[int, ...]) -> tuple[Ids, Ids]:
        """Thread and epoch of each of these accesses: made once between two barriers."""
        if self._of is not self.epoch:
            self._of, self._made = self.epoch, {}
        if shape not in self._made:
            threads, epochs = (
                np.broadcast_to(x, shape).ravel() for x in (self.threads, self.epoch)
            )
            self._made[shape] = threads, epochs
        return self._made[shape]

    def _load(self, place: str, width: int, index: int) -> None:
        _, type_, _, position = self.ir.body[index]
        region = self.memory[place][position]
        words = self._words(index, region, width)
        if region.shadow:
            self._note(index, region, words, region.shadow.read)
        self.values[index] = region.words.take(words).view(NUMPY[type_[:3]])

    def _store(self, place: str, width: int, index: int) -> None:
        _, _, args, position = self.ir.body[index]
        region = self.memory[place][position]
        words = self._words(index, region, width)
        if isinstance(region.shadow, Shadow):
            self._note(index, region, words, region.shadow.write)
        lanes = np.broadcast_arrays(self.active, *[self.values[a] for a in args[1:]])[1:]
        bits = np.stack([np.ascontiguousarray(v).view(np.uint32) for v in lanes])
        words, bits, active = np.broadcast_arrays(words, bits, self.active)
        words, bits = words[active], bits[active]
        turn = self._turn(words.size)
        region.words[words[turn]] = bits[turn]

    def _turn(self, count: int) -> Ids | slice:
        """The order in which threads come to a word that several of them change."""
        if self.order == "shuffled":
            return self.random.permutation(count)
        return slice(None, None, -1 if self.order == "reverse" else 1)

    def _set(self, index: int) -> None:
        register, value = self.ir.body[index][2]
        new = self.values[value]
        self.values[register] = (
            new if self.full else np.where(self.active, new, self.values[register])
        )
