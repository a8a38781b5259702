"""Which products of one row are streamed (`streamed_kernel.py`), and how a group works then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.hopper import MULTIPROCESSORS, SPARE
from centella.ops.matmul.normed import NormedAttrs
from centella.ops.matmul.normed_kernel import product_of
from centella.ops.matmul.one_row import DEPTH, EIGHT, LAYER, RMS, SUMS
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.product import Product, Scalars, launch
from centella.ops.matmul.streamed_kernel import WARPS, Stream, kernel
from centella.specs import Caps

SHARED = 184 << 10  # bytes of a group; with 112 KB products were slower (benchmarks/LOG.md)
STAGE = 16 << 10  # bytes of a stage, at most, where it has more than the fewest columns
FLIGHT = 48 << 10  # bytes in flight to a group whose ring has room for all of its weights
BARRIERS = 24  # bytes of the barriers of a stage, three at most
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

    return ring_of(tile, problem, halves, kept, caps)


def outputs_of(problem: Problem, y: DType, halves: int, most: int = MOST_ROWS) -> int:
    """Outputs of a block, so many that the busiest group has the fewest, in few blocks.

    What ends a block is counted as another output.
    """
    every = range(EIGHT // halves, most // halves + 1, y.per_word)
    return min(every, key=lambda rows: (_turns(problem.n, rows) * (rows + 1), -rows))


def _turns(n: int, rows: int) -> int:
    """Blocks of the busiest group."""
    blocks = -(-n // rows)
    return -(-blocks // MULTIPROCESSORS)


def ring_of(
    tile: Stream, problem: Problem, halves: int, kept: Callable[[Stream], int], caps: Caps
) -> Stream | None:
    """With columns and stages of a ring; None where too few stages have room, or too few threads.

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
    room = min(SHARED, caps.max_shared) - kept(tile) - SPARE
    stages = room // (tile.stage_bytes(halves) + BARRIERS)
    tiles = steps * _turns(problem.n, tile.rows)
    flight = min(max(FLIGHT // (2 * halves * tile.height * tile.columns), 1), tiles)
    tile = replace(tile, stages=min(stages, tiles), flight=flight if stages >= tiles else 0)
    fits = tile.stages >= min(LEAST, steps) and kernel.workgroup <= caps.max_workgroup
    return tile if fits else None


def _steps(problem: Problem, tile: Stream) -> int:
    """Stages of a block."""
    return -(-problem.k // tile.columns)


def blocks_of(problem: Problem, rows: int) -> int:
    """Blocks of so many outputs."""
    return -(-problem.n // rows)


def groups_of(problem: Problem, rows: int) -> int:
    """Groups with equal numbers of blocks."""
    return -(-blocks_of(problem, rows) // _turns(problem.n, rows))


def _tile(product: Product, caps: Caps) -> Stream | None:
    named = dict(zip(product.names, product.specs[2:-1], strict=True))
    vectors = [named[name] for name in ("norm", "shift") if name in named]
    if not product.whole or "scale" in named or not all(aligned(v, 0, 0) for v in vectors):
        return None
    dtypes = (*product.dtypes, product.specs[-1].dtype)
    halves = 2 if product.gated else 1
    return stream_of(product.problem, dtypes, halves, bool(vectors), caps)


def _launches(
    product: Product, tile: Stream, caps: Caps, kind: str = "", scalars: Scalars = ()
) -> Lowered:
    """The launch."""
    problem, groups = product.problem, groups_of(product.problem, tile.rows)
    constants = (
        ("activation", product.activation), ("depth", problem.k), ("gated", product.gated),
        ("kind", kind), ("tile", tile),
    )  # fmt: skip
    own: Scalars = (
        ("n", problem.n), ("k", problem.k), ("ldw", problem.ldb), ("half", problem.n),
        ("rows", product.columns), ("blocks", blocks_of(problem, tile.rows)),
        ("alpha", product.alpha), ("ldr", product.residual_pitch), *scalars,
    )  # fmt: skip
    names = ("x", "w", *product.names)
    return Lowered((launch(kernel, product, names, own, constants, groups, kernel.workgroup),))


def _normed_tile(form: Form[NormedAttrs], caps: Caps) -> Stream | None:
    return _tile(product_of(form), caps)


def _normed_launches(form: Form[NormedAttrs], tile: Stream, caps: Caps) -> Lowered:
    product, attrs, kind = product_of(form), form.attrs, ""
    if "norm" in attrs.extras:
        rms = SUMS if product.dtypes[0] is bf16 else RMS
        kind = LAYER if attrs.kind == LAYER else rms
    return _launches(product, tile, caps, kind, (("eps", attrs.eps),))


def _preferred(form: object, caps: Caps) -> bool:
    return caps.fast_tensor_cores


STREAMED: Variant[Product, Stream] = Variant("streamed", _tile, _launches, _preferred)
NORMED_STREAMED: Variant[Form[NormedAttrs], Stream] = Variant(
    "streamed", _normed_tile, _normed_launches, _preferred
)
