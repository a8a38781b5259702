"""Each benchmark that needs no GPU runs at tiny sizes, and what it times has met its bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "run.py"
CHEAP = (
    "gemm --devices cpu",
    "imported --devices cpu --dtypes f16",
    "gemv --devices cpu --dtypes f16 --rows 1",
    "thin --devices webgpu --dtypes f16 --rows 1",
    "attention --devices cpu --dtypes f32",
    "rows --devices cpu",
    "host --devices cpu",
    "search --devices cpu",
    "speech --devices cpu --dtypes f32 --rows 1",
    f"passages --devices cpu --dtypes f32 --model {ROOT / 'tests/data/tiny-bert'}",
)
SWEEPS = (
    "sweep --devices webgpu",
    "tiles --devices webgpu",
    "mma --devices simulator --dtypes f16 --tiles 64x64x32",
    "attention-cores --devices simulator --tiles",
    "decode-sweep --devices simulator",
)


@pytest.mark.parametrize("words", [*CHEAP, *(pytest.param(s, marks=[pytest.mark.sweep])
                                             for s in SWEEPS)])  # fmt: skip
def test_a_benchmark_runs(words: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), *words.split(), "--small", "--rounds", "1"]
    ran = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    if "webgpu: skipped" in ran.stdout:
        pytest.skip(ran.stdout)
    rows = json.loads(report.read_text())["rows"]
    assert rows, ran.stdout
    assert all(row["rate"] > 0 for row in rows)
    if words in SWEEPS or words.startswith("thin"):  # tiles beside what is shipped
        assert len({row["who"] for row in rows}) > 1, ran.stdout
