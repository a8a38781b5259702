"""The self-check: the first use of an adapter class computes a few results and compares them.

It uses an executor of its own, without tensors. What it found is remembered in the user's cache
folder by adapter, driver and version of this library, so that it runs once on a machine.
`CENTELLA_SELF_CHECK` is 1 (or unset) for that, 0 to leave it out, `always` to run it in each
process whatever is remembered.
"""

from __future__ import annotations

import json
import os
import zlib
from contextvars import Context
from typing import Any

import numpy as np

from centella.backends.base import Array, Backend
from centella.dtypes import f32, narrow
from centella.errors import DeviceError
from centella.host.caches import keep, kept
from centella.host.log import logger
from centella.host.version import __version__
from centella.ledger.call_sites import NOWHERE
from centella.op.op import get
from centella.runtime.executor import Executor
from centella.runtime.recorder import Recorder
from centella.runtime.storage import Storage
from centella.specs import strided

MODES = ("0", "1", "always")
NAMED = ("device", "name", "driver", "api", "arch", "wgpu")  # of `describe()`: the adapter's class
_faults: dict[str, str] = {}  # by key, in this process
# Operation, inputs, attributes, and sum((got - expected)^2) / sum(expected^2) at most.
Case = tuple[str, tuple[Array, ...], dict[str, Any], float]


def check_first_use(executor: Executor) -> str:
    """What the backend of a new device computes wrong: "" where it is right, or was not looked at.

    It counts in no scope of the caller's: `ct.totals()` alone has it. A fault is logged as a
    warning, once in a process. An executor whose device is lost on the way is marked so.

    Raises:
        DeviceError: `CENTELLA_SELF_CHECK` is something else.
    """
    mode = os.environ.get("CENTELLA_SELF_CHECK") or "1"
    if mode not in MODES:
        raise DeviceError(f"CENTELLA_SELF_CHECK: expected {', '.join(MODES)}, got {mode!r}")
    if mode == "0":
        return ""
    key = key_of(executor.backend)
    if key not in _faults:
        fault = None if mode == "always" else remembered(key)
        _faults[key] = _compute(executor, key) if fault is None else fault
        if _faults[key]:
            logger("device").warning(
                "%s failed its self-check: %s. It is not chosen by itself; where it is named it "
                "is used, and its results may be wrong. `centella check` tells more, "
                "CENTELLA_SELF_CHECK=always looks again", executor.name, _faults[key],
            )  # fmt: skip
    return _faults[key]


def _compute(executor: Executor, key: str) -> str:
    """Compute on memory and programs of their own; remember what was computed."""
    scratch = Executor(executor.backend)
    try:
        fault = Context().run(first_fault, scratch)  # in no ledger, batch or stream of the caller's
        keep(file_of(key), json.dumps({"key": key, "fault": fault}).encode())
    except Exception as error:  # of ours, the driver or its bindings; another time it may pass
        said = str(error).partition("\n")[0].rstrip(":")
        fault = f"{type(error).__name__}: {said}"
    if scratch.lost:
        executor.lose(fault)
    else:
        scratch.pool.trim()
    return fault


def _cases() -> list[Case]:
    """A tiled product, rows of a workgroup, a sum, a cast that saturates."""
    random = np.random.default_rng(0)  # loads a part of NumPy, which few processes need
    large = np.where(random.random((5, 260)) < 0.3, 800, random.standard_normal((5, 260)))
    kinds = [np.nan, np.inf, -np.inf, 0, 1, -1, 800, 6e4, -6e4, 1e9, 1e-3, 0.5, 1e-8]
    return [
        ("matmul", tuple(random.standard_normal(s) for s in ((37, 65), (65, 66))), {}, 1e-11),
        ("softmax", (large,), {}, 1e-11),
        ("reduce", (random.standard_normal((3, 1000)),), {"op": "sum"}, 1e-11),
        ("cast", (np.array(kinds),), {"dtype": "f16"}, 0.0),
    ]


def first_fault(executor: Executor) -> str:
    """The first of the results that a backend computes wrong, and where; "" when all are right.

    Raises:
        CentellaError: one cannot be computed.
    """
    storage = Storage(executor)
    recorder = Recorder(executor, storage)
    for name, inputs, attrs, limit in _cases():
        arrays = [x.astype(np.float32) for x in inputs]
        specs = [storage.spec(x.shape, f32) for x in arrays]
        values = [storage.write(x, s, NOWHERE) for x, s in zip(arrays, specs, strict=True)]
        operands = [(v, s, 0) for v, s in zip(values, specs, strict=True)]
        (result,) = recorder.record(get(name), operands, attrs)
        spec = result.spec
        ticket = executor.read([(result, 0, spec.span * spec.dtype.itemsize)])
        ticket.wait()
        got = strided(ticket.data(0), spec).astype(np.float64)
        formula = get(name).reference
        assert formula is not None, f"{name} has no formula"
        with np.errstate(all="ignore"):
            wanted = formula(*(x.astype(np.float64) for x in arrays), **attrs)
            exact = narrow(wanted, spec.dtype).astype(np.float64) if limit == 0 else wanted
        if where := difference(got, exact, limit):
            return f"{name} f32 {[list(x.shape) for x in arrays]} {where}"
    return ""


def difference(got: Array, wanted: Array, limit: float) -> str:
    """Where a result is furthest off; "" within the limit, with infinities and NaN as they are."""
    with np.errstate(invalid="ignore"):
        same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
        off = np.nan_to_num(np.where(same, 0, np.square(got - wanted)), nan=np.inf)
    if off.sum() <= limit * np.square(wanted[np.isfinite(wanted)]).sum():
        return ""
    index = np.unravel_index(int(off.argmax()), off.shape)
    at = [int(i) for i in index]
    return f"at {at}: expected {wanted[index]:.9g}, got {got[index]:.9g}"


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


def file_of(key: str) -> str:
    """The file that a verdict is in."""
    return f"self-check-{zlib.crc32(key.encode()):08x}.json"
