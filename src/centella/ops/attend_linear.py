"""attend_linear: a step's attention, and the product that alone reads what its queries get.

    K, V, h = rope_attend(K, V, x, ...)
    y = f(alpha (h W^T) + bias) + residual

The planner makes this op of the two, where the product can add up the parts that attention leaves:
two launches for three (`attention/combine_linear.py`). Nobody records it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.emit.program import HostProgram
from centella.op.op import Form, Op, Out, loaded, named
from centella.ops.layout import takes_rows
from centella.ops.matmul.op import LINEAR, linear_reference, linear_rule
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.rope_attend import ROPE_ATTEND, RopeAttendAttrs
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
    keys, values, ((b, t, h, d), dtype) = attend_rule(specs[:count], attrs.attend)
    row = make_spec((b, t, h * d), dtype, 1)
    return keys, values, *linear_rule((row, *specs[count:]), attrs.linear)


def reference(*operands: Array, attend: RopeAttendAttrs, linear: LinearAttrs) -> Any:
    """The NumPy formula: changes keys and values."""
    count = step_operands(AttendLinearAttrs(attend, linear), len(operands))
    keys, values, h = attended(*operands[:count], **named(attend))
    row = h.reshape(*h.shape[:2], -1)
    return keys, values, linear_reference(row, *operands[count:], **named(linear))


def attend_form(form: Form[AttendLinearAttrs]) -> Form[RopeAttendAttrs]:
    """What its attention is asked to do."""
    inputs = form.inputs[: step_operands(form.attrs, len(form.inputs))]
    keys, _, x, _, _, starts, *_ = inputs
    kv_heads = keys.shape[0 if len(starts.shape) == 2 else 1]
    batch, heads, tokens, dim = x.shape
    y = make_spec((batch, tokens, heads - 2 * kv_heads, dim), x.dtype, 16)
    return Form(ROPE_ATTEND, inputs, (*form.outputs[:2], y), form.attrs.attend)


def host(form: Form[AttendLinearAttrs]) -> HostProgram:
    """On the CPU: the programs of both, one after the other."""
    attend = attend_form(form)
    count, between = len(attend.inputs), attend.outputs[2]
    row = make_spec((*between.shape[:2], form.inputs[count].shape[-1]), between.dtype, 1)
    linear = Form(LINEAR, (row, *form.inputs[count:]), form.outputs[2:], form.attrs.linear)
    first, second = ROPE_ATTEND.host_program(attend), LINEAR.host_program(linear)

    def call(arrays: list[Array], outs: list[Array]) -> None:
        heads = np.empty(between.shape, between.dtype.numpy)
        first.call(arrays[:count], [*outs[:2], heads])
        second.call([heads.reshape(row.shape), *arrays[count:]], outs[2:])

    return HostProgram("numpy:attend_linear", "attend_linear", call)


def takes(index: int, spec: Spec) -> bool:
    """Takes what the two ops take."""
    return spec.unit_rows and (len(spec.shape) == 4 or takes_rows(index, spec))


def preferred(form: Form[AttendLinearAttrs], caps: Caps) -> bool:
    """Whether two launches are better than three; where they are not, the ops stay two."""
    if not form.within_binding(caps):
        return False
    return bool(loaded("centella.ops.attention.combine_linear:COMBINED").takes(form, caps))


ATTEND_LINEAR: Op[AttendLinearAttrs] = Op(
    "attend_linear", rule, reference, "centella.ops.attention.combine_linear:lower", takes,
    ("combined",), attrs=AttendLinearAttrs, mutates=(0, 1), host=host, preferred=preferred,
    narrower=True, doc=__doc__ or "",
)  # fmt: skip
