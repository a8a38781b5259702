"""MiniLM on the CPU beside torch and ONNX Runtime, and a cold `centella embed`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import Call, Row, alternate, cost, summary

import centella as ct
from centella.tasks.embed import Forward

SHAPES = ((32, 128), (1, 16))


def cpu(args: argparse.Namespace) -> list[Row]:
    """Sentences a second in f32, ids to vectors; peers that are installed, in the same rounds.

    `best` is the quickest round, for a machine that does other work as well.
    """
    embedder = ct.load(args.model, device="cpu", dtype="f32")
    forward = Forward(embedder)
    folder = _folder(args.model)
    rows: list[Row] = []
    for size, length in SHAPES:
        ids = np.random.default_rng(1).integers(1000, 20000, (size, length), dtype=np.int32)
        lengths = np.full(size, length, np.int32)
        results: dict[str, Any] = {}

        def ours(i: Any = ids, n: Any = lengths, to: dict[str, Any] = results) -> None:
            to["cpu"] = forward.captured.fetch(i, n, True, None).result()["dense"]

        contestants: dict[str, Call] = {"cpu": ours, **_peers(folder, ids, results)}
        rounds = args.rounds if size > 1 else 10 * args.rounds
        for name, times in alternate(contestants, rounds).items():
            cosine = float(np.min(np.sum(results["cpu"] * results[name], -1)))
            assert cosine > 0.999, (name, cosine)
            rows.append({"bench": "MiniLM f32, CPU", "shape": [size, length], "who": name,
                         "unit": "sentences/s", **summary(times, size),
                         "best": size / min(times), "cosine": cosine})  # fmt: skip
    return rows


def _folder(model: str) -> Path:
    from centella.weights.folder import find_folder as folder_of

    return folder_of(model)


def _peers(folder: Path, ids: Any, results: dict[str, Any]) -> dict[str, Call]:
    """transformers on torch, and ONNX Runtime with the same weights, where they are installed."""
    try:
        import torch
        from transformers import BertModel
    except ImportError:
        return {}
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    wide = torch.from_numpy(ids.astype(np.int64))
    mask = torch.ones_like(wide)

    def pooled(states: Any) -> Any:
        mean = states.mean(1)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    def eager() -> None:
        with torch.inference_mode():
            results["torch"] = pooled(model(wide, attention_mask=mask).last_hidden_state.numpy())

    peers: dict[str, Call] = {"torch": eager}
    try:
        import onnxruntime
    except ImportError:
        return peers
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.onnx"
        states = _states_of(torch, model)
        torch.onnx.export(states, (wide, mask), str(file), input_names=["ids", "mask"],
                          output_names=["states"], dynamo=False)  # fmt: skip
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = {"ids": wide.numpy(), "mask": mask.numpy()}

    def runtime() -> None:
        results["onnxruntime"] = pooled(session.run(["states"], given)[0])

    return {**peers, "onnxruntime": runtime}


def _states_of(torch: Any, model: Any) -> Any:
    """The model with two arguments and one result, as an export wants it."""

    class States(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    return States().eval()  # an export leaves it in the mode that it had


CACHES = (
    "XDG_CACHE_HOME", "MESA_SHADER_CACHE_DIR", "CUDA_CACHE_PATH", "__GL_SHADER_DISK_CACHE_PATH",
)  # fmt: skip


def start(args: argparse.Namespace) -> list[Row]:
    """Milliseconds of `centella embed hello` in fresh processes, device by device.

    Each way twice: with the drivers' caches of compiled kernels, and ours of self-checks and wgpu's
    header, empty ("first"), and as a second process finds them ("again"). Python's byte code is
    there both times, as pip leaves it with every package. Processes of their own say how long all
    programs took to compile, text and driver ("compile").
    """
    with tempfile.TemporaryDirectory() as code:
        kept = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
        return _start(args, {**kept, "PYTHONPYCACHEPREFIX": code})


def _start(args: argparse.Namespace, environment: dict[str, str]) -> list[Row]:
    rows: list[Row] = []
    for name in args.devices:
        code = "from centella.cli import main; main()"
        command = [sys.executable, "-c", code, "embed", "hello", "--model", args.model,
                   "--device", name]  # fmt: skip
        spent: dict[tuple[str, str], list[float]] = {}
        _process(command, environment)  # writes the byte code
        for _ in range(max(3, args.rounds // 3)):
            with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as others:
                for when in ("first", "again"):
                    wall, user = _process(command, {**environment, **dict.fromkeys(CACHES, caches)})
                    spent.setdefault((when, "wall"), []).append(wall)
                    spent.setdefault((when, "user time"), []).append(user)
                    there = {**environment, **dict.fromkeys(CACHES, others)}
                    spent.setdefault((when, "compile"), []).append(_compile(command, there))
        for (when, what), times in spent.items():
            bench = f"centella embed, {when}, {what}"
            rows.append({"bench": bench, "who": name, "unit": "ms", "shape": [1],
                         "best": 1e3 * min(times), **cost(times, 1e3)})  # fmt: skip
    return rows


def _process(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and user seconds of a process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    begin = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True, env=environment)
    wall = time.perf_counter() - begin
    return wall, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used


def _compile(command: list[str], environment: dict[str, str]) -> float:
    """Seconds that all programs of a process took to compile; 0 where nothing is compiled."""
    done = subprocess.run([*command, "--timing", "--json"], capture_output=True, check=True,
                          env=environment)  # fmt: skip
    return float(json.loads(done.stdout)["timing_ms"].get("compile", 0.0)) / 1e3
