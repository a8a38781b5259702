"""The kernel of element-wise ops, and of what moves elements: a chunk or a word a thread.

Dimensions that all operands walk alike are merged. Where the output's rows and each operand's start
on 16-byte boundaries a thread has one chunk, else one word of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from centella import lang
from centella.dtypes import DType, bool_, dtype_of, f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.op import NoAttrs
from centella.ops.layout import broadcast_strides, flat, merge
from centella.ops.rows import place_of, width_of
from centella.specs import Spec

A = TypeVar("A", bound=Struct)
WORKGROUP = 256
NUMBERS = (int, float)
NONE = NoAttrs()


class Number(NamedTuple):
    """A number among an op's attributes: it rides with the launch.

    Attributes:
        type: the name of the type that it rides as.
    """

    name: str
    type: str
    value: int | float


def element_kernel(
    name: str, compute: Callable[..., Any], moves: bool = False,
    begin: Callable[..., Any] | None = None,
) -> Kernel:  # fmt: skip
    """A kernel that gives each thread one chunk (or word) of the output.

    `compute(values, numbers, attrs)` maps the operands' elements, and the numbers that ride with
    the launch, to one output element. Constants: `rank` of the merged iteration space, `chunk` (16
    bytes a thread, else a word), `modes` of the operands ("chunk": 16-byte loads, "one": repeats
    along the row, "any": strided elements), `scalars` (the numbers' types) and `attrs`.

    `begin(inputs, places, numbers, attrs)` gives the places in the operands at which the row is
    read, the numbers, and the operands whose elements are not loaded.
    """

    def run(
        *, rank: int, chunk: bool, modes: Any, scalars: Any, attrs: Struct, y: Argument,
        **inputs: Argument,
    ) -> None:  # fmt: skip
        width = width_of(y, chunk)
        with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
            row, column = place_of(width) if rank > 1 else (None, lang.global_id() * width)
            index = index_of(row, "n", rank - 1)
            places = [offset_of(index, f"s{k}.") for k in range(len(modes) + 1)]
            numbers = {n: number(n, t) for n, t in scalars}
            unread: Any = ()
            if begin is not None:
                places, numbers, unread = begin(inputs, places, numbers, attrs)
            columns = [
                [None] * width
                if k in unread
                else load_elements(inputs[f"x{k}"], mode, places[k], column, width, k)
                for k, mode in enumerate(modes)
            ]
            out = [compute([c[j] for c in columns], numbers, attrs) for j in range(width)]
            y.store(places[-1] + column, out)

    run.__name__ = name
    return Kernel(run, workgroup=WORKGROUP, name=name, moves=moves)


def number(name: str, type_: str) -> Any:
    """A number that rides with the launch; bools ride as u32."""
    if type_ == bool_.name:
        return lang.parameter(name, u32) != 0
    return lang.parameter(name, dtype_of(type_))


def index_of(linear: Any, extents: str, rank: int) -> list[Any]:
    """The index along each dimension of the element that is `linear`-th in row-major order.

    The parameters `extents`1, `extents`2, ... are the extents from the second dimension on.
    """
    index: list[Any] = []
    for axis in range(rank - 1, 0, -1):
        extent = lang.parameter(f"{extents}{axis}", u32)
        index, linear = [linear % extent, *index], linear // extent
    return [linear, *index] if rank else []


def offset_of(index: list[Any], strides: str) -> Any:
    """Elements from a tensor's first to the one at an index; its strides are parameters."""
    offset = lang.const(0, u32)
    for axis, i in enumerate(index):
        offset = offset + i * lang.parameter(f"{strides}{axis}", u32)
    return offset


def numbered(values: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """Launch parameters for `index_of` and `offset_of`: of each name, one a dimension."""
    return {f"{name}{axis}": n for name, each in values.items() for axis, n in enumerate(each)}


def load_elements(
    x: Any, mode: str, start: Any, column: Any, width: int, operand: int
) -> list[Any]:
    """`width` elements of a row from a column, in the way that `mode` names."""
    if mode == "chunk":
        chunks = range(0, width, x.dtype.per_chunk)
        return [v for first in chunks for v in x.load(start + column + first)]
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
    numbers: tuple[Number, ...] = (),
    attrs: Struct = NONE,
    seen: tuple[Spec, ...] | None = None,
) -> Call:
    """The launch of an element kernel: merged dimensions, widest access that fits.

    Args:
        seen: the inputs as they broadcast, where they are others.
    """
    seen = inputs if seen is None else seen
    sizes, steps = _space(seen, out)
    modes = _modes(seen, out, steps)
    width = out.dtype.per_word if modes is None else out.dtype.per_chunk
    items = -(-sizes[-1] // width)
    threads = items * math.prod(sizes[:-1])
    values: dict[str, int | float] = {"items": items, "threads": threads, "columns": sizes[-1]}
    values.update({n.name: n.value for n in numbers})
    values.update({f"step{k}": step[-1] for k, step in enumerate(steps)})
    values.update(numbered({"n": sizes, **{f"s{k}.": s[:-1] for k, s in enumerate(steps)}}))
    constants = (
        ("attrs", attrs),
        ("chunk", modes is not None),
        ("modes", ("any",) * len(inputs) if modes is None else modes),
        ("rank", len(sizes)),
        ("scalars", tuple((n.name, n.type) for n in numbers)),
    )
    form = signature({f"x{k}": 1 for k in range(len(inputs))}, {"y": 1})
    refs = (*(Ref(k, flat(s)) for k, s in enumerate(inputs)), Ref(len(inputs), out))
    groups = -(-threads // WORKGROUP)
    return Call(kernel, refs, tuple(values.items()), constants, groups, signature=form)


Space = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def _space(inputs: tuple[Spec, ...], out: Spec) -> Space:
    """Merged extents, and the steps of each operand (the output's last) along them.

    Operands that lie alike are one row, pads and all. The output's step along the last extent is
    1: where its rows have one element (and a pitch of more), that element is a row.
    """
    specs = (*inputs, out)
    if all((s.shape, s.strides, s.aligned) == (out.shape, out.strides, True) for s in specs):
        alike = all(s.dtype.itemsize == out.dtype.itemsize for s in inputs)
        whole = out.storage_bytes // out.dtype.itemsize if alike else out.span
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
        if step[-1] == 0:
            modes.append("one")
        elif step[-1] == 1 and spec.aligned and spec.dtype.itemsize == item:
            modes.append("chunk")
        else:
            return None
    return tuple(modes)


def number_type(dtype: DType) -> str:
    """The type that a number of a dtype rides as."""
    return {"float": f32, "int": i32, "uint": u32, "bool": bool_}[dtype.kind].name


def as_f32(value: int | float) -> float:
    """A number as f32 holds it: beyond its range infinite."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def split_numbers(attrs: A, dtype: DType) -> tuple[tuple[Number, ...], A]:
    """Attributes that ride with the launch, as values of the dtype, and the attributes without."""
    type_ = number_type(dtype)
    numeric = sorted((n, v) for n, v in asdict(attrs).items() if isinstance(v, NUMBERS))
    numbers = [Number(n, type_, as_f32(v) if dtype.is_float else int(v)) for n, v in numeric]
    return tuple(numbers), replace(attrs, **dict.fromkeys(n for n, _ in numeric))
