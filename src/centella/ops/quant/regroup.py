"""Numbers of the K formats: from the order of their bits in files to that in planes.

A file has runs of bytes whose lowest bits are the first numbers of the run, the next bits those
that follow. Planes have what a kernel's step needs together. Nothing is unpacked on the way, and
bytes move eight at a time, since this is part of the time that loading a model takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.dtypes import Array

# Halves of a square of bits that change places, further apart in each round: distance and mask.
BITS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))
TWO, FOUR = np.uint64(2), np.uint64(4)


def nibbles(raw: Array, run: int) -> Array:
    """4-bit numbers of runs of bytes, each 32 in 16 bytes, of which the first 16 lie low.

    uint8 [rows, bytes] to the same.
    """
    words = raw.view("<u8").reshape(raw.size // run, run // 8)
    planes = np.empty_like(words)
    low, high = _mask(15), _mask(0xF0)
    for group in range(run // 32):
        for i in (4 * group, 4 * group + 1):  # whole columns: short axes are slow in NumPy
            first, last, at = words[:, i], words[:, i + 2], i - 2 * group
            planes[:, at] = first & low | (last & low) << FOUR
            planes[:, at + run // 16] = first >> FOUR & low | last & high
    return planes.view(np.uint8).reshape(raw.shape)


def quarters(raw: Array) -> Array:
    """2-bit numbers of runs of 32 bytes, each 64 in 16 bytes, of which the first 16 lie lowest.

    uint8 [rows, bytes] to the same.
    """
    words = raw.view("<u8").reshape(raw.size // 32, 4)
    planes = np.empty_like(words)
    masks = [_mask(3 << shift) for shift in (0, 2, 4, 6)]
    for i in (0, 1):
        first, last = words[:, i], words[:, i + 2]
        planes[:, i] = (
            first & masks[0] | (last & masks[0]) << TWO
            | (first & masks[1]) << TWO | (last & masks[1]) << FOUR
        )  # fmt: skip
        planes[:, i + 2] = (
            (first & masks[2]) >> FOUR | (last & masks[2]) >> TWO
            | (first & masks[3]) >> TWO | last & masks[3]
        )  # fmt: skip
    return planes.view(np.uint8).reshape(raw.shape)


def _mask(byte: int) -> np.uint64:
    """A byte eight times."""
    return np.uint64(byte * 0x0101010101010101)


def bit_words(raw: Array) -> Array:
    """One bit of each of 256 numbers in 32 bytes, as words of 32 neighbours.

    uint8 [rows, bytes] to u32 [rows, bytes / 4].
    """
    squares = _transposed(raw.view("<u8"))
    return _words(squares.view(np.uint8).reshape(len(raw), raw.shape[1] // 32, 4, 8))


def fifth_bits(raw: Array) -> Array:
    """A bit of each of 256 numbers in 32 bytes, as `host.high_bits` reads them.

    uint8 [rows, bytes] to u32 [rows, bytes / 4].
    """
    return _in_chunks(raw, 1, ((1, 0), (2, 1), (4, 2), (8, 3)))


def pairs_of_bits(raw: Array) -> Array:
    """Two bits of each of 128 numbers in 32 bytes, as `host.high_bits` reads them.

    uint8 [rows, bytes] to u32 [rows, bytes / 4].
    """
    return _in_chunks(raw, 2, ((3, 0), (12, 2)))


def _in_chunks(raw: Array, bits: int, fields: tuple[tuple[int, int], ...]) -> Array:
    """Of runs of 32 bytes two chunks: of the low halves of bytes, then of the high ones.

    Args:
        bits: of a field; fields: masks, and how far those of the first 16 bytes move, which the
            last 16 come behind.
    """
    words = raw.view("<u8").reshape(raw.size // 32, 4)
    chunks = np.empty_like(words)
    for half in (0, 1):
        for i in (0, 1):
            first, last = (words[:, i + at] >> np.uint64(4 * half) for at in (0, 2))
            chunks[:, 2 * half + i] = sum(
                (first & _mask(mask)) << np.uint64(by)
                | (last & _mask(mask)) << np.uint64(by + bits)
                for mask, by in fields
            )
    return chunks.view("<u4").astype(np.uint32, copy=False).reshape(len(raw), raw.shape[1] // 4)


def _transposed(squares: Array) -> Array:
    """Words that are square matrices of fields, transposed (Warren, Hacker's Delight, 7-3)."""
    kind: Any = squares.dtype.type
    for distance, mask in BITS:
        other = (squares ^ squares >> kind(distance)) & kind(mask)
        squares = squares ^ other ^ other << kind(distance)
    return squares


def _words(bytes_: Array) -> Array:
    """The last two axes swapped, as words [rows, words]."""
    rows, runs, first, last = bytes_.shape
    swapped: Array = np.empty((rows, runs, last, first), np.uint8)
    for i in range(first):
        swapped[..., i] = bytes_[:, :, i]
    return swapped.reshape(rows, runs * first * last).view("<u4").astype(np.uint32, copy=False)
