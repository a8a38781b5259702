"""The arithmetic table of docs/kernel-language.md: its operations, and what NumPy says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import DType, bool_, f32, i32, u32
from tests.support.lang_common import Array
from tests.support.lang_programs import remainder, truncated, wrapped

INF, NAN = np.float32(np.inf), np.float32(np.nan)
TINY = np.float32(2.0**-126)

FLOATS = np.array(
    [
        *(0.0, -0.0, 1.0, -1.5, 2.5, -2.5, 0.5, 1 / 3, 8388609.0, -16777215.0, 1e-20, 3e38, -3e38),
        *(1e-40, -1e-45, TINY, 3.4028235e38, INF, -INF, NAN, -NAN),
    ],
    np.float32,
)
A, B = (x.ravel() for x in np.meshgrid(FLOATS, FLOATS))
INTS = np.array(
    [0, 1, -1, 2, 3, 7, -7, 31, 32, 33, 63, 65536, -65537, 2**31 - 1, -(2**31)], np.int32
)
M, N = (x.ravel() for x in np.meshgrid(INTS, INTS))
U, V = M.view(np.uint32), N.view(np.uint32)
BITS = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32)
WIDE = np.append(BITS, np.array([2**24 + 1, 2**24 + 3, 2**32 - 129, 2**32 - 128], np.uint32))
TO_INT = np.array(
    [
        *(0.0, -0.0, 1.9, -1.9, -0.5, 3e9, -3e9, 5e9, 2147483520.0, 2147483648.0, 4294967040.0),
        *(4294967296.0, -2147483648.0, -2147483904.0, 1e-40, 3e38, -3e38, INF, -INF, NAN),
    ],
    np.float32,
)


def flush(x: Array) -> Array:
    """Subnormal f32 values as 0, as a device may have them."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def same(a: Array, b: Array) -> Array:
    """Which elements are equal bit for bit, any NaN being equal to any other."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if a.dtype != np.float32:
        return np.asarray(a == b)
    equal = a.view(np.uint32) == b.view(np.uint32)
    return np.asarray(equal | (np.isnan(a) & np.isnan(b)))


@dataclass(frozen=True)
class Row:
    """An operation, what NumPy says, and how far the device may be from it.

    `where` picks the operands for which the result is specified; `ulp` is the bound, None: exact.
    """

    name: str
    fn: Callable[..., Any]
    expected: Callable[..., Any]
    operands: tuple[Array, ...]
    out: DType = f32
    where: Callable[..., Any] | None = None
    ulp: float | None = None

    def __str__(self) -> str:
        return self.name

    def check(self, result: Array, every_bit: bool = False) -> None:
        """Compare with NumPy; unless `every_bit`, subnormal numbers may be 0, and `ulp` holds."""
        right = np.zeros(result.shape, np.bool_)
        with np.errstate(all="ignore"):
            exact = np.asarray(self.expected(*self.operands)).astype(result.dtype)
            flushed = np.asarray(self.expected(*map(flush, self.operands))).astype(result.dtype)
            right |= same(result, exact)
            for value in () if every_bit else (exact, flushed):
                right |= same(result, value) | same(result, flush(value))
                if self.ulp is not None:
                    right |= np.abs(result - value) <= self.ulp * np.spacing(np.abs(value))
            if self.where is not None:
                right |= ~np.asarray(self.where(*self.operands))
        bad = np.flatnonzero(~right)[:4]
        told = [(*(x[i] for x in self.operands), result[i], exact[i]) for i in bad]
        assert not bad.size, f"{self.name}: operands, result, expected: {told}"


def integer_rows() -> list[Row]:
    """Rows of the integer operations, each for i32 and u32."""
    table: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        ("+", lambda a, b: a + b, lambda a, b: a.astype(object) + b.astype(object)),
        ("-", lambda a, b: a - b, lambda a, b: a.astype(object) - b.astype(object)),
        ("*", lambda a, b: a * b, lambda a, b: a.astype(object) * b.astype(object)),
        ("//", lambda a, b: a // b, truncated),
        ("%", lambda a, b: a % b, remainder),
        ("&", lambda a, b: a & b, lambda a, b: a & b),
        ("|", lambda a, b: a | b, lambda a, b: a | b),
        ("^", lambda a, b: a ^ b, lambda a, b: a ^ b),
        ("<<", lambda a, b: a << b, lambda a, b: a.astype(object) << (b & 31).astype(object)),
        (">>", lambda a, b: a >> b, lambda a, b: a.astype(object) >> (b & 31).astype(object)),
        ("maximum", lang.maximum, np.maximum),
        ("minimum", lang.minimum, np.minimum),
        ("fmax", lang.fmax, np.maximum),
        ("fmin", lang.fmin, np.minimum),
    ]
    single: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
        ("-x", lambda a: -a, lambda a: -a.astype(object)),
        ("~x", lambda a: ~a, lambda a: ~a),
        ("x << 32", lambda a: a << 32, lambda a: a),
        ("x >> 33", lambda a: a >> 33, lambda a: a.astype(object) >> 1),
        ("x << 40", lambda a: a << 40, lambda a: a.astype(object) << 8),
        ("x // 0", lambda a: a // 0, lambda a: a),
        ("x % 0", lambda a: a % 0, lambda a: a * 0),
        ("x // 3", lambda a: a // 3, lambda a: truncated(a, a * 0 + 3)),
        ("x % 8", lambda a: a % 8, lambda a: remainder(a, a * 0 + 8)),
        ("8 // x", lambda a: 8 // a, lambda a: truncated(a * 0 + 8, a)),
        ("x + top", lambda a: a + 0x7FFFFFFF, lambda a: a.astype(object) + 0x7FFFFFFF),
    ]
    rows = []
    for kind, x, y in ((i32, M, N), (u32, U, V)):
        for name, fn, plain in table:
            rows.append(_integer(f"{name} {kind.name}", fn, plain, (x, y), kind))
        for name, fn, plain in single:
            rows.append(_integer(f"{name} {kind.name}", fn, plain, (x,), kind))
    for name, fn, plain in (
        ("i32 << u32", lambda a, b: a << b, table[8][2]),
        ("i32 >> u32", lambda a, b: a >> b, table[9][2]),
    ):
        rows.append(_integer(name, fn, plain, (M, V), i32))
    least = lambda a: a + (-(2**31))  # noqa: E731
    rows.append(_integer("x + least", least, lambda a: a.astype(object) - 2**31, (M,), i32))
    rows.append(_integer("x // -1", lambda a: a // -1, lambda a: -a.astype(object), (M,), i32))
    rows.append(_integer("x % -1", lambda a: a % -1, lambda a: a * 0, (M,), i32))
    rows.append(_integer("abs i32", lang.abs, lambda a: abs(a.astype(object)), (M,), i32))
    return rows


def _integer(name: str, fn: Any, plain: Any, operands: tuple[Array, ...], kind: DType) -> Row:
    return Row(name, fn, lambda *x: wrapped(plain(*x), kind.numpy), operands, kind)


def numbers(a: Any, b: Any) -> Any:
    """Neither is NaN: a comparison with it is unspecified."""
    return ~(np.isnan(a) | np.isnan(b))


def comparisons() -> list[Row]:
    rows = []
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        name = f"__{op}__"

        def fn(a: Any, b: Any, name: str = name) -> Any:
            return lang.cast(getattr(a, name)(b), u32)

        def plain(a: Any, b: Any, name: str = name) -> Any:
            return getattr(a, name)(b)

        rows.append(Row(f"{op} f32", fn, plain, (A, B), u32, numbers))
        rows.append(Row(f"{op} i32", fn, plain, (M, N), u32))
        rows.append(Row(f"{op} u32", fn, plain, (U, V), u32))
    return rows


def ordered(a: Any, b: Any) -> Any:
    """Neither is NaN, nor are both 0: else either operand may be the larger one."""
    return numbers(a, b) & ((a != 0) | (b != 0))


def mixed(a: Any, b: Any) -> Any:
    """A formula of bools, each way to combine them."""
    small, positive = a < b, b > 0
    value = (~(small & positive) | (small ^ positive)) & (small == positive)
    return lang.cast(value | (small != positive), u32)


ROWS = [
    Row("+ f32", lambda a, b: a + b, np.add, (A, B)),
    Row("- f32", lambda a, b: a - b, np.subtract, (A, B)),
    Row("* f32", lambda a, b: a * b, np.multiply, (A, B)),
    Row("/ f32", lambda a, b: a / b, np.divide, (A, B), ulp=2.5,
        where=lambda a, b: (np.abs(b) <= 2.0**126) | ~np.isfinite(b)),
    Row("x / 0", lambda a: a / 0.0, lambda a: a / np.float32(0), (FLOATS,)),
    Row("x / -0", lambda a: a / -0.0, lambda a: a / np.float32(-0.0), (FLOATS,)),
    Row("1 / x", lambda a: 1.0 / a, lambda a: 1 / a, (FLOATS,), ulp=2.5),
    Row("sqrt", lang.sqrt, np.sqrt, (FLOATS,), ulp=2.5),
    Row("rsqrt", lang.rsqrt, lambda a: 1 / np.sqrt(a), (FLOATS,), ulp=5),
    Row("-x f32", lambda a: -a, np.negative, (FLOATS,)),
    Row("abs", lang.abs, np.abs, (FLOATS,)),
    Row("floor", lang.floor, np.floor, (FLOATS,)),
    Row("ceil", lang.ceil, np.ceil, (FLOATS,)),
    Row("trunc", lang.trunc, np.trunc, (FLOATS,)),
    Row("isnan", lambda a: lang.cast(lang.isnan(a), u32), np.isnan, (FLOATS,), u32),
    Row("isnan bits", lambda a: lang.cast(lang.isnan(lang.bitcast(a, f32)), u32),
        lambda a: np.isnan(a.view(np.float32)), (BITS | 0x7F800000,), u32),
    Row("maximum", lang.maximum, np.maximum, (A, B), where=lambda a, b: (a != 0) | (b != 0)),
    Row("minimum", lang.minimum, np.minimum, (A, B), where=lambda a, b: (a != 0) | (b != 0)),
    Row("fmax", lang.fmax, np.maximum, (A, B), where=ordered),
    Row("fmin", lang.fmin, np.minimum, (A, B), where=ordered),
    Row("select", lambda a, b: lang.select(a < b, a, b), np.minimum, (M, N), i32),
    Row("bools", mixed,
        lambda a, b: (~((a < b) & (b > 0)) | ((a < b) ^ (b > 0))) & ((a < b) == (b > 0))
        | ((a < b) != (b > 0)), (M, N), u32),
    Row("cast f32 i32", lambda a: lang.cast(a, i32),
        lambda a: np.clip(np.nan_to_num(a.astype(np.float64), nan=0), -(2**31), 2**31 - 1)
        .astype(np.int32), (np.concatenate([TO_INT, BITS.view(np.float32)]),), i32),
    Row("cast f32 u32", lambda a: lang.cast(a, u32),
        lambda a: np.clip(np.nan_to_num(a.astype(np.float64), nan=0), 0, 2**32 - 1)
        .astype(np.uint32), (np.concatenate([TO_INT, BITS.view(np.float32)]),), u32),
    Row("cast i32 f32", lambda a: lang.cast(a, f32), lambda a: a.astype(np.float32),
        (np.concatenate([INTS, BITS.view(np.int32)]),)),
    Row("cast u32 f32", lambda a: lang.cast(a, f32), lambda a: a.astype(np.float32), (WIDE,)),
    Row("cast i32 u32", lambda a: lang.cast(a, u32), lambda a: a.view(np.uint32), (M,), u32),
    Row("cast f32 bool", lambda a: lang.cast(lang.cast(a, bool_), u32), lambda a: a != 0,
        (FLOATS,), u32, where=lambda a: ~np.isnan(a)),
    Row("cast i32 bool", lambda a: lang.cast(lang.cast(a, bool_), i32), lambda a: a != 0,
        (INTS,), i32),
    Row("cast bool f32", lambda a: lang.cast(a > 0, f32), lambda a: a > 0, (INTS,)),
    Row("bitcast", lambda a: lang.bitcast(lang.bitcast(a, i32), u32), lambda a: a, (BITS,), u32),
    *integer_rows(),
    *comparisons(),
]  # fmt: skip  # a table
