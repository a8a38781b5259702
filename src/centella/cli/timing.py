"""`--timing`: where the time of a command went."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from centella.ledger.counts import Ledger

LOADED = time.perf_counter()


def since_start() -> float:
    """Seconds since this process began; where the system does not say, since the command line."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.perf_counter() - LOADED


# What the library notes that is a stage of its own; what a batch uploads is part of its run.
NOTED = ("open model", "open device", "load weights", "upload", "compile", "tokenise")


class Stages:
    """Milliseconds of each stage of a command; of what the library notes there, by its own names.

    Args:
        led: a ledger with times, or None: nothing is measured.

    Attributes:
        millis: by stage, in order; empty where nothing is measured.
    """

    def __init__(self, led: Ledger | None) -> None:
        self.millis: dict[str, float] = {}
        self._ledger = led
        if led is not None:
            self.millis["start and import"] = 1e3 * since_start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure what happens inside."""
        led = self._ledger
        if led is None:
            yield
            return
        before, begin = led.spans(), time.perf_counter()
        yield
        whole = 1e3 * (time.perf_counter() - begin)
        noted = {n: ms - before.get(n, 0.0) for n, ms in led.spans().items() if n in NOTED}
        if noted.get("load weights"):  # which uploads are part of
            noted["load weights"] -= noted.get("upload", 0.0)
        elif "upload" in noted:
            del noted["upload"]
        for n, ms in noted.items():
            if ms:
                self.millis[n] = self.millis.get(n, 0.0) + ms
        self.millis[name] = max(0.0, whole - sum(noted.values()))

    def table(self) -> str:
        """One line a stage, and their sum."""
        rows = {**self.millis, "in all": sum(self.millis.values())}
        wide = max(map(len, rows))
        return "\n".join(f"{name:<{wide}}  {ms:>9,.1f} ms" for name, ms in rows.items())
