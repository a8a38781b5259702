"""Whether a driver rewrites arithmetic: x - x to 0, (x + 1) - x to 1, (x s) s to x (s s).

WGSL lets compilers do so where no number is infinite or NaN and rounding does not matter; the
language promises IEEE. Each of these formulas has another value, by far, when it is rewritten; none
depends on whether a product and a sum are rounded once or twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.backends.base import Array
from centella.backends.webgpu.probe import run

FORMULAS = (
    "(x + 1.0) - x", "x - (x + 1.0)", "x - x", "(x + 1.0) - (x + 1.0)", "x * 0.0", "x / x",
    "(x + 1e8) - 1e8", "(x * 1e30) * 1e-30", "(x * s) * s", "(s * x) * s", "x - floor(x)",
    "sqrt(x) * sqrt(x)",
)  # fmt: skip
X = (0.0, 0.5, 1.0, 0.75, 1e8, 1e20, 8e37, -1.0, np.inf, -np.inf, np.nan)
S = (2.0**64, 2.0**-64)
SUBNORMAL = 2.0**-126  # below it numbers may be 0
SOURCE = """
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) id: vec3<u32>) {{
    let at = id.x * {fields}u;
    let x = bitcast<f32>(y[at]);
    let s = bitcast<f32>(y[at + 1u]);
{lines}
}}
"""


def rewrites(device: Any) -> bool:
    """Whether the driver of a wgpu device gives one of the formulas another value."""
    lines = [f"    y[at + {i}u] = bitcast<u32>({text});" for i, text in enumerate(FORMULAS)]
    source = SOURCE.format(fields=len(FORMULAS), lines="\n".join(lines))
    operands = np.zeros((len(X) * len(S), len(FORMULAS)), np.float32)
    operands[:, :2] = probes()
    words = run(device, source, operands.view(np.uint32).reshape(-1), len(operands))
    return words is not None and not right(words.view(np.float32).reshape(operands.shape))


def probes() -> Array:
    """Values of x and s [.., 2]."""
    return np.array([(x, s) for x in X for s in S], np.float32)


def right(values: Array) -> bool:
    """Whether these are the values of the formulas [probes, formulas]."""
    return bool(np.isclose(values, expected(), rtol=1e-6, atol=SUBNORMAL, equal_nan=True).all())


def expected() -> Array:
    """The values of the formulas, each operation rounded: their text means the same to NumPy."""
    x, s = probes().T
    names = {"x": x, "s": s, "floor": np.floor, "sqrt": np.sqrt}
    with np.errstate(all="ignore"):
        columns: list[Array] = [eval(text, names) for text in FORMULAS]
    assert all(column.dtype == np.float32 for column in columns)
    return np.stack(columns, -1)
