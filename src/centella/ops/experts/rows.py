"""`expert_linear` of few rows: teams of a thin product (`matmul/thin.py`), weights chosen by ids.

A group has outputs of one row, with a gate of one pick of it. Without a gate it adds up the picks:
each is a walk along k whose x is multiplied by the pick's share. Where all planes are more than a
kernel may bind, one launch opens the gates and another multiplies by them, or adds the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered
from centella.op.variant import Variant, always
from centella.ops.elementwise import ACTIVATIONS, plain_call
from centella.ops.experts.op import ExpertAttrs, names_of, shape_of, up_planes
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.sums import SUBGROUP, Added, TeamSums, Thin, slots_of
from centella.ops.matmul.thin import (
    Rows,
    add_products,
    depth_of,
    reserve,
    thin_of,
    together_of,
)
from centella.ops.operands import KERNEL
from centella.ops.quant.format import SYMBOLS
from centella.ops.quant.kernels import add_blocks, fitted, on_chunks, pitches
from centella.ops.quant.table import FORMATS
from centella.specs import Caps, make_spec

NAN = float("nan")
GROUPS = 4  # of quantised experts on a multiprocessor: 128 registers, so that few formats spill
Lowering = Callable[[Form[ExpertAttrs]], Lowered]


class _Gated(Rows, frozen=True):
    """Rows of two weights by turns."""

    up: Rows

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Expr]:
        """As of `Rows`."""
        if row % 2:
            return self.up.read(row // 2, column, width, masked)
        return super().read(row // 2, column, width, masked)


class _Shared(Rows, frozen=True):
    """Rows of x times a share."""

    share: Any

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Expr]:
        """As of `Rows`."""
        return [v * self.share for v in super().read(row, column, width, masked)]


def _experts(
    *, tile: Thin, gate: str, both: bool, single: bool, format: str, depth: str, shuffle: bool,
    few: int, vector_x: bool, vector_w: bool, x: Argument, ids: Argument, y: Argument,
    **extra: Argument,
) -> None:  # fmt: skip
    reserve(few)
    kind = FORMATS[format] if format else None
    symbols = SYMBOLS[: len(kind.planes)] if kind else "w"
    planes = [extra.pop(symbol) for symbol in symbols]
    ups = [extra.pop(name) for name in up_planes(len(planes))] if both else []
    p = {n: lang.parameter(n, u32) for n in (
        "n", "k", "rowx", "ldi", *(f"ld{c}" for c in symbols), "ldy", "groups", "picks",
        "experts")}  # fmt: skip
    unit = lang.group_id() // p["groups"]  # a row, or a pick of one
    each = tile.outs // (2 if both else 1)
    first = (lang.group_id() - unit * p["groups"]) * (tile.teams * each)
    lane, team = lang.local_id() // tile.teams, lang.local_id() % tile.teams
    outs = [lang.minimum(first + team * each + r, p["n"] - 1) for r in range(each)]
    sums = lang.vars(f32, tile.outs, 1, init=0.0)

    def add(row: Operand, pick: Operand, start: Any, share: Operand) -> None:
        """Add the products of an expert's outputs with the row of x that starts there."""
        expert = lang.bitcast(ids[row * p["ldi"] + pick], u32)
        there = expert < p["experts"]
        begin = lang.select(there, expert, 0) * p["n"]
        rows = [begin + out for out in outs]
        inputs = _Shared(x, [start], vector_x, None, p["k"], lang.select(there, share, NAN))
        if kind:
            turns = [(of, row) for row in rows for of in ((planes, ups) if both else (planes,))]
            add_blocks(sums, tile, turns, lane, inputs, kind, p)
            return
        starts = [row * p["ldw"] for row in rows]
        weights = Rows(planes[0], starts, vector_w, None, p["k"])
        if both:
            up = Rows(ups[0], starts, vector_w, None, p["k"])
            weights = _Gated(planes[0], starts, vector_w, None, p["k"], up)
        add_products(sums, tile, weights, inputs, lane, p["k"], depth)

    if single:
        row = unit // p["picks"]
        add(row, unit - row * p["picks"], row * p["rowx"], lang.const(1.0, f32))
    else:
        for pick in lang.range(p["picks"]):
            share = extra["shares"][unit * lang.parameter("ld_shares", u32) + pick]
            add(unit, pick, (unit * p["picks"] + pick) * p["rowx"], share)
    slots = slots_of(tile, shuffle)
    added = TeamSums(tile.threads, tile.teams, slots, tile.outs, tile.rolled)([s[0] for s in sums])
    _store(added, tile, gate, both, unit, first, p, y, extra)


def _store(
    added: Added, tile: Thin, gate: str, both: bool, unit: Operand, first: Operand,
    p: dict[str, Expr], y: Argument, extra: dict[str, Argument],
) -> None:  # fmt: skip
    """A word of the output a thread."""
    per, each = y.dtype.per_word, tile.outs // (2 if both else 1)
    across = tile.teams * each // per
    for base in range(0, across, tile.threads):
        item = lang.local_id() + base
        offset = item * per
        with lang.if_((item < across) & (first + offset < p["n"])):
            out = []
            for j in range(per):
                team, o = (offset + j) // each, (offset + j) % each
                column = lang.minimum(first + offset + j, p["n"] - 1)
                value = added(o * (2 if both else 1), team)
                value = ACTIVATIONS[gate](KERNEL, value) if gate else value
                if both:
                    value = value * added(o * 2 + 1, team)
                if "opened" in extra:
                    at = unit * lang.parameter("ld_opened", u32) + column
                    value = value * extra["opened"][at]
                if "residual" in extra:
                    at = unit * lang.parameter("ld_residual", u32) + column
                    value = value + extra["residual"][at]
                out.append(value)
            y.store(unit * p["ldy"] + (first + offset), out)


kernel: Kernel = Kernel(_experts, workgroup=128, name="expert_linear", rewritable=True)


def after_each(
    indices: Sequence[int], form: Form[ExpertAttrs],
    before: Callable[[Form[ExpertAttrs], int, Lowering], Lowered], then: Lowering,
) -> Lowered:  # fmt: skip
    """What comes before the launches of a form on account of each operand, then these."""
    if not indices:
        return then(form)
    first, *others = indices
    return before(form, first, lambda inner: after_each(others, inner, before, then))


def _rows(form: Form[ExpertAttrs], fits: bool, caps: Caps) -> Lowered:
    """One launch; before it copies of quantised numbers whose rows do not start on 16 bytes."""
    attrs = form.attrs
    numbers = [1, *([2 + attrs.planes] if attrs.gate else [])] if attrs.format else []
    return after_each(
        numbers, form, lambda form, index, then: on_chunks(form, index, caps, then),
        lambda form: _launch(form, caps),
    )  # fmt: skip


def _launch(form: Form[ExpertAttrs], caps: Caps) -> Lowered:
    attrs, y = form.attrs, Ref(len(form.inputs), form.outputs[0])
    refs = [Ref(i, s) for i, s in enumerate(form.inputs)]
    named = dict(zip(names_of(attrs), refs, strict=True))
    if len(named) < caps.max_storage_buffers:
        return Lowered((_call(named, y, attrs, caps, attrs.gate),))
    if not attrs.gate:
        plain = Ref(y.index + 1, y.spec)
        residual = named.pop("residual")
        add = plain_call("add", (y.spec, residual.spec), y.spec, caps)
        places = (plain.index, residual.index, y.index)
        add = replace(add, tensors=tuple(replace(t, index=places[t.index]) for t in add.tensors))
        return Lowered((_call(named, plain, attrs, caps, ""), add), (y.spec,))
    ups = up_planes(attrs.planes)
    opened = Ref(y.index + 1, make_spec(y.spec.shape, f32, 16))
    left = {n: ref for n, ref in named.items() if n not in ups}
    right = left | dict(zip(SYMBOLS, (named[n] for n in ups), strict=False)) | {"opened": opened}
    calls = _call(left, opened, attrs, caps, attrs.gate), _call(right, y, attrs, caps, "")
    return Lowered(calls, (opened.spec,))


def _call(named: dict[str, Ref], result: Ref, attrs: ExpertAttrs, caps: Caps, gate: str) -> Call:
    """One launch; of a gated product whose planes are too many it is one of two."""
    kind = FORMATS[attrs.format] if attrs.format else None
    planes = [named[c].spec for c in SYMBOLS[: attrs.planes]]
    x, ids, both = named["x"].spec, named["ids"].spec, "up" in named
    (rows, picks), (experts, n, k) = ids.shape, shape_of(planes, attrs)
    flat_x, w, y = rows_of(x), rows_of(planes[0]), rows_of(result.spec)
    problem = Problem(
        batch=1, m=1, n=n * (2 if both else 1), k=w.shape[1] if kind else k, lda=k, ldb=k, ldy=n,
        sa=0, sb=0, sy=0, a_along_k=True, b_along_k=True,
    )  # fmt: skip
    tile = thin_of(problem, (w.dtype if kind else x.dtype, w.dtype), caps)
    tile = tile if kind is None else fitted(kind, tile)
    least = y.dtype.per_word * (2 if both else 1)  # sums of a team: whole words of the output
    if tile.teams * tile.outs < least or (both and tile.outs % 2):
        tile = replace(tile, outs=max(2, least // tile.teams))
    single = attrs.gate != ""  # a group has one pick of a row
    groups, units = -(-n // (tile.outputs // (2 if both else 1))), rows * picks if single else rows
    rowx = flat_x.strides[0]
    scalars = (
        ("n", n), ("k", k), ("rowx", rowx), ("ldi", rows_of(ids).strides[0]),
        *(pitches(planes) if kind else (("ldw", w.strides[0]),)), ("ldy", y.strides[0]),
        ("groups", groups), ("picks", picks), ("experts", experts),
        *((f"ld_{name}", rows_of(named[name].spec).strides[0])
          for name in ("shares", "residual", "opened") if name in named),
    )  # fmt: skip
    tensors = [planes[0], named["up"].spec] if both else [planes[0]]
    few = GROUPS if kind else together_of(tile, x.dtype, w.dtype)
    constants = (
        ("depth", depth_of(tile, k, max(x.dtype.per_chunk, w.dtype.per_chunk))), ("gate", gate),
        ("both", both), ("single", single), ("format", attrs.format),
        ("shuffle", caps.shuffles and tile.threads % SUBGROUP == 0),
        ("tile", tile),
        ("few", few if caps.reserves_registers else 0),
        ("vector_w", all(aligned(s, rows_of(s).strides[0], 0) for s in tensors)),
        ("vector_x", aligned(x, rowx, 0)),
    )  # fmt: skip
    refs = (*(Ref(r.index, flat(r.spec)) for r in named.values()), result)
    return Call(kernel, refs, scalars, constants, groups * units, workgroup=tile.threads,
                signature=signature(dict.fromkeys(named, 1), {"y": 1}))  # fmt: skip


ROWS: Variant[Form[ExpertAttrs], bool] = Variant("rows", always, _rows)
