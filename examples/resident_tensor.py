"""A chain of layers on tensors that stay on the device: one upload, one download, all counted.

python examples/resident_tensor.py [--device cpu|webgpu|cuda]
"""

from __future__ import annotations

import argparse

import numpy as np

import centella as ct

SEQ_LEN, WIDTH, HEADS, LAYERS = 32, 64, 4, 4


def layer(
    x: ct.Tensor, qkv: ct.Tensor, out: ct.Tensor, one: ct.Tensor, zero: ct.Tensor
) -> ct.Tensor:
    y = ct.linear(ct.layer_norm(x, one, zero), qkv)
    y = y.reshape(1, SEQ_LEN, 3 * HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)
    q, k, v = ct.chunk(y, 3, axis=1)
    y = ct.attention(q, k, v, causal=True)
    return ct.linear(y.permute(0, 2, 1, 3).reshape(1, SEQ_LEN, WIDTH), out, residual=x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="default: what centella info says")
    device = ct.device(parser.parse_args().device)

    random = np.random.default_rng(0)
    weights = [
        ct.from_host(random.standard_normal(shape, dtype=np.float32) / 8, device=device)
        for shape in ((3 * WIDTH, WIDTH), (WIDTH, WIDTH))
    ]
    weights += [ct.full((WIDTH,), value, device=device) for value in (1.0, 0.0)]
    states = random.standard_normal((1, SEQ_LEN, WIDTH), dtype=np.float32)
    device.synchronize()

    with ct.ledger() as led:
        x = ct.from_host(states, device=device)
        with ct.forbid("transfer"):  # a copy in here would raise at its line
            for _ in range(LAYERS):
                x = layer(x, *weights)
        result = x.to_host()
    led.expect(uploads=1, downloads=1, submissions=1, launches=4 * LAYERS)

    print(f"device    {device.name}")
    print(f"tensor    {list(x.shape)} {x.dtype.name}, {x.size_bytes:,} bytes, resident "
          f"{x.is_resident}")  # fmt: skip
    print(f"result    mean {result.mean():+.4f}, deviation {result.std():.4f}")
    print(f"ledger    {led}")
    print(f"process   {ct.totals()}")


if __name__ == "__main__":
    main()
