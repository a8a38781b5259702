"""Every public name of the floor has an expression here that does what it promises."""

from __future__ import annotations

from collections import Counter

import pytest

import centella as ct
from tests.support.seed_surface import ROWS, THEIRS, Row, run, scene_of

NAMED = {f"{row.owner}.{row.name}".removeprefix("."): row for row in ROWS}


@pytest.mark.parametrize("name", NAMED)
def test_name(device: ct.Device, name: str) -> None:
    row = NAMED[name]
    here = scene_of(row, device)
    run(row.before, here)
    with ct.ledger() as here["led"]:
        if row.only and not device.name.startswith(row.only):
            with pytest.raises((ct.DeviceError, AttributeError)):
                run(row.ours, here)
        else:
            result = run(row.ours, here)
            row.check(here, result)


def test_every_name_has_one_row() -> None:
    listed = [(owner, name) for owner, names in THEIRS.items() for name in names.split()]
    assert Counter((row.owner, row.name) for row in ROWS) == Counter(listed)
    assert len(listed) == len(set(listed)) == 69


def test_a_row_that_does_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expressions are run, not only printed."""
    device = ct.device("cpu")
    row = Row("GpuCommandBatch", "relu", "batch.tanh(x)", NAMED["GpuCommandBatch.relu"].check)
    here = scene_of(row, device)
    with ct.ledger() as here["led"], pytest.raises(AssertionError, match="tolerance"):
        row.check(here, run(row.ours, here))
