"""Operations that only NVIDIA GPUs have (sm_80 and later); a kernel that uses one has no WGSL.

The simulator runs all of them: the matrix ones exactly as documented here, the asynchronous ones at
their latest, so that what does not wait does not find its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from centella.dtypes import DType, f32, i8, i32, u8
from centella.errors import TraceError
from centella.lang.memory import Argument
from centella.lang.ptx.tiles import HALVES, Fragment, SharedTile, whole_warps
from centella.lang.tracer import current
from centella.lang.values import Expr, Operand, Value, expr_of


def mma_sync(c: Fragment, a: Fragment, b: Fragment) -> None:
    """c += a b by the tensor cores: [16, 16] by [16, 8], f16 or bf16 factors, f32 sums.

    PTX ISA, "Warp-level Matrix Instructions: mma" (mma.sync.aligned.m16n8k16.row.col); sm_80.
    Products are exact. The order of their sum and its rounding are the hardware's (f32 or wider,
    not always to nearest); the simulator adds them to c one by one in f32, k ascending.

    Thread `lane` of a warp holds, of a, in register r the elements (row, column) and (row, column
    + 1) with row = lane / 4 + 8 (r % 2), column = 2 (lane % 4) + 8 (r / 2); of b (row, column) and
    (row + 1, column) with row = 2 (lane % 4) + 8 r, column = lane / 4; of c, in register r, the
    element (lane / 4 + 8 (r / 2), 2 (lane % 4) + r % 2).

    Whole warps come here together, all of the group or of a role.

    Raises:
        TraceError: for fragments that do not fit, in divergent control flow, or for a workgroup
            that is no multiple of 32 threads.
    """
    t = current()
    whole_warps(t, "mma_sync")
    fit = c.dtype is f32 and a.dtype is b.dtype and a.dtype in HALVES
    if not fit or (a.shape, b.shape) != ((16, 16), (16, 8)):
        raise TraceError(
            f"mma_sync takes f32 (16, 8), and f16 or bf16 (16, 16) and (16, 8), got "
            f"{', '.join(f'{x.dtype.name} {x.shape}' for x in (c, a, b))}"
        )
    t.effect("mma", "", (c.handle, a.handle, b.handle), a.dtype.name)


def mma_bytes(c: Fragment, a: Fragment, b: Fragment, dtype: DType) -> None:
    """c += a b of integers by the tensor cores: bytes [16, 32] by i8 [32, 8], i32 sums.

    PTX ISA, "Warp-level Matrix Instructions: mma" (mma.sync.aligned.m16n8k32.row.col.s32); sm_80.
    Exact: sums wrap around as i32 do.

    Factors are fragments of 16-bit elements whose registers have four bytes each, as `ldmatrix`
    brings stored bytes. Thread `lane` of a warp holds, of a, in register r the bytes (row, column)
    to (row, column + 3) with row = lane / 4 + 8 (r % 2), column = 4 (lane % 4) + 16 (r / 2); of b
    (row, column) to (row + 3, column) with row = 4 (lane % 4) + 16 r, column = lane / 4; of c what
    it holds with `mma_sync`.

    Args:
        dtype: of the bytes of a, i8 or u8.

    Whole warps come here together, all of the group or of a role.

    Raises:
        TraceError: for fragments that do not fit, another dtype, in divergent control flow, or for
            a workgroup that is no multiple of 32 threads.
    """
    t = current()
    whole_warps(t, "mma_bytes")
    fit = c.dtype is i32 and a.dtype in HALVES and b.dtype in HALVES and dtype in (i8, u8)
    if not fit or (a.shape, b.shape) != ((16, 16), (16, 8)):
        raise TraceError(
            f"mma_bytes takes i32 (16, 8), words of a 16-bit (16, 16) and (16, 8), and i8 or u8, "
            f"got {', '.join(f'{x.dtype.name} {x.shape}' for x in (c, a, b))} and {dtype.name}"
        )
    t.effect("mma", "", (c.handle, a.handle, b.handle), dtype.name)


def widen_i8(word: Value, dtype: DType) -> tuple[Expr, Expr]:
    """The four i8 of a word as f16 or bf16: the bits of elements 0 and 1, and of 2 and 3.

    Exact: either dtype holds every integer up to 128. PTX ISA, "Data Movement and Conversion
    Instructions: prmt" and "Half Precision Floating Point Instructions: sub" (.f16x2), "fma"
    (.bf16x2); sm_80. Bytes become the last bits of numbers of one exponent, whose offset is then
    taken away: two to four instructions for two elements.

    Raises:
        TraceError: for another dtype.
    """
    if dtype not in HALVES:
        raise TraceError(f"widen_i8 gives f16 or bf16, got {dtype.name}")
    t = current()
    bits = expr_of(t, word, "u32")
    low, high = (t.pure("widen_i8", "u32", (bits,), (dtype.name, half)) for half in range(2))
    return low, high


def widen_u7(word: Value, dtype: DType, zero: int = 0) -> tuple[Expr, Expr]:
    """The four numbers of 0 to 127 of a word, less `zero`, as `widen_i8` gives those of i8.

    Exact. PTX ISA, as for `widen_i8`; sm_80. With no sign to part from the rest, two instructions
    for two elements in either dtype. The highest bit of each byte is 0.

    Raises:
        TraceError: for another dtype, or unless `zero` is a Python number from 0 to 127.
    """
    number: Any = zero
    if dtype not in HALVES or not isinstance(number, int) or not 0 <= number < 128:
        raise TraceError(f"widen_u7 gives f16 or bf16, less 0 to 127, got {dtype.name}, {zero!r}")
    t = current()
    bits = expr_of(t, word, "u32")
    low, high = (t.pure("widen_u7", "u32", (bits,), (dtype.name, half, zero)) for half in range(2))
    return low, high


def permute_bytes(a: Value, b: Value, order: tuple[int, int, int, int] | Operand) -> Expr:
    """A word of four bytes of two words: 0 to 3 are those of a, 4 to 7 those of b, lowest first.

    With 8 added to a number, all bits are the highest of that byte: (3, 11, 11, 11) is the last
    byte of a as an i8. PTX ISA, "Data Movement and Conversion Instructions: prmt"; one instruction.

    Args:
        order: four numbers, or a u32 whose sixteen lowest bits are four of four bits each.

    Raises:
        TraceError: unless `order` is four numbers from 0 to 15, or a u32.
    """
    t = current()
    operands = (expr_of(t, a, "u32"), expr_of(t, b, "u32"))
    if isinstance(order, Operand):
        return t.pure("permute_bytes", "u32", (*operands, expr_of(t, order, "u32")))
    numbers: Any = order
    whole = isinstance(numbers, Sequence) and all(isinstance(byte, int) for byte in numbers)
    if not whole or len(numbers) != 4 or any(byte not in range(16) for byte in numbers):
        raise TraceError(f"permute_bytes takes four numbers of bytes, 0 to 15, got {order!r}")
    return t.pure("permute_bytes", "u32", operands, tuple(order))


def max_pairs(a: Value, b: Value, dtype: DType) -> Expr:
    """The larger of two f16 or bf16 as they are stored, and of the two beside them: a word of two.

    NaN where either is, as `lang.maximum`; of 0 and -0 either. Exact. PTX ISA, "Half Precision
    Floating Point Instructions: max" (.NaN, .f16x2 and .bf16x2); sm_80. One instruction for two
    elements that need not be widened.

    Raises:
        TraceError: for another dtype.
    """
    if dtype not in HALVES:
        raise TraceError(f"max_pairs takes f16 or bf16, got {dtype.name}")
    t = current()
    return t.pure(f"max_{dtype.name}", "u32", (expr_of(t, a, "u32"), expr_of(t, b, "u32")))


def rsqrt(x: Value) -> Expr:
    """`1 / sqrt(x)` of an f32 by the target's own function: a few instructions for some forty.

    Off by 2^-22.9 of the result at most; of 0 inf, of inf 0, of NaN and below zero NaN. PTX ISA,
    "Floating Point Instructions: rsqrt" (.approx, with subnormal numbers).

    Raises:
        TraceError: for another type.
    """
    t = current()
    return t.pure("rsqrt", "f32", (expr_of(t, x, "f32"),))


def reciprocal(x: Value) -> Expr:
    """`1 / x` of an f32 by the target's own function: a few instructions for some twelve.

    Within 1 ulp; of 0 inf, of inf 0, of NaN NaN, each with x's sign. PTX ISA, "Floating Point
    Instructions: rcp" (.approx, with subnormal numbers).

    Raises:
        TraceError: for another type.
    """
    t = current()
    return t.pure("rcp", "f32", (expr_of(t, x, "f32"),))


def ldmatrix(tile: SharedTile, chunk: Value, *fragments: Fragment, trans: bool = False) -> None:
    """Load 8 x 8 matrices of 16-bit elements from shared memory into the registers of fragments.

    PTX ISA, "Warp-level Matrix Instructions: ldmatrix" (.m8n8, .x1, .x2 or .x4, by how many
    registers the fragments have together); sm_75, here sm_80. Threads 8 j to 8 j + 7 of a warp give
    the chunks of the eight rows of matrix j, which goes to register j: thread `lane` gets elements
    2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4; of the transposed matrix with `trans`.

    Args:
        tile: where the rows are; its dtype is that of the fragments.
        chunk: this thread's row, as `tile.chunk(...)` gives it (plus `tile.down(...)`,
            `tile.at_stage(...)`).
        fragments: one A, one or two B.

    Whole warps come here together, all of the group or of a role.

    Raises:
        TraceError: for fragments of another dtype or too many, in divergent control flow, or for a
            workgroup that is no multiple of 32 threads.
    """
    _matrices("ldmatrix", tile, chunk, fragments, [f.target for f in fragments], trans)


def stmatrix(tile: SharedTile, chunk: Value, *fragments: Fragment, trans: bool = False) -> None:
    """Store 8 x 8 matrices of 16-bit elements from the registers of fragments to shared memory.

    PTX ISA, "Warp-level Matrix Instructions: stmatrix" (.m8n8, .x1, .x2 or .x4, by how many
    registers the fragments have together); sm_90 and later. The mirror of `ldmatrix`: threads 8 j
    to 8 j + 7 of a warp give the chunks of the eight rows of matrix j, which comes from register j:
    thread `lane` has elements 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4; of the transposed
    matrix with `trans`. So the registers of sums of `wgmma`, rounded to a (64, 16) fragment, are
    four matrices: rows 0 and 8 of columns 0, then of columns 8.

    Cost: one instruction for what takes a warp four stores of a word each. With the tile's swizzle
    each eight rows touch every bank once; without one, rows of 128 bytes all begin at the same.

    Args:
        tile: where the rows go; its dtype is that of the fragments.
        chunk: this thread's row, as `tile.chunk(...)` gives it; threads past the last matrix's
            rows give any.
        fragments: factors, filled or loaded.

    Whole warps come here together, all of the group or of a role. Others see the rows after a
    barrier; copies and `wgmma` after `async_fence()` as well.

    Raises:
        TraceError: for fragments of another dtype or too many, in divergent control flow, or for a
            workgroup that is no multiple of 32 threads.
    """
    _matrices("stmatrix", tile, chunk, fragments, [f.handle for f in fragments], trans)


def _matrices(
    op: str, tile: SharedTile, chunk: Value, fragments: Sequence[Fragment], named: Sequence[Expr],
    trans: bool,
) -> None:  # fmt: skip
    """Matrices between a tile and the registers of fragments."""
    t = current()
    whole_warps(t, op)
    if sum(f.registers for f in fragments) not in (1, 2, 4) or any(
        f.dtype is not tile.dtype for f in fragments
    ):
        raise TraceError(
            f"{op} takes 1, 2 or 4 registers of {tile.dtype.name}, got fragments "
            f"{', '.join(f'{f.dtype.name} {f.shape}' for f in fragments) or 'none'}"
        )
    index = expr_of(t, chunk, "u32")
    t.effect(op, "", (index, *named), (tile.memory.position, trans))


def launch_dependents() -> None:
    """The next launch may begin as soon as every group of this one has said so, or has ended.

    PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol"
    (.launch_dependents); sm_90 and later. It only lets the next launch's groups take their places:
    every kernel for these targets waits until this launch is over and what it wrote can be seen, at
    its beginning or where it says `await_launches`. So results are the same. Without it the next
    launch may begin when all groups have ended, which is the end that every kernel has. It acts
    where launches may overlap: in a replay.

    Cost: whoever is let in early takes what room there is, and keeps it while it waits. Said first
    of all in each kernel it made a chain of short ones 9 % slower on an H200 and encoders between
    5 % faster and 7 % slower (benchmarks/LOG.md). Say it where a group has little left to do, or
    where groups leave room for the next. The simulator does nothing.
    """
    current().effect("launch_dependents", "", ())


def await_launches() -> None:
    """Wait until the launches before this one are over and what they wrote can be seen.

    PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol" (.wait);
    sm_90 and later. Every kernel begins with it, unless it says itself where: what it reads before
    is read while launches before it may still run. A launch that begins early (`launch_dependents`)
    is therefore one whose arguments read before are written by none before it in the replay; the
    backend sees to that. What it writes, it writes behind. Each thread that reads or writes what
    other launches write says it, and one of each group at least: a kernel in which that may be left
    out waits as it ends. The simulator does nothing.

    Raises:
        TraceError: as the kernel ends, where an argument is written by who has not said it.
    """
    current().effect("await_launches", "", ())


def resident(groups: int) -> None:
    """Ask for registers such that so many groups of this kernel fit on a multiprocessor.

    PTX ISA, "Performance-Tuning Directives: .minnctapersm". Without it the assembler gives up
    registers, and spills, for one group more of its own accord.

    Raises:
        TraceError: unless `groups` is a Python number from 1 to 32.
    """
    number: Any = groups
    if not isinstance(number, int) or not 0 < number <= 32:
        raise TraceError(f"resident takes a Python number of groups from 1 to 32, got {groups!r}")
    current().effect("resident", "", (), number)


def fetch_lines(source: Argument, nbytes: int = 128) -> None:
    """Have loads of 16 bytes of an argument bring so many of memory, aligned, to the L2 cache.

    PTX ISA, "Data Movement and Conversion Instructions: ld" (.level::prefetch_size); sm_80. For
    threads that read the rest of a line in loads of their own: memory is asked once for it.

    Raises:
        TraceError: for an argument that is written, or another number than 64, 128 or 256.
    """
    if source.mode != "in" or nbytes not in (64, 128, 256):
        raise TraceError(
            f"fetch_lines takes an In argument and 64, 128 or 256 bytes, got {source.name!r}: "
            f"{source.mode}, {nbytes!r}"
        )
    current().effect("fetch_lines", "", (), (source.position, nbytes))


def prefetch(source: Argument, *key: Value) -> None:
    """Start to bring the memory around an element to the L2 cache, which nobody waits for.

    PTX ISA, "Data Movement and Conversion Instructions: prefetch" (.global.L2); sm_80. It reads
    nothing: before `await_launches` it may name what earlier launches have yet to write.

    Args:
        key: the element, which is within the argument.

    Raises:
        TraceError: for an argument that cannot be read.
    """
    current().effect("prefetch", "", (source.word(*key),), source.position)


def cp_async(
    tile: SharedTile, chunk: Value, source: Argument, *key: Value, size: Value = 16
) -> None:
    """Start to copy 16 bytes from a tensor argument to shared memory, past the registers.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async" (.cg, 16 bytes); sm_80. The copy
    is done once this thread has waited for its group (`cp_async_wait`), and other threads see it
    after a barrier behind that; until then nobody may read or write the chunk.

    Args:
        chunk: where to, as `tile.chunk(...)` gives it.
        source: an In argument of the tile's dtype; key: the element that the chunk starts at, a
            multiple of 8 counted from the buffer's start, inside of the argument also where size
            is 0.
        size: bytes that are read, 0 to 16; the rest of the chunk becomes zeros.

    Raises:
        TraceError: for an argument that is written or has another dtype.
    """
    t = current()
    if source.mode != "in" or source.dtype is not tile.dtype:
        raise TraceError(
            f"cp_async copies from an In argument of {tile.dtype.name}, got {source.name!r}: "
            f"{source.mode} {source.dtype.name}"
        )
    where, element = source.chunk(key)
    args = (expr_of(t, chunk, "u32"), where, expr_of(t, size, "u32"))
    id_ = t.effect("cp_async", "", args, (tile.memory.position, source.position))
    t.starts[id_] = (element.id, source.dtype.per_chunk)


def cp_async_commit() -> None:
    """Make a group of the copies that this thread started since the last one; it may be empty.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async.commit_group"; sm_80.
    """
    current().effect("cp_async_commit", "", ())


def cp_async_wait(pending: int = 0) -> None:
    """Wait until at most `pending` of this thread's groups, the latest, are still on their way.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async.wait_group"; sm_80. A barrier
    must follow before other threads read what arrived. Copies in no group are not waited for.

    Raises:
        TraceError: unless `pending` is a Python number, 0 or more.
    """
    groups: Any = pending
    if not isinstance(groups, int) or groups < 0:
        raise TraceError(f"cp_async_wait takes a Python number of groups, got {pending!r}")
    current().effect("cp_async_wait", "", (), pending)
