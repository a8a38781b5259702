"""Objects between uses: who has one, and what a finalizer gives back."""

from __future__ import annotations

import gc
from collections.abc import Generator
from weakref import ref

from centella.host.idle import Idle


class Thing:
    """What is kept."""


def test_the_last_ones_given_wait() -> None:
    idle = Idle[Thing](2)
    things = [idle.use(Thing()) for _ in range(3)]
    first = ref(things[0])
    while things:
        idle.give(things.pop(0))
    assert first() is None  # it is let go at once
    things = idle.waiting[::-1]
    assert len(things) == 2
    assert idle.use(things[1]) is things[1]
    assert idle.waiting == [things[0]]


def test_what_was_forgotten_is_not_taken_back() -> None:
    idle = Idle[Thing](2)
    dropped, cleared = idle.use(Thing()), idle.use(Thing())
    idle.drop(dropped)
    idle.give(dropped)
    assert idle.waiting == []
    idle.clear()
    idle.give(cleared)
    assert idle.waiting == []


def test_a_user_that_is_collected_gives_back_what_is_whole() -> None:
    idle = Idle[Thing](2)

    def user() -> Generator[ref[Thing]]:
        thing = idle.use(Thing())
        try:
            yield ref(thing)
        finally:
            idle.give(thing)

    cycle: list[object] = [user()]
    weak = next(cycle[0])  # type: ignore[call-overload]  # it is a generator
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert weak() is not None
    assert idle.waiting == [weak()]
