"""What the PTX emitter knows of a kernel before its first line.

Last uses, gets that must be copied, values computed into their variable, and indices as sums of
terms and a constant, so that neighbouring accesses share an address register.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from msgspec import Struct

from centella.lang.ir import (
    FRAGMENT_WRITES,
    GLOBAL_ATOMICS,
    INDICES,
    INTEGERS,
    PURE,
    SHARED_ATOMICS,
    KernelIR,
)
from centella.lang.structure import OPENS, Statement

MAX_FOLDED = 1 << 24  # elements: a folded offset fits the immediate of every access
MAX_TERMS, MAX_DEPTH = 4, 3
# A u32 of these is a count or a position, whatever its operands: never "below 0".
_NEVER_BELOW_0 = (
    GLOBAL_ATOMICS
    | SHARED_ATOMICS
    | frozenset(
        "and shr div rem load sload extract cast param thread group groups lane subgroup_size grid "
        "warpgroup cluster_rank".split()
    )
)
# These values are another value's register, an immediate, or a fixed register.
NO_REGISTER = frozenset({"const", "get", "extract", "group", "groups", "subgroup_size", "for"})

Term = Any  # an id, or ("mul" | "shr", Terms, number): an alias cannot name itself before 3.12
Terms = tuple[Term, ...]  # what is to be added


class Facts(Struct, frozen=True):
    """Last use of each statement, and what needs no instruction of its own."""

    last: list[int]  # position of the last use, -1: never used
    snapshots: set[int]  # gets whose variable or fragment changes before their last use: copied
    direct: dict[int, int]  # value -> the variable it is computed into
    sums: dict[int, tuple[Terms, int]]  # index -> terms and constant: index = sum(terms) + constant


def leaves(terms: Terms) -> Iterator[int]:
    """Ids that a nested sum adds up."""
    for term in terms:
        if isinstance(term, int):
            yield term
        else:
            yield from leaves(term[1])


def _depth(terms: Terms) -> int:
    return max((1 + _depth(t[1]) for t in terms if not isinstance(t, int)), default=0)


def same_register(body: tuple[Statement, ...], statement: Statement) -> bool:
    """True for a conversion between i32 and u32: the bits stay where they are."""
    op, type_, args, _ = statement
    return op in ("bitcast", "cast") and type_ in INTEGERS and body[args[0]][1] in INTEGERS


class _Sums:
    """Indices as sums of terms and a constant, where that is exact (see `ptx.memory`)."""

    def __init__(self, body: tuple[Statement, ...]) -> None:
        self.body = body
        self.signed: set[int] = set()  # values that may stand for a number below 0
        self.linear: dict[int, tuple[Terms, int]] = {}
        self.pairs: dict[int, tuple[Terms, int]] = {}  # sums of two terms, to meet x[i] with x[i+1]
        size = -1
        while size != len(self.signed):  # a variable set late in a loop is read early in it
            size = len(self.signed)
            self.linear.clear()
            self.pairs.clear()
            for i, statement in enumerate(body):
                self._visit(i, statement)

    def all(self) -> dict[int, tuple[Terms, int]]:
        """What was found, by index."""
        return self.pairs | self.linear

    def _visit(self, i: int, statement: Statement) -> None:
        op, type_, args, attr = statement
        if op == "set":
            if args[1] in self.signed:
                self.signed.add(args[0])
            return
        if type_ != "u32":
            return
        if op == "const":
            if attr >= 2**31:
                self.signed.add(i)
            return
        if op in ("sub", "neg", "not", "bitcast") or (
            op not in _NEVER_BELOW_0 and not self.signed.isdisjoint(args)
        ):
            self.signed.add(i)
        if op in ("add", "sub", "mul", "shl", "shr"):
            terms = self._linear(op, args[0], args[1])
            if terms and abs(terms[1]) < MAX_FOLDED and 0 < len(terms[0]) <= MAX_TERMS:
                kept = self.linear if terms[1] or op != "add" else self.pairs
                kept[i] = terms

    def _split(self, i: int) -> tuple[Terms, int] | None:
        statement = self.body[i]
        if statement[0] == "const":
            value = statement[3]
            return (), value - 2**32 if value >= 2**31 else value
        return self.linear.get(i) or (None if i in self.signed else ((i,), 0))

    def _linear(self, op: str, first: int, second: int) -> tuple[Terms, int] | None:
        a, b = self._split(first), self._split(second)
        if a is None or b is None:
            return None
        if op == "add":
            return a[0] + b[0], a[1] + b[1]
        if op == "mul" and not a[0]:
            a, b = b, a
        if b[0] or b[1] < 0:  # from here on the second operand is a number
            return None
        number = b[1]
        if op == "sub":
            return a[0], a[1] - number
        if _depth(a[0]) == MAX_DEPTH:
            return None
        if op == "shr":
            number &= 31
            a = self.pairs.get(first, a)
            return ((("shr", a[0], number),), a[1] >> number) if a[1] % 2**number == 0 else None
        number = 1 << (number & 31) if op == "shl" else number
        return (("mul", a[0], number),), a[1] * number


def facts_of(ir: KernelIR) -> Facts:
    """One pass backwards: uses are met before definitions."""
    body = ir.body
    facts = Facts([-1] * len(body), set(), {}, _Sums(body).all())
    last = facts.last
    loops = loops_of(body)
    next_set: dict[int, int] = {}
    ends: list[int] = []
    for p in range(len(body) - 1, -1, -1):
        op, _, args, _ = statement = body[p]
        uses: tuple[int, ...] = args
        where = p
        if op == "end":
            ends.append(p)
        elif op in OPENS:
            end = ends.pop()
            if op == "for":
                for bound in args[1:]:
                    last[bound] = max(last[bound], end)
        elif op in ("get", "fragment_get"):
            position = last[p]
            if position > next_set.get(args[0], len(body)) or loops[position] != loops[p]:
                facts.snapshots.add(p)
            uses = ()
        elif op in PURE:
            if last[p] < 0:
                continue
            if op == "extract" or same_register(body, statement):
                where = last[p]
        elif op == "set":
            next_set[args[0]] = p
            uses = args[1:]
        elif op in INDICES:
            indices, rest = args[: INDICES[op]], args[INDICES[op] :]
            sums = [leaves(facts.sums[a][0]) if a in facts.sums else (a,) for a in indices]
            uses = (*chain.from_iterable(sums), *rest)
        if op in FRAGMENT_WRITES:
            own = op not in ("ldmatrix", "fragment_fill")  # the others are read
            for tile in args[INDICES.get(op, 0) :][: 1 if own else None]:
                next_set[tile] = p
        for a in uses:
            if where > last[a]:
                last[a] = where
        if last[p] == p + 1 and op not in NO_REGISTER and not same_register(body, statement):
            after = body[p + 1]
            if after[0] in ("set", "var") and after[2][-1] == p:
                facts.direct[p] = after[2][0] if after[0] == "set" else p + 1
    return facts


def loops_of(body: tuple[Statement, ...]) -> list[int]:
    """The innermost loop of each statement; a loop's `end` counts outside."""
    loops: list[int] = []
    inner, opened = [-1], [False]
    for p, statement in enumerate(body):
        op = statement[0]
        if op == "end" and opened.pop():
            inner.pop()
        loops.append(inner[-1])
        if op in OPENS:
            opened.append(op != "if")
            if op != "if":
                inner.append(p)
    return loops
