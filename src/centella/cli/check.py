"""`centella check`: whether this device computes right, and how fast it is."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from centella.cli.options import Device, quantized_format
from centella.cli.output import out, out_json, progress
from centella.errors import CentellaError, MissingExtraError
from centella.host.files import expect_writable, replaced

if TYPE_CHECKING:
    from centella.check import DeviceReport, ModelReport

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="F", help="Write the report as JSON to a file; - for stdout."),
]
Checked = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Compare a model's layers instead: a folder, or minilm."),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        parser=quantized_format, metavar="Q", help="Also compare quantised weights: q8_0 or q4_0."
    ),
]
Audio = Annotated[
    str | None, typer.Option(metavar="F", help="Audio file for a speech model (first window).")
]


def run(
    device: Device = None, json_file: JsonFile = None, model: Checked = None,
    quantize: Quantize = None, audio: Audio = None,
) -> None:  # fmt: skip
    """Check, print the card, and exit with 1 where something is wrong.

    Raises:
        CentellaError: no such device, or a folder without a model.
        OSError: the file cannot be written.
    """
    from centella.check import check_device, check_model

    report: DeviceReport | ModelReport
    for name, option in (("quantize", quantize), ("audio", audio)):
        if option is not None and model is None:
            raise CentellaError(f"check: --{name}: expected --model DIR with it, got none")
    if json_file is not None and json_file != "-":
        expect_writable(json_file)  # before the work is done
    if model is not None:
        try:
            report = check_model(model, device, quantize=quantize, audio=audio)
        except MissingExtraError as error:
            if error.extra != "reference":
                raise
            raise CentellaError(
                f"{error}; without it, another device is compared with the CPU: --device webgpu"
            ) from error
    else:
        with progress("", True) if sys.stderr.isatty() else nullcontext() as tell:
            report = check_device(device, progress=tell)
    if json_file is not None:
        content = {"ok": report.ok, **report.as_dict()}
        text = json.dumps(content, indent=2, allow_nan=False)
        if json_file == "-":
            out_json(content)
        else:
            with replaced(json_file) as file:
                file.write(f"{text}\n".encode())
    if json_file != "-":
        out(report.card())
    if not report.ok:
        raise typer.Exit(1)
