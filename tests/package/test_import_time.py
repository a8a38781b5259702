"""`import centella` stays cheap: what it adds to NumPy's own import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOT_LOADED = tuple(
    "wgpu cuda tokenizers safetensors gguf jinja2 huggingface_hub typer rich soundfile soxr "
    "onnxruntime torch asyncio logging concurrent.futures.thread centella.lang.ptx "
    "centella.emit.wgsl centella.emit.ptx centella.backends.cuda centella.backends.webgpu "
    "centella.ops.matmul.choice centella.ops.attention.choice centella.ops.attention.rope_choice "
    "centella.ops.attention.cluster_mma centella.ops.attention.op centella.ops.matmul.op "
    "centella.ops.cache centella.ops.sample centella.ops.speech centella.plan.build "
    "centella.audio centella.models centella.nn centella.tasks centella.weights "
    "centella.serving".split()
)
LIMIT = 60.0  # ms, where NumPy takes up to 100; on a slower or busier machine as many times more
NUMPY = 100.0
RUNS = 100  # the best of them counts: others on the machine only ever add
CODE = (
    "import time; start = time.perf_counter(); import numpy; middle = time.perf_counter(); "
    "import centella; print(1e3 * (middle - start), 1e3 * (time.perf_counter() - middle))"
)


@pytest.mark.alone
def test_import_adds_less_than_60_ms_to_numpy(tmp_path: Path) -> None:
    kept = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    env = {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # byte code is there from the second on
    tried: list[tuple[float, float]] = []
    while len(tried) < RUNS and not any(ours < limit for ours, limit in tried):
        said = subprocess.check_output([sys.executable, "-c", CODE], env=env)
        numpy, ours = map(float, said.split())
        tried.append((ours, LIMIT * max(1.0, numpy / NUMPY)))
    assert min(ours / limit for ours, limit in tried) < 1.0, f"ms, and the limit: {tried}"


def test_import_loads_no_driver_no_emitter_no_pass_and_no_kernel_of_products() -> None:
    code = f"import sys, centella; print(*[m for m in sys.modules if m.startswith({NOT_LOADED})])"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split(), run.stderr) == (0, [], "")
