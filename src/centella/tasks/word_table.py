"""Numbers of words by their bytes, looked up many at once: NumPy's loops run beside other threads.

A word of up to 16 bytes is its own key, two u64. Keys lie in a table of open addressing, whose
entries are compared with the whole key, so that words that meet at a slot are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from centella.dtypes import Array

WIDTH = 16  # bytes of a key
PROBES = 8  # slots that a key may be at, one behind the other
SPACES = b" \t\n\r"
NO_WORD = "\0"  # pads keys: in no word
# The bytes of a key that are a word's, by its length; a longer word has the key of no word.
_OWN: Array = np.frombuffer(
    b"".join(b"\xff" * n + bytes(WIDTH - n) for n in range(WIDTH + 1)) + bytes(WIDTH), np.uint64
).reshape(-1, 2)
_FACTORS: Array = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)


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


def keys_of(text: bytes, starts: Array, lengths: Array) -> Array:
    """The keys u64 [words, 2] of words of a text.

    Args:
        text: with `WIDTH` bytes from the begin of the last word on, and without `NO_WORD`.
    """
    places = np.ndarray((len(text) - WIDTH + 1,), f"V{WIDTH}", text, strides=(1,))
    keys: Array = places[starts].view(np.uint64).reshape(-1, 2)
    keys &= _OWN.take(lengths, axis=0, mode="clip")
    return keys


def keys_of_words(words: Sequence[bytes]) -> Array:
    """As `keys_of`, of words by themselves."""
    padded = (word.ljust(WIDTH, b"\0") if len(word) <= WIDTH else bytes(WIDTH) for word in words)
    return np.frombuffer(b"".join(padded), np.uint64).reshape(-1, 2)


class WordTable:
    """Keys with their numbers; nothing changes it.

    Args:
        keys: u64 [words, 2] by number. Those of number 0, and others that are 0, are no words'.
    """

    def __init__(self, keys: Array) -> None:
        self._keys = keys
        bits = max(4, (4 * len(keys) - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._index: Array = np.zeros((1 << bits) + PROBES, np.int32)
        left = np.flatnonzero(keys.any(axis=1))
        slots = self._slots(keys)
        for probe in range(PROBES):
            at = slots[left] + probe
            free = self._index[at] == 0
            self._index[at[free]] = left[free]  # of several at one slot the last stays
            left = left[self._index[at] != left]

    def numbers(self, keys: Array) -> Array:
        """The numbers i32 of keys u64 [words, 2]; 0 for those that are not here."""
        slots = self._slots(keys)
        numbers: Array = self._index.take(slots)
        left = self._others(numbers, keys)
        for probe in range(1, PROBES):
            if not len(left):
                break
            some = self._index.take(slots[left] + probe)
            numbers[left] = some
            left = left[self._others(some, keys[left])]
        numbers[left] = 0
        return numbers

    def _slots(self, keys: Array) -> Array:
        """Where the first probe looks: the upper bits of a sum of products."""
        slots: Array = keys[:, 0] * _FACTORS[0] + keys[:, 1] * _FACTORS[1] >> self._shift
        return slots.view(np.int64)

    def _others(self, numbers: Array, keys: Array) -> Array:
        """Which of the slots that were read hold another key."""
        same = (self._keys.take(numbers, axis=0) == keys).view(np.uint16).ravel() == 0x0101
        others: Array = (~same & (numbers != 0)).nonzero()[0]
        return others
