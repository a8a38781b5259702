"""Rounds of a kernel's loops: how many one thread runs at most, as a launch's parameters say.

Some drivers stop every loop of a thread after so many rounds, summed over loops and nesting
(`Caps.max_loop_rounds`). A loop whose body is written n times takes a round for n turns, so a
kernel is kept below such a bound by repeating bodies, where a launch needs it.

The turns of a loop follow from an interval for each integer: of constants, launch parameters, ids
and arithmetic on these, which is taken not to wrap. What comes from memory has no end; a loop that
has none either, on the host, is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from msgspec import Struct

from centella.lang.ir import KernelIR
from centella.lang.structure import Statement

MAX_STATEMENTS = 6000  # of a portable kernel
RANGES = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1), "bool": (0, 1)}

End = int | float  # an infinity: unknown
Interval = tuple[End, End]
Copies = tuple[tuple[int, int], ...]  # pairs of a loop's statement and how often its body stands
UNKNOWN: Interval = (-math.inf, math.inf)
NONE: Mapping[int, int] = MappingProxyType({})


class Loop(Struct, frozen=True):
    """A loop: its statement, how many statements it has, the loops directly inside."""

    index: int
    statements: int
    inner: tuple[Loop, ...]


class Loops(Struct, frozen=True):
    """The outermost loops of a kernel, and what its variables are set to."""

    outer: tuple[Loop, ...]
    values: dict[int, tuple[int, ...]]


def copies_within(ir: KernelIR, words: Sequence[int], groups: int, most: int) -> Copies | None:
    """How often bodies of loops stand in the text so that no thread runs over `most` rounds.

    Args:
        words: the launch's parameters, as raw words.

    Returns:
        Powers of 2; () where every body may stand once; None where too many would have to be
        written.
    """
    loops = loops_of(ir).outer
    turns = turns_of(ir, words, groups)
    copies = dict.fromkeys(turns, 1)
    others = len(ir.body) - _statements(loops, copies)
    while (rounds := rounds_of(loops, turns, copies)) > most:
        worth: list[tuple[float, int]] = []
        size = _statements(loops, copies)
        for index in copies:
            more = {**copies, index: 2 * copies[index]}
            growth = _statements(loops, more) - size
            if others + size + growth <= MAX_STATEMENTS:
                worth.append(((rounds - rounds_of(loops, turns, more)) / growth, index))
        best, index = max(worth, default=(0.0, 0))
        if best <= 0:
            return None
        copies[index] *= 2
    return tuple((index, n) for index, n in copies.items() if n > 1)


def rounds_of(
    loops: Sequence[Loop], turns: Mapping[int, End], copies: Mapping[int, int] = NONE
) -> int:
    """Rounds of a thread, the last one of a loop, which finds that it has ended, included."""
    total = 0
    for loop in loops:
        each = turns[loop.index]
        known = each < math.inf
        count = int(each) if known else 0
        total += count // copies.get(loop.index, 1) + 1
        # Of a loop that the host cannot count, one turn may pass the bound by those inside it.
        total += (count if known else 1) * rounds_of(loop.inner, turns, copies)
    return total


def _statements(loops: Sequence[Loop], copies: Mapping[int, int]) -> int:
    """Statements of loops as they are written."""
    total = 0
    for loop in loops:
        once = loop.statements - sum(inner.statements for inner in loop.inner)
        total += copies[loop.index] * (once + _statements(loop.inner, copies))
    return total


@lru_cache(maxsize=1024)
def loops_of(ir: KernelIR) -> Loops:
    """The loops of a kernel."""
    ends = ir.ends

    def between(first: int, last: int) -> tuple[Loop, ...]:
        loops: list[Loop] = []
        at = first
        while at < last:
            if ir.body[at][0] in ("for", "loop"):
                loops.append(Loop(at, ends[at] - at, between(at + 1, ends[at])))
                at = ends[at]
            at += 1
        return tuple(loops)

    values: dict[int, tuple[int, ...]] = {}
    for op, _, args, _ in ir.body:
        if op == "set":
            values[args[0]] = (*values.get(args[0], ()), args[1])
    return Loops(between(0, len(ir.body)), values)


def turns_of(ir: KernelIR, words: Sequence[int], groups: int) -> dict[int, End]:
    """Turns of each loop at most, in a launch; infinite where the host cannot know."""
    spans = _Spans(ir, words, groups)
    return {loop.index: spans.turns(ir.body[loop.index]) for loop in _flat(loops_of(ir).outer)}


def _flat(loops: Sequence[Loop]) -> list[Loop]:
    return [one for loop in loops for one in (loop, *_flat(loop.inner))]


class _Spans:
    """An interval for each integer that loops depend on, in a launch."""

    def __init__(self, ir: KernelIR, words: Sequence[int], groups: int) -> None:
        self.ir = ir
        self.words = words
        self.ids: dict[str, Interval] = {
            "thread": (0, ir.workgroup - 1),
            "group": (0, groups - 1),
            "groups": (groups, groups),
        }
        self.known: dict[int, Interval] = {}
        self.variables: dict[int, Interval] = {}
        self.distances: dict[tuple[int, int], End] = {}

    def of(self, index: int) -> Interval:
        """The interval of a statement's result."""
        interval = self.known.get(index)
        if interval is None:
            statement = self.ir.body[index]
            low, high = RANGES.get(statement[1], UNKNOWN)
            below, above = self._span(statement) if statement[1] in RANGES else UNKNOWN
            if below < low or above > high:  # it may wrap, and be anything of its type
                below, above = (0, math.inf) if statement[1] == "u32" else UNKNOWN
            interval = self.known[index] = (below, above)
        return interval

    def _span(self, statement: Statement) -> Interval:
        op, type_, args, attr = statement
        if op == "const":
            return attr, attr
        if op == "param":
            word = self.words[attr]
            signed = type_ == "i32" and word >= 2**31
            return (word - 2**32, word - 2**32) if signed else (word, word)
        if op in self.ids:
            return self.ids[op]
        if op == "for":
            return self.of(args[0])[0], self.of(args[1])[1] - 1
        if op == "get":
            return self._variable(args[0])
        if op in RULES and all(self.ir.body[a][1] in RANGES for a in args):
            return RULES[op](*(self.of(a) for a in args))
        return UNKNOWN

    def _variable(self, var: int) -> Interval:
        """All that a variable is ever set to; unknown where that depends on itself."""
        if var not in self.variables:
            self.variables[var] = UNKNOWN
            every = [self.of(v) for v in (var, *loops_of(self.ir).values.get(var, ()))]
            self.variables[var] = min(e[0] for e in every), max(e[1] for e in every)
        return self.variables[var]

    def turns(self, statement: Statement) -> End:
        """Turns of a `for` at most."""
        if statement[0] == "loop":
            return math.inf
        first, last, step = statement[2]
        distance = min(self.of(last)[1] - self.of(first)[0], self._above(last, first))
        op, _, args, _ = self.ir.body[first]
        if op == "add":
            for a, b in (args, args[::-1]):
                distance = min(distance, self._above(last, a) - self.of(b)[0])
        least = max(self.of(step)[0], 1)
        return distance if distance == math.inf else max(0, -(-distance // least))

    def _above(self, index: int, base: int) -> End:
        """By how much a value is above another at most, as its expression says."""
        distance = self.distances.get((index, base))
        if distance is None:
            distance = self.distances[index, base] = self._distance(index, base)
        return distance

    def _distance(self, index: int, base: int) -> End:
        if index == base:
            return 0
        op, _, args, _ = self.ir.body[index]
        if op == "add":
            a, b = args
            return min(self._above(a, base) + self.of(b)[1], self._above(b, base) + self.of(a)[1])
        if op == "mul" and self.ir.body[base][0] == "mul":
            (a, b), (c, d) = args, self.ir.body[base][2]
            pairs = ((a, c, b, d), (a, d, b, c), (b, c, a, d), (b, d, a, c))
            scaled = [
                self._above(x, y) * self.of(s)[1]
                for x, y, s, t in pairs
                if s == t and self.of(s)[0] >= 0
            ]
            return min((s for s in scaled if s >= 0), default=math.inf)
        if op == "sub":
            return self._above(args[0], base) - self.of(args[1])[0]
        if op == "min":
            return min(self._above(a, base) for a in args)
        if op in ("max", "select"):
            return max(self._above(a, base) for a in args[-2:])
        return math.inf


def _times(a: Interval, b: Interval) -> Interval:
    ends = [0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(ends), max(ends)


def _natural(rule: Callable[[Interval, Interval], Interval]) -> Callable[..., Interval]:
    """A rule for intervals that do not reach below 0; of others nothing is known."""
    return lambda a, b: UNKNOWN if a[0] < 0 or b[0] < 0 else rule(a, b)


@_natural
def _quotient(a: Interval, b: Interval) -> Interval:
    low = 0 if b[1] == math.inf or a[0] == math.inf else a[0] // max(b[1], 1)
    return low, a[1] if a[1] == math.inf else a[1] // max(b[0], 1)


def _masked(a: Interval, b: Interval) -> Interval:
    ends = [x[1] for x in (a, b) if x[0] >= 0]
    return (0, min(ends)) if ends else UNKNOWN


def _shift(by: Interval) -> Interval | None:
    return (2 ** by[0], 2 ** by[1]) if by[0] >= 0 and by[1] < 32 else None


def _left(a: Interval, b: Interval) -> Interval:
    factor = _shift(b)
    return UNKNOWN if factor is None else _times(a, factor)


def _right(a: Interval, b: Interval) -> Interval:
    factor = _shift(b)
    return a if factor is None and a[0] >= 0 else _quotient(a, factor or (1, 1))


SAME = (
    "var cast bitcast workgroup_uniform warpgroup_uniform shuffle_xor subgroup_min subgroup_max"
).split()
RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _times,
    "div": _quotient,
    "rem": _natural(lambda a, b: (0, max(0, min(a[1], b[1] - 1)))),
    "and": _masked,
    "or": _natural(lambda a, b: (max(a[0], b[0]), a[1] + b[1])),
    "shl": _left,
    "shr": _right,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "neg": lambda a: (-a[1], -a[0]),
    "select": lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    **dict.fromkeys(SAME, lambda a: a),
}
