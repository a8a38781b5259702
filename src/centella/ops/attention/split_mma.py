"""The decoding variant on tensor cores, for f16 and bf16 on NVIDIA GPUs from sm_80 on (PTX alone).

As in `split` a group reads one part of the keys and values of one head, once for up to eight
queries that share them; here a warp takes sixteen keys at a time, straight from global memory to
the registers that the products want them in, 16 bytes a load. Which keys and elements of the head
a register holds is free as long as both factors agree:

- Scores are Q K^T. Of 32 elements thread `4 g + c` loads 8 c to 8 c + 7 of key g: both factors of
  two products. Query g has its scores in the same four threads.
- Sums are V^T P^T. The scores of query g are where its weights are wanted; of 64 elements the
  thread loads 8 g to 8 g + 7 of keys 2 c and 2 c + 1 of each eight, and pairs them by element.
- The sum of weights is one more row of that product, a row of ones. What shrinks query g's sums
  where its maximum grew is spread from its threads to those that hold the sums by a product of
  ones too: maxima are whole, so that the factor, a power of two, is exact in bf16.

The next keys are on their way while the weights are computed, the next values during the scores.
Of bf16 weights are the sum of two numbers, as in `mma`.
"""

from __future__ import annotations

from functools import reduce
from itertools import chain
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import bf16, f32, u32
from centella.emit.program import Kernel
from centella.op.form import Form
from centella.op.op import Lowered
from centella.ops.attention.masks import LOWEST, Scoring, product_scale
from centella.ops.attention.parts import Parts, Work, launches_of
from centella.ops.attention.problem import AttentionAttrs, AttentionVariant, rows_of_16_bits
from centella.ops.attention.split import few_queries
from centella.ops.attention.table import MOST_ROWS
from centella.ops.attention.weights import LOG2E, put
from centella.specs import Caps

WARP = 32
KEYS = 16  # of a warp, at a time
MOST_DIM = 128
KEY_PART, VALUE_PART, CHUNK = 32, 64, 8  # elements of the head: of loads by a warp, of one
PITCH = VALUE_PART + 4  # words of a query's sums in shared memory


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


class _Warp:
    """A warp's sixteen keys and their values on the way, its sums, and its place in the group."""

    def __init__(self, work: Work, dim: int, k: Any, v: Any) -> None:
        lane = lang.local_id() % WARP
        self.g, self.c = lane // 4, lane % 4
        self.number = lang.local_id() // WARP
        self.work, self.dim, self.k, self.v = work, dim, k, v
        self.key_parts, self.value_parts = -(-dim // KEY_PART), -(-dim // VALUE_PART)
        self.keys = lang.vars(u32, 2, self.key_parts, 4)
        self.values = lang.vars(u32, 2, 2, self.value_parts, 4)
        self.scores = [lang.ptx.Fragment(f32, (16, 8)) for _ in range(2)]
        self.out = [
            [lang.ptx.Fragment(f32, (16, 8)) for _ in range(4)] for _ in range(self.value_parts)
        ]
        self.total = lang.ptx.Fragment(f32, (16, 8))
        self.spread = lang.ptx.Fragment(f32, (16, 8))
        self.shrink = lang.ptx.Fragment(bf16, (16, 8))
        self.exact = _ones(bf16)
        self.ones = self.exact if k.dtype is bf16 else _ones(k.dtype)
        self.weights = [
            lang.ptx.Fragment(k.dtype, (16, 8)) for _ in range(2 if k.dtype is bf16 else 1)
        ]
        self.values_of = lang.ptx.Fragment(k.dtype, (16, 16))
        self.keys_of = lang.ptx.Fragment(k.dtype, (16, 8))
        for held in (*(x for part in self.out for x in part), self.total):
            held.fill(0.0)
        self.shrink.fill(0)
        self.base = lang.var(LOWEST)  # what weights of query g are relative to; a whole number

    def element(self, part: int, size: int, lane: Any) -> tuple[Any, Any]:
        """The first element of this thread's chunk of a part; whether it lies within the head."""
        first = lane * CHUNK + part * size
        if (part + 1) * size <= self.dim:
            return first, None
        return lang.minimum(first, self.dim - CHUNK), first < self.dim

    def load_queries(self, q: Any) -> None:
        """Queries as the first factor, whose other eight rows are zeros."""
        place, self.queries = self.work.query(self.g), []
        for part in range(self.key_parts):
            element, inside = self.element(part, KEY_PART, self.c)
            words = q.load_bits(place + element)
            if inside is not None:
                words = [lang.select(inside, w, 0) for w in words]
            for half in range(2):
                held = lang.ptx.Fragment(q.dtype, (16, 16))
                held.fill(0)
                held[0], held[2] = words[2 * half], words[2 * half + 1]
                self.queries.append(held)

    def load_keys(self, first: Any) -> None:
        """Start to load the keys from one on, all of one block."""
        pitch, last = lang.parameter("kl", u32), self.work.end - 1
        start, _ = self.work.lines.places(first)
        for n, words in enumerate(self.keys):
            key = lang.minimum(first + (self.number * KEYS + n * 8) + self.g, last)
            place = start + key * pitch
            for part, into in enumerate(words):
                element, inside = self.element(part, KEY_PART, self.c)
                for var, word in zip(into, self.k.load_bits(place + element), strict=True):
                    var.set(word if inside is None else lang.select(inside, word, 0))

    def key(self, first: Any, n: int, e: int) -> Any:
        """Of the keys from one on: what register e of scores n belongs to."""
        return first + (self.number * KEYS + n * 8 + e) + self.c * 2

    def load_values(self, first: Any) -> None:
        """Start to load the values from one on."""
        pitch, last = lang.parameter("vl", u32), self.work.end - 1
        _, start = self.work.lines.places(first)
        for n in range(2):
            for e in range(2):
                key = lang.minimum(self.key(first, n, e), last)
                place = start + key * pitch
                for part, into in enumerate(self.values[n][e]):
                    element, _ = self.element(part, VALUE_PART, self.g)
                    for var, word in zip(into, self.v.load_bits(place + element), strict=True):
                        var.set(word)

    def score(self) -> None:
        for n, held in enumerate(self.scores):
            held.fill(0.0)
            for i, query in enumerate(self.queries):
                words = self.keys[n][i // 2]
                self.keys_of[0], self.keys_of[1] = words[i % 2 * 2], words[i % 2 * 2 + 1]
                lang.ptx.mma_sync(held, query, self.keys_of)

    def soften(self, first: Any, scale: Any) -> list[list[Any]]:
        """Weights of the keys, where a maximum grew less of what was summed; which keys count."""
        counted = [[self.work.counts(self.key(first, n, e)) for e in range(2)] for n in range(2)]
        found = [
            [
                self.work.seen(self.g, self.key(first, n, e), counted[n][e], held[e] * scale)
                for e in range(2)
            ]
            for n, held in enumerate(self.scores)
        ]
        high = lang.const(LOWEST, f32)
        for score, shown in chain.from_iterable(found):
            high = lang.fmax(high, lang.select(shown, score, LOWEST))
        for mask in (1, 2):
            high = lang.fmax(high, lang.shuffle_xor(high, mask))
        base = lang.fmax(self.base, lang.ceil(high))
        shrink = lang.exp2_native(self.base - base)
        self.base.set(base)
        for n, pairs in enumerate(found):
            both = [
                lang.select(shown, lang.exp2_native(score - base), 0.0) for score, shown in pairs
            ]
            put(self.weights, n, both)
        self.shrink[0] = (lang.select(self.c == 0, shrink, 0.0), lang.const(0.0, f32))
        self.spread.fill(0.0)
        lang.ptx.mma_sync(self.spread, self.exact, self.shrink)
        factors = [self.spread[e] for e in range(2)]
        for held in (*(x for part in self.out for x in part), self.total):
            for register in range(4):
                held[register] = held[register] * factors[register % 2]
        return counted

    def mix(self, counted: list[list[Any]]) -> None:
        """Add up the values; those of keys that do not count may be anything."""
        for weights in self.weights:
            lang.ptx.mma_sync(self.total, self.ones, weights)
        for part, tiles in enumerate(self.out):
            for j, held in enumerate(tiles):
                for n in range(2):
                    low, next_ = (
                        lang.select(counted[n][e], self.values[n][e][part][j], 0) for e in range(2)
                    )
                    self.values_of[2 * n] = (low & 0xFFFF) | (next_ << 16)
                    self.values_of[2 * n + 1] = (low >> 16) | (next_ & 0xFFFF0000)
                for weights in self.weights:
                    lang.ptx.mma_sync(held, self.values_of, weights)


def _ones(dtype: Any) -> Any:
    held = lang.ptx.Fragment(dtype, (16, 16))
    for register in range(4):
        held[register] = (lang.const(1.0, f32), lang.const(1.0, f32))
    return held


def _split_mma(
    *, tile: SplitTile, dim: int, rows: int, scoring: Scoring, q: Any, k: Any, v: Any,
    partial: Any, **masks: Any,
) -> None:  # fmt: skip
    lang.ptx.resident(tile.together)
    work, scale = Work(masks, scoring, rows), product_scale(scoring, LOG2E)
    with lang.if_(work.begin < work.end):
        warp = _Warp(work, dim, k, v)
        warp.load_keys(work.begin)
        warp.load_values(work.begin)
        warp.load_queries(q)
        for first in lang.range(work.begin, work.end, tile.step):
            after = first + tile.step
            warp.score()
            with lang.if_(after < work.end):
                warp.load_keys(after)
            counted = warp.soften(first, scale)
            warp.mix(counted)
            with lang.if_(after < work.end):
                warp.load_values(after)
        _finish(warp, tile, rows, partial)


def _finish(warp: _Warp, tile: SplitTile, rows: int, partial: Any) -> None:
    """What the warps of a group have, together: relative to one maximum, in order."""
    work, me, dim = warp.work, lang.local_id(), warp.dim
    tops, totals = (lang.shared(f32, tile.warps * MOST_ROWS) for _ in range(2))
    sums = lang.shared(f32, tile.warps * rows * PITCH)
    mine = [warp.c * 2 + e for e in range(2)]  # the queries whose sums this thread has
    with lang.if_(warp.c == 0):
        tops[warp.number * MOST_ROWS + warp.g] = warp.base
    with lang.if_(warp.g == 0):
        for e, query in enumerate(mine):
            totals[warp.number * MOST_ROWS + query] = warp.total[e]
    lang.barrier()

    def weights_of(query: Any) -> tuple[Any, list[Any]]:
        """The maximum of a query, and what each warp's sums are to be multiplied with."""
        each = [tops[n * MOST_ROWS + query] for n in range(tile.warps)]
        high = reduce(lang.fmax, each)
        return high, [lang.exp2_native(top - high) for top in each]

    with lang.if_((me < rows) & work.has(me)):
        high, factors = weights_of(me)
        whole = lang.const(0.0, f32)
        for n, factor in enumerate(factors):
            whole = lang.fma(factor, totals[n * MOST_ROWS + me], whole)
        at = work.results(me).stats
        partial[at] = high
        partial[at + 1] = whole
    factors = []
    for query in mine:
        high, _ = weights_of(query)
        factors.append(lang.exp2_native(tops[warp.number * MOST_ROWS + query] - high))
    row, column = me // (VALUE_PART // 4), me % (VALUE_PART // 4) * 4
    for part, tiles in enumerate(warp.out):
        if part:
            lang.barrier()
        for e, (query, factor) in enumerate(zip(mine, factors, strict=True)):
            with lang.if_(query < rows):
                at = (warp.number * rows + query) * PITCH + warp.g * CHUNK
                for j in range(0, 4, 2):
                    held = (tiles[j + n // 2][e + n % 2 * 2] for n in range(4))
                    sums.store(at + j * 2, [x * factor for x in held])
        lang.barrier()
        element = column + part * VALUE_PART
        for below in range(0, rows, tile.threads // (VALUE_PART // 4)):
            query = row + below
            with lang.if_((query < rows) & work.has(query) & (element < dim)):
                added = [lang.const(0.0, f32)] * 4
                for n in range(tile.warps):
                    found = sums.load((n * rows + query) * PITCH + column)
                    added = [a + b for a, b in zip(added, found, strict=True)]
                partial.store(work.results(query).sums + element, added)


kernel: Kernel = Kernel(_split_mma, workgroup=128, name="attention_split_mma")


def _tile_of(form: Form[AttentionAttrs], caps: Caps) -> SplitTile | None:
    """The tile of 16-bit rows in whole chunks."""
    dim = form.inputs[0].shape[3]
    chunks = dim <= MOST_DIM and dim % CHUNK == 0
    return SplitTile() if chunks and caps.tensor_cores and rows_of_16_bits(form) else None


def _launches(form: Form[AttentionAttrs], tile: SplitTile, caps: Caps) -> Lowered:
    parts = Parts.of(form, tile.step, tile.groups)
    return launches_of(kernel, parts, form, (("tile", tile),), caps, tile.threads)


def _preferred(form: Form[AttentionAttrs], caps: Caps) -> bool:
    return few_queries(form, caps) and caps.fast_tensor_cores


SPLIT_MMA = AttentionVariant(
    "split_mma", _tile_of, _launches, _preferred,
    needs=f"takes f16 or bf16 with rows on 16 bytes, heads of multiples of {CHUNK} up to "
          f"{MOST_DIM}, and tensor cores",
)  # fmt: skip
