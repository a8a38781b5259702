"""What the threads of a warp do together: matrix fragments, copies, reductions, shuffles.

A fragment's registers have fixed names (`%t0_0`, `%t0_1` ...) and are written in place by `mma` and
`ldmatrix`, without a `mov`: the assembler may then keep them where the tensor cores want them.
"""

from __future__ import annotations

from centella.emit.ptx.memory import address
from centella.emit.ptx.tables import INSTRUCTIONS, SUBGROUP_SIZE, TYPES, literal
from centella.emit.ptx.writer import Rule, Writer, braced
from centella.errors import TraceError
from centella.lang.structure import Statement

BYTES = {"i8": "s8", "u8": "u8"}  # of the first factor


def _fragment(w: Writer, i: int, statement: Statement) -> None:
    type_, count = statement[3]
    name = f"%t{len(w.fragments)}_"
    w.fragments.append((TYPES[type_][1], name, count))
    w.chunks[i] = [f"{name}{n}" for n in range(count)]


def _fill(w: Writer, i: int, statement: Statement) -> None:
    _, _, (tile,), number = statement
    type_ = w.ir.body[tile][3][0]
    for register in w.chunks[tile]:
        w.emit(f"mov.{TYPES[type_][1]} {register}, {literal(number, type_)};")


def _get(w: Writer, i: int, statement: Statement) -> None:
    _, _, (tile,), number = statement
    w.read(i, w.chunks[tile][number])


def _put(w: Writer, i: int, statement: Statement) -> None:
    _, _, (tile, value), number = statement
    w.emit(f"mov.{w.kind(value)} {w.chunks[tile][number]}, {w.values[value]};")


def _ldmatrix(w: Writer, i: int, statement: Statement) -> None:
    """8 x 8 matrices of 16-bit elements, a register of each thread for each matrix."""
    shape, registers, pointer = _matrices(w, statement)
    w.emit(f"ldmatrix.sync.aligned.{shape}.shared.b16 {registers}, {pointer};")


def _stmatrix(w: Writer, i: int, statement: Statement) -> None:
    shape, registers, pointer = _matrices(w, statement)
    w.emit(f"stmatrix.sync.aligned.{shape}.shared.b16 {pointer}, {registers};")


def _matrices(w: Writer, statement: Statement) -> tuple[str, str, str]:
    _, _, (index, *tiles), (position, transposed) = statement
    registers = [r for tile in tiles for r in w.chunks[tile]]
    shape = f"m8n8.x{len(registers)}{'.trans' if transposed else ''}"
    return shape, braced(registers), address(w, index, position, True, 16)


def _mma(w: Writer, i: int, statement: Statement) -> None:
    _, _, tiles, dtype = statement
    c, a, b = (braced(w.chunks[t]) for t in tiles)
    if dtype in BYTES:
        kinds = f"s32.{BYTES[dtype]}.s8.s32"
        w.emit(f"mma.sync.aligned.m16n8k32.row.col.{kinds} {c}, {a}, {b}, {c};")
        return
    w.emit(f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {c}, {a}, {b}, {c};")


def _cp_async(w: Writer, i: int, statement: Statement) -> None:
    """16 bytes from global to shared memory, past the registers; of them `size` are read."""
    _, _, (target, source, size), (array, argument) = statement
    into = address(w, target, array, True, 16)
    pointer = address(w, source, argument, False, 16)
    w.emit(f"cp.async.cg.shared.global {into}, {pointer}, 16, {w.values[size]};")


def _fetch_lines(w: Writer, i: int, statement: Statement) -> None:
    """Nothing here: loads of the argument say it from now on."""
    position, nbytes = statement[3]
    w.lines[position] = nbytes


# -- reductions and shuffles -----------------------------------------------------------------------


def _workgroup_uniform(w: Writer, i: int, statement: Statement) -> None:
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


def _subgroup(w: Writer, i: int, statement: Statement) -> None:
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
    "fragment": _fragment, "fragment_fill": _fill, "fragment_get": _get, "fragment_set": _put,
    "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "mma": _mma, "cp_async": _cp_async,
    "fetch_lines": _fetch_lines,
    "workgroup_uniform": _workgroup_uniform, "subgroup_add": _subgroup, "subgroup_min": _subgroup,
    "subgroup_max": _subgroup, "shuffle_xor": _subgroup,
}  # fmt: skip  # a table
