"""An open block of the kernel being recorded: what stands in it, and what a loop may not hold."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any

from msgspec import Struct, field

from centella.errors import TraceError

FORMS = {"if": "lang.if_", "else": "lang.else_", "for": "lang.range", "loop": "lang.loop"}
LOOPS = ("for", "loop")
_PACKAGE = __name__.rsplit(".", 1)[0] + "."


def source_line() -> str:
    """File and line of the nearest frame outside the language."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _inside(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_in(trace: TracebackType | None) -> str:
    """File and line of the innermost frame of a traceback outside the language; "" for none."""
    line = ""
    while trace is not None:
        frame, trace_line, trace = trace.tb_frame, trace.tb_lineno, trace.tb_next
        if not _inside(frame):
            line = f"{frame.f_code.co_filename}:{trace_line}"
    return line


def _inside(frame: FrameType) -> bool:
    """Whether a frame is the language's own."""
    name: str = frame.f_globals.get("__name__", "")
    return name == "contextlib" or name.startswith(_PACKAGE)


class Block(Struct, eq=False):
    """Where a block stands, whether control flow in it is uniform, what happened in it.

    `barrier`, `divergent_break` and `uniform_set` are the lines of the first of each, or None.
    `touched` are the fragments that were read in it; `role` the first thread and number of those
    that run it, where it is a role.
    """

    id: int
    kind: str
    uniform: bool
    line: str
    keys: list[Any] = field(default_factory=list)  # of the values numbered in it
    leaves: bool = False
    barrier: str | None = None
    divergent_break: str | None = None
    uniform_set: str | None = None
    touched: set[int] = field(default_factory=set)
    role: tuple[int, int] | None = None

    def left_open(self) -> str:
        """What to say when the block was left in a way that Python allows."""
        return (
            f"the {FORMS[self.kind]} block opened at {self.line} was left open: leave a loop "
            f"with lang.break_if, not by a Python break"
        )

    def check_loop(self) -> None:
        """Raise for a loop that never ends, or that threads leave one by one across a barrier."""
        if self.kind == "loop" and not self.leaves:
            raise TraceError("a lang.loop() without lang.break_if never ends")
        if not self.divergent_break:
            return
        ends = (
            f"ends on a condition that may differ by thread (break_if at {self.divergent_break}); "
            f"make it uniform, for example with lang.workgroup_uniform"
        )
        if self.barrier:
            raise TraceError(f"a loop with a barrier (at {self.barrier}) {ends}")
        if self.uniform_set:
            raise TraceError(f"a loop that sets a uniform var (at {self.uniform_set}) {ends}")
