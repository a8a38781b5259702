"""Attention: operations, or bytes of keys and values, in a second, beside PyTorch's.

Results are compared with float64 on sampled queries before anything is timed. A round is a few
replays of a captured plan (of a CUDA graph for PyTorch) over operands in turn, which are together
more than four times the L2 cache. A sweep gives the register-tiled kernel each tile in place of the
chosen one; the rest of the launch is as shipped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gemv import ROTATED, graphed, on_torch, round_of
from measure import Call, Row, alternate, forcing, summary, torch_or_none
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.ops.attention import choice
from centella.ops.attention.tiled import TILED
from centella.ops.attention.tiles import Tile
from centella.specs import Caps
from centella.tensors.tensor import apply


@dataclass(frozen=True)
class Shape:
    """A problem; `heads` of queries, `kv_heads` of keys and values."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    causal: bool = False

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that it sees, in every head."""
        seen = self.queries * (self.queries + 1) / 2 + self.queries * (self.keys - self.queries)
        return self.batch * self.heads * (seen if self.causal else self.queries * self.keys)

    @property
    def sizes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k and v."""
        kv = (self.batch, self.kv_heads, self.keys, self.dim)
        return (self.batch, self.heads, self.queries, self.dim), kv, kv


SHAPES = (
    Shape("Whisper", 1, 20, 20, 1500, 1500, 64),
    Shape("MiniLM", 512, 12, 12, 128, 128, 32),
    Shape("full", 1, 32, 32, 8192, 8192, 128),
    Shape("causal", 1, 32, 32, 8192, 8192, 128, causal=True),
)
SMALL = (
    Shape("full", 1, 2, 2, 70, 70, 64),
    Shape("causal", 2, 4, 2, 40, 70, 32, causal=True),
)
WORK = 4e11  # operations of a replay, at least
MOVED = 1e9  # bytes that a replay of a decoding step reads
SAMPLE = 64  # queries that are compared with float64
WORST = {"f32": 2e-6, "f16": 5e-4, "bf16": 4e-3}  # relative Frobenius error

Operands = list[tuple[Any, Any, Any]]  # q, k and v in storage


def operands(shape: Shape, dtype: DType) -> Operands:
    """Random sets, enough to leave the cache."""
    rng = np.random.default_rng(0)
    first = tuple(narrow(rng.standard_normal(s, np.float32), dtype) for s in shape.sizes)
    count = max(2, math.ceil(ROTATED / sum(x.nbytes for x in first)))
    return [tuple(np.roll(x, i, 2) for x in first) for i in range(count)]  # type: ignore[misc]


def error_of(got: Any, shape: Shape, operand: tuple[Any, Any, Any], dtype: DType) -> float:
    """Relative Frobenius error of [b, h, lq, d] against float64, on a sample of queries."""
    rng = np.random.default_rng(3)
    q, k, v = (widen(x, dtype) for x in operand)
    wanted, rows = [], []
    for _ in range(SAMPLE):
        b, h, i = (int(rng.integers(n)) for n in (shape.batch, shape.heads, shape.queries))
        kv = h // (shape.heads // shape.kv_heads)
        seen = i + shape.keys - shape.queries + 1 if shape.causal else shape.keys
        keys, values = (x[b, kv, :seen].astype(np.float64) for x in (k, v))
        scores = keys @ q[b, h, i].astype(np.float64) / math.sqrt(shape.dim)
        weights = np.exp(scores - scores.max())
        wanted.append(weights @ values / weights.sum())
        rows.append(got[b, h, i])
    return float(np.linalg.norm(np.array(rows) - wanted) / np.linalg.norm(wanted))


def launches_of(shape: Shape, operand: tuple[Any, Any, Any]) -> int:
    """Launches of a replay."""
    if shape.queries == 1:
        return min(max(2, round(MOVED / (operand[1].nbytes + operand[2].nbytes))), 64)
    return min(max(1, round(WORK / (4 * shape.pairs * shape.dim))), 32)


def replays_of(shape: Shape) -> int:
    """Replays of a round: several where one is short."""
    return 1 if 4 * shape.pairs * shape.dim > WORK else 4


@dataclass(frozen=True)
class Timed:
    """What alternates: a round, and the error of a replay's last result."""

    call: Call
    error: float
    kept: Any = None


Attend = Callable[..., ct.Tensor]  # of q, k, v and scales of rows of i8


def ours(
    device: ct.Device, shape: Shape, sets: Operands, dtype: DType, tensors: Any, attend: Attend
) -> Timed:
    """A plan over the sets in turn, captured and checked."""
    count = launches_of(shape, sets[0])

    def record() -> list[ct.Tensor]:
        return [attend(*tensors[i % len(tensors)]) for i in range(count)]

    replay = device.compile(record)
    got = replay()[-1].numpy().astype(np.float32)
    last = sets[(count - 1) % len(sets)]

    call = round_of(replay, device.synchronize, replays_of(shape))
    return Timed(call, error_of(got, shape, last, dtype))


def sdpa(torch: Any, shape: Shape, sets: Operands, dtype: DType) -> Timed:
    """The peer: PyTorch's scaled_dot_product_attention (TF32 off), in a CUDA graph."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = [tuple(on_torch(torch, x, dtype) for x in one) for one in sets]
    count = launches_of(shape, sets[0])
    grouped = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}
    attend = torch.nn.functional.scaled_dot_product_attention

    def record() -> list[Any]:
        turns = (tensors[i % len(tensors)] for i in range(count))
        return [attend(*one, is_causal=shape.causal, **grouped) for one in turns]

    call, results = graphed(torch, record, replays_of(shape))
    call()
    got = results[-1].float().cpu().numpy()
    error = error_of(got, shape, sets[(count - 1) % len(sets)], dtype)
    return Timed(call, error, (tensors, results))


def timed(
    bench: str, shape: Shape, operand: tuple[Any, Any, Any], contestants: dict[str, Timed],
    rounds: int, dtype: DType,
) -> Iterator[Row]:  # fmt: skip
    """A row for each contestant, once each has met the bound."""
    for name, one in contestants.items():
        assert one.error < WORST[dtype.name] * (1 if name != "torch" else 4), (name, one.error)
    seconds = alternate({name: one.call for name, one in contestants.items()}, rounds)
    launches = launches_of(shape, operand) * replays_of(shape)
    each = 4 * shape.pairs * shape.dim, float(operand[1].nbytes + operand[2].nbytes)
    amount, unit = (each[1], "TB/s") if shape.queries == 1 else (each[0], "TFLOP/s")
    sizes = [shape.batch, shape.heads, shape.queries, shape.keys, shape.dim]
    for name, times in seconds.items():
        row = {"bench": f"{bench} {dtype.name} {shape.name}", "shape": sizes, "who": name,
               "unit": unit}  # fmt: skip
        yield {**row, **summary(times, launches * amount / 1e12), "error": contestants[name].error}


def resident(device: ct.Device, sets: Operands, dtype: DType) -> list[tuple[ct.Tensor, ...]]:
    """The sets on a device."""
    return [tuple(ct.asarray(x, dtype, device) for x in one) for one in sets]


def shapes(args: argparse.Namespace) -> tuple[Shape, ...]:
    """Those that were asked for."""
    return SMALL if args.small else SHAPES


def attention(args: argparse.Namespace) -> Iterator[Row]:
    """`attention` as shipped on each device, PyTorch beside."""
    torch = torch_or_none()
    for shape in shapes(args):
        for dtype in map(dtype_of, (args.dtypes or "f32,f16").split(",")):
            sets = operands(shape, dtype)
            contestants: dict[str, Timed] = {}
            for name in args.devices:
                device = ct.device(name)

                def attend(q: Any, k: Any, v: Any, causal: bool = shape.causal) -> ct.Tensor:
                    return ct.attention(q, k, v, causal=causal)

                tensors = resident(device, sets, dtype)
                contestants[name] = ours(device, shape, sets, dtype, tensors, attend)
            if torch is not None:
                contestants["torch"] = sdpa(torch, shape, sets, dtype)
            yield from timed("attention", shape, sets[0], contestants, args.rounds, dtype)


def bias(args: argparse.Namespace) -> Iterator[Row]:
    """MPNet's attention with its bias as a table by distance, and as a mask of every pair."""
    shape = SMALL[0] if args.small else Shape("MPNet", 64, 12, 12, 384, 384, 64)
    for dtype in map(dtype_of, (args.dtypes or "f32,f16").split(",")):
        sets, contestants = operands(shape, dtype), dict[str, Timed]()
        scores = (1, shape.heads, shape.queries, shape.keys)
        for name in args.devices:
            device = ct.device(name)
            tensors = resident(device, sets, dtype)
            for kind, size in (("bias", (shape.heads, 257)), ("mask", scores)):
                added = {kind: ct.asarray(np.zeros(size, np.float32), device=device)}
                attend = partial(ct.attention, **added)
                contestants[f"{name}, {kind}"] = ours(device, shape, sets, dtype, tensors, attend)
        yield from timed("attention, added", shape, sets[0], contestants, args.rounds, dtype)


# -- sweep -----------------------------------------------------------------------------------------

TILES = (
    Tile(32, 32, 8, 4, 4), Tile(64, 32, 8, 4, 4), Tile(64, 32, 8, 8, 4), Tile(16, 64, 8, 4, 4),
    Tile(32, 64, 8, 4, 4), Tile(128, 32, 8, 8, 4), Tile(128, 32, 16, 8, 4), Tile(64, 64, 8, 8, 4),
    Tile(64, 64, 16, 8, 4), Tile(128, 64, 8, 8, 4), Tile(128, 64, 8, 8, 8), Tile(64, 64, 16, 8, 8),
    Tile(128, 32, 8, 4, 4), Tile(256, 32, 8, 8, 4),
)  # fmt: skip


def title(tile: Tile) -> str:
    """A tile as the log writes it: queries, keys and depth, then a thread's, slabs a turn."""
    turn = f", {tile.unroll} a turn" if tile.unroll > 1 else ""
    return f"{tile.bq}x{tile.bk}x{tile.depth}, {tile.tq}x{tile.tk}x{tile.td}{turn}"


def tiles(shape: Shape, caps: Caps) -> list[Tile]:
    """Those worth a try: a thread has at most 128 sums and scores."""
    every = (replace(t.of(shape.dim), unroll=n) for t in TILES for n in (1, 2))
    return [t for t in every if t.fits(caps) and t.tq * (t.td + t.tk) <= 128 and t.td <= 16]


def attention_sweep(args: argparse.Namespace) -> Iterator[Row]:
    """Every tile on each device, the best first; the streaming kernel and the shipped beside."""
    for shape in (s for s in shapes(args) if s.queries > 1):
        for dtype in map(dtype_of, (args.dtypes or "f32").split(",")):
            sets = operands(shape, dtype)
            contestants: dict[str, Timed] = {}
            for name in args.devices:
                device = ct.device(name)
                if device.caps.target == "numpy":
                    print(f"{name}: skipped, it has no tiles")
                    continue
                tensors = resident(device, sets, dtype)
                attrs = {"masks": (), "causal": shape.causal, "scale": shape.dim**-0.5}
                stream = forced(attrs | {"variant": "stream"})
                contestants[f"{name} stream"] = ours(device, shape, sets, dtype, tensors, stream)
                for tile in tiles(shape, device.caps):
                    attend = forced(attrs | {"variant": title(tile)})
                    try:
                        with forcing(choice, TILED, title(tile), lambda form, caps, t=tile: t):
                            one = ours(device, shape, sets, dtype, tensors, attend)
                        contestants[f"{name} {title(tile)}"] = one
                    except ct.CentellaError as error:
                        print(f"{title(tile)}: skipped, {str(error).splitlines()[0]}")
            rows = timed("tiles", shape, sets[0], contestants, args.rounds, dtype)
            yield from sorted(rows, key=lambda row: -row["rate"])


def forced(attrs: dict[str, Any]) -> Attend:
    """`attention` with these attributes, heads first."""
    return lambda *tensors: apply("attention", *tensors, **attrs).permute(0, 2, 1, 3)
