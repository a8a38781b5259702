"""How a product becomes launches: what `matmul` and `linear` import with their first plan."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from msgspec.structs import replace

from centella.emit.program import Call, Ref
from centella.op.op import Form, Lowered
from centella.op.variant import Variant, always, choose
from centella.ops.elementwise import plain_call
from centella.ops.layout import broadcast_strides, flat, rows_of
from centella.ops.matmul.choice import product_calls
from centella.ops.matmul.op import LINEAR, Lie, matrix, parted
from centella.ops.matmul.problem import THIN, LinearAttrs, MatmulAttrs, Problem
from centella.ops.matmul.product import Product
from centella.ops.quant.dequantize import DEQUANTIZE, DequantizeAttrs
from centella.ops.quant.digits import STREAMED_DIGITS
from centella.ops.quant.kernels import on_chunks, thin_linear
from centella.ops.quant.streamed import STREAMED_BLOCKS
from centella.ops.quant.table import FORMATS
from centella.specs import Caps, Spec, make_spec


def matmul(form: Form[MatmulAttrs], caps: Caps) -> Lowered:
    """The product; before it a copy of an operand whose batches no single stride visits."""
    y = form.outputs[0]
    copies: list[Call] = []
    temporaries: list[Spec] = []
    operands: list[tuple[int, Spec, Lie]] = []
    for index, operand in enumerate(form.inputs):
        spec = _expand(operand, y.shape[:-2])
        lie = matrix(spec)
        if lie is None:
            whole = make_spec(spec.shape, spec.dtype, caps.row_alignment)
            copy = plain_call("copy", (spec,), whole, caps)
            temporary = len(form.inputs) + 1 + len(copies)
            refs = (Ref(index, flat(operand)), Ref(temporary, whole))
            reason = f"copy for matmul operand {index}: batches are apart by no one stride"
            copies.append(replace(copy, tensors=refs, reason=reason))
            temporaries.append(whole)
            index, spec, lie = temporary, whole, _whole(whole)
        operands.append((index, spec, lie))
    (_, a, left), (_, b, right) = operands
    problem = Problem(
        batch=math.prod(y.shape[:-2]), m=y.shape[-2], n=y.shape[-1], k=a.shape[-1],
        lda=left[1], ldb=right[1], ldy=y.strides[-2],
        sa=left[0], sb=right[0], sy=_whole(y)[0], a_along_k=left[2],
        b_along_k=not right[2] or y.shape[-1] == right[1] == 1,  # a column without gaps
    )  # fmt: skip
    product = Product(problem, (a, b, y), alpha=form.attrs.alpha)
    lowered = product_calls("matmul", product, form.attrs.variant, caps)
    indices = (*(index for index, _, _ in operands), len(form.inputs))
    before = Lowered(tuple(copies), tuple(temporaries))
    return before + lowered.within(indices, len(indices) + len(temporaries))


def _whole(spec: Spec) -> Lie:
    """`matrix` of a tensor that the device laid out itself."""
    return (spec.strides[-3] if len(spec.shape) > 2 else 0, spec.strides[-2], True)


def _expand(spec: Spec, lead: tuple[int, ...]) -> Spec:
    """An operand with the leading dimensions of the result: stride 0 where it repeats."""
    batches = Spec(spec.shape[:-2], spec.dtype, spec.strides[:-2])
    strides = (*broadcast_strides(batches, lead), *spec.strides[-2:])
    return Spec((*lead, *spec.shape[-2:]), spec.dtype, strides, spec.aligned)


def linear(form: Form[LinearAttrs], caps: Caps) -> Lowered:
    """A product whose rows are the leading dimensions; a forced kernel takes dequantised planes."""
    if not form.attrs.format:
        return _linear(form, caps)
    forced = None if form.attrs.variant is None else DEQUANTIZED.name
    return choose(PLANES, form, caps, forced, "linear").lower(form, caps)


def _few_rows(form: Form[LinearAttrs], caps: Caps) -> bool | None:
    return math.prod(form.inputs[0].shape[:-1]) <= THIN or None


def _as_planes(form: Form[LinearAttrs], fits: bool, caps: Caps) -> Lowered:
    return on_chunks(form, 1, caps, partial(thin_linear, caps=caps))


def _dequantized(form: Form[LinearAttrs], fits: bool, caps: Caps) -> Lowered:
    """The weight as one tensor, then its product."""
    attrs = form.attrs
    x, planes, more = parted(form.inputs, attrs.format)
    n, k = FORMATS[attrs.format].check("linear", planes)
    whole, count = make_spec((n, k), x.dtype, caps.row_alignment), len(form.inputs)
    decoding = DequantizeAttrs(x.dtype.name, attrs.format)
    dequantized = Form(DEQUANTIZE, tuple(planes), (whole,), decoding).lower(caps)
    indices = (*range(1, 1 + len(planes)), count + 1)
    first = Lowered((), (whole,)) + dequantized.within(indices, count + 2)
    dense = Form(LINEAR, (x, whole, *more), form.outputs, replace(attrs, format=""))
    indices = (0, count + 1, *range(1 + len(planes), count + 1))
    return first + _linear(dense, caps).within(indices, count + 1 + len(first.temporaries))


PLANES: tuple[Variant[Form[LinearAttrs], Any], ...] = (
    STREAMED_DIGITS,
    STREAMED_BLOCKS,
    Variant("planes", _few_rows, _as_planes),
    DEQUANTIZED := Variant("dequantized", always, _dequantized),
)


def _linear(form: Form[LinearAttrs], caps: Caps) -> Lowered:
    """A product with a weight that is one tensor."""
    x, weight, *more = form.inputs
    problem = Problem.of_rows(rows_of(x), weight, rows_of(form.outputs[0]))
    extras = dict(zip(form.attrs.extras, more, strict=True))
    residual_pitch = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    product = Product(
        problem, (*form.inputs, form.outputs[0]), tuple(extras), residual_pitch,
        form.attrs.activation,
        form.attrs.alpha,
    )  # fmt: skip
    return product_calls("linear", product, form.attrs.variant, caps)
