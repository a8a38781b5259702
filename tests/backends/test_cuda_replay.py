"""Replays on CUDA: one graph, the read-back behind it. Most by a driver that only keeps order."""

# ruff: noqa: N802  # the functions are called as the driver calls them

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.backends.cuda.backend import ordered
from centella.backends.cuda.memory import NOT_READY
from centella.backends.cuda.words import FEW, bring, program_on
from centella.dtypes import u32
from centella.lang import In, Out, ptx
from centella.simulator.run import simulate
from centella.specs import Caps
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.support.fake_cuda import FakeCuda, installed
from tests.support.lang_common import empty, record

X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2


class Graphs(FakeCuda):
    """Graphs of launches, which do not happen either."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.alive: Counter[str] = Counter()
        self.capturing = False

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> Any:
        self.capturing = True
        return self._ok()

    def cuStreamEndCapture(self, stream: Any) -> Any:
        self.capturing = False
        self.alive["graphs"] += 1
        return self._ok(11)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        self.alive["execs"] += 1
        return self._ok(12)

    def cuGraphDestroy(self, graph: Any) -> Any:
        assert graph == 11
        self.alive["graphs"] -= 1
        return self._ok()

    def cuGraphExecDestroy(self, graph: Any) -> Any:
        assert graph == 12
        self.alive["execs"] -= 1
        return self._ok()

    def cuGraphLaunch(self, graph: Any, stream: Any) -> Any:
        assert not self.capturing
        self.put("graph", stream)
        return self._ok()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    yield from installed(monkeypatch, Graphs)


@pytest.mark.parametrize(("columns", "how"), [(4, "launch"), (FEW // 4, "launch"),
                                              (FEW // 4 + 1, "copy")])  # fmt: skip
def test_a_fetch_is_an_upload_a_graph_and_a_read_back_in_order(
    fake: Graphs, columns: int, how: str
) -> None:
    device = ct.device("cuda", native=0, pool="reuse")
    x = np.ones((1, columns), np.float32)
    fn = device.compile(lambda x: ct.softmax(x * 2.0), x)
    theirs = fake.new_stream()
    for stream in (None, theirs):
        fake.ops.clear()
        with ct.ledger() as led:
            if stream is None:
                fn.fetch(x).result()
            else:
                with device.stream(stream):
                    fn.fetch(x).result()
        led.expect(uploads=1, submissions=1, downloads=1, launches=fn.launches, allocations=0)
        assert [op.what for op in fake.ops] == [how, "graph", how]
        where = device.native.stream if stream is None else stream
        assert {op.stream for op in fake.ops} == {where}


def test_a_call_changes_the_context_three_times(
    fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the submission, to ask whether it is done, and to wait."""
    device = ct.device("cuda", native=0, pool="reuse")
    cache = ct.MatmulCache(device)
    cache.upload_weight("w", np.eye(4, dtype=np.float32))
    cache.matmul("w", X)
    calls: Counter[str] = Counter()

    def counted(name: str, *args: Any) -> Any:
        calls[name] += 1
        return getattr(fake, name)(*args)

    for name in dir(fake):
        if name.startswith("cu") and hasattr(fake.driver, name):
            monkeypatch.setattr(fake.driver, name, partial(counted, name))
    cache.matmul("w", X)
    assert calls == {
        "cuCtxPushCurrent": 3, "cuCtxPopCurrent": 3, "cuGraphLaunch": 1, "cuLaunchKernel": 2,
        "cuEventRecord": 1, "cuEventQuery": 1, "cuEventSynchronize": 1,
    }  # fmt: skip


def test_a_submission_compiles_and_loads_nothing(
    fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be behind work that does not end before this thread has gone on."""
    fake.loaded = False
    device = ct.device("cuda", native=0, pool="reuse")
    fn = device.compile(lambda x: x * 2.0, X)
    assert fake.loaded
    monkeypatch.setattr(fake.driver, "cuModuleLoadDataEx", None)
    fn.fetch(X).result()
    assert [op.what for op in fake.ops][-3:] == ["launch", "graph", "launch"]


def test_graphs_go_with_their_captures(fake: Graphs) -> None:
    device = ct.device("cuda", native=0, pool="reuse")
    for _ in range(3):
        fn = device.compile(lambda x: x * 2.0, X)
        fn.fetch(X).result()
        del fn
    assert fake.alive == {"graphs": 0, "execs": 1}  # the last one, until there is another
    device.close()
    assert fake.alive == {"graphs": 0, "execs": 0}


def test_launches_of_a_graph_overlap_where_a_driver_keeps_it(fake: Graphs) -> None:
    seen: list[tuple[str, int]] = []

    def taken(config: Any, *_: Any) -> Any:
        (attribute,) = config.attrs
        seen.append((attribute.id.name, attribute.value.programmaticStreamSerializationAllowed))
        assert config.gridDimX and config.blockDimX and config.blockDimZ == config.gridDimZ == 1
        return fake.cuLaunchKernelEx(config)

    fake.driver.cuLaunchKernelEx = taken
    for version, overlapped in ((12_020, 0), (12_030, 2)):
        fake.version = version
        device = ct.device("cuda", native=0, pool="reuse")
        device.compile(lambda x: ct.softmax(x * 2.0), X)
        assert len(seen) == overlapped
        device.close()
    assert set(seen) == {("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)}


def test_what_is_read_early_is_written_by_no_launch_that_runs() -> None:
    """A launch that does is ordered; then those behind it may read early what came before."""

    def early(table: In[u32], y: Out[u32]) -> None:
        word = table[0]
        ptx.await_launches()
        y[0] = word

    def late(table: In[u32], y: Out[u32]) -> None:
        y[0] = table[0]

    def launch(kernel: Any, *slots: int) -> Any:
        ir = record(kernel, {"table": empty((1,), u32), "y": empty((1,), u32)})
        return SimpleNamespace(program=SimpleNamespace(ir=ir), slots=slots)

    launches = [launch(late, 0, 1), launch(early, 0, 2), launch(early, 1, 3), launch(early, 1, 4),
                launch(early, 3, 5), launch(late, 5, 0), launch(early, 0, 6)]  # fmt: skip
    slots = [SimpleNamespace(native=256 * n) for n in range(7)]
    assert ordered(SimpleNamespace(launches=launches, slots=slots)) == {2, 4, 6}  # type: ignore[arg-type]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(
    fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ct.device("cuda", native=0, pool="reuse")
    invalid = fake.driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with monkeypatch.context() as patch:
        patch.setattr(fake.driver, "cuLaunchKernelEx", lambda *_: (invalid,))
        with pytest.raises(ct.DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
            device.compile(lambda x: x * 2.0, X)
    assert not fake.capturing
    assert fake.alive == {"graphs": 0}
    device.compile(lambda x: x * 2.0, X).fetch(X).result()


def test_an_upload_does_not_wait_for_the_work_before_it(fake: Graphs) -> None:
    """It goes by way of two pieces of pinned memory, so the third waits for the first copy."""
    device = ct.device("cuda", native=0, pool="reuse")
    double = device.compile(lambda x: x * 2.0, np.zeros(1 << 18, np.float32))
    arena = int(double._replay._slots[double._replay._inputs.slot].native)
    array, _, _ = fake.memory[arena]
    first = arena - array.ctypes.data
    uploaded = array[first : first + (1 << 20)].view(np.float32)
    for number, waits in enumerate((0, 0, 1, 2)):
        data = np.full(1 << 18, number, np.float32)
        double(data)
        data[:] = -1.0  # it is the caller's again
        assert fake.waits == waits
        assert (uploaded == number).all()
    with ct.ledger() as led:
        assert ct.asarray(np.zeros(3 << 20, np.float32), device=device).native
    assert led.counts.syncs == 1 and fake.waits > 2  # 12 MB are waited for
    device.close()
    assert 0 not in {context for _, _, context in fake.memory.values()}


def test_memory_that_nobody_has_read_is_not_written_while_the_device_may_write_there(
    fake: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload took it at once: a read-back that came later had its bytes sent to the device."""
    device = ct.device("cuda", native=0, pool="reuse")
    double = device.compile(lambda x: x * 2.0, np.zeros(1 << 15, np.float32))
    backend: Any = device.backend
    pending = double.fetch(np.ones(1 << 15, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(fake.driver, "cuEventQuery", lambda *_: (NOT_READY,))
        del pending
        gc.collect()
        (unread, _) = backend._unread[0]
        assert backend._take_pinned(unread.nbytes).address != unread.address
    addresses = {backend._take_pinned(unread.nbytes).address for _ in range(8)}
    assert unread.address in addresses and not backend._unread


def test_what_nobody_waited_for_goes_with_the_device(fake: Graphs) -> None:
    """Pinned memory that a read-back was to come to, or an upload has come from."""
    device = ct.device("cuda", native=0, pool="reuse")
    double: Any = device.compile(lambda x: x * 2.0, X)
    for _ in range(3):
        double.fetch(X)
    double(X)  # of which nothing is read, and whose upload takes no pinned memory
    gc.collect()
    backend: Any = device.backend
    assert backend._unread
    device.close()
    assert 0 not in {context for _, _, context in fake.memory.values()}


@pytest.mark.parametrize("words", [1, 127, 128, 129, FEW // 4])
def test_what_the_launch_of_a_copy_copies(fake: Graphs, words: int) -> None:
    """As it is launched, in the simulator: these words and no others."""
    taken: list[Any] = []

    def launched(_: Any, groups: int, *more: Any) -> Any:
        pointer = ctypes.c_void_p.from_address(more[7]).value
        assert pointer is not None and more[:2] == (1, 1) and more[3:6] == (1, 1, 0)
        taken.append((groups, more[2], ctypes.string_at(pointer, 32)))
        return fake.cuLaunchKernel(_, groups, *more)

    fake.driver.cuLaunchKernel = launched
    bring(None, 1 << 40, 3 << 33, 4 * words, 1)
    ((groups, threads, struct),) = taken
    ir = program_on(Caps("ptx", arch="sm_75")).ir
    assert threads == ir.workgroup
    np.testing.assert_array_equal(np.frombuffer(struct, np.uint64)[:2], [1 << 40, 3 << 33])
    number, *parameters = np.frombuffer(struct, np.uint32)[4:]
    assert number == groups
    x, y = np.arange(words, dtype=np.uint32), np.zeros(words, np.uint32)
    simulate(ir, [x, y], np.array(parameters), groups)
    np.testing.assert_array_equal(y, x)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("words", [1, 127, 128, 129, FEW // 4, FEW // 4 + 1])
def test_what_a_read_back_brings(device: ct.Device, words: int) -> None:
    """By a launch and by a copy; several a replay, of which one begins within a buffer."""
    x = np.arange(words, dtype=np.float32)
    fn = device.compile(lambda x: (x + 1.0, (x * 2.0)[words // 2 :], x[:1] - 3.0), x)
    for scale in (1, 2, 3):
        first, half, one = fn.fetch(x * scale).result()
        np.testing.assert_array_equal(first, x * scale + 1)
        np.testing.assert_array_equal(half, (x * scale * 2)[words // 2 :])
        np.testing.assert_array_equal(one, x[:1] * scale - 3)


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120a"])
def test_a_copy_of_words_assembles(arch: str, tmp_path: Path) -> None:
    """It takes two addresses, groups, words and two offsets, as it is launched."""
    program = program_on(Caps("ptx", arch=arch))
    assert [p.source for p in program.ir.params] == [
        ("words",), ("x", "offset"), ("y", "offset")
    ]  # fmt: skip
    assert assemble_clean(program.ir, arch, tmp_path) == program.source
