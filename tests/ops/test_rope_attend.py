"""`rope_attend`: when it is one launch, what that launch reads and writes, and its PTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, f32, i32
from centella.emit.ptx import emit_ptx
from centella.op.op import Form, Lowered
from centella.op.variant import Variant
from centella.ops.attend_linear import ATTEND_LINEAR, AttendLinearAttrs
from centella.ops.attention.rope_choice import APART, CLUSTER, SPLIT_STEP, SPLIT_STEP_MMA, lower
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.rope_attend import ROPE_ATTEND, RopeAttendAttrs
from centella.specs import Caps, Spec, make_spec
from centella.tensors.tensor import apply_all
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.support.attention import CAPS
from tests.support.launched import op_form, traced

AMPERE, SIMULATOR = replace(CAPS, arch="sm_80"), Caps("ir")


def form_of(
    batch: int = 1, heads: int = 32, kv: int = 8, tokens: int = 1, dim: int = 128,
    capacity: int = 1024, dtype: DType = bf16, *, norm: bool = True, blocks: bool = False,
    half: int | None = None, **attrs: Any,
) -> Form[RopeAttendAttrs]:  # fmt: skip
    cache = make_spec((batch, kv, capacity, dim), dtype, 16)
    starts = make_spec((batch,), i32, 16)
    if blocks:
        cache = make_spec((kv, capacity // 64, 64, dim), dtype, 16)
        starts = make_spec((batch, 1 + capacity // 64), i32, 16)
    rows = heads + 2 * kv
    x = Spec((batch, rows, tokens, dim), dtype, (tokens * rows * dim, dim, rows * dim, 1))
    table = make_spec((capacity, half or dim // 2), f32, 16)
    inputs = [cache, cache, replace(x, aligned=dim % 8 == 0), table, table, starts]
    inputs += [make_spec((2, dim), dtype, 16)] if norm else []
    outputs = (cache, cache, make_spec((batch, tokens, heads, dim), dtype, 16))
    given = {"interleaved": False, "eps": 1e-6, "scale": dim**-0.5, **attrs}
    return op_form(ROPE_ATTEND, tuple(inputs), outputs, given)


def launched(caps: Caps = CAPS, **form: Any) -> Lowered:
    return lower(form_of(**form), caps)


def test_when_it_is_one_launch() -> None:
    """Few queries of 16 bits that share their keys, on sm_90; by name in the simulator too."""
    for form in ({}, {"dtype": f16}, {"tokens": 2}, {"blocks": True}, {"batch": 16},
                 {"dim": 64}, {"norm": False}, {"heads": 8, "tokens": 8}):  # fmt: skip
        assert len(launched(**form).calls) == 1, form
    for form in ({"tokens": 3}, {"dtype": f32}, {"dim": 20}, {"heads": 128},
                 {"capacity": 8192}, {"half": 12}):  # fmt: skip
        assert len(launched(**form).calls) > 1, form
    for caps in (AMPERE, SIMULATOR, Caps("wgsl")):
        assert len(launched(caps).calls) > 1
    assert CLUSTER.fits(form_of(), SIMULATOR) and not CLUSTER.fits(form_of(), AMPERE)


def test_apart_the_queries_lie_between_two_launches() -> None:
    """The first writes the caches and q; the second reads them, and the blocks behind the start."""
    write, *attend = APART.lower(form_of(blocks=True), CAPS).calls
    assert {r.index for r in write.tensors} == {0, 1, 2, 3, 4, 5, 6, 10}
    assert {r.index for c in attend for r in c.tensors} == {0, 1, 5, 9, 10}
    table = [r for r in attend[0].tensors if r.index == 5]
    assert sorted(r.offset for r in table) == [0, 1]


@pytest.mark.parametrize("caps", [Caps("wgsl"), CAPS], ids=["wgsl", "ptx"])
def test_one_token_in_f32_is_two_launches(caps: Caps) -> None:
    """The first reads and writes the caches, in 8 bindings; the second adds its parts up."""
    names = ["rope_split", "attention_combine"]
    for form in ({}, {"blocks": True}, {"dim": 256, "heads": 8}, {"window": 99}, {"half": 12}):
        first, second = launched(caps, dtype=f32, **form).calls
        assert [first.kernel.name, second.kernel.name] == names
        assert [r.index for r in first.tensors] == [2, 3, 4, 5, 6, 0, 1, 10]
        assert [r.index for r in second.tensors] == [10, 5, 9]
    for form in ({"tokens": 2}, {"half": 10}, {"dim": 512, "heads": 64}, {"capacity": 63},
                 {"dim": 248}):  # fmt: skip
        assert launched(caps, dtype=f32, **form).calls[0].kernel.name == "rope_cache_write", form


@pytest.mark.parametrize(("dim", "most", "fewer"), [(120, 8, 8), (128, 8, 4), (256, 4, 2)])
def test_a_group_has_as_many_queries_as_memory_holds(dim: int, most: int, fewer: int) -> None:
    form = form_of(heads=64, dim=dim, dtype=f32)
    for shared, rows in ((32 << 10, most), (16 << 10, fewer)):
        first, _ = SPLIT_STEP.lower(form, Caps("wgsl", max_shared=shared)).calls
        assert dict(first.constants)["rows"] == rows
        assert traced(first).shared_bytes <= shared


@needs_ptxas
@pytest.mark.parametrize(
    "form", [{}, {"blocks": True, "window": 99},
             *({"dim": d, "heads": 64} for d in (120, 240, 256))], ids=str
)  # fmt: skip
def test_what_it_keeps_in_f32_stays_in_registers(form: dict[str, Any], tmp_path: Path) -> None:
    first, _ = launched(dtype=f32, **form).calls
    report, _ = assemble(emit_ptx(traced(first), "sm_80"), "sm_80", tmp_path)
    assert resources(report)[1] == 0


def test_long_caches_in_16_bits_are_two_launches() -> None:
    """Keys in a ring on Hopper, where a group has all queries of a head."""
    rings = ["rope_ring_split", "attention_combine"]
    names = ["rope_split_mma", "attention_combine"]
    for form in ({}, {"heads": 8, "tokens": 8}, {"blocks": True}, {"tokens": 8}, {"heads": 128}):
        first, second = launched(CAPS, capacity=8192, **form).calls
        whole = form not in ({"tokens": 8}, {"heads": 128})
        assert [first.kernel.name, second.kernel.name] == (rings if whole else names)
        assert [r.index for r in first.tensors] == [2, 3, 4, 5, 6, 0, 1, 10]
        assert [r.index for r in second.tensors] == [10, 5, 9]
    assert [c.kernel.name for c in launched(AMPERE).calls] == names
    for form in ({"half": 12}, {"dim": 20}):
        assert launched(CAPS, capacity=8192, **form).calls[0].kernel.name == "rope_cache_write", (
            form
        )


@needs_ptxas
@pytest.mark.parametrize("variant", [CLUSTER, SPLIT_STEP_MMA], ids=["cluster", "split_mma"])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"dtype": f16, "dim": 64, "heads": 14, "kv": 2},
        {"tokens": 2, "window": 100, "softcap": 30.0},
        {"blocks": True, "batch": 16, "norm": False},
        {"heads": 8, "tokens": 8, "dim": 80},
    ],
    ids=str,
)
def test_it_stays_in_registers(
    variant: Variant[Any, Any], form: dict[str, Any], tmp_path: Path
) -> None:
    call, *_ = variant.lower(form_of(**form), CAPS).calls
    report, _ = assemble(emit_ptx(traced(call), "sm_90a"), "sm_90a", tmp_path)
    registers, stack = resources(report)
    assert stack == 0 and registers * (call.workgroup or 128) * 2 <= 65_536


@needs_ptxas
@pytest.mark.parametrize(
    ("n", "dtype", "capacity"),
    [(1024, bf16, 1280), (1024, f32, 1024), (2048, bf16, 1024), (2048, f32, 512)],
)
def test_a_product_keeps_parts_and_weights_in_registers(
    n: int, dtype: DType, capacity: int, tmp_path: Path
) -> None:
    """The most words of each kind; a group has one multiprocessor."""
    caps = Caps("wgsl", family="nvidia", max_shared=32 << 10)
    attend = form_of(heads=16, capacity=capacity, dtype=f32)
    weight, y = make_spec((n, 2048), dtype, 16), make_spec((1, 1, n), f32, 16)
    attrs = AttendLinearAttrs(attend.attrs, LinearAttrs(("residual",), ""))
    inputs, outputs = (*attend.inputs, weight, y), (*attend.outputs[:2], y)
    form = Form(ATTEND_LINEAR, inputs, outputs, attrs)
    assert ATTEND_LINEAR.preferred is not None and ATTEND_LINEAR.preferred(form, caps)
    _, product = form.lower(caps).calls
    report, _ = assemble(emit_ptx(traced(product), "sm_80"), "sm_80", tmp_path)
    assert resources(report)[1] == 0
    assert traced(product).shared_bytes <= caps.max_shared


@pytest.mark.devices("simulator", "webgpu")
@pytest.mark.parametrize(("heads", "dim"), [(3, 40), (4, 128)])
def test_a_product_keeps_infinities(device: ct.Device, heads: int, dim: int) -> None:
    """Of the last columns, too, where a group has threads without any of the depth."""
    rng, keys, outputs = np.random.default_rng(1), 100, 9
    shape, at = (1, 1, keys, dim), (0, 0, 5, dim - 3)
    values = rng.standard_normal(shape).astype(np.float32)
    values[at] = np.inf
    caches = [ct.State(x, device=device) for x in (np.zeros(shape, np.float32), values)]
    weight = rng.standard_normal((outputs, heads * dim)).astype(np.float32)
    signs = np.where(np.arange(outputs) % 2, -1, 1)
    weight[:, at[-1] :: dim] = signs[:, None]
    x = rng.standard_normal((1, heads + 2, 1, dim)).astype(np.float32)
    angles = np.zeros((2, keys, dim // 2), np.float32)
    more = (x, *angles, np.array([50], np.int32), weight)
    given = (*(c.value for c in caches), *(ct.asarray(a, device=device) for a in more))
    attrs = {"attend": RopeAttendAttrs(False, 1e-6, 0.1), "linear": LinearAttrs((), "")}
    got = apply_all(ATTEND_LINEAR, given, {**attrs, "variant": "combined"})[2].numpy()
    np.testing.assert_array_equal(got.reshape(-1), signs * np.inf)
