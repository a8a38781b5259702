"""`topk` and `expert_linear`: what a mixture of experts is computed with, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import dtype_of
from centella.emit.program import program_of
from centella.emit.ptx import emit_ptx
from centella.errors import DTypeError, ShapeError
from centella.op import op
from centella.ops.experts.op import up_planes
from centella.ops.quant.table import FORMATS
from centella.ops.topk import GROUPS
from centella.plan.divide import divided
from centella.specs import Caps, make_spec
from centella.tensors.tensor import apply_with
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_quant import CUDA, quantised, whole_of
from tests.support.launched import op_form, traced
from tests.support.windowed import windowed

EVERY = ("cpu", "simulator", "webgpu", "webgpu-minimum", "webgpu-hardware", "cuda")
BLOCKS = [name for name, kind in FORMATS.items() if not kind.by_row]
Array = np.ndarray[Any, Any]


@pytest.mark.devices(*EVERY)
@pytest.mark.first("dtype", "webgpu", "webgpu-minimum")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32"])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 1), (7, 3), (128, 8), (130, 128), (513, 64), (300, 170), (9001, 5), (9999, 100),
     (5000, 140), (40_003, 1), (70_001, 16)],
)  # fmt: skip
def test_topk(device: ct.Device, dtype: str, n: int, k: int) -> None:
    """Many equal elements: the lower index first."""
    values = np.random.default_rng(n).integers(-n // 3, n // 3 + 1, (2, 3, n))
    x = ct.asarray(values, dtype, device)
    got, at = ct.topk(x, k)
    stored = x.astype("f32").numpy()
    order = np.argsort(-stored, -1, kind="stable")[..., :k]
    np.testing.assert_array_equal(at.numpy(), order)
    np.testing.assert_array_equal(got.astype("f32").numpy(), np.take_along_axis(stored, order, -1))
    assert (got.dtype.name, at.dtype.name) == (dtype, "i32")


@pytest.mark.devices(*EVERY)
def test_topk_of_nan_and_infinities(device: ct.Device) -> None:
    x = np.array([1, np.nan, -np.inf, np.inf, -0.0, 0.0, np.nan], np.float32)
    values, at = ct.topk(ct.asarray(x, device=device), 7)
    assert at.numpy().tolist() == [1, 6, 3, 0, 4, 5, 2]
    np.testing.assert_array_equal(values.numpy(), x[[1, 6, 3, 0, 4, 5, 2]])
    # In several parts; and more than are looked for, which are sorted.
    for times, k in ((1000, 8), (1000, 100), (22, 150)):
        many = np.tile(x, times)
        values, at = ct.topk(ct.asarray(many, device=device), k)
        order = np.argsort(np.where(np.isnan(many), -np.inf, -many), kind="stable")
        nan = np.isnan(many[order])
        order = np.concatenate([order[nan], order[~nan]])[:k]
        np.testing.assert_array_equal(at.numpy(), order)
        np.testing.assert_array_equal(values.numpy(), many[order])


@pytest.mark.devices("simulator", "webgpu", "cuda")
@pytest.mark.parametrize(("dtype", "k"), [("f32", 16), ("f16", 10), ("u8", 7), ("f32", 128)])
def test_topk_of_rows_whose_best_lie_together(device: ct.Device, dtype: str, k: int) -> None:
    """The list is longest where k threads have nothing but elements that others have not."""
    group = next(g for g in GROUPS if k <= g.most)
    kind = dtype_of(dtype)
    width, part = 16 // kind.itemsize, 2 * group.threads * group.each
    mine = np.arange(part) // width % group.threads  # the thread that an element is of
    top = 200 if kind.itemsize == 1 else 2000
    values = np.where(mine < k, top - mine, np.arange(part) % 50)
    falling, rising = top - np.arange(part) % top, np.arange(part) % top
    x = np.stack([values, falling, rising, np.full(part, 3)])
    got, at = ct.topk(ct.asarray(x, dtype, device), k)
    order = np.argsort(-x.astype(np.float64), -1, kind="stable")[:, :k]
    np.testing.assert_array_equal(at.numpy(), order)
    np.testing.assert_array_equal(got.numpy().astype(np.int64), np.take_along_axis(x, order, -1))


def test_topk_of_a_long_row_is_two_launches() -> None:
    """Which write k keys and columns of each part, and no more."""
    x, y = make_spec((4, 10**6), dtype_of("f32"), 16), (4, 10)
    results = (make_spec(y, dtype_of("f32"), 16), make_spec(y, dtype_of("i32"), 16))
    lowered = op_form(op.get("topk"), (x,), results, {"k": 10}).lower(CUDA)
    assert [call.groups for call in lowered.calls] == [4 * 245, 4]
    assert sum(spec.nbytes for spec in lowered.temporaries) == 2 * 4 * 4 * 245 * 10


@needs_ptxas
@pytest.mark.parametrize(("dtype", "k"), [("f32", 10), ("f16", 16), ("i8", 100)])
def test_texts_of_topk_assemble(dtype: str, k: int, tmp_path: Path) -> None:
    x = make_spec((2, 10**5), dtype_of(dtype), 16)
    results = (make_spec((2, k), x.dtype, 16), make_spec((2, k), dtype_of("i32"), 16))
    for call in op_form(op.get("topk"), (x,), results, {"k": k}).lower(CUDA).calls:
        report, _ = assemble(emit_ptx(traced(call), "sm_90a"), "sm_90a", tmp_path)
        assert resources(report)[1] == 0


def test_topk_refuses() -> None:
    x = ct.zeros((2, 5), device="cpu")
    with pytest.raises(ShapeError, match=r"topk: expected k from 1 to 5, .* got 6"):
        ct.topk(x, 6)
    with pytest.raises(ShapeError, match="got 0"):
        ct.topk(x, 0)
    with pytest.raises(ShapeError, match="got a scalar"):
        ct.topk(ct.zeros((), device="cpu"), 1)
    with pytest.raises(DTypeError, match="numeric dtype, got bool"):
        ct.topk(x.astype("bool"), 1)
    with pytest.raises(DTypeError, match="whole number for k"):
        ct.topk(x, "2")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="expected a Tensor"):
        ct.topk([1.0], 1)  # type: ignore[arg-type]


def expected(x: Array, w: Array, ids: Array, up: Array | None, share: Array) -> Array:
    """Each expert's products with all rows, of which each row takes its own; in float64."""
    x = x if up is None else np.repeat(x[:, None], ids.shape[1], 1)
    y = np.einsum("enk,rpk->rpen", w.astype(np.float64), x)
    y = np.take_along_axis(y, ids[..., None, None], 2)[:, :, 0]
    if up is None:
        summed: Array = (y * share[..., None]).sum(1)
        return summed
    right = np.einsum("enk,rpk->rpen", up.astype(np.float64), x)
    right = np.take_along_axis(right, ids[..., None, None], 2)[:, :, 0]
    gated: Array = y / (1 + np.exp(-y)) * right
    return gated


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 40), (66, 257)])
def test_products_of_experts(
    device: ct.Device, rows: int, dtype: str, gate: str, n: int, k: int
) -> None:
    picks, experts, random = 3, 5, np.random.default_rng(rows + n)
    ids = np.stack([random.permutation(experts)[:picks] for _ in range(rows)]).astype(np.int32)
    size = (rows, k) if gate else (rows, picks, k)
    x, w, up = (
        ct.asarray(random.standard_normal(s).astype(np.float32) * f, dtype_of(kind), device)
        for s, f, kind in ((size, 1.0, "f32"), *[((experts, n, k), k**-0.5, dtype)] * 2)
    )
    shares, residual = (random.random(s, np.float32) for s in ((rows, picks), (rows, n)))
    extras = {"up": up} if gate else {"shares": shares, "residual": residual}
    given = {
        name: e if isinstance(e, ct.Tensor) else ct.asarray(e, device=device)
        for name, e in extras.items()
    }
    on_device = ct.asarray(ids, device=device)
    y = apply_with("expert_linear", (x, w, on_device), "extras", given, {"gate": gate}).numpy()
    read = [t.astype("f32").numpy() for t in (x, w, up)]
    wanted = expected(read[0], read[1], ids, read[2] if gate else None, shares)
    wanted = wanted if gate else wanted + residual
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5 * max(1.0, np.abs(wanted).max()))


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("format", BLOCKS)
def test_quantised_experts(device: ct.Device, format: str, gate: str, rows: int) -> None:
    """Those of the weights that the planes stand for, in float64."""
    picks, experts, n, random = 2, 4, 7, np.random.default_rng(rows)
    weight, up = (quantised(experts * n, 96, format, device, seed) for seed in (1, 2))
    k = weight.shape[1]
    ids = np.stack([random.permutation(experts)[:picks] for _ in range(rows)]).astype(np.int32)
    size = (rows, k) if gate else (rows, picks, k)
    x, shares, residual = (random.standard_normal(s).astype(np.float32)
                           for s in (size, (rows, picks), (rows, n)))  # fmt: skip
    w, v = (whole_of(q).reshape(experts, n, k) for q in (weight, up))
    x = (
        (x / (np.abs(w).max() * k)).astype(np.float32) if gate else x
    )  # a gate's sums are not to be past its bend
    given: dict[str, Any] = dict(zip(up_planes(len(up.planes)), up.planes, strict=True))
    if not gate:
        extras = {"shares": shares, "residual": residual}
        given = {name: ct.asarray(e, device=device) for name, e in extras.items()}
    operands = (ct.asarray(x, device=device), *weight.planes, ct.asarray(ids, device=device))
    attrs = {"gate": gate, "format": format, "experts": experts}
    y = apply_with("expert_linear", operands, "extras", given, attrs).numpy()
    wanted = expected(x, w, ids, v if gate else None, shares)
    wanted = wanted if gate else wanted + residual
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=4e-6 * np.abs(wanted).max())


@needs_ptxas
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_k", "q6_k", "iq4_xs", "mxfp4"])
def test_texts_of_quantised_experts_assemble(format: str, gate: str, tmp_path: Path) -> None:
    kind, experts, n, k = FORMATS[format], 8, 768, 2048
    planes = [make_spec(p.shape(experts * n, k // kind.block), p.dtype or dtype_of("f16"), 16)
              for p in kind.planes]  # fmt: skip
    x = make_spec((1, k) if gate else (1, 8, k), dtype_of("bf16"), 16)
    ids, y = make_spec((1, 8), dtype_of("i32"), 16), make_spec((1, n), x.dtype, 16)
    more = planes if gate else [make_spec((1, 8), dtype_of("f32"), 16), y]
    y = make_spec((1, 8, n), x.dtype, 16) if gate else y
    extras = up_planes(len(planes)) if gate else ("shares", "residual")
    attrs = {"extras": extras, "gate": gate, "format": format, "experts": experts}
    form = op_form(op.get("expert_linear"), (x, *planes, ids, *more), (y,), attrs)
    (call,) = form.lower(CUDA).calls
    report, _ = assemble(emit_ptx(traced(call), "sm_90a"), "sm_90a", tmp_path)
    assert resources(report)[1] == 0


# -- many rows: tiles of each expert's -------------------------------------------------------------


def mixture(
    device: ct.Device, sizes: tuple[int, ...], dtype: str, gate: str, at: Array | None = None,
    variant: str | None = "grouped", wide: bool = False,
) -> tuple[ct.Tensor, Array]:  # fmt: skip
    """The products by tiles, and in float64 those of the operands as they are stored.

    Args:
        sizes: rows, picks, experts, n, k; at: which rows are taken, in which order.
        wide: x is of f32, whatever the weights are of.
    """
    rows, picks, experts, n, k = sizes
    random = np.random.default_rng(rows + n)
    ids = random.integers(0, experts, (rows, picks)).astype(np.int32)
    x = random.standard_normal((rows, k) if gate else (rows, picks, k)).astype(np.float32)
    weights = [random.standard_normal((experts, n, k)).astype(np.float32) * k**-0.5 for _ in "wv"]
    shares, residual = (random.random(s, np.float32) for s in ((rows, picks), (rows, n)))
    if at is not None:
        ids, x, shares, residual = ids[at], x[at], shares[at], residual[at]
    given = ct.asarray(x, "f32" if wide else dtype, device)
    w, up = (ct.asarray(value, dtype, device) for value in weights)
    extras = {"up": up}
    if not gate:
        extras = {"shares": ct.asarray(shares, device=device),
                  "residual": ct.asarray(residual, device=device)}  # fmt: skip
    attrs: dict[str, Any] = {"gate": gate, "variant": variant}
    y = apply_with("expert_linear", (given, w, ct.asarray(ids, device=device)), "extras", extras,
                   attrs)  # fmt: skip
    read = [t.astype("f32").numpy() for t in (given, w, up)]
    wanted = expected(read[0], read[1], ids, read[2] if gate else None, shares)
    return y, wanted if gate else wanted + residual


@pytest.mark.devices("simulator", "cuda")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 2, 8), (64, 3, 5, 66, 40), (65, 3, 5, 130, 72), (150, 2, 3, 7, 136),
              (300, 2, 2, 34, 24), (5, 2, 200, 16, 16)],
)  # fmt: skip
def test_tiles_of_experts(device: ct.Device, sizes: tuple[int, ...], gate: str, dtype: str) -> None:
    """Experts of no row, of one, of more than a tile; rows that name an expert twice."""
    y, wanted = mixture(device, sizes, dtype, gate)
    limit = dtype_of(dtype).epsilon * np.abs(wanted).max()
    np.testing.assert_allclose(y.astype("f32").numpy(), wanted, rtol=0, atol=limit)


@pytest.mark.parametrize("order", ["forward", "shuffled"])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(
    "sizes", [(300, 2, 2, 70, 40), (129, 3, 3, 257, 33), (9, 2, 3, 130, 70), (130, 2, 257, 5, 16)]
)
def test_tiles_of_experts_within_the_limits_of_a_gpu(
    sizes: tuple[int, ...], gate: str, order: str
) -> None:
    """Both tiles that only GPUs have room for, and as many threads as put pairs in order there."""
    device: Any = ct.device("simulator", pool="exact")
    device.backend.order = order
    device.backend.caps = replace(device.caps, max_shared=227 << 10, max_workgroup=1024)
    y, wanted = mixture(device, sizes, "bf16", gate)
    limit = dtype_of("bf16").epsilon * np.abs(wanted).max()
    np.testing.assert_allclose(y.astype("f32").numpy(), wanted, rtol=0, atol=limit)


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_portable_tiles_within_the_least_limits(gate: str, dtype: str) -> None:
    """Of workgroup memory as WebGPU counts it."""
    calls = of_30b(1024, gate, kind=dtype).lower(Caps("wgsl")).calls
    assert calls[-1 if gate else -2].kernel.name == "expert_tiled"
    for call in calls:
        program_of(traced(call), Caps("wgsl"))


@pytest.mark.parametrize("order", ["forward", "shuffled"])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("sizes", [(300, 2, 2, 70, 40), (150, 2, 3, 129, 33), (9, 2, 3, 5, 70)])
@pytest.mark.parametrize(("dtype", "wide"), [("f32", True), ("bf16", True), ("f16", False)])
def test_portable_tiles_within_the_limits_of_a_gpu(
    sizes: tuple[int, ...], gate: str, dtype: str, wide: bool, order: str
) -> None:
    """Both tiles that the least limits have no room for."""
    device: Any = ct.device("simulator", pool="exact")
    device.backend.order = order
    device.backend.caps = replace(device.caps, max_shared=48 << 10)
    y, wanted = mixture(device, sizes, dtype, gate, variant="tiles", wide=wide)
    limit = (2e-6 if wide else dtype_of(dtype).epsilon) * np.abs(wanted).max()
    np.testing.assert_allclose(y.astype("f32").numpy(), wanted, rtol=0, atol=limit)


PORTABLE = ("simulator", "webgpu", "webgpu-minimum", "webgpu-hardware", "cuda")


@pytest.mark.devices(*PORTABLE)
@pytest.mark.parametrize(("dtype", "wide"), [("f32", True), ("bf16", True), ("f16", False)])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (65, 3, 5, 130, 72), (150, 2, 3, 7, 33), (5, 2, 200, 16, 16),
              (33, 8, 2, 34, 200)],
)  # fmt: skip
def test_tiles_of_experts_on_any_device(
    device: ct.Device, sizes: tuple[int, ...], gate: str, dtype: str, wide: bool
) -> None:
    """Two heights of tiles; outputs and depths that fill none."""
    y, wanted = mixture(device, sizes, dtype, gate, variant="tiles", wide=wide)
    limit = (2e-6 if wide else dtype_of(dtype).epsilon) * np.abs(wanted).max()
    np.testing.assert_allclose(y.astype("f32").numpy(), wanted, rtol=0, atol=limit)


def test_experts_of_rows_whose_products_are_above_a_binding() -> None:
    """Many picks of few experts: no part of the rows has room for them, and none needs it."""
    y, wanted = mixture(windowed("simulator"), (3, 16, 4, 200, 1), "f32", "", variant=None)
    np.testing.assert_allclose(y.numpy(), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.devices("simulator", "cuda")
@pytest.mark.parametrize("gate", ["", "silu"])
def test_a_row_has_the_same_bits_among_others(device: ct.Device, gate: str) -> None:
    sizes = (150, 2, 3, 34, 40)
    whole = mixture(device, sizes, "bf16", gate)[0].numpy()
    for at in (np.random.default_rng(0).permutation(150), np.arange(149, 70, -1), np.array([77])):
        np.testing.assert_array_equal(
            mixture(device, sizes, "bf16", gate, at)[0].numpy(), whole[at]
        )


def of_30b(rows: int, gate: str, experts: int = 128, inner: int = 768, kind: str = "bf16") -> Any:
    """The form of a layer of 128 experts, 8 picks of each row."""
    i32, f32 = dtype_of("i32"), dtype_of("f32")
    n, k = (inner, 2048) if gate else (2048, inner)
    x = make_spec((rows, k) if gate else (rows, 8, k), dtype_of(kind), 16)
    w, ids = make_spec((experts, n, k), x.dtype, 16), make_spec((rows, 8), i32, 16)
    y = make_spec((rows, 8, n) if gate else (rows, n), x.dtype, 16)
    shares = make_spec((rows, 8), f32, 16)
    more, extras = ((w,), ("up",)) if gate else ((shares, y), ("shares", "residual"))
    attrs = {"extras": extras, "gate": gate}
    return op_form(op.get("expert_linear"), (x, w, ids, *more), (y,), attrs)


@needs_ptxas
@pytest.mark.parametrize("rows", [64, 512, 2048])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_texts_of_tiles_of_experts_assemble(gate: str, rows: int, tmp_path: Path) -> None:
    calls = of_30b(rows, gate).lower(replace(CUDA, max_shared=227 << 10)).calls
    names = ["expert_count"] * (rows > 64) + ["expert_order", "expert_tiles"]
    assert [call.kernel.name for call in calls] == names + ["expert_sum"] * (not gate)
    for call in calls:
        report, _ = assemble(emit_ptx(traced(call), "sm_90a"), "sm_90a", tmp_path)
        assert resources(report)[1] == 0


def test_tiles_of_experts_where_they_pay() -> None:
    def names(caps: Caps, rows: int, kind: str = "bf16") -> list[str]:
        return [call.kernel.name for call in of_30b(rows, "silu", kind=kind).lower(caps).calls]

    assert names(CUDA, 23) == ["expert_linear"]
    assert names(CUDA, 24)[-1] == "expert_tiles"
    for caps, kind in ((CUDA, "f32"), (replace(CUDA, arch=""), "bf16")):
        assert names(caps, 63, kind) == ["expert_linear"]
        assert names(caps, 64, kind)[-1] == "expert_tiled"
    assert names(Caps("wgsl"), 64)[-1] == "expert_tiled"
    assert names(Caps("wgsl", family="software"), 512) == ["expert_linear"]
    few = of_30b(64, "silu", experts=2, inner=64, kind="f32").lower(Caps("wgsl")).calls
    assert [call.kernel.name for call in few] == ["expert_linear"]  # tiles are too few


@pytest.mark.devices("simulator", "cuda")
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("format", ["q8_0", "q4_k", "q6_k", "mxfp4"])
def test_quantised_experts_as_tensors(device: ct.Device, format: str, gate: str) -> None:
    """Weights are rounded to x's dtype once."""
    picks, experts, n, random = 2, 4, 10, np.random.default_rng(5)
    weight, up = (quantised(experts * n, 96, format, device, seed) for seed in (1, 2))
    k, rows = weight.shape[1], 70
    ids = random.integers(0, experts, (rows, picks)).astype(np.int32)
    w, v = (whole_of(q).reshape(experts, n, k) for q in (weight, up))
    x = random.standard_normal((rows, k) if gate else (rows, picks, k)) / (np.abs(w).max() * k)
    given = ct.asarray(x.astype(np.float32), "bf16", device)
    shares = random.random((rows, picks), np.float32)
    more: dict[str, Any] = dict(zip(up_planes(len(up.planes)), up.planes, strict=True))
    more = more if gate else {"shares": ct.asarray(shares, device=device)}
    operands = (given, *weight.planes, ct.asarray(ids, device=device))
    attrs = {"gate": gate, "format": format, "experts": experts, "variant": "dequantized"}
    y = apply_with("expert_linear", operands, "extras", more, attrs).astype("f32").numpy()
    wanted = expected(given.astype("f32").numpy(), w, ids, v if gate else None, shares)
    limit = 2 * dtype_of("bf16").epsilon * np.abs(wanted).max()
    np.testing.assert_allclose(y, wanted, rtol=0, atol=limit)


LARGE = replace(CUDA, max_binding=1 << 34)  # as the driver's devices have it


def of_q4_k(dense: Any) -> Any:
    """A form of `of_30b` with quantised weights."""
    q4_k, f16, gate = FORMATS["q4_k"], dtype_of("f16"), dense.attrs.gate
    x, w, ids, *more = dense.inputs
    experts, n, k = w.shape
    planes = tuple(make_spec(p.shape(experts * n, k // q4_k.block), p.dtype or f16, 16)
                   for p in q4_k.planes)  # fmt: skip
    extras = up_planes(len(planes)) if gate else ("shares", "residual")
    attrs = {"extras": extras, "gate": gate, "format": "q4_k", "experts": experts}
    inputs = (x, *planes, ids, *(planes if gate else more))
    return op_form(op.get("expert_linear"), inputs, dense.outputs, attrs)


@pytest.mark.parametrize("gate", ["", "silu"])
def test_many_rows_of_quantised_experts_have_their_weights_as_tensors(gate: str) -> None:
    """Each is written once, before the tiles; a few rows read the planes."""

    def names(rows: int) -> list[str]:
        dense = of_30b(rows, gate)
        lowered = of_q4_k(dense).lower(LARGE)
        if rows == 128:
            wholes = [spec.nbytes for spec in lowered.temporaries if len(spec.shape) == 2]
            assert wholes.count(dense.inputs[1].nbytes) == (2 if gate else 1)
        return [call.kernel.name for call in lowered.calls]

    tail = ["expert_count", "expert_order", "expert_tiles"] + ["expert_sum"] * (not gate)
    assert names(127) == ["expert_linear"]
    assert names(128) == ["dequantize"] * (2 if gate else 1) + tail


@pytest.mark.parametrize(
    ("most", "inner", "binding"), [(128, 768, 384 << 20), (1023, 2048, 1 << 34)]
)
def test_quantised_experts_that_have_no_room_as_tensors(
    most: int, inner: int, binding: int
) -> None:
    """One expert more has more bytes than a launch sees, or more elements than it counts."""
    caps = replace(LARGE, max_binding=binding)
    for experts, first in ((most, "dequantize"), (most + 1, "expert_linear")):
        calls = divided(of_q4_k(of_30b(8192, "silu", experts, inner)), caps).calls
        assert calls[0].kernel.name == first and len(calls) == (5 if experts == most else 1)


def within_wider(plane: ct.Tensor, before: int) -> ct.Tensor:
    """The same elements, in rows of which they are a part: `before` others, then they, then 8."""
    ends = [ct.zeros((*plane.shape[:-1], n), dtype=plane.dtype, device=plane.device)
            for n in (before, 8) if n]  # fmt: skip
    wide = ct.concat([*ends[:-1], plane, ends[-1]], axis=-1).numpy()
    on_device = ct.asarray(wide, plane.dtype, plane.device)
    return on_device[..., before : before + plane.shape[-1]]


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("variant", [None, "grouped"])
@pytest.mark.parametrize("before", [0, 8, 3])
@pytest.mark.parametrize("which", [0, 1])
def test_gate_and_up_that_lie_in_different_ways(
    device: ct.Device, which: int, before: int, variant: str | None
) -> None:
    if variant and (before == 3 or not device.caps.tensor_cores):
        pytest.skip("rows that start on 16 bytes, on tensor cores")
    random, (rows, picks, experts, n, k) = np.random.default_rng(0), (9, 2, 3, 10, 24)
    ids = random.integers(0, experts, (rows, picks)).astype(np.int32)
    sizes = (rows, k), (experts, n, k), (experts, n, k)
    x, *weights = (
        ct.asarray(random.standard_normal(s).astype(np.float32), "bf16", device) for s in sizes
    )
    read = [t.astype("f32").numpy() for t in (x, *weights)]
    weights[which] = within_wider(weights[which], before)
    operands, attrs = (x, weights[0], ct.asarray(ids, device=device)), {"gate": "silu"}
    attrs |= {"variant": variant} if variant else {}
    y = apply_with("expert_linear", operands, "extras", {"up": weights[1]}, attrs)
    wanted = expected(read[0], read[1], ids, read[2], ids)
    limit = dtype_of("bf16").epsilon * np.abs(wanted).max()
    np.testing.assert_allclose(y.astype("f32").numpy(), wanted, rtol=0, atol=limit)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("before", "also"), [(4, None), (0, None), (1, 0), (0, 1)])
def test_planes_of_gate_and_up_that_lie_in_different_ways(
    device: ct.Device, number: int, before: int, also: int | None
) -> None:
    """`also`: those of the gate too, so that rows are as far apart, but start elsewhere."""
    random, (rows, picks, experts, n) = np.random.default_rng(0), (3, 2, 4, 7)
    weight, up = (quantised(experts * n, 96, "q4_0", device, seed) for seed in (1, 2))
    ids = random.integers(0, experts, (rows, picks)).astype(np.int32)
    w, v = (whole_of(q).reshape(experts, n, -1) for q in (weight, up))
    x = random.standard_normal((rows, w.shape[-1])) / (np.abs(w).max() * w.shape[-1])
    x = x.astype(np.float32)
    planes, ups = [*weight.planes], [*up.planes]
    ups[number] = within_wider(ups[number], before)
    if also is not None:
        planes[number] = within_wider(planes[number], also)
    operands = (ct.asarray(x, device=device), *planes, ct.asarray(ids, device=device))
    given = dict(zip(up_planes(len(ups)), ups, strict=True))
    attrs = {"gate": "silu", "format": "q4_0", "experts": experts}
    y = apply_with("expert_linear", operands, "extras", given, attrs).numpy()
    wanted = expected(x, w, ids, v, ids)
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=4e-6 * np.abs(wanted).max())


@pytest.mark.devices(*EVERY)
def test_an_expert_that_is_not_there_gives_nan(device: ct.Device) -> None:
    x, w = ct.ones((3, 2, 4), device=device), ct.ones((2, 3, 4), device=device)
    ids = ct.asarray(np.array([[0, 1], [0, 2], [-1, 1]], np.int32), device=device)
    shares = ct.ones((3, 2), device=device)
    y = apply_with("expert_linear", (x, w, ids), "extras", {"shares": shares}, {"gate": ""})
    assert np.isnan(y.numpy()).all(1).tolist() == [False, True, True]
    assert (y.numpy()[0] == 8).all()


def test_expert_linear_refuses() -> None:
    x, w = ct.zeros((4, 8), device="cpu"), ct.zeros((5, 6, 8), device="cpu")
    ids = ct.zeros((4, 2), "i32", device="cpu")
    gate, down = {"gate": "silu"}, {"gate": ""}
    each, shares = ct.zeros((4, 2, 8), device="cpu"), ct.zeros((4, 2), device="cpu")
    for inputs, extras, attrs, error, text in (
        ((x, w, ids.astype("f32")), {"up": w}, gate, DTypeError, "i32 ids, got f32"),
        ((x.astype("i32"), w, ids), {"up": w}, gate, DTypeError, "float dtypes"),
        ((x, w, ids), {"up": w.astype("f16")}, gate, DTypeError, "up of f32, got f16"),
        ((x, w[0], ids), {"up": w}, gate, ShapeError, r"weight \[experts, n, k\]"),
        ((x, w[:0], ids), {"up": w}, gate, ShapeError, "none of them 0"),
        ((x, w, ids), {}, gate, ShapeError, "up with a gate"),
        ((each, w, ids), {"up": w}, down, ShapeError, "else shares"),
        ((each, w, ids), {"up": w}, gate, ShapeError, r"x \[4, 8\], got \[4, 2, 8\]"),
        ((x, w, ids), {"shares": shares}, down, ShapeError, r"x \[4, 2, 8\]"),
        ((each, w, ids), {"shares": x}, down, ShapeError, r"shares \[4, 2\]"),
        ((each, w, ids), {"shares": shares, "residual": x}, down, ShapeError,
         r"residual \[4, 6\], got \[4, 8\]"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            apply_with("expert_linear", inputs, "extras", extras, attrs)
