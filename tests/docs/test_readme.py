"""README: what it prints is what runs, its picture is what the committed run says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np

import centella as ct

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_matrix_is_what_minilm_gives() -> None:
    (sentences,) = re.findall(r"vectors = model\.encode\((\[.*?\])\)", README)
    printed = README.partition("\n```\n[[")[2].partition("\n```")[0]
    matrix = np.array(re.findall(r"\d\.\d*", f"[[{printed}"), np.float32).reshape(3, 3)
    vectors = ct.load("minilm", device="cpu").encode(re.findall(r'"([^"]*)"', sentences))
    np.testing.assert_array_equal((vectors @ vectors.T).round(2), matrix)


def test_the_ledger_line_is_what_is_counted() -> None:
    (text,) = re.findall(r'model\.encode\(\["(.*?)"\]\)\nprint\(led\)', README)
    model = ct.load("minilm", device="cpu")
    model.encode([text])  # the first call of a length compiles
    with ct.ledger() as led:
        model.encode([text])
    printed = README.partition("print(led)\n```\n\n```\n")[2].partition("\n```")[0]
    assert str(led) == printed


def test_the_picture_is_that_of_the_committed_run() -> None:
    drawn = script(ROOT / "benchmarks" / "picture.py")
    assert drawn.PICTURE.read_text("utf-8") == drawn.picture()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 140
