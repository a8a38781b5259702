"""`check_device`: the cases of every operation on a device, then its rates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from centella.check.cases.case import Case
from centella.check.cases.compare import differences
from centella.check.cases.table import TABLE, sample_of
from centella.check.rates import measure
from centella.check.report import DeviceReport, Failure, Rate, device_fields
from centella.errors import DeviceLostError
from centella.runtime.device import Device
from centella.runtime.device import device as open_device

Progress = Callable[[int, int, str], None]
Job = tuple[str, str, list[Case]]  # operation, dtype, cases that run together

SECONDS = 40.0  # with rates a check takes less than a minute
CHUNK = 8  # cases that run together: compiling their programs is what takes time


def check_device(
    device: str | Device | None = None, *, seconds: float = SECONDS, rates: bool = True,
    progress: Progress | None = None,
) -> DeviceReport:  # fmt: skip
    """Compute cases of every operation on a device, compare them, and measure it.

    Each case is compared with the operation's formula in float64 of the same, rounded, inputs. The
    largest case of each operation in each dtype comes first; the others follow while there is
    time. Where all are right the device's rates are measured: bandwidths and a product as kernels
    alone, latencies as the host sees them.

    Args:
        device: default: the default device.
        seconds: after which no more cases are begun but the largest of each.
        rates: whether to measure.
        progress: called with the number of steps done, of all, and what comes next.

    Returns:
        A report: `ok`, `failures`, `rates`, `card()` and `as_dict()`.

    Raises:
        DeviceError: there is no such device.
    """
    begin = time.perf_counter()
    where = open_device(device)
    where.recorder.flush()  # what fails from here on is ours
    first, more = _jobs(where)
    steps = len(first) + len(more) + 1
    tell = progress or (lambda done, total, what: None)
    passed = failed = left_out = 0
    failures: dict[tuple[str, str], Failure] = {}
    for done, (name, dtype, cases) in enumerate((*first, *more)):
        if done >= len(first) and time.perf_counter() - begin > seconds:
            left_out = sum(len(cases) for _, _, cases in more[done - len(first) :])
            break
        tell(done, steps, f"{name} {dtype}")
        wrong = list(_failures(where, name, dtype, cases))
        failed += len(wrong)
        for failure in wrong[:1]:
            failures.setdefault((name, dtype), failure)
        if where.lost:  # which cases were right before, nobody knows
            break
        passed += len(cases) - len(wrong)
    measured: Sequence[Rate] = ()
    if rates and not failures:
        tell(steps - 1, steps, "rates")
        try:
            measured = measure(where)
        except Exception as error:  # as of a case
            where.recorder.implicit().fail()
            failures["rates", ""] = Failure("rates", "", (), "", _said(error))
    tell(steps, steps, "")
    if not where.lost:
        where.pool.trim()
    return DeviceReport(
        **device_fields(where, time.perf_counter() - begin),
        passed=passed, failed=failed, left_out=left_out, failures=tuple(failures.values()),
        rates=tuple(measured),
    )  # fmt: skip


def _jobs(device: Device) -> tuple[list[Job], list[Job]]:
    """The largest case of each operation and dtype; the others, a few of each in turn."""
    first: list[Job] = []
    others: list[list[Job]] = []
    for name, row in TABLE.items():
        for dtype in row.dtypes:
            cases = sorted(sample_of(name, dtype, device.caps), key=_elements, reverse=True)
            first.append((name, dtype, cases[:1]))
            rest = cases[1:]
            chunks = [rest[i : i + CHUNK] for i in range(0, len(rest), CHUNK)]
            others.append([(name, dtype, chunk) for chunk in chunks])
    turns = zip_longest(*others)
    return first, [job for turn in turns for job in turn if job is not None]


def _elements(case: Case) -> int:
    return sum(math.prod(i.shape) for i in case.inputs)


def _failures(device: Device, name: str, dtype: str, cases: Sequence[Case]) -> Iterator[Failure]:
    """The cases that are wrong, or raise; they run together, one by one where that raises."""
    try:
        differing = list(differences(device, name, dtype, cases, TABLE[name]))
    except Exception as error:  # of ours, the driver or its bindings: what there is to report
        device.recorder.implicit().fail()
        if len(cases) == 1 or device.lost:
            yield _failure(name, dtype, cases[0], _said(error))
            return
        for case in cases:
            yield from _failures(device, name, dtype, [case])
            if device.lost:
                return
        return
    for case, difference in differing:
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
