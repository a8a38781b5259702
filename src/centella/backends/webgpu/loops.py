"""Whether a driver stops loops: Mesa's llvmpipe does, after 65 535 rounds of a thread in all."""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.backends.webgpu.probe import run

ASKED = 1 << 17  # rounds: a millisecond of a GPU's thread
SOURCE = """
@group(0) @binding(0) var<storage, read_write> y: array<u32>;

@compute @workgroup_size(1)
fn main() {
    let asked = y[0];
    var x = y[1];
    var rounds = 0u;
    for (var i = 0u; i < asked; i += 1u) {
        x = x * 1664525u + (x >> 7u);
        rounds += 1u;
    }
    y[0] = rounds;
    y[1] = x;
}
"""


def most_rounds(device: Any) -> int:
    """Rounds of loops after which the driver of a wgpu device stops a thread's; 0: it does not."""
    words = run(device, SOURCE, np.array([ASKED, 1], np.uint32), 1)
    return 0 if words is None or words[0] == ASKED else int(words[0])
