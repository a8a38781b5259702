"""A product's sizes and layout, and the names of the kernels that may compute it.

What an op needs before anything is planned: the kernels themselves are imported with the first
plan, see `lower`.
"""

from __future__ import annotations

from msgspec import Struct

from centella.specs import Spec

ALONG_K = (
    "gemv", "skinny", "skinny_mma", "large", "medium", "small", "mma", "wgmma", "streamed",
    "streamed_rows", "streamed_many",
)  # fmt: skip
VARIANTS = (*ALONG_K[:3], "columns", *ALONG_K[3:])  # `ALONG_K`: where B is contiguous along k
DIGITS = "streamed_digits"  # that of weights in planes, behind their norm; the others are of floats
THIN = 16  # most rows of a thin product


class MatmulAttrs(Struct, frozen=True):
    """A factor, the dtype of the result where it is another, and a kernel that is forced."""

    alpha: float = 1.0
    dtype: str = ""
    variant: str | None = None


class LinearAttrs(Struct, frozen=True):
    """As of `matmul`; which operands come after the weight, and the activation.

    `format`: of a weight in planes, of which there are as many operands; "": it is one tensor.
    """

    extras: tuple[str, ...]
    activation: str
    alpha: float = 1.0
    dtype: str = ""
    format: str = ""
    variant: str | None = None


class Problem(Struct, frozen=True):
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

    @classmethod
    def of_rows(cls, x: Spec, weight: Spec, y: Spec) -> Problem:
        """Rows x [m, k] by a weight [.., k] to rows y [m, n]."""
        (m, k), n = x.shape, y.shape[1]
        return cls(
            batch=1, m=m, n=n, k=k, lda=x.strides[0], ldb=weight.strides[0], ldy=y.strides[0],
            sa=0, sb=0, sy=0, a_along_k=True, b_along_k=True,
        )  # fmt: skip


def aligned(spec: Spec, pitch: int, batch: int) -> bool:
    """True when every row of a matrix, in every batch, starts on a 16-byte boundary."""
    item = spec.dtype.itemsize
    return spec.aligned and pitch * item % 16 == 0 and batch * item % 16 == 0
