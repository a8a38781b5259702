"""Text of what only sm_90a has: memory barriers, bulk tensor copies, products of warpgroups.

Also of clusters, which later targets have as well. A matrix descriptor is two registers: the lower
has the address and the distance of panels, in units of 16 bytes, so that a chunk's index is added;
the upper is the same for a whole tile.
"""

from __future__ import annotations

from centella.emit.ptx.facts import MAX_FOLDED, leaves
from centella.emit.ptx.layout import MAP_BYTES
from centella.emit.ptx.memory import address, total
from centella.emit.ptx.writer import Rule, Writer
from centella.lang.ir import Matrix, Statement

SWIZZLES = {128: 1, 64: 2, 32: 3}  # bytes, as a matrix descriptor numbers them
REGISTERS = 65_536  # of a multiprocessor


def barrier_init(w: Writer, i: int, statement: Statement) -> None:
    """A barrier that waits for so many arrivals."""
    _, _, (index,), (array, arrivals) = statement
    w.emit(f"mbarrier.init.shared::cta.b64 {address(w, index, array, True, 8)}, {arrivals};")


def barrier_arrive(w: Writer, i: int, statement: Statement) -> None:
    """One arrival; with `expect` also bytes that copies will bring."""
    op, _, (index, *nbytes), array = statement
    place = address(w, index, array, True, 8)
    if op == "mbar_expect":
        size = w.values[nbytes[0]]
        w.emit(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {place}, {size};")
    else:
        w.emit(f"mbarrier.arrive.shared::cta.b64 _, {place};")


def barrier_arrive_at(w: Writer, i: int, statement: Statement) -> None:
    """One arrival at the barrier of another group of the cluster."""
    _, _, (index, rank), array = statement
    place = address(w, index, array, True, 8, rank)
    w.emit(f"mbarrier.arrive.shared::cluster.b64 _, {place};")


def barrier_wait(w: Writer, i: int, statement: Statement) -> None:
    """Try until the phase of this parity is over."""
    _, _, (index, parity), array = statement
    place, over = address(w, index, array, True, 8), w.new("%p")
    w.label(f"L{i}_wait:")
    w.emit(
        f"mbarrier.try_wait.parity.shared::cta.b64 {over}, {place}, {w.in_register(parity)};"
        if w.values[parity][0] == "%"
        else f"mbarrier.try_wait.parity.shared::cta.b64 {over}, {place}, {w.values[parity]};"
    )
    w.emit(f"@!{over} bra L{i}_wait;")


def _map(w: Writer, position: int) -> str:
    """The address of a tensor map in the launch's parameters."""
    name = f"%map{position}"
    lines = f"mov.b64 {name}, params;\n  cvta.param.u64 {name}, {name};"
    if position:
        lines += f"\n  add.u64 {name}, {name}, {MAP_BYTES * position};"
    return w.fixed_register(name, "b64", lines)


def tensor_load(w: Writer, i: int, statement: Statement) -> None:
    """A box from global to shared memory; its bytes count at the barrier. In several groups."""
    op, _, (index, barrier, *rest), (array, barriers, position) = statement
    mask, at = (rest[:1], rest[1:]) if op == "tma_multicast" else ([], rest)
    target = address(w, index, array, True, 16)
    signal = address(w, barrier, barriers, True, 8)
    coordinates = ", ".join(w.values[c] for c in at)
    name = f"cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    to = ""
    if mask:
        name += ".multicast::cluster"
        to = f", {_mask(w, mask[0])}"
    w.emit(f"{name} {target}, [{_map(w, position)}, {{{coordinates}}}], {signal}{to};")


def _mask(w: Writer, ranks: int) -> str:
    """A register of 16 bits with those of a u32."""
    value, made = w.values[ranks], w.new("%h")
    w.emit(f"{'cvt.u16.u32' if value[0] == '%' else 'mov.b16'} {made}, {value};")
    return made


def tensor_store(w: Writer, i: int, statement: Statement) -> None:
    """A box from shared to global memory, in the open group of this thread."""
    _, _, (index, *at), (array, position) = statement
    source = address(w, index, array, True, 16)
    coordinates = ", ".join(w.values[c] for c in at)
    name = f"cp.async.bulk.tensor.{len(at)}d.global.shared::cta.bulk_group"
    w.emit(f"{name} [{_map(w, position)}, {{{coordinates}}}], {source};")


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
    made = w.new("%rd")
    w.emit(f"mov.b64 {made}, {{{base}, {high}}};")
    return made


def wgmma(w: Writer, i: int, statement: Statement) -> None:
    """A product of a warpgroup; `p` says whether the sums are added to or written."""
    _, _, (left, right, tile, add), (a, b, dtype) = statement
    descriptors = _descriptor(w, left, a), _descriptor(w, right, b)
    sums, more = w.chunks[tile], w.in_register(add)
    shape = f"m64n{2 * len(sums)}k16.f32.{dtype}.{dtype}"
    turned = f"{int(not a.along_k)}, {int(not b.along_k)}"
    w.emit(
        f"wgmma.mma_async.sync.aligned.{shape} {{{', '.join(sums)}}}, {', '.join(descriptors)}, "
        f"{more}, 1, 1, {turned};"
    )


def wgmma_held(w: Writer, i: int, statement: Statement) -> None:
    """A product of a warpgroup whose first factor is in registers."""
    _, _, (right, tile, held, add), (b, dtype) = statement
    descriptor = _descriptor(w, right, b)
    sums, factor, more = w.chunks[tile], w.chunks[held], w.in_register(add)
    shape = f"m64n{2 * len(sums)}k16.f32.{dtype}.{dtype}"
    w.emit(
        f"wgmma.mma_async.sync.aligned.{shape} {{{', '.join(sums)}}}, {{{', '.join(factor)}}}, "
        f"{descriptor}, {more}, 1, 1, {int(not b.along_k)};"
    )


def registers(w: Writer, i: int, statement: Statement) -> None:
    """More or fewer registers a thread than the kernel was launched with."""
    count = statement[3]
    entry = REGISTERS // w.ir.workgroup // 8 * 8
    w.emit(f"setmaxnreg.{'inc' if count > entry else 'dec'}.sync.aligned.u32 {count};")


def plain(w: Writer, i: int, statement: Statement) -> None:
    """An instruction without operands but numbers."""
    w.emit(PLAIN[statement[0]].format(statement[3]))


def warpgroup_barrier(w: Writer, i: int, statement: Statement) -> None:
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


def warpgroup(w: Writer, i: int, statement: Statement) -> None:
    """Which warpgroup this is."""
    w.values[i] = _warpgroup(w)


def cluster_rank(w: Writer, i: int, statement: Statement) -> None:
    """Which group of its cluster this one is."""
    w.emit(f"mov.u32 {w.result(i)}, %cluster_ctarank;")


def cluster_load(w: Writer, i: int, statement: Statement) -> None:
    """A word of another group's shared memory."""
    _, _, (index, rank), array = statement
    place = address(w, index, array, True, 4, rank)
    w.emit(f"ld.shared::cluster.{w.kind(i)} {w.result(i)}, {place};")


def grid(w: Writer, i: int, statement: Statement) -> None:
    """Groups that run at a time."""
    w.emit(f"mov.u32 {w.result(i)}, %nctaid.x;")


PLAIN = {
    "cluster_arrive": "barrier.cluster.arrive.aligned;",
    "cluster_wait": "barrier.cluster.wait.aligned;",
    "mbar_fence": "fence.mbarrier_init.release.cluster;",
    "async_fence": "fence.proxy.async.shared::cta;",
    "tma_store_commit": "cp.async.bulk.commit_group;",
    "tma_store_wait": "cp.async.bulk.wait_group.read {};",
    "wgmma_fence": "wgmma.fence.sync.aligned;",
    "wgmma_commit": "wgmma.commit_group.sync.aligned;",
    "wgmma_wait": "wgmma.wait_group.sync.aligned {};",
}
RULES: dict[str, Rule] = {
    "mbar_init": barrier_init, "mbar_arrive": barrier_arrive, "mbar_expect": barrier_arrive,
    "mbar_arrive_at": barrier_arrive_at, "mbar_wait": barrier_wait, "wgmma": wgmma,
    "tma_load": tensor_load, "tma_multicast": tensor_load, "tma_store": tensor_store,
    "cluster_rank": cluster_rank, "cluster_load": cluster_load,
    "wgmma_held": wgmma_held, "setmaxnreg": registers, "warpgroup_barrier": warpgroup_barrier,
    "grid": grid, "warpgroup": warpgroup,
    **dict.fromkeys(PLAIN, plain),
}  # fmt: skip  # a table
