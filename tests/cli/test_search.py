"""`centella embed --output` of many texts, interrupted too, and `centella search` over it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import centella as ct
from centella import Embedder
from centella.cli import embed as embed_command
from tests.cli.test_cli import ON_CPU, TINY, call, failed

TEXTS = [f"{'rain ' * (n % 5)}light {n}" for n in range(150)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return file


def test_rows_that_are_nearest(tmp_path: Path, lines: Path) -> None:
    saved = tmp_path / "v.npy"
    assert "v.npy: 150 x " in call("embed", "--file", lines, "--output", saved, *ON_CPU).stdout
    vectors = np.load(saved)
    asked = call("search", saved, TEXTS[33], "rain", "--top", 3, "--file", lines, "--json", *ON_CPU)
    first, second = json.loads(asked.stdout)["results"]
    assert first["question"] == TEXTS[33] and first["nearest"][0]["text"] == TEXTS[33]
    query = ct.load(ON_CPU[1], device="cpu").encode("rain")
    rows = np.argsort(-(vectors @ query), kind="stable")[:3].tolist()
    assert [m["row"] for m in second["nearest"]] == rows
    shown = call("search", saved, "rain", "--f16", "--ledger", *ON_CPU)
    assert shown.stdout.splitlines()[0].split()[1] == str(rows[0])
    assert shown.stderr.startswith("ledger: uploads ")
    words = call("search", saved, "rain", "and", "light", *ON_CPU)
    assert words.stderr.endswith("if it is one, quote it: 'rain and light'\n")
    assert not call("search", saved, "rain", "and light", *ON_CPU).stderr
    folder = call("search", tmp_path, "rain")
    assert folder.exit_code == 1 and "centella demo --over FOLDER" in folder.stderr


def test_blank_lines_are_no_answers(tmp_path: Path) -> None:
    texts, saved = tmp_path / "t.txt", tmp_path / "v.npy"
    texts.write_text("\nTaxes are due.\n\n  \nCats sleep.\n")
    assert call("embed", "--file", texts, "--output", saved, *ON_CPU).exit_code == 0
    asked = call("search", saved, "zebra", "--file", texts, "--json", *ON_CPU)
    (result,) = json.loads(asked.stdout)["results"]
    assert sorted(m["row"] for m in result["nearest"]) == [1, 4]
    assert {m["text"] for m in result["nearest"]} == {"Taxes are due.", "Cats sleep."}


def stop_at_the_second(patch: pytest.MonkeyPatch) -> list[int]:
    """Have the second call of `Embedder.embed` interrupted; the texts of each call."""
    embed, calls = Embedder.embed, list[int]()

    def interrupted(model: Embedder, texts: list[str], **options: object) -> object:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return embed(model, texts, **options)  # type: ignore[arg-type]

    patch.setattr(Embedder, "embed", interrupted)
    return calls


def test_an_interrupted_command_goes_on(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "v.npy"
    command = ("embed", "--file", lines, "--output", saved, "--batch-size", 2, *ON_CPU)
    calls = stop_at_the_second(monkeypatch)
    assert call(*command).exit_code and not saved.exists()
    calls[:] = [0, 0]
    done = call(*command)
    assert "v.npy: continues after 64 of 150 texts" in done.stderr and calls[2:] == [64, 22]
    whole = ct.load(ON_CPU[1], device="cpu").encode(TEXTS, 2)
    np.testing.assert_allclose(np.load(saved), whole, atol=1e-6)
    assert {f.name for f in tmp_path.iterdir()} == {"v.npy", "lines.txt"}


def stop_at_few(patch: pytest.MonkeyPatch) -> None:
    """Have an Embedder interrupted at fewer than 64 texts, as the last ones of a file are."""
    embed = Embedder.embed

    def interrupted(model: Embedder, texts: list[str], **options: object) -> object:
        if len(texts) < 64:
            raise KeyboardInterrupt
        return embed(model, texts, **options)  # type: ignore[arg-type]

    patch.setattr(Embedder, "embed", interrupted)


def test_a_command_that_goes_on_counts_the_texts_that_were_cut_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, saved = tmp_path / "lines.txt", tmp_path / "v.npy"
    lines.write_text("storm " * 90 + "\n" + "short\n" * 70 + "storm " * 80 + "\n")
    command = ("embed", "--file", lines, "--output", saved, "--batch-size", 2, *ON_CPU)
    with monkeypatch.context() as patch:
        stop_at_few(patch)
        assert call(*command).exit_code and not saved.exists()
    done = call(*command)
    assert "continues after 64 of 72 texts" in done.stderr
    assert "embed: 2 of 72 texts were cut at 48 tokens" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_command_that_was_killed_goes_on(tmp_path: Path) -> None:
    lines, saved = tmp_path / "lines.txt", tmp_path / "v.npy"
    texts = [f"{'rain ' * (n % 40)}light {n}" for n in range(6000)]
    lines.write_text("\n".join(texts) + "\n")
    command = ["embed", "--file", str(lines), "--output", str(saved), *map(str, ON_CPU)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    note = Path(f"{saved}.part.note")

    def saved_bytes() -> int:
        """Of the header and the rows; 0 while the note is not there, or not written whole."""
        first = note.read_text().partition("\n")[0] if note.exists() else ""
        return int(first) if first.isdigit() else 0

    with subprocess.Popen(
        [sys.executable, "-m", "centella", *command, "--batch-size", "1"], env=environment
    ) as running:
        while running.poll() is None and saved_bytes() <= 128:
            time.sleep(0.01)
        running.kill()
    assert running.returncode == -signal.SIGKILL and not saved.exists()
    done = call(*command, "--batch-size", 64)
    before = int(re.findall(r"continues after ([\d,]+) of 6,000", done.stderr)[0].replace(",", ""))
    assert 0 < before < 6000
    whole = ct.load(ON_CPU[1], device="cpu").encode(texts, 64)
    np.testing.assert_allclose(np.load(saved), whole, atol=1e-6)
    assert {f.name for f in tmp_path.iterdir()} == {"v.npy", "lines.txt"}


@pytest.mark.devices("webgpu")
def test_rows_of_two_devices_are_not_mixed(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch, device: ct.Device
) -> None:
    saved = tmp_path / "v.npy"
    command = ("embed", "--file", lines, "--output", saved, "--batch-size", 2, "--model", TINY)
    with monkeypatch.context() as patch:
        stop_at_few(patch)
        patch.setattr(embed_command, "SECONDS", 0.0)  # 64 texts at a time
        assert call(*command, "--device", "cpu").exit_code and not saved.exists()
    called = f"device 'cpu {platform.machine()}', now 'webgpu "
    assert called in failed(*command, "--device", device.name)
    assert "continues after 128 of 150" in call(*command, "--device", "cpu").stderr


def test_rows_of_other_weights_are_not_mixed(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder keeps its name, and the file of weights its size and time."""
    saved, folder = tmp_path / "v.npy", tmp_path / "model"
    shutil.copytree(TINY, folder)
    weights = folder / "model.safetensors"
    content, seen = weights.read_bytes(), weights.stat()
    command = ("embed", "--file", lines, "--output", saved, "--batch-size", 2, "--model", folder)
    with monkeypatch.context() as patch:
        stop_at_few(patch)
        patch.setattr(embed_command, "SECONDS", 0.0)  # 64 texts at a time
        assert call(*command, "--device", "cpu").exit_code and not saved.exists()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    text = failed(*command, "--device", "cpu")
    assert re.search(r"\(model\.safetensors '([\d,]+ bytes), CRC \w+', now '\1, CRC \w+'\)", text)
    weights.write_bytes(content)
    assert "continues after 128 of 150" in call(*command, "--device", "cpu").stderr


def test_rows_of_a_file_that_has_changed_are_told_by_its_date(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("embed", "--file", lines, "--output", tmp_path / "v.npy", "--batch-size", 2, *ON_CPU)
    os.utime(lines, ns=(0, 1_767_225_599_000_000_700))
    with monkeypatch.context() as patch:
        stop_at_the_second(patch)
        assert call(*command).exit_code
    os.utime(lines, ns=(0, 1_767_225_599_000_000_800))  # in the same second
    before, now = (f"'2025-12-31 23:59:59.000000{n}00 UTC'" for n in (7, 8))
    assert f"(changed {before}, now {now}); finish that one" in failed(*command)
    os.utime(lines, ns=(0, 1_767_225_599_000_000_700))
    assert "continues after 64 of 150" in call(*command).stderr


def test_more_texts_at_a_time_where_they_take_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, calls = tmp_path / "lines.txt", []
    lines.write_text("a\n" * 1000)
    embed = Embedder.embed

    def counted(model: Embedder, texts: list[str], **options: object) -> object:
        calls.append(len(texts))
        return embed(model, texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Embedder, "embed", counted)
    command = ("embed", "--file", lines, "--output", tmp_path / "v.npy", "--batch-size", 2, *ON_CPU)
    monkeypatch.setattr(embed_command, "AT_MOST", 256)
    for seconds, sizes in ((60.0, [64, 128, 256, 256, 256, 40]), (0.0, [64] * 15 + [40])):
        monkeypatch.setattr(embed_command, "SECONDS", seconds)
        call(*command)
        assert calls == sizes
        calls.clear()


def test_exact_is_an_option(tmp_path: Path, lines: Path) -> None:
    saved = tmp_path / "v.npy"
    call("embed", "--file", lines, "--output", saved, "--exact", *ON_CPU)
    model = ct.load(ON_CPU[1], device="cpu")
    np.testing.assert_array_equal(np.load(saved)[7], model.encode(TEXTS[7], exact=True))


def test_search_says_what_is_wrong(tmp_path: Path, lines: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones((2, 5), np.float32))
    other = failed("search", tmp_path / "v.npy", "a", *ON_CPU)
    assert "has vectors of 5 numbers" in other and "name with --model what embedded it" in other
    few = failed("search", tmp_path / "v.npy", "a", "--file", lines, *ON_CPU)
    assert "a line for each of the 2 rows" in few and few.endswith("got 150")
    assert "expected a file of .npy" in failed("search", lines, "a", *ON_CPU)
    absent = failed("search", tmp_path / "no.npy", "a", *ON_CPU)
    assert absent.endswith("no.npy: no such file or directory")


def test_a_long_line_is_found_by_its_last_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a row for each piece, in a run that is interrupted, too."""
    pytest.importorskip("pyarrow")
    words = (TINY / "vocab.txt").read_text().split()[200:400]
    long = " ".join(f"{words[n]} {words[n + 1]}." for n in range(0, 120, 2))
    lines = [" ".join(words[n : n + 5]) for n in range(120, 190, 5)]
    file, saved = tmp_path / "lines.txt", tmp_path / "v.parquet"
    file.write_text("\n".join([*lines, "", long]) + "\n")
    command = ("embed", "--file", file, "--pieces", "--chunk", 8, "--overlap", 2, *ON_CPU)
    refused = failed(*command, "--output", tmp_path / "v.npy")
    assert "--pieces: expected .parquet or .arrow" in refused
    calls = stop_at_the_second(monkeypatch)
    stored = (*command, "--batch-size", 1, "--output", saved)
    assert call(*stored).exit_code and not saved.exists()
    calls[:] = [0, 0]
    assert f"continues after {embed_command.SAVED} of " in call(*stored).stderr
    asked = call("search", saved, f"{words[118]} {words[119]}.", "--top", 1, "--json", *ON_CPU)
    (best,) = json.loads(asked.stdout)["results"][0]["nearest"]
    assert best["line"] == len(lines) + 1 and best["text"].endswith(f"{words[118]} {words[119]}.")
    shown = call("search", saved, f"{words[118]} {words[119]}.", "--top", 1, *ON_CPU).stdout
    assert shown.split()[1] == str(len(lines) + 1)
    rows = json.loads(call(*command, "--json").stdout)["embeddings"]
    assert [row["line"] for row in rows[: len(lines) + 2]] == list(range(len(lines) + 2))
    assert {row["line"] for row in rows[len(lines) + 1 :]} == {len(lines) + 1} and len(rows) > 30
    vectors = ct.load(ON_CPU[1], device="cpu").encode([row["text"] for row in rows])
    np.testing.assert_allclose([row["embedding"] for row in rows], vectors, atol=1e-6)
