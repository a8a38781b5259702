"""WAV and raw PCM, read front to back, so they may come through a pipe.

A length that the header does not know (0, or near the largest) means: to the end. A file that ends
early gives the frames that are there. Source: Microsoft, Multiple Channel Audio Data and WAVE
Files, 2007; RF64, EBU Tech 3306.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from msgspec import Struct

from centella.audio.source import DTYPES, Source, block_frames, check_layout, floats
from centella.errors import AudioError

Array = np.ndarray[Any, Any]

MAGIC = (b"RIFF", b"RF64", b"BW64")
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN = 0x7FFFF000  # data lengths from here on are what writers to pipes put there
_MOST_HEADER = 1 << 26  # bytes before the samples: notes and pictures
_DTYPES = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "u1", (PCM, 32): "<i4",
           (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}  # fmt: skip


class Layout(Struct, frozen=True):
    """How frames lie in bytes.

    Attributes:
        rate: frames a second.
        channels: samples of a frame.
        dtype: of a sample; of a byte where a sample has three.
        bits: of a sample.
    """

    rate: int
    channels: int
    dtype: str
    bits: int

    @property
    def frame(self) -> int:
        """Bytes of a frame."""
        return self.channels * self.bits // 8

    def decoded(self, name: str, raw: bytes) -> Array:
        """Whole frames as f32 [frames, channels]."""
        whole = np.frombuffer(raw, self.dtype, len(raw) // self.frame * self.frame
                              // np.dtype(self.dtype).itemsize)  # fmt: skip
        if self.bits == 24:
            wide = np.zeros((whole.size // 3, 4), np.uint8)
            wide[:, 1:] = whole.reshape(-1, 3)
            whole = wide.view("<i4")
        return floats(name, whole.reshape(-1, self.channels))


def is_wav(head: bytes) -> bool:
    """Whether a file begins as one."""
    return head[:4] in MAGIC and head[8:12] == b"WAVE"


def open_wav(name: str, file: IO[bytes]) -> Source | None:
    """The samples of a WAV file or stream; None where their coding is for another reader.

    Raises:
        AudioError: not WAV, or a header that is broken.
    """
    head = file.read(12)
    if not is_wav(head):
        raise AudioError(
            f"{name}: expected WAV, got {_shown(head)}; a pipe carries WAV or raw samples, other "
            "formats are read from files: ffmpeg -i FILE -f wav - writes WAV"
        )
    layout, length = _header(name, file)
    if layout is None:
        return None
    check_layout(name, layout.rate, layout.channels)
    known = None if length is None else length // layout.frame
    return Source(name, layout.rate, layout.channels, _blocks(name, file, layout, length), known)


def open_pcm(name: str, file: IO[bytes], rate: int, channels: int, dtype: str) -> Source:
    """Raw samples of a stream, those of a frame side by side.

    Raises:
        AudioError: a rate, number of channels or dtype that is not read.
    """
    check_layout(name, rate, channels)
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise AudioError(f"{name}: expected samples of {DTYPES}, got {dtype!r}") from error
    floats(name, np.empty(0, kind))
    layout = Layout(rate, channels, kind.str, 8 * kind.itemsize)
    return Source(name, rate, channels, _blocks(name, file, layout, None))


def _header(name: str, file: IO[bytes]) -> tuple[Layout | None, int | None]:
    """The layout, and the bytes of samples that follow if the header knows them."""
    layout: Layout | None = None
    seen = read = 0
    while seen < _MOST_HEADER:
        head = file.read(8)
        if len(head) < 8:
            raise AudioError(f"{name}: expected samples, the file ends in its header")
        kind, size = head[:4], int.from_bytes(head[4:], "little")
        if kind == b"data" and read:
            return layout, (None if size == 0 or size >= _UNKNOWN else size)
        seen += 8 + size
        if kind == b"fmt ":
            layout, read = _layout(name, file.read(min(size + size % 2, 1024))), 1
        else:
            _skip(file, min(size + size % 2, _MOST_HEADER))
    raise AudioError(f"{name}: expected samples within {_MOST_HEADER >> 20} MB, got other chunks")


def _layout(name: str, fmt: bytes) -> Layout | None:
    """What a chunk `fmt ` says; None for a coding that is not read here."""
    if len(fmt) < 16:
        raise AudioError(f"{name}: expected a format of 16 bytes or more, got {len(fmt)}")
    tag, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == EXTENSIBLE and len(fmt) >= 26:
        tag = int.from_bytes(fmt[24:26], "little")
    dtype = _DTYPES.get((tag, bits))
    if dtype is None:
        return None
    if frame != channels * bits // 8:
        raise AudioError(f"{name}: expected frames of {channels * bits // 8} bytes, got {frame}")
    return Layout(rate, channels, dtype, bits)


def _skip(file: IO[bytes], count: int) -> None:
    while count > 0:
        got = len(file.read(min(count, 1 << 16)))
        count = count - got if got else 0


def _blocks(name: str, file: IO[bytes], layout: Layout, length: int | None) -> Iterator[Array]:
    most = block_frames(layout.channels) * layout.frame
    while length is None or length > 0:
        raw = file.read(most if length is None else min(most, length))
        if len(raw) < layout.frame:
            return
        length = None if length is None else length - len(raw)
        yield layout.decoded(name, raw)


def _shown(head: bytes) -> str:
    return f"bytes that begin {head!r}" if head else "nothing"
