"""Whether a driver stops loops: Mesa's llvmpipe does, after 65 535 rounds of a thread in all."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from centella.backends.webgpu.probe import run

log: logging.Logger = logging.getLogger("centella.webgpu")

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
    try:
        words = run(device, SOURCE, np.array([ASKED, 1], np.uint32), 1)
    except Exception as error:  # of the driver's compiler, or of the device
        log.info("how long loops may run is unknown: %s", error)
        return 0
    rounds = int(words[0])
    return 0 if rounds == ASKED else rounds
