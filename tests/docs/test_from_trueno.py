"""docs/from-trueno.md has the names that tests run, and every test of its scoreboard exists."""

from __future__ import annotations

import re

import pytest

from tests.support.make_from_trueno import PAGE, page
from tests.support.proofs import BACKENDS, HOST, backends
from tests.support.seed_surface import ROWS

TEXT = PAGE.read_text("utf-8")
FAULTS = re.findall(r"^\| (.+) \| (.+) \| (`test_.+`) \|$", TEXT, re.MULTILINE)


def test_the_tables_are_what_the_script_writes() -> None:
    assert page(TEXT) == TEXT, "run: python tests/support/make_from_trueno.py"
    row = f"| `{ROWS[0].name}` | "
    assert page(TEXT.replace(row, "| `stale` | ")) == TEXT
    with pytest.raises(AssertionError, match="GpuMatmulCache"):
        page(TEXT.replace("### `GpuMatmulCache`", "### Gone"))


def test_every_fault_is_on_the_scoreboard() -> None:
    assert len(FAULTS) == 22


@pytest.mark.parametrize(("what", "tests"), [(what, tests) for what, _, tests in FAULTS])
def test_a_fault_has_tests(what: str, tests: str) -> None:
    for reference in re.findall(r"`([^`]+)`", tests):
        assert backends(reference) <= {*BACKENDS, HOST}, what
