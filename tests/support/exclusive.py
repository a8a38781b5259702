"""One test by itself among processes that run tests side by side (`pytest -n 2`).

A test marked `alone` measures time: it waits until the others' current tests are done, and theirs
wait for its end. File locks do it, which end with the process that holds them; where there are none
(Windows), tests marked so run beside others.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID")


class Exclusive:
    """Many inside, or one alone: who wants to be alone keeps the gate shut while waiting."""

    def __init__(self, path: Path) -> None:
        # Open until the process ends, which is what releases them at the latest.
        self._gate = os.open(f"{path}.gate", os.O_CREAT | os.O_WRONLY)
        self._room = os.open(f"{path}.room", os.O_CREAT | os.O_WRONLY)

    @contextmanager
    def inside(self, alone: bool) -> Iterator[None]:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)


def exclusive() -> Exclusive | None:
    """That of the processes of this run; None where there is one process."""
    if RUN is None or fcntl is None:
        return None
    return Exclusive(Path(tempfile.gettempdir(), f"centella-tests-{RUN}"))
