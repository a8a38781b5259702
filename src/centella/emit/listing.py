"""The IR itself, which the simulator runs."""

from __future__ import annotations

from centella.emit.emission import Emission, Text
from centella.lang.ir import KernelIR
from centella.specs import Caps


def emit(ir: KernelIR, _caps: Caps, _emission: Emission) -> Text:
    """The canonical text of a kernel."""
    return Text(f"ir:{ir.digest}", ir.text())
