"""`Fragment` and `SharedTile`: matrices in the registers of a warp and in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from centella.dtypes import DType, bf16, f16, f32, i32
from centella.errors import TraceError
from centella.lang.groups import local_id
from centella.lang.memory import Shared
from centella.lang.packing import pack, unpack
from centella.lang.tracer import Tracer, current
from centella.lang.values import Expr, Operand, Value, adapt, expr_of

WARP = 32
CHUNK = 16  # bytes
HALVES = (f16, bf16)
# Registers a thread, by shape: of factors two elements each, of sums one.
FACTORS = {(16, 16): 4, (16, 8): 2, (64, 16): 4}
SUMS = {(16, 8): 4}
WIDEST = 128  # bytes of a row that one swizzle pattern covers
LINE = 8  # chunks of 128 bytes: all 32 banks once
WIDE = 64  # rows of the sums of a warpgroup


def whole_warps(tracer: Tracer, what: str) -> None:
    """Raise unless the group consists of whole warps, which all of it, or a role's, come here."""
    if tracer.workgroup % WARP:
        raise TraceError(
            f"{what} needs a workgroup of a multiple of {WARP} threads, got {tracer.workgroup}"
        )
    tracer.need_uniform(what, role=True)


class Fragment:
    """A matrix in the registers of a warp's 32 threads, as `mma_sync` takes it: opaque and linear.

    Each thread holds a few registers of it, whose layout the hardware fixes (PTX ISA, "Matrix
    Fragments for mma.m16n8k16"). A fragment is no value: it is not copied, assigned or passed
    through a variable; it is filled, loaded by `ldmatrix`, accumulated into, and its registers are
    read and written one by one, in registers of fixed names throughout. What is read before
    anything was written is a `TraceError`.

    Sums of `wgmma`, and the factor of `wgmma_held`, lie in the registers of a warpgroup's 128
    threads; while a product is under way nobody may touch them: a `TraceError`, until `wgmma_wait`.

    A factor of `mma_bytes` is one of 16-bit elements of the same registers: each has two bytes.

    Args:
        dtype: f16 or bf16 for a factor, f32 for sums, i32 for those of `mma_bytes`.
        shape: of a factor (16, 16) for A [m, k], (16, 8) for B [k, n], (64, 16) for A of
            `wgmma_held`; of sums (16, 8), or (64, n) for `wgmma`, n a multiple of 8 up to 256:
            C [m, n].

    Raises:
        TraceError: for a shape or dtype that neither takes.
    """

    def __init__(self, dtype: DType, shape: tuple[int, int]) -> None:
        t = current()
        sums = dtype in (f32, i32)
        registers = (FACTORS if dtype in HALVES else SUMS if sums else {}).get(shape)
        if dtype is f32 and shape[0] == WIDE and shape[1] in range(8, 257, 8):
            registers = shape[1] // 2
        if registers is None:
            raise TraceError(
                f"a Fragment is f16 or bf16 of (16, 16), (16, 8) or (64, 16), i32 of (16, 8), or "
                f"f32 of (16, 8) or (64, 8 to 256 in eights); got {dtype.name} of {shape}"
            )
        self.dtype: DType = dtype
        self.shape: tuple[int, int] = shape
        self.registers: int = registers
        self._written = False
        self._sums = sums
        self._type = dtype.name if sums else "u32"
        index = t.emit("fragment", "", (), (self._type, registers))
        self._handle = t.result(index, "fragment", False)

    @property
    def handle(self) -> Expr:
        """The fragment to read: what operations name it by."""
        if not self._written:
            raise TraceError("a Fragment was used before it was filled or loaded")
        self._touch()
        return self._handle

    @property
    def target(self) -> Expr:
        """The fragment to write."""
        self._written = True
        self._touch()
        return self._handle

    def pend(self) -> Expr:
        """The fragment for a product that writes it until its group has been waited for."""
        self._written = True
        return self.lend()

    def lend(self) -> Expr:
        """The fragment for a product that reads it until its group has been waited for."""
        if not self._written:
            raise TraceError("a Fragment was used before it was filled or loaded")
        current().pending[-1].add(self._handle.id)
        return self._handle

    def _touch(self) -> None:
        t = current()
        if any(self._handle.id in group for group in t.pending):
            raise TraceError(
                "a Fragment is read or written while a wgmma on it is pending: ptx.wgmma_commit() "
                "and ptx.wgmma_wait() first"
            )
        t.blocks[-1].touched.add(self._handle.id)

    def fill(self, value: float) -> None:
        """One number in every element of sums; 0 in those of a factor."""
        t = current()
        if not self._sums and value != 0:
            raise TraceError(f"a {self.dtype.name} Fragment is filled with 0, got {value!r}")
        number = adapt(t, value if self._sums else 0, self._type).const
        t.effect("fragment_fill", "", (self.target,), number)

    def __getitem__(self, register: int) -> Any:
        """A register of this thread: of sums the element at `place(register)`, f32 or i32.

        Of a factor two, as `f[register] = (value, next)` wrote them, rounded.
        """
        if register not in range(self.registers):
            raise TraceError(f"a Fragment has registers 0 to {self.registers - 1}: {register!r}")
        t = current()
        handle = self.handle
        t.check((handle,))
        type_ = self._type
        value = t.result(t.emit("fragment_get", type_, (handle.id,), register), type_, False)
        if self._sums:
            return value
        return tuple(unpack(t, value, self.dtype, half) for half in range(2))

    def word(self, register: int) -> Expr:
        """A register of a factor as it is: u32, two elements, or what else was loaded there.

        Raises:
            TraceError: for a register that there is not, or of sums.
        """
        if register not in range(self.registers) or self._sums:
            raise TraceError(
                f"words are those of a factor, 0 to {self.registers - 1}; got {register!r}"
            )
        t, handle = current(), self.handle
        t.check((handle,))
        return t.result(t.emit("fragment_get", "u32", (handle.id,), register), "u32", False)

    def __setitem__(self, register: int, value: Value | tuple[Value, ...]) -> None:
        """Write a register of this thread: of sums the element at `place(register)`.

        Of a factor two elements, f32, which are rounded to its dtype, or the word that holds both,
        u32: of A [m, k] the one at
        `place(register)` and its right neighbour, of B [k, n] that one and the one below. (PTX ISA,
        "Matrix Fragments for mma.m16n8k16": sums of two neighbouring (16, 8) fragments have, thread
        by thread, the elements of a (16, 16) factor.) Other threads may write nothing; all of the
        fragment's registers count as written.

        Raises:
            TraceError: for a register that there is not, or no two values for a factor.
        """
        if register not in range(self.registers):
            raise TraceError(f"a Fragment has registers 0 to {self.registers - 1}: {register!r}")
        t = current()
        if self._sums:
            new = expr_of(t, cast("Value", value), self._type)  # which refuses a pair
        elif isinstance(value, Operand):
            new = expr_of(t, value, "u32")
        else:
            if not isinstance(value, tuple) or len(value) != 2:
                raise TraceError(
                    f"a register of a factor takes a pair of values or a word, got {value!r}"
                )
            new = pack(t, [expr_of(t, v, "f32") for v in value], self.dtype)
        t.effect("fragment_set", "", (self.target, new), register)

    def place(self, register: int) -> tuple[Expr, Expr]:
        """Row and column of a register's (first) element, for this thread."""
        lane = local_id() % WARP
        if self.shape[0] == WIDE:
            one = 2 if self._sums else 1  # registers of a pair of neighbours
            down = local_id() // WARP % 4 * 16 + register // one % 2 * 8
            across = register // (2 * one) * 8 + register % one
            return down + lane // 4, lane % 4 * 2 + across
        row = lane // 4 + (register % 2 if self.shape == (16, 16) else register // 2) * 8
        if self._sums:
            return row, lane % 4 * 2 + register % 2
        if self.shape == (16, 16):
            return row, lane % 4 * 2 + register // 2 * 8
        return lane % 4 * 2 + register * 8, lane // 4

    def __copy__(self) -> Any:
        raise TraceError("a Fragment is not copied: it has registers of its own")

    def __iter__(self) -> Any:
        raise TraceError("a Fragment cannot be iterated: read its registers by number")


class SharedTile:
    """A matrix (or a ring of equal ones) of 16-bit elements in shared memory, with its layout.

    Rows lie in panels of at most 128 bytes, one panel after another, each row of a panel dense. The
    16-byte chunks of a row are permuted by XOR (`swizzle`), so that the eight rows that `ldmatrix`
    reads at a time touch each bank once: chunk i of a panel lies at i ^ ((i >> 3) & (swizzle / 16 -
    1)), which is the 32-, 64- and 128-byte swizzle of tensor maps (PTX ISA, "Swizzling Modes").
    Every address is derived here, so that writer and reader cannot disagree.

    Args:
        dtype: f16 or bf16.
        shape: (rows, columns) or (stages, rows, columns); rows a multiple of 8, columns of 8.
        swizzle: bytes of the pattern: 0 (none), 32, 64 or 128; None: those of a panel's row.

    Raises:
        TraceError: for a shape, dtype or swizzle that has no such layout.
    """

    def __init__(self, dtype: DType, shape: tuple[int, ...], swizzle: int | None = None) -> None:
        if dtype not in HALVES:
            raise TraceError(f"a SharedTile holds f16 or bf16, got {dtype.name}")
        sizes: tuple[Any, ...] = shape
        if len(sizes) not in (2, 3) or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise TraceError(f"a SharedTile is (rows, columns) or (stages, rows, columns): {shape}")
        self.dtype: DType = dtype
        self.shape: tuple[int, ...] = shape
        self.stages: int = shape[0] if len(shape) == 3 else 1
        self.rows: int = shape[-2]
        self.columns: int = shape[-1]
        row = self.columns * dtype.itemsize
        self.panel: int = min(row, WIDEST)  # bytes of its rows
        if self.rows % 8 or row % self.panel or self.panel not in (16, 32, 64, 128):
            raise TraceError(
                f"a SharedTile has rows in eights, of 8, 16, 32 or multiples of 64 elements; got "
                f"{shape}"
            )
        self.swizzle: int = (
            (self.panel if self.panel > CHUNK else 0) if swizzle is None else swizzle
        )
        if self.swizzle not in (0, 32, 64, 128) or self.swizzle > self.panel:
            raise TraceError(f"rows of {self.panel} bytes have no swizzle of {swizzle!r}")
        self.chunks: int = self.rows * row // CHUNK  # of a stage
        self.memory: Shared = Shared(current(), "u32", self.stages * self.chunks * 4)

    def chunk(self, row: Value, column: Value, stage: Value = 0) -> Expr:
        """The index of the chunk that holds elements 8 column to 8 column + 7 of a row.

        Args:
            row, column, stage: u32 values, or Python numbers; they are not checked here, the
                simulator reports what lies outside of the ring.
        """
        t = current()
        line, across = expr_of(t, row, "u32"), expr_of(t, column, "u32")
        width = self.panel // CHUNK
        turn = line // (LINE // width) % max(self.swizzle // CHUNK, 1)
        if self.columns * self.dtype.itemsize > self.panel:
            line, across = across // width * self.rows + line, across % width
        return line * width + (across ^ turn) + self.at_stage(stage)

    def start(self, row: Value, column: Value, stage: Value = 0) -> Expr:
        """Where a matrix begins for `wgmma`, in chunks; its descriptor has the pattern.

        Args:
            row: a multiple of 8; column: a multiple of 16 elements, or, where rows are not along k,
                of a panel's; u32 values or Python numbers.
        """
        t = current()
        width = self.panel // CHUNK
        line, across = expr_of(t, row, "u32"), expr_of(t, column, "u32") // self.dtype.per_chunk
        panel, inner = across // width, across % width
        return panel * (self.rows * width) + line * width + inner + self.at_stage(stage)

    def at_stage(self, stage: Value) -> Expr:
        """What a stage adds to the index of a chunk."""
        return expr_of(current(), stage, "u32") * self.chunks

    def down(self, rows: int) -> int:
        """What so many rows further down add to the index of a chunk: whole patterns of 8 rows."""
        if rows % LINE:
            raise TraceError(f"a swizzle repeats after {LINE} rows, got {rows}")
        return rows * (self.panel // CHUNK)

    def right(self, chunk: Value, columns: int) -> Expr:
        """The chunk so many further right in the same row: one operation, no new address.

        Args:
            chunk: in a column that has no bit in common with `columns`: from an even
                column one further is a column with bit 0 set, and so on.
        """
        width = self.panel // CHUNK
        panels, near = divmod(columns, width)
        turned = expr_of(current(), chunk, "u32") ^ near
        return turned + panels * self.rows * width

    def store(self, chunk: Value, values: Sequence[Value]) -> None:
        """Write 8 values, rounded to the dtype, to a chunk; seen by others after a barrier."""
        t = current()
        if len(values) != self.dtype.per_chunk:
            raise TraceError(f"a chunk takes {self.dtype.per_chunk} values, got {len(values)}")
        typed = [expr_of(t, v, "f32") for v in values]
        words = [pack(t, typed[i : i + 2], self.dtype) for i in range(0, len(typed), 2)]
        self.memory.store_chunk(chunk, words)
