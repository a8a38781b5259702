"""Pads of rows, given a value for compute-sanitizer's initcheck.

Rows are rounded up and kernels read them in chunks of that size, so they load pads that
nothing wrote: the layout leaves them undefined, and the poisoned pools of the other tests show that
they reach no result. A checker cannot know it. Before each submission this defines the pads of what
its launches write, and only those, so that initcheck still finds every element that is read unset.
The simulator allows the same reads and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella.backends.base import Submission
from centella.emit.program import Program
from centella.specs import pads


def define_pads(backend: Any) -> None:
    """Make a CUDA backend zero the pads of outputs before it runs what writes them."""
    from cuda.bindings import driver

    submit: Callable[[Submission], Any] = backend.submit

    def defined(work: Submission) -> Any:
        with backend.current():
            stream = backend._streams.turn().native
            for bound in work.launches:
                assert isinstance(bound.program, Program)
                operands = zip(bound.program.ir.args, bound.slots, bound.views, strict=True)
                for arg, slot, (spec, offset) in operands:
                    for begin, nbytes, pitch, rows in pads(spec, offset) if arg.writable else []:
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
