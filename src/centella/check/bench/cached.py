"""The cached product of one row: what a call costs beyond its kernel, host to host."""

from __future__ import annotations

import numpy as np

from centella.check.bench.figures import Array, Figure, Progress, median, seconds, timed, verify
from centella.ledger.counts import ledger
from centella.nn.matmul_cache import MatmulCache
from centella.runtime.device import Device
from centella.tensors.creation import asarray
from centella.tensors.functional import linear
from centella.tensors.tensor import Tensor

SIZE, SMALL = 1536, 48
CALLS, WARM, UNCACHED = 200, 8, 10
CHAIN, ROUNDS = 64, 30  # launches of the longer chain, replays
SENT, KEPT = 8e3, 100.0  # theirs, in us: the weight sent with each call, and kept


def measure(device: Device, small: bool, progress: Progress) -> tuple[list[Figure], str]:
    """Figures, and what was measured.

    Raises:
        DeviceError: wrong numbers.
        ContractError: a call allocated, compiled, or moved more than its input and its output.
    """
    size = SMALL if small else SIZE
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((size, size), dtype=np.float32) * np.float32(size**-0.5)
    inputs = [rng.standard_normal((1, size), dtype=np.float32) for _ in range(WARM)]
    cache = MatmulCache(device)
    cache.upload_weight("w", weight)
    device.synchronize()

    progress("cached product: first calls, float64")
    got: list[Array] = []
    first = seconds(lambda i: got.append(cache.matmul("w", inputs[i])), WARM)[0]
    for x, y in zip(inputs, got, strict=False):
        wanted = x.astype(np.float64) @ weight.T.astype(np.float64)
        verify("bench floor: cached product", device, y, wanted)

    progress(f"cached product: {CALLS} calls")
    times: list[float] = []
    with ledger() as led:
        while len(times) < CALLS:
            times += seconds(lambda i: cache.matmul("w", inputs[i % WARM]), CALLS - len(times))
        led.expect(
            uploads=CALLS, downloads=CALLS, submissions=CALLS, launches=CALLS, allocations=0,
            compiles=0,
        )  # fmt: skip
    progress("cached product: the kernel alone, the weight sent each time")
    kernel = _kernel_seconds(cache, device, inputs[0], small)
    sent = seconds(lambda i: _sent(device, inputs[i % WARM], weight), 2 + UNCACHED)[2:]

    def figure(
        what: str, times: list[float], theirs: float | None = None, less: float = 0
    ) -> Figure:
        return timed("cached", what, times, "us", (1, size, size), theirs, less)

    return [
        figure("beyond the kernel, weight kept", times, KEPT, kernel),
        figure("a call, weight kept", times),
        figure("the kernel", [kernel]),
        figure("a call, weight sent with it", sent, SENT),
        figure("first call", [first]),
    ], f"cached product: {CALLS} calls, none of which allocated or compiled anything"


def _sent(device: Device, x: Array, weight: Array) -> Array:
    return linear(asarray(x, device=device), asarray(weight, device=device)).numpy()


def _kernel_seconds(cache: MatmulCache, device: Device, x: Array, small: bool) -> float:
    """A launch's share of a replayed chain: what a longer chain takes more, host and copies out."""
    length, rounds = (8, 5) if small else (CHAIN, ROUNDS)

    def chain(h: Tensor, launches: int) -> Tensor:
        for _ in range(launches):
            h = cache.matmul("w", h)
        return h

    spent = []
    for launches in (1, 1 + length):
        replay = device.compile(chain, x, launches)
        times = seconds(lambda _, r=replay, n=launches: r(x, n).numpy(), 2 + rounds)  # type: ignore[misc]
        spent.append(median(times[2:]))
    return max(spent[1] - spent[0], 0.0) / length
