"""The ffmpeg on the PATH, as a process that writes samples into a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from shutil import which
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryFile
from typing import IO

from centella.audio.source import Array, Source, broken
from centella.audio.wav import open_wav
from centella.errors import AudioError

_SHOWN = 500  # characters of ffmpeg's message


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
        program, "-nostdin", "-v", "error", "-protocol_whitelist", "file,pipe", "-i",
        f"file:{path}", "-map", "0:a:0", "-af", "aresample=async=1:first_pts=0",
        "-c:a", "pcm_f32le", "-f", "wav", "pipe:1",
    ]  # fmt: skip
    said = TemporaryFile()  # noqa: SIM115  # `_end` closes it; a pipe could fill, unread
    process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=said)
    assert process.stdout is not None
    try:
        source = open_wav(name, process.stdout)
        assert source is not None  # it was told to write floats
    except AudioError:
        process.wait()
        reason = f"ffmpeg: {_last_words(said)}"
        _end(process, said)
        return reason
    return Source(
        name, source.rate, source.channels, _checked(name, source, process, said), None,
        lambda: _end(process, said),
    )  # fmt: skip


def _checked(name: str, source: Source, process: Popen[bytes], said: IO[bytes]) -> Iterator[Array]:
    """The blocks of ffmpeg, and an error at their end where it failed."""
    at = 0
    for block in source.blocks:
        at += len(block)
        yield block
    if process.wait():
        raise broken(name, at / source.rate, f"ffmpeg: {_last_words(said)}")


def _end(process: Popen[bytes], said: IO[bytes]) -> None:
    """End a process that nobody reads from any more, and close what was between."""
    process.kill()
    process.wait()
    said.close()
    if process.stdout is not None:
        process.stdout.close()


def _last_words(said: IO[bytes]) -> str:
    """The end of what a program wrote, on one line."""
    said.seek(0)
    return " ".join(said.read(1 << 16).decode(errors="replace").split())[-_SHOWN:]
