"""`centella bench`: measurements that the library takes of itself, as a table."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from centella.cli.options import Device, Json
from centella.cli.output import draw, err, out, out_json
from centella.cli.parts import Column, Table

if TYPE_CHECKING:
    from centella.check.bench import Figure, Report

TITLES = {
    "ffn": "feed-forward layers of Qwen3-4B",
    "cached": "product of one row with a cached weight",
    "encoder": "encoder of Whisper tiny",
}


class Bench(StrEnum):
    """What `centella bench` measures."""

    floor = "floor"


What = Annotated[
    Bench, typer.Argument(metavar="WHAT", help="floor: three claims of trueno and trueno-gpu.")
]
Small = Annotated[
    bool,
    typer.Option(
        "--small", help="Use small shapes, which do for the counts; their times mean little."
    ),
]


def run(what: What, device: Device = None, small: Small = False, as_json: Json = False) -> None:
    """Measure and print.

    Raises:
        CentellaError: no such device, wrong numbers, or work that should not have been done.
    """
    from centella.check.bench import floor

    tell = (lambda what: err(f"{what} ...")) if sys.stderr.isatty() else None
    report = floor(device, small=small, progress=tell)
    if as_json:
        out_json(report.as_dict())
    else:
        _show(report)


def _show(report: Report) -> None:
    out(f"device  {report.device}")
    for note in report.notes:
        out(f"note    {note}")
    for part, title in TITLES.items():
        figures = [f for f in report.figures if f.part == part]
        shape = " x ".join(map(str, figures[0].shape))
        out(f"\n{title}, {shape}")
        names = ("theirs, full size" if report.small else "theirs", "ours", "worst decile")
        rows = [(f.what, *(_said(f, n) for n in (f.theirs, f.ours, f.worst))) for f in figures]
        draw(Table((Column("", least=32), *(Column(n, right=True) for n in names)), rows))


def _said(figure: Figure, number: float | None) -> str:
    """A count, or a time with three digits or so."""
    if number is None:
        return ""
    if not figure.unit:
        return f"{number:,.0f}"
    return f"{number:,.{1 if abs(number) < 100 else 0}f} {figure.unit}"
