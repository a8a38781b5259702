"""Attention of one query a head over many keys: bytes of keys and values read in a second.

As in `attention`: checked against float64, operands rotated through more than four times the L2
cache, replays of a captured plan, PyTorch's SDPA in a CUDA graph beside. Then one plan for every
length: captured with room for 32 768 keys, its time at each length beside that of a plan captured
for it. A sweep gives the kernel on tensor cores each tile in place of the shipped one.

`--cache f,i8` has rows of i8 beside those of 16 bits; the sweep has them instead. Their rates are
in bytes of 16 bits, too, so that rates compare as times do, and they are checked against what the
rows stand for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from attention import (
    Operands,
    Shape,
    Timed,
    error_of,
    forced,
    operands,
    ours,
    resident,
    sdpa,
    timed,
)
from gemv import round_of
from measure import Row, alternate, cost, forcing, of_launch, torch_or_none

import centella as ct
from centella.dtypes import DType, dtype_of, narrow, widen
from centella.op.op import Form
from centella.ops.attention import choice
from centella.ops.attention.op import ATTENTION
from centella.ops.attention.problem import AttentionAttrs
from centella.ops.attention.split_mma import SPLIT_MMA
from centella.ops.attention.warp_sums import SplitTile
from centella.ops.rows_i8 import decode as decode_rows
from centella.ops.rows_i8 import encode
from centella.specs import make_spec

SHAPES = (
    Shape("decode", 1, 32, 8, 1, 4096, 128),
    Shape("decode", 1, 32, 8, 1, 32768, 128),
    Shape("decode", 1, 32, 32, 1, 4096, 128),
    Shape("decode", 8, 32, 8, 1, 4096, 128),
    Shape("decode", 1, 20, 20, 1, 1500, 64),
)
SMALL = (Shape("decode", 1, 4, 2, 1, 300, 64), Shape("decode", 2, 4, 2, 1, 200, 32))
ROOM, LENGTHS = 32768, (64, 4096, 32768)
LAUNCHES, REPLAYS = 32, 4  # of a plan that serves every length, in a round
TILES = (
    SplitTile(4, 2, 264),
    SplitTile(4, 3, 396),
    SplitTile(8, 1, 132),
    SplitTile(2, 4, 528),
    SplitTile(4, 2, 528),
)


def title(tile: SplitTile) -> str:
    """A tile as the log writes it: warps, groups that fit at a time and of a launch."""
    return f"{tile.warps} warps, {tile.together}, {tile.groups}"


def kernels_of(device: ct.Device, shape: Shape, dtype: DType) -> Row:
    """What the kernels of a decoding step take."""
    q, k, v = (make_spec(s, dtype, 16) for s in shape.sizes)
    y = make_spec((shape.batch, 1, shape.heads, shape.dim), dtype, 16)
    attrs = AttentionAttrs((), shape.dim**-0.5)
    calls = Form(ATTENTION, (q, k, v), (y,), attrs).lower(device.caps).calls
    return {"kernels": [{"kernel": c.kernel.name, **of_launch(device, c)} for c in calls]}


def attend(q: Any, k: Any, v: Any) -> ct.Tensor:
    """As shipped."""
    return ct.attention(q, k, v)


def attend_i8(q: Any, k: Any, v: Any, scales: Any) -> ct.Tensor:
    """The same over rows of i8."""
    return ct.attention(q, k, v, scales=scales)


def in_i8(
    device: ct.Device, sets: Operands, dtype: DType
) -> tuple[Operands, list[tuple[ct.Tensor, ...]]]:
    """The sets with what rows of i8 stand for, and these rows on a device."""
    stand_for, tensors = [], []
    for q, *rows in sets:
        pairs = [encode(widen(x, dtype)) for x in rows]
        k, v = (narrow(decode_rows(numbers, scale), dtype) for numbers, scale in pairs)
        stand_for.append((q, k, v))
        stored = [ct.asarray(numbers, "i8", device) for numbers, _ in pairs]
        scales = np.stack([scale for _, scale in pairs], -1)
        tensors.append((ct.asarray(q, dtype, device), *stored, ct.asarray(scales, device=device)))
    return stand_for, tensors


def decode(args: argparse.Namespace) -> Iterator[Row]:
    """A decoding step as shipped on each device, PyTorch beside; then one plan for every length."""
    torch = torch_or_none()
    for shape in SMALL if args.small else SHAPES:
        for dtype in map(dtype_of, (args.dtypes or "f16,bf16").split(",")):
            sets = operands(shape, dtype)
            contestants: dict[str, Timed] = {}
            kernels: dict[str, Row] = {}
            for name in args.devices:
                device = ct.device(name)
                contestants[name] = ours(
                    device, shape, sets, dtype, resident(device, sets, dtype), attend
                )
                if "i8" in args.cache.split(","):
                    stand_for, rows = in_i8(device, sets, dtype)
                    contestants[f"{name}, rows of i8"] = ours(
                        device, shape, stand_for, dtype, rows, attend_i8
                    )
                if device.caps.target != "numpy":
                    kernels[name] = kernels_of(device, shape, dtype)
            if torch is not None:
                contestants["torch"] = sdpa(torch, shape, sets, dtype)
            label = f"attention, {shape.kv_heads} heads of keys,"
            for row in timed(label, shape, sets[0], contestants, args.rounds, dtype):
                yield {**row, **kernels.get(row["who"], {})}
    for name in args.devices:
        yield from every_length(name, args)


def every_length(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """A plan with room for many keys beside plans captured for each length; microseconds."""
    device = ct.device(name)
    room, counts = (300, (64, 300)) if args.small else (ROOM, LENGTHS)
    whole, dtype = Shape("", 1, 32, 8, 1, room, 128), dtype_of("f16")
    data = operands(whole, dtype)[0]
    q = ct.asarray(data[0], dtype, device)
    lengths = ct.State(ct.zeros((1,), "i32", device), name="lengths")

    def plan(keys: int) -> Any:
        own = (q, *(ct.asarray(x[:, :, :keys], dtype, device) for x in data[1:]))

        def record() -> list[ct.Tensor]:
            return [ct.attention(*own, lengths=lengths.value) for _ in range(LAUNCHES)]

        return device.compile(record)

    general = plan(room)
    for count in counts:
        lengths.assign(ct.full((1,), count, "i32", device))
        replays = {"one plan": general, "its own plan": plan(count)}
        shape = Shape("", 1, 32, 8, 1, count, 128)
        cut = (data[0], data[1][:, :, :count], data[2][:, :, :count])
        for replay in replays.values():
            got = replay()[-1].numpy().astype(np.float32)
            assert error_of(got, shape, cut, dtype) < 5e-4
        calls = {who: round_of(r, device.synchronize, REPLAYS) for who, r in replays.items()}
        for who, times in alternate(calls, args.rounds).items():
            yield {"bench": f"attention f16 decode, {who} of {room}" if who == "one plan"
                   else "attention f16 decode, captured for its length",
                   "shape": [1, 32, 1, count, 128], "who": name, "unit": "us",
                   **cost(times, 1e6 / LAUNCHES / REPLAYS)}  # fmt: skip


def decode_sweep(args: argparse.Namespace) -> Iterator[Row]:
    """Every tile on tensor cores, the best first."""
    names = [d for d in args.devices if ct.device(d).caps.tensor_cores]
    if not names:
        print("skipped: no device here has tensor cores")
        return
    device = ct.device(names[0])
    for shape in SMALL if args.small else SHAPES:
        for dtype in map(dtype_of, (args.dtypes or "f16").split(",")):
            sets = operands(shape, dtype)
            tensors, in_rows = resident(device, sets, dtype), "i8" in args.cache.split(",")
            if in_rows:
                sets, tensors = in_i8(device, sets, dtype)
            contestants: dict[str, Timed] = {}
            for tile in TILES:
                masks = ("scales",) if in_rows else ()
                attrs = {"masks": masks, "causal": False, "scale": shape.dim**-0.5,
                         "variant": title(tile)}  # fmt: skip
                with forcing(choice, SPLIT_MMA, title(tile), lambda form, caps, t=tile: t):
                    contestants[title(tile)] = ours(
                        device, shape, sets, dtype, tensors, forced(attrs)
                    )
            rows = timed("split", shape, sets[0], contestants, args.rounds, dtype)
            yield from sorted(rows, key=lambda row: -row["rate"])
