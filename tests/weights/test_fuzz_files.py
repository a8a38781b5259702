"""A few hundred of the broken model files of which `tests/support/fuzz_files.py` has thousands."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("resource", reason="cases are made of pipes and links too")


@pytest.mark.parametrize(("kind", "cases"), [("safetensors", 400), ("folder", 200)])
def test_broken_files_are_read_or_refused(kind: str, cases: int) -> None:
    from tests.support.fuzz_files import run

    results = run(kind, cases)
    faults = {f"{r['kind']}:{r['number']}": r["fault"] for r in results if r["fault"]}
    assert not faults
    assert {r["outcome"] for r in results} == {"read", "WeightsError"}
    assert len(results) == cases
