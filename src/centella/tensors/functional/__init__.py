"""The public functions over tensors: names, order and defaults of the array API and PyTorch."""

from centella.tensors.creation import arange, full, zeros
from centella.tensors.functional.axes import (
    argmax,
    l2_normalize,
    layer_norm,
    log_softmax,
    max,
    mean,
    mean_pool,
    min,
    rms_norm,
    softmax,
    sum,
)
from centella.tensors.functional.elementwise import (
    abs,
    add,
    cast,
    clip,
    cos,
    div,
    elu,
    exp,
    floor_divide,
    gelu,
    leaky_relu,
    log,
    maximum,
    minimum,
    mul,
    neg,
    relu,
    remainder,
    rsqrt,
    scale,
    sigmoid,
    silu_gate,
    sin,
    sqrt,
    square,
    sub,
    swish,
    tanh,
    where,
)
from centella.tensors.functional.logic import (
    eq,
    ge,
    gt,
    le,
    logical_and,
    logical_not,
    logical_or,
    lt,
    ne,
)
from centella.tensors.functional.move import (
    chunk,
    concat,
    embedding,
    gather,
    interleaved_to_head_first,
    scatter,
    split,
    stack,
)
from centella.tensors.functional.positions import rope, rope_tables
from centella.tensors.functional.products import (
    attention,
    conv1d,
    dequantize,
    dot,
    linear,
    matmul,
    normed_linear,
)

__all__ = [
    "abs", "add", "arange", "argmax", "attention", "cast", "chunk", "clip", "concat", "conv1d",
    "cos", "dequantize", "div", "dot", "elu", "embedding", "eq", "exp", "floor_divide", "full",
    "gather", "ge", "gelu", "gt", "interleaved_to_head_first", "l2_normalize", "layer_norm",
    "le", "leaky_relu", "linear", "log", "log_softmax", "logical_and", "logical_not",
    "logical_or", "lt", "matmul", "max", "maximum", "mean", "mean_pool", "min", "minimum",
    "mul", "ne", "neg", "normed_linear", "relu", "remainder", "rms_norm", "rope",
    "rope_tables", "rsqrt", "scale", "scatter", "sigmoid", "silu_gate", "sin", "softmax",
    "split", "sqrt", "square", "stack", "sub", "sum", "swish", "tanh", "where", "zeros",
]  # fmt: skip
