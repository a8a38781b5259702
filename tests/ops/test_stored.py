"""Products on the CPU with weights as they are stored: 16 bits, integers, planes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

import centella as ct
from centella.dtypes import ALL, bf16, f16, narrow, widen
from centella.ops.matmul import stored
from centella.ops.quant.table import FORMATS
from tests.support.model_common import DATA

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("elements", [1, 300, 1 << 20], ids=["rows", "blocks", "whole"])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("name", ["bf16", "f16", "f32"])
def test_of_16_bits(name: str, rows: int, elements: int) -> None:
    """Rounded weights by f32 sums, whatever the blocks; one activation of the other dtypes."""
    weight = narrow(normal(37, 56), ALL[name])
    x, bias, residual = normal(rows, 56, seed=1), normal(37, seed=2), normal(rows, 37, seed=3)
    out = np.empty((rows, 37), np.float32)
    with mock.patch.multiple(stored, ELEMENTS=elements, FEW=64):
        stored.product(x, [weight], [ALL[name]], "", out)
    exact = x.astype(np.float64) @ widen(weight, ALL[name]).astype(np.float64).T
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-5)
    device = ct.device("cpu")
    operands = [ct.asarray(a, device=device) for a in (x, bias, residual)]
    w = ct.asarray(normal(37, 56), ALL[name], device)
    y = ct.linear(operands[0], w, bias=operands[1], residual=operands[2])
    np.testing.assert_allclose(y.numpy(), exact + bias + residual, rtol=0, atol=2e-5)


@pytest.mark.parametrize("format", list(FORMATS))
def test_of_planes(format: str) -> None:
    """The same as of the decoded weight, a block of rows at a time."""
    chosen = FORMATS[format]
    if chosen.encode is None:
        pytest.skip("no quantiser")
    planes = chosen.encode("test", normal(11, 512))
    dtypes = [ct.dtypes.dtype_of(p.dtype) for p in planes]
    x, out = normal(3, 512, seed=1), np.empty((3, 11), np.float32)
    with mock.patch.multiple(stored, ELEMENTS=1000, FEW=64):
        stored.product(x, planes, dtypes, format, out)
    whole = chosen.decode(*(widen(p, d) for p, d in zip(planes, dtypes, strict=True)))
    np.testing.assert_allclose(out, x.astype(np.float64) @ whole.T, rtol=0, atol=1e-4)


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
    """A checkpoint of bf16 gives the same tokens."""
    folder, asked, results = DATA / "decoders" / "qwen3", (5, 17, 4), []
    needed = 1 << 40
    for share, kind in ((None, ct.f32), (2.0, ct.f32), (1.0, bf16)):
        free = None if share is None else int(share * needed)
        monkeypatch.setattr("centella.tasks.load.available", lambda free=free: free)
        model = ct.load(folder, device="cpu", task="generate")
        weights = dict(model.model.named_parameters())
        assert weights["embed_tokens.weight"].dtype is kind
        needed = sum(4 * weight.size for weight in weights.values())
        results.append(model.generate(list(asked), max_new_tokens=12, ignore_eos=True).ids)
    assert results[0] == results[1] == results[2]
