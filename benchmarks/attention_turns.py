"""Attention by warpgroups as shipped, its other tiles, and an earlier kernel, by turns.

    python benchmarks/attention_turns.py [--before before] [--tiles] [--only WORD] [--rounds 10]

Each shape is computed by each kernel first: all of the result is compared with that of the shipped
one, whose last queries of the first and of the last head are compared with float64. Then come
rounds of replays in a new order each. `--before` names a package beside this file, whose module
`wgmma` has the variant `WGMMA` of another revision (with what it imports from there).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
from gemv import REPLAYS, round_of
from measure import Call, alternate, forcing, gpu
from msgspec import Struct
from msgspec.structs import replace

import centella as ct
from centella.dtypes import dtype_of, narrow
from centella.ops.attention import choice
from centella.ops.attention.op import reference
from centella.ops.attention.wgmma import WGMMA
from centella.ops.attention.wgmma_tile import WgmmaTile
from centella.tensors.tensor import apply

ENDS = 64  # queries that are compared with float64
BOUND = {"f16": 2e-7, "bf16": 5e-6}  # squared error of the squares
REPLAYED = 2.5e-3  # seconds of a replay, at the rates below
RATE, BANDWIDTH = 4e14, 2.8e12  # operations and bytes a second, to choose how many launches


class Shape(Struct, frozen=True):
    """A problem; `mean`: of texts end to end, else all are as long."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int
    dtype: str = "f16"
    window: int | None = None
    causal: bool = False
    lengths: bool = False
    texts: int = 0

    @property
    def pairs(self) -> float:
        """Queries times keys that they see."""
        length = self.tokens / max(self.texts, 1)
        keys = length / 2 if self.causal else length
        keys = min(keys, 2 * self.window - 1) if self.window else keys
        return self.batch * self.heads * self.tokens * keys

    @property
    def seconds(self) -> float:
        """About what a launch takes."""
        moved = 2 * self.batch * self.tokens * self.dim * 2 * (self.heads + self.kv_heads)
        return float(max(4 * self.dim * self.pairs / RATE, moved / BANDWIDTH))


SHAPES = (
    Shape("ModernBERT, all keys", 64, 12, 12, 512, 64, lengths=True),
    Shape("ModernBERT, window of 128", 64, 12, 12, 512, 64, lengths=True, window=65),
    Shape("bge-m3", 32, 16, 16, 512, 64, lengths=True),
    Shape("Whisper's encoder", 1, 20, 20, 1500, 64),
    Shape("8192, all keys", 1, 12, 12, 8192, 64, lengths=True),
    Shape("8192, window of 128", 1, 12, 12, 8192, 64, lengths=True, window=65),
    Shape("64 texts end to end", 1, 12, 12, 16384, 64, texts=64),
    Shape("heads of 128", 1, 32, 32, 4096, 128),
    Shape("grouped, causal", 1, 32, 8, 4096, 128, "bf16", causal=True),
    Shape("prompt of 512", 1, 32, 8, 512, 128, "bf16", causal=True),
)
SMALL = (
    Shape("lengths", 2, 2, 2, 140, 64, lengths=True),
    Shape("window", 1, 2, 2, 140, 16, lengths=True, window=20),
    Shape("texts", 1, 2, 2, 300, 16, texts=3),
    Shape("grouped, causal", 1, 4, 2, 140, 16, "bf16", causal=True),
)


class Problem:
    """Operands of a shape on a device, q, k and v as one product leaves them."""

    def __init__(self, device: ct.Device, shape: Shape) -> None:
        self.shape, rng = shape, np.random.default_rng(3)
        dtype, kv = dtype_of(shape.dtype), shape.kv_heads
        extents = (shape.batch, shape.tokens, shape.heads + 2 * kv, shape.dim)
        values = narrow(rng.standard_normal(extents, np.float32), dtype)
        qkv = ct.asarray(values, dtype, device).permute(0, 2, 1, 3)
        ends = 0, shape.heads, shape.heads + kv, shape.heads + 2 * kv
        self.q, self.k, self.v = (qkv[:, a:b] for a, b in itertools.pairwise(ends))
        self.masks: dict[str, Any] = {}
        self.begin = 0  # of the last text
        if shape.lengths:
            self.masks["lengths"] = np.full(shape.batch, shape.tokens, np.int32)
        if shape.texts:
            cuts = np.sort(rng.choice(np.arange(1, shape.tokens), shape.texts - 1, replace=False))
            self.masks["offsets"] = np.array([0, *cuts, shape.tokens], np.int32)
            self.begin = int(cuts[-1])
        self.given = {n: ct.asarray(x, device=device) for n, x in self.masks.items()}

    def attend(self, variant: str) -> ct.Tensor:
        """The result [batch, tokens, heads, dim]."""
        return apply(
            "attention", self.q, self.k, self.v, *self.given.values(), masks=tuple(self.given),
            causal=self.shape.causal, scale=self.shape.dim**-0.5, window=self.shape.window,
            variant=variant,
        )  # fmt: skip

    def error(self, got: ct.Tensor) -> float:
        """Squared error of the squares, of the last queries of the first and the last head."""
        worst, last = 0.0, self.shape.batch - 1
        for b, head in ((0, 0), (last, self.shape.heads - 1)):
            kv = head // (self.shape.heads // self.shape.kv_heads)
            rows = [x[b : b + 1, h : h + 1, self.begin :].astype("f32").numpy().astype(np.float64)
                    for x, h in ((self.q, head), (self.k, kv), (self.v, kv))]  # fmt: skip
            rows[0] = rows[0][:, :, -ENDS:]
            wanted = reference(
                *rows, masks=(), causal=self.shape.causal, scale=self.shape.dim**-0.5,
                window=None,
            ) if self.shape.window is None else self._windowed(*rows)  # fmt: skip
            part = got[b : b + 1, -rows[0].shape[2] :, head : head + 1].astype("f32").numpy()
            worst = max(worst, error_of(part, wanted))
        return worst

    def _windowed(self, q: Any, k: Any, v: Any) -> Any:
        """With a window of both sides."""
        mask = np.abs(np.arange(k.shape[2])[-q.shape[2] :, None] - np.arange(k.shape[2]))
        hidden = np.where(mask < (self.shape.window or 0), 0.0, -np.inf)[None, None]
        return reference(q, k, v, hidden, masks=("mask",), causal=False, scale=k.shape[3] ** -0.5)


def error_of(got: Any, wanted: Any) -> float:
    """Squared error of the squares."""
    return float(((got - wanted) ** 2).sum() / (wanted**2).sum())


# Of the shipped tile of heads of 64: what others have instead.
CHANGES: tuple[dict[str, Any], ...] = (
    {"stages": 2}, {"stages": 3}, {"cubic": 1}, {"cubic": 2}, {"late": False},
)  # fmt: skip


def contestants_of(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """What a kernel is forced by, by name."""
    rows: list[tuple[str, Any, Any, dict[str, Any]]] = [("shipped", WGMMA, WgmmaTile, {})]
    if args.before:
        old = importlib.import_module(f"{args.before}.wgmma")
        rows.append(("before", old.WGMMA, old.WgmmaTile, {}))
    for change in CHANGES if args.tiles and shape.dim <= 64 else ():
        name = ", ".join(f"{n} {value}" for n, value in change.items())
        rows.append((name, WGMMA, WgmmaTile, change))
    return {
        name: forcing(choice, variant, name, partial(_tile_of, variant, own, change, args.small))
        for name, variant, own, change in rows
    }


def _tile_of(
    variant: Any, own: Any, change: dict[str, Any], small: bool, form: Any, caps: Any
) -> Any:
    """The chosen tile with other sizes; a small one for the simulator, which has no room."""
    tile = own(32) if small else variant.tile(form, caps)
    return None if tile is None else replace(tile, **change)


def timed(device: ct.Device, shape: Shape, args: argparse.Namespace) -> None:
    """Check, then print microseconds of a launch, median and least."""
    count = 1 if args.small else math.ceil(REPLAYED / shape.seconds)
    problem = Problem(device, shape)
    rounds: dict[str, Call] = {}
    first: ct.Tensor | None = None
    for name, way in contestants_of(shape, args).items():
        with way:
            replay = device.compile(lambda name=name: [problem.attend(name) for _ in range(count)])
            got = replay()[-1]
        error = problem.error(got)
        assert error < BOUND[shape.dtype], (shape, name, error)
        first = got if first is None else first
        apart = error_of(got.astype("f32").numpy(), first.astype("f32").numpy())
        assert apart < 2 * BOUND[shape.dtype], (shape, name, apart)
        rounds[name] = round_of(replay, device.synchronize)
    print(f"{shape.name}: {4e-12 * shape.dim * shape.pairs:.3f} TFLOP that count", flush=True)
    for name, times in alternate(rounds, args.rounds).items():
        us = np.array(times) / (count * REPLAYS) * 1e6
        rate = 4e-6 * shape.dim * shape.pairs / float(np.median(us))
        print(f"  {name:24} {np.median(us):8.1f} us, least {us.min():8.1f}, {rate:6.1f} TFLOP/s")


def main() -> None:
    """All shapes, or those with a word in their name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default="", help="a package with an earlier kernel")
    parser.add_argument("--tiles", action="store_true", help="other tiles as well")
    parser.add_argument("--only", default="", help="shapes with one of these words (a,b)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    device = ct.device(args.device)
    print(gpu())
    for shape in SMALL if args.small else SHAPES:
        if any(word in shape.name for word in args.only.split(",")):
            timed(device, shape, args)


if __name__ == "__main__":
    main()
