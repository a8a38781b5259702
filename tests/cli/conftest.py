"""What every test of the command line has."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")

from centella.cli import output


@pytest.fixture(autouse=True)
def _no_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a command takes longer than the time after which it says how far it is."""
    monkeypatch.setattr(output, "SECONDS", 1e9)
