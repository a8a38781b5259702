"""What the library writes is whole, or what was there stays: on a full disk, without permission."""

from __future__ import annotations

import ast
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import centella as ct
from centella.host import caches
from centella.host.files import expect_writable, replaced

TINY = Path(__file__).parents[1] / "data" / "tiny-bert"
SRC = Path(__file__).parents[2] / "src" / "centella"
posix = pytest.mark.skipif(sys.platform == "win32", reason="permissions, links and pipes of POSIX")
no_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)


def put(file: Path) -> None:
    with replaced(file) as target:
        target.write(b"new" * 100)


def trace(file: Path) -> None:
    with ct.ledger(timing=True) as led:
        (ct.ones((4,), device="cpu") + 1).numpy()
    led.trace(file)


def run(*arguments: str) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from centella.cli.app import build

    result = CliRunner().invoke(build(), ["--debug", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def embed(file: Path) -> None:
    run("embed", "a", "--model", str(TINY), "--device", "cpu", "--output", str(file))


def check_model(file: Path) -> None:
    run("check", "--model", str(TINY), "--device", "simulator", "--json", str(file))


@contextmanager
def full_disk(room: int = 100) -> Iterator[None]:
    """Files end after so many bytes; the system then refuses, as it does on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would keep what it compiled, cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes


@pytest.mark.parametrize("write", [put, trace, embed, check_model])
def test_on_a_full_disk_the_old_file_stays(tmp_path: Path, write: Callable[[Path], None]) -> None:
    file = tmp_path / "out.npy"
    for before in (b"old" * 50, None):
        if before is not None:
            file.write_bytes(before)
        with pytest.raises(OSError, match="too large") as caught, full_disk():
            write(file)
        assert caught.value.filename == str(file)
        assert (file.read_bytes() if before is not None else None) == before
        assert [f.name for f in tmp_path.iterdir()] == ["out.npy"] * (before is not None)
        file.unlink(missing_ok=True)


def test_a_saved_array_is_the_array(tmp_path: Path) -> None:
    embed(tmp_path / "out.npy")
    vectors = ct.load(TINY, device="cpu").encode(["a"])
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), vectors)


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), replaced(file) as target:
            target.write(b"part")
            raise error
    with pytest.raises(OSError) as caught, replaced(file):
        (tmp_path / "another").read_bytes()
    assert caught.value.filename == str(tmp_path / "another")
    assert (file.read_bytes(), len(list(tmp_path.iterdir()))) == (b"old", 1)


@posix
def test_links_are_followed_and_permissions_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    put(link)
    assert link.is_symlink() and file.read_bytes() == b"new" * 100
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        put(tmp_path / "fresh")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640


@posix
def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    put(pipe)
    reader.join()
    assert read == [b"new" * 100] and pipe.is_fifo()


@posix
@no_root
def test_a_file_that_may_not_be_written_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o444)
    with pytest.raises(PermissionError):
        put(file)
    with pytest.raises(OSError, match="may not write it"):
        expect_writable(file)
    assert file.read_bytes() == b"old"


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    expect_writable(tmp_path / "a")
    expect_writable(os.devnull)
    with pytest.raises(OSError, match="there is no folder"):
        expect_writable(tmp_path / "none" / "a")
    with pytest.raises(OSError, match="got a folder"):
        expect_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_cache_is_private_whatever_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches.keep("name", b"first")
    file = Path(caches.cache_folder(), "name")
    file.chmod(0o666)
    assert caches.kept("name") is None
    caches.keep("name", b"second")
    assert caches.kept("name") == b"second"
    with full_disk():
        caches.keep("name", b"x" * 200)
    assert caches.kept("name") == b"second" and len(list(file.parent.iterdir())) == 1


WRITERS = {"write_text", "write_bytes", "save", "savez", "savez_compressed", "dump"}


def test_nothing_else_in_the_library_writes_files() -> None:
    """Names of calls that write, and `open` with a mode that does."""
    wrong = []
    for path in SRC.rglob("*.py"):
        if path == SRC / "host" / "files.py" or path.parent.name == "__pyinstaller":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            modes = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            opens = name == "open" and any(set("wxa+") & set(str(m)) for m in modes)
            if name in WRITERS or opens:
                wrong.append(f"{path.relative_to(SRC)}:{node.lineno} {name}")
    assert [w for w in wrong if not w.startswith("weights/vectors.py")] == []
    assert len(wrong) == 1  # np.save, into what `replaced` opened
