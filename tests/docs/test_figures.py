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
    names = (run, f"{run}-cpu")
    paths = (ROOT / "benchmarks" / "results" / f"{name}.json" for name in names)
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
    "MiniLM f16, one sentence of": speed("minilm", "MiniLM f16", (1, 16), "transformers", ms=True),
    "MiniLM f16, one sentence, text": speed(
        "sentence", "one sentence, text to vector", (1,), "transformers"
    ),
    "the same, one call after the other": speed("sentence", "the same, alone", (1,)),
    "bge-m3's": cores("shapes", "bge-m3", (32, 512), "cuda", "torch.compile"),
    "ModernBERT-base's": cores("shapes", "modernbert", (64, 512), "cuda", "torch.compile"),
    "bge-reranker-v2-m3's": cores("shapes", "reranker", (100, 256), "cuda", "torch.compile"),
    "MiniLM f32, 512 x 128": speed("minilm", "MiniLM f32", (512, 128), "transformers"),
    "MiniLM f32, 32 x 128": speed("minilm", "MiniLM f32", (32, 128), "transformers"),
    "MiniLM f16, 512 x 128": speed("minilm", "MiniLM f16", (512, 128), "transformers"),
    "product of one row, f16": speed("gemv", "gemv f16", (1, 14336, 4096), "cublas", "read"),
    "MiniLM f32, one sentence": speed("minilm", "MiniLM f32", (1, 16), "transformers", ms=True),
    "`centella embed hello`": speed("start", "centella embed, first, wall", (1,), "cpu"),
    "the same, a second time": speed("start", "centella embed, again, wall", (1,), "cpu"),
    "an operation of a replay": speed("host", "replay", (200,)),
}
PEER, COMPILED = "transformers bf16", "transformers f16, compiled"
README_ALONE = {  # the page has these rows in tables of other columns
    "Qwen3 4B in bf16": Source(
        "h200-generate",
        "decode",
        ("4b", 1),
        (("cuda bf16",), ("webgpu bf16",), ("transformers bf16",)),
    ),
    "Whisper large-v3-turbo": Source(
        "h200-speech", "decode", ("turbo", 1), (("cuda f16",), (), (COMPILED,))
    ),
}
CUDA = ("cuda", "all 2")
H100 = {  # file, bench, first of the shape, who has the second number
    "search among": ("search-1e7", "search, f16", 1, "torch"),
    "the same, 64": ("search-1e7", "search, f16", 64, "torch"),
    "a million": ("million", "million: file to file", 1000000, "transformers"),
    "40 000": ("several", "encode on several, f16", 40000, "cuda:0"),
}
GREEDY, DRAWN, SERVED = "decode", "decode, sampled", "served, prefill included"
TOLD, ALONE = "window to states", "window to keys and values"


def decoder(bench: str, size: str, *peers: str) -> Source:
    """A line of decoders: both devices, a peer."""
    own = tuple((f"{device} bf16",) for device in DEVICES)
    return Source("h200-generate", bench, (size, 1), (*own, peers))


def batches(run: str, bench: str, size: str, who: str) -> tuple[Source, ...]:
    """A line of several sequences: a cell for each number of them."""
    return tuple(Source(run, bench, (size, n), ((who,),)) for n in (4, 8, 16, 64))


def speech(bench: str, size: str, *peers: str) -> tuple[Source, ...]:
    """A line of speech: in each cell one window, and eight."""
    own = tuple((f"{device} f16",) for device in DEVICES)
    return tuple(Source("h200-speech", bench, (size, n), (*own, peers)) for n in (1, 8))


AFTER, AROUND = "decode after 1024", "decode after 924"
DECODERS = {
    "0.6B, most": decoder(GREEDY, "0.6b", PEER),
    "0.6B, drawn": decoder(DRAWN, "0.6b"),
    "0.6B, requests": decoder(SERVED, "0.6b"),
    "4B, most": decoder(GREEDY, "4b", PEER),
    "4B, drawn": decoder(DRAWN, "4b"),
    "4B, requests": decoder(SERVED, "4b"),
    "8B, most": Source("h200-generate-8b", GREEDY, ("8b", 1), (("cuda bf16",), (), (PEER,))),
    "8B, prompt": Source(
        "h200-generate-8b", "prefill 512", ("8b", 1), (("cuda bf16",), (), (PEER,))
    ),
    "0.6B, prompt": decoder("prefill 512", "0.6b", PEER),
    "4B, prompt": decoder("prefill 512", "4b", PEER),
}
BATCHES = {
    "0.6B": batches("h200-generate-batches", AFTER, "0.6b", "cuda bf16"),
    "0.6B, transformers": batches("h200-generate-batches", AFTER, "0.6b", PEER),
    "4B": batches("h200-generate-batches", AFTER, "4b", "cuda bf16"),
    "4B, transformers": batches("h200-generate-batches", AFTER, "4b", PEER),
}
EXPERTS = {
    name: Source("h200-generate-moe", bench, ("30b-a3b", n), tuple((f"{d} bf16",) for d in DEVICES))
    for name, bench, n in (
        ("one sequence, tokens/s", GREEDY, 1),
        ("16 sequences, tokens/s in all", GREEDY, 16),
        ("a prompt of 512 tokens, ms", "prefill 512", 1),
        ("16 prompts of 512 tokens, ms", "prefill 512", 16),
    )
}
SPEECH = {
    "encoder of large-v3, ms": speech(TOLD, "large-v3", "transformers f16"),
    "sound to keys and values, large-v3, ms": speech(ALONE, "large-v3"),
    "decoding, large-v3, tokens/s": speech(GREEDY, "large-v3", COMPILED),
    "decoding, large-v3-turbo, tokens/s": speech(GREEDY, "turbo", COMPILED),
    "decoding, tiny, tokens/s": speech(GREEDY, "tiny", COMPILED),
}
FILES = {
    name: Source("h200-transcribe", bench, shape, ((f"cuda{kind}",), (peer,)))
    for name, bench, shape, kind, peer in (
        ("large-v3", "file to text", ("large-v3", 16), " f16", "transformers f16"),
        ("large-v3-turbo", "file to text", ("turbo", 16), " f16", "transformers f16"),
        ("tiny", "file to text", ("tiny", 16), " f16", "transformers f16"),
        ("spectrograms alone, ms", "log-mel", (20, 480000), "", "transformers, from the host"),
    )
}
LONG_TEXTS = {
    f"{name.format(f'{n // 1000} {n % 1000}')}": Source(
        "h200-generate-long", f"{bench} {n}", ("4b", 1), (("cuda bf16",), (PEER,))
    )
    for name, bench in (
        ("tokens/s after {} tokens", "decode after"), ("a prompt of {} tokens, ms", "prefill"),
        ("40 more tokens after {}, ms", "40 more tokens after"),
    )
    for n in (8192, 32768)
}  # fmt: skip
ON_A_CPU = {
    name: Source(
        "cpu-generate", bench, ("0.6b", 1),
        (("cpu f32",), ("cpu bf16",), ("cpu q8_0",), ("cpu q4_k",), ("transformers f32", PEER)),
    )
    for name, bench in (
        ("tokens/s after 64 tokens", "decode after 64"),
        ("a prompt of 64 tokens, ms", "prefill 64"),
    )
}  # fmt: skip
NAMED: dict[str, dict[str, Any]] = {  # by the first cell of a table's head
    "sequences": BATCHES, "30B-A3B": EXPERTS, "Whisper": SPEECH, "ten minutes": FILES,
    "4B and long texts": LONG_TEXTS, "0.6B on a CPU": ON_A_CPU,
}  # fmt: skip
BEAMS = ("five beams beside greedy, large-v3, times as long", "the same, large-v3-turbo")
BEAM, SEVERAL = "beam 5, a window's text", "encode on several, f16"
MISSED: dict[str, list[tuple[Any, ...]]] = {  # run, bench, shape, who; and beside whom
    "MiniLM f16, sentences/s": [("h200-minilm", "MiniLM f16", (512, 128), "cuda")],
    "one sentence, text to vector, in turn and alone, ms": [
        ("h200-sentence", bench, (1,), "cuda")
        for bench in ("one sentence, text to vector", "the same, alone")
    ],
    "bge-m3, ModernBERT beside torch.compile": [
        ("h200-shapes", "bge-m3", (32, 512), "cuda", "torch.compile"),
        ("h200-shapes", "modernbert", (64, 512), "cuda", "torch.compile"),
    ],
    "two cards beside one, MiniLM (two H100)": [
        ("h100-several", SEVERAL, (40000,), "all 2", "cuda:0"),
    ],
}
MISSED["five beams beside greedy through WebGPU, large-v3 and turbo"] = [
    ("h200-speech", BEAM, (size, 1), "webgpu f16") for size in ("large-v3", "turbo")
]
MISSED["16 sequences of 4B, then 64, two hosts, tokens/s"] = [
    (run, bench, ("4b", n), "cuda bf16")
    for n in (16, 64)
    for run, bench in (("h200-generate-batches", AFTER), ("h200-batches-4b", AROUND))
]
MISSED["five beams beside greedy, eight windows of turbo"] = [
    ("h200-speech", BEAM, ("turbo", 8), "cuda f16")
]
# Operations of a token of 4B in a layer: its products, and causal attention over 8 192 / 2 keys.
PRODUCTS, ATTENTION = 2 * 2560 * (6144 + 4096 + 3 * 9728), 4 * 32 * 128 * 8192 // 2
MISSED["encoder of large-v3, eight windows, two hosts, ms"] = [
    (run, TOLD, ("large-v3", 8), "cuda f16") for run in ("h200-speech", "h200-speech-other")
]
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


@pytest.mark.parametrize("start", DECODERS)
def test_decoders(start: str) -> None:
    cells = row_of(table("work", PAGE.partition("## Decoders on a GPU")[2]), start)
    for cell, measured in zip(cells, DECODERS[start].numbers(), strict=True):
        check(numbers(cell), measured, f"{start}: {cell}")


@pytest.mark.parametrize(
    ("header", "name"),
    [(header, name) for header, rows in NAMED.items() for name in rows],
)
def test_tables_whose_rows_are_named(header: str, name: str) -> None:
    """A cell has the numbers of one source after the other, or each cell those of its own."""
    sources, cells = NAMED[header][name], table(header)[name]
    if isinstance(sources, Source):
        measured = list(sources.numbers())
    elif header == "sequences":
        measured = [n for source in sources for n in source.numbers()]
    else:
        parts = zip(*(source.numbers() for source in sources), strict=True)
        measured = [[n for part in cell for n in part] for cell in parts]
    for cell, wanted in zip(cells, measured, strict=True):
        check(numbers(cell), wanted, f"{name}: {cell}")


def test_quantised_weights() -> None:
    for name, cells in table("4B").items():
        format = name.partition(",")[0].lower()
        rows = rows_of("h200-generate-quantized") | rows_of("h200-generate-k")
        benches = ((GREEDY, 1), (GREEDY, 16), ("prefill 512", 1))
        for cell, (bench, n) in zip(cells, benches, strict=True):
            row = rows.get((bench, ("4b", n), f"cuda {format}"))
            check(numbers(cell), [row["rate"]] if row else [], f"{name}: {cell}")


@pytest.mark.parametrize(("name", "size"), [(BEAMS[0], "large-v3"), (BEAMS[1], "turbo")])
def test_beams(name: str, size: str) -> None:
    rows = rows_of("h200-speech")
    for cell, device in zip(table("Whisper")[name], DEVICES, strict=False):
        key = [("beam 5, a window's text", (size, n), f"{device} f16") for n in (1, 8)]
        check(numbers(cell), [rows[k]["of greedy"] for k in key], f"{name}: {cell}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3 0.6B", "qwen3-0.6b, first token"), ("Qwen3 4B", "qwen3-4b, first token"),
        ("Whisper tiny, the text of 30 s", "whisper-tiny, first text"),
    ],
)  # fmt: skip
def test_the_first_token(name: str, kind: str) -> None:
    rows = rows_of("h200-first") | rows_of("h200-first-text")
    first, again = kind, f"{kind}, again"
    sources = ((first, "cuda"), (again, "cuda"), (again, "transformers"))
    cells = table("first token")[name]
    for cell, (bench, who) in zip(cells, sources, strict=True):
        check(numbers(cell), [rows[bench, (1,), who]["rate"]], f"{name}: {cell}")


def test_a_long_prompt_beside_its_products() -> None:
    row = rows_of("h200-generate-long")["prefill 8192", ("4b", 1), "cuda bf16"]
    (text,) = (x for x in PAGE.split("\n\n") if x.startswith("The products of a prompt of 8 192"))
    measured = [row["products_ms"], row["share"] * (PRODUCTS + ATTENTION) / PRODUCTS]
    check(numbers(text.replace("8 192", "").replace("8 bits", "")), measured, text)


def test_bars_that_are_missed() -> None:
    rows = table("on an H200")
    assert rows.keys() == MISSED.keys()
    for name, (_, cell) in rows.items():
        measured = []
        for run, bench, shape, who, *peer in MISSED[name]:
            row = rows_of(run)[bench, shape, who]
            beside = rows_of(run)[bench, shape, peer[0]]["rate"] if peer else 1
            measured.append(row.get("of greedy", row["rate"]) / beside)
        check(numbers(cell), measured, name)


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
    for header, named in NAMED.items():
        assert table(header).keys() - set(BEAMS) == named.keys()
