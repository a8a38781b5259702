"""Values of bf16 as f16, so that weights may have 11 bits: what precedes attention by warpgroups.

Weights rounded to bf16 are as far off as the result's own rounding; both factors of a product have
one dtype; and the 8 bits of a bf16 number fit the 11 of f16, where its exponent does. So values are
multiplied by a power of two for each head and sixteen of its elements, which brings the largest to
2^15: what is no more than 2^32 times smaller stays as it is. The result is scaled back.
"""

from __future__ import annotations

from centella import lang
from centella.dtypes import f16, f32, u32
from centella.emit.program import Kernel, Ref
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.ops.attention.masks import Scoring, Sight
from centella.ops.attention.problem import AttentionAttrs, launch, operands, parameters, steps_of
from centella.ops.layout import flat
from centella.specs import Spec, make_spec

SLAB = 16  # elements of a head with one scale
THREADS = 512
TOGETHER = 8  # rows of a thread that are loaded at once
PER_CHUNK = 8
INFINITE = 0x7F800000
LEAST = 16  # exponent below which scales would not be normal numbers


def _scale_values(*, v: Argument, kept: Argument, scales: Argument, **masks: Argument) -> None:
    """A group has sixteen elements of all keys of one head: their largest, then each scaled."""
    p = parameters("kv_heads slabs lq lk vb vh vl fb fh fl")
    number = lang.group_id()
    slab, group = number % p["slabs"], number // p["slabs"]
    head, b = group % p["kv_heads"], group // p["kv_heads"]
    end = Sight(masks, Scoring(), b, p["lq"], p["lk"]).end
    column = slab * SLAB + lang.local_id() % 2 * PER_CHUNK
    mine, rows = lang.local_id() // 2, THREADS // 2
    source = b * p["vb"] + head * p["vh"] + column
    target = b * p["fb"] + head * p["fh"] + column

    highest = lang.var(0, u32)
    for first in lang.range(mine, end, rows * TOGETHER):
        for n in range(TOGETHER):  # a row twice does no harm
            row = lang.minimum(first + n * rows, end - 1)
            for value in v.load(source + row * p["vl"]):
                bits = lang.bitcast(value, u32) & 0x7FFFFFFF
                highest.set(lang.maximum(highest, lang.select(bits < INFINITE, bits, 0)))
    exponent = lang.maximum(lang.workgroup_reduce(highest.get(), "max") >> 23, LEAST)
    factor = lang.bitcast((127 + 15 + 127 - exponent) << 23, f32)
    with lang.if_(lang.local_id() == 0):
        scales[number] = lang.bitcast((exponent - 15) << 23, f32)
    for first in lang.range(mine, end, rows * TOGETHER):
        several = [first + n * rows for n in range(TOGETHER)]
        loaded = [v.load(source + lang.minimum(row, end - 1) * p["vl"]) for row in several]
        for row, values in zip(several, loaded, strict=True):
            with lang.if_(row < end):
                kept.store(target + row * p["fl"], [value * factor for value in values])


kernel: Kernel = Kernel(_scale_values, workgroup=THREADS, name="attention_values", rewritable=True)


def values_first(form: Form[AttentionAttrs]) -> Lowered:
    """The launch that scales values, and what it writes: them and their scales."""
    batch, kv_heads, lk, dim = form.inputs[2].shape
    slabs, first = dim // SLAB, len(form.inputs) + 1
    groups = batch * kv_heads * slabs
    kept, scales = make_spec((batch, kv_heads, lk, dim), f16, 16), Spec((groups,), f32, (1,))
    call = launch(
        kernel, form, groups, (), operands(form, "v", "lengths", "starts"),
        {"kept": Ref(first, flat(kept)), "scales": Ref(first + 1, scales)},
        scalars={**steps_of("f", kept), "slabs": slabs},
    )  # fmt: skip
    return Lowered((call,), (kept, scales))
