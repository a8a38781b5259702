"""Subgroups of a WebGPU device: used where a probe finds that they behave as the language says.

WebGPU leaves open which threads make a subgroup, and drivers differ. The language says: neighbours,
`subgroup_size()` of them, a power of two that is the same for all. So a device has subgroups when
one small kernel agrees with that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.backends.base import Array
from centella.backends.webgpu.adapter import SUBGROUPS
from centella.backends.webgpu.probe import Words, run

THREADS = 128  # of a group
GROUPS = 3
MASKS = (1, 2, 4, 8, 16, 32, 64)
FIELDS = 8 + len(MASKS)  # words a thread writes
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
    let f = f32(x) - 2048.0;
    y[i * {fields}u + 5u] = bitcast<u32>(subgroupAdd(f));
    y[i * {fields}u + 6u] = bitcast<u32>(subgroupMin(f));
    y[i * {fields}u + 7u] = bitcast<u32>(subgroupMax(f));
{shuffles}
}}
"""


def agree(device: Any) -> bool:
    """Whether a wgpu device has subgroups as the language describes them."""
    fields = _fields(device) if SUBGROUPS in device.features else None
    return fields is not None and right(fields.T)


def _fields(device: Any) -> Words | None:
    """What each thread finds; None where it cannot run."""
    count = GROUPS * THREADS
    shuffles = [  # a mask of as many lanes as there are, or more, asks for nobody's value
        f"    y[i * {FIELDS}u + {at}u] = "
        f"select(x, subgroupShuffleXor(x, {mask}u), lanes > {mask}u);"
        for at, mask in enumerate(MASKS, FIELDS - len(MASKS))
    ]
    source = SOURCE.format(threads=THREADS, fields=FIELDS, shuffles="\n".join(shuffles))
    fields = run(device, source, np.zeros(count * FIELDS, np.uint32), GROUPS)
    return None if fields is None else fields.reshape(count, FIELDS)


def right(fields: Words) -> bool:
    """Whether these are the fields [FIELDS, threads of all groups] of neighbours."""
    lanes, *got = fields
    size = int(lanes[0])
    if (lanes != size).any() or not 8 <= size <= THREADS or size & (size - 1):
        return False
    i = np.arange(len(lanes), dtype=np.uint32)
    x = (i * np.uint32(2654435761)) >> np.uint32(20)
    of_one = x.reshape(-1, size)
    floats = of_one.astype(np.float32) - np.float32(2048)  # whole: sums are exact in any order
    reduced = [f(values, 1) for values in (of_one, floats) for f in (np.sum, np.min, np.max)]
    wanted = (
        np.tile(np.arange(size), len(of_one)),
        *(np.repeat(_bits(each), size) for each in reduced),
        *(x[i ^ mask] if mask < size else x for mask in MASKS),
    )
    return all((a == b).all() for a, b in zip(got, wanted, strict=True))


def _bits(values: Array) -> Words:
    return values.view(np.uint32) if values.dtype.kind == "f" else values.astype(np.uint32)
