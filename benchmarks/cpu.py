"""MiniLM on the CPU beside torch and ONNX Runtime."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import Call, Row, alternate, summary

import centella as ct
from centella.tasks.embed.embedder import Forward

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
    inputs = {"ids": wide.numpy(), "mask": mask.numpy()}

    def runtime() -> None:
        results["onnxruntime"] = pooled(session.run(["states"], inputs)[0])

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
