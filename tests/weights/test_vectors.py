"""Files of vectors: whole, interrupted, of another run, and those that are none."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from centella import MissingExtraError, WeightsError
from centella.weights.vectors import VectorFile, open_vectors, write_vectors

ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)
ABOUT = {"model": "m", "bytes": 9}
SUFFIXES = [
    ".npy",
    *(
        pytest.param(s, marks=pytest.mark.skipif(
            importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed"
        ))
        for s in (".parquet", ".arrow")
    ),
]  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_interrupted_run_goes_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"v{suffix}"
    with VectorFile(path, 3, ABOUT) as file:
        file.append(ROWS[:4])
    with Path(f"{path}.part").open("ab") as end:
        end.write(b"\1\2\3\4\5")  # half a row, as a process leaves it that is killed
    assert not path.exists()
    with VectorFile(path, 3, ABOUT) as file:
        assert file.rows == 4
        file.append(ROWS[4:])
        file.finish([f"text {i}" for i in range(10)], "m")
    stored = open_vectors(path)
    np.testing.assert_array_equal(stored.vectors, ROWS)
    assert [f.name for f in tmp_path.iterdir()] == [path.name]
    if suffix != ".npy":
        assert stored.texts == [f"text {i}" for i in range(10)] and stored.model == "m"


def test_rows_of_another_run_are_kept_until_they_are_given_up(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    with VectorFile(path, 3, ABOUT) as file:
        file.append(ROWS)
    with pytest.raises(WeightsError, match=r"bytes 9, now 8\); finish that one"):
        VectorFile(path, 3, {**ABOUT, "bytes": 8})
    with pytest.raises(WeightsError, match="dim 3, now 4"):
        VectorFile(path, 4, ABOUT)
    with VectorFile(path, 3, {**ABOUT, "bytes": 8}, restart=True) as file:
        assert file.rows == 0
        file.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ended_at_once(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    Path(f"{path}.part").write_bytes(b"")
    Path(f"{path}.part.note").write_text(json.dumps(ABOUT)[:5])
    with VectorFile(path, 3, ABOUT) as file:
        assert file.rows == 0
        file.append(ROWS)
        file.finish()
    np.testing.assert_array_equal(np.load(path), ROWS)


def test_a_file_that_is_replaced_keeps_its_permissions_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.npy", tmp_path / "link.npy"
    write_vectors(real, ROWS[:1])
    real.chmod(0o600)
    link.symlink_to(real)
    with VectorFile(link, 3, ABOUT) as file:
        file.append(ROWS)
        file.finish()
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o600
    np.testing.assert_array_equal(open_vectors(link).vectors, ROWS)


def test_files_that_have_no_vectors(tmp_path: Path) -> None:
    for name, content in (("a.npy", b"no array"), ("b.npy", b""), ("c.txt", b"text")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=f"{name}: expected"):
            open_vectors(tmp_path / name)
    np.save(tmp_path / "d.npy", np.arange(6))
    with pytest.raises(WeightsError, match=r"expected vectors \[n, dim\] of floats, got \[6\]"):
        open_vectors(tmp_path / "d.npy")
    np.save(tmp_path / "e.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(WeightsError, match=r"e.npy: expected vectors in .npy"):
        open_vectors(tmp_path / "e.npy")
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(MissingExtraError, match="arrow"):
            VectorFile(tmp_path / "f.parquet", 3, ABOUT)
        return
    for name in ("f.parquet", "g.arrow"):
        (tmp_path / name).write_bytes(b"no table")
        with pytest.raises(WeightsError, match=f"{name}: expected vectors in"):
            open_vectors(tmp_path / name)
