"""Variables and control flow: registers that change, labels and branches.

A device loop tests at its bottom, after one guard at its top. Like `i += step` anywhere, it does
not end if `i + step` passes 2^32 (2^31 for i32) before the bound is reached.
"""

from __future__ import annotations

from centella.emit.ptx.tables import SIGNED
from centella.emit.ptx.writer import Block, Rule, Writer
from centella.lang.structure import Statement

COUNTER = "$arrived"  # of the module, zero when it is loaded: groups that came to grid barriers
ROOM = 20  # values moved before a loop at most: past 22, small GEMM tiles spill on Blackwell


def _assign(w: Writer, i: int, statement: Statement) -> None:
    """`var` and `set`: a move, unless the value was computed in place."""
    op, _, args, _ = statement
    variable, value = (i, args[0]) if op == "var" else args
    register = w.variable(variable)
    if value not in w.facts.direct:
        w.emit(f"mov.{w.kind(variable)} {register}, {w.values[value]};")


def _get(w: Writer, i: int, statement: Statement) -> None:
    w.read(i, w.values[statement[2][0]])


def _branch(w: Writer, i: int, statement: Statement) -> None:
    w.emit(f"@!{w.values[statement[2][0]]} bra L{i}_else;")
    w.blocks.append(Block("if", i))


def _otherwise(w: Writer, i: int, statement: Statement) -> None:
    opening = w.blocks[-1].opening
    w.emit(f"bra L{opening}_end;")
    w.label(f"L{opening}_else:")
    w.close()
    w.blocks.append(Block("else", opening))


def _loop(w: Writer, i: int, statement: Statement) -> None:
    op, type_, args, _ = statement
    comment, guard = "loop", []
    if op == "for":
        low, high = w.values[args[0]], w.values[args[1]]
        index = w.values[i] = w.new("%r")
        guard.append(f"  mov.b32 {index}, {low};")
        if low[0] == "%" or high[0] == "%" or int(low) >= int(high):
            empty = w.new("%p")
            guard.append(f"  setp.ge.{SIGNED[type_]} {empty}, {index}, {high};")
            guard.append(f"  @{empty} bra L{i}_end;")
        comment = f"for {index} < {high}"
    # What moves out of the loop stands before the guard: it may be used after an empty loop.
    w.blocks.append(Block(op, i, ROOM, [*guard, f"L{i}:  // {comment}"]))
    w.depth[i] = len(w.blocks) - 1


def _end(w: Writer, i: int, statement: Statement) -> None:
    kind, opening = w.blocks[-1].kind, w.blocks[-1].opening
    if kind == "for":
        _, type_, (_, high, step), _ = w.ir.body[opening]
        index, again = w.values[opening], w.new("%p")
        w.emit(f"add.{SIGNED[type_]} {index}, {index}, {w.values[step]};")
        w.emit(f"setp.lt.{SIGNED[type_]} {again}, {index}, {w.values[high]};")
        w.emit(f"@{again} bra L{opening};")
    elif kind == "loop":
        w.emit(f"bra L{opening};")
    w.label(f"L{opening}_else:" if kind == "if" else f"L{opening}_end:")
    w.close()


def _grid_barrier(w: Writer, i: int, statement: Statement) -> None:
    """One thread of each group adds to the kernel's counter, and waits until its top bit turns.

    What all groups add is 2^31: the first of them what the others leave of it.
    """
    thread, number, group, first = w.new("%r"), w.new("%r"), w.new("%r"), w.new("%p")
    others, step, before, now = w.new("%p"), w.new("%r"), w.new("%r"), w.new("%r")
    for line in (
        "bar.sync 0;", f"mov.u32 {thread}, %tid.x;", f"setp.ne.u32 {others}, {thread}, 0;",
        f"@{others} bra L{i}_met;", f"mov.u32 {number}, %nctaid.x;", f"mov.u32 {group}, %ctaid.x;",
        f"sub.u32 {step}, 0x80000001, {number};", f"setp.eq.u32 {first}, {group}, 0;",
        f"selp.u32 {step}, {step}, 1, {first};",
        f"atom.acq_rel.gpu.global.add.u32 {before}, [{COUNTER}], {step};",
    ):  # fmt: skip
        w.emit(line)
    w.label(f"L{i}_wait:")
    for line in (
        f"ld.acquire.gpu.global.u32 {now}, [{COUNTER}];", f"xor.b32 {now}, {now}, {before};",
        f"setp.lt.s32 {others}, {now}, 0;", f"@!{others} bra L{i}_wait;",
    ):  # fmt: skip
        w.emit(line)
    w.label(f"L{i}_met:")
    w.emit("bar.sync 0;")


def _break_if(w: Writer, i: int, statement: Statement) -> None:
    opening = next(b.opening for b in reversed(w.blocks) if b.kind in ("for", "loop"))
    w.emit(f"@{w.values[statement[2][0]]} bra L{opening}_end;")


RULES: dict[str, Rule] = {
    "var": _assign, "set": _assign, "get": _get, "if": _branch, "else": _otherwise, "for": _loop,
    "loop": _loop, "end": _end, "break_if": _break_if, "grid_barrier": _grid_barrier,
}  # fmt: skip  # a table
