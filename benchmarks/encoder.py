"""Whisper's encoder in the shape of large-v3, f16, beside transformers: random weights.

A call goes from a spectrogram on the device to states on the device, and waits for them. The result
is compared with transformers' own in f32: ours may be as far off as transformers' in f16, and half
as much again. Peers: transformers (SDPA) eagerly, as a CUDA graph of the same launches, and with
`--compile` by `torch.compile`, whose compiling is a row of its own, as is our first call.
Source of the sizes: config.json of whisper-large-v3 (128 mels, 1500 positions, width 1280, 20
heads, inner 5120, 32 layers).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gemv import graphed
from measure import Call, Row, alternate, cost, torch_or_none
from msgspec import Struct

import centella as ct
from centella import nn


class Size(Struct, frozen=True):
    """Of an encoder."""

    mels: int
    positions: int
    width: int
    heads: int
    inner: int
    layers: int


LARGE = Size(128, 1500, 1280, 20, 5120, 32)
SMALL = Size(8, 20, 32, 2, 64, 2)
BATCHES = (1, 8)


class Encoder(nn.Module):
    """[batch, mels, 2 positions] to [batch, positions, width]."""

    def __init__(self, size: Size) -> None:
        self.frontend = nn.ConvFrontend(size.mels, size.width, size.positions)
        self.layers = [
            nn.EncoderBlock(size.width, size.heads, size.inner, unbiased=("k_proj",))
            for _ in range(size.layers)
        ]
        self.layer_norm = nn.LayerNorm(size.width)

    def forward(self, mel: ct.Tensor) -> ct.Tensor:
        """States of spectrograms."""
        x = self.frontend(mel)
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


def peer_of(torch: Any, size: Size) -> Any:
    """The model of transformers with random weights, f32, where PyTorch is told to make it."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=size.width, encoder_layers=size.layers, encoder_attention_heads=size.heads,
        encoder_ffn_dim=size.inner, num_mel_bins=size.mels, max_source_positions=size.positions,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return WhisperEncoder(config).eval()


def ours_of(weights: dict[str, Any], size: Size, device: ct.Device) -> Encoder:
    """Our encoder with the same weights."""
    outside = ("layers.", "layer_norm.")
    named = {n if n.startswith(outside) else f"frontend.{n}": w for n, w in weights.items()}
    encoder = Encoder(size)
    encoder.load_parameters(named, device=device)
    return encoder


def encoder(args: argparse.Namespace) -> list[Row]:
    """Milliseconds of a forward pass on each device, and of the first one."""
    torch = torch_or_none()
    if torch is None:
        print("encoder: skipped, it compares with transformers on a CUDA device")
        return []
    size = SMALL if args.small else LARGE
    with torch.device("cuda"):
        exact = peer_of(torch, size)
    half = {name: w.half() for name, w in exact.state_dict().items()}
    exact.load_state_dict({name: w.float() for name, w in half.items()})
    rows: list[Row] = []
    for batch in BATCHES:
        spectra = np.random.default_rng(batch).standard_normal(
            (batch, size.mels, 2 * size.positions), np.float32
        )
        mel = torch.from_numpy(spectra).cuda().half()
        with torch.inference_mode():
            wanted = exact(mel.float()).last_hidden_state.double().cpu().numpy()
        contestants, errors, first = _contestants(torch, exact, half, mel, size, args)
        off = {who: _error(states, wanted) for who, states in errors.items()}
        for who, error in off.items():
            assert error <= 1.5 * off["transformers"], (who, off)
        for who, times in alternate(contestants, args.rounds, torch.cuda.synchronize).items():
            rows.append({"bench": "Whisper encoder f16", "shape": [batch], "who": who,
                         "unit": "ms", "error": off.get(who), **cost(times, 1e3)})  # fmt: skip
        for who, seconds in first.items():
            rows.append({"bench": "Whisper encoder f16, first", "shape": [batch], "who": who,
                         "unit": "ms", **cost([seconds], 1e3)})  # fmt: skip
    return rows


def _contestants(
    torch: Any, exact: Any, half: dict[str, Any], mel: Any, size: Size, args: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, Any], dict[str, float]]:
    """Calls, what each gave, and seconds of the first call of those that compile."""
    calls: dict[str, Call] = {}
    gave: dict[str, Any] = {}
    first: dict[str, float] = {}
    weights = {name: w.cpu().numpy() for name, w in half.items()}
    for name in args.devices:
        device = ct.device(name)
        model = ours_of(weights, size, device)
        x = ct.asarray(mel.cpu().numpy(), device=device)
        device.synchronize()
        start = time.perf_counter()
        run = device.compile(model, x)
        gave[name] = run(x).numpy()
        first[name] = time.perf_counter() - start
        calls[name] = _then(partial(run, x), device.synchronize)
    with torch.device("cuda"):
        peer = peer_of(torch, size).half()
    peer.load_state_dict(half)

    def eager(model: Any = peer) -> Any:
        with torch.inference_mode():
            return model(mel).last_hidden_state

    gave["transformers"] = eager().float().cpu().numpy()
    calls["transformers"] = _then(eager, torch.cuda.synchronize)
    calls["transformers, graph"], _ = graphed(torch, eager, 1)
    if args.compile:
        compiled = partial(eager, torch.compile(peer, mode="reduce-overhead"))
        start = time.perf_counter()
        gave["torch.compile"] = compiled().float().cpu().numpy()
        first["torch.compile"] = time.perf_counter() - start
        calls["torch.compile"] = _then(compiled, torch.cuda.synchronize)
    return calls, gave, first


def _then(run: Callable[[], Any], wait: Call) -> Call:
    """A call that waits for what it has started."""

    def call() -> None:
        run()
        wait()

    return call


def _error(states: Any, wanted: Any) -> float:
    """Relative Frobenius error."""
    return float(np.linalg.norm(states.astype(np.float64) - wanted) / np.linalg.norm(wanted))
