"""The few cases that a device computes at its first use: see `centella.self_check`."""

from __future__ import annotations

from centella.conformance.cases import Case, In
from centella.conformance.compare import TOLERANCE, differences
from centella.device import Device

# Operation, dtype, case, limit: a tiled product, rows of a workgroup, a cast that saturates.
FIRST: tuple[tuple[str, str, Case, float], ...] = (
    ("matmul", "f32", Case((In((37, 65)), In((65, 66)))), TOLERANCE["f32"][1]),
    ("softmax", "f32", Case((In((5, 260), "large"),)), TOLERANCE["f32"][1]),
    ("reduce", "f32", Case((In((3, 1000)),), {"op": "sum"}), TOLERANCE["f32"][1]),
    ("cast", "f32", Case((In((21,), "extremes"),), {"dtype": "f16"}), 0.0),
)


def first_fault(device: Device) -> str:
    """The first of the cases that the device computes wrong, and where; "" when all are right.

    Raises:
        CentellaError: one cannot be run.
    """
    for name, dtype, case, limit in FIRST:
        for _, found in differences(device, name, dtype, [case], limit):
            return f"{name} {dtype} {[list(i.shape) for i in case.inputs]} {found}"
    return ""
