"""Pads of rows, given a value for compute-sanitizer's initcheck.

Rows are rounded up and kernels read them in chunks of that size, so they load pads that
nothing wrote: the layout leaves them undefined, and the poisoned pools of the other tests show that
they reach no result. A checker cannot know it. Before each submission this defines the pads of what
its launches write, and only those, so that initcheck still finds every element that is read unset.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from centella.specs import Spec, make_spec
from centella.submission import Submission


def pads(spec: Spec) -> list[tuple[int, int, int, int]]:
    """Blocks of bytes that no element owns: first byte, bytes, bytes from row to row, rows.

    None for views of part of a buffer, or across its rows, whose pads are another operand's.
    """
    order = sorted(range(len(spec.shape)), key=lambda i: (-spec.strides[i], i))
    shape = tuple(spec.shape[i] for i in order)
    stored = make_spec(shape, spec.dtype, 16)
    lies = tuple(spec.strides[i] for i in order)
    if not spec.size or any(
        n > 1 and a != b for n, a, b in zip(shape, lies, stored.strides, strict=True)
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


def define_pads(backend: Any) -> None:
    """Make a CUDA backend zero the pads of outputs before it runs what writes them."""
    from cuda.bindings import driver

    submit: Callable[[Submission], Any] = backend.submit

    def defined(work: Submission) -> Any:
        with backend.current():
            stream = backend._streams.turn().native
            for bound in work.launches:
                outputs = zip(bound.slots, bound.views, strict=True)
                for slot, (spec, offset) in list(outputs)[bound.inputs :]:
                    for begin, nbytes, pitch, rows in [] if offset else pads(spec):
                        status, *_ = driver.cuMemsetD2D8Async(
                            work.slots[slot].native + begin,
                            max(pitch, nbytes),
                            0,
                            nbytes,
                            rows,
                            stream,
                        )
                        assert status == driver.CUresult.CUDA_SUCCESS, status
        return submit(work)

    backend.submit = defined
