"""What ops choose, tested without a device: tiles, chunks or words, launches, bindings."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from centella.check.cases.case import OWN, Case, In
from centella.check.cases.fits import variant_fits
from centella.check.cases.table import TABLE
from centella.dtypes import DType, bf16, dtype_of, f16, f32, i8, u8
from centella.emit.program import Call
from centella.op import op, variant
from centella.ops.attention import table as attention_table
from centella.ops.matmul import table
from centella.ops.matmul.choice import ORDER
from centella.ops.matmul.columns import columns_of
from centella.ops.matmul.mma import MMA_TILES, mma_tile_of
from centella.ops.matmul.problem import VARIANTS, Problem
from centella.ops.matmul.product import Product
from centella.ops.matmul.skinny import skinny_tile_of
from centella.ops.matmul.sums import SHARED_WORDS
from centella.ops.matmul.table import TILES
from centella.ops.matmul.thin import depth_of, thin_of
from centella.ops.matmul.tiled import splits_of, tile_of
from centella.ops.matmul.wgmma_tiles import wgmma_tile_of
from centella.specs import Caps, Shape, Spec, make_spec, rows_aligned
from tests.support.launched import op_form

MINIMUM = Caps("wgsl", max_shared=16 << 10, max_workgroup=256, max_storage_buffers=8)
LARGE = Caps("wgsl", max_shared=48 << 10, max_workgroup=1024, max_storage_buffers=32)
ADAPTERS = (
    Caps("ptx", max_workgroup=1024, max_shared=48 << 10, arch="sm_90a", family="nvidia"),
    *(Caps("wgsl", family=f) for f in ("nvidia", "software", "amd")),
)
SIZES = (1, 2, 31, 64, 65, 384, 1000, 4096)


def problem(m: int, n: int, k: int, batch: int = 1) -> Problem:
    return Problem(batch, m, n, k, k, k, n, m * k, 0, m * n, True, True)


Dtypes = tuple[DType, DType]


def product(whole: Problem, dtypes: Dtypes, aligned: bool = True) -> Product:
    """A problem with operands whose rows start on 16 bytes, or do not."""
    pitched = replace(whole, lda=-(-whole.lda // 16) * 16, ldb=-(-whole.ldb // 16) * 16, sa=0)
    specs = tuple(Spec((1, 1), d, (1, 1), aligned) for d in (*dtypes, dtypes[0]))
    return Product(pitched, specs)


def choose(whole: Problem, dtypes: Dtypes, caps: Caps, aligned: bool = True) -> str:
    """The name of the variant for a problem."""
    return variant.choose(ORDER, product(whole, dtypes, aligned), caps, None, "").name


def fits(name: str, whole: Problem, dtypes: Dtypes, caps: Caps) -> bool:
    """Whether a variant can compute a problem."""
    (named,) = (v for v in ORDER if v.name == name)
    return named.fits(product(whole, dtypes), caps)


def spec(*shape: int, dtype: DType = f32) -> Spec:
    """As a device lays it out."""
    return make_spec(shape, dtype, 16)


def view(shape: Shape, strides: Shape, dtype: DType = f32, offset: int = 0) -> Spec:
    """As a slice or transpose lies."""
    return Spec(shape, dtype, strides, rows_aligned(shape, strides, dtype.itemsize, offset))


def calls(name: str, *inputs: Spec, **attrs: Any) -> tuple[Call, ...]:
    declared = op.get(name)
    outs = tuple(spec(*s, dtype=d) for s, d in declared.rule(inputs, declared.attrs(**attrs)))
    return op_form(declared, inputs, outs, attrs).lower(MINIMUM).calls


def constants(name: str, *inputs: Spec, **attrs: Any) -> dict[str, Any]:
    (call,) = calls(name, *inputs, **attrs)
    return dict(call.constants)


def test_names_of_variants_are_those_of_kernels() -> None:
    assert tuple(v for v in VARIANTS if v in TILES) == tuple(TILES)
    assert {v.name for v in ORDER} == set(VARIANTS)


# -- tiles ----------------------------------------------------------------------------------------


DTYPES = [(f32, f32), (f16, f16), (f32, i8)]


@pytest.mark.parametrize("caps", [MINIMUM, LARGE], ids=["minimum", "large"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_the_chosen_kernel_fits(caps: Caps, dtypes: tuple[DType, DType]) -> None:
    for m in SIZES:
        for n in SIZES:
            for whole in (problem(m, n, 384), replace(problem(m, n, 384), b_along_k=False)):
                name = choose(whole, dtypes, caps)
                assert name in VARIANTS and fits(name, whole, dtypes, caps)
                if name in TILES:
                    tile = tile_of(name, min(d.itemsize for d in dtypes), caps)
                    assert tile is not None
                    assert tile.shared_bytes <= caps.max_shared
                    assert tile.threads <= caps.max_workgroup


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_large_products_get_large_tiles_and_small_ones_enough_groups(dtypes: Any) -> None:
    assert choose(problem(4096, 4096, 4096), dtypes, LARGE) == "large"
    assert choose(problem(17, 4096, 384), dtypes, LARGE) == "small"
    few, many = problem(512, 512, 64), problem(512, 512, 64, batch=64)
    assert choose(few, dtypes, LARGE) != "large"
    assert choose(many, dtypes, LARGE) == "large"


def test_few_rows_get_a_thin_kernel() -> None:
    assert choose(problem(1, 4096, 4096), (f32, f16), MINIMUM) == "gemv"
    assert choose(problem(0, 5, 7), (f32, f32), MINIMUM) == "gemv"
    for m in (2, 3, 8, 16):
        assert choose(problem(m, 4096, 4096), (f16, i8), MINIMUM) == "skinny"
    for m in (1, 16):
        across = replace(problem(m, 4096, 4096), b_along_k=False)
        assert choose(across, (f16, f16), MINIMUM) == "columns"
        assert not fits("gemv", across, (f16, f16), MINIMUM)
        assert not fits("skinny", across, (f16, f16), MINIMUM)
    assert not fits("gemv", problem(2, 5, 7), (f32, f32), LARGE)
    assert not fits("skinny", problem(17, 5, 7), (f32, f32), LARGE)
    assert not fits("columns", problem(2, 5, 7), (f32, f32), LARGE)


SMALL = tuple(replace(MINIMUM, max_workgroup=n, family=f"of {n} threads") for n in (64, 128, 256))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("caps", [*ADAPTERS, *SMALL], ids=lambda c: f"{c.target}-{c.family}")
def test_thin_groups_divide_among_their_teams(caps: Caps, dtypes: Any) -> None:
    for m in (1, 2, 3, 4, 5, 8, 9, 16):
        for n in (1, 127, 128, 2048, 2049, 1 << 18):
            for k in (0, 1, 64, 384, 1000, 1536, 4096, 20_000):
                thin = thin_of(problem(m, n, k), dtypes, caps)
                steps = -(-k // max(d.per_chunk for d in dtypes))
                assert thin.m >= m and thin.threads <= min(128, caps.max_workgroup)
                assert thin.threads % thin.lanes == 0 and thin.lanes <= max(steps, 8)
                assert thin.outputs % 2 == 0  # words of 16-bit results
                assert thin.threads * thin.outs <= SHARED_WORDS
                columns = columns_of(problem(m, n, k), caps)
                assert columns.m >= m and columns.threads <= caps.max_workgroup


def test_thin_groups_are_those_of_the_table() -> None:
    def of(
        caps: Caps, m: int, n: int, x: DType = f32, w: DType = f32, batch: int = 1
    ) -> tuple[int, int, int]:
        thin = thin_of(problem(m, n, 4096, batch), (x, w), caps)
        return thin.lanes, thin.outs, thin.unroll

    cuda, nvidia, software = ADAPTERS[:3]
    assert [of(cuda, m, 4096) for m in (3, 8, 16)] == [(64, 4, 1), (128, 2, 2), (64, 4, 1)]
    assert [of(nvidia, m, 4096) for m in (3, 8, 16)] == [(64, 4, 1), (64, 4, 2), (32, 4, 2)]
    assert [of(nvidia, m, 4096, f16, f16) for m in (3, 16)] == [(64, 4, 2), (32, 4, 1)]
    for few in (of(nvidia, 16, 2048), of(nvidia, 16, 1024, batch=2)):  # outputs of all batches
        assert few == (64, 2, 1)
    assert of(nvidia, 16, 1025, batch=2) == (32, 4, 2)
    assert of(cuda, 4, 2048) == (128, 2, 2)
    assert of(nvidia, 16, 4096, f32, i8) == of(MINIMUM, 16, 4096, f32, i8) == (32, 4, 1)
    assert [of(software, m, 4096) for m in (1, 16)] == [(8, 8, 1)] * 2
    # A group has 64 outputs then: of fewer its other teams would compute the last again.
    assert of(software, 16, 127) == of(software, 16, 4096, f32, i8) == (32, 4, 1)


def test_thin_groups_walk_whole_steps_where_they_can() -> None:
    def of(m: int, k: int, dtype: DType = f16) -> tuple[int, int, str]:
        thin = thin_of(problem(m, 4096, k), (dtype, dtype), MINIMUM)
        return thin.lanes, thin.unroll, depth_of(thin, k, dtype.per_chunk)

    assert [of(1, k) for k in (4096, 14336, 1536, 4864, 2560, 9728)] == [
        (128, 4, "once"), (128, 2, "whole"), (64, 3, "once"), (128, 4, "both"), (64, 1, "whole"),
        (128, 1, "both"),
    ]  # fmt: skip
    assert [of(1, k, f32) for k in (384, 31, 1, 0)] == [
        (32, 3, "once"), (8, 1, "masked"), (8, 1, "masked"), (8, 1, "masked"),
    ]  # fmt: skip
    assert [of(m, 4096) for m in (4, 16)] == [(32, 2, "whole"), (32, 1, "whole")]
    assert [of(m, 4097) for m in (4, 16)] == [(32, 2, "both"), (32, 1, "masked")]


def test_a_depth_is_split_where_columns_are_few() -> None:
    def of(m: int, k: int, n: int) -> list[tuple[str, int]]:
        return [(c.kernel.name, c.groups) for c in calls("matmul", spec(m, k), spec(k, n))]

    assert of(1, 4096, 32768) == [("columns", 256)]
    assert of(1, 4096, 128) == [("columns", 16), ("add_parts", 1)]
    assert of(1, 100, 128) == [("columns", 1)]
    assert of(16, 4096, 4096) == [("columns", 256), ("add_parts", 256)]
    assert of(0, 4096, 128) == [("columns", 0)]


def test_thin_products_read_chunks_where_rows_are_aligned() -> None:
    plain = constants("linear", spec(1, 4096), spec(70, 4096), extras=(), activation="")
    assert plain["vector_x"] and plain["vector_w"] and not plain["shuffle"]
    rest = constants("linear", spec(4095), spec(70, 4095, dtype=i8), spec(70), activation="",
                     extras=("scale",))  # fmt: skip
    assert rest["vector_x"] and rest["vector_w"]
    odd = constants("linear", view((2, 32), (33, 1)), view((70, 32), (40, 1), offset=1), extras=(),
                    activation="")  # fmt: skip
    assert not odd["vector_x"] and not odd["vector_w"] and odd["dense_x"]
    turned = constants("matmul", view((3, 64), (1, 3)), view((64, 9), (1, 64)))
    assert not turned["vector_x"] and turned["vector_w"] and not turned["dense_x"]


def test_a_device_of_few_threads_or_little_memory_gets_a_smaller_tile() -> None:
    whole = problem(4096, 4096, 4096)
    assert choose(whole, (f16, f16), LARGE) == "large"
    assert choose(whole, (f16, f16), MINIMUM) == "medium"  # 16-bit tiles are deeper: 32 KB
    assert choose(whole, (f32, f32), replace(LARGE, max_workgroup=64)) == "small"
    assert choose(whole, (f32, f32), replace(LARGE, max_shared=8 << 10)) == "small"
    assert all(tile_of("small", item, MINIMUM) is not None for item in (4, 2, 1))


@pytest.mark.parametrize("variant", TILES)
def test_tiles_divide_among_their_threads(variant: str) -> None:
    for itemsize in (4, 2):
        tile = tile_of(variant, itemsize, LARGE)
        assert tile is not None
        for side in (tile.bm, tile.bn):
            assert side * tile.bk % (16 // itemsize * tile.threads) == 0


def test_products_read_chunks_where_rows_are_aligned() -> None:
    plain = constants("matmul", spec(64, 33), spec(33, 64))
    assert plain["vector_a"] and plain["vector_b"] and plain["vector_y"]
    assert (plain["a_along_k"], plain["b_along_k"]) == (True, False)
    turned = constants("matmul", view((64, 32), (1, 64)), view((32, 64), (1, 32)))
    assert (turned["a_along_k"], turned["b_along_k"]) == (False, True)
    odd = constants("matmul", view((64, 32), (33, 1)), view((32, 64), (64, 1), offset=1))
    assert not odd["vector_a"] and not odd["vector_b"] and odd["vector_y"]
    assert not constants("matmul", spec(64, 32), spec(32, 3))["vector_y"]


def test_a_batch_of_no_single_stride_is_copied_first() -> None:
    a, b = spec(2, 1, 5, 8), spec(3, 8, 4)
    assert [c.kernel.name for c in calls("matmul", a, b)] == ["copy", "copy", "columns"]
    assert [c.kernel.name for c in calls("matmul", a, spec(2, 3, 8, 4))] == ["copy", "columns"]
    assert len(calls("matmul", spec(1, 5, 8), b)) == 1
    assert len(calls("matmul", spec(5, 8), b)) == 1
    assert len(calls("matmul", spec(2, 3, 5, 8), spec(2, 3, 8, 4))) == 1


def test_tensor_cores_take_16_bit_floats_where_there_are_some() -> None:
    whole = problem(4096, 4096, 4096)
    cuda = {arch: Caps("ptx", max_shared=99 << 10, max_workgroup=1024, arch=arch)
            for arch in ("sm_75", "sm_80", "sm_90a", "sm_120")}  # fmt: skip
    for arch, caps in cuda.items():
        for dtypes in ((f16, f16), (bf16, bf16)):
            assert fits("mma", whole, dtypes, caps) == (arch != "sm_75")
            assert choose(whole, dtypes, caps) == ("large" if arch == "sm_75" else "mma")
        for dtypes in ((f32, f32), (f16, bf16), (f16, i8)):
            assert not fits("mma", whole, dtypes, caps)
    assert not fits("mma", whole, (f16, f16), LARGE)
    caps = cuda["sm_90a"]
    assert mma_tile_of((f16, f16), caps) == MMA_TILES[0]
    assert mma_tile_of((f16, f16), caps, whole=False) == MMA_TILES[-1]
    assert mma_tile_of((f16, f16), replace(caps, max_shared=48 << 10)) == MMA_TILES[-1]
    assert mma_tile_of((f16, f16), replace(caps, max_workgroup=64)) is None
    assert mma_tile_of((f16, f16), Caps("ir", max_shared=16 << 10)) == MMA_TILES[-1]


HOPPER = Caps("ptx", max_shared=227 << 10, max_workgroup=1024, arch="sm_90a")


def test_hopper_multiplies_by_warpgroups() -> None:
    """By default, where there are rows to share a weight; another target has no such thing."""
    for m, n, k in ((65, 384, 384), (4096, 4096, 4096), (65536, 1536, 384), (128, 5, 1)):
        for dtype in (f16, bf16):
            assert choose(problem(m, n, k), (dtype, dtype), HOPPER) == "wgmma"
        assert choose(problem(m, n, k), (f32, f32), HOPPER) not in ("wgmma", "mma")
        for other in (replace(HOPPER, arch="sm_100"), replace(HOPPER, max_shared=99 << 10)):
            assert choose(problem(m, n, k), (f16, f16), other) == "mma"
        assert choose(problem(m, n, k), (f16, f16), replace(HOPPER, target="ir")) != "wgmma"
    assert choose(problem(65, 4096, 4096), (f16, f16), HOPPER) == "wgmma"


def test_few_rows_of_16_bit_and_int8_weights_get_tensor_cores() -> None:
    """From as many rows on as they are the better kernel, up to 32, on NVIDIA cards from sm_80.

    Up to 64 rows of 16 bits that are long are streamed on Hopper, above 16 not of small weights.
    """
    ampere = replace(HOPPER, arch="sm_80", max_shared=163 << 10)
    for caps in (HOPPER, ampere):
        for dtypes, first, last in (((f16, f16), 3, 32), ((bf16, bf16), 3, 32), ((f16, i8), 1, 32),
                                    ((f32, i8), 8, 16)):  # fmt: skip
            for n, k in ((14336, 4096), (384, 1536), (5, 40)):
                streamed = caps is HOPPER and dtypes[0] is dtypes[1] and k >= 128
                rows, many = range(70), 33 if n == 384 else 17
                chosen = [choose(problem(m, n, k), dtypes, caps) for m in rows]
                for name, wanted in (
                    (
                        "skinny_mma",
                        [
                            first <= m <= last and not (streamed and (m <= 16 or m >= many))
                            for m in rows
                        ],
                    ),
                    ("streamed_rows", [streamed and 2 <= m <= 16 for m in rows]),
                    ("streamed_many", [streamed and many <= m <= 64 for m in rows]),
                ):
                    assert [kind == name for kind in chosen] == wanted, (name, dtypes, n, k)
    few = problem(8, 4096, 4096)
    assert choose(few, (f16, f16), HOPPER, aligned=False) == "skinny"
    assert choose(problem(20, 64, 64), (f16, i8), HOPPER, aligned=False) == "small"
    for other in (replace(HOPPER, arch="sm_75"), replace(HOPPER, target="ir"), LARGE):
        assert choose(few, (f16, f16), other) == "skinny"
    for dtypes in ((f32, f32), (f32, f16), (f16, bf16)):
        assert choose(few, dtypes, HOPPER) == "skinny"
        assert not fits("skinny_mma", few, dtypes, HOPPER)
    for turned in (replace(few, a_along_k=False), replace(few, b_along_k=False),
                   replace(few, k=0), replace(few, m=0), replace(few, m=33)):  # fmt: skip
        assert not fits("skinny_mma", turned, (f16, f16), HOPPER)


def test_the_shape_of_a_skinny_group() -> None:
    """Few warps for short rows, which are one block; of long ones as the table has it."""

    def of(m: int, n: int, k: int, dtypes: tuple[DType, DType] = (f16, f16)) -> tuple[int, ...]:
        tile = skinny_tile_of(problem(m, n, k), dtypes, HOPPER)
        assert tile is not None and tile.eights * 8 >= m and tile.shared_bytes <= 48 << 10
        assert 1 <= tile.together(*dtypes) <= 2048 // tile.threads
        return tile.sixteens, tile.deep, tile.unroll

    assert [of(16, n, k) for n, k in ((1152, 384), (384, 384), (1536, 384), (384, 1536))] == [
        (1, 4, 3), (1, 4, 3), (1, 4, 3), (1, 8, 6),
    ]  # fmt: skip
    assert [of(m, 14336, 4096) for m in (8, 16, 32)] == [(1, 8, 2), (1, 4, 2), (1, 4, 1)]
    assert [of(m, 4096, 14336) for m in (8, 16, 32)] == [(1, 8, 4), (1, 8, 4), (1, 8, 3)]
    assert [of(m, 14336, 4096, (bf16, i8)) for m in (1, 9, 17)] == [(1, 4, 2), (1, 4, 1), (1, 4, 1)]
    assert [of(1, 100, k, (f16, i8)) for k in (1, 64, 1024)] == [(1, 4, 1), (1, 4, 1), (1, 8, 2)]
    assert [of(9, 4096, k, (f32, i8)) for k in (4096, 512)] == [(2, 8, 1), (1, 8, 1)]


def test_registers_are_asked_for_where_loads_shall_not_wait() -> None:
    """On NVIDIA GPUs from sm_80 on, for one row and two: of a portable kernel nothing is asked."""
    inputs = (spec(2, 4096, dtype=f16), spec(64, 4096, dtype=f16))
    y, attrs = spec(2, 64, dtype=f16), {"extras": (), "activation": ""}
    together = {}
    for name, caps in (("sm_80", replace(HOPPER, arch="sm_80")),
                       ("sm_75", replace(HOPPER, arch="sm_75")), ("", LARGE)):  # fmt: skip
        (call,) = op_form(op.get("linear"), inputs, (y,), attrs).lower(caps).calls
        together[name] = dict(call.constants)["together"]
    assert together == {"sm_80": 5, "sm_75": 0, "": 0}


def test_the_tile_of_warpgroups_fills_the_multiprocessors() -> None:
    """The last round of tiles is as full as it can be; few tiles are narrow ones."""
    sizes = {
        (4096, 4096, 4096): (128, 0), (65536, 1536, 384): (128, 0), (1500, 5120, 1280): (160, 0),
        (1500, 1280, 5120): (128, 0), (512, 2560, 9728): (80, 0), (2048, 2560, 9728): (160, 0),
        (128, 4096, 4096): (64, 0), (2048, 384, 1536): (64, 0), (1500, 3840, 1280): (128, 96),
        (12000, 1280, 5120): (160, 0), (8192, 8192, 8192): (128, 96),
    }  # fmt: skip
    for size, (columns, last) in sizes.items():
        tile = wgmma_tile_of(problem(*size), (f16, f16), HOPPER)
        assert tile is not None and (tile.bn, tile.last) == (columns, last), size
    shallow = wgmma_tile_of(problem(65536, 1536, 384), (f16, f16), HOPPER)
    assert shallow is not None and shallow.staged == shallow.bn  # results leave at once
    gated = wgmma_tile_of(problem(512, 9728, 2560), (f16, f16), HOPPER, gated=True)
    assert gated is not None and (gated.bn, gated.last) == (160, 128)
    for batch in (2, 3):  # of two, tiles of two widths would be the fewest
        batches = replace(problem(1500, 3840, 1280), batch=batch, sa=1500 * 1280, sy=1500 * 3840)
        several = wgmma_tile_of(batches, (f16, f16), HOPPER)
        assert several is not None and not several.last
    across = replace(problem(2048, 2560, 9728), b_along_k=False)
    tile = wgmma_tile_of(across, (f16, f16), HOPPER)
    assert tile is not None and tile.bn in (64, 128)  # rows of the ring are whole panels


# -- chunks and words -----------------------------------------------------------------------------


def test_tensors_that_lie_alike_are_one_row_of_chunks() -> None:
    (call,) = calls("add", spec(7, 5), spec(7, 5))
    chosen = dict(call.constants)
    assert (chosen["rank"], chosen["chunk"], chosen["modes"]) == (1, True, ("chunk", "chunk"))
    assert dict(call.scalars)["threads"] == 7 * 2  # rows of 5 are stored as 8


@pytest.mark.parametrize(
    ("inputs", "chunk", "modes"),
    [
        ((spec(6, 8), spec(8)), True, ("chunk", "chunk")),
        ((spec(6, 8), spec(6, 1)), True, ("chunk", "one")),
        ((spec(6, 8), spec()), True, ("chunk", "one")),
        ((spec(6, 8), view((6, 8), (1, 6))), False, ("any", "any")),
        ((spec(6, 8), view((6, 8), (9, 1))), False, ("any", "any")),
        ((spec(6, 8), view((8,), (1,), offset=3)), False, ("any", "any")),
        ((spec(6, 3), spec(3)), False, ("any", "any")),
    ],
)
def test_broadcast_operands_are_chunks_numbers_or_elements(
    inputs: tuple[Spec, ...], chunk: bool, modes: tuple[str, ...]
) -> None:
    chosen = constants("add", *inputs)
    assert (chosen["chunk"], chosen["modes"]) == (chunk, modes)


def test_a_change_of_item_size_goes_word_by_word() -> None:
    assert not constants("cast", spec(6, 8), dtype="f16")["chunk"]
    assert constants("cast", spec(6, 8), dtype="i32")["chunk"]
    condition = spec(6, 8, dtype=dtype_of("bool"))
    assert not constants("where", condition, spec(6, 8), spec(6, 8))["chunk"]
    narrow = spec(6, 16, dtype=u8)
    assert constants("where", spec(6, 16, dtype=dtype_of("bool")), narrow, narrow)["chunk"]


@pytest.mark.parametrize("name", ["softmax", "reduce", "norm", "argmax"])
def test_rows_are_read_in_chunks_where_aligned(name: str) -> None:
    every: dict[str, dict[str, Any]] = {
        "reduce": {"op": "sum"},
        "norm": {"kind": "rms", "eps": 1e-6, "vectors": ()},
    }
    attrs = every.get(name, {})
    assert constants(name, spec(6, 33), **attrs)["chunk"]
    assert not constants(name, view((6, 33), (33, 1)), **attrs)["chunk"]
    assert not constants(name, view((6, 32), (64, 1), offset=1), **attrs)["chunk"]


def test_groups_follow_the_length_of_a_row() -> None:
    assert [calls("softmax", spec(3, n))[0].workgroup for n in (8, 256, 2048, 4096, 9000)] == [
        128, 128, 128, 256, 256,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["reduce", "argmax"])
def test_long_rows_are_split(name: str) -> None:
    attrs = {"op": "max"} if name == "reduce" else {}
    assert [len(calls(name, spec(2, n), **attrs)) for n in (16384, 16385)] == [1, 2]
    first, second = calls(name, spec(2, 100_000), **attrs)
    assert (first.groups, second.groups) == (14, 1)  # seven parts a row; two rows in a group
    assert all(c.groups == 1 for c in calls("reduce", spec(4, 9, dtype=i8), op="max"))


def test_a_convolution_copies_only_what_does_not_lie_for_it() -> None:
    def names(x: Spec, weight: Spec, padding: int) -> list[str]:
        attrs = {"stride": 1, "padding": padding, "activation": ""}
        return [c.kernel.name for c in calls("conv1d", x, weight, **attrs)]

    first, last = spec(2, 8, 21), view((2, 8, 21), (168, 1, 8))
    weight, turned = spec(4, 8, 3), view((4, 8, 3), (24, 1, 8))
    assert names(first, weight, 1) == ["pack_channels", "pack_channels", "gemm"]
    assert names(first, turned, 1) == names(last, turned, 1) == ["pack_channels", "gemm"]
    assert names(last, turned, 0) == ["gemm"]
    assert names(last, spec(4, 8, 1), 0) == ["gemm"]
    chosen = [dict(c.constants) for c in calls("conv1d", last, turned, stride=1, padding=1,
                                               activation="")]  # fmt: skip
    assert chosen[0]["vector"] and chosen[1]["vector_a"] and chosen[1]["vector_b"]
    gap = view((2, 8, 21), (336, 1, 16))
    assert names(gap, turned, 0) == ["pack_channels", "gemm"]


def test_rope_uses_chunks_where_pairs_allow_it() -> None:
    def of(x: Spec, half: int, **attrs: Any) -> tuple[bool, bool, bool]:
        table = spec(64, half)
        chosen = constants("rope", x, table, table, **{"interleaved": False, **attrs})
        return chosen["chunk"], chosen["table_chunk"], chosen["partial"]

    heads = view((2, 4, 9, 32), (1152, 32, 128, 1))  # [batch, seq, heads, head_dim], permuted
    assert of(heads, 16) == (True, True, False)
    assert of(heads, 8) == (True, True, True)
    assert of(heads, 6) == (False, False, True)
    assert of(heads, 6, interleaved=True) == (True, False, True)
    assert of(view((2, 4, 9, 30), (1080, 30, 120, 1)), 15) == (False, False, False)
    assert not constants("rope", spec(1, 1, 9, 32), spec(9, 16), spec(9, 16),
                         spec(1, dtype=dtype_of("i32")), interleaved=False)["partial"]  # fmt: skip


def test_rows_are_gathered_in_chunks() -> None:
    ids, by = spec(7, dtype=dtype_of("i32")), {"axis": 0}
    whole = {"along": False, "chunk": True, "keep": False, "rank": 2}
    assert constants("gather", spec(9, 33), ids, **by) == whole
    assert not constants("gather", spec(9, 3), ids, **by)["chunk"]
    assert not constants("gather", view((9, 32), (33, 1)), ids, **by)["chunk"]
    assert constants("gather", spec(9, 33), ids, axis=1)["along"]
    assert constants("gather", spec(4, 9, 8), ids, axis=1)["rank"] == 3
    copies = calls("scatter", spec(9, 8), spec(0, dtype=dtype_of("i32")), spec(0, 8))
    assert [c.kernel.name for c in copies] == ["copy"]
    both = calls("scatter", spec(9, 8), ids, spec(7, 8))
    assert [c.kernel.name for c in both] == ["last_index", "gather"]


CLASSES = (
    "cuda", "nvidia", "amd", "intel", "apple", "software", "simulator", "cpu", "unheard of",
)  # fmt: skip


def adapter(name: str, shared: int = 48 << 10) -> Caps:
    """A device of a class."""
    if name == "cuda":
        return Caps("ptx", max_shared=227 << 10, max_workgroup=1024, arch="sm_90a", family="nvidia")
    return replace(LARGE, max_shared=shared, family=name)


@pytest.mark.parametrize("name", CLASSES)
def test_the_tiles_of_every_class_fit(name: str) -> None:
    for caps in (adapter(name), adapter(name, 16 << 10)):
        large = tile_of("large", 4, caps)
        assert large is not None and large.shared_bytes <= caps.max_shared


def test_a_class_without_a_measurement_says_so_and_is_conservative() -> None:
    for where in (table, attention_table):
        rows: dict[str, Any] = dict(where.ROWS)
        assert set(rows) == set(CLASSES[:7])
        measured = {n for n, row in rows.items() if row.measured}
        assert measured - {"software"} == {"cuda", "nvidia"}
        assert not where.CONSERVATIVE.measured
    unmeasured = [n for n in CLASSES[2:] if n != "software"]
    assert all(table.row_of(adapter(n)) == table.CONSERVATIVE for n in unmeasured)
    assert attention_table.row_of(adapter("unheard of")) == attention_table.CONSERVATIVE
    assert tile_of("large", 4, adapter("nvidia")) != tile_of("large", 4, adapter("amd"))


def test_the_depth_of_a_product_of_few_tiles_is_split() -> None:
    """Into equal parts of whole chunks, as few as even out, on classes that measured it."""
    caps = adapter("cuda")
    tile = tile_of("large", 4, caps)
    assert tile is not None

    def of(m: int, n: int, k: int, caps: Caps = caps, batch: int = 1) -> int:
        return splits_of(problem(m, n, k, batch), tile, caps)

    assert [of(1500, 1280, 5120), of(512, 2560, 9728), of(512, 2560, 4096)] == [4, 8, 8]
    assert [of(4096, 4096, 4096), of(1500, 5120, 1280), of(512, 19456, 2560)] == [1, 1, 1]
    assert [of(1500, 1280, k) for k in (512, 1008, 1024, 2049, 2056, 2048)] == [1, 1, 2, 1, 1, 4]
    assert of(1500, 1280, 5120, batch=3) == of(1500, 1280, 5120, adapter("amd")) == 1
    assert of(0, 1280, 5120) == of(5, 5, 0) == 1
    assert choose(problem(512, 2560, 9728), (f32, f32), caps) == "large"
    assert choose(problem(512, 2560, 9728), (f32, f32), adapter("amd")) == "medium"


# -- every case of the table fits the smallest device ---------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_every_kernel_binds_and_holds_what_any_device_has(name: str) -> None:
    for dtype in TABLE[name].dtypes:
        for case in TABLE[name].cases:
            if (not case.dtypes or dtype in case.dtypes) and variant_fits(case, dtype, MINIMUM):
                for call in of_case(name, case, dtype):
                    assert len(call.tensors) <= MINIMUM.max_storage_buffers, case
                    size = call.workgroup or call.kernel.workgroup
                    assert size <= MINIMUM.max_workgroup, case


def laid_out(given: In, dtype: DType, forced: bool) -> Spec:
    """As a device lays it out; a transposed view where a variant depends on it."""
    if not forced or given.layout != "transposed":
        return spec(*given.shape, dtype=dtype)
    *lead, rows, columns = given.shape
    stored = spec(*lead, columns, rows, dtype=dtype)
    strides = (*stored.strides[:-2], stored.strides[-1], stored.strides[-2])
    return Spec(given.shape, dtype, strides, stored.aligned)


def of_case(name: str, case: Case, dtype: str) -> tuple[Call, ...]:
    forced = "variant" in case.attrs
    inputs = [laid_out(i, dtype_of(i.dtype or dtype), forced) for i in case.inputs]
    return calls(name, *inputs, **{k: dtype if v == OWN else v for k, v in case.attrs.items()})
