"""cache_copy: keys and values of blocks into others of the same pool, in place.

    K[h, to_r, i] = K[h, from_r, i]    V the same    for i < keys_r

A pool is `[kv_heads, blocks, n, head_dim]`; copies are i32 `[r, 3]`: from, to, keys. Nothing is
copied where a block is outside of the pool, or to block 0. No block may be both copied from and
copied to. `cache_copy_i8` copies the scales `[kv_heads, blocks, n, 2]` too, as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, i32, u32
from centella.emit.program import Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, NoAttrs, Op, Out, unit_rows
from centella.ops.beam import NOTE
from centella.ops.cache import WORKGROUP, move, whole_rows
from centella.ops.cache_i8 import check_stored
from centella.ops.elements import offset_of
from centella.ops.layout import flat
from centella.ops.rows import chunked, place_of, rows_call, strides_of, width_of
from centella.ops.rows_i8 import PLANE
from centella.specs import Caps, Spec


def _copy(
    *, chunk: bool, copies: Argument, keys: Argument, values: Argument,
    scales: Argument | None = None,
) -> None:  # fmt: skip
    """A thread has one chunk (or word) of a row of keys, and the same of values."""
    size, heads, pool = (lang.parameter(n, u32) for n in ("block", "heads", "pool"))
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width_of(keys, chunk))
        token, rest = row % size, row // size
        head, note = rest % heads, rest // heads
        source, target, count = (lang.bitcast(copies[note, n], u32) for n in range(NOTE))
        with lang.if_((token < count) & (source < pool) & (target - 1 < pool - 1)):
            planes = ((keys, "kc"), (values, "vc"))
            for plane, name in planes:
                at, to = (offset_of([head, block, token], name) for block in (source, target))
                move(plane, at, plane, to, column, chunk)
            if scales is None:
                return
            at, to = (offset_of([head, block, token], "sc") for block in (source, target))
            with lang.if_(column == 0):
                for n in range(PLANE):
                    scales[to + n] = scales[at + n]


kernel: Kernel = Kernel(_copy, workgroup=WORKGROUP, name="cache_copy", moves=True)


def rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """Pools [h, blocks, n, d] twice, in i8 scales [h, blocks, n, 2], and copies [r, 3]."""
    *pools, copies = specs
    keys, values, *scales = pools
    name = "cache_copy_i8" if scales else "cache_copy"
    if len(keys.shape) != 4 or values.shape != keys.shape:
        raise ShapeError(
            f"{name}: expected keys and values [kv_heads, blocks, n, head_dim], got "
            f"{list(keys.shape)} and {list(values.shape)}"
        )
    if len(copies.shape) != 2 or copies.shape[1] != NOTE or copies.dtype is not i32:
        raise ShapeError(
            f"{name}: expected i32 copies [rows, {NOTE}], got {copies.dtype.name} "
            f"{list(copies.shape)}"
        )
    if scales:
        check_stored(name, keys, values, scales[0])
    elif values.dtype is not keys.dtype:
        raise DTypeError(f"{name}: expected values of {keys.dtype.name}, got {values.dtype.name}")
    return tuple((s.shape, s.dtype) for s in pools)


def reference(*operands: Any) -> Any:
    """The NumPy formula: changes the pools."""
    *pools, copies = operands
    blocks = pools[0].shape[1]
    for source, target, count in np.asarray(copies).astype(np.int64).tolist():
        if 0 <= source < blocks and 0 < target < blocks:
            for pool in pools:
                rows: Array = pool[:, source, : max(count, 0)]
                pool[:, target, : max(count, 0)] = rows
    return tuple(pools)


def lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch."""
    *pools, copies = form.inputs
    keys, values = pools[:2]
    heads, blocks, size, _ = keys.shape
    chunk = chunked(keys, values)
    names = dict(zip(("kc", "vc", "sc"), pools, strict=False))
    scalars = {"block": size, "heads": heads, "pool": blocks, "dim": keys.shape[3],
               **strides_of(**names)}  # fmt: skip
    refs = (Ref(len(pools), copies), *(Ref(i, flat(s)) for i, s in enumerate(pools)))
    changes: dict[str, int] = dict.fromkeys(("keys", "values", "scales")[: len(pools)], 1)
    params = signature({"copies": 2}, {}, changes)
    rows, width = copies.shape[0] * heads * size, width_of(keys, chunk)
    constants, across = (("chunk", chunk),), whole_rows(keys, values)
    return Lowered((rows_call(kernel, refs, rows, across, width, scalars, constants, params),))


def axes_of(form: Form[NoAttrs]) -> Axes:
    """Heads."""
    pools = ["h..."] * len(form.outputs)
    return axes([*pools, ".."], pools)


COPY = Op("cache_copy", rule, reference, lower, unit_rows, mutates=(0, 1), axes=axes_of,
          doc="keys and values of blocks into others of a pool")  # fmt: skip
COPY_I8 = Op("cache_copy_i8", rule, reference, lower, unit_rows, mutates=(0, 1, 2), axes=axes_of,
             doc="the same of a pool in i8, with scales")  # fmt: skip
