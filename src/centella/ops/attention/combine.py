"""The second launch of attention whose keys are split: parts of each query, weighed and added up.

It has few groups, which costs its latency: everything that a thread reads is asked for at once,
each team weighs its own parts, and one barrier later the teams' sums are weighed. The order is
fixed, so equal inputs give equal bits. Parts without keys wrote nothing. What the first launch
leaves is in `parts.py`.
"""

from __future__ import annotations

from functools import reduce

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32
from centella.emit.program import Call, Constants, Kernel, Ref
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.ops.attention.masks import Scoring, Sight, share_of, sink_of
from centella.ops.attention.parts import UNKNOWN, Known, Parts, Results, part_of
from centella.ops.attention.problem import AttentionAttrs, launch, operands
from centella.ops.attention.table import row_of
from centella.ops.attention.weights import LOG2E, power
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


def _combine(
    *, dim: int, early: bool, lay: Teams, native: bool, scoring: Scoring, known: Known,
    partial: Argument, y: Argument, **masks: Argument,
) -> None:  # fmt: skip
    """A group has one query.

    Args:
        known: as of `part_of`.
        native: as of `power`.
        early: the next launch may take its places at once: these groups leave most of a GPU free.
    """
    if early:
        lang.ptx.launch_dependents()
    p = known.among("heads share lq lk splits yb yl yh")
    group, me, width = lang.group_id(), lang.local_id(), lay.width
    head, group = group % p["heads"], group // p["heads"]
    i, b = group % p["lq"], group // p["lq"]
    kv_heads, kv_head = p["heads"] // p["share"], head // p["share"]
    query = (b * kv_heads + kv_head) * (p["share"] * p["lq"]) + i * p["share"] + head % p["share"]
    sight = Sight(masks, scoring, b, p["lq"], p["lk"], lambda value: value)
    _, _, used = part_of(sight, p["splits"], scoring.windowed, known)
    team, lane = lang.minimum(me // lay.lanes, lay.teams - 1), me % lay.lanes
    first_high, whole = sink_of(masks, head, LOG2E)
    high, total = lang.var(first_high), lang.var(lang.select(team == 0, whole, 0.0))
    mine = lang.vars(f32, CHUNK, init=0.0)
    for first in lang.range(team, used, lay.teams * lay.together):
        ahead = [first + n * lay.teams for n in range(lay.together)]
        there = [at < used for at in ahead]
        results = [Results(query, lang.minimum(at, used - 1)) for at in ahead]
        tops = [partial[result.stats] for result in results]
        wholes = [partial[result.stats + 1] for result in results]
        loaded = [partial.load(result.sums + lane * CHUNK) for result in results]
        highest = reduce(lang.fmax, tops, high + 0.0)  # one that is not there is the last again
        weights = [power(x - highest, native) for x in (high, *tops)]
        total *= weights[0]
        for into in mine:
            into *= weights[0]
        for inside, weight, whole, values in zip(there, weights[1:], wholes, loaded, strict=True):
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
    highest = reduce(lang.fmax, tops)
    weights = [power(top - highest, native) for top in tops]
    whole = lang.const(0.0, f32)
    for n, weight in enumerate(weights):
        whole = lang.fma(weight, stats[n + lay.teams], whole)
    factor = share_of(whole)
    start, per = b * p["yb"] + i * p["yl"] + head * p["yh"], y.dtype.per_word
    for base in range(0, -(-dim // per), lay.threads):
        word, values = me + base, []
        with lang.if_(word < -(-dim // per)):
            for e in range(per):
                value = lang.const(0.0, f32)
                for n, weight in enumerate(weights):
                    value = lang.fma(weight, sums[word * per + (n * width + e)], value)
                values.append(value * factor)
            y.store(start + word * per, values)


combine: Kernel = Kernel(
    _combine, workgroup=MOST_THREADS, name="attention_combine", rewritable=True
)


def launches_of(
    kernel: Kernel, parts: Parts, form: Form[AttentionAttrs], constants: Constants, caps: Caps,
    threads: int | None = None,
) -> Lowered:  # fmt: skip
    """Two launches: a group for each part of the keys of a head; one for each query.

    What the first writes counts as changed in place: of parts without keys nobody writes anything.
    """
    known = (
        ("scoring", form.attrs.scoring), ("dim", form.inputs[0].shape[3]), ("rows", parts.rows),
    )  # fmt: skip
    read = [name for name in ("q", "k", "v", *form.attrs.masks) if name != "sinks"]
    first = launch(
        kernel, form, parts.groups, (*known, *constants), operands(form, *read), {},
        changes=_between(parts, form), scalars=parts.scalars, threads=threads,
    )  # fmt: skip
    return Lowered((first, added_up(parts, form, caps)), (parts.spec,))


def _between(parts: Parts, form: Form[AttentionAttrs]) -> dict[str, Ref]:
    return {"partial": Ref(len(form.inputs) + 1, parts.spec)}


def added_up(
    parts: Parts, form: Form[AttentionAttrs], caps: Caps, own: bool = False
) -> Call:  # fmt: skip
    """The second launch.

    Args:
        own: whether the form is a model's own, whose numbers programs may be written for. Else they
            are not where keys are a buffer, which may be longer the next time.
    """
    scoring, rolled = form.attrs.scoring, row_of(caps).rolled
    lay = Teams(parts.width, FEW, 1) if rolled else Teams(parts.width)
    known = UNKNOWN
    if own or {"lengths", "starts"}.isdisjoint(form.attrs.masks):
        known = parts.known(form, own)
        lay = replace(lay, together=min(lay.together, -(-parts.splits // lay.teams)))
    spans = Scoring(scoring.causal, True) if scoring.windowed else Scoring()  # what parts depend on
    constants = (
        ("dim", form.inputs[0].shape[3]), ("early", caps.early_launch), ("known", known),
        ("lay", lay), ("native", caps.native_exp2), ("scoring", spans),
    )  # fmt: skip
    return launch(
        combine, form, parts.all_queries, constants,
        _between(parts, form) | operands(form, "lengths", "starts", "sinks"),
        {"y": Ref(len(form.inputs), form.outputs[0])}, scalars=parts.scalars, threads=lay.threads,
    )  # fmt: skip
