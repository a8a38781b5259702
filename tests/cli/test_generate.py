"""`centella generate`: text as it comes, JSON, chats, and errors in one line."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from centella.cli import chat
from centella.cli.answers import Answers, first_tokens
from centella.cli.limit import Memory, step_bytes, token_bytes
from centella.cli.options import QUANTIZED
from centella.cli.output import piece
from centella.errors import DeviceLostError
from centella.tasks.generate.generator import Generation, Generator
from centella.tasks.generate.session import Session
from centella.tasks.load import load
from centella.tensors.quantizers import QUANTIZERS

pytest.importorskip("typer")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.cli.test_cli import RUN, call, failed

MODEL = Path(__file__).parents[1] / "data" / "decoders" / "qwen3"
ON = ("generate", "--model", MODEL, "--device", "cpu")
SHARE = r"\([\d.,]+% of the memory's rate\)"
COUNTS = re.compile(
    rf"\d+ prompt tokens, \d+ tokens, first after [\d.]+ s, then [\d.,]+ tokens/s {SHARE}\n"
)
MEMORY = (
    r"memory: [\d.,]+ MB read a token, [\d.,]+ GB/s: [\d.]+% of the [\d.,]+ GB/s that this device "
    r"copies\n"
)


def model() -> Generator:
    return load(MODEL, "cpu", task="generate")


def test_text_on_stdout_and_numbers_on_stderr() -> None:
    result = call(*ON, "Hello", "--max-tokens", 8, "--ledger")
    wanted = model().generate("Hello", max_new_tokens=8).text
    assert result.stdout == f"{wanted}\n"
    numbers, counts, memory = result.stderr.splitlines(keepends=True)
    assert COUNTS.fullmatch(numbers)
    assert counts.startswith("ledger: ")
    assert re.fullmatch(MEMORY, memory)


def test_a_clock_that_has_not_moved() -> None:
    one = Generation([1, 2], "ab", "length", 3)
    line = Answers([one], 3, 0.0).line()
    assert line.startswith("3 prompt tokens, 2 tokens in 0.00 s (")


def test_one_token_is_no_tokens() -> None:
    one = Generation([1], "a", "length", 1)
    assert Answers([one], 1, 0.0).line().startswith("1 prompt token, 1 token in 0.00 s (")
    nothing = replace(one, ids=[])
    assert Answers([nothing], 2, 0.0).line().startswith("2 prompt tokens, 0 tokens in 0.00 s (")


def test_what_a_step_reads() -> None:
    """The weights but for the embedding, and keys and values of three layers."""
    weights = sum(w.nbytes for name, w in model().model.state_dict().items() if "embed" not in name)
    assert step_bytes(model(), 10) == weights + 2 * 3 * 2 * 16 * 4 * 10
    assert step_bytes(model(), 10, "i8") == weights + 2 * 3 * 2 * (16 + 4) * 10  # with its scale
    experts = load(MODEL.parent / "qwen3-moe", "cpu", task="generate")
    bytes_of_seven = step_bytes(experts, 0) / 3 * 7  # three of seven
    assert bytes_of_seven > sum(
        w.nbytes for n, w in experts.model.state_dict().items() if "expert" in n
    )
    assert step_bytes(experts, 0) < sum(w.nbytes for w in experts.model.state_dict().values()) * 0.7


def test_what_guessed_tokens_read() -> None:
    """20 tokens of 2 passes with 5 right guesses: 13 steps and 2 passes, and 16 of the draft."""
    done = Generation([5] * 20, "", "length", 3, guessed=14, accepted=5)
    step = step_bytes(model(), 10)
    assert token_bytes(model(), 10, None, "lookup", done) == step * 15 / 20
    assert token_bytes(model(), 10, None, model(), done) == step * (15 + 16) / 20
    assert token_bytes(model(), 10, None, None, replace(done, guessed=0, accepted=0)) == step
    experts = load(MODEL.parent / "qwen3-moe", "cpu", task="generate")
    share = 1 - (4 / 7) ** 8  # of seven experts those that eight tokens go to, three each
    more = step_bytes(experts, 0, tokens=8) - step_bytes(experts, 0)
    every = sum(w.nbytes for n, w in experts.model.state_dict().items() if ".experts." in n)
    assert more == pytest.approx((share - 3 / 7) * every)


@pytest.mark.parametrize("more", [[], ["--cache", "i8"], ["--draft", MODEL]])
def test_json_has_the_share_of_the_memory(more: list[Any]) -> None:
    given = ["Hello", "--max-tokens", 20, "--ignore-eos", "--json", "--ledger", *more]
    printed = json.loads(call(*ON, *given).stdout)
    memory = printed["memory"]
    rate = memory["bytes_per_token"] * printed["tokens_per_second"]
    assert memory["bytes_per_second"] == pytest.approx(rate) and memory["share"] > 0
    assert printed["ledger"]["submissions"] > 0
    if not more:
        assert memory["bytes_per_token"] == step_bytes(model(), printed["prompt_tokens"] + 10)


def test_json() -> None:
    result = call(*ON, "Hello", "--max-tokens", 6, "--temperature", 0.9, "--seed", 3, "--json")
    printed = json.loads(result.stdout)
    wanted = model().generate("Hello", max_new_tokens=6, temperature=0.9, seed=3)
    assert (printed["text"], printed["tokens"]) == (wanted.text, len(wanted.ids))
    assert printed["prompt_tokens"] == wanted.prompt_tokens
    assert (printed["finish"], printed["ids"]) == (wanted.finish, wanted.ids)
    assert printed["seconds_to_first_token"] > 0


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"max_new_tokens": 100, "temperature": 2.0, "seed": 5}, ["--temperature", 2, "--seed", 5]),
        ({"max_new_tokens": 200, "ignore_eos": True}, ["--ignore-eos"]),
        ({"max_new_tokens": 100, "stop": "e"}, ["--stop", "e"]),
        ({"max_new_tokens": 9, "frequency_penalty": 9.0}, ["--frequency-penalty", 9]),
        ({"max_new_tokens": 9, "presence_penalty": 9.0}, ["--presence-penalty", 9]),
    ],
)
def test_json_says_how_it_ended(options: dict[str, Any], arguments: list[Any]) -> None:
    wanted = model().generate("Hello", **options)
    tokens = options["max_new_tokens"]
    printed = json.loads(call(*ON, "Hello", "--json", "--max-tokens", tokens, *arguments).stdout)
    assert (printed["ids"], printed["finish"]) == (wanted.ids, wanted.finish)
    assert printed["text"] == wanted.text


def test_several_answers() -> None:
    given = ["Hello", "--n", 2, "--temperature", 2, "--seed", 1, "--max-tokens", 4]
    wanted = model().generate("Hello", n=2, temperature=2.0, seed=1, max_new_tokens=4)
    printed = json.loads(call(*ON, *given, "--json").stdout)
    assert [one["ids"] for one in printed["answers"]] == [one.ids for one in wanted]
    first, second = (one.text for one in wanted)
    result = call(*ON, *given)
    assert result.stdout == f"--- 1 of 2\n{first}\n--- 2 of 2\n{second}\n"
    numbers = r"\d+ prompt tokens, 8 tokens in [\d.]+ s \([\d.,]+ a second with the prompt\)\n"
    assert re.fullmatch(numbers, result.stderr)


def test_beams() -> None:
    given = ["Hello", "--beam", 3, "--max-tokens", 5]
    wanted = model().generate("Hello", beam=3, n=2, max_new_tokens=5)
    printed = json.loads(call(*ON, *given, "--n", 2, "--json").stdout)
    assert [(one["ids"], one["score"]) for one in printed["answers"]] == [
        (one.ids, one.score) for one in wanted
    ]
    assert call(*ON, *given).stdout == f"{wanted[0].text}\n"


def test_no_rate_for_fewer_than_three_tokens_after_the_first() -> None:
    few = call(*ON, "Hello", "--max-tokens", 3, "--ignore-eos")
    assert "tokens/s" not in few.stderr
    printed = json.loads(call(*ON, "Hello", "--max-tokens", 3, "--ignore-eos", "--json").stdout)
    assert printed["tokens_per_second"] is None and printed["memory"] is None
    some = call(*ON, "Hello", "--max-tokens", 4, "--ignore-eos")
    assert "tokens/s" in some.stderr


@pytest.mark.parametrize(("tokens", "told"), [(8, False), (10, False), (11, True)])
def test_a_rate_counts_from_the_end_of_the_first_pass(tokens: int, told: bool) -> None:
    """The model guesses what it says itself: eight tokens come together."""
    given = ["--ids", "5", "--max-tokens", tokens, "--ignore-eos", "--draft", MODEL, "--json"]
    printed = json.loads(call(*ON, *given).stdout)
    assert printed["guessed"] >= printed["accepted"] >= 7
    assert (printed["tokens_per_second"] is not None) == told
    assert (printed["memory"] is not None) == told


@pytest.mark.parametrize(
    ("accepted", "tokens"), [([], 0), ([0, 0], 1), ([1, 2, 2, 3], 3), ([0, 1, 1], 1), ([1, 2], 2)]
)
def test_tokens_that_come_first(accepted: list[int], tokens: int) -> None:
    assert first_tokens([(7, right) for right in accepted]) == tokens


def test_digits_of_small_rates() -> None:
    line = Memory(bytes_per_token=2e4, bytes_per_second=5.5e6, share=0.139).line()
    copied = "13.9% of the 0.0396 GB/s that this device copies"
    assert line == f"memory: 0.02 MB read a token, 0.0055 GB/s: {copied}"
    assert "of the 4,800 GB/s" in Memory(2e9, 2.4e12, 0.5).line()


def test_without_a_tokenizer_ids_are_printed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    for file in folder.glob("*token*"):
        file.unlink()
    wanted = model().generate([5, 17, 4], max_new_tokens=4).ids
    given = ("generate", "--model", folder, "--device", "cpu", "--ids", "5,17,4", "--max-tokens", 4)
    assert call(*given).stdout == ",".join(map(str, wanted)) + "\n"
    printed = json.loads(call(*given, "--json").stdout)
    assert (printed["text"], printed["ids"], printed["finish"]) == (None, wanted, "length")
    on = given[:5]
    assert "give ids in place of text" in failed(*on, "Hello")
    assert "--chat: expected a model with a chat template" in failed(*on, "--chat")


def test_the_prompt_comes_from_a_file_or_as_ids(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello", encoding="utf-8")
    outputs = {
        call(*ON, *given, "--max-tokens", 5).stdout
        for given in (["Hello"], ["--file", file],
                      ["--ids", ",".join(map(str, model().encode("Hello")))])
    }  # fmt: skip
    assert len(outputs) == 1
    assert call(*ON, "--file", "-", "--max-tokens", 5, stdin="Hello").stdout in outputs
    assert call(*ON, "--max-tokens", 5, stdin="Hello").stdout in outputs
    assert call(*ON, "-", "--max-tokens", 5, stdin="Hello").stdout in outputs


def test_logprobs_as_json() -> None:
    given = [*ON, "Hello", "--max-tokens", 4, "--ignore-eos", "--json", "--logprobs", 2]
    wanted = model().generate("Hello", max_new_tokens=4, ignore_eos=True, logprobs=2).logprobs or []
    tokens = json.loads(call(*given).stdout)["logprobs"]
    assert [(t["id"], t["logprob"]) for t in tokens] == [(t.id, t.logprob) for t in wanted]
    for one, other in zip(tokens, wanted, strict=True):
        assert {t["id"]: t["logprob"] for t in one["top"]} == other.top
        assert one["text"] == model().tokenizer.decode([other.id], skip_special_tokens=False)


def test_pieces_as_lines_of_json() -> None:
    given = ["Hello", "--max-tokens", 9, "--json", "--stream"]
    *pieces, last = map(json.loads, call(*ON, *given).stdout.splitlines())
    assert len(pieces) > 1
    assert "".join(one["piece"] for one in pieces) == last["text"]


def test_variables_of_the_template(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ more | join }}")
    given = [
        "generate",
        "--model",
        folder,
        "--device",
        "cpu",
        "--chat",
        "--max-tokens",
        1,
        "--json",
    ]
    variables = ["--template", '{"more": ["a", "b"]}']
    for result in (call(*given, "hi", *variables), call(*given, *variables, stdin="hi\n")):
        assert json.loads(result.stdout)["prompt_tokens"] == len(model().encode("hiab"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--seed", 3], "--seed changes nothing"),
        (["--top-p", 0.9, "--seed", 3], "--seed and --top-p change nothing"),
        (["--top-k", 9, "--top-p", 0.9, "--min-p", 0.1],
         "--top-k, --top-p and --min-p change nothing"),
        (["--n", 2], "--n gives equal texts"),
        (["--n", 2, "--seed", 3, "--presence-penalty", 1],
         "--seed changes nothing and --n gives equal texts"),
    ],
)  # fmt: skip
def test_options_that_need_a_temperature_are_told(given: list[Any], told: str) -> None:
    line = f"generate: {told} while the likeliest token is taken: add --temperature T\n"
    assert line in call(*ON, "Hello", "--max-tokens", 1, *given).stderr
    sampled = call(*ON, "Hello", "--max-tokens", 1, *given, "--temperature", 1)
    assert "likeliest" not in sampled.stderr


def test_beams_need_no_temperature() -> None:
    assert "likeliest" not in call(*ON, "Hello", "--max-tokens", 1, "--beam", 2, "--n", 2).stderr


@pytest.mark.parametrize("draft", ["lookup", MODEL])
def test_guesses(draft: str | Path) -> None:
    given = ["Hello", "--max-tokens", 30, "--ignore-eos", "--draft", draft]
    printed = json.loads(call(*ON, *given, "--json").stdout)
    assert printed["ids"] == model().generate("Hello", max_new_tokens=30, ignore_eos=True).ids
    line = call(*ON, *given).stderr
    if draft == "lookup":  # which may find nothing
        return
    assert printed["guessed"] >= printed["accepted"] > 0
    assert re.search(rf"tokens/s {SHARE}, \d+ of \d+ guesses right\n", line)


def test_a_cache_in_i8() -> None:
    given = ["Hello", "--max-tokens", 8, "--ignore-eos", "--cache", "i8"]
    printed = json.loads(call(*ON, *given, "--json").stdout)
    wanted = model().generate("Hello", max_new_tokens=8, ignore_eos=True, cache="i8")
    assert printed["ids"] == wanted.ids
    assert call(*ON, "Hello", "--cache", "f4").exit_code == 2


def test_a_trace(tmp_path: Path) -> None:
    for more in (["Hello"], ["--chat"]):
        file = tmp_path / f"{more[0]}.json"
        call(*ON, *more, "--max-tokens", 2, "--trace", file, stdin="hi\n")
        assert json.loads(file.read_text())["traceEvents"]


def test_one_answer_in_the_chat_format() -> None:
    result = call(*ON, "--chat", "--system", "Be brief.", "hi", "--max-tokens", 5)
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
    ]  # fmt: skip
    answer = "".join(model().chat(messages, max_new_tokens=5))
    assert result.stdout.rstrip("\n") == answer.rstrip("\n")


def test_a_chat_keeps_its_history_until_it_is_reset() -> None:
    result = call(*ON, "--chat", "--max-tokens", 4, stdin="hi\n\nmore\n/reset\nhi\n/exit\nno\n")
    numbers = [int(n) for n in re.findall(r"(\d+) prompt tokens", result.stderr)]
    assert len(numbers) == 3
    assert numbers[0] == numbers[2] < numbers[1]


def test_a_full_context_ends_a_turn_and_not_the_chat() -> None:
    said = f"hi\n{'many words ' * 100}\nhi\n/reset\nhi\n"
    result = call(*ON, "--chat", "--max-tokens", 4, stdin=said)
    assert result.exit_code == 0
    (line,) = [line for line in result.stderr.splitlines() if "expected a prompt" in line]
    assert "/reset" in line
    assert "with the messages before it; this message is dropped" in line
    numbers = [int(n) for n in re.findall(r"(\d+) prompt tokens", result.stderr)]
    assert len(numbers) == 3
    assert numbers[0] == numbers[2] < numbers[1] < 2 * numbers[0] + 20


def test_a_chat_tells_where_the_context_cut_an_answer() -> None:
    result = call(*ON, "--chat", "--max-tokens", 500, "--ignore-eos", stdin="hi\n")
    full = "chat: the context of 128 tokens is full: the answer ends here; /reset begins anew"
    assert full in result.stderr
    result = call(*ON, "--chat", "--max-tokens", 4, stdin="hi\n")
    assert "is full" not in result.stderr


@pytest.mark.parametrize("more", [(), ("--n", 2, "--temperature", 1)])
def test_a_text_that_the_context_cuts_is_told(more: tuple[Any, ...]) -> None:
    told = "generate: the context of 128 tokens is full: the text ends here"
    assert told in call(*ON, "Hello", "--max-tokens", 500, "--ignore-eos", *more).stderr
    assert "is full" not in call(*ON, "Hello", "--max-tokens", 4, *more).stderr


def test_unquoted_words_and_wrong_commands_get_a_hint() -> None:
    result = call(*ON, "Once", "upon", "a", "time")
    assert result.exit_code == 2
    assert "quote a text of several words: 'Once upon a time'" in result.stderr
    result = call("demo", "how", "isn't", "it", "freed")
    assert """several words: 'how isn'"'"'t it freed'""" in result.stderr
    assert "quote" not in call("info", "now").stderr
    for words, write in (
        (("chat",), "centella generate --chat"),
        (("devices",), "centella info"),
        (("generate", "--prompt", "hi"), "centella generate --model DIR 'Once upon'"),
        (("embed", "--input", "f.txt"), "write --file"),
    ):
        result = call(*words)
        assert result.exit_code == 2 and write in result.stderr
    for words in (("transcribe", "--input", "a.wav"), ("check", "--input", "a"),
                  ("embed", "--prompt", "hi"), ("rank", "--prompt", "hi")):  # fmt: skip
        assert "(write" not in call(*words).stderr  # what the command does not take


def test_a_lost_device_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise DeviceLostError("device lost")

    monkeypatch.setattr(Generator, "stream", lost)
    result = call(*ON, "--chat", stdin="hi\nhi\n")
    assert result.exit_code == 1
    assert result.stderr.count("device lost") == 1


def test_a_chat_as_json_is_a_line_for_each_answer() -> None:
    said = f"hi\n{'many words ' * 100}\nhi\n"
    result = call(*ON, "--chat", "--json", "--max-tokens", 4, stdin=said)
    first, failure, last = map(json.loads, result.stdout.splitlines())
    answer = model().generate(model().encode_chat([{"role": "user", "content": "hi"}]),
                              max_new_tokens=4)  # fmt: skip
    assert (first["text"], first["ids"]) == (answer.text, answer.ids)
    assert "expected a prompt" in failure["error"]
    assert last["prompt_tokens"] > first["prompt_tokens"]
    assert not result.stderr


def test_a_chat_reports_unknown_commands() -> None:
    result = call(*ON, "--chat", "--max-tokens", 4, stdin="/quit\n/help\n/exit\n")
    assert "no command /quit" in result.stderr
    assert result.stderr.count("chat: Ctrl-C stops an answer") == 2
    assert "prompt tokens" not in result.stderr


def test_interrupts_at_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clears the line, a second one in a row leaves."""
    typed: list[str | type[BaseException]] = [
        KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "not read",
    ]  # fmt: skip

    def type_one() -> str:
        given = typed.pop(0)
        if isinstance(given, str):
            return given
        raise given

    monkeypatch.setattr(chat, "_line", type_one)
    result = call(*ON, "--chat", "--max-tokens", 4)
    assert result.exit_code == 0
    assert typed == ["not read"]
    assert result.stderr.count("Ctrl-C once more leaves") == 2
    assert result.stderr.count("prompt tokens") == 1


def test_text_is_escaped_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, wanted in ((True, "\\x14"), (False, "\x14")):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", stream)
        piece("\x14")
        assert stream.getvalue() == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x"], "--model DIR: expected a model folder"),
        ([*ON], "no prompt; try"),
        ([*ON, "x", "--ids", "3"], "give one of PROMPT, --file and --ids"),
        ([*ON, "--ids", "3", "--chat"], "--ids is a whole prompt"),
        ([*ON, "--ids", "a,b"], "--ids: expected N,N,.., got a,b"),
        ([*ON, "--ids", "999"], "--ids: expected ids from 0 to 319, got 999"),
        ([*ON, "many words " * 100], "generate: PROMPT: expected a prompt of fewer than 128"),
        ([*ON, "x", "--temperature", "-1"], "generate: --temperature: expected 0 to 10,000"),
        ([*ON, "x", "--top-p", "0"], "generate: --top-p: expected above 0"),
        ([*ON, "--chat", "--top-p", "0"], "generate: --top-p: expected above 0"),
        ([*ON, "x", "--stop", ""], "--stop: expected a text that is not empty"),
        ([*ON, "x", "--system", "Be brief."], "--system: expected --chat"),
        ([*ON, "--chat", "--n", "2"], "--n: expected 1 in a chat"),
        ([*ON, "--chat", "--beam", "2"], "--beam: expected 1 in a chat"),
        ([*ON, "x", "--beam", "2", "--stream", "--json"], "--beam: expected 1 with --stream, got"),
        ([*ON, "x", "--n", "2", "--stream", "--json"], "--n: expected 1 with --stream, got 2"),
        ([*ON, "x", "--beam", "2", "--seed", "3"], "generate: expected no --seed with --beam"),
        ([*ON, "x", "--beam", "2", "--draft", "lookup"], "expected no --draft with --beam"),
        ([*ON, "x", "--draft", "/absent"], "generate: --draft: /absent: "),
        ([*ON, "x", "--beam", "2", "--top-k", "9"], "generate: --top-k: expected 0 with beams"),
        ([*ON, "x", "--beam", "2", "--n", "3"], "generate: --n: expected up to 2 texts"),
        ([*ON, "x", "--beam", "17"], "generate: --beam: expected 1 to 16, got 17"),
        ([*ON, "x", "--logprobs", "2"], "--logprobs: expected --json with it"),
        (
            [*ON, "x", "--json", "--logprobs", "21"],
            "generate: --logprobs: expected 0 to 20, got 21",
        ),
        ([*ON, "x", "--stream"], "--stream: expected --json with it"),
        ([*ON, "x", "--template", "{}"], "--template: expected --chat with it"),
        (
            [*ON, "x", "--chat", "--template", "[]"],
            "--template: expected an object of JSON, got []",
        ),
        (["generate", "--model", MODEL.parents[1] / "tiny-bert", "x"], "centella embed"),
        ([*ON, "--file", "/absent/prompt"], "no such file"),
        ([*ON, "x", "--quantize", "q8_0"], "expected rows of a multiple of 32 to quantize"),
        ([*ON, "x", "--draft", MODEL.parents[1] / "tiny-bert"], "which is to embed with"),
    ],
)
def test_errors_in_a_line(arguments: list[Any], message: str) -> None:
    assert message in failed(*arguments)


def test_formats_of_quantize_are_listed() -> None:
    for command in (ON, ("check", "--model", MODEL)):
        result = call(*command, "--quantize", "q4_k")
        assert result.exit_code == 2
        assert "'--quantize': 'q4_k' is not one of 'q8_0', 'q4_0'" in result.stderr
    assert set(QUANTIZED) == set(QUANTIZERS)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when a fifth token is computed."""
    run = Session.run

    def four(session: Session, steps: int) -> Iterator[Any]:
        yield from itertools.islice(run(session, steps), 4)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", four)


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_of_one_text_reports_what_has_come(tmp_path: Path) -> None:
    wanted, file = model().generate("Hello", max_new_tokens=4, ignore_eos=True), tmp_path / "t.json"
    given = [*ON, "Hello", "--ignore-eos", "--ledger", "--trace", file]
    result = call(*given)
    assert result.exit_code == 130
    assert result.stdout.endswith("\n") and str(wanted.text).startswith(result.stdout[:-1])
    assert "prompt tokens, 4 tokens, first after" in result.stderr
    assert "\nledger: " in result.stderr
    assert json.loads(file.read_text())["traceEvents"]
    as_json = call(*given, "--json")
    printed = json.loads(as_json.stdout)
    assert (as_json.exit_code, printed["finish"]) == (130, "interrupted")
    assert (printed["ids"], printed["text"]) == (wanted.ids, wanted.text)
    assert printed["ledger"]["submissions"] > 0


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_of_several_texts_leaves_none() -> None:
    given = [*ON, "Hello", "--ignore-eos", "--n", 2, "--temperature", 1]
    result = call(*given)
    assert (result.exit_code, result.stdout) == (130, "\n")
    printed = json.loads(call(*given, "--json").stdout)
    assert [(one["finish"], one["ids"]) for one in printed["answers"]] == [("interrupted", [])] * 2


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_an_interrupt_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    """The first interrupt comes while an answer of many tokens is written: seconds of them."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    wide = json.dumps(config | {"max_position_embeddings": 4096})
    (folder / "config.json").write_text(wide)
    on = [folder if argument == MODEL else argument for argument in ON]
    arguments = [*map(str, on), "--chat", "--max-tokens", "1000", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        assert "Ctrl-C" in process.stderr.readline()
        process.stdin.write("hi\n")
        process.stdin.flush()
        process.stdout.read(1)  # it has begun
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.stdin.write("again\n/exit\n")
        process.stdin.close()
        errors = process.stderr.read()
        process.stdout.read()
    assert process.returncode == 0, errors
    assert errors.count("prompt tokens") == 2
    assert "Traceback" not in errors
