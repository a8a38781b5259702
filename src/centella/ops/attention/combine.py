"""The second launch of the decoding variants: the parts of each query, weighed and added up.

A launch of few groups costs its latency: everything that a thread reads is asked for at once, each
team weighs its own parts, and one barrier later the teams' sums are weighed. The order is fixed, so
equal inputs give equal bits. Parts without keys wrote nothing.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.op.form import Form
from centella.ops.attention.masks import LOWEST, reach
from centella.ops.attention.parts import Parts, Place, part_of
from centella.ops.attention.problem import AttentionAttrs, launch, operands
from centella.ops.attention.table import row_of
from centella.specs import Caps

CHUNK = 4
MOST_THREADS, MOST_TEAMS = 256, 16
TOGETHER = 8  # parts that a thread loads at once
FEW = 2  # teams where threads are a CPU's; they load one part at a time


class Teams(Struct, frozen=True):
    """A team has the chunks of a head of `width` elements, and every so many parts.

    There are at most so many teams, whose threads load so many parts at once.
    """

    width: int
    most: int = MOST_TEAMS
    together: int = TOGETHER

    @property
    def lanes(self) -> int:
        """Threads a team."""
        return self.width // CHUNK

    @property
    def teams(self) -> int:
        """Teams a group."""
        return max(min(MOST_THREADS // self.lanes, self.most), 1)

    @property
    def threads(self) -> int:
        """Threads a group, whole warps."""
        return -(-self.lanes * self.teams // 32) * 32


def _combine(*, early: bool, lay: Teams, partial: Any, y: Any, **lengths: Any) -> None:
    """A group has one query.

    Args:
        early: the next launch may take its places at once: these groups leave most of a GPU free.
    """
    if early:
        lang.ptx.launch_dependents()
    p = {n: lang.parameter(n, u32) for n in (
        "heads", "share", "lq", "lk", "dim", "splits", "yb", "yl", "yh")}  # fmt: skip
    group, me, width = lang.group_id(), lang.local_id(), lay.width
    head, group = group % p["heads"], group // p["heads"]
    i, b = group % p["lq"], group // p["lq"]
    kv_heads, kv_head = p["heads"] // p["share"], head // p["share"]
    query = (b * kv_heads + kv_head) * (p["share"] * p["lq"]) + i * p["share"] + head % p["share"]
    count, _ = reach(lengths, False, b, p["lq"], p["lk"])
    _, used = part_of(count, p["splits"])
    team, lane = lang.minimum(me // lay.lanes, lay.teams - 1), me % lay.lanes
    high, total = lang.var(LOWEST), lang.var(0.0)
    mine = lang.vars(f32, CHUNK, init=0.0)
    for first in lang.range(team, used, lay.teams * lay.together):
        ahead = [first + n * lay.teams for n in range(lay.together)]
        there = [at < used for at in ahead]
        places = [Place(query, lang.minimum(at, used - 1)) for at in ahead]
        tops = [partial[place.stats] for place in places]
        wholes = [partial[place.stats + 1] for place in places]
        found = [partial.load(place.sums + lane * CHUNK) for place in places]
        highest = high + 0.0
        for top in tops:  # one that is not there is the last again
            highest = lang.fmax(highest, top)
        weights = [lang.exp2(x - highest) for x in (high, *tops)]
        total *= weights[0]
        for into in mine:
            into *= weights[0]
        for inside, weight, whole, values in zip(there, weights[1:], wholes, found, strict=True):
            total.set(lang.fma(weight, lang.select(inside, whole, 0.0), total))
            for into, value in zip(mine, values, strict=True):
                into.set(lang.fma(weight, lang.select(inside, value, 0.0), into))
        high.set(highest)
    stats = lang.shared(f32, 2 * lay.teams)
    sums = lang.shared(f32, lay.teams * width)
    with lang.if_(me < lay.teams * lay.lanes):
        sums.store(team * width + lane * CHUNK, [value + 0.0 for value in mine])
        with lang.if_(lane == 0):
            stats[team] = high
            stats[team + lay.teams] = total
    lang.barrier()
    tops = [stats[n] for n in range(lay.teams)]
    highest = tops[0]
    for top in tops[1:]:
        highest = lang.fmax(highest, top)
    weights = [lang.exp2(top - highest) for top in tops]
    whole = lang.const(0.0, f32)
    for n, weight in enumerate(weights):
        whole = lang.fma(weight, stats[n + lay.teams], whole)
    factor = lang.select(whole > 0.0, 1.0 / whole, 0.0)
    place, per = b * p["yb"] + i * p["yl"] + head * p["yh"], y.dtype.per_word
    for word in lang.range(me, (p["dim"] + (per - 1)) // per, lay.threads):
        values = []
        for e in range(per):
            value = lang.const(0.0, f32)
            for n, weight in enumerate(weights):
                value = lang.fma(weight, sums[word * per + (n * width + e)], value)
            values.append(value * factor)
        y.store(place + word * per, values)


kernel: Kernel = Kernel(_combine, workgroup=MOST_THREADS, name="attention_combine", rewritable=True)


def combine(parts: Parts, form: Form[AttentionAttrs], caps: Caps) -> Call:
    """The call: a group for each query."""
    lay = Teams(parts.width, FEW, 1) if row_of(caps).rolled else Teams(parts.width)
    partial = Ref(len(form.inputs) + 1, parts.spec)
    return launch(
        kernel, form, parts.all_queries, (("early", caps.sm >= 90), ("lay", lay)),
        {"partial": partial, **operands(form, "lengths", "starts")},
        {"y": Ref(len(form.inputs), form.outputs[0])}, scalars=parts.scalars, threads=lay.threads,
    )  # fmt: skip
