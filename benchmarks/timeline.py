"""One token of a decoder, launch by launch: each kernel's share of the byte limit, and the rest.

Launches are timed one at a time by the device, so that none overlaps the next and each has what a
launch costs by itself: their sum is more than a token takes as it is run. Bytes are what the plan
says that a launch reads and writes, of a table of embeddings the rows that are read. The picture
has the whole token, and one layer in order of time; dark is what the bytes take at the rate at
which the card reads, light what the kernel takes beyond.

    python benchmarks/run.py timeline --devices cuda --json results/h200-timeline.json
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from generate import PROMPT, model_of
from measure import READ, Row, cost, timed
from msgspec import Struct

import centella as ct
from centella.tasks.generate.sampling import Sampling
from centella.tasks.generate.session import Session

ROUNDS, TOKENS = 5, 32
MOVED = re.compile(r" reads ([\d,]+), writes ([\d,]+) bytes$")
COLOURS = ("#0a7d55", "#2a6fb0", "#b0562a", "#7a4fa3", "#8a7d1a", "#5a5a5a")
WIDTH, LEFT, BAR = 900, 12, 30


class Launch(Struct, frozen=True):
    """One launch of a token.

    Attributes:
        micros: of device time; nbytes: that it reads and writes.
    """

    kernel: str
    micros: float
    nbytes: int

    @property
    def limit(self) -> float:
        """Microseconds that its bytes take."""
        return 1e6 * self.nbytes / READ


def timeline(args: argparse.Namespace) -> Iterator[Row]:
    """A row for a token, and one for each of its kernels; with `--json` a picture beside it."""
    sizes = args.shapes.split(",") if args.shapes else ["mini"] if args.small else ["4b", "0.6b"]
    parts: list[tuple[str, float, list[Launch]]] = []
    for size, name in product(sizes, args.devices):
        for dtype in (args.dtypes or "bf16").split(","):
            who = f"{name} {dtype}"
            micros, launches = token(model_of(size, ct.device(name), dtype), args.small)
            parts.append((f"Qwen3 {size.upper()}, {who}", micros, launches))
            for row in rows_of(micros, launches):
                yield {"who": who, "shape": (size, 1), **row}
            if args.json:
                Path(args.json).with_suffix(".svg").write_text(picture(parts))


def token(model: Any, small: bool) -> tuple[float, list[Launch]]:
    """Microseconds of a token as it is run, and its launches, each the median of some tokens."""
    prompt, tokens = (16, 4) if small else (PROMPT, TOKENS)
    session = Session(model, 1, prompt + (ROUNDS + 3) * tokens)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (1, prompt)).tolist()
    session.start(ids)
    session.choose_by(Sampling(), ids)
    seconds = timed(lambda: list(session.run(tokens)), ROUNDS)
    micros = cost(seconds, 1e6 / tokens)["rate"]
    timings = [launches_of(session) for _ in range(ROUNDS)]
    moved = moved_of(model.device.compile(session.likeliest).explain())
    medians = np.median([[took for _, took in timing] for timing in timings], axis=0)
    launches = []
    # As a part of a capture a step copies its token in one more launch, the last.
    for (kernel, _), took, (reads, writes) in zip(timings[0], medians, moved, strict=False):
        nbytes = writes + (writes if "embedding" in kernel else reads)  # of a table a few rows
        launches.append(Launch(kernel, float(took), nbytes))
    return micros, launches


def launches_of(session: Session) -> list[tuple[str, float]]:
    """Kernel and microseconds of each launch of a step, in order."""
    with ct.ledger(timing=True) as led:
        list(session.run(1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        led.trace(file)
        events = json.loads(file.read_text())["traceEvents"]
    return [(e["name"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] == "kernel"]


def moved_of(explained: str) -> list[tuple[int, int]]:
    """Bytes that each launch of a plan reads, and writes."""
    lines = (MOVED.search(line) for line in explained.splitlines())
    both = (line.groups() for line in lines if line is not None)
    return [(int(r.replace(",", "")), int(w.replace(",", ""))) for r, w in both]


def rows_of(micros: float, launches: Sequence[Launch]) -> Iterator[Row]:
    """The token, and its kernels, the longest first."""
    limit = sum(launch.limit for launch in launches)
    alone = sum(launch.micros for launch in launches)
    base: Row = {"unit": "us", "of": "the byte limit"}
    yield {**base, "bench": "token", "rate": micros, "worst_decile": micros,
           "share": limit / micros, "limit_us": limit, "launches": len(launches),
           "apart_us": alone, "floor_us": min(launch.micros for launch in launches)}  # fmt: skip
    for kernel, several in by_kernel(launches):
        took, least = (sum(getattr(n, what) for n in several) for what in ("micros", "limit"))
        yield {**base, "bench": kernel, "rate": took, "worst_decile": took, "limit_us": least,
               "share": least / took if took else 0.0, "launches": len(several)}  # fmt: skip


def by_kernel(launches: Sequence[Launch]) -> list[tuple[str, list[Launch]]]:
    """Launches by kernel, the one that takes longest first."""
    kinds: dict[str, list[Launch]] = {}
    for launch in launches:
        kinds.setdefault(launch.kernel, []).append(launch)
    return sorted(kinds.items(), key=lambda kind: -sum(n.micros for n in kind[1]))


def layer_of(launches: Sequence[Launch]) -> list[Launch]:
    """The launches of a layer in the middle: those from one kernel of attention to the next."""
    names = [launch.kernel for launch in launches]
    first = next((n for n in names if "attend" in n or "attention" in n), names[0])
    at = [i for i, name in enumerate(names) if name == first]
    middle = len(at) // 2
    end = at[middle + 1] if middle + 1 < len(at) else len(names)
    return list(launches[at[middle] : end])


# -- the picture -----------------------------------------------------------------------------------


def picture(parts: Sequence[tuple[str, float, list[Launch]]]) -> str:
    """The text of the picture: of each token three bars and a legend."""
    lines: list[str] = []
    y = 18
    for title, micros, launches in parts:
        y = _token(lines, y, title, micros, launches) + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}"'
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    back = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    return "\n".join([f"{head} {style}>", back, *lines, "</svg>", ""])


def _token(
    lines: list[str], y: int, title: str, micros: float, launches: Sequence[Launch]
) -> int:  # fmt: skip
    """Draw a token from `y` on; where it ends."""
    kinds = by_kernel(launches)
    colours = {k: COLOURS[min(i, len(COLOURS) - 1)] for i, (k, _) in enumerate(kinds)}
    apart, limit = sum(n.micros for n in launches), sum(n.limit for n in launches)
    scale = (WIDTH - 2 * LEFT) / max(apart, micros)
    text = (
        f"{title}: a token takes {micros:,.0f} us, its bytes {limit:,.0f} us ({limit / micros:.0%})"
    )
    lines.append(_text(LEFT, y, text, "bold"))
    y += 10
    lines += [_bar(LEFT, y, scale * micros, "#d0d0d0"), _bar(LEFT, y, scale * limit, "#606060")]
    y += BAR + 16
    text = f"Its {len(launches)} launches, timed one at a time: {apart:,.0f} us"
    lines.append(_text(LEFT, y, text))
    y += 8
    totals = [Launch(k, sum(n.micros for n in some), sum(n.nbytes for n in some))
              for k, some in kinds]  # fmt: skip
    _row(lines, y, totals, scale, colours)
    y += BAR + 16
    layer = layer_of(launches)
    took = sum(n.micros for n in layer)
    lines.append(_text(LEFT, y, f"One layer in order, {took:,.1f} us"))
    y += 8
    _row(lines, y, layer, (WIDTH - 2 * LEFT) / took if took else 0.0, colours)
    y += BAR + 8
    for (kernel, some), total in zip(kinds, totals, strict=True):
        y += 16
        share = f"{total.limit / total.micros:.0%}" if total.micros else "-"
        text = f"{len(some)} launches, {total.micros:,.1f} us, {total.nbytes / 1e6:,.1f} MB"
        lines.append(_bar(LEFT, y - 10, 12, colours[kernel], 10))
        lines.append(_text(LEFT + 18, y, f"{kernel}: {text}, {share} of the byte limit"))
    return y


def _row(
    lines: list[str], y: int, launches: Sequence[Launch], scale: float, colours: dict[str, str]
) -> None:  # fmt: skip
    """Launches side by side: dark their bytes, light the rest."""
    x = float(LEFT)
    for launch in launches:
        wide = scale * launch.micros
        lines.append(_bar(x, y, wide, colours[launch.kernel], opacity=0.35))
        lines.append(_bar(x, y, min(wide, scale * launch.limit), colours[launch.kernel]))
        if wide > 60:
            text = f"{launch.kernel} {launch.micros:,.1f}"
            lines.append(_text(x + 4, y + 19, text, fill="white"))
        x += wide


def _bar(
    x: float, y: float, width: float, fill: str, height: int = BAR, opacity: float = 1.0
) -> str:  # fmt: skip
    seen = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    return (f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.1):.1f}" height="{height}" '
            f'fill="{fill}"{seen} stroke="white" stroke-width="0.3"/>')  # fmt: skip


def _text(x: float, y: float, text: str, weight: str = "normal", fill: str = "#333") -> str:
    bold = "" if weight == "normal" else f' font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y}"{bold} fill="{fill}">{escape(text)}</text>'
