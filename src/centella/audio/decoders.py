"""Coded audio: soundfile first, then PyAV, then ffmpeg from the PATH; each is optional.

A reader gives the blocks of a file, or says in words why it does not, or gives None: it is not
installed. PyAV and ffmpeg read the first good audio stream of a container; where its time begins
late or leaps ahead, as in recordings of calls, silence stands for what is missing, so that
positions are times of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import IO, Any, BinaryIO, cast

import numpy as np

from centella.audio.source import Array, Source, block_frames, broken, check_layout, floats
from centella.errors import AudioError, MissingExtraError

_LONGEST_GAP = 3600  # seconds of silence that stand for missing ones; more, and the file is broken
_TOLERATED = 0.1  # seconds between the time of a frame and its position before silence fills it
_GUESSED = ("aac", "ac3", "amr", "eac3", "mp3")  # ffmpeg guesses their length by the bit rate
_TICKS = 1_000_000  # of a second, in which ffmpeg states the times of a container


def open_coded(name: str, path: str | None, file: IO[bytes]) -> Source:
    """The samples of a coded file, by the first reader that takes it.

    Args:
        name: for errors.
        path: of the file, which ffmpeg opens itself; None for bytes in memory.
        file: the same, open at its start, seekable.

    Raises:
        AudioError: no reader takes it: says why for each, and names those that are missing.
        MissingExtraError: no reader is installed.
    """
    reasons: list[str] = []
    readers = {_soundfile: _NO_SOUNDFILE, _pyav: _NO_PYAV, _ffmpeg: _NO_FFMPEG}
    for reader, absent in readers.items():
        file.seek(0)
        opened = reader(name, path, file)
        if isinstance(opened, Source):
            check_layout(name, opened.rate, opened.channels)
            return opened
        reasons.append(opened or absent)
    if reasons == list(readers.values()):
        raise MissingExtraError("soundfile", "audio")
    raise AudioError(f"{name}: expected audio; {'; '.join(reasons)}")


_UNDECODED = 7  # of libsndfile, of an mp3 without a frame; it says that there is no such file
_NO_SOUNDFILE = "soundfile is not installed (pip install 'centella[audio]')"
_NO_PYAV = "PyAV, for m4a, mp4, webm and others, is not installed (pip install 'centella[av]')"
_NO_FFMPEG = "ffmpeg, which reads them too, is not on the PATH"


def _soundfile(name: str, _: str | None, file: IO[bytes]) -> Source | str | None:
    try:
        import soundfile
    except ImportError:
        return None

    class Forward(soundfile.SoundFile):  # type: ignore[misc]  # it has no types
        """After each read soundfile seeks to where it is, and an mp3 decoder loses its state."""

        def seekable(self) -> bool:
            return False

    try:
        opened = Forward(cast(BinaryIO, file))
    except soundfile.SoundFileError as error:
        if getattr(error, "code", None) == _UNDECODED:
            return "soundfile: no whole frame"
        return f"soundfile: {getattr(error, 'error_string', error)}"
    if not opened.frames:
        opened.close()
        return "soundfile: no samples"

    def blocks() -> Iterator[Array]:
        size, at = block_frames(opened.channels), 0
        while True:
            try:
                block = opened.read(size, dtype="float32", always_2d=True)
            except soundfile.SoundFileError as error:
                raise broken(name, at / opened.samplerate, error) from error
            if not len(block):
                return
            at += len(block)
            yield block

    known = opened.frames
    return Source(name, opened.samplerate, opened.channels, blocks(), known, opened.close)


def _pyav(name: str, _: str | None, file: IO[bytes]) -> Source | str | None:
    try:
        import av.error  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    # For a broken file; the last two for seeks and for formats that NumPy lacks.
    fails = (av.error.FFmpegError, OSError, ValueError)
    try:
        container: Any = av.open(file, metadata_errors="replace")
    except fails as error:
        return f"PyAV: {getattr(error, 'strerror', None) or error}"
    stream = container.streams.best("audio")
    frames = _decoded(container, stream) if stream is not None else iter(())
    try:
        first = next(frames, None)
    except fails as error:
        container.close()
        return f"PyAV: no samples: {error}"
    if first is None:
        container.close()
        return "PyAV: no audio stream with samples"
    rate, channels = first[0].sample_rate, first[0].layout.nb_channels
    begin = (container.start_time or 0) / _TICKS
    length: int | None = None if container.format.name in _GUESSED else container.duration
    known = None if length is None else int(length / _TICKS * rate)
    blocks = _timed(name, chain([first], frames), rate, channels, begin, fails)
    return Source(name, rate, channels, blocks, known, container.close)


def _decoded(container: Any, stream: Any) -> Iterator[tuple[Any, Array]]:
    """Frames and their samples, [n, channels]."""
    for frame in container.decode(stream):
        raw = frame.to_ndarray()
        planar = frame.format.is_planar
        yield frame, raw.T if planar else raw.reshape(-1, frame.layout.nb_channels)


def _timed(
    name: str, frames: Iterator[tuple[Any, Array]], rate: int, channels: int, begin: float,
    fails: tuple[type[Exception], ...],
) -> Iterator[Array]:  # fmt: skip
    """The samples of frames, and silence up to the time of one that comes late."""
    at = 0
    try:
        for frame, block in frames:
            if (frame.sample_rate, frame.layout.nb_channels) != (rate, channels):
                raise broken(name, at / rate, "its rate or number of channels changes")
            if frame.time is not None:
                for silence in _missing(name, frame.time - begin, at, rate, channels):
                    at += len(silence)
                    yield silence
            at += len(block)
            yield floats(name, block)
    except fails as error:
        raise broken(name, at / rate, error) from error


def _missing(name: str, time: float, at: int, rate: int, channels: int) -> Iterator[Array]:
    """Blocks of silence up to the time of a frame, if that is later than frame `at`."""
    gap = round(time * rate) - at
    if gap > _LONGEST_GAP * rate:
        raise broken(name, at / rate, f"a gap of {gap / rate:.0f} s")
    if gap > _TOLERATED * rate:
        size = block_frames(channels)
        for first in range(0, gap, size):
            yield np.zeros((min(size, gap - first), channels), np.float32)


def _ffmpeg(name: str, path: str | None, _: IO[bytes]) -> Source | str | None:
    from centella.audio.ffmpeg import open_piped

    return open_piped(name, path)
