"""One table of ops: for each op in the registry the cases that a device is tested with."""

from __future__ import annotations

from centella.check.cases.attention import attention
from centella.check.cases.caches import (
    attend_linear,
    beam_blocks,
    cache_attend,
    cache_copy,
    cache_copy_i8,
    cache_step,
    cache_write,
    cache_write_i8,
    rope_attend,
    rope_cache_write,
    rope_cache_write_i8,
)
from centella.check.cases.case import Case, Row
from centella.check.cases.elementwise import cast, expressions, fused
from centella.check.cases.experts import expert_linear
from centella.check.cases.fits import variant_fits
from centella.check.cases.move import (
    arange,
    assign,
    concat,
    embedding,
    fill,
    gather,
    reshape,
    rope,
    scatter,
    scatter_reduce,
    take_along_axis,
)
from centella.check.cases.planes import dequantize
from centella.check.cases.products import (
    conv1d,
    linear,
    linear_norm,
    matmul,
    normed_linear,
)
from centella.check.cases.rows import (
    argmax,
    argsort,
    beam_select,
    cumsum,
    dot,
    mean_pool,
    norm,
    reduce,
    sample,
    softmax,
    speech_beams,
    speech_move,
    speech_scores,
    speech_token,
    topk,
)
from centella.specs import Caps

TABLE: dict[str, Row] = {
    **expressions(),
    "cast": cast(),
    "reshape": reshape(),
    "concat": concat(),
    "fill": fill(),
    "reduce": reduce(),
    "dot": dot(),
    "argmax": argmax(),
    "topk": topk(),
    "argsort": argsort(),
    "cumsum": cumsum(),
    "sample": sample(),
    "beam_select": beam_select(),
    "speech_token": speech_token(),
    "speech_scores": speech_scores(),
    "speech_beams": speech_beams(),
    "speech_move": speech_move(),
    "softmax": softmax(),
    "norm": norm(),
    "mean_pool": mean_pool(),
    "embedding": embedding(),
    "matmul": matmul(),
    "linear": linear(),
    "linear_norm": linear_norm(),
    "normed_linear": normed_linear(),
    "expert_linear": expert_linear(),
    "dequantize": dequantize(),
    "attention": attention(),
    "arange": arange(),
    "gather": gather(),
    "scatter": scatter(),
    "take_along_axis": take_along_axis(),
    "scatter_reduce": scatter_reduce(),
    "rope": rope(),
    "conv1d": conv1d(),
    "assign": assign(),
    "cache_write": cache_write(),
    "cache_attend": cache_attend(),
    "cache_write_i8": cache_write_i8(),
    "cache_copy": cache_copy(),
    "cache_copy_i8": cache_copy_i8(),
    "beam_blocks": beam_blocks(),
    "cache_step": cache_step(),
    "rope_attend": rope_attend(),
    "attend_linear": attend_linear(),
    "rope_cache_write": rope_cache_write(),
    "rope_cache_write_i8": rope_cache_write_i8(),
    "fused": fused(),
}


# How an operand lies is a matter of its elements' width: one dtype of each stands for the others.
WIDTHS: tuple[str, ...] = ("f32", "f16", "i8", "bool")


def cases_of(name: str, dtype: str, caps: Caps) -> list[Case]:
    """The cases of an op that run in a dtype on a device."""
    row, simulated = TABLE[name], caps.target == "ir"
    return [
        case
        for case in row.cases
        if (not case.dtypes or dtype in case.dtypes)
        and (case.small or not simulated)
        and variant_fits(case, dtype, caps)
    ]


def sample_of(name: str, dtype: str, caps: Caps) -> list[Case]:
    """Those of them that a check of a user's device takes: a driver compiles each program anew.

    No sweeps. The first dtype of a row has all others; each further one a part of them, and views
    only where it stands for its width.
    """
    cases = [case for case in cases_of(name, dtype, caps) if not case.sweep]
    dtypes = TABLE[name].dtypes
    number, parts = dtypes.index(dtype) - 1, min(3, len(dtypes) - 1)
    if number < 0:
        return cases
    cases = [case for case in cases if dtype in WIDTHS or not case.laid_out] or cases[:1]
    return cases[number % parts :: parts] or cases[:1]
