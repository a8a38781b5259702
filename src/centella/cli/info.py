"""`centella info`: what is installed, which devices there are, which one is used and why."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np

from centella import __version__
from centella.backends.opening import GPUS, choose, listed
from centella.cli.options import Device, Json
from centella.cli.output import out, out_json
from centella.errors import CentellaError
from centella.runtime.device import Device as OpenDevice
from centella.runtime.device import device as open_device
from centella.runtime.device import trusted

# The packages of each extra; CUDA needs both of its own.
EXTRAS = {
    "models": ("tokenizers", "huggingface_hub", "jinja2"),
    "audio": ("soundfile", "soxr"),
    "av": ("av",),
    "silero": ("onnxruntime",),
    "cli": ("typer", "rich"),
    "arrow": ("pyarrow",),
    "cuda": ("cuda-core", "cuda-bindings"),
}
MOST = 1 << 34  # bytes of a tensor, whatever a driver allows: 2^32 elements of 4


def run(device: Device = None, as_json: Json = False) -> None:
    """Print what there is.

    Raises:
        CentellaError: no such device.
    """
    report = gather(device)
    if as_json:
        out_json(report)
    else:
        _show(report)


def gather(chosen: str | None = None) -> dict[str, Any]:
    """Versions, devices, the one that is chosen and why, and extras, as plain data.

    Args:
        chosen: the device in place of the default one.

    Raises:
        CentellaError: it cannot be opened.
    """
    used = _default() if chosen is None else _opened(chosen, f"--device {chosen}")
    devices, missing = [_cpu()], {}
    for kind in GPUS:
        try:
            devices += listed(kind)
        except Exception as error:  # drivers and their bindings raise what they like
            missing[kind] = str(error)
    return {
        "centella": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "chosen": used,
        "devices": devices,
        "missing": missing,
        "extras": {name: _extra(packages) for name, packages in EXTRAS.items()},
    }


def _default() -> dict[str, Any]:
    """The device that `ct.device()` opens, and why."""
    named = os.environ.get("CENTELLA_DEVICE")
    try:
        return _opened(named, f"CENTELLA_DEVICE={named}") if named else _shown(*choose(trusted))
    except CentellaError as error:
        why = f"CENTELLA_DEVICE={named}: {error}" if named else str(error)
        return {"name": None, "why": why, "details": {}}


def _opened(name: str, why: str) -> dict[str, Any]:
    return _shown(open_device(name), why)


def _shown(device: OpenDevice, why: str) -> dict[str, Any]:
    return {"name": device.name, "why": why, "details": device.describe()}


def _cpu() -> dict[str, Any]:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        memory = None
    return {
        "open_with": "cpu",
        "name": platform.processor() or platform.machine(),
        "type": f"CPU, {os.cpu_count()} cores",
        "driver": "NumPy",
        "memory_bytes": memory,
        "limits": {},
    }


def _extra(packages: tuple[str, ...]) -> dict[str, Any]:
    from importlib import metadata

    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    missing = [p for p in packages if p not in versions]
    return {"installed": not missing, "versions": versions, "missing": missing}


def _show(report: dict[str, Any]) -> None:
    out(
        f"centella {report['centella']}, Python {report['python']}, NumPy {report['numpy']}, "
        f"{report['platform']}\n"
    )
    for row in report["devices"]:
        out(f"{row['open_with']:<9} {row['name']}; {row['type']}; {row['driver']}")
        memory = _size(row["memory_bytes"]) or "not reported by the driver"
        most = _size(min(row["limits"].get("max_tensor_bytes", 0), MOST) or None)
        out(f"          memory {memory}" + (f"; tensors up to {most}" if most else ""))
        if "cooperative_matrix" in row:
            out(f"          cooperative matrices: {row['cooperative_matrix']}")
    for kind, why in report["missing"].items():
        out(f"{kind:<9} none: {why}")
    used = report["chosen"]
    why = used["why"]
    for kind, text in report["missing"].items():  # which stands above
        if why.startswith(("CENTELLA_DEVICE", "--device")):
            break
        why = why.replace(f"{kind}: {text}", f"no {kind}")
    role = "chosen" if why.startswith("--device") else "default"
    out(f"\n{role:<9} {used['name'] or 'none'}: {why}\n")
    for name, extra in report["extras"].items():
        state = "installed" if extra["installed"] else f"missing {', '.join(extra['missing'])}"
        line = "" if extra["installed"] else f"; pip install 'centella[{name}]'"
        out(f"extra     {name}: {state}{line}")


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    return f"{nbytes / 2**30:.1f} GB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MB"
