"""Products of few rows: bytes of weights read in a second, beside cuBLAS and a plain read.

A round is eight replays of a captured plan (of a CUDA graph for PyTorch), each over 2 GB of
weights, in turn from sets that are together more than four times the L2 cache: all but the first
replay are prepared while the device is busy. The limit is a sum over 1 GB, measured in the same
rounds. A sweep gives the kernel of thin products each shape of a group in place of the chosen one;
the rest of the launch is as shipped.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from measure import Call, Row, alternate, forcing, of_launch, summary, torch_or_none

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.op.op import Form
from centella.op.variant import Variant
from centella.ops.matmul import choice
from centella.ops.matmul.op import LINEAR
from centella.ops.matmul.problem import THIN, LinearAttrs, Problem
from centella.ops.matmul.skinny import SKINNY_MMA, Skinny, skinny_tile_of
from centella.ops.matmul.streamed_many import MOST, STREAMED_MANY, ManyTile
from centella.ops.matmul.streamed_many import tiles_of as many_tiles_of
from centella.ops.matmul.sums import Thin
from centella.ops.matmul.thin import ROWS, SKINNY
from centella.specs import make_spec
from centella.tensors.tensor import apply

# [n, k]: the two products of a feed-forward layer, and one of attention.
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))
SMALL = ((333, 64), (64, 333))
KINDS = "f32,f16,bf16,i8"
ROTATED = 240e6  # bytes of weights that a round goes over before it repeats
MOVED = 2e9  # bytes of weights that a replay reads
REPLAYS = 8  # in a round
READ = 1 << 30  # bytes of the plain read
SAMPLE = 64  # outputs of each row that are compared with float64
WORST = 2e-6  # relative Frobenius error; of 16-bit results, twice their rounding

Set = tuple[Any, Any]  # a weight and the factors of its rows, or None


@dataclass(frozen=True)
class Timed:
    """What alternates: a round, the bytes it reads, the error of the last product of a replay.

    `kept` is what a CUDA graph reads, which lives as long as this.
    """

    call: Call
    nbytes: float
    error: float = 0.0
    kept: Any = None


@dataclass(frozen=True)
class Cell:
    """One product: x [m, k] by weights [n, k] in sets, all on the host; its launches a replay."""

    x: Any
    x_type: DType
    sets: list[Set]
    w_type: DType
    launches: int

    @property
    def nbytes(self) -> float:
        """Bytes of weights that a round reads."""
        return float(self.sets[0][0].nbytes) * self.launches * REPLAYS

    def error_of(self, got: Any) -> float:
        """Relative Frobenius error of a replay's last product against float64, on a sample."""
        stored, scale = self.sets[(self.launches - 1) % len(self.sets)]
        columns = np.linspace(0, len(stored) - 1, SAMPLE).astype(int)
        weight = widen(stored[columns], self.w_type).astype(np.float64)
        if scale is not None:
            weight *= scale[columns, None]
        wanted = widen(self.x, self.x_type).astype(np.float64) @ weight.T
        return float(np.linalg.norm(got[:, columns] - wanted) / np.linalg.norm(wanted))


def weights_of(n: int, k: int, dtype: DType, small: bool) -> list[Set]:
    """Random weights as they are stored: sets of different rows, enough to leave the cache."""
    values = np.random.default_rng(0).standard_normal((n, k), np.float32)
    stored, scale = ct.quantize_int8(values) if dtype is ct.i8 else (narrow(values, dtype), None)
    count = 2 if small else max(2, math.ceil(ROTATED / stored.nbytes))
    rolled = [np.roll(stored, i, 0) for i in range(count)]
    return [(w, None if scale is None else np.roll(scale, i)) for i, w in enumerate(rolled)]


def resident(device: ct.Device, sets: list[Set], dtype: DType) -> list[Set]:
    """Sets of weights on a device."""
    return [
        (ct.asarray(w, dtype, device), None if s is None else ct.asarray(s, device=device))
        for w, s in sets
    ]


def round_of(replay: Callable[[], Any], wait: Call, replays: int = REPLAYS) -> Call:
    """Replays one after the other, then a wait."""

    def call() -> None:
        for _ in range(replays):
            replay()
        wait()

    return call


def ours(device: ct.Device, cell: Cell, tensors: list[Set], product: Callable[..., Any]) -> Timed:
    """A plan of products over the sets in turn, captured and checked."""
    x = ct.asarray(cell.x, cell.x_type, device)

    def products() -> list[ct.Tensor]:
        turns = (tensors[i % len(tensors)] for i in range(cell.launches))
        return [product(x, w, scale=s) for w, s in turns]

    replay = device.compile(products)
    error = cell.error_of(replay()[-1].numpy())
    return Timed(round_of(replay, device.synchronize), cell.nbytes, error)


def graphed(torch: Any, record: Callable[[], Any], replays: int = REPLAYS) -> tuple[Call, Any]:
    """A CUDA graph of what PyTorch records, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = record()
    return round_of(graph.replay, torch.cuda.synchronize, replays), results


def on_torch(torch: Any, array: Any, dtype: DType) -> Any:
    """A host array in PyTorch's memory; bf16 comes as bits."""
    if dtype is ct.bf16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def cublas(torch: Any, cell: Cell, weights: list[Any]) -> Timed:
    """The peer: PyTorch's linear, x and weights of one dtype (TF32 off)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    x = on_torch(torch, cell.x, cell.x_type)

    def record() -> list[Any]:
        turns = (weights[i % len(weights)] for i in range(cell.launches))
        return [torch.nn.functional.linear(x, w) for w in turns]

    call, results = graphed(torch, record)
    call()
    error = cell.error_of(results[-1].float().cpu().numpy())
    return Timed(call, cell.nbytes, error, (x, results))


def plain_read(torch: Any, args: argparse.Namespace) -> Timed:
    """The limit: a sum over one large tensor, PyTorch's where it is here, else the library's."""
    nbytes, times = (1 << 20, 2) if args.small else (READ, round(MOVED / READ))
    if torch is not None:
        data = torch.rand(nbytes // 4, device="cuda")
        call, _ = graphed(torch, lambda: [torch.sum(data) for _ in range(times)])
        return Timed(call, float(nbytes) * times * REPLAYS, kept=data)
    device = ct.device(args.devices[0])
    rows = min(nbytes, device.caps.max_binding) // (4 * 4096)
    values = np.random.default_rng(1).random((rows, 4096), np.float32)
    x = ct.asarray(values, device=device)
    replay = device.compile(lambda: [ct.sum(x, -1) for _ in range(times)])
    return Timed(round_of(replay, device.synchronize), float(values.nbytes) * times * REPLAYS)


def kernel_of(device: ct.Device, cell: Cell) -> Row:
    """The kernel of a product as shipped, the shape of its groups, and what the driver gives it."""
    m, (n, k) = len(cell.x), cell.sets[0][0].shape
    scaled = cell.sets[0][1] is not None
    specs = [make_spec((m, k), cell.x_type, 16), make_spec((n, k), cell.w_type, 16)]
    specs += [make_spec((n,), ct.f32, 16)] * scaled
    attrs, y = LinearAttrs(("scale",) * scaled, ""), make_spec((m, n), cell.x_type, 16)
    if device.caps.target == "numpy":
        return {}
    call = Form(LINEAR, tuple(specs), (y,), attrs).lower(device.caps).calls[0]
    shape = str(dict(call.constants).get("tile", ""))
    return {"kernel": call.kernel.name, "tile": shape, **of_launch(device, call)}


def timed(
    bench: str, cell: Cell, contestants: dict[str, Timed], rounds: int,
    kernels: dict[str, Row] | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each contestant, once each has met the bound; its share of the plain read."""
    worst = max(WORST, 2 * cell.x_type.epsilon)
    for name, one in contestants.items():
        # PyTorch may add partial sums in 16 bits
        assert one.error < worst * (2 if name == "cublas" else 1), (bench, name, one.error)
    seconds = alternate({name: one.call for name, one in contestants.items()}, rounds)
    shape = [cell.x.shape[0], *cell.sets[0][0].shape]
    rows: list[Row] = []
    for name, times in seconds.items():
        one = contestants[name]
        row = {"bench": bench, "shape": shape, "who": name, "unit": "TB/s", "error": one.error}
        rows.append({**row, **(kernels or {}).get(name, {}), **summary(times, one.nbytes / 1e12)})
    most = next(row["rate"] for row in rows if row["who"] == "read")
    return [{**row, "share": row["rate"] / most} for row in rows]


def cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell, dict[str, list[Set]], Any]]:
    """Each product that was asked for: its kind, operands on the devices and for PyTorch."""
    torch = torch_or_none()
    asked = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",") if shape]
    for n, k in asked or (SMALL if args.small else SHAPES):
        for kind in (args.dtypes or KINDS).split(","):
            stored, _, x_name = kind.partition("/")
            w_type = dtype_of(stored)
            x_type = dtype_of(x_name or ("f32" if w_type is ct.i8 else stored))
            sets = weights_of(n, k, w_type, args.small)
            count = 3 if args.small else max(1, round(MOVED / sets[0][0].nbytes))
            tensors = {d: resident(ct.device(d), sets, w_type) for d in args.devices}
            peers = None
            if torch is not None and w_type is x_type:
                peers = [on_torch(torch, w, w_type) for w, _ in sets]
            for m in map(int, args.rows.split(",")):
                x = np.random.default_rng(m).standard_normal((m, k), np.float32)
                yield kind, Cell(narrow(x, x_type), x_type, sets, w_type, count), tensors, peers


def gemv(args: argparse.Namespace) -> Iterator[Row]:
    """`linear` as shipped on each device, cuBLAS and the plain read beside."""
    torch = torch_or_none()
    read = plain_read(torch, args)
    for kind, cell, tensors, peers in cells(args):
        contestants = {d: ours(ct.device(d), cell, t, ct.linear) for d, t in tensors.items()}
        if peers is not None:
            contestants["cublas"] = cublas(torch, cell, peers)
        contestants["read"] = read
        kernels = {d: kernel_of(ct.device(d), cell) for d in tensors}
        yield from timed(f"gemv {kind}", cell, contestants, args.rounds, kernels)


# -- sweep -----------------------------------------------------------------------------------------


Shape = Thin | Skinny | ManyTile


def title(tile: Shape) -> str:
    """A group's shape: threads of a team, outputs of a team, steps at once, threads.

    On tensor cores: eights of rows by sixteens of outputs, warps, steps at once; of more rows the
    columns of a tile, parts of the depth, stages.
    """
    if isinstance(tile, ManyTile):
        return f"many {tile.columns} columns, {tile.parts} parts, {tile.stages} stages"
    if isinstance(tile, Skinny):
        return f"skinny {tile.eights} x {tile.sixteens}, {tile.deep} warps, {tile.unroll}"
    return f"{tile.lanes} lanes, {tile.outs} x {tile.unroll}, {tile.threads}"


def tiles(cell: Cell, caps: ct.Caps) -> list[Thin]:
    """The shapes of a group worth a try."""
    m = next(rows for rows in ROWS if len(cell.x) <= rows)
    width = max(cell.w_type.per_chunk, cell.x_type.per_chunk)
    steps = -(-cell.x.shape[1] // width)
    few = m <= 2
    every = itertools.product(
        (32, 64, 128, 256) if few else (8, 16, 32), (1, 2, 4) if few else (1, 2, 4, 8),
        (1, 2, 4, 7, 8) if few else (1, 2, 4), (128, 256),
    )  # fmt: skip
    possible = (Thin(m, *shape) for shape in every)
    return [
        tile
        for tile in possible
        if tile.lanes <= tile.threads <= caps.max_workgroup
        and tile.outputs % cell.x_type.per_word == 0
        and 2 <= tile.outs * tile.unroll <= 16
        and tile.outs * m <= 64  # sums in registers
        and tile.outs * tile.unroll * m * width <= 2048  # statements
        and (tile.unroll != 7 or steps % (tile.lanes * 7) == 0)
    ]


def problem_of(cell: Cell) -> Problem:
    """The product."""
    (m, k), n = cell.x.shape, len(cell.sets[0][0])
    return Problem(1, m, n, k, k, k, n, 0, 0, 0, True, True)


def many_tiles(cell: Cell, caps: ct.Caps) -> list[ManyTile]:
    """The tiles of a cluster of groups, where 17 to 64 rows have them."""
    halves = cell.x_type is cell.w_type and cell.x_type.itemsize == 2
    if not (halves and THIN < len(cell.x) <= MOST and caps.warpgroups and caps.target == "ptx"):
        return []
    return many_tiles_of(problem_of(cell), False, caps)


def skinny_tiles(cell: Cell, caps: ct.Caps) -> list[Skinny]:
    """The shapes of a group on tensor cores worth a try, where the product has them."""
    problem, dtypes = problem_of(cell), (cell.x_type, cell.w_type)
    chosen = skinny_tile_of(problem, dtypes, caps) if caps.target == "ptx" else None
    if chosen is None:
        return []
    every = itertools.product((1, 2), (4, 8, 16), (1, 2, 3, 4, 6))
    possible = [Skinny(chosen.eights, *shape) for shape in every]
    return [tile for tile in possible if tile.together(*dtypes) * tile.threads >= 256]


KERNELS: dict[type[Any], Variant[Any, Any]] = {
    Thin: SKINNY, Skinny: SKINNY_MMA, ManyTile: STREAMED_MANY,
}  # fmt: skip


def forced(tile: Shape) -> Callable[..., Any]:
    """`linear` with a group of this shape: to be captured while it is forced."""

    def product(x: ct.Tensor, w: ct.Tensor, scale: ct.Tensor | None) -> ct.Tensor:
        extras = {} if scale is None else {"scale": scale}
        attrs = {"activation": "", "alpha": 1.0, "extras": tuple(extras), "variant": title(tile)}
        return apply("linear", x, w, *extras.values(), **attrs)

    return product


def thin_sweep(args: argparse.Namespace) -> Iterator[Row]:
    """Shapes of a group on each device, the best first; the shipped choice and the read beside."""
    torch = torch_or_none()
    read = plain_read(torch, args)
    for kind, cell, tensors, _ in cells(args):
        contestants: dict[str, Timed] = {}
        for name, sets in tensors.items():
            device = ct.device(name)
            if device.caps.target == "numpy":
                print(f"{name}: skipped, it has no groups")
                continue
            contestants[f"{name} shipped"] = ours(device, cell, sets, ct.linear)
            every: list[Shape] = [*many_tiles(cell, device.caps), *skinny_tiles(cell, device.caps)]
            every += tiles(cell, device.caps) if len(cell.x) <= THIN else []
            for tile in every[: 4 if args.small else None]:
                who = f"{name} {title(tile)}"
                kernel = KERNELS[type(tile)]
                try:
                    with forcing(choice, kernel, title(tile), lambda form, caps, t=tile: t):
                        contestants[who] = ours(device, cell, sets, forced(tile))
                except ct.CentellaError as error:
                    print(f"{who}: skipped, {str(error).splitlines()[0]}")
        contestants["read"] = read
        rows = timed(f"thin {kind}", cell, contestants, args.rounds)
        yield from sorted(rows, key=lambda row: -row["rate"])
