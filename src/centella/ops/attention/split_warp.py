"""A warp of the decoding kernels whose keys and values come straight from memory (PTX alone).

A warp takes sixteen keys at a time to the registers that the products want them in, 16 bytes a
load; what it has of the softmax is in `warp_sums`. Which keys and elements of the head a register
holds is free as long as both factors agree:

- Of 32 elements thread `4 g + c` loads 8 c to 8 c + 7 of key g: both factors of two products.
- Of 64 elements of a value it loads 8 g to 8 g + 7 of keys 2 c and 2 c + 1 of each eight, and pairs
  them by element.

The next keys are on their way while the weights are computed, the next values during the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from msgspec import Struct

from centella import lang
from centella.dtypes import i32, u32
from centella.lang.ptx import Fragment
from centella.lang.values import Expr, Operand
from centella.op.op import Form
from centella.ops.attention.parts import Work
from centella.ops.attention.problem import AttentionAttrs, rows_of_16_bits, texts_of
from centella.ops.attention.warp_sums import CHAINS, KEYS, SplitTile, WarpSums
from centella.specs import Caps

MOST_DIM = 128
CHUNK = 8  # elements of a load of 16-bit rows

Read = Callable[[Any, Any], list[Any]]  # the words of a chunk of a row: of a key, from one on


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


class Warp(WarpSums):
    """A warp's sixteen keys and their values on the way, its sums, and where it is in the group.

    Args:
        dim: elements of a head; dtype: of q, k and v.
        chunk: elements of a key or value in 16 bytes; as many are a thread's of a part of a head.
    """

    def __init__(self, work: Work, dim: int, dtype: Any, chunk: int = CHUNK) -> None:
        super().__init__(work, dim, dtype, -(-dim // (8 * chunk)), 8 * chunk)
        self.chunk: int = chunk
        self.key_part: int = 4 * chunk  # of the head, by a warp's load
        self.key_parts: int = -(-dim // self.key_part)
        self.keys: Any = lang.vars(u32, 2, self.key_parts, 4)
        self.values: Any = lang.vars(u32, 2, 2, self.parts, 4)

    def element(self, part: int, size: int, lane: Operand) -> tuple[Any, Any]:
        """The first element of this thread's chunk of a part; whether it lies within the head."""
        first = lane * self.chunk + part * size
        if (part + 1) * size <= self.dim:
            return first, None
        return lang.minimum(first, self.dim - self.chunk), first < self.dim

    def load_queries(self, read: Read) -> None:
        """Queries as the first factor, whose other eight rows are zeros; `read` takes a row."""
        self.queries.clear()
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
            since: the first key of the source, which may be below 0; those before stay as they are.
        """
        read = source.keys(first if since is None else lang.bitcast(since, u32))
        for n, words in enumerate(self.keys):
            key = first + (self.number * KEYS + n * 8) + self.g
            with _where(key, since):
                for part, into in enumerate(words):
                    element, inside = self.element(part, self.key_part, self.c)
                    for var, word in zip(into, read(key, element), strict=True):
                        var.set(word if inside is None else lang.select(inside, word, 0))

    def load_values(self, first: Any, source: RowSource, since: Any = None) -> None:
        """Start to load the values from one on; as `load_keys`."""
        read = source.values(first if since is None else lang.bitcast(since, u32))
        for n in range(2):
            for e in range(2):
                key = self.key(first, n, e)
                with _where(key, since):
                    for part, into in enumerate(self.values[n][e]):
                        element, _ = self.element(part, self.width, self.g)
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
        self.clear_scores()
        for i, query in enumerate(self.queries):
            for n, chains in enumerate(self.scores):
                words = self.keys[n][i // 2]
                self.keys_of[0], self.keys_of[1] = words[i % 2 * 2], words[i % 2 * 2 + 1]
                lang.ptx.mma_sync(chains[i % CHAINS], query, self.keys_of)

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

    def leave(self, memory: Any, line: Any, size: int, e: int) -> None:
        """As of `WarpSums`: a thread has eight neighbours of each part."""
        at = line + self.g * self.chunk
        for part, tiles in enumerate(self.out):
            for j in range(0, len(tiles), 2):
                sums = [tiles[j + n // 2][e + n % 2 * 2] for n in range(4)]
                memory.store(at + (part * size + j * 2), sums)


def _where(key: Any, since: Any) -> AbstractContextManager[None]:
    return nullcontext() if since is None else lang.if_(lang.bitcast(key, i32) >= since)


def tile_of(form: Form[AttentionAttrs], caps: Caps) -> SplitTile | None:
    """The tile of 16-bit rows in whole chunks."""
    dim = form.inputs[0].shape[3]
    chunks = dim <= MOST_DIM and dim % CHUNK == 0
    fits = chunks and caps.tensor_cores and texts_of(form) is None and rows_of_16_bits(form)
    return SplitTile() if fits else None
