"""Products with what follows them, as MiniLM has them: tiles by warpgroups, each checked first.

Bias, and bias with GELU, of depth 384, where a tile's epilogue takes as long as its products, over
operands in turn that are more than four times the L2 cache.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gemv import REPLAYS, ROTATED, round_of
from measure import Call, Row, alternate, error_of, fresh, summary
from tensor_cores import FROBENIUS, forced, title, variant_of

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.ops.matmul.wgmma_tiles import WGMMA_TILES, WgmmaTile
from centella.ops.operands import NUMPY
from centella.tensors.tensor import apply

Array = np.ndarray[Any, Any]
# Rows, columns, depth, activation: MiniLM, 512 sentences of 128 tokens.
SHAPES = ((65536, 1152, 384, ""), (65536, 1536, 384, "gelu"))
SMALL = ((70, 72, 40, "gelu"),)
ODD = ((1, 200, 8), (129, 200, 96), (4097, 1536, 384), (17001, 1160, 320))
SHIPPED = next(iter(WGMMA_TILES))
TILES = (SHIPPED,)  # and others, to try them
REPLAYED = 1e12  # operations of a replay
ENDS = 64  # rows at either end that are compared


def product(tile: WgmmaTile, activation: str) -> Callable[..., ct.Tensor]:
    """f(x W^T + bias) on a tile: to be recorded and planned while it is `forced`."""
    attrs = {"activation": activation, "extras": ("bias",), "alpha": 1.0}
    return lambda *tensors: apply("linear", *tensors, variant=variant_of(tile), **attrs)


def wanted(values: list[Array], activation: str) -> Array:
    """In float64."""
    x, w, bias = (v.astype(np.float64) for v in values)
    y = x @ w.T + bias
    return np.asarray(NUMPY.gelu(y) if activation else y, np.float64)


def operands(m: int, n: int, k: int, dtype: DType) -> list[Array]:
    """Random x, w and bias, so that sums are some units wide."""
    rng = np.random.default_rng(m + n + k)
    values = (rng.standard_normal((m, k)), rng.standard_normal((n, k)) * 2 / math.sqrt(k),
              rng.standard_normal(n))  # fmt: skip
    return [np.asarray(widen(narrow(v.astype(np.float32), dtype), dtype)) for v in values]


def checked(device: ct.Device, tile: WgmmaTile, dtype: DType, small: bool) -> float:
    """The largest relative Frobenius error over odd shapes, with GELU and without.

    Raises:
        AssertionError: for one past the bound, or an element past its store's rounding.
    """
    worst = 0.0
    for m, n, k in (SMALL[0][:3],) if small else ODD:
        values = operands(m, n, k, dtype)
        tensors = [ct.asarray(v, dtype, device) for v in values]
        for activation in ("", "gelu"):
            with forced(tile):
                got = widen(product(tile, activation)(*tensors).numpy(), dtype)
            want = wanted(values, activation)
            near = dtype.epsilon * np.abs(want) + 1e-5 * np.abs(want).max()
            assert (np.abs(got - want) <= near).all(), (m, n, k, activation)
            worst = max(worst, error_of(got.astype(np.float64), want))
    assert worst < FROBENIUS[dtype.name], worst
    return worst


def epilogues(args: argparse.Namespace) -> Iterator[Row]:
    """Both products by every tile."""
    for name in args.devices:
        device = ct.device(name)
        if not device.caps.warpgroups:
            print(f"{name}: skipped, it has no warpgroups")
            continue
        for kind in (args.dtypes or "f16").split(","):
            dtype = dtype_of(kind)
            passed = list(_passed(device, dtype, args.small))
            for shape in SMALL if args.small else SHAPES:
                yield from _timed(device, shape, dtype, passed, args)


def _passed(device: ct.Device, dtype: DType, small: bool) -> Iterator[WgmmaTile]:
    for tile in TILES:
        try:
            worst = checked(device, tile, dtype, small)
        except (ct.LimitError, AssertionError) as error:
            print(f"{title(tile)} {dtype.name}: not timed, {error}")
        else:
            print(f"{title(tile)} {dtype.name}: checked, relative error at most {worst:.1e}")
            yield tile


def _timed(
    device: ct.Device, shape: tuple[int, int, int, str], dtype: DType,
    tiles: list[WgmmaTile], args: argparse.Namespace,
) -> Iterator[Row]:  # fmt: skip
    m, n, k, activation = shape
    work = 2.0 * m * n * k
    values = operands(m, n, k, dtype)
    sets = 1 if args.small else max(2, math.ceil(ROTATED / (2 * m * (k + n))))
    tensors = [
        [ct.asarray(np.roll(v, s * (not i), 0), dtype, device) for i, v in enumerate(values)]
        for s in range(sets)
    ]
    count = 2 if args.small else max(sets, round(REPLAYED / work))
    contestants: dict[str, Call] = {}
    for tile in tiles:
        who = title(tile)
        with forced(tile), fresh(device):
            op = product(tile, activation)
            replay = device.compile(lambda op=op: [op(*tensors[i % sets]) for i in range(count)])
            got = replay()[-1]
        ends = [widen(part.numpy(), dtype) for part in (got[: min(ENDS, m)], got[-min(ENDS, m) :])]
        x = np.roll(values[0], (count - 1) % sets, 0)
        for part, rows in zip(ends, (x[:ENDS], x[-ENDS:]), strict=True):
            error = error_of(part.astype(np.float64), wanted([rows, *values[1:]], activation))
            assert error < FROBENIUS[dtype.name], (who, error)
        contestants[who] = round_of(replay, device.synchronize)
    for who, times in alternate(contestants, args.rounds).items():
        row = summary(times, work * count * REPLAYS / 1e12)
        print(f"  {who}: {row['seconds'] / count / REPLAYS * 1e6:.1f} us each")
        yield {"bench": f"product + {activation or 'bias'} {dtype.name}", "shape": [m, n, k],
               "who": who, "unit": "TFLOP/s", **row}  # fmt: skip
