"""The operations: one file an op or a small family, each in one order.

Formula, shape rule, NumPy formula, kernel(s), choice. A file loads when one of its ops is first
asked for, or another file needs something of it. The element-wise ones load at once: the public
functions are made of their table.
"""

from centella.op.op import register_later
from centella.ops import elementwise

MODULES: dict[str, str] = {
    "centella.ops.along": "take_along_axis scatter_reduce",
    "centella.ops.arange": "arange",
    "centella.ops.argmax": "argmax",
    "centella.ops.assign": "assign",
    "centella.ops.attend_linear": "attend_linear",
    "centella.ops.attention.op": "attention",
    "centella.ops.beam": "beam_select beam_blocks",
    "centella.ops.cache": "cache_write cache_step",
    "centella.ops.cache_attend": "cache_attend",
    "centella.ops.cache_copy": "cache_copy cache_copy_i8",
    "centella.ops.cache_i8": "cache_write_i8 rope_cache_write_i8",
    "centella.ops.concat": "concat",
    "centella.ops.conv1d.op": "conv1d",
    "centella.ops.cumsum": "cumsum",
    "centella.ops.embedding": "embedding",
    "centella.ops.experts.op": "expert_linear",
    "centella.ops.fill": "fill",
    "centella.ops.fused": "fused",
    "centella.ops.gather": "gather scatter",
    "centella.ops.matmul.linear_norm": "linear_norm",
    "centella.ops.matmul.normed": "normed_linear",
    "centella.ops.matmul.op": "matmul linear",
    "centella.ops.move": "cast reshape",
    "centella.ops.norm": "norm",
    "centella.ops.pool": "mean_pool",
    "centella.ops.quant.dequantize": "dequantize",
    "centella.ops.reduce": "reduce dot",
    "centella.ops.rope": "rope",
    "centella.ops.rope_attend": "rope_attend",
    "centella.ops.rope_cache": "rope_cache_write",
    "centella.ops.sample": "sample",
    "centella.ops.softmax": "softmax",
    "centella.ops.sort": "argsort",
    "centella.ops.speech": "speech_token",
    "centella.ops.speech_beams": "speech_beams",
    "centella.ops.speech_move": "speech_move",
    "centella.ops.speech_scores": "speech_scores",
    "centella.ops.topk": "topk",
}
register_later(MODULES)
