"""linear_chain: products one after the other, each of what the one before gave.

    h = y[i - 1] / sqrt(mean(y[i - 1]^2) + eps) * norm        where link i has a norm
    y[i] = alpha (h W^T) + bias + residual
    y[i] = act(h W[:n]^T) * (h W[n:]^T)                       where it has a gate

y[-1] is x; the residual of a link is the operand of that name, or the result of an earlier link.
What lies between the attention of a decoder's layer and that of the next is such a chain: the
product behind attention, the gated network, and the next layer's product of q, k and v.

Between links values are f32; results are rounded to their dtype. For one row of x that is one
launch of an NVIDIA GPU (`chain_kernel.py`), else the launches of `normed_linear` and `linear`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from centella.dtypes import Array, DType, dtype_of
from centella.errors import DTypeError, ShapeError
from centella.op.axes import LETTERS, WHOLE, Axes, axes
from centella.op.form import Form, loaded
from centella.op.op import Op, Out
from centella.op.variant import APART
from centella.ops.elementwise import ACTIVATIONS
from centella.ops.layout import takes_rows
from centella.ops.matmul.normed import reference as product_of
from centella.ops.matmul.problem import THIN
from centella.specs import Caps, Shape, Spec

GIVEN = -1  # the residual is the op's operand
VARIANTS = ("resident", APART)
FASTER: frozenset[str] = frozenset()  # PTX targets on which "resident" was measured to be faster
T = TypeVar("T")


class Link(Struct, frozen=True):
    """One product.

    Attributes:
        norm, bias: whether it has them; their operands follow its weight, in this order.
        gate: activation of the first half of its outputs, which multiplies the second; "": none.
        residual: None, GIVEN, or the number of an earlier link.
        eps: of the norm; alpha: a factor of its sums.
        kept: whether what it gives is a result of the op; the last link's always is.
    """

    norm: bool = False
    bias: bool = False
    gate: str = ""
    residual: int | None = None
    eps: float = 1e-6
    alpha: float = 1.0
    kept: bool = False

    @property
    def operands(self) -> int:
        """Its weight, and what it has besides."""
        return 1 + self.norm + self.bias


class ChainAttrs(Struct, frozen=True):
    """The links; the dtype of the last one's result, "" for that of x; a kernel that is forced."""

    links: tuple[Link, ...]
    dtype: str = ""
    variant: str | None = None

    @property
    def has_residual(self) -> bool:
        """Whether there is a residual among the operands, after x."""
        return any(link.residual == GIVEN for link in self.links)


def parted(operands: Sequence[T], attrs: ChainAttrs) -> Iterator[tuple[Link, int, Sequence[T]]]:
    """Each link, with the number of its first operand and these."""
    first = 1 + attrs.has_residual
    for link in attrs.links:
        yield link, first, operands[first : first + link.operands]
        first += link.operands


def results(attrs: ChainAttrs) -> list[int]:
    """The links whose results the op gives."""
    last = len(attrs.links) - 1
    return [i for i, link in enumerate(attrs.links) if link.kept or i == last]


def shapes(specs: Sequence[Spec], attrs: ChainAttrs) -> list[tuple[Shape, DType]]:
    """What each link gives.

    Raises:
        ShapeError, DTypeError: for operands that do not fit together.
    """
    x = specs[0]
    all_of: list[tuple[Shape, DType]] = []
    count = 1 + attrs.has_residual + sum(link.operands for link in attrs.links)
    if len(specs) != count or not attrs.links:
        raise ShapeError(f"linear_chain: expected {count} operands and a link, got {len(specs)}")
    if any(not s.dtype.is_float for s in specs):
        raise DTypeError(
            f"linear_chain: expected float dtypes, got {[s.dtype.name for s in specs]}"
        )
    if not x.shape or not 0 < math.prod(x.shape[:-1]) <= THIN or not x.shape[-1]:
        raise ShapeError(f"linear_chain: expected 1 to {THIN} rows, got {list(x.shape)}")
    lead, k = x.shape[:-1], x.shape[-1]
    for i, (link, _, (weight, *more)) in enumerate(parted(specs, attrs)):
        gated = 2 if link.gate else 1
        if len(weight.shape) != 2 or weight.shape[1] != k or weight.shape[0] % gated:
            raise ShapeError(
                f"linear_chain: link {i}: expected a weight [{'2 n' if link.gate else 'n'}, {k}], "
                f"got {list(weight.shape)}"
            )
        if link.gate and (link.gate not in ACTIVATIONS or link.bias or link.residual is not None):
            raise ShapeError(
                f"linear_chain: link {i}: expected the name of an activation, and nothing else "
                f"after a gate, got {link}"
            )
        n = weight.shape[0] // gated
        named = dict(zip([n for n in ("norm", "bias") if getattr(link, n)], more, strict=True))
        wanted = {"norm": (k,), "bias": (n,)}
        for name, spec in named.items():
            if spec.shape != wanted[name]:
                raise ShapeError(
                    f"linear_chain: link {i}: expected {name} {list(wanted[name])}, got "
                    f"{list(spec.shape)}"
                )
        shape = (*lead, n)
        if link.residual is not None:
            if not GIVEN <= link.residual < i:
                raise ShapeError(f"linear_chain: link {i} has no residual {link.residual}")
            added = specs[1].shape if link.residual == GIVEN else all_of[link.residual][0]
            if added != shape:
                raise ShapeError(
                    f"linear_chain: link {i}: expected a residual {list(shape)}, got {list(added)}"
                )
        last = i == len(attrs.links) - 1
        all_of.append((shape, dtype_of(attrs.dtype) if last and attrs.dtype else x.dtype))
        k = n
    return all_of


def rule(specs: tuple[Spec, ...], attrs: ChainAttrs) -> tuple[Out, ...]:
    """x [..., k] of at most 16 rows, the residual, each link's weight, norm [k] and bias [n]."""
    every = shapes(specs, attrs)
    return tuple(every[i] for i in results(attrs))


def reference(x: Array, *more: Array, **named: Any) -> Any:
    """The NumPy formula."""
    attrs = ChainAttrs(**named)
    operands: tuple[Array, ...] = (x, *more)
    every: list[Array] = []
    for link, _, own in parted(operands, attrs):
        extras = [name for name in ("norm", "bias") if getattr(link, name)]
        arrays = list(own[1:])
        if link.residual is not None:
            extras.append("residual")
            arrays.append(operands[1] if link.residual == GIVEN else every[link.residual])
        x = product_of(
            x, own[0], *arrays, extras=tuple(extras), gate=link.gate, eps=link.eps,
            alpha=link.alpha, dtype="",
        )  # fmt: skip
        every.append(x)
    kept = results(attrs)
    return tuple(every[i] for i in kept) if len(kept) > 1 else every[-1]


def axes_of(form: Form[ChainAttrs]) -> Axes:
    """Rows of x. A link reads all outputs of the one before, so nothing else is divided."""
    rows = LETTERS[: len(form.inputs[0].shape) - 1] + WHOLE
    own = len(form.inputs) - 1 - form.attrs.has_residual
    weights = [WHOLE * len(spec.shape) for spec in form.inputs[len(form.inputs) - own :]]
    return axes([rows] * (1 + form.attrs.has_residual) + weights, [rows] * len(form.outputs))


def preferred(form: Form[ChainAttrs], caps: Caps) -> bool:
    """Of several links, where one launch was measured to be faster or is forced, and fits."""
    wanted = form.attrs.variant is not None or caps.arch in FASTER
    if not wanted or len(form.attrs.links) < 2 or not form.within_binding(caps):
        return False
    return loaded("centella.ops.matmul.chain_choice:tile_of")(form, caps) is not None


CHAIN: Op[ChainAttrs] = Op(
    "linear_chain", rule, reference, "centella.ops.matmul.chain_choice:lower", takes_rows,
    VARIANTS, attrs=ChainAttrs, preferred=preferred, narrower=True, axes=axes_of,
    doc=__doc__ or "",
)  # fmt: skip
