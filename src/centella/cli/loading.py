"""Loading a model for a command, with how far it is on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from centella.cli.output import progress
from centella.errors import CentellaError
from centella.runtime.device import Device
from centella.tasks.load import Devices, load

SOON = 0.7  # seconds: a model that is loaded by then needs no bar, whose drawing takes a while


def load_shown(
    model: str, device: str | None, dtype: str, quantize: str | None = None,
    task: str | None = None, devices: str | None = None,
) -> Any:  # fmt: skip
    """`ct.load`, with a bar where there is a terminal, else a line every few seconds."""
    begin, megabyte = time.monotonic(), 1_000_000
    with ExitStack() as stack:
        lines = stack.enter_context(progress("loaded {:,} of {:,} MB", False))
        drawn: list[Callable[..., None]] = []

        def tell(done: int, total: int) -> None:
            if not sys.stderr.isatty():
                lines(done // megabyte, total // megabyte)
                return
            if not drawn and done < total and time.monotonic() - begin > SOON:
                drawn.append(stack.enter_context(progress("", True)))
            for bar in drawn:
                bar(done, total, f"{done // megabyte:,} of {total // megabyte:,} MB of weights")

        return load(
            model, device, dtype, quantize=quantize, task=task, progress=tell,
            devices=_listed(devices),
        )  # fmt: skip


def _listed(devices: str | None) -> Devices | None:
    """What `--devices` names.

    Raises:
        CentellaError: a name is empty.
    """
    if devices is None:
        return None
    names = [name.strip() for name in devices.split(",")]
    if not all(names):
        raise CentellaError(f"--devices: expected all, or names with commas, got {devices!r}")
    return "all" if names == ["all"] else names


def device_kind(device: Device) -> str:
    """A device without its number: another of that kind computes the same."""
    return f"{device.name.partition(':')[0]} {device.describe().get('name', '')}"
