"""InOut arguments: a user's kernel changes a State in place."""

from __future__ import annotations

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.lang import In, InOut, Out, f16, f32, i32, u32


@ct.kernel(workgroup=64)
def accumulate(total: InOut[f32], x: In[f32], n: u32) -> None:
    i = lang.global_id()
    with lang.if_(i < n):
        total[i] = total[i] + x[i]


@ct.kernel(workgroup=64)
def rows(table: InOut[f32, 2], counts: InOut[i32], y: Out[f32], n: u32, columns: u32) -> None:
    """Adds a row's index to the row; counts the row; writes its first element."""
    row = lang.global_id()
    with lang.if_(row < n):
        for column in lang.range(columns):
            table[row, column] = table[row, column] + lang.cast(row, f32)
        counts[row] = counts[row] + 1
        y[row] = table[row, 0]


def test_a_state_accumulates(device: ct.Device) -> None:
    total = ct.State(np.zeros(100, np.float32), device=device)
    x = ct.asarray(np.arange(100, dtype=np.float32), device=device)
    seen = []
    for _ in range(3):
        accumulate(total, x, n=100, threads=100)
        seen.append(total.value * 1)
    for i, got in enumerate(ct.fetch(*seen).result(), 1):
        assert np.array_equal(got, np.arange(100) * i)
    assert np.array_equal(total.numpy(), np.arange(100) * 3)


def test_two_states_and_an_output(device: ct.Device) -> None:
    table = ct.State(np.ones((5, 7), np.float32), device=device)
    counts = ct.State(np.zeros(5, np.int32), device=device)
    y = ct.empty(5, device=device)
    with device.batch():
        rows(table, counts, y, n=5, columns=7, threads=5)
        rows(table, counts, y, n=5, columns=7, threads=5)
    want = 1 + 2 * np.arange(5, dtype=np.float32)[:, None] + np.zeros((5, 7), np.float32)
    assert np.array_equal(table.numpy(), want)
    assert np.array_equal(counts.numpy(), np.full(5, 2))
    assert np.array_equal(y.numpy(), want[:, 0])


def test_replayed(device: ct.Device) -> None:
    total = ct.State(np.zeros(10, np.float32), device=device)

    def step(x: ct.Tensor) -> ct.Tensor:
        accumulate(total, x, n=10, threads=10)
        return total.value * 2

    fn = device.compile(step, np.zeros(10, np.float32))
    for i in range(1, 4):
        assert np.array_equal(fn(np.ones(10, np.float32)).numpy(), np.full(10, 2 * i))


def test_simulated() -> None:
    got = accumulate.simulate(
        np.ones(9, np.float32), np.arange(9, dtype=np.float32), n=9, threads=9
    )
    assert np.array_equal(got["total"], np.arange(9) + 1)


def test_an_in_argument_takes_a_state(device: ct.Device) -> None:
    total = ct.State(np.zeros(4, np.float32), device=device)
    other = ct.State(np.ones(4, np.float32), device=device)
    accumulate(total, other, n=4, threads=4)
    assert np.array_equal(total.numpy(), np.ones(4))


def test_mistakes(device: ct.Device) -> None:
    x = ct.asarray(np.ones(4, np.float32), device=device)
    total = ct.State(x)
    with pytest.raises(
        ct.TraceError, match="expected a State for 'total', which is InOut, got Tensor"
    ):
        accumulate(x, x, n=4, threads=4)
    with pytest.raises(ct.ContractError, match="is read and changed at once"):
        accumulate(total, total, n=4, threads=4)
    with pytest.raises(ct.DTypeError, match="expected f32 for 'total', got f16"):
        accumulate(ct.State(x.astype(f16)), x, n=4, threads=4)
    with pytest.raises(ct.ShapeError, match="expected rank 2 for 'table'"):
        rows(total, ct.State(np.zeros(4, np.int32), device=device), x, n=4, columns=1, threads=4)
    if device.caps.row_alignment > 1:
        padded = ct.State(np.ones((3, 5), np.float32), device=device)
        with pytest.raises(ct.ShapeError, match=r"expected InOut\[..., 2\] for 'total'"):
            accumulate(padded, x, n=4, threads=4)
    assert np.array_equal(total.numpy(), np.ones(4))
