"""The IR itself, which the simulator runs."""

from __future__ import annotations

from centella.emit.emission import Emission, Text
from centella.lang.ir import KernelIR, digest_of
from centella.specs import Caps


def emit(ir: KernelIR, _caps: Caps, _emission: Emission) -> Text:
    """The canonical text of a kernel."""
    text = ir.text()
    return Text(f"ir:{digest_of(text)}", text)
