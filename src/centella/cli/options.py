"""Options that several subcommands have."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option(metavar="DIR", help="minilm, a model folder, or a repository of huggingface.co."),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="D",
        help="cpu, webgpu, webgpu:N, webgpu:WORD, cuda, cuda:N or simulator "
        "(default: the best here).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
