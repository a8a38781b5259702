"""Steps that are submitted before the last one was read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from centella.tasks.generate.run_ahead import run_ahead


class Step:
    """What a submission gives; the log has what happened."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log
        log.append(f"submit {number}")

    def result(self) -> int:
        self.log.append(f"read {self.number}")
        return self.number


@pytest.mark.parametrize(
    ("ahead", "wanted"),
    [
        (0, "submit 0, read 0, submit 1, read 1, submit 2, read 2"),
        (1, "submit 0, submit 1, read 0, submit 2, read 1, read 2"),
        (2, "submit 0, submit 1, submit 2, read 0, read 1, read 2"),
    ],
)
def test_so_many_are_under_way(ahead: int, wanted: str) -> None:
    log, numbers = list[str](), count()

    def submit() -> Any:
        return Step(next(numbers), log)

    assert list(run_ahead(submit, 3, ahead)) == [0, 1, 2]
    assert ", ".join(log) == wanted


def test_no_step_is_submitted_that_nobody_asks_for() -> None:
    log, numbers = list[str](), count()

    def submit() -> Any:
        return Step(next(numbers), log)

    steps: Iterator[int] = run_ahead(submit, 9)
    assert next(steps) == 0
    assert log == ["submit 0", "submit 1", "read 0"]
    assert list(run_ahead(submit, 0)) == []
