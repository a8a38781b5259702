"""Text of what only sm_90a has: memory barriers, bulk tensor copies, products of warpgroups.

Also of clusters, which later targets have as well. A matrix descriptor is two registers: the lower
has the address and the distance of panels, in units of 16 bytes, so that a chunk's index is added;
the upper is the same for a whole tile.
"""

from __future__ import annotations

from centella.emit.ptx.facts import MAX_FOLDED, leaves
from centella.emit.ptx.layout import MAP_BYTES
from centella.emit.ptx.memory import address, total
from centella.emit.ptx.tables import TYPES
from centella.emit.ptx.writer import Rule, Writer, braced
from centella.lang.ir import Matrix
from centella.lang.structure import Statement

SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes, as a matrix descriptor numbers them
REGISTERS = 65_536  # of a multiprocessor
SIGNALS = {  # the place of the barrier, then arrivals or bytes
    "mbar_init": ".init.shared::cta.b64 {}, {}", "mbar_arrive": ".arrive.shared::cta.b64 _, {}",
    "mbar_expect": ".arrive.expect_tx.shared::cta.b64 _, {}, {}",
    "mbar_arrive_at": ".arrive.shared::cluster.b64 _, {}",
}  # fmt: skip  # a table


def _signal(w: Writer, i: int, statement: Statement) -> None:
    op, _, (index, *rest), attr = statement
    array, arrivals = attr if op == "mbar_init" else (attr, 0)
    rank = rest[0] if op == "mbar_arrive_at" else None
    pointer = address(w, index, array, True, 8, rank)
    operand = w.values[rest[0]] if rest else arrivals
    w.emit(f"mbarrier{SIGNALS[op].format(pointer, operand)};")


def _barrier_wait(w: Writer, i: int, statement: Statement) -> None:
    """Try until the phase of this parity is over."""
    _, _, (index, parity), array = statement
    pointer, over = address(w, index, array, True, 8), w.new("%p")
    w.label(f"L{i}_wait:")
    w.emit(f"mbarrier.try_wait.parity.shared::cta.b64 {over}, {pointer}, {w.values[parity]};")
    w.emit(f"@!{over} bra L{i}_wait;")


def _map(w: Writer, position: int) -> str:
    """The address of a tensor map in the launch's parameters."""
    name = f"%map{position}"
    lines = f"mov.b64 {name}, params;\n  cvta.param.u64 {name}, {name};"
    if position:
        lines += f"\n  add.u64 {name}, {name}, {MAP_BYTES * position};"
    return w.fixed_register(name, "b64", lines)


def _tensor_load(w: Writer, i: int, statement: Statement) -> None:
    """A box from global to shared memory; its bytes count at the barrier. In several groups."""
    op, _, (index, barrier, *at), (array, barriers, position) = statement
    mask = at.pop(0) if op == "tma_multicast" else None
    target = address(w, index, array, True, 16)
    signal = address(w, barrier, barriers, True, 8)
    name = f"cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    if mask is not None:  # its lower 16 bits
        ranks, bits = w.values[mask], w.new("%h")
        w.emit(f"{'cvt.u16.u32' if ranks[0] == '%' else 'mov.b16'} {bits}, {ranks};")
        name, signal = f"{name}.multicast::cluster", f"{signal}, {bits}"
    w.emit(f"{name} {target}, {_box(w, position, at)}, {signal};")


def _bulk_load(w: Writer, i: int, statement: Statement) -> None:
    _, _, (index, source, barrier, nbytes), (array, argument, barriers) = statement
    target, pointer = address(w, index, array, True, 16), address(w, source, argument, False, 16)
    signal, name = address(w, barrier, barriers, True, 8), "cp.async.bulk.shared::cluster.global"
    count = w.values[nbytes]
    w.emit(f"{name}.mbarrier::complete_tx::bytes {target}, {pointer}, {count}, {signal};")


def _tensor_store(w: Writer, i: int, statement: Statement) -> None:
    _, _, (index, *at), (array, position) = statement
    source = address(w, index, array, True, 16)
    name = f"cp.async.bulk.tensor.{len(at)}d.global.shared::cta.bulk_group"
    w.emit(f"{name} {_box(w, position, at)}, {source};")


def _box(w: Writer, position: int, at: list[int]) -> str:
    return f"[{_map(w, position)}, {braced(w.values[c] for c in at)}]"


def _descriptor(w: Writer, index: int, matrix: Matrix) -> str:
    """The 64-bit descriptor of a factor that begins at a chunk."""
    terms, constant = w.facts.sums.get(index) or ((index,), 0)
    if w.ir.body[index][0] == "const" and w.ir.body[index][3] < MAX_FOLDED:
        terms, constant = (), w.ir.body[index][3]
    start = w.shared.offsets[matrix.array] // 16 + (matrix.leading // 16 << 16)
    low, high = f"%low{matrix.array}", f"%high{matrix.array}"
    smem = w.smem()
    # In a cluster an address has bits above its place in the group's own memory (PTX ISA,
    # matrix-descriptor-encode): they would add to the distance between panels.
    text = f"and.b32 {low}, {smem}, 0x3ffff;\n  shr.u32 {low}, {low}, 4;\n"
    text += f"  add.u32 {low}, {low}, {start};"
    base = w.fixed_register(low, "b32", text)
    upper = matrix.stride // 16 | SWIZZLES[matrix.swizzle] << 30
    w.fixed_register(high, "b32", f"mov.b32 {high}, {upper};")
    if terms:
        text = f"add.u32 {{}}, {total(w, terms)}, {base};"
        base = w.once((base, terms), "%r", text, leaves(terms))
    if constant:
        moved = w.new("%r")
        w.emit(f"add.u32 {moved}, {base}, {constant};")
        base = moved
    descriptor = w.new("%rd")
    w.emit(f"mov.b64 {descriptor}, {{{base}, {high}}};")
    return descriptor


def _wgmma(w: Writer, i: int, statement: Statement) -> None:
    """A product of a warpgroup, its first factor in shared memory or in registers.

    A predicate says whether the sums are added to or written.
    """
    op, _, args, (*matrices, dtype) = statement
    tile, add = args[-3 if op == "wgmma_held" else -2], args[-1]
    factors = [_descriptor(w, at, m) for at, m in zip(args, matrices, strict=False)]
    if op == "wgmma_held":
        factors.insert(0, braced(w.chunks[args[-2]]))
    sums, more = w.chunks[tile], w.in_register(add)
    turned = ", ".join(str(int(not m.along_k)) for m in matrices)
    w.emit(
        f"wgmma.mma_async.sync.aligned.m64n{2 * len(sums)}k16.f32.{dtype}.{dtype} {braced(sums)}, "
        f"{', '.join(factors)}, {more}, 1, 1, {turned};"
    )


def _registers(w: Writer, i: int, statement: Statement) -> None:
    count = statement[3]
    entry = REGISTERS // w.ir.workgroup // 8 * 8
    w.emit(f"setmaxnreg.{'inc' if count > entry else 'dec'}.sync.aligned.u32 {count};")


def _warpgroup_barrier(w: Writer, i: int, statement: Statement) -> None:
    """The threads of a warpgroup meet, at a barrier of their own: number 0 is the group's."""
    number = w.new("%r")
    w.emit(f"add.u32 {number}, {_warpgroup(w)}, 1;")
    w.emit(f"bar.sync {number}, 128;")


def _warpgroup(w: Writer) -> str:
    """Which warpgroup: of the warp's first thread, so that the assembler knows it for uniform."""
    name = "%warpgroup"
    text = f"mov.u32 {name}, %tid.x;\n  shr.u32 {name}, {name}, 7;\n"
    return w.fixed_register(
        name, "b32", f"{text}  shfl.sync.idx.b32 {name}, {name}, 0, 31, 0xffffffff;"
    )


def _warpgroup_id(w: Writer, i: int, statement: Statement) -> None:
    w.values[i] = _warpgroup(w)


def _warpgroup_uniform(w: Writer, i: int, statement: Statement) -> None:
    """Of the warp's first thread, as its other threads have it."""
    value = w.in_register(statement[2][0])
    w.emit(f"shfl.sync.idx.b32 {w.result(i)}, {value}, 0, 31, 0xffffffff;")


def _cluster_arrive(w: Writer, i: int, statement: Statement) -> None:
    relaxed = statement[3]
    w.emit(f"barrier.cluster.arrive{'.relaxed' if relaxed else ''}.aligned;")


def _cluster_load(w: Writer, i: int, statement: Statement) -> None:
    """A word of another group's shared memory."""
    _, _, (index, rank), array = statement
    pointer = address(w, index, array, True, 4, rank)
    w.emit(f"ld.shared::cluster.{w.kind(i)} {w.result(i)}, {pointer};")


def _cluster_store(w: Writer, i: int, statement: Statement) -> None:
    """Words to another group's shared memory, which count at its barrier."""
    _, _, (index, barrier, rank, *words), (array, barriers) = statement
    pointer = address(w, index, array, True, 4, rank)
    there = address(w, barrier, barriers, True, 8, rank)
    text = ", ".join(w.values[word] for word in words)
    kind = TYPES[w.ir.body[words[0]][1][:3]][1]
    vector, text = (f".v{len(words)}", f"{{{text}}}") if len(words) > 1 else ("", text)
    completion = "shared::cluster.mbarrier::complete_tx::bytes"
    w.emit(f"st.async.weak.{completion}{vector}.{kind} {pointer}, {text}, {there};")


RULES: dict[str, Rule] = {
    **dict.fromkeys(SIGNALS, _signal), "mbar_wait": _barrier_wait,
    "tma_load": _tensor_load, "tma_multicast": _tensor_load, "bulk_load": _bulk_load,
    "tma_store": _tensor_store,
    "wgmma": _wgmma, "wgmma_held": _wgmma, "setmaxnreg": _registers,
    "warpgroup_barrier": _warpgroup_barrier, "warpgroup": _warpgroup_id,
    "warpgroup_uniform": _warpgroup_uniform,
    "cluster_arrive": _cluster_arrive, "cluster_load": _cluster_load,
    "cluster_store": _cluster_store,
}  # fmt: skip  # a table
