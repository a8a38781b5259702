"""First use of pipelines before they are timed: some drivers compile a pipeline when it first runs.

lavapipe does, for seconds, between the time stamps of the first launch. So what is new to a timed
submission is dispatched before it for no groups, which compiles and computes nothing; the time that
takes is noted as that of compiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from centella.backends.base import Launch
from centella.backends.webgpu.prepared import Prepared
from centella.backends.webgpu.raw import Encoder, submit
from centella.backends.webgpu.ticket import WebGpuTicket
from centella.ledger.counts import began, noted


class Warm:
    """The pipelines of a device that have run, as far as timed submissions know.

    Args:
        native: the wgpu device.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._known: WeakSet[Any] = WeakSet()

    def run(self, launches: Sequence[Launch], prepared: Prepared) -> None:
        """Run once, for no groups, what may not have run; waits for it and for all before."""
        if prepared.runs:
            return
        new = {
            bound.pipeline[0]: (bound.program.name, dispatch)
            for bound, dispatch in zip(launches, prepared.dispatches, strict=True)
            if bound.pipeline[0] not in self._known
        }
        if not new:
            return
        self._wait()
        for pipeline, (kernel, (handle, group, offset, *_)) in new.items():
            begin = began()
            encoder = Encoder(self._native)
            encoder.launch([(handle, group, offset, 0, 1)])
            submit(self._native.queue, [encoder.finish()])
            self._wait()
            noted("compile", begin, kernel=kernel)
            self._known.add(pipeline)

    def _wait(self) -> None:
        WebGpuTicket(self._native, None, 0, [], lambda _: None).wait()
