"""Batches of the texts of concurrent requests: each request gets its own vector or error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any

import msgspec
import numpy as np
import pytest

import centella as ct
from centella.serving import Batcher
from tests.support.model_common import DATA

Array = np.ndarray[Any, Any]


class Lengths:
    """In place of an Embedder: a text's vector is its length; notes the texts of each call.

    Attributes:
        calls: the texts of each call; go: a call waits until it is set.
    """

    def __init__(self, fail: Callable[[list[str]], Exception | None] = lambda texts: None) -> None:
        self.calls: list[list[str]] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self._fail = fail

    def encode(
        self, texts: Iterable[str], batch_size: int = 32, normalize: bool | None = None
    ) -> Array:
        listed = list(texts)
        self.calls.append(listed)
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(30)
        if error := self._fail(listed):
            raise error
        return np.array([[len(text)] for text in listed], np.float32)


def batcher_of(model: Any, **options: Any) -> Batcher:
    return Batcher(model, **options)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test on an event loop of its own; no task but its own is there when it ends."""

    @wraps(test)
    def run(**given: Any) -> None:
        async def watched() -> None:
            await test(**given)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(watched(), debug=True)

    return run


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def outcomes(*requests: Awaitable[Array]) -> list[Any]:
    """Numbers of vectors of one element, and exceptions."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    return [x if isinstance(x, BaseException) else float(x[0]) for x in results]


def words(count: int) -> list[str]:
    return ["x" * (n + 1) for n in range(count)]


# -- an Embedder ----------------------------------------------------------------------------------


@in_loop
async def test_requests_get_their_own_vectors() -> None:
    model = ct.load(DATA / "tiny-bert", device="cpu")
    texts = [f"request {i} " * (1 + i % 5) for i in range(100)]
    async with Batcher(model, max_wait=1.0) as batcher:
        vectors = await asyncio.gather(*map(batcher.encode, texts))
    assert batcher.batches == 4
    assert all(v.shape == (48,) and v.dtype == np.float32 and v.base is None for v in vectors)
    np.testing.assert_allclose(vectors, model.encode(texts), atol=1e-6)


@in_loop
async def test_a_bad_text_fails_its_own_request_alone() -> None:
    model = ct.load(DATA / "tiny-bert", device="cpu")
    texts = ["one storm", "bad \ud800", "two storms", "a river", "worse \udfff"]
    good, bad = [0, 2, 3], [1, 4]
    async with Batcher(model, max_wait=1.0, batch_size=5) as batcher:
        results: list[Any] = await asyncio.gather(
            *map(batcher.encode, texts), return_exceptions=True
        )
    np.testing.assert_allclose(
        [results[i] for i in good], model.encode([texts[i] for i in good]), atol=1e-6
    )
    for i in bad:
        with pytest.raises((ct.CentellaError, UnicodeError), match="surrogate") as alone:
            model.encode([texts[i]])
        assert type(results[i]) is alone.type and str(results[i]) == str(alone.value)


@pytest.mark.devices("cpu")
@in_loop
async def test_a_batcher_counts_in_the_ledger_of_its_construction(device: ct.Device) -> None:
    model = ct.load(DATA / "tiny-bert", device=device)
    with ct.ledger() as led:
        batcher = Batcher(model, max_wait=1.0, batch_size=2)
    with ct.forbid("transfer"), ct.ledger() as request:
        await asyncio.gather(batcher.encode("a"), batcher.encode("b"))
    await batcher.close()
    assert (led.counts.submissions, request.counts.submissions) == (1, 0)


# -- batches --------------------------------------------------------------------------------------


@in_loop
async def test_a_full_batch_starts_at_once() -> None:
    model = Lengths()
    async with batcher_of(model, batch_size=3, max_wait=1000.0) as batcher:
        first = asyncio.gather(*map(batcher.encode, words(2)))
        await asyncio.sleep(0.01)
        assert model.calls == []
        last = await batcher.encode("xxx")
        assert [float(v[0]) for v in (*await first, last)] == [1, 2, 3]
    assert model.calls == [words(3)]
    assert model.threads.isdisjoint({threading.main_thread().name})


@in_loop
async def test_what_arrives_while_a_batch_runs_is_the_next() -> None:
    model = Lengths()
    async with batcher_of(model, max_wait=0.0, batch_size=4) as batcher:
        model.go.clear()
        first = asyncio.create_task(batcher.encode("x" * 9))
        await until(lambda: len(model.calls) == 1)
        rest = [asyncio.create_task(batcher.encode(text)) for text in words(6)]
        await asyncio.sleep(0.01)
        assert len(model.calls) == 1
        model.go.set()
        assert await outcomes(first, *rest) == [9, 1, 2, 3, 4, 5, 6]
    assert model.calls == [["x" * 9], words(6)[:4], words(6)[4:]]


@in_loop
async def test_more_requests_than_the_queue_has_room_for() -> None:
    model = Lengths()
    async with batcher_of(model, queue_size=2, max_wait=1000.0) as batcher:
        assert await outcomes(*map(batcher.encode, words(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [len(call) for call in model.calls] == [2, 2, 2, 2]  # a full queue is a full batch


# -- failures -------------------------------------------------------------------------------------


def too_large(texts: list[str]) -> Exception | None:
    return ct.OutOfMemoryError("no room") if len(texts) > 2 else None


def has_a_seven(texts: list[str]) -> Exception | None:
    return ct.ShapeError("seven") if any(len(text) == 7 for text in texts) else None


@pytest.mark.parametrize(("fail", "bad"), [(too_large, set[int]()), (has_a_seven, {7})])
@in_loop
async def test_what_fails_together_is_tried_in_halves(
    fail: Callable[[list[str]], Exception | None], bad: set[int]
) -> None:
    model = Lengths(fail)
    async with batcher_of(model, batch_size=8, max_wait=1000.0) as batcher:
        results = await outcomes(*map(batcher.encode, words(8)))
    assert {n for n, x in enumerate(results, 1) if isinstance(x, ct.CentellaError)} == bad
    assert [x for x in results if isinstance(x, float)] == [n for n in range(1, 9) if n not in bad]
    done = [text for call in model.calls if not fail(call) for text in call]
    assert sorted(done) == [t for t in words(8) if len(t) not in bad]  # each once


@in_loop
async def test_a_lost_device_fails_the_batch_in_one_call() -> None:
    model = Lengths(lambda texts: ct.DeviceLostError("gone"))
    async with batcher_of(model, batch_size=4, max_wait=1000.0) as batcher:
        results = await outcomes(*map(batcher.encode, words(4)))
    assert [type(x) for x in results] == [ct.DeviceLostError] * 4
    assert len(model.calls) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "Batcher: batch_size: expected 1 or more, got 0"),
        ({"batch_size": 2.0}, r"Batcher: batch_size: expected 1 or more, got 2\.0"),
        ({"queue_size": 0}, "Batcher: queue_size: expected 1 or more, got 0"),
        ({"max_wait": -1.0}, r"Batcher: max_wait: expected seconds, 0 or more, got -1\.0"),
        ({"max_wait": float("nan")}, "Batcher: max_wait: expected seconds, 0 or more, got nan"),
    ],
)
def test_options_of_a_batcher_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ct.ShapeError, match=text):
        batcher_of(Lengths(), **options)
    with pytest.raises(ct.DTypeError, match="Batcher: max_wait: expected seconds, got str"):
        batcher_of(Lengths(), max_wait="2 ms")


@in_loop
async def test_what_is_no_text_is_refused_at_the_call() -> None:
    model, wrong = Lengths(), b"bytes"
    async with batcher_of(model) as batcher:
        with pytest.raises(ct.DTypeError, match=r"Batcher\.encode: expected str, got bytes"):
            await batcher.encode(wrong)  # type: ignore[arg-type]
    assert model.calls == []


# -- cancelling and closing -----------------------------------------------------------------------


@in_loop
async def test_a_cancelled_request_disturbs_no_other() -> None:
    model = Lengths()
    async with batcher_of(model, max_wait=0.0, queue_size=6) as batcher:
        model.go.clear()
        running = [asyncio.create_task(batcher.encode(text)) for text in words(3)]
        await until(lambda: len(model.calls) == 1)
        texts = ["x" * n for n in (10, 11, 12, 13)]  # the last waits for room
        waiting = [asyncio.create_task(batcher.encode(text)) for text in texts]
        await asyncio.sleep(0)
        for task in (running[0], waiting[1]):
            task.cancel()
        await asyncio.sleep(0)
        model.go.set()
        results = await outcomes(*running, *waiting)
    assert [type(results[i]) for i in (0, 4)] == [asyncio.CancelledError] * 2
    assert [x for x in results if isinstance(x, float)] == [2, 3, 10, 12, 13]
    assert "x" * 11 not in [text for call in model.calls for text in call]


@in_loop
async def test_all_requests_cancelled() -> None:
    model = Lengths()
    async with batcher_of(model, batch_size=3, max_wait=0.05) as batcher:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.gather(*map(batcher.encode, words(2)))
        await asyncio.sleep(0.1)
        assert model.calls == []
        assert (await batcher.encode("xxx"))[0] == 3


@in_loop
async def test_closing_embeds_what_waits() -> None:
    batcher = batcher_of(Lengths(), batch_size=2, queue_size=3, max_wait=1000.0)
    tasks = [asyncio.create_task(batcher.encode(text)) for text in words(7)]
    await asyncio.sleep(0)
    await batcher.close()
    assert all(task.done() for task in tasks)
    with pytest.raises(ct.ContractError, match="expected an open Batcher, got one that is cl"):
        await batcher.encode("late")
    await batcher.close()
    assert await outcomes(*tasks) == [1, 2, 3, 4, 5, 6, 7]


@in_loop
async def test_closing_without_draining() -> None:
    model = Lengths()
    batcher = batcher_of(model, batch_size=2, queue_size=4, max_wait=0.0)
    model.go.clear()
    tasks = [asyncio.create_task(batcher.encode(text)) for text in words(7)]
    await until(lambda: len(model.calls) == 1)
    closing = asyncio.create_task(batcher.close(drain=False))
    await until(lambda: sum(task.done() for task in tasks) == 5)
    assert not closing.done()  # two are with the model
    model.go.set()
    await closing
    results = await outcomes(*tasks)
    assert results[:2] == [1, 2]
    assert all(isinstance(x, ct.ContractError) and "closed" in str(x) for x in results[2:])
    assert model.calls == [words(2)]


@in_loop
async def test_an_exception_in_the_block_answers_what_waits() -> None:
    model = Lengths()
    tasks: list[asyncio.Task[Array]] = []
    with pytest.raises(KeyError):
        async with batcher_of(model, max_wait=1000.0) as batcher:
            tasks.append(asyncio.create_task(batcher.encode("x")))
            await asyncio.sleep(0)
            raise KeyError("app")
    (error,) = await outcomes(*tasks)
    assert isinstance(error, ct.ContractError) and model.calls == []


def test_a_loop_that_ends_leaves_nobody_waiting() -> None:
    model = Lengths()

    async def main() -> None:
        batcher = batcher_of(model, max_wait=1000.0)
        task = asyncio.create_task(batcher.encode("x"))
        await asyncio.sleep(0.005)
        assert not task.done()

    asyncio.run(main(), debug=True)  # which cancels what there is, and would wait for ever
    assert model.calls == []


@in_loop
async def test_its_task_cancelled_from_outside() -> None:
    model = Lengths()
    batcher = batcher_of(model, max_wait=0.0, batch_size=1)
    model.go.clear()
    tasks = [asyncio.create_task(batcher.encode(text)) for text in words(2)]
    await until(lambda: len(model.calls) == 1)
    own = {*tasks, asyncio.current_task()}
    (serving,) = (t for t in asyncio.all_tasks() - own if "_serve" in repr(t.get_coro()))
    serving.cancel()
    for error in await outcomes(*tasks):
        assert isinstance(error, ct.ContractError) and "was cancelled" in str(error)
    model.go.set()
    assert (await batcher.encode("xxxx"))[0] == 4
    await batcher.close()


@in_loop
async def test_a_loop_whose_executor_was_shut_down() -> None:
    batcher = batcher_of(Lengths(), max_wait=0.0, batch_size=2)
    await batcher.encode("x")
    await asyncio.get_running_loop().shutdown_default_executor()
    for error in await outcomes(*map(batcher.encode, words(3))):
        assert isinstance(error, ct.ContractError)
        assert "expected an event loop that can start threads" in str(error)
    await batcher.close()


def test_one_event_loop() -> None:
    batcher = batcher_of(Lengths(), max_wait=0.0)
    assert asyncio.run(batcher.encode("xx"))[0] == 2
    for use in (batcher.encode, lambda text: batcher.close()):
        with pytest.raises(ct.ContractError, match="expected the event loop of its first call"):
            asyncio.run(use("xx"))


def test_what_embeds_no_texts_is_refused() -> None:
    generator = ct.load(DATA / "decoders" / "qwen3", "cpu", task="generate")
    for model in (generator, None, "minilm"):
        with pytest.raises(TypeError, match="expected an Embedder, got " + type(model).__name__):
            Batcher(model)  # type: ignore[arg-type]


def test_the_model_is_loaded_with_the_first_use() -> None:
    code = (
        "import sys, centella as ct; before = 'asyncio' in sys.modules; ct.serving.Batcher; "
        "print(before, 'asyncio' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False True\n"


@in_loop
async def test_options_of_encode() -> None:
    model = ct.load(DATA / "tiny-bert", "cpu", task="embed")
    model.config = msgspec.structs.replace(model.config, prompts={"query": "search "})
    texts = ["a storm", "rain over the lake", "x"]
    async with Batcher(model, prompt_name="query", dim=20, exact=True) as batcher:
        vectors = await asyncio.gather(*map(batcher.encode, texts))
    for text, vector in zip(texts, vectors, strict=True):
        alone = model.encode(text, prompt="search ", dim=20, exact=True)
        np.testing.assert_array_equal(vector, alone, strict=True)
    async with Batcher(model, prompt_name="other") as batcher:
        with pytest.raises(ct.ShapeError, match="prompt_name: expected one of query, got 'other'"):
            await batcher.encode("a")
    async with Batcher(model, dim=0) as batcher:
        with pytest.raises(ct.ShapeError, match="expected dim of 1 or more, got 0"):
            await batcher.encode("a")


@in_loop
async def test_encode_beside_the_event_loop() -> None:
    model, texts = ct.load(DATA / "tiny-bert", "cpu", task="embed"), ["a storm", "rain"] * 40
    told: list[tuple[int, int]] = []
    vectors, other = await asyncio.gather(
        model.encode_async(texts, batch_size=8, progress=lambda *done: told.append(done)),
        model.encode_async("rain", dim=20),
    )
    np.testing.assert_allclose(vectors, model.encode(texts), atol=1e-6)
    np.testing.assert_allclose(other, model.encode("rain", dim=20), atol=1e-6)
    assert told[-1] == (80, 80) and len(told) == 10
    begun, done = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def note(number: int, _: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        done.append(number)

    running = asyncio.create_task(model.encode_async(["rain"] * 4000, batch_size=1, progress=note))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert 0 < len(done) < 4000
    with pytest.raises(
        ct.DTypeError,
        match="encode_async: expected None or a function of two numbers for progress, got",
    ):
        await model.encode_async("a", progress=True)  # type: ignore[arg-type]
    with pytest.raises(ct.ShapeError, match="batch_size of 1 or more"):
        await model.encode_async("a", batch_size=0)
