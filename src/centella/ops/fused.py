"""fused: a chain of ops as one launch; intermediates stay in registers.

Element-wise ops, rows of tables, and at most one norm or reduction among them, whose kernel then
computes what it reads and goes on with what it makes. Each intermediate is rounded to its dtype as
a store and a load would, so the result has the bits that the ops would give one by one. The planner
makes this op; nobody records it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from centella.dtypes import DType, dtype_of, f32, narrow, widen
from centella.emit.program import HostProgram, Kernel
from centella.errors import LimitError
from centella.host.call_list import Symbol
from centella.op.axes import LETTERS, WHOLE, Axes, axes, spread
from centella.op.op import Form, Lowered, Op, Out, broadcasting, get, named
from centella.op.op import along_rows as by_rows
from centella.ops import norm, reduce, tables
from centella.ops.elements import element_call, element_kernel
from centella.ops.host import block_program, plain
from centella.ops.layout import takes_rows
from centella.ops.operands import SYMBOLS
from centella.ops.steps import Chain, ChainStep, FusedAttrs, chain_of, computed
from centella.ops.tables import LOOKUPS
from centella.specs import Caps, Spec

ALONG_ROWS: dict[str, Callable[[Chain, Spec, Caps], Lowered]] = {
    "norm": norm.lower_chain,
    "reduce": reduce.lower_chain,
}


def _compute(values: list[Any], numbers: dict[str, Any], attrs: FusedAttrs) -> Any:
    have = list(values)
    for index, step in enumerate(attrs.steps):
        have.append(computed(step, index, [have[k] for k in step.elements], numbers))
    return have[-1]


def _begin(
    inputs: dict[str, Any], places: list[Any], numbers: dict[str, Any], attrs: FusedAttrs
) -> tuple[list[Any], dict[str, Any], set[int]]:
    """Places of tables at the rows that ids choose; ids are loaded here alone."""
    found = [s for s in attrs.steps if s.name in LOOKUPS]
    unread = {k for s in found for k in s.operands if k not in s.elements}
    return *tables.chosen(attrs.steps, inputs, places, numbers), unread


kernel: Kernel = element_kernel("fused", _compute, begin=_begin)


def rule(specs: tuple[Spec, ...], attrs: FusedAttrs) -> tuple[Out, ...]:
    """What the last step makes, by the rules of the steps."""
    last = chain_of(specs, attrs, 1).specs[-1]
    return ((last.shape, last.dtype),)


def along_rows(steps: tuple[ChainStep, ...]) -> str | None:
    """The op of a chain that works along rows, if there is one."""
    return next((s.name for s in steps if s.name in ALONG_ROWS), None)


def _rounded(value: Any, dtype: DType) -> Any:
    """A float64 oracle keeps what f32 would round; other dtypes are what they are."""
    if dtype is f32 and value.dtype == np.float64:
        return value
    return widen(narrow(value, dtype), dtype)


def reference(*xs: Any, steps: tuple[ChainStep, ...]) -> Any:
    """The NumPy formula, one step after the other."""
    have = list(xs)
    for step in steps:
        formula = get(step.name).reference
        assert formula is not None, "every op that is fused has one"
        value = formula(*(have[k] for k in step.operands), **named(step.attrs))
        have.append(_rounded(np.asarray(value), dtype_of(step.dtype)))
    return have[-1]


def host(form: Form[FusedAttrs]) -> HostProgram | None:
    """All steps on one block after the other; None where one makes another dtype or shape."""
    chain = chain_of(form.inputs, form.attrs, 1)
    ops = [get(step.name) for step in chain.steps]
    if not plain(chain.specs) or any(op.formula is None for op in ops):
        return None
    at = next((chain.specs[len(form.inputs) + i] for i, s in enumerate(chain.steps)
               if s.name in ALONG_ROWS), form.outputs[0])  # fmt: skip
    if at.shape != form.outputs[0].shape:
        return None

    def evaluate(values: list[Symbol]) -> Symbol:
        have = list(values)
        for step, op in zip(form.attrs.steps, ops, strict=True):
            assert op.formula is not None, "looked at above"
            have.append(op.formula(SYMBOLS, [have[k] for k in step.operands], step.attrs))
        return have[-1]

    return block_program("fused", form.inputs, form.outputs[0], evaluate)


def lower(form: Form[FusedAttrs], caps: Caps) -> Lowered:
    """One element kernel, or the kernel of the op that works along rows.

    Raises:
        LimitError: these are parts, cut so that what was rows one pitch apart is none any more.
    """
    chain = chain_of(form.inputs, form.attrs, caps.row_alignment)
    op = along_rows(chain.steps)
    if op is not None:
        for spec in chain.sources:
            if not takes_rows(0, spec):
                raise LimitError(f"fused {op}: parts of {list(spec.shape)} are no rows")
        return ALONG_ROWS[op](chain, form.outputs[0], caps)
    attrs = FusedAttrs(chain.steps)
    call = element_call(kernel, form.inputs, form.outputs[0], chain.numbers, attrs, chain.seen)
    return Lowered((call,))


def axes_of(form: Form[FusedAttrs]) -> Axes:
    """Elements; with a norm, a reduction or tables, rows: of a reduction before and after it."""
    op = along_rows(form.attrs.steps)
    found = [step for step in form.attrs.steps if step.name in LOOKUPS]
    if not found and op != "reduce":
        return broadcasting(form) if op is None else by_rows(form)
    rows, before = LETTERS[: len(form.outputs[0].shape)], set(range(len(form.inputs)))
    if op == "reduce":
        chain = chain_of(form.inputs, form.attrs, 1)
        before = chain.reads(*chain.steps[chain.at].operands)
        result = rows
    else:
        rows = rows[:-1]
        result = rows + WHOLE
    read: dict[int, str] = {}
    for step in found:
        letters = rows + WHOLE * (step.operands[0] in before)
        both = tables.dims(step.name, [form.inputs[k] for k in step.operands], letters)
        read.update(zip(step.operands, both, strict=True))
    for k, spec in enumerate(form.inputs):
        if k not in read:
            read[k] = spread(spec.shape, rows + WHOLE * (k in before))
    return axes([read[k] for k in range(len(form.inputs))], [result])


FUSED: Op[FusedAttrs] = Op(
    "fused", rule, reference, lower, attrs=FusedAttrs, host=host, axes=axes_of, doc=__doc__ or ""
)
