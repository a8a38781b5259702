"""WGSL on an adapter and the simulator: one arithmetic, row by row of docs/kernel-language.md."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import centella as ct
from centella import lang
from centella.backends.webgpu import functions
from centella.dtypes import ALL, DType, bf16, bool_, f16, f32, i8, i32, narrow, u8, u32, widen
from centella.emit.program import program_of
from centella.emit.wgsl import MAX_DEPTH, bits_literal, count_statements, emit_wgsl
from centella.errors import LimitError, TraceError
from centella.lang import In, InOut, KernelIR, Out, Scalar, storage
from centella.specs import Caps
from tests.lang.test_lang_math import AT_ZERO, BOUNDS, REFERENCE, SPECIAL, sweep, ulps
from tests.support.lang_common import (
    MOST_GROUPS,
    POISON,
    Array,
    Tensor,
    collatz,
    compute,
    compute_twice,
    copies,
    element_kernel,
    empty,
    on_simulator,
    on_webgpu,
    record,
    tensor,
    tint,
    webgpu,
)
from tests.support.lang_programs import (
    GROUPS,
    SCALARS,
    Node,
    first_words,
    on_host,
    program,
    programs,
)
from tests.support.lang_rows import BITS, NAN, ROWS, TINY, A, B, Row, flush, same

# -- the arithmetic table --------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_arithmetic(row: Row) -> None:
    simulated, device = compute_twice(row.fn, *row.operands, out=row.out)
    row.check(simulated)
    row.check(device)


def test_fma_rounds_once_or_twice() -> None:
    c = np.roll(A, 5)
    with np.errstate(all="ignore"):
        twice = A * B + c
        once = (A.astype(np.float64) * B + c).astype(np.float32)
    simulated, device = compute_twice(lang.fma, A, B, c)
    assert same(simulated, once).all()
    for result in (simulated, device):
        right = same(result, once) | same(result, twice)
        right |= same(result, flush(once)) | same(result, flush(twice))
        subnormal = [(x != 0) & (np.abs(x) < TINY) for x in (A, B, c)]
        right |= np.logical_or.reduce(subnormal)  # flushed before
        assert right.all(), [x[~right][:4] for x in (A, B, c, result)]


FORMULAS = ("exp", "exp2", "log", "log2", "tanh", "erf", "sin", "cos", "sigmoid")
DIVIDES = {"tanh": 2.5, "sigmoid": 2.5}  # ulp of a division, which the bound adds


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_keep_their_bounds(name: str) -> None:
    bound, granted, _, _ = BOUNDS[name]
    x = sweep(name)[::3]
    with np.errstate(all="ignore"):
        exact = REFERENCE[name](x.astype(np.float64))
        for result in compute_twice(getattr(lang, name), x):
            error = ulps(result, exact, granted + 2.0**-126)  # a target may flush
            worst = int(np.argmax(error))
            assert error[worst] <= bound + DIVIDES.get(name, 0), (x[worst], result[worst])


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_at_special_values(name: str) -> None:
    cases = list(SPECIAL[name].items())
    cases += zip((0.0, -0.0), AT_ZERO.get(name, (0.0, -0.0)), strict=True)
    x, expected = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    x = np.concatenate([x, [NAN]]).astype(np.float32)
    expected = np.concatenate([expected, [NAN]]).astype(np.float32)
    for result in compute_twice(getattr(lang, name), x):
        assert (same(result, expected) | same(result, flush(expected))).all(), (x, result)


def test_powers_by_the_target() -> None:
    if not functions.agrees(webgpu())[1]:
        pytest.skip("this adapter's exp2 is less exact")
    x = functions.exponents()
    with np.errstate(all="ignore"):
        for result in compute_twice(lang.exp2_native, x):
            assert functions.powers(result)


# -- constants -------------------------------------------------------------------------------------

CONSTANTS: list[tuple[Any, DType]] = [
    *[(v, f32) for v in (0.0, -0.0, 1.0, -1.5, 1e-5, 16777217.0, 3.4028235e38, 2.0**-126, 1e-45)],
    *[(v, f32) for v in (math.inf, -math.inf, math.nan, 0.1, 1 / 3, 1e20, 123456.789)],
    *[(v, i32) for v in (0, -1, 2**31 - 1, -(2**31), 7)],
    *[(v, u32) for v in (0, 2**31, 2**32 - 1)],
]


@pytest.mark.parametrize(("value", "dtype"), CONSTANTS, ids=str)
def test_constants_keep_every_bit(value: Any, dtype: DType) -> None:
    def fn(a: Any) -> Any:
        return lang.select(a > 5, lang.const(value, dtype), lang.const(value, dtype))

    expected = np.full(4, value).astype(dtype.numpy)
    for result in compute_twice(fn, np.arange(4, dtype=np.uint32), out=dtype):
        assert (same(result, expected) | same(result, flush(expected))).all()


def constant_formulas(a: Any) -> Any:
    """What constants alone make: WGSL refuses it unless it is folded."""
    huge, zero = lang.const(3e38, f32), lang.const(0.0, f32)
    values = [
        huge * huge,
        huge * 10.0 - huge * 10.0,
        1.0 / zero,
        zero / zero,
        lang.sqrt(zero - 1.0),
    ]
    values += [lang.log(zero), lang.exp(huge), lang.bitcast(lang.const(0x7FC00001, u32), f32)]
    numbers = [lang.cast(huge, i32), lang.const(7, i32) // 0, lang.const(-(2**31), i32) // -1]
    numbers += [lang.const(1, i32) << 31, lang.const(2**31 - 1, i32) + 1, lang.const(5, i32) % 0]
    total = a
    for v in values:
        total = total + lang.cast(lang.bitcast(lang.select(a > 1.0, v, 0.0), u32) >> 8, f32)
    for n in numbers:
        total = total + lang.cast(lang.select(a > 1.0, n, 0) >> 8, f32)
    return total


def test_constants_alone_never_reach_the_device() -> None:
    x = np.array([0, 2, 3], np.float32)
    simulated, device = compute_twice(constant_formulas, x)
    np.testing.assert_array_equal(simulated, device)


# -- storage ---------------------------------------------------------------------------------------

EVERY_HALF = np.arange(2**16, dtype=np.uint32)


def halfway(dtype: DType) -> Array:
    """Each midpoint of two neighbours of a 16-bit float, its neighbours in f32, and all ends."""
    every = EVERY_HALF[: 0x7C00 if dtype is f16 else 0x7F80].astype(np.uint16)
    wide = widen(every.view(dtype.numpy), dtype).astype(np.float64)
    middle = ((wide[:-1] + wide[1:]) / 2).astype(np.float32).view(np.uint32)
    largest = {f16: [0x477FEFFF, 0x477FF000, 0x47800000], bf16: [0x7F7F7FFF, 0x7F7F8000]}[dtype]
    ends = [*largest, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 1, 0x007FFFFF]
    bits = np.concatenate([middle, middle - 1, middle + 1, wide.astype(np.float32).view(np.uint32),
                           np.array(ends, np.uint32), BITS])  # fmt: skip
    return np.concatenate([bits, bits ^ 0x80000000]).view(np.float32)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=lambda d: d.name)
def test_stores_round_to_nearest_even(dtype: DType) -> None:
    x = halfway(dtype)
    expected = narrow(x, dtype)
    flushed = narrow(flush(x), dtype)
    simulated, device = compute_twice(lambda a: a, x, out=dtype)
    wide, nan = widen(expected, dtype), np.isnan(x)
    assert same(simulated, wide).all()
    np.testing.assert_array_equal(np.isnan(device), nan)
    right = same(device, wide) | same(device, widen(flushed, dtype))
    assert right.all(), (x[~right][:4], device[~right][:4])
    assert np.isinf(widen(expected, dtype)[~np.isinf(x)]).any()


def test_native_half_stores_are_the_same_for_exact_values() -> None:
    x = EVERY_HALF.astype(np.uint16).view(np.float16).astype(np.float32)
    ir, _, _ = element_kernel(lambda a: a, x, out=f16)
    source = emit_wgsl(ir, native_f16=True)
    assert "pack2x16float" in source and "f16_bits" not in source
    assert "pack2x16float" not in emit_wgsl(ir)
    webgpu().create_shader_module(code=source)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=lambda d: d.name)
def test_loads_widen_every_half(dtype: DType) -> None:
    def one(x: In[storage], y: Out[f32]) -> None:
        y[lang.global_id()] = x[lang.global_id()]

    def eight(x: In[storage], y: Out[f32]) -> None:
        first = lang.global_id() * 8
        values = x.load(first)
        y.store(first, values[:4])
        y.store(first + 4, values[4:])

    expected = widen(EVERY_HALF.astype(np.uint16).view(dtype.numpy), dtype)
    packed = Tensor(EVERY_HALF.astype(np.uint16).view(np.uint32), dtype, (2**16,), (1,))
    for fn, each in ((one, 1), (eight, 8)):
        tensors = {"x": packed, "y": empty((2**16,), f32)}
        ir = record(fn, tensors, 256)
        first, second = (t["y"].numpy() for t in run_twice(ir, tensors, 256 // each))
        assert same(first, expected).all()
        flushed = np.where(np.abs(expected) < 2.0**-14, np.copysign(0, expected), expected)
        assert (same(second, expected) | same(second, flushed.astype(np.float32))).all()


def run_twice(
    ir: KernelIR, tensors: dict[str, Tensor], groups: int, scalars: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors after a launch in the simulator, and after one on the adapter."""
    first, second = copies(tensors), copies(tensors)
    on_simulator(ir, first, groups, scalars)
    on_webgpu(ir, second, groups, scalars)
    return first, second


def equal(results: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The result, equal word for word on both, pads too."""
    for name, t in results[0].items():
        np.testing.assert_array_equal(t.words, results[1][name].words)
    return results[0]


def values_of(dtype: DType, n: int) -> Array:
    """Values that a dtype holds exactly, each end among them."""
    if dtype.kind == "float":
        return np.asarray((np.arange(n) - n // 2) / 4, np.float32)
    if dtype.kind == "bool":
        return np.asarray(np.arange(n) % 3 == 0)
    ends = np.iinfo(dtype.numpy)
    spread = np.linspace(ends.min, ends.max, n).astype(np.int64)
    return np.asarray(spread.astype(dtype.numpy))


STORAGE = pytest.mark.parametrize("dtype", ALL.values(), ids=list(ALL))


@STORAGE
def test_any_element_loads_by_itself(dtype: DType) -> None:
    """From any offset, with any stride, in any order; each is stored alone as 4 bytes."""

    def kernel(x: In[storage, 2], y: Out[f32, 2]) -> None:
        i = lang.global_id()
        with lang.if_(i < x.shape(0)):
            for k in range(5):
                y[i, k] = lang.cast(x[i, 4 - k], f32)

    values = values_of(dtype, 256)
    for offset, strides in ((0, (5, 1)), (3, (7, 1)), (1, (20, 3)), (2, (1, 40))):
        flat = tensor(values, dtype)
        x = Tensor(flat.words, dtype, (9, 5), strides, offset)
        tensors = {"x": x, "y": empty((9, 5), f32)}
        ir = record(kernel, tensors, 4)
        result = equal(run_twice(ir, tensors, 3))["y"].numpy()
        np.testing.assert_array_equal(result, x.numpy()[:, ::-1].astype(np.float32))


@STORAGE
@pytest.mark.parametrize("load", ["element", "chunk"])
@pytest.mark.parametrize("store", ["word", "chunk"])
def test_words_and_chunks(dtype: DType, load: str, store: str) -> None:
    def kernel(x: In[storage, 2], y: Out[storage, 2]) -> None:
        per = y.dtype.per_word if store == "word" else y.dtype.per_chunk
        many = y.dtype.per_chunk
        i = lang.global_id()
        with lang.if_(i < x.shape(0)):
            for start in range(0, 2 * many, many):
                if load == "chunk":
                    values = x.load(i, start)
                else:
                    values = [x[i, start + k] for k in range(many)]
                for k in range(0, many, per):
                    y.store(i, start + k, values[k : k + per])

    shape = (7, 2 * dtype.per_chunk)
    values = values_of(dtype, math.prod(shape)).reshape(shape)
    tensors = {"x": tensor(values, dtype, dtype.per_chunk), "y": empty(shape, dtype)}
    ir = record(kernel, tensors, 4)
    assert [a.width for a in ir.args] == [4 if s == "chunk" else 1 for s in (load, store)]
    result = equal(run_twice(ir, tensors, 2))["y"]
    np.testing.assert_array_equal(result.numpy(), widen(narrow(values, dtype), dtype))


@pytest.mark.parametrize("dtype", [i8, u8, bool_], ids=lambda d: d.name)
def test_bytes_store_their_low_bits(dtype: DType) -> None:
    x = np.array([0, 1, -1, 127, 128, -128, -129, 255, 256, 300, 2**31 - 1], np.int32)

    def fn(a: Any) -> Any:
        return lang.cast(lang.cast(a, dtype), dtype)

    expected = x != 0 if dtype is bool_ else x.astype(dtype.numpy)
    for result in compute_twice(fn, x, out=dtype):
        np.testing.assert_array_equal(result, expected)


def test_packed_four_bit_values() -> None:
    """A packed type fits the rules: a word is loaded, eight values are unpacked and stored."""

    def kernel(x: In[u32], y: Out[f32]) -> None:
        i = lang.global_id()
        word = x[i // 8]
        nibble = lang.bitcast((word >> (i % 8 * 4)) << 28, i32) >> 28
        y[i] = lang.cast(nibble, f32)

    tensors = {"x": tensor(BITS[:16], u32), "y": empty((128,), f32)}
    result = equal(run_twice(record(kernel, tensors, 32), tensors, 4))["y"].numpy()
    nibbles = (BITS[:16, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    np.testing.assert_array_equal(result, np.where(nibbles > 7, nibbles - 16.0, nibbles).ravel())


def test_lanes_of_chunks() -> None:
    """Once one chunk is accessed a buffer is an array of chunks; words of it are lanes."""

    def kernel(x: In[f32], z: InOut[u32], y: Out[f32], at: u32) -> None:
        tile, me = lang.shared(f32, 64), lang.local_id()
        tile.store(me * 4, x.load(me * 4))
        z.store(me * 4, z.load(me * 4))
        lang.barrier()
        with lang.if_(me < 16):
            for k in (0, 1, 2, 3):
                tile[me * 4 + k] = tile[me * 4 + k] + x[at] + x[5]
        with lang.if_(me == 3):
            z[at] = z[at + 1]
            z[7] = z[6]
        lang.barrier()
        for k in range(4):
            y[me * 4 + k] = tile[63 - (me * 4 + k)] + tile[at] + tile[9]

    x = np.arange(64, dtype=np.float32)
    z = np.arange(100, 164, dtype=np.uint32)
    tensors = {"x": tensor(x), "z": tensor(z, u32), "y": empty((64,), f32)}
    ir = record(kernel, tensors, 16)
    assert [a.width for a in ir.args] == [4, 4, 1]
    result = equal(run_twice(ir, tensors, 1, {"at": 2}))
    tile = x + 2 + 5
    np.testing.assert_array_equal(result["y"].numpy(), tile[::-1] + tile[2] + tile[9])
    assert result["z"].words[[2, 7]].tolist() == [103, 106]


def test_scalars_in_device_memory() -> None:
    def kernel(p: Scalar[u32], s: Scalar[f32], y: Out[f32]) -> None:
        with lang.if_(p.value > 3):
            lang.barrier()
        with lang.if_(lang.global_id() < p.value):
            y[lang.global_id()] = s.value

    tensors = {"p": tensor(np.array([0, 9]), u32, offset=1), "s": tensor(np.array([2.5])),
               "y": empty((9,), f32)}  # fmt: skip
    tensors["p"].shape, tensors["p"].offset = (1,), 2
    result = equal(run_twice(record(kernel, tensors, 4), tensors, 3))["y"].numpy()
    np.testing.assert_array_equal(result, 2.5)


# -- control flow ----------------------------------------------------------------------------------


def bounds_are_read_once(n: Any) -> Any:
    """A variable that bounds a loop may change inside it."""
    bound, step, total = lang.var(n), lang.var(1), lang.var(0)
    for k in lang.range(0, bound, step):
        bound -= 1
        step += 1
        total += k + 1
    return total * 1000 + bound


def constants_of_inner_blocks(n: Any) -> Any:
    """A constant or parameter first used inside a block may be used after it."""
    m = lang.bitcast(n, i32)
    total = lang.var(lang.const(0, i32))
    with lang.if_(n > 4):
        for k in lang.range(lang.const(-3, i32), lang.const(5, i32), lang.const(2, i32)):
            for j in lang.range(k, lang.const(5, i32)):
                total += k * j
    with lang.else_():
        total += 5
    return lang.bitcast(total * 5 + (m - 3), u32)


def values_before_changes(n: Any) -> Any:
    """An expression keeps the value that its variables had when it was written."""
    x = lang.var(n)
    before = x * 2 + 1
    twice = x + x
    x.set(before + 1)
    again = x - n
    with lang.if_(again > 3):
        x += again
    for _ in lang.range(2):
        tripled = x * 3
        x += 1
        x.set(x + tripled - before)
    return x + before + twice + again


def nested_breaks(n: Any) -> Any:
    total = lang.var(0)
    for i in lang.range(n):
        lang.break_if(i > 6)
        j = lang.var(0)
        with lang.loop():
            lang.break_if(j * i > n)
            j += 1
            lang.break_if(j > 4)
            total += j
        for k in lang.range(j, j + i, 2):
            lang.break_if(k == 5)
            with lang.if_((k & 1) == 0):
                total += k
    return total


@pytest.mark.parametrize(
    "fn",
    [collatz, bounds_are_read_once, constants_of_inner_blocks, values_before_changes,
     nested_breaks],
)  # fmt: skip
def test_control_flow(fn: Callable[..., Any]) -> None:
    simulated, device = compute_twice(fn, np.arange(1, 100, dtype=np.uint32), out=u32)
    np.testing.assert_array_equal(simulated, device)


def test_bounds_of_loops_are_read_once() -> None:
    n = np.arange(1, 20, dtype=np.uint32)
    result = compute(bounds_are_read_once, n, out=u32)
    np.testing.assert_array_equal(result, n * (n + 1) // 2 * 1000)


def test_parameters_inside_and_outside_blocks() -> None:
    """A launch parameter that addresses a lane inside a block is still one outside it."""

    def kernel(y: Out[u32], n: u32, m: i32) -> None:
        tile, me = lang.shared(u32, 16), lang.local_id()
        total = lang.var(0)
        tile.store(me * 4, [me, me, me, me])
        lang.barrier()
        with lang.if_(me < 3):
            total += tile[n]
            for k in lang.range(lang.const(0, i32), m):
                total += lang.bitcast(k, u32)
        y[me] = total + n + lang.bitcast(m, u32)

    tensors = {"y": empty((4,), u32)}
    result = equal(run_twice(record(kernel, tensors, 4), tensors, 1, {"n": 9, "m": 5}))
    np.testing.assert_array_equal(result["y"].words, [26, 26, 26, 14])


def test_groups_meet() -> None:
    """Barriers, `workgroup_uniform` and `workgroup_reduce`, in loops too; InOut between threads."""

    def kernel(x: In[f32], z: InOut[u32], y: Out[f32, 2]) -> None:
        me, size, group = lang.local_id(), lang.workgroup_size(), lang.group_id()
        i = lang.global_id()
        first = lang.workgroup_uniform(x[i])
        flag = lang.workgroup_uniform(x[i] > 100.0)
        total = lang.var(0.0)
        for _ in lang.range(lang.cast(first, u32) % 3 + 1):
            total += lang.workgroup_reduce(x[i], "add")
        with lang.if_(flag):
            total += lang.workgroup_reduce(x[i], "max")
        for _ in lang.range(3):
            ahead = z[group * size + (me + 1) % size]
            lang.barrier()
            z[i] = ahead + me
            lang.barrier()
        y[i, 0] = first
        y[i, 1] = total

    n = 3 * 20
    x = np.arange(n, dtype=np.float32) * 4
    tensors = {"x": tensor(x), "z": tensor(np.arange(n) * 7, u32), "y": empty((n, 2), f32)}
    result = equal(run_twice(record(kernel, tensors, 20), tensors, 3))
    rows = x.reshape(3, 20)
    total = rows.sum(1) * (rows[:, 0] % 3 + 1) + np.where(rows[:, 0] > 100, rows.max(1), 0)
    np.testing.assert_array_equal(result["y"].numpy()[:, 1].reshape(3, 20)[:, 3], total)


def test_reduction_is_bitwise_repeatable() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        y[lang.global_id()] = lang.workgroup_reduce(x[lang.global_id()], "add")

    x = np.random.default_rng(5).standard_normal(4 * 96).astype(np.float32)
    tensors = {"x": tensor(x), "y": empty(x.shape, f32)}
    ir = record(kernel, tensors, 96)
    first = equal(run_twice(ir, tensors, 4))["y"].words
    for _ in range(3):
        np.testing.assert_array_equal(equal(run_twice(ir, tensors, 4))["y"].words, first)


def test_storage_barriers_where_they_are_needed() -> None:
    """A barrier orders global memory only where a written buffer was accessed before it."""

    def barriers(fn: Callable[..., None]) -> list[bool]:
        tensors = {"z": tensor(np.zeros(8), u32), "y": empty((8,), u32)}
        lines = emit_wgsl(record(fn, tensors, 8)).splitlines()
        return [
            "storageBarrier" in lines[i + 1]
            for i, line in enumerate(lines)
            if "workgroupBarrier" in line
        ]

    def plain(z: InOut[u32], y: Out[u32]) -> None:
        lang.barrier()
        value = z[lang.local_id()]
        lang.barrier()
        y[lang.local_id()] = value

    def looped(z: InOut[u32], y: Out[u32]) -> None:
        lang.barrier()
        for k in lang.range(3):
            lang.barrier()
            y[k] = 0
        y[lang.local_id()] = 1
        lang.barrier()

    def untouched(z: InOut[u32], y: Out[u32]) -> None:
        tile = lang.shared(u32, 8)
        for _ in lang.range(3):
            tile[lang.local_id()] = 0
            lang.barrier()
        with lang.if_(lang.group_id() == 0):
            y[lang.local_id()] = tile[0]

    assert barriers(plain) == [False, True]
    assert barriers(looped) == [False, True, True]
    assert barriers(untouched) == [False]


# -- grids -----------------------------------------------------------------------------------------


def test_grids_are_folded() -> None:
    """Group ids are linear beyond the side of a grid, and the groups that fill it run nothing."""

    def kernel(y: Out[u32], n: u32) -> None:
        y[lang.group_id()] = lang.group_id() ^ lang.num_groups()

    groups = MOST_GROUPS + 5
    y = Tensor(np.full(2 * MOST_GROUPS + 4, POISON, np.uint32), u32, (groups,), (1,))
    on_webgpu(record(kernel, {"y": y}, 1), {"y": y}, groups, {"n": groups})
    np.testing.assert_array_equal(y.numpy(), np.arange(groups) ^ groups)
    assert (y.words[groups:] == POISON).all()


def test_a_launch_runs_whole_groups() -> None:
    """`ceil(threads / workgroup)` groups, through the device's own folding."""

    @ct.kernel(workgroup=4)
    def ids(y: Out[u32], n: u32) -> None:
        i = lang.global_id()
        with lang.if_(i < n):
            y[i] = i + lang.num_groups()

    webgpu()
    for n in (1, 4, 5, 4 * MOST_GROUPS + 3):
        y = ct.asarray(np.zeros(n, np.uint32), device="webgpu")
        ids(y, n=n, threads=n)
        np.testing.assert_array_equal(y.numpy(), np.arange(n) + -(-n // 4))


# -- text ------------------------------------------------------------------------------------------


def test_statements_are_counted() -> None:
    def kernel(x: In[f32], y: Out[f32], n: u32, *, terms: int) -> None:
        i = lang.global_id()
        total = lang.var(0.0)
        a, b = x[i], x[i + 1]
        for _ in range(terms):
            total.set(lang.fma(a, b, total))
        with lang.if_(i < n):
            y[i] = total

    tensors = {"x": tensor(np.zeros(8)), "y": empty((8,), f32)}
    few, many = (record(kernel, tensors, 8, terms=t) for t in (1, 101))
    assert count_statements(many) - count_statements(few) == 100  # one each
    for ir in (few, many):
        source = emit_wgsl(ir)
        body = source[source.index("  if (group <") :].splitlines()[1:-2]
        assert count_statements(ir) == len(body)


def test_a_users_kernel_has_no_bound() -> None:
    @ct.kernel(workgroup=64)
    def kernel(x: ct.In[f32], y: ct.Out[f32]) -> None:
        i = lang.global_id()
        total = lang.var(0.0)
        a = x[i]
        for _ in range(8_000):
            total.set(lang.fma(a, a, total))
        y[i] = total

    x = ct.asarray(np.ones(64, np.float32), device="cpu")
    kernel(x, ct.empty((64,), device="cpu"), threads=64)
    assert kernel.source("wgsl").count("fma(") >= 8_000


def test_long_expressions_are_cut() -> None:
    def chain(a: Any) -> Any:
        for _ in range(10 * MAX_DEPTH):
            a = a * 3 + 1
        return a

    simulated, device = compute_twice(chain, np.arange(9, dtype=np.uint32), out=u32)
    np.testing.assert_array_equal(simulated, device)
    ir, _, _ = element_kernel(chain, np.arange(9, dtype=np.uint32), out=u32)
    deepest = max(line.count("(") for line in emit_wgsl(ir).splitlines())
    assert deepest <= 2 * MAX_DEPTH
    assert "zero_bits" not in emit_wgsl(ir) and bits_literal(math.inf).startswith("bitcast<f32>(")


def test_operations_of_another_target_are_refused() -> None:
    ir, _, _ = element_kernel(lambda a: a, np.zeros(4, np.float32))
    for op, type_ in (("wgmma", ""), ("mma", "f32")):
        with pytest.raises(TraceError, match=f"WGSL has no {op}"):
            emit_wgsl(replace(ir, body=(*ir.body, (op, type_, (), None))))


def test_subgroup_operations_ask_for_the_extension() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        i = lang.global_id()
        total = lang.subgroup_sum(x[i]) + lang.subgroup_max(x[i]) - lang.subgroup_min(x[i])
        lane = lang.cast(lang.lane_id() + lang.subgroup_size(), f32)
        y[i] = lang.shuffle_xor(total, 1) + lane

    ir = record(kernel, {"x": tensor(np.zeros(8)), "y": empty((8,), f32)}, 8)
    assert ir.uses_subgroups
    source = emit_wgsl(ir, enable_subgroups=True)
    assert source.startswith("enable subgroups;") and "enable" not in emit_wgsl(ir)
    for text in ("subgroupAdd(", "subgroupMin(", "subgroupMax(", "subgroupShuffleXor("):
        assert text in source


@pytest.mark.parametrize(
    ("function", "said", "text", "has"),
    [
        (lang.subgroup_sum, "subgroup operations, which", "subgroupAdd(", "subgroups"),
        (lang.exp2_native, r"lang\.exp2_native, which", "= exp2(", "native_exp2"),
    ],
    ids=["subgroups", "powers"],
)
def test_a_device_that_lacks_an_operation_says_so(
    function: Any, said: str, text: str, has: str
) -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        y[lang.global_id()] = function(x[lang.global_id()])

    ir = record(kernel, {"x": tensor(np.zeros(8)), "y": empty((8,), f32)}, 8)
    caps = Caps(target="wgsl")
    with pytest.raises(LimitError, match=rf"'kernel': {said}"):
        program_of(ir, caps)
    assert text in program_of(ir, replace(caps, **{has: True})).source


def test_workgroup_memory_is_counted_as_webgpu_counts_it() -> None:
    """Each variable by 16 bytes, those of `workgroup_uniform` too."""

    def kernel(x: In[f32], y: Out[f32]) -> None:
        shared, flag = lang.shared(f32, 32), lang.shared(f32, 1)
        shared[lang.local_id()] = x[lang.local_id()]
        flag[0] = 1.0
        lang.barrier()
        y[lang.local_id()] = shared[lang.local_id()] + flag[0] + lang.workgroup_uniform(x[0])

    ir = record(kernel, {"x": tensor(np.zeros(32)), "y": empty((32,), f32)}, 32)
    caps = Caps("wgsl", max_shared=128 + 16 + 16)
    assert "var<workgroup> shared_" in program_of(ir, caps).source
    with pytest.raises(LimitError, match="160 bytes of workgroup memory; this device has 159"):
        program_of(ir, replace(caps, max_shared=159))


def modules() -> dict[str, str]:
    """The WGSL of the kernels above, by name."""
    texts = {}
    for row in ROWS:
        texts[row.name] = emit_wgsl(element_kernel(row.fn, *row.operands, out=row.out)[0])
    x = np.zeros(4, np.float32)
    for name in FORMULAS:
        texts[name] = emit_wgsl(element_kernel(getattr(lang, name), x)[0])
    for dtype in ALL.values():
        cast = lambda a, d=dtype: lang.cast(a, d)  # noqa: E731
        texts[f"store {dtype.name}"] = emit_wgsl(element_kernel(cast, x, out=dtype)[0])
    for value, dtype in CONSTANTS:

        def fixed(a: Any, value: Any = value, dtype: DType = dtype) -> Any:
            return lang.select(a > 0.0, lang.const(value, dtype), lang.const(value, dtype))

        texts[f"{value} {dtype}"] = emit_wgsl(element_kernel(fixed, x, out=dtype)[0])
    texts["constants"] = emit_wgsl(element_kernel(constant_formulas, x)[0])
    u = np.zeros(4, np.uint32)
    for fn in (collatz, bounds_are_read_once, constants_of_inner_blocks, nested_breaks):
        texts[fn.__name__] = emit_wgsl(element_kernel(fn, u, out=u32)[0])
    return texts


def test_tint_accepts_the_language() -> None:
    texts = modules()
    faults = dict(zip(texts, tint(list(texts.values())), strict=True))
    assert {k: v for k, v in faults.items() if v} == {}


def test_tint_is_asked() -> None:
    bad = "@compute @workgroup_size(1) fn main() { let x = 1.0f / 0.0f; }"
    good = "@compute @workgroup_size(1) fn main() { workgroupBarrier(); }"
    faults = tint([good, bad, good])
    assert faults[0] == faults[2] == "" and "cannot be represented" in faults[1]


# -- random programs -------------------------------------------------------------------------------

EXAMPLES = int(os.environ.get("CENTELLA_EXAMPLES", "60"))


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(nodes=programs(), chunked=st.booleans())
def test_random_programs(nodes: list[Node], chunked: bool) -> None:
    """Python, thread by thread; the simulator; WebGPU: equal to the bit."""
    tensors = {"z": tensor(first_words(), u32)}
    result = equal(run_twice(program(nodes, chunked), tensors, GROUPS, SCALARS))["z"].words
    np.testing.assert_array_equal(result, on_host(nodes))
