"""`centella rank`, and the prompts and sizes of `centella embed` and `search`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import centella as ct
from tests.cli.test_cli import call, failed
from tests.support.model_common import DATA
from tests.tasks.test_classify import DOCUMENTS, with_tokenizer
from tests.tasks.test_pooling import with_head

CPU = ("--device", "cpu")


def test_texts_in_order(tmp_path: Path) -> None:
    folder = with_tokenizer("gte-rank", tmp_path)
    ranked = ct.load(folder, device="cpu", task="classify").rank("the lake", DOCUMENTS, 3)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    command = ("rank", "the lake", "--model", folder, "--top", 3, *CPU)
    shown = call(*command, "--file", lines, "--ledger")
    assert shown.stdout.splitlines() == [f"{r.score:.4f}  {r.index}  {r.text}" for r in ranked]
    assert "submissions 1" in shown.stderr
    rows = json.loads(call(*command, "--json", *DOCUMENTS).stdout)["ranked"]
    assert [(r["row"], r["text"]) for r in rows] == [(r.index, r.text) for r in ranked]
    devices = (*command[:-2], "--devices", "cpu", "--json", *DOCUMENTS)
    assert json.loads(call(*devices).stdout)["ranked"] == rows
    assert "give texts or --file, not both" in failed(*command, "a", "--file", lines)
    assert "rank: no text" in failed(*command)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(["", *DOCUMENTS, " "]))
    numbered = json.loads(call(*command, "--json", "--file", lines).stdout)["ranked"]
    assert numbered == [r | {"row": r["row"] + 1} for r in rows]  # blank lines are not ranked
    assert "expected a text that is not blank, got 2 blank" in failed(*command, "", " ")
    labels = with_tokenizer("bert-labels", tmp_path)
    refused = failed(*command, "a", "--instruction", "b")
    assert "instruction: expected none: this model reads two texts and no prompt" in refused
    assert "one label, got 3" in failed("rank", "a", "b", "--model", labels, *CPU)


def test_a_decoder_ranks_by_an_instruction() -> None:
    folder = DATA / "rerankers" / "qwen3"
    command = ("rank", "the lake", *DOCUMENTS[:3], "--model", folder, "--json", *CPU)
    rows = json.loads(call(*command, "--instruction", "Judge the style").stdout)["ranked"]
    assert "instruction: expected valid Unicode" in failed(*command, "--instruction", "\udcff")
    model = ct.load(folder, device="cpu", task="classify")
    ranked = model.rank("the lake", DOCUMENTS[:3], instruction="Judge the style")
    assert [r["row"] for r in rows] == [r.index for r in ranked]
    np.testing.assert_allclose([r["score"] for r in rows], [r.score for r in ranked], atol=1e-6)


def test_prompts_and_sizes_of_vectors(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder, saved = with_head(tmp_path), tmp_path / "v.parquet"
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    chosen = ("--model", folder, "--prompt-name", "passage", "--dim", 6, *CPU)
    assert "6 x 6 float32" in call("embed", "--file", lines, "--output", saved, *chosen).stdout
    model = ct.load(folder, device="cpu", task="embed")
    vectors = model.encode_document(DOCUMENTS, dim=6)
    asked = json.loads(call("search", saved, "storm", "--json", "--top", 6, *CPU).stdout)
    scores = vectors @ model.encode_query("storm", dim=6)
    nearest = asked["results"][0]["nearest"]
    assert [n["row"] for n in nearest] == np.argsort(-scores, kind="stable").tolist()
    assert "prompt_name: expected one of" in failed(
        "embed", "a", "--model", folder, "--prompt-name", "x", *CPU
    )
