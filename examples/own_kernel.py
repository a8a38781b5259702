"""A kernel of one's own: the nearest centre of each point, on every device of this machine.

python examples/own_kernel.py [--device cpu|webgpu|cuda] [--source wgsl|ptx|ir]
"""

from __future__ import annotations

import argparse

import numpy as np

import centella as ct
from centella import lang

DEVICES = ("cpu", "webgpu", "cuda")


@ct.kernel(workgroup=64)
def nearest(
    points: ct.In[ct.f32, 2],
    centres: ct.In[ct.f32, 2],
    index: ct.Out[ct.u32],
    rows: ct.u32,
    *,
    count: int,
    dim: int,
) -> None:
    """A thread a point; `count` and `dim` are constants, so both loops unroll."""
    row = lang.global_id()
    with lang.if_(row < rows):
        point = [points[row, d] for d in range(dim)]
        best, where = lang.const(3.0e38, ct.f32), lang.const(0, ct.u32)
        for c in range(count):
            distance = sum((point[d] - centres[c, d]) * (point[d] - centres[c, d])
                           for d in range(dim))  # fmt: skip
            where = lang.select(distance < best, lang.const(c, ct.u32), where)
            best = lang.minimum(best, distance)
        index[row] = where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="default: every device of this machine")
    parser.add_argument("--source", choices=("wgsl", "ptx", "ir"), help="print the kernel, too")
    options = parser.parse_args()

    random = np.random.default_rng(0)
    points = random.standard_normal((1000, 3), dtype=np.float32)
    centres = random.standard_normal((5, 3), dtype=np.float32)
    expected = ((points[:, None] - centres) ** 2).sum(-1).argmin(1)

    for name in (options.device,) if options.device else DEVICES:
        try:
            device = ct.device(name)
        except (ct.DeviceError, ct.MissingExtraError) as error:
            if options.device:
                raise
            print(f"{name}: {error}")
            continue
        p, c = ct.asarray(points, device=device), ct.asarray(centres, device=device)
        index = ct.empty(len(points), ct.u32, device)
        nearest(p, c, index, rows=len(points), count=5, dim=3, threads=len(points))
        found = index.numpy()
        print(f"{device.name}: points a centre {np.bincount(found, minlength=5)}, "
              f"{(found == expected).mean():.1%} as NumPy")  # fmt: skip
    if options.source:
        print(nearest.source(options.source, count=5, dim=3))


if __name__ == "__main__":
    main()
