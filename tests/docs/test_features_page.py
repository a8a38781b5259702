"""docs/features.md is held to its word: rows, public names, tests, backends."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import centella as ct
from tests.support.proofs import BACKENDS, HOST, backends

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"
LETTERS = {"A": 13, "B": 7, "C": 13, "D": 5, "E": 1}
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Feature:
    """A row of the page."""

    row: str
    what: str
    names: list[str]
    tests: list[str]
    runs_on: frozenset[str]


def features(text: str) -> list[Feature]:
    """The rows of every table of a page."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"[A-Z]\d+", cells[0]):
            row, what, names, tests, runs_on, _ = cells
            where = frozenset(filter(None, re.split(r",\s*", runs_on)))
            rows.append(Feature(row, what, CODE.findall(names), CODE.findall(tests), where))
    return rows


FEATURES = features(PAGE.read_text("utf-8"))


def resolve(name: str) -> object:
    """What a public name means: an attribute below `centella`, or a command.

    Raises:
        LookupError: nothing.
    """
    command = name.removeprefix("centella ")
    if command != name:
        from centella.cli.app import COMMANDS

        return COMMANDS[command]
    value: object = ct
    for part in name.split("."):
        if not hasattr(value, part):
            try:
                value = importlib.import_module(f"{ct.__name__}.{part}")
            except ImportError as error:
                raise LookupError(f"{name}: there is no {part!r}") from error
        else:
            value = getattr(value, part)
    return value


def test_every_row_is_there_once() -> None:
    wanted = [f"{letter}{n}" for letter, last in LETTERS.items() for n in range(1, last + 1)]
    assert [feature.row for feature in FEATURES] == wanted


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.row)
def test_a_row_is_proved(feature: Feature) -> None:
    assert feature.what
    assert feature.names and feature.tests and feature.runs_on
    for name in feature.names:
        assert resolve(name) is not None, name
        assert "." in name or " " in name or name in ct.__all__, name
    proved = frozenset[str]().union(*(backends(test) for test in feature.tests))
    assert feature.runs_on <= proved, f"no test of {feature.row} runs there"
    assert feature.runs_on <= {*BACKENDS, HOST}


def test_what_does_not_exist_is_found() -> None:
    for name in ("nothing", "Tensor.nothing", "nothing.Tensor", "centella nothing"):
        with pytest.raises(LookupError, match="nothing"):
            resolve(name)
    for test in ("test_no.py::test_op", "test_ops.py::test_no", "test_ops.py::run", "test_ops.py"):
        with pytest.raises(LookupError, match="no such"):
            backends(test)
    assert features("| row | what |\n|---|---|\n") == []


def test_backends_are_those_of_the_markers() -> None:
    assert backends("test_ops.py::test_op") == frozenset(BACKENDS)
    assert backends("test_tensor.py::TestWgpuBuffers::test_it_is_read_in_place") == {"webgpu"}
    assert backends("test_batch.py::test_larger_than_the_device_allows") == {"webgpu"}
    assert backends("test_choice.py::test_few_rows_get_a_thin_kernel") == {HOST}


def test_cuda_needs_the_driver_alone() -> None:
    """No module that is imported from NVIDIA is a compiler, a linker or a library of kernels."""
    imported = set[str]()
    for path in (ROOT / "src" / "centella").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuda"):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {a.name for a in node.names if a.name.partition(".")[0] == "cuda"}
    assert imported == {"cuda.bindings.driver"}
