"""The product by warpgroups whose tiles are whole rows, normalised where they lie: sm_90a alone.

A group has 128 rows of all columns, at most 384: two consumers, each with 64 rows as two fragments
of sums, 192 registers a thread. So four lanes have a row, and its statistics are sums in registers
and two shuffles. The producer fills a ring with A and B as that of `wgmma.py`, and besides has the
residual's rows copied to the place where the results will lie, while the tile is multiplied: what
is read there is overwritten by the same warp, and leaves by a copy of whole boxes while the next
tile is multiplied.

Rows of A, B, residual and results, and vectors, of 16 bits an element too, start on 16 bytes;
columns are a multiple of 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered
from centella.op.variant import Variant, choose
from centella.ops.hopper import MULTIPROCESSORS, PANEL
from centella.ops.layout import rows_of
from centella.ops.matmul.linear_norm import LinearNormAttrs, product_operands
from centella.ops.matmul.mma import takes
from centella.ops.matmul.op import LINEAR
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.product import Constants, Product, Scalars, launch
from centella.ops.matmul.results import K, M
from centella.ops.matmul.row_norms import NormedRows
from centella.ops.norm import NORM
from centella.ops.ring import Ring
from centella.specs import Caps

WARPGROUP = 128  # threads
CONSUMERS = 2
ROWS = CONSUMERS * M  # of a tile
REGISTERS = (24, 240)  # of a producer's thread, of a consumer's
WIDEST = 384  # columns that fit the registers
DEPTH, STAGES = 32, 4  # of a stage; of the ring
PIECES = 2 * STAGES  # of B in the ring
CLUSTER = 2  # groups with neighbouring rows that have B copied for each other, half each
THREADS = (1 + CONSUMERS) * WARPGROUP  # of a group
LEFT_BYTES = 2 * DEPTH * ROWS  # of A in one stage
SIZES = ("m", "k", "lda", "ldb", "ldy", "ldr")


class RowsTile(Struct, frozen=True):
    """The columns of a group: all that there are."""

    columns: int

    @property
    def half(self) -> int:
        """Columns of one of a consumer's two fragments, and rows of a piece of B."""
        return self.columns // 2

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece of B."""
        return 2 * DEPTH * self.half

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of one consumer."""
        return 2 * M * self.columns

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: the ring, the residual or results, barriers."""
        ring = STAGES * LEFT_BYTES + PIECES * (self.piece_bytes + 16)
        return ring + CONSUMERS * (self.row_bytes + 16)


class _Shared:
    """What both roles see: sizes, rings, maps, barriers.

    A piece of B, half of its columns of a stage's depth, is a place of the ring by itself, so that
    it can be filled again while the other half is multiplied. A stage of A comes with the first
    piece of two, and is read when the second one is.
    """

    def __init__(self, tile: RowsTile, a: Any, b: Any, y: Any, residual: Any) -> None:
        self.tile = tile
        lang.ptx.cluster(CLUSTER)
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in SIZES}
        p = self.p
        self.left = lang.ptx.SharedTile(a.dtype, (STAGES, ROWS, DEPTH))
        self.right = lang.ptx.SharedTile(b.dtype, (PIECES, tile.half, DEPTH))
        self.rows = lang.ptx.SharedTile(y.dtype, (CONSUMERS, M, tile.columns))
        columns = lang.parameter("n", u32)
        self.map_a = lang.ptx.TensorMap(a, self.left, (p["k"], p["m"]), (p["lda"],))
        self.map_b = lang.ptx.TensorMap(b, self.right, (p["k"], columns), (p["ldb"],))
        self.map_y = lang.ptx.TensorMap(y, self.rows, (columns, p["m"]), (p["ldy"],))
        self.map_residual: Any = None
        if residual is not None:
            extents = (columns, p["m"])
            self.map_residual = lang.ptx.TensorMap(residual, self.rows, extents, (p["ldr"],))
        self.full, self.empty = lang.ptx.Barriers(PIECES), lang.ptx.Barriers(PIECES)
        self.come, self.gone = lang.ptx.Barriers(CONSUMERS), lang.ptx.Barriers(CONSUMERS)
        self.steps = (p["k"] + (DEPTH - 1)) // DEPTH
        with lang.if_(lang.local_id() == 0):
            for piece in range(PIECES):
                self.full.init(piece, 1)
                self.empty.init(piece, CLUSTER * CONSUMERS)
            for consumer in range(CONSUMERS):
                self.come.init(consumer, 1)
                self.gone.init(consumer, 1)
            lang.ptx.init_fence()
        self.meet(relaxed=True)

    def meet(self, *, relaxed: bool = False) -> None:
        """The threads of both groups meet."""
        lang.ptx.cluster_arrive(relaxed=relaxed)
        lang.ptx.cluster_wait()

    def tiles(self) -> Iterator[Any]:
        """The first rows of this group's tiles; past the last row there is nothing to copy."""
        counts = lang.group_id, lang.num_groups, lang.ptx.grid
        for number in lang.range(*(count() // CLUSTER for count in counts)):
            yield (number * CLUSTER + lang.ptx.cluster_rank()) * ROWS

    def release(self, piece: Any) -> None:
        """This thread's consumer has read a piece: whoever fills it, in either group, may."""
        self.empty.arrive(piece)
        for further in range(1, CLUSTER):
            self.empty.arrive(piece, (lang.ptx.cluster_rank() + further) % CLUSTER)


def _whole_rows(
    *, tile: RowsTile, kind: str, a: Argument, b: Argument, y: Argument, **extra: Argument
) -> None:
    shared = _Shared(tile, a, b, y, extra.get("residual"))
    fewer, more = REGISTERS
    with lang.ptx.role(0, WARPGROUP, registers=fewer), lang.if_(lang.local_id() == 0):
        _produce(shared)
    with lang.ptx.role(WARPGROUP, CONSUMERS * WARPGROUP, registers=more):
        _consume(shared, kind, extra)
    shared.meet()  # nobody leaves while the other still copies to it or tells it something


def _produce(shared: _Shared) -> None:
    """Have the tiles of all steps copied as places become free, and the residual among them.

    It is asked for once the ring is full: then nothing waits behind it, and the rows before it have
    mostly left.
    """
    tile, ring = shared.tile, Ring(PIECES)
    turn = lang.var(0, u32)
    filled = lang.minimum(shared.steps, STAGES) - 1
    for row in shared.tiles():
        for step in lang.range(shared.steps):
            first = ring.stage.get()
            for half in range(2):
                piece = ring.stage.get()
                shared.empty.wait(piece, ring.parity ^ 1)
                nbytes = tile.piece_bytes if half else tile.piece_bytes + LEFT_BYTES
                shared.full.expect(piece, nbytes)
                if half:  # both are free, and so is the stage of A
                    at = step * DEPTH, row
                    lang.ptx.tma_load(shared.map_a, at, first // 2, shared.full, first)
                at = step * DEPTH, half * tile.half
                with lang.if_(lang.ptx.cluster_rank() == half):  # for both groups
                    everyone = (1 << CLUSTER) - 1
                    lang.ptx.tma_load(shared.map_b, at, piece, shared.full, piece, everyone)
                ring.advance()
            if shared.map_residual is not None:
                with lang.if_(step == filled):
                    for mine in range(CONSUMERS):
                        _ask(shared, mine, row + mine * M, turn)
        turn.set(turn ^ 1)


def _ask(shared: _Shared, mine: int, row: Any, turn: Any) -> None:
    """Have a consumer's rows of the residual copied, once its last results have left."""
    shared.gone.wait(mine, turn)
    shared.come.expect(mine, shared.tile.row_bytes)
    lang.ptx.tma_load(shared.map_residual, (0, row), mine, shared.come, mine)


def _consume(shared: _Shared, kind: str, extra: dict[str, Any]) -> None:
    """Multiply what has arrived, tile by tile, and normalise each."""
    ring = Ring(PIECES)
    mine = lang.ptx.warpgroup() - 1
    turn = lang.var(0, u32)
    sums = [lang.ptx.Fragment(f32, (M, shared.tile.half)) for _ in range(2)]
    leader = lang.local_id() % WARPGROUP == 0
    rows = NormedRows(shared.rows, sums, mine, extra)
    for row in shared.tiles():
        last = _multiply(shared, ring, sums, mine, leader)
        lang.ptx.wgmma_wait(0)
        with lang.if_(leader):
            shared.release(last)
        if shared.map_residual is None:
            lang.ptx.warpgroup_barrier()  # behind which all know that the last results have left
        else:
            shared.come.wait(mine, turn)
            turn.set(turn ^ 1)
        rows.normalise(kind)
        lang.ptx.async_fence()
        lang.ptx.warpgroup_barrier()
        with lang.if_(leader):
            lang.ptx.tma_store(shared.map_y, (0, row + mine * M), mine)
            lang.ptx.tma_store_commit()
    with lang.if_(leader):
        lang.ptx.tma_store_wait(0)


def _multiply(shared: _Shared, ring: Ring, sums: list[Any], mine: Any, leader: Any) -> Any:
    """The steps of a tile; the last piece of B, whose products are still under way.

    In the second step, the tensor cores at work, the results of the tile before have left.
    """
    left, right = shared.left, shared.right
    before = lang.var(0, u32)  # the piece that is being read
    second = lang.minimum(shared.steps, 2) - 1
    for step in lang.range(shared.steps):
        for half, fragment in enumerate(sums):
            piece = ring.stage.get()
            shared.full.wait(piece, ring.parity)
            lang.ptx.wgmma_fence()
            for k in range(0, DEPTH, K):
                lang.ptx.wgmma(
                    fragment, left, left.start(mine * M, k, piece // 2),
                    right, right.start(0, k, piece), accumulate=step > 0 if k == 0 else True,
                )  # fmt: skip
            lang.ptx.wgmma_commit()
            if half:
                with lang.if_(leader & (step == second)):
                    lang.ptx.tma_store_wait(0)
                    if shared.map_residual is not None:
                        shared.gone.arrive(mine)
            lang.ptx.wgmma_wait(1)
            with lang.if_(leader & (step > 0)) if half == 0 else lang.if_(leader):
                shared.release(before)
            before.set(piece)
            ring.advance()
    return before


whole_rows: Kernel = Kernel(_whole_rows, workgroup=384, name="whole_rows")


# -- how it is launched ---------------------------------------------------------------------------

Whole = Form[LinearNormAttrs]


def product_of(form: Whole) -> Product:
    """The product with its operands; the norm's vectors are the last extras."""
    x, weight, *more = form.inputs
    problem = Problem.of_rows(rows_of(x), weight, rows_of(form.outputs[0]))
    renamed = {"bias": "shift"}
    vectors = [renamed.get(name, name) for name in form.attrs.norm.vectors]
    names = (*form.attrs.linear.extras, *vectors)
    extras = dict(zip(names, more, strict=True))
    pitch = rows_of(extras["residual"]).strides[0] if "residual" in extras else 0
    return Product(problem, (*form.inputs, form.outputs[0]), names, pitch)


def tile_of(form: Whole, caps: Caps) -> RowsTile | None:
    """The tile, where the sums of whole rows fit the registers and copies can reach all rows."""
    attrs, count = form.attrs.linear, product_operands(form.attrs, len(form.inputs))
    plain = not attrs.format and not attrs.activation and attrs.alpha == 1.0
    if not (caps.warpgroups and plain and {"bias", "residual"}.issuperset(attrs.extras)):
        return None
    kind = form.attrs.norm.kind
    # Squares need no mean first, so that too much is loaded at once: with a residual it spills.
    if kind != "layer" and (kind != "rms" or "residual" in attrs.extras):
        return None
    product = product_of(form)
    problem, y = product.problem, product.specs[-1]
    residual = product.specs[count - 1] if "residual" in attrs.extras else y  # the last extra
    vectors = [s for s in product.specs[2:-1] if len(s.shape) == 1]
    tile = RowsTile(problem.n)
    fits = (
        problem.n % PANEL == 0 and 0 < problem.n <= WIDEST and problem.k > 0 and problem.m > 0
        and takes(product.dtypes) and takes((y.dtype, residual.dtype))
        and product.whole and aligned(y, problem.ldy, 0)
        and aligned(residual, product.residual_pitch, 0)
        and all(takes((s.dtype, s.dtype)) and aligned(s, 0, 0) for s in vectors)
        and tile.shared_bytes <= caps.max_shared and caps.max_workgroup >= THREADS
    )  # fmt: skip
    return tile if fits else None


# Microseconds on an H100. Of a tile of 128 x 128: a step of 64, what else it takes with a residual.
# Of 128 columns of whole rows: such a step, what else. A launch of norms, and bytes a microsecond.
STEP, REST, WHOLE_STEP, NORMING, LAUNCH, MOVED = 0.344, 3.9, 0.48, 3.6, 2.0, 2.9e6


def preferred(form: Whole, caps: Caps) -> bool:
    """Where rows fill the multiprocessors: fewer are better cut along columns as well."""
    p = product_of(form).problem
    wide, steps = p.n / 128, p.k / 64
    rounds = math.ceil(p.m / (CLUSTER * ROWS) / (MULTIPROCESSORS // CLUSTER))
    whole = rounds * wide * (steps * WHOLE_STEP + NORMING)
    rounds = math.ceil(math.ceil(p.m / ROWS) * math.ceil(wide) / MULTIPROCESSORS)
    apart = rounds * (steps * STEP + REST)
    return whole <= apart + LAUNCH + 4 * p.m * p.n / MOVED


def _launches(form: Whole, tile: RowsTile, caps: Caps) -> Lowered:
    product = product_of(form)
    problem = product.problem
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("lda", problem.lda),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("ldr", product.residual_pitch),
        ("eps", form.attrs.norm.eps),
    )  # fmt: skip
    constants: Constants = (("kind", form.attrs.norm.kind), ("tile", tile))
    groups = CLUSTER * math.ceil(problem.m / (CLUSTER * ROWS))
    names = ("a", "b", *product.names)
    return Lowered((launch(whole_rows, product, names, scalars, constants, groups, THREADS),))


def _both(form: Whole, tile: bool, caps: Caps) -> Lowered:
    """The launches of `linear` and `norm`; the product lies between them as the result will."""
    attrs, total, (y,) = form.attrs, len(form.inputs), form.outputs
    count, between = product_operands(attrs, total), total + 1
    inner = Form(LINEAR, form.inputs[:count], (y,), attrs.linear).lower(caps)
    first = Lowered((), (y,)) + inner.within((*range(count), between), between + 1)
    norm = Form(NORM, (y, *form.inputs[count:]), (y,), attrs.norm).lower(caps)
    after = between + len(first.temporaries)
    return first + norm.within((between, *range(count, total), total), after)


WHOLE_ROWS: Variant[Whole, RowsTile] = Variant("whole_rows", tile_of, _launches, preferred)
APART: Variant[Whole, bool] = Variant("apart", lambda form, caps: True, _both)
ORDER: tuple[Variant[Whole, Any], ...] = (WHOLE_ROWS,)  # what one launch is better by


def lower(form: Whole, caps: Caps) -> Lowered:
    """The launches of the variant that is forced or chosen.

    Raises:
        LimitError: a forced kernel does not take it.
    """
    x, weight, *_ = form.inputs
    what = f"linear_norm: {list(x.shape)} by {list(weight.shape)}"
    return choose((*ORDER, APART), form, caps, form.attrs.variant, what).lower(form, caps)
