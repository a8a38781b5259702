"""The few cases that a device computes at its first use: see `centella.self_check`."""

from __future__ import annotations

from centella.check.cases.case import Case, In, Row
from centella.check.cases.compare import differences
from centella.runtime.device import Device

F32 = ("f32",)
# Operation and case: a tiled product, rows of a workgroup, a cast that saturates.
FIRST: dict[str, Row] = {
    "matmul": Row(F32, (Case((In((37, 65)), In((65, 66)))),), sums=True),
    "softmax": Row(F32, (Case((In((5, 260), "large"),)),), sums=True),
    "reduce": Row(F32, (Case((In((3, 1000)),), {"op": "sum"}),), sums=True),
    "cast": Row(F32, (Case((In((21,), "extremes"),), {"dtype": "f16"}),), exact=True),
}


def first_fault(device: Device) -> str:
    """The first of the cases that the device computes wrong, and where; "" when all are right.

    Raises:
        CentellaError: one cannot be run.
    """
    for name, row in FIRST.items():
        for case, found in differences(device, name, "f32", row.cases, row):
            return f"{name} f32 {[list(i.shape) for i in case.inputs]} {found}"
    return ""
