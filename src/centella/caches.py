"""What outlives a process: small files in the user's cache folder, each written whole or never.

A file that is missing, or a folder that cannot be written, only means that the next process does
the work again.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress


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
    """The content of a file of the folder; None where it cannot be read."""
    try:
        with open(os.path.join(cache_folder(), name), "rb") as file:
            return file.read()
    except OSError:
        return None


def keep(name: str, content: bytes) -> None:
    """Write a file of the folder; readers see the old one or the new one, never a part."""
    path = os.path.join(cache_folder(), name)
    beside = f"{path}.{os.getpid()}.{time.time_ns()}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(beside, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError as error:
        import logging

        with suppress(OSError):
            os.remove(beside)
        logging.getLogger("centella.caches").debug("%s not kept: %s", name, error)
