"""What every benchmark needs: the machine, rounds that alternate, medians, and the peer."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
from msgspec.structs import replace

import centella as ct
from centella.emit.program import Kernel, Program
from centella.op.variant import Variant
from centella.runtime.plans import Plans

Row = dict[str, Any]
Call = Callable[[], None]
READS = {"H200": 4.39e12, "H100": 3.05e12}  # bytes a second of a plain read


def run(command: list[str]) -> str:
    """Standard output of a command, or an empty string."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def gpu() -> str:
    """Name, driver, clocks and temperature of the card."""
    query = "name,driver_version,clocks.sm,clocks.mem,temperature.gpu"
    return run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])


CARD = gpu()
READ = next((rate for name, rate in READS.items() if name in CARD), READS["H200"])


def machine() -> Row:
    """What the figures were measured on."""
    versions = {}
    for name in ("centella", "numpy", "wgpu", "cuda-bindings", "torch", "transformers",
                 "onnxruntime", "pywhispercpp"):  # fmt: skip
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["centella"] = ct.__version__
    here = Path(__file__).parent
    head = run(["git", "-C", str(here), "rev-parse", "--verify", "HEAD"])
    commit = os.environ.get("CENTELLA_COMMIT") or head
    return {
        "platform": platform.platform(),
        "cpu": platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "gpu": gpu(),
        "versions": versions,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def alternate(
    contestants: dict[str, Call], rounds: int, between: Call = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each contestant's rounds, one of each in a new order, after two to warm up.

    At a card's power limit the clock follows who ran before: in one order for all rounds the same
    kernel had 566 TFLOP/s behind a fast one and 641 behind a slow one.

    Args:
        between: called before each round, not timed.
    """
    for call in contestants.values():
        call()
        call()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    chance = random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            between()
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def timed(
    call: Callable[[], object], rounds: int, wait: Call = lambda: None, warm: int = 1,
    before: Call = lambda: None,
) -> list[float]:  # fmt: skip
    """Seconds of each round of one call, after some that are not counted.

    Args:
        wait: called before the clock starts, and as the last part of a round.
        before: what each round begins with, not timed.
    """
    seconds = []
    for _ in range(warm + rounds):
        before()
        wait()
        begin = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - begin)
    return seconds[warm:]


def quantiles(seconds: list[float], scale: float = 1e3) -> Row:
    """Median and 99th percentile, times `scale`: of milliseconds by default."""
    p50, p99 = (float(q) * scale for q in np.percentile(seconds, (50, 99)))
    return {"rate": p50, "worst_decile": scale * float(np.percentile(seconds, 90)), "p99": p99,
            "rounds": len(seconds)}  # fmt: skip


def forcing(module: ModuleType, variant: Variant[Any, Any], name: str, tile_of: Any) -> Any:
    """Let `variant=name` be a kernel on the tiles of `tile_of(form, caps)`, while this is entered.

    Plans are kept by their attributes, so that a name stands for one tile.

    Args:
        module: which has the `ORDER` of the op's variants.
    """
    forced = replace(variant, name=name, tile=tile_of)
    return mock.patch.object(module, "ORDER", (forced, *module.ORDER))


def named(title: str, words: str | None) -> bool:
    """Whether `--tiles` asks for what is called so: nothing by default, all without words."""
    return words is not None and any(word.strip() in title for word in words.split(","))


def bert(model: str, kind: Any) -> Any:
    """The model of transformers."""
    from transformers import BertModel

    return BertModel.from_pretrained(model, add_pooling_layer=False).to(kind).eval()


def summary(seconds: list[float], amount: float) -> Row:
    """Median and worst decile as a rate of `amount` a round."""
    took = cost(seconds, 1.0)
    return {
        "rate": amount / took["rate"],
        "worst_decile": amount / took["worst_decile"],
        "seconds": took["rate"],
        "rounds": took["rounds"],
    }


def cost(times: list[float], scale: float) -> Row:
    """Median and worst decile of what is best small, times `scale`."""
    ordered = sorted(times)
    worst = ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))]
    return {
        "rate": scale * statistics.median(ordered),
        "worst_decile": scale * worst,
        "rounds": len(ordered),
    }


def of_launch(device: ct.Device, call: Any) -> Row:
    """What the driver says a launch's kernel takes; nothing but on CUDA."""
    dtypes = tuple(r.spec.dtype for r in call.tensors)
    unit = (True,) * len(dtypes)
    return resources(device, call.kernel.program(
        device.caps, dtypes, unit, call.constants, call.workgroup, call.signature
    ))  # fmt: skip


def error_of(got: Any, wanted: Any) -> float:
    """Relative Frobenius error."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def fresh(device: ct.Device) -> AbstractContextManager[Any]:
    """Plan anew while this is entered: plans are kept by what was recorded."""
    return mock.patch.object(device.executor, "plans", Plans(device.backend))


def print_kernels(who: str, call: Callable[[], object]) -> None:
    """What each kernel takes, timed one launch at a time."""
    call()
    with ct.ledger(timing=True) as led:
        call()
    print(f"  {who}:\n{led}", flush=True)
    del led


@contextmanager
def launched() -> Iterator[list[Program]]:
    """The programs of what is planned while this is entered, in order of launch."""
    programs: list[Program] = []
    traced = Kernel.program

    def noted(self: Kernel, *args: Any) -> Program:
        programs.append(traced(self, *args))
        return programs[-1]

    with mock.patch.object(Kernel, "program", noted):
        yield programs


def resources(device: ct.Device, program: Any) -> Row:
    """A kernel, and what CUDA's driver says it takes; nothing more of other devices."""
    row: Row = {"kernel": program.name}
    if device.caps.target != "ptx":
        return row
    from cuda.bindings import driver

    backend: Any = device.backend
    pipeline = backend.compile(program)
    of = driver.CUfunction_attribute
    asked = {"registers": of.CU_FUNC_ATTRIBUTE_NUM_REGS,
             "local_bytes": of.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES}  # fmt: skip
    with backend.current():
        figures = {n: driver.cuFuncGetAttribute(a, pipeline.function)[1] for n, a in asked.items()}
    return {**row, **figures, "threads": pipeline.threads, "shared_bytes": pipeline.dynamic}


def torch_or_none(where: str = "cuda") -> Any:
    """PyTorch, for CUDA where there is such a device, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if where == "cpu" or torch.cuda.is_available() else None
