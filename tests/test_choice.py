"""What ops choose, tested without a device: tiles, chunks or words, launches, bindings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from centella import op
from centella.dtypes import DType, dtype_of, f16, f32, i8, u8
from centella.ops.matmul.op import TILES, Problem, choose, tile_of
from centella.program import Call
from centella.specs import Caps, Shape, Spec, make_spec, rows_aligned
from tests.ops_table import OWN, TABLE, Case

MINIMUM = Caps("wgsl", max_shared=16 << 10, max_workgroup=256, max_storage_buffers=8)
LARGE = Caps("wgsl", max_shared=48 << 10, max_workgroup=1024, max_storage_buffers=32)
SIZES = (1, 2, 31, 64, 65, 384, 1000, 4096)


def problem(m: int, n: int, k: int, batch: int = 1) -> Problem:
    return Problem(batch, m, n, k, k, k, n, m * k, 0, m * n, True, True)


def spec(*shape: int, dtype: DType = f32) -> Spec:
    """As a device lays it out."""
    return make_spec(shape, dtype, 16)


def view(shape: Shape, strides: Shape, dtype: DType = f32, offset: int = 0) -> Spec:
    """As a slice or transpose lies."""
    return Spec(shape, dtype, strides, rows_aligned(shape, strides, dtype.itemsize, offset))


def calls(name: str, *inputs: Spec, **attrs: Any) -> tuple[Call, ...]:
    declared = op.get(name)
    outs = tuple(spec(*s, dtype=d) for s, d in declared.rule(inputs, attrs))
    return declared.lower(inputs, outs, attrs, MINIMUM).calls


def constants(name: str, *inputs: Spec, **attrs: Any) -> dict[str, Any]:
    (call,) = calls(name, *inputs, **attrs)
    return dict(call.constants)


# -- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("caps", [MINIMUM, LARGE], ids=["minimum", "large"])
@pytest.mark.parametrize("itemsize", [4, 2])
def test_the_chosen_tile_fits(caps: Caps, itemsize: int) -> None:
    for m in SIZES:
        for n in SIZES:
            tile = tile_of(choose(problem(m, n, 384), itemsize, caps), itemsize, caps)
            assert tile is not None
            assert tile.shared_bytes <= caps.max_shared
            assert tile.threads <= caps.max_workgroup


@pytest.mark.parametrize("itemsize", [4, 2])
def test_large_products_get_large_tiles_and_small_ones_enough_groups(itemsize: int) -> None:
    assert choose(problem(4096, 4096, 4096), itemsize, LARGE) == "large"
    assert choose(problem(1, 1, 4096), itemsize, LARGE) == "small"
    assert choose(problem(16, 4096, 384), itemsize, LARGE) == "small"
    few, many = problem(512, 512, 64), problem(512, 512, 64, batch=64)
    assert choose(few, itemsize, LARGE) != "large"
    assert choose(many, itemsize, LARGE) == "large"


def test_a_device_of_few_threads_or_little_memory_gets_a_smaller_tile() -> None:
    whole = problem(4096, 4096, 4096)
    assert choose(whole, 2, LARGE) == "large"
    assert choose(whole, 2, MINIMUM) == "medium"  # 16-bit tiles are deeper: 32 KB
    assert choose(whole, 4, replace(LARGE, max_workgroup=64)) == "small"
    assert choose(whole, 4, replace(LARGE, max_shared=8 << 10)) == "small"
    assert all(tile_of("small", item, MINIMUM) is not None for item in (4, 2))


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
    assert [c.kernel.name for c in calls("matmul", a, b)] == ["copy", "copy", "gemm"]
    assert [c.kernel.name for c in calls("matmul", a, spec(2, 3, 8, 4))] == ["copy", "gemm"]
    assert len(calls("matmul", spec(1, 5, 8), b)) == 1
    assert len(calls("matmul", spec(5, 8), b)) == 1
    assert len(calls("matmul", spec(2, 3, 5, 8), spec(2, 3, 8, 4))) == 1


# -- chunks and words -----------------------------------------------------------------------------


def test_tensors_that_lie_alike_are_one_row_of_chunks() -> None:
    (call,) = calls("add", spec(7, 5), spec(7, 5))
    found = dict(call.constants)
    assert (found["rank"], found["chunk"], found["modes"]) == (1, True, ("chunk", "chunk"))
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
    found = constants("add", *inputs)
    assert (found["chunk"], found["modes"]) == (chunk, modes)


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
    assert [calls("softmax", spec(3, n))[0].workgroup for n in (8, 256, 1000, 9000)] == [
        64, 64, 128, 256,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["reduce", "argmax"])
def test_long_rows_are_split(name: str) -> None:
    attrs = {"op": "max"} if name == "reduce" else {}
    assert [len(calls(name, spec(2, n), **attrs)) for n in (16384, 16385)] == [1, 2]
    first, second = calls(name, spec(2, 100_000), **attrs)
    assert (first.groups, second.groups) == (14, 2)
    assert all(c.groups == 1 for c in calls("reduce", spec(4, 9, dtype=i8), op="max"))


def test_heads_wide_and_narrow() -> None:
    def of(dim: int, length: int, dtype: DType = f16) -> dict[str, Any]:
        qkv = (spec(1, 2, length, dim, dtype=dtype),) * 3
        return constants("attention", *qkv, masks=(), causal=False, scale=1.0)

    assert (of(64, 9)["part"], of(64, 9)["queries"]) == (64, 1)
    assert (of(32, 65)["part"], of(32, 65)["queries"]) == (32, 2)
    assert (of(128, 9)["part"], of(5, 9)["part"]) == (64, 8)
    assert of(64, 9)["vector"] and not of(3, 9)["vector"]


# -- every case of the table fits the smallest device ---------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_every_kernel_binds_and_holds_what_any_device_has(name: str) -> None:
    for dtype in TABLE[name].dtypes:
        for case in TABLE[name].cases:
            if (not case.dtypes or dtype in case.dtypes) and fits(case, dtype):
                for call in of_case(name, case, dtype):
                    assert len(call.tensors) <= MINIMUM.max_storage_buffers, case
                    size = call.workgroup or call.kernel.workgroup
                    assert size <= MINIMUM.max_workgroup, case


def of_case(name: str, case: Case, dtype: str) -> tuple[Call, ...]:
    inputs = [spec(*i.shape, dtype=dtype_of(i.dtype or dtype)) for i in case.inputs]
    return calls(name, *inputs, **{k: dtype if v == OWN else v for k, v in case.attrs.items()})


def fits(case: Case, dtype: str) -> bool:
    variant = case.attrs.get("variant")
    return variant is None or tile_of(variant, dtype_of(dtype).itemsize, MINIMUM) is not None
