"""The program of a kernel for an NVIDIA GPU."""

from __future__ import annotations

from centella.emit.emission import Emission, Text
from centella.emit.ptx.emit import emit_ptx
from centella.lang.ir import KernelIR
from centella.specs import Caps


def emit(ir: KernelIR, caps: Caps, _emission: Emission) -> Text:
    """The PTX of a kernel for an architecture."""
    return Text(f"ptx:{caps.arch}:{ir.digest}", emit_ptx(ir, caps.arch))
