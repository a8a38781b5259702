"""What a tensor is (`Spec`), how it lies in memory (`Layout`), what a device can do (`Caps`)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType

Shape = tuple[int, ...]
INDEX_LIMIT = (1 << 32) - 64  # kernels count elements in 32 bits
MAX_GROUPS = 1 << 31  # of a launch: every backend takes fewer


@lru_cache(maxsize=8192)
def dense_strides(shape: Shape) -> Shape:
    """Row-major strides, in elements, of a shape without padding."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=8192)
def padded_strides(shape: Shape, itemsize: int, row_alignment: int) -> Shape:
    """Row-major strides, in elements, with rows rounded up as the device stores them.

    From rank 2 up, rows of `row_alignment` bytes or more are rounded up to it and shorter rows
    to a 4-byte word; rank 0 and 1 and `row_alignment` 1 are dense.
    """
    if len(shape) < 2 or row_alignment <= 1:
        return dense_strides(shape)
    row = max(shape[-1], 1) * itemsize
    unit = row_alignment if row >= row_alignment else 4
    pitch = -(-row // unit) * unit // itemsize
    strides = [1, pitch]
    for extent in reversed(shape[1:-1]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides))


class Spec(Struct, frozen=True, cache_hash=True):
    """Shape, dtype and strides (in elements) of a value; the offset rides with the binding.

    `aligned` says that the first element starts on a 16-byte boundary and that every outer
    stride is a multiple of 16 bytes, so that rows may be read in 16-byte chunks. The hash is
    computed once: a Spec is part of every key that recording and planning look up.
    """

    shape: Shape
    dtype: DType
    strides: Shape
    aligned: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Logical bytes: elements times item size, without padding."""
        return self.size * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Elements from the first to one past the last, padding between them included."""
        if self.size == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def storage_bytes(self) -> int:
        """Bytes from the first element to the end of the last one's 16-byte chunk, at least 16.

        A buffer of its own has so many, and a launch touches no more of a larger one: pads of rows
        end with a chunk.
        """
        return max(16, -(-self.span * self.dtype.itemsize // 16) * 16)

    @property
    def unit_rows(self) -> bool:
        """True when neighbours in the last dimension are neighbours in memory."""
        return not self.shape or self.strides[-1] == 1 or self.shape[-1] <= 1


class Described:
    """Something on a device that a Spec describes."""

    __slots__ = ()
    spec: Spec

    @property
    def shape(self) -> Shape:
        """Extents of each dimension."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """Storage type of the elements."""
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def nbytes(self) -> int:
        """Logical bytes, without padding."""
        return self.spec.nbytes


@lru_cache(maxsize=8192)
def make_spec(shape: Shape, dtype: DType, row_alignment: int) -> Spec:
    """The Spec a device gives a tensor that it allocates itself."""
    strides = padded_strides(shape, dtype.itemsize, row_alignment)
    return Spec(shape, dtype, strides, rows_aligned(shape, strides, dtype.itemsize))


@lru_cache(maxsize=8192)
def view_spec(shape: Shape, dtype: DType, strides: Shape, whole: bool) -> Spec:
    """The Spec of a view of memory; `whole`: that begins and ends on 16-byte boundaries."""
    return Spec(shape, dtype, strides, whole and rows_aligned(shape, strides, dtype.itemsize))


def strided(data: Array, spec: Spec, start: int = 0) -> Array:
    """The array that a Spec describes in flat bytes on the host, from byte `start` on."""
    shape, dtype, strides = _in_bytes(spec)
    if strides is None:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, data, start, strides)


@lru_cache(maxsize=8192)
def _in_bytes(spec: Spec) -> tuple[Shape, np.dtype[Any], Shape | None]:
    """Shape, dtype and strides as NumPy takes them; no strides where there are no elements."""
    strides = tuple([s * spec.dtype.itemsize for s in spec.strides])
    return spec.shape, spec.dtype.numpy, strides if spec.size else None


def rows_aligned(shape: Shape, strides: Shape, itemsize: int, offset: int = 0) -> bool:
    """True when every row starts on a 16-byte boundary, counted from the buffer's start.

    Rows are runs of neighbouring elements, along whichever dimension has stride 1.
    """
    if offset * itemsize % 16:
        return False
    if strides and strides[-1] != 1 and shape[-1] > 1 and 1 in strides:
        along = strides.index(1)
        shape = (*shape[:along], *shape[along + 1 :], 1)
        strides = (*strides[:along], *strides[along + 1 :], 1)
    pairs = zip(shape[:-1], strides[:-1], strict=True)
    return all(n <= 1 or s * itemsize % 16 == 0 for n, s in pairs)


def pads(spec: Spec, offset: int = 0) -> list[tuple[int, int, int, int]]:
    """Blocks of bytes that no element owns: first byte, bytes, bytes from row to row, rows.

    None for what begins inside a buffer or lies across its rows: they may be others' elements.
    """
    order = sorted(range(len(spec.shape)), key=lambda i: (-spec.strides[i], i))
    shape = tuple(spec.shape[i] for i in order)
    stored = make_spec(shape, spec.dtype, 16)
    lies = tuple(spec.strides[i] for i in order)
    if (
        offset
        or not spec.size
        or any(n > 1 and a != b for n, a, b in zip(shape, lies, stored.strides, strict=True))
    ):
        return []
    rows, size = math.prod(shape[:-1]), spec.dtype.itemsize
    data = (shape[-1] if shape else 1) * size
    pitch = stored.strides[-2] * size if len(shape) >= 2 else data
    blocks = [
        (data, pitch - data, pitch, rows),
        (rows * pitch, stored.storage_bytes - rows * pitch, 0, 1),
    ]
    return [block for block in blocks if block[1]]


class Caps(Struct, frozen=True):
    """What a device can do, as far as a choice of kernels may depend on it.

    Attributes:
        target: "numpy", "ir" (the simulator), "wgsl" or "ptx".
        row_alignment: bytes that rows of rank >= 2 are rounded up to (1 on the CPU).
        max_storage_buffers: tensor arguments one kernel may bind.
        max_binding: bytes of one binding: what a launch sees of a buffer.
        binding_alignment: bytes that a binding of a part of a buffer begins on a multiple of.
        max_buffer: bytes of one allocation.
        max_workgroup: threads a workgroup may have.
        max_shared: bytes of workgroup memory a kernel may use.
        max_groups: workgroups along one side of a grid.
        subgroups: True when there are subgroup operations and subgroups are neighbouring threads;
            of a WebGPU device, as probed when it is opened.
        native_f16_pack: True when the target's own f32 to f16 rounding was probed and agrees.
        native_exp2: True when the target's own power of 2 is as exact as `lang.exp2_native`
            says; of a WebGPU device, as probed when it is opened.
        arch: PTX target ("sm_90a"), else "".
        rewrites_arithmetic: True when a probe at opening found that the driver gives f32 formulas
            values other than IEEE's, so that its WGSL keeps the driver from it.
        max_loop_rounds: rounds of loops, summed, after which the driver stops each loop of a
            thread; 0: a probe at opening found no such bound.
        family: "nvidia", "amd", "intel", "apple", "software", "simulator", "cpu".
    """

    target: str
    row_alignment: int = 16
    max_storage_buffers: int = 8
    max_binding: int = 128 << 20
    binding_alignment: int = 256
    max_buffer: int = 256 << 20
    max_workgroup: int = 256
    max_shared: int = 16 << 10
    max_groups: int = 65535
    subgroups: bool = False
    native_f16_pack: bool = False
    native_exp2: bool = False
    rewrites_arithmetic: bool = False
    max_loop_rounds: int = 0
    arch: str = ""
    family: str = "cpu"

    @property
    def on_host(self) -> bool:
        """Whether operations are calls of NumPy, in the host's own memory."""
        return self.target == "numpy"

    @property
    def adapter_class(self) -> str:
        """What tables of measured variants know the device by: "cuda", or its family."""
        return "cuda" if self.target == "ptx" else self.family

    @property
    def sm(self) -> int:
        """The number of the PTX target, such as 90; 0 without one."""
        return int("".join(filter(str.isdigit, self.arch)) or 0)

    @property
    def tensor_cores(self) -> bool:
        """Whether there is `mma_sync`: in PTX from sm_80 on, and in the simulator."""
        return self.target == "ir" or self.sm >= 80

    @property
    def fast_tensor_cores(self) -> bool:
        """Whether a GPU has tensor cores: kernels for the simulator's are asked for by name."""
        return self.tensor_cores and self.target != "ir"

    @property
    def shuffles(self) -> bool:
        """Whether subgroups are neighbouring threads by promise: CUDA has one, WebGPU none."""
        return self.subgroups and self.target == "ptx"

    @property
    def warpgroups(self) -> bool:
        """Whether there are wgmma and the copy engine: on Hopper, and in the simulator."""
        return self.target == "ir" or self.arch == "sm_90a"

    @property
    def clusters(self) -> bool:
        """Whether groups of a cluster reach each other's memory: in PTX from sm_90 on."""
        return self.target == "ir" or self.sm >= 90

    @property
    def early_launch(self) -> bool:
        """Whether a launch may let the next one begin before it is over: in PTX from sm_90 on."""
        return self.sm >= 90

    @property
    def reserves_registers(self) -> bool:
        """Whether a kernel may ask for registers, by groups a multiprocessor: PTX from sm_80 on."""
        return self.sm >= 80

    @property
    def binds_by_pointer(self) -> bool:
        """Whether a kernel gets addresses: it sees all memory, and no binding ends before that."""
        return self.target == "ptx"

    @property
    def narrow_activations(self) -> bool:
        """Whether activations are by default as narrow as stored weights: CUDA, tuned so."""
        return self.target == "ptx"

    @property
    def launches_are_free(self) -> bool:
        """Whether a launch costs nothing beside its work: where a CPU does it."""
        return self.uses_host_memory

    @property
    def uses_host_memory(self) -> bool:
        """Whether its memory is that of the process, since a CPU computes."""
        return self.family in ("software", "simulator", "cpu")

    def has_room(self, spec: Spec) -> bool:
        """Whether a launch may see a whole tensor of its own, and count its elements."""
        return spec.storage_bytes <= self.max_binding and spec.span < INDEX_LIMIT

    @property
    def safe_binding(self) -> int:
        """Bytes that a binding has room for wherever they begin: whole chunks, as storage has."""
        return (self.max_binding - self.binding_alignment) // 16 * 16
