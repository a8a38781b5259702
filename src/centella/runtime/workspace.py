"""Memory for the temporaries of replays.

A device runs submissions in order, and what is temporary in one is over with when the next begins:
so all replays of a device compute in the same buffers, whichever of them are kept ready. Where the
pool clears what it hands out, each has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from centella.backends.base import Buffer
from centella.runtime.memory import Pool


class Workspace:
    """The buffers that replays of one device have for temporaries; they own them together.

    Args:
        pool: where memory comes from.
        most: bytes that can be bound whole; a larger buffer stands in for no smaller one.
    """

    def __init__(self, pool: Pool, most: int) -> None:
        self.pool: Pool = pool
        self.most: int = most
        self.buffers: WeakSet[Buffer] = WeakSet()

    def share(self) -> Callable[[int], Buffer]:
        """Buffers for one more plan: gives the smallest with room, none twice, else a new one.

        Raises:
            LimitError, OutOfMemoryError, TransferForbidden: when it is called, as `Pool.allocate`.
        """
        taken: set[Buffer] = set()

        def allocate(nbytes: int) -> Buffer:
            shared = () if self.pool.mode == "clear" else self.buffers
            room = [
                b for b in shared
                if nbytes <= b.nbytes and (b.nbytes <= self.most or nbytes > self.most)
                and b not in taken
            ]  # fmt: skip
            buffer = min(room, key=lambda b: b.nbytes, default=None) or self.pool.allocate(nbytes)
            self.buffers.add(buffer)
            taken.add(buffer)
            return buffer

        return allocate
