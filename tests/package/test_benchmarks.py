"""Each benchmark that needs no GPU runs at tiny sizes, and what it times has met its bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "run.py"
TINY_BERT = ROOT / "tests" / "data" / "tiny-bert"
CHEAP = (
    "gemm --devices cpu",
    "imported --devices cpu --dtypes f16",
    "rows --devices cpu",
    "host --devices cpu",
    "search --devices cpu",
    "speech --devices cpu --dtypes f32 --rows 1",
    "transcribe --devices cpu",
    "generate --devices cpu --dtypes q8_0,q4_k --rows 1",
    "speculation --devices cpu --dtypes f32",
    f"minilm --devices cpu --model {TINY_BERT}",
    f"passages --devices cpu --dtypes f32 --model {TINY_BERT}",
    f"sentence --devices cpu --dtypes f32 --model {TINY_BERT}",
)
WITH_TORCH = ("first --devices cpu --shapes qwen3-mini", "shapes --devices cpu --dtypes f32")
COSTLY = (
    "gemv --devices cpu --dtypes f16 --rows 1",
    "bias --devices cpu --dtypes f32",
    "attention --devices cpu --dtypes f32",
    "generate --devices cpu --dtypes bf16 --rows 1 --beam 3",
    "generate --devices cpu --shapes mini-moe --rows 1",
    f"million --devices cpu --dtypes f32 --model {TINY_BERT}",
    "thin --devices webgpu --dtypes f16 --rows 1",
)
SWEEPS = (
    "sweep --devices webgpu",
    "tiles --devices webgpu",
    "mma --devices simulator --dtypes f16 --tiles 64x64x32",
    "attention-cores --devices simulator --tiles",
    "decode-sweep --devices simulator",
)


def check_rows(words: str, tmp_path: Path) -> None:
    """Run a benchmark; its rows have rates."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), *words.split(), "--small", "--rounds", "1"]
    ran = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    if "webgpu: skipped" in ran.stdout:
        pytest.skip(ran.stdout)
    rows = json.loads(report.read_text())["rows"]
    assert rows, ran.stdout
    assert all(row["rate"] > 0 for row in rows)
    if words in SWEEPS or words.startswith("thin"):  # tiles beside what is shipped
        assert len({row["who"] for row in rows}) > 1, ran.stdout


@pytest.mark.parametrize("words", [*CHEAP, *(pytest.param(s, marks=[pytest.mark.sweep])
                                             for s in (*COSTLY, *SWEEPS))])  # fmt: skip
def test_a_benchmark_runs(words: str, tmp_path: Path) -> None:
    check_rows(words, tmp_path)


@pytest.mark.parametrize("words", WITH_TORCH)
def test_a_benchmark_of_folders_that_transformers_writes_runs(words: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_rows(words, tmp_path)


def test_a_time_line_is_drawn(tmp_path: Path) -> None:
    report = tmp_path / "timeline.json"
    command = [sys.executable, str(SCRIPT), "timeline", "--small", "--devices", "cpu"]
    subprocess.run([*command, "--json", str(report)], check=True, capture_output=True)
    rows = json.loads(report.read_text())["rows"]
    drawn = ElementTree.fromstring(report.with_suffix(".svg").read_text())
    said = "".join(drawn.itertext())
    assert {row["bench"] for row in rows} > {"token", "linear"}
    assert all(f"{row['bench']}: {row['launches']} launches" in said for row in rows[1:])


def test_all_cases_in_a_budget(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "all", "--small", "--devices", "cpu", "--name", "here"]
    cases = ["--cases", "search,generate-8b", "--budget", "20.5", "--json", str(tmp_path)]
    ran = subprocess.run([*command, *cases], capture_output=True, text=True, check=True)
    assert "search, f16 5000x1 cpu: " in ran.stdout  # the table
    assert "no time was left for: --cases generate-8b" in ran.stdout
    assert json.loads((tmp_path / "here-search.json").read_text())["rows"]


def test_several_cards_are_a_case_where_they_are(tmp_path: Path) -> None:
    """Without two cards it is left out, and says so; tiny, it runs on what there is."""
    command = [sys.executable, str(SCRIPT), "all", "--devices", "cpu", "--name", "here", "--cases",
               "several", "--json", str(tmp_path), "--model", str(TINY_BERT)]  # fmt: skip
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=hidden)
    assert "several: skipped, no device for it is here" in ran.stdout
    ran = subprocess.run([*command, "--small"], capture_output=True, text=True, check=True)
    assert "encode on several, MiniLM f16 200 cpu: " in ran.stdout, ran.stdout


def test_rows_are_written_as_they_come(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "search", "--small", "--devices", "cpu"]
    subprocess.run([*command, "--budget", "0", "--json", str(report)], check=True)
    assert len(json.loads(report.read_text())["rows"]) == 1


def test_without_llama_cpp_a_row_says_why(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "llama", "--small", "--rows", "1"]
    nowhere = ["--llama", str(tmp_path / "none"), "--json", str(report)]
    subprocess.run([*command, *nowhere], check=True)
    (row,) = json.loads(report.read_text())["rows"]
    assert row["skipped"] == f"nothing is at {tmp_path / 'none'}"
