"""What stands where among a kernel's statements: blocks, and waits for the launches before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Statement = tuple[str, str, tuple[int, ...], Any]  # see `lang.ir`

OPENS = frozenset({"if", "for", "loop"})


def unawaited(body: Sequence[Statement]) -> list[int]:
    """What a thread may come to before it waits for the launches before, where a kernel says that.

    A block that may be left out, or run by other threads, has waited for none behind it; an `if`
    has, if both of its branches have.
    """
    if all(op != "await_launches" for op, *_ in body):
        return []
    return [i for i, waited in enumerate(_waited(body, of_group=False)) if not waited]


def may_end_unawaited(body: Sequence[Statement]) -> bool:
    """True when no thread of a group may have waited for the launches before, as its last ends.

    That one role waits is enough: a group is over when all of its threads are.
    """
    if all(op != "await_launches" for op, *_ in body):
        return False
    return not _waited(body, of_group=True)[-1]


def _waited(body: Sequence[Statement], of_group: bool) -> list[bool]:
    """Whether a thread has waited, behind each statement; or, of a group, one in any role."""
    waited, every = False, []
    outside: list[tuple[bool, bool, bool]] = []  # of each open block: before it; a role; in `if`
    for op, _, _, attr in body:
        if op in OPENS:
            outside.append((waited, op == "if" and attr is not None, False))
        elif op == "else":
            before, role, _ = outside.pop()
            outside.append((before, role, waited))
            waited = before
        elif op == "end":
            before, role, first = outside.pop()
            waited = before or (waited and (first or (of_group and role)))
        waited = waited or op == "await_launches"
        every.append(waited)
    return every


def matching(body: Sequence[Statement]) -> dict[int, int]:
    """For each statement that opens a block (`else` too), the one that closes it."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for i, (op, *_) in enumerate(body):
        if op in ("else", "end"):
            ends[opened.pop()] = i
        if op == "else" or op in OPENS:
            opened.append(i)
    return ends
