"""The bytes of a model file, read when they are wanted into memory of the reader's own.

A map would show what happens to the file later: other weights when it is overwritten, and the end
of the process (SIGBUS) when it becomes shorter; a private map, too, for pages not yet read.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from centella.dtypes import Array
from centella.errors import WeightsError
from centella.host.blockwise import cores, share

PIECE = 1 << 20  # bytes that a thread reads at a time


class Contents:
    """A file that is to stay as it was when it was opened first.

    Args:
        file: its path; it is opened for each reading and not kept open.

    Attributes:
        size: its bytes; written: when it was written last, in ns since 1970.

    Raises:
        WeightsError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._was = file.stat()
        except OSError as error:
            raise WeightsError(f"{file}: cannot be read: {error}") from error
        self.size: int = self._was.st_size
        self.written: int = self._was.st_mtime_ns

    def read(self, begin: int, end: int) -> Array:
        """Bytes `begin` to `end` in memory of the caller's; raises as `read_into`."""
        data: Array = np.empty(end - begin, np.uint8)
        self.read_into(begin, data)
        return data

    def read_into(self, begin: int, data: Array) -> None:
        """Fill an array of bytes with those from `begin` on; several threads copy large parts.

        Raises:
            WeightsError: it cannot be read, or is not what it was.
        """
        pieces = list(range(0, max(len(data), 1), PIECE))
        share(lambda at: self._read(begin + at, data[at : at + PIECE]), pieces, cores())

    def _read(self, begin: int, data: Array) -> None:
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(begin)
                left = data.data
                while left and (count := file.readinto(left)):
                    left = left[count:]
                now = os.fstat(file.fileno())
        except OSError as error:
            raise WeightsError(f"{self.file}: cannot be read: {error}") from error
        if left or _identity(now) != _identity(self._was):
            raise WeightsError(
                f"{self.file}: expected the file of {self.size} bytes that was opened, got one of "
                f"{now.st_size} bytes that was written since: load it again once it is complete"
            )


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
