"""How much memory of the machine this process may still take: what is free, and what limits allow.

A container has less than its machine: its control group has a limit of its own (Linux's cgroups,
versions 1 and 2), and so may each group around it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROCESSES = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# Folder below GROUPS; files of the limit and of what is used; the line of what can be given back.
UNIFIED = ("", "memory.max", "memory.current", "inactive_file")
SEPARATE = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available() -> int | None:
    """Bytes that may be taken now, without other processes giving some back; None: nobody says.

    On macOS, which does not say what is free: the bytes that the machine has.
    """
    if sys.platform == "win32":
        return _windows()
    known = [*_machine(), *_groups()]
    return max(0, min(known)) if known else None


def _machine() -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in (PROCESSES / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
                return
    with suppress(OSError, ValueError, AttributeError):  # not each system knows these names
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups() -> Iterator[int]:
    """What the group of this process, and each around it, has left."""
    with suppress(OSError):
        for line in (PROCESSES / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, *names = SEPARATE if controllers else UNIFIED
            root = GROUPS / folder
            group = root / path.strip("/")
            # Inside a container the path may be that of the host: then the root is its group.
            for each in (group, *group.parents):
                with suppress(OSError, ValueError):  # no limit is "max", and the root has no files
                    yield _left(each, *names)
                if each == root:
                    break


def _left(group: Path, limit: str, used: str, inactive: str) -> int:
    """Bytes up to a group's limit; pages of files that nobody uses are given back."""
    most, now = int((group / limit).read_text()), int((group / used).read_text())
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return most - now + next((int(n) for name, n in lines if name == inactive), 0)


if sys.platform == "win32":
    import ctypes

    class _Status(ctypes.Structure):
        """MEMORYSTATUSEX."""

        _fields_ = (
            ("length", ctypes.c_uint32), ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in (
                "total", "available", "total_paged", "available_paged", "total_virtual",
                "available_virtual", "available_extended",
            )),
        )  # fmt: skip

    def _windows() -> int | None:
        status = _Status(length=ctypes.sizeof(_Status))
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            return None
        return int(status.available)
