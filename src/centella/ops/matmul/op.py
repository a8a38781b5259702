"""`matmul` and `linear` as ops: rules, NumPy formulas, lowering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from centella.dtypes import Array, DType, dtype_of, i8, narrow, u8, widen
from centella.emit.program import HostProgram
from centella.errors import DTypeError, ShapeError
from centella.host.blas import SMALL, around, taken_over
from centella.host.blockwise import blocks_of, cores, parts_of, share, threads_for
from centella.op.axes import LETTERS, Axes, Fold, axes, spread
from centella.op.op import Form, Op, Out
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.host import calls_of, plain, run_blocks
from centella.ops.layout import (
    as_rows,
    broadcast,
    one_stride,
    repeats,
    rows_of,
    takes_rows,
)
from centella.ops.matmul.problem import ALONG_K, VARIANTS, LinearAttrs, MatmulAttrs
from centella.ops.matmul.stored import product
from centella.ops.operands import NUMPY, SYMBOLS
from centella.ops.quant.dequantize import plane_axes
from centella.ops.quant.table import FORMATS
from centella.specs import Spec

T = TypeVar("T")
MANY = 64  # rows a thread from which on it is better to read the weight once for each part


def _float(name: str, specs: Sequence[Spec]) -> None:
    if any(not s.dtype.is_float for s in specs):
        raise DTypeError(f"{name}: expected float dtypes, got {[s.dtype.name for s in specs]}")


def matmul_rule(specs: tuple[Spec, ...], attrs: MatmulAttrs) -> tuple[Out, ...]:
    """[..., m, k] and [..., k, n] to [..., m, n]; the leading dimensions broadcast."""
    a, b = specs
    _float("matmul", specs)
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        vectors = "; ct.dot takes vectors" if len(a.shape) == len(b.shape) == 1 else ""
        raise ShapeError(
            f"matmul: expected [..., m, k] and [..., k, n], got {list(a.shape)} and "
            f"{list(b.shape)}{vectors}"
        )
    if a.dtype is not b.dtype:
        raise DTypeError(f"matmul: expected one dtype, got {a.dtype.name} and {b.dtype.name}")
    lead = broadcast("matmul", a.shape[:-2], b.shape[:-2])
    return (((*lead, a.shape[-2], b.shape[-1]), result_dtype(a.dtype, attrs)),)


def result_dtype(of: DType, attrs: MatmulAttrs | LinearAttrs) -> DType:
    """What sums are rounded to: the dtype that was asked for, else the first operand's."""
    return dtype_of(attrs.dtype) if attrs.dtype else of


def linear_rule(specs: tuple[Spec, ...], attrs: LinearAttrs) -> tuple[Out, ...]:
    """x [..., k], weight [n, k] or planes, scale [n], bias [n], residual [..., n] to [..., n]."""
    x, weight, more = parted(specs, attrs.format)
    if attrs.format:
        n, k = FORMATS[attrs.format].check("linear", weight)
        _float("linear", (x, *more))
        if not x.shape or x.shape[-1] != k:
            raise ShapeError(f"linear: expected x [..., {k}], got {list(x.shape)}")
    else:
        n = _rows_of_weight(x, weight[0], more, "scale" in attrs.extras)
    shape = (*x.shape[:-1], n)
    check_extras(shape, attrs.extras, more)
    return ((shape, result_dtype(x.dtype, attrs)),)


def parted(operands: Sequence[T], format: str) -> tuple[T, Sequence[T], Sequence[T]]:
    """The operands of a product: x, the weight's (`format`: "" of one tensor), the extras."""
    count = len(FORMATS[format].planes) if format else 1
    return operands[0], operands[1 : 1 + count], operands[1 + count :]


def _rows_of_weight(x: Spec, weight: Spec, more: Sequence[Spec], scaled: bool) -> int:
    """Outputs of a weight that is one tensor: an i8 one needs a scale, a float one may have it."""
    if weight.dtype is u8:
        raise DTypeError(
            "linear: expected scale= [n, k / 32] with a u8 weight; ct.quantize_blocks makes both"
        )
    if weight.dtype is not i8:
        _float("linear", (x, weight, *more))
    elif not scaled:
        raise DTypeError("linear: expected scale= with an i8 weight; ct.quantize_int8 makes both")
    else:
        _float("linear", (x, *more))
    if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: expected x [..., k] and weight [n, k], got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    return weight.shape[0]


def check_extras(shape: tuple[int, ...], names: tuple[str, ...], specs: Sequence[Spec]) -> None:
    """Refuse a scale or bias that is not [n], or a residual that is not of the result's shape.

    Raises:
        ShapeError: names the operand.
    """
    for name, spec in zip(names, specs, strict=True):
        wanted = shape if name == "residual" else shape[-1:]
        if spec.shape != wanted:
            raise ShapeError(f"linear: expected {name} {list(wanted)}, got {list(spec.shape)}")


def matmul_reference(a: Array, b: Array, alpha: float = 1.0, dtype: str = "") -> Any:
    """The NumPy formula."""
    c = np.matmul(a, b)
    return c if alpha == 1.0 else c * a.dtype.type(alpha)


def epilogue(o: Any, y: Any, named: dict[str, Any], attrs: LinearAttrs) -> Any:
    """f(alpha y scale + bias) + residual of the sums y."""
    if attrs.alpha != 1.0:
        y = y * attrs.alpha
    if "scale" in named:
        y = y * named["scale"]
    if "bias" in named:
        y = y + named["bias"]
    if attrs.activation:
        y = ACTIVATIONS[attrs.activation](o, y)
    return y + named["residual"] if "residual" in named else y


def linear_reference(*operands: Array, **named: Any) -> Any:
    """The NumPy formula."""
    attrs = LinearAttrs(**named)
    x, weight, more = parted(operands, attrs.format)
    whole = FORMATS[attrs.format].decode(*weight) if attrs.format else weight[0]
    rows = math.prod(x.shape[:-1])
    y = np.matmul(x.reshape(rows, x.shape[-1]), whole.astype(x.dtype, copy=False).T)
    y = y.reshape(*x.shape[:-1], len(whole))
    return epilogue(NUMPY, y, dict(zip(attrs.extras, more, strict=True)), attrs)


def linear_host(form: Form[LinearAttrs]) -> HostProgram:
    """The product into the result, which the epilogue then goes over in blocks."""
    x, planes, more = parted(form.inputs, form.attrs.format)
    if not plain((x, *more, *form.outputs)):
        return _rounded_host(form)
    stored = bool(form.attrs.format) or not plain(planes)
    dtypes = [plane.dtype for plane in planes]
    out = rows_of(form.outputs[0])
    extras = form.attrs.extras
    lies = [_as_rows(s) if n == "residual" else _repeated(s, out)
            for n, s in zip(extras, more, strict=True)]  # fmt: skip
    run = calls_of(
        (out, *lies), out.shape[-1],
        lambda xs: epilogue(SYMBOLS, xs[0], dict(zip(extras, xs[1:], strict=True)), form.attrs),
    )  # fmt: skip
    blocks = blocks_of(out.shape)
    more_to_do = extras or form.attrs.activation or form.attrs.alpha != 1.0
    multiplications = out.size * x.shape[-1]  # work, unlike results, says what threads gain
    threads = cores() if multiplications >= SMALL else threads_for(out.size)
    parts = parts_of(out.shape, threads)

    def call(ins: list[Any], outs: list[Any]) -> None:
        left, weight, rest = parted(ins, form.attrs.format)
        y = outs[0].reshape(out.shape)
        left = left.reshape(len(y), x.shape[-1])
        operands = [y, *(r.reshape(y.shape) for r in rest)]
        if stored:
            product(np.ascontiguousarray(left), weight, dtypes, form.attrs.format, y)
            if more_to_do:
                run_blocks(run, blocks, operands, y)
            return
        right = weight[0]
        blas = taken_over(threads) if len(y) >= threads * MANY else None

        def compute(part: tuple[slice, list[slice]]) -> None:
            rows, blocks = part
            with np.errstate(all="ignore"):
                np.matmul(left[rows], right.T, out=y[rows])
                for index in blocks if more_to_do else ():
                    run([x[index] for x in operands], y[index])

        if blas is not None:
            with blas.alone():
                share(compute, parts, threads)
            return
        with np.errstate(all="ignore"), around(multiplications):
            np.matmul(left, right.T, out=y)
        if more_to_do:
            run_blocks(run, blocks, operands, y)

    return HostProgram("numpy:linear", "linear", call, (), (_as_rows(x), *planes, *lies, out))


def _rounded_host(form: Form[LinearAttrs]) -> HostProgram:
    """Of activations that are stored in 16 bits: in f32, rounded once behind the epilogue."""
    (y,), attrs = form.outputs, form.attrs
    x, planes, more = parted(form.inputs, attrs.format)
    rows, n, k = math.prod(y.shape[:-1]), y.shape[-1], x.shape[-1]
    dtypes = [plane.dtype for plane in planes]

    def call(ins: list[Any], outs: list[Any]) -> None:
        left, weight, given = parted(ins, attrs.format)
        left = np.ascontiguousarray(widen(left, x.dtype).reshape(rows, k), np.float32)
        sums = np.empty((rows, n), np.float32)
        product(left, weight, dtypes, attrs.format, sums)
        wide = map(widen, given, (spec.dtype for spec in more))
        named = dict(zip(attrs.extras, wide, strict=True))
        with np.errstate(all="ignore"):
            result = epilogue(NUMPY, sums.reshape(y.shape), named, attrs)
        np.copyto(outs[0], narrow(result, y.dtype))

    return HostProgram("numpy:linear", "linear", call)


def _as_rows(spec: Spec) -> Spec:
    """Rows where no copy is needed for that."""
    rows = as_rows(spec)
    return spec if rows is None else rows


def _repeated(vector: Spec, out: Spec) -> Spec:
    """A vector seen as all rows of the result."""
    return Spec(out.shape, vector.dtype, (0, vector.strides[0]))


def matmul_host(form: Form[MatmulAttrs]) -> HostProgram | None:
    """The product into the result."""
    if not plain((*form.inputs, *form.outputs)):
        return None
    alpha = np.float32(form.attrs.alpha)
    one = math.prod(form.outputs[0].shape[-2:]) * form.inputs[0].shape[-1]  # of a batch

    def call(ins: list[Any], outs: list[Any]) -> None:
        with np.errstate(all="ignore"), around(one):
            np.matmul(ins[0], ins[1], out=outs[0])
            if alpha != 1.0:
                np.multiply(outs[0], alpha, out=outs[0])

    return HostProgram("numpy:matmul", "matmul", call)


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
    batch = one_stride(spec.shape[:-2], spec.strides[:-2])
    if batch is None:
        return None
    return (batch, rows, True) if columns == 1 else (batch, columns, False)


def takes_matrix(index: int, spec: Spec) -> bool:
    """Takes matrices with one contiguous dimension and one batch stride."""
    if len(spec.shape) < 2 or spec.size == 0:
        return True
    return matrix(spec) is not None and not repeats(spec, 2)


def matmul_axes(form: Form[MatmulAttrs]) -> Axes:
    """Batches, rows and columns of the result; along k what the parts give is added."""
    a, b = form.inputs
    lead = LETTERS[: len(form.outputs[0].shape) - 2]
    left, right = (spread(s.shape[:-2], lead) for s in (a, b))
    return axes([f"{left}mk", f"{right}kn"], [f"{lead}mn"], fold=Fold("k"))


def linear_axes(form: Form[LinearAttrs]) -> Axes:
    """Rows of x, outputs of the weight; the epilogue needs whole sums."""
    lead = LETTERS[: len(form.outputs[0].shape) - 1]
    more = [f"{lead}n" if name == "residual" else "n" for name in form.attrs.extras]
    if not form.attrs.format:
        return axes([f"{lead}.", "n.", *more], [f"{lead}n"])
    planes = plane_axes(FORMATS[form.attrs.format], "n")
    return axes([f"{lead}.", *planes, *more], [f"{lead}n"], scratch="n")


def flops_of(form: Form[Any]) -> int:
    """A multiplication and an addition for each element of a row."""
    return 2 * form.outputs[0].size * form.inputs[0].shape[-1]


MATMUL = Op("matmul", matmul_rule, matmul_reference, "centella.ops.matmul.lower:matmul",
            takes_matrix, VARIANTS, attrs=MatmulAttrs, host=matmul_host, axes=matmul_axes,
            flops=flops_of, doc="C = alpha A B")  # fmt: skip
LINEAR = Op("linear", linear_rule, linear_reference, "centella.ops.matmul.lower:linear",
            takes_rows, ALONG_K, attrs=LinearAttrs, host=linear_host, axes=linear_axes,
            flops=flops_of, doc="Y = f(alpha (X W^T) scale + bias) + residual")  # fmt: skip
