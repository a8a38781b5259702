"""`matmul` and `linear` as ops: rules, NumPy formulas, and the choice of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from centella.errors import DTypeError, LimitError, ShapeError
from centella.lang.face import Face, TensorParam
from centella.op import Lowered, Op, Out
from centella.ops.elements import element_call, element_kernel
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.layout import broadcast, broadcast_strides, flat, rows_of, takes_rows
from centella.ops.matmul.tiled import Tile, gemm
from centella.ops.operands import NUMPY
from centella.program import Call, Ref
from centella.specs import Caps, Spec, make_spec

TILES: dict[str, tuple[Tile, ...]] = {
    "large": (Tile(128, 128, 8, 8, 8, 4), Tile(128, 128, 8, 8, 8), Tile(128, 128, 16, 8, 8, 4)),
    "medium": (Tile(64, 64, 16, 4, 4), Tile(64, 64, 16, 8, 4)),
    "small": (Tile(32, 32, 16, 4, 4),),
}
ENOUGH = 96
CPU_BLOCK = 1 << 15  # elements of a block on the CPU: 128 KB of f32


@dataclass(frozen=True, slots=True)
class Problem:
    """C [batch, m, n] = A [batch, m, k] B [batch, k, n], with pitches and batch strides.

    `a_along_k` and `b_along_k` say which dimension is contiguous in memory.
    """

    batch: int
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldy: int
    sa: int
    sb: int
    sy: int
    a_along_k: bool
    b_along_k: bool


def tile_of(variant: str, itemsize: int, caps: Caps) -> Tile | None:
    """The tile of a variant on a device: the first that fits.

    Its threads share the 16-byte chunks of either operand's tile evenly.
    """
    for tile in TILES[variant]:
        share = 16 // itemsize * tile.threads
        if tile.bm * tile.bk % share or tile.bn * tile.bk % share:
            continue
        if tile.shared_bytes <= caps.max_shared and tile.threads <= caps.max_workgroup:
            return tile
    return None


def choose(problem: Problem, itemsize: int, caps: Caps) -> str:
    """The variant for a problem: the largest tile that still gives the device enough groups."""
    for name in ("large", "medium"):
        tile = tile_of(name, itemsize, caps)
        if tile is None:
            continue
        tiles = -(-problem.m // tile.bm) * -(-problem.n // tile.bn) * problem.batch
        small = problem.m <= tile.bm // 2 or problem.n <= tile.bn // 2
        if tiles >= ENOUGH and not small:
            return name
    return "small"


def _float(name: str, specs: tuple[Spec, ...]) -> None:
    if any(not s.dtype.is_float for s in specs):
        raise DTypeError(f"{name}: expected float dtypes, got {[s.dtype.name for s in specs]}")


def matmul_rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """[..., m, k] and [..., k, n] to [..., m, n]; the leading dimensions broadcast."""
    a, b = specs
    _float("matmul", specs)
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"matmul: expected [..., m, k] and [..., k, n], got {list(a.shape)} and {list(b.shape)}"
        )
    if a.dtype is not b.dtype:
        raise DTypeError(f"matmul: expected one dtype, got {a.dtype.name} and {b.dtype.name}")
    lead = broadcast("matmul", a.shape[:-2], b.shape[:-2])
    return (((*lead, a.shape[-2], b.shape[-1]), a.dtype),)


def linear_rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """x [..., k], weight [n, k], bias [n], residual [..., n] to [..., n]."""
    x, weight, *more = specs
    _float("linear", specs)
    if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: expected x [..., k] and weight [n, k], got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    shape = (*x.shape[:-1], weight.shape[0])
    for name, spec in zip(attrs["extras"], more, strict=True):
        wanted = shape[-1:] if name == "bias" else shape
        if spec.shape != wanted:
            raise ShapeError(f"linear: expected {name} {list(wanted)}, got {list(spec.shape)}")
    if attrs["activation"] and attrs["activation"] not in ACTIVATIONS:
        raise ShapeError(
            f"linear: expected activation of {', '.join(ACTIVATIONS)}, got {attrs['activation']!r}"
        )
    return ((shape, x.dtype),)


def matmul_reference(a: Any, b: Any, alpha: float = 1.0) -> Any:
    """The NumPy formula."""
    c = np.matmul(a, b)
    return c if alpha == 1.0 else c * a.dtype.type(alpha)


def linear_reference(
    x: Any, weight: Any, *more: Any, extras: tuple[str, ...], activation: str, alpha: float = 1.0
) -> Any:
    """The NumPy formula; the epilogue in blocks of rows that stay in cache."""
    named = dict(zip(extras, more, strict=True))
    y = np.matmul(x.reshape(-1, x.shape[-1]) if x.size else x, weight.T)
    rows = y.reshape(-1, y.shape[-1])
    residual = named["residual"].reshape(rows.shape) if "residual" in named else None
    step = max(1, CPU_BLOCK // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        if alpha != 1.0:
            part *= x.dtype.type(alpha)
        if "bias" in named:
            part += named["bias"]
        if activation:
            part[...] = ACTIVATIONS[activation](NUMPY, part)
        if residual is not None:
            part += residual[start : start + step]
    return y.reshape(*x.shape[:-1], weight.shape[0])


Lie = tuple[int, int, bool]


def matrix(spec: Spec) -> Lie | None:
    """(batch stride, pitch, contiguous along the last dimension) of a matrix operand, or None."""
    rows, columns = spec.strides[-2:]
    if spec.shape[-1] == 1 and rows != 1:
        columns = 1
    if spec.shape[-2] == 1 and columns != 1 and spec.shape[-1] != 1:
        rows = 1
    if columns != 1 and rows != 1:
        return None
    lead = [(n, s) for n, s in zip(spec.shape[:-2], spec.strides[:-2], strict=True) if n != 1]
    for (_, outer), (n, inner) in pairwise(lead):
        if outer != n * inner:
            return None
    batch = lead[-1][1] if lead else 0
    return (batch, rows, True) if columns == 1 else (batch, columns, False)


def takes_matrix(index: int, spec: Spec) -> bool:
    """Takes matrices with one contiguous dimension and one batch stride."""
    return len(spec.shape) < 2 or spec.size == 0 or matrix(spec) is not None


def takes_linear(index: int, spec: Spec) -> bool:
    """x, weight, bias, residual: rows of neighbouring elements."""
    return takes_rows(index, spec)


def _aligned(spec: Spec, pitch: int, batch: int) -> bool:
    item = spec.dtype.itemsize
    return spec.aligned and pitch * item % 16 == 0 and batch * item % 16 == 0


def _call(
    problem: Problem, specs: tuple[Spec, ...], names: tuple[str, ...], attrs: dict[str, Any],
    residual: tuple[int, int], caps: Caps,
) -> Call:  # fmt: skip
    """The launch of the tiled kernel; `specs` are a, b, extras, y."""
    a, b, y = specs[0], specs[1], specs[-1]
    if problem.k == 0:  # nothing is summed; every read is of the first element
        problem = replace(problem, lda=0, ldb=0, sa=0, sb=0)
    item = min(a.dtype.itemsize, b.dtype.itemsize)
    variant = attrs.get("variant") or choose(problem, item, caps)
    tile = tile_of(variant, item, caps)
    if tile is None:
        raise LimitError(f"matmul: the tile of variant {variant!r} does not fit {caps.target}")
    tiles_m, tiles_n = -(-problem.m // tile.bm), -(-problem.n // tile.bn)
    face = Face(
        (
            *((n, TensorParam("in", None, 1)) for n in ("a", "b", *names)),
            ("y", TensorParam("out", None, 1)),
        ),
        (),
        (),
    )
    scalars: tuple[tuple[str, int | float], ...] = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("lda", problem.lda),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("sa", problem.sa), ("sb", problem.sb),
        ("sy", problem.sy), ("tiles_m", tiles_m), ("tiles_n", tiles_n),
        ("alpha", attrs.get("alpha", 1.0)), ("sr", residual[0]), ("ldr", residual[1]),
    )  # fmt: skip
    constants = (
        ("a_along_k", problem.a_along_k),
        ("activation", attrs.get("activation", "")),
        ("b_along_k", problem.b_along_k),
        ("exact_k", problem.k % tile.bk == 0 and problem.k > 0),
        ("tile", tile),
        ("vector_a", _aligned(a, problem.lda, problem.sa)),
        ("vector_b", _aligned(b, problem.ldb, problem.sb)),
        ("vector_y", _aligned(y, problem.ldy, problem.sy)),
    )
    return Call(
        gemm,
        (*(Ref(i, flat(s)) for i, s in enumerate(specs[:-1])), Ref(len(specs) - 1, y)),
        scalars,
        constants,
        tiles_m * tiles_n * problem.batch,
        workgroup=tile.threads,
        face=face,
    )


def matmul_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch; before it a copy of an operand whose batches no single stride visits."""
    y = outputs[0]
    operands = [_expand(s, y.shape[:-2]) for s in inputs]
    found = [matrix(s) for s in operands]
    copies: list[Call] = []
    temporaries: list[Spec] = []
    places = [0, 1]
    for i, spec in enumerate(operands):
        if found[i] is None:
            whole = make_spec(spec.shape, spec.dtype, caps.row_alignment)
            places[i] = len(inputs) + 1 + len(copies)
            call = element_call(copy_kernel, (spec,), whole)
            copies.append(replace(call, tensors=(Ref(i, flat(inputs[i])), Ref(places[i], whole))))
            temporaries.append(whole)
            operands[i], found[i] = whole, matrix(whole)
    call = _product(operands, found, y, attrs, caps)
    tensors = (*(Ref(p, r.spec) for p, r in zip(places, call.tensors, strict=False)), Ref(2, y))
    return Lowered((*copies, replace(call, tensors=tensors)), tuple(temporaries))


def _expand(spec: Spec, lead: tuple[int, ...]) -> Spec:
    """An operand with the leading dimensions of the result: stride 0 where it repeats."""
    batches = Spec(spec.shape[:-2], spec.dtype, spec.strides[:-2])
    strides = (*broadcast_strides(batches, lead), *spec.strides[-2:])
    return Spec((*lead, *spec.shape[-2:]), spec.dtype, strides, spec.aligned)


copy_kernel = element_kernel("copy", lambda values, scalars, attrs: values[0])


def _product(
    operands: list[Spec], found: list[Lie | None], y: Spec, attrs: dict[str, Any], caps: Caps
) -> Call:
    a, b = operands
    empty = (0, 0, True)
    left, right, out = found[0] or empty, found[1] or empty, matrix(y) or empty
    if not a.shape[-1]:
        left = right = empty
    problem = Problem(
        math.prod(y.shape[:-2]), y.shape[-2], y.shape[-1], a.shape[-1], left[1], right[1],
        y.strides[-2], left[0], right[0], out[0], left[2], not right[2] or not a.shape[-1],
    )  # fmt: skip
    return _call(problem, (a, b, y), (), attrs, (0, 0), caps)


def linear_lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch; leading dimensions are rows."""
    x, weight, *more = inputs
    rows, y = rows_of(x), rows_of(outputs[0])
    lda, ldb = (rows.strides[0], weight.strides[0]) if x.shape[-1] else (0, 0)
    problem = Problem(
        1, y.shape[0], y.shape[1], x.shape[-1], lda, ldb, y.strides[0], 0, 0, 0, True, True,
    )  # fmt: skip
    residual = (0, 0)
    for name, spec in zip(attrs["extras"], more, strict=True):
        if name == "residual":
            residual = (0, rows_of(spec).strides[0])
    specs = (x, weight, *more, outputs[0])
    return Lowered((_call(problem, specs, attrs["extras"], attrs, residual, caps),))


VARIANTS = tuple(TILES)
MATMUL = Op("matmul", matmul_rule, matmul_reference, matmul_lower, takes_matrix, VARIANTS,
            doc="C = alpha A B")  # fmt: skip
LINEAR = Op("linear", linear_rule, linear_reference, linear_lower, takes_linear, VARIANTS,
            doc="Y = f(X W^T + bias) + residual")  # fmt: skip
