"""What kernel functions call: parameters, variables, workgroup memory and control flow."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never

from centella.dtypes import DType
from centella.errors import TraceError
from centella.lang.memory import Shared
from centella.lang.tracer import current
from centella.lang.values import Expr, Operand, Value, Var, adapt, common_type, expr_of

# -- parameters, variables and memory --------------------------------------------------------------


def parameter(name: str, dtype: DType) -> Expr:
    """A launch parameter by name, for kernels whose number of parameters is a constant."""
    if dtype.itemsize != 4:
        raise TraceError(f"a launch parameter is f32, i32 or u32, got {dtype.name}")
    return current().param((name,), dtype.value)


def const(value: Value, dtype: DType) -> Expr:
    """A constant of a value type."""
    return adapt(current(), value, dtype.value)


def var(init: Value, dtype: DType | None = None, *, uniform: bool = False) -> Var:
    """A mutable register; a Python float makes f32, an int u32, unless `dtype` says otherwise."""
    tracer = current()
    type_ = dtype.value if dtype is not None else common_type(init)
    return tracer.var(expr_of(tracer, init, type_), uniform)


def vars(dtype: DType, *shape: int, init: Value = 0) -> Any:
    """Nested Python lists of registers: `vars(f32, 8, 8)[i][j]`, indexed by Python numbers."""
    if not shape:
        return var(init, dtype)
    return [vars(dtype, *shape[1:], init=init) for _ in builtins.range(shape[0])]


def shared(dtype: DType, words: int) -> Shared:
    """Workgroup memory of `words` 4-byte values (f32, i32 or u32), not initialised."""
    if dtype.itemsize != 4:
        raise TraceError(f"shared memory holds f32, i32 or u32, got {dtype.name}")
    size: Any = words
    if isinstance(size, Operand) or not isinstance(size, int) or size <= 0:
        raise TraceError(f"shared memory needs a positive Python size, got {words!r}")
    return Shared(current(), dtype.name, words)


# -- control flow ----------------------------------------------------------------------------------


class _Rounds(Iterator[Expr]):
    """What `range` returns: for `for`, and for no `with`."""

    def __init__(self, rounds: Iterator[Expr]) -> None:
        self._rounds = rounds

    def __next__(self) -> Expr:
        return next(self._rounds)

    def __enter__(self) -> Never:
        raise TraceError("lang.range is a loop, and no block: write `for i in lang.range(n):`")

    def __exit__(self, *_: object) -> None: ...


def range(start: Value, stop: Value | None = None, step: Value = 1) -> _Rounds:
    """A loop on the device: `for k in lang.range(n):`. Bounds are u32 (or i32); step positive."""
    return _Rounds(_rounds(start, stop, step))


def _rounds(start: Value, stop: Value | None, step: Value) -> Iterator[Expr]:
    tracer = current()
    if stop is None:
        start, stop = 0, start
    type_ = common_type(*(v for v in (start, stop, step) if isinstance(v, Operand)), 0)
    if type_ not in ("u32", "i32"):
        raise TraceError(f"lang.range takes u32 or i32 bounds, got {type_}")
    if not isinstance(step, Operand) and (not isinstance(step, int) or step <= 0):
        raise TraceError(f"lang.range needs a positive step, got {step!r}")
    bounds = tuple(expr_of(tracer, v, type_) for v in (start, stop, step))
    uniform = all(b.uniform for b in bounds)
    index, block = tracer.open("for", bounds, uniform)
    yield tracer.result(index, type_, uniform)
    tracer.close(block)


@contextmanager
def loop() -> Iterator[None]:
    """An endless loop on the device; leave it with `lang.break_if(cond)`."""
    tracer = current()
    _, block = tracer.open("loop", (), True)
    yield
    tracer.close(block)


@contextmanager
def if_(condition: Value) -> Iterator[None]:
    """Run the block in the threads where `condition` holds."""
    tracer = current()
    cond = expr_of(tracer, condition, "bool")
    _, block = tracer.open("if", (cond,), cond.uniform)
    yield
    tracer.close(block)


@contextmanager
def else_() -> Iterator[None]:
    """Run the block in the threads where the `if_` just before did not."""
    tracer = current()
    block = tracer.reopen_else()
    yield
    tracer.close(block)


def break_if(condition: Value) -> None:
    """Leave the innermost loop in the threads where `condition` holds."""
    tracer = current()
    tracer.break_if(expr_of(tracer, condition, "bool"))
