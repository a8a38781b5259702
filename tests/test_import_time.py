"""`import centella` stays cheap: what it adds to NumPy's own import."""

from __future__ import annotations

import subprocess
import sys

LIMIT = 60.0
CODE = (
    "import time, numpy; start = time.perf_counter(); import centella; "
    "print(1e3 * (time.perf_counter() - start))"
)


def test_import_adds_less_than_60_ms_to_numpy() -> None:
    command = [sys.executable, "-c", CODE]
    times = [float(subprocess.check_output(command)) for _ in range(8)]
    assert min(times) < LIMIT, f"best of {len(times)}: {min(times):.1f} ms"
