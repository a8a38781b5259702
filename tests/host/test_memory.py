"""What memory is left: of the machine, and of the control groups of a process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from centella.host import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of Linux's files")
FREE = 8 << 30


def machine(folder: Path, patch: pytest.MonkeyPatch, groups: str) -> Path:
    """Files of a machine with 8 GiB available; where the groups of the process are."""
    processes, root = folder / "proc", folder / "cgroup"
    (processes / "self").mkdir(parents=True)
    (processes / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {FREE >> 10} kB\n")
    (processes / "self" / "cgroup").write_text(groups)
    patch.setattr(memory, "PROCESSES", processes)
    patch.setattr(memory, "GROUPS", root)
    return root


def group(folder: Path, names: tuple[str, ...], most: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _, limit, current, inactive = names
    (folder / limit).write_text(f"{most}\n")
    (folder / current).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{inactive} {cached}\n")


def test_a_group_and_those_around_it_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, monkeypatch, "0::/outer/inner\n")
    assert memory.available() == FREE
    group(root / "outer" / "inner", memory.UNIFIED, "max", 10, 0)
    assert memory.available() == FREE
    group(root / "outer", memory.UNIFIED, "5000", 4000, 300)
    assert memory.available() == 1300
    group(root / "outer" / "inner", memory.UNIFIED, "700", 100, 10)
    assert memory.available() == 610
    group(root / "outer" / "inner", memory.UNIFIED, "700", 900, 0)
    assert memory.available() == 0


def test_groups_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, monkeypatch, "5:cpu:/a\n4:memory,x:/docker/abc\n0::/\n")
    group(root / "memory" / "docker" / "abc", memory.SEPARATE, "9000", 2000, 500)
    assert memory.available() == 7500
    group(root / "memory", memory.SEPARATE, "3000", 0, 0)  # as a container sees its own
    assert memory.available() == 3000


def test_where_nobody_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROCESSES", tmp_path)
    total = memory.available()
    assert total is not None and total > 1 << 26  # what the machine has


def test_of_this_machine() -> None:
    free = memory.available()
    assert free is not None and free > 1 << 20
