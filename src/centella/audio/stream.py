"""Audio from anywhere as mono samples at 16 kHz, piece by piece: never a whole file in memory.

A file's blocks are averaged over channels and resampled with state that goes on from block to
block, so the pieces are those of the whole. Sample i is at i / 16000 s of the file.
"""

from __future__ import annotations

import io
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import IO, Any, cast
from weakref import finalize

import numpy as np
from msgspec.structs import replace

from centella.audio.decoders import open_coded
from centella.audio.mel import RATE, WINDOW
from centella.audio.source import (
    MOST_CHANNELS,
    Array,
    Source,
    block_frames,
    check_finite,
    check_layout,
    expect_whole,
    floats,
)
from centella.audio.wav import is_wav, open_pcm, open_wav
from centella.errors import AudioError, MissingExtraError
from centella.host.log import logger

_TOLERATED = 0.25  # seconds by which the length that a header states may be wrong: mp3's is

Given = str | os.PathLike[str] | Array | IO[bytes] | Iterable[Array]


class AudioStream:
    """Mono f32 samples at 16 kHz, in pieces; iterate over it, or `read` so many.

    Attributes:
        name: what it reads, for errors.
        rate: of what it reads, samples a second.
        channels: of what it reads; their mean is given.
        duration: seconds, where the source says so; a file that ends early has less.
        position: samples given so far.
        live: whether samples come as they are recorded, as those of a pipe or an iterable may.
    """

    def __init__(self, source: Source) -> None:
        self.name: str = source.name
        self.rate: int = source.rate
        self.channels: int = source.channels
        self.duration: float | None = None if source.frames is None else source.frames / source.rate
        self.position: int = 0
        self.live: bool = source.live
        self._pieces: Iterator[Array] = _resampled(source)
        self._left = np.empty(0, np.float32)
        self._end = finalize(self, source.close)

    def __iter__(self) -> Iterator[Array]:
        return self

    def __next__(self) -> Array:
        """The next piece, of a second or so, f32 [n] with n above 0.

        Raises:
            AudioError: what follows is broken, has no samples, or samples that are not finite.
        """
        piece, self._left = self._left, self._left[:0]
        if not piece.size:
            try:
                piece = next(self._pieces)
            except BaseException:  # the end, or an error
                self.close()
                raise
        self.position += piece.size
        return piece

    def read(self, count: int | None = None) -> Array:
        """The next `count` samples, fewer at the end; all that are left without a count.

        Raises:
            AudioError: as iteration does; a count that is no whole number.
        """
        taken: list[Array] = []
        if count is not None:
            expect_whole(f"{self.name}: read", count, 0, None, "samples")
        missing = math.inf if count is None else count
        while missing > 0 and (piece := next(self, None)) is not None:
            taken.append(piece[: int(min(missing, piece.size))])
            missing -= taken[-1].size
            self._left = piece[taken[-1].size :]
            self.position -= self._left.size
        return np.concatenate(taken) if taken else np.empty(0, np.float32)

    def close(self) -> None:
        """Release the file or process; a closed stream gives nothing more."""
        self._pieces, self._left = iter(()), self._left[:0]
        self._end()

    def __enter__(self) -> AudioStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_audio(
    source: Given, *, rate: int = RATE, channels: int = 1, dtype: str | None = None,
    channel_axis: int = -1,
) -> AudioStream:  # fmt: skip
    """Audio as mono samples at 16 kHz, read as they are asked for.

    Args:
        source: a path; "-" (standard input) or a binary file, with WAV or raw samples, and if it
            can seek with any format; an array [n] or [n, channels]; or an iterable of such
            arrays, as a microphone gives them. Integers are divided by their full scale; floats
            are kept, whatever their size. An `AudioStream` is given back.
        rate: of arrays and raw samples; a file says its own.
        channels, dtype: of raw samples in bytes (uint8, int16, int32, float32, float64), those of
            a moment side by side. Without a dtype the bytes are a file's.
        channel_axis: of arrays; 0 for [channels, n].

    Raises:
        AudioError: no such file, a folder, not audio, no samples; names the file, and what is to
            be installed to read it. A source of another type; a rate, number of channels or dtype
            that no recording has.
        MissingExtraError: nothing that reads it is installed, or soxr, which resamples.
    """
    if isinstance(source, AudioStream):
        return source
    untyped: object = source
    with ExitStack() as opened:
        raw = None if dtype is None else (rate, channels, dtype)
        if isinstance(source, str | os.PathLike):
            name = os.fspath(source)
            audio = _of_path(name, raw, opened)
        elif hasattr(source, "read"):
            audio = _of_file(str(getattr(source, "name", "a stream")), None, source, raw)  # type: ignore[arg-type]  # `read` tells
        elif hasattr(source, "__array__"):
            audio = _of_arrays([source], rate, channel_axis)  # type: ignore[list-item]  # it tells
        elif isinstance(untyped, bytes | bytearray) or not isinstance(untyped, Iterable):
            raise AudioError(
                f"audio: expected a path, a binary file, samples or an iterable of them, got "
                f"{type(untyped).__name__}"
            )
        else:
            audio = _of_arrays(cast("Iterable[Array]", untyped), rate, channel_axis)
        opened.callback(audio.close)
        if audio.rate != RATE:
            _resampler(audio.rate)
        kept = opened.pop_all()
    return AudioStream(replace(audio, close=kept.close))


def read_audio(
    source: Given, *, rate: int = RATE, channels: int = 1, dtype: str | None = None,
    channel_axis: int = -1,
) -> Array:  # fmt: skip
    """All samples of what `open_audio` takes: f32 [n], mono at 16 kHz. Raises as it does."""
    with open_audio(
        source, rate=rate, channels=channels, dtype=dtype, channel_axis=channel_axis
    ) as stream:
        return stream.read()


def windows(samples: Array | Iterable[Array], count: int = WINDOW) -> Iterator[tuple[float, Array]]:
    """A recording of any length in rows of equal length, one after the other, as `log_mel` reads.

    Args:
        samples: f32 [n], or pieces of it, as an `AudioStream` gives them.
        count: samples of a row; by default those of 30 s.

    Returns:
        The second at which a row begins, and its samples, f32 [count]; the last has zeros behind.

    Raises:
        AudioError: as `open_audio`; a count below 1.
    """
    stream = open_audio(samples)
    expect_whole("windows", count, 1, None, "samples")
    while (row := stream.read(count)).size:
        begin = (stream.position - row.size) / RATE
        yield begin, np.pad(row, (0, count - row.size))


def _of_path(name: str, raw: tuple[int, int, str] | None, opened: ExitStack) -> Source:
    if name == "-":
        return _of_file("standard input", None, sys.stdin.buffer, raw)
    try:
        if stat.S_ISDIR(os.stat(name).st_mode):
            raise AudioError(f"{name}: expected a file, got a folder")
        file = opened.enter_context(open(name, "rb"))  # noqa: SIM115  # so it is
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AudioError(
            f"{name or repr(name)}: expected audio, the file cannot be read: {reason}"
        ) from error
    return _of_file(name, name, file, raw)


def _of_file(
    name: str, path: str | None, file: IO[bytes], raw: tuple[int, int, str] | None
) -> Source:
    """The samples of an open file; one that cannot seek has to be WAV or raw."""
    if isinstance(file, io.TextIOBase):
        raise AudioError(f"{name}: expected a file opened in binary mode, got one of text")
    if getattr(file, "closed", False):
        raise AudioError(f"{name}: expected an open file, got a closed one")
    asked = getattr(file, "seekable", None)  # what has `read` alone arrives as it is recorded
    seekable = asked is not None and asked()
    if raw is not None:
        return replace(open_pcm(name, file, *raw), live=not seekable)
    if not seekable:
        wav = open_wav(name, file)
        if wav is None:
            raise AudioError(f"{name}: expected WAV of integers or floats in a stream")
        return replace(wav, live=True)
    head = file.read(12)
    if not head:
        raise AudioError(f"{name}: expected audio, got 0 bytes")
    file.seek(0)
    wav = open_wav(name, file) if is_wav(head) else None
    return wav or open_coded(name, path, file)


def _of_arrays(arrays: Iterable[Array], rate: int, channel_axis: int) -> Source:
    """The samples of arrays; the first says how many channels there are."""
    left = iter(arrays)
    first = _frames(next(left, np.empty(0, np.float32)), channel_axis)
    channels = first.shape[1]
    if channels > MOST_CHANNELS >= len(first):
        raise AudioError(
            f"array: expected 1 to {MOST_CHANNELS} channels, got {channels}; write samples.T"
        )
    check_layout("array", rate, channels)

    def blocks() -> Iterator[Array]:
        size = block_frames(channels)
        for array in chain([first], (_frames(block, channel_axis) for block in left)):
            if array.shape[1] != channels:
                raise AudioError(f"array: expected {channels} channels, got {array.shape[1]}")
            for begin in range(0, len(array), size):
                yield floats("array", array[begin : begin + size])

    known = len(first) if isinstance(arrays, list) and len(arrays) == 1 else None
    return Source("array", rate, channels, blocks(), known, live=known is None)


def _frames(block: Any, channel_axis: int) -> Array:
    """Samples as [n, channels]."""
    try:
        array = np.asarray(block)
    except (TypeError, ValueError) as error:  # rows of several lengths, or memory of a device
        raise AudioError(f"array: expected samples: {error}") from error
    if array.ndim == 1:
        return array[:, None]
    if array.ndim != 2 or channel_axis not in (0, 1, -1):
        got = f"{list(array.shape)} with channel_axis={channel_axis}"
        if not array.ndim:
            number = isinstance(block, int | float)
            got = type(block).__name__ + "; write np.asarray(samples)" * number
        raise AudioError(
            f"array: expected [n] or [n, channels] (or [channels, n] with channel_axis=0), "
            f"got {got}"
        )
    return array.T if channel_axis == 0 else array


def _resampler(rate: int) -> Any:
    try:
        import soxr
    except ImportError as error:
        raise MissingExtraError("soxr", "audio") from error
    return soxr.ResampleStream(rate, RATE, 1, dtype="float32", quality="HQ")


def _mono(source: Source) -> Iterator[Array]:
    """The mean of the channels, f32 [n]; NaN and infinity are refused at their time."""
    at = 0
    for block in source.blocks:
        with np.errstate(over="ignore", invalid="ignore"):
            # A mean along rows, which are short, takes ten times as long.
            mono = block[:, 0] if block.shape[1] == 1 else np.ascontiguousarray(block.T).mean(0)
        check_finite(source.name, mono, at, source.rate)
        at += len(mono)
        yield mono
    if not at:
        raise AudioError(f"{source.name}: expected samples, got none")
    if source.frames is not None and at < source.frames - _TOLERATED * source.rate:
        logger("audio").warning(
            "%s: ends early: %.2f s of %.2f s",
            source.name, at / source.rate, source.frames / source.rate,
        )  # fmt: skip


def _resampled(source: Source) -> Iterator[Array]:
    """Pieces at 16 kHz, never empty: round(frames x 16000 / rate) samples in all, at least one."""
    if source.rate == RATE:
        yield from _mono(source)
        return
    resampler = _resampler(source.rate)
    taken = yielded = 0
    for mono in _mono(source):
        taken += len(mono)
        piece = resampler.resample_chunk(mono)
        yielded += piece.size
        if piece.size:
            yield piece
    missing = max((2 * taken * RATE + source.rate) // (2 * source.rate), 1) - yielded
    rest = resampler.resample_chunk(np.empty(0, np.float32), last=True)[:missing]
    if missing > 0:
        yield np.pad(rest, (0, missing - rest.size))
