"""Values of bf16 as f16, so that weights may have 11 bits: what precedes attention by warpgroups.

Weights rounded to bf16 are as far off as the result's own rounding; both factors of a product have
one dtype; and the 8 bits of a bf16 number fit the 11 of f16, where its exponent does. So values are
multiplied by a power of two for each head and sixteen of its elements, which brings the largest to
2^15: what is no more than 2^32 times smaller stays as it is. The result is scaled back.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from centella import lang
from centella.dtypes import f16, f32, u32
from centella.emit.program import Kernel, Ref
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.ops.attention.masks import Scoring, Sight
from centella.ops.attention.problem import AttentionAttrs, launch, operands, parameters, steps_of
from centella.ops.hopper import MULTIPROCESSORS
from centella.ops.layout import flat
from centella.specs import Spec, make_spec

SLAB = 16  # elements of a head with one scale
THREADS = 64, 128, 256, 512  # of a group; two have a row
TOGETHER = 8  # rows of a thread that are loaded at once, at most
FEW = 2 * MULTIPROCESSORS  # groups: up to so many have as many threads as there may be
PER_CHUNK = 8
INFINITE = 0x7F800000
LEAST = 16  # exponent below which scales would not be normal numbers


def _scale_values(
    *, threads: int, together: int, once: bool, v: Argument, kept: Argument, scales: Argument,
    **masks: Argument,
) -> None:  # fmt: skip
    """A group has sixteen elements of all keys of one head: their largest, then each scaled.

    Args:
        threads: of a group; together: rows of a thread that are loaded at once.
        once: whether these are all that it has, and stay in registers.
    """
    p = parameters("kv_heads slabs lq lk vb vh vl fb fh fl")
    number = lang.group_id()
    slab, group = number % p["slabs"], number // p["slabs"]
    head, b = group % p["kv_heads"], group // p["kv_heads"]
    end = Sight(masks, Scoring(), b, p["lq"], p["lk"]).end
    column = slab * SLAB + lang.local_id() % 2 * PER_CHUNK
    mine, rows = lang.local_id() // 2, threads // 2
    source = b * p["vb"] + head * p["vh"] + column
    target = b * p["fb"] + head * p["fh"] + column
    last = lang.maximum(end, 1) - 1
    highest = lang.var(0, u32)

    def several(first: Any) -> list[Any]:  # a row twice does no harm
        at = (lang.minimum(first + n * rows, last) for n in range(together))
        return [v.load(source + row * p["vl"]) for row in at]

    def look(values: Iterable[Any]) -> None:
        for value in values:
            bits = lang.bitcast(value, u32) & 0x7FFFFFFF
            highest.set(lang.maximum(highest, lang.select(bits < INFINITE, bits, 0)))

    every = several(mine) if once else []
    if once:
        look(chain.from_iterable(every))
    else:
        for first in lang.range(mine, end, rows * together):
            look(chain.from_iterable(several(first)))
    exponent = lang.maximum(lang.workgroup_reduce(highest.get(), "max") >> 23, LEAST)
    factor = lang.bitcast((127 + 15 + 127 - exponent) << 23, f32)
    with lang.if_(lang.local_id() == 0):
        scales[number] = lang.bitcast((exponent - 15) << 23, f32)

    def keep(first: Any, loaded: list[Any]) -> None:
        for n, values in enumerate(loaded):
            row = first + n * rows
            with lang.if_(row < end):
                kept.store(target + row * p["fl"], [value * factor for value in values])

    if once:
        keep(mine, every)
        return
    for first in lang.range(mine, end, rows * together):
        keep(first, several(first))


kernel: Kernel = Kernel(
    _scale_values, workgroup=THREADS[-1], name="attention_values", rewritable=True
)


def values_first(form: Form[AttentionAttrs]) -> Lowered:
    """The launch that scales values, and what it writes: them and their scales."""
    batch, kv_heads, lk, dim = form.inputs[2].shape
    slabs, first = dim // SLAB, len(form.inputs) + 1
    groups = batch * kv_heads * slabs
    threads = next((n for n in THREADS if n // 2 * TOGETHER >= lk), THREADS[-1])
    threads = THREADS[-1] if groups <= FEW else threads
    each = -(-lk // (threads // 2))  # rows of a thread
    together = min(1 << (each - 1).bit_length(), TOGETHER)
    how = (("threads", threads), ("together", together), ("once", each <= together))
    kept, scales = make_spec((batch, kv_heads, lk, dim), f16, 16), Spec((groups,), f32, (1,))
    call = launch(
        kernel, form, groups, how, operands(form, "v", "lengths", "starts"),
        {"kept": Ref(first, flat(kept)), "scales": Ref(first + 1, scales)},
        scalars={**steps_of("f", kept), "slabs": slabs}, threads=threads,
    )  # fmt: skip
    return Lowered((call,), (kept, scales))
