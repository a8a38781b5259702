"""f32 products: the library's own beside cuBLAS, and a sweep of tiles for the tiled kernel.

A sweep gives each tile as a variant of its own to `matmul` and `linear`, forced by name, so that
everything else of the launch (layout, masks, alignment) is as shipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_webgpu
from measure import Call, Row, alternate, forcing, summary, torch_or_none
from msgspec.structs import replace

import centella as ct
from centella.ops.matmul import choice
from centella.ops.matmul.table import Tile
from centella.ops.matmul.tiled import TILED, fits
from centella.tensors.tensor import apply

SHAPES = ((4096, 4096, 4096), (4097, 4093, 4099))
MODELS = (
    (65536, 1152, 384),  # MiniLM, 512 sentences of 128 tokens: q k v, feed-forward
    (65536, 1536, 384),
    (65536, 384, 1536),
    (1500, 5120, 1280),  # Whisper large-v3, one window
    (1500, 1280, 5120),
    (512, 19456, 2560),  # Qwen3-4B, a prompt of 512: gate and up in one, down
    (512, 2560, 9728),
)
SMALL = ((256, 256, 256), (257, 253, 259))
LAUNCHES = 8
SETS = 3  # of operands, in turn: together more than four times the L2 cache
WORST = 2e-6  # relative Frobenius error

TILES = (
    Tile(128, 128, 8, 8, 8, 0),
    Tile(128, 128, 8, 8, 8, 4),
    Tile(128, 128, 16, 8, 8, 4),
    Tile(128, 256, 8, 8, 16, 4),
    Tile(256, 128, 8, 16, 8, 4),
    Tile(64, 128, 16, 8, 8, 4),
    Tile(128, 128, 8, 8, 8, 4, 2),
    Tile(128, 128, 8, 8, 8, 0, 2),
    Tile(128, 256, 8, 8, 16, 4, 2),
    Tile(256, 128, 8, 16, 8, 4, 2),
    Tile(64, 64, 16, 4, 4, 0),
)
LAYOUTS = ("x W^T", "A B")

Pair = tuple[Any, Any]
Product = Callable[[Any, Any], Any]


def operands(shape: Sequence[int]) -> list[Pair]:
    """Random x [m, k] and weights [n, k], in `SETS`."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32))
        for _ in range(SETS)
    ]


def error_of(got: Any, x: Any, w: Any) -> float:
    """Relative Frobenius error of x W^T against float64, on a sample of rows."""
    rows = np.linspace(0, x.shape[0] - 1, 64).astype(int)
    want = x[rows].astype(np.float64) @ w.T.astype(np.float64)
    return float(np.linalg.norm(got[rows] - want) / np.linalg.norm(want))


def ours(device: ct.Device, tensors: Sequence[Pair], product: Product) -> Call:
    """LAUNCHES products a round, over the operands in turn."""

    def call() -> None:
        with device.batch():
            kept = [product(*tensors[i % len(tensors)]) for i in range(LAUNCHES)]
        device.synchronize()
        del kept

    return call


def cublas(torch: Any, inputs: Sequence[Pair]) -> tuple[Call, float]:
    """The peer, in f32 through PyTorch (TF32 off), and its error."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = [tuple(torch.from_numpy(a).cuda() for a in pair) for pair in inputs]
    error = error_of((tensors[0][0] @ tensors[0][1].T).cpu().numpy(), *inputs[0])

    def call() -> None:
        for i in range(LAUNCHES):
            x, w = tensors[i % len(tensors)]
            torch.matmul(x, w.T)
        torch.cuda.synchronize()

    return call, error


def timed(
    bench: str, shape: Sequence[int], contestants: dict[str, tuple[Call, float]], rounds: int
) -> Iterator[Row]:
    """A row for each contestant, once each has met the bound."""
    for name, (_, error) in contestants.items():
        assert error < WORST, (bench, name, error)
    seconds = alternate({name: call for name, (call, _) in contestants.items()}, rounds)
    work = 2.0 * np.prod([float(n) for n in shape]) * LAUNCHES / 1e12
    for name, times in seconds.items():
        row = {"bench": bench, "shape": list(shape), "who": name, "unit": "TFLOP/s"}
        yield {**row, **summary(times, work), "error": contestants[name][1]}


def gemm(args: argparse.Namespace) -> Iterator[Row]:
    """`linear` as shipped on each device, cuBLAS beside."""
    torch = torch_or_none()
    for shape in SMALL if args.small else SHAPES + MODELS:
        inputs = operands(shape)
        contestants: dict[str, tuple[Call, float]] = {}
        for name in args.devices:
            device = ct.device(name)
            tensors = [(ct.asarray(x, device=device), ct.asarray(w, device=device))
                       for x, w in inputs]  # fmt: skip
            error = error_of(ct.linear(*tensors[0]).numpy(), *inputs[0])
            contestants[name] = ours(device, tensors, ct.linear), error
        if torch is not None:
            contestants["cublas"] = cublas(torch, inputs)
        if "webgpu" in args.devices and onnx_webgpu.available():
            peer = onnx_webgpu.products(inputs, LAUNCHES)
            if peer is not None:
                contestants[onnx_webgpu.WHO] = peer[0], error_of(peer[1], *inputs[0])
        yield from timed("gemm f32", shape, contestants, args.rounds)


# -- sweep -----------------------------------------------------------------------------------------


def title(tile: Tile) -> str:
    """A tile as the log writes it: group and depth, thread, words of padding, steps a turn."""
    turn = f", {tile.unroll} a turn" if tile.unroll > 1 else ""
    return f"{tile.bm}x{tile.bn}x{tile.bk}, {tile.tm}x{tile.tn}, {tile.pad}{turn}"


def product_of(layout: str, tile: Tile) -> Product:
    """The product of a layout, forced to a tile."""
    attrs: dict[str, Any] = {"alpha": 1.0, "variant": title(tile)}
    if layout == "A B":
        return lambda a, b: apply("matmul", a, b, **attrs)
    return lambda x, w: apply("linear", x, w, activation="", extras=(), **attrs)


def checked(name: str) -> ct.Device:
    """A device of its own that compiles the library's kernels as it compiles a user's."""
    device = ct.device(name, pool="reuse")
    compile_ = device.backend.compile
    setattr(  # noqa: B010  # an instance's own, in place of its class's method
        device.backend, "compile", lambda program: compile_(replace(program, trusted=False))
    )
    return device


def swept(names: Sequence[str]) -> Iterator[tuple[str, ct.Device]]:
    """The devices of a sweep; a WebGPU adapter also with the driver's bounds checks."""
    for name in names:
        device = ct.device(name)
        if device.caps.target == "numpy":
            print(f"{name}: skipped, it has no tiles")
            continue
        yield name, device
        if device.caps.target == "wgsl" and device.caps.family != "software":
            yield f"{name} checked", checked(name)


def sweep(args: argparse.Namespace) -> Iterator[Row]:
    """Every tile on each device, for either layout; cuBLAS beside."""
    torch = torch_or_none()
    devices = list(swept(args.devices))
    for shape in SMALL if args.small else SHAPES:
        inputs = operands(shape)
        for layout in LAYOUTS:
            if layout == "A B":
                inputs = [(x, np.ascontiguousarray(w.T).T) for x, w in inputs]
            contestants: dict[str, tuple[Call, float]] = {}
            for name, device in devices:
                contestants.update(_tiles(name, device, layout, inputs))
            if torch is not None:
                contestants["cublas"] = cublas(torch, inputs)
            yield from timed(f"sweep {layout}", shape, contestants, args.rounds)


def _tiles(
    name: str, device: ct.Device, layout: str, inputs: Sequence[Pair]
) -> Iterator[tuple[str, tuple[Call, float]]]:
    """A contestant for each tile that the device takes, checked."""
    tensors = [
        (ct.asarray(x, device=device), ct.asarray(w if layout == "x W^T" else w.T, device=device))
        for x, w in inputs
    ]
    for tile in TILES:
        who = f"{name} {title(tile)}"
        product = product_of(layout, tile)
        if not fits(tile, 4, device.caps):
            print(f"{who}: skipped, {tile.threads} threads and {tile.shared_bytes:,} bytes of "
                  f"workgroup memory; {device.caps.max_workgroup} and "
                  f"{device.caps.max_shared:,} are allowed")  # fmt: skip
            continue
        call = ours(device, tensors, product)
        try:
            with forcing(choice, TILED[-1], title(tile), lambda form, caps, t=tile: t):
                got = product(*tensors[0]).numpy()
                call()  # its plan, too, is built here
        except ct.CentellaError as error:
            print(f"{who}: skipped, {str(error).splitlines()[0]}")
            continue
        yield who, (call, error_of(got, *inputs[0]))
