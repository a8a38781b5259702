"""Products joined to the norm of their rows: checked, then beside the two launches they replace.

Each tile is first right on odd shapes: rows off every boundary, tails of k, rows with outliers,
rows far from zero, without bias or residual, against float64. Then `linear` and `layer_norm` with
the tile, without it, and the product alone, over operands in turn that are more than four times
the L2 cache. Last MiniLM's forward, f16, 512 x 128 tokens, with the tile and without: sentences a
second, and what its kernels take when the device times them one by one.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from checkpoints import values_of
from gemv import REPLAYS, ROTATED, round_of
from measure import Call, Row, alternate, fresh, launched, print_kernels, resources, summary
from random_weights import fill

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.models.bert import BertModel
from centella.models.bert_config import BertConfig
from centella.ops.matmul import whole_rows as kernels
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NormAttrs
from centella.tensors import functional as F  # noqa: N812  # as users of PyTorch spell it
from centella.tensors.tensor import apply

Array = np.ndarray[Any, Any]
EPS = 1e-12  # of a BERT
SHAPES = ((65536, 384, 384), (65536, 384, 1536))  # MiniLM, 512 x 128: rows, columns, depth
SMALL = ((131, 128, 72),)
ODD = ((1, 384, 8), (65, 384, 40), (129, 384, 1536), (777, 64, 136), (300, 320, 31 * 8),
       (20000, 384, 384))  # fmt: skip
EXTRAS = (("bias", "residual"), ("bias",), ("residual",), ())
REPLAYED = 1e12  # operations of a replay
NEAR = 4e-4  # in units of the largest result, beside the rounding of the store
ENDS = 64  # rows at either end that are compared


def joined(extras: tuple[str, ...]) -> Callable[..., ct.Tensor]:
    """The product and its norm as one op, in one launch."""
    attrs = {"linear": LinearAttrs(extras, ""), "norm": NormAttrs("layer", EPS, ("weight", "bias"))}
    return lambda *tensors: apply("linear_norm", *tensors, variant="whole_rows", **attrs)


def apart(x: ct.Tensor, w: ct.Tensor, *more: ct.Tensor) -> ct.Tensor:
    """The two ops, of bias and residual."""
    bias, residual, weight, shift = more
    return F.layer_norm(F.linear(x, w, bias, residual=residual), weight, shift, EPS)


def alone(x: ct.Tensor, w: ct.Tensor, *more: ct.Tensor) -> ct.Tensor:
    """The product, with bias and residual."""
    return F.linear(x, w, more[0], residual=more[1])


def operands(m: int, n: int, k: int, extras: tuple[str, ...], dtype: DType) -> list[Array]:
    """Random x, w, extras, the norm's vectors; some rows have outliers, or are far from zero."""
    rng = np.random.default_rng(m + n + k)
    shapes = [(m, k), (n, k), *({"bias": (n,), "residual": (m, n)}[e] for e in extras), (n,), (n,)]
    values = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    values[0][::7] *= 20
    values[0][3::11, 0] = 900
    if "residual" in extras:
        values[1 + len(extras)][5::13] += 200
    return [widen(narrow(v, dtype), dtype) for v in values]


def wanted(values: list[Array], extras: tuple[str, ...], rows: Array) -> Array:
    """In float64, of some rows."""
    x, w, *more = (v.astype(np.float64) for v in values)
    by_name = dict(zip(extras, more, strict=False))
    y = x[rows] @ w.T + by_name.get("bias", 0.0)
    y = y + by_name["residual"][rows] if "residual" in by_name else y
    centred = y - y.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS)
    return np.asarray(y * more[-2] + more[-1])


def check(device: ct.Device, dtype: DType, small: bool) -> float:
    """The largest relative Frobenius error over odd shapes.

    Raises:
        AssertionError: an element is off by more than its store's rounding and f32 sums explain.
    """
    worst = 0.0
    sizes = SMALL if small else ODD
    for (m, n, k), extras in itertools.product(sizes, EXTRAS):
        values = operands(m, n, k, extras, dtype)
        tensors = [ct.asarray(v, dtype, device) for v in values]
        got = widen(joined(extras)(*tensors).numpy(), dtype).astype(np.float64)
        want = wanted(values, extras, np.arange(m))
        off = np.abs(got - want)
        near = dtype.epsilon * np.abs(want) + NEAR * np.abs(want).max()
        assert (off <= near).all(), (m, n, k, extras, float(off.max()))
        worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    return worst


def rounds_of(
    device: ct.Device, tensors: list[list[ct.Tensor]], count: int, op: Callable[..., ct.Tensor]
) -> tuple[Call, Any, Row]:
    """Replays of `count` launches, the last result of one, and the first kernel's resources."""
    with launched() as programs:
        replay = device.compile(lambda: [op(*tensors[i % len(tensors)]) for i in range(count)])
    got = replay()[-1].astype("f32").numpy()
    row = resources(device, programs[0]) if programs else {}
    return round_of(replay, device.synchronize), got, row


def whole_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Checked; both sizes; MiniLM."""
    dtypes = [dtype_of(kind) for kind in (args.dtypes or "f16").split(",")]
    for name in args.devices:
        device = ct.device(name)
        if not device.caps.warpgroups:
            print(f"{name}: skipped, it has no warpgroups")
            continue
        for dtype in dtypes:
            try:
                worst = check(device, dtype, args.small)
            except ct.LimitError as error:
                print(f"whole rows: skipped, {str(error).splitlines()[0]}")
                continue
            print(f"whole rows {dtype.name}: checked, relative error at most {worst:.1e}")
            for shape in SMALL if args.small else SHAPES:
                yield from _timed(device, shape, dtype, args)
        yield from minilm(device, name, args)


def _timed(
    device: ct.Device, shape: tuple[int, int, int], dtype: DType, args: argparse.Namespace
) -> Iterator[Row]:
    m, n, k = shape
    work = 2.0 * math.prod(shape)
    values = operands(m, n, k, EXTRAS[0], dtype)
    sets = 1 if args.small else max(2, math.ceil(ROTATED / (2 * m * (k + n))))
    turned = [{0, 3}.__contains__(i) for i in range(len(values))]  # x and residual
    tensors = [
        [ct.asarray(np.roll(v, s, 0) if t else v, dtype, device)
         for v, t in zip(values, turned, strict=True)]
        for s in range(sets)
    ]  # fmt: skip
    count = 2 if args.small else max(sets, round(REPLAYED / work))
    contestants: dict[str, Call] = {}
    kernel: dict[str, Row] = {}
    for who, op, order in (("whole rows", joined(EXTRAS[0]), kernels.ORDER), ("apart", apart, ())):
        with mock.patch.object(kernels, "ORDER", order), fresh(device):
            contestants[who], got, kernel[who] = rounds_of(device, tensors, count, op)
        _compare(got, values, (count - 1) % sets, dtype)
    contestants["product alone"], _, kernel["product alone"] = rounds_of(
        device, tensors, count, alone
    )
    seconds = alternate(contestants, args.rounds)
    for who, times in seconds.items():
        row = summary(times, work * count * REPLAYS / 1e12)
        print(f"  {who}: {row['seconds'] / count / REPLAYS * 1e6:.1f} us each, {kernel[who]}")
        yield {"bench": f"product + norm {dtype.name}", "shape": list(shape), "who": who,
               "unit": "TFLOP/s", **kernel[who], **row}  # fmt: skip


def _compare(got: Array, values: list[Array], turn: int, dtype: DType) -> None:
    """The first and last rows of a turn against float64."""
    m = len(got)
    rows = np.unique(np.r_[: min(ENDS, m), max(m - ENDS, 0) : m])
    rolled = [np.roll(v, turn, 0) if i in (0, 3) else v for i, v in enumerate(values)]
    want = wanted(rolled, EXTRAS[0], rows)
    near = 3 * dtype.epsilon * np.abs(want) + 1e-2 * np.abs(want).max()  # apart rounds the sums
    assert (np.abs(got[rows] - want) <= near).all(), float(np.abs(got[rows] - want).max())


# -- MiniLM ----------------------------------------------------------------------------------------

ORDERS: dict[str, Any] = {"as chosen": kernels.ORDER, "without whole rows": ()}


def minilm(device: ct.Device, name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Ids on the device to pooled vectors there, captured, both ways in turn."""
    texts, tokens = (4, 40) if args.small else (512, 128)
    model = BertModel(BertConfig.from_dict(values_of("minilm", args.small)), ct.f16)
    fill(model, device, ct.f16)
    rng = np.random.default_rng(1)
    ids = ct.asarray(
        rng.integers(10, model.config.vocab_size, (texts, tokens), dtype=np.int32), device=device
    )
    lengths = ct.asarray(np.full(texts, tokens, np.int32), device=device)

    def embed(ids: ct.Tensor, lengths: ct.Tensor) -> ct.Tensor:
        return F.l2_normalize(F.mean_pool(model(ids, lengths), lengths).astype("f32"))

    contestants: dict[str, Call] = {}
    vectors: dict[str, Array] = {}
    for who, order in ORDERS.items():
        with mock.patch.object(kernels, "ORDER", order), fresh(device):
            replay = device.compile(embed, ids, lengths)
            vectors[who] = replay(ids, lengths).numpy()
            print_kernels(who, lambda r=replay: r(ids, lengths).numpy())
        contestants[who] = round_of(lambda r=replay: r(ids, lengths), device.synchronize)
    first, *others = vectors.values()
    cosine = min(float(np.min(np.sum(first * other, -1))) for other in others)
    assert cosine > 0.999, cosine
    for who, times in alternate(contestants, args.rounds).items():
        row = summary(times, texts * REPLAYS)
        yield {"bench": "MiniLM f16, forward", "shape": [texts, tokens], "who": f"{name} {who}",
               "unit": "sentences/s", "cosine": cosine, **row}  # fmt: skip
