"""A product with a weight in planes, and a launch over it: what streamed kernels are given."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.op.op import Form, Lowered
from centella.ops.layout import flat, rows_of
from centella.ops.matmul.op import parted
from centella.ops.matmul.problem import LinearAttrs, Problem
from centella.ops.matmul.product import Constants, Scalars
from centella.ops.matmul.streamed import blocks_of, groups_of
from centella.ops.quant.format import SYMBOLS, Format
from centella.ops.quant.stream import BlockStream, parts_of
from centella.ops.quant.table import FORMATS
from centella.specs import Spec


class Product(Struct, frozen=True):
    """A product with a weight in planes, whichever op it is of.

    Attributes:
        problem: its n is that of the result; planes: of the weight; extras: operands behind, by
            name.
        kind: of the norm, of `streamed_kernel.py`, or "".
        scalars: of that norm.
    """

    format: Format
    problem: Problem
    x: Spec
    planes: tuple[Spec, ...]
    extras: dict[str, Spec]
    y: Spec
    activation: str
    alpha: float
    gated: bool = False
    kind: str = ""
    scalars: Scalars = ()


def product_of(form: Form[Any], **more: Any) -> Product:
    """The product of an op with `extras` and a `format` among its attributes."""
    attrs, y = form.attrs, form.outputs[0]
    x, planes, rest = parted(form.inputs, attrs.format)
    problem = Problem.of_rows(rows_of(x), planes[0], rows_of(y))
    extras = dict(zip(attrs.extras, rest, strict=True))
    more = {"activation": attrs.activation, "alpha": attrs.alpha, **more}
    return Product(FORMATS[attrs.format], problem, x, tuple(planes), extras, y, **more)


def of_linear(form: Form[LinearAttrs]) -> Product:
    """The product of `linear`."""
    return product_of(form)


def launched(
    kernel: Kernel, product: Product, tile: BlockStream, constants: Constants = (),
    threads: int | None = None,
) -> Lowered:  # fmt: skip
    """The launch of a streamed kernel; `threads`: of a group, None: its workgroup."""
    problem, extras = product.problem, product.extras
    beside, layout = parts_of(product.format, product.planes)
    pitch = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    specs = (product.x, *product.planes, *extras.values())
    refs = (*(Ref(i, flat(s)) for i, s in enumerate(specs)), Ref(len(specs), product.y))
    names = ("x", *SYMBOLS[: len(product.planes)], *extras)
    scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), *layout, ("half", problem.n),
        ("rows", product.planes[0].shape[0]), ("ldx", problem.lda), ("ldy", problem.ldy),
        ("blocks", blocks_of(problem, tile.rows)), ("alpha", product.alpha), ("ldr", pitch),
        *product.scalars,
    )  # fmt: skip
    constants = (
        ("activation", product.activation), ("beside", beside), ("depth", problem.k),
        ("format", product.format.name), ("tile", tile), *constants,
    )  # fmt: skip
    call = Call(
        kernel, refs, scalars, constants, groups_of(problem, tile.rows),
        workgroup=threads or kernel.workgroup,
        signature=signature(dict.fromkeys(names, 1), {"y": 1}),
    )  # fmt: skip
    return Lowered((call,))
