"""Whether a driver stops loops: Mesa's llvmpipe does, after 65 535 rounds of a thread in all.

Where one does, kernels with loops that we did not count count how often it did, in two words of the
device (`emit.wgsl`). Each read-back brings them along: one that finds more than there were when it
was submitted raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from centella.backends.base import Array
from centella.backends.webgpu.probe import run
from centella.errors import LimitError

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


class Stops:
    """What is known of loops that the driver of a device has stopped.

    Args:
        most: rounds after which it does.

    Attributes:
        count: how many, as far as anybody has read.
        names: of kernels, by the first 32 bits of their digests.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count: int = 0
        self.names: dict[int, str] = {}

    def check(self, index: int, before: int, read: Sequence[Array]) -> None:
        """Refuse data that was read after a loop had been stopped.

        Args:
            index: of the words among what was read; before: `count` when it was submitted.

        Raises:
            LimitError: it names the kernel.
        """
        count, kernel = read[index].view(np.uint32).tolist()
        if count == before:
            return
        self.count = max(self.count, count)  # reads come back in any order
        raise LimitError(
            f"kernel {self.names[kernel]!r}: the driver of this device stopped a loop that was not "
            f"over, after {self._most:,} rounds of all loops of a thread: what the kernel wrote, "
            f"and all that was computed from it, is wrong; let more threads share the work, or "
            f"launch it in parts"
        )
