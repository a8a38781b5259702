"""`ct.Index` beside NumPy in float64: rows, scores, order, sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.tasks import search
from centella.weights.vectors import write_vectors

RNG = np.random.default_rng(7)


@pytest.mark.devices("cpu", "webgpu")
@pytest.mark.parametrize(
    ("n", "dim", "queries", "k", "dtype"),
    [
        (5, 7, 3, 10, None),  # more rows wanted than there are
        (2048, 16, 1, 10, None),
        (5000, 24, 5, 10, "f16"),
        (5000, 24, 2, 150, None),  # more than are chosen at a time
        (9001, 8, 67, 3, "bf16"),  # several parts, and queries in several turns
    ],
)
def test_the_nearest_rows(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch,
    n: int, dim: int, queries: int, k: int, dtype: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(search, "PART", 4096)
    vectors = RNG.standard_normal((n, dim)).astype(np.float32)
    vectors[0] *= 9
    vectors[n // 2] = vectors[0]
    asked = np.concatenate([vectors[:1], RNG.standard_normal((queries, dim))[1:]], 0)
    index = ct.Index(vectors, device=device, dtype=dtype)
    nearest = index.search(asked.astype(np.float32), k)
    if dtype is not None:
        vectors, asked = (
            ct.asarray(x, "f32", device="cpu").astype(dtype).astype("f32").numpy()
            for x in (vectors, asked)
        )
    scores = asked.astype(np.float32).astype(np.float64) @ vectors.T.astype(np.float64)
    best = -np.sort(-scores, axis=1)[:, :k]
    assert nearest.rows.dtype == np.int64 and nearest.rows.shape == best.shape
    assert all(len(set(rows)) == len(rows) for rows in nearest.rows.tolist())
    np.testing.assert_allclose(nearest.scores, best, rtol=1e-5, atol=1e-5)
    # Neighbours whose scores differ by a rounding may change places.
    named = np.take_along_axis(scores, nearest.rows, 1)
    np.testing.assert_allclose(named, best, rtol=1e-5, atol=1e-5)
    if n > 5:
        assert set(nearest.rows[0, :2].tolist()) == {0, n // 2}


def test_a_search_moves_the_queries_and_what_it_finds() -> None:
    index = ct.Index(RNG.standard_normal((3000, 8)).astype(np.float32), device="cpu")
    asked = RNG.standard_normal((2, 8)).astype(np.float32)
    first = index.search(asked, 4)
    with ct.ledger() as led:
        again = index.search(asked, 4)
    led.expect(uploads=1, downloads=1, submissions=1, compiles=0)
    assert led.counts.download_bytes == 2 * 4 * (4 + 4)
    np.testing.assert_array_equal(first.rows, again.rows)
    one = index.search(asked[1].astype(np.float64), 4)
    np.testing.assert_array_equal(one.rows, first.rows[1:])


def test_vectors_of_a_device_and_of_files(tmp_path: Path) -> None:
    vectors = RNG.standard_normal((300, 6)).astype(np.float32)
    on_device = ct.Index(ct.asarray(vectors, device="cpu"))
    assert repr(on_device) == "<Index of 300 x 6 f32 on cpu>" and on_device.nbytes == vectors.nbytes
    write_vectors(tmp_path / "v.npy", vectors)
    mapped = ct.Index.open(tmp_path / "v.npy", device="cpu", dtype="f32")
    for index in (on_device, mapped):
        assert index.search(vectors[17:18], 1).rows.shape == (1, 1)
    np.testing.assert_array_equal(
        on_device.search(vectors[:9], 5).rows, mapped.search(vectors[:9], 5).rows
    )


def test_vectors_that_are_no_arrays() -> None:
    rows = [[1.0, 2.0], [3.0, -4.0]]
    wide = np.array(rows)
    for given in (rows, tuple(map(tuple, rows))):
        index = ct.Index(given, device="cpu")
        assert (index.shape, index.dtype) == ((2, 2), ct.f32)
        np.testing.assert_array_equal(index.search(wide, 2).rows, [[0, 1], [1, 0]])
    assert ct.Index(wide, device="cpu", dtype="f32").shape == (2, 2)
    for wrong, text in ((wide, r"pass dtype="), (None, "got NoneType"), ("ab", "got str"),
                        ([[1, 2]], "expected floats, got i32")):  # fmt: skip
        with pytest.raises(ct.DTypeError, match=text):
            ct.Index(wrong, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ct.ShapeError, match="Index: expected rows of equal length, got 1 and 2"):
        ct.Index([[1.0], [1.0, 2.0]], device="cpu")


def test_what_is_refused() -> None:
    good = RNG.standard_normal((4, 3)).astype(np.float32)
    bad = good.copy()
    bad[2, 1] = np.nan
    with pytest.raises(ct.ContractError, match="within the range of f32, got nan in row 2"):
        ct.Index(bad, device="cpu")
    with pytest.raises(ct.ShapeError, match=r"vectors \[n, dim\], got \[4\]"):
        ct.Index(good[:, 0], device="cpu")
    with pytest.raises(ct.ShapeError, match=r"got \[0, 3\]"):
        ct.Index(good[:0], device="cpu")
    with pytest.raises(ct.DTypeError, match="expected floats, got i32"):
        ct.Index(good.astype(np.int32), device="cpu")
    with pytest.raises(ct.ShapeError, match="a text for each of the 4 rows, got 1"):
        ct.Index(good, texts=["a"], device="cpu")
    index = ct.Index(good, device="cpu")
    with pytest.raises(ct.ShapeError, match=r"queries \[queries, 3\] or \[3\], got \[2\]"):
        index.search(good[0, :2])
    with pytest.raises(ct.DTypeError, match="queries of floats, got int64"):
        index.search(np.arange(3))
    for wrong, error, text in (
        ([[1.0, 2.0, 3.0], [1.0, 2.0]], ct.ShapeError, "rows of equal length, got 2 and 3"),
        (1.0, ct.ShapeError, r"or \[3\], got \[\]"),
        (np.zeros((1, 1, 3)), ct.ShapeError, r"or \[3\], got \[1, 1, 3\]"),
        ([], ct.ShapeError, r"or \[3\], got \[0\]"),
        ("a text", ct.DTypeError, "expected numbers, .* got str"),
        (None, ct.DTypeError, "expected numbers, .* got NoneType"),
        (np.array([None] * 3), ct.DTypeError, "got ndarray of object"),
        (bad, ct.ContractError, "finite numbers .* got nan in query 2"),
        ([[0.0] * 3, [0.0, 1e300, 0.0]], ct.ContractError, r"got 1e\+300 in query 1"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^search: .*{text}"):
            index.search(wrong)  # type: ignore[arg-type]
    for texts in ("text", 4, (t for t in "text")):
        with pytest.raises(ct.DTypeError, match="expected texts in a list, got"):
            ct.Index(good, texts=texts, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ct.ShapeError):
        index.search(good, 0)
    assert index.search(good, 1).rows.shape == (4, 1)


def test_scores_beyond_f32_are_infinite() -> None:
    index = ct.Index([[3e38, 3e38], [1.0, 0.0]], device="cpu")
    nearest = index.search([3e38, 3e38])
    assert (nearest.rows.tolist(), nearest.scores[0, 0]) == ([[0, 1]], np.inf)


@pytest.mark.devices("cpu", "webgpu", "cuda")
def test_values_beyond_the_range_of_the_dtype_are_refused(device: ct.Device) -> None:
    vectors = RNG.standard_normal((5000, 4)).astype(np.float32)
    for dtype, value, shown in (("f16", -65_536.0, "65536"), ("bf16", 3.4e38, r"3\.4e\+38"),
                                ("f32", np.inf, "inf"), ("f32", np.nan, "nan")):  # fmt: skip
        vectors[4321, 2] = value
        text = f"within the range of {dtype}, got {shown} in row 4,321"
        with pytest.raises(ct.ContractError, match=text):
            ct.Index(vectors, device=device, dtype=dtype)
        with pytest.raises(ct.ContractError, match=text):
            ct.Index(ct.asarray(vectors, device=device), dtype=dtype)
    vectors[4321, 2] = 65_504.0
    index = ct.Index(vectors, device=device, dtype="f16")
    assert index.search(np.array([0, 0, 1.0, 0]), 1).rows.tolist() == [[4321]]


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_queries_beyond_the_range_of_the_dtype(device: ct.Device, dtype: str) -> None:
    """They are scaled by a power of 2, which changes no bit of a score."""
    vectors = RNG.standard_normal((300, 8)).astype(np.float32)
    index, asked = ct.Index(vectors, device=device, dtype=dtype), vectors[[7, 70]]
    plain = index.search(asked, 3)
    for scale in (2.0**20, 2.0**-30):
        scaled = index.search(asked * np.float32(scale), 3)
        np.testing.assert_array_equal(scaled.rows, plain.rows)
        np.testing.assert_array_equal(scaled.scores, plain.scores * np.float32(scale))
    assert (index.search(asked * 0, 3).scores == 0).all()


def test_sizes_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ct.Index(np.ones((5, 8), np.float32), device="cpu")
    assert index._most() == search.PART
    monkeypatch.setattr(search, "LARGEST", 1 << 10)
    assert index._most() == 32
    monkeypatch.setattr(search, "LARGEST", 1)
    assert index._most() == 1 and len(index) == 5


@pytest.mark.parametrize("text", ["a text", ["a text", "another"]])
def test_texts_are_no_vectors(text: Any) -> None:
    index = ct.Index(np.eye(3, dtype=np.float32), device="cpu")
    model = ct.load("tests/data/tiny-bert", device="cpu", task="embed")
    said = r": expected numbers, .* got (str|list of str); model\.encode\(texts\) gives vectors"
    with pytest.raises(ct.DTypeError, match=f"^search{said}"):
        index.search(text)
    with pytest.raises(ct.DTypeError, match=f"^Index{said}"):
        ct.Index(text, device="cpu")
    with pytest.raises(ct.DTypeError, match=f"^similarity{said}"):
        model.similarity(text, np.eye(3))
