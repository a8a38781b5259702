"""Numbers of words by their bytes, looked up many at once: NumPy's loops run beside other threads.

A word of up to 16 bytes is its own key, two u64; a longer one of up to 64 has a key of eight. Keys
lie in a table of open addressing, whose entries are compared with the whole key, so that words that
meet at a slot are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from centella.dtypes import Array

SHORT, LONG = 16, 64  # bytes of keys
PROBES = 4  # slots that a key may be at, one behind the other
ROOM = 8  # slots for each key, so that most are at the first
SPACES = b" \t\n\r"
NO_WORD = "\0"  # pads keys: in no word
# Of each u64 of a key; the upper bits of a product with an odd number depend on all bits.
_FACTORS = [np.uint64(pow(0x9E3779B97F4A7C15, 2 * i + 1, 1 << 64)) for i in range(LONG // 8)]


def bounds(text: bytes) -> tuple[Array, Array]:
    """Where words begin, and their bytes, i64 [words] both.

    Args:
        text: with a space at either end.
    """
    data = np.frombuffer(text, np.uint8)
    space = data == SPACES[0]
    for other in SPACES[1:]:
        space |= data == other
    edges = np.flatnonzero(space[1:] != space[:-1])
    return edges[::2] + 1, edges[1::2] - edges[::2]


class WordTable:
    """Numbers of words; nothing changes it.

    Args:
        words: by number. The first is none, and words of more than `LONG` bytes are not looked up.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        starts = lengths.cumsum() - lengths
        text = b"".join((*words, bytes(LONG)))
        self._short = _Keys(SHORT, text, starts, lengths, 0)
        self._long = _Keys(LONG, text, starts, lengths, SHORT)

    def numbers(self, text: bytes, starts: Array, lengths: Array) -> Array:
        """The numbers i32 of words of a text; 0 for those that are not here.

        Args:
            text: with `LONG` bytes from the begin of the last word on, and without `NO_WORD`.
        """
        numbers = self._short.numbers(text, starts, lengths)
        rows = np.flatnonzero(lengths > SHORT)
        if len(rows):
            numbers[rows] = self._long.numbers(text, starts[rows], lengths[rows])
        return numbers


class _Keys:
    """The words of a text that have more than `least` and at most `width` bytes.

    The slot of a key has its row among the keys. Row 0 is the key of no word.
    """

    def __init__(self, width: int, text: bytes, starts: Array, lengths: Array, least: int) -> None:
        self._width = width
        own = (b"\xff" * n + bytes(width - n) for n in range(width + 1))
        self._own: Array = np.frombuffer(b"".join((*own, bytes(width))), np.uint64)
        self._own = self._own.reshape(-1, width // 8)  # a longer word has the key of none
        mine = np.flatnonzero((lengths > least) & (lengths <= width))
        self._numbers: Array = np.concatenate(([0], mine)).astype(np.int32)
        keys = self._keys_of(text, starts[mine], lengths[mine])
        self._keys: Array = np.concatenate((np.zeros_like(self._own[:1]), keys))
        bits = (ROOM * len(self._keys)).bit_length()
        self._shift = np.uint64(64 - bits)
        self._index: Array = np.zeros((1 << bits) + PROBES, np.int32)
        slots, left = self._slots(self._keys), np.arange(1, len(self._keys))
        for probe in range(PROBES):
            at = slots[left] + probe
            free = self._index[at] == 0
            self._index[at[free]] = left[free]  # of several at one slot the last stays
            left = left[self._index[at] != left]

    def numbers(self, text: bytes, starts: Array, lengths: Array) -> Array:
        """As those of `WordTable`."""
        keys = self._keys_of(text, starts, lengths)
        slots = self._slots(keys)
        rows = self._index.take(slots)
        left = self._others(rows, keys)
        for probe in range(1, PROBES):
            if not len(left):
                break
            next_rows = self._index.take(slots[left] + probe)
            rows[left] = next_rows
            left = left[self._others(next_rows, keys[left])]
        rows[left] = 0
        numbers: Array = self._numbers.take(rows)
        return numbers

    def _keys_of(self, text: bytes, starts: Array, lengths: Array) -> Array:
        """The keys u64 [words, width / 8]."""
        places = np.ndarray((len(text) - self._width + 1,), f"V{self._width}", text, strides=(1,))
        keys: Array = places[starts].view(np.uint64).reshape(len(starts), self._width // 8)
        keys &= self._own.take(lengths, axis=0, mode="clip")
        return keys

    def _slots(self, keys: Array) -> Array:
        """Where the first probe looks: the upper bits of a sum of products."""
        total = keys[:, 0] * _FACTORS[0]
        for i in range(1, keys.shape[1]):
            total += keys[:, i] * _FACTORS[i]
        slots: Array = (total >> self._shift).view(np.int64)
        return slots

    def _others(self, rows: Array, keys: Array) -> Array:
        """Which slots hold another key."""
        differ = self._keys.take(rows, axis=0) != keys
        whole = differ.view(f"u{keys.shape[1]}").ravel()  # a row of bool as one number
        others: Array = np.flatnonzero((whole != 0) & (rows != 0))
        return others
