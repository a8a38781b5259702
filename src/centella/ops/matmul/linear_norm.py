"""linear_norm: a product whose rows are normalised before they are stored, in one launch.

    h = x W^T + bias + residual
    y = (h - mean) / sqrt(var + eps) * weight + shift        a norm of the kind "layer"
    y = h / sqrt(mean(h^2) + eps) * weight                   of the kind "rms"

The planner makes this op of `linear` and the norm that alone reads its result, where a kernel takes
both (`whole_rows.py`); nobody records it. Elsewhere its launches are those of the two (`apart`).
The norm is of the f32 sums, which are not rounded between the two, so the result is that of the two
ops within rounding, and no less exact.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella.op.axes import LETTERS, WHOLE, Axes, axes
from centella.op.op import Form, Op, Out, loaded, named
from centella.ops import norm
from centella.ops.layout import takes_rows
from centella.ops.matmul.op import flops_of, linear_reference, linear_rule
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NormAttrs
from centella.specs import Caps, Spec, make_spec


class LinearNormAttrs(Struct, frozen=True):
    """The attributes of the two ops; the norm's vectors come after the product's operands.

    Attributes:
        variant: a kernel that is forced, for tests and benchmarks.
    """

    linear: LinearAttrs
    norm: NormAttrs
    variant: str | None = None


def product_operands(attrs: LinearNormAttrs, count: int) -> int:
    """How many of `count` operands are the product's."""
    return count - len(attrs.norm.vectors)


def rule(specs: tuple[Spec, ...], attrs: LinearNormAttrs) -> tuple[Out, ...]:
    """x [..., k], weight [n, k], bias [n], residual [..., n], vectors [n] to [..., n]."""
    count = product_operands(attrs, len(specs))
    ((shape, dtype),) = linear_rule(specs[:count], attrs.linear)
    return norm.rule((make_spec(shape, dtype, 1), *specs[count:]), attrs.norm)


def reference(*operands: Any, linear: LinearAttrs, norm: NormAttrs) -> Any:
    """The NumPy formula."""
    count = product_operands(LinearNormAttrs(linear, norm), len(operands))
    sums = linear_reference(*operands[:count], **named(linear))
    return _of_norm(sums, *operands[count:], **named(norm))


_of_norm = norm.reference


def axes_of(form: Form[LinearNormAttrs]) -> Axes:
    """Rows of x."""
    lead = LETTERS[: len(form.outputs[0].shape) - 1]
    letters = {"residual": f"{lead}{WHOLE}"}
    more = [letters.get(name, WHOLE) for name in form.attrs.linear.extras]
    more += [WHOLE] * len(form.attrs.norm.vectors)
    return axes([f"{lead}{WHOLE}", WHOLE * 2, *more], [f"{lead}{WHOLE}"])


def preferred(form: Form[LinearNormAttrs], caps: Caps) -> bool:
    """Whether one launch is better than two; where it is not, they stay two."""
    if not (caps.warpgroups and caps.fast_tensor_cores):
        return False
    order = loaded("centella.ops.matmul.whole_rows:ORDER")
    return any(v.takes(form, caps) for v in order)


LINEAR_NORM: Op[LinearNormAttrs] = Op(
    "linear_norm", rule, reference, "centella.ops.matmul.whole_rows:lower", takes_rows,
    ("whole_rows", "apart"), attrs=LinearNormAttrs, axes=axes_of, flops=flops_of,
    preferred=preferred, doc=__doc__ or "",
)  # fmt: skip
