"""The skinny product on tensor cores: up to 32 rows of x, weights contiguous along k (PTX alone).

    y[m, n] = f(alpha (x[m, :] . W[n, :]) scale[n] + bias[n]) + residual[m, n]

16 rows of W are the first factor of `mma_sync`, eight rows of x the columns of the second: each
weight is read once, straight into registers. The four lanes that share a row of a fragment read 64
neighbouring bytes of it, 16 each. Lanes feed `mma` in load order, for W and x alike; this permutes
k, which a sum ignores. x is small and comes from the caches.

Warps of a group share the depth; each loads several steps before it uses the first. The threads
that store the results add the parts of the depth in order, through shared memory: the same bits in
every run.

i8 weights become f16 or bf16 in registers, exactly. f32 x against them is the sum of three bf16
numbers, also exactly, whose products the same sums take: the result is that of f32.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, i8, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.hopper import MULTIPROCESSORS
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.product import (
    Constants,
    Product,
    Scalars,
    batch_of_b,
    launch,
    rows_of_a,
)  # fmt: skip
from centella.ops.matmul.sums import words_of
from centella.ops.matmul.table import SHORT, SKINNY, SKINNY_FROM
from centella.ops.matmul.thin import MOST_THREADS, REGISTERS
from centella.ops.rows import fold, power_above
from centella.specs import Caps

WARP = 32
QUAD = 4  # lanes that share a row of a fragment
OUTPUTS = 16  # rows of W in a fragment
EIGHT = 8  # rows of x in a fragment
BESIDE = 28  # registers for addresses, a product's factors and the loop
HIGH = 0xFFFF0000  # of an f32, the bits of a bf16


class Skinny(Struct, frozen=True):
    """How a group works: eights of rows of x, sixteens of outputs; warps, steps of each at once."""

    eights: int
    sixteens: int
    deep: int
    unroll: int

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return self.deep * WARP

    @property
    def outputs(self) -> int:
        """Neighbouring outputs of a group."""
        return self.sixteens * OUTPUTS

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: the sums of every thread."""
        return 16 * self.sixteens * self.eights * self.threads

    def together(self, x: DType, weight: DType) -> int:
        """Groups that a multiprocessor shall have registers for, a step's loads in them at once.

        The assembler, left alone, takes fewer registers and has one load wait for another.
        """
        words = 4 * self.unroll * (2 * self.sixteens + self.eights * x.itemsize // weight.itemsize)
        sums = 4 * self.sixteens * self.eights
        widened = 24 * (self.eights if x is f32 else self.eights // 4 * 2 if weight is i8 else 0)
        registers = -(-(words + sums + widened + BESIDE) // 8) * 8
        return max(1, min(REGISTERS // registers, MOST_THREADS) // self.threads)

    def block(self, weight: DType) -> int:
        """The k that a group reads at a time."""
        return self.deep * self.unroll * QUAD * weight.per_chunk


def takes(dtypes: tuple[DType, DType]) -> bool:
    """Whether the tensor cores multiply x and weights of these."""
    x, w = dtypes
    return (x in (f16, bf16) and w in (x, i8)) or (x is f32 and w is i8)


def _skinny(
    *, tile: Skinny, activation: str, depth: str, whole: bool, x: Argument, w: Argument,
    y: Argument, **extra: Argument,
) -> None:  # fmt: skip
    lang.ptx.resident(tile.together(x.dtype, w.dtype))
    lang.ptx.fetch_lines(w)
    p = {n: lang.parameter(n, u32) for n in (
        "m", "n", "k", "rowx", "ldw", "ldy", "sx", "sw", "sy", "groups")}  # fmt: skip
    batch = lang.group_id() // p["groups"]
    first = (lang.group_id() - batch * p["groups"]) * tile.outputs
    thread = lang.local_id()
    lane, warp = thread % WARP, thread // WARP
    own = first + lane // QUAD
    per, block = w.dtype.per_chunk, tile.block(w.dtype)
    part = warp * (tile.unroll * QUAD * per) + lane % QUAD * per
    weights = [
        _start(w, batch * p["sw"] + lang.minimum(own + EIGHT * i, p["n"] - 1) * p["ldw"])
        for i in range(2 * tile.sixteens)
    ]
    inputs = [
        _start(x, batch * p["sx"] + lang.minimum(lane // QUAD + EIGHT * i, p["m"] - 1) * p["rowx"])
        for i in range(tile.eights)
    ]
    column = lang.var(part)
    kind = bf16 if x.dtype is f32 else x.dtype
    sums = [
        [lang.ptx.Fragment(f32, (16, 8)) for _ in range(tile.eights)] for _ in range(tile.sixteens)
    ]
    every = [f for line in sums for f in line]
    for fragment in every:
        fragment.fill(0.0)
    # Sums of tensor cores are cut, not rounded: those of f32 are kept short.
    totals = lang.vars(f32, len(every), every[0].registers, init=0.0) if x.dtype is f32 else []
    height, width = lang.ptx.Fragment(kind, (16, 16)), lang.ptx.Fragment(kind, (16, 8))

    def step(index: Any, masked: bool) -> None:
        """A block of the depth: everything is on its way before the first is used."""
        at = column + index * block
        ks = [at + u * (QUAD * per) for u in range(tile.unroll)]
        reach = Reach(p["k"], masked, whole)
        left, right = ([v + 0 for v in fragment] for fragment in (weights, inputs))
        ws = [[reach.bits(w, start, k, per) for start in left] for k in ks]
        xs = [[reach.bits(x, start, k, per) for start in right] for k in ks]
        for k, left, right in zip(ks, ws, xs, strict=True):
            rows = [_pairs(v, w.dtype, kind) for v in left]
            if w.dtype is not i8:  # whose pads are numbers, and meet zeros
                rows = [reach.kept(v, k) for v in rows]
            if x.dtype is f32:
                pieces = [_thirds(reach.kept_f32(v, k)) for v in right]
            else:
                pieces = [[reach.kept(v, k)] for v in right]
            for j in range(0, per // 2, 2):
                for i, line in enumerate(sums):
                    low, high = rows[2 * i], rows[2 * i + 1]
                    for register, word in enumerate((low[j], high[j], low[j + 1], high[j + 1])):
                        height[register] = word
                    for fragment, parts in zip(line, pieces, strict=True):
                        for piece in parts:
                            width[0] = piece[j]
                            width[1] = piece[j + 1]
                            lang.ptx.mma_sync(fragment, height, width)
            for fragment, whole_sums in zip(every, totals, strict=False):
                for register, total in enumerate(whole_sums):
                    total.set(total + fragment[register])
                fragment.fill(0.0)

    blocks = p["k"] // block
    if depth != "masked":
        for index in lang.range(blocks):
            step(index, False)
    if depth != "whole":
        step(blocks, True)
    registers = [v for line in totals or every for v in (line if totals else _registers(line))]
    _finish(registers, tile, batch, first, p, y, activation, extra)


def _start(source: Argument, element: Operand) -> Any:
    """Where a row starts, which is on 16 bytes, in a register: steps then differ by a number."""
    per = source.dtype.per_chunk
    return lang.var(element // per * per)


class Reach(Struct, frozen=True, eq=False):
    """What of a row lies before k: the rest is zeros, whatever memory holds there.

    `whole`: k is a multiple of 8, so that 16-bit chunks end with it.
    """

    k: Any
    masked: bool
    whole: bool

    def bits(self, source: Argument, start: Operand, at: Operand, count: int) -> list[Expr]:
        """The words of `count` neighbouring elements; past k of some that are before it."""
        per, words = source.dtype.per_chunk, []
        last = (self.k - 1) // per * per
        for j in range(0, count, per):
            word = at + j
            words += source.load_bits(start + (lang.minimum(word, last) if self.masked else word))
        return words

    def kept(self, words: list[Any], at: Any) -> list[Any]:
        """Pairs of elements from `at` on."""
        if not self.masked:
            return words
        masks: list[Any] = []
        for j in range(len(words)):
            if self.whole and j % 4:
                masks.append(masks[-1])
                continue
            mask = lang.select(at + 2 * j < self.k, lang.const(0xFFFFFFFF, u32), 0)
            if not self.whole:
                mask = lang.select(at + 2 * j + 1 == self.k, 0xFFFF, mask)
            masks.append(mask)
        return [word & mask for word, mask in zip(words, masks, strict=True)]

    def kept_f32(self, words: list[Any], at: Any) -> list[Operand]:
        """Elements from `at` on, as their bits."""
        if not self.masked:
            return words
        return [lang.select(at + j < self.k, word, 0) for j, word in enumerate(words)]


def _pairs(words: list[Any], stored: DType, kind: DType) -> list[Operand]:
    """Stored weights as pairs of the factors' dtype."""
    return words if stored is not i8 else [v for w in words for v in lang.ptx.widen_i8(w, kind)]


def _thirds(words: list[Operand]) -> list[list[Expr]]:
    """f32 numbers as three lists of pairs of bf16, which add up to them.

    24 bits of a number are three times eight; what is cut off is exact, and nothing of an infinity.
    """
    parts = []
    left = [lang.bitcast(w, f32) for w in words]
    for _ in range(2):
        cut = [lang.bitcast(lang.bitcast(v, u32) & HIGH, f32) for v in left]
        parts.append(cut)
        left = [lang.select(v == c, 0.0, v - c) for v, c in zip(left, cut, strict=True)]
    return [[_pair(a, b) for a, b in zip(p[::2], p[1::2], strict=True)] for p in (*parts, left)]


def _pair(low: Operand, high: Operand) -> Expr:
    """Two f32 that are bf16 numbers as a word of them."""
    return lang.bitcast(low, u32) >> 16 | lang.bitcast(high, u32) & HIGH


def _registers(fragment: Any) -> list[Expr]:
    """A fragment's registers of this thread."""
    return [fragment[r] for r in range(fragment.registers)]


def _finish(
    registers: Sequence[Operand], tile: Skinny, batch: Operand, first: Operand, p: dict[str, Any],
    y: Argument, activation: str, extra: dict[str, Argument],
) -> None:  # fmt: skip
    """Add the parts of the depth, in order, as a word of the result needs them; then store it."""
    thread = lang.local_id()
    scratch = lang.shared(f32, len(registers) * tile.threads)
    for i, value in enumerate(registers):
        scratch[i * tile.threads + thread] = value
    lang.barrier()
    per, rows = y.dtype.per_word, tile.eights * EIGHT
    for row, offset in words_of(tile.threads, rows, tile.outputs, per, 0, first, p):
        finish = Epilogue(activation, extra, first + offset, per, p["n"])
        totals = []
        for j in range(per):
            at = _word_of(tile, row, offset + j)
            parts = [scratch[at + d * WARP] for d in range(tile.deep)]
            totals.append(fold(parts, operator.add))
        y.store(batch * p["sy"] + row * p["ldy"] + (first + offset), finish(totals, row))


def _word_of(tile: Skinny, row: Operand, output: Operand) -> Expr:
    """Where the first part of an element's sum lies: register after register, each of all threads.

    Of a fragment of sums thread `lane` has in register 2 h + c the output lane / 4 + 8 h for row
    2 (lane % 4) + c (PTX ISA, "Matrix Fragments for mma.m16n8k16").
    """
    within = output % OUTPUTS
    fragment = output // OUTPUTS * tile.eights + row // EIGHT
    register = fragment * 4 + within // EIGHT * 2 + row % 2
    lane = within % EIGHT * QUAD + row % EIGHT // 2
    return register * tile.threads + lane


skinny: Kernel = Kernel(_skinny, workgroup=256, name="skinny", rewritable=True)


# -- how it is launched ---------------------------------------------------------------------------


def skinny_tile_of(problem: Problem, dtypes: tuple[DType, DType], caps: Caps) -> Skinny | None:
    """The shape of a skinny group on tensor cores; the simulator has them, too.

    A short row is one block, of few warps, each with all its loads on their way at once.
    """
    along = problem.a_along_k and problem.b_along_k
    if not (along and problem.m > 0 < problem.k and takes(dtypes) and caps.tensor_cores):
        return None
    x, weight = dtypes
    eights = power_above(-(-problem.m // EIGHT))
    shapes = SKINNY[_kind(dtypes)].get(eights)
    if shapes is None:
        return None
    steps = -(-problem.k // (QUAD * weight.per_chunk))
    short = max(SHORT * weight.itemsize // x.itemsize, 1)
    groups = -(-problem.n // OUTPUTS) * problem.batch
    sixteens, deep, unroll = shapes[groups < 4 * MULTIPROCESSORS]
    if steps <= 8 * short:
        sixteens, deep = 1, 8 if steps > 2 * short else 4
        unroll = max(-(-steps // deep), 1)
    tile = Skinny(eights, sixteens, deep, unroll)
    fitting = tile.threads <= caps.max_workgroup and tile.shared_bytes <= caps.max_shared
    return tile if fitting else None


def _kind(dtypes: tuple[DType, DType]) -> str:
    """The row of `SKINNY` for x and weights."""
    x, weight = dtypes
    return "16-bit" if weight is not i8 else "i8 by f32" if x is f32 else "i8"


def _launches(product: Product, tile: Skinny, caps: Caps) -> Lowered:
    problem, weight = product.problem, product.specs[1].dtype
    row, _, batch = rows_of_a(problem)
    groups = -(-problem.n // tile.outputs)
    block = tile.block(weight)
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("rowx", row), ("ldw", problem.ldb),
        ("ldy", problem.ldy), ("sx", batch), ("sw", batch_of_b(problem)), ("sy", problem.sy),
        ("groups", groups), ("alpha", product.alpha), ("ldr", product.residual_pitch),
    )  # fmt: skip
    depth = "masked" if problem.k < block else "both" if problem.k % block else "whole"
    constants: Constants = (
        ("activation", product.activation),
        ("depth", depth),
        ("tile", tile),
        ("whole", depth != "whole" and problem.k % EIGHT == 0),
    )
    names = ("x", "w", *product.names)
    many = groups * problem.batch
    return Lowered((launch(skinny, product, names, scalars, constants, many, tile.threads),))


def _tile(product: Product, caps: Caps) -> Skinny | None:
    return skinny_tile_of(product.problem, product.dtypes, caps) if product.whole else None


def _preferred(product: Product, caps: Caps) -> bool:
    enough = product.problem.m >= SKINNY_FROM[_kind(product.dtypes)]
    return enough and caps.fast_tensor_cores


SKINNY_MMA: Variant[Product, Skinny] = Variant("skinny_mma", _tile, _launches, _preferred)
