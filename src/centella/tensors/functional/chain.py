"""`linear_chain`: what lies between the attention of one decoder layer and that of the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from centella.dtypes import bf16, f16
from centella.op.op import get
from centella.ops.matmul.chain import GIVEN, Link
from centella.tensors.functional.products import linear, normed_linear
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.tensor import Tensor, apply_all

Weight = Tensor | QTensor | Stacked
FASTER: frozenset[str] = frozenset()  # PTX targets where one launch was measured to be faster


class ChainLink(Struct, frozen=True, eq=False):
    """One product of a chain, of what the one before gave.

    Attributes:
        weight: [n, k], with a gate [2 n, k]; norm: [k], of an RMS norm before it; eps: of that.
        gate: the activation of the first half of the outputs, which multiplies the second.
        bias: [n]; alpha: a factor of the sums.
        residual: what is added last: "x", the chain's operand of that name, or the number of an
            earlier link; not with a gate, nor is a bias.
        kept: whether what it gives is a result of the chain; the last link's always is.
    """

    weight: Weight
    norm: Tensor | None = None
    eps: float = 1e-6
    gate: str = ""
    bias: Tensor | None = None
    alpha: float = 1.0
    residual: str | int | None = None
    kept: bool = False


def linear_chain(
    y: Tensor, links: Sequence[ChainLink], residual: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Products one after the other: one launch for one row and 16-bit weights, where it is faster.

    Else those of `normed_linear` and `linear`, which round what each link gives to the dtype of y,
    where the one launch keeps f32 between links.

    Args:
        y: [..., k]; links: at least one.
        residual: what a link with the residual "x" adds.

    Returns:
        What the links give that are kept, [..., n] in the dtype of y, the last one's last.

    Raises:
        ShapeError, DTypeError: for operands that do not fit together.
    """
    if _one_launch(y, links):
        return _applied(y, links, residual)
    given: list[Tensor] = []
    for link in links:
        source = link.residual
        added = given[source] if isinstance(source, int) else residual if source else None
        if link.norm is None and not link.gate:
            y = linear(y, link.weight, link.bias, residual=added, alpha=link.alpha)
        else:
            y = normed_linear(
                y, link.weight, link.norm, eps=link.eps, gate=link.gate or None, bias=link.bias,
                residual=added, alpha=link.alpha,
            )  # fmt: skip
        given.append(y)
    last = len(links) - 1
    return tuple(t for i, t in enumerate(given) if links[i].kept or i == last)


def _one_launch(y: Tensor, links: Sequence[ChainLink]) -> bool:
    """Whether one launch is faster: of one row, and 16-bit weights alone."""
    caps = y.device.caps
    if caps.arch not in FASTER or math.prod(y.shape[:-1]) != 1:
        return False
    weights = [link.weight for link in links]
    kinds = {w.dtype for w in weights if isinstance(w, Tensor)}
    return (
        len(links) > 1
        and all(isinstance(w, Tensor) for w in weights)
        and (kinds == {bf16} or kinds == {f16})
        and not any(link.gate and link.bias is not None for link in links)
        and all(w.spec.storage_bytes <= caps.safe_binding for w in weights if isinstance(w, Tensor))
    )


def _applied(y: Tensor, links: Sequence[ChainLink], residual: Tensor | None) -> tuple[Tensor, ...]:
    """The op `linear_chain`."""
    operands = [y] if residual is None else [y, residual]
    declared = []
    for link in links:
        assert isinstance(link.weight, Tensor)
        vectors = [t for t in (link.norm, link.bias) if t is not None]
        operands += [link.weight, *vectors]
        source = GIVEN if isinstance(link.residual, str) else link.residual
        declared.append(Link(
            norm=link.norm is not None, bias=link.bias is not None, gate=link.gate,
            residual=source, eps=link.eps, alpha=link.alpha, kept=link.kept,
        ))  # fmt: skip
    return apply_all(get("linear_chain"), tuple(operands), {"links": tuple(declared)})
