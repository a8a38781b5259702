"""Who has a row: every kind of team, with and without shuffles, in the simulator; its registers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, dtype_of, f16, f32, i32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.lang import KernelIR
from centella.ops import argmax, norm, softmax
from centella.ops.hopper import MULTIPROCESSORS
from centella.ops.rows import ENOUGH, MOST, RESERVED, Team, team_of
from centella.ops.steps import step_of
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas
from tests.support.launched import laid_out, one_launch, parameters, result, rounded

Array = np.ndarray[Any, Any]
CUDA = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
            subgroups=True, native_f16_pack=True, native_exp2=True, arch="sm_90a",
            family="nvidia")  # fmt: skip
LARGE = Caps("wgsl", max_workgroup=1024)  # groups of a desktop's GPU, no shuffles
LEAST = Caps("ir")
ROWS = 5
# Columns that give teams of every size, with whole rows, empty places, and part of an item.
COLUMNS = (1, 3, 20, 45, 96, 384, 511, 1000, 2048, 3000, 5120, 9000, 20000, 24579)
NORM = {"kind": "layer", "eps": 1e-5, "vectors": ("weight", "bias")}
OPS: dict[str, dict[str, Any]] = {"softmax": {}, "norm": NORM}
VOCABULARIES = (24570, 28672, 32000, 32768, 36864, 50257, 61496, 90140, 100000)
ASSEMBLED = {"norm": (384, 8192, 20480, 24570, 32000, 36864),
             "argmax": (384, 4096, *VOCABULARIES),
             "softmax": (384, 8192, 20483, *VOCABULARIES)}  # fmt: skip


def lowered(
    name: str, columns: int, dtype: DType, caps: Caps, rows: int = ROWS
) -> tuple[Call, KernelIR]:  # fmt: skip
    """The launch of an op on so many rows, and its kernel."""
    x, vector = make_spec((rows, columns), dtype, 16), make_spec((columns,), dtype, 16)
    inputs = (x, vector, vector) if name == "norm" else (x,)
    y = make_spec((rows,), i32, 4) if name == "argmax" else x
    return one_launch(name, inputs, y, caps, **OPS.get(name, {}))


def simulated(call: Call, ir: KernelIR, *given: Array) -> Array:
    """The result of a launch, as it is stored; pads hold NaN."""
    *inputs, y = (r.spec for r in call.tensors)
    pairs = zip(given, inputs, strict=True)
    words = [laid_out(value, make_spec(value.shape, s.dtype, 16)) for value, s in pairs]
    words.append(laid_out(None, y))
    simulate(ir, words, parameters(call, ir), call.groups)
    return result(call, words)


def rows_by(name: str, x: Array, dtype: DType, team: Team, log: bool = False) -> Array:
    """The rows of softmax, or indices of argmax, by one team in the simulator."""
    spec = make_spec(x.shape, dtype, 16)
    out = make_spec(x.shape[:1], i32, 4) if name == "argmax" else spec
    module = argmax if name == "argmax" else softmax
    with (
        mock.patch.object(module, "team_of", return_value=team),
        mock.patch.object(argmax, "MANY", 1),
    ):
        attrs = {} if name == "argmax" else {"log": log}
        return simulated(*one_launch(name, (spec,), out, CUDA, **attrs), x)


def softmax_of(x: Array, log: bool = False) -> Array:
    """The result in float64."""
    with np.errstate(all="ignore"):
        shifted = x - np.asarray(x, np.float64).max(-1, keepdims=True)
        e = np.exp(shifted)
        total = e.sum(-1, keepdims=True)
        return np.asarray(shifted - np.log(total) if log else e / total)


def wanted_of(name: str, x: Array, *vectors: Array) -> Array:
    """The result in float64."""
    if name == "softmax":
        return softmax_of(x)
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return np.asarray(y * vectors[0] + vectors[1])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("caps", [CUDA, LARGE, LEAST], ids=["shuffle", "large", "least"])
def test_every_team_is_right(name: str, caps: Caps) -> None:
    teams: set[Team] = set()
    for columns in COLUMNS:
        for dtype in (f32, f16) if columns < 4000 or columns == 20000 else (f32,):
            call, ir = lowered(name, columns, dtype, caps)
            team = dict(call.constants)["team"]
            assert ir.uses_subgroups == team.shuffle == (caps is CUDA)
            assert ir.workgroup == team.threads <= caps.max_workgroup
            assert team.stored or ir.shared_bytes <= 16 << 10
            teams.add(team)
            check(name, call, ir, columns, dtype)
    assert len(teams) > 10
    assert {(t.sure < t.items, t.parted) for t in teams if t.items} == {
        (False, False), (True, False), (True, True),
    }  # fmt: skip
    assert any(not t.items for t in teams) == (caps is LEAST)
    assert any(t.stored for t in teams) == (caps is CUDA and name == "softmax")


LARGE_NUMBERS = (1e5, 3e6, 1e10, -1e10, 1e20, -1e30)


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_a_row_is_right_wherever_it_is(dtype: DType, log: bool) -> None:
    """Registers, shared memory, walked: NaN, infinities, the lowest numbers, parts of items."""
    width = dtype.per_chunk
    for columns in (64 * width, 64 * width * 3 - 5):
        rng = np.random.default_rng(columns)
        x = rng.standard_normal((7 + len(LARGE_NUMBERS), columns)) * 3 + 7
        low = -65504.0 if dtype is f16 else -3e38
        for i, number in enumerate(LARGE_NUMBERS, 7):  # masks, and what dwarfs the rest
            x[i, i % 2 :: 2] = np.clip(number, low, -low)
        x[1, 5], x[2, 9], x[3], x[4], x[4, 70:90], x[5], x[6, 3] = (
            np.nan, np.inf, -np.inf, -np.inf, 1, low, -low,
        )  # fmt: skip
        x = rounded(x.astype(np.float32), dtype)
        items = -(-columns // (64 * width))
        parted = columns % width > 0
        in_registers = Team(64, 128, items, columns // (64 * width), parted, True, 3)
        in_memory = replace(in_registers, stored=True)
        near, wanted = max(dtype.epsilon, 2e-6), softmax_of(x, log)
        stored_as = rounded(wanted.astype(np.float32), dtype)
        wanted = np.where(np.isinf(stored_as), stored_as, wanted)  # past the dtype's range
        for team in (in_registers, in_memory, Team(64, 64, 0, 0, parted, False)):
            got = rows_by("softmax", x, dtype, team, log)
            np.testing.assert_allclose(got, wanted, rtol=near, atol=1e-7 if not log else near)


@pytest.mark.parametrize("shuffle", [True, False], ids=["cuda", "webgpu"])
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
def test_the_first_of_the_largest(dtype: DType, shuffle: bool) -> None:
    """NaN of either sign above all, 0 and -0 alike; unrolled and walked, parts of items."""
    width = dtype.per_chunk
    for columns in (64 * width * 2, 64 * width * 3 - 5):
        x = np.random.default_rng(columns).standard_normal((9, columns))
        x[0, 7], x[0, 17], x[1, 40], x[2], x[2, -1], x[3] = -np.nan, np.nan, np.nan, -np.inf, -7, -9
        x[4, -1], x[5], x[5, 90], x[5, 1], x[6, 100], x[6, 50] = 99, -0.0, 0, -1, np.inf, np.inf
        x[7], x[7, 300:] = -5, -4
        x = rounded(x.astype(np.float32), dtype)
        parted, sure = columns % width > 0, columns // (64 * width)
        for team in (
            Team(64, 128, -(-columns // (64 * width)), sure, parted, shuffle),
            Team(128, 128, 0, 0, parted, shuffle),
        ):
            np.testing.assert_array_equal(rows_by("argmax", x, dtype, team), np.argmax(x, -1))


@pytest.mark.parametrize("shuffle", [True, False], ids=["cuda", "webgpu"])
def test_threads_without_an_item_never_win(shuffle: bool) -> None:
    """Every thread, also past the row, starts with the least number of the type as its maximum."""
    least = np.full((2, 40), np.iinfo(np.int32).min)
    least[1, 7:] += 1
    team = Team(128, 128, 0, 0, False, shuffle)
    np.testing.assert_array_equal(rows_by("argmax", least, i32, team), [0, 7])


def check(name: str, call: Call, ir: KernelIR, columns: int, dtype: DType) -> None:
    """Run it on random numbers far from zero; pads hold NaN."""
    rng = np.random.default_rng(columns)
    x, *vectors = (
        rounded(rng.standard_normal(s) + shift, dtype)
        for s, shift in (((ROWS, columns), 7), ((columns,), 1), ((columns,), 0))
    )
    got = simulated(call, ir, *[x, *vectors][: len(call.tensors) - 1])
    near = max(dtype.epsilon * 4, 2e-5)
    np.testing.assert_allclose(got, wanted_of(name, x, *vectors), rtol=near, atol=near)


def test_teams_hold_rows_in_few_registers() -> None:
    for caps in (CUDA, LARGE, LEAST):
        for columns in range(1, 40000, 37):
            for width in (1, 2, 4, 8):
                team = team_of(columns, width, caps)
                assert team.lanes & (team.lanes - 1) == 0
                assert team.threads <= caps.max_workgroup
                if team.items:
                    items = -(-columns // width)
                    capacity = team.items * team.lanes
                    assert capacity - team.lanes < items <= capacity
                    assert team.items * width <= MOST
                    assert team.sure == team.items - (columns < capacity * width)
                    assert team.parted == (columns % width > 0)
    assert not team_of(40000, 4, CUDA).items
    assert not team_of(8200, 4, LEAST).items


def test_a_row_is_shared_as_its_length_allows() -> None:
    """Whole rows where some team has them whole; a warp as long as one holds the row."""
    for columns, width, lanes, items in (
        *((384, 4, 32, 3), (384, 8, 16, 3), (768, 4, 32, 6), (1024, 8, 32, 4)),
        *((4096, 4, 256, 4), (4096, 8, 256, 2), (5120, 4, 256, 5), (8192, 4, 256, 8)),
        *((16384, 4, 512, 8), (32000, 4, 1024, 8), (1, 4, 2, 1)),
    ):
        team = team_of(columns, width, CUDA)
        assert (team.lanes, team.items) == (lanes, items)
    assert ENOUGH < MOST
    assert team_of(384, 4, CUDA).groups(65536) == 16384


def test_long_rows_share_a_multiprocessor() -> None:
    """Where its shared memory or its registers have room for them."""
    ampere = replace(CUDA, max_shared=163 << 10, arch="sm_80")
    ada = replace(CUDA, max_shared=99 << 10, arch="sm_89")
    for name, columns, dtype, caps, lanes, resident, stored in (
        *(("softmax", 32000, d, CUDA, 512, 3, True) for d in (f16, bf16)),
        ("softmax", 50257, f16, CUDA, 512, 2, True), ("softmax", 100000, f16, CUDA, 1024, 1, True),
        ("softmax", 16384, f16, CUDA, 512, 2, False), ("softmax", 8192, f16, CUDA, 256, 0, False),
        ("softmax", 32000, f32, CUDA, 1024, 0, False), ("softmax", 50257, f32, CUDA, 1024, 1, True),
        ("softmax", 60000, f32, CUDA, 256, 0, False), ("softmax", 32000, f16, ampere, 512, 2, True),
        ("softmax", 32000, f16, ada, 1024, 0, False), ("softmax", 50257, f16, ada, 256, 0, False),
        *(("argmax", 50257, d, CUDA, 512, 3, False) for d in (f16, bf16)),
        ("argmax", 32000, f16, ada, 512, 3, False), ("argmax", 32000, f32, CUDA, 512, 2, False),
        ("argmax", 50257, f32, CUDA, 1024, 1, False), ("argmax", 4096, f16, CUDA, 256, 0, False),
        ("argmax", 100000, f32, CUDA, 256, 0, False), ("argmax", 32000, f16, LARGE, 1024, 0, False),
        ("softmax", 50257, f16, LARGE, 256, 0, False), ("softmax", 0, f16, CUDA, 256, 0, False),
    ):  # fmt: skip
        team = dict(lowered(name, columns, dtype, caps, rows=600)[0].constants)["team"]
        assert (team.lanes, team.resident, team.stored) == (lanes, resident, stored), (name, team)


def test_stored_rows_fit() -> None:
    for memory in (48, 99, 100, 163, 227):
        caps = replace(CUDA, max_shared=memory << 10)
        for columns in range(1, 120000, 997):
            for dtype in (f16, f32):
                call, ir = lowered("softmax", columns, dtype, caps)
                team = dict(call.constants)["team"]
                assert ir.shared_bytes <= caps.max_shared
                if team.stored:
                    groups = (caps.max_shared + RESERVED) // (ir.shared_bytes + RESERVED)
                    assert 1 <= team.resident <= groups


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_masks_of_large_numbers(device: ct.Device, dtype: str) -> None:
    """What was added to hide elements, in part of a row and in all of it."""
    kind = dtype_of(dtype)
    x = np.random.default_rng(1).standard_normal((12, 384)).astype(np.float32)
    most = 65504.0 if dtype == "f16" else 3e38
    for i, number in enumerate(LARGE_NUMBERS):
        x[i, i + 1 :: 2] = x[i + 6] = np.clip(number, -most, most)
    x = rounded(x, kind)
    got = ct.softmax(ct.asarray(x, kind, device)).astype("f32").numpy()
    np.testing.assert_allclose(got, softmax_of(x), rtol=max(kind.epsilon, 2e-6), atol=1e-7)


@pytest.mark.parametrize("columns", [256, 9001])
def test_small_weights_keep_their_digits(device: ct.Device, columns: int) -> None:
    """However far below the largest an element is, its weight is within 6 ulp."""
    x = np.linspace(-75, 0, 16 * columns, dtype=np.float32)
    x = np.random.default_rng(1).permutation(x).reshape(16, columns)
    x[:, 7] = 0  # what is taken off is exact
    got = ct.softmax(ct.asarray(x, device=device)).numpy()
    np.testing.assert_allclose(got, softmax_of(x), rtol=6 * 2.0**-23, atol=0)


@pytest.mark.parametrize("columns", [32000, 50257])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_long_rows(device: ct.Device, dtype: str, columns: int) -> None:
    """Rows of vocabularies; NaN, infinities; of equal elements the first."""
    x = np.random.default_rng(columns).standard_normal((6, columns)).astype(np.float32)
    x[1, -1], x[2, 700], x[3, :-1], x[4, 9], x[5, 5], x[5, -2] = (
        np.nan, np.inf, -np.inf, -np.inf, 300, 300,
    )  # fmt: skip
    kind = dtype_of(dtype)
    x = rounded(x, kind)
    given = ct.asarray(x, kind, device)
    got = ct.softmax(given).astype("f32").numpy()
    np.testing.assert_allclose(got, softmax_of(x), rtol=max(kind.epsilon, 2e-6), atol=1e-7)
    with mock.patch.object(argmax, "MANY", 1):
        np.testing.assert_array_equal(ct.argmax(given, -1).numpy(), np.argmax(x, -1))


@pytest.mark.parametrize("kinds", [(f16, f32), (f32, f16), (bf16, f32)], ids=str)
@pytest.mark.parametrize("few", [norm.FEW, 0], ids=["few", "many"])
def test_vectors_of_another_width_than_rows(kinds: tuple[DType, DType], few: int) -> None:
    """Rows are still read by chunks; 1280 of 16 bits are five of each lane of a warp."""
    own, theirs = kinds
    rng = np.random.default_rng(0)
    for columns in (45, 96, 1000, 1280, 2560):
        specs = tuple(make_spec((columns,), theirs, 16) for _ in range(2))
        x = make_spec((ROWS, columns), own, 16)
        with mock.patch.object(norm, "FEW", few):
            call, ir = one_launch("norm", (x, *specs), x, CUDA, **NORM)
        known = dict(call.constants)
        assert known["chunk"] and known["ahead"] == (few > 0)
        if columns == 1280 and own is not f32:
            assert (known["team"].lanes, known["team"].items) == (32, 5)
        given = [rng.standard_normal(shape) for shape in ((ROWS, columns), columns, columns)]
        given[0][0, -1] *= 1000  # an outlier, and a row far from zero
        given[0][1] += 1000
        got = simulated(call, ir, *given)
        rounded_to = [rounded(v, k) for v, k in zip(given, (own, theirs, theirs), strict=True)]
        np.testing.assert_allclose(
            got, wanted_of("norm", *rounded_to), rtol=4 * own.epsilon, atol=8 * own.epsilon + 1e-5
        )


def chain_of_norm(rows: int, how: str) -> KernelIR:
    """A layer norm on CUDA: of x plus a vector, with a computed weight, or of rows of a table."""
    n, ids = 45, make_spec((rows,), i32, 4)
    x, vector, table = (make_spec(shape, f32, 16) for shape in ((rows, n), (n,), (7, n)))
    given = (ids, table, vector, vector) if how == "table" else (x, vector, vector, vector)
    before = {"table": ("embedding", (0, 1)), "weight": ("add", (1, 2)), "sum": ("add", (0, 1))}
    operands = {"table": (4, 2, 3), "weight": (0, 4, 3), "sum": (4, 2, 3)}[how]
    steps = (step_of(*before[how], "f32"), step_of("norm", operands, "f32", **NORM))
    return one_launch("fused", given, x, CUDA, steps=steps)[1]


def test_vectors_are_read_before_the_wait() -> None:
    """They alone, and where the launch leaves the next one room: that is let in first of all."""
    _, ir = lowered("norm", 1024, bf16, CUDA, rows=4 * MULTIPROCESSORS)
    assert ir.early == (1, 2)
    before, wait, behind = emit_ptx(ir, CUDA.arch).partition("griddepcontrol.wait;")
    assert "griddepcontrol.launch_dependents;" in before.partition("ld.global")[0]
    assert wait and "ld.global" in before and "ld.global" in behind
    _, ir = lowered("norm", 1024, bf16, CUDA, rows=4 * MULTIPROCESSORS + 1)
    assert not ir.early and "launch_dependents" not in ir.ops
    assert chain_of_norm(3, "sum").early == (2, 3)
    for how in ("weight", "table"):
        assert not chain_of_norm(3, how).early


@needs_ptxas
@pytest.mark.parametrize("name", [*OPS, "argmax"])
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_no_kernel_spills(name: str, dtype: DType, tmp_path: Path) -> None:
    each = [(columns, 600) for columns in ASSEMBLED[name]]
    few = [(columns, 3) for columns in (*ASSEMBLED[name], 1280)] if name == "norm" else []
    for columns, rows in each + few:
        _, ir = lowered(name, columns, dtype, CUDA, rows=rows)
        report, _ = assemble(emit_ptx(ir, CUDA.arch), CUDA.arch, tmp_path)
        assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"], (columns, report)


@needs_ptxas
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_no_norm_with_wider_vectors_spills(dtype: DType, tmp_path: Path) -> None:
    """Threads of larger groups hold fewer elements, of rows of 20480 and 36864."""
    for columns in (640, 1280, 5120, 10240, 20480, 36864):
        x, vector = make_spec((600, columns), dtype, 16), make_spec((columns,), f32, 16)
        _, ir = one_launch("norm", (x, vector, vector), x, CUDA, **NORM)
        report, _ = assemble(emit_ptx(ir, CUDA.arch), CUDA.arch, tmp_path)
        assert re.findall(r"(\d+) bytes spill", report) == ["0", "0"], (columns, report)
