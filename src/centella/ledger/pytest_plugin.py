"""The fixture `ledger`, which pytest finds where centella is installed.

A test asks for it by name and says what it expects: `ledger.expect(uploads=1, downloads=1)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from centella.ledger.counts import Ledger
from centella.ledger.counts import ledger as open_ledger


@pytest.fixture(name="ledger")
def ledger_of_this_test() -> Iterator[Ledger]:
    """What this test does on any device, counted: a `ct.ledger()` that is open while it runs."""
    with open_ledger() as led:
        yield led
