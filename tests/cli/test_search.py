"""`centella embed --output` of many texts, interrupted too, and `centella search` over it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import centella as ct
from centella import Embedder
from tests.cli.test_cli import ON_CPU, call, failed

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


def test_an_interrupted_command_goes_on(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "v.npy"
    command = ("embed", "--file", lines, "--output", saved, "--batch-size", 2, *ON_CPU)
    embed, calls = Embedder.embed, []

    def interrupted(*given: object, **options: object) -> object:
        calls.append(len(given[1]))  # type: ignore[arg-type]
        if len(calls) == 2:
            raise KeyboardInterrupt
        return embed(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Embedder, "embed", interrupted)
    assert call(*command).exit_code and not saved.exists()
    calls[:] = [0, 0]
    done = call(*command)
    assert "v.npy: goes on behind 64 of 150 texts" in done.stderr and calls[2:] == [64, 22]
    whole = ct.load(ON_CPU[1], device="cpu").encode(TEXTS, 2)
    np.testing.assert_allclose(np.load(saved), whole, atol=1e-6)
    assert {f.name for f in tmp_path.iterdir()} == {"v.npy", "lines.txt"}


def test_a_command_that_goes_on_counts_the_texts_that_were_cut_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, saved = tmp_path / "lines.txt", tmp_path / "v.npy"
    lines.write_text("storm " * 90 + "\n" + "short\n" * 70 + "storm " * 80 + "\n")
    command = ("embed", "--file", lines, "--output", saved, "--batch-size", 2, *ON_CPU)
    embed = Embedder.embed

    def interrupted(model: Embedder, texts: list[str], **options: object) -> object:
        if len(texts) < 64:
            raise KeyboardInterrupt
        return embed(model, texts, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "embed", interrupted)
        assert call(*command).exit_code and not saved.exists()
    done = call(*command)
    assert "goes on behind 64 of 72 texts" in done.stderr
    assert "embed: 2 of 72 texts were cut at 48 tokens" in done.stderr


def test_search_says_what_is_wrong(tmp_path: Path, lines: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones((2, 5), np.float32))
    other = failed("search", tmp_path / "v.npy", "a", *ON_CPU)
    assert "has vectors of 5 numbers" in other and "name with --model what embedded it" in other
    few = failed("search", tmp_path / "v.npy", "a", "--file", lines, *ON_CPU)
    assert "a line for each of the 2 rows" in few and few.endswith("got 150")
    assert "expected a file of .npy" in failed("search", lines, "a", *ON_CPU)
    absent = failed("search", tmp_path / "no.npy", "a", *ON_CPU)
    assert absent.endswith("no.npy: no such file or directory")
