"""`rope_cache_write` where threads have two chunks of several heads of a token.

The columns of one chunk turn with those of the other, or each with its neighbour. So a thread needs
its entries of the tables and its weights of the norm once, asks for all its chunks before it needs
the first, and reads none of them twice. The threads of a head add up its squares by shuffles.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.ops.cache import place_in
from centella.ops.elements import offset_of
from centella.ops.rope import NAN, Turn, table_entries
from centella.ops.rows import Values, fold
from centella.specs import Caps, Spec

THREADS = 128  # of a group
LANES = (1, 2, 4, 8, 16, 32)  # of a warp that can add up the squares of a head
EACH = (4, 2, 1)  # heads of a thread: up to 128 bytes on their way
FULL = 1 << 15  # threads that hide the way to memory; they have several heads beyond that

Chunks = list[list[Expr]]  # two of a head


class Share(Struct, frozen=True):
    """Who has which heads of a token. All heads of a thread are of queries, of keys or of values.

    Attributes:
        lanes: threads that have a head together.
        each: heads of a thread, a power of two, not more than lanes.
        heads: of queries; kv_heads: of keys, and of values.
        single: there is one sequence.
    """

    lanes: int
    each: int
    heads: int
    kv_heads: int
    single: bool

    @property
    def teams(self) -> int:
        """Teams of `lanes` threads that have a token together."""
        return (self.heads + 2 * self.kv_heads) // self.each


class PairTurn(Turn, frozen=True):
    """How the columns of a thread turn that has two chunks of each of its heads."""

    def columns(self, lane: Operand, lanes: int, width: int) -> list[Expr]:
        """Where they begin, of a thread of so many: with the partners of all their columns."""
        low, high = lane, lane + lanes
        if self.partial and not self.interleaved:
            half = lang.parameter("rotary", u32) // (2 * width)
            turns = lane < half
            low, high = (lang.select(turns, *c) for c in ((lane, lane + half), (lane + half, high)))
        return [low * width, high * width]

    def of_position(
        self, position: Expr, height: Operand, columns: Chunks
    ) -> list[tuple[list[Expr], list[Expr]]]:  # fmt: skip
        """The entries of the tables that `both` needs; of a position outside them NaN."""
        inside, at = position < height, lang.minimum(position, height - 1)
        found = []
        for part in columns if self.interleaved else columns[:1]:
            cos, sin = ([lang.select(inside, v, NAN) for v in t] for t in self.entries(at, part))
            found.append((cos, sin))
        return found

    def both(
        self, own: Chunks, entries: list[tuple[list[Expr], list[Expr]]], columns: Chunks
    ) -> Chunks:  # fmt: skip
        """The two chunks of a head, turned; what passes, as it was."""
        if self.interleaved:
            parts = zip(own, entries, columns, strict=True)
            out = [self._neighbours(None, lang.const(0, u32), *part) for part in parts]
        else:
            rows = list(zip(*own, *entries[0], strict=True))
            out = [[a * c + -s * b for a, b, c, s in rows], [b * c + s * a for a, b, c, s in rows]]
        if not self.partial:
            return out
        inside = [[c < lang.parameter("rotary", u32) for c in part] for part in columns]
        if not self.interleaved:  # of a chunk all columns turn, or none
            inside = [[part[0]] * len(part) for part in inside]
        return [
            [lang.select(turns, v, o) for turns, v, o in zip(*part, strict=True)]
            for part in zip(inside, out, own, strict=True)
        ]


def shared(y: Spec, kv_heads: int, width: int, norms: bool, caps: Caps) -> Share | None:
    """As many heads a thread as leave threads enough; None where a head is no pairs of chunks.

    Args:
        width: elements of a chunk.
        norms: squares of a head are added up, so its threads are lanes of one warp.
    """
    batch, heads, tokens, dim = y.shape
    lanes, rest = divmod(dim, 2 * width)
    if rest or (norms and not (caps.shuffles and lanes in LANES)):
        return None
    threads = batch * tokens * (heads + 2 * kv_heads) * lanes
    most = min(lanes, threads // FULL)
    common = math.gcd(heads, kv_heads)
    each = next((n for n in EACH if n <= most and not common % n), 1)
    return Share(lanes, each, heads, kv_heads, batch == 1)


def first_of(starts: Argument, b: Operand) -> Expr:
    """The position of the first token of a sequence."""
    return lang.bitcast(starts[b] if starts.rank == 1 else starts[b, 0], u32)


def write_heads(
    share: Share, turn: PairTurn, x: Argument, starts: Argument, y: Argument, keys: Argument,
    values: Argument, norms: Argument | None, norm_chunk: bool,
) -> None:  # fmt: skip
    """What a thread does: all loads, then its norms, then what turns."""
    width, each, queries = x.dtype.per_chunk, share.each, share.heads
    tokens, height, threads = (lang.parameter(n, u32) for n in ("tokens", "height", "threads"))
    thread = lang.global_id()
    lane = thread % share.lanes
    team = lang.minimum(thread, threads - 1) // share.lanes  # threads past the last shuffle too
    token, head = team // share.teams, team % share.teams * each
    b, i = (lang.const(0, u32), token) if share.single else (token // tokens, token % tokens)
    columns = turn.columns(lane, share.lanes, width)
    every = [[column + e for e in range(width)] for column in columns]

    position, place = first_of(starts, b) + i, offset_of([b, head, i], "x")
    loaded = [[x.load(place + at + column) for column in columns] for at in _apart(each, "x1")]
    weights: Chunks = []
    factors: list[Expr] = []
    if norms is not None:
        which = lang.select(head < queries, 0, lang.const(1, u32))
        weights = [table_entries(norms, which, part, norm_chunk) for part in every]
    entries = turn.of_position(position, height, every)
    if norms is not None:
        factors = _factors(loaded, share, lane)

    def turned(n: int) -> Chunks:
        own = loaded[n]
        if norms is not None:
            pairs = zip(own, weights, strict=True)
            own = [[v * factors[n] * w for v, w in zip(*of, strict=True)] for of in pairs]
        return turn.both(own, entries, every)

    def store(target: Argument, to: Operand, stride: str, heads: list[Chunks]) -> None:
        for at, chunks in zip(_apart(each, stride), heads, strict=True):
            for column, chunk in zip(columns, chunks, strict=True):
                target.store(to + at + column, chunk)

    axis = 1 if starts.rank == 1 else 0  # of a cache's heads
    with lang.if_(thread < threads):
        with lang.if_(head < queries + share.kv_heads):
            heads = [turned(n) for n in range(each)]
            with lang.if_(head < queries):
                store(y, offset_of([b, head, i], "y"), "y1", heads)
            with lang.else_():
                to, fits = place_in(starts, b, head - queries, i, "kc")
                with lang.if_(fits):
                    store(keys, to, f"kc{axis}", heads)
        with lang.else_():
            to, fits = place_in(starts, b, head - queries - share.kv_heads, i, "vc")
            with lang.if_(fits):
                store(values, to, f"vc{axis}", loaded)


def _apart(count: int, stride: str) -> list[Expr]:
    """How far each of so many heads is from the first."""
    return [lang.parameter(stride, u32) * n for n in range(count)]


def _factors(heads: list[Chunks], share: Share, lane: Expr) -> list[Expr]:
    """What the norm of each head multiplies by; a thread computes that of one head."""
    dim = 2 * share.lanes * len(heads[0][0])  # a power of two
    low, high = (
        scattered(
            [fold([v * v for v in chunk], operator.add) for chunk in chunks], share.lanes, lane
        )
        for chunks in zip(*heads, strict=True)
    )
    mean = (low + high) * (1 / dim)
    return gathered(1.0 / lang.sqrt(mean + lang.parameter("eps", f32)), share.each, lane)


def scattered(values: Values, lanes: int, lane: Any) -> Any:
    """Add up each of several values over lanes: lane i has the sum of values[i % len(values)].

    Args:
        values: as many as a power of two, not more than lanes.
        lane: the number of this one.
    """
    mask = 1
    while len(values) > 1:
        odd = lane & mask != 0
        pairs = zip(values[::2], values[1::2], strict=True)
        kept = [(lang.select(odd, b, a), lang.select(odd, a, b)) for a, b in pairs]
        values = [mine + lang.shuffle_xor(theirs, mask) for mine, theirs in kept]
        mask *= 2
    while mask < lanes:
        values, mask = [values[0] + lang.shuffle_xor(values[0], mask)], mask * 2
    return values[0]


def gathered(value: Any, count: int, lane: Any) -> Values:
    """The values of so many lanes, in each of them: of lane i, of each that is i modulo `count`."""
    values, mask = [value], count // 2
    while mask:
        odd = lane & mask != 0
        both = [(v, lang.shuffle_xor(v, mask)) for v in values]
        values = [x for v, o in both for x in (lang.select(odd, o, v), lang.select(odd, v, o))]
        mask //= 2
    return values
