"""docs/from-trueno.md is what its script makes, and every test that it names exists."""

from __future__ import annotations

import re

import pytest

from tests.support.make_from_trueno import PAGE, ROOT, page
from tests.support.proofs import BACKENDS, HOST, backends
from tests.support.seed_faults import FAULTS
from tests.support.seed_surface import ROWS


def test_the_page_is_what_the_script_makes() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python tests/support/make_from_trueno.py"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_has_tests(fault: object) -> None:
    tests = getattr(fault, "tests", ())
    assert len(tests) >= 1
    for reference in tests:
        assert backends(reference) <= {*BACKENDS, HOST}


def test_every_name_and_fault_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    for row in ROWS:
        assert f"| `{row.name}` | `{row.ours}` |" in text
    assert len(re.findall(r"^\| .* \| .* \| `test_", text, re.MULTILINE)) == len(FAULTS)


def test_what_it_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text("utf-8")):
        assert (PAGE.parent / target).resolve().is_file(), target
    assert (ROOT / "examples" / "resident_tensor.py").is_file()
