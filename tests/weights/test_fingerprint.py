"""Fingerprints of models: what changes them, and what does not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from centella import WeightsError
from centella.weights import fingerprint as module
from centella.weights.fingerprint import fingerprint

TINY = Path(__file__).parents[1] / "data" / "tiny-bert"
WEIGHTS, POOLING = "model.safetensors", "1_Pooling/config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def flipped(file: Path, at: int) -> None:
    """Change one byte and leave size and times."""
    content, seen = bytearray(file.read_bytes()), file.stat()
    content[at] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def test_any_byte_of_a_file_that_the_model_is_read_from(folder: Path) -> None:
    first = fingerprint(folder)
    assert {WEIGHTS, POOLING, "config.json", "tokenizer.json", "vocab.txt"} <= set(first)
    (folder / "README.md").write_text("a card")
    os.utime(folder / WEIGHTS)
    assert fingerprint(str(folder)) == first == fingerprint(TINY)
    for name in (WEIGHTS, POOLING, "tokenizer.json"):
        before, size = fingerprint(folder), (folder / name).stat().st_size
        for at in (0, size // 2, size - 1):
            flipped(folder / name, at)
            after = fingerprint(folder)
            assert [n for n in before if before[n] != after[n]] == [name]
            before = after


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda file: flipped(file, 10), True),
        (lambda file: flipped(file, 100 * 1000 + 7), True),
        (lambda file: flipped(file, 99_999), False),  # between two samples, and of no other time
        (lambda file: os.utime(file, ns=(0, 1)), True),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), True),
    ],
    ids=["list of tensors", "sample", "elsewhere", "time", "size"],
)
def test_a_large_file_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], seen: bool
) -> None:
    monkeypatch.setattr(module, "WHOLE", 1000)
    monkeypatch.setattr(module, "FIRST", 100)
    monkeypatch.setattr(module, "SAMPLE", 10)
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1000 * 1024))
    before = fingerprint(file)
    change(file)
    assert (fingerprint(file) != before) == seen


def test_a_large_file_costs_little(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with file.open("wb") as hole:
        hole.truncate(20 << 30)
    begin = time.process_time()
    assert fingerprint(file)["model.gguf"].startswith("21,474,836,480 bytes, written ")
    assert time.process_time() - begin < 1.0  # 5 MB are read


def test_what_cannot_be_read(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(WeightsError, match="expected a model folder"):
        fingerprint(tmp_path / "none")
    with pytest.raises(WeightsError, match=r"none\.gguf: cannot be read"):
        fingerprint(tmp_path / "none.gguf")
    (folder / "modules.json").write_text('[{"path": "../.."}]')
    with pytest.raises(WeightsError, match="path: expected a path in the folder"):
        fingerprint(folder)
