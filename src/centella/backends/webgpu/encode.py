"""Launches put into a compute pass by wgpu-native's own calls.

Through wgpu-py a launch costs three times as much. An error of one of these calls is kept by the
pass and raised where it ends, which is wgpu-py's call again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import wgpu.backends.wgpu_native as native

from centella.backends.webgpu.stamps import Stamps

SLOT = 256  # bytes of a launch's parameters


class Dispatch(NamedTuple):
    """One launch: driver handles, the offset of its parameters, the grid.

    The handles do not keep their objects alive.
    """

    pipeline: Any
    group: Any
    offset: Any
    across: int
    down: int


class Offsets:
    """Where the parameters of each launch begin in their buffer, as the driver reads it.

    Attributes:
        at: a pointer for each launch.
    """

    def __init__(self, launches: int) -> None:
        self._words = native.ffi.new("uint32_t[]", [i * SLOT for i in range(launches)])
        self.at: list[Any] = [self._words + i for i in range(launches)]


def encode(encoder: Any, dispatches: Sequence[Dispatch], stamps: Stamps | None = None) -> None:
    """One compute pass; where launches are timed, one for each."""
    if stamps is None:
        _encode(encoder.begin_compute_pass(), dispatches)
        return
    for index, dispatch in enumerate(dispatches):
        run = encoder.begin_compute_pass(timestamp_writes=stamps.around(index))
        _encode(run, (dispatch,))


def _encode(run: Any, dispatches: Sequence[Dispatch]) -> None:
    handle: Any = run._internal
    lib: Any = native.lib  # its calls are made by cffi: checkers do not see them
    set_pipeline = lib.wgpuComputePassEncoderSetPipeline
    set_group = lib.wgpuComputePassEncoderSetBindGroup
    dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
    last = None
    for pipeline, group, offset, across, down in dispatches:
        if pipeline is not last:
            set_pipeline(handle, pipeline)
            last = pipeline
        set_group(handle, 0, group, 1, offset)
        dispatch(handle, across, down, 1)
    run.end()
