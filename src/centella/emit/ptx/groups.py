"""Where the threads of a group meet: barriers, the first thread's value, shuffles."""

from __future__ import annotations

from centella.emit.ptx.tables import INSTRUCTIONS, SUBGROUP_SIZE, TYPES
from centella.emit.ptx.writer import Rule, Writer
from centella.errors import TraceError
from centella.lang.ir import Statement


def barrier(w: Writer, i: int, statement: Statement) -> None:
    """All threads meet; bar.sync also orders their memory accesses."""
    w.emit("bar.sync 0;")


def workgroup_uniform(w: Writer, i: int, statement: Statement) -> None:
    """The first thread's value, through a word of its own."""
    value = w.in_register(statement[2][0])
    kind = w.kind(i)
    word = f"[{w.smem()}+{w.shared.uniform}]"
    thread = w.fixed_register("%thread", "b32", "mov.u32 %thread, %tid.x;")
    first = w.new("%p")
    w.emit(f"setp.eq.u32 {first}, {thread}, 0;")
    w.emit(f"@{first} st.shared.{kind} {word}, {value};")
    w.emit("bar.sync 0;")
    w.emit(f"ld.shared.{kind} {w.result(i)}, {word};")
    w.emit("bar.sync 0;")


def subgroup(w: Writer, i: int, statement: Statement) -> None:
    """A butterfly of shuffles: every lane computes the same tree."""
    op, type_, (a,), attr = statement
    if w.ir.workgroup % SUBGROUP_SIZE:
        raise TraceError(
            f"{op} on PTX needs a workgroup of a multiple of {SUBGROUP_SIZE} threads, got "
            f"{w.ir.workgroup}"
        )
    prefix, value = TYPES[type_][0], w.in_register(a)
    shuffle = "shfl.sync.bfly.b32 {}, {}, {}, 31, 0xffffffff;"
    if op == "shuffle_xor":
        w.emit(shuffle.format(w.result(i), value, attr))
        return
    combine = INSTRUCTIONS[op.removeprefix("subgroup_"), type_]
    for mask in (16, 8, 4, 2, 1):
        other = w.new(prefix)
        w.emit(shuffle.format(other, value, mask))
        total = w.result(i) if mask == 1 else w.new(prefix)
        w.emit(f"{combine} {total}, {value}, {other};")
        value = total


RULES: dict[str, Rule] = {
    "barrier": barrier, "workgroup_uniform": workgroup_uniform, "subgroup_add": subgroup,
    "subgroup_min": subgroup, "subgroup_max": subgroup, "shuffle_xor": subgroup,
}  # fmt: skip  # a table
