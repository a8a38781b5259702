"""The launches of a product: operands, sizes and constants, as each kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import f32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import LimitError
from centella.op.op import Lowered
from centella.ops.kernel_params import face
from centella.ops.layout import flat
from centella.ops.matmul import repack
from centella.ops.matmul.choice import (
    BUSY,
    choose,
    columns_of,
    depth_of,
    fits,
    mma_tile_of,
    skinny_tile_of,
    splits_of,
    thin_of,
    tile_of,
    wgmma_tile_of,
)
from centella.ops.matmul.columns import AHEAD, Columns, add_parts, columns
from centella.ops.matmul.mma import MmaTile, mma
from centella.ops.matmul.problem import Problem, aligned
from centella.ops.matmul.skinny import EIGHT, skinny
from centella.ops.matmul.thin import SUBGROUP, thin, together_of
from centella.ops.matmul.tiled import Tile, gemm
from centella.ops.matmul.wgmma import WgmmaTile, wgmma
from centella.specs import Caps, Spec, make_spec

Scalars = tuple[tuple[str, int | float], ...]
Constants = tuple[tuple[str, Any], ...]


class Product(Struct, frozen=True):
    """A problem with its operands: `specs` are a, b, the extras by `names`, y.

    A residual has no batches: `residual_pitch` is elements from one row of it to the next.
    """

    problem: Problem
    specs: tuple[Spec, ...]
    names: tuple[str, ...] = ()
    residual_pitch: int = 0
    activation: str = ""
    alpha: float = 1.0


def product_calls(op: str, product: Product, variant: str | None, caps: Caps) -> Lowered:
    """The launches that compute a product: one, or two where the depth is split.

    Where operands' rows do not start on 16 bytes, "wgmma" has them copied first, what is chosen for
    tensor cores where that pays; the default takes the place of "skinny_mma".

    Raises:
        LimitError: a forced variant cannot compute it on this device.
    """
    a, b = product.specs[0].dtype, product.specs[1].dtype
    problem = product.problem
    if problem.k == 0:  # nothing is summed; every read is of the first element
        problem = replace(problem, lda=0, ldb=0, sa=0, sb=0, a_along_k=True, b_along_k=True)
        product = replace(product, problem=problem)
    rows = _whole(product)
    whole = all(rows)
    chosen = variant or choose(problem, (a, b), caps, whole)
    if not fits(chosen, problem, (a, b), caps):
        what = f"[{problem.m}, {problem.k}] by [{problem.k}, {problem.n}]"
        raise LimitError(f"{op}: variant {chosen!r} does not fit {what} on {caps.target}")
    if chosen == "skinny_mma" and not whole:
        chosen = choose(problem, (a, b), caps, whole)
    if chosen in ("mma", "wgmma") and not whole and product.specs[-1].size:
        matrices = repack.matrices(problem, *product.specs[:2])
        copied = {i: m for i, m in enumerate(matrices) if not rows[i]}
        if variant == "wgmma" or (variant is None and repack.pays(problem, [*copied.values()])):
            return _repacked(op, product, copied, variant, caps)
    if chosen == "skinny_mma":
        return Lowered((_skinny_call(product, caps),))
    if chosen in ("gemv", "skinny"):
        return Lowered((_thin_call(product, caps),))
    if chosen == "columns":
        return _columns_calls(product, caps)
    if chosen == "wgmma" and whole and problem.k:
        return Lowered((_wgmma_call(product, caps),))
    if chosen in ("mma", "wgmma"):
        return Lowered((_mma_call(product, caps),))
    return _tiled_calls(product, chosen, caps)


def after_copies(copies: Lowered, places: Sequence[int], product: Lowered) -> Lowered:
    """Copies of operands, then the product; `places` of its operands, extras and result."""
    own = len(places) + len(copies.temporaries)
    where = (*places, *range(own, own + len(product.temporaries)))
    calls = (
        replace(c, tensors=tuple(Ref(where[r.index], r.spec) for r in c.tensors))
        for c in product.calls
    )
    return Lowered((*copies.calls, *calls), (*copies.temporaries, *product.temporaries))


def _repacked(
    op: str, product: Product, copied: dict[int, repack.Matrix], variant: str | None, caps: Caps
) -> Lowered:
    """Copies of operands to rows on 16 bytes, then the product of those."""
    own = len(product.specs)
    problem, copies, whole = repack.repacked(op, product.problem, copied, own, caps)
    specs = tuple(whole.get(i, spec) for i, spec in enumerate(product.specs))
    inner = product_calls(op, replace(product, problem=problem, specs=specs), variant, caps)
    where = {place: own + i for i, place in enumerate(whole)}
    places = [where.get(i, i) for i in range(own)]
    return after_copies(Lowered(copies, tuple(whole.values())), places, inner)


def _call(
    kernel: Kernel, product: Product, names: tuple[str, ...], scalars: Scalars,
    constants: Constants, groups: int, threads: int,
) -> Call:  # fmt: skip
    """A launch over a product's own operands."""
    form = face(dict.fromkeys(names, 1), {"y": 1})
    refs = tuple(Ref(i, flat(s)) for i, s in enumerate(product.specs[:-1]))
    y = Ref(len(refs), product.specs[-1])
    return Call(kernel, (*refs, y), scalars, constants, groups, workgroup=threads, face=form)


def _tiled_calls(product: Product, variant: str, caps: Caps) -> Lowered:
    """One launch; with few tiles a second, which adds the parts of a split depth."""
    problem, (a, b, *_) = product.problem, product.specs
    tile = tile_of(variant, min(a.dtype.itemsize, b.dtype.itemsize), caps)
    assert tile is not None, "the variant fits"
    splits = splits_of(problem, tile, caps)
    if splits == 1:
        return Lowered((_tiled_call(product, tile),))
    parts = make_spec((splits, problem.m, problem.n), f32, 16)
    depth, place = problem.k // splits, len(product.specs)
    inner = Product(
        replace(
            problem, batch=splits, k=depth, ldy=parts.strides[1], sy=parts.strides[0],
            sa=depth * (1 if problem.a_along_k else problem.lda),
            sb=depth * (1 if problem.b_along_k else problem.ldb),
        ),
        (a, b, parts),
    )  # fmt: skip
    first = _tiled_call(inner, tile)
    first = replace(first, tensors=(*first.tensors[:2], Ref(place, parts)))
    return Lowered((first, _add_call(product, parts, splits, place)), (parts,))


def _add_call(product: Product, parts: Spec, splits: int, place: int) -> Call:
    """The launch that adds the parts of a split depth, and ends the product."""
    problem, y = product.problem, product.specs[-1]
    words = -(-problem.n // y.dtype.per_word)
    items = words * problem.m * problem.batch
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("words", words), ("splits", splits),
        ("ldp", parts.strides[1]), ("sp", parts.strides[0]), ("ldy", problem.ldy),
        ("sy", problem.sy), ("items", items), ("alpha", product.alpha),
        ("ldr", product.residual_pitch),
    )  # fmt: skip
    names = product.names
    extras = (Ref(i, flat(product.specs[i])) for i in range(2, 2 + len(names)))
    refs = (Ref(place, flat(parts)), *extras, Ref(2 + len(names), y))
    form = face(dict.fromkeys(("parts", *names), 1), {"y": 1})
    constants: Constants = (("activation", product.activation),)
    return Call(add_parts, refs, scalars, constants, -(-items // add_parts.workgroup), face=form)


def _tiled_call(product: Product, tile: Tile) -> Call:
    problem, (a, b, *_), y = product.problem, product.specs, product.specs[-1]
    constants: Constants = (
        ("a_along_k", problem.a_along_k),
        ("activation", product.activation),
        ("b_along_k", problem.b_along_k),
        ("exact_k", problem.k % (tile.bk * tile.unroll) == 0 and problem.k > 0),
        ("tile", tile),
        ("vector_a", aligned(a, problem.lda, problem.sa)),
        ("vector_b", aligned(b, problem.ldb, problem.sb)),
        ("vector_y", aligned(y, problem.ldy, problem.sy)),
    )
    return _tiles_call(gemm, product, tile, constants)


def _whole(product: Product) -> tuple[bool, bool]:
    """Whether the rows of A, of B, start on 16 bytes."""
    problem, (a, b, *_) = product.problem, product.specs
    nothing = problem.k == 0  # is read
    return (
        nothing or aligned(a, problem.lda, problem.sa),
        nothing or aligned(b, problem.ldb, problem.sb),
    )


def _rows_whole(product: Product) -> bool:
    """Whether the rows of C start on 16 bytes."""
    return aligned(product.specs[-1], product.problem.ldy, product.problem.sy)


def _in_words(product: Product) -> tuple[str, ...]:
    """The operands of the epilogue whose columns may be loaded two at a time."""
    if product.problem.n % 2:
        return ()
    extras = zip(product.names, product.specs[2:-1], strict=True)
    pitches = {"residual": product.residual_pitch}
    return tuple(n for n, s in extras if aligned(s, pitches.get(n, 0), 0))


def _wgmma_call(product: Product, caps: Caps) -> Call:
    problem, (a, b, *_), y = product.problem, product.specs, product.specs[-1]
    tile = wgmma_tile_of(problem, (a.dtype, b.dtype), caps)
    assert tile is not None, "the variant fits"
    # With both, addresses in shared memory are what the registers have no room for.
    light = not (product.activation and "residual" in product.names)
    constants: Constants = (
        ("a_along_k", problem.a_along_k),
        ("activation", product.activation),
        ("b_along_k", problem.b_along_k),
        ("staged", tile.staged > 0 and y.dtype.itemsize == 2 and _rows_whole(product) and light),
        ("tile", tile),
        ("words", _in_words(product)),
    )
    batches = (  # of what is repeated there is one
        ("batches", problem.batch),
        ("batches_a", problem.batch if problem.sa else 1),
        ("batches_b", problem.batch if problem.sb else 1),
    )
    return _tiles_call(wgmma, product, tile, constants, batches)


def _mma_call(product: Product, caps: Caps) -> Call:
    problem, (a, b, *_) = product.problem, product.specs
    vector_a, vector_b = _whole(product)
    tile = mma_tile_of((a.dtype, b.dtype), caps, vector_a and vector_b)
    assert tile is not None, "the variant fits"
    constants: Constants = (
        ("a_along_k", problem.a_along_k),
        ("activation", product.activation),
        ("b_along_k", problem.b_along_k),
        ("tile", tile),
        ("vector_a", vector_a),
        ("vector_b", vector_b),
    )
    return _tiles_call(mma, product, tile, constants)


def _tiles_call(
    kernel: Kernel, product: Product, tile: Tile | MmaTile | WgmmaTile, constants: Constants,
    more: Scalars = (),
) -> Call:  # fmt: skip
    """A group for each tile of C."""
    problem = product.problem
    cluster = tile.cluster if isinstance(tile, WgmmaTile) else 1  # groups above each other
    tiles_m, tiles_n = -(-problem.m // (cluster * tile.bm)), -(-problem.n // tile.bn)
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("lda", problem.lda),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("sa", problem.sa), ("sb", problem.sb),
        ("sy", problem.sy), ("tiles_m", tiles_m), ("tiles_n", tiles_n),
        ("alpha", product.alpha), ("ldr", product.residual_pitch), *more,
    )  # fmt: skip
    names = ("a", "b", *product.names)
    groups = cluster * tiles_m * tiles_n * problem.batch
    return _call(kernel, product, names, scalars, constants, groups, tile.threads)


def _rows_of_a(problem: Problem) -> tuple[int, int, int]:
    """Strides of A along m and k, and between batches; 0 along a dimension of one element."""
    along = problem.a_along_k
    row, step = (problem.lda, 1) if along else (1, problem.lda)
    return row * (problem.m > 1), step, problem.sa * (problem.batch > 1)


def _batch_of_b(problem: Problem) -> int:
    return problem.sb * (problem.batch > 1)


def _thin_call(product: Product, caps: Caps) -> Call:
    problem, (x, w, *_) = product.problem, product.specs
    tile = thin_of(problem, (x.dtype, w.dtype), caps)
    row, step, batch = _rows_of_a(problem)
    groups = -(-problem.n // tile.outputs)
    width = max(x.dtype.per_chunk, w.dtype.per_chunk)
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("rowx", row), ("stepx", step),
        ("ldw", problem.ldb), ("ldy", problem.ldy), ("sx", batch), ("sw", problem.sb),
        ("sy", problem.sy), ("groups", groups), ("alpha", product.alpha),
        ("ldr", product.residual_pitch),
    )  # fmt: skip
    # For more rows shared memory is quicker: it adds up each value once.
    shuffle = caps.shuffles and tile.threads % SUBGROUP == 0 and tile.m <= 2
    constants = (
        ("activation", product.activation),
        ("dense_x", step == 1),
        ("depth", depth_of(tile, problem.k, width)),
        ("shuffle", shuffle),
        ("tile", tile),
        ("together", together_of(tile, x.dtype, w.dtype) if caps.sm >= 80 else 0),
        ("vector_w", aligned(w, problem.ldb * (problem.n > 1), _batch_of_b(problem))),
        ("vector_x", step == 1 and problem.a_along_k and aligned(x, row, batch)),
    )
    names = ("x", "w", *product.names)
    many = groups * problem.batch if problem.m else 0
    return _call(thin, product, names, scalars, constants, many, tile.threads)


def _skinny_call(product: Product, caps: Caps) -> Call:
    problem, (x, w, *_) = product.problem, product.specs
    tile = skinny_tile_of(problem, (x.dtype, w.dtype), caps)
    assert tile is not None, "the variant fits"
    row, _, batch = _rows_of_a(problem)
    groups = -(-problem.n // tile.outputs)
    block = tile.block(w.dtype)
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("rowx", row), ("ldw", problem.ldb),
        ("ldy", problem.ldy), ("sx", batch), ("sw", _batch_of_b(problem)), ("sy", problem.sy),
        ("groups", groups), ("alpha", product.alpha), ("ldr", product.residual_pitch),
    )  # fmt: skip
    depth = "masked" if problem.k < block else "both" if problem.k % block else "whole"
    constants: Constants = (
        ("activation", product.activation),
        ("depth", depth),
        ("tile", tile),
        ("whole", depth != "whole" and problem.k % EIGHT == 0),
    )
    names = ("x", "w", *product.names)
    many = groups * problem.batch
    return _call(skinny, product, names, scalars, constants, many, tile.threads)


def _columns_calls(product: Product, caps: Caps) -> Lowered:
    """One launch; with few columns a second, which adds the parts of a split depth."""
    problem, (a, b, y) = product.problem, product.specs
    tile = columns_of(problem, caps)
    across = -(-problem.n // (tile.across * b.dtype.per_chunk))
    few = max(across * problem.batch, 1)
    part = -(-problem.k // max(1, min(BUSY // few, problem.k // tile.least)))
    part = max(-(-part // tile.depth), 1) * tile.depth
    splits = max(-(-problem.k // part), 1)
    if splits == 1 or not y.size:
        return Lowered((_columns_call(product, tile, 1, part),))
    parts = make_spec((problem.batch * splits, problem.m, problem.n), f32, 16)
    inner = replace(
        product, specs=(a, b, parts), alpha=1.0,
        problem=replace(problem, ldy=parts.strides[1], sy=parts.strides[0]),
    )  # fmt: skip
    first = _columns_call(inner, tile, splits, part)
    first = replace(first, tensors=(*first.tensors[:2], Ref(3, parts)))
    return Lowered((first, _add_call(product, parts, splits, 3)), (parts,))


def _columns_call(product: Product, tile: Columns, splits: int, part: int) -> Call:
    problem, (a, b, _) = product.problem, product.specs
    row, step, batch = _rows_of_a(problem)
    groups = -(-problem.n // (tile.across * b.dtype.per_chunk))
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("k", problem.k), ("rowa", row), ("stepa", step),
        ("ldb", problem.ldb), ("ldy", problem.ldy), ("sa", batch), ("sb", problem.sb),
        ("sy", problem.sy), ("groups", max(groups, 1)), ("splits", splits), ("part", part),
        ("alpha", product.alpha),
    )  # fmt: skip
    constants = (
        ("exact_k", problem.k % AHEAD == 0 and problem.k > 0),
        ("tile", tile),
        ("vector_a", step == 1 and problem.a_along_k and aligned(a, row, batch)),
        ("vector_b", aligned(b, problem.ldb * (problem.k > 1), _batch_of_b(problem))),
    )
    many = groups * splits * problem.batch if problem.m else 0
    return _call(columns, product, ("a", "b"), scalars, constants, many, tile.threads)
