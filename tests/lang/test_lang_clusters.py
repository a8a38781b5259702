"""Clusters, multicast, `stmatrix`, dependent launches: what sm_90 and later add, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.dtypes import DType, bf16, f16, f32, u32
from centella.emit.program import program_of
from centella.emit.ptx import emit_ptx
from centella.errors import LimitError, SimulationError, TraceError
from centella.lang import In, KernelIR, Out, ptx, storage
from centella.lang.ir import BARRIERS, FROM_90
from centella.simulator.run import simulate
from tests.emit.test_lang_ptx import assemble_clean, execute, needs_ptxas
from tests.support.fake_cuda import FakeCuda
from tests.support.lang_common import (
    ORDERS,
    Tensor,
    assert_refused,
    empty,
    on_simulator,
    parameters,
    record,
    tensor,
)

Array = np.ndarray[Any, Any]
HALVES = pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
WG = 128
STEPS = 5

# -- groups that meet, and read each other's shared memory -----------------------------------------


def meetings(x: In[u32], y: Out[u32], *, size: int, fault: str = "") -> None:
    """Of each word the sum over the cluster, plus the rank; twice, in the same memory."""
    ptx.cluster(size)
    shared, t = lang.shared(u32, 64), lang.local_id()
    rank = ptx.cluster_rank()
    for part in range(2):
        shared[t] = x[lang.group_id() * 64 + t] + part
        if fault == "unordered":
            lang.barrier()
        else:
            ptx.cluster_arrive(relaxed=fault == "relaxed")
            if fault == "twice":
                ptx.cluster_arrive()
            if fault in ("behind", "unwaited"):
                lang.barrier()
            if fault == "behind":
                shared[t] = x[t]
            if fault != "unwaited":
                ptx.cluster_wait()
        if fault == "unarrived":
            ptx.cluster_wait()
        total = lang.var(rank)
        for other in range(ptx.cluster_size()):
            total += ptx.cluster_load(shared, t ^ 1, other)
        y[(lang.group_id() * 2 + part) * 64 + t] = total
        if fault == "rank":
            y[(lang.group_id() * 2 + part) * 64 + t] = ptx.cluster_load(shared, t, total)
        if fault == "beyond":
            y[(lang.group_id() * 2 + part) * 64 + t] = ptx.cluster_load(shared, t + 1, rank)
        if fault == "overwritten":
            lang.barrier()
        if not ((fault == "overwritten" and part == 0) or (fault == "left" and part == 1)):
            ptx.cluster_arrive()
            ptx.cluster_wait()
    ptx.launch_dependents()


def met(size: int, groups: int, fault: str = "") -> tuple[KernelIR, dict[str, Tensor]]:
    x = np.random.default_rng(size).integers(0, 1 << 20, groups * 64).astype(np.uint32)
    tensors = {"x": tensor(x, u32), "y": empty((groups * 128,), u32)}
    return record(meetings, tensors, 64, size=size, fault=fault), tensors


def sums_of(x: Array, size: int) -> Array:
    """What `meetings` gives."""
    each = x.reshape(-1, size, 1, 64) + np.arange(2, dtype=np.uint32)[:, None]
    total = each.sum(1, dtype=np.uint32, keepdims=True)[..., np.arange(64) ^ 1]
    return np.asarray((total + np.arange(size, dtype=np.uint32)[:, None, None]).reshape(-1))


@pytest.mark.parametrize(("size", "groups"), [(2, 6), (3, 3), (8, 8)])
def test_a_cluster_meets_and_reads(size: int, groups: int) -> None:
    ir, tensors = met(size, groups)
    for order in ORDERS:
        on_simulator(ir, tensors, groups, order=order)
        wanted = sums_of(tensors["x"].bits(), size)
        np.testing.assert_array_equal(tensors["y"].bits(), wanted)
    tensors["y"].words[:] = 0
    on_simulator(ir, tensors, groups, check=False)
    np.testing.assert_array_equal(tensors["y"].bits(), wanted)


@pytest.mark.devices("cpu", "simulator", "cuda")
def test_a_cluster_on_a_device(device: ct.Device) -> None:
    x = np.random.default_rng(1).integers(0, 1 << 20, 8 * 64).astype(np.uint32)
    kernel = ct.kernel(workgroup=64)(meetings)
    check_launches(device, kernel, x, sums_of(x, 4), groups=8, size=4)


def check_launches(device: ct.Device, kernel: Any, x: Array, wanted: Array, **launch: Any) -> None:
    """Run a kernel at once, and replayed: in a graph, where launches overlap."""

    def run(x: ct.Tensor) -> ct.Tensor:
        y = ct.zeros(wanted.shape, "u32", device)
        kernel(x, y, **launch)
        return y

    given = ct.asarray(x, device=device)
    np.testing.assert_array_equal(run(given).numpy(), wanted)
    replay = device.compile(run, given)
    for _ in range(2):
        np.testing.assert_array_equal(replay(given).numpy(), wanted)


FAULTS = {
    "unordered": "nobody wrote it|no cluster barrier between",
    "relaxed": "no cluster barrier between",
    "twice": "cluster_arrive twice",
    "behind": "race: read here, written by thread .* with no cluster barrier between",
    "unwaited": "nobody wrote it|no cluster barrier between",
    "unarrived": "cluster_wait without cluster_arrive",
    "rank": "a cluster of 2 has no rank",
    "beyond": "shared array 0 word 64 is out of bounds",
    "overwritten": "race: read here, written by thread .* with no cluster barrier between",
    "left": "the group of rank . has ended",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_reports(fault: str) -> None:
    ir, tensors = met(2, 2, fault)
    with pytest.raises(SimulationError, match=FAULTS[fault]):
        on_simulator(ir, tensors, 2)


@pytest.mark.parametrize("meet", [True, False])
def test_what_another_group_reads_is_kept(meet: bool) -> None:
    def kernel(y: Out[u32]) -> None:
        ptx.cluster(2)
        shared, t, total = lang.shared(u32, 32), lang.local_id(), lang.var(0)
        shared[t] = t
        ptx.cluster_arrive()
        ptx.cluster_wait()
        with lang.if_(ptx.cluster_rank() == 1):
            total += ptx.cluster_load(shared, t, 0)
        if meet:
            ptx.cluster_arrive()
            ptx.cluster_wait()
        with lang.if_(ptx.cluster_rank() == 0):
            shared[t] = 7
        ptx.cluster_arrive()
        y[lang.global_id()] = total
        ptx.cluster_wait()

    tensors = {"y": empty((64,), u32)}
    ir = record(kernel, tensors, 32)
    if not meet:
        with pytest.raises(SimulationError, match="written here, read by another group with no"):
            on_simulator(ir, tensors, 2)
        return
    on_simulator(ir, tensors, 2)
    wanted = np.concatenate([np.zeros(32), np.arange(32)])
    np.testing.assert_array_equal(tensors["y"].bits(), wanted)


def test_writes_between_arriving_and_waiting_count_as_earlier() -> None:
    """A race on a GPU, which the simulator does not see."""

    def kernel(y: Out[u32]) -> None:
        ptx.cluster(2)
        shared, t = lang.shared(u32, 32), lang.local_id()
        ptx.cluster_arrive()
        shared[t] = t + ptx.cluster_rank()
        ptx.cluster_wait()
        y[lang.global_id()] = ptx.cluster_load(shared, t, 1 - ptx.cluster_rank())
        ptx.cluster_arrive()
        ptx.cluster_wait()

    tensors = {"y": empty((64,), u32)}
    ir = record(kernel, tensors, 32)
    on_simulator(ir, tensors, 2)
    wanted = np.concatenate([np.arange(32) + 1, np.arange(32)])
    np.testing.assert_array_equal(tensors["y"].bits(), wanted)


@pytest.mark.parametrize(
    ("alone", "text"),
    [(True, "deadlock: nobody gets further"), (False, "ends between cluster_arrive and")],
)
def test_groups_that_do_not_meet(alone: bool, text: str) -> None:
    def kernel(y: Out[u32]) -> None:
        ptx.cluster(2)
        y[lang.global_id()] = 0
        with lang.if_((ptx.cluster_rank() == 0) | (not alone)):
            ptx.cluster_arrive()
            if alone:
                ptx.cluster_wait()

    tensors = {"y": empty((64,), u32)}
    with pytest.raises(SimulationError, match=text):
        on_simulator(record(kernel, tensors, 32), tensors, 2)


# -- a ring that two groups fill for each other ----------------------------------------------------


def shared_out(
    x: In[storage], y: Out[u32], columns: u32, rows: u32, pitch: u32, ranks: u32,
    *, fault: str = "",
) -> None:  # fmt: skip
    """Each of two groups reads all boxes; each box is asked for by one of them, in turn."""
    ptx.cluster(2)
    tile = ptx.SharedTile(x.dtype, (2, 8, 64))
    source = ptx.TensorMap(x, tile, (columns, rows), (pitch,))
    full, free = ptx.Barriers(2), ptx.Barriers(2)
    t, rank = lang.local_id(), ptx.cluster_rank()
    with lang.if_(t == 0):
        for stage in range(2):
            full.init(stage, 1)
            free.init(stage, 1 if fault == "alone" else 2)
        ptx.init_fence()
    if fault == "uninitialised":
        lang.barrier()
    else:
        ptx.cluster_arrive(relaxed=True)  # which is enough for barriers
        ptx.cluster_wait()
    with ptx.role(0, WG), lang.if_(t == 0):
        for step in range(STEPS):
            stage, parity = step % 2, step // 2 % 2
            free.wait(stage, parity ^ 1)
            if fault != "unexpected":
                full.expect(stage, 1024)
            with lang.if_(rank == stage):
                ptx.tma_load(source, (0, 8 * step), stage, full, stage, ranks)
    with ptx.role(WG, WG):
        row, column, half = t % WG // 16, t // 2 % 8, t % 2 * 2
        for step in range(STEPS):
            stage, parity = step % 2, step // 2 % 2
            full.wait(stage, parity)
            chunk = tile.chunk(row, column, stage)
            for word in range(2):
                at = (lang.group_id() * STEPS + step) * 256 + t % WG * 2 + word
                y[at] = tile.memory[chunk * 4 + half + word]
            ptx.warpgroup_barrier()
            with lang.if_(t == WG):
                for other in range(2):
                    if fault != "alone":
                        free.arrive(stage, other)
                if fault == "alone":
                    free.arrive(stage)
    if fault != "left":
        ptx.cluster_arrive()
        ptx.cluster_wait()


RING = {"columns": 60, "rows": 38, "pitch": 64, "ranks": 3}  # both edges lie in the last boxes


def ring(dtype: DType, fault: str = "") -> tuple[KernelIR, dict[str, Tensor]]:
    rng = np.random.default_rng(2)
    tensors = {
        "x": tensor(rng.standard_normal(64 * 38), dtype),
        "y": empty((4 * STEPS * 256,), u32),
    }
    return record(shared_out, tensors, 2 * WG, fault=fault), tensors


def boxes_of(x: Array) -> Array:
    """What `shared_out` gives for two clusters, from the elements as they are stored."""
    padded = np.zeros((8 * STEPS, 64), np.uint16)
    padded[:38, :60] = x.view(np.uint16).reshape(38, 64)[:, :60]
    return np.tile(padded.reshape(-1).view(np.uint32), 4)


@HALVES
def test_a_box_reaches_every_group(dtype: DType) -> None:
    ir, tensors = ring(dtype)
    for order in ORDERS:
        on_simulator(ir, tensors, 4, RING, order=order)
        wanted = boxes_of(tensors["x"].words)
        np.testing.assert_array_equal(tensors["y"].bits(), wanted)


@pytest.mark.devices("simulator", "cuda")
def test_a_box_reaches_every_group_of_a_device(device: ct.Device) -> None:
    kernel = ct.kernel(workgroup=2 * WG)(shared_out)
    x = np.random.default_rng(3).standard_normal(64 * 38).astype(np.float16)
    check_launches(device, kernel, x, boxes_of(x), groups=4, **RING)


RING_FAULTS = {
    "uninitialised": "a box for a barrier that was not initialised",
    "alone": "before a thread has waited for its box",
    "unexpected": "deadlock",
    "left": "the group of rank . has ended",
}


@pytest.mark.parametrize("fault", RING_FAULTS)
def test_the_simulator_reports_faults_of_rings(fault: str) -> None:
    ir, tensors = ring(f16, fault)
    with pytest.raises(SimulationError, match=RING_FAULTS[fault]):
        on_simulator(ir, tensors, 2, RING)


@pytest.mark.parametrize("ranks", [0, 4])
def test_the_simulator_reports_a_mask(ranks: int) -> None:
    ir, tensors = ring(f16)
    with pytest.raises(SimulationError, match=f"a mask of {ranks:#b} in a cluster of 2"):
        on_simulator(ir, tensors, 2, RING | {"ranks": ranks})


@pytest.mark.parametrize("expected", [True, False])
def test_a_box_that_nobody_waits_for_is_reported(expected: bool) -> None:
    def kernel(x: In[f16], y: Out[u32], n: u32) -> None:
        tile = ptx.SharedTile(f16, (8, 64))
        source, full = ptx.TensorMap(x, tile, (n, n), (n,)), ptx.Barriers(1)
        with lang.if_(lang.local_id() == 0):
            full.init(0, 1)
            if expected:
                full.expect(0, 1024)
            ptx.tma_load(source, (0, 0), 0, full, 0)
        y[lang.local_id()] = 0

    tensors = {"x": tensor(np.zeros(64 * 64), f16), "y": empty((128,), u32)}
    with pytest.raises(SimulationError, match="ends while a box is on its way"):
        on_simulator(record(kernel, tensors, 128), tensors, 1, {"n": 64})


def resident(y: Out[u32]) -> None:
    ptx.cluster(2)
    t = lang.local_id()
    for group in lang.range(lang.group_id(), lang.num_groups(), ptx.grid()):
        y[group * 32 + t] = ptx.cluster_rank() * 100 + ptx.grid()


@pytest.mark.parametrize(("asked", "grid"), [(0, 4), (3, 4), (6, 6), (100, 6)])
def test_whole_clusters_are_resident(asked: int, grid: int) -> None:
    tensors = {"y": empty((6 * 32,), u32)}
    ir = record(resident, tensors, 32)
    on_simulator(ir, tensors, 6, resident=asked)
    wanted = np.repeat(np.tile([0, 100], 3) + grid, 32)
    np.testing.assert_array_equal(tensors["y"].bits(), wanted)


def test_a_driver_is_asked_for_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are resident; their size is the function's, of which no launch says anything."""
    driver = pytest.importorskip("cuda.bindings.driver")
    from centella.backends.cuda.backend import CudaBackend

    fake = FakeCuda(driver).install(monkeypatch)
    asked: list[tuple[int, ...]] = []

    def clusters(function: Any, config: Any) -> Any:
        asked.append((config.gridDimX, config.blockDimX, config.sharedMemBytes, config.numAttrs))
        return driver.CUresult.CUDA_SUCCESS, 66

    monkeypatch.setattr(driver, "cuOccupancyMaxActiveClusters", clusters)
    backend = CudaBackend()
    ir = record(resident, {"y": empty((64,), u32)}, 32)
    assert backend.compile(program_of(ir, backend.caps)).most == 132
    assert asked == [(2, 32, 0, 0)]
    backend.close()
    assert fake.retained == 0


# -- matrices out of registers ---------------------------------------------------------------------


def stored(x: In[storage, 2], y: Out[u32, 2], *, registers: int, trans: bool) -> None:
    """Register r of each thread has word r of its row; the tile's rows come out as they lie."""
    tile = ptx.SharedTile(x.dtype, (32, 8), 0)
    t = lang.local_id()
    words = x.load_bits(t, 0)
    shapes = {2: [(16, 8)], 4: [(16, 16)], 22: [(16, 8)] * 2}[registers]
    fragments = [ptx.Fragment(x.dtype, shape) for shape in shapes]
    first = 0
    for fragment in fragments:
        for register in range(fragment.registers):
            fragment[register] = words[first + register]
        first += fragment.registers
    ptx.stmatrix(tile, tile.chunk(t % (8 * first), 0), *fragments, trans=trans)
    lang.barrier()
    with lang.if_(t < 8 * first):
        for word in range(4):
            y[t, word] = tile.memory[t * 4 + word]


CASES = [(n, trans) for n in (2, 4, 22) for trans in (False, True)]


def stored_case(dtype: DType, registers: int, trans: bool) -> tuple[KernelIR, dict[str, Tensor]]:
    count = 2 if registers == 2 else 4
    values = np.random.default_rng(4).standard_normal((32, 8))
    tensors = {"x": tensor(values, dtype), "y": empty((8 * count, 4), u32)}
    return record(stored, tensors, 32, registers=registers, trans=trans), tensors


def rows_of(words: Array, trans: bool) -> Array:
    """The rows of the matrices (PTX ISA, "stmatrix"), from the words [thread, register]."""
    matrices = words.T.reshape(-1, 8, 4)  # thread 4 i + c has words c of row i
    if trans:
        halves = np.ascontiguousarray(matrices).view(np.uint16).swapaxes(1, 2)
        matrices = np.ascontiguousarray(halves).view(np.uint32)
    return matrices.reshape(-1, 4)


@HALVES
@pytest.mark.parametrize(("registers", "trans"), CASES)
def test_matrices_are_stored(dtype: DType, registers: int, trans: bool) -> None:
    """In the simulator, and by the emitted text in an interpreter of its own."""
    ir, tensors = stored_case(dtype, registers, trans)
    words = [tensors[n].words.copy() for n in "xy"]
    count = len(tensors["y"].words) // 32
    wanted = rows_of(tensors["x"].words.reshape(32, 4)[:, :count], trans)
    for order in ORDERS:
        on_simulator(ir, tensors, 1, order=order)
        np.testing.assert_array_equal(tensors["y"].bits(), wanted)
    execute(ir, "sm_90", words, parameters(ir, tensors), 1)
    np.testing.assert_array_equal(words[1], tensors["y"].words)


@pytest.mark.devices("cpu", "simulator", "cuda")
@pytest.mark.parametrize(("registers", "trans"), CASES)
def test_matrices_are_stored_on_a_device(device: ct.Device, registers: int, trans: bool) -> None:
    x = np.random.default_rng(5).standard_normal((32, 8)).astype(np.float16)
    count = 2 if registers == 2 else 4
    y = ct.zeros((8 * count, 4), "u32", device)
    given = ct.asarray(x, device=device)
    ct.kernel(workgroup=32)(stored)(given, y, threads=32, registers=registers, trans=trans)
    words = np.ascontiguousarray(x).view(np.uint32)
    np.testing.assert_array_equal(y.numpy(), rows_of(words[:, :count], trans))


def rounded(y: Out[f32], *, fault: str = "") -> None:
    """In a role: the registers of sums go to a tile, and two matrices come back by `ldmatrix`."""
    tile, t = ptx.SharedTile(f16, (64, 64)), lang.local_id()
    with ptx.role(WG, WG):
        lane, top = t % 32, t // 32 % 4 * 16
        for columns in range(0, 64, 16):
            fragment = ptx.Fragment(f16, (64, 16))
            for register in range(4):
                row, column = fragment.place(register)
                first = lang.cast(row * 32 + column + columns, f32)
                fragment[register] = (first, first + 1.0)
            ptx.stmatrix(tile, tile.chunk(top + lane % 16, columns // 8 + lane // 16), fragment)
        if fault != "race":
            ptx.warpgroup_barrier()
        for columns in range(0, 64, 8):
            row = t % WG // 2
            at = tile.chunk(row ^ 1, columns // 8) * 4 + t % 2 * 2
            for word in range(2):
                y[row * 64 + columns + t % 2 * 4 + word * 2] = lang.cast(
                    tile.memory[at + word] >> 16, f32
                )
                y[row * 64 + columns + t % 2 * 4 + word * 2 + 1] = 0.0
        back = ptx.Fragment(f16, (16, 16))
        ptx.ldmatrix(tile, tile.chunk(top + lane % 16, lane // 16), back)
        y[4096 + t % WG] = back[0][0]


def test_sums_are_stored_in_a_role() -> None:
    tensors = {"y": empty((4096 + WG,), f32)}
    on_simulator(record(rounded, tensors, 2 * WG), tensors, 1)
    element = np.arange(64)[:, None] * 32 + np.arange(64)
    bits = element.astype(np.float16).view(np.uint16)
    wanted = np.zeros((64, 64), np.float32)
    wanted[:, ::2] = bits[np.arange(64) ^ 1][:, 1::2]
    np.testing.assert_array_equal(tensors["y"].numpy()[:4096].reshape(64, 64), wanted)
    lanes = np.arange(WG)
    first = element[lanes // 32 * 16 + lanes % 32 // 4, lanes % 4 * 2]
    np.testing.assert_array_equal(tensors["y"].numpy()[4096:], first)
    with pytest.raises(SimulationError, match="race: read here, written by thread"):
        on_simulator(record(rounded, tensors, 2 * WG, fault="race"), tensors, 1)


# -- words that are sent ---------------------------------------------------------------------------


def posted(x: In[u32], y: Out[u32], *, size: int, fault: str = "") -> None:
    """Each group sends every other one a word and four; each adds up what has come."""
    ptx.cluster(size)
    ptx.await_launches()
    one, four = lang.shared(u32, size), lang.shared(u32, 32 * 4 * size)
    there, t, rank = ptx.Barriers(1), lang.local_id(), ptx.cluster_rank()
    with lang.if_(t == 0):
        there.init(0, 1)
        ptx.init_fence()
        there.expect(0, size * 4 * (1 + 32 * 4) - (4 if fault == "few" else 0))
    if fault != "unready":
        ptx.cluster_arrive()
        ptx.cluster_wait()
    words = [x[(lang.group_id() * 32 + t) * 4 + n] for n in range(4)]
    for other in range(size):
        with lang.if_(t == other):
            there.send(0, one, rank, [words[0]], other)
        there.send(0, four, (rank * 32 + t) * 4 + (2 if fault == "off" else 0), words, other)
    if fault != "early":
        there.wait(0, 0)
    total = lang.var(lang.const(0, u32))
    for other in range(size):
        total += one[other]
        for word in four.load((other * 32 + t) * 4):
            total += word
    y[lang.group_id() * 32 + t] = total


def sent(size: int, groups: int, fault: str = "") -> tuple[KernelIR, dict[str, Tensor]]:
    x = np.random.default_rng(size).integers(0, 1 << 20, groups * 128).astype(np.uint32)
    tensors = {"x": tensor(x, u32), "y": empty((groups * 32,), u32)}
    return record(posted, tensors, 32, size=size, fault=fault), tensors


@pytest.mark.parametrize(("size", "groups"), [(2, 6), (3, 3), (8, 8)])
def test_words_are_sent_and_waited_for(size: int, groups: int) -> None:
    ir, tensors = sent(size, groups)
    each = tensors["x"].bits().reshape(-1, size, 32, 4)
    wanted = np.repeat(each.sum((1, 3), dtype=np.uint32)[:, None], size, 1)
    for rank in range(size):  # the word that goes to a rank is of the thread of its number
        wanted[:, rank] += each[:, :, rank, 0].sum(1, dtype=np.uint32)[:, None]
    for order in ORDERS:
        on_simulator(ir, tensors, groups, order=order)
        np.testing.assert_array_equal(tensors["y"].bits(), wanted.reshape(-1))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("early", "read, but nobody wrote it|read before a thread has waited for its box"),
        ("unready", "a box for a barrier that was not initialised"),
        ("off", "4 words off their boundary"),
        ("few", "deadlock|on its way"),
    ],
)
def test_sent_words_that_are_not_waited_for_are_reported(fault: str, text: str) -> None:
    ir, tensors = sent(2, 2, fault)
    with pytest.raises(SimulationError, match=text):
        on_simulator(ir, tensors, 2)


def test_sends_that_are_refused() -> None:
    def three(y: Out[u32]) -> None:
        ptx.cluster(2)
        ptx.Barriers(1).send(0, lang.shared(u32, 4), 0, [lang.const(0, u32)] * 3, 0)

    def alone(y: Out[u32]) -> None:
        ptx.Barriers(1).send(0, lang.shared(u32, 4), 0, [lang.const(0, u32)], 0)

    for kernel, text in ((three, "1 or 4 words, got 3"), (alone, "without clusters")):
        with pytest.raises(TraceError, match=text):
            record(kernel, {"y": empty((64,), u32)}, 32)


# -- what is read early ----------------------------------------------------------------------------


def early(x: In[u32], table: In[u32], y: Out[u32], *, fault: str = "") -> None:
    """The table is read before the launches before are over, x, which is asked for, behind."""
    t = lang.local_id()
    word = table[t]
    ptx.prefetch(x, t)
    if fault == "stored":
        y[t] = word
    ptx.await_launches()
    y[t] = word + x[t]


def apart(x: In[u32], table: In[u32], y: Out[u32], *, how: str, fault: str = "") -> None:
    """Threads wait in a role, or in a block that may be left out; the table is read behind it."""
    t = lang.local_id()
    words = lang.shared(u32, 256)
    if how == "role":
        with ptx.role(0, 128):
            ptx.await_launches()
            y[t] = x[t]
        with ptx.role(128, 128):
            words[t] = table[t]
            if fault == "stored":
                y[t] = table[t]
        return
    if how == "loop":
        for _ in lang.range(x.shape(0)):
            ptx.await_launches()
    else:
        with lang.if_(t < 64):
            ptx.await_launches()
        with lang.else_():
            if how == "branches":
                ptx.await_launches()
    words[t] = table[t]
    ptx.await_launches()
    y[t] = words[t]


def test_reads_before_a_wait_are_early_in_roles_loops_and_branches() -> None:
    """A role, a branch and what is behind a loop may run where the launches before have not."""
    tensors = {"x": empty((256,), u32), "table": empty((256,), u32), "y": empty((256,), u32)}
    for how in ("role", "loop", "branch", "branches"):
        ir = record(apart, tensors, 256, how=how)
        assert [ir.args[i].name for i in ir.early] == ["table"] * (how != "branches"), how
    with pytest.raises(TraceError, match="before what a kernel writes, in each branch and role"):
        record(apart, tensors, 256, how="role", fault="stored")


def may_wait(x: In[u32], y: Out[u32], *, how: str) -> None:
    """Threads wait where x has something, or in a role of some of them."""
    t = lang.local_id()
    if how == "role":
        with ptx.role(0, 128):
            ptx.await_launches()
            y[t] = x[t]
        return
    with lang.if_(x[0] > 0):
        ptx.await_launches()
        y[t] = x[t]
    if how == "both":
        with lang.else_():
            ptx.await_launches()


@pytest.mark.parametrize("how", ["role", "one", "both"])
def test_a_launch_ends_after_the_launches_before_it(how: str) -> None:
    """A later launch that waits for this one alone would read what those have yet to write."""
    tensors = {"x": empty((256,), u32), "y": empty((256,), u32)}
    text = emit_ptx(record(may_wait, tensors, 256, how=how), "sm_90a")
    assert text.endswith("griddepcontrol.wait;\n  ret;\n}\n") == (how == "one")


def test_arguments_read_early_are_marked() -> None:
    """They alone are read by way of the read-only cache, whose lines may be stale for the rest."""
    tensors = {n: tensor(np.arange(32, dtype=np.uint32), u32) for n in ("x", "table")}
    tensors["y"] = empty((32,), u32)
    ir = record(early, tensors, 32)
    assert [ir.args[i].name for i in ir.early] == ["table"] and record(
        meetings, {"x": tensors["x"], "y": tensors["y"]}, 64, size=2
    ).early == ()
    on_simulator(ir, tensors, 1)
    np.testing.assert_array_equal(tensors["y"].bits(), 2 * np.arange(32))
    before, _, behind = emit_ptx(ir, "sm_90").partition("griddepcontrol.wait;")
    assert "ld.global.nc" in before and "ld.global.b32" in behind
    assert "prefetch.global.L2" in before and "prefetch" not in behind
    assert "griddepcontrol" not in behind and "ld.global.nc" not in behind
    with pytest.raises(TraceError, match="await_launches comes before what a kernel writes"):
        record(early, tensors, 32, fault="stored")


# -- texts -----------------------------------------------------------------------------------------


def texts() -> dict[str, KernelIR]:
    """A kernel for each operation."""
    kernels = {f"stored {n} {trans}": stored_case(bf16, n, trans)[0] for n, trans in CASES}
    return kernels | {
        "met": met(2, 2)[0],
        "sent": sent(2, 2)[0],
        "resident": record(resident, {"y": empty((64,), u32)}, 32),
    }


def test_the_cases_cover_every_operation() -> None:
    every = [*texts().values(), ring(f16)[0]]
    seen = {s[0] for ir in every for s in ir.body}
    assert seen >= (FROM_90 - BARRIERS) | {"mbar_arrive_at", "tma_multicast"}


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100", "sm_120"])
def test_texts_assemble(arch: str, tmp_path: Path) -> None:
    for name, ir in texts().items():
        if name == "resident" and arch != "sm_90a":  # ptx.grid() is of Hopper
            continue
        assemble_clean(ir, arch, tmp_path)


@needs_ptxas
@HALVES
def test_texts_for_hopper_assemble(dtype: DType, tmp_path: Path) -> None:
    for ir in (ring(dtype)[0], record(rounded, {"y": empty((4096 + WG,), f32)}, 2 * WG)):
        assemble_clean(ir, "sm_90a", tmp_path)


def test_the_head_has_the_cluster() -> None:
    """No launch says how large it is."""
    text = emit_ptx(met(3, 3)[0], "sm_90")
    assert ".reqntid 64, 1, 1\n.explicitcluster\n.reqnctapercluster 3, 1, 1\n{" in text
    assert "cluster" not in emit_ptx(stored_case(f16, 4, False)[0], "sm_90")


def test_the_wait_is_first_and_has_no_name() -> None:
    lines = emit_ptx(met(2, 2)[0], "sm_90a").splitlines()
    waits, lets = (
        [n for n, line in enumerate(lines) if line == f"  griddepcontrol.{what};"]
        for what in ("wait", "launch_dependents")
    )
    assert len(waits) == len(lets) == 1 and waits < lets
    assert not [name for name in ptx.__all__ if "griddep" in name]


def test_addresses_of_another_group_are_computed_once() -> None:
    """The other group's address is computed once for each rank, the rest as for one's own."""
    text = emit_ptx(met(3, 3)[0], "sm_90")
    assert text.count("mapa.shared::cluster.u32") == 3
    assert text.count("ld.shared::cluster.b32") == 6


@pytest.mark.parametrize("name", ["met", "stored 4 False"])
def test_other_targets_refuse(name: str) -> None:
    with pytest.raises(TraceError, match="needs sm_90 or later, got sm_89"):
        emit_ptx(texts()[name], "sm_89")


# -- refusals --------------------------------------------------------------------------------------


def divided(y: Out[u32]) -> None:
    ptx.cluster(2)
    y[lang.global_id()] = ptx.cluster_rank()


@pytest.mark.devices("cpu", "simulator", "cuda")
def test_groups_are_whole_clusters(device: ct.Device) -> None:
    kernel = ct.kernel(workgroup=32)(divided)
    y = ct.zeros((96,), "u32", device)
    with pytest.raises(LimitError, match="3 groups are no whole number of clusters of 2"):
        kernel(y, groups=3)
    ir = kernel.ir()
    assert ir.cluster == 2 and not ir.refused(4)
    with pytest.raises(SimulationError, match="3 groups are no whole number of clusters of 2"):
        simulate(ir, [np.zeros(96, np.uint32)], np.zeros(len(ir.params), np.uint32), 3)


def clustered(wrong: Callable[[], Any], size: int = 2) -> Callable[[], None]:
    def inside() -> None:
        ptx.cluster(size)
        wrong()

    return inside


def shared_array() -> Any:
    return lang.shared(f32, 32)


def tile() -> ptx.SharedTile:
    return ptx.SharedTile(f16, (8, 64))


def divergent() -> None:
    with lang.if_(lang.local_id() < 3):
        ptx.cluster_arrive()


def in_role() -> None:
    with ptx.role(0, WG):
        ptx.cluster_wait()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "large": (lambda: ptx.cluster(9), "a cluster has 2 to 8 groups, got 9"),
    "one": (lambda: ptx.cluster(1), "a cluster has 2 to 8 groups, got 1"),
    "traced": (lambda: ptx.cluster(lang.group_id()), "a cluster has 2 to 8 groups, got "),  # type: ignore[arg-type]
    "again": (clustered(lambda: ptx.cluster(4)), "said once: clusters of 2, now 4"),
    "rank alone": (ptx.cluster_rank, "cluster_rank in a kernel without clusters: ptx.cluster"),
    "arrive alone": (ptx.cluster_arrive, "cluster_arrive in a kernel without clusters"),
    "wait alone": (ptx.cluster_wait, "cluster_wait in a kernel without clusters"),
    "load alone": (
        lambda: ptx.cluster_load(shared_array(), 0, 0),
        "cluster_load in a kernel without",
    ),
    "signal alone": (lambda: ptx.Barriers(1).arrive(0, 0), "another group's barrier in a kernel"),
    "divergent": (clustered(divergent), "cluster_arrive inside control flow that may differ"),
    "role": (clustered(in_role), "cluster_wait inside a ptx.role"),
    "rank": (
        clustered(lambda: ptx.cluster_load(shared_array(), 0, 2)),
        "a cluster of 2 has no rank 2",
    ),
    "signalled": (clustered(lambda: ptx.Barriers(1).arrive(0, 3)), "a cluster of 2 has no rank 3"),
    "stored": (lambda: ptx.stmatrix(tile(), 0), "stmatrix takes 1, 2 or 4 registers of f16, got"),
    "unfilled": (
        lambda: ptx.stmatrix(tile(), 0, ptx.Fragment(f16, (16, 8))),
        "before it was filled or loaded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert_refused(*REFUSED[name], 2 * WG)


@pytest.mark.parametrize(
    ("size", "mask", "text"),
    [(1, 1, "in a kernel without clusters"), (2, 0, "a cluster of 2 and one set"),
     (2, 5, "got 0b101"), (8, 256, "a cluster of 8 and one set")],
)  # fmt: skip
def test_a_mask_is_of_the_cluster(size: int, mask: int, text: str) -> None:
    def kernel(x: In[f16], y: Out[f32], n: u32) -> None:
        if size > 1:
            ptx.cluster(size)
        source = ptx.TensorMap(x, tile(), (n, n), (n,))
        ptx.tma_load(source, (0, 0), 0, ptx.Barriers(1), 0, mask)
        y[lang.local_id()] = 0.0

    tensors = {"x": empty((64,), f16), "y": empty((128,), f32)}
    with pytest.raises(TraceError, match=text):
        record(kernel, tensors, WG)


def test_ranks_are_uniform() -> None:
    """In a group: its threads may meet where the rank says so, as by the group's number."""

    def kernel(y: Out[u32]) -> None:
        ptx.cluster(2)
        with lang.if_(ptx.cluster_rank() == 1):
            lang.barrier()
        y[lang.global_id()] = ptx.cluster_rank() * 10 + ptx.cluster_size()

    tensors = {"y": empty((128,), u32)}
    on_simulator(record(kernel, tensors, 32), tensors, 4)
    np.testing.assert_array_equal(tensors["y"].bits(), np.repeat([2, 12, 2, 12], 32))
