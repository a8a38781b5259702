"""PTX from the kernel IR (NVIDIA PTX ISA): what `ptxas` or the driver assembles, no toolkit.

One table of types, one of instructions, and a small rule for each operation that needs more than
one instruction. Every value is a virtual register of its own (`%f` f32, `%r` i32 and u32, `%p`
bool); the assembler allocates. Floating point is never contracted: add.rn, mul.rn, fma.rn.
Integer values that a loop does not change are computed before it, up to `ROOM` of them a loop;
nothing moves out of an `if`.
"""

from centella.emit.ptx.control import ROOM
from centella.emit.ptx.emit import emit_ptx
from centella.emit.ptx.layout import (
    ParamLayout,
    SharedLayout,
    entry_name,
    param_layout,
    shared_layout,
)
from centella.emit.ptx.tables import TARGETS, literal, overlaps

__all__ = [
    "ROOM", "TARGETS", "ParamLayout", "SharedLayout", "emit_ptx", "entry_name", "literal",
    "overlaps", "param_layout", "shared_layout",
]  # fmt: skip  # a table
