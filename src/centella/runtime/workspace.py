"""Memory for the temporaries of replays.

A device runs submissions in order, and what is temporary in one is over with when the next begins:
so all replays of a device compute in the same buffers, whichever of them are kept ready. Where the
pool clears what it hands out, each has buffers of its own.
"""

from __future__ import annotations

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
        self.held: WeakSet[Buffer] = WeakSet()

    def share(self) -> Share:
        """Buffers for one more plan."""
        return Share(self)


class Share:
    """The part of a workspace that one plan uses: no buffer twice."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._taken: set[Buffer] = set()

    def allocate(self, nbytes: int) -> Buffer:
        """The smallest buffer of the workspace with room, else a new one.

        Raises:
            LimitError, OutOfMemoryError, TransferForbidden: as `Pool.allocate`.
        """
        most = self._workspace.most
        common = () if self._workspace.pool.mode == "clear" else self._workspace.held
        room = [
            b for b in common
            if nbytes <= b.nbytes and (b.nbytes <= most or nbytes > most) and b not in self._taken
        ]  # fmt: skip
        found = min(room, key=lambda buffer: buffer.nbytes, default=None)
        if found is None:
            found = self._workspace.pool.allocate(nbytes)
            self._workspace.held.add(found)
        self._taken.add(found)
        return found
