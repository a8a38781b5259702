"""Which kernels compute an `expert_linear`: the first of the list that is preferred and fits.

grouped       many rows of f16 and bf16 on tensor cores            `mma.py`
dequantized   the same of quantised weights, written as tensors    here
tiles         many rows of any floats                              `tiled.py`
rows          the rest: each row reads its own weights             `rows.py`
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.experts.mma import GROUPED
from centella.ops.experts.op import ExpertAttrs, shape_of
from centella.ops.experts.rows import ROWS, Lowering, after_each
from centella.ops.experts.tiled import TILED
from centella.ops.layout import rows_of
from centella.ops.matmul.problem import aligned
from centella.ops.quant.dequantize import DEQUANTIZE, DequantizeAttrs
from centella.ops.quant.kernels import after_copy
from centella.specs import Caps, Spec, make_spec

MANY = 8  # pairs for each expert, from which on quantised weights are written as tensors


def lower(form: Form[ExpertAttrs], caps: Caps) -> Lowered:
    """The variant that is chosen, after copies of W and V where these lie in different ways."""
    what = f"expert_linear: ids {list(form.inputs[1 + form.attrs.planes].shape)}"

    def chosen(form: Form[ExpertAttrs]) -> Lowered:
        return choose(ORDER, form, caps, form.attrs.variant, what).lower(form, caps)

    def copied(form: Form[ExpertAttrs], index: int, then: Lowering) -> Lowered:
        return after_copy(form, index, "gate and up lie in different ways", caps, then)

    return after_each(_apart(form), form, copied, chosen)


def _apart(form: Form[ExpertAttrs]) -> list[int]:
    """The operands that lie otherwise than the same plane of the other weight: kernels know one."""
    attrs = form.attrs
    if not attrs.gate:
        return []

    def lies(spec: Spec) -> tuple[int, bool]:
        pitch = rows_of(spec).strides[0]
        return pitch, attrs.format != "" and aligned(spec, pitch, 0)

    pairs = [(1 + i, 2 + attrs.planes + i) for i in range(attrs.planes)]
    differ = [pair for pair in pairs if len({lies(form.inputs[i]) for i in pair}) > 1]
    return [i for pair in differ for i in pair]


def _dense(form: Form[ExpertAttrs]) -> tuple[Form[ExpertAttrs], tuple[int, ...]]:
    """A form of quantised weights with tensors in their place, and the numbers of its operands.

    The tensors come behind the result.
    """
    attrs, count = form.attrs, len(form.inputs)
    ids = 1 + attrs.planes
    experts, n, k = shape_of(form.inputs[1:ids], attrs)
    whole = make_spec((experts, n, k), form.inputs[0].dtype, 16)
    both = attrs.gate != ""
    more = range(ids + 1 + (attrs.planes if both else 0), count)
    inputs = (form.inputs[0], whole, form.inputs[ids], *([whole] if both else []),
              *(form.inputs[i] for i in more))  # fmt: skip
    numbers = (0, count + 1, ids, *([count + 2] if both else []), *more, count)
    extras = tuple(name for name in attrs.extras if not name.startswith("up_"))
    plain = replace(attrs, format="", experts=0, extras=extras, variant=None)
    return replace(form, inputs=inputs, attrs=plain), numbers


def _dequantized(form: Form[ExpertAttrs], dense: Form[ExpertAttrs], caps: Caps) -> Lowered:
    """Weights as tensors, each written and read once for all rows, then tiles of the experts'."""
    attrs, count = form.attrs, len(form.inputs)
    _, numbers = _dense(form)
    firsts = [1, *([2 + attrs.planes] if attrs.gate else [])]
    whole = dense.inputs[1]
    rows = make_spec((whole.shape[0] * whole.shape[1], whole.shape[2]), whole.dtype, 16)
    lowered = Lowered((), (rows,) * len(firsts))
    decoding = DequantizeAttrs(rows.dtype.name, attrs.format)
    for number, first in enumerate(firsts):
        planes = form.inputs[first : first + attrs.planes]
        one = Form(DEQUANTIZE, planes, (rows,), decoding).lower(caps)
        indices = (*range(first, first + attrs.planes), count + 1 + number)
        lowered += one.within(indices, count + 1 + len(lowered.temporaries))
    tiles = GROUPED.lower(dense, caps)
    return lowered + tiles.within(numbers, count + 1 + len(lowered.temporaries))


def _takes_tiles(form: Form[ExpertAttrs], caps: Caps) -> Form[ExpertAttrs] | None:
    """The form of tensors; None where there is no room for one, or no tile."""
    if not form.attrs.format:
        return None
    dense, _ = _dense(form)
    return dense if caps.has_room(dense.inputs[1]) and GROUPED.fits(dense, caps) else None


def _many(form: Form[ExpertAttrs], caps: Caps) -> bool:
    """Where pairs are so many that a weight is sooner written as a tensor than read for each."""
    ids = form.inputs[1 + form.attrs.planes]
    return caps.fast_tensor_cores and math.prod(ids.shape) >= MANY * form.attrs.experts


ORDER: tuple[Variant[Form[ExpertAttrs], Any], ...] = (
    GROUPED,
    Variant("dequantized", _takes_tiles, _dequantized, _many),
    TILED,
    ROWS,
)
