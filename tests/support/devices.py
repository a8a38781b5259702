"""The devices that tests run on, and devices of a test's own."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import centella as ct
from centella.emit.program import Kernel
from centella.plan.build import Memo
from tests.support.pads import define_pads
from tests.support.windowed import windowed

POOL = os.environ.get("CENTELLA_POOL", "poison")
GPU = ("cuda", "webgpu-hardware")
DEVICES = ("cpu", "simulator", "webgpu", "webgpu-minimum", *GPU)
WINDOWED = ("simulator-windows", "webgpu-windows")  # by name only: see tests/plan/test_windows.py
PROGRAMS = 300  # 1.5 MB each, on a software adapter

Opening = Callable[..., ct.Device]
_opened: dict[ct.Device, Opening] = {}  # how each was, its pool apart


def _hardware() -> str:
    """The first adapter that is a GPU, by its place in the list."""
    from centella.backends import webgpu

    for index, adapter in enumerate(webgpu.adapters()):
        if not webgpu.is_software(adapter):
            return f"webgpu:{index}"
    raise ct.DeviceError("no hardware WebGPU adapter")


@functools.cache
def open_device(kind: str) -> ct.Device | str:
    """The device of one of `DEVICES`, opened once, or the reason why there is none.

    Its memory is poisoned, so that pads, outputs and reused buffers hold NaN until a kernel writes
    them.
    """
    pool = {} if kind == "cpu" else {"pool": POOL}
    if kind.startswith("simulator"):  # fills what it allocates with NaN, checks every bound
        pool = {"pool": "exact"}
    limits = {"minimum": True} if kind == "webgpu-minimum" else {}
    try:
        if kind in WINDOWED:
            opening: Opening = functools.partial(windowed, kind.partition("-")[0])
        else:
            name = _hardware() if kind == "webgpu-hardware" else kind.removesuffix("-minimum")
            opening = functools.partial(ct.device, name, **limits)
        device = opening(**pool)
    except (ct.CentellaError, ImportError, OSError) as error:
        return f"{kind}: {error}"
    if kind == "cuda" and POOL == "exact":  # for compute-sanitizer
        define_pads(device.backend)
    _opened[device] = opening
    return device


def own(device: ct.Device, **options: Any) -> ct.Device:
    """Another device of the same kind, with nothing compiled, planned or allocated."""
    return _opened[device](**{"pool": "reuse", **options})


def forget_programs() -> None:
    """Drop what the opened devices keep by structure, where that is much."""
    if sum(len(device.cache) for device in _opened) < PROGRAMS:
        return
    for device in _opened:
        plans: Any = device.executor.plans
        plans._planned.clear()
        plans._memo = Memo()
        device.cache.clear()
        device.pool.trim()
    gc.unfreeze()  # what is frozen is none of these objects
    for kernel in gc.get_objects():
        if type(kernel) is Kernel:
            kernel._traced.clear()
            kernel._programs.clear()
    gc.collect()
    gc.freeze()


def name_of(device: ct.Device) -> str:
    """What another process opens it by."""
    kind = next(kind for kind in DEVICES if open_device(kind) is device)
    return _hardware() if kind == "webgpu-hardware" else kind.removesuffix("-minimum")
