"""A backend of one's own, written from docs/howto/backend.md alone: NumPy without a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.backends import opening
from centella.backends.base import Array, Backend, Buffer, DoneTicket, Submission
from centella.check import check_device
from centella.emit.program import HostProgram, Program
from centella.specs import Caps, strided

X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2


class ToyBackend(Backend):
    """Formulas, called as they are submitted."""

    name: str = "toy"
    unit: int = 1

    def __init__(self, fill: int = 0) -> None:
        self.caps: Caps = Caps(
            target="numpy", row_alignment=1, max_storage_buffers=64, max_binding=1 << 40,
            max_buffer=1 << 40, family="toy",
        )  # fmt: skip
        self.fill = fill

    def allocate(self, nbytes: int) -> Array:
        return np.full(nbytes, self.fill, np.uint8)

    def free(self, native: Array) -> None:
        del native

    def adopt(self, native: Any) -> tuple[Array, int]:
        return native.reshape(-1).view(np.uint8), native.nbytes

    def write(self, buffer: Buffer, data: Array) -> None:
        buffer.native[: data.size] = data

    def compile(self, program: Program | HostProgram) -> Any:
        return program

    def submit(self, work: Submission) -> DoneTicket:
        memory = [buffer.native for buffer in work.slots]
        for slot, data in work.uploads:
            memory[slot][: data.size] = data
        for c in work.copies:
            memory[c.target][c.start :][: c.nbytes] = memory[c.source][c.first :][: c.nbytes]
        for launch in work.launches:
            arrays = [
                strided(memory[slot], spec, offset * spec.dtype.itemsize)
                for slot, (spec, offset) in zip(launch.slots, launch.views, strict=True)
            ]
            assert isinstance(launch.program, HostProgram)
            launch.program.call(arrays[: launch.inputs], arrays[launch.inputs :])
        return DoneTicket(tuple(memory[r.slot][r.start :][: r.nbytes].copy() for r in work.reads))

    def describe(self) -> dict[str, Any]:
        return {"device": "toy", "name": "NumPy"}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ct.Device:
    """The row in the table is all that the library is told of it."""
    monkeypatch.setitem(opening.BACKENDS, "toy", (__name__, "ToyBackend"))
    return ct.device("toy", pool="poison")


def test_every_operation_is_right(toy: ct.Device) -> None:
    report = check_device(toy, seconds=0.0, rates=False)
    assert report.ok and report.passed > 100, report.card()


def test_what_users_hold_runs_on_it(toy: ct.Device) -> None:
    total = ct.State(X, device=toy)

    def step(x: ct.Tensor) -> ct.Tensor:
        total.assign(total.value + x)
        return ct.softmax(x @ x.T)

    fn = toy.compile(step, X)
    for _ in range(3):
        with ct.ledger() as led:
            y = fn(X)
            np.testing.assert_allclose(y.numpy().sum(-1), 1, rtol=1e-6)
        led.expect(uploads=1, downloads=1)
    np.testing.assert_array_equal(total.numpy(), 4 * X)


def test_what_it_leaves_out_is_refused_or_not_needed(toy: ct.Device) -> None:
    assert toy.native is None and toy.memory.free is None and toy.fault == ""
    assert repr(ct.asarray(X, device=toy))
    with pytest.raises(ct.DeviceError, match="stream: expected a CUDA device, got toy"):
        toy.stream().__enter__()
    with pytest.raises(BufferError, match="DLPack: toy does not export memory"):
        ct.asarray(X, device=toy).__dlpack__()
    with pytest.raises(BufferError, match="toy does not export"):
        toy.backend.lend(toy.pool.allocate(16), None)
    for name, text in (("toy:1", "unknown device 'toy:1'"), ("toys", "unknown device 'toys'")):
        with pytest.raises(ct.DeviceError, match=text):
            ct.device(name)
    with pytest.raises(ct.DeviceError, match="toy: expected no native=, it has no driver; got 5"):
        ct.device("toy", native=5)
    with pytest.raises(ct.DeviceError, match="toy: unknown option among speed"):
        ct.device("toy", speed=3)
    assert ct.device("toy", fill=7).backend.allocate(2).tolist() == [7, 7]
    toy.backend.before_fork()
    assert toy.backend.after_fork(child=True) and toy.backend.finish(0.0)


def test_a_class_without_a_method_is_not_opened(
    toy: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "class_of", lambda kind: type("Half", (Backend,), {}))
    with pytest.raises(TypeError, match=r"abstract.*allocate.*submit"):
        ct.device("toy", pool="exact", cache=None)
