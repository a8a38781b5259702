"""conv1d: y[b, t, o] = f(bias[o] + sum over j, c of x[b, c, t stride + j - padding] w[o, c, j]).

With channels last and the padding written out, the columns that an output sees are neighbours in
memory: row t of the unfolded input begins `stride channels` elements after row t - 1 and is
`kernel channels` long. So the product reads overlapping rows of one padded copy of x, and no
unfolded input is stored. An x that lies so already, or weights that lie [out, kernel, in], are not
copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec.structs import replace

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.op.axes import Axes, axes
from centella.op.op import Lowered, Op, Out
from centella.ops.elements import Number, element_call
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.fill import kernel as fill
from centella.ops.kernel_params import face
from centella.ops.layout import flat
from centella.ops.matmul.problem import ALONG_K, Problem
from centella.ops.operands import NUMPY
from centella.ops.rows import place_of
from centella.specs import Caps, Spec

WORKGROUP = 256


def _pack(*, vector: bool, x: Any, y: Any) -> None:
    """A thread a chunk: y[r, l channels + c] = x[r, l - before, c], zeros outside its extent.

    `vector`: channels are neighbours in x, and a chunk has one place l.
    """
    width = y.dtype.per_chunk
    channels, extent, before, s0, s1, s2 = (
        lang.parameter(n, u32) for n in ("channels", "extent", "before", "s0", "s1", "s2")
    )
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        out: list[Any] = []
        for j in range(0, width, width if vector else 1):
            place = (column + j) // channels
            channel = (column + j) - place * channels
            inside = place - before < extent  # what is before the first wraps
            at = row * s0 + (place - before) * s1 + channel * s2
            at = lang.select(inside, at, 0)
            found = x.load(at) if vector else [x[at]]
            out += [lang.select(inside, v, 0.0) for v in found]
        y.store(row, column, out)


pack_channels: Kernel = Kernel(
    _pack, workgroup=WORKGROUP, name="pack_channels", face=face({"x": 1}, {"y": 2})
)


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """x [b, in, l], weight [out, in, kernel], bias [out] to [b, l_out, out]."""
    x, weight, *more = specs
    if len(x.shape) != 3 or len(weight.shape) != 3 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"conv1d: expected x [batch, in, length] and weight [out, in, kernel], got "
            f"{list(x.shape)} and {list(weight.shape)}"
        )
    taps, whole = weight.shape[2], x.shape[2] + 2 * attrs["padding"]
    if not 1 <= taps <= whole:
        raise ShapeError(f"conv1d: expected a kernel of 1 to {whole} (padded length), got {taps}")
    for spec in more:
        if spec.shape != weight.shape[:1]:
            raise ShapeError(
                f"conv1d: expected bias {list(weight.shape[:1])}, got {list(spec.shape)}"
            )
    if any(not s.dtype.is_float for s in specs):
        raise DTypeError(f"conv1d: expected float dtypes, got {[s.dtype.name for s in specs]}")
    return (((x.shape[0], (whole - taps) // attrs["stride"] + 1, weight.shape[0]), x.dtype),)


def reference(x: Any, weight: Any, *bias: Any, stride: int, padding: int, activation: str) -> Any:
    """The NumPy formula: the product of overlapping rows with the weights."""
    batch, channels, length = x.shape
    out, _, taps = weight.shape
    padded = np.zeros((batch, length + 2 * padding, channels), x.dtype)
    padded[:, padding : padding + length] = x.swapaxes(1, 2)
    count = (length + 2 * padding - taps) // stride + 1
    row, item = padded.strides[0], padded.itemsize
    rows = np.lib.stride_tricks.as_strided(
        padded, (batch, count, taps * channels), (row, stride * channels * item, item)
    )
    rows = np.ascontiguousarray(rows)  # BLAS takes no rows that overlap
    y = np.matmul(rows, weight.transpose(2, 1, 0).reshape(taps * channels, out))
    for vector in bias:
        y += vector
    return ACTIVATIONS[activation](NUMPY, y) if activation else y


def takes(index: int, spec: Spec) -> bool:
    """x and weights as they lie; a bias of neighbouring elements."""
    return index < 2 or spec.unit_rows


def _whole(spec: Spec, channels: int, places: int) -> bool:
    """Whether [.., channels, places] lies with channels last and no gap between places."""
    along, step = spec.strides[1:]
    return (channels == 1 or along == 1) and (places == 1 or step == channels)


def _packed(source: int, spec: Spec, target: int, before: int) -> tuple[Call, Spec]:
    """The copy of [rows, channels, places] with channels last, `before` zeros on either side."""
    rows, channels, places = spec.shape
    s0, s2, s1 = spec.strides
    columns, width = (places + 2 * before) * channels, spec.dtype.per_chunk
    items = -(-columns // width)
    y = Spec((rows, columns), spec.dtype, (max(items, 1) * width, 1))
    if not spec.size:  # nothing may be read
        zeros = element_call(fill, (), y, (Number("value", "f32", 0.0),))
        return replace(zeros, tensors=(Ref(target, y),)), y
    steps = (s0, s1) if places > 1 else (s0,)
    near = channels > 0 and channels % width == 0 and s2 == 1 and spec.aligned
    vector = near and all(s % width == 0 for s in steps)
    scalars = (
        ("threads", rows * items), ("items", items), ("channels", channels), ("extent", places),
        ("before", before), ("s0", s0), ("s1", s1), ("s2", s2),
    )  # fmt: skip
    refs = (Ref(source, flat(spec)), Ref(target, y))
    groups = -(-rows * items // WORKGROUP)
    return Call(pack_channels, refs, scalars, (("vector", vector),), groups), y


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """The product, after a copy of x and of the weights where they do not lie for it."""
    from centella.ops.matmul.launches import Product, after_copies, product_calls

    (x, weight, *bias), y = inputs, outputs[0]
    batch, channels, _ = x.shape
    out, _, taps = weight.shape
    operands, places = [x, weight], [0, 1]
    calls: list[Call] = []
    temporaries: list[Spec] = []
    for i, before in enumerate((attrs["padding"], 0)):
        spec = operands[i]
        if before or not _whole(spec, *spec.shape[1:]):
            places[i] = len(inputs) + 1 + len(temporaries)
            call, operands[i] = _packed(i, spec, places[i], before)
            calls.append(call)
            temporaries.append(operands[i])
    a, b = operands
    depth, pitch = taps * channels, attrs["stride"] * channels
    problem = Problem(
        batch, y.shape[1], out, depth, pitch, b.strides[0], y.strides[1], a.strides[0], 0,
        y.strides[0], True, True,
    )  # fmt: skip
    names = ("bias",) if bias else ()
    product = Product(problem, (a, b, *bias, y), names, activation=attrs["activation"])
    lowered = product_calls("conv1d", product, attrs.get("variant"), caps)
    copies = Lowered(tuple(calls), tuple(temporaries))
    return after_copies(copies, (*places, *range(2, len(inputs) + 1)), lowered)


def axes_of(inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]) -> Axes:
    """Sequences and output channels."""
    return axes(["b..", "o..", *("o" for _ in inputs[2:])], ["b.o"])


def flops_of(inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]) -> int:
    """A multiplication and an addition for each element of a filter."""
    return 2 * outputs[0].size * math.prod(inputs[1].shape[1:])


CONV1D = Op("conv1d", rule, reference, lower, takes, ALONG_K, axes=axes_of, flops=flops_of,
            doc=__doc__ or "")  # fmt: skip
