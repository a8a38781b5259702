"""The peer on WebGPU: ONNX Runtime with its WebGPU provider, on models that torch exports.

Its Python package hands over no memory of the device, so operands are constants of the model, each
product's input is scaled by a number that is sent (nothing folds, no two products are one), and a
corner of each result comes back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import Call

PROVIDER = "WebGpuExecutionProvider"
WHO = "onnxruntime webgpu"


def available() -> bool:
    """Whether it is installed; says why not."""
    try:
        import onnxruntime
        import torch
    except ImportError as error:
        print(f"{WHO}: skipped, {error}")
        return False
    del torch
    if PROVIDER not in onnxruntime.get_available_providers():
        print(f"{WHO}: skipped, onnxruntime {onnxruntime.__version__} has no {PROVIDER}")
        return False
    return True


def session_of(module: Any, example: dict[str, Any]) -> Any:
    """A session of a torch module, or None where it found no adapter."""
    import onnxruntime
    import torch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        inputs = tuple(torch.from_numpy(v) for v in example.values())
        torch.onnx.export(module.eval(), inputs, str(file), input_names=list(example),
                          output_names=["y"], dynamo=False)  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(file), options, providers=[PROVIDER])
    if PROVIDER not in session.get_providers():
        print(f"{WHO}: skipped, no adapter")
        return None
    return session


def products(pairs: Sequence[tuple[Any, Any]], launches: int) -> tuple[Call, Any] | None:
    """Rounds of `launches` products x W^T, over the pairs in turn; and the first pair's product."""
    import torch

    class Products(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            for i, (x, w) in enumerate(pairs):
                self.register_buffer(f"x{i}", torch.from_numpy(x))
                self.register_buffer(f"w{i}", torch.from_numpy(w))

        def forward(self, s: Any) -> Any:
            corners = []
            for i in range(launches):
                x = getattr(self, f"x{i % len(pairs)}") * s[i]
                y = torch.nn.functional.linear(x, getattr(self, f"w{i % len(pairs)}"))
                corners.append(y[-1:, :4])
            return torch.cat(corners)

    class One(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.from_numpy(pairs[0][1]))

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.linear(x, self.w)

    inputs = {"s": np.ones(launches, pairs[0][0].dtype)}
    session = session_of(Products(), inputs)
    if session is None:
        return None
    one = {"x": pairs[0][0]}
    result = session_of(One(), one).run(["y"], one)[0]
    corner = session.run(["y"], inputs)[0][0]
    assert np.allclose(corner, result[-1, :4], rtol=1e-2, atol=1e-2), "another product"
    return lambda: session.run(["y"], inputs), result


def minilm(model: Any, ids: Any, results: dict[str, Any]) -> Call | None:
    """A forward pass of a transformers BertModel, ids to vectors, both on the host."""
    import torch

    class Vectors(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any) -> Any:
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            return torch.nn.functional.normalize(states.mean(1), dim=-1)

    wide = ids.astype(np.int64)
    inputs = {"ids": wide, "mask": np.ones_like(wide)}
    session = session_of(Vectors(), inputs)
    if session is None:
        return None

    def call() -> None:
        results[WHO] = session.run(["y"], inputs)[0]

    return call
