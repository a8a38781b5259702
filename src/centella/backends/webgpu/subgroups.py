"""Subgroups of a WebGPU device: used where a probe finds that they behave as the language says.

WebGPU leaves open which threads make a subgroup, and drivers differ. The language says: neighbours,
`subgroup_size()` of them, a power of two that is the same for all. So a device has subgroups when
one small kernel agrees with that.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from centella.backends.webgpu.adapter import SUBGROUPS
from centella.backends.webgpu.probe import run

log: logging.Logger = logging.getLogger("centella.webgpu")

THREADS = 128  # of a group
GROUPS = 3
FIELDS = 6  # words a thread writes
SOURCE = """
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size({threads})
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>,
        @builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) lanes: u32) {{
    let i = group.x * {threads}u + thread;
    let x = (i * 2654435761u) >> 20u;
    y[i * {fields}u] = lanes;
    y[i * {fields}u + 1u] = lane;
    y[i * {fields}u + 2u] = subgroupAdd(x);
    y[i * {fields}u + 3u] = subgroupMin(x);
    y[i * {fields}u + 4u] = subgroupMax(x);
    y[i * {fields}u + 5u] = subgroupShuffleXor(x, 1u) + (subgroupShuffleXor(x, 4u) << 12u);
}}
"""


def agree(device: Any) -> bool:
    """Whether a wgpu device has subgroups as the language describes them."""
    if SUBGROUPS not in device.features:
        return False
    try:
        return right(_fields(device).T)
    except Exception as error:  # of the driver's compiler, or of the device
        log.info("no subgroups: %s", error)
        return False


def _fields(device: Any) -> np.ndarray[Any, Any]:
    """What each thread finds."""
    count = GROUPS * THREADS
    source = SOURCE.format(threads=THREADS, fields=FIELDS)
    found = run(device, source, np.zeros(count * FIELDS, np.uint32), GROUPS)
    return found.reshape(count, FIELDS)


def right(found: np.ndarray[Any, Any]) -> bool:
    """Whether these are the fields [FIELDS, threads of all groups] of neighbours."""
    lanes, lane, total, least, most, shuffled = found
    size = int(lanes[0])
    if (lanes != size).any() or not 8 <= size <= THREADS or size & (size - 1):
        return False
    i = np.arange(len(lanes), dtype=np.uint32)
    x = (i * np.uint32(2654435761)) >> np.uint32(20)
    of_one = x.reshape(-1, size)
    wanted = (
        np.tile(np.arange(size), len(of_one)),
        np.repeat(of_one.sum(1), size),
        np.repeat(of_one.min(1), size),
        np.repeat(of_one.max(1), size),
        x[i ^ 1] + (x[i ^ 4] << np.uint32(12)),
    )
    got = (lane, total, least, most, shuffled)
    return all((a == b).all() for a, b in zip(got, wanted, strict=True))
