"""Products by threads of ours: whose threads they take, and what is left of that afterwards."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.host import blas
from centella.host.blas import BLAS, Threads, taken_over
from centella.host.blockwise import PART, SHARED, parts_of
from centella.ops.matmul import op as products

RNG = np.random.default_rng(6)


class Setting:
    """A number of threads, and all that it was set to."""

    def __init__(self, count: int) -> None:
        self.seen = [count]
        self.threads = Threads(lambda: self.seen[-1], self.seen.append)


def test_products_are_alone_until_the_last_of_us_is_done() -> None:
    setting = Setting(6)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with setting.threads.alone():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with setting.threads.alone():
        assert setting.seen == [6, 1] and setting.threads.count() == 6
        thread.start()
        assert inside.wait(10)
    assert setting.seen == [6, 1] and setting.threads.count() == 6
    leave.set()
    thread.join()
    assert setting.seen == [6, 1, 6] and setting.threads.count() == 6


def test_a_failure_inside_gives_the_threads_back() -> None:
    setting = Setting(3)
    with pytest.raises(ValueError, match="inside"), setting.threads.alone():
        raise ValueError("inside")
    assert setting.seen == [3, 1, 3]


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    setting = Setting(3)
    with setting.threads.alone():
        setting.seen.append(2)
    assert setting.seen == [3, 1, 2]


def test_only_as_many_threads_are_taken_over_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(2)
    monkeypatch.setattr(blas, "BLAS", setting.threads)
    assert taken_over(2) is setting.threads
    assert taken_over(1) is taken_over(3) is None
    setting.seen.append(1)  # the application wants one thread
    assert taken_over(1) is taken_over(2) is None
    monkeypatch.setattr(blas, "BLAS", None)
    assert taken_over(2) is None


def test_of_many_threads_a_small_product_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(blas.MANY)
    monkeypatch.setattr(blas, "BLAS", setting.threads)
    with blas.around(1):
        pass
    assert setting.seen == [blas.MANY]


def test_a_small_product_is_done_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(2)
    monkeypatch.setattr(blas, "BLAS", setting.threads)
    for size in (blas.SMALL, blas.SMALL - 1):
        with blas.around(size):
            pass
    assert setting.seen == [2, 1, 2]
    device = ct.device("cpu", pool="reuse")
    x, w = RNG.standard_normal((5, 30), np.float32), RNG.standard_normal((7, 30), np.float32)
    y = ct.linear(ct.asarray(x, device=device), ct.asarray(w, device=device)).numpy()
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-5)
    assert setting.seen == [2, 1, 2, 1, 2]


def test_a_sentence_is_done_alone_and_a_batch_by_threads_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The products and the attention of 128 tokens; then of 2000, by rows."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    setting = Setting(2)
    monkeypatch.setattr(blas, "BLAS", setting.threads)
    device = ct.device("cpu", pool="reuse")
    w = ct.asarray(RNG.standard_normal((384, 1536), np.float32), device=device)
    works: tuple[Callable[[ct.Tensor], ct.Tensor], ...] = (
        lambda x: ct.linear(x, w),
        lambda x: ct.matmul(x, w.T.copy()),
        lambda x: ct.attention(*(x.reshape(1, 12, 128, 128),) * 3),
    )
    for work in works:
        setting.seen[:] = [2]
        x = ct.asarray(RNG.standard_normal((128, 1536), np.float32), device=device)
        work(x).numpy()
        assert setting.seen == [2, 1, 2], work
    seen = set()
    matmul = np.matmul

    def noted(a: Any, b: Any, **to: Any) -> Any:
        seen.add((len(a), setting.seen[-1]))
        return matmul(a, b, **to)

    monkeypatch.setattr(np, "matmul", noted)
    x = ct.asarray(RNG.standard_normal((2000, 1536), np.float32), device=device)
    ct.linear(x, w).numpy()
    assert {threads for _, threads in seen} == {1} and max(rows for rows, _ in seen) <= PART


@pytest.mark.skipif(BLAS is None, reason="NumPy's BLAS is not an OpenBLAS with threads of its own")
def test_the_blas_of_numpy_is_told() -> None:
    assert BLAS is not None
    before = BLAS.count()
    with BLAS.alone():
        assert BLAS.count() == before
        assert BLAS._read() == 1
        x = RNG.standard_normal((300, 200))
        np.testing.assert_allclose((x @ x.T)[7, 5], np.sum(x[7] * x[5]))
    assert BLAS._read() == before


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """OpenBLAS has two, also where tests run in processes of one each."""
    before = BLAS.count() if BLAS is not None else 0
    if BLAS is not None:
        BLAS._write(2)
    yield
    if BLAS is not None:
        BLAS._write(before)


def _left_in_a_child(pipe: Any) -> None:
    assert BLAS is not None
    pipe.send(BLAS._read())


@pytest.mark.skipif(BLAS is None or not hasattr(os, "fork"), reason="no OpenBLAS, or no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_meanwhile_has_its_threads() -> None:
    assert BLAS is not None
    before = BLAS.count()
    here, there = multiprocessing.Pipe()
    with BLAS.alone():
        child = multiprocessing.get_context("fork").Process(target=_left_in_a_child, args=(there,))
        child.start()
        assert here.poll(30)
        assert here.recv() == before
        child.join()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("shape", [(0, 3), (1, 5), (7, SHARED), (2 * PART, 3), (9 * PART + 1, 700)])
def test_parts_are_all_rows_once(shape: tuple[int, int], threads: int) -> None:
    parts = parts_of(shape, threads)
    seen = np.zeros(shape[0], np.int32)
    for rows, blocks in parts:
        assert seen[rows].size <= PART
        seen[rows] += 1
        assert [b.start for b in blocks] == [*([rows.start] if seen[rows].size else []),
                                             *(b.stop for b in blocks[:-1])]  # fmt: skip
        assert not blocks or blocks[-1].stop == rows.stop
    assert (seen == 1).all()
    assert threads == 1 or shape[0] < 2 or len(parts) >= threads


@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
@pytest.mark.parametrize("over", [True, False])
def test_a_product_by_rows_is_the_product(
    monkeypatch: pytest.MonkeyPatch, activation: str | None, over: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    setting = Setting(2)
    monkeypatch.setattr(products, "taken_over", lambda n: setting.threads if over else None)
    device = ct.device("cpu", pool="reuse")
    x, w = RNG.standard_normal((1700, 40), np.float32), RNG.standard_normal((600, 40), np.float32)
    bias, residual = RNG.standard_normal(600, np.float32), RNG.standard_normal((1700, 600))
    given = [ct.asarray(a, device=device) for a in (x, w, bias, residual.astype(np.float32))]
    y = ct.linear(*given[:3], activation=activation, residual=given[3]).numpy()
    sums = ct.asarray(x.astype(np.float64) @ w.T.astype(np.float64) + bias, dtype="f32",
                      device=device)  # fmt: skip
    after = sums if activation is None else getattr(ct, activation)(sums)
    np.testing.assert_allclose(y, after.numpy() + residual, rtol=0, atol=2e-4)
    assert setting.seen == ([2, 1, 2] if over else [2])


def test_a_product_of_few_rows_is_left_to_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of our threads would read the whole weight."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    setting = Setting(2)
    monkeypatch.setattr(products, "taken_over", lambda n: setting.threads)
    device = ct.device("cpu", pool="reuse")
    x, w = RNG.standard_normal((5, 3), np.float32), RNG.standard_normal((120_000, 3), np.float32)
    y = ct.linear(ct.asarray(x, device=device), ct.asarray(w, device=device)).numpy()
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-5)
    assert setting.seen == [2]


@pytest.mark.parametrize("score", [-60.0, -20.0, -1.0, 0.0, 60.0, 80.0])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e10])
def test_the_mean_of_equal_scores(score: float, size: float) -> None:
    """However far the scores are from zero, and however small the values."""
    k = np.ones((1, 1, 9, 4), np.float32)
    v = np.full((1, 1, 9, 4), size, np.float32)
    q = np.full((1, 1, 40, 4), score / 4, np.float32)
    given = [ct.asarray(a, device="cpu") for a in (q, k, v)]
    got = ct.attention(*given, scale=1.0).numpy()
    np.testing.assert_allclose(got, size, rtol=1e-5)
