"""Launches prepared once: parameters in their slots, bind groups, driver handles; encoded ahead.

A command buffer is used once, and encoding takes most of what a submission costs the host. So
whoever waits for the device encodes meanwhile what has run before and is likely to run again.

wgpu-native (29.0) never frees finished commands that are not submitted, a tenth of a MB each; an
encoder that was not finished it does free. So a device has `MOST` finished commands that wait for
their submission, those of plans that have gone counted for good. What is beyond is encoded and left
unfinished until it is submitted, which leaves less than half of the work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import ref

from msgspec import Struct

from centella.backends.base import Launch
from centella.backends.webgpu.raw import Checked, Commands, Dispatch, Encoder, Offsets
from centella.errors import DeviceError
from centella.host.interrupts import uninterrupted

LEAST = 16  # launches: below, the submission of one more command buffer costs what is saved
MOST = 8  # finished commands that wait for their submission; also encoders that wait


class Prepared(Struct, weakref=True, eq=False):
    """The launches of a plan on its buffers, ready to be encoded again and again.

    Attributes:
        groups, params, offsets: what the dispatches refer to.
        runs: how often it was submitted.
        spare: its launches encoded for the next time; an encoder is yet to be finished.
    """

    dispatches: Sequence[Dispatch]
    groups: Sequence[object]
    params: Any
    offsets: Offsets
    runs: int = 0
    spare: Commands | Encoder | None = None


def prepared(
    launches: Sequence[Launch], groups: Sequence[Any], params: Any, offsets: Offsets, most: int
) -> Prepared:
    """Launches with their bind groups and the offsets of their parameters.

    Args:
        most: groups along one side of a grid.
    """
    dispatches: list[Dispatch] = []
    for bound, group, at in zip(launches, groups, offsets.at, strict=True):
        down = -(-bound.groups // most)  # folded where one side of a grid is too long
        across = bound.groups if down == 1 else -(-bound.groups // down)
        dispatches.append((bound.pipeline[2], group._internal, at, across, down))
    return Prepared(dispatches, groups, params, offsets)


class Ahead:
    """What is to be encoded while somebody waits.

    Args:
        native: the wgpu device.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._due: deque[ref[Prepared]] = deque(maxlen=MOST)
        self._unfinished: list[ref[Prepared]] = []
        self._room: list[None] = [None] * MOST  # for finished commands

    def ran(self, prepared: Prepared) -> None:
        """Note a submission: what runs twice is likely to run again."""
        prepared.runs += 1
        if prepared.runs > 1 and len(prepared.dispatches) >= LEAST:
            self._due.append(ref(prepared))

    def taken(self, prepared: Prepared) -> Commands | None:
        """The commands of a plan that were encoded ahead, to be submitted now."""
        spare, prepared.spare = prepared.spare, None
        if isinstance(spare, Encoder):
            return spare.finish()
        if spare is not None:
            self._room.append(None)
        return spare

    @uninterrupted
    def encode(self) -> None:
        """Encode what is due; called without any lock, from whatever thread waits."""
        if not self._lock.acquire(blocking=False):  # another thread does it
            return
        try:
            while self._due:
                again = self._due.popleft()()
                if again is not None and again.spare is None:
                    self._encode(again)
        finally:
            self._lock.release()

    def _encode(self, again: Prepared) -> None:
        spare: Commands | Encoder
        try:
            with Checked():
                spare = encoder = Encoder(self._native)
                encoder.launch(again.dispatches)
                if self._room:
                    spare = encoder.finish()
                    self._room.pop()
        except DeviceError:
            return  # who runs it once more is told
        again.spare = spare
        if isinstance(spare, Encoder):
            self._keep(again)

    def _keep(self, again: Prepared) -> None:
        """Note a plan that has an encoder; of too many the oldest loses its own."""
        waiting = [(one, one()) for one in self._unfinished]
        kept = [
            (one, plan) for one, plan in waiting
            if plan is not None and plan is not again and isinstance(plan.spare, Encoder)
        ]  # fmt: skip
        kept.append((ref(again), again))
        for _, plan in kept[:-MOST]:
            plan.spare = None
        self._unfinished = [one for one, _ in kept[-MOST:]]
