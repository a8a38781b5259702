"""What kernel functions call: integer words that several threads change at once.

Each is one indivisible step on one word of an `InOut` argument or of `lang.shared`, and returns the
word as it was before. Steps of several threads on one word happen one after the other, in an order
that no program knows; they order nothing else (relaxed). So what add, min, max, and, or, xor leave
behind is the same in every run; which thread saw what on the way is not.
"""

from __future__ import annotations

from centella.errors import TraceError
from centella.lang.memory import Argument, Shared
from centella.lang.tracer import current
from centella.lang.values import Expr, Index, Value, expr_of


def _atomic(name: str, array: Argument | Shared, index: Index, *values: Value) -> Expr:
    if not isinstance(array, (Argument, Shared)):
        raise TraceError(
            f"lang.atomic_{name} takes an InOut argument or lang.shared, an index and a value, as "
            f"in lang.atomic_{name}(counts, i, 1); got {type(array).__name__}"
        )
    t = current()
    type_, at = array.atomic(index if isinstance(index, tuple) else (index,))
    operands = tuple(expr_of(t, value, type_) for value in values)
    op = f"{'s' if isinstance(array, Shared) else ''}atomic_{name}"
    return t.result(t.effect(op, type_, (at, *operands), array.position), type_, False)


def atomic_add(array: Argument | Shared, index: Index, value: Value) -> Expr:
    """Add to a word, modulo 2^32; the word before."""
    return _atomic("add", array, index, value)


def atomic_min(array: Argument | Shared, index: Index, value: Value) -> Expr:
    """Make a word the smaller of itself and a value; the word before."""
    return _atomic("min", array, index, value)


def atomic_max(array: Argument | Shared, index: Index, value: Value) -> Expr:
    """Make a word the larger of itself and a value; the word before."""
    return _atomic("max", array, index, value)


def atomic_and(array: Argument | Shared, index: Index, value: Value) -> Expr:
    """Clear the bits of a word that a value lacks; the word before."""
    return _atomic("and", array, index, value)


def atomic_or(array: Argument | Shared, index: Index, value: Value) -> Expr:
    """Set the bits of a word that a value has; the word before."""
    return _atomic("or", array, index, value)


def atomic_xor(array: Argument | Shared, index: Index, value: Value) -> Expr:
    """Flip the bits of a word that a value has; the word before."""
    return _atomic("xor", array, index, value)


def atomic_exchange(array: Argument | Shared, index: Index, value: Value) -> Expr:
    """Make a word a value; the word before."""
    return _atomic("exchange", array, index, value)


def atomic_compare_exchange(
    array: Argument | Shared, index: Index, expected: Value, value: Value
) -> Expr:
    """Make a word a value where it is the expected one; the word before, equal if it was."""
    return _atomic("compare_exchange", array, index, expected, value)
