"""The kernel of `expert_linear`: teams of the thin product (`thin.py`), whose weights ids choose.

A group has outputs of one row, with a gate of one pick of it. Without a gate it adds up the picks:
each is a walk along k whose x is multiplied by the pick's share.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.op.form import Form
from centella.op.op import Lowered
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.kernel_params import face
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.experts import ExpertAttrs
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.sums import SUBGROUP, slots_of, totals
from centella.ops.matmul.thin import (
    Rows,
    Thin,
    add_products,
    depth_of,
    reserve,
    thin_of,
    together_of,
)
from centella.ops.operands import KERNEL
from centella.specs import Caps

NAN = float("nan")


class _Gated(Rows, frozen=True):
    """Rows of two weights by turns."""

    up: Rows

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Any]:
        """As of `Rows`."""
        if row % 2:
            return self.up.read(row // 2, column, width, masked)
        return super().read(row // 2, column, width, masked)


class _Shared(Rows, frozen=True):
    """Rows of x times a share."""

    share: Any

    def read(self, row: int, column: Any, width: int, masked: bool) -> list[Any]:
        """As of `Rows`."""
        return [v * self.share for v in super().read(row, column, width, masked)]


def _experts(
    *, tile: Thin, gate: str, depth: str, shuffle: bool, together: int, vector_x: bool,
    vector_w: bool, x: Any, w: Any, ids: Any, y: Any, **extra: Any,
) -> None:  # fmt: skip
    reserve(together)
    p = {n: lang.parameter(n, u32) for n in (
        "n", "k", "rowx", "ldi", "ldw", "sw", "ldy", "groups", "picks", "experts")}  # fmt: skip
    unit = lang.group_id() // p["groups"]  # a row, or a pick of one
    first = (lang.group_id() - unit * p["groups"]) * (tile.outputs // (2 if gate else 1))
    lane, team = lang.local_id() // tile.teams, lang.local_id() % tile.teams
    each = tile.outs // (2 if gate else 1)
    outs = [lang.minimum(first + team * each + r, p["n"] - 1) * p["ldw"] for r in range(each)]
    sums = lang.vars(f32, tile.outs, 1, init=0.0)

    def add(row: Any, pick: Any, start: Any, share: Any) -> None:
        """Add the products of an expert's outputs with the row of x that starts there."""
        expert = lang.bitcast(ids[row * p["ldi"] + pick], u32)
        there = expert < p["experts"]
        begin = lang.select(there, expert, 0) * p["sw"]
        weights = Rows(w, [begin + out for out in outs], vector_w, None, p["k"])
        if gate:
            up = Rows(extra["up"], weights.starts, vector_w, None, p["k"])
            weights = _Gated(w, weights.starts, vector_w, None, p["k"], up)
        share = lang.select(there, share, NAN)
        inputs = _Shared(x, [start], vector_x, None, p["k"], share)
        add_products(sums, tile, weights, inputs, lane, p["k"], depth)

    if gate:
        row = unit // p["picks"]
        add(row, unit - row * p["picks"], row * p["rowx"], lang.const(1.0, f32))
    else:
        for pick in lang.range(p["picks"]):
            share = extra["shares"][unit * lang.parameter("lds", u32) + pick]
            add(unit, pick, (unit * p["picks"] + pick) * p["rowx"], share)
    own = tile.teams == 1 and y.dtype.per_word == 1 and not gate  # a thread stores what it added up
    slots = slots_of(tile, shuffle)
    scratch = lang.shared(f32, slots * tile.outs)
    pitch = totals(scratch, [s[0] for s in sums], tile, slots, own)
    _store(scratch, pitch, tile, gate, unit, first, p, y, extra)


def _store(
    scratch: Any, pitch: int, tile: Thin, gate: str, unit: Any, first: Any, p: dict[str, Any],
    y: Any, extra: dict[str, Any],
) -> None:  # fmt: skip
    """A word of the output a thread."""
    per, each = y.dtype.per_word, tile.outs // (2 if gate else 1)
    across = tile.teams * each // per
    for base in range(0, across, tile.threads):
        item = lang.local_id() + base
        offset = item * per
        with lang.if_((item < across) & (first + offset < p["n"])):
            out = []
            for j in range(per):
                team, o = (offset + j) // each, (offset + j) % each
                if gate:
                    opened = ACTIVATIONS[gate](KERNEL, scratch[o * 2 * pitch + team])
                    out.append(opened * scratch[(o * 2 + 1) * pitch + team])
                    continue
                out.append(scratch[o * pitch + team])
                if "residual" in extra:
                    column = lang.minimum(first + offset + j, p["n"] - 1)
                    out[j] += extra["residual"][unit * lang.parameter("ldr", u32) + column]
            y.store(unit * p["ldy"] + (first + offset), out)


kernel: Kernel = Kernel(_experts, workgroup=128, name="expert_linear", rewritable=True)


def lower(form: Form[ExpertAttrs], caps: Caps) -> Lowered:
    """One launch."""
    x, w, ids, *more = form.inputs
    gate, extras = form.attrs.gate, dict(zip(form.attrs.extras, more, strict=True))
    (rows, picks), (experts, n, k) = ids.shape, w.shape
    flat_x, flat_w, y = rows_of(x), rows_of(w), rows_of(form.outputs[0])
    problem = Problem(
        batch=1, m=1, n=n * (2 if gate else 1), k=k, lda=k, ldb=k, ldy=n, sa=0, sb=0, sy=0,
        a_along_k=True, b_along_k=True,
    )  # fmt: skip
    tile = thin_of(problem, (x.dtype, w.dtype), caps)
    least = y.dtype.per_word * (2 if gate else 1)  # sums of a team: whole words of the output
    if tile.teams * tile.outs < least or (gate and tile.outs % 2):
        tile = replace(tile, outs=max(2, least // tile.teams))
    outputs = tile.outputs // (2 if gate else 1)
    ldw, rowx = flat_w.strides[0], flat_x.strides[0]
    groups, units = -(-n // outputs), rows * picks if gate else rows
    pitches = {name: rows_of(s).strides[0] for name, s in extras.items() if name != "up"}
    scalars = (
        ("n", n), ("k", k), ("rowx", rowx), ("ldi", rows_of(ids).strides[0]), ("ldw", ldw),
        ("sw", n * ldw), ("ldy", y.strides[0]), ("groups", groups), ("picks", picks),
        ("experts", experts), ("lds", pitches.get("shares", 0)),
        ("ldr", pitches.get("residual", 0)),
    )  # fmt: skip
    weights = [w, extras["up"]] if gate else [w]
    constants = (
        ("depth", depth_of(tile, k, max(x.dtype.per_chunk, w.dtype.per_chunk))), ("gate", gate),
        ("shuffle", caps.shuffles and tile.threads % SUBGROUP == 0),
        ("tile", tile),
        ("together", together_of(tile, x.dtype, w.dtype) if caps.sm >= 80 else 0),
        ("vector_w", all(aligned(s, rows_of(s).strides[0], 0) for s in weights)),
        ("vector_x", aligned(x, rowx, 0)),
    )  # fmt: skip
    names = dict.fromkeys(("x", "w", "ids", *extras), 1)
    refs = (*(Ref(i, flat(s)) for i, s in enumerate(form.inputs)),
            Ref(len(form.inputs), form.outputs[0]))  # fmt: skip
    call = Call(kernel, refs, scalars, constants, groups * units, workgroup=tile.threads,
                face=face(names, {"y": 1}))  # fmt: skip
    return Lowered((call,))
