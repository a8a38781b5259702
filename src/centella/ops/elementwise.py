"""Element-wise operations: each is one expression over an operand set, written once.

The same expression is the NumPy formula, the float64 oracle and the kernel. Shapes broadcast by
NumPy's rule; one operand of a binary op may be a number, which rides with the launch. Statistics
aside, arithmetic is f32 whatever the storage; each op rounds once, when it stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import DType, bool_, dtype_of, f32, i32, u32
from centella.errors import DTypeError
from centella.lang.face import Face, TensorParam
from centella.op import Lowered, Op, Out
from centella.ops.layout import broadcast, broadcast_strides, flat, merge
from centella.ops.operands import KERNEL, NUMPY
from centella.program import Call, Kernel, Ref
from centella.specs import Caps, Spec

WORKGROUP = 256
NUMBERS = (int, float)


def gelu(o: Any, x: Any, kind: str = "none") -> Any:
    """GELU: "none" x Phi(x) by erf; "tanh" its tanh form; "quick" x sigmoid(1.702 x)."""
    if kind == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (o.tanh(inner) + 1.0)
    if kind == "quick":
        return x * o.sigmoid(x * 1.702)
    return x * 0.5 * (o.erf(x * math.sqrt(0.5)) + 1.0)


def relu(o: Any, x: Any) -> Any:
    """max(x, 0), NaN kept."""
    return o.maximum(x, 0)


def silu(o: Any, x: Any) -> Any:
    """x sigmoid(x), also called swish."""
    return x * o.sigmoid(x)


def elu(o: Any, x: Any, alpha: float) -> Any:
    """x above 0, alpha (e^x - 1) below."""
    return o.maximum(x, 0) + o.expm1(o.minimum(x, 0)) * alpha


ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": lambda o, x: gelu(o, x, "tanh"),
    "gelu_quick": lambda o, x: gelu(o, x, "quick"),
    "silu": silu,
    "sigmoid": lambda o, x: o.sigmoid(x),
    "tanh": lambda o, x: o.tanh(x),
}


@dataclass(frozen=True, slots=True)
class Expression:
    """An element-wise op: `fn(operands, *values, **attrs)`.

    Attributes:
        operands: their names; one given as a number is an attribute of that name.
        kinds: kinds of dtype it takes.
        conditions: how many of the operands, the first ones, are bool.
    """

    name: str
    operands: tuple[str, ...]
    fn: Callable[..., Any]
    kinds: tuple[str, ...]
    doc: str
    conditions: int = 0


FLOATS, NUMERIC = ("float",), ("float", "int", "uint")
EVERY = (*NUMERIC, "bool")
TABLE = (
    Expression("add", ("first", "second"), lambda o, a, b: a + b, NUMERIC, "a + b"),
    Expression("sub", ("first", "second"), lambda o, a, b: a - b, NUMERIC, "a - b"),
    Expression("mul", ("first", "second"), lambda o, a, b: a * b, NUMERIC, "a * b"),
    Expression("div", ("first", "second"), lambda o, a, b: a / b, FLOATS, "a / b"),
    Expression("maximum", ("first", "second"), lambda o, a, b: o.maximum(a, b), NUMERIC, "max"),
    Expression("minimum", ("first", "second"), lambda o, a, b: o.minimum(a, b), NUMERIC, "min"),
    Expression("neg", ("x",), lambda o, x: -x, NUMERIC, "-x"),
    Expression("abs", ("x",), lambda o, x: o.abs(x), NUMERIC, "|x|"),
    Expression("sqrt", ("x",), lambda o, x: o.sqrt(x), FLOATS, "square root"),
    Expression("exp", ("x",), lambda o, x: o.exp(x), FLOATS, "e^x"),
    Expression("log", ("x",), lambda o, x: o.log(x), FLOATS, "natural logarithm"),
    Expression("tanh", ("x",), lambda o, x: o.tanh(x), FLOATS, "hyperbolic tangent"),
    Expression("sigmoid", ("x",), lambda o, x: o.sigmoid(x), FLOATS, "1 / (1 + e^-x)"),
    Expression("relu", ("x",), relu, NUMERIC, "max(x, 0)"),
    Expression("swish", ("x",), silu, FLOATS, "x sigmoid(x)"),
    Expression("gelu", ("x",), gelu, FLOATS, "x Phi(x)"),
    Expression("elu", ("x",), elu, FLOATS, "x above 0, alpha (e^x - 1) below"),
    Expression("scale", ("x",), lambda o, x, factor: x * factor, FLOATS, "x * factor"),
    Expression(
        "clip", ("x",), lambda o, x, low, high: o.minimum(o.maximum(x, low), high), NUMERIC,
        "min(max(x, low), high)",
    ),
    Expression(
        "leaky_relu", ("x",), lambda o, x, slope: o.maximum(x, 0) + o.minimum(x, 0) * slope,
        FLOATS, "x above 0, slope x below",
    ),
    Expression(
        "where", ("condition", "first", "second"), lambda o, c, a, b: o.where(c, a, b), EVERY,
        "first where the condition holds, else second", conditions=1,
    ),
    Expression("copy", ("x",), lambda o, x: x, EVERY, "x, moved"),
)  # fmt: skip


def _rule(expression: Expression) -> Callable[[tuple[Spec, ...], dict[str, Any]], tuple[Out, ...]]:
    name, split = expression.name, expression.conditions

    def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
        for spec in specs[:split]:
            if spec.dtype is not bool_:
                raise DTypeError(f"{name}: expected a bool condition, got {spec.dtype.name}")
        for spec in specs[split:]:
            if spec.dtype.kind not in expression.kinds:
                raise DTypeError(
                    f"{name}: expected a dtype of kind {' or '.join(expression.kinds)}, got "
                    f"{spec.dtype.name}"
                )
        first = specs[split].dtype
        if any(s.dtype is not first for s in specs[split:]):
            got = ", ".join(s.dtype.name for s in specs[split:])
            raise DTypeError(f"{name}: expected operands of one dtype, got {got}")
        check_numbers(name, attrs, first)
        return ((broadcast(name, *(s.shape for s in specs)), first),)

    return rule


def check_numbers(op: str, attrs: dict[str, Any], dtype: DType) -> None:
    """Numbers among the attributes must be values of the dtype.

    Raises:
        DTypeError: for a fraction, or a number out of range, where the dtype is an integer.
    """
    if dtype.is_float:
        return
    info = np.iinfo(dtype.numpy) if dtype is not bool_ else None
    low, high = (info.min, info.max) if info is not None else (0, 1)
    for value in attrs.values():
        whole = isinstance(value, int)
        if isinstance(value, NUMBERS) and not (whole and low <= value <= high):
            raise DTypeError(f"{op}: expected a number that fits {dtype.name}, got {value}")


def _arguments(
    expression: Expression, values: list[Any], attrs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Operands in order, numbers filled in, and the remaining attributes."""
    rest = dict(attrs)
    ordered: list[Any] = []
    left = list(values)
    for name in expression.operands:
        ordered.append(rest.pop(name) if name in rest else left.pop(0))
    return ordered, rest


def _reference(expression: Expression) -> Callable[..., Any]:
    def reference(*arrays: Any, **attrs: Any) -> Any:
        ordered, rest = _arguments(expression, list(arrays), attrs)
        return expression.fn(NUMPY, *ordered, **rest)

    return reference


def element_kernel(name: str, compute: Callable[..., Any]) -> Kernel:
    """A kernel that gives each thread one chunk (or word) of the output.

    `compute(values, scalars, attrs)` maps the operands' elements to one output element. Constants:
    `rank` of the merged iteration space, `chunk` (16 bytes a thread, else a word), `modes` of the
    operands ("chunk": 16-byte loads, "one": repeats along the row, "any": strided elements),
    `scalars` and `attrs` of the expression.
    """

    def run(
        *, rank: int, chunk: bool, modes: Any, scalars: Any, attrs: Any, y: Any, **inputs: Any
    ) -> None:
        width = y.dtype.per_chunk if chunk else y.dtype.per_word
        items = lang.parameter("items", u32)
        with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
            row, item = _split(items, rank)
            column = item * width
            places = [_places(rank, row, k) for k in range(len(modes) + 1)]
            numbers = {n: _number(n, t) for n, t in scalars}
            columns = [
                _load(inputs[f"x{k}"], mode, places[k], column, width, k)
                for k, mode in enumerate(modes)
            ]
            out = [compute([c[j] for c in columns], numbers, dict(attrs)) for j in range(width)]
            y.store(places[-1] + column, out)

    run.__name__ = name
    return Kernel(run, workgroup=WORKGROUP, name=name, face=Face((), (), ()))


def _number(name: str, type_: str) -> Any:
    """A number that rides with the launch; bools ride as u32."""
    if type_ == bool_.name:
        return lang.parameter(name, u32) != 0
    return lang.parameter(name, dtype_of(type_))


def _split(items: Any, rank: int) -> tuple[Any, Any]:
    thread = lang.global_id()
    if rank == 1:
        return lang.const(0, u32), thread
    row = thread // items
    return row, thread - row * items


def _places(rank: int, row: Any, operand: int) -> Any:
    """Element where an operand's row starts."""
    start = lang.const(0, u32)
    for axis in range(rank - 2, -1, -1):
        if axis:
            extent = lang.parameter(f"n{axis}", u32)
            index, row = row % extent, row // extent
        else:
            index = row
        start = start + index * lang.parameter(f"s{operand}.{axis}", u32)
    return start


def _load(x: Any, mode: str, start: Any, column: Any, width: int, operand: int) -> list[Any]:
    if mode == "chunk":
        return x.load(start + column)  # type: ignore[no-any-return]  # traced values
    if mode == "one":
        return [x[start]] * width
    step = lang.parameter(f"step{operand}", u32)
    last = lang.parameter("columns", u32) - 1
    if width == 1:
        return [x[start + column * step]]
    lanes = [lang.minimum(column + j, last) for j in range(width)]
    return [x[start + lane * step] for lane in lanes]


def element_call(
    kernel: Kernel,
    inputs: tuple[Spec, ...],
    out: Spec,
    scalars: tuple[tuple[str, int | float], ...] = (),
    attrs: tuple[tuple[str, Any], ...] = (),
) -> Call:
    """The launch of an element kernel: merged dimensions, widest access that fits."""
    sizes, steps = _space(inputs, out)
    modes = _modes(inputs, out, steps)
    width = out.dtype.per_word if modes is None else out.dtype.per_chunk
    items = -(-sizes[-1] // width)
    threads = items * math.prod(sizes[:-1])
    values: dict[str, int | float] = {"items": items, "threads": threads, "columns": sizes[-1]}
    values.update(scalars)
    for k, step in enumerate(steps):
        values[f"step{k}"] = step[-1]
        values.update({f"s{k}.{axis}": s for axis, s in enumerate(step[:-1])})
    values.update({f"n{axis}": n for axis, n in enumerate(sizes)})
    constants = (
        ("attrs", attrs),
        ("chunk", modes is not None),
        ("modes", ("any",) * len(inputs) if modes is None else modes),
        ("rank", len(sizes)),
        ("scalars", tuple((n, _scalar_type(out.dtype)) for n, _ in scalars)),
    )
    face = Face(
        (
            *((f"x{k}", TensorParam("in", None, 1)) for k in range(len(inputs))),
            ("y", TensorParam("out", None, 1)),
        ),
        (),
        (),
    )
    refs = (*(Ref(k, flat(s)) for k, s in enumerate(inputs)), Ref(len(inputs), out))
    groups = -(-threads // WORKGROUP)
    return Call(kernel, refs, tuple(values.items()), constants, groups, face=face)


Space = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def _space(inputs: tuple[Spec, ...], out: Spec) -> Space:
    """Merged extents, and the steps of each operand (the output's last) along them.

    Operands that lie alike are one row, pads and all. The output's step along the last extent is
    1: where its rows have one element (and a pitch of more), that element is a row.
    """
    specs = (*inputs, out)
    if all((s.shape, s.strides, s.aligned) == (out.shape, out.strides, True) for s in specs):
        whole = out.storage_bytes // out.dtype.itemsize if len(out.shape) > 1 else out.size
        return (whole,), ((1,),) * len(specs)
    sizes, steps = merge(out.shape, tuple(broadcast_strides(s, out.shape) for s in specs))
    if steps[-1][-1] > 1:
        return (*sizes, 1), (*((*s, 0) for s in steps[:-1]), (*steps[-1], 1))
    return sizes, steps


def _modes(
    inputs: tuple[Spec, ...], out: Spec, steps: tuple[tuple[int, ...], ...]
) -> tuple[str, ...] | None:
    """How each operand is read in 16-byte chunks of the output; None where a word is the most."""
    item = out.dtype.itemsize
    if not out.aligned or steps[-1][-1] > 1 or any(s * item % 16 for s in steps[-1][:-1]):
        return None
    modes: list[str] = []
    for spec, step in zip(inputs, steps[:-1], strict=True):
        if spec.dtype.itemsize != item:
            return None
        if step[-1] == 0:
            modes.append("one")
        elif step[-1] == 1 and spec.aligned and not any(s * item % 16 for s in step[:-1]):
            modes.append("chunk")
        else:
            return None
    return tuple(modes)


def _scalar_type(dtype: DType) -> str:
    return {"float": f32, "int": i32, "uint": u32, "bool": bool_}[dtype.kind].name


def _lower(expression: Expression, kernel: Kernel) -> Callable[..., Lowered]:
    def lower(
        inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
    ) -> Lowered:
        numbers, rest = split_numbers(attrs, outputs[0].dtype)
        return Lowered((element_call(kernel, inputs, outputs[0], numbers, rest),))

    return lower


def split_numbers(
    attrs: dict[str, Any], dtype: DType
) -> tuple[tuple[tuple[str, int | float], ...], tuple[tuple[str, Any], ...]]:
    """Attributes that ride with the launch, as values of the dtype, and those that choose it."""
    numbers = {n: v for n, v in attrs.items() if isinstance(v, NUMBERS)}
    with np.errstate(over="ignore"):
        typed = {n: float(np.float32(v)) if dtype.is_float else int(v) for n, v in numbers.items()}
    rest = {n: v for n, v in attrs.items() if n not in numbers}
    return tuple(sorted(typed.items())), tuple(sorted(rest.items()))


def _declare(expression: Expression) -> Op:
    def compute(values: list[Any], scalars: dict[str, Any], attrs: dict[str, Any]) -> Any:
        ordered, rest = _arguments(expression, values, {**scalars, **attrs})
        return expression.fn(KERNEL, *ordered, **rest)

    kernel = element_kernel(expression.name, compute)
    return Op(
        expression.name,
        _rule(expression),
        _reference(expression),
        _lower(expression, kernel),
        doc=expression.doc,
    )


OPS = {e.name: _declare(e) for e in TABLE}
