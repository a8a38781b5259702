"""How a convolution becomes launches: what `conv1d` imports with its first plan."""

from __future__ import annotations

from msgspec.structs import replace

from centella import lang
from centella.dtypes import u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr
from centella.op.op import Form, Lowered
from centella.ops.conv1d.op import Conv1dAttrs
from centella.ops.elements import Number, element_call
from centella.ops.fill import kernel as fill
from centella.ops.layout import flat
from centella.ops.matmul.choice import product_calls
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.product import Product
from centella.ops.rows import place_of
from centella.specs import Caps, Spec

WORKGROUP = 256


def _pack(*, vector: bool, x: Argument, y: Argument) -> None:
    """A thread a chunk: y[r, l channels + c] = x[r, l - before, c], zeros outside its extent.

    `vector`: channels are neighbours in x, and a chunk has one place l.
    """
    width = y.dtype.per_chunk
    channels, extent, before, s0, s1, s2 = (
        lang.parameter(n, u32) for n in ("channels", "extent", "before", "s0", "s1", "s2")
    )
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        out: list[Expr] = []
        for j in range(0, width, width if vector else 1):
            tap = (column + j) // channels
            channel = (column + j) - tap * channels
            inside = tap - before < extent  # what is before the first wraps
            at = row * s0 + (tap - before) * s1 + channel * s2
            at = lang.select(inside, at, 0)
            loaded = x.load(at) if vector else [x[at]]
            out += [lang.select(inside, v, 0.0) for v in loaded]
        y.store(row, column, out)


pack_channels: Kernel = Kernel(
    _pack, workgroup=WORKGROUP, name="pack_channels", signature=signature({"x": 1}, {"y": 2})
)


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


def conv1d(form: Form[Conv1dAttrs], caps: Caps) -> Lowered:
    """The product, after a copy of x and of the weights where they do not lie for it."""
    (x, weight, *bias), y = form.inputs, form.outputs[0]
    batch, channels, _ = x.shape
    out, _, taps = weight.shape
    operands, places = [x, weight], [0, 1]
    calls: list[Call] = []
    temporaries: list[Spec] = []
    for i, before in enumerate((form.attrs.padding, 0)):
        spec = operands[i]
        if before or not _whole(spec, *spec.shape[1:]):
            places[i] = len(form.inputs) + 1 + len(temporaries)
            call, operands[i] = _packed(i, spec, places[i], before)
            calls.append(call)
            temporaries.append(operands[i])
    a, b = operands
    depth, pitch = taps * channels, form.attrs.stride * channels
    problem = Problem(
        batch, y.shape[1], out, depth, pitch, b.strides[0], y.strides[1], a.strides[0], 0,
        y.strides[0], True, True,
    )  # fmt: skip
    names = ("bias",) if bias else ()
    product = Product(problem, (a, b, *bias, y), names, activation=form.attrs.activation)
    lowered = product_calls("conv1d", product, form.attrs.variant, caps)
    copies = Lowered(tuple(calls), tuple(temporaries))
    own = len(form.inputs) + 1
    return copies + lowered.within((*places, *range(2, own)), own + len(temporaries))
