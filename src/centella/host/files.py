"""Files that the library writes: whole, or not at all.

The content goes to a temporary name in the same folder, which then replaces the file. Where writing
fails, on a full disk say, the temporary file goes and the old file stays as it was.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO


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
