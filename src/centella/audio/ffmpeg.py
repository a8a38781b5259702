"""The ffmpeg on the PATH, as a process that writes samples into a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from subprocess import DEVNULL, PIPE, Popen
from tempfile import NamedTemporaryFile

from centella.audio.source import Array, Source, broken
from centella.audio.wav import open_wav
from centella.errors import AudioError

_SHOWN = 500  # characters of ffmpeg's message
_READ = 1 << 16  # bytes of it that are looked at, from the begin or the end
_LENGTH = re.compile(r"^\[info\]   Duration: (\d+):(\d\d):(\d\d\.\d+)", re.MULTILINE)
_ESTIMATE = "Estimating duration from bitrate"  # ffmpeg's warning
_FAILURE = re.compile(r"\[(?:error|fatal|panic)\] (.*)")


def open_piped(name: str, path: str | None) -> Source | str | None:
    """The samples of a file, why there are none, or None where there is no ffmpeg.

    Args:
        name: for errors.
        path: of the file; None for bytes in memory.
    """
    program = which("ffmpeg")
    if program is None:
        return None
    if path is None:
        return "ffmpeg: reads files alone, not bytes in memory"
    # `file:` keeps a name from being read as a URL, and the list keeps playlists from opening any.
    command = [
        program, "-nostdin", "-hide_banner", "-nostats", "-v", "level+info",
        "-protocol_whitelist", "file,pipe", "-i", f"file:{path}", "-map", "0:a:0",
        "-af", "aresample=async=1:first_pts=0", "-c:a", "pcm_f32le", "-f", "wav", "pipe:1",
    ]  # fmt: skip
    with NamedTemporaryFile(delete=False) as file:  # `_end` removes it; a pipe could fill, unread
        said = Path(file.name)
        try:
            process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=file)
        except OSError as error:
            said.unlink()
            return f"ffmpeg: {error}"
    assert process.stdout is not None
    try:
        source = open_wav(name, process.stdout)
        assert source is not None  # it was told to write floats
    except AudioError:
        process.wait()
        reason = f"ffmpeg: {_last_words(said)}"
        _end(process, said)
        return reason
    seconds = _length(said)  # it is written before the first sample
    return Source(
        name, source.rate, source.channels, _checked(name, source, process, said),
        None if seconds is None else int(seconds * source.rate), lambda: _end(process, said),
    )  # fmt: skip


def _checked(name: str, source: Source, process: Popen[bytes], said: Path) -> Iterator[Array]:
    """The blocks of ffmpeg, and an error at their end where it failed."""
    at = 0
    for block in source.blocks:
        at += len(block)
        yield block
    if process.wait():
        raise broken(name, at / source.rate, f"ffmpeg: {_last_words(said)}")


def _end(process: Popen[bytes], said: Path) -> None:
    """End a process that nobody reads from any more, and close what was between."""
    process.kill()
    process.wait()
    said.unlink(missing_ok=True)
    if process.stdout is not None:
        process.stdout.close()


def _length(said: Path) -> float | None:
    """Seconds of the input by ffmpeg's words; None where it does not know or estimates them."""
    with said.open("rb") as file:
        message = file.read(_READ).decode(errors="replace")
    stated = _LENGTH.search(message)
    if stated is None or _ESTIMATE in message:
        return None
    hours, minutes, seconds = stated.groups()
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def _last_words(said: Path) -> str:
    """The end of the errors that ffmpeg wrote, on one line."""
    with said.open("rb") as file:
        file.seek(max(said.stat().st_size - _READ, 0))
        message = file.read().decode(errors="replace")
    return " ".join(_FAILURE.findall(message))[-_SHOWN:]
