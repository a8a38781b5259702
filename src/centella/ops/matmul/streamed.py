"""Which products of one row are streamed (`streamed_kernel.py`), and how a group works then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16
from centella.op.op import Lowered
from centella.op.variant import Variant
from centella.ops.matmul.normed import NormedAttrs
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.product import Product, Scalars, launch
from centella.ops.matmul.streamed_kernel import (
    DEPTH,
    EIGHT,
    LAYER,
    RMS,
    SUMS,
    WARPS,
    Stream,
    kernel,
)
from centella.ops.matmul.table import MULTIPROCESSORS
from centella.specs import Caps

SHARED = 184 << 10  # bytes of a group, beside which one of attention has room
STAGE = 16 << 10  # bytes of a stage, at most, where it has more than the fewest columns
FEWEST, WIDEST = DEPTH * WARPS, 512  # columns of a stage
LEAST = 2  # stages, of which one is filled while the other is read
MOST_ROWS = 80  # of a stage


def stream_of(
    problem: Problem, dtypes: Sequence[DType], halves: int, normed: bool, caps: Caps
) -> Stream | None:
    """How a group works where one row of 16 bits meets weights whose rows are whole chunks."""
    x, w, y = dtypes
    along = problem.a_along_k and problem.b_along_k
    if not (problem.m == problem.batch == 1 and along and caps.warpgroups):
        return None
    if x is not w or w not in (bf16, f16) or problem.k % EIGHT or problem.k < FEWEST:
        return None
    tile = Stream(outputs_of(problem, y, halves), 0, 0)
    sixteens = tile.sixteens(halves)

    def kept(tile: Stream) -> int:
        """Bytes of x, in two columns where it is normalised, and of two sets of sums."""
        columns = _steps(problem, tile) * tile.columns
        return 2 * columns * (2 if normed else 1) + 8 * WARPS * sixteens * DEPTH

    return ring_of(tile, problem, halves, kept)


def outputs_of(problem: Problem, y: DType, halves: int) -> int:
    """Outputs of a block, so many that the busiest group has the fewest, in few blocks.

    What ends a block is counted as another output.
    """
    every = range(EIGHT // halves, MOST_ROWS // halves + 1, y.per_word)
    return min(every, key=lambda rows: (_turns(problem.n, rows) * (rows + 1), -rows))


def _turns(n: int, rows: int) -> int:
    """Blocks of the busiest group."""
    blocks = -(-n // rows)
    return -(-blocks // MULTIPROCESSORS)


def ring_of(
    tile: Stream, problem: Problem, halves: int, kept: Callable[[Stream], int]
) -> Stream | None:
    """With columns and stages of a ring; None where too few stages have room.

    Args:
        kept: bytes of shared memory of what is not in the ring.
    """
    columns = WIDEST
    while columns > FEWEST and (
        2 * halves * tile.height * columns > STAGE or columns >= 2 * problem.k
    ):
        columns //= 2
    tile = replace(tile, columns=columns)
    steps = _steps(problem, tile)
    stages = (SHARED - kept(tile) - 2048) // tile.stage_bytes(halves)
    tile = replace(tile, stages=min(stages, steps * _turns(problem.n, tile.rows)))
    return tile if tile.stages >= min(LEAST, steps) else None


def _steps(problem: Problem, tile: Stream) -> int:
    """Stages of a block."""
    return -(-problem.k // tile.columns)


def blocks_of(problem: Problem, tile: Stream) -> int:
    """Blocks of outputs."""
    return -(-problem.n // tile.rows)


def groups_of(problem: Problem, tile: Stream) -> int:
    """Groups with equal numbers of blocks."""
    return -(-blocks_of(problem, tile) // _turns(problem.n, tile.rows))


def stream_launch(
    product: Product, tile: Stream, gate: str = "", kind: str = "", scalars: Scalars = ()
) -> Lowered:
    """The launch."""
    problem, groups = product.problem, groups_of(product.problem, tile)
    constants = (
        ("activation", product.activation), ("depth", problem.k), ("gate", gate), ("kind", kind),
        ("tile", tile),
    )  # fmt: skip
    own: Scalars = (
        ("n", problem.n), ("k", problem.k), ("ldw", problem.ldb), ("half", problem.n),
        ("rows", product.specs[1].shape[0]), ("blocks", blocks_of(problem, tile)),
        ("alpha", product.alpha), ("ldr", product.residual_pitch), *scalars,
    )  # fmt: skip
    names = ("x", "w", *product.names)
    return Lowered((launch(kernel, product, names, own, constants, groups, kernel.workgroup),))


def normed_stream(product: Product, attrs: NormedAttrs, caps: Caps) -> Stream | None:
    """Of a product with a norm or a gate."""
    named = zip(product.names, product.specs[2:-1], strict=True)
    vectors = [aligned(spec, 0, 0) for name, spec in named if name in ("norm", "shift")]
    if not (product.whole and all(vectors)):
        return None
    dtypes, normed = (*product.dtypes, product.specs[-1].dtype), kind_of(product, attrs) != ""
    return stream_of(product.problem, dtypes, 2 if attrs.gate else 1, normed, caps)


def kind_of(product: Product, attrs: NormedAttrs) -> str:
    """What the kernel calls the norm; "" for none."""
    if attrs.kind == LAYER:
        return LAYER
    if "norm" not in product.names:
        return ""
    return SUMS if product.dtypes[0] is bf16 else RMS


def _tile(product: Product, caps: Caps) -> Stream | None:
    if not product.whole or "scale" in product.names:
        return None
    dtypes = (*product.dtypes, product.specs[-1].dtype)
    return stream_of(product.problem, dtypes, 1, False, caps)


def _launches(product: Product, tile: Stream, caps: Caps) -> Lowered:
    return stream_launch(product, tile)


STREAMED: Variant[Product, Stream] = Variant(
    "streamed", _tile, _launches, lambda product, caps: caps.fast_tensor_cores
)
