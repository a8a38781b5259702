"""Rates of a device: kernels alone, by what a longer chain takes more; latencies as hosts see them.

Sizes follow the device: so large that a launch takes a few milliseconds, at most what is said here.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np

from centella.check.bench.figures import Array, median
from centella.check.report import Rate
from centella.host.caches import keep, kept
from centella.runtime.device import Device
from centella.runtime.self_check import key_of
from centella.tensors.creation import asarray, full
from centella.tensors.functional import linear, matmul
from centella.tensors.tensor import Tensor

COPY_BYTES = 96 << 20  # below the 128 MB that every WebGPU adapter binds
FIRST_BYTES = 1 << 20
LAUNCH = 0.01  # seconds that one may take, or sizes stay smaller
CHAIN, ROUNDS = 4, 10
WARM, STEPS = 0.15, (4, 20)  # seconds of a window of work, least and most of them before a rate
PRODUCTS = (256, 512, 1024, 2048, 4096)
ROWS = (256, 1024, 2048, 4096, 8192)  # of the square weight of the thin product, by bytes
WEIGHTS = 4  # that take turns, so that no cache holds them
SMALL_OPS = 64
CALLS = 60
AGAIN = 1.1  # times the rate that a copy was measured for once, before it is measured again


def measure(device: Device) -> list[Rate]:
    """Each rate; the device computes right, or they mean nothing."""
    copy, nbytes = _copy(device)
    size, product = _product(device)
    rows, thin = _thin(device)
    return [
        Rate("copy", copy / 1e9, "GB/s", f"{nbytes / 1e6:.3g} MB read, as many written"),
        Rate("f32 product", product / 1e9, "GFLOP/s", f"{size} x {size} x {size}"),
        Rate("one row, f16 weights", thin / 1e9, "GB/s", f"{rows} x {rows}", thin / copy),
        *_latencies(device),
    ]


def copy_rate(device: Device, above: float = 0.0) -> float:
    """Bytes a second that are read and written side by side, measured once for an adapter.

    It is measured anew where what was kept is not above a rate that was seen since. The device is
    expected to have worked just now: nothing is done to clock it up.
    """
    key = key_of(device.backend)
    file = f"copy-rate-{zlib.crc32(key.encode()):08x}.json"
    try:
        stored = json.loads(kept(file) or b"")
        if stored["key"] == key and max(stored["rate"], AGAIN * stored["above"]) > above:
            return float(stored["rate"])
    except (ValueError, KeyError, TypeError):  # not there, or not what we wrote
        pass
    rate, _ = _copy(device, quick=True)
    keep(file, json.dumps({"key": key, "rate": rate, "above": above}).encode())
    return rate


def _copy(device: Device, quick: bool = False) -> tuple[float, int]:
    """Bytes a second that are read and written side by side, and the bytes that were read."""

    def spent(nbytes: int) -> float:
        x = full((nbytes // 4096, 1024), 0.0, device=device)
        return _launch_seconds(device, x, lambda y, _: y * 1.5, quick=quick)  # NumPy shares copies

    nbytes = FIRST_BYTES
    took = spent(nbytes)
    larger = int(min(COPY_BYTES, device.caps.max_binding // 2, nbytes * LAUNCH / took))
    if larger >= 2 * nbytes:
        nbytes = larger // 4096 * 4096
        took = spent(nbytes)
    return 2 * nbytes / took, nbytes


def _product(device: Device) -> tuple[int, float]:
    """The size of the square f32 product with most operations a second, and how many."""
    random = np.random.default_rng(0)
    rate, best = 0.0, (0.0, 0)
    for size in PRODUCTS:
        if rate and 2 * size**3 / rate > 4 * LAUNCH:
            break
        w = asarray(_normal(random, size, size) * np.float32(size**-0.5), device=device)
        x = asarray(_normal(random, size, size), device=device)
        rate = 2 * size**3 / _launch_seconds(device, x, partial(_times, w))
        best = max(best, (rate, size))
    return best[1], best[0]


def _thin(device: Device) -> tuple[int, float]:
    """Rows of the largest square f16 weight that LAUNCH allows, and its bytes a second."""
    random = np.random.default_rng(1)
    measured = (ROWS[0], 0.0)
    for rows in ROWS:
        nbytes = 2 * rows * rows
        if nbytes > device.caps.max_binding // 2 or (measured[1] and nbytes / measured[1] > LAUNCH):
            break
        part = (_normal(random, rows, rows) * np.float32(rows**-0.5)).astype(np.float16)
        weights = [asarray(part, device=device) for _ in range(WEIGHTS)]
        x = asarray(_normal(random, 1, rows), device=device)
        measured = rows, nbytes / _launch_seconds(device, x, partial(_row, weights), 4 * CHAIN)
    return measured


def _row(weights: list[Tensor], x: Tensor, i: int) -> Tensor:
    return linear(x, weights[i % WEIGHTS])


def _times(w: Tensor, x: Tensor, _: int) -> Tensor:
    return matmul(x, w)


def _normal(random: np.random.Generator, rows: int, columns: int) -> Array:
    return random.standard_normal((rows, columns), np.float32)


def _latencies(device: Device) -> list[Rate]:
    x = asarray(np.ones((1, 8), np.float32), device=device)
    w = asarray(np.eye(8, dtype=np.float32), device=device)
    device.synchronize()

    def submitted() -> None:
        matmul(x, w)
        device.recorder.flush()

    def chain(y: Tensor) -> Tensor:
        for _ in range(SMALL_OPS):
            y = matmul(y, w)  # products are not joined
        return y

    kept = matmul(x, w)
    replay = device.compile(chain, x)
    return [
        Rate("submit", 1e6 * _host_seconds(device, submitted), "us", "one operation, recorded "
             "and submitted, the plan known"),
        Rate("replay", 1e6 * _host_seconds(device, lambda: replay(x)) / SMALL_OPS, "us",
             f"an operation of a replay of {SMALL_OPS}, submitted"),
        Rate("read-back", 1e6 * _host_seconds(device, kept.numpy), "us", "32 bytes that are ready"),
    ]  # fmt: skip


def _host_seconds(device: Device, call: Callable[[], object]) -> float:
    """What a call takes on the host, the device idle before; the median."""
    times: list[float] = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        device.synchronize()
    return median(times[CALLS // 6 :])


def _launch_seconds(
    device: Device, x: Tensor, step: Callable[[Tensor, int], Tensor], length: int = CHAIN,
    quick: bool = False,
) -> float:  # fmt: skip
    """A launch's share of a replayed chain: what a longer chain takes more, host and copies out."""

    def chain(launches: int) -> list[Tensor]:
        y, results = x, list[Tensor]()
        for i in range(launches):
            y = step(y, i)
            results.append(y)  # each is a result, so that none is joined with the next
        return results

    one, more = (device.compile(chain, n) for n in (1, 1 + length))

    def took(replay: Callable[[int], object], launches: int) -> float:
        start = time.perf_counter()
        replay(launches)
        device.synchronize()
        return time.perf_counter() - start

    if not quick:
        _warm(lambda: took(one, 1) + took(more, 1 + length))
    pairs = [
        (took(one, 1), took(more, 1 + length)) for _ in range(ROUNDS // 2 if quick else ROUNDS)
    ]
    short, long = (median(times) for times in zip(*pairs, strict=True))
    return max(long - short, 1e-9) / length


def _warm(work: Callable[[], float]) -> None:
    """Have a device work until it gets no faster: one that was idle clocks up by and by."""
    before = math.inf
    for step in range(1, 1 + STEPS[1]):
        begin, times = time.perf_counter(), [work()]
        while time.perf_counter() - begin < WARM:
            times.append(work())
        if (now := median(times)) > 0.95 * before and step >= STEPS[0]:
            return
        before = now
