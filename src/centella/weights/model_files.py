"""Files of a model folder, which anybody may have written: each is bounded before it is used.

A JSON text is weighed before it is parsed: every value of it begins the text, or follows a comma or
an opening bracket, so their count bounds the values, and with them the memory and the time.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from centella.errors import WeightsError

T = TypeVar("T", dict[str, Any], list[Any])
R = TypeVar("R")

MAX_JSON = 2**22  # bytes of a file; the largest that describes a published model has 1.2 MB
MAX_VALUES = 2**18  # values of a JSON text, of 100 bytes each at most once parsed

_OBJECT = 4  # an object takes as much as so many other values
_SHOWN = 400  # characters of a value in an error
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024  # characters of a path that a file names
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}
_OUTSIDE = "\\:"  # what makes a path absolute, or another one, on some system


def kind(path: Path) -> str:
    """What is at a path: "a file", "a folder", or words for an error."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing at that path"
    except (OSError, ValueError) as error:  # a name too long, or of no bytes; no permission
        return f"a path that cannot be read: {getattr(error, 'strerror', None) or error}"
    return kind_of(mode)


def kind_of(mode: int) -> str:
    """What has this `st_mode`: "a file", "a folder", "a FIFO", "a socket" or "a device"."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def is_file(path: Path) -> bool:
    """Whether a regular file is there; False for a path that cannot be looked at."""
    return kind(path) == "a file"


def read_bytes(file: Path, most: int = MAX_JSON) -> bytes:
    """A file of at most so many bytes, whole.

    Raises:
        WeightsError: a larger one, a Git LFS pointer, or one that cannot be read.
    """
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            raw = stream.read(size) if size <= most else b""
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error
    if size > most:
        raise WeightsError(f"{file}: expected at most {most} bytes, got {size}")
    check_pointer(file, raw)
    return raw


def check_pointer(file: Path, raw: bytes) -> None:
    """Refuse what Git keeps in place of a large file.

    Raises:
        WeightsError: it begins as one, with the command that gets the file.
    """
    if raw.startswith(_POINTER):
        raise WeightsError(
            f"{file}: expected the file, got the pointer that Git LFS keeps in its place; "
            f"type: git lfs install && git -C {str(file.parent)!r} lfs pull"
        )


def check_values(file: Path, raw: bytes, most: int = MAX_VALUES) -> None:
    """Refuse a JSON text of too many values, before it is parsed.

    Raises:
        WeightsError: it has more.
    """
    values = raw.count(b",") + raw.count(b"[") + _OBJECT * raw.count(b"{")
    if values > most:
        raise WeightsError(f"{file}: expected JSON of at most {most} values, got {values}")


def parse_json(
    file: Path, raw: bytes, most: int = MAX_VALUES,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:  # fmt: skip
    """The value of a JSON text in UTF-8, of at most so many values.

    Args:
        file: the file that it is from, for errors.
        pairs: makes an object of its names and values.

    Raises:
        WeightsError: too many values, or no JSON.
    """
    check_values(file, raw, most)
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: expected JSON, got bad JSON: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a model folder; as `read_json_as`."""
    return read_json_as(file, dict)


def read_json_as(file: Path, wanted: type[T]) -> T:
    """A JSON object (dict) or list of a model folder; an empty one where the file is missing.

    Raises:
        WeightsError: for a file that holds none, or is too large.
    """
    there = kind(file)
    if there == "nothing at that path":
        return wanted()
    if there != "a file":
        raise WeightsError(f"{file}: expected JSON, got {there}")
    value = parse_json(file, read_bytes(file))
    if not isinstance(value, wanted):
        name = "object" if wanted is dict else wanted.__name__
        raise WeightsError(f"{file}: expected a JSON {name}, got {type(value).__name__}")
    return value


def inside(folder: Path, name: Any, origin: str) -> Path:
    """The path that a file of a folder names; it may not leave the folder.

    Links are followed. They may lead to huggingface_hub's `blobs`, of which its snapshots are made.

    Args:
        folder: the model folder.
        name: the path in it, with slashes.
        origin: begins the text of an error: the file, and what names the path.

    Raises:
        WeightsError: no such path, or one that leads elsewhere.
    """
    wrong = f"{origin}: expected a path in the folder, got {show(name)}"
    if not isinstance(name, str) or len(name) > _LONGEST or not name.isprintable():
        raise WeightsError(wrong)
    if set(name) & set(_OUTSIDE) or name.startswith("/") or ".." in name.split("/"):
        raise WeightsError(wrong)
    path = folder / name
    try:
        root, end = folder.resolve(), path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long; no UTF-8; links in a circle
        raise WeightsError(f"{wrong}: {error}") from error
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    if not any(end.is_relative_to(home) for home in homes):
        raise WeightsError(f"{wrong}, which is a link out of it, to {end}")
    return path


def known(origin: str, field: str, name: Any, table: Mapping[str, R]) -> R:
    """The row of a table that a field of a file names.

    Raises:
        WeightsError: there is none.
    """
    if not isinstance(name, str) or name not in table:
        raise WeightsError(f"{origin}: {field}: expected {', '.join(table)}, got {show(name)}")
    return table[name]


def show(value: Any) -> str:
    """A value of a file, cut short in size and depth: a hostile one floods no message."""
    brief = reprlib.Repr()
    brief.maxstring, brief.maxlist, brief.maxlevel = 120, 12, 3
    text = brief.repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
