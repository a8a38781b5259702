"""Host programs that run formulas on blocks, in memory that is there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from centella.dtypes import bool_, f32
from centella.emit.program import HostProgram
from centella.host.blockwise import Array, Index, blocks_of, share, threads_for
from centella.host.call_list import CallList, Run, Symbol
from centella.op.op import Form
from centella.ops.layout import broadcast_strides, merge
from centella.ops.operands import SYMBOLS
from centella.specs import Spec

A = TypeVar("A", bound=Struct)


def plain(specs: Sequence[Spec]) -> bool:
    """Whether NumPy computes on these operands as they are stored."""
    return all(s.dtype is f32 or s.dtype is bool_ for s in specs)


def calls_of(specs: Sequence[Spec], columns: int, evaluate: Callable[[list[Symbol]], Any]) -> Run:
    """What a formula does with symbols of operands."""
    calls = CallList([s.dtype.numpy for s in specs], columns)
    return calls.finish(evaluate(calls.operands))


def run_blocks(run: Run, blocks: Sequence[Index], ins: list[Array], out: Array) -> None:
    """Each block of a result from the same block of each operand."""

    def compute(index: Index) -> None:
        with np.errstate(all="ignore"):
            run([x[index] for x in ins], out[index])

    share(compute, blocks, threads_for(out.size))


def block_program(
    name: str, inputs: tuple[Spec, ...], out: Spec, evaluate: Callable[[list[Symbol]], Any]
) -> HostProgram | None:
    """A formula as a host program; None where operands are stored in less than f32, or integers.

    Args:
        evaluate: the result of symbols of the operands.
    """
    if not plain((*inputs, out)):
        return None
    run = calls_of(inputs, out.shape[-1] if out.shape else 1, evaluate)
    views = _views((*inputs, out), out.shape, run.along_rows)
    shape = views[-1].shape
    blocks = blocks_of(shape, run.along_rows)

    def call(ins: list[Array], outs: list[Array]) -> None:
        run_blocks(run, blocks, ins, outs[0])

    return HostProgram(f"numpy:{name}", name, call, (), views)


def _views(specs: Sequence[Spec], shape: tuple[int, ...], whole_rows: bool) -> tuple[Spec, ...]:
    """Operands as they broadcast to a shape, dimensions that all walk alike merged."""
    steps = tuple(broadcast_strides(s, shape) for s in specs)
    if whole_rows:
        sizes, merged = merge(shape[:-1], tuple(s[:-1] for s in steps))
        sizes = (*sizes, shape[-1])
        merged = tuple((*m, s[-1]) for m, s in zip(merged, steps, strict=True))
    else:
        sizes, merged = merge(shape, steps)
    return tuple(Spec(sizes, s.dtype, m) for s, m in zip(specs, merged, strict=True))


def on_blocks(
    name: str, formula: Callable[[Any, list[Any], A], Any]
) -> Callable[[Form[A]], HostProgram | None]:
    """The `host` of an op that has a formula."""

    def host(form: Form[A]) -> HostProgram | None:
        return block_program(
            name, form.inputs, form.outputs[0], lambda xs: formula(SYMBOLS, list(xs), form.attrs)
        )

    return host
