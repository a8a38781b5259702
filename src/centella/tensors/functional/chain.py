"""`linear_chain`: what lies between the attention of one decoder layer and that of the next."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from centella.op.op import get
from centella.ops.matmul.chain import GIVEN, Link
from centella.tensors.functional.products import linear, normed_linear
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.tensor import Tensor, apply_preferred

Weight = Tensor | QTensor | Stacked


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
    """Products one after the other: one launch of 16-bit weights and one row, where it is faster.

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
    one_launch = _one_launch(y, links, residual)
    if one_launch is not None:
        return one_launch
    results: list[Tensor] = []
    for link in links:
        source = link.residual
        added = results[source] if isinstance(source, int) else residual if source else None
        if link.norm is None and not link.gate:
            y = linear(y, link.weight, link.bias, residual=added, alpha=link.alpha)
        else:
            y = normed_linear(
                y, link.weight, link.norm, eps=link.eps, gate=link.gate or None, bias=link.bias,
                residual=added, alpha=link.alpha,
            )  # fmt: skip
        results.append(y)
    last = len(links) - 1
    return tuple(t for i, t in enumerate(results) if links[i].kept or i == last)


def _one_launch(
    y: Tensor, links: Sequence[ChainLink], residual: Tensor | None
) -> tuple[Tensor, ...] | None:
    """What the op `linear_chain` gives, where it takes these links and is preferred."""
    operands = [y] if residual is None else [y, residual]
    declared = []
    for link in links:
        if not isinstance(link.weight, Tensor):
            return None
        operands += [t for t in (link.weight, link.norm, link.bias) if t is not None]
        source = GIVEN if isinstance(link.residual, str) else link.residual
        declared.append(Link(
            norm=link.norm is not None, bias=link.bias is not None, gate=link.gate,
            residual=source, eps=link.eps, alpha=link.alpha, kept=link.kept,
        ))  # fmt: skip
    return apply_preferred(get("linear_chain"), tuple(operands), {"links": tuple(declared)})
