"""`normed_linear`: the one launch and the launches that it stands for, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.dtypes import bf16, dtype_of, f32
from centella.errors import DTypeError, ShapeError
from centella.op import op
from centella.specs import Caps, make_spec
from centella.tensors import functional
from centella.tensors.qtensor import Stacked
from centella.tensors.tensor import apply_with
from tests.support.launched import op_form

EVERY = ("cpu", "simulator", "webgpu", "webgpu-minimum", "webgpu-hardware", "cuda")
EPS = 1e-5
Array = np.ndarray[Any, Any]
GATE = {
    "silu": lambda v: v / (1 + np.exp(-v)),
}


def expected(x: Array, w: Array, norm: Array | None, gate: str, residual: Array | None) -> Array:
    h = x.astype(np.float64)
    if norm is not None:
        h = h / np.sqrt((h * h).mean(-1, keepdims=True) + EPS) * norm
    y: Array = 0.5 * (h @ w.astype(np.float64).T)
    if gate:
        n = len(w) // 2
        y = GATE[gate](y[..., :n]) * y[..., n:]
    return y if residual is None else y + residual


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 40), (130, 257)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_one_launch(device: ct.Device, rows: int, n: int, k: int, normed: bool, gate: str) -> None:
    for dtype in ("f32", "bf16") if rows == 1 else ("f32",):
        _check(device, rows, n, k, normed, gate, dtype)


def _check(
    device: ct.Device, rows: int, n: int, k: int, normed: bool, gate: str, dtype: str
) -> None:
    random = np.random.default_rng(rows + n + k)
    outputs = 2 * n if gate else n
    kind = dtype_of(dtype)
    tensors = [
        ct.asarray(random.standard_normal(shape).astype(np.float32) * size, kind, device)
        for shape, size in (((rows, k), 3.0), ((outputs, k), k**-0.5), ((rows, n), 1.0))
    ]
    norm = ct.asarray(random.standard_normal(k).astype(np.float32), device=device)
    x, w, residual = tensors
    extras = {"norm": norm if normed else None, "residual": None if gate else residual}
    attrs = {"gate": gate, "eps": EPS, "alpha": 0.5, "dtype": "f32"}
    y = apply_with("normed_linear", (x, w), "extras", extras, attrs).numpy()
    read = [np.asarray(t.astype("f32").numpy()) for t in (x, w, residual)]
    wanted = expected(
        read[0], read[1], norm.numpy() if normed else None, gate, None if gate else read[2]
    )
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5 * max(1.0, np.abs(wanted).max()))


@pytest.mark.devices(*EVERY)
def test_the_function_is_what_it_stands_for(device: ct.Device) -> None:
    random = np.random.default_rng(5)
    x, w, norm = (
        ct.asarray(random.standard_normal(s).astype(np.float32), device=device)
        for s in ((1, 2, 48), (80, 48), (48,))
    )
    first = x[:, :1].copy()
    apart, at_once = (
        functional.normed_linear(first, w, norm, eps=EPS, gate="silu", alpha=0.5, variant=variant)
        for variant in ("apart", "joined")
    )
    assert apart.shape == at_once.shape == (1, 1, 40)
    np.testing.assert_allclose(at_once.numpy(), apart.numpy(), atol=1e-4)
    wanted = expected(x.numpy()[0], w.numpy(), norm.numpy(), "", None)
    got = functional.normed_linear(x, w, norm, eps=EPS, alpha=0.5)
    np.testing.assert_allclose(got.numpy()[0], wanted, atol=1e-4)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_layer_norm_and_an_epilogue(device: ct.Device, rows: int) -> None:
    """Rows far from zero, too: the mean is subtracted before anything is multiplied."""
    random = np.random.default_rng(rows)
    shapes = ((rows, 531), (70, 531), (531,), (531,), (70,), (rows, 70))
    x, w, norm, shift, bias, residual = (random.standard_normal(s) for s in shapes)
    w, x = w / 23, (x + np.array([1000.0, 0.0, -3.0])[:rows, None]).astype(np.float32)
    far = x.astype(np.float64)
    off = far - far.mean(-1, keepdims=True)
    h = off / np.sqrt((off * off).mean(-1, keepdims=True) + EPS) * norm + shift
    wanted = np.maximum(h @ w.T + bias, 0) + residual
    given = [ct.asarray(a, "f32", device) for a in (x, w, norm, shift, bias, residual)]
    y = functional.normed_linear(
        *given[:2], norm=given[2], shift=given[3], bias=given[4], residual=given[5], kind="layer",
        eps=EPS, activation="relu", variant="joined" if rows < 3 else "apart",
    )  # fmt: skip
    np.testing.assert_allclose(y.numpy(), wanted, atol=1e-4)


@pytest.mark.devices("simulator", "webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("gate", ["", "silu"])
def test_rows_in_f32_by_a_weight_of_16_bits(device: ct.Device, rows: int, gate: str) -> None:
    """As decoders through WebGPU have them, by teams of each size."""
    random = np.random.default_rng(rows)
    for k, kind in ((72, "bf16"), (512, "f16"), (600, "bf16"), (1024, "f16"), (1536, "bf16"),
                    (2048, "bf16"), (2560, "f16")):  # fmt: skip
        given = [random.standard_normal(s) for s in ((rows, k), (2 * 21, k), (k,))]
        kinds = ("f32", kind, "f32")
        x, w, norm = (ct.asarray(a, t, device) for a, t in zip(given, kinds, strict=True))
        y = functional.normed_linear(
            x, w, norm, eps=EPS, alpha=0.5, gate=gate or None, variant="joined"
        )
        wide = np.asarray(w.astype("f32").numpy())
        wanted = expected(x.numpy(), wide, norm.numpy(), gate, None)
        np.testing.assert_allclose(y.numpy(), wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.devices("simulator")
def test_tiny_rows_and_no_eps(device: ct.Device) -> None:
    """The mean of squares is subnormal, which others may flush to 0."""
    x = np.where(np.arange(1024) % 2, 4e-20, -4e-20).astype(np.float32)[None]
    w, norm = np.sign(x).repeat(3, 0) / 1024, np.ones(1024, np.float32)
    given = [ct.asarray(a, "f32", device) for a in (x, w, norm)]
    y = functional.normed_linear(*given, eps=0.0, variant="joined").numpy()
    np.testing.assert_allclose(y, 1.0, rtol=1e-4)


@pytest.mark.parametrize("most", [64, 100, 128, 200, 256, 1024])
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_groups_within_the_threads_of_a_device(rows: int, most: int) -> None:
    for k in (72, 512, 600, 1200, 2048, 2560):
        x, w = make_spec((rows, k), f32, 16), make_spec((40, k), bf16, 16)
        norm, y = make_spec((k,), f32, 16), make_spec((rows, 40), f32, 16)
        attrs = {"extras": ("norm",), "gate": "", "eps": EPS, "alpha": 1.0, "variant": "joined"}
        caps = Caps("ir", max_workgroup=most)
        (call,) = op_form(op.get("normed_linear"), (x, w, norm), (y,), attrs).lower(caps).calls
        assert call.workgroup is not None and call.workgroup <= most


@pytest.mark.devices("webgpu", "webgpu-windows")
@pytest.mark.usefixtures("costly_launches")
def test_one_launch_where_launches_cost_something(device: ct.Device) -> None:
    """Of one or two rows, with a norm or a gate, and of a weight that a launch sees whole."""
    w, norm = ct.zeros((80, 48), device=device), ct.zeros(48, device=device)
    bias = ct.zeros(80, device=device)
    for rows, options, launches in (
        (1, {"norm": norm}, 1), (2, {"norm": norm, "gate": "silu"}, 1), (2, {"gate": "silu"}, 1),
        (3, {"norm": norm}, 2), (1, {}, 1), (1, {"gate": "silu", "bias": bias}, 2),
    ):  # fmt: skip
        x = ct.ones((rows, 48), device=device)
        device.synchronize()
        with ct.ledger() as led:
            y = functional.normed_linear(x, w, **options)
            device.synchronize()
        whole = w.spec.storage_bytes <= device.caps.safe_binding
        assert y.shape[0] == rows and (led.launches == launches or not whole), (rows, options)
        assert whole or led.launches > 1


def test_bad_calls() -> None:
    x, w = ct.zeros((1, 8), device="cpu"), ct.zeros((6, 8), device="cpu")
    for more in ({"residual": x}, {"activation": "gelu"}):
        with pytest.raises(ShapeError, match="a gate, or an activation and a residual"):
            functional.normed_linear(x, w, gate="silu", **more)
    for more in ({"shift": w[0]}, {"kind": "layer"}):
        with pytest.raises(ShapeError, match="expected norm= with kind='layer'"):
            functional.normed_linear(x, w, **more)
    with pytest.raises(ShapeError, match="activation"):
        functional.normed_linear(x, w, gate="sine")
    names = "streamed, joined, streamed_rows, streamed_many, wgmma, mma, streamed_digits, apart"
    with pytest.raises(ShapeError, match=f"variant of {names}"):
        functional.normed_linear(x, w, variant="once")
    with pytest.raises(DTypeError, match="a weight of floats with variant='joined'"):
        functional.normed_linear(x, Stacked((w, w)), variant="joined")
    attrs = {"gate": "", "eps": 0.0, "alpha": 1.0, "dtype": ""}
    for inputs, named, error, text in (
        ((x, w.T.copy()), attrs, ShapeError, r"weight \[n, k\]"),
        ((ct.zeros((0, 8), device="cpu"), w), attrs, ShapeError, "1 row or more"),
        ((x, w[:5]), {**attrs, "gate": "silu"}, ShapeError, r"a weight \[2 n, k\]"),
        ((x.astype("i32"), w), attrs, DTypeError, "float dtypes"),
    ):
        with pytest.raises(error, match=text):
            apply_with("normed_linear", inputs, "extras", {}, named)
    with pytest.raises(ShapeError, match=r"expected norm \[8\]"):
        apply_with("normed_linear", (x, w), "extras", {"norm": w[0, :4]}, attrs)
