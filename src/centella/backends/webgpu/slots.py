"""Where the parameters of launches lie: a slot each, in one buffer that they take by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wgpu

from centella.backends.webgpu.groups import Groups
from centella.backends.webgpu.raw import SLOT

PARAMS: int = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC
# Launches whose parameters are kept: at first, and where they begin anew.
SLOTS: tuple[int, int] = (256, 1 << 14)


class Slots:
    """Slots of a device.

    Args:
        new: a buffer of so many bytes for a usage.
        groups: what binds them, which is told when they are given anew.

    Attributes:
        buffer: that the slots are in.
    """

    def __init__(self, new: Callable[[int, int], Any], groups: Groups) -> None:
        self._new, self._groups = new, groups
        self._used = 0
        self.buffer: Any = new(SLOTS[0] * SLOT, PARAMS)

    def take(self, launches: int) -> int:
        """The first of so many slots. Where none are left all are given anew."""
        have = self.buffer.size // SLOT
        if self._used + launches > have:
            self._used = 0
            self._groups.epoch += 1  # what is remembered of launches has their slots no more
            wanted = max(launches, min(2 * have, SLOTS[1]))
            if wanted > have:
                self.buffer = self._new(wanted * SLOT, PARAMS)
                self._groups.clear()
        self._used += launches
        return self._used - launches
