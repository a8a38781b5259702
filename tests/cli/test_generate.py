"""`centella generate`: text as it comes, JSON, chats, and errors in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from centella.tasks.generate import Generator
from centella.tasks.load import load

pytest.importorskip("typer")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.cli.test_cli import RUN, call, failed

MODEL = Path(__file__).parents[1] / "data" / "decoders" / "qwen3"
ON = ("generate", "--model", MODEL, "--device", "cpu")
COUNTS = re.compile(r"\d+ prompt tokens, \d+ tokens, first after [\d.]+ s, then [\d.,]+ tokens/s\n")


def model() -> Generator:
    return load(MODEL, "cpu", task="generate")


def test_text_on_stdout_and_numbers_on_stderr() -> None:
    result = call(*ON, "Hello", "--max-tokens", 8, "--ledger")
    wanted = model().generate("Hello", max_new_tokens=8).text
    assert result.stdout == (wanted or "").replace("\x14", "\\x14") + "\n"
    numbers, counts = result.stderr.splitlines(keepends=True)
    assert COUNTS.fullmatch(numbers)
    assert counts.startswith("ledger: ")


def test_json() -> None:
    result = call(*ON, "Hello", "--max-tokens", 6, "--temperature", 0.9, "--seed", 3, "--json")
    found = json.loads(result.stdout)
    wanted = model().generate("Hello", max_new_tokens=6, temperature=0.9, seed=3)
    assert (found["text"], found["tokens"]) == (wanted.text, len(wanted.ids))
    assert found["prompt_tokens"] == wanted.prompt_tokens
    assert found["seconds_to_first_token"] > 0


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x"], "--model DIR: expected a model folder"),
        ([*ON], "no prompt; try"),
        ([*ON, "x", "--ids", "3"], "give one of PROMPT, --file and --ids"),
        ([*ON, "--ids", "3", "--chat"], "--ids is a whole prompt"),
        ([*ON, "--ids", "a,b"], "--ids: expected N,N,.., got a,b"),
        ([*ON, "--ids", "999"], "expected ids from 0 to 319, got 999"),
        ([*ON, "x", "--temperature", "-1"], "temperature: expected 0 to 10,000"),
        ([*ON, "x", "--top-p", "0"], "top_p: expected above 0"),
        (["generate", "--model", MODEL.parents[1] / "tiny-bert", "x"], "one that embeds it"),
        ([*ON, "--file", "/absent/prompt"], "no such file"),
        ([*ON, "x", "--quantize", "q8_0"], "expected rows of a multiple of 32 to quantize"),
        ([*ON, "x", "--quantize", "q9"], "expected quantize of q8_0, q4_0"),
    ],
)
def test_errors_in_a_line(arguments: list[Any], message: str) -> None:
    assert message in failed(*arguments)


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_an_interrupt_stops_the_answer_and_not_the_chat() -> None:
    """The first interrupt comes while an answer of many tokens is written."""
    arguments = [*map(str, ON), "--chat", "--max-tokens", "100", "--temperature", "2"]
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
