"""What outlives a process: small files in the user's cache folder, each written whole or never.

A file that is missing or that others may write, or a folder that cannot be written, only means that
the next process does the work again.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress

from centella.host.files import whole
from centella.host.log import logger

OTHERS = 0 if sys.platform == "win32" else 0o022  # who may write, but for the owner


def cache_folder() -> str:
    """Where this user's caches of this library are, whether or not the folder exists."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # as its specification says: another is no folder
        return os.path.join(named, "centella")
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or os.path.expanduser(r"~\AppData\Local")
        return os.path.join(local, "centella", "Cache")
    own = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return os.path.join(os.path.expanduser(own), "centella")


def kept(name: str) -> bytes | None:
    """The content of a file of the folder; None for one that is not the user's alone to write."""
    try:
        with open(_path(name), "rb", opener=_at_once) as file:
            about = os.fstat(file.fileno())
            mine = sys.platform == "win32" or about.st_uid == os.geteuid()
            alone = mine and stat.S_ISREG(about.st_mode) and not about.st_mode & OTHERS
            return file.read() if alone else None
    except OSError:
        return None


def keep(name: str, content: bytes) -> None:
    """Write a file of the folder; readers see the old one or the new one, never a part."""
    try:
        path = _path(name)
        _make_folder(os.path.dirname(path))
        with whole(path, 0o600) as file:
            file.write(content)
    except OSError as error:
        logger("caches").debug("%s not kept: %s", name, error)


def _path(name: str) -> str:
    """Where a file is; OSError where the user has no folder: never one of the current directory."""
    folder = cache_folder()
    if not os.path.isabs(folder):
        raise FileNotFoundError(f"no cache folder: {folder} is not absolute")
    return os.path.join(folder, name)


def _make_folder(path: str) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    if os.path.isdir(path):
        return
    _make_folder(os.path.dirname(path))
    with suppress(FileExistsError):  # another process was at it
        os.mkdir(path, 0o700)


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for somebody to write, as a pipe would have it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
