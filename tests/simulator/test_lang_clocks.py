"""What comes before what where threads meet by barriers in shared memory, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from centella import lang
from centella.dtypes import f16, f32, u32
from centella.errors import SimulationError
from centella.lang import In, InOut, Out, ptx
from tests.support.lang_common import ORDERS, Tensor, empty, on_simulator, record, tensor

WARP, WG = 32, 128
UNORDERED = "with no barrier between"


def ran(kernel: Callable[..., Any], *, threads: int = 2 * WG, words: int = 256, **more: Any) -> Any:
    """What a kernel writes to its only tensor, in one group; with more tensors and constants."""
    tensors = {"y": empty((words,), u32)}
    on_simulator(record(kernel, tensors, threads, **more), tensors, 1)
    return tensors["y"].bits()


def ready(*arrivals: int) -> ptx.Barriers:
    """Barriers that wait for so many arrivals each."""
    barriers = ptx.Barriers(len(arrivals))
    with lang.if_(lang.local_id() == 0):
        for number, count in enumerate(arrivals):
            barriers.init(number, count)
        ptx.init_fence()
    lang.barrier()
    return barriers


def told(y: Out[u32], *, by: int) -> None:
    """The first warpgroup writes and arrives at 0, others arrive at 1; the second waits for one."""
    shared, t = lang.shared(u32, WG), lang.local_id()
    there = ready(WG, WG)
    with ptx.role(0, WG):
        shared[t] = t
        there.arrive(0)
    with ptx.role(2 * WG, WG):
        there.arrive(1)
    with ptx.role(WG, WG):
        there.wait(by, 0)
        y[t - WG] = shared[t - WG]


def test_waiting_for_another_barrier_orders_nothing() -> None:
    np.testing.assert_array_equal(ran(told, threads=3 * WG, words=WG, by=0), np.arange(WG))
    text = f"race: read here, written by thread 0 of group 0 {UNORDERED} .thread 128 of group 0, "
    with pytest.raises(
        SimulationError, match=rf"kernel 'told'.*{text}.*test_lang_clocks.py:{LINE}"
    ):
        ran(told, threads=3 * WG, words=WG, by=1)


LINE = told.__code__.co_firstlineno + 11


def slots(y: Out[u32], *, fault: str = "") -> None:
    """One role fills two slots in turn, the other reads them."""
    shared, t = lang.shared(u32, 2 * WG), lang.local_id()
    full, free = ready(*[WG] * 5), ready(WG // WARP, WG // WARP)
    with ptx.role(0, WG):
        for step in range(5):
            slot, parity = step % 2, step // 2 % 2
            if fault != "reused":
                free.wait(slot, parity ^ 1)
            if fault == "untold":
                full.arrive(step)
            shared[slot * WG + t] = t * step
            if fault != "untold":
                full.arrive(step)
    with ptx.role(WG, WG):
        total, me = lang.var(0, u32), t - WG
        for step in range(5):
            slot = step % 2
            full.wait(step, 0)
            if fault == "early":
                with lang.if_(t % WARP == 0):
                    free.arrive(slot)
            total += shared[slot * WG + (me ^ WARP)]
            if fault != "early":
                with lang.if_(t % WARP == 0):  # for its warp
                    free.arrive(slot)
        y[me] = total


SLOTS = {
    "reused": f"race: read here, written by thread .* {UNORDERED}",
    "early": f"race: written here, read by thread .* {UNORDERED}",
    "untold": f"race: read here, written by thread .* {UNORDERED}",
}


def test_slots_are_used_again() -> None:
    tensors = {"y": empty((WG,), u32)}
    ir = record(slots, tensors, 2 * WG)
    for order in ORDERS:
        on_simulator(ir, tensors, 1, order=order)
        np.testing.assert_array_equal(tensors["y"].bits(), (np.arange(WG) ^ WARP) * 10)


@pytest.mark.parametrize("fault", SLOTS)
def test_slots_that_are_used_too_early(fault: str) -> None:
    with pytest.raises(SimulationError, match=SLOTS[fault]):
        ran(slots, words=WG, fault=fault)


def phases(y: Out[u32], *, second: bool) -> None:
    """A warp arrives twice in the first phase, once in the second, and writes before each."""
    shared, t = lang.shared(u32, 2 * WARP), lang.local_id()
    there = ready(2)
    with ptx.role(0, WARP):
        shared[t] = t
        with lang.if_(t < 2):
            there.arrive(0)
        shared[t + WARP] = t + 7
        with lang.if_(t == 0):
            there.arrive(0)
    with ptx.role(WG, WARP):
        there.wait(0, 0)
        y[t - WG] = shared[t - WG + (WARP if second else 0)]


def test_a_phase_tells_what_was_published_to_it() -> None:
    """Not what arrivals at the next phase publish, which is not over."""
    np.testing.assert_array_equal(ran(phases, words=WARP, second=False), np.arange(WARP))
    with pytest.raises(SimulationError, match=f"race: read here, written by thread .*{UNORDERED}"):
        ran(phases, words=WARP, second=True)


def each(y: Out[u32], *, other: int) -> None:
    """Each warp of a role waits for a barrier of its own."""
    shared, t = lang.shared(u32, WG), lang.local_id()
    there = ready(*[WARP] * 4)
    with ptx.role(0, WG):
        shared[t] = t
        there.arrive(t // WARP)
    with ptx.role(WG, WG):
        there.wait((t - WG) // WARP, 0)
        y[t - WG] = shared[(t - WG) ^ other]


def test_each_warp_waits_for_itself() -> None:
    np.testing.assert_array_equal(ran(each, words=WG, other=1), np.arange(WG) ^ 1)
    with pytest.raises(SimulationError, match=f"race: read here, written by thread .*{UNORDERED}"):
        ran(each, words=WG, other=WARP)


def passed_on(y: Out[u32], *, on: bool) -> None:
    """What one role knows by waiting it tells the next."""
    shared, t = lang.shared(u32, WARP), lang.local_id()
    there = ready(WARP, WARP)
    with ptx.role(0, WARP):
        shared[t] = t
        there.arrive(0)
    with ptx.role(WG, WARP):
        if on:
            there.wait(0, 0)
        there.arrive(1)
    with ptx.role(2 * WG, WARP):
        there.wait(1, 0)
        y[t - 2 * WG] = shared[t - 2 * WG]


def test_order_is_passed_on() -> None:
    np.testing.assert_array_equal(
        ran(passed_on, threads=3 * WG, words=WARP, on=True), np.arange(WARP)
    )
    with pytest.raises(SimulationError, match=f"race: read here, written by thread .*{UNORDERED}"):
        ran(passed_on, threads=3 * WG, words=WARP, on=False)


def meetings(y: Out[u32], *, how: str) -> None:
    """One thread has waited often; then all meet, and read what it wrote."""
    shared, t = lang.shared(u32, 2), lang.local_id()
    there = ready(1)
    with lang.if_(t == 0):
        for parity in (0, 1, 0):
            there.arrive(0)
            there.wait(0, parity)
        shared[0] = 5
    if how == "barrier":
        lang.barrier()
        lang.barrier()
        y[t] = shared[0]
        return
    with ptx.role(0, WG):
        ptx.warpgroup_barrier()
        ptx.warpgroup_barrier()
        y[t] = shared[0]
    with ptx.role(WG, WG):
        ptx.warpgroup_barrier()
        y[t] = shared[0] if how == "wrong" else 5


def test_a_barrier_passes_on_what_all_threads_know() -> None:
    for how in ("barrier", "warpgroups"):
        np.testing.assert_array_equal(ran(meetings, how=how), np.full(2 * WG, 5))
    with pytest.raises(
        SimulationError, match=f"race: read here, written by thread 0 .*{UNORDERED}"
    ):
        ran(meetings, how="wrong")


def alone(y: Out[u32], *, before: bool) -> None:
    """One thread of a warp waits, and the others read, who may have waited for something before."""
    shared, t = lang.shared(u32, WARP), lang.local_id()
    there = ready(WARP, WARP)
    with ptx.role(0, WARP):
        shared[t] = t
        there.arrive(0)
    with ptx.role(WG, WARP):
        if before:
            there.arrive(1)
            there.wait(1, 0)
        with lang.if_(t % WARP == 0):
            there.wait(0, 0)
        y[t - WG] = shared[t - WG]


def test_a_warp_is_taken_for_one() -> None:
    """A race on a GPU, which the simulator sees only in threads that have waited for nothing."""
    np.testing.assert_array_equal(ran(alone, words=WARP, before=True), np.arange(WARP))
    with pytest.raises(SimulationError, match=f"race: read here, written by thread .*{UNORDERED}"):
        ran(alone, words=WARP, before=False)


def elsewhere(y: Out[u32], z: InOut[u32], *, atomic: bool) -> None:
    """Who waits for another barrier reads what was changed atomically, or device memory."""
    shared, t = lang.shared(u32, WARP), lang.local_id()
    there = ready(WARP, WARP)
    with lang.if_(t < WARP):
        shared[t] = 0
    lang.barrier()
    with ptx.role(0, WARP):
        if atomic:
            lang.atomic_add(shared, t, 3)
        else:
            z[t] = 3
        there.arrive(0)
    with ptx.role(2 * WG, WARP):
        there.arrive(1)
    with ptx.role(WG, WARP):
        there.wait(1, 0)
        y[t - WG] = shared[t - WG] if atomic else z[t - WG]


@pytest.mark.parametrize("atomic", [True, False])
def test_atomics_and_device_memory(atomic: bool) -> None:
    """Races on a GPU, which the simulator does not see: the reader has waited for something."""
    tensors = {"y": empty((WARP,), u32), "z": tensor(np.zeros(WARP), u32)}
    on_simulator(record(elsewhere, tensors, 3 * WG, atomic=atomic), tensors, 1)
    np.testing.assert_array_equal(tensors["y"].bits(), np.full(WARP, 3))


# -- copies and products ---------------------------------------------------------------------------


def boxes(x: In[f16], y: Out[f32], n: u32, *, fault: str = "", by: int = 0) -> None:
    """A box is read by products of a warpgroup and by threads of another one, then overwritten."""
    tile, t = ptx.SharedTile(f16, (64, 64)), lang.local_id()
    source = ptx.TensorMap(x, tile, (n, n), (n,))
    full, free = ready(1), ready(2)
    with ptx.role(0, WARP), lang.if_(t == 0):
        for parity in range(2):
            full.expect(0, 8192)
            ptx.tma_load(source, (0, 0), 0, full, 0)
            free.wait(0, parity)
    with ptx.role(WG, WG):
        sums = ptx.Fragment(f32, (64, 64))
        for parity in range(2):
            full.wait(0, parity)
            ptx.wgmma_fence()
            ptx.wgmma(sums, tile, tile.start(0, 0), tile, tile.start(0, 0), accumulate=False)
            ptx.wgmma_commit()
            if fault == "reading":
                with lang.if_(t == WG + by):
                    free.arrive(0)
            ptx.wgmma_wait()
            if fault != "reading":
                with lang.if_(t == WG + by):
                    free.arrive(0)
        y[t - WG] = sums[0]
    with ptx.role(2 * WG, WARP):
        for parity in range(2):
            if fault != "unwaited":
                full.wait(0, parity)
            y[t - WG] = lang.cast(tile.memory[t % WARP] & 0, f32)
            with lang.if_(t % WARP == 0):
                free.arrive(0)


def boxed(**options: Any) -> None:
    tensors: dict[str, Tensor] = {"x": tensor(np.ones(4096), f16), "y": empty((WG + WARP,), f32)}
    on_simulator(record(boxes, tensors, 3 * WG, **options), tensors, 1, {"n": 64})
    np.testing.assert_array_equal(tensors["y"].numpy(), [16.0] * WG + [0.0] * WARP)


@pytest.mark.parametrize("by", [0, WARP, WG - 1])
def test_a_box_is_overwritten_once_it_is_read(by: int) -> None:
    """Any thread of a warpgroup that has waited for its products says so."""
    boxed(by=by)
    with pytest.raises(SimulationError, match="a box comes here, read by wgmma of warpgroup 1"):
        boxed(fault="reading", by=by)


def test_each_thread_waits_for_a_box_itself() -> None:
    """The wait of another thread, which it is ordered behind, is not enough."""
    text = "race: read here, where a box came that this thread has not waited for"
    with pytest.raises(SimulationError, match=text):
        boxed(fault="unwaited")
