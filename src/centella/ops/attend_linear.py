"""attend_linear: a step's attention, and the product that alone reads what its queries get.

    K, V, h = rope_attend(K, V, x, ...)
    y = f(alpha (h W^T) + bias) + residual

The planner makes this op of the two, where the product can add up the parts that attention leaves:
two launches for three (`attention/combine_linear.py`). Nobody records it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella.dtypes import Array
from centella.op.op import Form, Op, Out, loaded, named
from centella.ops.layout import as_rows
from centella.ops.matmul.op import linear_reference, linear_rule
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.rope_attend import RopeAttendAttrs
from centella.ops.rope_attend import reference as attended
from centella.ops.rope_attend import rule as attend_rule
from centella.specs import Caps, Spec, make_spec


class AttendLinearAttrs(Struct, frozen=True):
    """The attributes of the two ops; the product's operands come after those of attention.

    Attributes:
        variant: a kernel that is forced, for tests and benchmarks.
    """

    attend: RopeAttendAttrs
    linear: LinearAttrs
    variant: str | None = None


def step_operands(attrs: AttendLinearAttrs, count: int) -> int:
    """How many of `count` operands are those of attention."""
    return count - 1 - len(attrs.linear.extras)


def rule(specs: tuple[Spec, ...], attrs: AttendLinearAttrs) -> tuple[Out, ...]:
    """As of `rope_attend`, then weight [n, h d], bias [n], residual [b, t, n]; y is [b, t, n]."""
    count = step_operands(attrs, len(specs))
    keys, values, (shape, dtype) = attend_rule(specs[:count], attrs.attend)
    b, t, h, d = shape
    h = make_spec((b, t, h * d), dtype, 1)
    return keys, values, *linear_rule((h, *specs[count:]), attrs.linear)


def reference(*operands: Array, attend: RopeAttendAttrs, linear: LinearAttrs) -> Any:
    """The NumPy formula: changes keys and values."""
    count = step_operands(AttendLinearAttrs(attend, linear), len(operands))
    keys, values, h = attended(*operands[:count], **named(attend))
    h = h.reshape(*h.shape[:2], -1)
    return keys, values, linear_reference(h, *operands[count:], **named(linear))


def takes(index: int, spec: Spec) -> bool:
    """Takes what the two ops take."""
    return spec.unit_rows and (len(spec.shape) == 4 or as_rows(spec) is not None)


def preferred(form: Form[AttendLinearAttrs], caps: Caps) -> bool:
    """Whether two launches are better than three; where they are not, the ops stay two."""
    if caps.launches_are_free or caps.early_launch or not form.within_binding(caps):
        return False
    return bool(loaded("centella.ops.attention.combine_linear:COMBINED").takes(form, caps))


ATTEND_LINEAR: Op[AttendLinearAttrs] = Op(
    "attend_linear", rule, reference, "centella.ops.attention.combine_linear:lower", takes,
    ("combined",), attrs=AttendLinearAttrs, mutates=(0, 1), preferred=preferred,
    narrower=True, doc=__doc__ or "",
)  # fmt: skip
