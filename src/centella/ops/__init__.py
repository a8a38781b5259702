"""The operations: one file an op or a small family, each in one order.

Formula, shape rule, NumPy formula, kernel(s), choice. Importing this package registers them all.
"""

from centella.ops import (
    along,
    arange,
    argmax,
    assign,
    attention,
    cache,
    cache_attend,
    cache_i8,
    concat,
    conv1d,
    cumsum,
    elementwise,
    embedding,
    fill,
    fused,
    gather,
    matmul,
    move,
    norm,
    pool,
    quant,
    reduce,
    rope,
    rope_attend,
    rope_cache,
    sample,
    softmax,
    sort,
    speech,
    speech_scores,
    topk,
)
