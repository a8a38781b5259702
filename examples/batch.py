"""Many layers as one batch: one compile a kernel, one upload, one submission, one result back.

python examples/batch.py [--device cpu|webgpu|cuda]
"""

from __future__ import annotations

import argparse

import numpy as np

import centella as ct

LAYERS, WIDTH = 24, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = ct.device(parser.parse_args().device)

    random = np.random.default_rng(0)
    points = random.standard_normal((64, WIDTH), dtype=np.float32)
    weights = random.standard_normal((LAYERS, WIDTH, WIDTH), dtype=np.float32) / 16

    cache = ct.PipelineCache()  # a fresh one, so that every compile is counted
    for run in ("first", "second"):
        with ct.ledger() as led:
            batch = device.batch()
            x = batch.upload(points)
            for weight in weights:
                x = batch.tanh(batch.matmul(x, batch.upload(weight)))
            batch.execute_with_cache(cache, outputs=[x])
            result = batch.read(x)
        print(f"{run:<6} run  {led}")
        # Everything goes up in one write; 48 operations are one submission.
        led.expect(uploads=1, downloads=1, submissions=1)
        if run == "second":
            led.expect(compiles=0)

    expected = points.astype(np.float64)
    for weight in weights:
        expected = np.tanh(expected @ weight)
    error = np.abs(result - expected).max()
    kernels = ", ".join(cache.names()) or "none, the CPU's operations are NumPy's"
    print(f"{batch.num_operations} operations on {device.name}; compiled: {kernels}")
    print(f"largest difference to float64: {error:.1e}")
    assert batch.num_operations == 2 * LAYERS
    assert error < 1e-3


if __name__ == "__main__":
    main()
