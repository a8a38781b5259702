"""A warp of the decoding kernels on tensor cores: sixteen keys at a time (PTX alone).

A warp takes its keys straight from memory to the registers that the products want them in, 16 bytes
a load. Which keys and elements of the head a register holds is free as long as both factors agree:

- Scores are Q K^T. Of 32 elements thread `4 g + c` loads 8 c to 8 c + 7 of key g: both factors of
  two products. Query g has its scores in the same four threads.
- Sums are V^T P^T. The scores of query g are where its weights are wanted; of 64 elements the
  thread loads 8 g to 8 g + 7 of keys 2 c and 2 c + 1 of each eight, and pairs them by element.
- The sum of weights is one more row of that product, a row of ones. What shrinks query g's sums
  where its maximum grew is spread from its threads to those that have the sums by a product of
  ones too: maxima are whole, so that the factor, a power of two, is exact in bf16.

The next keys are on their way while the weights are computed, the next values during the scores.
Of bf16 weights are the sum of two numbers, as in `mma`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import chain
from typing import Any, Protocol

from msgspec import Struct

from centella import lang
from centella.dtypes import bf16, f32, u32
from centella.lang.ptx import Fragment
from centella.lang.values import Expr, Operand
from centella.op.op import Form
from centella.ops.attention.masks import LOWEST
from centella.ops.attention.parts import Work
from centella.ops.attention.problem import AttentionAttrs, rows_of_16_bits, texts_of
from centella.ops.attention.table import MOST_ROWS
from centella.ops.attention.weights import put
from centella.ops.rows import QUAD, over_lanes
from centella.specs import Caps

WARP = 32
KEYS = 16  # of a warp, at a time
MOST_DIM = 128
CHUNK = 8  # elements of a load of 16-bit rows

Read = Callable[[Any, Any], list[Any]]  # the words of a chunk of a row: of a key, from one on


class SplitTile(Struct, frozen=True):
    """Warps of a group, groups that a multiprocessor has registers for, groups of a launch."""

    warps: int = 4
    together: int = 2
    groups: int = 264

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.warps * WARP

    @property
    def step(self) -> int:
        """Keys that a group takes at a time."""
        return self.warps * KEYS


class RowSource(Protocol):
    """Where rows of keys and of values come from; a key past the last is read as the last."""

    def keys(self, first: Any) -> Read:
        """What reads keys of the block that key `first` is in."""
        ...

    def values(self, first: Any) -> Read:
        """The same of values."""
        ...


class CachedRows(Struct, frozen=True, eq=False):
    """Rows of keys and values in memory, up to an end; None: that of the group's part."""

    work: Work
    k: Any
    v: Any
    end: Any = None

    def keys(self, first: Any) -> Read:
        """As of `RowSource`."""
        return self._reader(self.k, self.work.lines.places(first)[0], "kl")

    def values(self, first: Any) -> Read:
        """As of `RowSource`."""
        return self._reader(self.v, self.work.lines.places(first)[1], "vl")

    def _reader(self, source: Any, start: Operand, pitch: str) -> Read:
        end = self.work.end if self.end is None else self.end
        step, last = lang.parameter(pitch, u32), end - 1

        def read(key: Operand, element: Any) -> list[Expr]:
            at = start + lang.minimum(key, last) * step
            return source.load_bits(at + element)  # type: ignore[no-any-return]  # traced

        return read


class Warp:
    """A warp's sixteen keys and their values on the way, its sums, and where it is in the group.

    Args:
        dim: elements of a head; dtype: of q, k and v.
        chunk: elements of a key or value in 16 bytes; as many are a thread's of a part of a head.
    """

    g: Any
    c: Any
    number: Any
    work: Work
    dim: int
    chunk: int
    key_part: int  # of the head, by a warp's load
    value_part: int
    key_parts: int
    value_parts: int
    keys: Any
    values: Any
    queries: list[Any]
    scores: list[Fragment]
    out: list[list[Fragment]]
    total: Fragment
    spread: Fragment
    shrink: Fragment
    exact: Fragment
    ones: Fragment
    weights: list[Fragment]
    values_of: Fragment
    keys_of: Fragment
    dtype: Any
    base: Any  # what weights of query g are relative to; a whole number

    def __init__(self, work: Work, dim: int, dtype: Any, chunk: int = CHUNK) -> None:
        lane = lang.local_id() % WARP
        self.g, self.c = lane // 4, lane % 4
        self.number = lang.local_id() // WARP
        self.work, self.dim, self.chunk = work, dim, chunk
        self.key_part, self.value_part = 4 * chunk, 8 * chunk
        self.key_parts, self.value_parts = -(-dim // self.key_part), -(-dim // self.value_part)
        self.keys = lang.vars(u32, 2, self.key_parts, 4)
        self.values = lang.vars(u32, 2, 2, self.value_parts, 4)
        self.queries = []
        self.scores = [Fragment(f32, (16, 8)) for _ in range(2)]
        self.out = [
            [Fragment(f32, (16, 8)) for _ in range(chunk // 2)] for _ in range(self.value_parts)
        ]
        self.total = Fragment(f32, (16, 8))
        self.spread = Fragment(f32, (16, 8))
        self.shrink = Fragment(bf16, (16, 8))
        self.exact = _ones(bf16)
        self.ones = self.exact if dtype is bf16 else _ones(dtype)
        self.weights = [Fragment(dtype, (16, 8)) for _ in range(2 if dtype is bf16 else 1)]
        self.values_of = Fragment(dtype, (16, 16))
        self.keys_of = Fragment(dtype, (16, 8))
        self.dtype = dtype
        self.shrink.fill(0)
        self.base = lang.var(LOWEST)
        self.begin()

    def begin(self) -> None:
        """Nothing has been summed."""
        for sums in self._sums:
            sums.fill(0.0)

    @property
    def _sums(self) -> list[Any]:
        return [*chain.from_iterable(self.out), self.total]

    def element(self, part: int, size: int, lane: Operand) -> tuple[Any, Any]:
        """The first element of this thread's chunk of a part; whether it lies within the head."""
        first = lane * self.chunk + part * size
        if (part + 1) * size <= self.dim:
            return first, None
        return lang.minimum(first, self.dim - self.chunk), first < self.dim

    def load_queries(self, read: Read) -> None:
        """Queries as the first factor, whose other eight rows are zeros; `read` takes a row."""
        self.queries = []
        for part in range(self.key_parts):
            element, inside = self.element(part, self.key_part, self.c)
            each = range(0, self.chunk, CHUNK)
            words = [word for e in each for word in read(self.g, element + e)]
            if inside is not None:
                words = [lang.select(inside, w, 0) for w in words]
            for n in range(0, len(words), 2):
                query = Fragment(self.dtype, (16, 16))
                query.fill(0)
                query[0], query[2] = words[n], words[n + 1]
                self.queries.append(query)

    def load_keys(self, first: Any, source: RowSource, since: Any = None) -> None:
        """Start to load the keys from one on, all of one block.

        Args:
            since: the first key of the source; those before stay as they are.
        """
        read = source.keys(first if since is None else since)
        for n, words in enumerate(self.keys):
            key = first + (self.number * KEYS + n * 8) + self.g
            with _where(key, since):
                for part, into in enumerate(words):
                    element, inside = self.element(part, self.key_part, self.c)
                    for var, word in zip(into, read(key, element), strict=True):
                        var.set(word if inside is None else lang.select(inside, word, 0))

    def key(self, first: Operand, n: int, e: int) -> Any:
        """Of the keys from one on: what register e of scores n belongs to."""
        return first + (self.number * KEYS + n * 8 + e) + self.c * 2

    def load_values(self, first: Any, source: RowSource, since: Any = None) -> None:
        """Start to load the values from one on; as `load_keys`."""
        read = source.values(first if since is None else since)
        for n in range(2):
            for e in range(2):
                key = self.key(first, n, e)
                with _where(key, since):
                    for part, into in enumerate(self.values[n][e]):
                        element, _ = self.element(part, self.value_part, self.g)
                        for var, word in zip(into, read(key, element), strict=True):
                            var.set(word)

    def walk(self, begin: Operand, end: Operand, step: int, scale: Any, source: RowSource) -> None:
        """Take the keys from `begin`, whose loads have begun, to `end`."""
        for first in lang.range(begin, end, step):
            after = first + step
            self.score()
            with lang.if_(after < end):
                self.load_keys(after, source)
            counted = self.soften(first, scale)
            self.mix(counted)
            with lang.if_(after < end):
                self.load_values(after, source)

    def score(self) -> None:
        """The products of the queries and the keys that are loaded."""
        for n, scores in enumerate(self.scores):
            scores.fill(0.0)
            for i, query in enumerate(self.queries):
                words = self.keys[n][i // 2]
                self.keys_of[0], self.keys_of[1] = words[i % 2 * 2], words[i % 2 * 2 + 1]
                lang.ptx.mma_sync(scores, query, self.keys_of)

    def product(self, n: int, e: int, scale: Operand) -> Any:
        """Register e of scores n, times the factor of scores."""
        return self.scores[n][e] * scale

    def weigh(self, n: int, both: list[Expr]) -> None:
        """Keep the weights of two keys."""
        put(self.weights, n, both)

    def soften(self, first: Any, scale: Any) -> list[list[Any]]:
        """Weights of the keys; where a maximum grew, less of what was summed.

        Returns:
            Which keys count.
        """
        counted = [[self.work.counts(self.key(first, n, e)) for e in range(2)] for n in range(2)]
        seen = [
            [
                self.work.seen(
                    self.g, self.key(first, n, e), counted[n][e], self.product(n, e, scale)
                )
                for e in range(2)
            ]
            for n in range(2)
        ]
        high = lang.const(LOWEST, f32)
        for score, shown in chain.from_iterable(seen):
            high = lang.fmax(high, lang.select(shown, score, LOWEST))
        base = lang.fmax(self.base, lang.ceil(over_lanes(high, QUAD, "fmax")))
        shrink = lang.exp2_native(self.base - base)
        self.base.set(base)
        for n, pairs in enumerate(seen):
            both = [
                lang.select(shown, lang.exp2_native(score - base), 0.0) for score, shown in pairs
            ]
            self.weigh(n, both)
        self.shrink[0] = (lang.select(self.c == 0, shrink, 0.0), lang.const(0.0, f32))
        self.spread.fill(0.0)
        lang.ptx.mma_sync(self.spread, self.exact, self.shrink)
        factors = [self.spread[e] for e in range(2)]
        for sums in self._sums:
            for register in range(4):
                sums[register] = sums[register] * factors[register % 2]
        return counted

    def mix(self, counted: list[list[Any]]) -> None:
        """Add up the values; those of keys that do not count may be anything."""
        for weights in self.weights:
            lang.ptx.mma_sync(self.total, self.ones, weights)
        for part, tiles in enumerate(self.out):
            for j, sums in enumerate(tiles):
                for n in range(2):
                    low, next_ = (
                        lang.select(counted[n][e], self.values[n][e][part][j], 0) for e in range(2)
                    )
                    self.values_of[2 * n] = (low & 0xFFFF) | (next_ << 16)
                    self.values_of[2 * n + 1] = (low >> 16) | (next_ & 0xFFFF0000)
                for weights in self.weights:
                    lang.ptx.mma_sync(sums, self.values_of, weights)

    def add_up(
        self, tile: SplitTile, rows: int, put_stats: Callable[[Any, Any, Any, Any], None],
        put_sums: Callable[[Any, Any, list[Any]], None], copies: int = 1,
    ) -> None:  # fmt: skip
        """What the warps of a group have, together: relative to one maximum, in order.

        Rows past the queries are the last one's again.

        Args:
            put_stats: takes a query, its maximum, the sum of its weights, and which copy it is, of
                so many.
            put_sums: takes a query, an element of the head and its sums from there on, four.
        """
        me = lang.local_id()
        tops, totals = (lang.shared(f32, tile.warps * MOST_ROWS) for _ in range(2))
        pitch, size = self.value_part + 4, tile.warps * rows * (self.value_part + 4)
        memory = lang.shared(f32, self.value_parts * size)
        with lang.if_(self.c == 0):
            tops[self.number * MOST_ROWS + self.g] = self.base
        for e in range(2):
            query = self.c * 2 + e  # whose sums this thread has
            with lang.if_(self.g == 0):
                totals[self.number * MOST_ROWS + query] = self.total[e]
            with lang.if_(query < rows):
                at = (self.number * rows + query) * pitch + self.g * self.chunk
                for part, tiles in enumerate(self.out):
                    for j in range(0, len(tiles), 2):
                        sums = [tiles[j + n // 2][e + n % 2 * 2] + 0.0 for n in range(4)]
                        memory.store(at + (part * size + j * 2), sums)
        lang.barrier()

        def weights_of(query: Operand) -> tuple[Expr, list[Expr]]:
            """The maximum of a query, and what each warp's sums are to be multiplied with."""
            each = [tops[n * MOST_ROWS + query] for n in range(tile.warps)]
            high = reduce(lang.fmax, each)
            return high, [lang.exp2_native(top - high) for top in each]

        with lang.if_(me < rows * copies):
            query = me % rows
            high, factors = weights_of(query)
            whole = lang.const(0.0, f32)
            for n, factor in enumerate(factors):
                whole = lang.fma(factor, totals[n * MOST_ROWS + query], whole)
            put_stats(query, high, whole, me // rows)
        across = self.dim // 4
        for base in range(0, rows * across, tile.threads):
            item = me + base
            row, element = item // across, item % across * 4
            which, column = element // self.value_part, element % self.value_part
            with lang.if_(item < rows * across):
                _, factors = weights_of(row)
                added = [lang.const(0.0, f32)] * 4
                for n, factor in enumerate(factors):
                    theirs = memory.load(which * size + (n * rows + row) * pitch + column)
                    added = [lang.fma(factor, x, a) for a, x in zip(added, theirs, strict=True)]
                put_sums(row, element, added)


def _where(key: Any, since: Any) -> AbstractContextManager[None]:
    return nullcontext() if since is None else lang.if_(key >= since)


def _ones(dtype: Any) -> Any:
    ones = Fragment(dtype, (16, 16))
    for register in range(4):
        ones[register] = (lang.const(1.0, f32), lang.const(1.0, f32))
    return ones


def tile_of(form: Form[AttentionAttrs], caps: Caps) -> SplitTile | None:
    """The tile of 16-bit rows in whole chunks."""
    dim = form.inputs[0].shape[3]
    chunks = dim <= MOST_DIM and dim % CHUNK == 0
    fits = chunks and caps.tensor_cores and texts_of(form) is None and rows_of_16_bits(form)
    return SplitTile() if fits else None
