"""Products with weights that stay on the device, against sending them each time.

python examples/cached_matmul.py [--device cpu|webgpu|cuda]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

import centella as ct

SIZE, ROUNDS = 1536, 10


def measured(work: Callable[[], object]) -> tuple[float, ct.Counts]:
    """Median milliseconds of a call, and what all of them moved."""
    work()
    work()  # the first compiles, the second takes the last memory it needs
    times = []
    with ct.ledger() as led:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times)), led.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = ct.device(parser.parse_args().device)

    random = np.random.default_rng(0)
    weight = random.standard_normal((SIZE, SIZE), dtype=np.float32) / 40
    x = random.standard_normal((1, SIZE), dtype=np.float32)

    cache = ct.MatmulCache(device)
    for dtype in ("f32", "f16", "i8"):
        cache.upload_weight(dtype, weight, dtype)

    def send_and_multiply() -> object:
        return ct.linear(ct.asarray(x, device=device), ct.asarray(weight, device=device)).numpy()

    best: dict[str, float] = {}
    print(f"device    {device.name}: [1, {SIZE}] by [{SIZE}, {SIZE}]^T, host to host")
    spent, counts = measured(send_and_multiply)
    print(f"sent      {spent:8.3f} ms  {counts.upload_bytes / ROUNDS:12,.0f} bytes up a call")
    for row in cache.weights():
        now, counts = measured(lambda name=row.name: cache.matmul(name, x))  # type: ignore[misc]
        best[row.name] = now
        error = np.abs(cache.matmul(row.name, x) - x @ weight.T).max()
        sent = counts.upload_bytes / ROUNDS
        print(f"kept {row.dtype.name:>4} {now:8.3f} ms  {sent:12,.0f} bytes up a call, "
              f"{row.nbytes:,} kept, {counts.allocations} allocations, "
              f"{counts.compiles} compiles, off by {error:.1e}")  # fmt: skip
        assert (counts.uploads, counts.downloads, counts.submissions) == (ROUNDS,) * 3
        assert (counts.allocations, counts.compiles) == (0, 0)
        assert sent == x.nbytes  # the weight stays where it is
    print(f"saved     {spent - min(best.values()):8.3f} ms a call")


if __name__ == "__main__":
    main()
