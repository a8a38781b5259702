"""The operations: one file an op or a small family, each in one order.

Formula, shape rule, NumPy formula, kernel(s), choice. Importing this package registers them all.
"""

from centella.ops import (
    argmax,
    attention,
    concat,
    elementwise,
    embedding,
    fill,
    matmul,
    move,
    norm,
    pool,
    reduce,
    softmax,
)

__all__ = [
    "argmax",
    "attention",
    "concat",
    "elementwise",
    "embedding",
    "fill",
    "matmul",
    "move",
    "norm",
    "pool",
    "reduce",
    "softmax",
]
