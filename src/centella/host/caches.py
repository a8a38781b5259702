"""What outlives a process: small files in the user's cache folder, each written whole or never.

A file that is missing or that others may write, or a folder that cannot be written, only means that
the next process does the work again.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

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
        with open(_path(name), "rb") as file:
            about = os.fstat(file.fileno())
            mine = sys.platform == "win32" or about.st_uid == os.geteuid()
            return file.read() if mine and not about.st_mode & OTHERS else None
    except OSError:
        return None


def keep(name: str, content: bytes) -> None:
    """Write a file of the folder; readers see the old one or the new one, never a part."""
    beside = ""
    try:
        path = _path(name)
        beside = f"{path}.{os.getpid()}.{time.time_ns()}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(beside, "wb", opener=_private) as file:
            file.write(content)
        os.replace(beside, path)
    except OSError as error:
        import logging

        with suppress(OSError):
            os.remove(beside)
        logging.getLogger("centella.caches").debug("%s not kept: %s", name, error)


def _path(name: str) -> str:
    """Where a file is; OSError where the user has no folder: never one of the current directory."""
    folder = cache_folder()
    if not os.path.isabs(folder):
        raise FileNotFoundError(f"no cache folder: {folder} is not absolute")
    return os.path.join(folder, name)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)
