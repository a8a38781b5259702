"""Launches prepared once: parameters in their slots, bind groups, driver handles; encoded ahead.

A command buffer is used once, and encoding takes most of what a submission costs the host. So
whoever waits for the device encodes meanwhile what has run before and is likely to run again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import ref

from msgspec import Struct

from centella.backends.base import Bound
from centella.backends.webgpu.raw import Checked, Commands, Dispatch, Encoder, Offsets
from centella.errors import DeviceError

LEAST = 16  # launches: below, the submission of one more command buffer costs what is saved
MOST = 8  # plans that have commands ahead


class Prepared(Struct, weakref=True, eq=False):
    """The launches of a plan on its buffers, ready to be encoded again and again.

    Attributes:
        groups, params, offsets: what the dispatches refer to.
        runs: how often it was submitted.
        spare: its launches encoded for the next time.
    """

    dispatches: Sequence[Dispatch]
    groups: Any
    params: Any
    offsets: Any
    runs: int = 0
    spare: Commands | None = None

    def taken(self) -> Commands | None:
        """The commands that were encoded ahead, to be submitted now."""
        spare, self.spare = self.spare, None
        return spare


def prepared(
    launches: Sequence[Bound], groups: Sequence[Any], params: Any, offsets: Offsets, most: int
) -> Prepared:
    """Launches with their bind groups and the offsets of their parameters.

    Args:
        most: groups along one side of a grid.
    """
    found: list[Dispatch] = []
    for bound, group, at in zip(launches, groups, offsets.at, strict=True):
        down = -(-bound.groups // most)  # folded where one side of a grid is too long
        across = bound.groups if down == 1 else -(-bound.groups // down)
        found.append((bound.pipeline[2], group._internal, at, across, down))
    return Prepared(found, groups, params, offsets)


class Ahead:
    """What is to be encoded while somebody waits.

    Args:
        native: the wgpu device.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._due: deque[ref[Prepared]] = deque(maxlen=MOST)
        self._spares: deque[ref[Prepared]] = deque()

    def ran(self, prepared: Prepared) -> None:
        """Note a submission: what runs twice is likely to run again."""
        prepared.runs += 1
        if prepared.runs > 1 and len(prepared.dispatches) >= LEAST:
            self._due.append(ref(prepared))

    def encode(self) -> None:
        """Encode what is due; called without any lock, from whatever thread waits."""
        while self._due:
            try:
                due = self._due.popleft()
            except IndexError:  # another thread was quicker
                return
            again = due()
            if again is None or again.spare is not None:
                continue
            try:
                with Checked():
                    encoder = Encoder(self._native)
                    encoder.launch(again.dispatches)
                    spare = encoder.finish()
            except DeviceError:
                continue  # who runs it once more is told
            again.spare = spare
            if due in self._spares:
                self._spares.remove(due)
            self._spares.append(due)
            if len(self._spares) > MOST:
                oldest = self._spares.popleft()()
                if oldest is not None:
                    oldest.spare = None
