"""One launch of a WGSL text on a wgpu device, for what is asked of an adapter when it is opened."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import wgpu
from numpy.typing import NDArray

log: logging.Logger = logging.getLogger("centella.webgpu")
Words = NDArray[np.uint32]


def run(device: Any, source: str, words: Words, groups: int) -> Words | None:
    """The words of the only binding, `var<storage, read_write> y`, after a launch of `main`.

    None where the driver or its compiler refuses, which is logged.
    """
    try:
        return _run(device, source, words, groups)
    except Exception as error:  # of the driver's compiler, or of the device
        log.info("a probe of the adapter could not run: %s", error)
        return None


def _run(device: Any, source: str, words: Words, groups: int) -> Words:
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    buffer = device.create_buffer_with_data(data=words, usage=usage)
    try:
        module = device.create_shader_module(code=source)
        pipeline = device.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )
        group = device.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[{"binding": 0, "resource": {"buffer": buffer}}],
        )
        encoder = device.create_command_encoder()
        work = encoder.begin_compute_pass()
        work.set_pipeline(pipeline)
        work.set_bind_group(0, group)
        work.dispatch_workgroups(groups)
        work.end()
        device.queue.submit([encoder.finish()])
        return np.frombuffer(device.queue.read_buffer(buffer), np.uint32)
    finally:
        buffer.destroy()
