"""Whisper-tiny's encoder: how often a forward pass crosses between host and device.

Two convolutions, four blocks that normalise first, a norm; random weights. Source: whisper-tiny's
config.json (width 384, 6 heads, inner 1536, 80 mels, 1500 positions).
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from centella.check.bench.figures import Array, Figure, Progress, seconds, timed, verify
from centella.ledger.counts import ledger
from centella.nn import ConvFrontend, EncoderBlock, LayerNorm, Module
from centella.runtime.device import Device
from centella.tensors.tensor import Tensor

LAYERS = 4
THEIRS = 150  # transfers of a forward pass
ROUNDS = 10
_erf = np.frompyfunc(math.erf, 1, 1)


class Size(Struct, frozen=True):
    """Of an encoder and its input."""

    width: int
    heads: int
    inner: int
    mels: int
    frames: int


TINY = Size(384, 6, 1536, 80, 3000)
SMALL = Size(24, 6, 96, 5, 42)  # heads of 4


class Encoder(Module):
    """[batch, mels, frames] to [batch, (frames + 1) // 2, width]."""

    def __init__(self, size: Size) -> None:
        self.frontend: ConvFrontend = ConvFrontend(size.mels, size.width, (size.frames + 1) // 2)
        self.layers: list[EncoderBlock] = [
            EncoderBlock(size.width, size.heads, size.inner, unbiased=("k_proj",))
            for _ in range(LAYERS)
        ]
        self.layer_norm: LayerNorm = LayerNorm(size.width)

    def forward(self, mel: Tensor) -> Tensor:
        """States of a spectrogram."""
        x = self.frontend(mel)
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


def measure(device: Device, small: bool, progress: Progress) -> tuple[list[Figure], str]:
    """Figures, and what was measured.

    Raises:
        DeviceError: wrong numbers.
    """
    size = SMALL if small else TINY
    weights = random_weights(size)
    encoder = Encoder(size)
    encoder.load_parameters(weights, device=device)
    mel = np.random.default_rng(3).standard_normal((1, size.mels, size.frames), dtype=np.float32)

    def forward() -> Array:
        with device.batch() as batch:
            states = encoder(batch.upload(mel))
            batch.execute([states])
        return states.numpy()

    progress("encoder: float64")
    verify("bench floor: encoder", device, forward(), float64(size, weights, mel))
    progress("encoder: transfers and time")
    with ledger() as led:
        forward()
    counts = led.counts
    times = seconds(lambda _: forward(), ROUNDS)
    shape = (1, size.mels, size.frames)
    return [
        Figure("encoder", "transfers", counts.uploads + counts.downloads, "", shape, THEIRS),
        Figure("encoder", "submissions", counts.submissions, "", shape),
        Figure("encoder", "launches", counts.launches, "", shape),
        timed("encoder", "a forward pass, host to host", times, "ms", shape),
    ], (
        f"encoder: two convolutions and {LAYERS} blocks, width {size.width}, {size.heads} heads, "
        f"{size.frames} frames to {(size.frames + 1) // 2} positions, random weights, f32"
    )  # fmt: skip


def random_weights(size: Size) -> dict[str, Array]:
    """Weights by their names in a checkpoint."""
    rng = np.random.default_rng(2)
    width, inner = size.width, size.inner
    matrices = {
        "frontend.conv1": (width, size.mels, 3),
        "frontend.conv2": (width, width, 3),
        "frontend.embed_positions": ((size.frames + 1) // 2, width),
    }
    norms = ["layer_norm"]
    for i in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            matrices[f"layers.{i}.self_attn.{name}"] = (width, width)
        matrices[f"layers.{i}.fc1"], matrices[f"layers.{i}.fc2"] = (inner, width), (width, inner)
        norms += [f"layers.{i}.self_attn_layer_norm", f"layers.{i}.final_layer_norm"]
    weights: dict[str, Array] = {}
    for name, shape in matrices.items():
        weights[f"{name}.weight"] = rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
        if not name.endswith(("k_proj", "embed_positions")):
            weights[f"{name}.bias"] = 0.1 * rng.standard_normal(shape[0])
    for name in norms:
        weights[f"{name}.weight"] = 1 + 0.1 * rng.standard_normal(width)
        weights[f"{name}.bias"] = 0.1 * rng.standard_normal(width)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def float64(size: Size, weights: dict[str, Array], mel: Array) -> Array:
    """The encoder in NumPy's float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def linear(x: Array, name: str) -> Array:
        y: Array = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        result: Array = y * w[f"{name}.weight"] + w[f"{name}.bias"]
        return result

    def conv(x: Array, name: str, stride: int) -> Array:  # x [length, channels]
        padded = np.pad(x, ((1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, 3, 0)[::stride]
        y: Array = np.einsum("tcj,ocj->to", windows, w[f"{name}.weight"], optimize=True)
        return y + w[f"{name}.bias"]

    def attention(x: Array, name: str) -> Array:
        q, k, v = (
            linear(x, f"{name}.{p}").reshape(len(x), size.heads, -1).transpose(1, 0, 2)
            for p in ("q_proj", "k_proj", "v_proj")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(size.width // size.heads)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        y = scores / scores.sum(-1, keepdims=True) @ v
        return linear(y.transpose(1, 0, 2).reshape(len(x), -1), f"{name}.out_proj")

    x = _gelu(conv(mel[0].T.astype(np.float64), "frontend.conv1", 1))
    x = _gelu(conv(x, "frontend.conv2", 2)) + w["frontend.embed_positions.weight"]
    for i in range(LAYERS):
        x = x + attention(norm(x, f"layers.{i}.self_attn_layer_norm"), f"layers.{i}.self_attn")
        y = _gelu(linear(norm(x, f"layers.{i}.final_layer_norm"), f"layers.{i}.fc1"))
        x = x + linear(y, f"layers.{i}.fc2")
    return norm(x, "layer_norm")[None]


def _gelu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.asarray(_erf(x * math.sqrt(0.5)), np.float64))
    return y
