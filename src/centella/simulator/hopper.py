"""The simulator's machine with what sm_90a alone has: roles, barriers, boxes.

A group runs by itself. The warpgroups of its roles run by turns, each until it waits for a barrier
whose phase is not over; a round in which none gets further is a deadlock, and is reported. So a
producer runs as far ahead as its barriers let it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from centella.errors import SimulationError
from centella.simulator.bulk import Boxes, Phases, Words
from centella.simulator.factors import WARPGROUP
from centella.simulator.machine import UNDEFINED
from centella.simulator.race_check import Ids, Mask, Shadow
from centella.simulator.warpgroups import CHUNK, WarpgroupMachine

DONE = object()


class Strand(NamedTuple):
    """A warpgroup in a role: its threads, what they have computed, what they still have to do."""

    mask: Mask
    values: list[Any]
    rest: Iterator[None]


class HopperMachine(WarpgroupMachine):
    """One launch, group by group, of a kernel for sm_90a."""

    values: list[Any]
    epoch: Ids

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.roles["if"], self.waits["mbar_wait"] = self._roles, self._await
        self.effects.update({
            "mbar_init": self._init, "mbar_fence": self._nothing, "mbar_arrive": self._arrive,
            "mbar_expect": self._arrive, "tma_load": self._tma_load, "tma_store": self._tma_store,
            "tma_store_commit": self._store_commit, "tma_store_wait": self._store_wait,
            "async_fence": self._async_fence,
        })  # fmt: skip

    def bind(
        self, buffers: Sequence[Words], params: Words, initialised: Sequence[Mask | None] | None
    ) -> None:
        """Take the launch's buffers and parameters.

        Raises:
            SimulationError: the driver would make no tensor map with them.
        """
        super().bind(buffers, params, initialised)
        for made in self.ir.maps:
            if text := made.refused(params, self.ir.args[made.argument].dtype.itemsize):
                raise SimulationError(f"kernel {self.ir.name!r}: {text}")

    def begin(self, first: int, count: int) -> None:
        """Take group `first`."""
        assert count == 1, "roles run group by group"
        self.passed: int = 0  # waits
        self.phases: dict[int, Phases] = {}
        # Groups of stores by thread; the last one is open.
        self.stores: dict[int, list[list[tuple[int, Ids]]]] = {}
        super().begin(first, count)

    def end(self) -> None:
        """The group ends, with nothing under way in its shared memory."""
        left = (*self.stores.values(), *self.products.values())
        if any(any(groups) for groups in left):
            text = "a group ends while a store or a wgmma reads its memory"
            raise self._bad(len(self.ir.body) - 1, text)
        if any(box for p in self.phases.values() for box in (*p.boxes, *p.ready)):
            text = "a group ends while a box is on its way to its memory"
            raise self._bad(len(self.ir.body) - 1, text)

    def _shadow(self, words: int, known: Mask) -> Shadow:
        return Boxes(words, self.ir.workgroup, known)

    # -- roles ------------------------------------------------------------------------------------

    def _roles(self, start: int, stop: int) -> Generator[None, None, int]:
        """Run roles beside each other; the statement behind them. Yields where all of them wait."""
        outer = self.active
        beside, behind = self._beside(start, stop)
        for n in beside:
            op, _, args, _ = self.ir.body[n]
            if op in self.plain:
                self.values[n] = self.plain[op](*[self.values[a] for a in args])
        live = [
            Strand(mask, list(self.values), self._run(index + 1, self.ends[index]))
            for index in beside
            if self.ir.body[index][0] == "if"
            for mask in self._warpgroups(outer & self.values[self.ir.body[index][2][0]])
        ]
        own, strands = self.values, tuple(live)
        while live:
            before, waiting = self.passed, []
            for strand in live:
                self._narrow(strand.mask)
                self.values = strand.values
                if next(strand.rest, DONE) is not DONE:
                    waiting.append(strand)
            if len(waiting) == len(live) and self.passed == before:
                yield
            live = waiting
        self.values = own
        for n, (op, *_) in enumerate(self.ir.body[:start]):
            if op in ("var", "fragment"):
                for strand in strands:
                    own[n] = np.where(strand.mask, strand.values[n], own[n])
        self._narrow(outer)
        return behind

    def _warpgroups(self, mask: Mask) -> Iterator[Mask]:
        """The threads of each warpgroup, of those there are."""
        number = np.arange(self.ir.workgroup)[None] // WARPGROUP
        for group in np.unique(number):
            mine = mask & (number == group)
            if mine.any():
                yield mine

    def _await(self, index: int) -> Iterator[None]:
        _, _, _, array = self.ir.body[index]
        active = self.active
        phases = self.phases_of(array)
        parity, which = self._mine(index, 1)[0], self._barriers(index, 0, array)
        for barrier in sorted(set(which)):
            if not phases.needed[barrier]:
                raise self._bad(index, "a barrier that was not initialised")
            while not phases.is_over(barrier, parity):
                self.waits_at = index
                yield
                self._narrow(active)
            self.passed += 1
            # What arrivals come after is seen by who has waited: a later epoch.
            self.epoch = np.where(
                self.active, np.maximum(self.epoch, phases.epochs[barrier] + 1), self.epoch
            )
            for position, words, bits in phases.landed(barrier):
                region = self.memory["shared"][position]
                region.words[words] = bits
                if isinstance(region.shadow, Boxes):
                    region.shadow.came(words)

    def _mine(self, index: int, operand: int) -> list[int]:
        """The values of an operand in the active threads."""
        value = np.broadcast_to(self.values[self.ir.body[index][2][operand]], self.shape)
        return [int(v) for v in value[np.broadcast_to(self.active, self.shape)]]

    def _barriers(self, index: int, operand: int, array: int) -> list[int]:
        """The barriers of an array that an operand names in the active threads."""
        which, most = self._mine(index, operand), self.ir.shared[array].words // 2
        if max(which) >= most:
            raise self._bad(index, f"shared array {array} has {most} barriers, got {max(which)}")
        return which

    def _nothing(self, index: int) -> None:
        """What is done as soon as it is said."""

    # -- barriers ---------------------------------------------------------------------------------

    def phases_of(self, array: int) -> Phases:
        """The barriers of a shared array."""
        if array not in self.phases:
            self.phases[array] = Phases(self.ir.shared[array].words // 2)
        return self.phases[array]

    def _init(self, index: int) -> None:
        array, arrivals = self.ir.body[index][3]
        for which in self._barriers(index, 0, array):
            self._say(index, self.phases_of(array).init(which, arrivals))

    def _arrive(self, index: int) -> None:
        op, _, _, array = self.ir.body[index]
        which = self._barriers(index, 0, array)
        nbytes = self._mine(index, 1) if op == "mbar_expect" else [0] * len(which)
        epochs = np.broadcast_to(self.epoch, self.shape)[np.broadcast_to(self.active, self.shape)]
        for barrier, n, epoch in zip(which, nbytes, epochs, strict=True):
            self._say(index, self.phases_of(array).arrive(barrier, n, int(epoch)))

    def _say(self, index: int, text: str) -> None:
        if text:
            raise self._bad(index, text)

    # -- boxes ------------------------------------------------------------------------------------

    def _box(self, index: int, first: int, operand: int, position: int) -> tuple[Ids, Ids, Mask]:
        """Words of a box in shared memory, in its argument, and which of them are inside of it.

        Words have two elements of 16 bits; of one that is half inside the rest is zeros.
        """
        made = self.ir.maps[position]
        at = [self._mine(index, operand + d)[0] for d in range(len(made.box))]
        params = [int(p) for p in self.params]
        columns, rows = made.box[:2]
        x = at[0] + np.arange(columns)
        y = at[1] + np.arange(rows)[:, None]
        inside = (x < params[made.extents[0]]) & (y < params[made.extents[1]])
        element = params[made.offset] + x + y * params[made.strides[0]]
        for d in range(2, len(made.box)):
            inside &= at[d] < params[made.extents[d]]
            element = element + at[d] * params[made.strides[d - 1]]
        chunks = first + np.arange(rows * columns // 8)
        chunks = chunks ^ ((chunks >> 3) & (made.swizzle // CHUNK - 1))
        words = (chunks[:, None] * 4 + np.arange(4)).reshape(-1)
        return words, element.reshape(-1), inside.reshape(-1)

    def _tma_load(self, index: int) -> None:
        self._boxes(index, 2, [[self] for _ in self._mine(index, 0)])

    def _boxes(self, index: int, at: int, every: Sequence[Sequence[HopperMachine]]) -> None:
        """Have boxes on their way: of each active thread to groups, at the same place in each.

        Args:
            at: the first operand that is a coordinate.
        """
        _, _, _, (array, barriers, position) = self.ir.body[index]
        source = self.memory["global"][self.ir.maps[position].argument]
        signals = self._barriers(index, 1, barriers)
        for first, barrier, groups in zip(self._mine(index, 0), signals, every, strict=True):
            words, element, inside = self._box(index, first, at, position)
            self._inside(index, array, words)
            halves = np.zeros(element.size, np.uint16)
            halves[inside] = source.words.view(np.uint16)[element[inside]]
            if self.check and source.shadow:
                read = np.unique(element[inside] // 2)
                unknown = ~source.shadow.known[read]
                if unknown.any():
                    word = read[int(unknown.argmax())]
                    raise self._bad(index, f"{source.name} word {word}: read, but nobody wrote it")
            for group in groups:
                region = group.memory["shared"][array]
                if isinstance(region.shadow, Boxes):
                    self._tell(index, array, words, region.shadow.come(words))
                region.words[words] = UNDEFINED
                box = array, words, halves.view(np.uint32)
                self._say(index, group.phases_of(barriers).copy(barrier, box))

    def _tma_store(self, index: int) -> None:
        _, _, _, (array, position) = self.ir.body[index]
        region = self.memory["shared"][array]
        target = self.memory["global"][self.ir.maps[position].argument]
        threads = np.flatnonzero(np.broadcast_to(self.active, self.shape)[0])
        for thread, first in zip(threads, self._mine(index, 0), strict=True):
            words, element, inside = self._box(index, first, 1, position)
            self._inside(index, array, words)
            if isinstance(region.shadow, Boxes):
                who = self._who(words, int(thread))
                self._tell(index, array, words, region.shadow.start_reading(words, *who))
            halves = np.ascontiguousarray(region.words[words]).view(np.uint16)
            target.words.view(np.uint16)[element[inside]] = halves[inside]
            if isinstance(target.shadow, Shadow):
                # The engine writes elements: what shares a word with them stays as it is.
                written = np.unique(element[inside] // 2)
                target.shadow.known[written] = target.shadow.written[written] = True
            self.stores.setdefault(int(thread), [[]])[-1].append((array, words))

    def _store_commit(self, index: int) -> None:
        for thread in np.flatnonzero(np.broadcast_to(self.active, self.shape)[0]):
            self.stores.setdefault(int(thread), [[]]).append([])

    def _store_wait(self, index: int) -> None:
        for thread in np.flatnonzero(np.broadcast_to(self.active, self.shape)[0]):
            groups = self.stores.setdefault(int(thread), [[]])
            self._retire(groups, self.ir.body[index][3], int(thread))

    def _async_fence(self, index: int) -> None:
        active = np.broadcast_to(self.active, self.shape)[0]
        for region in self.memory["shared"]:
            if isinstance(region.shadow, Boxes):
                region.shadow.fence(active)
