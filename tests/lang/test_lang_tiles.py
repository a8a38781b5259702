"""Fragments, shared tiles and asynchronous copies: the operations that PTX alone has.

Their layouts are checked element by element against the formulas of the PTX ISA, which the
interpreter of `test_lang_ptx` spells out on its own; faults and refusals by example.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, i8, i32, narrow, u8, u32, widen
from centella.emit.program import program_of
from centella.emit.ptx import emit_ptx
from centella.emit.wgsl import emit_wgsl
from centella.errors import LimitError, SimulationError, TraceError
from centella.lang import In, InOut, KernelIR, Out, ptx, storage
from centella.lang.ir import AMPERE
from centella.simulator.run import simulate
from centella.specs import Caps
from tests.emit.test_lang_ptx import assemble_clean, execute, needs_ptxas
from tests.support.lang_common import (
    ORDERS,
    Tensor,
    assert_refused,
    copies,
    empty,
    on_simulator,
    parameters,
    record,
    tensor,
)
from tests.support.mutations import mutations

Array = np.ndarray[Any, Any]
HALVES = pytest.mark.parametrize("dtype", [f16, bf16], ids=str)

# -- a product in every layout ---------------------------------------------------------------------

M, N, K = 32, 16, 64  # of a group of two warps, each with 16 rows


def product(
    a: In[storage, 2], b: In[storage, 2], y: Out[f32, 2], *, left: bool, right: bool, swizzle: Any
) -> None:
    """A tile of C = A B: `left` and `right` say that k is the contiguous dimension of A, of B."""
    shapes = ((M, K) if left else (K, M)), ((N, K) if right else (K, N))
    tiles = [ptx.SharedTile(x.dtype, s, swizzle) for x, s in zip((a, b), shapes, strict=True)]
    t = lang.local_id()
    for source, tile in zip((a, b), tiles, strict=True):
        across = tile.columns // 8
        for i in range(tile.rows * across // lang.workgroup_size()):
            piece = t + i * lang.workgroup_size()
            row, column = piece // across, piece % across
            ptx.cp_async(tile, tile.chunk(row, column), source, row, column * 8)
        ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    lang.barrier()
    lane, top = t % 32, t // 32 * 16
    sums = [ptx.Fragment(f32, (16, 8)) for _ in range(N // 8)]
    for fragment in sums:
        fragment.fill(0.5)
    height = ptx.Fragment(a.dtype, (16, 16))
    widths = [ptx.Fragment(b.dtype, (16, 8)) for _ in range(2)]
    low, high = lane // 8 % 2, lane // 16
    for k in range(0, K, 16):
        if left:
            at = tiles[0].chunk(top + low * 8 + lane % 8, high + k // 8)
        else:
            at = tiles[0].chunk(high * 8 + lane % 8 + k, top // 8 + low)
        ptx.ldmatrix(tiles[0], at, height, trans=not left)
        if right:
            at = tiles[1].chunk(high * 8 + lane % 8, low + k // 8)
        else:
            at = tiles[1].chunk(low * 8 + lane % 8 + k, high)
        ptx.ldmatrix(tiles[1], at, *widths, trans=not right)
        for fragment, width in zip(sums, widths, strict=True):
            ptx.mma_sync(fragment, height, width)
    for j, fragment in enumerate(sums):
        for register in range(fragment.registers):
            row, column = fragment.place(register)
            y[top + row, column + 8 * j] = fragment[register]


def loads(x: In[storage, 2], y: Out[u32, 2], *, trans: bool) -> None:
    """One, two and four matrices; the values go through `store`, the registers out through mma."""
    tile = ptx.SharedTile(x.dtype, (32, 8), 0)
    t = lang.local_id()
    tile.store(tile.chunk(t, 0), x.load(t, 0))
    lang.barrier()
    one = ptx.Fragment(x.dtype, (16, 8))
    square = ptx.Fragment(x.dtype, (16, 16))
    square.fill(0)
    ptx.ldmatrix(tile, tile.chunk(t % 16, 0), one, trans=trans)
    unit = ptx.Fragment(f32, (16, 8))
    unit.fill(0.0)
    ptx.ldmatrix(tile, tile.chunk(t, 0), square, trans=trans)
    ptx.mma_sync(unit, square, one)
    before = unit[1]
    ptx.mma_sync(unit, square, one)
    for register in range(4):
        y[t, register] = lang.bitcast(unit[register], u32)
    y[t, 4] = lang.bitcast(before, u32)


def chained(x: In[storage, 2], y: Out[f32, 2]) -> None:
    """W X with W = 2^(X X^T / 8), whose rows from 8 on are halved: sums become a factor."""
    ptx.resident(4)
    tile = ptx.SharedTile(x.dtype, (16, 64))
    t = lang.local_id()
    for n in range(4):
        row, column = (t + 32 * n) // 8, t % 8
        tile.store(tile.chunk(row, column), x.load(row, column * 8))
    lang.barrier()
    low, high = t // 8 % 2, t // 16
    height, weights = (ptx.Fragment(x.dtype, (16, 16)) for _ in range(2))
    pair = [ptx.Fragment(x.dtype, (16, 8)) for _ in range(2)]
    scores = [ptx.Fragment(f32, (16, 8)) for _ in range(2)]
    for fragment in scores:
        fragment.fill(0.0)
    for k in range(0, 64, 16):
        ptx.ldmatrix(tile, tile.right(tile.chunk(low * 8 + t % 8, high), k // 8), height)
        ptx.ldmatrix(tile, tile.right(tile.chunk(high * 8 + t % 8, low), k // 8), *pair)
        for fragment, width in zip(scores, pair, strict=True):
            ptx.mma_sync(fragment, height, width)
    for j, fragment in enumerate(scores):
        for half in range(2):
            first, second = (lang.exp2_native(fragment[2 * half + e] * 0.125) for e in range(2))
            fragment[2 * half] = first
            with lang.if_(fragment.place(2 * half)[0] >= 8):
                fragment[2 * half] = fragment[2 * half] * 0.5
            second = lang.select(fragment.place(2 * half)[0] >= 8, second * 0.5, second)
            weights[2 * j + half] = (fragment[2 * half], second)
            kept = weights[2 * j + half]
            weights[2 * j + half] = (kept[0], kept[1])
    out = [ptx.Fragment(f32, (16, 8)) for _ in range(2)]
    ptx.ldmatrix(tile, tile.chunk(low * 8 + t % 8, high), *pair, trans=True)
    for j, (fragment, width) in enumerate(zip(out, pair, strict=True)):
        fragment.fill(0.0)
        ptx.mma_sync(fragment, weights, width)
        for register in range(4):
            row, column = fragment.place(register)
            y[row, column + 8 * j] = fragment[register]


def widened(w: In[i8], x: In[storage, 2], y: Out[f32, 2], *, zero: int | None) -> None:
    """[16, 64] by [64, 8], straight from memory: each lane has 16 bytes of two rows of the first.

    k is in the order in which lanes have it, in the second as in the first. The first factor goes
    by way of another fragment, word by word.

    Constants: `zero` is what numbers of 0 to 127 are more than they stand for; None: they are i8.
    """
    ptx.fetch_lines(w)
    t = lang.local_id()
    row, k = t // 4, t % 4 * 16
    rows = [w.load_bits((row + 8 * h) * 64 + k) for h in range(2)]
    other = [v for j in (0, 8) for v in x.load_bits(row, k + j)]
    first, height = (ptx.Fragment(x.dtype, (16, 16)) for _ in range(2))
    width, total = ptx.Fragment(x.dtype, (16, 8)), ptx.Fragment(f32, (16, 8))
    total.fill(0.0)
    for j in range(4):
        pairs = [
            ptx.widen_i8(words[j], x.dtype) if zero is None else
            ptx.widen_u7(words[j], x.dtype, zero) for words in rows
        ]  # fmt: skip
        for register in range(4):
            first[register] = pairs[register % 2][register // 2]
        for register in range(4):
            height[register] = first.word(register)
        for register in range(2):
            width[register] = other[2 * j + register]
        ptx.mma_sync(total, height, width)
    for register in range(4):
        at, column = total.place(register)
        y[at, column] = total[register]


def widened_case(
    dtype: DType, zero: int | None = None
) -> tuple[KernelIR, dict[str, Tensor]]:  # fmt: skip
    numbers = np.arange(1024) % 256 - 128 if zero is None else np.arange(1024) % 128
    whole = np.random.default_rng(3).permutation(numbers)
    tensors = {"w": tensor(whole, i8), "x": random((8, 64), dtype), "y": empty((16, 8), f32)}
    return record(widened, tensors, 32, zero=zero), tensors


def both_widened(w: In[u32], z: Out[u32], y: Out[u32], *, first: DType) -> None:
    """Numbers of a word as the one dtype, then as the other."""
    t, other = lang.local_id(), f16 if first is bf16 else bf16
    z[t] = ptx.widen_u7(w[t], first, 8)[0]
    y[t] = ptx.widen_u7(w[t], other, 8)[0]


def both_widened_case(first: DType) -> tuple[KernelIR, dict[str, Tensor]]:
    words = np.arange(128, dtype=np.uint8).view(np.uint32)
    tensors = {"w": tensor(words, u32), "z": empty((32,), u32), "y": empty((32,), u32)}
    return record(both_widened, tensors, 32, first=first), tensors


def integers(w: In[u32], x: In[u32], z: Out[u32], y: Out[i32, 2], *, kind: DType) -> None:
    """[16, 32] bytes by [32, 8] i8, whose columns lie in memory; bytes in another order."""
    t, dtype = lang.local_id(), f16
    height, width = ptx.Fragment(dtype, (16, 16)), ptx.Fragment(dtype, (16, 8))
    total = ptx.Fragment(i32, (16, 8))
    total.fill(-7)
    for register in range(4):
        height[register] = w[(t // 4 + register % 2 * 8) * 8 + (t % 4 + register // 2 * 4)]
    for register in range(2):
        width[register] = x[t // 4 * 8 + (t % 4 + register * 4)]
    ptx.mma_bytes(total, height, width, kind)
    ptx.mma_bytes(total, height, width, kind)
    total[1] = total[1] + 1
    for register in range(4):
        row, column = total.place(register)
        y[row, column] = total[register]
    z[t] = ptx.permute_bytes(w[t], x[t], (6, 3, 8, 15))
    z[t + 32] = ptx.permute_bytes(w[t], x[t], lang.var(x[t] ^ w[t]))


def integers_case(kind: DType) -> tuple[KernelIR, dict[str, Tensor]]:
    rng = np.random.default_rng(11)
    left, right = rng.integers(0, 256, (16, 32), np.uint8), rng.integers(0, 256, (8, 32), np.uint8)
    left[3], right[5] = 128, 128
    tensors = {
        "w": tensor(left.reshape(-1).view(np.uint32), u32),
        "x": tensor(right.reshape(-1).view(np.uint32), u32),
        "z": empty((64,), u32), "y": empty((16, 8), i32),
    }  # fmt: skip
    return record(integers, tensors, 32, kind=kind), tensors


def larger(x: In[storage], z: Out[f32], y: Out[u32]) -> None:
    """A chunk a thread: the larger of it and another thread's, as words and as values."""
    t = lang.local_id()
    mine, other = x.load_bits(t * 8), x.load_bits((31 - t) * 8)
    words = [ptx.max_pairs(a, b, x.dtype) for a, b in zip(mine, other, strict=True)]
    for n, word in enumerate(words):
        y[t * 4 + n] = word
    for n, value in enumerate(x.unpack(words)):
        z[t * 8 + n] = value


def larger_case(dtype: DType, values: Array | None = None) -> tuple[KernelIR, dict[str, Tensor]]:
    x = random((32 * 8,), dtype) if values is None else tensor(values, dtype)
    tensors = {"x": x, "z": empty((256,), f32), "y": empty((128,), u32)}
    return record(larger, tensors, 32), tensors


def asked_for(x: In[storage], y: InOut[u32], *, beyond: bool = False) -> None:
    """Elements of both are asked for, and not read."""
    t = lang.local_id()
    ptx.prefetch(x, t * 3 + (3 if beyond else 0))
    with lang.if_(t < 16):
        ptx.prefetch(y, 2 * t)
    y[t] = t


def asked_for_case(dtype: DType) -> tuple[KernelIR, dict[str, Tensor]]:
    tensors = {"x": random((95,), dtype), "y": tensor(np.zeros(32), u32)}
    return record(asked_for, tensors, 32), tensors


def roots(x: In[f32], y: Out[f32]) -> None:
    """Of each number 1 / sqrt(x), then 1 / x."""
    t = lang.local_id()
    y[t], y[t + 32] = ptx.rsqrt(x[t]), ptx.reciprocal(x[t])


def roots_case(values: Array | None = None) -> tuple[KernelIR, dict[str, Tensor]]:
    values = np.linspace(1e-3, 1e3, 32) if values is None else values
    tensors = {"x": tensor(values, f32), "y": empty((64,), f32)}
    return record(roots, tensors, 32), tensors


def random(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> Tensor:
    return tensor(np.random.default_rng(seed).standard_normal(shape), dtype)


def product_case(
    dtype: DType, left: bool = True, right: bool = True, swizzle: Any = None
) -> tuple[KernelIR, dict[str, Tensor]]:
    tensors = {
        "a": random((M, K) if left else (K, M), dtype, 1),
        "b": random((N, K) if right else (K, N), dtype, 2),
        "y": empty((M, N), f32),
    }
    return record(product, tensors, 64, left=left, right=right, swizzle=swizzle), tensors


def in_order(tensors: dict[str, Tensor], left: bool, right: bool) -> Array:
    """C in f32, from 0.5 on, products added k by k."""
    a, b = (tensors[n].numpy().astype(np.float32) for n in "ab")
    a, b = a if left else a.T, b.T if right else b
    c = np.full((M, N), 0.5, np.float32)
    for k in range(K):
        c = c + np.outer(a[:, k], b[k])
    return c


@HALVES
@pytest.mark.parametrize("right", [True, False], ids=["NK", "KN"])
@pytest.mark.parametrize("left", [True, False], ids=["MK", "KM"])
def test_a_product_in_every_layout(dtype: DType, left: bool, right: bool) -> None:
    for swizzle in (None, 0):
        ir, tensors = product_case(dtype, left, right, swizzle)
        assert ir.ptx_only
        for order in ORDERS:
            results = copies(tensors)
            on_simulator(ir, results, 1, order=order)
            np.testing.assert_array_equal(results["y"].numpy(), in_order(results, left, right))
        unchecked = copies(tensors)
        on_simulator(ir, unchecked, 1, check=False)
        np.testing.assert_array_equal(unchecked["y"].words, results["y"].words)


@HALVES
def test_sums_that_become_a_factor(dtype: DType) -> None:
    ir, tensors = chained_case(dtype)
    x = tensors["x"].numpy().astype(np.float64)
    weights = np.exp2(x @ x.T / 8)
    weights[8:] /= 2
    wanted = widen(narrow(weights.astype(np.float32), dtype), dtype).astype(np.float64) @ x[:, :16]
    for order in ORDERS:
        on_simulator(ir, tensors, 1, order=order)
        got = tensors["y"].numpy()
        np.testing.assert_allclose(got, wanted, atol=dtype.epsilon * np.abs(wanted).max())


@HALVES
def test_a_factor_takes_words_as_they_are_stored(dtype: DType) -> None:
    def kernel(x: In[storage], y: Out[u32], z: Out[f32]) -> None:
        fragment, t = ptx.Fragment(x.dtype, (16, 8)), lang.local_id()
        words = x.load_bits(t * 8)
        for register in range(2):
            fragment[register] = words[register + 1]
            y[t * 2 + register] = words[register + 1]
            for e, value in enumerate(fragment[register]):
                z[t * 4 + register * 2 + e] = value

    tensors = {"x": random((32 * 8,), dtype), "y": empty((64,), u32), "z": empty((128,), f32)}
    on_simulator(record(kernel, tensors, 32), tensors, 1)
    wanted = tensors["x"].words.reshape(32, 4)[:, 1:3].reshape(-1)
    np.testing.assert_array_equal(tensors["y"].words, wanted)
    pairs = tensors["x"].numpy().reshape(32, 8)[:, 2:6].reshape(-1)
    np.testing.assert_array_equal(tensors["z"].numpy(), pairs)


@HALVES
@pytest.mark.parametrize("zero", [None, 0, 8, 127])
def test_integers_become_factors(dtype: DType, zero: int | None) -> None:
    """Every i8, and all of 0 to 127 less a number, exactly."""
    ir, tensors = widened_case(dtype, zero)
    on_simulator(ir, tensors, 1)
    w = tensors["w"].numpy().astype(np.float64).reshape(16, 64) - (zero or 0)
    wanted = w @ tensors["x"].numpy().astype(np.float64).T
    np.testing.assert_allclose(tensors["y"].numpy(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", [i8, u8], ids=str)
def test_bytes_are_multiplied_exactly(kind: DType) -> None:
    ir, tensors = integers_case(kind)
    on_simulator(ir, tensors, 1)
    words = [tensors[name].bits().reshape(rows, 8) for name, rows in (("w", 16), ("x", 8))]
    left = np.ascontiguousarray(words[0]).view(kind.numpy).astype(np.int64)
    right = np.ascontiguousarray(words[1]).view(np.int8).astype(np.int64)
    wanted = 2 * (left @ right.T) - 7
    wanted[:8, 1::2] += 1  # register 1
    np.testing.assert_array_equal(tensors["y"].numpy(), wanted)
    each = [np.ascontiguousarray(w).view(np.uint8).reshape(-1, 4) for w in words]
    eight = np.concatenate([each[0][:32], each[1][:32]], 1)
    got = np.ascontiguousarray(tensors["z"].bits()).view(np.uint8).reshape(-1, 4)
    signs = np.where(eight[:, [0, 7]] > 127, 255, 0)
    np.testing.assert_array_equal(got[:32], np.concatenate([eight[:, [6, 3]], signs], 1))
    order = (words[0].reshape(-1)[:32] ^ words[1].reshape(-1)[:32])[:, None] >> 4 * np.arange(4)
    bytes_ = np.take_along_axis(eight, (order & 7).astype(np.int64), 1)
    wanted = np.where(order & 8, np.where(bytes_ > 127, 255, 0), bytes_)
    np.testing.assert_array_equal(got[32:], wanted)


@HALVES
def test_pairs_of_halves_have_their_larger(dtype: DType) -> None:
    """NaN above all; infinities, zeros of both signs, subnormals."""
    values = np.random.default_rng(7).standard_normal(256)
    values[:12] = np.nan, np.nan, -np.inf, -np.inf, np.inf, np.inf, -0.0, 0.0, 1e-7, -1e-7, 1, -1
    values[-8:] = 3, -np.nan, -4, -np.inf, np.nan, 5, 0.0, -0.0
    ir, tensors = larger_case(dtype, values)
    on_simulator(ir, tensors, 1)
    x = tensors["x"].numpy().reshape(32, 8)
    np.testing.assert_array_equal(tensors["z"].numpy(), np.maximum(x, x[::-1]).reshape(-1))


def test_roots_and_reciprocals_by_the_target() -> None:
    """Of zeros, infinities, NaN, subnormal and negative numbers too."""
    values = np.geomspace(1e-40, 1e38, 32)
    values[:8] = 0.0, -0.0, np.inf, -np.inf, np.nan, -4.0, 1e-39, -1e-3
    ir, tensors = roots_case(values)
    with np.errstate(all="ignore"):
        on_simulator(ir, tensors, 1)
        x = tensors["x"].numpy().astype(np.float64)
        wanted = np.concatenate([1 / np.sqrt(x), 1 / x])
        wanted = wanted.astype(np.float32)
    np.testing.assert_allclose(tensors["y"].numpy(), wanted, rtol=3e-7)
    text = emit_ptx(ir, "sm_80")
    assert "rsqrt.approx.f32" in text and "rcp.approx.f32" in text


def test_lines_are_fetched_where_it_is_asked_for() -> None:
    text = emit_ptx(widened_case(f16)[0], "sm_80")
    assert text.startswith(".version 7.4\n") and text.count("ld.global.nc.L2::128B.v4") == 2
    assert text.count("ld.global.nc.v4") == 2
    assert emit_ptx(widened_case(f16)[0], "sm_90a").startswith(".version 8.0\n")


@HALVES
def test_memory_is_asked_for(dtype: DType) -> None:
    """Nothing is read: not by the text, not for the simulator, which sees where it is."""
    ir, tensors = asked_for_case(dtype)
    text = emit_ptx(ir, "sm_80")
    addresses = re.findall(r"prefetch\.global\.L2 \[(%rd\d+)\];", text)
    assert len(addresses) == text.count("prefetch") == 2 and "ld.global" not in text
    for name, base in zip(addresses, ("%base0", "%base1"), strict=True):
        assert re.search(rf"mad.wide.u32 {name}, %r\d+, 4, {base};", text)
    tensors["y"] = empty((32,), u32)
    unread = [np.zeros(t.words.size, np.bool_) for t in tensors.values()]
    on_simulator(ir, tensors, 1, initialised=unread)
    np.testing.assert_array_equal(tensors["y"].words, np.arange(32))
    beyond = record(asked_for, tensors, 32, beyond=True)
    with pytest.raises(SimulationError, match="'x' word 48 is out of bounds, it has 48 words"):
        on_simulator(beyond, tensors, 1)


def test_what_cannot_be_read_is_not_asked_for() -> None:
    def kernel(y: Out[f32]) -> None:
        ptx.prefetch(y, lang.local_id())

    with pytest.raises(TraceError, match="'y' is an Out argument and cannot be read"):
        record(kernel, {"y": empty((32,), f32)}, 32)
    ir, _ = asked_for_case(f16)
    with pytest.raises(TraceError, match="WGSL has no prefetch"):
        emit_wgsl(ir)
    with pytest.raises(TraceError, match="prefetch needs sm_80 or later, got sm_75"):
        emit_ptx(ir, "sm_75")


def loads_case(dtype: DType, trans: bool) -> tuple[KernelIR, dict[str, Tensor]]:
    tensors = {"x": random((32, 8), dtype), "y": empty((32, 5), u32)}
    return record(loads, tensors, 32, trans=trans), tensors


def chained_case(dtype: DType) -> tuple[KernelIR, dict[str, Tensor]]:
    tensors = {"x": random((16, 64), dtype), "y": empty((16, 16), f32)}
    return record(chained, tensors, 32), tensors


CASES: dict[str, Callable[[DType], tuple[KernelIR, dict[str, Tensor]]]] = {
    "MK NK": product_case, "KM KN": lambda dtype: product_case(dtype, False, False),
    "loads": lambda dtype: loads_case(dtype, False), "chained": chained_case,
    "loads transposed": lambda dtype: loads_case(dtype, True), "widened": widened_case,
    "positive": lambda dtype: widened_case(dtype, 0), "less 8": lambda d: widened_case(d, 8),
    "both": both_widened_case, "larger": larger_case,
    "i8": lambda _: integers_case(i8), "u8": lambda _: integers_case(u8),
    "roots": lambda _: roots_case(), "asked for": asked_for_case,
}  # fmt: skip  # a table


@HALVES
@pytest.mark.parametrize("name", CASES)
def test_ptx_equals_the_simulator(dtype: DType, name: str) -> None:
    ir, tensors = CASES[name](dtype)
    results = copies(tensors)
    on_simulator(ir, results, 1)
    words = [tensors[a.name].words.copy() for a in ir.args]
    execute(ir, "sm_80", words, parameters(ir, tensors), 1)
    np.testing.assert_array_equal(words[-1], results["y"].words)


def test_the_cases_cover_every_operation() -> None:
    every = [case(dtype)[0] for case in CASES.values() for dtype in (f16, bf16)]
    assert {s[0] for ir in every for s in ir.body} >= AMPERE - {"grid", "grid_barrier"}  # `grids`


@needs_ptxas
@HALVES
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_texts_assemble(dtype: DType, arch: str, tmp_path: Path) -> None:
    for case in CASES.values():
        assemble_clean(case(dtype)[0], arch, tmp_path)


def test_fragments_keep_their_registers() -> None:
    ir, _ = product_case(f16)
    lines = emit_ptx(ir, "sm_90a").splitlines()
    moved = [s for s in lines if s.lstrip().startswith("mov") and "%t0_" in s]
    assert moved == [f"  mov.f32 %t0_{n}, 0f3F000000;" for n in range(4)]
    assert "  .reg .f32 %t0_<4>;" in lines and "  .reg .b32 %t2_<4>;" in lines


def test_residents_are_in_the_head() -> None:
    text = emit_ptx(chained_case(f16)[0], "sm_90a")
    assert ".reqntid 32, 1, 1\n.minnctapersm 4\n{" in text


def test_a_register_read_before_the_fragment_changes_is_copied() -> None:
    text = emit_ptx(loads_case(f16, False)[0])
    assert len(re.findall(r"mov.f32 %f\d+, %t2_1;", text)) == 1
    assert len(re.findall(r"%f\d+, %t2_", text)) == 1


# -- layouts ---------------------------------------------------------------------------------------

SHAPES = [(8, 8), (16, 16), (32, 32), (64, 64), (32, 128), (16, 256), (2, 16, 64), (3, 8, 128)]


def chunks_of(shape: tuple[int, ...], swizzle: int | None) -> tuple[Array, int]:
    """The chunk of each (stage, row, column) as a kernel computes it, and those of a stage."""
    sizes: dict[str, int] = {}
    stages = shape[0] if len(shape) == 3 else 1
    rows, columns = shape[-2:]
    count = stages * rows * columns // 8

    def kernel(y: Out[u32]) -> None:
        tile = ptx.SharedTile(f16, shape, swizzle)
        sizes["chunks"] = tile.chunks
        i = lang.global_id()
        at = tile.chunk(i // (columns // 8) % rows, i % (columns // 8), i * 8 // (rows * columns))
        with lang.if_(i < count):
            y[i] = at

    tensors = {"y": empty((count,), u32)}
    on_simulator(record(kernel, tensors, 32), tensors, -(-count // 32))
    return tensors["y"].bits().reshape(stages, rows, columns // 8), sizes["chunks"]


@pytest.mark.parametrize("swizzle", [None, 0, 32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_of_a_shared_tile(shape: tuple[int, ...], swizzle: int | None) -> None:
    panel = min(shape[-1] * 2, 128)
    if swizzle and swizzle > panel:
        with pytest.raises(TraceError, match=f"rows of {panel} bytes have no swizzle of {swizzle}"):
            chunks_of(shape, swizzle)
        return
    at, size = chunks_of(shape, swizzle)
    assert sorted(at.reshape(-1)) == list(range(at.size))  # each place once
    used = (panel if panel > 16 else 0) if swizzle is None else swizzle
    width = panel // 16
    for stage, row, column in np.ndindex(at.shape):
        dense = (column // width * shape[-2] + row) * width + column % width
        xored = dense ^ (dense >> 3 & max(used // 16, 1) - 1)  # the formula of tensor maps
        assert at[stage, row, column] == stage * size + xored
    if used == panel:  # eight rows of a column touch each bank once
        for stage, first, column in np.ndindex(at.shape[0], at.shape[1] // 8, at.shape[2]):
            eight = at[stage, 8 * first : 8 * first + 8, column]
            assert sorted(eight % 8) == list(range(8))


def test_rows_further_down_are_a_number_away() -> None:
    def kernel(y: Out[u32]) -> None:
        tile = ptx.SharedTile(bf16, (2, 64, 128))
        i = lang.local_id()
        there = tile.chunk(i + 24, 9, 1)
        y[i] = there - (tile.chunk(i, 9) + tile.down(24) + tile.at_stage(1))
        with pytest.raises(TraceError, match="repeats after 8 rows, got 4"):
            tile.down(4)

    tensors = {"y": empty((8,), u32)}
    on_simulator(record(kernel, tensors, 8), tensors, 1)
    assert not tensors["y"].bits().any()


@pytest.mark.parametrize("columns", [16, 32, 64, 256])
def test_columns_further_right_are_one_operation_away(columns: int) -> None:
    across = columns // 8

    def kernel(y: InOut[u32]) -> None:
        tile = ptx.SharedTile(f16, (2, 16, columns))
        row = lang.local_id()
        for first in range(min(across, 8)):
            for further in range(across):
                if first & further == 0:
                    there = tile.right(tile.chunk(row, first, 1), further)
                    y[row * 256 + first * 32 + further] = there - tile.chunk(row, first + further)

    tensors = {"y": tensor(np.full(16 * 256, 16 * across, np.uint32), u32)}
    on_simulator(record(kernel, tensors, 16), tensors, 1)
    assert (tensors["y"].bits() == 16 * across).all()


# -- copies ----------------------------------------------------------------------------------------


def ring(x: In[f16], y: Out[f16], *, pending: int, meet: bool, commit: bool, late: bool) -> None:
    """Three copies of each thread in groups of their own; the first and the last are read."""
    tile = ptx.SharedTile(f16, (3, 8, 64))
    t = lang.local_id()
    at = tile.chunk(t // 8, t % 8)
    for stage in range(3):
        ptx.cp_async(tile, at + tile.at_stage(stage), x, stage * 512 + t * 8)
        if commit or stage < 2:
            ptx.cp_async_commit()
    ptx.cp_async_wait(pending)
    if meet:
        lang.barrier()
    other = tile.chunk(7 - t // 8, t % 8)
    first = tile.memory.load_chunk(other)
    if late:
        ptx.cp_async_wait(0)
        lang.barrier()
    last = tile.memory.load_chunk(other + tile.at_stage(2))
    for n, chunk in enumerate((first, last)):
        values = [lang.stored(lang.bitcast(w, f32), f16) for w in chunk]
        y.store(t * 16 + n * 8, [v for v in values for _ in range(2)])


def fault_of(fn: Callable[..., Any], tensors: dict[str, Tensor], **constants: Any) -> str:
    ir = record(fn, tensors, 64, **constants)
    try:
        on_simulator(ir, copies(tensors), 1)
    except SimulationError as error:
        return str(error)
    return ""


WAITED = "has waited for its copy"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pending": 2}, ""),
        ({"pending": 0}, ""),
        ({"pending": 3}, WAITED),
        ({"pending": 2, "late": False}, WAITED),
        ({"pending": 0, "late": False}, ""),
        ({"pending": 0, "late": False, "commit": False}, WAITED),
        ({"pending": 2, "meet": False}, "race: read here"),
    ],
    ids=str,
)
def test_copies_are_there_when_waited_for(given: dict[str, Any], text: str) -> None:
    tensors = {"x": random((1536,), f16), "y": empty((1024,), f16)}
    message = fault_of(ring, tensors, **{"meet": True, "commit": True, "late": True, **given})
    assert (text in message) if text else not message, message


def test_what_is_in_flight_is_not_written() -> None:
    def twice(x: In[f16], y: Out[u32]) -> None:
        tile = ptx.SharedTile(f16, (8, 64))
        t = lang.local_id()
        for _ in range(2):
            ptx.cp_async(tile, tile.chunk(t // 8, t % 8), x, t * 8)
        y[t] = t

    def stored(x: In[f16], y: Out[u32]) -> None:
        tile = ptx.SharedTile(f16, (8, 64))
        t = lang.local_id()
        ptx.cp_async(tile, tile.chunk(t // 8, t % 8), x, t * 8)
        tile.store(tile.chunk(t // 8, t % 8), [1.0] * 8)
        y[t] = t

    def read_before(x: In[f16], y: Out[u32]) -> None:
        tile = ptx.SharedTile(f16, (8, 64))
        t = lang.local_id()
        tile.store(tile.chunk(t // 8, t % 8), [1.0] * 8)
        lang.barrier()
        y[t] = tile.memory[t * 4 ^ 4]
        ptx.cp_async(tile, tile.chunk(t // 8, t % 8), x, t * 8)

    tensors = {"x": random((512,), f16), "y": empty((64,), u32)}
    assert f"written before thread 0 of group 0 {WAITED}" in fault_of(twice, tensors)
    assert f"written before thread 0 of group 0 {WAITED}" in fault_of(stored, tensors)
    assert "race: written here, read by thread" in fault_of(read_before, tensors)


def test_a_copy_of_fewer_bytes_ends_in_zeros() -> None:
    def kernel(x: In[f16], y: InOut[u32]) -> None:
        tile = ptx.SharedTile(f16, (8, 64))
        t = lang.local_id()
        ptx.cp_async(tile, tile.chunk(t // 8, t % 8), x, t * 8, size=t % 17)
        ptx.cp_async_commit()
        ptx.cp_async_wait()
        for j, word in enumerate(tile.memory.load_chunk(tile.chunk(t // 8, t % 8))):
            y[t * 4 + j] = word

    tensors = {"x": random((512,), f16), "y": tensor(np.zeros(256, np.uint32), u32)}
    ir = record(kernel, tensors, 64)
    words = [tensors[n].words.copy() for n in "xy"]
    wanted = bytearray(words[0].tobytes())
    for t in range(64):
        wanted[t * 16 + t % 17 : t * 16 + 16] = bytes(16 - t % 17)
    on_simulator(ir, tensors, 1)
    assert tensors["y"].words.tobytes() == bytes(wanted)
    execute(ir, "sm_80", words, parameters(ir, tensors), 1)
    assert words[1].tobytes() == bytes(wanted)


def test_copies_off_their_boundary_and_out_of_bounds() -> None:
    def kernel(x: In[f16], y: Out[u32], *, first: int, down: int) -> None:
        tile = ptx.SharedTile(f16, (8, 64))
        t = lang.local_id()
        ptx.cp_async(tile, tile.chunk(t // 8 + down, t % 8), x, t * 8 + first)
        y[t] = t

    tensors = {"x": random((512,), f16), "y": empty((64,), u32)}
    assert "'x' element 4 is not a multiple of 8" in fault_of(kernel, tensors, first=4, down=0)
    assert "'x' word 256 is out of bounds" in fault_of(kernel, tensors, first=8, down=0)
    assert "shared array 0 word 256 is out of" in fault_of(kernel, tensors, first=0, down=1)


def test_every_mutation_is_caught() -> None:
    ir, tensors = product_case(f16)
    labels = [label for label, _ in mutations(ir)]
    assert sum("no cp_async_wait" in label for label in labels) == 1
    assert {"ldmatrix", "cp_async"} <= {label.split()[0] for label in labels}
    for label, mutant in mutations(ir):
        results = copies(tensors)
        try:
            on_simulator(mutant, results, 1)
        except SimulationError:
            continue
        assert not np.array_equal(results["y"].numpy(), in_order(results, True, True)), label


# -- refusals --------------------------------------------------------------------------------------


def test_other_targets_refuse_these_operations() -> None:
    ir, _ = product_case(f16)
    with pytest.raises(
        LimitError, match=r"cp_async of lang.ptx, which only NVIDIA GPUs from sm_80"
    ):
        program_of(ir, Caps("wgsl", max_shared=48 << 10))
    with pytest.raises(TraceError, match="WGSL has no cp_async"):
        emit_wgsl(ir)
    with pytest.raises(TraceError, match="cp_async needs sm_80 or later, got sm_75"):
        emit_ptx(ir, "sm_75")
    assert program_of(ir, Caps("ptx", max_shared=48 << 10, arch="sm_80")).target == "ptx"


def sums() -> ptx.Fragment:
    fragment = ptx.Fragment(f32, (16, 8))
    fragment.fill(0.0)
    return fragment


def factor(shape: tuple[int, int] = (16, 16), dtype: DType = f16) -> ptx.Fragment:
    fragment = ptx.Fragment(dtype, shape)
    fragment.fill(0)
    return fragment


def divergent() -> None:
    with lang.if_(lang.local_id() < 5):
        ptx.mma_sync(sums(), factor(), factor((16, 8)))


def outside() -> None:
    with lang.if_(lang.group_id() < 5):
        inner = sums()
    inner[0]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: ptx.Fragment(f16, (8, 8)), r"in eights\); got f16 of \(8, 8\)"),
    "dtype": (lambda: ptx.Fragment(u32, (16, 8)), "a Fragment is f16 or bf16"),
    "unwritten": (lambda: ptx.Fragment(f32, (16, 8))[0], "used before it was filled or loaded"),
    "half filled": (lambda: ptx.Fragment(f16, (16, 8)).fill(1), "is filled with 0, got 1"),
    "register": (lambda: sums()[4], "has registers 0 to 3: 4"),
    "factor read": (lambda: factor()[4], "has registers 0 to 3: 4"),
    "register written": (lambda: sums().__setitem__(4, 1.0), "has registers 0 to 3: 4"),
    "one of a pair": (lambda: factor().__setitem__(0, 1.0), "a pair of values or a word, got 1.0"),
    "iterated": (lambda: list(sums()), "cannot be iterated"),
    "copied": (lambda: copy.copy(sums()), "a Fragment is not copied"),
    "in a variable": (lambda: lang.var(0.0).set(cast(Any, sums())), "mixed types"),
    "order": (lambda: ptx.mma_sync(sums(), factor((16, 8)), factor()), "mma_sync takes f32"),
    "mixed": (lambda: ptx.mma_sync(sums(), factor(), factor((16, 8), bf16)), "bf16 \\(16, 8\\)"),
    "divergent": (divergent, "mma_sync inside control flow that may differ by thread"),
    "outside": (outside, "a value was used outside the block"),
    "tile dtype": (lambda: ptx.SharedTile(f32, (8, 8)), "a SharedTile holds f16 or bf16, got f32"),
    "tile rank": (lambda: ptx.SharedTile(f16, (8,)), r"\(rows, columns\) or \(stages"),
    "tile rows": (lambda: ptx.SharedTile(f16, (4, 8)), "rows in eights"),
    "tile columns": (lambda: ptx.SharedTile(f16, (8, 24)), "rows in eights"),
    "loaded dtype": (
        lambda: ptx.ldmatrix(ptx.SharedTile(f16, (8, 8)), 0, ptx.Fragment(bf16, (16, 8))),
        "ldmatrix takes 1, 2 or 4 registers of f16, got fragments bf16",
    ),
    "nothing": (lambda: ptx.ldmatrix(ptx.SharedTile(f16, (8, 8)), 0), "got fragments none"),
    "residents": (lambda: ptx.resident(0), "a Python number of groups from 1 to 32, got 0"),
    "groups": (lambda: ptx.cp_async_wait(-1), "a Python number of groups, got -1"),
    "integers": (lambda: ptx.widen_i8(1, f32), "widen_i8 gives f16 or bf16, got f32"),
    "sums of bytes": (
        lambda: ptx.mma_bytes(sums(), factor(), factor((16, 8)), i8), "mma_bytes takes i32 .16, 8."
    ),
    "bytes": (lambda: ptx.permute_bytes(1, 2, (0, 1, 2, 16)), "four numbers of bytes, 0 to 15"),
    "bytes by a float": (
        lambda: ptx.permute_bytes(1, 2, lang.cast(lang.local_id(), f32)), "u32"
    ),
    "whole bytes": (
        lambda: ptx.permute_bytes(lang.local_id(), 2, cast("Any", (0, 1, 2, 3.0))),
        "four numbers of bytes, 0 to 15",
    ),
    "a byte": (
        lambda: ptx.permute_bytes(1, 2, cast("Any", 5)), "four numbers of bytes, 0 to 15, got 5"
    ),
    "numbers": (lambda: ptx.widen_u7(1, f32), "widen_u7 gives f16 or bf16, less 0 to 127, got f32"),
    "zero": (lambda: ptx.widen_u7(1, f16, 128), "less 0 to 127, got f16, 128"),
    "words of sums": (
        lambda: ptx.Fragment(f32, (16, 8)).word(0), "words are those of a factor, 0 to 3; got 0",
    ),
    "root": (lambda: ptx.rsqrt(lang.local_id()), "f32"),
    "reciprocal": (lambda: ptx.reciprocal(lang.local_id() == 0), "f32"),
    "pairs": (lambda: ptx.max_pairs(1, 2, f32), "max_pairs takes f16 or bf16, got f32"),
    "values": (lambda: ptx.SharedTile(f16, (8, 8)).store(0, [1.0]), "takes 8 values, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert_refused(*REFUSED[name], 32)


def test_every_name_is_on_the_page() -> None:
    """Docs give the call as it is; names for tools, which emit and lay out, are not listed."""
    page = Path(__file__).parents[2] / "docs" / "kernel-language.md"
    table = page.read_text("utf-8").partition("## PTX alone")[2].partition("\n## ")[0]
    quoted = re.findall(r"`ptx\.([^`]+)`", table)
    for text in quoted:
        name = text.partition("(")[0]
        parameters = inspect.signature(getattr(ptx, name)).parameters.values()
        plain = [str(p.replace(annotation=p.empty)) for p in parameters]
        assert text == f"{name}({', '.join(plain)})"
    tools = {"ROOM", "TARGETS", "ParamLayout", "SharedLayout", "emit_ptx", "entry_name", "literal",
             "overlaps", "param_layout", "shared_layout"}  # fmt: skip
    assert {text.partition("(")[0] for text in quoted} == set(ptx.__all__) - tools


def test_half_a_warp_is_refused() -> None:
    def kernel(y: Out[f32]) -> None:
        ptx.mma_sync(sums(), factor(), factor((16, 8)))
        y[lang.local_id()] = 0.0

    with pytest.raises(TraceError, match="mma_sync needs a workgroup of a multiple of 32 threads"):
        record(kernel, {"y": empty((48,), f32)}, 48)


def test_copies_from_written_arguments_are_refused() -> None:
    def kernel(x: InOut[f16], z: In[bf16], *, which: str) -> None:
        tile = ptx.SharedTile(f16, (8, 64))
        ptx.cp_async(tile, 0, {"x": x, "z": z}[which], 0)

    tensors = {"x": random((512,), f16), "z": random((512,), bf16)}
    for which, text in (("x", "got 'x': inout f16"), ("z", "got 'z': in bf16")):
        with pytest.raises(TraceError, match=text):
            record(kernel, tensors, 32, which=which)


def test_lines_of_written_arguments_are_refused() -> None:
    def kernel(x: InOut[f16], z: In[f16], *, which: str, nbytes: int) -> None:
        ptx.fetch_lines({"x": x, "z": z}[which], nbytes)

    tensors = {"x": random((512,), f16), "z": random((512,), f16)}
    for which, nbytes, text in (("x", 128, "got 'x': inout, 128"), ("z", 32, "got 'z': in, 32")):
        with pytest.raises(TraceError, match=text):
            record(kernel, tensors, 32, which=which, nbytes=nbytes)


def test_fragments_in_loops_and_among_groups() -> None:
    """Sums that a loop adds up, whose number of rounds differs by group."""

    def kernel(x: In[f16, 2], y: Out[f32, 2]) -> None:
        tile = ptx.SharedTile(f16, (16, 16))
        t = lang.local_id()
        tile.store(tile.chunk(t // 2, t % 2), x.load(t // 2, t % 2 * 8))
        lang.barrier()
        square, total = ptx.Fragment(f16, (16, 16)), sums()
        pair = ptx.Fragment(f16, (16, 8))
        ptx.ldmatrix(tile, tile.chunk(t % 16, t // 16), square)
        for _ in lang.range(lang.group_id()):
            ptx.ldmatrix(tile, tile.chunk(t % 16, 0), pair, trans=True)
            ptx.mma_sync(total, square, pair)
        for register in range(4):
            row, column = total.place(register)
            y[lang.group_id() * 16 + row, column] = total[register]

    tensors = {"x": random((16, 16), f16), "y": empty((48, 8), f32)}
    ir = record(kernel, tensors, 32)
    words = [tensors[n].words.copy() for n in "xy"]
    on_simulator(ir, tensors, 3)
    x = tensors["x"].numpy().astype(np.float64)
    wanted = np.concatenate([g * (x @ x[:, :8]) for g in range(3)])
    np.testing.assert_allclose(tensors["y"].numpy(), wanted, rtol=1e-5, atol=1e-5)
    execute(ir, "sm_80", words, parameters(ir, tensors), 3)
    np.testing.assert_array_equal(words[1], tensors["y"].words)
    alone = [w.copy() for w in words]
    simulate(ir, alone, parameters(ir, tensors), 3, subgroup=8)  # a warp has 32 lanes all the same
    np.testing.assert_array_equal(alone[1], words[1])
