"""Planes of a quantised weight that lie beside its stored numbers in shared memory (sm_90a).

The copy engine brings those of a block of outputs, whose rows follow each other in memory, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import bf16, f16, u32
from centella.ops.quant.format import CHUNK
from centella.specs import Spec

Beside = tuple[tuple[int, bool], ...]  # of planes: words of a row, whether they are whole chunks


class BesidePlane:
    """A plane of blocks of outputs in shared memory, row after row.

    Args:
        rows: of a block; blocks: that there is room for.
        pitch: words of a row; whole: rows start on 16 bytes, else with any element.
    """

    def __init__(self, plane: Any, rows: int, blocks: int, pitch: int, whole: bool) -> None:
        self.plane: Any = plane
        self.pitch: int = pitch
        self.whole: bool = whole
        self._words = words_of(rows, pitch, whole)
        self.memory: Any = lang.shared(u32, blocks * self._words)

    def span(self, row: Any, rows: Any) -> tuple[Any, Any]:
        """The first element of rows, and the bytes from the chunk that it is in to their end."""
        first, nbytes = row * (self.pitch * self.plane.dtype.per_word), rows * (4 * self.pitch)
        if self.whole:
            return first, nbytes
        before = self.plane.within_chunk(first) * self.plane.dtype.itemsize
        return first, (before + nbytes + (CHUNK - 1)) & (0xFFFFFFFF - (CHUNK - 1))

    def block(self, number: Any) -> Any:
        """Where what a block has begins, in words."""
        return number * self._words

    def row(self, begin: Any, first: Any, row: Any) -> Row:
        """A row of a block that begins at a word, and at a row of the weight."""
        start = begin + row * self.pitch
        if self.whole:
            return Row(self.memory, start, None)
        before = self.plane.within_chunk(first * (self.pitch * self.plane.dtype.per_word))
        return Row(self.memory, start + before // 2, before % 2)


class Row(Struct, frozen=True, eq=False):
    """A row of a plane that lies beside.

    Attributes:
        start: its first word in `memory`.
        odd: 1 where it begins in the middle of that word, else 0; None where rows are whole chunks.
    """

    memory: Any
    start: Any
    odd: Any | None

    def word(self, word: Any) -> Any:
        """One of its words."""
        low = self.memory[self.start + word]
        if self.odd is None:
            return low
        high = self.memory[self.start + word + self.odd]
        return lang.select(self.odd == 1, low >> 16 | high << 16, low)

    def chunk(self, word: Any) -> list[Any]:
        """Four of its words, of which the first has a number that four divides."""
        if self.odd is None:
            return list(self.memory.load(self.start + word))
        return [self.word(word + i) for i in range(4)]


def words_of(rows: int, pitch: int, whole: bool) -> int:
    """Words of shared memory for rows of a plane."""
    return rows * pitch if whole else -(-(rows * pitch + 4) // 4) * 4


def beside_of(planes: Sequence[Spec]) -> Beside:
    """How planes lie."""
    return tuple((s.strides[0] * s.dtype.itemsize // 4, in_chunks(s)) for s in planes)


def rows_follow(spec: Spec) -> bool:
    """Whether rows follow each other, in chunks or in words of two 16-bit numbers."""
    width, (pitch, step) = spec.shape[1], spec.strides
    if step != 1 or not 0 <= (pitch - width) * spec.dtype.itemsize < CHUNK:
        return False
    return in_chunks(spec) or (spec.dtype in (bf16, f16) and pitch == width and width % 2 == 0)


def in_chunks(spec: Spec) -> bool:
    """Whether rows are whole chunks; the only row of an aligned plane may be none."""
    return spec.aligned and spec.strides[0] * spec.dtype.itemsize % CHUNK == 0
