"""What embedding n texts costs, for n from 1 to 100 000: a straight line, with no step at a border.

Around the borders of batches (one more text than fills them) are counts of their own. The line is
fitted to the counts of a batch and more; `beside` is how far a count lies from it, in texts. A plot
is written as SVG, both axes logarithmic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measure import Row

import centella as ct

WORDS = (
    "a the of river kernel boils over paper mountain quiet engine lamp seven walks under bread "
    "window signal yellow stone answer early garden turns copper letter slowly"
).split()
BATCH = 32
LONGEST = 60.0  # seconds of one count; larger ones are left out
WIDTH, HEIGHT, MARGIN = 640, 400, 56


def texts_of(n: int) -> list[str]:
    """Sentences of 4 to 40 words, the same ones every time."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(4, 41, n)
    words = rng.integers(0, len(WORDS), int(lengths.sum()))
    ends = np.cumsum(lengths)
    return [
        " ".join(WORDS[w] for w in words[end - length : end])
        for end, length in zip(ends, lengths, strict=True)
    ]


def counts_of(most: int) -> list[int]:
    """1, 2, 5, 10 ..., and three around each border of the first batches and of some later ones."""
    round_ones = {d * 10**e for e in range(6) for d in (1, 2, 5)}
    borders = {b * BATCH + d for b in (1, 2, 3, 4, 8, 16, 32) for d in (-1, 0, 1)}
    return sorted(n for n in round_ones | borders if n <= most)


def texts(args: argparse.Namespace) -> list[Row]:
    """Seconds of `encode` for each count, with the line through them."""
    rows: list[Row] = []
    for name in args.devices:
        model = ct.load(args.model, device=name)
        every = texts_of(70 if args.small else 10**5)
        model.encode(every[:300], batch_size=BATCH)  # plans and programs of all lengths
        took = dict(_measured(model, every, args.rounds))
        slope, start = _line(took)
        for n, seconds in took.items():
            beside = (seconds - start - slope * n) / slope
            rows.append({"bench": "encode", "shape": [n], "who": name, "unit": "ms",
                         "rate": 1e3 * seconds, "worst_decile": 1e3 * seconds,
                         "texts/s": n / seconds, "beside": beside})  # fmt: skip
    if args.json:
        Path(args.json).with_suffix(".svg").write_text(plot(rows))
    return rows


def _measured(model: ct.Embedder, every: list[str], rounds: int) -> Iterator[tuple[int, float]]:
    """The best of a few rounds: fewer of what takes long."""
    last = 0.0
    for n in counts_of(len(every)):
        best, spent, tries = float("inf"), 0.0, 0
        while tries < min(rounds, 3) or (spent < 1.0 and tries < rounds):
            start = time.perf_counter()
            model.encode(every[:n], batch_size=BATCH)
            best = min(best, time.perf_counter() - start)
            spent, tries = spent + best, tries + 1
            if best > LONGEST / 4:
                break
        yield n, best
        last = best / n
        if last * n * 2.5 > LONGEST:
            return


def _line(took: dict[int, float]) -> tuple[float, float]:
    """Slope and start of the line through the counts from a batch on, each with equal weight."""
    n = np.array([k for k in took if k >= BATCH], float)
    seconds = np.array([took[int(k)] for k in n])
    weighed = np.stack([n, np.ones_like(n)], 1) / seconds[:, None]
    slope, start = np.linalg.lstsq(weighed, np.ones_like(n), rcond=None)[0]
    return float(slope), float(start)


def plot(rows: list[Row]) -> str:
    """Counts and seconds as an SVG, a line for each device."""
    xs, ys = [r["shape"][0] for r in rows], [r["rate"] / 1e3 for r in rows]
    low, high = np.log10([min(xs), min(ys)]), np.log10([max(xs), max(ys)])
    low, high = np.floor(low), np.ceil(high)

    def at(n: float, seconds: float) -> tuple[float, float]:
        x, y = (np.log10([n, seconds]) - low) / np.maximum(high - low, 1)
        return MARGIN + x * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN)

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(int(low[0]), int(high[0]) + 1):
        x, bottom = at(10.0**power, 10 ** low[1])
        svg.append(f'<path d="M{x:.1f} {MARGIN}V{bottom:.1f}" stroke="#ddd"/>'
                   f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{10**power:,}'
                   "</text>")  # fmt: skip
    for power in range(int(low[1]), int(high[1]) + 1):
        left, y = at(10 ** low[0], 10.0**power)
        svg.append(f'<path d="M{left:.1f} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>'
                   f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s'
                   "</text>")  # fmt: skip
    for colour, who in zip(("#0b6", "#c50", "#06c", "#808"), dict.fromkeys(r["who"] for r in rows),
                           strict=False):  # fmt: skip
        points = [at(r["shape"][0], r["rate"] / 1e3) for r in rows if r["who"] == who]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        svg.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        svg += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in points]
        x, y = points[-1]
        svg.append(f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="end" fill="{colour}">{who}'
                   "</text>")  # fmt: skip
    svg.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">texts</text></svg>')
    return "\n".join(svg) + "\n"
