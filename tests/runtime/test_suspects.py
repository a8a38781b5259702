"""Values that a stopped loop may have left wrong, by the submissions that they depend on."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from centella.backends.base import Buffer, Submission
from centella.errors import LimitError
from centella.record.values import Value
from centella.runtime.suspects import Suspects


class Noted:
    """A value with a buffer, that says whether it was refused."""

    def __init__(self) -> None:
        self.buffer = cast("Buffer", object())
        self.refused = False

    def refuse(self, error: LimitError) -> None:
        self.refused = True


def noted(suspects: Suspects, serial: int, *values: Noted, of: tuple[Noted, ...] = ()) -> None:
    """A submission that computes values: with loops of its own, or of others."""

    def earliest(work: Submission, number: int) -> dict[Any, int]:
        firsts = [suspects._serials[cast("Value", v)][1] for v in of]
        return {v.buffer: min(firsts, default=number) for v in values}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suspects, "_earliest", earliest)
        work = Submission([])
        work.reports = True
        suspects.note(work, serial, cast("list[Value]", list(values)))


def test_a_late_read_back_refuses_what_depends_on_it_alone() -> None:
    suspects = Suspects(threading.RLock())
    first, second, from_first, newer = Noted(), Noted(), Noted(), Noted()
    noted(suspects, 1, first)
    noted(suspects, 2, second)
    noted(suspects, 3, from_first, of=(first,))
    suspects.refuse(LimitError("stopped"), 1)
    assert (first.refused, second.refused, from_first.refused) == (True, False, True)
    noted(suspects, 4, newer)
    suspects.refuse(LimitError("stopped"), 2)  # which was under way all the time
    assert (second.refused, newer.refused) == (True, False)


def test_a_clean_read_back_clears_what_came_before() -> None:
    suspects = Suspects(threading.RLock())
    first, second = Noted(), Noted()
    noted(suspects, 1, first)
    noted(suspects, 2, second)
    suspects.passed(1)
    suspects.refuse(LimitError("stopped"), 2)
    assert (first.refused, second.refused) == (False, True)
