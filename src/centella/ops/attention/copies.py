"""How rows of q, k and v come into shared memory for tensor cores: asynchronously, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang

PER_CHUNK = 8  # elements of 16 bytes


class Walk:
    """How the threads of a group share the 16-byte chunks of a tile's rows."""

    def __init__(self, tile: Any, threads: int, dim: int) -> None:
        across = tile.columns // PER_CHUNK
        down = threads // across
        each = max(8 // down, 1)  # rows whose swizzles differ
        assert tile.rows % (down * each) == 0, "threads share the chunks"
        thread = lang.local_id()
        column = thread % across * PER_CHUNK
        self.row: Any = thread // across
        chunks = [tile.chunk(self.row + i * down, column // PER_CHUNK) for i in range(each)]
        self.pieces: list[tuple[int, Any]] = [
            (i * down, chunks[i % each] + tile.down(i // each * each * down))
            for i in range(tile.rows // down)
        ]
        self.element: Any = lang.minimum(column, (dim - 1) // PER_CHUNK * PER_CHUNK)
        left = lang.select(column < dim, dim - column, 0)
        self.nbytes: Any = (
            PER_CHUNK * 2 if dim == tile.columns else lang.minimum(left, PER_CHUNK) * 2
        )

    def fetch(
        self, first: Any, last: Any, stage: Any, counts: Callable[[Any], Any] | None,
        *tensors: tuple[Any, Any, Any, Any],
    ) -> None:  # fmt: skip
        """Start this thread's copies of the rows from `first` on; zeros for what does not count.

        Args:
            tensors: a ring, its source, where row 0 starts, elements from a row to the next.
        """
        for below, chunk in self.pieces:
            row = first + (self.row + below)
            nbytes = lang.select(counts(row), self.nbytes, 0) if counts else self.nbytes
            inside = lang.minimum(row, last)
            for ring, source, start, pitch in tensors:
                where = start + inside * pitch + self.element
                lang.ptx.cp_async(ring, chunk + ring.at_stage(stage), source, where, size=nbytes)
