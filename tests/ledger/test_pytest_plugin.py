"""The fixture `ledger` that ships with the library, as a test of somebody else would use it."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ("pytester",)
ROOT = Path(__file__).parents[2]
TESTS = """
import numpy as np
import pytest
import centella as ct

def chain():
    x = ct.asarray(np.ones(4, np.float32), device="cpu")
    return (x + 1.0).numpy()

def test_counts(ledger):
    chain()
    ledger.expect(uploads=1, downloads=1, submissions=1)

def test_each_test_has_its_own(ledger):
    ledger.expect(uploads=0)
    assert isinstance(ledger, ct.Ledger)

def test_that_fails(ledger):
    chain()
    ledger.expect(uploads=2)
"""


def test_the_fixture_in_a_process_of_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH')}")
    pytester.makepyfile(TESTS)
    named = [] if _installed() else ["-p", "centella.ledger.pytest_plugin"]
    result = pytester.runpytest_subprocess("-W", "error", *named)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*ledger: uploads: expected 2, got 1*"])


def _installed() -> bool:
    return any(p.name == "centella" for p in importlib.metadata.entry_points(group="pytest11"))


def test_pytest_is_told_where_the_fixture_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"centella": "centella.ledger.pytest_plugin"}
