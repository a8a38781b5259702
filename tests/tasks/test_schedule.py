"""`Scheduler`: each request gets what it gets alone, whoever comes and goes beside it."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import ContractError, DTypeError, ShapeError
from centella.tasks.generate.speculation import GUESSES, Lookup
from centella.tasks.load import load
from tests.support.devices import own
from tests.support.model_common import DATA

Asked = list[tuple[list[int], dict[str, Any]]]
EVERY = ("cpu", "webgpu", "webgpu-hardware", "cuda")
BLOCK = 64
CONTEXT = 512
TEXT = "data stays on the device"


@functools.cache
def generator(device: ct.Device, name: str = "qwen3") -> ct.Generator:
    """A small decoder with positions for several blocks."""
    pytest.importorskip("tokenizers")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copied = Path(shutil.copytree(DATA / "decoders" / name, Path(folder) / name))
        config = json.loads((copied / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXT
        (copied / "config.json").write_text(json.dumps(config))
        return load(copied, device, "f32", task="generate")


@pytest.fixture
def host() -> ct.Generator:
    return generator(ct.device("cpu"))


def chats(count: int, longest: int, most: int, seed: int = 0) -> Asked:
    """Prompts of random lengths, a third of which begin alike; greedy, sampled, with penalties."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, 200, longest).tolist()
    requests: Asked = []
    for i in range(count):
        ids = rng.integers(3, 200, rng.integers(1, longest)).tolist()
        if i % 3 == 0:
            ids = [*common[: 2 * longest // 3], *ids[: longest // 3]]
        options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, most)), "ignore_eos": True}
        if i % 2:
            options |= {"temperature": 1.0, "seed": i, "top_k": 30, "top_p": 0.95}
        if i % 4 == 3:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.1}
        requests.append((ids, options))
    return requests


def alone(model: ct.Generator, asked: Asked) -> list[ct.Generation]:
    return [model.generate(ids, **options) for ids, options in asked]


def run(scheduler: ct.Scheduler, asked: Asked) -> list[ct.Generation]:
    """Submit them, some while others are computed."""
    requests = []
    for i, (ids, options) in enumerate(asked):
        requests.append(scheduler.submit(ids, **options))
        for _ in range(i % 3):
            scheduler.step()
    scheduler.run()
    return [request.result() for request in requests]


def free(scheduler: ct.Scheduler) -> int:
    return scheduler._jobs.device.cache.blocks.free


@pytest.mark.devices("simulator")
def test_no_two_threads_write_one_word(device: ct.Device, host: ct.Generator) -> None:
    asked = chats(4, 100, 4)
    scheduler = ct.Scheduler(generator(device), max_batch=4, tokens=600, background=False)
    assert run(scheduler, asked) == alone(host, asked)


def many(device: ct.Device, name: str) -> bool:
    """Whether there is time for many chats: one family has them."""
    return device.name == "cpu" and name == "qwen3"


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-moe"])
def test_chats_get_what_they_get_alone(device: ct.Device, name: str) -> None:
    model = generator(device, name)
    asked = chats(*((20, 200, 30) if many(device, name) else (6, 150, 12)))
    scheduler = ct.Scheduler(model, max_batch=8, tokens=2000, background=False)
    whole = free(scheduler)
    got = run(scheduler, asked)
    assert got == alone(model, asked)
    assert scheduler.reused_tokens >= BLOCK
    assert (free(scheduler), scheduler.running, scheduler.waiting) == (whole, 0, 0)
    assert scheduler.steps < sum(len(g.ids) for g in got)


def test_sixty_chats_in_flat_memory(host: ct.Generator) -> None:
    chats_in_flat_memory(host, 60)


@pytest.mark.sweep
def test_a_hundred_chats_in_flat_memory(host: ct.Generator) -> None:
    chats_in_flat_memory(host, 100)


@pytest.mark.sweep
@pytest.mark.devices("webgpu", "webgpu-hardware", "cuda")
def test_a_hundred_chats_in_flat_memory_of_a_gpu(device: ct.Device) -> None:
    chats_in_flat_memory(generator(own(device)), 100)


def chats_in_flat_memory(model: ct.Generator, count: int) -> None:
    """With less memory than they need: some are stopped and read anew."""
    asked = chats(count, 180, 30, seed=1)
    scheduler = ct.Scheduler(model, max_batch=8, tokens=CONTEXT, background=False)
    device = model.model.device
    got = run(scheduler, asked)
    pool_bytes = device.pool.held  # all sizes of steps are captured
    assert run(scheduler, asked) == got
    assert device.pool.held <= pool_bytes * 1.02
    assert got == alone(model, asked)
    assert scheduler.preemptions > 5
    assert free(scheduler) == CONTEXT // BLOCK


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
def test_a_step_is_one_submission_and_its_table(device: ct.Device, sampling: Any) -> None:
    scheduler = ct.Scheduler(generator(device), max_batch=4, tokens=1024, background=False)
    for _ in range(2):  # the first time it is captured
        requests = [scheduler.submit([5, 6, i], max_new_tokens=60, ignore_eos=True, **sampling)
                    for i in range(3)]  # fmt: skip
        while scheduler.waiting:
            scheduler.step()
        scheduler.step()
        with ct.ledger() as led:
            for _ in range(10):
                scheduler.step()
        table = 4 * (1 + 4) * 4 + 4 * 4  # of four rows: a position and blocks; a slot
        led.expect(submissions=10, downloads=10, download_bytes=4 * 4 * 10, uploads=10, compiles=0,
                   allocations=0, plans=0)  # fmt: skip
        assert led.upload_bytes <= 10 * (table + 512)
        for request in requests:
            request.cancel()
        scheduler.run()


def test_a_warm_scheduler_captures_nothing_for_short_texts(host: ct.Generator) -> None:
    scheduler = ct.Scheduler(host, max_batch=5, background=False)
    scheduler.warm()
    with ct.ledger() as led:
        run(scheduler, [([i], {"max_new_tokens": 9, "ignore_eos": True}) for i in range(20)])
    led.expect(compiles=0, allocations=0, plans=0)


def test_continuations_of_a_prompt_read_it_once(host: ct.Generator) -> None:
    ids = list(range(3, 100))
    options: dict[str, Any] = {"max_new_tokens": 70, "ignore_eos": True, "temperature": 1.2}
    scheduler = ct.Scheduler(host, max_batch=3, tokens=1500, background=False)
    requests = scheduler.submit(ids, n=4, seed=7, **options)
    scheduler.run()
    got = [request.result() for request in requests]
    assert got == [host.generate(ids, seed=7 + i, **options) for i in range(4)]
    assert scheduler.reused_tokens >= 2 * 96 + BLOCK
    assert len({tuple(g.ids) for g in got}) == 4


def test_a_conversation_goes_on_from_its_blocks(host: ct.Generator) -> None:
    scheduler = ct.Scheduler(host, background=False)
    first = scheduler.submit(list(range(3, 60)), max_new_tokens=40, ignore_eos=True).result()
    ids = [*range(3, 60), *first.ids, 7, 8, 9]
    again = scheduler.submit(ids, max_new_tokens=10, ignore_eos=True)
    assert again.result() == host.generate(ids, max_new_tokens=10, ignore_eos=True)
    assert scheduler.reused_tokens == BLOCK


def test_the_end_of_a_request(host: ct.Generator) -> None:
    scheduler = ct.Scheduler(host, tokens=200, background=False)
    assert scheduler.context == 192 + BLOCK  # whole blocks
    whole = host.generate(TEXT, max_new_tokens=30, ignore_eos=True)
    assert whole.text is not None
    stop = whole.text[5:8]
    asked: list[dict[str, Any]] = [{}, {"stop": stop}, {"logprobs": 3}, {"logprobs": 0}]
    requests = [scheduler.submit(TEXT, max_new_tokens=30, ignore_eos=True, **o) for o in asked]
    endless = scheduler.submit([5] * 250, max_new_tokens=99, ignore_eos=True)
    scheduler.run()
    for request, options in zip(requests, asked, strict=True):
        wanted = host.generate(TEXT, max_new_tokens=30, ignore_eos=True, **options)
        got = request.result()
        assert (got.ids, got.text, got.finish) == (wanted.ids, wanted.text, wanted.finish)
        assert [p.id for p in got.logprobs or ()] == [p.id for p in wanted.logprobs or ()]
        for mine, theirs in zip(got.logprobs or (), wanted.logprobs or (), strict=True):
            assert list(mine.top) == list(theirs.top)
            np.testing.assert_allclose(list(mine.top.values()), list(theirs.top.values()), 1e-4)
    assert (endless.result().finish, len(endless.result().ids)) == ("context", 6)
    assert "".join(scheduler.submit(TEXT, max_new_tokens=30, ignore_eos=True)) == whole.text


def test_a_request_that_fails_or_is_cancelled_leaves_the_others(host: ct.Generator) -> None:
    """NaN of one text is in its blocks, which others get afterwards."""
    model = generator(ct.device("cpu"), "llama")
    good: Asked = [(list(range(3, 76)), {"max_new_tokens": 30, "ignore_eos": True}),
            ([8, 9], {"max_new_tokens": 30, "ignore_eos": True})]  # fmt: skip
    wanted = alone(model, good)
    said = {
        token
        for (ids, _), generation in zip(good, wanted, strict=True)
        for token in ids + generation.ids
    }
    never = next(token for token in range(100, 300) if token not in said)
    table = model.model.embed_tokens.weight.numpy().copy()
    assert not model.model.config.tie_word_embeddings
    table[never] = np.nan
    kept, model.model.embed_tokens.weight = model.model.embed_tokens.weight, ct.asarray(table)
    try:
        scheduler = ct.Scheduler(model, max_batch=4, tokens=CONTEXT, background=False)
        first = scheduler.submit(good[0][0], **good[0][1])
        bad = [scheduler.submit([*range(10, 60), never, 5], max_new_tokens=9) for _ in range(2)]
        gone = scheduler.submit([9] * 99, max_new_tokens=99, ignore_eos=True)
        last = scheduler.submit(good[1][0], **good[1][1])
        for _ in range(8):
            scheduler.step()
        gone.cancel()
        scheduler.run()
        for request in bad:
            with pytest.raises(ContractError, match=r"token 52: the logits are NaN, .* embedding"):
                request.result()
        assert gone.result().finish == "closed" and len(gone.result().ids) > 1
        assert [first.result(), last.result()] == wanted
        assert run(scheduler, 4 * good) == 4 * wanted
        assert free(scheduler) == CONTEXT // BLOCK
    finally:
        model.model.embed_tokens.weight = kept
    assert run(scheduler, [([never, 5], good[0][1])])[0].finish == "length"  # of the model as it is


@pytest.mark.parametrize("what", ["read", "step"])
@pytest.mark.parametrize("error", [ct.OutOfMemoryError, ct.DeviceLostError])
def test_a_step_that_fails_ends_what_was_in_it(
    host: ct.Generator, monkeypatch: pytest.MonkeyPatch, what: str, error: type[Exception]
) -> None:
    asked = chats(6, 100, 20)
    wanted = alone(host, asked)
    scheduler = ct.Scheduler(host, max_batch=2, background=False)
    requests = [scheduler.submit(ids, **options) for ids, options in asked]
    while what == "step" and scheduler.running < 2:
        scheduler.step()
    under_way = sum(not request.done() for request in requests)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise error("no more")

        device = scheduler._jobs.device
        patch.setattr(device.past if what == "read" else device, what, fails)
        scheduler.step()
    scheduler.run()
    ended = list[bool]()
    for request, result in zip(requests, wanted, strict=True):
        try:
            assert request.result() == result
        except error as raised:
            assert str(raised) == "no more"
            ended.append(True)
    hurt = {"read": 1, "step": 2}[what]
    assert len(ended) == (under_way if error is ct.DeviceLostError else hurt)
    assert run(scheduler, asked) == wanted  # nothing is left of it


@pytest.mark.parametrize("what", ["begin", "go on"])
def test_a_request_without_its_blocks_ends_alone(
    host: ct.Generator, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    asked = chats(5, 100, 20)
    wanted = alone(host, asked)
    scheduler = ct.Scheduler(host, max_batch=2, background=False)
    requests = [scheduler.submit(ids, **options) for ids, options in asked]
    while what == "go on" and scheduler.running < 2:
        scheduler.step()
    with monkeypatch.context() as patch:
        copy = scheduler._jobs.device.cache.copy

        def fails(*_: Any) -> None:
            patch.setattr(scheduler._jobs.device.cache, "copy", copy)
            raise ct.OutOfMemoryError("no more")

        patch.setattr(scheduler._jobs.device.cache, "copy", fails)
        scheduler.run()
    ended = 0
    for request, result in zip(requests, wanted, strict=True):
        try:
            assert request.result() == result
        except ct.OutOfMemoryError:
            ended += 1
    assert ended == 1
    assert free(scheduler) == scheduler._jobs.device.cache.blocks.count - 1
    assert run(scheduler, asked) == wanted


def test_a_text_that_cannot_be_decoded_ends_alone(
    host: ct.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = chats(4, 60, 20)
    wanted = alone(host, asked)
    scheduler = ct.Scheduler(host, background=False)
    requests = [scheduler.submit(ids, **options) for ids, options in asked]

    def fails(ids: list[int]) -> str:
        raise ValueError("no text")

    monkeypatch.setattr(requests[1]._answer._text, "_decode", fails)
    scheduler.run()
    with pytest.raises(ValueError, match="no text"):
        requests[1].result()
    for i in (0, 2, 3):
        assert requests[i].result() == wanted[i]
    assert (free(scheduler), scheduler.running) == (
        scheduler._jobs.device.cache.blocks.count - 1,
        0,
    )


@pytest.mark.parametrize("background", [True, False])
def test_an_error_of_no_request_ends_all_of_them(
    host: ct.Generator, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    asked = chats(6, 100, 20)
    with ct.Scheduler(host, max_batch=2, background=background) as scheduler:
        with monkeypatch.context() as patch:

            def fails() -> None:
                raise RuntimeError("not of a request")

            patch.setattr(scheduler._jobs, "_collect", fails)
            requests = [scheduler.submit(ids, **options) for ids, options in asked]
            for request in requests:
                with pytest.raises(RuntimeError, match="not of a request"):
                    request.result(60)
        assert (scheduler.running, scheduler.waiting) == (0, 0)
        assert free(scheduler) == scheduler._jobs.device.cache.blocks.count - 1
        assert run(scheduler, asked) == alone(host, asked)


def test_without_a_thread_nothing_waits(
    host: ct.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = ct.Scheduler(host)
    with monkeypatch.context() as patch:

        def fails(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start"):
            scheduler.submit([5])
    assert scheduler.waiting == 0
    scheduler.close()


@pytest.mark.devices("cpu", "webgpu")
def test_threads_submit_and_wait(device: ct.Device) -> None:
    model, asked = generator(device), chats(12, 90, 25, seed=5)
    wanted, got = alone(model, asked), dict[int, str]()
    with ct.Scheduler(model, max_batch=4) as scheduler:

        def user(i: int) -> None:
            ids, options = asked[i]
            request = scheduler.submit(ids, **options)
            pieces = "".join(request)
            assert request.result(60) == wanted[i]
            got[i] = pieces

        threads = [threading.Thread(target=user, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [got[i] for i in range(len(asked))] == [g.text for g in wanted]
        late = scheduler.submit(TEXT, max_new_tokens=20, ignore_eos=True)
    assert late.done()
    with pytest.raises(ContractError, match="expected an open Scheduler, got one that is closed"):
        scheduler.submit(TEXT)
    scheduler.close()


def test_coroutines_wait_and_cancel(host: ct.Generator) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    wanted = host.generate(TEXT, **options)

    async def users(scheduler: ct.Scheduler) -> None:
        both = await asyncio.gather(*(scheduler.submit(TEXT, **options) for _ in range(5)))
        assert both == 5 * [wanted]
        pieces = [piece async for piece in scheduler.submit(TEXT, **options)]
        assert "".join(pieces) == wanted.text
        request = scheduler.submit([5] * 9, max_new_tokens=450, ignore_eos=True)
        task = asyncio.ensure_future(request)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert request.result().finish == "closed"

    for background in (True, False):
        with ct.Scheduler(host, max_batch=4, background=background) as scheduler:
            asyncio.run(users(scheduler))


def test_closing_without_waiting(host: ct.Generator) -> None:
    scheduler = ct.Scheduler(host, max_batch=2)
    requests = [scheduler.submit([i], max_new_tokens=400, ignore_eos=True) for i in range(3, 9)]
    next(iter(requests[0]))
    scheduler.close(drain=False)
    assert {request.result().finish for request in requests} <= {"closed", "length"}
    assert free(scheduler) == scheduler._jobs.device.cache.blocks.count - 1
    with pytest.raises(ValueError, match="left"), ct.Scheduler(host) as scheduler:
        request = scheduler.submit([3], max_new_tokens=500, ignore_eos=True)
        raise ValueError("left")
    assert request.done()


def test_waiting_has_a_limit(host: ct.Generator) -> None:
    scheduler = ct.Scheduler(host, background=False)
    request = scheduler.submit([3], max_new_tokens=400, ignore_eos=True)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        request.result(0.01)
    for timeout in ("x", np.array([1])):
        with pytest.raises(DTypeError, match=r"^result: expected a number for timeout, got"):
            request.result(timeout)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="expected a number of seconds for timeout, got nan"):
        request.result(math.nan)
    with request:
        next(request)
    assert request.result(math.inf).finish == "closed"
    assert not scheduler.step()
    assert "done" in repr(request) and "0 running" in repr(scheduler)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_batch": 0}, ShapeError, "Scheduler: expected max_batch of 1 or more, got 0"),
        ({"tokens": 0}, ShapeError, "Scheduler: expected tokens of 1 or more, got 0"),
        ({"tokens": 9, "memory": 9}, ShapeError, "expected tokens= or memory=, got both"),
        ({"memory": 100}, ShapeError, r"expected memory for two blocks of 64 tokens .* got 100"),
        ({"memory": -1}, ShapeError, r"expected memory for two blocks of 64 tokens .* got -1"),
        ({"memory": "lots"}, DTypeError, "Scheduler: memory: expected bytes, .* got 'lots'"),
        ({"background": 1}, DTypeError, "expected True or False for background, got int"),
    ],
)
def test_mistakes(host: ct.Generator, arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ct.Scheduler(host, **arguments)


def test_mistakes_of_requests(host: ct.Generator) -> None:
    with pytest.raises(DTypeError, match="Scheduler: expected a Generator, got int"):
        ct.Scheduler(3)  # type: ignore[arg-type]
    scheduler = ct.Scheduler(host, memory="100 kB", background=False)
    most = scheduler.context
    assert most % BLOCK == 0 and scheduler._jobs.device.cache.nbytes <= 100_000
    with pytest.raises(ShapeError, match=f"submit: expected a prompt of fewer than {most} tokens"):
        scheduler.submit([5] * most)
    with pytest.raises(ShapeError, match="submit: temperature: expected 0 to 10,000, got -1"):
        scheduler.submit([5], temperature=-1.0)
    with pytest.raises(ShapeError, match="submit: expected n of 1 or more"):
        scheduler.submit([5], n=0)
    assert not scheduler.step()


class Oracle(Lookup):
    """Knows how a text goes on, but not always, and guesses one of some tokens wrong."""

    def __init__(self, whole: list[int]) -> None:
        self.whole = whole

    def ready(self, row: list[int]) -> bool:
        return len(row) % 11 != 0

    def guess(self, row: list[int]) -> Any:
        some = (self.whole[len(row) :] + [0] * GUESSES)[:GUESSES]
        some[(5 * len(row)) % 13 % GUESSES] ^= len(row) % 3 > 0
        return np.array([some], np.int32)


class Seldom(Oracle):
    """Has a guess at every ninth token alone."""

    def ready(self, row: list[int]) -> bool:
        return len(row) % 9 == 0


def guessed(
    host: ct.Generator, asked: Asked, wanted: list[ct.Generation], kind: type[Oracle]
) -> tuple[ct.Scheduler, list[ct.Request]]:
    """A scheduler with all requests, each with what knows it."""
    scheduler = ct.Scheduler(host, max_batch=6, background=False)
    requests = [scheduler.submit(ids, **options, draft="lookup") for ids, options in asked]
    for job, known in zip(scheduler._new, wanted, strict=True):
        if job.lookup is not None:
            job.lookup = kind(job.ids + known.ids)
    return scheduler, requests


def run_guessed(scheduler: ct.Scheduler, asked: Asked, wanted: list[ct.Generation]) -> Any:
    """Submit them all, most with what knows them; the results, and tokens of each pass."""
    requests, numbers, add = [], list[int](), scheduler._jobs._add_verified
    for i, ((ids, options), known) in enumerate(zip(asked, wanted, strict=True)):
        requests.append(scheduler.submit(ids, **options, draft=None if i % 5 == 4 else "lookup"))
        job = scheduler._new[-1]
        assert (job.lookup is None) == (i % 5 == 4 or i % 4 == 3)  # these have penalties
        if job.lookup is not None:
            job.lookup = Oracle(ids + known.ids)

    def counted(job: Any, *given: Any) -> None:
        before = len(job.ids)
        add(job, *given)
        numbers.append(len(job.ids) - before)

    scheduler._jobs._add_verified = counted  # type: ignore[method-assign, assignment]
    scheduler.run()
    return [request.result() for request in requests], numbers


@pytest.mark.first("name", "webgpu")
@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-moe"])
def test_guessed_requests_get_what_they_get_alone(device: ct.Device, name: str) -> None:
    """Rows of a pass accept different numbers of guesses; others are decoded beside them."""
    model = generator(device, name)
    asked = chats(*((16, 150, 60) if many(device, name) else (9, 100, 30)))
    wanted = alone(model, asked)
    scheduler = ct.Scheduler(model, max_batch=7, tokens=2000, background=False)
    whole = free(scheduler)
    got, numbers = run_guessed(scheduler, asked, wanted)
    assert [(g.ids, g.text, g.finish) for g in got] == [(g.ids, g.text, g.finish) for g in wanted]
    assert {1, 2, 4, GUESSES + 1} <= set(numbers)
    for i, result in enumerate(got):
        assert result.accepted <= result.guessed and (result.guessed == 0 or i % 5 < 4)
    assert sum(g.accepted for g in got) > sum(g.guessed for g in got) / 3
    assert scheduler.steps < 0.7 * sum(len(g.ids) for g in wanted) / 3
    assert (free(scheduler), scheduler.running, scheduler.waiting) == (whole, 0, 0)
    assert run(scheduler, asked) == wanted  # nothing is left of wrong guesses in known blocks


def test_a_guess_withholds_nobody(host: ct.Generator) -> None:
    """Each step has a token or more of every request, also where a guess waits for its step."""
    asked = chats(6, 100, 40, seed=5)
    wanted = alone(host, asked)
    scheduler, requests = guessed(host, asked, wanted, Seldom)
    jobs = scheduler._jobs
    awaited = 0
    while True:
        before = {id(job): job.submitted for job in jobs.running if job.submitted < job.steps}
        awaited += any(job.lookup for ahead in jobs._ahead for job in ahead.jobs)
        more = scheduler.step()
        for job in jobs.running:
            assert job.submitted > before.get(id(job), -1)
        if not more:
            break
    assert awaited > 10
    assert [request.result().ids for request in requests] == [g.ids for g in wanted]


def test_guesses_where_memory_is_short(host: ct.Generator) -> None:
    """Some requests are stopped and read anew, and blocks of wrong guesses are given back."""
    asked = chats(30, 150, 60, seed=3)
    wanted = alone(host, asked)
    scheduler = ct.Scheduler(host, max_batch=6, tokens=CONTEXT, background=False)
    got, numbers = run_guessed(scheduler, asked, wanted)
    assert [g.ids for g in got] == [g.ids for g in wanted]
    assert scheduler.preemptions > 2 and len(numbers) > 50
    assert free(scheduler) == CONTEXT // BLOCK


@pytest.mark.sweep
@pytest.mark.devices("simulator")
def test_no_two_threads_of_a_pass_write_one_word(device: ct.Device, host: ct.Generator) -> None:
    asked = chats(3, 60, 8)
    wanted = alone(host, asked)
    scheduler = ct.Scheduler(generator(device), max_batch=3, tokens=600, background=False)
    got, numbers = run_guessed(scheduler, asked, wanted)
    assert [g.ids for g in got] == [g.ids for g in wanted] and numbers


def test_a_pass_that_fails_ends_what_was_in_it(
    host: ct.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = chats(6, 100, 40)
    wanted = alone(host, asked)
    scheduler, requests = guessed(host, asked, wanted, Oracle)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise ct.OutOfMemoryError("no more")

        patch.setattr(scheduler._jobs.device, "verify", fails)
        scheduler.run()
    for i, (request, result) in enumerate(zip(requests, wanted, strict=True)):
        if i % 4 == 3:  # with penalties
            assert request.result() == result
        else:
            with pytest.raises(ct.OutOfMemoryError, match="no more"):
                request.result()
    assert run(scheduler, asked) == wanted


def test_lookup_of_a_text_that_repeats_itself(host: ct.Generator) -> None:
    text, given = "one two " * 12, {"max_new_tokens": 12, "ignore_eos": True}
    scheduler = ct.Scheduler(host, background=False)
    generation = scheduler.submit(text, draft="lookup", **given).result()  # type: ignore[call-overload]
    wanted = host.generate(text, draft="lookup", **given)  # type: ignore[call-overload]
    assert (generation.ids, generation.guessed, generation.accepted) == (
        wanted.ids, wanted.guessed, wanted.accepted
    )  # fmt: skip
    assert generation.accepted > 0 and scheduler.steps < 12


def test_what_is_not_guessed(host: ct.Generator) -> None:
    scheduler = ct.Scheduler(host, background=False)
    with pytest.raises(DTypeError, match=r'draft: expected "lookup" or None, got .*Gener'):
        scheduler.submit([5], draft=host)  # type: ignore[call-overload]
    for options in ({"logprobs": 1}, {"presence_penalty": 0.5}):
        given: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, **options}
        generation = scheduler.submit([5, 6, 7] * 9, draft="lookup", **given).result()
        assert generation.guessed == 0
        assert generation.ids == host.generate([5, 6, 7] * 9, **given).ids
    long = [5, 6, 7] * (CONTEXT // 3 - 6)
    generation = scheduler.submit(long, max_new_tokens=99, ignore_eos=True, draft="lookup").result()
    assert generation.ids == host.generate(long, max_new_tokens=99, ignore_eos=True).ids
    assert generation.finish == "context"


@pytest.mark.devices(*EVERY)
def test_a_pool_in_i8(device: ct.Device) -> None:
    """Requests get what a Generator gives each in i8; blocks are shared as ever."""
    model, ids = generator(device), np.random.default_rng(4).integers(3, 200, 90).tolist()
    given: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    alone = model.generate(ids, cache="i8", **given)
    with ct.Scheduler(model, max_batch=2, tokens=512, cache="i8") as scheduler:
        first = scheduler.submit(ids, **given).result()
        second = scheduler.submit(ids, **given).result()
        assert scheduler.reused_tokens == BLOCK
    assert first.ids == second.ids == alone.ids


def test_memory_in_i8_has_more_blocks(host: ct.Generator) -> None:
    pools = [ct.Scheduler(host, memory="1 MB", cache=kind, background=False)
             for kind in (None, "i8")]  # fmt: skip
    wide, narrow = (p._jobs.device.cache for p in pools)
    dim = host.model.config.head_dim
    assert wide.nbytes <= 10**6 and narrow.nbytes <= 10**6
    assert abs(narrow.shape[1] / wide.shape[1] - 4 * dim / (dim + 4)) < 0.2
    with pytest.raises(DTypeError, match='Scheduler: cache: expected "i8" or None, got'):
        ct.Scheduler(host, cache=8)  # type: ignore[arg-type]


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("draft", [None, "lookup"])
def test_requests_across_the_trained_length(device: ct.Device, draft: Any) -> None:
    """Each is read again where its rotary frequencies change, and nothing of others changes."""
    pytest.importorskip("tokenizers")
    folder = DATA / "decoders" / "phi4-mini"
    model, stored = load(folder, device, "f32", task="generate"), np.load(folder / "expected.npz")
    short, long = stored["ids"][0, :24].tolist(), stored["ids"][1].tolist()
    drawn = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.1}
    asked: Asked = [
        (row, {"max_new_tokens": most, "ignore_eos": True, **sampling})
        for row in (short, long, long[:9], short) for most in (3, 40)
        for sampling in ({}, drawn)
    ]  # fmt: skip
    with ct.Scheduler(model, max_batch=5, tokens=448, background=False) as scheduler:
        assert scheduler.context == 128  # all positions, and not those that were trained
        generations = run(scheduler, [(ids, {**options, "draft": draft}) for ids, options in asked])
        several = scheduler.submit(short, n=3, max_new_tokens=40, ignore_eos=True, draft=draft)
        assert [r.result().ids for r in several] == [stored["across"].tolist()] * 3
        again = scheduler.submit(long * 2, max_new_tokens=3, ignore_eos=True)
        whole = again.result().ids
    assert [m.ids for m in generations] == [m.ids for m in alone(model, asked)]
    assert generations[2].ids == stored["across"].tolist()
    assert whole == model.generate(long * 2, max_new_tokens=3, ignore_eos=True).ids


def test_blocks_are_shared_among_texts_of_the_same_frequencies() -> None:
    """Keys of a text that has grown long are not those of a short one, though its tokens are."""
    pytest.importorskip("tokenizers")
    model = load(DATA / "decoders" / "phi4-mini", "cpu", "f32", task="generate")
    (turn,) = model.model.config.ropes
    turn._values["original_max_position_embeddings"] = 70  # a block, and a little
    prompt = np.random.default_rng(1).integers(3, 300, 100).tolist()
    options: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    with ct.Scheduler(model, background=False) as scheduler:
        for length, reused in ((100, 0), (66, 0), (69, 64), (80, 64), (65, 64)):
            before = scheduler.reused_tokens
            generation = scheduler.submit(prompt[:length], **options).result()
            assert generation.ids == model.generate(prompt[:length], **options).ids
            assert scheduler.reused_tokens - before >= reused
            if length == 66:
                assert scheduler.reused_tokens == before
