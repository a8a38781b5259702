"""What follows a product, on its f32 sums: f(alpha sum scale + bias) + residual.

`scale` and `bias` have an element a column, `residual` one for each output. With a gate an output
has sums of two columns, n apart: f(alpha sum + bias) (alpha sum' + bias').
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.operands import KERNEL

VECTORS = ("scale", "bias")
SECTOR = 32  # bytes, which come to the L2 cache together


def ask_for_vectors(
    extra: dict[str, Argument], count: int, columns: Operand, gated: bool, me: Operand
) -> None:
    """Have the vectors of a group's first block brought to the L2 cache, by a thread a sector.

    Threads ask for elements a sector apart, from the block's first column to one behind its last,
    since it may begin within a sector; behind the last column of all they ask for that one.

    Args:
        extra, columns, gated: as of `Epilogue`.
        count: columns of a block; a group's first block has the group's number.
        me: the thread's number.
    """
    for vector in [extra[name] for name in VECTORS if name in extra]:
        near = SECTOR // vector.dtype.itemsize
        with lang.if_(me <= -(-count // near)):
            column = lang.minimum(lang.group_id() * count + me * near, columns - 1)
            lang.ptx.prefetch(vector, column)
            if gated:
                lang.ptx.prefetch(vector, column + columns)


class Epilogue:
    """Of `count` neighbouring outputs from a column on; what a column has is loaded once.

    Args:
        extra: the operands that the launch has, by name.
        columns: of the result; outputs past them are computed from the last one's operands.
        gated: whether there are as many sums again, of the columns that are `columns` further.
        operands: what activations are written over.
        words: operands whose rows start on 16 bytes: 16-bit ones are loaded two at a time, from
            an even column on, of an even number; `count` is 2.
    """

    def __init__(
        self, activation: str, extra: dict[str, Argument], column: Operand, count: int,
        columns: Operand, words: tuple[str, ...] = (), gated: bool = False, operands: Any = KERNEL,
    ) -> None:  # fmt: skip
        self._words, self._gated, self._operands = words, gated, operands
        self._activation, self._extra = activation, extra
        self._alpha = lang.parameter("alpha", f32)
        lanes = [column] + [lang.minimum(column + j, columns - 1) for j in range(1, count)]
        self._lanes = lanes + [lane + columns for lane in lanes] if gated else lanes
        zero = lang.const(0, u32)
        self._vectors = {n: self._load(n, zero) for n in VECTORS if n in extra}

    def __call__(
        self, sums: list[Expr], row: Operand, residual: list[Expr] | None = None
    ) -> list[Expr]:
        """The outputs of a row from their sums; with a gate those of the first columns first.

        Args:
            residual: where that was loaded before.
        """
        factors = [self._alpha] * len(sums)
        if "scale" in self._vectors:
            sums, factors = [v * self._alpha for v in sums], self._vectors["scale"]
        if "bias" in self._vectors:
            terms = zip(sums, factors, self._vectors["bias"], strict=True)
            out = [lang.fma(v, f, b) for v, f, b in terms]
        else:
            out = [v * f for v, f in zip(sums, factors, strict=True)]
        if self._gated:
            half = len(out) // 2
            opened = [ACTIVATIONS[self._activation](self._operands, v) for v in out[:half]]
            return [v * w for v, w in zip(opened, out[half:], strict=True)]
        if self._activation:
            out = [ACTIVATIONS[self._activation](self._operands, v) for v in out]
        if "residual" in self._extra:
            residual = residual or self.residual(row)
            out = [v + r for v, r in zip(out, residual, strict=True)]
        return out

    def residual(self, row: Operand) -> list[Expr]:
        """What is added to the outputs of a row."""
        return self._load("residual", row * lang.parameter("ldr", u32))

    def _load(self, name: str, at: Operand) -> list[Expr]:
        """An operand's values of these columns, from an index on."""
        operand = self._extra[name]
        if name not in self._words or operand.dtype.per_word != 2:
            return [operand[at + c] for c in self._lanes]
        return [v for lane in self._lanes[::2] for v in operand.load_word(at + lane)]


class Word:
    """A thread's word of a group's results in the only row: what follows its sums.

    Its operands are loaded where it is constructed, so before the sums.

    Args:
        activation, extra, gated: as of `Epilogue`.
        outputs: of the group, from `first` on: whole words, at most one for each thread.
        columns: of the result `y`.
    """

    def __init__(
        self, activation: str, extra: dict[str, Argument], outputs: int, first: Operand,
        columns: Operand, y: Argument, gated: bool = False,
    ) -> None:  # fmt: skip
        self._y, self._first, self._per = y, first, y.dtype.per_word
        offset = lang.local_id() * self._per
        self._stores = (offset < outputs) & (first + offset < columns)
        self._offset = lang.minimum(offset, outputs - self._per)
        column = lang.minimum(first + self._offset, columns - 1)
        self._finish = Epilogue(activation, extra, column, self._per, columns, gated=gated)
        self._residual: Any = lang.vars(f32, self._per, init=0.0) if "residual" in extra else []
        if self._residual:
            with lang.if_(self._stores):
                loaded = self._finish.residual(lang.const(0, u32))
                for var, value in zip(self._residual, loaded, strict=True):
                    var.set(value)

    def store(self, sums: Callable[[Any], list[Any]], start: Any = 0) -> None:
        """Store the results, if there are any for the thread.

        Args:
            sums: gives those of the group's output of a number: one, with a gate two.
            start: of the row, in elements of y.
        """
        with lang.if_(self._stores):
            each = [sums(self._offset + e) for e in range(self._per)]
            residual = [v.get() for v in self._residual] or None
            totals = [v for half in zip(*each, strict=True) for v in half]
            values = self._finish(totals, lang.const(0, u32), residual)
            self._y.store(start + self._first + self._offset, values)
