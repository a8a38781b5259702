"""Barriers, boxes, warpgroups and roles: what sm_90a alone has, one operation at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, narrow, u32, widen
from centella.emit.program import program_of
from centella.emit.ptx import emit_ptx
from centella.errors import LimitError, SimulationError, TraceError
from centella.lang import In, KernelIR, Out, ptx, storage
from centella.lang.ir import BARRIERS, HOPPER
from centella.simulator.run import simulate
from centella.specs import Caps
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.support.lang_common import Tensor, assert_refused, copies, empty, record, tensor
from tests.support.lang_common import parameters as bits

SIZES = {"rows": 70, "columns": 72, "pitch": 72, "more": 0, "batches": 1}
HALVES = pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
WG = 128


def parameters(*names: str) -> list[Any]:
    return [lang.parameter(n, u32) for n in names]


def boxes(x: In[storage], y: Out[storage], z: Out[f32], *, along: bool, fault: str = "") -> None:
    """One role copies a box in; the other multiplies it with itself and copies it out again."""
    rows, columns, pitch, more, batches = parameters(*SIZES)
    tile = ptx.SharedTile(x.dtype, (2, 64, 64))
    source = ptx.TensorMap(x, tile, (columns, rows, batches), (pitch, more))
    target = ptx.TensorMap(y, tile, (columns, rows, batches), (pitch, more))
    full, done = ptx.Barriers(2), ptx.Barriers(1)
    thread = lang.local_id()
    with lang.if_(thread == 0):
        full.init(0, 1)
        full.init(1, 1)
        done.init(0, 1)
        ptx.init_fence()
    lang.barrier()
    with ptx.role(0, WG, registers=40), lang.if_(thread == 0):
        for stage in range(2):
            full.expect(stage, 8192 if fault != "bytes" else 8208)
            if fault == "arrivals":
                full.arrive(stage)
            ptx.tma_load(source, (8 * stage, 4, 0), stage, full, stage)
            if fault == "overwritten":
                ptx.tma_load(source, (8, 4, 0), stage, full, stage)
        if fault != "never":
            done.wait(0, 0)
        ptx.tma_store(target, (0, 0, 0), 0)
        ptx.tma_store(target, (64, 0, 0), 1)
        ptx.tma_store_commit()
        ptx.tma_store_wait()
    with ptx.role(WG, WG, registers=232):
        sums = ptx.Fragment(f32, (64, 64))
        if fault != "early":
            full.wait(0, 0)
            full.wait(1, 0 if fault != "phase" else 1)
        ptx.wgmma_fence()
        for k in range(0, 64, 16):
            at = tile.start(0, k, 1) if along else tile.start(k, 0, 1)
            ptx.wgmma(sums, tile, at, tile, at, a_along_k=along, b_along_k=along,
                      accumulate=k > 0)  # fmt: skip
        ptx.wgmma_commit()
        ptx.wgmma_wait()
        for register in range(32):
            row, column = sums.place(register)
            z[row * 64 + column] = sums[register]
        factor, more = ptx.Fragment(x.dtype, (64, 16)), ptx.Fragment(f32, (64, 64))
        for register in range(4):  # the first 16 columns, as they lie
            factor[register] = (sums[2 * register], sums[2 * register + 1])
        ptx.wgmma_fence()
        ptx.wgmma_held(more, factor, tile, tile.start(0, 0, 1), b_along_k=along, accumulate=False)
        ptx.wgmma_commit()
        ptx.wgmma_wait()
        for register in range(32):
            row, column = more.place(register)
            z[4096 + row * 64 + column] = more[register]
        z[8192 + thread % WG] = lang.shuffle_xor(lang.cast(thread, f32), 3)
        row = ptx.warpgroup_uniform(ptx.warpgroup())
        with lang.if_(thread % WG < 8):
            tile.store(tile.chunk(row, thread % WG), [1.0, 2.0] * 4)
        if fault != "unfenced":
            ptx.async_fence()
        ptx.warpgroup_barrier()
        with lang.if_(thread == WG):
            done.arrive(0)


def case(dtype: DType, along: bool = True, fault: str = "") -> tuple[KernelIR, dict[str, Tensor]]:
    rng = np.random.default_rng(1)
    tensors = {
        "x": tensor(rng.standard_normal(70 * 72), dtype),
        "y": empty((70 * 72,), dtype),
        "z": empty((2 * 64 * 64 + WG,), f32),
    }
    return record(boxes, tensors, 2 * WG, along=along, fault=fault), tensors


def common(x: In[f32], y: Out[f32], *, shared: bool) -> None:
    """Each warpgroup loads a number of its own, or each thread."""
    with ptx.role(0, 2 * WG):
        mine = ptx.warpgroup() if shared else lang.local_id() % 2
        which = ptx.warpgroup_uniform(lang.cast(x[mine], u32))
        for _ in lang.range(which):
            ptx.warpgroup_barrier()  # which needs uniform control flow
        y[lang.local_id()] = lang.cast(which, f32)


def test_a_number_that_a_warpgroup_has_in_common() -> None:
    tensors = {"x": tensor(np.array([3.0, 5.0]), f32), "y": empty((2 * WG,), f32)}
    ir = record(common, tensors, 2 * WG, shared=True)
    simulate(ir, [t.words for t in tensors.values()], bits(ir, tensors), 1)
    assert tensors["y"].numpy().tolist() == [3.0] * WG + [5.0] * WG
    other = record(common, tensors, 2 * WG, shared=False)
    with pytest.raises(SimulationError, match="a value differs within a warpgroup"):
        simulate(other, [t.words for t in tensors.values()], bits(other, tensors), 1)


def phases(y: Out[u32]) -> None:
    """The first warp waits for a phase that is over, the others for the one before the first."""
    there, me = ptx.Barriers(2), lang.local_id()
    with lang.if_(me == 0):
        there.init(0, 1)
        there.init(1, 1)
        ptx.init_fence()
    lang.barrier()
    with lang.if_(me == 0):
        there.arrive(0)
    with ptx.role(0, WG):
        other = lang.select(me < 32, lang.const(0, u32), 1)
        there.wait(other, other)
        y[me] = me


def test_warps_of_a_warpgroup_wait_for_phases_of_their_own() -> None:
    tensors = {"y": empty((WG,), u32)}
    ir = record(phases, tensors, WG)
    simulate(ir, [t.words for t in tensors.values()], bits(ir, tensors), 1)
    assert tensors["y"].numpy().tolist() == list(range(WG))


@HALVES
@pytest.mark.parametrize("along", [True, False], ids=["MK", "KM"])
def test_boxes_and_products(dtype: DType, along: bool) -> None:
    ir, tensors = case(dtype, along)
    tensors["y"].words[:] = tensors["x"].words  # the store covers a part
    results = copies(tensors)
    simulate(ir, [t.words for t in results.values()], bits(ir, results, SIZES), 1)
    x = tensors["x"].numpy().astype(np.float32).reshape(70, 72)
    box = np.zeros((64, 64), np.float32)
    box[:, :] = x[4:68, 8:72]
    factor = box if along else box.T
    once, again = results["z"].numpy()[:8192].reshape(2, 64, 64)
    np.testing.assert_allclose(once, factor @ factor.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(results["z"].numpy()[8192:], (np.arange(WG) + WG) ^ 3)
    rounded = widen(narrow(once[:, :16], dtype), dtype)
    np.testing.assert_allclose(again, rounded @ factor.T[:16], rtol=1e-5, atol=1e-3)
    out = results["y"].numpy().astype(np.float32).reshape(70, 72)
    np.testing.assert_array_equal(out[0, :64], x[4, :64])
    np.testing.assert_array_equal(out[1, 1:64:2], np.full(32, 2.0))
    np.testing.assert_array_equal(out[2:64, :64], x[6:68, :64])
    np.testing.assert_array_equal(out[:64, 64:], x[4:68, 8:16])
    np.testing.assert_array_equal(out[64:], x[64:])


FAULTS = {
    "bytes": "deadlock",
    "phase": "deadlock",
    "early": "read before a thread has waited for its box",
    "overwritten": "written before a thread has waited for its box",
    "never": "read before a thread has waited for its box",
    "unfenced": "stored without ptx.async_fence",
    "arrivals": "more arrivals than the barrier waits for",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_reports(fault: str) -> None:
    ir, tensors = case(f16, fault=fault)
    with pytest.raises(SimulationError, match=FAULTS[fault]):
        simulate(ir, [t.words for t in tensors.values()], bits(ir, tensors, SIZES), 1)


def again(x: In[f16], y: Out[u32], *, fenced: bool) -> None:
    """A box comes where all threads have stored."""
    tile, there, thread = ptx.SharedTile(f16, (64, 64)), ptx.Barriers(1), lang.local_id()
    source = ptx.TensorMap(x, tile, parameters("columns", "rows"), parameters("pitch"))
    with lang.if_(thread == 0):
        there.init(0, 1)
        ptx.init_fence()
    tile.store(tile.chunk(thread % 64, thread // 64), [2.0] * 8)
    if fenced:
        ptx.async_fence()
    lang.barrier()
    with lang.if_(thread == 0):
        there.expect(0, 8192)
        ptx.tma_load(source, (0, 0), 0, there, 0)
    there.wait(0, 0)
    y.store(thread * 4, tile.memory.load_chunk(thread))


def test_the_simulator_reports_a_box_over_what_was_stored() -> None:
    for fenced in (True, False):
        tensors = {"x": tensor(np.ones(70 * 72), f16), "y": empty((4 * WG,), u32)}
        ir = record(again, tensors, WG, fenced=fenced)
        words, params = [t.words for t in tensors.values()], bits(ir, tensors, SIZES)
        if fenced:
            simulate(ir, words, params, 1)
            assert (tensors["y"].numpy() == 0x3C003C00).all()
            continue
        with pytest.raises(SimulationError, match="a box comes here, stored without"):
            simulate(ir, words, params, 1)


def panelled(x: In[f16], y: Out[u32], *, whole: bool) -> None:
    """Four panels of a box, from the second panel of its tensor and row 60 on."""
    tile, there, thread = ptx.SharedTile(f16, (2, 16, 256)), ptx.Barriers(1), lang.local_id()
    columns, rows, batches, pitch, more = parameters("columns", "rows", "batches", "pitch", "more")
    source = ptx.TensorMap(x, tile, (columns, rows, batches), (pitch, more), whole=whole)
    with lang.if_(thread == 0):
        there.init(0, 1)
        ptx.init_fence()
        there.expect(0, 8192)
        ptx.tma_load(source, (64, 60, 1), 1, there, 0)
    lang.barrier()
    there.wait(0, 0)
    for base in range(0, 512, WG):
        at = thread + base
        chunk = tile.chunk(at // 32, at % 32, 1)
        y.store(at * 4, tile.memory.load_chunk(chunk))


def test_panels_come_as_one_copy() -> None:
    """Rows and panels that the tensor has not are zeros; so it is with a copy a panel."""
    sizes = {"rows": 70, "columns": 256, "pitch": 264, "more": 70 * 264, "batches": 2}
    x = np.random.default_rng(0).standard_normal((2, 70, 264))
    for whole in (False, True):
        tensors = {"x": tensor(x.reshape(-1), f16), "y": empty((4 * 512,), u32)}
        ir = record(panelled, tensors, WG, whole=whole)
        assert [op for op, *_ in ir.body].count("tma_load") == (1 if whole else 4)
        simulate(ir, [t.words for t in tensors.values()], bits(ir, tensors, sizes), 1)
        got = tensors["y"].words.view(np.float16).reshape(16, 256)
        wanted = np.zeros((16, 256), np.float16)
        wanted[:10, :192] = x[1, 60:, 64:256]
        np.testing.assert_array_equal(got, wanted)
    with pytest.raises(SimulationError, match="whole panels of 64 elements, got 250"):
        words = bits(ir, tensors, sizes | {"columns": 250})
        simulate(ir, [t.words for t in tensors.values()], words, 1)


@needs_ptxas
def test_panels_assemble(tmp_path: Path) -> None:
    tensors = {"x": empty((70 * 264,), f16), "y": empty((4 * 512,), u32)}
    text = assemble_clean(record(panelled, tensors, WG, whole=True), "sm_90a", tmp_path)
    assert "cp.async.bulk.tensor.4d" in text


@pytest.mark.parametrize("name", ["x", "y"])
def test_boxes_stay_within_their_argument(name: str) -> None:
    """Whatever extents a map has: rows that memory has not are neither read nor written."""
    ir, tensors = case(f16)
    words = {n: t.words[: 30 * 36] if n == name else t.words for n, t in tensors.items()}
    with pytest.raises(SimulationError, match=f"'{name}' word .* out of bounds, it has 1080 words"):
        simulate(ir, list(words.values()), bits(ir, tensors, SIZES), 1)


@pytest.mark.parametrize(
    "sizes", [{"pitch": 73}, {"rows": 0}, {"batches": 2, "more": 100}], ids=str
)
def test_maps_that_the_driver_would_not_make(sizes: dict[str, int]) -> None:
    ir, tensors = case(f16)
    words = bits(ir, tensors, SIZES | sizes)
    with pytest.raises(SimulationError, match="multiples of 16 bytes, got"):
        simulate(ir, [t.words for t in tensors.values()], words, 1)


def test_the_case_covers_every_operation() -> None:
    ir, _ = case(f16)
    elsewhere = {"mbar_arrive_at", "tma_multicast", "bulk_load"}
    assert {s[0] for s in ir.body} >= (HOPPER | BARRIERS) - elsewhere


def neighbours(x: In[storage], y: Out[u32], *, nbytes: int = 48, waited: bool = True) -> None:
    """Words from the 16 bytes on that element 13 is in, and where in them it is."""
    memory, there, t = lang.shared(u32, 64), ptx.Barriers(1), lang.local_id()
    with lang.if_(t == 0):
        there.init(0, 1)
        ptx.init_fence()
    lang.barrier()
    with lang.if_(t == 0):
        there.expect(0, nbytes)
        ptx.bulk_load(x, 13, nbytes, memory, 4, there, 0)
    if waited:
        there.wait(0, 0)
    y[t] = lang.select(t < 12, memory[4 + t % 12], x.within_chunk(13))
    there.wait(0, 0)


def neighbours_case(dtype: DType, **options: Any) -> tuple[KernelIR, dict[str, Tensor]]:
    values = np.random.default_rng(0).standard_normal(30)  # the last 16 bytes have 12
    tensors = {"x": tensor(values, dtype), "y": empty((32,), u32)}
    return record(neighbours, tensors, 32, **options), tensors


@HALVES
def test_neighbouring_bytes_come(dtype: DType, tmp_path: Path) -> None:
    ir, tensors = neighbours_case(dtype)
    simulate(ir, [t.words for t in tensors.values()], bits(ir, tensors), 1)
    got = tensors["y"].bits()
    np.testing.assert_array_equal(got[:11], tensors["x"].words[4:15])
    assert (got[12:] == 5).all()
    text = emit_ptx(ir, "sm_90a")
    assert "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in text


@pytest.mark.parametrize(
    ("name", "text"), [("y", "'y': out, rank 1"), ("grid", "'grid': in, rank 2")]
)
def test_neighbouring_bytes_are_of_one_axis_and_read(name: str, text: str) -> None:
    def wrong(grid: In[u32, 2], y: Out[u32]) -> None:
        memory, there = lang.shared(u32, 16), ptx.Barriers(1)
        ptx.bulk_load({"grid": grid, "y": y}[name], 0, 16, memory, 0, there, 0)

    tensors = {"grid": empty((4, 4), u32), "y": empty((32,), u32)}
    with pytest.raises(TraceError, match=f"reads an In argument of rank 1, got {text}"):
        record(wrong, tensors, 32)


@needs_ptxas
def test_neighbouring_bytes_assemble(tmp_path: Path) -> None:
    assemble_clean(neighbours_case(f16)[0], "sm_90a", tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"waited": False}, "read before a thread has waited for its box"),
        ({"nbytes": 40}, "copies are of multiples of 16 bytes, got 40"),
        ({"nbytes": 64}, "'x' word 19 is out of bounds, it has 16"),
    ],
)
def test_the_simulator_reports_of_neighbouring_bytes(options: dict[str, Any], text: str) -> None:
    ir, tensors = neighbours_case(f16, **options)
    with pytest.raises(SimulationError, match=text):
        simulate(ir, [t.words for t in tensors.values()], bits(ir, tensors), 1)


@needs_ptxas
@HALVES
@pytest.mark.parametrize("along", [True, False], ids=["MK", "KM"])
def test_texts_assemble(dtype: DType, along: bool, tmp_path: Path) -> None:
    ir, _ = case(dtype, along)
    text = assemble_clean(ir, "sm_90a", tmp_path)
    assert re.search(r"\.param \.align 64 \.b8 params", text) and ".minnctapersm 1" in text


def test_other_targets_refuse() -> None:
    ir, _ = case(f16)
    with pytest.raises(TraceError, match="needs sm_90a, got sm_80"):
        emit_ptx(ir, "sm_80")
    with pytest.raises(LimitError, match="only NVIDIA GPUs"):
        program_of(ir, Caps("wgsl", max_shared=48 << 10))


def test_the_layout_of_a_tile_is_that_of_its_map_and_descriptor() -> None:
    """One swizzle; the array on the pattern's own boundary; rows and panels as they lie."""
    for along in (True, False):
        ir, _ = case(f16, along)
        assert [m.swizzle for m in ir.maps] == [128, 128] and ir.shared[0].align == 1024
        a, b, _ = next(s[3] for s in ir.body if s[0] == "wgmma")
        assert a == b and a.swizzle == 128 and a.stride == 1024 and a.along_k is along
        assert a.leading == (16 if along else 8192)


def sums() -> ptx.Fragment:
    return ptx.Fragment(f32, (64, 64))


def tile(**more: Any) -> ptx.SharedTile:
    return ptx.SharedTile(f16, (64, 64), **more)


def pending() -> ptx.Fragment:
    total, factor = sums(), tile()
    ptx.wgmma(total, factor, factor.start(0, 0), factor, factor.start(0, 0), accumulate=False)
    return total


def read_pending() -> None:
    total = pending()
    ptx.wgmma_commit()
    total[0] + 1


def left_pending() -> None:
    total, factor = sums(), tile()
    total.fill(0.0)
    at = factor.start(0, 0)
    for _ in lang.range(4):
        ptx.wgmma_wait(0)
        total[0] + 1
        ptx.wgmma(total, factor, at, factor, at)
        ptx.wgmma_commit()


def lend(factor: ptx.Fragment) -> ptx.Fragment:
    ptx.wgmma_held(sums(), factor, tile(), 0, accumulate=False)
    return factor


def read_lent() -> None:
    factor = ptx.Fragment(f16, (64, 16))
    factor.fill(0.0)
    lend(factor)[0] = (1.0, 2.0)


def in_role(wrong: Callable[[], Any]) -> Callable[[], None]:
    def inside() -> None:
        with ptx.role(0, WG):
            wrong()

    return inside


def set_outside() -> None:
    count = lang.var(0, uniform=True)
    with ptx.role(0, WG):
        count.set(1)


def diverge() -> None:
    with lang.if_(lang.local_id() < 3):
        pending()


def meet_in_warps() -> None:
    with ptx.role(32, 64):
        ptx.warpgroup_barrier()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "pending": (read_pending, "read or written while a wgmma on it is pending"),
    "filled": (lambda: pending().fill(0.0), "read or written while a wgmma on it is pending"),
    "left": (left_pending, "a loop reads a Fragment that a wgmma at its end leaves pending"),
    "divergent": (diverge, "control flow that may differ by thread"),
    "shape": (lambda: ptx.Fragment(f32, (64, 12)), "in eights"),
    "narrow": (lambda: ptx.wgmma(ptx.Fragment(f32, (16, 8)), tile(), 0, tile(), 0), "sums of f32"),
    "pattern": (lambda: ptx.wgmma(sums(), tile(swizzle=0), 0, tile(), 0), "whose swizzle is a"),
    "barrier": (in_role(lang.barrier), "a barrier inside a ptx.role"),
    "nested": (in_role(in_role(lambda: None)), "a role inside a ptx.role"),
    "uniform": (set_outside, "set in a role, which not all threads run"),
    "threads": (lambda: ptx.role(0, 100).__enter__(), "whole warps of 32"),
    "beyond": (lambda: ptx.role(WG, 2 * WG).__enter__(), "whole warps of 32"),
    "warps": (lambda: ptx.role(32, 32, registers=40).__enter__(), "those of whole warpgroups"),
    "few meet": (meet_in_warps, "in a ptx.role of some warps"),
    "registers": (lambda: ptx.role(0, WG, registers=50).__enter__(), "in eights"),
    "outside": (ptx.warpgroup, "for the inside of a ptx.role"),
    "barriers": (lambda: ptx.Barriers(0), "a Python number of them"),
    "number": (lambda: ptx.Barriers(2).arrive(2), "there are 2 barriers"),
    "held": (lambda: lend(sums()), r"a factor \(64, 16\) and a tile of its dtype"),
    "empty": (lambda: lend(ptx.Fragment(f16, (64, 16))), "before it was filled or loaded"),
    "lent": (read_lent, "read or written while a wgmma on it is pending"),
    "groups": (lambda: ptx.wgmma_wait(-1), "a Python number of groups"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert_refused(*REFUSED[name], 2 * WG)


def test_maps_refuse_what_they_cannot_describe() -> None:
    def kernel(x: In[f16], s: Out[f16], y: Out[f32], *, which: str) -> None:
        n, pitch = parameters("n", "pitch")
        shared_tile = tile()
        if which == "number":
            ptx.TensorMap(x, shared_tile, (n, 3), (pitch,))
        elif which == "strides":
            ptx.TensorMap(x, shared_tile, (n, n), (pitch, pitch))
        elif which == "mode":
            of_s = ptx.TensorMap(s, shared_tile, (n, n), (pitch,))
            ptx.tma_load(of_s, (0, 0), 0, ptx.Barriers(1), 0)
        elif which == "dtype":
            ptx.TensorMap(x, ptx.SharedTile(bf16, (64, 64)), (n, n), (pitch,))
        elif which == "panels":
            wide = ptx.SharedTile(f16, (64, 128))
            ptx.TensorMap(x, wide, (n, n), (pitch,), rows=32, whole=True)
        elif which == "rows":
            ptx.TensorMap(x, ptx.SharedTile(f16, (264, 64)), (n, n), (pitch,))
        elif which in ("end", "before", "eights"):
            half = ptx.TensorMap(x, shared_tile, (n, n), (pitch,), rows=32)
            row = {"end": shared_tile.rows - 24, "before": -8, "eights": 4}[which]
            ptx.tma_load(half, (0, 0), 0, ptx.Barriers(1), 0, row=row)
        else:
            tensor_map = ptx.TensorMap(x, shared_tile, (n, n), (pitch,))
            if which == "coordinates":
                ptx.tma_load(tensor_map, (0,), 0, ptx.Barriers(1), 0)
            else:
                ptx.tma_store(tensor_map, (0, 0))
        y[lang.local_id()] = 0.0

    texts = {
        "number": "u32 launch parameters", "strides": "a stride less", "mode": "no Out argument",
        "panels": "in boxes of all 64 rows, .* got 32 rows, 2 extents",
        "dtype": "an argument of rank 1 and bf16", "rows": "at most 256 rows",
        "coordinates": "as many coordinates", "store": "cannot be written",
        "end": "a box of 32 rows ends within a stage of 64, got row 40",
        "before": "a box of 32 rows ends within a stage of 64, got row -8",
        "eights": "a swizzle repeats after 8 rows, got 4",
    }  # fmt: skip
    tensors = {"x": empty((64,), f16), "s": empty((64,), f16), "y": empty((128,), f32)}
    for which, text in texts.items():
        with pytest.raises(TraceError, match=text):
            record(kernel, tensors, WG, which=which)
