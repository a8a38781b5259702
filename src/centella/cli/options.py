"""Options that several subcommands have."""

from __future__ import annotations

from typing import Annotated

import typer

from centella.dtypes import dtype_of
from centella.errors import DTypeError

WEIGHTS = ("auto", "f32", "f16", "bf16")
QUANTIZED = ("q8_0", "q4_0")


def _weight_dtype(text: str) -> str:
    """What weights are kept in, by any name that `ct.load` takes: float16 is f16."""
    try:
        name = text if text == "auto" else dtype_of(text).name
    except DTypeError:
        name = ""
    if name not in WEIGHTS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, WEIGHTS))}.")
    return name


def quantized_format(text: str) -> str:
    """A format that weights are quantised in at load."""
    if text not in QUANTIZED:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, QUANTIZED))}.")
    return text


Folder = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="DIR",
        help="A model folder, a repository (Qwen/Qwen3-0.6B) or a .gguf file; required.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="minilm, a model folder, a .gguf file, or a repository (owner/name).",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="D",
        help="cpu, webgpu, webgpu:N, webgpu:WORD, cuda, cuda:N or simulator "
        "(default: the best here).",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(metavar="D,D", help="Several devices: cuda:0,cuda:1, or all."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[
    str,
    typer.Option(
        parser=_weight_dtype,
        metavar=f"[{'|'.join(WEIGHTS)}]",
        help="Dtype of weights; auto: as in the files.",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        parser=quantized_format, metavar="Q", help="Quantise weights at load: q8_0 or q4_0."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, metavar="N", help="Texts in one batch.")]
ShowLedger = Annotated[
    bool, typer.Option("--ledger", help="Print counts of copies and launches (stderr).")
]
Trace = Annotated[
    str | None, typer.Option(metavar="F", help="Write a timeline for ui.perfetto.dev.")
]
