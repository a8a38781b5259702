"""Files that the library writes: whole, or not at all.

The content goes to a temporary name in the same folder, which then replaces the file. Where writing
fails, on a full disk say, the temporary file goes and the old file stays as it was.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Self


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` at the end of the block; an exception leaves `path` alone.

    A link is followed, and a file that exists keeps its permissions. A pipe or a device has no
    content to lose: it is written directly.

    Raises:
        OSError: the file, or its folder, cannot be written; it has the name that was given.
    """
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode if os.path.exists(target) else None
        if mode is not None and not stat.S_ISREG(mode):
            with open(target, "wb") as file:
                yield file
            return
        if mode is not None:
            os.close(os.open(target, os.O_WRONLY))  # a file that refuses to be written stays
        with whole(target) as file:
            if mode is not None:
                os.chmod(file.name, stat.S_IMODE(mode))
            yield file
    except OSError as error:
        if error.errno is not None and error.filename in (None, target):
            error.filename = os.fspath(path)
        raise


@contextmanager
def whole(target: str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new binary file beside `target`, which it replaces at the end of the block.

    Args:
        target: the name that it gets; a link of that name is replaced, not followed.
        mode: its permissions, before the umask.
    """
    beside = (
        f".{os.getpid()}.{os.urandom(4).hex()}"  # short: the target's may be as long as names get
    )
    temporary = os.path.join(os.path.dirname(target), beside)

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        with open(temporary, "xb", opener=create) as file:
            yield file
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename, error.filename2 = target, None
        raise


def expect_writable(path: str | os.PathLike[str]) -> None:
    """Refuse, before work is done, a file that could not be written after it; creates nothing.

    Raises:
        OSError: no such folder, a folder in place of a file, or no permission.
    """
    folder = os.path.dirname(os.path.realpath(path))
    shown = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise OSError(f"{path}: there is no folder {shown}")
    if os.path.isdir(path):
        raise OSError(f"{path}: expected a file that can be written, got a folder")
    exists = os.path.exists(path)
    special = exists and not os.path.isfile(path)
    if exists and not os.access(path, os.W_OK):
        raise OSError(f"{path}: expected a file that can be written; this user may not write it")
    if not special and not os.access(folder, os.W_OK):
        raise OSError(f"{path}: expected a folder that can be written; this user may not")


class Growing:
    """A file that is written over several runs: its bytes, and a note of what run they are of.

    They stand beside the file, in `F.part` and `F.part.note`, until it gets its name. The note also
    says how many bytes are on the disk: it is written after them, and what a crash left behind them
    is cut off by the next run.

    Args:
        path: the file; a link is followed.

    Attributes:
        size: bytes that are there, 0 where there is no part or no note.
        note: what the run before left, "" where there was none.

    Raises:
        OSError: the file cannot be written; it has the name of the part.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._target = os.path.realpath(path)
        self.part: str = f"{self._target}.part"
        self._file: BinaryIO | None = None
        self.size: int = 0
        self.note: str = ""
        with suppress(OSError, ValueError), open(f"{self.part}.note", encoding="utf-8") as file:
            size, note = int(file.readline()), file.read()
            if os.path.getsize(self.part) >= size >= 0:
                self.size, self.note = size, note

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def open(self, size: int, note: str) -> None:
        """Go on behind so many bytes of what is there, with this note; behind 0 begin anew."""
        self._file = open(self.part, "r+b" if size else "w+b")  # noqa: SIM115  # closed on exit
        self.size, self.note = size, note
        try:
            self._file.truncate(size)
            self._file.seek(size)
            self._saved()
        except BaseException:
            self._file.close()
            raise

    def append(self, content: bytes, note: str) -> None:
        """Write behind what is there; on return it is on the disk, and the note says so."""
        assert self._file is not None, "open comes first"
        try:
            self._file.write(content)
        except OSError as error:
            error.filename = self.part
            raise
        self.size, self.note = self.size + len(content), note
        self._saved()

    def _saved(self) -> None:
        """Wait until the bytes are on the disk, and note how many."""
        assert self._file is not None, "open comes first"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            with whole(f"{self.part}.note") as file:
                file.write(f"{self.size}\n{self.note}".encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = self.part
            raise

    def begin(self, content: bytes) -> None:
        """Write over the first bytes; nothing is appended after it."""
        assert self._file is not None, "open comes first"
        self._file.seek(0)
        self._file.write(content)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def rename(self) -> None:
        """Give the file its name; one that exists is replaced and keeps its permissions."""
        if os.path.exists(self._target):
            os.chmod(self.part, stat.S_IMODE(os.stat(self._target).st_mode))
        os.replace(self.part, self._target)

    def discard(self) -> None:
        """Remove part and note."""
        for name in (self.part, f"{self.part}.note"):
            with suppress(FileNotFoundError):
                os.remove(name)
