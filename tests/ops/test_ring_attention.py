"""Few queries whose keys and values come by the copy engine: `ring`, `ring_split`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16
from centella.emit.ptx import emit_ptx
from centella.op.variant import Variant
from centella.ops.attention import ring_choice
from centella.ops.attention.choice import ORDER
from centella.ops.attention.ring import RING
from centella.ops.attention.ring_choice import RingParts, clustered
from centella.ops.attention.rope_choice import CLUSTER, RING_SPLIT
from centella.ops.attention.rope_choice import RING as ROPE_RING
from centella.ops.hopper import AT_ONCE, SHARED
from centella.ops.rope_attend import attention_form
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_decoding import check, turned
from tests.ops.test_rope_attend import form_of
from tests.support.attention import CAPS, error, planned
from tests.support.launched import traced

BOUND = {f16: 2.5e-7, bf16: 1.6e-5}
SIXTEEN = pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "lengths": {"lengths": [0, 33, 320]},
    "starts": {"starts": [-9, 0, 249]},
    "causal": {"causal": True},
    "mask": {"mask": np.where(np.arange(320) % 5 == 2, -np.inf, np.linspace(-3, 3, 320))[None] *
             np.ones((3, 1, 2, 1))},
    "window": {"starts": [-9, 130, 310], "window": 70},
    "both sides": {"window": 80},
    "softcap": {"softcap": 1.5, "causal": True, "sinks": [0.5, -np.inf, 9.0, -1.0]},
    "bias": {"lengths": [320, 33, 1], "bias": np.sin(np.arange(4 * 21)).reshape(4, 21) * 3},
}  # fmt: skip


@pytest.fixture(params=[1, 2, 9], ids=["one tile", "two tiles", "all tiles"], autouse=True)
def rings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of one tile and of two, which come round, and such as have a part's tiles at once."""
    whole = ring_choice._with_ring

    def short(*args: Any) -> RingParts | None:
        tile = whole(*args)
        most = min(request.param, tile.ring.stages) if tile else 0
        return replace(tile, ring=replace(tile.ring, stages=most)) if tile else None

    monkeypatch.setattr(ring_choice, "_with_ring", short)


@pytest.mark.turns("rings")
@SIXTEEN
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128])
def test_head_sizes(dim: int, dtype: DType) -> None:
    plan = planned("ring", (2, 4, 2, 1, 325, dim), dtype)
    arrays = plan.random()
    assert error(plan.run(*arrays), plan.exact(*arrays)) < BOUND[dtype]


@pytest.mark.turns("rings")
@pytest.mark.parametrize("parts", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as clusters, and all keys of a head in one group, which takes several tiles."""
    if not parts:
        monkeypatch.setattr(ring_choice, "AT_ONCE", {1: 132})
    plan = planned("ring", (3, 4, 2, 2, 320, 32), f16, **MASKS[name])
    assert (dict(plan.calls[0].constants)["splits"] == 1) is not parts
    arrays = plan.random()
    assert error(plan.run(*arrays), plan.exact(*arrays)) < BOUND[f16]


@SIXTEEN
def test_blocks(dtype: DType) -> None:
    """Some of them in two sequences; one sequence begins with two that the pool has not."""
    blocks = np.array([[4, 1, 3, 2, 0], [4, 2, 0, 1, 3], [9, -1, 0, 0, 0]])
    plan = planned("ring", (3, 4, 2, 2, 5, 48), dtype, starts=[300, 64, 99], blocks=blocks)
    arrays = plan.random()
    assert error(plan.run(*arrays), plan.exact(*arrays)) < BOUND[dtype]


@SIXTEEN
def test_what_does_not_count_may_hold_anything(dtype: DType) -> None:
    """NaN past the lengths; a NaN and an infinity among the rest stay where they are."""
    lengths = np.array([219, 0])
    plan = planned("ring", (2, 1, 1, 2, 240, 16), dtype, lengths=lengths)
    q, k, v = plan.random()
    wanted = plan.exact(q, k, v)
    hidden = np.arange(240) >= lengths[:, None]
    k[:, 0][hidden] = v[:, 0][hidden] = np.nan
    got = plan.run(q, k, v)
    assert error(got, wanted) < BOUND[dtype] and not got[1].any()
    plan = planned("ring", (1, 1, 1, 2, 240, 16), dtype)
    q, k, v = plan.random()
    k[0, 0, 207, 3] = np.nan
    assert np.isnan(plan.run(q, k, v)).all()
    q, k, v = plan.random()
    v[0, 0, 207, 3] = np.inf
    got = plan.run(q, k, v)[0, :, 0]
    assert (got[:, 3] == np.inf).all() and np.isfinite(got[:, :3]).all()


def test_before_a_window_anything_may_be() -> None:
    """In the tile that it begins in, too."""
    starts = np.array([130, 310, 64])
    plan = planned("ring", (3, 4, 2, 2, 320, 32), f16, starts=starts, window=70)
    q, k, v = plan.random()
    wanted = plan.exact(q, k, v)
    hidden = np.arange(320) <= (starts - 70)[:, None]
    k.swapaxes(1, 2)[hidden] = v.swapaxes(1, 2)[hidden] = np.nan
    assert error(plan.run(q, k, v), wanted) < BOUND[f16]


@pytest.mark.parametrize("variant", ["ring", "ring_split"])
def test_before_the_window_of_a_step_anything_may_be(variant: str) -> None:
    starts = [300, 100, 64]
    given = turned(4, 2, 2, 32, bf16, starts, capacity=320)
    for row, start in enumerate(starts):
        for cache, _ in given[:2]:
            cache[row, :, : max(start - 69, 0)] = np.nan
    attrs = {"interleaved": False, "eps": 1e-6, "scale": 0.1, "variant": variant}
    check("rope_attend", given, 8 * bf16.epsilon, **attrs, window=70)


@pytest.mark.turns("rings")
@pytest.mark.parametrize("variant", ["ring", "ring_split"])
@pytest.mark.parametrize(
    ("tokens", "starts", "window", "dim", "blocks"),
    [
        (1, [300, 0, 128, 63, 64], None, 64, False),
        (2, [511, 1, 62], None, 128, False),
        (1, [300, 64, 5, 127], 150, 80, True),
        (4, [10, 500, 191, 190], 70, 16, False),
        (4, [-2, -1, 0], None, 32, True),
    ],
)
def test_rotation_and_cache_in_front(
    variant: str, tokens: int, starts: list[int], window: int | None, dim: int, blocks: bool
) -> None:
    """A step's tokens in one tile and in two, where a cache is NaN past the lengths."""
    given = turned(4, 2, tokens, dim, bf16, starts, capacity=576, blocks=blocks)
    attrs = {"interleaved": False, "eps": 1e-6, "scale": 0.1, "variant": variant}
    check("rope_attend", given, 8 * bf16.epsilon, **attrs, window=window)


@needs_ptxas
@pytest.mark.parametrize("variant", [ROPE_RING, RING_SPLIT], ids=["ring", "ring_split"])
@pytest.mark.parametrize("form", [{}, {"batch": 64}, {"batch": 64, "blocks": True, "window": 99},
                                  {"heads": 8, "tokens": 8, "dim": 80}], ids=str)  # fmt: skip
def test_it_stays_in_registers(
    variant: Variant[Any, Any], form: dict[str, Any], tmp_path: Path
) -> None:
    call, *_ = variant.lower(form_of(**form), CAPS).calls
    tile = dict(call.constants)["tile"].ring
    report, _ = assemble(emit_ptx(traced(call), "sm_90a"), "sm_90a", tmp_path)
    registers, stack = resources(report)
    assert stack == 0 and registers * 128 * tile.split.together <= 65_536


def test_groups_run_at_once() -> None:
    """As few to a multiprocessor as that takes; where there are too many, two."""
    for batch, groups, splits, together in (
        (1, 64, 8, 1), (2, 128, 8, 2), (4, 128, 4, 2), (8, 128, 2, 1), (16, 128, 1, 1),
        (17, 136, 1, 2), (33, 264, 1, 2), (34, 272, 1, 2), (64, 512, 1, 2),
    ):  # fmt: skip
        form = form_of(batch=batch, capacity=1408)
        tile = clustered(attention_form(form), 1, CAPS)
        assert tile is not None
        found = tile.parts.groups, tile.parts.splits, tile.split.together
        assert found == (groups, splits, together), batch
        assert groups <= AT_ONCE[splits] * together or batch > 33
        call, *_ = ROPE_RING.lower(form, CAPS).calls
        assert traced(call).shared_bytes + 1024 <= SHARED // together


def test_when_it_is_chosen() -> None:
    def chosen(**form: Any) -> str:
        order = (ROPE_RING, CLUSTER, RING_SPLIT)
        forms = form_of(**form)
        return next((v.name for v in order if v.takes(forms, CAPS)), "")

    assert {chosen(batch=n) for n in (4, 64)} == {"ring"}
    assert {chosen(capacity=n) for n in (64, 1024, 6144)} == {"ring"}
    assert chosen(batch=16, capacity=32768) == "ring"
    assert chosen(capacity=6208) == chosen(capacity=32768) == "ring_split"
    for arch in ("sm_90", "sm_100"):  # where there is no ring
        assert CLUSTER.takes(form_of(), replace(CAPS, arch=arch))
    assert chosen(dim=72) == chosen(heads=128) == chosen(tokens=9) == ""
    for caps in (replace(CAPS, arch="sm_80"), replace(CAPS, arch="sm_100")):
        assert not ROPE_RING.fits(form_of(), caps)
    assert ORDER[0] is RING
