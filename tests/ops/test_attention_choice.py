"""Which kernel computes attention, with which tile: without a device."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32, i32
from centella.emit.program import Call
from centella.op import variant as variants
from centella.op.op import Form
from centella.ops.attention import mma, table, wgmma
from centella.ops.attention.choice import ORDER
from centella.ops.attention.mma import LEAST_TILE, MMA_TILES
from centella.ops.attention.op import ATTENTION
from centella.ops.attention.parts import MOST_SPLITS, Parts
from centella.ops.attention.problem import AttentionAttrs
from centella.ops.attention.split import SPLIT, Layout
from centella.specs import Caps, Spec
from tests.ops.test_choice import CLASSES, LARGE, MINIMUM, adapter, spec, view
from tests.support.launched import op_form

CUDA = {arch: Caps("ptx", max_shared=227 << 10, max_workgroup=1024, arch=arch)
        for arch in ("sm_75", "sm_80", "sm_89", "sm_90a")}  # fmt: skip
HOPPER = CUDA["sm_90a"]


def qkv(lq: int, dim: int, dtype: DType = f16, lk: int = 90) -> tuple[Spec, Spec, Spec]:
    k = spec(2, 2, lk, dim, dtype=dtype)
    return spec(2, 4, lq, dim, dtype=dtype), k, k


def form_of(inputs: tuple[Spec, ...], **attrs: Any) -> Form[AttentionAttrs]:
    """Without masks unless said otherwise."""
    b, heads, lq, dim = inputs[0].shape
    y = spec(b, lq, heads, dim, dtype=inputs[0].dtype)
    return op_form(ATTENTION, inputs, (y,), {"masks": (), "scale": 0.125, **attrs})


def chosen(inputs: tuple[Spec, ...], caps: Caps = HOPPER, **attrs: Any) -> str:
    """The name of the variant."""
    return variants.choose(ORDER, form_of(inputs, **attrs), caps, None, "attention").name


def test_every_variant_has_its_name() -> None:
    assert {v.name for v in ORDER} == set(ATTENTION.variants)


@pytest.mark.parametrize(
    ("queries", "keys", "dim", "variant"),
    [
        *((1, 64, 128, "split"), (1, 32768, 64, "split"), (8, 1500, 64, "split")),
        *((9, 1500, 64, "tiled"), (1, 63, 64, "stream"), (0, 64, 64, "split")),
        *((1, 500, 1024, "split"), (1, 500, 1025, "stream"), (1, 500, 0, "stream")),
        *((9, 9, 32, "stream"), (9, 9, 128, "tiled"), (9, 9, 129, "stream"), (9, 9, 0, "stream")),
    ],
)
def test_few_queries_of_many_keys_are_split(
    queries: int, keys: int, dim: int, variant: str
) -> None:
    assert chosen(qkv(queries, dim, f32, keys), MINIMUM) == variant


@pytest.mark.parametrize("name", CLASSES)
def test_the_tiles_of_every_class_fit(name: str) -> None:
    """What the table has for a class fits its devices, the least of them too."""
    for caps in (adapter(name), adapter(name, 16 << 10)):
        for dim in (1, 31, 32, 33, 64, 65, 80, 128, 129, 192, 256):
            q = spec(1, 2, 40, dim)
            variant, tile = chosen((q, q, q), caps), table.tile_of(40, dim, caps)
            if tile is None:
                assert dim > 128 and caps.max_shared == 16 << 10 and variant == "stream"
                continue
            assert tile.fits(caps) and tile.columns >= dim
            assert tile.threads >= tile.bq and tile.across % 8 == 0 == tile.bq // tile.tq % 4
            assert name not in ("software", "simulator") or variant == "stream"
        assert table.tile_of(40, 257, caps) is table.tile_of(40, 0, caps) is None


def test_few_queries_take_the_smallest_tile() -> None:
    for dim in (32, 64, 128):
        few, many = (table.tile_of(n, dim, adapter("cuda")) for n in (32, 33))
        assert few is not None and many is not None and few.bq == 32 < many.bq


def test_many_queries_of_16_bits_go_to_tensor_cores() -> None:
    for dtype in (f16, bf16):
        for arch, cores in (("sm_75", False), ("sm_80", True), ("sm_90a", True)):
            assert (chosen(qkv(17, 64, dtype, 5), CUDA[arch]) == "mma") == cores
    for given, cores in (
        *((qkv(17, d, lk=5), True) for d in (16, 20, 256)),
        *((qkv(17, d, lk=5), False) for d in (0, 8, 15, 257)),
        *((qkv(n, 64, lk=5), True) for n in (1, 8, 16)),
        *((qkv(17, 64, lk=n), n > 0) for n in (0, 1)),
        *((qkv(17, 64, f32, 5), False), (qkv(8, 64, lk=64), False)),
    ):
        assert (chosen(given) == "mma") == cores
    assert chosen(qkv(17, 64, lk=5), Caps("ir")) != "mma"  # it is asked for by name
    q, k, _ = qkv(17, 64, lk=5)
    whole = view(k.shape, (10 * 192, 64, 192, 1), f16)  # of rows that hold q, k and v
    assert mma.MMA.fits(form_of((q, whole, whole)), HOPPER)
    odd = view(k.shape, (10 * 65, 65, 130, 1), f16)
    assert not mma.MMA.fits(form_of((q, k, odd)), HOPPER)


def test_many_queries_on_hopper_go_to_warpgroups() -> None:
    """What a tensor map describes, with masks and a scale that the softmax folds, heads near 64."""
    q, k, v = qkv(65, 64)
    whole = view(k.shape, (90 * 192, 64, 192, 1), f16)  # of rows that hold q, k and v
    repeated = view(k.shape, (90 * 64, 0, 64, 1), f16)
    cases: tuple[tuple[tuple[Spec, ...], dict[str, Any], str], ...] = (
        *((qkv(65, d), {}, "wgmma") for d in (56, 64, 104, 128)),
        *((qkv(65, d), {}, "mma") for d in (16, 32, 48, 72, 96, 136, 256)),
        (qkv(65, 128, bf16), {}, "wgmma"),
        (qkv(64, 64), {}, "mma"),
        *((qkv(17, d, lk=lk), {}, "wgmma") for d, lk in ((64, 1024), (128, 512))),
        *((qkv(17, d, lk=lk), {}, "mma") for d, lk in ((64, 1023), (128, 511))),
        (qkv(17, 64, lk=1024), {"causal": True, "window": 900}, "mma"),
        *(
            (qkv(17, 64, lk=lk), {"masks": ("starts",)}, name)
            for lk, name in ((2031, "wgmma"), (2030, "mma"))
        ),  # of a cache half full
        (qkv(65, 64, lk=0), {}, "tiled"),
        (qkv(65, 64), {"masks": ("lengths", "starts", "sinks")}, "wgmma"),
        *((qkv(65, 64), {"masks": (m,)}, "mma") for m in ("mask", "key_mask")),
        *(
            (
                (*[spec(1, 9, 4000, 64, dtype=f16)] * 3, spec(texts + 1, dtype=i32)),
                {"masks": ("offsets",)},
                name,
            )  # by the mean length
            for texts, name in ((60, "wgmma"), (63, "mma"), (200, "mma"), (400, "tiled"))
        ),
        *((qkv(65, 64), {"scale": x}, "mma") for x in (-0.125, 0.0, 0.01, 1.0)),
        (qkv(65, 64), {"scale": 1.0, "softcap": 50.0, "window": 9}, "wgmma"),
        (
            (q, *[spec(2, 9, 64, 64, dtype=f16)] * 2, spec(2, 3, dtype=i32)),
            {"masks": ("blocks",)},
            "mma",
        ),
        ((q, whole, v), {}, "wgmma"),
        ((q, repeated, v), {}, "mma"),
        ((q, k, view(k.shape, (90 * 65, 65, 130, 1), f16)), {}, "tiled"),
    )
    for given, attrs, variant in cases:
        assert chosen(given, **attrs) == variant, (given[0].shape, attrs)
    several = tuple(spec(32, n, 65, 64, dtype=bf16) for n in (4, 2, 2))
    many = tuple(spec(32, n, 1024, 64, dtype=bf16) for n in (4, 2, 2))
    bf16_cases: tuple[tuple[tuple[Spec, ...], dict[str, Any], int], ...] = (
        *((qkv(65, dim, bf16, 1024), {}, 1) for dim in (64, 112)),
        (qkv(65, 104, bf16, 1024), {}, 2),
        (qkv(65, 64, bf16, 1023), {}, 2),
        (qkv(65, 64, bf16, 2048), {"causal": True, "window": 800}, 2),
        ((several[0], *many[1:]), {}, 2),  # 64 heads of values for one round of tiles
        (many, {}, 1),
    )
    for given, attrs, parts in bf16_cases:
        tile = wgmma.tile_of(form_of(given, **attrs), HOPPER)
        assert tile is not None and tile.parts == parts, (given, attrs)
    for caps in (CUDA["sm_89"], replace(HOPPER, max_shared=64 << 10)):
        assert chosen(qkv(65, 64), caps) == "mma"


def test_decoding_runs_on_tensor_cores_where_rows_are_whole_chunks() -> None:
    for dtype in (f16, bf16):
        assert {chosen(qkv(1, 64, dtype, lk)) for lk in (64, 100, 1024)} == {"ring"}
        assert {chosen(qkv(1, dim, dtype, 1500)) for dim in (16, 64, 128)} == {"ring"}
        assert {chosen(qkv(1, dim, dtype, 1500)) for dim in (8, 72)} == {"cluster_mma"}
        ampere = {chosen(qkv(1, dim, dtype), CUDA["sm_89"]) for dim in (8, 64, 128)}
        assert ampere == {"split_mma"}
    assert {chosen(qkv(1, dim)) for dim in (4, 20, 136)} == {"split"}
    assert chosen(qkv(1, 64, f32)) == "split"
    assert {chosen(qkv(1, 64), c) for c in (CUDA["sm_75"], LARGE, Caps("ir"))} == {"split"}
    assert (chosen(qkv(4, 64, lk=1500)), chosen(qkv(8, 64, lk=1500))) == ("ring", "cluster_mma")
    masked = (*qkv(1, 64, lk=1500), spec(2, 1500, dtype=i32))
    assert chosen(masked, masks=("key_mask",)) == "cluster_mma"
    k = view((1, 2, 100, 64), (12900, 6450, 64, 1), dtype=f16, offset=1)
    assert chosen((spec(1, 4, 1, 64, dtype=f16), k, k)) == "split"


def test_a_group_has_fewer_queries_of_few_keys() -> None:
    """Through Vulkan on NVIDIA: the groups of the others read the same keys from a cache."""
    for name, batch, keys, rows in (("nvidia", 1, 2048, 2), ("nvidia", 1, 2049, 4),
                                    ("nvidia", 2, 100, 4), ("amd", 1, 100, 4)):  # fmt: skip
        q, k = spec(batch, 32, 1, 128, dtype=f32), spec(batch, 8, keys, 128, dtype=f32)
        parts = SPLIT.tile(form_of((q, k, k)), adapter(name))
        assert isinstance(parts, Parts) and parts.rows == rows, (name, keys)
        assert parts.blocks == 4 // rows


def test_few_sequences_of_many_keys_take_two_launches() -> None:
    """A cluster has eight groups: of two sequences they leave half of a large GPU idle."""
    for batch, lk, variant in ((1, 6144, "ring"), (1, 6208, "split_mma"), (2, 8192, "ring"),
                               (4, 8192, "ring")):  # fmt: skip
        q = spec(batch, 32, 1, 128, dtype=f16)
        k = spec(batch, 8, lk, 128, dtype=f16)
        assert chosen((q, k, k)) == variant, (batch, lk)


def test_tiles_of_attention() -> None:
    def of(
        lq: int, dim: int, *masks: str, dtype: DType = f16, caps: Caps = HOPPER
    ) -> mma.MmaTile | None:
        return mma.tile_of(form_of(qkv(lq, dim, dtype), masks=masks), caps)

    for most, large, small in MMA_TILES:
        for dim in (most // 2 + 1, most):
            assert of(65, dim) == of(65, dim, "lengths", "starts") == large
            assert of(64, dim) == of(65, dim, "mask") == of(65, dim, "key_mask") == small
            capped = form_of(qkv(65, dim), softcap=1.0)
            assert mma.tile_of(capped, HOPPER) == small
            assert of(65, dim, dtype=bf16) == replace(large, parts=2)
            assert large.shared_bytes(dim) * large.together <= 227 << 10
    assert of(65, 257) is None
    few = Caps("ir", max_shared=16 << 10)
    assert of(65, 64, caps=few) == LEAST_TILE and of(65, 128, caps=few) is None


def test_heads_wide_and_narrow() -> None:
    def of(dim: int, length: int) -> dict[str, Any]:
        q = spec(1, 2, length, dim, dtype=f16)
        (call,) = form_of((q, q, q), variant="stream").lower(MINIMUM).calls
        return dict(call.constants)

    assert (of(64, 9)["part"], of(64, 9)["queries"]) == (64, 1)
    assert (of(32, 65)["part"], of(32, 65)["queries"]) == (32, 2)
    assert (of(128, 9)["part"], of(5, 9)["part"]) == (64, 8)
    assert of(64, 9)["vector"] and not of(3, 9)["vector"]


def test_parts_of_the_keys_follow_from_shapes() -> None:
    def of(heads: int, keys: int, queries: int = 1, enough: int = 512, **attrs: Any) -> Parts:
        k = spec(1, heads, keys, 64)
        return Parts.of(form_of((spec(1, heads, queries, 64), k, k), **attrs), 64, enough)

    assert [of(8, n).splits for n in (0, 1, 64, 65, 4096, 32768)] == [1, 1, 1, 2, 64, 64]
    assert [of(n, 32768).splits for n in (1, 3, 64, 256, 257, 9000)] == [
        MOST_SPLITS, MOST_SPLITS, 8, 2, 1, 1,
    ]  # fmt: skip
    assert [of(8, 32768, enough=n).splits for n in (7, 396, 528)] == [1, 49, 66]
    rows = [of(1, 9, n).rows for n in (0, 1, 2, 3, 4, 5, 8, 9, 64)]
    assert rows == [1, 1, 2, 4, 4, 8, 8, 8, 8]
    k = spec(1, 1, 9, 64)
    assert Parts.of(form_of((spec(1, 8, 1, 64), k, k)), 64, most=2).blocks == 4
    for causal, lq, splits in ((True, 1, 4), (True, 2, 5), (False, 1, 8)):  # of 256 keys and more
        assert of(1, 32768, lq, window=256, causal=causal).splits == splits
    assert [of(1, 9, n).blocks for n in (0, 1, 8, 9, 64)] == [0, 1, 1, 2, 8]


def test_a_buffer_of_another_length_is_no_other_program() -> None:
    def of(capacity: int, queries: int = 1, batch: int = 1) -> list[Any]:
        k, q = (spec(batch, *s, 128, dtype=f16) for s in ((8, capacity), (32, queries)))
        form = form_of((q, k, k, spec(batch, dtype=i32)), masks=("lengths",))
        calls: tuple[Call, ...] = form.lower(MINIMUM).calls
        parts, whole = calls
        assert parts.groups == batch * 8 * dict(parts.scalars)["splits"]
        assert whole.groups == batch * 32 * queries
        return [c.constants for c in (parts, whole)]

    assert of(64) == of(8192) == of(32768, batch=3)
    assert dict(of(64)[0])["rows"] == 4 and dict(of(64, 2)[0])["rows"] == 8
    assert dict(of(64)[0])["vector"]


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [1, 5, 17, 64, 67, 80, 128, 192, 256, 1024])
def test_the_teams_of_a_group_fit(dim: int, rows: int) -> None:
    lay = Layout(dim, rows, 1)
    assert lay.lanes * lay.teams <= 128 and lay.teams * rows <= 128 and lay.lanes * 8 >= dim
    words = lay.scratch + lay.teams * (lay.scores + rows)
    assert words * 4 <= MINIMUM.max_shared
