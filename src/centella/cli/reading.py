"""Text files of any origin: how they are opened, and how their bytes become text.

UTF-8, with or without a byte order mark; UTF-16 by its mark; else Windows-1252, and Latin-1 for the
five bytes that it leaves out, where the bytes look like text.
"""

from __future__ import annotations

import codecs
import io
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from centella.cli.escape import in_line
from centella.cli.process import reason
from centella.errors import CentellaError
from centella.weights.model_files import kind_of

# Bytes of no text in any 8-bit encoding: the controls that file(1) takes for binary as well.
BINARY = bytes({*range(32), 127} - {7, 8, 9, 10, 11, 12, 13, 27})
NO_WAIT = getattr(os, "O_NONBLOCK", getattr(os, "O_BINARY", 0))  # Windows has the second alone


class NotTextError(ValueError):
    """What cannot be read as text; its text is the reason, to stand behind the file's name."""


def decode(raw: bytes) -> str:
    """The text of bytes, without a byte order mark.

    Raises:
        NotTextError: a NUL or other bytes that no text has, or UTF-16 that is broken or unmarked.
    """
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            text = raw.decode("utf-16")
        except UnicodeDecodeError as error:
            raise NotTextError(f"no valid UTF-16: {error.reason} at byte {error.start}") from error
    else:
        text = _of_8_bits(raw)
    if "\0" in text:
        raise _no_text(raw, "it has NUL bytes")
    return text


def _of_8_bits(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    if len(raw.translate(None, BINARY)) < len(raw):
        raise _no_text(raw, "neither UTF-8 nor UTF-16, with control characters")
    try:
        return raw.decode("cp1252")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _no_text(raw: bytes, why: str) -> NotTextError:
    """The error of bytes that are binary; or UTF-16, where most of every second byte are NUL."""
    for name, high in (("UTF-16LE", raw[1::2]), ("UTF-16BE", raw[::2])):
        if 2 * high.count(0) > len(high):
            text = raw.decode(name, "replace")
            if not set(text) & {*BINARY.decode("latin-1"), "\ufffd"}:
                return NotTextError(
                    f"it looks like {name} without a byte order mark; type: "
                    f"iconv -f {name} -t UTF-8"
                )
    return NotTextError(f"binary: {why}")


def open_readable(path: Path, pipes: bool = False) -> BinaryIO:
    """Open a file to read without waiting for anybody.

    Args:
        path: the file.
        pipes: whether a FIFO will do; one that nobody writes to has nothing in it.

    Raises:
        NotTextError: a broken link, a folder, a FIFO, a socket, a device, or no permission.
    """
    try:
        mode = path.stat().st_mode
        kind = kind_of(mode)
        pipe = pipes and stat.S_ISFIFO(mode)
        if kind != "a file" and not pipe:
            raise NotTextError(f"{kind}, no file")
        opened = os.open(path, os.O_RDONLY | NO_WAIT)
        if pipe:
            os.set_blocking(opened, True)
        return open(opened, "rb")
    except OSError as error:
        if path.is_symlink() and not path.exists():
            raise NotTextError(f"a broken link to {os.readlink(path)}") from error
        raise NotTextError(reason(error)) from error


def read_text(path: Path, pipes: bool = False) -> str:
    """The text of a file.

    Raises:
        NotTextError: as `open_readable` and `decode`.
    """
    with open_readable(path, pipes) as file:
        try:
            raw: bytes | None = file.read()
            if raw is None:  # without waiting, as files that the kernel makes can answer
                raise NotTextError("nothing to read yet")
            return decode(raw)
        except OSError as error:
            raise NotTextError(reason(error)) from error


def texts_of(command: str, texts: list[str], file: str | None, example: str) -> list[str]:
    """The texts of a command line, or the lines of its --file.

    Args:
        example: a command to try where there is no text.

    Raises:
        CentellaError: both kinds of text, or none.
    """
    if texts and file is not None:
        raise CentellaError(f"{command}: give texts or --file, not both")
    if file is not None:
        texts = lines_of(command, file)
        if not texts:
            raise CentellaError(f"{command}: --file {in_line(file)}: expected lines, got none")
    if not texts:
        raise CentellaError(f"{command}: no text; try: {example}")
    return texts


def lines_of(command: str, file: str) -> list[str]:
    """The lines of a file, or of stdin for "-"; a blank one is a text too, so that rows are lines.

    Raises:
        CentellaError: they are no text.
    """
    try:
        text = decode(_standard_input()) if file == "-" else read_text(Path(file), pipes=True)
    except NotTextError as error:
        raise CentellaError(f"{command}: --file {in_line(file)}: {error}") from error
    return [line.rstrip("\n") for line in io.StringIO(text, newline=None)]


def _standard_input() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise NotTextError(reason(error)) from error
