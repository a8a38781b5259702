"""Launches prepared once: parameters in a buffer of their own, bind groups, raw calls.

A replay encodes by wgpu-native's own calls: through wgpu-py a launch costs three times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import wgpu.backends.wgpu_native as native

from centella.backends.webgpu.stamps import Stamps


class Dispatch(NamedTuple):
    """One launch: driver handles, the offset of its parameters, the grid."""

    pipeline: Any
    group: Any
    offsets: Any
    across: int
    down: int


class Prepared:
    """The launches of a plan, ready to be encoded again and again.

    Args:
        dispatches: (pipeline, bind group, parameter offset, grid) of each, as wgpu-py objects.
        params: the buffer of their parameters.
    """

    def __init__(
        self, dispatches: Sequence[tuple[Any, Any, int, tuple[int, int]]], params: Any
    ) -> None:
        self._kept = (params, dispatches)  # handles below do not keep their objects alive
        self._steps = [
            Dispatch(
                pipeline._internal,
                group._internal,
                native.ffi.new("uint32_t[]", [offset]),
                across,
                down,
            )
            for pipeline, group, offset, (across, down) in dispatches
        ]

    def encode(self, encoder: Any, stamps: Stamps | None = None) -> None:
        """One compute pass; where launches are timed, one for each."""
        if stamps is None:
            self._encode(encoder.begin_compute_pass(), self._steps)
            return
        for index, step in enumerate(self._steps):
            run = encoder.begin_compute_pass(timestamp_writes=stamps.around(index))
            self._encode(run, [step])

    def _encode(self, run: Any, steps: Sequence[Dispatch]) -> None:
        handle: Any = run._internal
        lib: Any = native.lib  # its calls are made by cffi: checkers do not see them
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        last = None
        for pipeline, group, offsets, across, down in steps:
            if pipeline is not last:
                set_pipeline(handle, pipeline)
                last = pipeline
            set_group(handle, 0, group, 1, offsets)
            dispatch(handle, across, down, 1)
        run.end()
