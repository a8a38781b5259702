"""Steps of the device that are submitted before the host has read what the last one sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from centella.runtime.pending import Pending

R = TypeVar("R")


def run_ahead(
    submit: Callable[[], Pending[R]], steps: int, ahead: int = 1,
    meanwhile: Callable[[], None] | None = None,
) -> Iterator[R]:  # fmt: skip
    """What each of so many steps sends.

    Args:
        submit: submits a step.
        ahead: steps that are under way when the one before them is read.
        meanwhile: called before a wait for the first of several under way.
    """
    under_way: deque[Pending[R]] = deque()
    for _ in range(steps):
        under_way.append(submit())
        if len(under_way) > ahead:
            if meanwhile is not None and not under_way[0].done():
                meanwhile()
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()
