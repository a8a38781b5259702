"""16-bit products on tensor cores: every tile checked on odd shapes, then timed beside cuBLAS.

A tile is checked before it is timed: shapes off every boundary, operands in every layout, pads that
hold NaN, an epilogue, each against float64 of the rounded operands. Then rounds of replays as in
`gemv`, over operands in turn that are together more than four times the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from gemv import REPLAYS, ROTATED, graphed, on_torch, round_of
from measure import (
    Call,
    Row,
    alternate,
    error_of,
    forcing,
    named,
    of_launch,
    summary,
    torch_or_none,
)

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.op.op import Form
from centella.ops.matmul import choice
from centella.ops.matmul import product as matmul
from centella.ops.matmul.mma import MMA, MMA_TILES, MmaTile
from centella.ops.matmul.op import LINEAR
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.matmul.wgmma import WGMMA
from centella.ops.matmul.wgmma_tiles import WGMMA_TILES, WgmmaTile
from centella.specs import Caps, make_spec
from centella.tensors.tensor import apply

SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4097, 4093, 4099),
    (65536, 1536, 384),  # MiniLM, 512 sentences of 128 tokens: the two products of a feed-forward
    (65536, 384, 1536),
    (1500, 5120, 1280),  # Whisper large-v3, one window
    (1500, 1280, 5120),
    (512, 19456, 2560),  # Qwen3-4B, prompts of 512 and 2048: gate and up in one, down
    (512, 2560, 9728),
    (2048, 19456, 2560),
    (2048, 2560, 9728),
)
SMALL = ((70, 66, 72),)
ODD = ((1, 1, 1), (7, 5, 3), (33, 70, 31), (129, 131, 97), (200, 258, 512), (65, 257, 1000))
AnyTile = MmaTile | WgmmaTile
TILES: tuple[AnyTile, ...] = (
    *WGMMA_TILES,
    WgmmaTile(128, 256, 64, 4, staged=128),
    WgmmaTile(128, 256, 64, 4),
    *MMA_TILES,
    MmaTile(128, 128, 64, 64, 64, 3),
    MmaTile(128, 256, 32, 64, 64, 4),
    MmaTile(256, 128, 32, 64, 64, 4),
    MmaTile(256, 128, 64, 64, 64, 3),
    MmaTile(128, 128, 32, 64, 32, 4),
    MmaTile(128, 64, 32, 64, 32, 4),
)
REPLAYED = 2e12  # operations of a replay
FROBENIUS = {"f16": 3e-4, "bf16": 2e-3}  # relative, of results rounded to the dtype
SAMPLE = 64  # rows that are compared with float64

Pair = tuple[Any, Any]
Timed = tuple[str, ct.Device, AnyTile | None]
Product = Callable[..., ct.Tensor]


def title(tile: AnyTile | None) -> str:
    """A tile as the log writes it: group and depth, warp, stages; None: the one that is chosen."""
    if tile is None:
        return "as chosen"
    size = f"{tile.bm}x{tile.bn}x{tile.bk}"
    if isinstance(tile, MmaTile):
        return f"{size}, {tile.wm}x{tile.wn}, {tile.stages}"
    last = f", last {tile.last}" if tile.last else ""
    return f"{size}, wgmma{' in turn' * tile.turns}, {tile.stages}, {tile.staged}{last}"


def variant_of(tile: AnyTile | None) -> str | None:
    """The variant that `forced` adds for a tile; None: the choice is the library's."""
    return None if tile is None else title(tile)


def linear(tile: AnyTile | None) -> Product:
    """x W^T on a tile: to be recorded and planned while it is `forced`."""

    def product(x: ct.Tensor, w: ct.Tensor, *more: ct.Tensor) -> ct.Tensor:
        named = ("bias", "residual")[: len(more)]
        attrs = {"activation": "silu" if more else "", "alpha": 1.0, "extras": named}
        return apply("linear", x, w, *more, variant=variant_of(tile), **attrs)

    return product


def forced(tile: AnyTile | None) -> Any:
    """Give this tile to every product on tensor cores whose rows start on 16 bytes."""
    if tile is None:
        return nullcontext()
    kernel = MMA if isinstance(tile, MmaTile) else WGMMA

    def tile_of(product: matmul.Product, caps: Caps) -> AnyTile | None:
        if kernel.tile(product, caps) is None:
            return None
        if isinstance(tile, MmaTile):
            return tile if product.whole else MMA_TILES[-1]
        takes = tile.takes(product.problem.a_along_k, product.problem.b_along_k)
        return tile if takes else next(iter(WGMMA_TILES))

    return forcing(choice, kernel, title(tile), tile_of)


def placed(device: ct.Device, values: Any, dtype: DType, way: str) -> ct.Tensor:
    """A matrix on a device: as it is, turned, or with rows off 16 bytes; beside it lies NaN."""
    turned = way == "turned"
    rows, columns = values.shape[::-1] if turned else values.shape
    more = 9 - columns % 8 if way == "odd" else 8  # columns before the matrix
    wide = np.full((rows + 1, columns + 2 * more), np.nan, np.float32)
    wide[:rows, more : more + columns] = values.T if turned else values
    whole = ct.asarray(narrow(wide, dtype), dtype, device)
    part = whole[:rows, more : more + columns]
    return part.T if turned else part


def check(device: ct.Device, tile: AnyTile | None, dtype: DType) -> float:
    """The largest error over odd shapes, layouts and an epilogue.

    Raises:
        AssertionError: for one past the bound.
    """
    rng = np.random.default_rng(1)
    worst = 0.0
    product = linear(tile)
    for m, n, k in ODD:
        x, w, bias, residual = (
            widen(narrow(rng.standard_normal(s).astype(np.float32), dtype), dtype)
            for s in ((m, k), (n, k), (n,), (m, n))
        )
        wanted = x.astype(np.float64) @ w.T.astype(np.float64)
        for a_way, b_way in itertools.product(("plain", "turned", "odd"), repeat=2):
            a, b = placed(device, x, dtype, a_way), placed(device, w, dtype, b_way)
            got = apply("matmul", a, b.T, alpha=1.0, variant=variant_of(tile)).numpy()
            worst = max(worst, bounded(got, wanted, dtype, (m, n, k, a_way, b_way)))
        sums = wanted + bias
        fused = sums / (1 + np.exp(-sums)) + residual
        tensors = [ct.asarray(v, dtype, device) for v in (x, w, bias, residual)]
        got = product(*tensors).numpy()
        worst = max(worst, bounded(got, fused, dtype, (m, n, k, "fused")))
    return worst


def bounded(got: Any, wanted: Any, dtype: DType, what: Any) -> float:
    """The error of a result, each element within its store's rounding."""
    got = np.asarray(widen(got, dtype) if got.dtype.itemsize == 2 else got, np.float64)
    near = 2 * dtype.epsilon * np.abs(wanted) + 1e-4 * np.sqrt(np.mean(wanted**2)) + 1e-7
    assert (np.abs(got - wanted) <= near).all(), (what, float(np.abs(got - wanted).max()))
    return error_of(got, wanted)


def kernel_of(device: ct.Device, shape: tuple[int, ...], dtype: DType, tile: AnyTile | None) -> Row:
    """The kernel of x W^T: its tile, and what the driver says it takes."""
    m, n, k = shape
    specs = tuple(make_spec(s, dtype, 16) for s in ((m, k), (n, k), (m, n)))
    attrs = LinearAttrs((), "", variant=variant_of(tile))
    with forced(tile):
        (call,) = Form(LINEAR, specs[:2], specs[2:], attrs).lower(device.caps).calls
    chosen = dict(call.constants).get("tile")
    return {**of_launch(device, call), "tile": title(chosen) if chosen in TILES else ""}


def randoms(shape: tuple[int, ...]) -> Pair:
    """Random x [m, k] and weights [n, k]."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    return rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)


def operands(values: Pair, dtype: DType, small: bool) -> list[Pair]:
    """x and weights as they are stored, in sets."""
    x, w = (narrow(v, dtype) for v in values)
    count = 2 if small else max(2, math.ceil(ROTATED / (x.nbytes + w.nbytes)))
    return [(np.roll(x, i, 0), np.roll(w, i, 0)) for i in range(count)]


def sampled(got: Any, pair: Pair, dtype: DType) -> float:
    """Relative Frobenius error of a product, on a sample of rows."""
    rows = np.linspace(0, len(pair[0]) - 1, SAMPLE).astype(int)
    x, w = (widen(v, dtype).astype(np.float64) for v in (pair[0][rows], pair[1]))
    return error_of(np.asarray(got[rows], np.float64), x @ w.T)


def ours(
    device: ct.Device, tensors: list[Pair], pairs: list[Pair], count: int, dtype: DType,
    product: Product,
) -> tuple[Call, float]:  # fmt: skip
    """Rounds of a captured plan of `count` products, and the last one's error."""

    def products() -> list[ct.Tensor]:
        return [product(*tensors[i % len(tensors)]) for i in range(count)]

    replay = device.compile(products)
    got = replay()[-1].numpy()
    return round_of(replay, device.synchronize), sampled(
        got, pairs[(count - 1) % len(pairs)], dtype
    )


def cublas(torch: Any, pairs: list[Pair], count: int, dtype: DType) -> tuple[Call, float, Any]:
    """The peer, sums in f32 throughout, its error, and what its graph reads."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    tensors = [tuple(on_torch(torch, v, dtype) for v in pair) for pair in pairs]

    def record() -> list[Any]:
        turns = (tensors[i % len(tensors)] for i in range(count))
        return [torch.nn.functional.linear(x, w) for x, w in turns]

    call, results = graphed(torch, record)
    call()
    error = sampled(results[-1].float().cpu().numpy(), pairs[(count - 1) % len(pairs)], dtype)
    return call, error, (tensors, results)


def mma(args: argparse.Namespace) -> Iterator[Row]:
    """What is chosen on each device that has tensor cores (or simulates them), cuBLAS beside.

    With `--tiles` every tile is checked and timed as well.
    """
    torch = torch_or_none()
    devices = [(d, ct.device(d)) for d in args.devices]
    for name, device in devices:
        if device.caps.target not in ("ptx", "ir"):
            print(f"{name}: skipped, it has no tensor cores")
    devices = [(d, device) for d, device in devices if device.caps.target in ("ptx", "ir")]
    dtypes = [dtype_of(kind) for kind in (args.dtypes or "bf16,f16").split(",")]
    tiles = (None, *(t for t in TILES if named(title(t), args.tiles)))
    checked = {d: list(_checked(devices, tiles, d)) for d in dtypes}
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",") if s]
    for shape in shapes or (SMALL if args.small else SHAPES):
        values = randoms(shape)
        for dtype in dtypes:
            yield from _timed(values, dtype, checked[dtype], torch, args)


def _checked(
    devices: list[tuple[str, ct.Device]], tiles: Sequence[AnyTile | None], dtype: DType
) -> Iterator[Timed]:
    """The tiles that a device takes, once they have passed."""
    for name, device in devices:
        for tile in tiles:
            who = f"{name} {title(tile)}"
            try:
                with forced(tile):
                    worst = check(device, tile, dtype)
            except ct.LimitError as error:
                print(f"{who}: skipped, {str(error).splitlines()[0]}")
                continue
            except AssertionError as error:
                if tile is None:
                    raise
                print(f"{who} {dtype.name}: not timed, past the bound: {error}")
                continue
            print(f"{who} {dtype.name}: checked, relative error at most {worst:.1e}")
            yield name, device, tile


def _timed(
    values: Pair, dtype: DType, timed: list[Timed], torch: Any, args: argparse.Namespace
) -> Iterator[Row]:
    """A row for each tile and cuBLAS, once each has met the bound."""
    shape = (len(values[0]), len(values[1]), values[0].shape[1])
    work = 2.0 * math.prod(shape)
    count = 3 if args.small else max(1, round(REPLAYED / work))
    pairs = operands(values, dtype, args.small)
    contestants: dict[str, Call] = {}
    errors: dict[str, float] = {}
    kernels: dict[str, Row] = {}
    resident: dict[str, list[Pair]] = {}
    for name, device, tile in timed:
        if name not in resident:
            resident[name] = [
                (ct.asarray(x, dtype, device), ct.asarray(w, dtype, device)) for x, w in pairs
            ]
        who = f"{name} {title(tile)}"
        kernels[who] = kernel_of(device, shape, dtype, tile)
        with forced(tile):
            contestants[who], errors[who] = ours(
                device, resident[name], pairs, count, dtype, linear(tile)
            )
    kept = None
    if torch is not None:
        contestants["cublas"], errors["cublas"], kept = cublas(torch, pairs, count, dtype)
    for who, error in errors.items():
        assert error < FROBENIUS[dtype.name], (shape, who, error)
    seconds = alternate(contestants, args.rounds)
    del kept
    amount = work * count * REPLAYS / 1e12
    rows = [
        {"bench": f"mma {dtype.name}", "shape": list(shape), "who": who, "unit": "TFLOP/s",
         "error": errors[who], **kernels.get(who, {}), **summary(times, amount)}
        for who, times in seconds.items()
    ]  # fmt: skip
    yield from sorted(rows, key=lambda row: -row["rate"])
