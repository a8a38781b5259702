"""Products on the CPU with weights as they are stored: 16 bits, integers, planes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

import centella as ct
from centella.dtypes import ALL, bf16, dtype_of, f16, narrow, widen
from centella.ops.matmul import stored
from centella.ops.quant.table import FORMATS
from tests.support.model_common import DATA

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(params=["ours", "shared widening"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads, which multiply; or which only widen, where the BLAS has more."""
    shared = request.param == "shared widening"
    monkeypatch.setattr(stored, "cores", lambda: 4)
    monkeypatch.setattr(stored, "MANY", 1 if shared else 1000)
    monkeypatch.setattr(stored, "taken_over", lambda threads: None)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("elements", [1, 300, 1 << 20], ids=["rows", "blocks", "whole"])
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("name", ["bf16", "f16", "i8", "f32"])
def test_of_one_tensor(name: str, rows: int, elements: int) -> None:
    """The weight's numbers, summed in f32, whatever the blocks."""
    weight = narrow(normal(37, 56) * (100 if name == "i8" else 1), ALL[name])
    x, out = normal(rows, 56, seed=1), np.full((rows, 37), np.nan, np.float32)
    with mock.patch.multiple(stored, ELEMENTS=elements, FEW=64):
        stored.product(x, [weight], [ALL[name]], "", out)
    exact = x.astype(np.float64) @ widen(weight, ALL[name]).astype(np.float64).T
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-3 if name == "i8" else 2e-5)


@pytest.mark.parametrize("stored_as", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_a_linear_of_mixed_dtypes(dtype: str, stored_as: str) -> None:
    """Activations of 16 bits are rounded once; blocks are of a few numbers."""
    device, bound = ct.device("cpu"), {"f32": 2e-5, "f16": 0.02, "bf16": 0.15}[dtype]
    arrays = normal(3, 5, 56, seed=1), normal(37, seed=2), normal(3, 5, 37, seed=3)
    x, bias, residual = (ct.asarray(a, dtype, device) for a in arrays)
    weight = ct.asarray(normal(37, 56), stored_as, device)
    with mock.patch.multiple(stored, ELEMENTS=300, FEW=64):
        y = ct.linear(x, weight, bias=bias, residual=residual, activation="relu")
        got = np.asarray(y.astype("f32").numpy(), np.float64)
    x64, w64, b64, r64 = (t.astype("f32").numpy().astype(np.float64)
                          for t in (x, weight, bias, residual))  # fmt: skip
    exact = np.maximum(x64 @ w64.T + b64, 0) + r64
    assert y.dtype.name == dtype
    np.testing.assert_allclose(got, exact, rtol=0, atol=bound)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("format", list(FORMATS))
def test_of_planes(format: str) -> None:
    """The same as of the decoded weight, a block of rows at a time."""
    chosen = FORMATS[format]
    if chosen.encode is not None:
        planes = chosen.encode("test", normal(11, 512))
    else:
        assert chosen.from_blocks is not None
        kind = getattr(gguf.GGMLQuantizationType, format.upper())
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(4).integers(0, 64, (11, 512 // numbers, size), np.uint8)
        planes = chosen.from_blocks(raw)
    dtypes = [dtype_of(p.dtype) for p in planes]
    x, out = normal(3, 512, seed=1), np.empty((3, 11), np.float32)
    with mock.patch.multiple(stored, ELEMENTS=1000, FEW=64):
        stored.product(x, planes, dtypes, format, out)
    whole = chosen.decode(*(widen(p, d) for p, d in zip(planes, dtypes, strict=True)))
    exact = x.astype(np.float64) @ whole.astype(np.float64).T
    assert np.isfinite(exact).all()
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4 * abs(exact).max())


@pytest.mark.parametrize("dtype", [bf16, f16], ids=["bf16", "f16"])
def test_every_number_of_16_bits(dtype: ct.DType) -> None:
    """Subnormal ones, infinities and NaN too."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256).view(dtype.numpy)
    for rows in (bits, bits[:120], bits[124:250]):
        got, wanted = stored.wide(rows, dtype).copy(), widen(rows, dtype)
        same = np.isnan(got) & np.isnan(wanted)
        assert (same | (got.view(np.uint32) == wanted.view(np.uint32))).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_rows_of_a_table(dtype: str) -> None:
    """Only those that are asked for; NaN for ids outside."""
    values = normal(9, 5)
    table = ct.asarray(values, dtype, device="cpu")
    ids = np.array([[3, 0, 8], [-1, 9, 3]], np.int32)
    got = ct.embedding(ct.asarray(ids, device="cpu"), table).numpy()
    wanted = widen(narrow(values, ALL[dtype]), ALL[dtype])[np.clip(ids, 0, 8)]
    wanted[1, :2] = np.nan
    np.testing.assert_array_equal(np.asarray(got, np.float32), wanted)


def test_weights_stay_as_they_are_where_f32_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of bf16 gives the same tokens; a limit of the device counts, too."""
    folder, asked, results = DATA / "decoders" / "qwen3", (5, 17, 4), []

    def tokens(kind: ct.DType, free: int | None, device: ct.Device) -> int:
        monkeypatch.setattr("centella.tasks.load.available", lambda: free)
        model = ct.load(folder, device=device, task="generate")
        weights = dict(model.model.named_parameters())
        assert weights["embed_tokens.weight"].dtype is kind
        results.append(model.generate(list(asked), max_new_tokens=12, ignore_eos=True).ids)
        return sum(4 * weight.size for weight in weights.values())

    cpu = ct.device("cpu")
    needed = tokens(ct.f32, None, cpu)
    tokens(ct.f32, 2 * needed, cpu)
    tokens(bf16, needed, cpu)
    limited = ct.device("cpu", memory_limit=needed)
    tokens(bf16, None, limited)
    limited.close()
    assert all(result == results[0] for result in results)
