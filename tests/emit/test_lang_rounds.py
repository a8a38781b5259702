"""Drivers that stop loops: what is counted, how bodies repeat, and that no result is cut short."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella import In, InOut, Out, State, f32, lang
from centella.backends.webgpu import loops
from centella.check.cases.case import DEPTH
from centella.check.cases.compare import attrs_of, differences
from centella.check.cases.table import TABLE, cases_of, sample_of
from centella.dtypes import dtype_of, i32, u32
from centella.emit.program import Call, parameter_words, program_of
from centella.emit.wgsl import emit_wgsl
from centella.lang import KernelIR
from centella.lang.rounds import copies_within, loops_of, rounds_of, turns_of
from centella.op import op
from centella.specs import Caps, make_spec
from tests.support.devices import own
from tests.support.lang_common import empty, record, tensor
from tests.support.launched import op_form

SOFTWARE = Caps("wgsl", max_shared=32 << 10, max_workgroup=1024, family="software")
BOUND = 65_535
GPUS = pytest.mark.devices("webgpu", "webgpu-minimum", "cuda", "webgpu-hardware")


# -- what is counted -------------------------------------------------------------------------------


def counted(body: Any, words: list[int], groups: int = 4) -> list[float]:
    """The turns of each loop of a kernel with parameters n and m, in 64 threads a group."""

    def kernel(x: In[ct.i32], y: Out[f32], n: ct.u32, m: ct.u32) -> None:
        both: Any = (n, m)
        body(x, *both)
        y[lang.global_id()] = lang.cast(both[0] + both[1], f32)

    tensors = {"x": tensor(np.ones(5), i32), "y": empty((256,), f32)}
    ir = record(kernel, tensors, 64)
    named = {"n": words[0], "m": words[1]}
    raw = [named.get(str(p.source[0]), 0) for p in ir.params]
    return list(turns_of(ir, raw, groups).values())


def test_turns_follow_from_parameters_and_ids() -> None:
    def body(x: Any, n: Any, m: Any) -> None:
        part = lang.group_id() * m
        for bounds in (
            (n,), (10, n), (lang.local_id(), n, 64), (lang.const(0, u32), n, m), (n, 10),
            (part, lang.minimum(part + m, n)),
            (part + lang.local_id() // 8, lang.minimum((lang.group_id() + 1) * m, n), 8),
            (lang.global_id(),), (n // m + n % m,), ((n >> 2) * 3,), (lang.maximum(n, m) - m,),
            (lang.minimum(lang.bitcast(x[0], u32), m),), (lang.select(n > m, n, m),),
        ):  # fmt: skip
            for _ in lang.range(*bounds):
                lang.var(0.0)

    turns = counted(body, [1000, 100], groups=10)
    assert turns == [
        *(1000, 990, 16, 10, 0, 100, 13),
        *(639, 10 + 99, 750, 900, 100, 1000),
    ]  # fmt: skip


def test_variables_have_all_that_they_are_set_to() -> None:
    def body(x: Any, n: Any, m: Any) -> None:
        either, grows = lang.var(m), lang.var(n)
        with lang.if_(n > m):
            either.set(n * 2)
        grows += 1
        for last in (either.get(), grows.get()):
            for _ in lang.range(last):
                lang.var(0.0)

    assert counted(body, [7, 3]) == [14, math.inf]


def test_what_only_the_device_knows_is_not_counted() -> None:
    def body(x: Any, n: Any, m: Any) -> None:
        for _ in lang.range(lang.bitcast(x[0], u32)):
            lang.var(0.0)
        with lang.loop():
            lang.break_if(x[1] > 0)
            for _ in lang.range(n):
                lang.var(0.0)

    assert counted(body, [1 << 30, 2]) == [math.inf, math.inf, 1 << 30]


def launches(name: str, dtype: str) -> Iterator[tuple[KernelIR, Call]]:
    """What a software adapter runs of the cases of an op."""
    for case in sample_of(name, dtype, SOFTWARE):
        declared, attrs = op.get(name), attrs_of(case, dtype)
        if attrs.get("variant") in ("gemv", "skinny"):  # they want views
            continue
        ins = tuple(make_spec(i.shape, dtype_of(i.dtype or dtype), 16) for i in case.inputs)
        outs = tuple(make_spec(*out, 16) for out in declared.rule(ins, declared.attrs(**attrs)))
        for call in op_form(declared, ins, outs, attrs).lower(SOFTWARE).calls:
            dtypes = tuple(r.spec.dtype for r in call.tensors)
            unit = tuple(r.spec.unit_rows for r in call.tensors)
            if call.groups:
                yield (
                    call.kernel.specialise(
                        dtypes, unit, call.constants, call.workgroup, call.signature
                    ),
                    call,
                )


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_host_knows_the_turns_of_every_kernel_of_ours(name: str) -> None:
    for ir, call in launches(name, TABLE[name].dtypes[0]):
        words, _ = parameter_words(call, ir)
        turns = turns_of(ir, words, call.groups)
        assert all(t < math.inf for t in turns.values()), (name, ir.name, turns)
        assert copies_within(ir, words, call.groups, BOUND) is not None


# -- how bodies repeat -----------------------------------------------------------------------------


def nested(x: In[f32], y: Out[f32], n: ct.u32, m: ct.u32) -> None:
    """x[0] + .. n times, each m + 1 times but for the last."""
    total = lang.var(0.0)
    for j in lang.range(n):
        for _ in lang.range(m):
            total += x[0]
        lang.break_if(j + 1 == n)
        total += x[0]
    y[lang.global_id()] = total.get()


def test_bodies_are_repeated_until_a_thread_keeps_to_the_bound() -> None:
    ir = record(nested, {"x": tensor(np.ones(1)), "y": empty((32,), f32)})
    (outer,) = loops_of(ir).outer
    (inner,) = outer.inner
    for n, m in ((1000, 1000), (1000, 3), (3, 100_000)):
        words = [{"n": n, "m": m}.get(str(p.source[0]), 0) for p in ir.params]
        turns = turns_of(ir, words, 1)
        assert rounds_of(loops_of(ir).outer, turns) == n * (m + 1) + n + 1
        copies = copies_within(ir, words, 1, BOUND)
        assert copies is not None
        assert rounds_of(loops_of(ir).outer, turns, dict(copies)) <= BOUND
        assert bool(copies) == (n * (m + 2) + 1 > BOUND)
        assert {index for index, _ in copies} <= {outer.index, inner.index}
    source = emit_wgsl(ir, copies=((inner.index, 4),))
    assert source.count(f"v{inner.index} += 1u; if (v{inner.index} >= ") == 3
    assert emit_wgsl(ir, copies=()) == emit_wgsl(ir)


def test_too_long_for_any_text_is_none() -> None:
    ir = record(nested, {"x": tensor(np.ones(1)), "y": empty((32,), f32)})
    words = [{"n": 2**20, "m": 2**12}.get(str(p.source[0]), 0) for p in ir.params]
    assert copies_within(ir, words, 1, BOUND) is None


@pytest.mark.devices("webgpu")
@pytest.mark.parametrize(
    "name", ["matmul", "linear", "attention", "reduce", "norm", "mean_pool", "scatter"]
)
def test_repeated_bodies_compute_the_same(device: ct.Device, name: str) -> None:
    """Where a driver is said to stop after 40 rounds, most kernels with loops are affected."""
    other = own(device)
    other.backend.caps = replace(device.caps, max_loop_rounds=40)
    few = [c for c in cases_of(name, "f32", SOFTWARE) if not c.sweep and c.small]
    cases = [c for c in few if sum(math.prod(i.shape) for i in c.inputs) < 2000][::12]
    wrong = []
    for case in cases:
        try:
            wrong += list(differences(other, name, "f32", [case], TABLE[name]))
        except ct.LimitError as error:
            assert "rounds of its loops" in str(error)  # others are right
            other.recorder.implicit().fail()
    assert not wrong


# -- that no result is cut short -------------------------------------------------------------------


@pytest.mark.devices("webgpu", "webgpu-hardware")
def test_the_probe_says_where_a_driver_stops(device: ct.Device) -> None:
    most = loops.most_rounds(device.backend.native)
    assert most == device.caps.max_loop_rounds
    if device.caps.family == "software":
        assert most in (0, BOUND)  # none, or Mesa's
    else:
        assert most == 0


@GPUS
def test_deep_products_are_right(device: ct.Device) -> None:
    a = ct.ones((64, 33_000), device=device)
    np.testing.assert_array_equal((a @ a.T).numpy(), 33_000)
    thin = ct.ones((1, 300_000), device=device)
    np.testing.assert_array_equal((thin @ ct.ones((300_000, 3), device=device)).numpy(), 300_000)


@GPUS
@pytest.mark.parametrize("name", ["matmul", "attention", "mean_pool", "scatter"])
def test_long_cases_of_the_check(device: ct.Device, name: str) -> None:
    """`centella check` has them too."""
    long = [
        case for case in sample_of(name, "f32", device.caps)
        if any(DEPTH in i.shape for i in case.inputs)
    ]  # fmt: skip
    assert long
    assert not list(differences(device, name, "f32", long, TABLE[name]))


@ct.kernel(workgroup=64)
def total(x: In[f32], y: Out[f32], n: ct.u32) -> None:
    """Each y: the sum of n elements of x."""
    result = lang.var(0.0)
    for k in lang.range(n):
        result += x[k % x.shape(0)]
    with lang.if_(lang.global_id() < y.shape(0)):
        y[lang.global_id()] = result.get()


@GPUS
@pytest.mark.parametrize("n", [65_534, 65_535, 65_536, 1_000_000])
def test_long_loops_of_a_user(device: ct.Device, n: int) -> None:
    y = ct.zeros((3,), device=device)
    total(ct.ones((5,), device=device), y, n=n, threads=3)
    np.testing.assert_array_equal(y.numpy(), np.float32(n))


@ct.kernel(workgroup=64)
def add_turns(y: InOut[f32], n: ct.u32, m: ct.u32) -> None:
    """Each y: the turns of loops in loops, with a meeting in each."""
    turns = lang.var(0.0)
    for _ in lang.range(n):
        for _ in lang.range(m):
            turns += 1.0
            lang.barrier()
        turns += 1.0
    y[lang.global_id()] += turns.get()


@GPUS
@pytest.mark.parametrize(("n", "m"), [(300, 400), (40_000, 2)])
def test_nested_loops_of_a_user(device: ct.Device, n: int, m: int) -> None:
    state = State(np.zeros(64, np.float32), device=device)
    add_turns(state, n=n, m=m, groups=1)
    np.testing.assert_array_equal(state.value.numpy(), np.float32(n * m + n))


@pytest.mark.devices("webgpu", "webgpu-minimum")
def test_what_no_text_can_do_is_refused_at_the_launch(device: ct.Device) -> None:
    if not device.caps.max_loop_rounds:
        pytest.skip("this driver stops no loop")
    x, y = ct.ones((5,), device=device), ct.zeros((3,), device=device)
    with pytest.raises(ct.LimitError, match=r"kernel 'total': expected at most 65,535 rounds of"):
        total(x, y, n=4_000_000_000, threads=3)
    np.testing.assert_array_equal(y.numpy(), 0)


@ct.kernel(workgroup=4)
def loop_of_memory(x: In[u32], y: Out[u32], n: u32) -> None:
    """Each y: turns that x says, between loops that the host counts."""
    total = lang.var(0, u32)
    for _ in lang.range(n):
        total.set(total + 1)
        for _ in lang.range(x[lang.global_id()]):
            total.set(total + 1)
    for _ in lang.range(n):
        total.set(total + 1)
    y[lang.global_id()] = total + 0


@ct.kernel(workgroup=4)
def left_by_break(x: In[u32], y: Out[u32], n: u32) -> None:
    total = lang.var(0, u32)
    with lang.loop():
        lang.break_if(total.get() >= x[lang.global_id()])
        total.set(total + n)
    y[lang.global_id()] = total + 0


@pytest.mark.devices("webgpu")
@pytest.mark.parametrize("kernel", [loop_of_memory, left_by_break])
@pytest.mark.parametrize("turns", [1, 1000, 65_000, 200_000])
def test_an_uncounted_loop_that_is_cut_short_raises_at_the_read(
    device: ct.Device, kernel: Any, turns: int
) -> None:
    other = own(device)
    few = ct.asarray(np.array([3, 0, 1, 2], np.uint32), device=other)
    many = ct.asarray(np.array([3, 0, turns, 2], np.uint32), device=other)
    x = ct.asarray(np.ones(3, np.float32), device=other)

    def launched(counts: ct.Tensor) -> ct.Tensor:
        y = ct.empty((4,), u32, device=other)
        kernel(counts, y, n=1, threads=4)
        return y

    added = 2 * (kernel is loop_of_memory)
    np.testing.assert_array_equal(launched(few).numpy(), [3 + added, added, 1 + added, 2 + added])
    before = ct.fetch(x + 1.0)
    replayed = other.compile(launched, few)
    for ask in (
        lambda: ct.fetch(launched(many)), lambda: ct.fetch(replayed(many)),
        lambda: replayed.fetch(many),
    ):  # fmt: skip
        reads = [ask(), ct.fetch(x + 1.0)]
        if device.caps.max_loop_rounds and turns > BOUND:
            for read in reads:
                with pytest.raises(ct.LimitError, match=rf"'{kernel.__name__}': .* after 65,535 r"):
                    read.result()
        else:
            assert np.ravel(reads[0].result())[2] == turns + added
        np.testing.assert_array_equal((x + 1.0).numpy(), 2)  # asked for later
    np.testing.assert_array_equal(before.result()[0], 2)


def stopping(device: ct.Device) -> tuple[ct.Device, ct.Tensor]:
    """A device of the test's own whose driver stops loops, and rounds of which one has too many."""
    if not device.caps.max_loop_rounds:
        pytest.skip("this driver stops no loop")
    other = own(device)
    return other, ct.asarray(np.array([3, 0, 200_000, 2], np.uint32), device=other)


@ct.kernel(workgroup=64)
def filled_memory(y: Out[u32]) -> None:
    """Ones in workgroup memory, which some drivers leave there for the next kernel."""
    memory = lang.shared(u32, 4096)
    for word in lang.range(lang.local_id(), 4096, 64):
        memory[word] = lang.const(1, u32)
    lang.barrier()
    y[lang.global_id()] = memory[lang.local_id()]


@pytest.mark.devices("webgpu")
def test_a_stopped_loop_is_seen_whatever_workgroup_memory_holds(device: ct.Device) -> None:
    other, many = stopping(device)
    for _ in range(3):  # on different threads of the driver
        ones = ct.empty((64 * 64,), u32, device=other)
        filled_memory(ones, threads=64 * 64)
        assert ones.numpy().all()
        y = ct.empty((4,), u32, device=other)
        left_by_break(many, y, n=1, threads=4)
        with pytest.raises(ct.LimitError, match="'left_by_break'"):
            y.numpy()


@pytest.mark.devices("webgpu")
def test_reads_in_another_order_leave_no_report_behind(device: ct.Device) -> None:
    other, many = stopping(device)
    x = ct.ones((3,), device=other)
    reads = []
    for _ in range(2):
        y = ct.empty((4,), u32, device=other)
        left_by_break(many, y, n=1, threads=4)
        reads.append(ct.fetch(y))
    for read in reversed(reads):
        with pytest.raises(ct.LimitError, match="'left_by_break'"):
            read.result()
    np.testing.assert_array_equal((x + 1.0).numpy(), 2)


@ct.kernel(workgroup=4)
def counted_up(x: In[u32], s: ct.InOut[u32]) -> None:
    """Each s: as many more as x says, one by one."""
    at = lang.global_id()
    total = lang.var(s[at], u32)
    for _ in lang.range(x[at]):
        total.set(total + 1)
    s[at] = total + 0


@pytest.mark.devices("webgpu")
def test_every_use_of_what_a_stopped_loop_left_raises(device: ct.Device) -> None:
    other, many = stopping(device)
    few = ct.asarray(np.array([3, 0, 1, 2], np.uint32), device=other)
    x = ct.ones((4,), u32, device=other)
    earlier, beside = ct.empty((4,), u32, device=other), x + x
    left_by_break(few, earlier, n=1, threads=4)
    np.testing.assert_array_equal(earlier.numpy(), [3, 0, 1, 2])

    y, z = ct.empty((4,), u32, device=other), ct.empty((4,), u32, device=other)
    left_by_break(many, y, n=1, threads=4)
    left_by_break(many, z, n=1, threads=4)
    from_y, after = y + x, x * 3
    other.synchronize()
    for read in (y, y, z, from_y, from_y, y[:2]):  # each of them is asked, and more than once
        with pytest.raises(ct.LimitError, match="'left_by_break': the driver of this device"):
            read.numpy()
    with pytest.raises(ct.LimitError, match="'left_by_break'"):
        (z + x).numpy()
    np.testing.assert_array_equal(earlier.numpy(), [3, 0, 1, 2])
    np.testing.assert_array_equal(beside.numpy(), 2)
    np.testing.assert_array_equal(after.numpy(), 3)
    np.testing.assert_array_equal(x.numpy(), 1)


@pytest.mark.devices("webgpu")
def test_a_state_and_a_replay_after_a_stopped_loop(device: ct.Device) -> None:
    other, many = stopping(device)
    few = ct.asarray(np.array([3, 0, 1, 2], np.uint32), device=other)
    state = ct.State(np.zeros(4, np.uint32), device=other)

    def step(counts: ct.Tensor) -> ct.Tensor:
        counted_up(counts, state, threads=4)
        return counts + state.value

    replayed = other.compile(step, few)
    np.testing.assert_array_equal(replayed(few).numpy(), [6, 0, 2, 4])
    result = replayed(many)
    for read in (result, result, state.value, state.value):
        with pytest.raises(ct.LimitError, match="'counted_up'"):
            read.numpy()
    with pytest.raises(ct.LimitError, match="'counted_up'"):  # it would go on from wrong counts
        replayed(few)
    state.assign(np.zeros(4, np.uint32))
    np.testing.assert_array_equal(replayed(few).numpy(), [6, 0, 2, 4])
    np.testing.assert_array_equal(state.value.numpy(), [3, 0, 1, 2])


def test_a_report_takes_a_binding_and_a_word_of_each_thread() -> None:
    ir = record(nested, {"x": tensor(np.ones(1)), "y": empty((32,), f32)})
    stops = replace(SOFTWARE, max_loop_rounds=BOUND, max_storage_buffers=2)
    assert not program_of(ir, stops).reports
    with pytest.raises(ct.LimitError, match="3 storage buffers; this device has 2"):
        program_of(ir, stops, reports=True)
    with pytest.raises(ct.LimitError, match="128 bytes of workgroup memory; this device has 127"):
        program_of(ir, replace(SOFTWARE, max_shared=127), reports=True)
    assert program_of(ir, replace(stops, max_storage_buffers=3), reports=True).reports


# -- what wraps, goes down, or stands in a loop that the host cannot count -------------------------


@ct.kernel(workgroup=1)
def wrapped(x: In[u32], y: Out[u32], n: u32, k: u32) -> None:
    total = lang.var(0, u32)
    for _ in lang.range(k):
        for _ in lang.range((lang.const(0, u32) - n) & 1023):
            total.set(total + x[0])
    y[lang.global_id()] = total + 0


@ct.kernel(workgroup=1)
def inside_of_unknown(x: In[u32], y: Out[u32], n: u32, k: u32) -> None:
    total = lang.var(0, u32)
    for _ in lang.range(x[1]):
        for _ in lang.range(k):
            total.set(total + n)
    y[lang.global_id()] = total + 0


@ct.kernel(workgroup=1)
def down_to_a_negative(x: In[u32], y: Out[u32], a: i32, b: i32) -> None:
    total = lang.var(0, u32)
    for _ in lang.range(a, a - b):  # type: ignore[operator]  # traced values
        total.set(total + x[0])
    y[lang.global_id()] = total + 0


@ct.kernel(workgroup=1)
def of_other_bits(x: In[u32], y: Out[u32], n: i32, k: u32) -> None:
    total = lang.var(0, u32)
    for _ in lang.range(lang.minimum(lang.bitcast(n, u32), k)):
        total.set(total + x[0])
    y[lang.global_id()] = total + 0


@pytest.mark.devices("cpu", "webgpu")
@pytest.mark.parametrize(
    ("kernel", "scalars", "rounds"),
    [
        (wrapped, {"n": 1, "k": 100}, 102_300),
        (inside_of_unknown, {"n": 1, "k": 100_000}, 100_000),
        (down_to_a_negative, {"a": 0, "b": -100_000}, 100_000),
        (of_other_bits, {"n": -1, "k": 100_000}, 100_000),
    ],
)
def test_bounds_that_wrap_or_are_unknown(
    device: ct.Device, kernel: Any, scalars: dict[str, int], rounds: int
) -> None:
    x = ct.asarray(np.array([1, 1], np.uint32), device=device)
    y = ct.empty((1,), u32, device=device)
    kernel(x, y, threads=1, **scalars)
    assert y.numpy()[0] == rounds
