"""A problem with its operands, and a launch over them: what every kernel of products is given."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from centella.dtypes import DType
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.ops.layout import flat
from centella.ops.matmul.problem import Problem, aligned
from centella.specs import Spec

Scalars = tuple[tuple[str, int | float], ...]
Constants = tuple[tuple[str, Any], ...]


class Product(Struct, frozen=True):
    """A problem with its operands: `specs` are a, b, the extras by `names`, y.

    A residual has no batches: `residual_pitch` is elements from one row of it to the next.
    `gated`: B has 2 n columns, and the activation of one is multiplied with the one n further.
    """

    problem: Problem
    specs: tuple[Spec, ...]
    names: tuple[str, ...] = ()
    residual_pitch: int = 0
    activation: str = ""
    alpha: float = 1.0
    gated: bool = False

    @property
    def dtypes(self) -> tuple[DType, DType]:
        """Of A and of B."""
        return self.specs[0].dtype, self.specs[1].dtype

    @property
    def columns(self) -> int:
        """Of B, whichever way it lies."""
        return self.problem.n * (2 if self.gated else 1)

    @property
    def rows(self) -> tuple[bool, bool]:
        """Whether the rows of A, of B, start on 16 bytes."""
        p, (a, b, *_) = self.problem, self.specs
        nothing = p.k == 0  # is read
        return nothing or aligned(a, p.lda, p.sa), nothing or aligned(b, p.ldb, p.sb)

    @property
    def whole(self) -> bool:
        """Whether the rows of both do."""
        return all(self.rows)


def launch(
    kernel: Kernel, product: Product, names: tuple[str, ...], scalars: Scalars,
    constants: Constants, groups: int, threads: int,
) -> Call:  # fmt: skip
    """A launch over a product's own operands."""
    form = signature(dict.fromkeys(names, 1), {"y": 1})
    refs = tuple(Ref(i, flat(s)) for i, s in enumerate(product.specs[:-1]))
    y = Ref(len(refs), product.specs[-1])
    return Call(kernel, (*refs, y), scalars, constants, groups, workgroup=threads, signature=form)


def tiles_launch(
    kernel: Kernel, product: Product, size: tuple[int, int], threads: int, constants: Constants,
    more: Scalars = (), across: tuple[int, int] | None = None,
) -> Call:  # fmt: skip
    """A group for each tile of C.

    Args:
        size: rows and columns of a tile.
        across: how many tiles of that size lie beside each other, and how many narrower ones behind
            them; None: all have that size.
    """
    problem = product.problem
    tiles_m = -(-problem.m // size[0])
    tiles_n, narrower = across or (-(-problem.n // size[1]), 0)
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("lda", problem.lda),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("sa", problem.sa), ("sb", problem.sb),
        ("sy", problem.sy), ("tiles_m", tiles_m), ("tiles_n", tiles_n),
        ("alpha", product.alpha), ("ldr", product.residual_pitch), *more,
    )  # fmt: skip
    names = ("a", "b", *product.names)
    groups = tiles_m * (tiles_n + narrower) * problem.batch
    return launch(kernel, product, names, scalars, constants, groups, threads)


def rows_of_a(problem: Problem) -> tuple[int, int, int]:
    """Strides of A along m and k, and between batches; 0 along a dimension of one element."""
    along = problem.a_along_k
    row, step = (problem.lda, 1) if along else (1, problem.lda)
    return row * (problem.m > 1), step, problem.sa * (problem.batch > 1)


def batch_of_b(problem: Problem) -> int:
    """The stride between batches of B, where there are several."""
    return problem.sb * (problem.batch > 1)
