"""Opening a backend by the name of a device, and the choice where no name is given."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

from centella.backends.base import Backend
from centella.errors import CentellaError, DeviceError

T = TypeVar("T")

# The module and class of each kind of device. A driver loads with the first device of its kind.
BACKENDS: dict[str, tuple[str, str]] = {
    "cpu": ("centella.backends.cpu", "CpuBackend"),
    "webgpu": ("centella.backends.webgpu", "WebGpuBackend"),
    "cuda": ("centella.backends.cuda", "CudaBackend"),
    "simulator": ("centella.backends.simulator", "SimulatorBackend"),
}
# Kinds that a driver has, and what `which` of them is: called with it and the application's own,
# `native`; checked at their first use.
GPUS = {"webgpu": "index or word", "cuda": "index"}
# The kind of device that an application's own is, by the package of its type.
NATIVES: dict[str, str] = {
    "wgpu": "webgpu",
    **dict.fromkeys(("cuda", "cupy", "torch", "centella", "int"), "cuda"),
}
# What to write, by what other libraries call a device.
OTHERS = {
    "gpu": "webgpu or cuda; ct.device() chooses",
    "nvidia": "cuda",
    "numpy": "cpu",
    **dict.fromkeys(("mps", "metal", "vulkan", "dx12", "xpu", "rocm", "hip", "wgpu"), "webgpu"),
}
AFTER_FORK = (
    "GPU drivers do not survive a fork. Start processes by multiprocessing.get_context('spawn') "
    "or 'forkserver', or open the device in the children alone; the CPU works on either side"
)
BYTES = r"(\d+(?:\.\d*)?)\s*(?:([kmgt])(i)?)?b?"
forked: set[str] = set()  # kinds that the parent process had open: drivers do not survive a fork


def open_backend(name: str, native: object, options: dict[str, object]) -> Backend:
    """The backend that a device of this name runs on.

    Args:
        native: the driver's own device that the application has, or None.
        options: arguments of the backend's own.

    Raises:
        DeviceError: unknown name or option, no adapter, or a device that cannot be opened.
    """
    kind, _, which = name.partition(":")
    if kind in forked:
        raise DeviceError(
            f"{name}: the parent process had a {kind} device open when it forked; {AFTER_FORK}"
        )
    if native is not None and kind not in GPUS:
        raise DeviceError(f"{kind}: expected no native=, it has no driver; got {native!r}")
    if kind not in BACKENDS or (which and kind not in GPUS) or name.endswith(":"):
        meant = kind.lower() if kind.lower() in BACKENDS else OTHERS.get(kind.lower())
        raise DeviceError(
            f"unknown device {name!r}; expected {_spellings()}{f'; write {meant}' if meant else ''}"
        )
    chosen = {"which": which, "native": native} if kind in GPUS else {}
    try:
        return class_of(kind)(**chosen, **options)
    except TypeError as error:
        if not options:
            raise
        raise DeviceError(f"{name}: unknown option among {', '.join(options)}") from error


def _spellings() -> str:
    """The names of devices, for errors."""
    names: list[str] = []
    for kind in BACKENDS:
        names += [kind, f"{kind}:<{GPUS[kind]}>"] if kind in GPUS else [kind]
    *most, last = names
    return f"{', '.join(most)} or {last}"


def class_of(kind: str) -> type[Backend]:
    """The class of a kind of device; its module, and with it the driver, is loaded now.

    Raises:
        MissingExtraError: the driver's package is not installed.
    """
    module, name = BACKENDS[kind]
    backend: type[Backend] = getattr(import_module(module), name)
    return backend


def import_driver(name: object) -> None:
    """Import the module of the device that is about to be opened, where there is one.

    A thread that opens a device waits for the driver; one that imports waits for the interpreter,
    which reading a tokenizer keeps for itself.
    """
    kind = str(name or os.environ.get("CENTELLA_DEVICE") or "cuda").partition(":")[0]
    if kind in BACKENDS:
        with suppress(CentellaError, ImportError, OSError):  # opening says what is missing
            class_of(kind)


def byte_count(asked: object) -> int:
    """Bytes as a number, or as a text with a unit: "512 MiB" (powers of 1024), "1.5 GB" (of 1000).

    Raises:
        DeviceError: it is neither, or less than one byte.
    """
    count = -1
    if type(asked) is int:
        count = asked
    elif isinstance(asked, str) and (match := re.fullmatch(BYTES, asked.strip().lower())):
        number, prefix, binary = match.groups()
        count = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
    if count < 1:
        raise DeviceError(
            f"device: expected memory_limit= in bytes, an integer or a text such as '1.5 GB' or "
            f"'512 MiB', got {asked!r:.80}"
        )
    return count


def spelled(name: str) -> str:
    """The name that stands for all spellings of one device."""
    return "cuda:0" if name == "cuda" else name


def kind_of(native: object) -> str:
    """The kind of device that an application's own belongs to.

    Raises:
        DeviceError: it is none that is known.
    """
    package = "int" if type(native) is int else type(native).__module__.partition(".")[0]
    if package in NATIVES:
        return NATIVES[package]
    raise DeviceError(
        f"device: expected a wgpu device, a CUDA ordinal, device or CUcontext as native=, got "
        f"{native!r}"
    )


def names_of(kind: str) -> list[str]:
    """The devices of a kind that this machine has: "cuda:0", "cuda:1", ...

    Raises:
        DeviceError: there is no driver; MissingExtraError: its package is not installed.
    """
    if kind == "cuda":
        count = import_module(BACKENDS[kind][0]).device_count()
        return [f"cuda:{index}" for index in range(count)]
    if kind != "webgpu":
        return [kind]
    webgpu = import_module(BACKENDS[kind][0])
    adapters = list(enumerate(webgpu.adapters()))
    some = [(i, a) for i, a in adapters if not webgpu.is_software(a)] or adapters[:1]
    driver = some[0][1].info["backend_type"] if some else ""  # another one has the same GPUs
    return [f"webgpu:{i}" for i, adapter in some if adapter.info["backend_type"] == driver]


def listed(kind: str) -> list[dict[str, Any]]:
    """The devices of a kind that a driver has, as plain data; none is opened.

    Raises:
        DeviceError: there is none; MissingExtraError: the driver's package is not installed.
    """
    rows: list[dict[str, Any]] = import_module(BACKENDS[kind][0]).listed()
    return rows


def choose(open_device: Callable[[str], T]) -> tuple[T, str]:
    """The default device: cuda, else a hardware WebGPU adapter, else the CPU; and why."""
    try:
        return open_device("cuda"), "an NVIDIA driver is here"
    except CentellaError as error:
        cuda = str(error)
    try:
        webgpu = import_module(BACKENDS["webgpu"][0])
        if any(not webgpu.is_software(a) for a in webgpu.adapters()):
            return open_device("webgpu"), "a hardware WebGPU adapter is here"
        why = "no hardware WebGPU adapter"
    except (CentellaError, ImportError, OSError) as error:
        why = f"WebGPU: {error}"
    return open_device("cpu"), f"cuda: {cuda}; {why}"
