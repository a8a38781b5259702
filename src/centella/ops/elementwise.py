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

from centella import lang
from centella.dtypes import DType, dtype_of, f32, i32, u32
from centella.errors import DTypeError
from centella.lang.face import Face, TensorParam
from centella.op import Lowered, Op, Out
from centella.ops.layout import broadcast, broadcast_strides, merge
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
    """An element-wise op: `fn(operands, *values, **attrs)`; `kinds` of dtype it takes."""

    name: str
    operands: tuple[str, ...]
    fn: Callable[..., Any]
    kinds: tuple[str, ...]
    doc: str


FLOATS, NUMERIC = ("float",), ("float", "int", "uint")
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
    Expression("scale", ("x",), lambda o, x, factor: x * factor, FLOATS, "x * factor"),
    Expression(
        "clip", ("x",), lambda o, x, low, high: o.minimum(o.maximum(x, low), high), NUMERIC,
        "min(max(x, low), high)",
    ),
    Expression(
        "leaky_relu", ("x",), lambda o, x, slope: o.maximum(x, 0) + o.minimum(x, 0) * slope,
        FLOATS, "x above 0, slope x below",
    ),
    Expression("copy", ("x",), lambda o, x: x, ("float", "int", "uint", "bool"), "x, moved"),
)  # fmt: skip


def _rule(expression: Expression) -> Callable[[tuple[Spec, ...], dict[str, Any]], tuple[Out, ...]]:
    def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
        for spec in specs:
            if spec.dtype.kind not in expression.kinds:
                raise DTypeError(
                    f"{expression.name}: expected a dtype of kind "
                    f"{' or '.join(expression.kinds)}, got {spec.dtype.name}"
                )
        first = specs[0].dtype
        if any(s.dtype is not first for s in specs):
            got = ", ".join(s.dtype.name for s in specs)
            raise DTypeError(f"{expression.name}: expected operands of one dtype, got {got}")
        return ((broadcast(expression.name, *(s.shape for s in specs)), first),)

    return rule


def _arguments(expression: Expression, values: list[Any], attrs: dict[str, Any]
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
    `rank` of the merged iteration space, `modes` of the operands ("chunk": 16-byte loads, "one":
    repeats along the row, "any": strided elements), `scalars` and `attrs` of the expression.
    """

    def run(*, rank: int, modes: Any, scalars: Any, attrs: Any, y: Any, **inputs: Any) -> None:
        chunked = "any" not in modes
        width = y.dtype.per_chunk if chunked else y.dtype.per_word
        items = lang.parameter("items", u32)
        with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
            row, item = _split(items, rank)
            column = item * width
            places = [_places(rank, row, k) for k in range(len(modes) + 1)]
            numbers = {n: lang.parameter(n, dtype_of(t)) for n, t in scalars}
            columns = [
                _load(inputs[f"x{k}"], mode, places[k], column, width, k)
                for k, mode in enumerate(modes)
            ]
            out = [
                compute([c[j] for c in columns], numbers, dict(attrs)) for j in range(width)
            ]
            if chunked or width > 1:
                y.store(places[-1] + column, out)
            else:
                y[places[-1] + column] = out[0]

    run.__name__ = name
    return Kernel(run, workgroup=WORKGROUP, name=name, face=Face((), (), ()))


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
    scalars: tuple[tuple[str, int | float], ...],
    attrs: tuple[tuple[str, Any], ...],
) -> Call:
    """The launch of an element kernel: merged dimensions, widest access that fits."""
    specs = (*inputs, out)
    flat = all(s.shape == out.shape and s.strides == out.strides and s.aligned for s in specs)
    same_size = all(s.dtype.itemsize == out.dtype.itemsize for s in inputs)
    if flat and same_size and out.aligned:
        sizes: tuple[int, ...] = (out.storage_bytes // out.dtype.itemsize if len(out.shape) > 1
                                  else out.size,)
        steps: tuple[tuple[int, ...], ...] = tuple((1,) for _ in specs)
    else:
        strides = tuple(broadcast_strides(s, out.shape) for s in specs)
        sizes, steps = merge(out.shape, strides)
    modes = _modes(inputs, out, steps, same_size)
    width = out.dtype.per_word if "any" in modes else out.dtype.per_chunk
    items = -(-sizes[-1] // width)
    threads = items * math.prod(sizes[:-1])
    rank = len(sizes)
    types = tuple((n, _scalar_type(inputs[0].dtype)) for n, _ in scalars)
    values: dict[str, int | float] = {"items": items, "threads": threads, "columns": sizes[-1]}
    values.update(scalars)
    for k, step in enumerate(steps):
        values[f"step{k}"] = step[-1]
        values.update({f"s{k}.{axis}": s for axis, s in enumerate(step[:-1])})
    values.update({f"n{axis}": n for axis, n in enumerate(sizes)})
    names = [f"x{k}" for k in range(len(inputs))]
    face = Face(
        (*((n, TensorParam("in", None, 1)) for n in names), ("y", TensorParam("out", None, 1))),
        (),
        (),
    )
    refs = tuple(
        Ref(k, Spec((s.storage_bytes // s.dtype.itemsize,), s.dtype, (1,), s.aligned))
        for k, s in enumerate(inputs)
    )
    constants = (("attrs", attrs), ("modes", modes), ("rank", rank), ("scalars", types))
    groups = -(-threads // WORKGROUP)
    result = Ref(len(inputs), out)
    return Call(kernel, (*refs, result), tuple(values.items()), constants, groups, face=face)


def _modes(
    inputs: tuple[Spec, ...], out: Spec, steps: tuple[tuple[int, ...], ...], same_size: bool
) -> tuple[str, ...]:
    modes: list[str] = []
    item = out.dtype.itemsize
    fits = same_size and out.aligned and all(s * item % 16 == 0 for s in steps[-1][:-1])
    fits = fits and steps[-1][-1] == 1
    for spec, step in zip(inputs, steps[:-1], strict=True):
        if step[-1] == 0:
            modes.append("one")
        elif step[-1] == 1 and spec.aligned and all(
            s * spec.dtype.itemsize % 16 == 0 for s in step[:-1]
        ):
            modes.append("chunk")
        else:
            modes.append("any")
    if not fits or "any" in modes:
        return tuple("any" for _ in inputs)
    return tuple(modes)


def _scalar_type(dtype: DType) -> str:
    return {"float": f32, "int": i32, "uint": u32, "bool": u32}[dtype.kind].name


def _lower(expression: Expression, kernel: Kernel) -> Callable[..., Lowered]:
    def lower(
        inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
    ) -> Lowered:
        numbers = tuple((n, v) for n, v in sorted(attrs.items())
                        if isinstance(v, NUMBERS) and not isinstance(v, bool))
        named = {n for n, _ in numbers}
        rest = tuple((n, v) for n, v in sorted(attrs.items()) if n not in named)
        return Lowered((element_call(kernel, inputs, outputs[0], numbers, rest),))

    return lower


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
