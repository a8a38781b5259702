"""The audit: what the ledger counts against a shim around the raw calls of each driver.

A shim counts at the border itself: wgpu's queue, encoders and raw dispatches; the functions of the
CUDA driver; the arrays that go into and come out of the CPU and the simulator.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.tasks.load import load
from tests.support.devices import WINDOWED, own
from tests.support.model_common import DATA, activations_of, lengths_of, texts_of

Array = np.ndarray[Any, Any]
Amounts = Callable[..., dict[str, int]]
RNG = np.random.default_rng(5)
LARGE = np.arange(1 << 15, dtype=np.float32)
STATED = (  # what every shim sees for itself
    "uploads", "upload_bytes", "bytes_back", "copies", "copy_bytes", "launches", "submissions",
    "reading", "allocations", "allocated", "compiles", "parameter_bytes", "timing_bytes",
)  # fmt: skip


class Shim(ABC):
    """Counts raw calls of one device.

    Attributes:
        raw: what was seen; `bytes_back` came to the host, `reading` submissions brought some.
        blind: what cannot be seen there.
    """

    blind: tuple[str, ...] = ()

    def __init__(self, device: ct.Device, patch: pytest.MonkeyPatch) -> None:
        self.raw: Counter[str] = Counter()
        self.backend: Any = device.backend
        self.patch = patch
        self._works = self._reads = 0  # since the last submission
        self.install()

    @abstractmethod
    def install(self) -> None:
        """Put counters around the raw calls."""

    def around(self, owner: Any, name: str, amounts: Amounts, *, after: bool = False) -> None:
        """Count what `amounts` says of each call; `after`: of its result."""
        call = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            if not after:
                self.see(amounts(*args, **named))
            result = call(*args, **named)
            if after:
                self.see(amounts(result))
            return result

        self.patch.setattr(owner, name, counted)

    def see(self, amounts: dict[str, int]) -> None:
        """Add what one raw call did."""
        self._works += amounts.get("launches", 0) + amounts.get("copies", 0)
        self._reads += amounts.get("bytes_back", 0)
        self.raw.update(amounts)

    def submitted(self, *_: Any, **__: Any) -> dict[str, int]:
        """What the raw calls up to a submission make it."""
        amounts = {"submissions": int(self._works > 0), "reading": int(self._reads > 0)}
        self._works = self._reads = 0
        return amounts

    def agree(self, counts: ct.Counts) -> None:
        """Assert that a ledger counted the same, to the byte."""
        told = counts.as_dict()
        told["bytes_back"] = counts.download_bytes + counts.peek_bytes
        told["reading"] = counts.downloads
        told["allocated"] = self.raw["allocated"]
        seen = {name: self.raw[name] for name in STATED if name not in self.blind}
        assert seen == {name: told[name] for name in seen}


class CpuShim(Shim):
    """The arrays that go into and come out of the worker."""

    blind = ("compiles",)  # formulas are called as they are

    def install(self) -> None:
        from centella.backends import cpu

        backend, run = self.backend, self.backend._run

        def counted(work: Any, *rest: Any) -> Any:
            for _, data in work.uploads:
                self.see({"uploads": 1, "upload_bytes": data.nbytes})
            back = run(work, *rest)
            self.see({"bytes_back": sum(data.nbytes for data in back)})
            self.see(self.submitted())
            return back

        self.patch.setattr(backend, "_run", counted)
        self.around(backend, "write", lambda _, d: {"uploads": 1, "upload_bytes": d.nbytes})
        self.around(backend, "allocate", lambda n: {"allocations": 1, "allocated": n})
        self.around(backend, "_launch", lambda *_: {"launches": 1})
        self.around(cpu, "copied", lambda _, c: {"copies": 1, "copy_bytes": c.nbytes})


class SimulatorShim(Shim):
    """Words allocated, written, simulated and handed back."""

    def install(self) -> None:
        from centella.backends import simulator

        backend, submit = self.backend, self.backend.submit

        def counted(work: Any) -> Any:
            for copy in work.copies:
                self.see({"copies": 1, "copy_bytes": copy.nbytes})
            ticket = submit(work)
            self.see({"bytes_back": sum(d.nbytes for d in ticket._results)})
            self.see(self.submitted())
            return ticket

        self.patch.setattr(backend, "submit", counted)
        self.around(backend, "write", lambda _, d: {"uploads": 1, "upload_bytes": d.nbytes})
        self.around(simulator, "simulate", lambda *_, **__: {"launches": 1})
        self.around(backend, "allocate", lambda n: {"allocations": 1, "allocated": n})
        self.around(backend, "compile", lambda _: {"compiles": 1})
        # Each launch takes its words and the number of groups.
        words = lambda array: {"parameter_bytes": array.nbytes + 4}  # noqa: E731  # as the others
        self.around(simulator, "_parameters", words, after=True)


class Calls:
    """A library whose functions can be replaced; cffi's own cannot."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class WebGpuShim(Shim):
    """What is called of wgpu-native: its queue, encoders and passes; and what wgpu-py makes."""

    def install(self) -> None:
        from centella.backends.webgpu import raw

        native: Any = raw.lib
        self.usage = native.wgpuBufferGetUsage
        counted = Calls(native)
        self.around(counted, "wgpuQueueWriteBuffer", self._write)
        self.around(counted, "wgpuQueueSubmit", self._submit)
        self.around(counted, "wgpuCommandEncoderCopyBufferToBuffer", self._copy)
        self._encoded = 0
        self._finished: dict[Any, int] = {}  # launches by the commands that have them
        self.around(counted, "wgpuComputePassEncoderDispatchWorkgroups", self._launch)
        self.around(counted, "wgpuCommandEncoderFinish", self._finish, after=True)
        self.patch.setattr(raw, "lib", counted)
        self.around(self.backend.native, "create_buffer", self._buffer)
        self.around(self.backend.native, "create_compute_pipeline", lambda **_: {"compiles": 1})

    def _launch(self, _: Any, across: int, down: int, deep: int) -> dict[str, int]:
        """One of no groups runs nothing: it has a program compiled before that is timed."""
        self._encoded += across * down * deep > 0
        return {}

    def _finish(self, commands: Any) -> dict[str, int]:
        self._finished[commands], self._encoded = self._encoded, 0
        return {}

    def _submit(self, _: Any, many: int, commands: Any) -> dict[str, int]:
        """What is encoded, now or while somebody waited, runs when it is submitted."""
        self.see({"launches": sum(self._finished.pop(commands[i]) for i in range(many))})
        return self.submitted()

    def _write(self, _: Any, buffer: Any, __: int, ___: Any, nbytes: int) -> dict[str, int]:
        import wgpu

        if self.usage(buffer) & wgpu.BufferUsage.UNIFORM:
            return {"parameter_bytes": nbytes}
        return {"uploads": 1, "upload_bytes": nbytes}

    def _buffer(self, *, size: int, usage: int) -> dict[str, int]:
        import wgpu

        if usage & wgpu.BufferUsage.STORAGE:
            return {"allocations": 1, "allocated": size}
        return {"own_buffers": 1}  # parameters, read-backs, time stamps: no value's

    def _copy(self, _: Any, source: Any, __: int, target: Any, ___: int, n: int) -> dict[str, int]:
        import wgpu

        if self.usage(source) & wgpu.BufferUsage.QUERY_RESOLVE:
            return {"timing_bytes": n}
        if self.usage(target) & wgpu.BufferUsage.MAP_READ:
            return {"bytes_back": n}
        return {"copies": 1, "copy_bytes": n}


class Arguments(ctypes.Structure):
    """What the launch that copies a few words is given."""

    _fields_ = (
        ("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("groups", ctypes.c_uint32),
        ("words", ctypes.c_uint32),
    )  # fmt: skip


class CudaShim(Shim):
    """The functions of the CUDA driver; launches that a graph was captured with run with it."""

    blind = ("parameter_bytes",)  # the driver takes addresses of structs, not their sizes

    def install(self) -> None:
        from centella.backends.cuda.driver import driver

        self._capturing = False
        self._captured = 0
        self._graphs: dict[int, int] = {}
        self.around(driver, "cuMemcpyHtoDAsync", lambda *a: {"uploads": 1, "upload_bytes": a[2]})
        self.around(driver, "cuMemcpyDtoHAsync", lambda *a: {"bytes_back": a[2]})
        self.around(driver, "cuMemcpyDtoDAsync", lambda *a: {"copies": 1, "copy_bytes": a[2]})
        self.around(driver, "cuMemAlloc", lambda n: {"allocations": 1, "allocated": n})
        self.around(driver, "cuModuleLoadDataEx", lambda *_: {"compiles": 1})
        self.around(driver, "cuLaunchKernel", self._launch)
        self.around(driver, "cuLaunchKernelEx", self._launch)
        self.around(driver, "cuStreamBeginCapture", self._begin)
        self.around(driver, "cuGraphInstantiate", self._instantiate, after=True)
        self.around(driver, "cuGraphLaunch", lambda g, _: {"launches": self._graphs[int(g)]})
        self.around(self.backend, "submit", self.submitted, after=True)

    def _launch(self, function: Any, *rest: Any) -> dict[str, int]:
        if function is self.backend._copier:  # of a plan it is none: it copies from or to the host
            given = Arguments.from_address(ctypes.c_uint64.from_address(rest[8]).value)
            if self._on_host(given.target):
                return {"bytes_back": 4 * given.words}
            return {"uploads": 1, "upload_bytes": 4 * given.words}
        self._captured += self._capturing
        return {"launches": int(not self._capturing)}

    @staticmethod
    def _on_host(address: int) -> bool:
        from centella.backends.cuda.driver import check, driver

        which = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        kind = check(driver.cuPointerGetAttribute(which, address))
        return int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)

    def _begin(self, *_: Any) -> dict[str, int]:
        self._capturing, self._captured = True, 0
        return {}

    def _instantiate(self, result: Any) -> dict[str, int]:
        self._capturing = False
        self._graphs[int(result[1])] = self._captured
        return {}


SHIMS: dict[str, type[Shim]] = {
    "cpu": CpuShim, "simulator": SimulatorShim, "webgpu": WebGpuShim, "cuda": CudaShim,
}  # fmt: skip


@pytest.fixture
def where(device: ct.Device) -> ct.Device:
    return own(device)


@pytest.fixture
def shim(where: ct.Device, monkeypatch: pytest.MonkeyPatch) -> Shim:
    return SHIMS[where.name.partition(":")[0]](where, monkeypatch)


# -- what is audited ------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", [False, True], ids=["counted", "timed"])
def test_embedding_a_text_from_the_file_on(where: ct.Device, shim: Shim, timing: bool) -> None:
    pytest.importorskip("tokenizers")
    texts = texts_of("tiny-bert")[0][:2]
    with ct.ledger(timing=timing) as led:
        embedder = load(DATA / "tiny-bert", device=where)
        loaded = led.counts.uploads
        first = embedder.encode(texts)
        second = embedder.encode(texts)
    np.testing.assert_array_equal(first, second)
    assert loaded > 0
    led.expect(uploads=loaded + 2, downloads=2, submissions=2, copies=0)
    shim.agree(led.counts)
    assert where.memory.held == shim.raw["allocated"] or where.name == "cpu"
    with ct.ledger(timing=timing) as led, ct.forbid("compile", "allocation"):
        before = Counter(shim.raw)
        embedder.encode(texts)
    shim.raw.subtract(before)
    shim.agree(led.counts)
    led.expect(uploads=1, downloads=1, submissions=1, allocations=0, compiles=0)


def test_an_encoder_block(where: ct.Device, shim: Shim) -> None:
    pytest.importorskip("tokenizers")
    stored = activations_of("tiny-bert", 0)
    with ct.ledger() as led:
        model = load(DATA / "tiny-bert", device=where).model
        x = ct.asarray(stored["embeddings"].astype(np.float32), device=where)
        lengths = ct.asarray(lengths_of(stored), device=where)
    loaded = led.counts.uploads
    with ct.ledger() as block:
        y = model.encoder.layer[0](x, lengths)
        block.expect(uploads=0, downloads=0, copies=0, submissions=1)
        y.numpy()
    # qkv, attention, output, norm, the two of the feed-forward network, norm
    block.expect(launches=7, downloads=1, submissions=1, uploads=0)
    assert loaded > 0
    whole = ct.Counts(**{k: v + block.counts.as_dict()[k] for k, v in led.counts.as_dict().items()})
    shim.agree(whole)
    real = stored["attention_mask"] == 1
    np.testing.assert_allclose(y.numpy()[real], stored["layer0"][real], atol=1e-5)


@pytest.mark.parametrize("timing", [False, True], ids=["counted", "timed"])
def test_a_replay(where: ct.Device, shim: Shim, timing: bool) -> None:
    w = RNG.standard_normal((5, 7)).astype(np.float32)
    total = RNG.standard_normal((3, 7)).astype(np.float32)
    with ct.ledger(timing=timing) as led:
        weight, state = ct.asarray(w, device=where), ct.State(total, device=where)

        def step(x: ct.Tensor, y: ct.Tensor) -> tuple[ct.Tensor, ct.Tensor]:
            state.assign(state.value + x)
            return ct.softmax(ct.linear(x * 2.0 + y, weight)), x

        a, b = (RNG.standard_normal((3, 7)).astype(np.float32) for _ in range(2))
        fn = where.compile(step, a, b)
        on_device = ct.asarray(b, device=where)
        for x, y in ((a, b), (b, a), (a, on_device), (on_device, on_device)):
            ct.fetch(*fn(x, y)).result()
        fn(a, a)
        state.numpy()
    shim.agree(led.counts)
    # Weights, the tensor, and one write for the arrays of a call; a tensor is copied once.
    led.expect(uploads=6, copies=2, submissions=6, downloads=5)
    with ct.ledger(timing=timing) as led, ct.forbid("compile", "allocation"):
        before = Counter(shim.raw)
        fn(b, b)
        where.synchronize()
    shim.raw.subtract(before)
    shim.agree(led.counts)
    led.expect(uploads=1, submissions=1, launches=fn.launches, downloads=0, compiles=0)


@pytest.mark.devices(*WINDOWED)
@pytest.mark.parametrize("timing", [False, True], ids=["counted", "timed"])
def test_launches_on_parts(where: ct.Device, shim: Shim, timing: bool) -> None:
    w, x = (RNG.standard_normal(shape).astype(np.float32) for shape in ((75, 41), (30, 41)))
    with ct.ledger(timing=timing) as led:
        weight = ct.asarray(w, device=where)
        lazily = ct.softmax(ct.linear(ct.asarray(x, device=where), weight))
        first = lazily.numpy()
        led.expect(submissions=1, downloads=1)
        launches, planned = led.counts.launches, len(where.last_plan.launches)
        replay = where.compile(lambda x: ct.softmax(ct.linear(x, weight)), x)
        second = replay(x).numpy()
    np.testing.assert_array_equal(first, second)
    assert replay.launches == launches == planned > lazily.kernel_launches > 1
    led.expect(launches=2 * launches, submissions=2)
    shim.agree(led.counts)


def test_odd_shapes_views_and_peeks(where: ct.Device, shim: Shim) -> None:
    with ct.ledger() as led:
        for n in (1, 7, 300):
            odd = RNG.standard_normal((n, 3)).astype(np.float16)
            with where.batch() as batch:
                y = ct.softmax(batch.upload(odd)) + batch.upload(odd)
                z = y * 2.0
            ct.fetch(y, z, y[:, 1:], z.T[0]).result()
            (ct.asarray(LARGE, device=where) + float(n)).numpy()
            ct.asarray(odd, device=where)
            (ct.asarray(odd, device=where)[:, 1:] * 3.0).numpy()
        where.synchronize()
    shim.agree(led.counts)
    before = Counter(shim.raw)
    with ct.ledger() as led:
        z.peek()
    shim.raw.subtract(before)
    led.expect(peeks=1, downloads=0, download_bytes=0)
    assert led.counts.peek_bytes == shim.raw["bytes_back"] > 0


def test_a_tensor_moves_between_devices_through_the_host(where: ct.Device, shim: Shim) -> None:
    data = RNG.standard_normal((5, 3)).astype(np.float32)
    other = ct.device("cpu")
    with ct.ledger() as led:
        there = ct.asarray(data, device=where).to(other)
        np.testing.assert_array_equal((there if other is where else there + 0.0).numpy(), data)
    moved = 2
    if where.name == "cpu":
        pytest.skip("both devices are the CPU")
    led.expect(uploads=moved, downloads=moved)
    assert shim.raw["uploads"] == 1
    assert led.counts.download_bytes == shim.raw["bytes_back"] + data.nbytes
