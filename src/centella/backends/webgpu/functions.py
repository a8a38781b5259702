"""WGSL's own functions: used where a probe finds them as exact as the language says.

WGSL leaves open how `pack2x16float` rounds, what it makes of numbers beyond f16, and whether it
keeps subnormals; `exp2` may be off by more the larger its operand is. The language says: to nearest
even, infinities beyond, subnormals kept; and 4 ulp, with infinities and NaN as they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from centella.backends.base import Array
from centella.backends.webgpu.probe import run

THREADS = 64
ULP = 2.0**-23  # of numbers from 1 on
SOURCE = """
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size({threads})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    let x = bitcast<f32>(y[id.x]);
    if (id.x < {halves}u) {{
        y[id.x] = pack2x16float(vec2<f32>(x, x));
    }} else {{
        y[id.x] = bitcast<u32>(exp2(x));
    }}
}}
"""


def agrees(device: Any) -> tuple[bool, bool]:
    """Whether a wgpu device rounds to f16, and has powers of 2, as the language describes them."""
    halves = probes()
    words = np.concatenate([halves, exponents().view(np.uint32)])
    source = SOURCE.format(threads=THREADS, halves=halves.size)
    computed = run(device, source, words, words.size // THREADS)
    if computed is None:
        return False, False
    return rounds(computed[: halves.size]), powers(computed[halves.size :].view(np.float32))


@lru_cache(maxsize=1)
def probes() -> Array:
    """Bits of f32 numbers where roundings differ: every exponent, next to and at each middle."""
    far = (0, 1, 2, 64, 190, 253, 254)  # subnormal in f32, its largest, and between
    near = range(127 - 27, 127 + 19)  # tiny ones, and beyond f16
    exponents = np.array([*far, *near], np.uint32) << 23
    kept = np.array([0, 1, 2, 0x155, 0x1FF, 0x200, 0x3FE, 0x3FF], np.uint32) << 13
    rest = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    finite = (exponents[:, None, None] | kept[:, None] | rest).reshape(-1)
    ends = np.array([0, 1, 0x7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x477FEFFF, 0x477FF000],
                    np.uint32)  # fmt: skip
    both = np.concatenate([finite, ends])
    return _whole_groups(np.concatenate([both, both | np.uint32(0x80000000)]))


@lru_cache(maxsize=1)
def exponents() -> Array:
    """f32 numbers: whole ones and what is next to them, all between, tiny ones, and the ends.

    Densest where powers are about to be infinite, subnormal and 0.
    """
    whole = np.arange(-152, 131, dtype=np.float32)
    near = [np.nextafter(whole, np.float32(end)) for end in (-np.inf, np.inf)]
    between = [
        np.linspace(low, high, count, dtype=np.float32)
        for low, high, count in ((-127, 127, 4096), (-151, -125, 1024), (126, 129, 1024))
    ]
    tiny = np.float32(2.0) ** np.arange(-149, 0, 7, dtype=np.float32)
    ends = np.array([-np.inf, np.inf, np.nan, -3.2e38, 3.2e38, -1000, 1000], np.float32)
    return _whole_groups(np.concatenate([whole, *near, *between, tiny, -tiny, ends]))


def _whole_groups(values: Array) -> Array:
    return np.resize(values, -(-values.size // THREADS) * THREADS)


def rounds(packed: Array) -> bool:
    """Whether these are the probes, each rounded twice into a word."""
    low, high = packed & 0xFFFF, packed >> 16
    with np.errstate(all="ignore"):
        wanted = probes().view(np.float32).astype(np.float16)
    got = low.astype(np.uint16).view(np.float16)
    same = (got.view(np.uint16) == wanted.view(np.uint16)) | (np.isnan(got) & np.isnan(wanted))
    return bool((low == high).all() and same.all())


def powers(computed: Array) -> bool:
    """Whether these are powers of the exponents, within 4 ulp; tiny ones may be 0."""
    with np.errstate(all="ignore"):
        wanted = np.exp2(exponents().astype(np.float64))
        wanted = np.where(wanted >= 2.0**128, np.inf, wanted)
        off = np.abs(computed.astype(np.float64) - wanted)
        within = np.isfinite(wanted) & (off <= 4 * ULP * 2.0 ** np.floor(np.log2(wanted)))
    tiny = (wanted < 2.0**-126) & (computed >= 0) & (computed <= np.float32(2.0**-126))
    tiny &= (computed == 0) | (wanted >= 2.0**-150)
    ends = ~np.isfinite(wanted) & (
        (computed == wanted.astype(np.float32)) | (np.isnan(computed) & np.isnan(wanted))
    )
    return bool((within | tiny | ends).all())
