"""The feed-forward networks of Qwen3-4B: what is compiled and submitted for 36 layers.

h = h + (silu(h G^T) * (h U^T)) D^T, a layer after the other, each as a batch of its own and then
all as one batch. Source: Qwen3-4B's config.json (hidden 2560, intermediate 9728, 36 layers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from centella.check.bench.figures import Array, Figure, Progress, seconds, timed, verify
from centella.dtypes import f32, u32
from centella.ledger.counts import Counts, ledger
from centella.runtime.device import Device
from centella.runtime.pipelines import PipelineCache
from centella.tensors.creation import arange, asarray
from centella.tensors.functional import linear, silu_gate
from centella.tensors.tensor import Tensor

HIDDEN, INNER, LAYERS = 2560, 9728, 36
SMALL = (40, 152)  # hidden and inner, a 64th
THEIRS = 108  # they compile three shaders for each layer's batch
ROUNDS = 10
SMALL_BYTES = 1 << 28  # weights that fit anywhere


class Layer(Struct, frozen=True):
    """Three weights, [out, in]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        inner = silu_gate(linear(x, self.gate), linear(x, self.up))
        return linear(inner, self.down, residual=x)


Run = Callable[[Device, Sequence[Layer], Array, PipelineCache], Array]


def measure(device: Device, small: bool, progress: Progress) -> tuple[list[Figure], str]:
    """Figures, and what the weights are.

    Raises:
        DeviceError: wrong numbers.
    """
    hidden, inner = SMALL if small else (HIDDEN, INNER)
    progress(f"FFN: weights of {LAYERS} layers")
    layers, note = _weights(device, hidden, inner)
    x = np.random.default_rng(0).standard_normal((1, hidden), dtype=np.float32)
    progress("FFN: float64")
    # Where each layer has weights of its own, reading all of them back would take minutes.
    checked = layers if small or layers[0] is layers[-1] else layers[:1]
    got = one_batch(device, checked, x, device.cache)
    verify("bench floor: FFN", device, got, _float64(checked, x))

    progress("FFN: programs and submissions")
    cache = PipelineCache()
    first, wanted = _counted(device, layers, x, cache, each_layer)
    second, again = _counted(device, layers, x, cache, each_layer)
    whole, at_once = _counted(device, layers, x, cache, one_batch)
    for what, result in (("second pass", again), ("one batch", at_once)):
        verify(f"bench floor: FFN, {what}", device, result, wanted.astype(np.float64))
    progress("FFN: time")
    times = seconds(lambda _: one_batch(device, layers, x, cache), ROUNDS)
    shape = (LAYERS, 1, hidden, inner)
    compiles = first.compiles + second.compiles + whole.compiles
    return [
        Figure("ffn", "programs compiled in all", compiles, "", shape, THEIRS),
        Figure("ffn", "compiled in the second pass", second.compiles, "", shape, THEIRS),
        Figure("ffn", "submissions, a batch a layer", first.submissions, "", shape, LAYERS),
        Figure("ffn", "submissions, one batch", whole.submissions, "", shape, 1),
        Figure("ffn", "launches", whole.launches, "", shape),
        timed("ffn", "one batch, host to host", times, "ms", shape),
    ], note  # fmt: skip


def each_layer(device: Device, layers: Sequence[Layer], x: Array, cache: PipelineCache) -> Array:
    """The layers, a batch each."""
    h = asarray(x, device=device)
    for layer in layers:
        with device.batch() as batch:
            h = layer(h)
            batch.execute_with_cache(cache, [h])
    return h.numpy()


def one_batch(device: Device, layers: Sequence[Layer], x: Array, cache: PipelineCache) -> Array:
    """The layers in one batch."""
    with device.batch() as batch:
        h: Tensor = batch.upload(x)
        for layer in layers:
            h = layer(h)
        batch.execute_with_cache(cache, [h])
    return h.numpy()


def _counted(
    device: Device, layers: Sequence[Layer], x: Array, cache: PipelineCache, run: Run
) -> tuple[Counts, Array]:
    with ledger() as led:
        result = run(device, layers, x, cache)
    return led.counts, result


def _weights(device: Device, hidden: int, inner: int) -> tuple[list[Layer], str]:
    """The layers, made on the device; one layer's weights for all where that is known to fit only.

    WebGPU says of no adapter how much memory it has; the CPU would make 10 GB for minutes.
    """
    nbytes = LAYERS * 3 * hidden * inner * 4
    free = int(device.describe().get("memory_free") or 0)
    own = nbytes < SMALL_BYTES or nbytes < 0.8 * free
    layers = [_layer(device, hidden, inner, number) for number in range(LAYERS if own else 1)]
    said = f"FFN: {LAYERS} layers, 1 token, hidden {hidden}, inner {inner}, f32; "
    if own:
        return layers, f"{said}each layer has random weights of its own, {nbytes / 1e6:,.0f} MB"
    return layers * LAYERS, (
        f"{said}one layer's random weights stand for all: {device.name} does not say that it has "
        f"{nbytes / 1e9:.1f} GB free"
    )


def _layer(device: Device, hidden: int, inner: int, number: int) -> Layer:
    with device.batch() as batch:
        gate = _random(device, inner, hidden, 3 * number, hidden**-0.5)
        up = _random(device, inner, hidden, 3 * number + 1, hidden**-0.5)
        # A layer adds little to the residual: 36 times the same one would run away otherwise.
        down = _random(device, hidden, inner, 3 * number + 2, 0.02 * inner**-0.5)
        batch.execute([gate, up, down])
    return Layer(gate, up, down)


def _random(device: Device, rows: int, columns: int, seed: int, deviation: float) -> Tensor:
    """Uniform numbers of mean 0, from a hash of each element's place."""
    h = arange(rows * columns, dtype=u32, device=device) + (seed * 0x9E3779B9) % (1 << 32)
    for _ in range(3):
        h = h * (h * 2 + 1)  # a permutation of 32 bits (that of RC6); its high bits are the mixed
        h = h + h // 65536
    uniform = (h // 256).astype(f32) * 2.0**-24 - 0.5
    return (uniform * (deviation * 12**0.5)).reshape(rows, columns)


def _float64(layers: Sequence[Layer], x: Array) -> Array:
    y, previous = x.astype(np.float64), None
    weights: list[Array] = []
    for layer in layers:
        if layer is not previous:
            weights = [w.numpy().astype(np.float64) for w in (layer.gate, layer.up, layer.down)]
            previous = layer
        gate, up, down = weights
        g = y @ gate.T
        y = y + (g / (1 + np.exp(-g)) * (y @ up.T)) @ down.T
    return y
