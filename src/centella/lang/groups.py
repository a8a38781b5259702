"""What kernel functions call: where a thread stands, what the threads of a group do together."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from centella.dtypes import u32
from centella.errors import TraceError
from centella.lang.control import if_
from centella.lang.functions import cast, fmax, fmin, maximum, minimum
from centella.lang.memory import Shared
from centella.lang.tracer import current
from centella.lang.values import Expr, Operand, Value, traced

# -- ids -------------------------------------------------------------------------------------------


def local_id() -> Expr:
    """Index of this thread in its group, u32."""
    return current().pure("thread", "u32")


def group_id() -> Expr:
    """Index of this group in the launch, u32, uniform; grids are folded, so it has no limit."""
    return current().pure("group", "u32")


def num_groups() -> Expr:
    """Groups of the launch, u32, uniform."""
    return current().pure("groups", "u32")


def global_id() -> Expr:
    """`group_id() * workgroup + local_id()`, u32; may reach past the threads asked for."""
    return group_id() * current().workgroup + local_id()


def workgroup_size() -> int:
    """Threads a group: a Python number."""
    return current().workgroup


def lane_id() -> Expr:
    """Index of this thread in its subgroup, u32."""
    return current().pure("lane", "u32")


def subgroup_size() -> Expr:
    """Lanes of a subgroup on this device, u32, uniform."""
    return current().pure("subgroup_size", "u32")


# -- operations of a group -------------------------------------------------------------------------


def barrier() -> None:
    """All threads of the group meet; their writes to shared and global memory are visible after."""
    tracer = current()
    tracer.need_uniform("a barrier")
    tracer.effect("barrier", "", ())


def workgroup_uniform(x: Value) -> Expr:
    """The value of the group's first thread, in every thread; uniform. Implies a barrier."""
    tracer = current()
    tracer.need_uniform("workgroup_uniform")
    value = traced(x, "lang.workgroup_uniform")
    if value.type == "bool":
        return workgroup_uniform(cast(value, u32)) != 0
    return tracer.result(tracer.effect("workgroup_uniform", value.type, (value,)), value.type, True)


_COMBINE: dict[str, Callable[[Any, Any], Expr]] = {
    "add": operator.add, "max": maximum, "min": minimum, "fmax": fmax, "fmin": fmin,
}  # fmt: skip  # a table


def workgroup_reduce(value: Value, op: str) -> Expr:
    """Reduce over the threads of a group ("add", "max", "min", "fmax", "fmin"), in every thread.

    A tree through shared memory in a fixed order: equal inputs give bitwise equal results.
    """
    tracer = current()
    tracer.need_uniform("workgroup_reduce")
    expr = traced(value, "lang.workgroup_reduce")
    if op not in _COMBINE or expr.type == "bool":
        raise TraceError(
            f"lang.workgroup_reduce takes numbers and one of {', '.join(_COMBINE)}; got "
            f"{expr.type} and {op!r}"
        )
    size = tracer.workgroup
    scratch = Shared(tracer, expr.type, size)
    me = local_id()
    scratch[me] = expr
    barrier()
    width = size
    while width > 1:
        half = (width + 1) // 2
        with if_(me < width - half):
            scratch[me] = _COMBINE[op](scratch[me], scratch[me + half])
        barrier()
        width = half
    result = scratch[0]
    if len(tracer.blocks) > 1:
        barrier()
    return result


def _subgroup(op: str, x: Value, attr: Any = None) -> Expr:
    tracer = current()
    tracer.need_uniform("a subgroup operation", role=True)
    value = traced(x, "a subgroup operation")
    if value.type == "bool":
        raise TraceError("a subgroup operation is for numbers, got bool; use lang.cast")
    index = tracer.effect(op, value.type, (value,), attr)
    return tracer.result(index, value.type, False)


def subgroup_sum(x: Value) -> Expr:
    """Sum over the subgroup, in every lane."""
    return _subgroup("subgroup_add", x)


def subgroup_max(x: Value) -> Expr:
    """Maximum over the subgroup, in every lane (NaN: either operand)."""
    return _subgroup("subgroup_max", x)


def subgroup_min(x: Value) -> Expr:
    """Minimum over the subgroup, in every lane (NaN: either operand)."""
    return _subgroup("subgroup_min", x)


def shuffle_xor(x: Value, mask: int) -> Expr:
    """The value of the lane whose index differs by `mask` (a Python number)."""
    number: Any = mask
    if isinstance(number, Operand) or not isinstance(number, int) or not 0 < number < 128:
        raise TraceError(f"lang.shuffle_xor takes a Python number from 1 to 127, got {mask!r}")
    return _subgroup("shuffle_xor", x, mask)
