"""The product by warpgroups whose tiles are whole rows, normalised where they lie: sm_90a alone.

A group has 128 rows of all columns, at most 384: two consumers, each with 64 rows as two fragments
of sums, 192 registers a thread. So four lanes have a row, and its statistics are sums in registers
and two shuffles. The producer fills a ring with A and B as that of `wgmma.py`, and besides has the
residual's rows copied to the place where the results will lie, while the tile is multiplied: what
is read there is overwritten by the same warp, and leaves by a copy of whole boxes while the next
tile is multiplied.

Rows of A, B, residual and results start on 16 bytes; columns are a multiple of 64.
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
from centella.ops.layout import rows_of
from centella.ops.matmul.linear_norm import LinearNormAttrs, product_operands
from centella.ops.matmul.mma import takes
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.product import Constants, Product, Scalars, launch
from centella.ops.matmul.results import K, M
from centella.ops.matmul.row_norms import NormedRows
from centella.ops.matmul.table import MULTIPROCESSORS
from centella.ops.ring import Ring
from centella.specs import Caps

WARPGROUP = 128  # threads
CONSUMERS = 2
ROWS = CONSUMERS * M  # of a tile
REGISTERS = (24, 240)  # of a producer's thread, of a consumer's
WIDEST, PANEL = 384, 64  # columns: that fit the registers; that a copied box has
SIZES = ("m", "k", "lda", "ldb", "ldy", "ldr")


class RowsTile(Struct, frozen=True):
    """How a group works: columns, all that there are; depth of a stage; stages of the ring."""

    columns: int
    bk: int = 32
    stages: int = 4

    @property
    def threads(self) -> int:
        """Threads of a group."""
        return (1 + CONSUMERS) * WARPGROUP

    @property
    def half(self) -> int:
        """Columns of one of a consumer's two fragments."""
        return self.columns // 2

    @property
    def stage_bytes(self) -> int:
        """Bytes of both operands in one stage."""
        return 2 * self.bk * (ROWS + self.columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of one consumer."""
        return 2 * M * self.columns

    @property
    def shared_bytes(self) -> int:
        """Workgroup memory: the ring, the residual or results, barriers."""
        return self.stages * (self.stage_bytes + 16) + CONSUMERS * (self.row_bytes + 16)


class _Shared:
    """What both roles see: sizes, rings, maps, barriers."""

    def __init__(self, tile: RowsTile, a: Any, b: Any, y: Any, residual: Any) -> None:
        self.tile = tile
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in SIZES}
        p, half = self.p, tile.half
        self.left = lang.ptx.SharedTile(a.dtype, (tile.stages, ROWS, tile.bk))
        self.right = lang.ptx.SharedTile(b.dtype, (2 * tile.stages, half, tile.bk))
        self.rows = lang.ptx.SharedTile(y.dtype, (CONSUMERS, M, tile.columns))
        columns = lang.parameter("n", u32)
        self.map_a = lang.ptx.TensorMap(a, self.left, (p["k"], p["m"]), (p["lda"],))
        self.map_b = lang.ptx.TensorMap(b, self.right, (p["k"], columns), (p["ldb"],))
        self.map_y = lang.ptx.TensorMap(y, self.rows, (columns, p["m"]), (p["ldy"],))
        self.map_residual: Any = None
        if residual is not None:
            extents = (columns, p["m"])
            self.map_residual = lang.ptx.TensorMap(residual, self.rows, extents, (p["ldr"],))
        self.full, self.empty = lang.ptx.Barriers(tile.stages), lang.ptx.Barriers(tile.stages)
        self.come, self.gone = lang.ptx.Barriers(CONSUMERS), lang.ptx.Barriers(CONSUMERS)
        self.steps = (p["k"] + (tile.bk - 1)) // tile.bk
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, 1)
                self.empty.init(stage, CONSUMERS)
            for consumer in range(CONSUMERS):
                self.come.init(consumer, 1)
                self.gone.init(consumer, 1)
            lang.ptx.init_fence()
        lang.barrier()

    def tiles(self) -> Iterator[Any]:
        """The numbers of this group's tiles, each of `ROWS` rows."""
        yield from lang.range(lang.group_id(), lang.num_groups(), lang.ptx.grid())


def _whole_rows(
    *, tile: RowsTile, kind: str, words: tuple[str, ...], a: Argument, b: Argument, y: Argument,
    **extra: Argument,
) -> None:  # fmt: skip
    shared = _Shared(tile, a, b, y, extra.get("residual"))
    fewer, more = REGISTERS
    with lang.ptx.role(0, WARPGROUP, registers=fewer), lang.if_(lang.local_id() == 0):
        _produce(shared)
    with lang.ptx.role(WARPGROUP, CONSUMERS * WARPGROUP, registers=more):
        _consume(shared, kind, extra, words)


def _produce(shared: _Shared) -> None:
    """Have the tiles of all steps copied as stages become free, and the residual among them.

    It is asked for once the ring is full: then nothing waits behind it, and the rows before it have
    mostly left.
    """
    tile, ring = shared.tile, Ring(shared.tile.stages)
    turn = lang.var(0, u32)
    filled = lang.minimum(shared.steps, tile.stages) - 1
    for number in shared.tiles():
        row = number * ROWS
        for step in lang.range(shared.steps):
            stage, k = ring.stage.get(), step * tile.bk
            shared.empty.wait(stage, ring.parity ^ 1)
            shared.full.expect(stage, tile.stage_bytes)
            lang.ptx.tma_load(shared.map_a, (k, row), stage, shared.full, stage)
            for half in range(2):
                at = (k, half * tile.half)
                lang.ptx.tma_load(shared.map_b, at, stage * 2 + half, shared.full, stage)
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


def _consume(shared: _Shared, kind: str, extra: dict[str, Any], words: tuple[str, ...]) -> None:
    """Multiply what has arrived, tile by tile, and normalise each."""
    tile, ring = shared.tile, Ring(shared.tile.stages)
    mine = lang.ptx.warpgroup() - 1
    turn = lang.var(0, u32)
    sums = [lang.ptx.Fragment(f32, (M, tile.half)) for _ in range(2)]
    leader = lang.local_id() % WARPGROUP == 0
    rows = NormedRows(shared.rows, sums, mine, extra, words)
    for number in shared.tiles():
        last = _multiply(shared, ring, sums, mine, leader)
        lang.ptx.wgmma_wait(0)
        with lang.if_(leader):
            shared.empty.arrive(last)
        if shared.map_residual is None:
            lang.ptx.warpgroup_barrier()  # behind which all know that the last results have left
        else:
            shared.come.wait(mine, turn)
            turn.set(turn ^ 1)
        rows.normalise(kind)
        lang.ptx.async_fence()
        lang.ptx.warpgroup_barrier()
        with lang.if_(leader):
            lang.ptx.tma_store(shared.map_y, (0, number * ROWS + mine * M), mine)
            lang.ptx.tma_store_commit()
    with lang.if_(leader):
        lang.ptx.tma_store_wait(0)


def _multiply(shared: _Shared, ring: Ring, sums: list[Any], mine: Any, leader: Any) -> Any:
    """The steps of a tile; the stage of the last one, whose products are still under way.

    In the second step, the tensor cores at work, the results of the tile before have left.
    """
    left, right = shared.left, shared.right
    before = lang.var(0, u32)  # the stage that is being read
    second = lang.minimum(shared.steps, 2) - 1
    for step in lang.range(shared.steps):
        stage = ring.stage.get()
        shared.full.wait(stage, ring.parity)
        lang.ptx.wgmma_fence()
        for k in range(0, shared.tile.bk, K):
            for half, fragment in enumerate(sums):
                lang.ptx.wgmma(
                    fragment, left, left.start(mine * M, k, stage),
                    right, right.start(0, k, stage * 2 + half),
                    accumulate=step > 0 if k == 0 else True,
                )  # fmt: skip
        lang.ptx.wgmma_commit()
        with lang.if_(leader & (step == second)):
            lang.ptx.tma_store_wait(0)
            if shared.map_residual is not None:
                shared.gone.arrive(mine)
        lang.ptx.wgmma_wait(1)
        with lang.if_(leader & (step > 0)):
            shared.empty.arrive(before)
        before.set(stage)
        ring.advance()
    return before


whole_rows: Kernel = Kernel(_whole_rows, workgroup=384, name="whole_rows")


# -- how it is launched ---------------------------------------------------------------------------

Whole = Form[LinearNormAttrs]


def product_of(form: Whole) -> Product:
    """The product with its operands; the norm's vectors are the last extras."""
    x, weight, *more = form.inputs
    y, rows = rows_of(form.outputs[0]), rows_of(x)
    problem = Problem(
        batch=1, m=y.shape[0], n=y.shape[1], k=rows.shape[1],
        lda=rows.strides[0], ldb=weight.strides[0], ldy=y.strides[0],
        sa=0, sb=0, sy=0, a_along_k=True, b_along_k=True,
    )  # fmt: skip
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
    tile = RowsTile(problem.n)
    fits = (
        problem.n % PANEL == 0 and 0 < problem.n <= WIDEST and problem.k > 0 and problem.m > 0
        and takes(product.dtypes) and takes((y.dtype, residual.dtype))
        and product.whole and aligned(y, problem.ldy, 0)
        and aligned(residual, product.residual_pitch, 0)
        and tile.shared_bytes <= caps.max_shared and tile.threads <= caps.max_workgroup
    )  # fmt: skip
    return tile if fits else None


# Microseconds on an H200: a step of 64 of a tile of 128 x 128, what else such a tile takes; what
# norms of whole rows take beside a tile's products; a launch of norms, and bytes it moves in one.
STEP, REST, NORMING, LAUNCH, MOVED = 0.33, 0.7, 2.0, 2.0, 3.8e6


def preferred(form: Whole, caps: Caps) -> bool:
    """Where rows fill the multiprocessors: fewer are better cut along columns as well."""
    p = product_of(form).problem
    tiles, across = math.ceil(p.m / ROWS), math.ceil(p.n / 128)
    one = p.k / 64 * STEP
    whole = math.ceil(tiles / MULTIPROCESSORS) * (one * p.n / 128 + NORMING)
    apart = math.ceil(tiles * across / MULTIPROCESSORS) * (one + REST)
    return whole <= apart + LAUNCH + 4 * p.m * p.n / MOVED


def _launches(form: Whole, tile: RowsTile, caps: Caps) -> Lowered:
    product = product_of(form)
    problem = product.problem
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("lda", problem.lda),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("ldr", product.residual_pitch),
        ("eps", form.attrs.norm.eps),
    )  # fmt: skip
    extras = zip(product.names, product.specs[2:-1], strict=True)
    words = tuple(n for n, s in extras if n != "residual" and aligned(s, 0, 0))
    constants: Constants = (("kind", form.attrs.norm.kind), ("tile", tile), ("words", words))
    groups, names = math.ceil(problem.m / ROWS), ("a", "b", *product.names)
    return Lowered((launch(whole_rows, product, names, scalars, constants, groups, tile.threads),))


WHOLE_ROWS: Variant[Whole, RowsTile] = Variant("whole_rows", tile_of, _launches, preferred)
ORDER: tuple[Variant[Whole, Any], ...] = (WHOLE_ROWS,)


def lower(form: Whole, caps: Caps) -> Lowered:
    """The launch.

    Raises:
        LimitError: a forced kernel does not take it, or none prefers it.
    """
    x, weight, *_ = form.inputs
    what = f"linear_norm: {list(x.shape)} by {list(weight.shape)}"
    return choose(ORDER, form, caps, form.attrs.variant, what).lower(form, caps)
