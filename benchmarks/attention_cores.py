"""Attention of many queries on tensor cores, checked, then timed beside PyTorch's SDPA.

That is the tile that is chosen; with `--tiles` all others too, of `mma` and, on Hopper, of `wgmma`.
One is checked before it is timed: lengths, a causal mask, grouped queries and sizes off every
boundary, all of the result against float64 of the rounded operands; then, of each shape that is
timed, a sample of queries. Rounds of replays alternate with PyTorch's, as in `gemv`. Operations are
4 lq lk d a head, half of that under a causal mask.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from gemv import REPLAYS, graphed, on_torch, round_of
from measure import Call, Row, alternate, forcing, named, of_launch, summary, torch_or_none
from msgspec import Struct
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, dtype_of, narrow, widen
from centella.op import op
from centella.op.op import Form
from centella.ops.attention import choice
from centella.ops.attention.mma import LEAST_TILE, MMA, MMA_TILES, MmaTile
from centella.ops.attention.op import ATTENTION
from centella.ops.attention.problem import AttentionAttrs
from centella.ops.attention.wgmma import WGMMA, WGMMA_TILES
from centella.ops.attention.wgmma_tile import WgmmaTile
from centella.specs import Caps, make_spec
from centella.tensors.tensor import apply

AnyTile = MmaTile | WgmmaTile
# By head size: tiles beside the shipped ones.
TILES: dict[int, tuple[MmaTile, ...]] = {
    32: (
        MmaTile(64, 64, 4, 2, together=3),
        MmaTile(128, 64, 8, 2),
        MmaTile(128, 128, 4, 2),
        MmaTile(128, 32, 4, 3, together=3),
    ),
    64: (
        MmaTile(64, 64, 4, 2, together=3),
        MmaTile(64, 64, 4, 3, together=3),
        MmaTile(128, 64, 8, 2, together=1),
        MmaTile(128, 32, 4, 2),
        MmaTile(128, 128, 8, 2, together=1),
    ),
    128: (
        MmaTile(128, 48, 4, 2, keeps_queries=False),
        MmaTile(128, 64, 4, 2, keeps_queries=False),
        MmaTile(64, 64, 4, 2),
        MmaTile(128, 64, 8, 2, together=1),
    ),
}
BY_WARPGROUPS: dict[int, tuple[WgmmaTile, ...]] = {
    64: (WgmmaTile(128), WgmmaTile(192, late=True), WgmmaTile(128, 3)),
    128: (WgmmaTile(128, late=True), WgmmaTile(176), WgmmaTile(96)),
}
BOUND = {"f16": 2e-7, "bf16": 5e-6}  # squared error of the squares, as in the table of ops
ONE_PART = 7e-6  # of bf16 with weights of one part, which are timed to show what two cost
REPLAYED = 2e11  # operations of a replay at least
SAMPLE = 64  # queries that are compared with float64
ROUNDS = 12


class Shape(Struct, frozen=True):
    """A problem: [batch, heads, kv_heads, queries and keys, head size]."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    dtype: str
    causal: bool = False

    @property
    def work(self) -> float:
        """Operations."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.dim
        return whole / 2 if self.causal else whole


SHAPES = (
    Shape("MiniLM", 512, 12, 12, 128, 32, "f16"),
    Shape("Whisper", 1, 20, 20, 1500, 64, "f16"),
    Shape("Whisper", 1, 20, 20, 1500, 64, "bf16"),
    Shape("long", 1, 32, 32, 8192, 128, "f16"),
    Shape("long", 1, 32, 32, 8192, 128, "bf16"),
    Shape("long, causal", 1, 32, 32, 8192, 128, "f16", True),
    Shape("long, causal", 1, 32, 32, 8192, 128, "bf16", True),
    Shape("grouped, causal", 1, 32, 8, 2048, 128, "f16", True),
)
SMALL = (Shape("small", 1, 4, 2, 40, 32, "f16", True), Shape("small", 2, 2, 2, 33, 64, "bf16"))


def title(tile: AnyTile | None) -> str:
    """A tile as the log writes it: queries, keys, warps, stages; what else differs.

    None: the one that is chosen.
    """
    if tile is None:
        return "as chosen"
    parts = f"{', 2 parts' if tile.parts == 2 else ''}"
    if isinstance(tile, MmaTile):
        more = f"{'' if tile.keeps_queries else ', q again'}{parts}"
        return f"{tile.queries}x{tile.keys}, {tile.warps}, {tile.stages}{more}"
    more = f"{', late' if tile.late else ''}{parts}"
    return f"wgmma {tile.queries}x{tile.keys}, {tile.stages}{more}"


def tiles_of(dim: int, dtype: DType, small: bool) -> list[AnyTile]:
    """The shipped tiles, then others; of bf16 in two parts, and the first of each in one.

    Those of `wgmma` in one part make values f16.
    """
    shipped = next(tile for most, tile, _ in MMA_TILES if dim <= most)
    tiles: list[AnyTile] = [LEAST_TILE] if small else [shipped, *TILES[dim]]
    groups: list[list[AnyTile]] = [tiles, [tile for most, tile, *_ in WGMMA_TILES if dim == most]]
    groups[1] += [] if small else BY_WARPGROUPS.get(dim, ())
    if dtype is bf16:
        groups = [[*(replace(t, parts=2) for t in some), *some[:1]] for some in groups]
    return [tile for some in groups for tile in some]


def attend(tile: AnyTile | None, causal: bool, *tensors: ct.Tensor) -> ct.Tensor:
    """Attention, with lengths where given; to be recorded and planned while it is `forced`."""
    masks = ("lengths",) if len(tensors) > 3 else ()
    scale = tensors[0].shape[3] ** -0.5
    return apply("attention", *tensors, masks=masks, causal=causal, scale=scale,
                 variant=variant_of(tile))  # fmt: skip


def variant_of(tile: AnyTile | None) -> str | None:
    """The variant that `forced` adds for a tile, whose plans are its own; None: as is chosen."""
    return None if tile is None else repr(tile)


def forced(tile: AnyTile | None) -> Any:
    """Add a variant that has this tile alone."""
    if tile is None:
        return nullcontext()
    kernel: Any = MMA if isinstance(tile, MmaTile) else WGMMA
    return forcing(choice, kernel, repr(tile), lambda form, caps: tile)


def kernel_of(device: ct.Device, shape: Shape, tile: AnyTile | None) -> Row:
    """The kernel of an attention, and what the driver says that it takes."""
    dtype, kv = dtype_of(shape.dtype), (shape.batch, shape.kv_heads, shape.length, shape.dim)
    q = make_spec((kv[0], shape.heads, *kv[2:]), dtype, 16)
    inputs = q, make_spec(kv, dtype, 16), make_spec(kv, dtype, 16)
    y = make_spec((kv[0], kv[2], shape.heads, kv[3]), dtype, 16)
    attrs = AttentionAttrs((), shape.dim**-0.5, shape.causal, variant=variant_of(tile))
    with forced(tile):
        lowered = Form(ATTENTION, inputs, (y,), attrs).lower(device.caps)
    return of_launch(device, lowered.calls[-1])


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Any:
    """Normal numbers as they are stored."""
    return narrow(rng.standard_normal(shape, np.float32), dtype)


def error_of(got: Any, wanted: Any) -> float:
    """Squared error of the squares."""
    return float(((got - wanted) ** 2).sum() / (wanted**2).sum())


def bound_of(tile: AnyTile | None, dtype: DType) -> float:
    """How far a tile may be off."""
    rough = dtype is bf16 and isinstance(tile, MmaTile) and tile.parts == 1
    return ONE_PART if rough else BOUND[dtype.name]


def check(device: ct.Device, tile: AnyTile | None, dim: int, dtype: DType) -> float:
    """The larger error of two problems off every boundary.

    Raises:
        AssertionError: for one past the bound.
    """
    rng, worst = np.random.default_rng(1), 0.0
    formula = op.get("attention").reference
    assert formula is not None
    for causal, lq, lk in ((True, 131, 215), (False, 131, 77)):
        shapes = ((2, 4, lq, dim), (2, 2, lk, dim), (2, 2, lk, dim))
        stored = [random(rng, s, dtype) for s in shapes]
        lengths = np.array([lk - 7, lk // 2], np.int32)
        tensors = [ct.asarray(x, dtype, device) for x in stored]
        with forced(tile):
            got = attend(tile, causal, *tensors, ct.asarray(lengths, device=device)).numpy()
        wide = [widen(x, dtype).astype(np.float64) for x in stored]
        wanted = formula(*wide, lengths, masks=("lengths",), causal=causal, scale=dim**-0.5)
        error = error_of(np.asarray(got, np.float64), wanted)
        assert error < bound_of(tile, dtype), (tile, dtype.name, causal, error)
        worst = max(worst, error)
    return worst


def sampled(got: Any, stored: list[Any], shape: Shape, dtype: DType) -> float:
    """Error of some queries of some heads; `got` is [batch, queries, heads, dim]."""
    rng, sampled_rows, wanted = np.random.default_rng(2), [], []
    for _ in range(SAMPLE):
        b, head, i = (int(rng.integers(n)) for n in (shape.batch, shape.heads, shape.length))
        last = i + 1 if shape.causal else shape.length
        group = head // (shape.heads // shape.kv_heads)
        rows = stored[0][b, head, i], stored[1][b, group, :last], stored[2][b, group, :last]
        q, k, v = (widen(x, dtype).astype(np.float64) for x in rows)
        scores = k @ q * shape.dim**-0.5
        weights = np.exp(scores - scores.max())
        wanted.append(weights @ v / weights.sum())
        sampled_rows.append(np.asarray(got[b, i, head], np.float64))
    return error_of(np.array(sampled_rows), np.array(wanted))


def sdpa(torch: Any, stored: list[Any], shape: Shape, count: int, dtype: DType) -> tuple[Call, Any]:
    """The peer in a graph of `count`, and its last result [batch, queries, heads, dim]."""
    tensors = [on_torch(torch, x, dtype) for x in stored]
    options = {"is_causal": shape.causal}
    if shape.heads != shape.kv_heads:
        options["enable_gqa"] = True

    def record() -> list[Any]:
        attention = torch.nn.functional.scaled_dot_product_attention
        return [attention(*tensors, **options) for _ in range(count)]

    call, results = graphed(torch, record)
    call()
    return call, (results[-1].transpose(1, 2).float().cpu().numpy(), tensors, results)


def attention_cores(args: argparse.Namespace) -> Iterator[Row]:
    """What the first device with tensor cores chooses (or the simulator), SDPA beside.

    With `--tiles` every tile is checked and timed as well.
    """
    torch = torch_or_none()
    names = [d for d in args.devices if ct.device(d).caps.target in ("ptx", "ir")]
    if not names:
        print("skipped: no device here has tensor cores")
        return
    device = ct.device(names[0])
    wanted = (args.dtypes or "f16,bf16").split(",")
    shapes = [s for s in (SMALL if args.small else SHAPES) if s.dtype in wanted]
    usable: dict[tuple[int, str], list[AnyTile | None]] = {}
    for shape in shapes:
        kind = shape.dim, shape.dtype
        if kind not in usable:
            dtype = dtype_of(shape.dtype)
            every = tiles_of(shape.dim, dtype, args.small)
            others = [t for t in every if named(title(t), args.tiles)]
            usable[kind] = list(_checked(device, (None, *others), shape.dim, dtype))
        yield from _timed(device, shape, usable[kind], torch, args)


def _checked(
    device: ct.Device, tiles: Sequence[AnyTile | None], dim: int, dtype: DType
) -> Iterator[AnyTile | None]:
    """The tiles that a device takes, once they have passed."""
    for tile in tiles:
        if tile is not None and not fits(tile, dim, device.caps):
            print(f"{title(tile)} of heads of {dim}: skipped, it does not fit")
            continue
        worst = check(device, tile, dim, dtype)
        print(f"{title(tile)} of heads of {dim}, {dtype.name}: checked, error at most {worst:.1e}")
        yield tile


def fits(tile: AnyTile, dim: int, caps: Caps) -> bool:
    """Whether a device has the threads, the shared memory and the instructions."""
    small = tile.shared_bytes(dim) <= caps.max_shared and tile.threads <= caps.max_workgroup
    return small and (isinstance(tile, MmaTile) or caps.warpgroups)


def _timed(
    device: ct.Device, shape: Shape, tiles: list[AnyTile | None], torch: Any,
    args: argparse.Namespace,
) -> Iterator[Row]:  # fmt: skip
    """A row for each tile and SDPA, once each has met the bound on a sample."""
    dtype, rng = dtype_of(shape.dtype), np.random.default_rng(0)
    kv = (shape.batch, shape.kv_heads, shape.length, shape.dim)
    stored = [random(rng, s, dtype) for s in ((kv[0], shape.heads, *kv[2:]), kv, kv)]
    count = 1 if args.small else max(1, math.ceil(REPLAYED / shape.work))
    tensors = [ct.asarray(x, dtype, device) for x in stored]
    contestants: dict[str, Call] = {}
    errors: dict[str, float] = {}
    kernels: dict[str, Row] = {}
    for tile in tiles:

        def record(tile: AnyTile | None = tile) -> list[ct.Tensor]:
            return [attend(tile, shape.causal, *tensors) for _ in range(count)]

        with forced(tile):
            replay = device.compile(record)
            got = replay()[-1].numpy()
        errors[title(tile)] = sampled(got, stored, shape, dtype)
        kernels[title(tile)] = kernel_of(device, shape, tile)
        assert errors[title(tile)] < 1.5 * bound_of(tile, dtype), (shape, tile, errors)
        contestants[title(tile)] = round_of(replay, device.synchronize)
    kept = None
    if torch is not None:
        contestants["torch SDPA"], kept = sdpa(torch, stored, shape, count, dtype)
        errors["torch SDPA"] = sampled(kept[0], stored, shape, dtype)
    seconds = alternate(contestants, min(args.rounds, ROUNDS))
    del kept
    rows: list[Row] = [
        {"bench": f"attention {shape.name} {dtype.name}", "who": who, "unit": "TFLOP/s",
         "shape": [shape.batch, shape.heads, shape.length, shape.dim], "error": errors[who],
         **kernels.get(who, {}), "us": float(np.median(times)) / (count * REPLAYS) * 1e6,
         **summary(times, shape.work * count * REPLAYS / 1e12)}
        for who, times in seconds.items()
    ]  # fmt: skip
    yield from sorted(rows, key=lambda row: -row["rate"])
