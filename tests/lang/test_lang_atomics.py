"""Integer atomics in the tracer, the simulator, on WebGPU, as PTX; kernels that live by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.emit.ptx import emit_ptx
from centella.emit.wgsl import emit_wgsl
from centella.errors import SimulationError, TraceError
from centella.lang import In, InOut, KernelIR, Out, f16, f32, i32, u8, u32
from centella.lang.kernel_params import Face
from centella.simulator.atomics import take_turns
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas
from tests.support.lang_common import (
    ORDERS,
    Tensor,
    copies,
    empty,
    on_simulator,
    on_webgpu,
    parameters,
    record,
    tensor,
)

BINS, THREADS = 7, 32
rng = np.random.default_rng(3)
VALUES = rng.integers(0, BINS, 300).astype(np.uint32)

STEPS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "exchange": lambda a, b: b,
}  # fmt: skip


def histogram(x: In[u32], counts: InOut[u32], n: u32) -> None:
    i = lang.global_id()
    with lang.if_(i < n):
        lang.atomic_add(counts, x[i], 1)


def shared_histogram(x: In[u32], counts: InOut[u32], n: u32, *, bins: int) -> None:
    """A group counts in shared memory, then adds what it has to the counts of all."""
    i, me = lang.global_id(), lang.local_id()
    mine = lang.shared(u32, bins)
    for k in range(0, bins, lang.workgroup_size()):
        with lang.if_(me + k < bins):
            mine[me + k] = 0
    lang.barrier()
    with lang.if_(i < n):
        lang.atomic_add(mine, x[i], 1)
    lang.barrier()
    for k in range(0, bins, lang.workgroup_size()):
        with lang.if_(me + k < bins):
            lang.atomic_add(counts, me + k, mine[me + k])


def compaction(x: In[u32], kept: InOut[u32], count: InOut[u32], n: u32) -> None:
    """The odd numbers, in an order that no program knows."""
    i = lang.global_id()
    with lang.if_(i < n), lang.if_((x[i] & 1) == 1):
        kept[lang.atomic_add(count, 0, 1)] = x[i]


def largest_f32(x: In[f32], bits: InOut[u32], n: u32) -> None:
    """The largest of floats, for which there is no atomic, by a compare-exchange loop."""
    i = lang.global_id()
    with lang.if_(i < n):
        seen = lang.var(lang.atomic_or(bits, 0, 0))
        mine = x[i]
        with lang.loop():
            lang.break_if(lang.bitcast(seen, f32) >= mine)
            before = lang.atomic_compare_exchange(bits, 0, seen, lang.bitcast(mine, u32))
            lang.break_if(before == seen)
            seen.set(before)


def every(
    words: InOut[u32], more: InOut[i32], seen: Out[u32], told: Out[i32], *, shared: bool
) -> None:
    """Each step on a word of its own, by all threads of a group."""
    i, me = lang.global_id(), lang.local_id()
    for array, out in ((words, seen), (more, told)):
        at: Any = array
        if shared:
            at = lang.shared(array.dtype, len(STEPS) + 1)
            with lang.if_(me < len(STEPS) + 1):
                at[me] = array[me]
            lang.barrier()
        value = lang.cast(me * 77 + 5, array.dtype)
        for k, name in enumerate(STEPS):
            step = getattr(lang, f"atomic_{name}")
            if name in ("min", "and"):
                step(at, k, -value if array is more else value)  # the word before is not wanted
            elif name == "exchange":
                out[i] = step(at, k, value)
            else:
                step(at, k, value)
        last = len(STEPS)
        lang.atomic_compare_exchange(at, last, 3, value)
        if shared:
            lang.barrier()
            with lang.if_(me < len(STEPS) + 1):
                array[me] = at[me]


def on_ptx(ir: KernelIR, tensors: dict[str, Tensor], groups: int, scalars: Any = None) -> None:
    words = [tensors[a.name].words for a in ir.args]
    execute(ir, "sm_80", words, parameters(ir, tensors, scalars), groups)


RUNS: dict[str, Callable[..., Any]] = {
    **{f"simulator-{order}": partial(on_simulator, order=order) for order in ORDERS},
    "webgpu": on_webgpu,
    "ptx": on_ptx,
}


@pytest.fixture(params=list(RUNS))
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return RUNS[request.param]


@pytest.mark.parametrize("kernel", [histogram, shared_histogram])
def test_histogram(kernel: Any, run: Callable[..., Any]) -> None:
    tensors = {"x": tensor(VALUES, u32), "counts": tensor(np.arange(BINS, dtype=np.uint32), u32)}
    constants = {"bins": BINS} if kernel is shared_histogram else {}
    ir = record(kernel, tensors, THREADS, **constants)
    run(ir, tensors, 10, {"n": VALUES.size})
    want = np.bincount(VALUES, minlength=BINS) + np.arange(BINS)
    np.testing.assert_array_equal(tensors["counts"].numpy(), want)


def test_compaction(run: Callable[..., Any]) -> None:
    x = rng.permutation(300).astype(np.uint32)
    tensors = {"x": tensor(x, u32), "kept": tensor(np.zeros(300, np.uint32), u32),
               "count": tensor(np.zeros(1, np.uint32), u32)}  # fmt: skip
    run(record(compaction, tensors, THREADS), tensors, 10, {"n": 300})
    assert tensors["count"].numpy()[0] == 150
    assert sorted(tensors["kept"].numpy()[:150]) == list(range(1, 300, 2))  # as a set


def test_a_compare_exchange_loop(run: Callable[..., Any]) -> None:
    x = rng.permutation(96).astype(np.float32)
    tensors = {"x": tensor(x), "bits": tensor(np.zeros(1, np.uint32), u32)}
    run(record(largest_f32, tensors, THREADS), tensors, 3, {"n": 96})
    assert tensors["bits"].words[:1].view(np.float32)[0] == 95.0


@pytest.mark.parametrize("shared", [False, True])
def test_every_step(shared: bool, run: Callable[..., Any]) -> None:
    first = rng.integers(0, 2**32, len(STEPS) + 1).astype(np.uint32)
    first[-1] = 3
    tensors = {"words": tensor(first, u32), "more": tensor(first.view(np.int32), i32),
               "seen": empty((THREADS,), u32), "told": empty((THREADS,), i32)}  # fmt: skip
    run(record(every, tensors, THREADS, shared=shared), tensors, 1)
    mine = [77 * k + 5 for k in range(THREADS)]
    for name, out, kind in (("words", "seen", np.uint32), ("more", "told", np.int32)):
        got, seen = tensors[name].numpy(), tensors[out].numpy()
        start = [int(v) for v in first.view(kind)]
        for k, step in enumerate(STEPS):
            if step == "exchange":
                chain = {*mine, start[k]} - {int(got[k])}  # each but the last was seen by another
                assert sorted(int(s) for s in seen) == sorted(chain)
                continue
            want = start[k]
            for value in mine:
                signed = -value if step in ("min", "and") and kind is np.int32 else value
                want = STEPS[step](want, signed)
            assert int(got[k]) == np.int64(want).astype(kind), (name, step)
        assert int(got[-1]) in mine


@pytest.mark.parametrize("kind", [*STEPS, "compare_exchange"])
@pytest.mark.parametrize("words", [1, 3, 40])
def test_the_simulator_takes_turns(kind: str, words: int) -> None:
    """As a loop over the threads does."""
    r = np.random.default_rng(words)
    at = r.integers(0, words, 50)
    operands = [r.integers(0, 4, 50).astype(np.uint32) for _ in range(2)]
    memory = r.integers(0, 4, words).astype(np.uint32)
    want, before = memory.copy(), []
    for n, word in enumerate(at):
        before.append(int(want[word]))
        a, b = (int(x[n]) for x in operands)
        if kind == "compare_exchange":
            want[word] = b if want[word] == a else want[word]
        else:
            want[word] = STEPS[kind](int(want[word]), a)
    got = take_turns(kind, memory, at, operands)
    assert got.tolist() == before
    assert memory.tolist() == want.tolist()


# -- what is refused -------------------------------------------------------------------------------


def chunk_of_shared() -> None:
    mine = lang.shared(u32, 4)
    mine.store(0, [0, 0, 0, 0])
    lang.atomic_add(mine, 0, 1)


def meeting(x: Any) -> None:
    with lang.if_(lang.atomic_add(x, 0, 1) == 0):
        lang.barrier()


KINDS = "atomics are for i32 and u32, got {}; sums of floats would depend on the order"
WIDTH = "is accessed by words, x.i., not by chunks"
REFUSED: list[tuple[Any, Callable[[Any], Any], str]] = [
    (InOut[f32], lambda x: lang.atomic_add(x, 0, 1.0), KINDS.format("f32")),
    (InOut[f32], lambda x: lang.atomic_max(lang.shared(f32, 4), 0, 1.0), KINDS.format("f32")),
    (InOut[f16], lambda x: lang.atomic_add(x, 0, 1.0), KINDS.format("f16")),
    (InOut[u8], lambda x: lang.atomic_add(x, 0, 1), KINDS.format("u8")),
    (In[u32], lambda x: lang.atomic_add(x, 0, 1), "'x' is an in argument: .* needs InOut"),
    (Out[u32], lambda x: lang.atomic_add(x, 0, 1), "'x' is an out argument: .* needs InOut"),
    (InOut[u32], lambda x: lang.atomic_add(x, x.load(0)[0], 1), WIDTH),
    (InOut[u32], lambda x: x.store(0, [lang.atomic_add(x, 0, 1)] * 4), WIDTH),
    (InOut[u32], lambda x: chunk_of_shared(), WIDTH),
    (InOut[u32], lambda x: lang.atomic_add(x[0], 0, 1), "or lang.shared, .* got Expr"),
    (InOut[u32], lambda x: lang.atomic_add(x, 0, lang.const(1, i32)), "a u32 value, got i32"),
    (InOut[u32], meeting, "a barrier inside control flow that may differ"),
]


@pytest.mark.parametrize(("kind", "wrong", "text"), REFUSED)
def test_refused(kind: Any, wrong: Callable[[Any], Any], text: str) -> None:
    face = Face((("x", kind),), (), ())
    with pytest.raises(TraceError, match=text):
        lang.trace(wrong, face, workgroup=THREADS, dtypes={})


# -- races -----------------------------------------------------------------------------------------


def raced(kernel: Any, text: str, groups: int = 1) -> None:
    tensors = {"x": tensor(np.zeros(THREADS, np.uint32), u32), "y": empty((64,), u32)}
    ir = record(kernel, tensors, THREADS)
    for order in ORDERS:
        with pytest.raises(SimulationError, match=text):
            on_simulator(ir, copies(tensors), groups, order=order)


def test_atomics_race_with_plain_accesses() -> None:
    def read(x: InOut[u32], y: Out[u32]) -> None:
        lang.atomic_add(x, 0, 1)
        y[lang.global_id()] = x[0]

    def read_before(x: InOut[u32], y: Out[u32]) -> None:
        y[lang.global_id()] = x[0]
        lang.atomic_add(x, 0, 1)

    def stored(x: InOut[u32], y: Out[u32]) -> None:
        i = lang.global_id()
        y[i] = 0
        x[lang.local_id()] = 1
        lang.atomic_add(x, 0, 1)

    def stored_after(x: InOut[u32], y: Out[u32]) -> None:
        y[lang.global_id()] = 0
        lang.atomic_add(x, 0, 1)
        x[lang.local_id()] = 1

    def shared(x: InOut[u32], y: Out[u32]) -> None:
        mine = lang.shared(u32, THREADS)
        mine[lang.local_id()] = 0
        lang.atomic_add(mine, 0, 1)
        y[lang.global_id()] = mine[lang.local_id()] + x[0]

    def behind_a_barrier(x: InOut[u32], y: Out[u32]) -> None:
        lang.atomic_add(x, 0, 1)
        lang.barrier()
        y[lang.global_id()] = x[0]

    def unwritten(x: InOut[u32], y: Out[u32]) -> None:
        y[lang.global_id()] = lang.atomic_add(lang.shared(u32, 1), 0, 1) + x[0]

    between = "with no barrier between"
    raced(read, f"read here, changed atomically by .* {between}")
    raced(read_before, f"changed atomically here, read by .* {between}")
    raced(stored, f"changed atomically here, written by .* {between}")
    raced(stored_after, f"written here, changed atomically by .* {between}")
    raced(shared, f"changed atomically here, written by .* {between}")
    raced(behind_a_barrier, "changed atomically.* groups do not meet in between", groups=2)
    raced(unwritten, "read, but nobody wrote it")
    tensors = {"x": tensor(np.zeros(THREADS, np.uint32), u32), "y": empty((THREADS,), u32)}
    on_simulator(record(behind_a_barrier, tensors, THREADS), tensors, 1)
    assert set(tensors["y"].numpy()) == {THREADS}


# -- texts -----------------------------------------------------------------------------------------


def texts() -> dict[str, KernelIR]:
    n, x = tensor(np.zeros(8, np.uint32), u32), tensor(np.zeros(8, np.float32))
    more = {"more": tensor(np.zeros(8, np.int32), i32), "told": empty((8,), i32)}
    return {
        "histogram": record(histogram, {"x": n, "counts": n}),
        "shared": record(shared_histogram, {"x": n, "counts": n}, bins=BINS),
        "compaction": record(compaction, {"x": n, "kept": n, "count": n}),
        "loop": record(largest_f32, {"x": x, "bits": n}),
        "every": record(every, {"words": n, "seen": n, **more}, shared=False),
        "every-shared": record(every, {"words": n, "seen": n, **more}, shared=True),
    }


def test_a_result_that_nobody_wants_costs_nothing() -> None:
    texts_ = texts()
    assert "red.global.add.u32 [" in emit_ptx(texts_["histogram"])
    assert "atom.global.add.u32 %r" in emit_ptx(texts_["compaction"])
    assert "atom.global.cas.b32" in emit_ptx(texts_["loop"])
    assert "red.shared.min.s32" in emit_ptx(texts_["every-shared"])
    assert "array<atomic<u32>>" in emit_wgsl(texts_["histogram"])
    assert "array<atomic<i32>, 8>" in emit_wgsl(texts_["every-shared"])


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("name", texts())
def test_texts_assemble(name: str, arch: str, tmp_path: Path) -> None:
    assemble(emit_ptx(texts()[name], arch), arch, tmp_path)


def test_the_step_is_part_of_the_identity() -> None:
    def kernel(x: InOut[u32], *, name: str) -> None:
        getattr(lang, f"atomic_{name}")(x, 0, 1)

    x = {"x": tensor(np.zeros(4, np.uint32), u32)}
    digests = {record(kernel, x, name=name).digest for name in STEPS}
    assert len(digests) == len(STEPS)


# -- launched --------------------------------------------------------------------------------------


def test_launched(device: ct.Device) -> None:
    count = ct.kernel(histogram, workgroup=64)
    keep = ct.kernel(compaction, workgroup=64)
    x = rng.integers(0, BINS, 1000).astype(np.uint32)
    counts = ct.State(np.zeros(BINS, np.uint32), device=device)
    kept = ct.State(np.zeros(1000, np.uint32), device=device)
    total = ct.State(np.zeros(1, np.uint32), device=device)
    given = ct.asarray(x, device=device)
    for _ in range(2):
        count(given, counts, n=1000, threads=1000)
    keep(given, kept, total, n=1000, threads=1000)
    np.testing.assert_array_equal(counts.numpy(), 2 * np.bincount(x, minlength=BINS))
    odd = x[x % 2 == 1]
    assert total.numpy()[0] == odd.size
    assert sorted(kept.numpy()[: odd.size]) == sorted(odd)


def test_an_index_of_rank_two(device: ct.Device) -> None:
    @ct.kernel(workgroup=32)
    def pairs(x: In[u32], table: InOut[u32, 2], n: u32) -> None:
        i = lang.global_id()
        with lang.if_(i + 1 < n):
            lang.atomic_add(table, (x[i], x[i + 1]), 1)

    x = rng.integers(0, 3, 100).astype(np.uint32)
    table = ct.State(np.zeros((3, 5), np.uint32), device=device)
    pairs(ct.asarray(x, device=device), table, n=100, threads=100)
    want = np.zeros((3, 5), np.uint32)
    for a, b in itertools.pairwise(x):
        want[a, b] += 1
    np.testing.assert_array_equal(table.numpy(), want)
