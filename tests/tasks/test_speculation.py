"""Speculation: the tokens of single steps, whoever guesses, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.tasks.generate import speculation
from centella.tasks.generate.pieces import Tally
from centella.tasks.generate.sampling import Sampling
from centella.tasks.generate.session import Array, Ids, Session
from centella.tasks.generate.speculation import GUESSES, Draft, Guesser, Lookup

DECODERS = Path(__file__).parents[1] / "data" / "decoders"
PROMPT = [5, 17, 4, 9, 5, 17, 4, 9, 5, 17, 4] * 3
STEPS = 45


class Oracle:
    """Knows the tokens, but guesses every fifth wrong."""

    def __init__(self, tokens: Ids) -> None:
        self.tokens = tokens

    def ready(self, row: Ids) -> bool:
        return len(row) % 11 != 0  # not always

    def guess(self, row: Ids) -> Array:
        at = len(row) - len(PROMPT)
        some = (self.tokens[at : at + GUESSES] + [0] * GUESSES)[:GUESSES]
        guesses = np.array([some], np.int32)
        guesses[0, 4 - at % 5] ^= 1
        return guesses

    def verified(self, right: Ids) -> None:
        """It knows."""


def single(session: Session, sampling: Sampling) -> Ids:
    session.choose_by(sampling, [PROMPT])
    session.start([PROMPT])
    for step in session.run(STEPS):
        session.add(step)
    return session.rows[0][len(PROMPT) :]


def guessed(session: Session, sampling: Sampling, guesser: Guesser, tally: Tally) -> Ids:
    session.choose_by(sampling, [PROMPT])
    session.start([PROMPT])
    for step in speculation.run(session, guesser, STEPS, tally):
        session.add(step)
    return session.rows[0][len(PROMPT) :]


@pytest.mark.devices("cpu", "webgpu", "cuda")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=20, seed=3)])
def test_the_tokens_of_single_steps(device: ct.Device, sampling: Sampling) -> None:
    # The two largest logits of a step are 0.005 apart, less than a rounding of bf16, and a pass of
    # eight rows rounds otherwise than a step of one: so this is a test in f32.
    model = ct.load(DECODERS / "qwen3", device=device, dtype="f32", task="generate").model
    other = ct.load(DECODERS / "llama", device=device, dtype="f32", task="generate").model
    vocab = model.config.vocab_size
    tokens = single(Session(model, 1, 128), sampling)
    session = Session(model, 1, 128)
    guessers: dict[str, Guesser] = {
        "oracle": Oracle(tokens), "itself": Draft(model, 128, vocab),
        "another": Draft(other, 128, vocab), "lookup": Lookup(),
    }  # fmt: skip
    for name, guesser in guessers.items():
        tally = Tally()
        assert guessed(session, sampling, guesser, tally) == tokens, name
        if name == "oracle" or (name == "itself" and sampling.greedy):
            assert tally.accepted > tally.guessed / 3, (name, tally)
    assert single(session, sampling) == tokens  # the session is as it was


@pytest.mark.devices("cpu", "webgpu", "cuda")
@pytest.mark.parametrize("name", ["oracle", "another", "lookup"])
def test_in_16_bits_a_token_is_the_likeliest_within_rounding(device: ct.Device, name: str) -> None:
    model = ct.load(DECODERS / "qwen3", device=device, dtype="bf16", task="generate").model
    other = ct.load(DECODERS / "llama", device=device, dtype="bf16", task="generate").model
    session = Session(model, 1, 128)
    guessers: dict[str, Guesser] = {
        "oracle": Oracle(single(session, Sampling())),
        "another": Draft(other, 128, model.config.vocab_size), "lookup": Lookup(),
    }  # fmt: skip
    tokens = guessed(session, Sampling(), guessers[name], Tally())
    exact = ct.load(DECODERS / "qwen3", device="cpu", dtype="f32", task="generate").model
    ids = ct.asarray(np.array([PROMPT + tokens], np.int32), device="cpu")
    logits = exact(ids).numpy()[0, len(PROMPT) - 1 : -1]
    behind = logits.max(-1) - logits[np.arange(STEPS), tokens]
    assert behind.max() < 0.5, behind  # bf16 moves a logit by 0.25; a wrong past costs over 2


def test_a_pass_moves_guesses_and_tokens(device: ct.Device) -> None:
    if device.name.startswith(("cuda", "simulator")):
        pytest.skip("as on the others")
    model = ct.load(DECODERS / "qwen3", device=device, task="generate").model
    session = Session(model, 1, 128)
    tokens = single(session, Sampling())
    tally = Tally()
    guessed(session, Sampling(), Oracle(tokens), tally)
    session.start([PROMPT])
    guess = np.array([tokens[:GUESSES]], np.int32)
    with ct.ledger() as led:
        assert session.verify(guess).tolist() == tokens[: GUESSES + 1]
    led.expect(uploads=1, downloads=1, submissions=2, compiles=0, allocations=0)
    assert led.counts.download_bytes == 4 * (2 * GUESSES + 1)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_draft_reads_no_token_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ct.load(DECODERS / "qwen3", device="cpu", task="generate").model
    draft = Draft(ct.load(DECODERS / name, device="cpu", task="generate").model, 128, 320)
    session, parts, read = Session(model, 1, 128), list[int](), draft._session._fill
    wanted = single(session, Sampling())

    def reading(part: Array) -> None:
        parts.append(part.shape[1])
        read(part)

    monkeypatch.setattr(draft._session, "_fill", reading)
    monkeypatch.setattr(speculation, "PAUSE", 0)
    monkeypatch.setattr(speculation, "LONGEST_PAUSE", 0)  # each step is guessed: none is between
    tally = Tally()
    assert guessed(session, Sampling(), draft, tally) == wanted
    assert parts == [32]  # of the prompt; its last token, and the guesses, are read as steps
    assert tally.guessed >= 7 * (5 if name == "qwen3" else 20)


def test_lookup_finds_the_longest_and_the_last() -> None:
    lookup = Lookup()
    assert not lookup.ready([1, 2, 3]) and not lookup.ready([1])
    row = [1, 2, 3, 4, 9, 8, 3, 4, 5, 2, 3, 4]
    assert lookup.ready(row)
    assert lookup.guess(row)[0, :3].tolist() == [9, 8, 3]  # behind 2 3 4, not behind 3 4
    assert lookup.guess([*row, 7, 3, 4])[0, :2].tolist() == [7, 3]  # the last 3 4 before the end
    assert lookup.guess([6, 6, 6, 6])[0].tolist() == [6] * GUESSES
    assert lookup.guess([1, 2, 3, 1, 2, 3, 1, 2])[0].tolist() == [3, 1, 2, 3, 1, 2, 3]
    assert not lookup.ready([1, 2, 3])  # another row


def test_generate_stream_and_chat_take_a_draft() -> None:
    model = ct.load(DECODERS / "qwen3", device="cpu", task="generate")
    plain = model.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    for draft in ("lookup", model):
        done = model.generate(PROMPT, max_new_tokens=30, ignore_eos=True, draft=draft)
        assert done.ids == plain.ids and done.text == plain.text
        assert done.guessed >= done.accepted >= 0 and done.guessed % GUESSES == 0
        stream = model.stream(PROMPT, max_new_tokens=30, ignore_eos=True, draft=draft)
        assert "".join(stream) == plain.text
    assert done.accepted >= 20  # it knows what it will say itself
    stopped = model.generate(PROMPT, max_new_tokens=30, draft=model, stop=plain.text[8:12])
    assert plain.text.startswith(stopped.text) and stopped.finish == "stop"
    assert model.generate(PROMPT, max_new_tokens=30, ignore_eos=True).ids == plain.ids
    for options in ({"n": 2}, {"logprobs": 0}, {"repetition_penalty": 1.3}):
        both = [
            model.generate([PROMPT], max_new_tokens=9, draft=d, **options) for d in (None, model)
        ]
        assert both[0] == both[1], options


def test_accepted_tokens_are_those_of_the_result() -> None:
    """One pass guesses seven tokens right; not all of them are wanted."""
    model = ct.load(DECODERS / "qwen3", device="cpu", task="generate")
    prompt = PROMPT[:1]
    for tokens in (1, 2, 7, 8, 9):
        done = model.generate(prompt, max_new_tokens=tokens, ignore_eos=True, draft=model)
        assert (done.guessed % GUESSES, done.accepted) == (0, min(tokens, 7) + (tokens == 9))
    ended = model.config.stop_ids | {done.ids[3]}
    model.config = replace(model.config, stop_ids=ended)
    before = done.ids.index(done.ids[3])
    stopped = model.generate(prompt, draft=model)
    assert (stopped.ids, stopped.accepted) == (done.ids[:before], before)
    stream = model.stream(prompt, draft=model)
    list(stream)
    assert (stream.guessed, stream.accepted) == (stopped.guessed, stopped.accepted)


def test_accepted_tokens_of_a_request() -> None:
    model = ct.load(DECODERS / "qwen3", device="cpu", task="generate")
    text = "one two " * 12
    with ct.Scheduler(model, background=False) as scheduler:
        done = scheduler.submit(text, draft="lookup", max_new_tokens=12, ignore_eos=True).result()
        few = scheduler.submit(text, draft="lookup", max_new_tokens=2, ignore_eos=True).result()
    assert 0 < done.accepted <= len(done.ids) and few.accepted <= 2


def test_up_to_the_end_of_the_context() -> None:
    model = ct.load(DECODERS / "qwen3", device="cpu", task="generate")
    prompt = (PROMPT * 40)[: model.context - 20]
    plain = model.generate(prompt, ignore_eos=True)
    done = model.generate(prompt, ignore_eos=True, draft=model)
    assert done.ids == plain.ids and done.finish == plain.finish == "context"


def test_what_is_refused() -> None:
    model = ct.load(DECODERS / "qwen3", device="cpu", task="generate")
    with pytest.raises(ct.DTypeError, match='draft: expected "lookup", a Generator or None, got'):
        model.generate(PROMPT, draft="look")  # type: ignore[call-overload]
    elsewhere = ct.load(DECODERS / "qwen3", device="simulator", task="generate")
    with pytest.raises(ct.DeviceError, match="draft: expected a model on cpu, got one on simul"):
        model.stream(PROMPT, draft=elsewhere)
