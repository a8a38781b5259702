"""The table of quantised formats: planes as GGUF's own package has them; what takes a QTensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import nn
from centella.dtypes import dtype_of
from centella.emit.ptx import emit_ptx
from centella.op import op
from centella.ops.quant.format import SYMBOLS
from centella.ops.quant.table import FORMATS
from centella.plan.divide import divided
from centella.specs import Caps, make_spec
from centella.tensors import quantizers
from centella.tensors.functional import normed_linear
from centella.tensors.qtensor import Stacked
from centella.tensors.quantizers import QUANTIZERS
from centella.weights.gguf import KINDS
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.support.launched import op_form, traced

Array = np.ndarray[Any, Any]
# Bytes of each plane in a block of a file, in its order there.
FILES = {
    "q8_0": {"scale": 2, "stored": 32},
    "q4_0": {"scale": 2, "stored": 16},
    "q4_1": {"scale": 2, "low": 2, "stored": 16},
    "q5_0": {"scale": 2, "high": 4, "stored": 16},
    "q5_1": {"scale": 2, "low": 2, "high": 4, "stored": 16},
}
BLOCK = 32
GGUF = [name for name, kind in FORMATS.items() if kind.from_blocks]
KINDS_OF_X = [(n, "f32") for n in FORMATS] + [
    (n, d) for n in ("q8_0", "q4_0") for d in ("f16", "bf16")
]
BLOCKS = pytest.mark.parametrize("name", FILES)
EVERY = pytest.mark.parametrize("name", FORMATS)
CUDA = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=48 << 10,
            subgroups=True, arch="sm_90a")  # fmt: skip


def weight_of(n: int, k: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 3, (n, k // BLOCK, 1))
    weight = (rng.standard_normal((n, k // BLOCK, BLOCK)) * sizes).astype(np.float32)
    weight[0, 0] = 0
    weight[-1, -1] = 5
    return weight.reshape(n, k)


def planes_of(raw: Array, name: str) -> list[Array]:
    """The planes of blocks as GGUF's files have them."""
    sizes = FILES[name]
    blocks = raw.reshape(len(raw), -1, sum(sizes.values()))
    planes, first = {}, 0
    for plane, size in sizes.items():
        planes[plane] = np.ascontiguousarray(blocks[..., first : first + size])
        first += size
    kinds = {p.name: p.dtype.numpy if p.dtype else np.float16 for p in FORMATS[name].planes}
    return [planes[n].view(kind).reshape(len(raw), -1) for n, kind in kinds.items()]


def blocks_of(weight: Array, name: str) -> Array:
    """A weight as a file has it, [rows, blocks, bytes]; a random one where nothing writes it."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import quantized

    raw = quantized(weight, name.upper())
    return raw.reshape(len(raw), weight.shape[1] // FORMATS[name].block, -1)


def quantised(n: int, k: int, name: str, device: ct.Device | str, seed: int = 0) -> ct.QTensor:
    """A weight in a format, by its quantiser or of a file's blocks; rows of k or of one block."""
    kind = FORMATS[name]
    if kind.encode is not None:
        return ct.quantize(weight_of(n, k, seed), name, device=device)
    assert kind.from_blocks is not None
    planes = kind.from_blocks(blocks_of(weight_of(n, columns(name, k), seed), name))
    return ct.QTensor(tuple(ct.asarray(p, device=device) for p in planes), name)


def columns(name: str, k: int) -> int:
    """k, or two blocks."""
    return k if k % FORMATS[name].block == 0 else 2 * FORMATS[name].block


def whole_of(weight: ct.QTensor) -> Array:
    """The values that a weight stands for, by the formula in float64."""
    arrays = (plane.numpy() for plane in weight.planes)
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
    return weight.format.decode(*wide)


@BLOCKS
def test_planes_are_those_of_gguf(name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    kind = getattr(pytest.importorskip("gguf").GGMLQuantizationType, name.upper())
    weight = weight_of(7, 160)
    raw = quants.quantize(weight, kind)
    stored, encode = planes_of(raw, name), FORMATS[name].encode
    assert encode is not None
    for ours, theirs in zip(encode("test", weight), stored, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    wide = [p.astype(np.float32) if p.dtype == np.float16 else p for p in stored]
    np.testing.assert_array_equal(FORMATS[name].decode(*wide), quants.dequantize(raw, kind))


@pytest.mark.parametrize("name", GGUF)
def test_blocks_of_a_file_become_planes(name: str) -> None:
    """They stand for what the package says, bit for bit, in 5 % more bytes at most."""
    quants = pytest.importorskip("gguf.quants")
    kind = getattr(pytest.importorskip("gguf").GGMLQuantizationType, name.upper())
    raw, from_blocks = blocks_of(weight_of(7, 768), name), FORMATS[name].from_blocks
    assert from_blocks is not None
    planes = from_blocks(raw)
    wide = [p.astype(np.float32) if p.dtype == np.float16 else p for p in planes]
    wanted = quants.dequantize(raw.reshape(7, -1), kind)
    np.testing.assert_array_equal(FORMATS[name].decode(*wide), wanted)
    assert sum(p.nbytes for p in planes) <= 1.05 * raw.nbytes
    specs = [ct.asarray(p, device="cpu").spec for p in planes]
    assert FORMATS[name].check("test", specs) == (7, 768)
    assert all(p.shape[0] == 0 for p in from_blocks(raw[:0]))


def test_formats_are_those_of_the_gguf_package() -> None:
    """Each format with blocks is a type of files, as the package numbers it; quantisers are told.

    A type that is missing: `KINDS` in weights/gguf.py; a layout: `FILES` here.
    """
    gguf = pytest.importorskip("gguf")
    kinds = {kind.name.lower(): kind for kind in KINDS.values() if kind.dtype is None}
    assert kinds.keys() == set(GGUF)
    for code, kind in KINDS.items():
        form = gguf.GGMLQuantizationType[kind.name]
        assert (code, (kind.block, kind.size)) == (form.value, gguf.GGML_QUANT_SIZES[form])
    assert {n for n in GGUF if FORMATS[n].encode is not None} == FILES.keys()


def test_pages_have_every_format() -> None:
    """The docstring of `ct.QTensor`, and the table of docs/generate.md, bytes included."""
    files = {kind.name.lower(): kind for kind in KINDS.values()}
    page = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines()]
    told = {row[1]: [row[0], *row[3:]] for row in rows if len(row) == 7}
    for name, kind in FORMATS.items():
        assert f'"{name}"' in str(ct.QTensor.__doc__), name
        file = files.get(name)
        shapes = [(p.shape(1, 256 // kind.block), p.dtype or dtype_of("f16")) for p in kind.planes]
        if not kind.by_row:
            assert told[f"`{name}`"] == [
                file.name if file else "",
                str(256 // file.block * file.size) if file else "",
                str(sum(shape[1] * dtype.itemsize for shape, dtype in shapes)),
                "yes" if kind.encode is not None else "",
                "yes" if name in QUANTIZERS else "",
            ], name


@pytest.mark.parametrize("name", [n for n, kind in FORMATS.items() if kind.encode])
def test_what_a_quantiser_makes_is_near(name: str) -> None:
    """Within a step, where the numbers of a block's bits are as far apart as its range allows."""
    kind, weight = FORMATS[name], weight_of(7, 160)
    assert kind.encode is not None
    planes = kind.encode("test", weight)
    block = 160 if kind.by_row else kind.block
    bits = sum(8 * p.dtype.itemsize * p.length for p in kind.planes if p.dtype) / kind.block
    wide = [p.astype(np.float64) if p.dtype.kind == "f" else p for p in planes]
    blocks = weight.reshape(7, -1, block)
    apart = np.abs(kind.decode(*wide).reshape(blocks.shape) - blocks)
    step = np.abs(blocks).max(-1, keepdims=True) * 2 ** (1 - bits)
    assert (apart <= 1.1 * step + 1e-7).all()  # factors are rounded to f16
    assert apart.mean() <= 0.3 * step.mean()  # a quarter, where numbers are rounded


@EVERY
def test_formats_keep_to_what_kernels_read(name: str) -> None:
    """The first plane has bytes; steps end with blocks; names are those of operands."""
    kind = FORMATS[name]
    first = kind.planes[0]
    assert first.dtype is not None and first.dtype.itemsize == 1
    assert kind.block == 1 or kind.block % kind.step == 0
    assert len(kind.planes) <= len(SYMBOLS)
    assert len({p.name for p in kind.planes}) == len(kind.planes)
    assert kind.by_row == any(not p.length for p in kind.planes)


@pytest.mark.parametrize(("name", "dtype"), KINDS_OF_X)
def test_products_of_few_rows_and_of_many(device: ct.Device, name: str, dtype: str) -> None:
    """1e-6 of the terms' magnitudes beside the formula in float64; in 16 bits two of their ulps."""
    n, k = 21, columns(name, 96)
    weight = quantised(n, k, name, device)
    wide, bias = whole_of(weight), np.linspace(-1, 1, n)
    for m in (1, 3, 17) if dtype == "f32" else (1, 17):
        values = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
        x = ct.asarray(values, dtype, device)
        added = ct.asarray(bias, "f32", device)
        got = ct.linear(x, weight, added, activation="relu", dtype="f32").numpy()
        exact = x.astype("f32").numpy().astype(np.float64)
        near = np.abs(exact) @ np.abs(wide).T + np.abs(bias)
        epsilon = 1e-6 if dtype == "f32" else 2 * dtype_of(dtype).epsilon
        assert (np.abs(got - np.maximum(exact @ wide.T + bias, 0)) <= epsilon * near).all(), m


@EVERY
def test_a_weight_made_whole_and_rows_of_it(device: ct.Device, name: str) -> None:
    weight = quantised(21, 96, name, device)
    wide = whole_of(weight)
    assert weight.shape == (21, columns(name, 96)) and weight.format is FORMATS[name]
    assert weight.nbytes == sum(p.nbytes for p in weight.planes)
    np.testing.assert_allclose(weight.dequantize().numpy(), wide, rtol=1e-6, atol=1e-7)
    ids = ct.asarray(np.array([[3, 0], [20, 21]], np.int32), device=device)
    rows = ct.embedding(ids, weight).numpy()
    np.testing.assert_allclose(rows[0], wide[[3, 0]], rtol=1e-6, atol=1e-7)
    assert np.isnan(rows[1, 1]).all() and rows.dtype == np.float32
    assert ct.embedding(ids, weight, "f16").dtype is ct.f16


@EVERY
def test_launches_of_a_qtensor(device: ct.Device, name: str) -> None:
    k = columns(name, 64)
    weight = quantised(8, k, name, device)
    # Factors of rows are the epilogue's; on the CPU a formula is one call.
    many = 1 if weight.format.by_row or device.caps.target == "numpy" else 2
    for m, launches in ((1, 1), (16, 1), (17, many)):
        x = ct.ones((m, k), device=device)
        with ct.ledger() as led:
            ct.linear(x, weight).numpy()
        assert led.launches == launches
    with ct.ledger() as led:
        ct.embedding(ct.asarray(np.array([1], np.int32), device=device), weight).numpy()
    assert led.launches == 1


@EVERY
def test_layers_and_caches_take_a_qtensor(device: ct.Device, name: str) -> None:
    k = columns(name, 64)
    weight = quantised(9, k, name, device)
    x = ct.ones((2, k), device=device)
    wanted = ct.linear(x, weight).numpy()
    layer = nn.Linear(k, 9)
    layer.weight, layer.bias = weight, ct.zeros(9, device=device)
    np.testing.assert_array_equal(layer(x).numpy(), wanted)
    assert f"weight.{name}.stored [9, " in repr(layer)
    state = layer.state_dict()
    assert {n for n in state if n != "bias"} == {
        f"weight.{name}.{p.name}" for p in weight.format.planes
    }
    arrays = {n: t.numpy() for n, t in state.items()}
    for tensors in (state, arrays):  # a format stays, whatever dtype the others get
        again = nn.Linear(k, 9)
        again.load_parameters(tensors, device=device, dtype="f16")
        np.testing.assert_array_equal(again(x).numpy(), wanted)
        assert again.bias is not None and again.bias.dtype is ct.f16
    for broken in (dict([*state.items()][1:]), state | {"more": state["bias"]}):
        empty = nn.Linear(k, 9)
        with pytest.raises(ct.WeightsError, match=r"missing|left over: more"):
            empty.load_parameters(broken, device=device)
        assert not [*empty.named_parameters()]
    with pytest.raises(ct.WeightsError, match=r"weight: QTensor: expected planes of \[9, 32\]"):
        nn.Linear(32, 9).load_parameters(state, device=device)
    table = nn.Embedding(9, k)
    table.weight = weight
    ids = ct.asarray(np.arange(9, dtype=np.int32), device=device)
    np.testing.assert_array_equal(table(ids).numpy(), weight.dequantize().numpy())
    cache = ct.MatmulCache(device)
    cache.upload_weight("w", weight)
    if weight.format.encode is not None:
        cache.upload_weight("again", weight_of(9, k), name)
    for cached in cache.weights():
        np.testing.assert_array_equal(cache.matmul(cached.name, x).numpy(), wanted)
        assert cached.shape == (9, k)
    assert cache.weights()[0].nbytes == weight.storage_bytes


def test_weights_of_several_formats_are_one(device: ct.Device) -> None:
    """The products of the parts beside each other, with what follows a product."""
    parts = (quantised(5, 64, "q4_1", device), ct.ones((3, 64), device=device),
             quantised(4, 64, "q8_0", device))  # fmt: skip
    weight = Stacked(parts)
    assert weight.shape == (12, 64) and weight.nbytes == sum(p.nbytes for p in parts)
    x = ct.asarray(np.random.default_rng(0).standard_normal((3, 64)), "f32", device)
    bias, residual = ct.arange(12, dtype="f32", device=device), ct.ones((3, 12), device=device)
    got = ct.linear(x, weight, bias, activation="relu", residual=residual, alpha=0.5).numpy()
    each = [ct.linear(x, p, alpha=0.5).numpy() for p in parts]
    wanted = np.maximum(np.concatenate(each, -1) + np.arange(12, dtype=np.float32), 0) + 1
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    gated = normed_linear(x, weight, gate="silu").numpy()
    h = np.concatenate([ct.linear(x, p).numpy() for p in parts], -1)
    np.testing.assert_allclose(
        gated, h[:, :6] / (1 + np.exp(-h[:, :6])) * h[:, 6:], rtol=1e-5, atol=1e-4
    )


def test_a_qtensor_moves_and_prints() -> None:
    weight = ct.quantize(weight_of(4, 64), "q5_0", device="cpu")
    assert repr(weight).startswith("<QTensor [4, 64] q5_0 on ")
    assert weight.to("cpu") is weight
    moved = weight.to("simulator")
    assert moved.device.name != weight.device.name
    np.testing.assert_array_equal(whole_of(moved), whole_of(weight))


def test_an_int8_qtensor_is_quantize_int8() -> None:
    stored, scale = ct.quantize_int8(weight_of(5, 64))
    weight = ct.quantize(ct.asarray(weight_of(5, 64), device="cpu"), "int8")
    np.testing.assert_array_equal(weight.planes[0].numpy(), stored)
    np.testing.assert_array_equal(weight.planes[1].numpy(), scale)
    x = ct.ones((2, 64), device="cpu")
    pair = ct.linear(x, weight.planes[0], scale=weight.planes[1])
    np.testing.assert_array_equal(ct.linear(x, weight).numpy(), pair.numpy())


@needs_ptxas
@EVERY
def test_texts_assemble(name: str, tmp_path: Path) -> None:
    kind = FORMATS[name]
    planes = tuple(
        make_spec(p.shape(40, 256 // kind.block), p.dtype or dtype_of("f16"), 16)
        for p in kind.planes
    )
    ids, y = make_spec((3,), dtype_of("i32"), 16), make_spec((3, 256), dtype_of("f16"), 16)
    forms = [op_form(op.get("embedding"), (ids, *planes), (y,), {"format": name, "dtype": "f16"})]
    if not kind.by_row:
        attrs = {"extras": (), "activation": "silu", "format": name}
        for m in (1, 9):
            x, y = (make_spec((m, k), dtype_of("f16"), 16) for k in (256, 40))
            forms.append(op_form(op.get("linear"), (x, *planes), (y,), attrs))
    for form in forms:
        (call,) = form.lower(CUDA).calls
        report, _ = assemble(emit_ptx(traced(call), "sm_90a"), "sm_90a", tmp_path)
        if kind.outs and form.outputs[0].shape == (1, 40):  # one row: what a decode step has
            assert resources(report)[1] == 0


def test_a_weight_larger_than_a_binding_is_made_whole_in_parts() -> None:
    """More rows than are thin: parts of the outputs, each with a temporary that fits."""
    kind = FORMATS["q4_0"]
    caps = Caps("wgsl", max_binding=1 << 16)
    planes = tuple(make_spec(p.shape(512, 8), p.dtype or dtype_of("f16"), 16) for p in kind.planes)
    x, y = (make_spec((20, k), dtype_of("f32"), 16) for k in (256, 512))
    attrs = {"extras": (), "activation": "", "format": "q4_0"}
    lowered = divided(op_form(op.get("linear"), (x, *planes), (y,), attrs), caps)
    assert all(t.storage_bytes <= caps.max_binding for t in lowered.temporaries)
    names = [c.kernel.name for c in lowered.calls]
    assert names[:2] == ["dequantize", "gemm"] and len(names) == 2 * names.count("gemm") == 16


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda w, x: ct.quantize(w, "q3_9"), ct.DTypeError, "int8, q8_0, .* q5_1, got 'q3_9'"),
        (lambda w, x: ct.quantize(w, "iq4_nl"), ct.DTypeError, "q5_1, got iq4_nl, which"),
        (lambda w, x: ct.quantize(np.zeros((2, 256)), "q4_k"), ct.DTypeError, "no quantiser"),
        (lambda w, x: ct.quantize(np.zeros((2, 33)), "q4_1"), ct.ShapeError, "multiple of 32"),
        (lambda w, x: ct.quantize(np.zeros((2, 32), "i4"), "q5_0"), ct.DTypeError, "floats"),
        (lambda w, x: ct.quantize(np.full((2, 32), np.nan), "q4_1"), ct.DTypeError, "finite"),
        (lambda w, x: ct.QTensor(w.planes[:1], "q4_0"), ct.ShapeError, "expected 2 planes, got 1"),
        (lambda w, x: ct.QTensor(w.planes, "q8_0"), ct.DTypeError, "i8 numbers and float factors"),
        (lambda w, x: ct.QTensor(w.planes, "q4_0", (2, 64)), ct.ShapeError, "planes of"),
        (lambda w, x: ct.linear(x, w, scale=x), ct.DTypeError, "no scale= with a QTensor"),
        (lambda w, x: ct.linear(x, Stacked((w, w)), x), ct.ShapeError, r"bias \[..., 6\]"),
        (lambda w, x: ct.linear(x, Stacked((w, w)), scale=x), ct.DTypeError, "no scale="),
        (lambda w, x: Stacked((w, x[:, :32])), ct.ShapeError, r"expected weights \[n, k\]"),
        (lambda w, x: ct.linear(x[:, :32], w), ct.ShapeError, r"expected x \[\.\.\., 64\]"),
        (lambda w, x: normed_linear(x[:, :32], w), ct.ShapeError, r"\[\.\.\., 64\]"),
        (lambda w, x: normed_linear(x, w, norm=x[0, :32]), ct.ShapeError, "64"),
        (lambda w, x: normed_linear(x[:1], w, gate="silu"), ct.ShapeError, "even"),
        (lambda w, x: ct.embedding(x, w), ct.DTypeError, "expected i32 ids"),
        (lambda w, x: w.dequantize("i8"), ct.DTypeError, "expected a float dtype, got i8"),
        (lambda w, x: ct.MatmulCache("cpu").upload_weight("w", w, "f16"), ct.DTypeError, "QTensor"),
    ],
)  # fmt: skip
def test_mistakes(call: Any, kind: type[Exception], text: str) -> None:
    weight = ct.quantize(weight_of(3, 64), "q4_0", device="cpu")
    with pytest.raises(kind, match=text):
        call(weight, ct.ones((2, 64), device="cpu"))


# -- quantising on the device ---------------------------------------------------------------------


def weight_of_corners() -> Array:
    """Ties of amounts and of roundings, a block of zeros, a factor without a finite inverse."""
    weight = weight_of(24, 96)
    weight[1, :32] = np.tile([2.0, -2.0], 16)
    weight[2, :32] = np.tile([-2.0, 2.0], 16)
    weight[3, :32] = np.concatenate([[127.0], np.arange(31) - 15.5])
    weight[4, :32] = 1e-39
    weight[5, :32] = np.concatenate([[-8.0], np.arange(31) / 2 - 7.5])
    return weight


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_device_quantises_as_the_host_does(
    device: ct.Device, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit on the host; GPUs may round a quotient otherwise, which moves a tie by a step."""
    monkeypatch.setattr(quantizers, "PART", 7 * 4 * 96)  # parts of 7 rows, and one of 3
    weight = ct.asarray(weight_of_corners(), dtype, device)
    wanted = ct.quantize(weight, name)
    got, bad = quantizers.quantized(weight, name)
    assert got.format is wanted.format and got.shape == (24, 96) and bad.numpy() == 0
    if device.caps.family in ("cpu", "simulator"):
        for ours, theirs in zip(got.planes, wanted.planes, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    scale, other = (w.planes[1].numpy().astype(np.float32) for w in (got, wanted))
    np.testing.assert_allclose(scale, other, rtol=2**-10, atol=6e-8)
    step = np.abs(other).repeat(BLOCK, 1)
    apart = np.abs(whole_of(got) - whole_of(wanted))
    assert (apart <= step * 1.13 + 1e-7).all() and (apart > step / 2).mean() < 0.01


@pytest.mark.parametrize("name", QUANTIZERS)
def test_factors_that_are_not_finite_are_counted(name: str) -> None:
    weight = weight_of(3, 64)
    weight[0, 3], weight[2, 40] = np.nan, 1e30
    assert quantizers.quantized(ct.asarray(weight, device="cpu"), name)[1].numpy() == 2


@pytest.mark.parametrize("name", QUANTIZERS)
def test_planes_that_a_device_quantises_have_no_gaps(name: str) -> None:
    """Rows are as long as in memory of their own: a model takes no more, nothing is copied."""
    device = ct.device("simulator")
    weight = ct.asarray(weight_of(5, 96), device=device)
    tensor, _ = quantizers.quantized(weight, name)
    for plane in tensor.planes:
        assert plane.spec == make_spec(plane.shape, plane.dtype, device.caps.row_alignment)
