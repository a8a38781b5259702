"""Attention on the CPU: heads and queries in blocks whose scores stay in cache."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from centella.dtypes import f32
from centella.emit.program import HostProgram
from centella.host.blas import around, taken_over
from centella.host.blockwise import SHARED, Array, scratch, share, threads_for
from centella.op.op import Form
from centella.ops.attention.masks import Scoring
from centella.ops.attention.problem import AttentionAttrs

SCORES = 1 << 16  # of a block: 256 KB
QUERIES = 32  # of a block at least: fewer make thin products
ALONE = 1 << 18  # multiplications that OpenBLAS does on the thread that asks, without its others
FAR = 64.0  # scores up to which e^score is computed as it is
LEAST = np.float32(np.exp(-16.0))  # a sum of weights that leaves their products with values precise


def host(form: Form[AttentionAttrs]) -> HostProgram | None:
    """Without masks, windows and caps, or with lengths or starts; None for the rest.

    Of starts a query sees the keys up to its own, which stand where the sequence's next tokens do.
    """
    masks: tuple[str, ...] = form.attrs.masks
    if form.attrs.scoring != Scoring() or masks not in ((), ("lengths",), ("starts",)):
        return None
    if any(s.dtype is not f32 for s in (*form.inputs[:3], form.outputs[0])):
        return None
    b, heads, lq, dim = form.inputs[0].shape
    kv_heads, lk = form.inputs[1].shape[1:3]
    shared = heads // kv_heads
    threads = threads_for(b * heads * lq * lk)
    scores = SCORES if threads == 1 else SHARED
    fewest = QUERIES if threads == 1 else ALONE // max(lk * dim, 1)
    rows = min(lq, max(QUERIES, fewest))
    most = max(1, scores // max(rows * lk, 1))  # heads of queries in a block
    step = max(1, most // shared)
    blocks: list[tuple[int, slice, slice]] = list(
        product(
            range(b),
            [slice(i, min(i + step, kv_heads)) for i in range(0, kv_heads, step)],
            [slice(i, min(i + rows, lq)) for i in range(0, lq, rows)],
        )
    )
    scale = np.float32(form.attrs.scale)

    def call(ins: list[Array], outs: list[Array]) -> None:
        q, k, v, *more = ins
        ordered = masks == ("starts",)
        lengths = [lk] * b
        if more:
            lengths = np.clip(more[0] + lq if ordered else more[0], 0, lk).tolist()
        starts = more[0].tolist() if ordered else [0] * b
        groups = (b, kv_heads, shared, lq, dim)
        strides = (q.strides[0], q.strides[1] * shared, *q.strides[1:])
        grouped = np.lib.stride_tricks.as_strided(q, groups, strides, writeable=False)
        by_head = outs[0].reshape(b, lq, kv_heads, shared, dim).transpose(0, 2, 3, 1, 4)

        def compute(block: tuple[int, slice, slice]) -> None:
            row, group, queries = block
            seen, own = lengths[row], None
            if ordered:
                own = starts[row] + queries.start
                seen = min(max(starts[row] + queries.stop, 0), lk)
            with np.errstate(all="ignore"):
                _block(
                    grouped[row, group, :, queries], k[row, group, :seen],
                    v[row, group, :seen], scale, by_head[row, group, :, queries], own,
                )  # fmt: skip

        blas = taken_over(threads)
        with around(rows * lk * dim) if blas is None else blas.alone():
            share(compute, blocks, threads)

    return HostProgram("numpy:attention", "attention", call)


def _block(
    q: Array, k: Array, v: Array, scale: np.float32, out: Array, own: int | None = None
) -> None:  # fmt: skip
    """Some queries of some heads, all of which see all keys; or keys up to their own.

    A softmax does not change when all scores of a row do by the same number. To take away the
    largest takes as long as the exponentials, so it is done only where it has to be: where an e^x
    may be too large, or where all that a row has are too small.

    Args:
        q: [kv_heads, shared, rows, dim]; k, v: [kv_heads, keys, dim].
        out: as q.
        own: the key of the first query; that of the next one is the next. None: they see all.
    """
    keys = k.shape[1]
    if not keys:
        out[...] = 0
        return
    lead = q.shape[:-1]
    single = f32.numpy
    scaled, scores, column, mixed = scratch(
        ((q.shape, single), ((*lead, keys), single), ((*lead, 1), single), (q.shape, single))
    )
    across, values = k[:, None].swapaxes(-1, -2), v[:, None]
    np.multiply(q, scale, out=scaled)
    np.matmul(scaled, across, out=scores)
    _hide(scores, own)
    near = scores.max() < FAR  # false with NaN
    if not near:
        _lower(scores, column)
    _mix(scores, values, column, mixed)
    if near and not (column.min() > LEAST and math.isfinite(mixed.sum())):
        np.matmul(scaled, across, out=scores)
        _hide(scores, own)
        _lower(scores, column)
        _mix(scores, values, column, mixed)
    np.divide(mixed, column, out=out)
    if own is not None and own < 0:
        out[..., :-own, :] = 0  # queries that see no key


def _hide(scores: Array, own: int | None) -> None:
    """The keys behind a query's own."""
    if own is not None:
        for row in range(scores.shape[-2]):
            scores[..., row, max(own + row + 1, 0) :] = -np.inf


def _lower(scores: Array, column: Array) -> None:
    np.maximum.reduce(scores, axis=-1, out=column, keepdims=True)
    np.subtract(scores, column, out=scores)


def _mix(scores: Array, v: Array, column: Array, mixed: Array) -> None:
    """Sums of values weighted by e^score, and of the weights; these replace the scores."""
    np.exp(scores, out=scores)
    np.matmul(scores, np.ones((scores.shape[-1], 1), f32.numpy), out=column)
    np.matmul(scores, v, out=mixed)
