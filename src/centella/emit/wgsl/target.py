"""The program of a kernel for a WebGPU device."""

from __future__ import annotations

from centella.emit.emission import Emission, Text
from centella.emit.wgsl.emit import emit_wgsl
from centella.emit.wgsl.expressions import REWRITTEN, SUMS
from centella.errors import LimitError
from centella.lang.ir import KernelIR
from centella.specs import Caps


def emit(ir: KernelIR, caps: Caps, emission: Emission) -> Text:
    """The WGSL of a kernel, as a driver needs it.

    Raises:
        LimitError: for operations that the device, or WGSL, has not.
    """
    if lacking := _lacking(ir, caps):
        raise LimitError(f"kernel {ir.name!r}: {lacking}")
    keep = caps.family == "software"
    settled: frozenset[str] = frozenset()
    if caps.rewrites_arithmetic:
        settled = SUMS if emission.rewritable else REWRITTEN
    flags = (caps.native_f16_pack, emission.trusted, keep, len(settled))
    key = f"wgsl:{ir.digest}:{''.join(str(int(flag)) for flag in flags)}"
    key += "".join(f":{loop}x{n}" for loop, n in emission.copies)
    key += ":stops" if emission.reports else ""
    source = emit_wgsl(
        ir, native_f16=caps.native_f16_pack, keep_loops=keep, settled=settled,
        copies=emission.copies, report_stops=emission.reports,
    )  # fmt: skip
    return Text(key, source)


def _lacking(ir: KernelIR, caps: Caps) -> str:
    """What a kernel needs and the device has not; "" for nothing."""
    if ir.ptx_only:
        return (
            f"{ir.ptx_only} of lang.ptx, which only NVIDIA GPUs from sm_80 on have; this device "
            f"runs WGSL"
        )
    if ir.uses_subgroups and not caps.subgroups:
        return (
            "subgroup operations, which this device has not, or not as neighbouring threads; "
            "lang.workgroup_reduce runs everywhere"
        )
    if ir.first({"ex2"}) and not caps.native_exp2:
        return (
            "lang.exp2_native, which this device has not, or not as exact; lang.exp2 runs "
            "everywhere"
        )
    return ""
