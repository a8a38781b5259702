"""Operands of tensor cores whose rows do not start on 16 bytes, copied to rows that do.

Imported memory and slices lie so. Asynchronous copies and tensor maps need rows on 16 bytes; where
they are not, elements go through registers one by one, at an eighth of the rate. A copy reads and
writes each element once, so a product of many rows and columns pays for it. It is one of the
product's launches and runs whenever the product does: imported memory may have changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella.emit.program import Call, Ref
from centella.ops.elementwise import plain_call
from centella.ops.layout import flat
from centella.ops.matmul.problem import Problem
from centella.specs import Caps, Spec

# Seconds, measured on an H200: an operation in registers (57 TFLOP/s) and in tiles (465); a step of
# k in registers, which takes so long however few tiles there are; a byte that a copy moves; a
# launch. Of a slower card all of them grow.
SLOW, FAST, STEP = 1 / 57e12, 1 / 465e12, 0.072e-6
MOVED, LAUNCH = 1 / 2e12, 3e-6


class Matrix(Struct, frozen=True):
    """An operand as it lies, [batches,] rows of neighbouring elements; its names in a Problem."""

    spec: Spec
    pitch: str
    batch: str


def matrices(problem: Problem, a: Spec, b: Spec) -> tuple[Matrix, Matrix]:
    """The two operands; of what is repeated there is one batch."""
    p = problem
    return (
        _matrix(a, (p.sa, p.lda), (p.m, p.k) if p.a_along_k else (p.k, p.m), p.batch, "a"),
        _matrix(b, (p.sb, p.ldb), (p.n, p.k) if p.b_along_k else (p.k, p.n), p.batch, "b"),
    )


def _matrix(
    spec: Spec, apart: tuple[int, int], shape: tuple[int, int], batch: int, name: str
) -> Matrix:
    if batch > 1 and apart[0]:
        lies = Spec((batch, *shape), spec.dtype, (*apart, 1), False)
    else:
        lies = Spec(shape, spec.dtype, (apart[1], 1), False)
    return Matrix(lies, f"ld{name}", f"s{name}")


def pays(problem: Problem, copied: Sequence[Matrix]) -> bool:
    """Whether copying these operands takes less time than elements one by one cost."""
    work = 2 * problem.batch * problem.m * problem.n * problem.k
    moved = sum(2 * m.spec.nbytes for m in copied)
    saved = max(work * SLOW, problem.k * STEP) - work * FAST
    return saved > moved * MOVED + len(copied) * LAUNCH


def _padded(spec: Spec) -> Spec:
    """A matrix of this shape whose rows start on 16 bytes, also those that are shorter."""
    chunk = 16 // spec.dtype.itemsize
    pitch = -(-spec.shape[-1] // chunk) * chunk
    strides = (spec.shape[-2] * pitch, pitch, 1)[-len(spec.shape) :]
    return Spec(spec.shape, spec.dtype, strides, True)


def repacked(
    op: str, problem: Problem, copied: dict[int, Matrix], first: int, caps: Caps
) -> tuple[Problem, tuple[Call, ...], dict[int, Spec]]:
    """The problem with operands on whole rows, the copies, and what each operand becomes.

    Args:
        copied: operands by their place among the product's; `first`: place of the first temporary.
    """
    calls: list[Call] = []
    specs: dict[int, Spec] = {}
    pitches: dict[str, Any] = {}
    for operand, matrix in copied.items():
        call, whole = copied_whole(op, operand, matrix.spec, first + len(calls), caps)
        calls.append(call)
        pitches[matrix.pitch] = whole.strides[-2]
        pitches[matrix.batch] = whole.strides[0] if len(whole.shape) > 2 else 0
        specs[operand] = whole
    return replace(problem, **pitches), tuple(calls), specs


def copied_whole(
    op: str, operand: int, lies: Spec, temporary: int, caps: Caps,
    why: str = "rows do not start on 16 bytes",
) -> tuple[Call, Spec]:  # fmt: skip
    """The copy of an operand to a temporary whose rows start on 16 bytes, and how that lies."""
    whole = _padded(lies)
    copy = plain_call("copy", (lies,), whole, caps)
    refs = (Ref(operand, flat(lies)), Ref(temporary, whole))
    reason = f"copy for {op} operand {operand}: {why}"
    return replace(copy, tensors=refs, reason=reason), whole
