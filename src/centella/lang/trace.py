"""The user's face of the kernel language: what kernel functions call, and `trace` itself.

Tracing runs the function once per specialisation and never reads its source. Python `for`, `if`
and numbers act while tracing; the functions here act on the device.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from centella.dtypes import DType, u32
from centella.errors import TraceError
from centella.lang import math as formulas
from centella.lang.face import Face
from centella.lang.ir import KernelIR
from centella.lang.memory import Argument, ScalarArgument, Shared
from centella.lang.tracer import Tracer, expr_of
from centella.lang.values import Expr, Operand, Var, adapt, traced

_active = threading.local()


def current() -> Tracer:
    """The tracer of the kernel being recorded on this thread."""
    tracer = getattr(_active, "tracer", None)
    if tracer is None:
        raise TraceError("centella.lang functions work only inside a kernel function")
    return tracer  # type: ignore[no-any-return]  # a threading.local is untyped


def trace(
    fn: Callable[..., Any],
    face: Face,
    *,
    workgroup: int,
    dtypes: Mapping[str, DType],
    unit: Mapping[str, bool] | None = None,
    constants: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> KernelIR:
    """Record one specialisation of a kernel function.

    Args:
        fn: the kernel function; face: its parameters (`face_of(fn)`).
        workgroup: threads a group.
        dtypes: storage dtype of each tensor parameter.
        unit: False for tensors whose last dimension is strided (default: all True).
        constants: values of the keyword-only parameters.

    Returns:
        The kernel, equal (by digest) for equal arguments in every process.

    Raises:
        TraceError: at the line that the language cannot express.
    """
    tracer = Tracer(name or fn.__name__, workgroup)
    arguments: dict[str, Any] = {}
    tensors: list[Argument | ScalarArgument] = []
    for position, (arg, param) in enumerate(face.tensors):
        dtype = param.dtype or dtypes.get(arg)
        if dtype is None:
            raise TraceError(f"kernel {tracer.name!r}: say which storage {arg!r} has (dtypes=)")
        if dtypes.get(arg, dtype) is not dtype:
            raise TraceError(f"{arg!r} is declared {dtype.name}, got {dtypes[arg].name}")
        made: Argument | ScalarArgument
        if param.mode == "scalar":
            made = ScalarArgument(tracer, position, arg, dtype)
        else:
            is_unit = unit is None or unit.get(arg, True)
            made = Argument(tracer, position, arg, param.mode, dtype, param.rank, is_unit)
        tensors.append(made)
        arguments[arg] = made
    arguments.update(constants or {})
    previous = getattr(_active, "tracer", None)
    _active.tracer = tracer
    try:
        for scalar, type_ in face.scalars:
            arguments[scalar] = tracer.param((scalar,), type_)
        fn(**arguments)
        return tracer.finish(tuple(t.declaration(_where(fn)) for t in tensors))
    finally:
        tracer.abandon()
        _active.tracer = previous


def _where(fn: Callable[..., Any]) -> str:
    """The place of a kernel function, as far as it has one."""
    code = getattr(fn, "__code__", None)
    return f" (kernel {code.co_name!r} at {code.co_filename}:{code.co_firstlineno})" if code else ""


# -- ids -------------------------------------------------------------------------------------------


def local_id() -> Expr:
    """Index of this thread in its group, u32."""
    return current().pure("thread", "u32")


def group_id() -> Expr:
    """Index of this group in the launch, u32, uniform; grids are folded, so it has no limit."""
    return current().pure("group", "u32")


def num_groups() -> Expr:
    """Groups of the launch, u32, uniform."""
    return current().pure("groups", "u32")


def global_id() -> Expr:
    """`group_id() * workgroup + local_id()`, u32; may reach past the threads asked for."""
    return group_id() * current().workgroup + local_id()


def workgroup_size() -> int:
    """Threads a group: a Python number."""
    return current().workgroup


def parameter(name: str, dtype: DType) -> Expr:
    """A launch parameter by name, for kernels whose number of parameters is a constant."""
    if dtype.itemsize != 4:
        raise TraceError(f"a launch parameter is f32, i32 or u32, got {dtype.name}")
    return current().param((name,), dtype.value)


# -- variables and memory ------------------------------------------------------------------------


def const(value: float | int | bool, dtype: DType) -> Expr:
    """A constant of a value type."""
    return adapt(current(), value, dtype.value)


def var(init: Any, dtype: DType | None = None, *, uniform: bool = False) -> Var:
    """A mutable register; a Python float makes f32, an int u32, unless `dtype` says otherwise."""
    tracer = current()
    type_ = dtype.value if dtype is not None else _common_type(init)
    return tracer.var(expr_of(tracer, init, type_), uniform)


def _common_type(*values: Any) -> str:
    """The type of the first traced value; of Python numbers u32 or bool where all are, else f32."""
    for value in values:
        if isinstance(value, Operand):
            return value.type
    kinds = {type(v) for v in values}
    return "bool" if kinds == {bool} else "u32" if kinds == {int} else "f32"


def vars(dtype: DType, *shape: int, init: Any = 0) -> Any:
    """Nested Python lists of registers: `vars(f32, 8, 8)[i][j]`, indexed by Python numbers."""
    if not shape:
        return var(init, dtype)
    return [vars(dtype, *shape[1:], init=init) for _ in range_of_python(shape[0])]


range_of_python = range


def shared(dtype: DType, words: int) -> Shared:
    """Workgroup memory of `words` 4-byte values (f32, i32 or u32), not initialised."""
    if dtype.itemsize != 4:
        raise TraceError(f"shared memory holds f32, i32 or u32, got {dtype.name}")
    size: Any = words
    if isinstance(size, Operand) or not isinstance(size, int) or size <= 0:
        raise TraceError(f"shared memory needs a positive Python size, got {words!r}")
    return Shared(current(), dtype.name, words)


# -- control flow ----------------------------------------------------------------------------------


def range(start: Any, stop: Any = None, step: Any = 1) -> Iterator[Expr]:
    """A loop on the device: `for k in lang.range(n):`. Bounds are u32 (or i32); step positive."""
    tracer = current()
    if stop is None:
        start, stop = 0, start
    type_ = _common_type(*(v for v in (start, stop, step) if isinstance(v, Operand)), 0)
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
def if_(condition: Any) -> Iterator[None]:
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


def break_if(condition: Any) -> None:
    """Leave the innermost loop in the threads where `condition` holds."""
    tracer = current()
    tracer.break_if(expr_of(tracer, condition, "bool"))


def barrier() -> None:
    """All threads of the group meet; their writes to shared and global memory are visible after."""
    tracer = current()
    tracer.need_uniform("a barrier")
    tracer.effect("barrier", "", ())


# -- arithmetic ------------------------------------------------------------------------------------


def select(condition: Any, if_true: Any, if_false: Any) -> Expr:
    """`if_true` where the condition holds, else `if_false`; both are computed."""
    tracer = current()
    cond = expr_of(tracer, condition, "bool")
    type_ = _common_type(if_true, if_false)
    a, b = expr_of(tracer, if_true, type_), expr_of(tracer, if_false, type_)
    if cond.const is not None:
        return a if cond.const else b
    return tracer.pure("select", type_, (cond, a, b))


def fma(a: Any, b: Any, c: Any) -> Expr:
    """`a * b + c` in f32, with one rounding or two: no kernel may depend on which."""
    tracer = current()
    args = tuple(expr_of(tracer, v, "f32") for v in (a, b, c))
    return tracer.pure("fma", "f32", args)


def _pair(op: str, a: Any, b: Any) -> Expr:
    tracer = current()
    type_ = _common_type(a, b)
    if type_ == "bool":
        raise TraceError(f"lang.{op} is for numbers, got bool")
    if type_ != "f32":
        op = op[:3]  # only an f32 may be NaN
    return tracer.pure(op, type_, (expr_of(tracer, a, type_), expr_of(tracer, b, type_)))


def maximum(a: Any, b: Any) -> Expr:
    """The larger value; NaN when either is NaN."""
    return _pair("maxn", a, b)


def minimum(a: Any, b: Any) -> Expr:
    """The smaller value; NaN when either is NaN."""
    return _pair("minn", a, b)


def fmax(a: Any, b: Any) -> Expr:
    """The larger value; for NaN operands either operand may come back (cheapest form)."""
    return _pair("max", a, b)


def fmin(a: Any, b: Any) -> Expr:
    """The smaller value; for NaN operands either operand may come back (cheapest form)."""
    return _pair("min", a, b)


def _unary(op: str, x: Any) -> Expr:
    tracer = current()
    return tracer.pure(op, "f32", (expr_of(tracer, x, "f32"),))


def abs(x: Any) -> Expr:
    """Absolute value of an f32 or i32."""
    if isinstance(x, Operand) and x.type == "i32":
        value = x._expr()
        return select(value < 0, -value, value)
    return _unary("abs", x)


def floor(x: Any) -> Expr:
    """Largest integer not above x, as f32."""
    return _unary("floor", x)


def ceil(x: Any) -> Expr:
    """Smallest integer not below x, as f32."""
    return _unary("ceil", x)


def trunc(x: Any) -> Expr:
    """x without its fraction, as f32."""
    return _unary("trunc", x)


def sqrt(x: Any) -> Expr:
    """Square root; NaN below zero."""
    return _unary("sqrt", x)


def rsqrt(x: Any) -> Expr:
    """`1 / sqrt(x)`."""
    return 1.0 / sqrt(x)


def isnan(x: Any) -> Expr:
    """True for NaN, by its bits (drivers may assume that NaN does not occur)."""
    return (bitcast(x, "u32") & 0x7FFFFFFF) > 0x7F800000


def cast(x: Any, dtype: DType) -> Expr:
    """Value conversion: floats truncate and saturate, NaN gives 0; bools give 0 or 1."""
    if not isinstance(x, Operand):
        return const(x, dtype)
    value = x._expr()
    if value.type == dtype.value:
        return value
    if dtype.value == "bool":
        return value != 0
    tracer = current()
    if {value.type, dtype.value} == {"i32", "u32"}:
        return tracer.pure("bitcast", dtype.value, (value,))
    return tracer.pure("cast", dtype.value, (value,))


def bitcast(x: Any, dtype: DType | str) -> Expr:
    """The same 32 bits as another value type."""
    tracer = current()
    type_ = dtype if isinstance(dtype, str) else dtype.value
    value = traced(x, "lang.bitcast")
    if "bool" in (type_, value.type):
        raise TraceError("bitcast is for f32, i32 and u32")
    return value if value.type == type_ else tracer.pure("bitcast", type_, (value,))


class TracedOperands:
    """The operand set of traced values: what `centella.lang.math` computes on."""

    floor = staticmethod(floor)
    where = staticmethod(select)
    fma = staticmethod(fma)
    abs = staticmethod(abs)
    sqrt = staticmethod(sqrt)
    maximum = staticmethod(maximum)
    minimum = staticmethod(minimum)
    isnan = staticmethod(isnan)

    @staticmethod
    def bits(x: Any) -> Expr:
        """f32 to u32, bit for bit."""
        return bitcast(x, "u32")

    @staticmethod
    def from_bits(x: Any) -> Expr:
        """u32 to f32, bit for bit."""
        return bitcast(x, "f32")

    @staticmethod
    def to_i32(x: Any) -> Expr:
        """f32 to i32: truncating, saturating, NaN to 0."""
        return current().pure("cast", "i32", (traced(x, "to_i32"),))

    @staticmethod
    def to_f32(x: Any) -> Expr:
        """i32 or u32 to f32."""
        return current().pure("cast", "f32", (traced(x, "to_f32"),))

    @staticmethod
    def as_u32(x: Any) -> Expr:
        """i32 to u32, bit for bit."""
        return bitcast(x, "u32")

    @staticmethod
    def as_i32(x: Any) -> Expr:
        """u32 to i32, bit for bit."""
        return bitcast(x, "i32")


OPERANDS = TracedOperands()


def _formula(name: str) -> Callable[[Any], Expr]:
    function = getattr(formulas, name)

    def traced(x: Any) -> Expr:
        return function(OPERANDS, expr_of(current(), x, "f32"))  # type: ignore[no-any-return]

    traced.__name__ = traced.__qualname__ = name
    traced.__doc__ = function.__doc__
    return traced


exp: Callable[[Any], Expr] = _formula("exp")
exp2: Callable[[Any], Expr] = _formula("exp2")
log: Callable[[Any], Expr] = _formula("log")
log2: Callable[[Any], Expr] = _formula("log2")
tanh: Callable[[Any], Expr] = _formula("tanh")
erf: Callable[[Any], Expr] = _formula("erf")
sin: Callable[[Any], Expr] = _formula("sin")
cos: Callable[[Any], Expr] = _formula("cos")
sigmoid: Callable[[Any], Expr] = _formula("sigmoid")


# -- group operations ------------------------------------------------------------------------------


def workgroup_uniform(x: Any) -> Expr:
    """The value of the group's first thread, in every thread; uniform. Implies a barrier."""
    tracer = current()
    tracer.need_uniform("workgroup_uniform")
    value = traced(x, "lang.workgroup_uniform")
    if value.type == "bool":
        return workgroup_uniform(cast(value, u32)) != 0
    return tracer.result(tracer.effect("workgroup_uniform", value.type, (value,)), value.type, True)


_COMBINE: dict[str, Callable[[Any, Any], Expr]] = {
    "add": operator.add, "max": maximum, "min": minimum, "fmax": fmax, "fmin": fmin,
}  # fmt: skip  # a table


def workgroup_reduce(value: Any, op: str) -> Expr:
    """Reduce over the threads of a group ("add", "max", "min", "fmax", "fmin"), in every thread.

    A tree through shared memory in a fixed order: equal inputs give bitwise equal results.
    """
    tracer = current()
    tracer.need_uniform("workgroup_reduce")
    expr = traced(value, "lang.workgroup_reduce")
    if op not in _COMBINE or expr.type == "bool":
        raise TraceError(
            f"lang.workgroup_reduce takes numbers and one of {', '.join(_COMBINE)}; got "
            f"{expr.type} and {op!r}"
        )
    size = tracer.workgroup
    scratch = Shared(tracer, expr.type, size)
    me = local_id()
    scratch[me] = expr
    barrier()
    width = size
    while width > 1:
        half = (width + 1) // 2
        with if_(me < width - half):
            scratch[me] = _COMBINE[op](scratch[me], scratch[me + half])
        barrier()
        width = half
    result = scratch[0]
    if len(tracer.blocks) > 1:
        barrier()
    return result


def _subgroup(op: str, x: Any, attr: Any = None) -> Expr:
    tracer = current()
    tracer.need_uniform("a subgroup operation")
    value = traced(x, "a subgroup operation")
    if value.type == "bool":
        raise TraceError("a subgroup operation is for numbers, got bool; use lang.cast")
    index = tracer.effect(op, value.type, (value,), attr)
    return tracer.result(index, value.type, False)


def subgroup_sum(x: Any) -> Expr:
    """Sum over the subgroup, in every lane."""
    return _subgroup("subgroup_add", x)


def subgroup_max(x: Any) -> Expr:
    """Maximum over the subgroup, in every lane (NaN: either operand)."""
    return _subgroup("subgroup_max", x)


def subgroup_min(x: Any) -> Expr:
    """Minimum over the subgroup, in every lane (NaN: either operand)."""
    return _subgroup("subgroup_min", x)


def shuffle_xor(x: Any, mask: int) -> Expr:
    """The value of the lane whose index differs by `mask` (a Python number)."""
    number: Any = mask
    if isinstance(number, Operand) or not isinstance(number, int) or not 0 < number < 128:
        raise TraceError(f"lang.shuffle_xor takes a Python number from 1 to 127, got {mask!r}")
    return _subgroup("shuffle_xor", x, mask)


def lane_id() -> Expr:
    """Index of this thread in its subgroup, u32."""
    return current().pure("lane", "u32")


def subgroup_size() -> Expr:
    """Lanes of a subgroup on this device, u32, uniform."""
    return current().pure("subgroup_size", "u32")
