"""WGSL from the kernel IR (W3C WebGPU Shading Language).

A pure value used once, in the block that computed it, is written into the expression that uses it;
everything else is a `let`. So a fused multiply-add on a register is one statement, which matters:
naga's time grows with the square of the number of statements.

Bindings: tensor arguments in order at 0 .. n-1, the launch parameters as a uniform buffer at n.
"""

from centella.emit.wgsl.emit import count_statements, emit_wgsl
from centella.emit.wgsl.expressions import bits_literal
from centella.emit.wgsl.writer import MAX_DEPTH

__all__ = ["MAX_DEPTH", "bits_literal", "count_statements", "emit_wgsl"]
