"""The steps of the decoding kernel: what a thread of a team does with keys, scores and sums.

A thread has 8 elements of the head; a team is as many threads as that takes, and has one key at a
time. Thread `team * rows + row` leads: it keeps the running maximum and sum of a team and query.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.ops.attention.masks import LOWEST

THREADS = 128
EACH = 8  # elements of a head that a thread has


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

    def element(self, lane: Any, piece: int) -> Any:
        """The first element of a thread's piece; it may lie past the head."""
        return (lane + piece * self.lanes) * self.width

    def ragged(self, piece: int) -> bool:
        """True when the piece of some lane reaches past the head."""
        return (piece + 1) * self.lanes * self.width > self.dim


class Thread(Struct, frozen=True):
    """A thread's place, and what it keeps: sums [rows][8]; a leader's maximum and sum."""

    lay: Layout
    me: Any
    team: Any
    lane: Any
    out: Any
    top: Any
    total: Any
    scratch: Any
    weights: Any
    shrinks: Any

    @property
    def works(self) -> Any:
        """Whether the thread is part of a team."""
        return self.me < self.lay.lanes * self.lay.teams

    @property
    def leads(self) -> Any:
        """Whether it leads."""
        return self.me < self.lay.teams * self.lay.rows


def thread(lay: Layout) -> Thread:
    """This thread; those left over repeat the last team's loads and write nothing."""
    me = lang.local_id()
    return Thread(
        lay, me, lang.minimum(me // lay.lanes, lay.teams - 1), me % lay.lanes,
        lang.vars(f32, lay.rows, EACH, init=0.0), lang.var(LOWEST), lang.var(0.0),
        lang.shared(f32, lay.scratch), lang.shared(f32, lay.teams * lay.scores),
        lang.shared(f32, lay.teams * lay.rows),
    )  # fmt: skip


def load(my: Thread, source: Any, place: Any, clean: bool) -> list[Any]:
    """A thread's elements of a row; where `clean`, zeros for those past the head."""
    lay, loaded = my.lay, list[Any]()
    last = (lay.dim - 1) // lay.width * lay.width
    for i in range(EACH // lay.width):
        first = lay.element(my.lane, i)
        at = place + (lang.minimum(first, last) if lay.ragged(i) else first)
        piece = source.load(at) if lay.width > 1 else [source[at]]
        if clean and lay.ragged(i):
            piece = [lang.select(first + e < lay.dim, x, 0.0) for e, x in enumerate(piece)]
        loaded += piece
    return loaded


def multiply(my: Thread, query: list[list[Any]], keys: list[list[Any]]) -> None:
    """Leave the partial products of every query and key for the leaders."""
    lay = my.lay
    products = [_dot(row, key) for row in query for key in keys]
    with lang.if_(my.works):
        for n in range(0, lay.scores, 4):
            at = my.lane * lay.pitch + my.team * lay.scores + n
            my.scratch.store(at, products[n : n + 4])


def _dot(query: list[Any], key: list[Any]) -> Any:
    """In two chains, even and odd elements."""
    parts = [query[0] * key[0], query[1] * key[1]]
    for d in range(2, EACH):
        parts[d % 2] = lang.fma(query[d], key[d], parts[d % 2])
    return parts[0] + parts[1]


def gather(my: Thread) -> list[Any]:
    """A leader's scores: the partial products of its team, in the order of the head."""
    lay, scores = my.lay, list[Any]()
    for lane in range(lay.lanes):
        at = my.me * lay.keys + lane * lay.pitch
        found = (
            my.scratch.load(at) if lay.keys == 4 else [my.scratch[at + j] for j in range(lay.keys)]
        )
        scores = [a + b for a, b in zip(scores, found, strict=True)] if lane else found
    return scores


def soften(my: Thread, scores: list[Any], visible: list[Any]) -> None:
    """A leader's step of the running softmax: weights of the new keys, what shrinks the old."""
    found = [lang.select(c, s, LOWEST) for c, s in zip(visible, scores, strict=True)]
    high = found[0]
    for score in found[1:]:
        high = lang.fmax(high, score)
    high = lang.fmax(my.top, high)
    shrink = lang.exp2(my.top - high)
    total = my.total * shrink
    for j, (seen, score) in enumerate(zip(visible, found, strict=True)):
        weight = lang.select(seen, lang.exp2(score - high), 0.0)
        my.weights[my.me * my.lay.keys + j] = weight
        total = total + weight
    my.shrinks[my.me] = shrink
    my.total.set(total)
    my.top.set(high)


def accumulate(my: Thread, values: list[list[Any]]) -> None:
    """Add the new keys' values to what is summed."""
    lay, weights = my.lay, list[Any]()
    for n in range(0, lay.scores, 4):
        weights += my.weights.load(my.team * lay.scores + n)
    for row in range(lay.rows):
        shrink = my.shrinks[my.team * lay.rows + row]
        for d in range(EACH):
            value = my.out[row][d] * shrink
            for j in range(lay.keys):
                value = lang.fma(weights[row * lay.keys + j], values[j][d], value)
            my.out[row][d].set(value)


def weigh(my: Thread) -> tuple[Any, Any]:
    """Weights of the teams; of query `me % rows` the maximum, and the sum of all its weights.

    Memory `weights` has them by team and query.
    """
    lay, row = my.lay, my.me % my.lay.rows
    highest, whole = lang.var(LOWEST), lang.var(0.0)
    lang.barrier()
    with lang.if_(my.leads):
        my.shrinks[my.me] = my.top
    lang.barrier()
    with lang.if_(my.leads):
        for team in lang.range(lang.const(0, u32), lay.teams):
            highest.set(lang.fmax(highest, my.shrinks[team * lay.rows + row]))
        weight = lang.exp2(my.top - highest)
        my.weights[my.me] = weight
        my.weights[lay.teams * lay.rows + my.me] = weight * my.total
    lang.barrier()
    with lang.if_(my.me < lay.rows):
        for team in lang.range(lang.const(0, u32), lay.teams):
            whole += my.weights[(lay.teams + team) * lay.rows + row]
    return highest, whole


def add_up(my: Thread, row: int, partial: Any, place: Any, wanted: Any) -> None:
    """Write the sums of a query over all teams, in order, where it is `wanted`."""
    lay = my.lay
    with lang.if_(my.works):
        factor = my.weights[my.team * lay.rows + row]
        values = [value * factor for value in my.out[row]]
        for i in range(EACH // lay.width):
            at = my.team * lay.whole + lay.element(my.lane, i)
            piece = values[i * lay.width : (i + 1) * lay.width]
            if lay.width == 1:
                my.scratch[at] = piece[0]
            for e in range(0, lay.width if lay.width > 1 else 0, 4):
                my.scratch.store(at + e, piece[e : e + 4])
    lang.barrier()
    with lang.if_(wanted):
        for d in lang.range(my.me, -(-lay.dim // 4) * 4, THREADS):  # a chunk's last may be anything
            value = lang.var(0.0)
            for team in lang.range(lang.const(0, u32), lay.teams):
                value += my.scratch[team * lay.whole + d]
            partial[place + d] = value
