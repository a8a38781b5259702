"""`import centella` stays cheap: what it adds to NumPy's own import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LIMIT = 60.0
RUNS = 40  # the best of them counts: others on the machine only ever add
CODE = (
    "import time, numpy; start = time.perf_counter(); import centella; "
    "print(1e3 * (time.perf_counter() - start))"
)


def test_import_adds_less_than_60_ms_to_numpy(tmp_path: Path) -> None:
    kept = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    env = {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # byte code is there from the second on
    best = float("inf")
    for _ in range(RUNS):
        best = min(best, float(subprocess.check_output([sys.executable, "-c", CODE], env=env)))
        if best < LIMIT:
            break
    assert best < LIMIT, f"best of {RUNS}: {best:.1f} ms"
