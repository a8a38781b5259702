"""Files of vectors: whole, interrupted, of another run, and those that are none."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from centella import MissingExtraError, ShapeError, WeightsError
from centella.weights.vectors import HEADER, VectorFile, open_vectors, write_vectors

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


def test_a_run_that_goes_on_knows_how_many_texts_were_cut(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    for cut in (3, 0, 2):
        with VectorFile(path, 3, ABOUT) as file:
            before = file.cut
            file.append(ROWS, cut)
            assert file.cut == before + cut
    with VectorFile(path, 3, ABOUT) as file:
        assert (file.rows, file.cut) == (30, 5)
    with VectorFile(path, 3, ABOUT, restart=True) as file:
        assert (file.rows, file.cut) == (0, 0)


def test_a_run_with_an_option_more_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    with VectorFile(path, 3, {**ABOUT, "prompt_name": "query"}) as file:
        file.append(ROWS, 1)
    with pytest.raises(WeightsError, match=r"prompt_name 'query', now None\); finish that one"):
        VectorFile(path, 3, ABOUT)
    with VectorFile(path, 3, {**ABOUT, "prompt_name": "query"}) as file:
        assert file.rows == 10


@pytest.mark.parametrize("text", ['{"a"', "[]", "", "[" * 9999, '{"cut": "a"}', '{"cut": 1.5}'])
def test_a_note_from_which_no_run_is_known(tmp_path: Path, text: str) -> None:
    path = tmp_path / "v.npy"
    Path(f"{path}.part").write_bytes(bytes(HEADER + 36))
    Path(f"{path}.part.note").write_text(f"{HEADER + 36}\n{text}")
    with pytest.raises(WeightsError, match=r"v\.npy\.part\.note: expected .* --restart") as caught:
        VectorFile(path, 3, ABOUT)
    assert len(str(caught.value)) < len(str(path)) + 300
    with VectorFile(path, 3, ABOUT, restart=True) as file:
        assert file.rows == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dim", [0, 8])
def test_no_rows(tmp_path: Path, suffix: str, dim: int) -> None:
    path = tmp_path / f"v{suffix}"
    write_vectors(path, np.zeros((0, dim), np.float32))
    assert open_vectors(path).vectors.shape == (0, dim)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs and sockets of POSIX")
@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".arrow"])
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    path = Path(f"v{suffix}")

    def refused(kind: str) -> None:
        with pytest.raises(WeightsError, match=rf"v\{suffix}: expected a file of vectors, {kind}"):
            open_vectors(path)

    os.mkfifo(path)
    refused("got a FIFO")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        refused("got a socket")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused("got a device")
    path.unlink()
    path.mkdir()
    refused("got a folder")
    path.rmdir()
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        open_vectors(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_vectors_outlive_their_file(tmp_path: Path, suffix: str) -> None:
    """A file that is mapped and then cut short would end the process."""
    path = tmp_path / f"v{suffix}"
    rows = np.ones((20_000, 8), np.float32)
    write_vectors(path, rows, ["a"] * len(rows))
    stored = open_vectors(path)
    os.truncate(path, 500)
    np.testing.assert_array_equal(stored.vectors, rows)
    with pytest.raises(WeightsError, match=rf"v\{suffix}: expected vectors"):
        open_vectors(path)


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


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_that_a_crash_left_behind_the_note_are_computed_again(
    tmp_path: Path, rows: int
) -> None:
    path = tmp_path / "v.npy"
    with VectorFile(path, 3, ABOUT) as file:
        file.append(ROWS[:4])
    with Path(f"{path}.part").open("ab") as end:
        end.write(bytes(12 * rows))  # zeros, as a file system leaves them that lost its power
    with VectorFile(path, 3, ABOUT) as file:
        assert file.rows == 4
        assert Path(f"{path}.part").stat().st_size == HEADER + 4 * 12
        file.append(ROWS[4:])
        file.finish()
    np.testing.assert_array_equal(np.load(path), ROWS)


def test_another_run_has_no_rows_before_its_note_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "v.npy", {**ABOUT, "bytes": 8}
    with VectorFile(path, 3, ABOUT) as file:
        file.append(ROWS)

    def crash(_: int) -> None:
        raise KeyboardInterrupt

    for ended in (1, 2):  # as the rows are cut; as the note is written
        calls = iter([*[lambda _: None] * (ended - 1), crash])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "fsync", lambda number: next(calls)(number))  # noqa: B023
            VectorFile(path, 3, other, restart=True)
        for about in (ABOUT, other):
            with VectorFile(path, 3, about) as file:
                assert file.rows == 0


@pytest.mark.parametrize("note", [json.dumps(ABOUT)[:5], f"999\n{json.dumps(ABOUT)}", "", "x\n"])
def test_a_note_that_says_nothing_of_the_part(tmp_path: Path, note: str) -> None:
    path = tmp_path / "v.npy"
    Path(f"{path}.part").write_bytes(b"")
    Path(f"{path}.part.note").write_text(note)
    with VectorFile(path, 3, ABOUT) as file:
        assert file.rows == 0


def test_a_part_that_is_gone_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    with VectorFile(path, 3, ABOUT) as file:
        file.append(ROWS)
    Path(f"{path}.part").unlink()
    with VectorFile(path, 3, {**ABOUT, "bytes": 8}) as file:  # of which run does not matter
        assert file.rows == 0
        file.append(ROWS)
        file.finish()
    np.testing.assert_array_equal(np.load(path), ROWS)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_that_are_unequal_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"v{suffix}"
    with VectorFile(path, 3, ABOUT) as file:
        for wrong in (ROWS[:, :2], ROWS[0]):
            with pytest.raises(ShapeError, match=r"v\.\w+: expected rows \[n, 3\], got \["):
                file.append(wrong)
        file.append(ROWS)
        if suffix != ".npy":
            for count in (9, 11):
                with pytest.raises(
                    ShapeError, match=f"a text for each of the 10 rows, got {count}"
                ):
                    file.finish(["text"] * count)
        file.discard()
    with pytest.raises(ShapeError, match=r"expected vectors \[n, dim\], got \[3\]"):
        write_vectors(path, ROWS[0], ["text"] * 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]],
            "expected rows of one length in embedding, got 2, 1",
        ),
        ([[1.0, 2.0], None], "expected rows of one length in embedding, got 2, no row"),
        ([[1.0, 2.0], [3.0, None]], "expected numbers in embedding, got 1 missing"),
        ([1.0, 2.0], "expected lists in embedding, got double"),
    ],
)
def test_tables_whose_rows_are_unequal(
    tmp_path: Path, suffix: str, rows: list[object], text: str
) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table, path = arrow.table({"embedding": rows}), tmp_path / f"v{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as out:
            out.write_table(table)
    with pytest.raises(WeightsError, match=f"{path.name}: expected vectors in .*{text}"):
        open_vectors(path)


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
