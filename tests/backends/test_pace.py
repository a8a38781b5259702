"""Submissions that would keep a GPU too long are cut; what one takes is learned."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.backends.base import Load, Submission
from centella.backends.webgpu import pace as pacing
from centella.backends.webgpu.pace import CUT, GUESS, Pace
from tests.support.devices import own

webgpu = pytest.mark.devices("webgpu")
X = np.random.default_rng(5).standard_normal((64, 64), np.float32)


def chain(x: ct.Tensor) -> ct.Tensor:
    for _ in range(6):
        x = ct.softmax(x @ x)
    return x


def reference(x: Any) -> Any:
    x = x.astype(np.float64)
    for _ in range(6):
        y = x @ x
        e = np.exp(y - y.max(-1, keepdims=True))
        x = e / e.sum(-1, keepdims=True)
    return x


@pytest.fixture
def where(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> ct.Device:
    """A device that is taken for so slow a GPU that a product of 64 x 64 takes it 0.26 s."""
    slow = Pace("DiscreteGPU")
    slow.factor = 0.26 / slow.seconds(Load(2 * 64**3))
    monkeypatch.setattr(slow, "seen", lambda *_: None)
    monkeypatch.setattr(device.backend, "pace", slow)
    return device


@pytest.fixture
def submits(where: ct.Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many dispatches each `queue.submit` had."""
    from centella.backends.webgpu import backend, raw

    sizes: list[int] = []
    submit = raw.submit

    class Counted(raw.Encoder):
        launches = 0

        def launch(self, dispatches: Any, stamps: Any = None) -> None:
            self.launches += len(dispatches)
            super().launch(dispatches, stamps)

        def finish(self) -> Any:
            return CountedCommands(super().finish(), self.launches)

    class CountedCommands:
        def __init__(self, commands: raw.Commands, launches: int) -> None:
            self._commands, self.handle, self.launches = commands, commands.handle, launches

    def counted(queue: Any, commands: Any) -> None:
        sizes.append(sum(one.launches for one in commands))
        submit(queue, commands)

    monkeypatch.setattr(backend, "Encoder", Counted)
    monkeypatch.setattr(raw, "submit", counted)
    return sizes


@webgpu
@pytest.mark.parametrize("timing", [False, True], ids=["counted", "timed"])
def test_what_is_recorded_lazily_is_cut(where: ct.Device, submits: list[int], timing: bool) -> None:
    x = ct.asarray(X, device=where)
    with ct.ledger(timing=timing) as led:
        y = chain(x).numpy()
        led.expect(submissions=1, launches=12, downloads=1)  # one plan ran, whatever its parts
    np.testing.assert_allclose(y, reference(X), rtol=1e-4)
    assert len(submits) >= 6 and sum(submits) == 12


@webgpu
def test_a_replay_is_cut(where: ct.Device, submits: list[int]) -> None:
    replay = where.compile(chain, X)
    submits.clear()
    for x in (X, X + 1):
        np.testing.assert_allclose(replay(x).numpy(), reference(x), rtol=1e-4)
        np.testing.assert_allclose(replay.fetch(x).result(), reference(x), rtol=1e-4)
    assert sum(submits) == 4 * 12 and max(submits) <= 2


@webgpu
def test_a_batch_is_one_submission_and_a_warning(
    where: ct.Device, submits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert where.backend.pace is not None  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "centella"):
        for known in (False, True):
            where.backend.pace.known = known  # type: ignore[attr-defined]
            batch = where.batch()
            y = chain(batch.upload(X))
            batch.execute()
            np.testing.assert_allclose(batch.read(y), reference(X), rtol=1e-4)
            assert bool(caplog.records) is known  # a guess alone warns nobody
    assert [n for n in submits if n] == [12, 12]
    assert "expected to take" in caplog.text and "in parts" in caplog.text


@webgpu
def test_a_software_adapter_has_no_pace(device: ct.Device) -> None:
    backend: Any = device.backend
    assert (backend.pace is None) is backend.software


def work(*seconds: float, pace: Pace) -> Submission:
    flops = [s * GUESS["DiscreteGPU"][0] / pace.factor for s in seconds]
    loads = [Load(f) for f in flops]
    return Submission([], loads=loads, total=Load(sum(flops)))


def test_where_a_submission_is_cut() -> None:
    pace = Pace("DiscreteGPU")
    assert pace.cuts(work(0.1, 0.1, 0.04, pace=pace)) == ()
    assert pace.cuts(work(0.1, 0.1, 0.1, 0.1, pace=pace)) == [2]
    assert pace.cuts(work(3.0, 0.1, 3.0, pace=pace)) == [1, 2]  # a launch is not cut
    assert pace.cuts(work(*[CUT / 8] * 33, pace=pace)) == [8, 16, 24, 32]
    whole = work(3.0, 3.0, pace=pace)
    whole.whole = True
    assert pace.cuts(whole) == ()
    assert Pace("Unknown").seconds(Load(1e9)) > pace.seconds(Load(1e9))


def test_the_pace_is_learned_from_watched_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("centella.backends.webgpu.pace.time.perf_counter", lambda: now[0])
    pace, second = Pace("DiscreteGPU"), Load(GUESS["DiscreteGPU"][0], 0)

    def run(took: float, watched: bool = True) -> None:
        course = pace.begin(second)
        now[0] += took
        with pace.watched if watched else nullcontext():
            course.end()

    run(0.02)
    assert pace.known and pace.seconds(second) == pytest.approx(0.02)
    run(0.04)
    assert pace.seconds(second) == pytest.approx(0.03)
    run(5.0, watched=False)  # somebody looked later
    run(0.001)  # mostly the driver
    under_way = pace.begin(second)
    behind = pace.begin(second)  # has to wait for the one before
    now[0] += 9.0
    with pace.watched:
        behind.end()
    assert pace.seconds(second) == pytest.approx(0.03)
    under_way.end()
    pace.begin(second)  # whose ticket nobody keeps, and which may be under way all the same
    behind = pace.begin(second)
    now[0] += 9.0
    with pace.watched:
        behind.end()
    assert pace.seconds(second) == pytest.approx(0.03)
    for _ in range(9):
        run(100.0)
    assert pace.seconds(second) <= pacing.SLOWEST


@webgpu
def test_a_replay_is_timed_by_a_later_wait(device: ct.Device) -> None:
    """A thread that waits for later work, as a read-back does, sees the replay end."""
    own_device, pace = own(device), Pace("DiscreteGPU")
    own_device.backend.pace = pace  # type: ignore[attr-defined]
    x = np.ones((256, 512), np.float32)
    fn = own_device.compile(lambda x: chain(x @ x.T), x)
    for _ in range(3):
        y = fn(x)  # nobody waits for this itself
        own_device.synchronize()
    np.testing.assert_allclose(y.numpy().sum(-1), 1, rtol=1e-4)
    assert pace.known
    assert not pace.watched


def test_when_a_submission_is_near_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("centella.backends.webgpu.pace.time.perf_counter", lambda: now[0])
    pace, second = Pace("DiscreteGPU"), Load(GUESS["DiscreteGPU"][0], 0)
    course = pace.begin(second)
    assert not course.near()  # nothing is known
    now[0] = 0.02
    with pace.watched:
        course.end()
    course, behind = pace.begin(second), pace.begin(second)
    for after in (0.0, 0.019, 0.0195, 0.0205, 0.03):
        now[0] = 0.02 + after
        assert course.near() is (after in (0.0195, 0.0205))
        assert not behind.near()  # which begins when nobody knows
