"""The self-check: the first use of an adapter class computes a few cases and compares them.

What it found is remembered in the user's cache folder by adapter, driver and version of this
library, so that it runs once on a machine. `CENTELLA_SELF_CHECK` is 1 (or unset) for that, 0 to
leave it out, `always` to run it in each process whatever is remembered.
"""

from __future__ import annotations

import json
import os
import zlib
from contextvars import Context

from centella import __version__
from centella.backends.base import Backend
from centella.errors import DeviceError
from centella.host.caches import keep, kept
from centella.host.log import logger
from centella.runtime.device import Device

MODES = ("0", "1", "always")
NAMED = ("device", "name", "driver", "api", "arch", "wgpu")  # of `describe()`: the adapter's class
_found: dict[str, str] = {}  # by key, in this process


def check_first_use(device: Device) -> str:
    """What a new device computes wrong: "" where it is right, or was not looked at.

    It counts in no scope of the caller's: `ct.totals()` alone has it. A fault is logged as a
    warning, once in a process. A device that is lost on the way is marked so.

    Raises:
        DeviceError: `CENTELLA_SELF_CHECK` is something else.
    """
    mode = os.environ.get("CENTELLA_SELF_CHECK") or "1"
    if mode not in MODES:
        raise DeviceError(f"CENTELLA_SELF_CHECK: expected {', '.join(MODES)}, got {mode!r}")
    if mode == "0":
        return ""
    key = key_of(device.backend)
    if key not in _found:
        fault = None if mode == "always" else remembered(key)
        _found[key] = _compute(device, key) if fault is None else fault
        if _found[key]:
            logger("device").warning(
                "%s failed its self-check: %s. It is not chosen by itself; where it is named it "
                "is used, and its results may be wrong. `centella check` tells more, "
                "CENTELLA_SELF_CHECK=always looks again", device.name, _found[key],
            )  # fmt: skip
    return _found[key]


def _compute(device: Device, key: str) -> str:
    """Run the cases on memory and programs of their own; remember what was computed."""
    from centella.check.cases.first import first_fault

    scratch = Device(device.backend)
    try:
        fault = Context().run(first_fault, scratch)  # in no ledger, batch or stream of the caller's
        remember(key, fault)
    except Exception as error:  # of ours, the driver or its bindings; another time it may pass
        said = str(error).partition("\n")[0].rstrip(":")
        fault = f"{type(error).__name__}: {said}"
    if scratch.lost:
        device.executor.lose(fault)
    else:
        scratch.pool.trim()
    return fault


# -- what is remembered ---------------------------------------------------------------------------


def key_of(backend: Backend) -> str:
    """An adapter, its driver and this library's version, as JSON."""
    about = backend.describe()
    return json.dumps({"centella": __version__, **{n: about[n] for n in NAMED if n in about}})


def remembered(key: str) -> str | None:
    """The fault that was found, "" for none; None where nothing is remembered."""
    try:
        stored = json.loads(kept(file_of(key)) or b"")
        if stored["key"] == key and isinstance(stored["fault"], str):
            return str(stored["fault"])
    except (ValueError, KeyError, TypeError):  # not there, or not what we wrote
        pass
    return None


def remember(key: str, fault: str) -> None:
    """Keep what was found."""
    keep(file_of(key), json.dumps({"key": key, "fault": fault}).encode())


def file_of(key: str) -> str:
    """The file that a verdict is in."""
    return f"self-check-{zlib.crc32(key.encode()):08x}.json"
