"""Token ids of texts end to end, and batches of them: no Python object for a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import numpy as np
from msgspec import Struct

from centella.dtypes import Array

FIRST: Array = np.zeros(1, np.int64)  # the number of a text that is alone, and where it begins
FIRST.flags.writeable = False


class Tokens(Struct, frozen=True, eq=False):
    """The token ids of texts.

    Attributes:
        ids: u32, those of one text after those of another.
        starts: of each text, where its ids begin.
        lengths: of each text, how many of its ids are read, special ones counted.
        counts: of each text, how many it has before it is cut, special ones counted.
    """

    ids: Array
    starts: Array
    lengths: Array
    counts: Array

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]]) -> Tokens:
        """Of lists of ids."""
        if len(ids) == 1:  # a request of a service has one, and a few microseconds
            size = np.array([len(ids[0])], np.int64)
            return cls(np.array(ids[0], np.uint32), FIRST, size, size)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum()))
        return cls(flat, np.cumsum(lengths) - lengths, lengths, lengths)

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """Of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        sizes = np.array([len(part.ids) for part in parts], np.int64)
        starts = [
            part.starts + at for part, at in zip(parts, np.cumsum(sizes) - sizes, strict=True)
        ]
        empty = np.zeros(0, np.int64)
        return cls(
            np.concatenate([np.zeros(0, np.uint32), *(part.ids for part in parts)]),
            np.concatenate([empty, *starts]),
            np.concatenate([empty, *(part.lengths for part in parts)]),
            np.concatenate([empty, *(part.counts for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def array(self, text: int) -> Array:
        """The ids of a text that are read, u32."""
        return self.ids[self.starts[text] :][: self.lengths[text]]

    def row(self, text: int) -> list[int]:
        """As `array`, a list."""
        ids: list[int] = self.array(text).tolist()
        return ids

    def lists(self) -> list[list[int]]:
        """Those of each text."""
        return [self.row(text) for text in range(len(self))]

    def taken(self, texts: Array) -> Tokens:
        """Those of some texts alone."""
        lengths = self.lengths[texts]
        starts = np.cumsum(lengths) - lengths
        away = np.repeat(self.starts[texts] - starts, lengths)
        ids = self.ids[away + np.arange(len(away))]
        return Tokens(ids, starts, lengths, self.counts[texts])

    def cut(
        self, most: int, side: Literal["left", "right"], before: Sequence[int],
        after: Sequence[int],
    ) -> Tokens:  # fmt: skip
        """At most so many ids of each text; changes `ids` where a text is cut.

        Args:
            side: where the text's own tokens are cut off.
            before, after: the special tokens at its ends, which stay.
        """
        if len(self.ids) <= most:
            return self
        long = (self.counts > most).nonzero()[0]
        if not len(long):
            return self
        starts, kept, at = self.starts.copy(), before, 0
        if side == "left":
            starts[long] += self.counts[long] - most
        else:
            kept, at = after, most - len(after)
        places = starts[long][:, None] + at + np.arange(len(kept))
        self.ids[places] = np.array(kept, np.uint32)
        return Tokens(self.ids, starts, np.minimum(self.counts, most), self.counts)

    def grid(self, rows: Array, shape: tuple[int, int], fill: int) -> tuple[Array, Array]:
        """Ids i32 of a shape, a text a row, with `fill` behind each; and lengths i32 [rows].

        Args:
            rows: numbers of the texts; rows of the shape past these have length 0.
        """
        padded, lengths = np.empty(shape, np.int32), np.zeros(shape[0], np.int32)
        padded.fill(fill)
        if len(rows) == 1:
            ids = self.array(rows[0])
            lengths[0] = len(ids)
            padded[0, : len(ids)] = ids
            return padded, lengths
        lengths[: len(rows)] = self.lengths[rows]
        if not len(self.ids):
            return padded, lengths
        columns = np.arange(shape[1])
        places = self.starts[rows][:, None] + columns  # past the end of a text too
        ids = self.ids.take(places, mode="clip").view(np.int32)
        np.copyto(padded[: len(rows)], ids, where=columns < lengths[: len(rows), None])
        return padded, lengths


def longest_first(left: Array, right: Array, room: int) -> tuple[Array, Array]:
    """Tokens that are kept of pairs: of each the longer is cut, and where that does not do, both.

    Args:
        left, right: tokens of the texts, i64 [pairs]; room: for both.
    """
    short, long = np.minimum(left, right), np.maximum(left, right)
    long = np.minimum(long, np.maximum(short, room - short))
    over = short + long > room
    short, long = np.where(over, room // 2, short), np.where(over, room - room // 2, long)
    return np.where(left <= right, short, long), np.where(left <= right, long, short)
