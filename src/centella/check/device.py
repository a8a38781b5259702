"""`check_device`: the cases of every operation on a device, then its rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from centella.check.rates import measure
from centella.check.report import DeviceReport, Failure, Rate, found_on
from centella.conformance.cases import Case
from centella.conformance.compare import differences, limit_of
from centella.conformance.table import TABLE, cases_of
from centella.device import Device
from centella.device import device as open_device
from centella.errors import DeviceLostError

Progress = Callable[[int, int, str], None]


def check_device(
    device: str | Device | None = None, *, rates: bool = True, progress: Progress | None = None
) -> DeviceReport:
    """Compute the cases of every operation on a device, compare them, and measure it.

    Each case is compared with the operation's formula in float64 of the same, rounded, inputs.
    Where all are right the device's rates are measured: bandwidths and a product as kernels
    alone, latencies as the host sees them.

    Args:
        device: default: the default device.
        rates: whether to measure.
        progress: called with the number of steps done, of all, and what comes next.

    Returns:
        A report: `ok`, `failures`, `rates`, `card()` and `as_dict()`.

    Raises:
        DeviceError: there is no such device.
    """
    begin = time.perf_counter()
    where = open_device(device)
    where.flush_thread()  # what fails from here on is ours
    rows = [(name, dtype) for name, row in TABLE.items() for dtype in row.dtypes]
    tell = progress or (lambda done, total, what: None)
    steps = len(rows) + 1
    passed = failed = 0
    failures: list[Failure] = []
    for done, (name, dtype) in enumerate(rows):
        tell(done, steps, f"{name} {dtype}")
        cases = cases_of(name, dtype, where.caps, sample=True)
        wrong = list(_failures(where, name, dtype, cases))
        failed += len(wrong)
        failures += wrong[:1]
        if where.lost:  # which cases were right before, nobody knows
            break
        passed += len(cases) - len(wrong)
    measured: Sequence[Rate] = ()
    if rates and not failures:
        tell(steps - 1, steps, "rates")
        measured = measure(where)
    tell(steps, steps, "")
    if not where.lost:
        where.pool.trim()
    return DeviceReport(
        **found_on(where, time.perf_counter() - begin),
        passed=passed, failed=failed, failures=tuple(failures), rates=tuple(measured),
    )  # fmt: skip


def _failures(device: Device, name: str, dtype: str, cases: Sequence[Case]) -> Iterator[Failure]:
    """The cases that are wrong, or raise; they run together, one by one where that raises."""
    limit = limit_of(TABLE[name], dtype)
    try:
        found = list(differences(device, name, dtype, cases, limit))
    except Exception as error:  # of ours, the driver or its bindings: what there is to report
        device.implicit().fail()
        if len(cases) == 1 or device.lost:
            yield _failure(name, dtype, cases[0], _said(error))
            return
        for case in cases:
            yield from _failures(device, name, dtype, [case])
            if device.lost:
                return
        return
    for case, difference in found:
        yield _failure(
            name, dtype, case, str(difference), difference.index,
            f"{difference.expected:.9g}", f"{difference.got:.9g}",
        )  # fmt: skip


def _failure(
    name: str, dtype: str, case: Case, why: str, index: tuple[int, ...] | None = None,
    expected: str = "", got: str = "",
) -> Failure:  # fmt: skip
    shapes = tuple(i.shape for i in case.inputs)
    return Failure(name, dtype, shapes, str(case), why, index, expected, got)


def _said(error: Exception) -> str:
    prefix = "" if isinstance(error, DeviceLostError) else f"{type(error).__name__}: "
    return prefix + str(error).partition("\n")[0]
