"""Values that no operation makes: host data written, memory reserved, memory imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from centella.backends.base import Array
from centella.dtypes import DType, check_elements
from centella.errors import LimitError, ShapeError
from centella.host.interrupts import uninterrupted
from centella.ledger.call_sites import Site, call_site
from centella.ledger.counts import began, count, noted
from centella.record.values import Value
from centella.runtime.executor import Executor
from centella.specs import (
    INDEX_LIMIT,
    Shape,
    Spec,
    dense_strides,
    make_spec,
    rows_aligned,
    strided,
)

PART = 16 << 20  # bytes of a large tensor that are on the host at a time


class Storage:
    """The memory of an executor's device, for values that no operation makes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._device = executor.device
        self._pool = executor.pool

    def spec(self, shape: Shape, dtype: Any) -> Spec:
        """How this device lays out a tensor that it allocates."""
        return make_spec(shape, dtype, self._executor.backend.caps.row_alignment)

    def bytes_of(self, data: Array, spec: Spec) -> Array:
        """Host data as the bytes of its layout here: a copy, its pads filled."""
        total = spec.storage_bytes
        raw = np.empty(total, np.uint8)
        if total != spec.nbytes:
            raw[...] = 0xFF if self._pool.mode == "poison" else 0
        strided(raw, spec)[...] = data
        return raw

    @uninterrupted
    def write(self, data: Array, spec: Spec, site: Site, stays: bool = False) -> Value:
        """Host data as a value, written now.

        Args:
            stays: the data changes no more, so the CPU reads it where it is: no upload.
        """
        as_is = data.nbytes == spec.storage_bytes and data.flags.c_contiguous
        raw = data.reshape(-1).view(np.uint8) if as_is else self.bytes_of(data, spec)
        value = Value(spec, self._device, "upload", site=site)
        executor = self._executor
        with executor.lock, executor.border:
            executor.check_lost()
            if stays and self._executor.backend.caps.on_host:
                value.ready(self._pool.adopt(raw))
                return value
            buffer = self._pool.allocate(spec.storage_bytes)
            begin = began()
            executor.backend.write(buffer, raw)
            noted("upload", begin, executor.name, bytes=raw.nbytes)
        count(uploads=1, upload_bytes=raw.nbytes)
        value.ready(buffer)
        return value

    @uninterrupted
    def fill(self, specs: Sequence[Spec], read: Callable[..., None], site: Site) -> list[Value]:
        """Host data that is read part after part as values, written now: each is one upload.

        Args:
            specs: of the values, which have one number of rows, their axis 0.
            read: `read(first, *outs)` writes the rows of each value from `first` on into its `out`;
                on the CPU, into the value itself: no upload. Other threads may use the device
                meanwhile.
        """
        values = [Value(spec, self._device, "upload", site=site) for spec in specs]
        executor, rows = self._executor, specs[0].shape[0]
        pitches = [spec.strides[0] * spec.dtype.itemsize for spec in specs]
        step = max(PART // sum(pitches), 1)

        def part(first: int, outs: Sequence[Array]) -> None:
            views = []
            for out, spec in zip(outs, specs, strict=True):
                if spec.storage_bytes != spec.nbytes:
                    out[...] = 0xFF if self._pool.mode == "poison" else 0
                shape = min(step, rows - first), *spec.shape[1:]
                views.append(strided(out, Spec(shape, spec.dtype, spec.strides)))
            read(first, *views)

        if executor.backend.caps.on_host:
            wholes = [np.empty(spec.storage_bytes, np.uint8) for spec in specs]
            for first in range(0, rows, step):
                part(first, [raw[first * p : (first + step) * p]
                             for raw, p in zip(wholes, pitches, strict=True)])  # fmt: skip
            with executor.lock, executor.border:
                executor.check_lost()
                for value, raw in zip(values, wholes, strict=True):
                    value.ready(self._pool.adopt(raw))
            return values
        with executor.lock, executor.border:
            executor.check_lost()
            buffers = [self._pool.allocate(spec.storage_bytes) for spec in specs]
        begin, first = began(), 0
        sizes = [spec.storage_bytes for spec in specs]
        each = zip(buffers, sizes, pitches, strict=True)
        parts = [executor.backend.write_parts(b, size, step * pitch) for b, size, pitch in each]

        def next_part() -> list[Array]:
            with executor.lock, executor.border:
                executor.check_lost()
                outs = (next(one, None) for one in parts)  # of which none has more than another
                return [out for out in outs if out is not None]

        while outs := next_part():
            part(first, outs)  # without the lock: a file may be slow
            first += step
        noted("upload", begin, executor.name, bytes=sum(sizes))
        count(uploads=len(specs), upload_bytes=sum(sizes))
        for value, buffer in zip(values, buffers, strict=True):
            value.ready(buffer)
        return values

    @uninterrupted
    def reserve(self, spec: Spec) -> Value:
        """A value whose content is undefined; nothing is copied."""
        value = Value(spec, self._device, "empty", site=call_site())
        executor = self._executor
        with executor.lock, executor.border:
            executor.check_lost()
            buffer = self._pool.allocate(spec.storage_bytes)
        value.ready(buffer)
        return value

    @uninterrupted
    def import_buffer(self, native: Any, shape: Shape, dtype: DType, offset: int) -> Value:
        """Memory of the application's as a value: neither copied nor freed.

        Args:
            native: a wgpu buffer, a CUDA array or (address, bytes), a NumPy array; kept alive
                until the last submission that reads it is done.
            offset: bytes to the first element; rows follow one another without padding.

        Raises:
            DeviceError: not memory of this device, or it cannot be bound and read.
            DTypeError: an array of another type.
            ShapeError: it has fewer bytes than the shape needs.
            LimitError: it ends where no kernel counts elements any more, from the buffer's first.
        """
        strides = dense_strides(shape)
        if offset < 0 or offset % dtype.itemsize:
            raise ShapeError(
                f"import_buffer: expected an offset that is a multiple of {dtype.itemsize} bytes, "
                f"got {offset}"
            )
        executor = self._executor
        with executor.lock, executor.border:
            executor.check_lost()
            buffer = self._pool.adopt(native)
        check_elements("import_buffer", native, dtype)
        first = offset // dtype.itemsize
        plain = Spec(shape, dtype, strides)
        if offset + plain.nbytes > buffer.nbytes:
            raise ShapeError(
                f"import_buffer: shape {list(shape)} of {dtype.name} from byte {offset} needs "
                f"{offset + plain.nbytes:,} bytes; the buffer has {buffer.nbytes:,}"
            )
        if not self._executor.backend.caps.on_host and first + plain.span >= INDEX_LIMIT:
            raise LimitError(
                f"import_buffer: expected it within the first {INDEX_LIMIT:,} elements of the "
                f"buffer, got elements {first:,} to {first + plain.span:,}"
            )
        aligned = rows_aligned(shape, strides, dtype.itemsize, first)
        whole = offset + plain.storage_bytes <= buffer.nbytes
        value = Value(Spec(shape, dtype, strides, aligned and whole), self._device,
                      "import_buffer", site=call_site())  # fmt: skip
        value.ready(buffer, first)
        return value
