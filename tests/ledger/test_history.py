"""What has happened to a tensor: `history`, and the counters that are computed from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.record.history import LINES

X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2


def kinds(tensor: ct.Tensor) -> list[str]:
    return [event.kind for event in tensor.history]


def test_uploaded_and_read_back(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    assert kinds(x) == ["recorded"]
    assert (x.h2d_transfers, x.d2h_transfers, x.kernel_launches) == (0, 0, 0)
    for _ in range(3):
        x.numpy()
    x.peek()
    came, read, peeked = x.history
    assert (came.kind, came.nbytes, came.times) == ("uploaded", x.spec.storage_bytes, 1)
    assert (read.kind, read.times) == ("downloaded", 3)
    assert read.nbytes == 3 * x.spec.span * 4
    assert (peeked.kind, peeked.times) == ("peeked", 1)
    assert (x.h2d_transfers, x.d2h_transfers, x.kernel_launches) == (1, 3, 0)
    assert __file__ in came.line
    assert str(came).startswith(f"uploaded at {__file__}:")
    assert "3 times" in str(read)


def test_computed_by_an_op_at_a_line(device: ct.Device) -> None:
    y = ct.softmax(ct.asarray(X, device=device))
    z = ct.relu(y * 2.0) + 1.0
    assert kinds(z) == ["recorded"]
    z.numpy()
    (computed,), (fused, read) = y.history, z.history
    assert (computed.kind, computed.what, computed.launches) == ("computed", "softmax", 1)
    assert (fused.kind, fused.what, fused.launches) == ("computed", "mul + relu + add", 1)
    assert read.kind == "downloaded"
    assert y.kernel_launches == z.kernel_launches == 1
    assert y.h2d_transfers == y.d2h_transfers == 0
    assert "1 launch)" in str(fused)


def test_a_view_shares_the_history_of_its_data(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    x[1:].T.numpy()
    assert x.d2h_transfers == x[0].d2h_transfers == 1
    wide = ct.asarray(np.zeros((300, 300), np.float32), device=device)
    wide[:, :1].numpy()  # copied together on the device, then read
    assert wide.d2h_transfers == 1


def test_how_else_a_tensor_comes_to_be(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    assert kinds(ct.empty((2, 2), device=device)) == ["reserved"]
    copy = x.copy()
    copy.numpy()
    assert (copy.history[0].kind, copy.history[0].what) == ("copied", "copy")
    zeros = ct.zeros(3, device=device)
    zeros.numpy()
    assert (zeros.history[0].kind, zeros.history[0].what) == ("computed", "fill")
    assert zeros.h2d_transfers == 0
    batch = device.batch()
    a = batch.relu(batch.upload(X))
    b = batch.matmul(a, x.T)
    batch.execute(outputs=[b])
    assert kinds(a) == ["discarded"]
    assert kinds(b) == ["computed"]
    batch.relu(x)
    lost = batch.relu(x)
    batch._recording.fail()
    assert kinds(lost) == ["failed"]


def test_imported_memory() -> None:
    x = ct.from_dlpack(X)
    assert kinds(x) == ["imported"]
    assert x.h2d_transfers == 0


def test_moved_through_the_host() -> None:
    here, there = ct.device("cpu"), ct.device("simulator")
    x = ct.asarray(X, device=here)
    y = x.to(there)
    y.numpy()
    assert x.d2h_transfers == y.h2d_transfers == 1
    assert kinds(y) == ["uploaded", "downloaded"]


def test_replayed(device: ct.Device) -> None:
    state = ct.State(np.zeros((3, 4), np.float32), device=device)

    def step(x: ct.Tensor) -> tuple[ct.Tensor, ct.Tensor]:
        state.assign(state.value + x)
        return ct.softmax(x * 2.0), x

    fn = device.compile(step, X)
    soft, same = fn(X)
    soft.numpy()
    (replayed, _) = soft.history
    assert (replayed.kind, replayed.what, replayed.launches) == ("replayed", "step: softmax", 1)
    assert (same.history[0].kind, same.kernel_launches) == (
        "replayed",
        1,
    )  # a copy: inputs are overwritten
    changed = state.value.history[0]
    assert changed.kind == "replayed"
    assert (changed.what, changed.launches) == ("step: assign", 1)


def test_foreign_kernels(device: ct.Device) -> None:
    x = ct.asarray(X, device=device) + 1.0
    with pytest.raises(ct.ContractError, match="mine cannot have run on a tensor that is pending"):
        x.record_launch("mine")
    _ = x.native
    with ct.ledger() as led:
        for _ in range(2):
            x.record_launch("mine")
    led.expect(launches=0)  # the application's, not ours
    assert (x.history[-1].kind, x.history[-1].what, x.history[-1].times) == ("launched", "mine", 2)
    assert x.kernel_launches == 3
    bad: Any
    for bad in ("", None, 3):
        with pytest.raises(ct.ContractError, match="record_launch: expected the name of a kernel"):
            x.record_launch(bad)


def test_a_history_stays_short_and_its_totals_true() -> None:
    x = ct.asarray(X, device=ct.device("cpu"))
    _ = x.native
    for i in range(3 * LINES):
        x.record_launch(f"kernel {i}")
    for _ in range(1000):
        x.numpy()
    assert len(x.history) <= LINES + 3
    assert x.kernel_launches == 3 * LINES
    assert x.d2h_transfers == 1000
    assert x.history[-1].nbytes == 1000 * X.nbytes
    assert x.history[-1].line == ""


def test_events_do_not_change() -> None:
    x = ct.asarray(X, device=ct.device("cpu"))
    with pytest.raises(AttributeError, match="immutable"):
        x.history[0].kind = "made up"
