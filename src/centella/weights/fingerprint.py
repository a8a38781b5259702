"""What tells the files of one model from those of another, without reading all of large weights."""

from __future__ import annotations

import zlib
from os import PathLike
from pathlib import Path
from typing import Any

from centella.weights.contents import Contents
from centella.weights.folder import (
    FILES,
    TORCH_FILES,
    find_model,
    is_gguf,
    read_modules,
    split_files,
)
from centella.weights.model_files import inside, is_file

WHOLE = 1 << 28  # bytes of a file that is read whole, in a tenth of a second
FIRST = 1 << 20  # bytes of a larger one that are read: the list of its tensors
SAMPLES, SAMPLE = 1024, 4096  # parts of a larger one, evenly apart, and bytes of each


def fingerprint(path: str | PathLike[str]) -> dict[str, str]:
    """What is in the files of a model: a text for each name, which changes with the content.

    It has the size and a CRC-32 of the content. Of a file of more than 256 MiB, the CRC is of the
    first MiB and of 4 KiB at each of 1 024 points, and the text has the time of its last change.

    Args:
        path: as `centella.load` takes it: a folder, whose modules' files are included, or a file.

    Raises:
        WeightsError: no such model, or a file that cannot be read; TypeError: no path.
    """
    root = find_model(path)
    if is_gguf(root):
        return {file.name: _text(file) for file in split_files(root)
                if file == root or is_file(file)}  # fmt: skip
    named: list[Any] = [module.get("path", "") for module in read_modules(root)]
    folders = [root, *(inside(root, name, f"{root / 'modules.json'}: path") for name in named)]
    files = {
        file for folder in folders for end in (*FILES, *TORCH_FILES) for file in folder.glob(end)
    }
    return {file.relative_to(root).as_posix(): _text(file) for file in sorted(files)
            if is_file(file)}  # fmt: skip


def _text(file: Path) -> str:
    contents = Contents(file)
    size, step = contents.size, max(contents.size // SAMPLES, 1)
    if size <= WHOLE:
        parts, written = [(at, min(at + FIRST, size)) for at in range(0, size, FIRST)], ""
    else:
        parts = [(0, FIRST), *((at, min(at + SAMPLE, size)) for at in range(0, size, step))]
        written = f"written {contents.written}, "
    code = 0
    for begin, end in parts:
        code = zlib.crc32(contents.read(begin, end).data, code)
    return f"{size:,} bytes, {written}CRC {code:08x}"
