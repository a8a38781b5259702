"""Figures of README and docs/performance.md are those of committed runs of `benchmarks/run.py`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
SQUARE, ODD = (4096, 4096, 4096), (4097, 4093, 4099)
DEVICES = ("cuda", "webgpu")


@functools.cache
def rows_of(run: str) -> dict[tuple[str, tuple[int | str, ...], str], dict[str, Any]]:
    """The rows of a run by bench, shape and who; those of the CPU may be a run of their own."""
    paths = (ROOT / "benchmarks" / "results" / f"{name}.json" for name in (run, f"{run}-cpu"))
    rows = [row for p in paths if p.exists() for row in json.loads(p.read_text("utf-8"))["rows"]]
    return {(r["bench"], tuple(r["shape"]), r["who"]): r for r in rows}


@dataclass(frozen=True)
class Source:
    """Where a line of a table is from: for each of its cells, who has the numbers.

    Attributes:
        milliseconds: seconds a round, for a rate.
    """

    run: str
    bench: str
    shape: tuple[int | str, ...]
    cells: tuple[tuple[str, ...], ...]
    milliseconds: bool = False

    def numbers(self) -> Iterator[list[float]]:
        """The numbers of each cell."""
        for cell in self.cells:
            rows = (rows_of(self.run)[self.bench, self.shape, who] for who in cell)
            yield [1e3 * r["seconds"] if self.milliseconds else r["rate"] for r in rows]


def speed(run: str, bench: str, shape: tuple[int, ...], *peers: str, ms: bool = False) -> Source:
    return Source(f"h200-{run}", bench, shape, (*((d,) for d in DEVICES), peers), ms)


def cores(run: str, bench: str, shape: tuple[int, ...], who: str, peer: str) -> Source:
    """A line of what WebGPU has not."""
    return Source(f"h200-{run}", bench, shape, ((who,), (), (peer,)))


def floor(bench: str, shape: tuple[int, ...]) -> Source:
    cells = (("cpu",), ("webgpu",), ("cuda",))
    return Source("h200-floor", bench, shape, cells)


LONG, CORES = (1, 32, 8192, 128), ("as chosen", "torch SDPA")
WHISPER = ("transformers", "transformers, graph")
FFN, ONE_ROW, SOUND = (36, 1, 2560, 9728), (1, 1536, 1536), (1, 80, 3000)
PERFORMANCE = {
    "f32 product 4096 x 4096 x 4096": speed("gemm", "gemm f32", SQUARE, "cublas"),
    "f32 product 4097 x 4093 x 4099": speed("gemm", "gemm f32", ODD, "cublas"),
    "bf16 product 4096": cores("mma", "mma bf16", SQUARE, "cuda as chosen", "cublas"),
    "bf16 product 8192": cores("mma", "mma bf16", (8192,) * 3, "cuda as chosen", "cublas"),
    "bf16 attention, 32 heads": cores("attention-cores", "attention long bf16", LONG, *CORES),
    "bf16 attention, the same": cores(
        "attention-cores", "attention long, causal bf16", LONG, *CORES
    ),
    "f16 attention, as many": cores("attention-cores", "attention long f16", LONG, *CORES),
    "f16 attention, causal": cores("attention-cores", "attention long, causal f16", LONG, *CORES),
    "f16 decoding": speed(
        "decode", "attention, 8 heads of keys, f16 decode", (1, 32, 1, 32768, 128), "torch"
    ),
    "product of 16 rows": speed("gemv", "gemv f16", (16, 14336, 4096), "cublas", "read"),
    "MiniLM f16, one sentence": speed("minilm", "MiniLM f16", (1, 16), "transformers", ms=True),
    "encoder in the shape": speed("encoder", "Whisper encoder f16", (1,), *WHISPER),
    "the same encoder": speed("encoder", "Whisper encoder f16", (8,), *WHISPER),
    "MiniLM f32, 512 x 128": speed("minilm", "MiniLM f32", (512, 128), "transformers"),
    "MiniLM f32, 32 x 128": speed("minilm", "MiniLM f32", (32, 128), "transformers"),
    "MiniLM f16, 512 x 128": speed("minilm", "MiniLM f16", (512, 128), "transformers"),
    "product of one row, f16": speed("gemv", "gemv f16", (1, 14336, 4096), "cublas", "read"),
    "MiniLM f32, one sentence": speed("minilm", "MiniLM f32", (1, 16), "transformers", ms=True),
    "`centella embed hello`": speed("start", "centella embed, first, wall", (1,), "cpu"),
    "the same, a second time": speed("start", "centella embed, again, wall", (1,), "cpu"),
    "an operation of a replay": speed("host", "replay", (200,)),
}
README_ALONE = {  # the page has these rows in tables of other columns
    "Qwen3 4B in bf16": Source(
        "h200-generate",
        "decode",
        ("4b", 1),
        (("cuda bf16",), ("webgpu bf16",), ("transformers bf16",)),
    ),
    "Whisper large-v3-turbo": Source(
        "h200-speech", "decode", ("turbo", 1), (("cuda f16",), (), ("transformers f16",))
    ),
}
CUDA = ("cuda", "cuda bf16", "cuda f16", "all 2")
H100 = {  # file, bench, first of the shape, who has the second number
    "MiniLM f16, 512": ("minilm", "MiniLM f16", 512, "transformers"),
    "MiniLM f16, one": ("sentence", "one sentence, text to vector", 1, "transformers"),
    "bge-m3's": ("shapes", "bge-m3", 32, "torch.compile"),
    "ModernBERT": ("shapes", "modernbert", 64, "torch.compile"),
    "bge-reranker": ("shapes", "reranker", 100, "torch.compile"),
    "Qwen3 0.6B in": ("generate", "decode", "0.6b", "transformers bf16"),
    "Qwen3 4B in": ("generate", "decode", "4b", "transformers bf16"),
    "Qwen3 4B, prompt": ("generate", "prefill 512", "4b", "transformers bf16"),
    "Qwen3 4B, host": ("generate", "host, a step", "4b", ""),
    "Qwen3 30B-A3B in": ("generate-moe", "decode", "30b-a3b", ""),
    "Qwen3 30B-A3B, a prompt": ("generate-moe", "prefill 512", "30b-a3b", ""),
    "Whisper large-v3,": ("transcribe", "file to text", "large-v3", "transformers f16"),
    "Whisper large-v3-turbo": ("transcribe", "file to text", "turbo", "transformers f16"),
    "Whisper tiny": ("transcribe", "file to text", "tiny", "transformers f16"),
    "search among": ("search-1e7", "search, f16", 1, "torch"),
    "the same, 64": ("search-1e7", "search, f16", 64, "torch"),
    "a million": ("million", "million: file to file", 1000000, "transformers"),
    "40 000": ("several", "encode on several, f16", 40000, "cuda:0"),
    "Qwen3 0.6B, first": ("first", "qwen3-0.6b, first token, again", 1, "transformers"),
    "Qwen3 4B, first": ("first", "qwen3-4b, first token, again", 1, "transformers"),
    "the same, first text": ("first-text", "whisper-tiny, first text, again", 1, "transformers"),
}
FLOOR = {
    "feed-forward layers of Qwen3-4B": (floor("ffn: programs compiled in all", FFN),),
    "the same: compiled in the second": (floor("ffn: compiled in the second pass", FFN),),
    "the same: submissions": (
        floor("ffn: submissions, a batch a layer", FFN),
        floor("ffn: submissions, one batch", FFN),
    ),
    "product 1 x 1536 x 1536": (floor("cached: beyond the kernel, weight kept", ONE_ROW),),
    "the same, weight sent": (floor("cached: a call, weight sent with it", ONE_ROW),),
    "Whisper tiny's encoder": (floor("encoder: transfers", SOUND),),
    "the same: host to host": (floor("encoder: a forward pass, host to host", SOUND),),
}


def table(header: str, page: str = PAGE) -> dict[str, list[str]]:
    """The lines of a table of a page by their first cell."""
    below = page.partition(f"\n| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in below)
    return {first: rest for first, *rest in cells}


def numbers(cell: str) -> list[str]:
    """The numbers of a cell, thousands joined; those of a name (f32) are none."""
    joined = re.sub(r"(?<=\d) (?=\d{3}\b)", "", cell)
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?", joined)


def check(printed: list[str], measured: list[float], where: str) -> None:
    """Equal as far as they are printed, and to three digits."""
    assert len(printed) == len(measured), where
    for text, value in zip(printed, measured, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2])
        assert abs(float(text) - value) <= max(unit / 2, 0.005 * value), f"{where}: {value}"


def row_of(rows: dict[str, list[str]], start: str) -> list[str]:
    (row,) = (cells for first, cells in rows.items() if first.startswith(start))
    return row


def test_readme_shows_rows_of_the_page() -> None:
    rows = table("work", README)
    assert len(rows) == 5
    shared = rows.keys() & table("work").keys()
    assert len(shared) == 5 - len(README_ALONE)
    for name in shared:
        assert table("work")[name] == rows[name]


@pytest.mark.parametrize("start", README_ALONE)
def test_readme_shows_rows_of_a_run(start: str) -> None:
    cells = row_of(table("work", README), start)
    for cell, measured in zip(cells, README_ALONE[start].numbers(), strict=True):
        check(numbers(cell), measured, f"{start}: {cell}")


@pytest.mark.parametrize("start", PERFORMANCE)
def test_performance(start: str) -> None:
    cells = row_of(table("work"), start)
    for cell, measured in zip(cells, PERFORMANCE[start].numbers(), strict=True):
        check(numbers(cell), measured, f"{start}: {cell}")


@pytest.mark.parametrize("start", H100)
def test_on_an_h100(start: str) -> None:
    run, bench, size, peer = H100[start]
    cells = row_of(table("on an H100"), start)
    for cell, names in zip(cells, (CUDA, (peer,)), strict=True):
        measured = [
            row["rate"]
            for (of, shape, who), row in rows_of(f"h100-{run}").items()
            if who in names and (of == "million: file to vectors" or (
                of == bench and size in (shape[0], shape[-1])))
        ]  # fmt: skip
        check(numbers(cell), measured, f"{start}: {cell}")


@pytest.mark.parametrize("start", FLOOR)
def test_beside_the_floor(start: str) -> None:
    theirs, *ours = row_of(table("claim"), start)
    rows = [rows_of(s.run)[s.bench, s.shape, "cpu"] for s in FLOOR[start]]
    stated = [row["theirs"] for row in rows if row["theirs"] is not None]
    check(numbers(theirs), stated, f"{start}: theirs")
    parts = zip(*(source.numbers() for source in FLOOR[start]), strict=True)
    for cell, measured in zip(ours, parts, strict=True):
        check(numbers(cell), [n for part in measured for n in part], f"{start}: {cell}")


def test_every_figure_has_its_source() -> None:
    for header, sources in (("work", PERFORMANCE), ("claim", FLOOR), ("on an H100", H100)):
        rows = table(header)
        assert len(rows) == len(sources)
        assert all(sum(first.startswith(s) for s in sources) == 1 for first in rows)
