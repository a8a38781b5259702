"""Broken inputs of the commands: one line that names the cause, and JSON that is JSON."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import ContractError, DTypeError, ShapeError
from centella.tasks.load import load

pytest.importorskip("typer")
pytest.importorskip("tokenizers")

from centella.cli import rank
from centella.cli.output import out_json
from tests.cli.test_cli import RUN, call, failed
from tests.support.model_common import copy_of

DATA = Path(__file__).parents[1] / "data"
TINY, DECODER, SPEECH = DATA / "tiny-bert", DATA / "decoders" / "qwen3", DATA / "whisper" / "tiny"
RANKER = DATA / "rerankers" / "qwen3"
ODD = "\x1b[31mred\nline\u202e"
SHOWN = "\\x1b[31mred\\nline\\u202e"
ON = ("--device", "cpu")
full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device on this system")


def broken(name: str, where: Path) -> Path:
    """A model whose last norm is NaN."""

    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        last = next(n for n in reversed(sorted(tensors)) if n.endswith("orm.weight"))
        return {**tensors, last: np.full_like(tensors[last], np.nan)}

    return copy_of(name, where, edit)


def shell(arguments: tuple[object, ...], redirect: str) -> subprocess.CompletedProcess[str]:
    """A command line of bash, with a word on standard input."""
    line = shlex.join([sys.executable, "-c", RUN, *map(str, arguments)])
    command = ["bash", "-c", f"{line} {redirect}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, input="hi\n")


# -- numbers that are none ------------------------------------------------------------------------


def test_vectors_that_are_not_finite(tmp_path: Path) -> None:
    model = ("--model", broken("tiny-bert", tmp_path), *ON)
    (tmp_path / "a.txt").write_text("a cat")
    for command, what in (
        (
            ("embed", "a cat", "a dog"),
            "embed: expected finite numbers, got nan in the vector of te",
        ),
        (("embed", "a cat", "--json"), "in the vector of text 0; the weights are broken, or the"),
        (("demo", "a cat", "--over", tmp_path / "a.txt", "--json"), "in the vector of question 0"),
    ):
        assert what in failed(*command, *model)


def test_scores_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    ranker = load(RANKER, "cpu", task="classify")
    model: Any = ranker.model
    model.norm.scale = ct.full(model.norm.scale.shape, np.nan, device="cpu")
    monkeypatch.setattr(rank, "load_shown", lambda *_, **__: ranker)
    assert "got nan in the logits of pair 0" in failed("rank", "q", "a", "--model", RANKER, *ON)
    with pytest.raises(ContractError, match="rank: expected finite numbers, got nan in the logits"):
        ranker.rank("q", ["a", "b"])


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    out_json({"a": [1.5, float("nan")], "b": {"c": -np.inf}, "d": "NaN"})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed == {"a": [1.5, None], "b": {"c": None}, "d": "NaN"}


# -- files of vectors -----------------------------------------------------------------------------


def search(file: object, *more: object) -> tuple[object, ...]:
    return ("search", file, "a cat", "--model", TINY, *ON, *more)


def test_npy_files_of_other_tools(tmp_path: Path) -> None:
    vectors = np.eye(2, 48)
    rows = []
    for name, kind in (("f4", "<f4"), ("f8", "<f8"), ("big", ">f4")):
        np.save(tmp_path / f"{name}.npy", vectors.astype(kind))
        printed = json.loads(call(*search(tmp_path / f"{name}.npy", "--json")).stdout)
        rows.append(printed["results"][0]["nearest"])
    assert rows[0] == rows[1] == rows[2]
    np.save(tmp_path / "none.npy", vectors[:0])
    assert "none.npy: expected one vector or more, got none" in failed(
        *search(tmp_path / "none.npy")
    )
    np.save(tmp_path / "nan.npy", np.full((2, 48), np.nan, np.float32))
    said = failed(*search(tmp_path / "nan.npy"))
    assert said.startswith(f"centella: {tmp_path}/nan.npy: expected finite numbers")
    assert "INDEX: expected a file of vectors, got an empty text" in failed(*search(""))


def test_parquet_files_of_other_tools(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    vectors = np.eye(2, 48).tolist()

    def written(**columns: Any) -> Path:
        parquet.write_table(arrow.table(columns), tmp_path / "v.parquet")
        return tmp_path / "v.parquet"

    call(*search(written(embedding=vectors, text=["a", "b"])))  # of float64
    printed = json.loads(
        call(*search(written(embedding=vectors, text=["a", None]), "--json")).stdout
    )
    assert [row["text"] for row in printed["results"][0]["nearest"]] == ["a"]  # a blank one is none
    said = failed(*search(written(embedding=vectors, text=[1, 2])))
    assert "v.parquet: expected vectors in .parquet: expected texts in text, got int64" in said
    said = failed(*search(written(vector=vectors)))
    assert (
        "v.parquet: expected vectors in .parquet: expected a column embedding, got vector" in said
    )
    table = arrow.table({"embedding": vectors}).replace_schema_metadata({"centella.model": ODD})
    parquet.write_table(table, tmp_path / "v.parquet")
    said = failed("search", tmp_path / "v.parquet", "a cat", *ON)
    assert said.startswith(f"centella: {SHOWN}: expected a model folder")


def test_an_output_named_by_its_suffix_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = failed("embed", "a", "--output", ".npy", "--model", tmp_path / "none")
    assert "embed: --output: expected .npy, .parquet, .arrow, got .npy" in said


# -- texts and names ------------------------------------------------------------------------------


def test_questions_that_are_empty(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.eye(2, 48, dtype=np.float32))
    assert "expected questions that are not empty" in failed("search", tmp_path / "v.npy", "a", " ")
    assert "rank: the question is empty" in failed("rank", "", "a", "--model", RANKER)


@pytest.mark.parametrize(
    "command", [("generate", "a"), ("transcribe", "a.wav"), ("rank", "q", "a")]
)
def test_no_model(command: tuple[str, ...]) -> None:
    """Each names a repository that would do."""
    said = failed(*command)
    assert said.startswith(f"centella: {command[0]}: --model DIR: expected a") and ", as " in said


@pytest.mark.parametrize(
    "command",
    [("embed", "a", "--model", ODD), ("embed", "a", f"--model={ODD}"), ("search", ODD, "a"),
     ("generate", "a", "--model", ODD), ("transcribe", "a.wav", "--model", ODD),
     ("rank", "a", "b", "--model", ODD), ("generate", "a", "--model", DECODER, "--draft", ODD)],
)  # fmt: skip
def test_names_of_several_lines(command: tuple[object, ...]) -> None:
    said = failed(*command)
    named = "generate: --draft: " if "--draft" in command else ""
    assert said.startswith(f"centella: {named}{SHOWN}: expected a ") and "--debug" not in said


def test_an_empty_prompt_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    arguments = ("generate", "--model", DECODER, *ON, "--file", tmp_path / "empty.txt")
    assert "empty.txt: expected a prompt, got no text" in failed(*arguments)


def test_more_continuations_than_there_is_memory_for() -> None:
    arguments = ("generate", "a", "--model", DECODER, *ON)
    assert "generate: expected n of 1 to 65,536, got 99,999,999,999" in failed(
        *arguments, "--n", 99_999_999_999
    )


def test_variables_that_chat_sets_itself() -> None:
    pytest.importorskip("jinja2")
    arguments = ("generate", "a", "--model", DECODER, *ON, "--chat", "--template")
    for name in ("messages", "parse_special", "answer"):
        said = failed(*arguments, json.dumps({name: 1}))
        assert f"generate: --template: expected variables of the template, got '{name}'" in said
    model = load(DECODER, "cpu", task="generate")
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(DTypeError, match=r"chat: template: expected variables .*, got 'messages'"):
        model.chat(messages, template={"messages": 1})


def test_messages_that_are_no_text() -> None:
    pytest.importorskip("jinja2")
    model = load(DECODER, "cpu", task="generate")
    for special in (False, True):
        with pytest.raises(
            ShapeError, match=r"chat: messages: expected valid Unicode, .*'\\ud800'"
        ):
            model.encode_chat(
                [{"role": "user", "content": "half \ud800"}], parse_special=special
            )  # fmt: skip


# -- outputs --------------------------------------------------------------------------------------


def test_a_trace_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    for command in (("generate", "a"), ("transcribe", "a.wav")):
        said = failed(*command, "--model", tmp_path / "none", "--trace", tmp_path / "no" / "t.json")
        assert "t.json: there is no folder" in said
        assert "got a folder" in failed(*command, "--model", tmp_path, "--trace", tmp_path)


def tone(path: Path) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((np.sin(np.arange(16000) / 10) * 9000).astype("<i2").tobytes())
    return path


def test_names_of_audio(tmp_path: Path) -> None:
    said = failed("transcribe", ODD, "--model", SPEECH, *ON)
    assert said.startswith(f"centella: {SHOWN}: expected audio, the file cannot be read")
    assert "centella: '': expected audio" in failed("transcribe", "", "--model", SPEECH, *ON)
    (tmp_path / "file").write_text("")
    arguments = ("transcribe", tone(tmp_path / "a.wav"), "--model", SPEECH, *ON)
    assert "file: expected a folder, got a file" in failed(
        *arguments, "--output", tmp_path / "file"
    )


@full
def test_a_full_disk(tmp_path: Path) -> None:
    arguments = ("transcribe", tone(tmp_path / "a.wav"), "--model", SPEECH, *ON, "--vad", "off")
    run = shell((*arguments, tmp_path / "no.wav"), ">/dev/full")
    assert run.stderr == "centella: standard output: no space left on device\n"  # and no more
    assert run.returncode == 1
    os.symlink("/dev/full", tmp_path / "a.txt")
    said = failed(*arguments, "--output", tmp_path)
    assert said.endswith(f"a.wav: {tmp_path}/a.txt: no space left on device")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize(
    ("redirect", "end"),
    [("<&-", "standard input: bad file descriptor"),
     pytest.param(">/dev/full", "standard output: no space left on device", marks=full)],
)  # fmt: skip
def test_a_chat_whose_streams_are_closed_or_full(redirect: str, end: str) -> None:
    pytest.importorskip("jinja2")
    run = shell(("generate", "--chat", "--model", DECODER, "--max-tokens", 3, *ON), redirect)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == f"centella: {end}"
    assert shutil.which("bash") and "Traceback" not in run.stderr
