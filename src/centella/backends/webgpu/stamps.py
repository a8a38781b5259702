"""Time stamps around launches: each in a compute pass of its own, in the device's ticks.

Source: the WebGPU specification, timestamp queries. wgpu-native counts in the adapter's ticks and
says how many ns one has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import wgpu

from centella.backends.base import Array, Times
from centella.backends.webgpu.raw import Encoder, timestamp_period

PAIR = 16  # bytes of the two stamps of a launch
MOST = 2048  # launches of a query set, which holds 4096 stamps at most


class Stamps:
    """The query sets of one submission, and the buffer that their stamps are written to.

    Args:
        device: a wgpu device with `timestamp-query`.
        launches: how many to time.
    """

    def __init__(self, device: Any, launches: int) -> None:
        self._sets = [
            device.create_query_set(type="timestamp", count=2 * min(MOST, launches - first))
            for first in range(0, launches, MOST)
        ]
        self.nbytes: int = PAIR * launches
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        self._resolved: Any = device.create_buffer(size=self.nbytes, usage=usage)
        self._period: float = timestamp_period(device.queue)

    def around(self, index: int) -> tuple[Any, int]:
        """The query set of launch `index` and its first stamp; the one at its end follows."""
        return self._sets[index // MOST], 2 * (index % MOST)

    def copy_to(self, encoder: Encoder, staging: Any, at: int) -> None:
        """Put the stamps of all launches where the host reads."""
        for index, one in enumerate(self._sets):
            encoder.resolve(one, self._resolved, index * MOST * PAIR)
        encoder.copy(self._resolved, 0, staging, at, self.nbytes)

    def times(self, data: Array) -> Times:
        """Begin and end of each launch in ns."""
        ticks = data.view(np.uint64).astype(np.int64).reshape(-1, 2)
        first = int(ticks[0, 0])
        base = int(first * self._period)  # differences are small: they keep their precision
        later = (ticks - first) * self._period
        return [(base + int(begin), base + int(end)) for begin, end in later]
