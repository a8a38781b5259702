"""A formula as a list of NumPy calls into memory that is there already.

The formula is run once on symbols, which note each call. The result is a list of calls in order,
each with the registers that it reads and the one that it writes; a register is free again after its
last reader. The list runs on one block of the operands after the other, so that intermediate values
stay in cache and nothing is allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from centella.host.blockwise import scratch

Array = np.ndarray[Any, Any]
FULL, COLUMN = 0, 1  # a symbol has an element for each of the block's, or one for each row


def _operator(call: Callable[..., Any], turned: bool = False) -> Callable[[Any, Any], Symbol]:
    """A binary operator that is noted; `turned`: the symbol is its right operand."""

    def operate(symbol: Symbol, other: Any) -> Symbol:
        return symbol.calls.note(call, *((other, symbol) if turned else (symbol, other)))

    return operate


class Symbol:
    """A value of the formula: operators on it are noted."""

    __slots__ = ("calls", "columns", "dtype", "kind", "number")
    __array_ufunc__ = None  # NumPy's scalars leave operators to it

    def __init__(self, calls: CallList, number: int, dtype: Any, kind: int, columns: int) -> None:
        self.calls: CallList = calls
        self.number: int = number
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.kind: int = kind
        self.columns: int = columns

    if not TYPE_CHECKING:  # which sees formulas of Any
        __add__, __radd__ = _operator(np.add), _operator(np.add, turned=True)
        __sub__, __rsub__ = _operator(np.subtract), _operator(np.subtract, turned=True)
        __mul__, __rmul__ = _operator(np.multiply), _operator(np.multiply, turned=True)
        __truediv__, __rtruediv__ = _operator(np.divide), _operator(np.divide, turned=True)
        __and__, __or__ = _operator(np.logical_and), _operator(np.logical_or)
        __ge__, __lt__ = _operator(np.greater_equal), _operator(np.less)

    def __neg__(self) -> Symbol:
        return self.calls.note(np.negative, self)

    def __invert__(self) -> Symbol:
        return self.calls.note(np.logical_not, self)


def larger(a: Any, b: Any, out: Array) -> None:
    """NaN stays NaN; NumPy takes this `out` by name alone, as below."""
    np.maximum(a, b, out=out)


def smaller(a: Any, b: Any, out: Array) -> None:
    """NaN stays NaN."""
    np.minimum(a, b, out=out)


def spread(like: Any, number: Any, out: Array) -> None:
    """A number in each element."""
    np.copyto(out, number)


def choose(condition: Array, first: Any, second: Any, out: Array) -> None:
    """`np.where` into `out`, which is none of the operands."""
    np.copyto(out, second)
    np.copyto(out, first, where=condition)


def move(x: Any, out: Array) -> None:
    """A copy."""
    np.copyto(out, x)


def row_first(x: Array, out: Array) -> None:
    """The first element of each row."""
    np.copyto(out, x[..., :1])


def row_sum(x: Array, out: Array) -> None:
    """Write the sum of each row: x [..., n] to out [..., 1]."""
    np.add.reduce(x, axis=-1, out=out, keepdims=True)


def row_max(x: Array, out: Array) -> None:
    """The largest of each row."""
    np.maximum.reduce(x, axis=-1, out=out, keepdims=True)


ALONG_ROWS = (row_first, row_sum, row_max)
ORDERS = (larger, smaller)  # several times as fast on two arrays as on one and a number
COMPARES = (np.greater_equal, np.less, np.less_equal, np.equal)
APART = (choose, *ALONG_ROWS)  # what may not write where it reads

Note = tuple[Callable[..., Any], tuple[Any, ...], Symbol]
Form = tuple[int, Any]  # of a register: FULL or COLUMN, and its dtype


class CallList:
    """The calls that a formula makes.

    Args:
        dtypes: of the operands.
        columns: elements of a row.

    Attributes:
        along_rows: whether it needs whole rows.
    """

    def __init__(self, dtypes: Sequence[Any], columns: int) -> None:
        self.operands: list[Symbol] = [
            Symbol(self, k, d, FULL, columns) for k, d in enumerate(dtypes)
        ]
        self.along_rows: bool = False
        self._columns = columns
        self._notes: list[Note] = []
        self._symbols = len(self.operands)

    def note(self, call: Callable[..., Any], *args: Any) -> Symbol:
        """One more call; gives its result."""
        if call in ORDERS:
            like = next(a for a in args if isinstance(a, Symbol))
            args = tuple(a if isinstance(a, Symbol) else self.note(spread, like, a) for a in args)
        symbols = [a for a in args if isinstance(a, Symbol)]
        dtype = _dtype(call, args)
        kind = COLUMN if call in ALONG_ROWS else min(s.kind for s in symbols)
        self.along_rows |= call in ALONG_ROWS
        symbol = Symbol(self, self._symbols, dtype, kind, self._columns)
        self._symbols += 1
        self._notes.append((call, args, symbol))
        return symbol

    def finish(self, result: Symbol) -> Run:
        """The calls that lead to a result, on values: operands, result, constants, registers."""
        notes = self._needed(result)
        if not notes or notes[-1][2] is not result or result.kind == COLUMN:
            notes.append((move, (result,), Symbol(self, self._symbols, result.dtype, FULL, 0)))
        first = len(self.operands)
        constants: list[Array] = []
        last: dict[int, int] = {}
        for step, (call, args, _) in enumerate(notes):
            last.update({a.number: step for a in args if isinstance(a, Symbol)})
            with np.errstate(over="ignore"):  # beyond f32 it is infinite
                constants += [
                    np.array(a, _dtype(call, args, compared=True))
                    for a in args if not isinstance(a, Symbol)
                ]  # fmt: skip
        numbers = count(first + 1)
        where = {k: k for k in range(first)}  # of a symbol, among the values
        layout: list[Form] = []
        free: dict[Form, list[int]] = defaultdict(list)
        code: list[tuple[Callable[..., Any], Any]] = []
        for step, (call, args, symbol) in enumerate(notes):
            at = [where[a.number] if isinstance(a, Symbol) else next(numbers) for a in args]
            over = {
                where[a.number]: (a.kind, a.dtype) for a in args
                if isinstance(a, Symbol) and last[a.number] == step and a.number >= first
            }  # fmt: skip
            form = symbol.kind, symbol.dtype
            if call not in APART:
                _release(free, over)
            if step == len(notes) - 1:
                where[symbol.number] = first
            elif free[form]:
                where[symbol.number] = free[form].pop()
            else:
                where[symbol.number] = first + 1 + len(constants) + len(layout)
                layout.append(form)
            if call in APART:
                _release(free, over)
            code.append((call, itemgetter(*at, where[symbol.number])))
        return Run(tuple(code), tuple(constants), tuple(layout), self.along_rows)

    def _needed(self, result: Symbol) -> list[Note]:
        """The calls without those whose result nobody reads."""
        wanted = {result.number}
        kept: list[Note] = []
        for call, args, symbol in reversed(self._notes):
            if symbol.number in wanted:
                wanted.update(a.number for a in args if isinstance(a, Symbol))
                kept.append((call, args, symbol))
        return kept[::-1]


def _dtype(call: Callable[..., Any], args: tuple[Any, ...], compared: bool = False) -> Any:
    """Of the result; or of numbers among the operands."""
    if call in COMPARES and not compared:
        return np.dtype(bool)
    values = args[1:] if call is choose else args
    return next((a.dtype for a in values if isinstance(a, Symbol)), np.dtype(np.float32))


def _release(free: dict[Form, list[int]], over: dict[int, Form]) -> None:
    for register, form in over.items():
        free[form].append(register)


class Run:
    """A finished list of calls; threads may share it.

    Attributes:
        steps: calls for each block.
        along_rows: whether blocks must be of whole rows.
    """

    def __init__(
        self, code: tuple[tuple[Callable[..., Any], Any], ...], constants: tuple[Array, ...],
        layout: tuple[Form, ...], along_rows: bool,
    ) -> None:  # fmt: skip
        self._code = code
        self._constants = constants
        self._layout = layout
        self.steps: int = len(code)
        self.along_rows: bool = along_rows

    def __call__(self, operands: Sequence[Array], out: Array) -> None:
        """Compute one block of the result.

        Args:
            operands: of the block's shape, or of one that broadcasts to it; one may be `out`.
        """
        full = out.shape
        column = (*full[:-1], 1)
        registers = scratch(tuple([(column if k else full, d) for k, d in self._layout]))
        values = [*operands, out, *self._constants, *registers]
        for call, pick in self._code:
            call(*pick(values))
