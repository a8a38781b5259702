"""Check, time and compare: one script for every figure that README and docs print.

    python benchmarks/run.py gemm --devices cuda,webgpu --json results/gemm.json
    python benchmarks/run.py minilm --model DIR --devices cuda,webgpu,cpu
    python benchmarks/run.py import
    python benchmarks/run.py host --devices webgpu

Each benchmark first compares its result with float64. Ours and the peer alternate, on random data,
over operands rotated through more than four times the L2 cache; medians and worst deciles of the
rounds are printed and written as JSON with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import centella as ct

Row = dict[str, Any]


def run(command: list[str]) -> str:
    """Standard output of a command, or an empty string."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine() -> Row:
    """What the figures were measured on."""
    versions = {}
    for name in ("centella", "numpy", "wgpu", "cuda-bindings", "torch", "transformers",
                 "onnxruntime"):  # fmt: skip
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["centella"] = ct.__version__
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu",
             "--format=csv,noheader"]  # fmt: skip
    here = Path(__file__).parent
    head = run(["git", "-C", str(here), "rev-parse", "--verify", "HEAD"])
    commit = os.environ.get("CENTELLA_COMMIT") or head
    return {
        "platform": platform.platform(),
        "cpu": platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "gpu": run(query),
        "versions": versions,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def alternate(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's rounds, one round of each in turn, after two to warm up."""
    for call in contestants.values():
        call()
        call()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float], amount: float) -> Row:
    """Median and worst decile as a rate of `amount` a round."""
    ordered = sorted(seconds)
    worst = ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))]
    return {
        "rate": amount / statistics.median(ordered),
        "worst_decile": amount / worst,
        "seconds": statistics.median(ordered),
        "rounds": len(ordered),
    }


def torch_or_none() -> Any:
    """PyTorch with a CUDA device, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


# -- GEMM ------------------------------------------------------------------------------------------

SHAPES = ((4096, 4096, 4096), (4097, 4093, 4099))
LAUNCHES = 8


def gemm_inputs(shape: tuple[int, int, int], sets: int) -> list[tuple[Any, Any]]:
    """Random x [m, k] and weights [n, k], `sets` of them."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32))
        for _ in range(sets)
    ]


def gemm_error(got: Any, x: Any, w: Any) -> float:
    """Relative Frobenius error against float64, on a sample of rows."""
    rows = np.linspace(0, x.shape[0] - 1, 64).astype(int)
    want = x[rows].astype(np.float64) @ w.T.astype(np.float64)
    return float(np.linalg.norm(got[rows] - want) / np.linalg.norm(want))


def gemm_contestant(name: str, inputs: list[tuple[Any, Any]]) -> tuple[Callable[[], None], float]:
    """`linear` on a device, LAUNCHES a round, and its error."""
    device = ct.device(name)
    tensors = [tuple(ct.asarray(a, device=device) for a in pair) for pair in inputs]
    error = gemm_error(ct.linear(*tensors[0]).numpy(), *inputs[0])

    def call() -> None:
        with device.batch():
            kept = [ct.linear(*tensors[i % len(tensors)]) for i in range(LAUNCHES)]
        device.synchronize()
        del kept

    return call, error


def gemm_peer(torch: Any, inputs: list[tuple[Any, Any]]) -> tuple[Callable[[], None], float]:
    """cuBLAS in f32 through PyTorch (TF32 off)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = [tuple(torch.from_numpy(a).cuda() for a in pair) for pair in inputs]
    error = gemm_error((tensors[0][0] @ tensors[0][1].T).cpu().numpy(), *inputs[0])

    def call() -> None:
        for i in range(LAUNCHES):
            x, w = tensors[i % len(tensors)]
            torch.matmul(x, w.T)
        torch.cuda.synchronize()

    return call, error


def gemm(args: argparse.Namespace) -> list[Row]:
    """f32 products on each device, cuBLAS beside."""
    rows: list[Row] = []
    torch = torch_or_none()
    for shape in SHAPES if not args.small else ((256, 256, 256), (257, 253, 259)):
        inputs = gemm_inputs(shape, 3)
        contestants: dict[str, Callable[[], None]] = {}
        errors: dict[str, float] = {}
        for name in args.devices.split(","):
            contestants[name], errors[name] = gemm_contestant(name, inputs)
        if torch is not None:
            contestants["cublas"], errors["cublas"] = gemm_peer(torch, inputs)
        seconds = alternate(contestants, args.rounds)
        work = 2.0 * np.prod([float(n) for n in shape]) * LAUNCHES / 1e12
        for name, times in seconds.items():
            assert errors[name] < 2e-6, (name, errors[name])
            row = {"bench": "gemm f32", "shape": list(shape), "who": name, "unit": "TFLOP/s"}
            rows.append({**row, **summary(times, work), "error": errors[name]})
    return rows


# -- MiniLM ----------------------------------------------------------------------------------------


def token_batch(rows: int, length: int) -> Any:
    """Random ids of a full batch."""
    rng = np.random.default_rng(1)
    return rng.integers(1000, 20000, (rows, length), dtype=np.int32)


def minilm(args: argparse.Namespace) -> list[Row]:
    """Sentences a second, ids on the host to vectors on the host, transformers beside."""
    rows: list[Row] = []
    torch = torch_or_none()
    for size, length in ((512, 128), (32, 128), (1, 16)):
        for dtype in args.dtypes.split(","):
            contestants: dict[str, Callable[[], None]] = {}
            results: dict[str, Any] = {}
            for name in args.devices.split(","):
                if name == "cpu" and size > 32:
                    continue
                embedder = ct.load(args.model, device=name, dtype=dtype)
                ids = token_batch(size, length)

                contestants[name] = _embed(embedder, ids, name, results)
            if torch is not None:
                contestants["transformers"] = _peer(torch, args.model, size, length, dtype, results)
            seconds = alternate(contestants, args.rounds)
            first = results[next(iter(results))]
            for name, times in seconds.items():
                cosine = float(np.min(np.sum(first * results[name], -1)))
                assert cosine > 0.999, (name, cosine)
                row = {"bench": f"MiniLM {dtype}", "shape": [size, length], "who": name,
                       "unit": "sentences/s"}  # fmt: skip
                rows.append({**row, **summary(times, size), "cosine": cosine})
    return rows


def _embed(embedder: Any, ids: Any, name: str, results: Row) -> Callable[[], None]:
    """One batch: ids to vectors."""

    def call() -> None:
        with embedder.model.device.batch() as batch:
            lengths = batch.upload(np.full(len(ids), ids.shape[1], np.int32))
            vectors = embedder.pool(embedder.model(batch.upload(ids), lengths), lengths)
        results[name] = ct.fetch(vectors).result()[0]

    return call


def _peer(
    torch: Any, model: str, size: int, length: int, dtype: str, results: Row
) -> Callable[[], None]:
    from transformers import BertModel

    kind = torch.float16 if dtype == "f16" else torch.float32
    peer = BertModel.from_pretrained(model, add_pooling_layer=False).to("cuda", kind).eval()
    ids = torch.from_numpy(token_batch(size, length).astype(np.int64))

    def call() -> None:
        with torch.inference_mode():
            on_device = ids.cuda()
            states = peer(on_device, attention_mask=torch.ones_like(on_device)).last_hidden_state
            pooled = torch.nn.functional.normalize(states.float().mean(1), dim=-1)
            results["transformers"] = pooled.cpu().numpy()

    return call


# -- host ------------------------------------------------------------------------------------------


def import_time(args: argparse.Namespace) -> list[Row]:
    """Milliseconds that `import centella` adds to NumPy's own import, in fresh processes."""
    code = (
        "import time, numpy; a = time.perf_counter(); import centella; "
        "print(1e3 * (time.perf_counter() - a))"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(15)
    ]
    return [{"bench": "import centella beyond numpy", "who": "cpu", "unit": "ms", "shape": [],
             "rate": statistics.median(times), "worst_decile": sorted(times)[-2],
             "rounds": len(times)}]  # fmt: skip


CHAIN = 200


def host(args: argparse.Namespace) -> list[Row]:
    """Microseconds an operation, recorded to submitted, of an unfusable chain."""
    rows: list[Row] = []
    for name in args.devices.split(","):
        device = ct.device(name)
        x = ct.asarray(np.ones((64, 64), np.float32), device=device)

        def call(d: Any = device, t: Any = x) -> None:
            with d.batch():
                y = t
                for _ in range(CHAIN):
                    y = ct.softmax(y)

        seconds = alternate({name: call}, args.rounds)
        device.synchronize()
        each = summary(seconds[name], float(CHAIN))
        rows.append({"bench": "record to submit", "who": name, "unit": "us/op", "shape": [CHAIN],
                     "rate": 1e6 * each["seconds"] / CHAIN, "worst_decile": 0.0,
                     "rounds": args.rounds})  # fmt: skip
    return rows


BENCHES = {"gemm": gemm, "minilm": minilm, "import": import_time, "host": host}


def main() -> None:
    """Run one benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--dtypes", default="f32")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--json", help="write the rows, with machine and versions, here")
    args = parser.parse_args()
    before = machine()
    rows = BENCHES[args.bench](args)
    for row in rows:
        shape = "x".join(map(str, row["shape"]))
        print(f"{row['bench']:<30} {shape:<18} {row['who']:<14} {row['rate']:>12,.2f} "
              f"{row['unit']:<12} worst decile {row['worst_decile']:,.2f}")  # fmt: skip
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": before, "gpu_after": machine()["gpu"], "rows": rows}
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
