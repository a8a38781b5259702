"""The decoding variant: few queries, whose keys are split among groups.

A group reads one part of the keys and values of one head, once for all queries that share them:
every position of every head of the group of heads. A thread has 8 elements of the head; a team is
as many threads as that takes, and has one key at a time. Thread `team * rows + row` leads: it keeps
the running maximum and sum of a team and query. Scores are base 2 logarithms.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument, Shared
from centella.lang.values import Expr, Operand, Var
from centella.op.op import Form, Lowered
from centella.ops.attention.combine import launches_of
from centella.ops.attention.lines import load_piece, piece_of
from centella.ops.attention.masks import LOWEST, Scoring, product_scale
from centella.ops.attention.parts import ENOUGH_GROUPS, Parts, Work
from centella.ops.attention.problem import (
    AttentionAttrs,
    AttentionVariant,
    extents,
    keys_seen,
    texts_of,
)
from centella.ops.attention.table import FEW_QUERIES, MOST_ROWS, row_of
from centella.ops.attention.weights import LOG2E
from centella.specs import Caps

THREADS = 128
EACH = 8  # elements of a head that a thread has
MOST_DIM = THREADS * EACH
FEWEST_KEYS = 64  # of a part
ENOUGH_KEYS = 64


class Layout(Struct, frozen=True):
    """Who has what, for `rows` queries and loads of `width` elements.

    Piece i of a thread is the `width` elements from `(i lanes + lane) width`.
    """

    dim: int
    rows: int
    width: int

    @property
    def lanes(self) -> int:
        """Threads a team."""
        return -(-self.dim // EACH)

    @property
    def teams(self) -> int:
        """Teams a group: each needs its threads, and a leader for each query."""
        return max(min(THREADS // self.lanes, THREADS // self.rows), 1)

    @property
    def keys(self) -> int:
        """Keys that a team loads at once."""
        return 4 if self.rows <= 4 else 2

    @property
    def scores(self) -> int:
        """Scores of a team, a multiple of 4."""
        return self.rows * self.keys

    @property
    def pitch(self) -> int:
        """Words from one lane's partial products to the next's: off the banks of the first."""
        return self.teams * self.scores + 4

    @property
    def whole(self) -> int:
        """Words of a query's sums of one team."""
        return self.lanes * EACH

    @property
    def scratch(self) -> int:
        """Words for the partial products; later for one query's sums of every team."""
        return max(self.lanes * self.pitch, self.teams * self.whole)

    def element(self, lane: Operand, piece: int) -> Expr:
        """The first element of a thread's piece; it may lie past the head."""
        return (lane + piece * self.lanes) * self.width

    def ragged(self, piece: int) -> bool:
        """True when the piece of some lane reaches past the head."""
        return (piece + 1) * self.lanes * self.width > self.dim


class Thread:
    """A thread's place, and what it keeps: sums [rows][8]; a leader's maximum and sum.

    Threads left over repeat the last team's loads and write nothing.
    """

    def __init__(self, lay: Layout) -> None:
        self.lay: Layout = lay
        self.me: Expr = lang.local_id()
        self.team: Expr = lang.minimum(self.me // lay.lanes, lay.teams - 1)
        self.lane: Expr = self.me % lay.lanes
        self.out: Any = lang.vars(f32, lay.rows, EACH, init=0.0)
        self.top: Var = lang.var(LOWEST)
        self.total: Var = lang.var(0.0)
        self.scratch: Shared = lang.shared(f32, lay.scratch)
        self.weights: Shared = lang.shared(f32, lay.teams * lay.scores)
        self.shrinks: Shared = lang.shared(f32, lay.teams * lay.rows)

    @property
    def works(self) -> Expr:
        """Whether the thread is one of a team."""
        return self.me < self.lay.lanes * self.lay.teams

    @property
    def leads(self) -> Expr:
        """Whether it keeps the maximum and sum of a team and query."""
        return self.me < self.lay.teams * self.lay.rows

    def queries(self, work: Work, scale: Any, q: Any) -> list[list[Any]]:
        """A thread's elements of each query, times the factor of scores."""
        queries = []
        for row in range(self.lay.rows):
            start = work.query(lang.const(row, u32))
            queries.append([x * scale for x in self.load(q, start, True, None)])
        return queries

    def read(self, work: Work, query: list[list[Any]], k: Any, v: Any) -> None:
        """Take the keys of the group's part."""
        lay = self.lay
        key_pitch, value_pitch = (lang.parameter(n, u32) for n in ("kl", "vl"))
        for base in lang.range(work.begin, work.end, lay.teams * lay.keys):
            ahead = [base + j * lay.teams for j in range(lay.keys)]
            safe = [lang.minimum(at + self.team, work.end - 1) for at in ahead]
            rows = [
                (key, *work.lines.places(key), *(of(key) for of in work.lines.scales(key)))
                for key in safe
            ]
            keys = [self.load(k, at + key * key_pitch, True, s) for key, at, _, s, _ in rows]
            values = [self.load(v, at + key * value_pitch, False, s) for key, _, at, _, s in rows]
            self.take(work, ahead, query, keys, values)

    def take(
        self, work: Work, ahead: list[Any], query: list[list[Any]], keys: list[list[Any]],
        values: list[list[Any]], end: Any = None,
    ) -> None:  # fmt: skip
        """Take some keys of each team: scores, weights, sums.

        Args:
            ahead: the first team's keys; the next team's are one further.
            end: of the keys that count; None: of the group's part.
        """
        kept = [work.counts(at + self.team, end) for at in ahead]
        # what hides a key hides a NaN in its value
        values = [[lang.select(c, x, 0.0) for x in xs] for c, xs in zip(kept, values, strict=True)]
        self._multiply(query, keys)
        lang.barrier()
        with lang.if_(self.leads):
            led = self.me % self.lay.rows
            theirs = [at + self.me // self.lay.rows for at in ahead]
            pairs = zip(theirs, self._gather(), strict=True)
            self._soften([work.seen(led, key, work.counts(key, end), x) for key, x in pairs])
        lang.barrier()
        self._accumulate(values)

    def load(self, source: Any, start: Operand, clean: bool, scale: Any) -> list[Expr]:
        """A thread's elements of a row; where `clean`, zeros for those past the head."""
        lay, loaded = self.lay, list[Any]()
        last = (lay.dim - 1) // lay.width * lay.width
        for i in range(EACH // lay.width):
            first = lay.element(self.lane, i)
            at = start + (lang.minimum(first, last) if lay.ragged(i) else first)
            piece = load_piece(source, at, lay.width, scale)
            if clean and lay.ragged(i):
                piece = [lang.select(first + e < lay.dim, x, 0.0) for e, x in enumerate(piece)]
            loaded += piece
        return loaded

    def _multiply(self, query: list[list[Any]], keys: list[list[Any]]) -> None:
        """Leave the partial products of every query and key for the leaders."""
        lay = self.lay
        products = [_dot(row, key) for row in query for key in keys]
        with lang.if_(self.works):
            for n in range(0, lay.scores, 4):
                at = self.lane * lay.pitch + self.team * lay.scores + n
                self.scratch.store(at, products[n : n + 4])

    def _gather(self) -> list[Expr]:
        """A leader's scores: the partial products of its team, in the order of the head."""
        lay, scores, memory = self.lay, list[Any](), self.scratch
        for lane in range(lay.lanes):
            at = self.me * lay.keys + lane * lay.pitch
            parts = memory.load(at) if lay.keys == 4 else [memory[at + j] for j in range(lay.keys)]
            scores = [a + b for a, b in zip(scores, parts, strict=True)] if lane else parts
        return scores

    def _soften(self, seen_scores: list[tuple[Expr, Expr]]) -> None:
        """A leader's step of the running softmax: weights of the new keys, what shrinks the old.

        Args:
            seen_scores: scores, and whether each counts.
        """
        scores = [lang.select(seen, score, LOWEST) for score, seen in seen_scores]
        high = lang.fmax(self.top, reduce(lang.fmax, scores))
        shrink = lang.exp2(self.top - high)
        total = self.total * shrink
        for j, ((_, seen), score) in enumerate(zip(seen_scores, scores, strict=True)):
            weight = lang.select(seen, lang.exp2(score - high), 0.0)
            self.weights[self.me * self.lay.keys + j] = weight
            total = total + weight
        self.shrinks[self.me] = shrink
        self.total.set(total)
        self.top.set(high)

    def _accumulate(self, values: list[list[Expr]]) -> None:
        lay, weights = self.lay, list[Any]()
        for n in range(0, lay.scores, 4):
            weights += self.weights.load(self.team * lay.scores + n)
        for row in range(lay.rows):
            shrink = self.shrinks[self.team * lay.rows + row]
            for d in range(EACH):
                value = self.out[row][d] * shrink
                for j in range(lay.keys):
                    value = lang.fma(weights[row * lay.keys + j], values[j][d], value)
                self.out[row][d].set(value)

    def _weigh(self) -> tuple[Operand, Operand]:
        """Weights of the teams; of query `me % rows` the maximum, and the sum of all its weights.

        Memory `weights` has them by team and query.
        """
        lay, row = self.lay, self.me % self.lay.rows
        highest, whole = lang.var(LOWEST), lang.var(0.0)
        lang.barrier()
        with lang.if_(self.leads):
            self.shrinks[self.me] = self.top
        lang.barrier()
        with lang.if_(self.leads):
            for team in lang.range(lang.const(0, u32), lay.teams):
                highest.set(lang.fmax(highest, self.shrinks[team * lay.rows + row]))
            weight = lang.exp2(self.top - highest)
            self.weights[self.me] = weight
            self.weights[lay.teams * lay.rows + self.me] = weight * self.total
        lang.barrier()
        with lang.if_(self.me < lay.rows):
            for team in lang.range(lang.const(0, u32), lay.teams):
                whole += self.weights[(lay.teams + team) * lay.rows + row]
        return highest, whole

    def _add_up(self, row: int, partial: Any, start: Operand, wanted: Operand) -> None:
        """Write the sums of a query over all teams, in order, where it is `wanted`."""
        lay = self.lay
        with lang.if_(self.works):
            factor = self.weights[self.team * lay.rows + row]
            values = [value * factor for value in self.out[row]]
            for i in range(EACH // lay.width):
                at = self.team * lay.whole + lay.element(self.lane, i)
                piece = values[i * lay.width : (i + 1) * lay.width]
                if lay.width == 1:
                    self.scratch[at] = piece[0]
                for e in range(0, lay.width if lay.width > 1 else 0, 4):
                    self.scratch.store(at + e, piece[e : e + 4])
        lang.barrier()
        with lang.if_(wanted):
            chunks = -(-lay.dim // 4) * 4  # the last one may end with anything
            for d in lang.range(self.me, chunks, THREADS):
                value = lang.var(0.0)
                for team in lang.range(lang.const(0, u32), lay.teams):
                    value += self.scratch[team * lay.whole + d]
                partial[start + d] = value

    def finish(self, work: Work, partial: Any) -> None:
        """Leave the part's results."""
        highest, whole = self._weigh()
        with lang.if_((self.me < self.lay.rows) & work.has(self.me)):
            at = work.results(self.me).stats
            partial[at] = highest
            partial[at + 1] = whole
        for row in range(self.lay.rows):
            if row:
                lang.barrier()
            query = lang.const(row, u32)
            self._add_up(row, partial, work.results(query).sums, work.has(query))


def _dot(query: list[Any], key: list[Any]) -> Any:
    """In two chains, even and odd elements."""
    parts = [query[0] * key[0], query[1] * key[1]]
    for d in range(2, EACH):
        parts[d % 2] = lang.fma(query[d], key[d], parts[d % 2])
    return parts[0] + parts[1]


def _split(
    *, dim: int, rows: int, scoring: Scoring, vector: bool, q: Argument, k: Argument, v: Argument,
    partial: Argument, **masks: Argument,
) -> None:  # fmt: skip
    work = Work(masks, scoring, rows)
    my = Thread(Layout(dim, rows, piece_of(k, vector)))
    with lang.if_(work.begin < work.end):
        query = my.queries(work, product_scale(scoring, LOG2E), q)
        my.read(work, query, k, v)
        my.finish(work, partial)


kernel: Kernel = Kernel(_split, workgroup=THREADS, name="attention_split", rewritable=True)


def parts_of(
    form: Form[AttentionAttrs], caps: Caps, enough: int = ENOUGH_GROUPS, most: int = MOST_ROWS
) -> Parts | None:
    """The parts, where the threads of a group hold a head.

    Args:
        enough: groups for a large GPU; most: queries of a group.
    """
    batch, _, queries, dim = form.inputs[0].shape
    if not 0 < dim <= MOST_DIM or texts_of(form) is not None:
        return None
    row = row_of(caps)
    few_keys, fewer = row.short
    short = batch == 1 and keys_seen(form, queries) <= few_keys
    return Parts.of(form, FEWEST_KEYS, enough, min(fewer if short else row.rows, most))


def _launches(form: Form[AttentionAttrs], parts: Parts, caps: Caps) -> Lowered:
    vector = all(s.aligned for s in form.inputs[:3])
    return launches_of(kernel, parts, form, (("vector", vector),), caps)


def few_queries(form: Form[AttentionAttrs], caps: Caps) -> bool:
    """Few queries of many keys, of a head that a group holds."""
    (lq, dim), (_, lk) = form.inputs[0].shape[2:], extents(form)
    return texts_of(form) is None and lq <= FEW_QUERIES and lk >= ENOUGH_KEYS and dim <= MOST_DIM


SPLIT = AttentionVariant(
    "split", parts_of, _launches, few_queries, needs=f"takes head_dim 1 to {MOST_DIM}, no offsets"
)
