"""Matrix products: `matmul` and `linear`.

    matmul   C = alpha A B             A [..., m, k], B [..., k, n], either one transposed by view
    linear   Y = f(alpha (X W^T) scale + bias) + residual        X [..., k], W [n, k]

    linear_blocks, dequantize   the same with weights in blocks of small integers

Epilogues act on the f32 accumulator and are asked for by name.
"""

from centella.ops.matmul.op import LINEAR, MATMUL
from centella.ops.matmul.planes import DEQUANTIZE, LINEAR_BLOCKS

__all__ = ["DEQUANTIZE", "LINEAR", "LINEAR_BLOCKS", "MATMUL"]
