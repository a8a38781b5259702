"""A two-layer network as one batch: inputs up, one submission, one result back.

python examples/batch.py [--device cpu|webgpu|cuda]
"""

from __future__ import annotations

import argparse

import numpy as np

import centella as ct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="default: what centella info says")
    device = ct.device(parser.parse_args().device)

    random = np.random.default_rng(0)
    x = random.standard_normal((64, 256), dtype=np.float32)
    up = random.standard_normal((256, 512), dtype=np.float32) / 16
    down = random.standard_normal((512, 128), dtype=np.float32) / 16

    with ct.ledger() as led:
        batch = device.batch()
        hidden = batch.gelu(batch.matmul(batch.upload(x), batch.upload(up)), "tanh")
        y = batch.matmul(hidden, batch.upload(down))
        batch.execute(outputs=[y])
        result = batch.read(y)
    led.expect(uploads=1, downloads=1, submissions=1)

    inner = x @ up
    gelu = inner * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
    print(f"device      {device.name}")
    print(f"result      {result.shape}, largest difference to NumPy "
          f"{np.abs(result - gelu @ down).max():.1e}")  # fmt: skip
    print(f"ledger      {led}")
    assert device.last_plan is not None
    print(device.last_plan.explain())


if __name__ == "__main__":
    main()
