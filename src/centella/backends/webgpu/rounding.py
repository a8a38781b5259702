"""WGSL's own rounding to f16: used where a probe finds that it rounds as the language says.

WGSL leaves open how `pack2x16float` rounds, what it makes of numbers beyond f16, and whether it
keeps subnormals. The language says: to nearest even, infinities beyond, subnormals kept.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import numpy as np

from centella.backends.webgpu.probe import run

log: logging.Logger = logging.getLogger("centella.webgpu")

Array = np.ndarray[Any, Any]
THREADS = 64
SOURCE = """
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size({threads})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    let x = bitcast<f32>(y[id.x]);
    y[id.x] = pack2x16float(vec2<f32>(x, x));
}}
"""


def agrees(device: Any) -> bool:
    """Whether a wgpu device rounds to f16 as the language describes it."""
    try:
        return right(_packed(device, probes()))
    except Exception as error:  # of the driver's compiler, or of the device
        log.info("no rounding to f16 of its own: %s", error)
        return False


@lru_cache(maxsize=1)
def probes() -> Array:
    """Bits of f32 numbers where roundings differ: every exponent, next to and at each middle."""
    exponents = np.arange(127 - 27, 127 + 19, dtype=np.uint32) << 23  # tiny ones, and beyond f16
    kept = np.array([0, 1, 2, 0x155, 0x1FF, 0x200, 0x3FE, 0x3FF], np.uint32) << 13
    rest = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    finite = (exponents[:, None, None] | kept[:, None] | rest).reshape(-1)
    ends = np.array([0, 1, 0x7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x477FEFFF, 0x477FF000],
                    np.uint32)  # fmt: skip
    both = np.concatenate([finite, ends])
    both = np.concatenate([both, both | np.uint32(0x80000000)])
    return np.resize(both, -(-both.size // THREADS) * THREADS)


def right(packed: Array) -> bool:
    """Whether these are the probes, each rounded twice into a word."""
    low, high = packed & 0xFFFF, packed >> 16
    with np.errstate(all="ignore"):
        wanted = probes().view(np.float32).astype(np.float16)
    got = low.astype(np.uint16).view(np.float16)
    same = (got.view(np.uint16) == wanted.view(np.uint16)) | (np.isnan(got) & np.isnan(wanted))
    return bool((low == high).all() and same.all())


def _packed(device: Any, values: Array) -> Array:
    """What the device makes of each."""
    return run(device, SOURCE.format(threads=THREADS), values, values.size // THREADS)
