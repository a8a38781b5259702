"""How the keys of a few queries are split, where the parts leave what they computed, and its sum.

How many parts there are follows from shapes; where each begins, from the lengths on the device. So
one plan serves every length: a part has `step` keys at least, and the groups of those that have
none leave at once.

Of each query and part there are `width` sums (the head, up to a chunk), after all of them the
maximum of its scores (of their base 2 logarithms) and the sum of its weights; f32.

The second launch has few groups, which costs its latency: everything that a thread reads is asked
for at once, each team weighs its own parts, and one barrier later the teams' sums are weighed. The
order is fixed, so equal inputs give equal bits. Parts without keys wrote nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Constants, Kernel, Ref
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.ops.attention.lines import Lines
from centella.ops.attention.masks import Scoring, Sight, bounded, share_of, sink_of
from centella.ops.attention.problem import (
    AttentionAttrs,
    extents,
    keys_seen,
    launch,
    operands,
    parameters,
)
from centella.ops.attention.table import MOST_ROWS, row_of
from centella.ops.attention.weights import LOG2E
from centella.ops.rows import power_above
from centella.specs import Caps, Spec

MOST_SPLITS = 128
ENOUGH_GROUPS = 512
# Of the second launch:
CHUNK = 4
MOST_THREADS, MOST_TEAMS = 256, 16
TOGETHER = 8  # parts that a thread loads at once
FEW = 2  # teams where threads are a CPU's; they load one part at a time


class Known(Struct, frozen=True):
    """Numbers that a program is written for: a division by another one takes 25 instructions.

    Attributes:
        step: keys that every part has at most; 0: parts have several steps, or begin anywhere.
        heads, share, lq, blocks: as the launch parameters; 0: it is a parameter.
    """

    step: int = 0
    heads: int = 0
    share: int = 0
    lq: int = 0
    blocks: int = 0

    def among(self, names: str) -> dict[str, Any]:
        """Launch parameters by name; those that are known are constants."""
        return {
            name: lang.const(value, u32) if (value := getattr(self, name, 0)) else parameter
            for name, parameter in parameters(names).items()
        }


UNKNOWN = Known()


class Parts(Struct, frozen=True):
    """Of `queries` that share their keys, `rows` at a time, in so many blocks; keys in `splits`."""

    batch: int
    heads: int  # of keys and values
    queries: int
    rows: int
    splits: int
    step: int
    width: int

    @classmethod
    def of(
        cls, form: Form[AttentionAttrs], step: int, enough: int = ENOUGH_GROUPS,
        most: int = MOST_ROWS, splits: int = MOST_SPLITS,
    ) -> Parts:  # fmt: skip
        """Enough groups for a large GPU, none of a few keys; at most so many rows and splits."""
        batch, heads, lq, dim = form.inputs[0].shape
        (kv_heads, _), lk = extents(form), keys_seen(form, lq)
        queries = heads // kv_heads * lq
        rows = min(power_above(max(queries, 1)), most)  # few programs serve all
        groups = max(batch * kv_heads * -(-queries // rows), 1)
        splits = max(min(max(enough // groups, 1), -(-lk // step), splits), 1)
        return cls(batch, kv_heads, queries, rows, splits, step, -(-dim // 4) * 4)

    @property
    def blocks(self) -> int:
        """Blocks of queries."""
        return -(-self.queries // self.rows)

    @property
    def groups(self) -> int:
        """Groups of the first launch."""
        return self.batch * self.heads * self.blocks * self.splits

    def known(self, form: Form[AttentionAttrs], heads: bool = False) -> Known:
        """What kernels may divide by as constants; `heads`: those of the form, too."""
        windowed, (kv_heads, lk) = form.attrs.window is not None, extents(form)
        step = self.step if not windowed and self.splits * self.step >= lk else 0
        if not heads:
            return Known(step)
        _, all_heads, lq, _ = form.inputs[0].shape
        return Known(step, all_heads, all_heads // kv_heads, lq, self.blocks)

    @property
    def all_queries(self) -> int:
        """Queries of every sequence and head."""
        return self.batch * self.heads * self.queries

    @property
    def spec(self) -> Spec:
        """The memory between the launches."""
        return Spec((self.all_queries * self.splits * (self.width + 2),), f32, (1,))

    @property
    def scalars(self) -> dict[str, int | float]:
        """What both launches are told."""
        stats = self.all_queries * self.splits * self.width
        return {"blocks": self.blocks, "splits": self.splits, "step": self.step,
                "width": self.width, "stats": stats}  # fmt: skip


def part_of(sight: Sight, splits: Any, windowed: bool, known: Known) -> tuple[Any, Any, Any]:
    """Where the first part begins, a multiple of the step; keys of a part; parts that have any.

    Args:
        known: what the program is written for.
    """
    if known.step:
        parts = (sight.end + (known.step - 1)) // known.step
        return lang.const(0, u32), lang.const(known.step, u32), parts
    step, begin = lang.parameter("step", u32), sight.begin
    begin = begin // step * step if windowed else begin
    count = sight.end - begin
    part = lang.maximum(((count + (splits - 1)) // splits + (step - 1)) // step, 1) * step
    parts = (count + (part - 1)) // part
    # Never more than `splits`, which is not seen where keys begin late; loops' rounds are counted.
    return begin, part, lang.minimum(parts, splits) if windowed else parts


class Results:
    """Where a part of a query leaves its results: `query` counts all of them, heads outermost."""

    def __init__(self, query: Any, split: Any) -> None:
        at = query * lang.parameter("splits", u32) + split
        self.sums: Any = at * lang.parameter("width", u32)
        self.stats: Any = lang.parameter("stats", u32) + at * 2


class Work:
    """What a group of the first launch has: a part of the keys of a head, and `rows` queries.

    Attributes:
        b, kv_head: the sequence, and the head of its keys; split: which part of these.
        begin, end: its keys; nothing to do unless one is before the other.
        all_begin, all_end: where the keys of all parts begin and end.
        windowed: whether there is a window, without which they begin at 0.
        block: which block of the queries it has.
        counts: whether a key counts for any query.

    Args:
        rows: of the group; single: each head has one query, so that rows are heads.
        same: as of `Sight`; known: as of `part_of`.
    """

    split: Any
    block: Any
    kv_head: Any
    b: Any

    def __init__(
        self, masks: dict[str, Any], scoring: Scoring, rows: int, single: bool = False,
        same: Callable[[Any], Any] = lang.workgroup_uniform, known: Known = UNKNOWN,
    ) -> None:  # fmt: skip
        p = known.among("heads share lq lk blocks splits qb qh ql")
        group = lang.group_id()
        self.split, group = group % p["splits"], group // p["splits"]
        self.block, group = group % p["blocks"], group // p["blocks"]
        heads, self._queries = p["heads"] // p["share"], p["share"] * p["lq"]
        self.kv_head, self.b = group % heads, group // heads
        sight = Sight(masks, scoring, self.b, p["lq"], p["lk"], same)
        self._sight, self._scoring = sight, scoring
        first, part, _ = part_of(self._sight, p["splits"], scoring.windowed, known)
        self.begin: Any = lang.minimum(first + self.split * part, self._sight.end)
        self.end: Any = lang.minimum(self.begin + part, self._sight.end)
        self.all_begin: Any = self._sight.begin
        self.all_end: Any = self._sight.end
        self.windowed: bool = scoring.windowed
        self.lines: Lines = Lines(masks, self.b, self.kv_head)
        self._first = self.block * rows
        self._all = (self.b * heads + self.kv_head) * self._queries
        self._p = p
        self._single = single

    def counts(self, key: Any, end: Any = None) -> Any:
        """Whether a key counts for any query, of those before `end`; None: of the part."""
        return self._sight.counts(key, self.end if end is None else end)

    def head_and_query(self, row: Any) -> tuple[Any, Any]:
        """Head and position of a row; those past the last are the last again."""
        at = lang.minimum(self._first + row, self._queries - 1)
        if self._single:
            return self.kv_head * self._p["share"] + at, lang.const(0, u32)
        return self.kv_head * self._p["share"] + at % self._p["share"], at // self._p["share"]

    def query(self, row: Any) -> Any:
        """Where a row of q begins."""
        p, (head, i) = self._p, self.head_and_query(row)
        return self.b * p["qb"] + head * p["qh"] + i * p["ql"]

    def has(self, row: Any) -> Any:
        """Whether there is such a row."""
        return row < self._queries - self._first

    def results(self, row: Any) -> Results:
        """Where a row's part of the results goes."""
        return Results(self._all + self._first + row, self.split)

    def result(self, row: Any) -> Any:
        """Where a row of y begins."""
        p, (head, i) = parameters("yb yh yl"), self.head_and_query(row)
        return self.b * p["yb"] + head * p["yh"] + i * p["yl"]

    def seen(self, row: Any, key: Any, counted: Any, score: Any) -> tuple[Any, Any]:
        """The score of a row and a key, capped, with the mask; whether the row sees the key.

        Args:
            counted: whether the key counts for any.
            score: the product times its factor, as a logarithm to base 2.
        """
        head, i = self.head_and_query(row)
        score = bounded(score, self._scoring, LOG2E)
        return self._sight.seen(score, counted, head, i, key, LOG2E)


# -- the second launch: the parts of each query, weighed and added up ------------------------------


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
    *, dim: int, early: bool, lay: Teams, scoring: Scoring, known: Known, partial: Argument,
    y: Argument, **masks: Argument,
) -> None:  # fmt: skip
    """A group has one query.

    Args:
        known: as of `part_of`.
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
        weights = [lang.exp2(x - highest) for x in (high, *tops)]
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
    weights = [lang.exp2(top - highest) for top in tops]
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
        ("lay", lay), ("scoring", spans),
    )  # fmt: skip
    return launch(
        combine, form, parts.all_queries, constants,
        _between(parts, form) | operands(form, "lengths", "starts", "sinks"),
        {"y": Ref(len(form.inputs), form.outputs[0])}, scalars=parts.scalars, threads=lay.threads,
    )  # fmt: skip
