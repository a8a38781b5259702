"""Streams in threads and coroutines: one implementation, cancelled, closed and shared."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

import centella as ct
from centella.errors import ContractError
from centella.tasks.generate.session import Session
from centella.tasks.load import load
from tests.support.threads import together
from tests.tasks.test_generate import EVERY, FOLDER, MESSAGES, TEXT, generator, host

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.mark.devices(*EVERY)
def test_coroutines_get_what_threads_get(device: ct.Device) -> None:
    model = generator(device)
    whole = model.generate(TEXT, logprobs=1, **OPTIONS)

    async def main() -> None:
        stream = model.stream(TEXT, logprobs=1, **OPTIONS)
        assert "".join([piece async for piece in stream]) == whole.text
        assert stream.result == whole
        assert await stream == whole  # which has ended
        assert await model.stream(TEXT, logprobs=1, **OPTIONS) == whole
        assert await model.generate_async(TEXT, logprobs=1, **OPTIONS) == whole
        prompts: list[str | list[int]] = [list(range(3, 70)), TEXT]  # each is read once
        random = {**OPTIONS, "temperature": 1.0}
        several = await model.generate_async(prompts, n=2, seed=4, **random)
        assert several == [model.generate(prompts[i // 2], seed=4 + i, **random) for i in range(4)]
        assert (await model.chat(MESSAGES, max_new_tokens=3)).prompt_tokens > 3

    asyncio.run(main())


def test_tasks_share_a_generator() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    prompts = [list(range(3 + i, 40 + 2 * i)) for i in range(6)]
    alone = [host().generate(prompt, temperature=1.0, seed=7, **OPTIONS) for prompt in prompts]

    async def main() -> list[ct.Generation]:
        generations: list[ct.Generation] = await asyncio.gather(
            *(model.generate_async(p, temperature=1.0, seed=7, **OPTIONS) for p in prompts[:3]),
            *(model.stream(p, temperature=1.0, seed=7, **OPTIONS) for p in prompts[3:]),
        )
        return generations

    with ct.ledger() as led:
        assert asyncio.run(main()) == alone
    assert led.downloads >= 6 * 12  # also of what ran in threads
    assert together(lambda i: model.generate(prompts[i % 6], temperature=1.0, seed=7, **OPTIONS)) \
        == [alone[i % 6] for i in range(8)]  # fmt: skip


def test_a_cancelled_task_ends_its_stream() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    begun, seen = threading.Event(), list[int]()
    long: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}

    def note(token: int) -> None:
        seen.append(token)
        begun.set()

    async def cancelled(work: Any) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        stream = model.stream(TEXT, on_token=note, **long)
        await cancelled(stream)
        assert stream.result is not None
        assert (stream.result.finish, stream.result.ids) == ("closed", seen)
        assert len(seen) < 100
        await cancelled(model.generate_async([[5, 6]] * 2, **long))  # which has hardly begun
        async with model.stream(TEXT, **long) as pieces:
            await anext(pieces)
        assert pieces.result is not None
        assert pieces.result.finish == "closed"

    asyncio.run(main())
    whole = host().generate(TEXT, **OPTIONS)
    with ct.ledger() as led:  # the session that read the prompt is there, and right
        assert model.generate(TEXT, **OPTIONS) == whole
    assert led.allocations <= 1


def test_a_stream_says_where_its_text_is() -> None:
    with host().stream("x", **OPTIONS) as stream:
        text: Any = stream
        with pytest.raises(AttributeError, match=r"'text': .*join.*; .* stream\.result\.text"):
            text.text  # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute 'pieces'$"):
            text.pieces  # noqa: B018


def test_a_loop_that_is_left_leaves_the_model_usable() -> None:
    """Whether somebody still holds the stream or nobody does; its session is used again."""
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    whole = host().generate(TEXT, **OPTIONS)
    for _ in range(3):
        for piece in model.stream(TEXT, **OPTIONS):
            assert piece
            break
    with ct.ledger() as led:
        assert model.generate(TEXT, **OPTIONS) == whole
    assert led.allocations <= 1
    stream = model.stream(TEXT, **OPTIONS)
    first = next(stream)
    assert model.generate(TEXT, **OPTIONS) == whole
    assert first + "".join(stream) == whole.text  # it goes on where it was


def test_a_stream_in_a_cycle_leaves_the_model_usable() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    for _ in range(3):
        cycle: list[Any] = [model.stream(TEXT, **OPTIONS)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert model.generate(TEXT, **OPTIONS) == host().generate(TEXT, **OPTIONS)


def test_a_collection_while_a_session_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    model.generate(TEXT, **OPTIONS)
    cycle: list[Any] = [model.stream(TEXT, **OPTIONS)]
    next(cycle[0])
    model.generate(TEXT, **OPTIONS)  # with another session, which waits then
    cycle.append(cycle)
    del cycle
    shared = Session.shared

    def collecting(session: Session, rows: Any) -> int:
        gc.collect()
        return shared(session, rows)

    monkeypatch.setattr(Session, "shared", collecting)
    assert model.generate(TEXT, **OPTIONS) == host().generate(TEXT, **OPTIONS)


def test_on_token_takes_no_piece_of_its_stream() -> None:
    model, refused = host(), list[str]()

    def take(_: int) -> None:
        with pytest.raises(ContractError, match="on_token to take no piece") as caught:
            next(stream)
        refused.append(str(caught.value))

    stream = model.stream(TEXT, on_token=take, **OPTIONS)
    assert "".join(stream) == model.generate(TEXT, **OPTIONS).text
    assert len(refused) == 12


def test_reading_a_prompt_ends_between_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = host()
    session, ending = Session(model.model, 2, 128), threading.Event()
    rows = [list(range(3, 90)), list(range(40, 60))]
    read, fill = list[int](), session._fill

    def noted(part: Any) -> None:
        fill(part)
        read.append(part.shape[1])
        if len(read) == 2:
            ending.set()

    monkeypatch.setattr(session, "_fill", noted)
    assert not session.start(rows, chunk=16, ending=ending)
    assert (read, session.past.cache.lengths) == ([16, 16], (32, 19))
    assert session.start(rows, chunk=16)
    assert sum(read) <= 32 + 64  # it went on where it was
    both = [tokens.tolist() for tokens in session.run(5)]
    alone = model.generate(rows, max_new_tokens=5, ignore_eos=True)
    assert [list(ids) for ids in zip(*both, strict=True)] == [one.ids for one in alone]


def test_a_stream_is_closed_from_elsewhere() -> None:
    model = host()
    stream = model.stream(TEXT, max_new_tokens=90, ignore_eos=True,
                          on_token=lambda _: stream.close())  # fmt: skip
    assert len(list(stream)) <= 1
    assert stream.result is not None
    assert (len(stream.result.ids), stream.result.finish) == (1, "closed")
    shared = model.stream(TEXT, max_new_tokens=90, ignore_eos=True)
    whole = model.generate(TEXT, max_new_tokens=90, ignore_eos=True)
    parts = together(lambda _: list(shared))
    assert sum(len("".join(some)) for some in parts) == len(whole.text or "")
    assert shared.result == whole


def test_an_error_reaches_the_task() -> None:
    async def main() -> None:
        with pytest.raises(ct.ShapeError, match=r"^generate_async: expected ids from 0"):
            await host().generate_async([999])
        stream = host().stream("x", on_token=lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await stream
        assert stream.result is not None

    asyncio.run(main())


def test_a_prompt_is_read_once_for_several_continuations() -> None:
    model = load(FOLDER / "qwen3", "cpu", "f32", task="generate")
    long, other = list(range(3, 90)), list(range(40, 80))
    for prompt in (long[::-1], long[1:]):  # the sessions that are kept
        model.generate(prompt, n=4, temperature=1.0, seed=1, **OPTIONS)
    with ct.ledger() as led:
        four = model.generate(long, n=4, temperature=1.0, seed=2, **OPTIONS)
    assert led.upload_bytes < 2500  # with the ids four times it would be 3,584
    assert four == [host().generate(long, temperature=1.0, seed=2 + i, **OPTIONS) for i in range(4)]
    pairs = model.generate([long, other], n=2, temperature=1.0, seed=2, **OPTIONS)
    assert pairs == [
        host().generate(row, temperature=1.0, seed=2 + i, **OPTIONS)
        for i, row in enumerate([long, long, other, other])
    ]
    text = r"argument n=; generate gives several"
    with pytest.raises(TypeError, match=f"^stream: .*{text}"):
        model.stream("x", n=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=f"^chat: .*{text}"):
        model.chat(MESSAGES, n=2)  # type: ignore[call-arg]


def test_repr_of_a_stream() -> None:
    stream = host().stream([1, 2, 3], max_new_tokens=2)
    assert repr(stream) == "<Stream of 3 tokens, under way>"
    next(stream)
    assert repr(stream) == "<Stream of 3 tokens, under way>"
    list(stream)
    assert repr(stream) == "<Stream of 3 tokens, done>"
