"""Products of operands as other libraries store them: rows that do not start on 16 bytes.

PyTorch's tensors are imported over DLPack and multiplied where they lie, beside `torch.matmul` on
the same memory, beside the product with no copy first, and beside operands as centella stores them.
Where PyTorch shares no memory with the device (WebGPU, the simulator) a slice of a wider tensor
lies so, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from gemv import REPLAYS, ROTATED, graphed, on_torch, round_of
from measure import Call, Row, alternate, summary, torch_or_none

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.tensors.tensor import apply

SHAPES = ((4097, 4099, 4093), (1025, 1027, 1029), (513, 515, 509))  # m, n, k
SMALL = ((71, 67, 73),)
REPLAYED = 5e11  # operations of a replay
FROBENIUS = {"f32": 2e-6, "f16": 3e-4, "bf16": 2e-3}  # relative, of results rounded to the dtype
SAMPLE = 64  # rows that are compared with float64

Pair = tuple[Any, Any]


def sets_of(shape: tuple[int, ...], dtype: DType, small: bool) -> list[Pair]:
    """Random A [m, k] and B [k, n] as they are stored, together more than four times the L2."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (narrow(rng.standard_normal(s, np.float32), dtype) for s in ((m, k), (k, n)))
    count = 2 if small else max(2, math.ceil(ROTATED / (a.nbytes + b.nbytes)))
    return [(np.roll(a, i, 0), np.roll(b, i, 1)) for i in range(count)]


def odd(device: ct.Device, values: Any, dtype: DType, torch: Any) -> tuple[ct.Tensor, Any]:
    """A tensor whose rows do not start on 16 bytes, and PyTorch's over the same memory."""
    if torch is not None and device.caps.target == "ptx":
        theirs = on_torch(torch, values, dtype)
        return ct.from_dlpack(theirs), theirs
    wide = np.zeros((len(values), values.shape[1] + 1), values.dtype)
    wide[:, 1:] = values
    return ct.asarray(wide, dtype, device)[:, 1:], None


def error_of(got: Any, pair: Pair, dtype: DType) -> float:
    """Relative Frobenius error, on a sample of rows."""
    rows = np.linspace(0, len(pair[0]) - 1, SAMPLE).astype(int)
    a, b = (widen(v, dtype).astype(np.float64) for v in (pair[0][rows], pair[1]))
    wanted = a @ b
    kept = np.asarray(widen(got, dtype) if got.dtype.itemsize == 2 else got, np.float64)[rows]
    return float(np.linalg.norm(kept - wanted) / np.linalg.norm(wanted))


def ours(device: ct.Device, tensors: list[Pair], count: int, variant: str) -> tuple[Call, Any]:
    """Rounds of a captured plan of products over the sets in turn, and the last result."""
    more = {"variant": variant} if variant else {}

    def products() -> list[ct.Tensor]:
        turns = (tensors[i % len(tensors)] for i in range(count))
        return [apply("matmul", a, b, alpha=1.0, **more) for a, b in turns]

    replay = device.compile(products)
    return round_of(replay, device.synchronize), replay()[-1].numpy()


def contestants(
    name: str, pairs: list[Pair], dtype: DType, count: int, torch: Any
) -> Iterator[tuple[str, Call, Any]]:
    """Each way to multiply on a device: who, rounds, the last result."""
    device = ct.device(name)
    shared = [tuple(odd(device, v, dtype, torch) for v in pair) for pair in pairs]
    tensors = [(a[0], b[0]) for a, b in shared]
    stored = [(ct.asarray(a, dtype, device), ct.asarray(b, dtype, device)) for a, b in pairs]
    yield f"{name} imported", *ours(device, tensors, count, "")
    if device.caps.tensor_cores and dtype.itemsize == 2:
        yield f"{name} imported, no copy", *ours(device, tensors, count, "mma")
    yield f"{name} own layout", *ours(device, stored, count, "")
    if shared[0][0][1] is None:
        return
    theirs = [(a[1], b[1]) for a, b in shared]
    call, results = graphed(torch, lambda: [
        torch.matmul(*theirs[i % len(theirs)]) for i in range(count)
    ])  # fmt: skip
    call()
    yield "cublas", call, results[-1].float().cpu().numpy()


def imported(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each way to multiply, once each has met the bound."""
    torch = torch_or_none()
    if torch is not None:
        matmul = torch.backends.cuda.matmul
        matmul.allow_tf32 = False
        matmul.allow_fp16_reduced_precision_reduction = False
        matmul.allow_bf16_reduced_precision_reduction = False
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",") if s]
    for shape in shapes or (SMALL if args.small else SHAPES):
        for kind in (args.dtypes or "bf16,f16").split(","):
            dtype = dtype_of(kind)
            pairs = sets_of(shape, dtype, args.small)
            work = 2.0 * math.prod(shape)
            count = 2 if args.small else max(1, round(REPLAYED / work))
            calls: dict[str, Call] = {}
            errors: dict[str, float] = {}
            for name in args.devices:
                for who, call, got in contestants(name, pairs, dtype, count, torch):
                    calls[who] = call
                    errors[who] = error_of(got, pairs[(count - 1) % len(pairs)], dtype)
                    assert errors[who] < FROBENIUS[kind], (shape, who, errors[who])
            amount = work * count * REPLAYS / 1e12
            for who, times in alternate(calls, args.rounds).items():
                row = {"bench": f"imported {kind}", "shape": list(shape), "who": who}
                rate = {"unit": "TFLOP/s", "error": errors[who], **summary(times, amount)}
                yield row | rate
