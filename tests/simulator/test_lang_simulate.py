"""The simulator: kernels against NumPy, the arithmetic table, and every fault it must report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, i32, u32
from centella.errors import SimulationError
from centella.lang import In, InOut, KernelIR, Out, storage
from centella.simulator.race_check import Buffer
from centella.simulator.run import simulate as run_ir
from tests.support.lang_common import ORDERS, Tensor, collatz, compute, empty, record, tensor
from tests.support.lang_common import on_simulator as launch
from tests.support.lang_rows import ROWS, A, B, Row
from tests.support.mutations import mutations

Array = NDArray[Any]
SUBGROUPS = (1, 8, 32, 64)

# -- kernels --------------------------------------------------------------------------------------


def scale(x: In[storage], y: Out[storage], n: u32, s: f32) -> None:
    per = y.dtype.per_word
    first = lang.global_id() * per
    with lang.if_(first < n):
        y.store(first, [x[first + k] * s for k in range(per)])


def scale_chunks(x: In[storage], y: Out[storage], n: u32, s: f32) -> None:
    first = lang.global_id() * y.dtype.per_chunk
    with lang.if_(first < n):
        y.store(first, [v * s for v in x.load(first)])


def copy(x: In[storage, 2], y: Out[storage, 2]) -> None:
    per = y.dtype.per_word
    words = (y.shape(1) + (per - 1)) // per
    i = lang.global_id()
    row, col = i // words, i % words * per
    with lang.if_(row < y.shape(0)):
        last = x.shape(1) - 1
        y.store(row, col, [x[row, lang.minimum(col + k, last)] for k in range(per)])


def row_sum(x: In[storage, 2], y: Out[f32]) -> None:
    row, me, size = lang.group_id(), lang.local_id(), lang.workgroup_size()
    total = lang.var(0.0)
    for k in lang.range(me, x.shape(1), size):
        total += x[row, k]
    result = lang.workgroup_reduce(total, "add")
    with lang.if_(me == 0):
        y[row] = result


def softmax(x: In[storage, 2], y: Out[storage, 2]) -> None:
    per, cols = y.dtype.per_word, x.shape(1)
    row, me, size = lang.group_id(), lang.local_id(), lang.workgroup_size()
    top, total = lang.var(-3.0e38), lang.var(0.0)
    for k in lang.range(me, cols, size):
        top.set(lang.maximum(top, x[row, k]))
    peak = lang.workgroup_reduce(top, "max")
    for k in lang.range(me, cols, size):
        total += lang.exp(x[row, k] - peak)
    scaled = 1.0 / lang.workgroup_reduce(total, "add")
    for k in lang.range(me * per, cols, size * per):
        columns = [lang.minimum(k + j, cols - 1) for j in range(per)]
        y.store(row, k, [lang.exp(x[row, c] - peak) * scaled for c in columns])


TILE = 4


def matmul(a: In[storage, 2], b: In[storage, 2], c: Out[storage, 2]) -> None:
    per, inner = c.dtype.per_word, a.shape(1)
    wide = TILE * per
    tile_a, tile_b = lang.shared(f32, TILE * TILE), lang.shared(f32, TILE * wide)
    tiles = (c.shape(1) + (wide - 1)) // wide
    row, col = lang.local_id() // TILE, lang.local_id() % TILE
    top, left = lang.group_id() // tiles * TILE, lang.group_id() % tiles * wide
    sums = lang.vars(f32, per)

    def guarded(x: Any, i: Any, j: Any) -> Any:
        inside = (i < x.shape(0)) & (j < x.shape(1))
        i, j = lang.minimum(i, x.shape(0) - 1), lang.minimum(j, x.shape(1) - 1)
        return lang.select(inside, x[i, j], 0.0)

    for k in lang.range(0, inner, TILE):
        tile_a[row * TILE + col] = guarded(a, top + row, k + col)
        for p in range(per):
            column = col * per + p
            tile_b[row * wide + column] = guarded(b, k + row, left + column)
        lang.barrier()
        for j in range(TILE):
            for p in range(per):
                right = tile_b[j * wide + col * per + p]
                sums[p].set(lang.fma(tile_a[row * TILE + j], right, sums[p]))
        lang.barrier()
    with lang.if_((top + row < c.shape(0)) & (left + col * per < c.shape(1))):
        c.store(top + row, left + col * per, sums)


def normal(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass
class Case:
    """A kernel, its tensors, and what it must compute."""

    fn: Callable[..., Any]
    tensors: dict[str, Tensor]
    expected: Array
    workgroup: int
    groups: int
    scalars: dict[str, Any]

    def trace(self) -> KernelIR:
        return record(self.fn, self.tensors, self.workgroup)

    def run(self, ir: KernelIR | None = None, **options: Any) -> Array:
        fresh = {k: dataclasses.replace(t, words=t.words.copy()) for k, t in self.tensors.items()}
        launch(ir or self.trace(), fresh, self.groups, self.scalars, **options)
        return list(fresh.values())[-1].numpy()

    def is_right(self, result: Array) -> bool:
        out = list(self.tensors.values())[-1]
        eps = {f32: 1e-5, f16: 2e-3, bf16: 2e-2}[out.dtype]
        return bool(np.allclose(result, self.expected, rtol=eps, atol=eps))


def case(name: str, dtype: DType) -> Case:
    per = dtype.per_word
    if name in ("scale", "scale_chunks"):
        x = tensor(normal((203,)), dtype, offset=8)
        y = empty((203,), dtype, offset=16)
        fn, each = (scale, per) if name == "scale" else (scale_chunks, dtype.per_chunk)
        groups = -(-203 // (each * 32))
        return Case(fn, {"x": x, "y": y}, x.numpy() * 1.5, 32, groups, {"n": 203, "s": 1.5})
    if name == "copy":
        whole = tensor(normal((9 * 40,)), dtype)
        x = Tensor(whole.words, dtype, (9, 13), (40, 3), 1)
        y = empty((9, 13), dtype)
        return Case(copy, {"x": x, "y": y}, x.numpy(), 16, 8, {})
    if name == "row_sum":
        x = tensor(normal((5, 77)), dtype)
        return Case(row_sum, {"x": x, "y": empty((5,), f32)}, x.numpy().sum(1), 32, 5, {})
    if name == "softmax":
        # each thread has the peak of one row, and that row overflows unless its peak is taken off
        x = tensor(normal((17, 77)) * 2 + 100 * np.eye(17, 77), dtype)
        e = np.exp(x.numpy().astype(np.float64) - x.numpy().max(1, keepdims=True))
        y = empty((17, 77), dtype)
        return Case(softmax, {"x": x, "y": y}, e / e.sum(1, keepdims=True), 16, 17, {})
    a, b = tensor(normal((9, 11), 1), dtype), tensor(normal((11, 10), 2), dtype)
    tensors = {"a": a, "b": b, "c": empty((9, 10), dtype)}
    tiles = 3 * -(-10 // (TILE * per))
    return Case(matmul, tensors, a.numpy() @ b.numpy(), TILE * TILE, tiles, {})


NAMES = ("scale", "scale_chunks", "copy", "row_sum", "softmax", "matmul")
STORAGE = pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=lambda d: d.name)


@STORAGE
@pytest.mark.parametrize("name", NAMES)
def test_kernels_agree_with_numpy(name: str, dtype: DType) -> None:
    subject = case(name, dtype)
    first = subject.run()
    assert subject.is_right(first)
    for order in ORDERS:
        np.testing.assert_array_equal(subject.run(order=order), first)
    for options in ({"check": False}, {"subgroup": 1}, {"check": False, "order": "shuffled"}):
        np.testing.assert_array_equal(subject.run(**options), first)
    assert subject.is_right(subject.run(fused=False))


@pytest.mark.parametrize("name", NAMES)
def test_groups_run_in_any_number_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = case(name, f32)
    whole = subject.run()
    monkeypatch.setattr("centella.simulator.run.THREADS_AT_ONCE", 2 * subject.workgroup)
    for order in ORDERS:
        np.testing.assert_array_equal(subject.run(order=order), whole)


def test_more_than_65535_groups() -> None:
    n = 70_001
    x, y = tensor(np.arange(n)), empty((n,), f32)
    launch(record(scale, {"x": x, "y": y}, 1), {"x": x, "y": y}, n, {"n": n, "s": 2.0}, check=False)
    np.testing.assert_array_equal(y.numpy(), np.arange(n) * 2)


def test_no_groups() -> None:
    subject = case("scale", f32)
    report = run_ir(
        subject.trace(), [t.words for t in subject.tensors.values()], np.zeros(4, np.uint32), 0
    )
    assert not report.written[1].any()


# -- mutations ------------------------------------------------------------------------------------


@STORAGE
@pytest.mark.parametrize("name", NAMES)
def test_every_mutation_is_caught(name: str, dtype: DType) -> None:
    subject = case(name, dtype)
    ir = subject.trace()
    mutants = list(mutations(ir))
    barriers = [mutant for label, mutant in mutants if label.startswith("no barrier")]
    assert len(barriers) == sum(s[0] == "barrier" for s in ir.body)
    for mutant in barriers:
        with pytest.raises(SimulationError, match=r"race|nobody wrote"):
            subject.run(mutant)
    for label, mutant in mutants:
        try:
            result = subject.run(mutant)
        except SimulationError:
            continue
        assert not subject.is_right(result), label


def test_mutations_are_kernels() -> None:
    ir = case("matmul", f32).trace()
    accesses = ("load", "store", "sload", "sstore")
    assert len(list(mutations(ir))) == sum(s[0] in (*accesses, "barrier") for s in ir.body)
    for label, mutant in mutations(ir):
        assert mutant.digest != ir.digest
        assert __file__ in label
        assert all(a < i for i, s in enumerate(mutant.body) for a in s[2])


# -- faults ---------------------------------------------------------------------------------------


def fault(
    fn: Callable[..., Any], tensors: dict[str, Tensor], workgroup: int = 8, groups: int = 1,
    **options: Any,
) -> str:  # fmt: skip
    """The text of the fault that a kernel runs into."""
    with pytest.raises(SimulationError) as caught:
        launch(record(fn, tensors, workgroup), tensors, groups, **options)
    return str(caught.value)


def test_out_of_bounds() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        i = lang.global_id()
        y[i] = x[i]

    text = fault(kernel, {"x": tensor(np.zeros(8)), "y": empty((16,), f32)}, groups=2)
    assert "kernel 'kernel': 'x' word 8 is out of bounds, it has 8 words" in text
    assert "thread 0 of group 1" in text
    assert "; 'x' has room for 8 elements of f32, padding included: guard the access by how" in text
    assert f"{__file__}:{kernel.__code__.co_firstlineno + 2}" in text
    text = fault(kernel, {"x": tensor(np.zeros(16)), "y": empty((12,), f32)}, groups=2)
    assert "'y' word 12" in text and "thread 4 of group 1" in text
    unchecked = {"x": tensor(np.zeros(16)), "y": empty((12,), f32)}
    assert "'y' word 12" in fault(kernel, unchecked, groups=2, check=False)


def test_out_of_bounds_chunk_counts_four_words() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        i = lang.global_id() * 4
        with lang.if_(i < 8):
            y.store(i, x.load(i))

    x = Tensor(np.zeros(7, np.uint32), f32, (7,), (1,))
    assert "'x' word 7 is out of bounds, it has 7 words (thread 1 of" in fault(
        kernel, {"x": x, "y": empty((8,), f32)}
    )


def test_out_of_bounds_shared_and_wrapped() -> None:
    def shared(y: Out[f32]) -> None:
        memory = lang.shared(f32, 8)
        memory[lang.local_id() + 1] = 0.0
        y[lang.local_id()] = 0.0

    assert "shared array 0 word 8 is out of bounds" in fault(shared, {"y": empty((8,), f32)})

    def wrapped(x: In[f32], y: Out[f32]) -> None:
        y[lang.local_id()] = x[lang.local_id() - 1]

    tensors = {"x": tensor(np.zeros(8)), "y": empty((8,), f32)}
    assert "word 4294967295 is out of bounds" in fault(wrapped, tensors)


def test_empty_buffer() -> None:
    tensors = {"x": tensor(np.zeros(0)), "y": empty((0,), f32)}
    ir = record(scale, tensors, 8)
    launch(ir, tensors, 1, {"n": 0, "s": 1.0})
    with pytest.raises(SimulationError, match="'x' word 0 is out of bounds, it has 0 words"):
        launch(ir, tensors, 1, {"n": 1, "s": 1.0})


def test_off_boundary() -> None:
    def chunk(x: In[f32], y: Out[f32], at: u32) -> None:
        y[lang.local_id()] = x.load(lang.local_id() * 4 + at)[0]

    tensors = {"x": tensor(np.zeros(64)), "y": empty((8,), f32)}
    launch(record(chunk, tensors, 8), tensors, 1, {"at": 4})
    text = fault(chunk, tensors, scalars={"at": 2})
    assert "'x' element 2 is not a multiple of 4 (thread 0 of group 0" in text
    moved = tensors | {"x": tensor(np.zeros(64), offset=2)}
    assert "'x' element 2 is not" in fault(chunk, moved, scalars={"at": 0})

    def word(y: Out[f16]) -> None:
        with lang.if_(lang.local_id() > 4):
            y.store(lang.local_id(), [1.0, 2.0])

    assert "'y' element 5 is not a multiple of 2" in fault(word, {"y": empty((8,), f16)})

    def shared(y: Out[f32]) -> None:
        memory = lang.shared(f32, 64)
        memory.store(lang.local_id() * 4 + 1, [0.0] * 4)
        y[lang.local_id()] = 0.0

    assert "shared array 0 element 1 is not" in fault(shared, {"y": empty((8,), f32)})


def test_unwritten_output() -> None:
    def kernel(y: Out[f32]) -> None:
        with lang.if_(lang.local_id() != 5):
            y[lang.local_id()] = 1.0

    text = fault(kernel, {"y": empty((8,), f32)})
    assert text == "kernel 'kernel': 'y' word 5 was never written (1 of 8 words)"


def test_report_of_written_words() -> None:
    subject = case("matmul", f16)
    report = launch(subject.trace(), subject.tensors, subject.groups)
    assert [m.any() for m in report.written] == [False, False, True]
    assert report.written[2].sum() == 9 * 5  # 10 elements are 5 words; the pads stay as they were
    unchecked = launch(subject.trace(), subject.tensors, subject.groups, check=False)
    assert unchecked.written == ()


def test_read_of_unwritten_memory() -> None:
    def shared(y: Out[f32]) -> None:
        memory, me = lang.shared(f32, 8), lang.local_id()
        with lang.if_(me < 4):
            memory[me] = 1.0
        lang.barrier()
        y[me] = memory[me]

    text = fault(shared, {"y": empty((8,), f32)}, groups=2)
    assert "shared array 0 word 4: read, but nobody wrote it (thread 4 of group 0" in text

    def inout(z: InOut[f32]) -> None:
        z[lang.local_id()] += 1.0

    z = tensor(np.arange(8))
    launch(record(inout, {"z": z}, 8), {"z": z}, 1)
    np.testing.assert_array_equal(z.numpy(), np.arange(8) + 1)
    known = np.arange(8) != 6
    assert "'z' word 6: read, but nobody wrote it" in fault(inout, {"z": z}, initialised=[known])

    def after_write(z: InOut[f32]) -> None:
        z[lang.local_id()] = 1.0
        z[lang.local_id()] += 1.0

    launch(record(after_write, {"z": z}, 8), {"z": z}, 1, initialised=[np.zeros(8, np.bool_)])

    def input_(x: In[f32], y: Out[f32]) -> None:
        y[lang.local_id()] = x[lang.local_id()]

    tensors = {"x": tensor(np.zeros(8)), "y": empty((8,), f32)}
    launch(record(input_, tensors, 8), tensors, 1)
    assert "'x' word 6: read, but nobody wrote it" in fault(
        input_, tensors, initialised=[known, None]
    )


def shared_kernel(steps: Callable[[Any, Any], None]) -> Callable[..., Any]:
    def kernel(y: Out[f32]) -> None:
        memory, me = lang.shared(f32, 16), lang.local_id()
        memory[me] = 1.0
        memory[me + 8] = 1.0
        lang.barrier()
        steps(memory, me)
        y[lang.global_id()] = 1.0

    return kernel


def read_after_write(memory: Any, me: Any) -> None:
    memory[me] = 2.0
    lang.fma(memory[(me + 1) % 8], 1.0, 0.0)


def write_after_read(memory: Any, me: Any) -> None:
    memory[me] = memory[(me + 1) % 8]


def write_after_many_reads(memory: Any, me: Any) -> None:
    value = memory[0]
    with lang.if_(me == 0):
        memory[0] = value


def write_write(memory: Any, me: Any) -> None:
    memory[me] = 1.0
    memory[me ^ 1] = 1.0


def same_statement(memory: Any, me: Any) -> None:
    memory[me // 2] = 1.0


def same_statement_uniform(memory: Any, me: Any) -> None:
    memory[3] = 1.0


def chunk_beside_word(memory: Any, me: Any) -> None:
    with lang.if_(me < 2):
        memory.store(me * 4, [0.0] * 4)
    with lang.if_(me == 7):
        memory[5] = 0.0


def next_round(memory: Any, me: Any) -> None:
    for _ in lang.range(2):
        memory[me] = 1.0
        lang.barrier()
        memory[(me + 1) % 8]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (read_after_write, "word 1: race: read here, written by thread 1 of group 0 with no barr"),
        (write_after_read, "word 0: race: written here, read by thread 7 of group 0 with no barr"),
        (write_after_many_reads, "word 0: race: written here, read by several threads with no ba"),
        (write_write, "word 1: race: written here, written by thread 1 of group 0 with no barrier"),
        (same_statement, "word 0: race: written here by thread 1 of group 0 too (thread 0 of"),
        (same_statement_uniform, "word 3: race: written here by thread 7 of group 0 too"),
        (chunk_beside_word, "word 5: race: written here, written by thread 1 of group 0"),
        (next_round, "word 0: race: written here, read by thread 7 of group 0"),
    ],
)
@pytest.mark.parametrize("order", ["forward", "shuffled"])
def test_shared_races(steps: Callable[..., None], text: str, order: str) -> None:
    message = fault(shared_kernel(steps), {"y": empty((16,), f32)}, groups=2, order=order)
    assert "shared array 0 word" in message and "race: " in message
    if order == "forward":
        assert text in message


def no_race(memory: Any, me: Any) -> None:
    memory[me] = memory[me] + 1.0  # its own word
    lang.barrier()
    for _ in range(2):
        value = memory[0] + memory[7]  # many readers
    lang.barrier()
    with lang.if_(me == 3):
        memory[0] = value
        memory[0] = memory[0]
    lang.workgroup_uniform(value)  # a barrier too
    memory[me + 8] = memory[0]
    lang.barrier()
    with lang.if_(me < 2):
        memory.store(me * 4, memory.load(me * 4 + 8))


@pytest.mark.parametrize("order", ORDERS)
def test_no_race_where_there_is_none(order: str) -> None:
    y = {"y": empty((16,), f32)}
    report = launch(record(shared_kernel(no_race), y, 8), y, 2, order=order)
    assert report.written[0].all()
    np.testing.assert_array_equal(y["y"].numpy(), 1.0)


def test_global_races() -> None:
    def exchange(z: InOut[f32]) -> None:
        me, size = lang.local_id(), lang.workgroup_size()
        start = lang.group_id() * size
        z[start + me] = 1.0
        lang.barrier()
        z[start + (me + 1) % size] += 1.0

    z = {"z": tensor(np.zeros(16))}
    ir = record(exchange, z, 8)
    launch(ir, z, 2)
    np.testing.assert_array_equal(z["z"].numpy(), 2.0)
    ((_, unsynchronised),) = [m for m in mutations(ir) if "barrier" in m[0]]
    with pytest.raises(SimulationError, match=r"'z' word 1: race: read here, written by thread 1"):
        launch(unsynchronised, z, 2)

    def both_write(y: Out[f32]) -> None:
        y[lang.local_id()] = 1.0

    text = fault(both_write, {"y": empty((8,), f32)}, groups=2)
    assert "'y' word 0: race: written here by thread 0 of group 1 too" in text

    def one_reads(z: InOut[f32]) -> None:
        with lang.if_(lang.group_id() == 0):
            z[lang.local_id()] = 1.0
        lang.barrier()
        with lang.if_(lang.group_id() == 1):
            z[lang.local_id() + 8] = z[lang.local_id()]

    assert "read here, written by thread 0 of group 0; groups do not meet" in fault(
        one_reads, z, groups=2
    )

    def one_writes_later(z: InOut[f32]) -> None:
        value = z[0]
        lang.barrier()
        with lang.if_(lang.global_id() == 0):
            z[0] = value

    launch(record(one_writes_later, z, 8), z, 1)
    text = fault(one_writes_later, z, groups=2)
    assert "written here, read by" in text and "groups do not meet" in text


def test_races_between_groups_that_run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(z: InOut[f32]) -> None:
        value = z[0]
        with lang.if_(lang.global_id() == 24):
            z[0] = value

    monkeypatch.setattr("centella.simulator.run.THREADS_AT_ONCE", 8)
    text = fault(kernel, {"z": tensor(np.zeros(8))}, groups=4)
    assert "(thread 0 of group 3" in text and "groups do not meet" in text


def divergent(ir: KernelIR) -> KernelIR:
    """The kernel with thread ids where it asks for group ids: past the tracer's rule."""
    return replace(ir, body=tuple(("thread", *s[1:]) if s[0] == "group" else s for s in ir.body))


@pytest.mark.parametrize("meeting", ["barrier", "workgroup_uniform", "subgroup_add"])
def test_divergent_meetings(meeting: str) -> None:
    def kernel(y: Out[f32]) -> None:
        with lang.if_(lang.group_id() < 1):
            if meeting == "barrier":
                lang.barrier()
            elif meeting == "workgroup_uniform":
                lang.workgroup_uniform(lang.local_id())
            else:
                lang.subgroup_sum(lang.local_id())
        y[lang.global_id()] = 1.0

    y = {"y": empty((16,), f32)}
    ir = record(kernel, y, 8)
    launch(ir, y, 2)  # all of one group, none of the other
    with pytest.raises(
        SimulationError, match=rf"{meeting} reached by 1 of 8 threads \(thread 0 of"
    ):
        launch(divergent(ir), y, 2)


def test_loop_with_barrier_that_threads_leave_apart() -> None:
    def kernel(y: Out[f32]) -> None:
        with lang.loop():
            lang.barrier()
            lang.break_if(lang.group_id() < 1)
            lang.break_if(lang.num_groups() > 0)
        for _ in lang.range(lang.group_id()):
            lang.barrier()
        y[lang.global_id()] = 1.0

    y = {"y": empty((32,), f32)}
    ir = record(kernel, y, 8)
    launch(ir, y, 4)
    with pytest.raises(SimulationError, match="barrier reached by 7 of 8 threads"):
        launch(divergent(ir), y, 4)


def test_groups_count_their_own_barriers() -> None:
    def kernel(y: Out[f32]) -> None:
        memory, me = lang.shared(f32, 8), lang.local_id()
        memory[me] = 1.0
        with lang.if_(lang.group_id() == 0):
            lang.barrier()
        y[lang.global_id()] = memory[(me + 1) % 8]

    assert "thread 0 of group 1" in fault(kernel, {"y": empty((16,), f32)}, groups=2)


def test_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(y: Out[f32]) -> None:
        with lang.loop():
            y[lang.local_id()] = 1.0
            lang.break_if(y.shape(0) == 0)

    monkeypatch.setattr("centella.simulator.machine.MOST_ITERATIONS", 100)
    assert "100 iterations" in fault(kernel, {"y": empty((8,), f32)})


@pytest.mark.parametrize("seed", range(40))
def test_shadow_reports_exactly_the_races(seed: int) -> None:
    """Against the definition, over every pair of accesses."""
    random = np.random.default_rng(seed)
    size, groups, words = 4, 2, 9
    shadow = Buffer(words, size, np.ones(words, np.bool_))
    epoch = np.zeros(groups, np.int64)
    past: list[tuple[int, int, int, bool]] = []  # word, thread, epoch, writes
    for _ in range(60):
        if random.random() < 0.4:
            epoch[random.integers(groups)] += 1
            continue
        chosen = np.flatnonzero(random.random(size * groups) < 0.3)
        if not chosen.size:
            continue
        writes = bool(random.random() < 0.4)
        # mostly the thread's own word, the common one only read
        at = np.where(random.random(chosen.size) < 0.1, random.integers(words), chosen)
        if not writes:
            at = np.where(random.random(chosen.size) < 0.5, at, words - 1)
        now = [
            (int(w), int(t), int(epoch[t // size]), writes) for w, t in zip(at, chosen, strict=True)
        ]
        race = any(
            a[0] == b[0]
            and a[1] != b[1]
            and (a[3] or b[3])
            and (a[1] // size != b[1] // size or a[2] == b[2])
            for a in now
            for b in past + now
        )
        rule = shadow.write if writes else shadow.read
        report = rule(at, chosen, epoch[chosen // size])
        assert (report is not None) == race
        if race:
            return
        past += now


# -- control flow ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("check", [True, False])
def test_divergent_control_flow(order: str, check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("centella.simulator.run.THREADS_AT_ONCE", 96)  # 3 groups, then 1

    def expected(n: int) -> int:
        steps = 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        return steps

    numbers = np.arange(1, 100, dtype=np.uint32)
    result = compute(collatz, numbers, out=u32, order=order, check=check)
    np.testing.assert_array_equal(result, [expected(int(n)) for n in numbers])


def test_ranges_with_bounds_of_each_thread() -> None:
    def total(low: Any, high: Any) -> Any:
        result = lang.var(lang.const(0, i32))
        for k in lang.range(low, high, 3):
            lang.break_if(k > 50)
            result += k
        return result

    low = np.arange(-20, 30, dtype=np.int32)
    high = low * 2
    expected = [sum(k for k in range(a, b, 3) if k <= 50) for a, b in zip(low, high, strict=True)]
    np.testing.assert_array_equal(compute(total, low, high, out=i32), expected)


def test_ids() -> None:
    def kernel(y: Out[u32, 2]) -> None:
        values = (lang.local_id(), lang.group_id(), lang.num_groups(), lang.global_id())
        for k, value in enumerate(values):
            y[lang.global_id(), k] = value

    y = empty((24, 4), u32)
    launch(record(kernel, {"y": y}, 8), {"y": y}, 3)
    i = np.arange(24)
    np.testing.assert_array_equal(y.numpy(), np.stack([i % 8, i // 8, i * 0 + 3, i], axis=1))


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_conflicting_stores(order: str) -> None:
    def kernel(y: Out[u32]) -> None:
        y[0] = lang.global_id()

    y = empty((4,), u32)
    launch(record(kernel, {"y": y}, 8), {"y": y}, 2, check=False, order=order)
    if order != "shuffled":
        assert y.words[0] == {"forward": 15, "reverse": 0}[order]


def test_shuffled_lets_half_of_the_threads_run_ahead() -> None:
    def kernel(z: InOut[u32]) -> None:
        me = lang.local_id()
        z[me] = 1
        z[me + 8] = z[(me + 1) % 8]

    z = {"z": tensor(np.zeros(16), u32)}
    ir = record(kernel, z, 8)
    launch(ir, z, 1, check=False)
    assert z["z"].words.tolist() == [1] * 16
    z["z"].words[:] = 0
    launch(ir, z, 1, check=False, order="shuffled")
    assert 0 < z["z"].words[8:].sum() < 8


# -- groups of threads ----------------------------------------------------------------------------


@pytest.mark.parametrize("subgroup", SUBGROUPS)
@pytest.mark.parametrize("workgroup", [64, 48, 20])
def test_subgroup_operations(subgroup: int, workgroup: int) -> None:
    def kernel(x: In[f32], y: Out[f32, 2]) -> None:
        i = lang.global_id()
        y[i, 0] = lang.subgroup_sum(x[i])
        y[i, 1] = lang.subgroup_max(x[i])
        y[i, 2] = lang.subgroup_min(x[i])
        integer = lang.cast(x[i], i32)
        y[i, 3] = lang.cast(lang.subgroup_sum(integer), f32)
        y[i, 4] = lang.cast(lang.subgroup_max(integer), f32)
        y[i, 5] = lang.cast(lang.lane_id() * 100 + lang.subgroup_size(), f32)

    n = 2 * workgroup
    values = np.random.default_rng(0).integers(-50, 50, n).astype(np.float32)
    tensors = {"x": tensor(values), "y": empty((n, 6), f32)}
    launch(record(kernel, tensors, workgroup), tensors, 2, subgroup=subgroup)
    i = np.arange(n)
    which = i // workgroup * 100 + i % workgroup // subgroup
    same = which[:, None] == which[None]
    expected = [
        np.where(same, values, 0).sum(1),
        np.where(same, values, -99).max(1),
        np.where(same, values, 99).min(1),
        np.where(same, values, 0).sum(1),
        np.where(same, values, -99).max(1),
        i % workgroup % subgroup * 100 + subgroup,
    ]
    np.testing.assert_array_equal(tensors["y"].numpy(), np.stack(expected, axis=1))


@pytest.mark.parametrize("subgroup", SUBGROUPS)
def test_shuffle(subgroup: int) -> None:
    def kernel(x: In[f32], y: Out[f32], *, mask: int) -> None:
        value = lang.var(x[lang.global_id()])
        with lang.if_(lang.subgroup_size() > mask):
            value.set(lang.shuffle_xor(value, mask))
        y[lang.global_id()] = value

    def bare(x: In[f32], y: Out[f32]) -> None:
        y[lang.global_id()] = lang.shuffle_xor(x[lang.global_id()], 4)

    i = np.arange(128)
    tensors = {"x": tensor(i), "y": empty((128,), f32)}
    for mask in (1, 4, 31):
        launch(record(kernel, tensors, 64, mask=mask), tensors, 2, subgroup=subgroup)
        expected = i ^ mask if subgroup > mask else i
        np.testing.assert_array_equal(tensors["y"].numpy(), expected)
    if subgroup == 1:
        text = fault(bare, tensors, 64, 2, subgroup=subgroup)
        assert "shuffle_xor by 4 leaves the subgroup of 1 lanes (thread 0 of group 0" in text
    text = fault(bare, tensors, 18, 7, subgroup=subgroup)  # the last subgroup is not whole
    assert f"leaves the subgroup of {subgroup} lanes" in text


@pytest.mark.parametrize("op", ["add", "max", "min", "fmax", "fmin"])
@pytest.mark.parametrize("workgroup", [1, 2, 7, 64])
def test_workgroup_reduce(op: str, workgroup: int) -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        y[lang.global_id()] = lang.workgroup_reduce(x[lang.global_id()], op)

    x = normal((3 * workgroup,))
    tensors = {"x": tensor(x), "y": empty(x.shape, f32)}
    launch(record(kernel, tensors, workgroup), tensors, 3)
    plain: Any = {"add": np.sum, "max": np.max, "min": np.min, "fmax": np.max, "fmin": np.min}[op]
    expected = np.repeat(plain(x.reshape(3, -1), axis=1), workgroup)
    np.testing.assert_allclose(tensors["y"].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_workgroup_uniform() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        first = lang.workgroup_uniform(x[lang.global_id()])
        odd = lang.workgroup_uniform(x[lang.global_id()] > 8)
        with lang.if_(odd):
            lang.barrier()
        y[lang.global_id()] = first

    tensors = {"x": tensor(np.arange(24)), "y": empty((24,), f32)}
    launch(record(kernel, tensors, 8), tensors, 3)
    np.testing.assert_array_equal(tensors["y"].numpy(), np.arange(24) // 8 * 8)


# -- arithmetic, row by row of the table ----------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_arithmetic(row: Row) -> None:
    row.check(compute(row.fn, *row.operands, out=row.out), every_bit=True)


def bitwise(result: Array, expected: Any) -> None:
    """Equal bit for bit, any NaN being equal to any other."""
    expected = np.asarray(expected, np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(result), nan)
    np.testing.assert_array_equal(result[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_fma_rounds_once_or_twice() -> None:
    x = np.full(4, 1 + 2.0**-12, np.float32)
    c = np.full(4, -(1 + 2.0**-11), np.float32)
    bitwise(compute(lang.fma, x, x, c), [2.0**-24] * 4)
    bitwise(compute(lang.fma, x, x, c, fused=False), [0.0] * 4)


def test_fmax_and_fmin_of_nan_give_an_operand() -> None:
    for fn in (lang.fmax, lang.fmin):
        result = compute(fn, A, B)
        assert ((result == A) | (result == B) | np.isnan(result)).all()


def test_bitcast_keeps_every_bit() -> None:
    bits = np.array([0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0xFFFFFFFF], np.uint32)
    through = compute(lambda u: lang.bitcast(lang.bitcast(u, f32), u32) ^ 0, bits, out=u32)
    np.testing.assert_array_equal(through, bits)
    np.testing.assert_array_equal(
        compute(lambda u: lang.bitcast(u, i32), bits, out=i32), bits.view(np.int32)
    )
