"""Products of a few rows whose weights the copy engine brings: in the simulator, and as PTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.op import op
from centella.op.variant import Variant
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.product import Product
from centella.ops.matmul.streamed import STREAMED
from centella.ops.matmul.streamed_kernel import Stream
from centella.ops.matmul.streamed_rows import STREAMED_ROWS
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.support.attention import CAPS
from tests.support.launched import laid_out, op_form, parameters, result, rounded, traced

Array = np.ndarray[Any, Any]


FEW = 8


def product_of(
    m: int, n: int, k: int, *extras: str, gate: str = "", dtype: DType = bf16,
    y: DType | None = None, caps: Caps = CAPS, kind: str = "rms", variant: str | None = None,
) -> tuple[Call, tuple[Spec, ...]]:  # fmt: skip
    """The launch of a product of m rows: n outputs, of twice as many rows of W with a gate.

    With a norm it is that of `streamed_rows`, if no other variant is named.

    Returns:
        It, and its operands as they were before it took them for flat.
    """
    outputs = 2 * n if gate else n
    shapes = {"norm": (k,), "shift": (k,), "bias": (outputs,), "residual": (m, n)}
    given = tuple(make_spec(shapes[e], dtype if e == "residual" else f32, 16) for e in extras)
    x, w = make_spec((m, k), dtype, 16), make_spec((outputs, k), dtype, 16)
    attrs: dict[str, Any] = {"extras": tuple(extras), "alpha": 0.5}
    normed = gate != "" or "norm" in extras
    attrs |= {"gate": gate, "eps": 1e-5, "kind": kind} if normed else {"activation": "relu"}
    attrs |= {"dtype": y.name} if y else {}
    variant = variant or ("streamed_rows" if "norm" in extras else None)
    attrs |= {"variant": variant} if variant else {}
    name = "normed_linear" if normed else "linear"
    specs = (x, w, *given, make_spec((m, n), y or dtype, 16))
    (call,) = op_form(op.get(name), specs[:-1], specs[-1:], attrs).lower(caps).calls
    return call, specs


def call_of(*args: Any, **options: Any) -> Call:
    """The launch alone."""
    return product_of(*args, **options)[0]


def run(call: Call, arrays: list[Array], specs: tuple[Spec, ...]) -> list[Any]:
    """The operands of a launch once the simulator has run it."""
    ir = traced(call)
    words = [laid_out(a, spec) for a, spec in zip((*arrays, None), specs, strict=True)]
    simulate(ir, words, parameters(call, ir), call.groups)
    return words


def in_few_groups(call: Call) -> Call:
    """A launch as if its rings had no room for all weights, each group with several blocks.

    One of few groups as it is.
    """
    if call.groups <= FEW:
        return call
    constants = tuple(
        (name, replace(value, flight=0) if isinstance(value, Stream) else value)
        for name, value in call.constants
    )
    return replace(call, constants=constants, groups=min(call.groups, 3))


def near_float64(
    got: Array, arrays: list[Array], specs: tuple[Spec, ...], extras: tuple[str, ...], gate: str
) -> None:
    """What a launch of `product_of` computed from arrays, rounded as it is stored."""
    x, w, *more = (rounded(a, spec.dtype) for a, spec in zip(arrays, specs, strict=False))
    vectors, n, kind = dict(zip(extras, more, strict=True)), got.shape[1], specs[-1].dtype
    wanted = 0.5 * (x @ w.T) + vectors.get("bias", 0)
    if gate:
        wanted = wanted[:, :n] / (1 + np.exp(-wanted[:, :n])) * wanted[:, n:]
    else:
        wanted = np.maximum(wanted, 0) + vectors.get("residual", 0)
    size = np.abs(wanted).max()
    np.testing.assert_allclose(
        got, wanted, rtol=4 * kind.epsilon, atol=max(kind.epsilon, 1e-5) * size
    )


@pytest.mark.turns("dtype", "y")
@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras"),
    [
        (2, 2, 128, "", ()),
        (3, 38, 1000, "", ("residual",)),
        (8, 530, 264, "", ("bias",)),
        (9, 530, 264, "", ("bias", "residual")),
        (16, 270, 648, "", ()),
        (5, 300, 136, "silu", ()),
        (16, 150, 520, "silu", ("bias",)),
        (7, 41, 136, "", ("bias", "residual")),
        (3, 151, 136, "silu", ("bias",)),
    ],
)
@pytest.mark.parametrize("y", [None, f32], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_it_equals_float64(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], dtype: DType, y: DType | None
) -> None:
    """Odd numbers of rows, outputs and columns; several blocks a group, stages that come round."""
    call, specs = product_of(m, n, k, *extras, gate=gate, dtype=dtype, y=y)
    assert call.kernel.name == "streamed_rows"
    arrays = [np.random.default_rng(n).standard_normal(spec.shape) for spec in specs[:-1]]
    words = run(in_few_groups(call), arrays, specs)
    near_float64(result(call, words), arrays, specs, extras, gate)


@pytest.mark.parametrize(
    ("m", "k", "whole"), [(3, 640, {"x", "w"}), (16, 640, {"x"}), (3, 648, set())]
)  # fmt: skip
def test_rows_of_whole_panels_are_a_copy_a_stage(m: int, k: int, whole: set[str]) -> None:
    """Of weights where there is one eight of rows; of what ends within a panel, a copy a panel."""
    call = call_of(m, 530, k)
    ir, panels = traced(call), dict(call.constants)["tile"].columns // 64
    found = {ir.args[each.argument].name: each.panels for each in ir.maps}
    assert found == {name: panels if name in whole else 1 for name in ("x", "w")} and panels > 1


@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras", "turns"),
    [
        (9, 90, 2056, "", ("bias",), 1),
        (16, 70, 648, "", ("residual",), 1),
        (3, 40, 2056, "silu", ("bias",), 1),
        (11, 42, 648, "", ("bias",), 3),
        (4, 60, 640, "silu", (), 2),
    ],
)
def test_a_ring_with_room_for_all_weights(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], turns: int
) -> None:
    """They are asked for without x, which comes on its own, some of them at a time.

    A group with several blocks has x of each in stages of its own.
    """
    call, specs = product_of(m, n, k, *extras, gate=gate, y=f32)
    tile = dict(call.constants)["tile"]
    steps = -(-k // tile.columns)
    assert 0 < tile.flight <= tile.stages == steps
    more = replace(tile, stages=turns * steps)
    constants = tuple((n, more if n == "tile" else v) for n, v in call.constants)
    call = replace(call, constants=constants, groups=-(-call.groups // turns))
    arrays = [np.random.default_rng(n).standard_normal(spec.shape) for spec in specs[:-1]]
    words = run(call, arrays, specs)
    near_float64(result(call, words), arrays, specs, extras, gate)


@pytest.mark.turns("values")
@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras"),
    [
        (2, 38, 1000, "", ("norm",)),
        (16, 270, 648, "", ("norm", "bias", "residual")),
        (5, 300, 136, "silu", ("norm",)),
        (9, 530, 264, "", ("norm", "residual")),
    ],
)
@pytest.mark.parametrize("values", ["normal", "outliers"])
def test_rows_with_their_norm(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], values: str
) -> None:
    """As exact as a norm in a launch of its own, whose result is rounded before the product."""
    call, specs = product_of(m, n, k, *extras, gate=gate, y=f32)
    assert call.kernel.name == "streamed_rows"
    rng = np.random.default_rng(n)
    arrays = [rng.standard_normal(spec.shape) for spec in specs[:-1]]
    if values == "outliers":
        arrays[0][:, 3] *= 1000
        arrays[0][0] *= 1e15
    words = run(in_few_groups(call), arrays, specs)
    x, w, *more = (rounded(a, spec.dtype) for a, spec in zip(arrays, specs, strict=False))
    vectors = dict(zip(extras, more, strict=True))
    h = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-5) * vectors["norm"]

    def after(h: Array) -> Array:
        wanted: Array = 0.5 * (h @ w.T) + vectors.get("bias", 0)
        if gate:
            opened: Array = wanted[:, :n] / (1 + np.exp(-wanted[:, :n])) * wanted[:, n:]
            return opened
        return np.asarray(wanted + vectors.get("residual", 0))

    wanted = after(h)
    apart = np.abs(after(rounded(h, bf16)) - wanted).max()
    assert np.abs(result(call, words) - wanted).max() < 2 * apart


@pytest.mark.parametrize(("n", "k"), [(600, 264), (70, 264)])
@pytest.mark.parametrize(("m", "variant"), [(1, STREAMED), (4, STREAMED_ROWS)])
def test_matmul_by_a_transposed_view(
    m: int, variant: Variant[Product, Stream], n: int, k: int
) -> None:
    """Of B [k, n], whose columns lie in memory, there may be more than rows."""
    a, w, y = (make_spec(shape, bf16, 16) for shape in ((m, k), (n, k), (m, n)))
    b = Spec((k, n), bf16, w.strides[::-1], w.aligned)
    (call,) = op_form(op.get("matmul"), (a, b), (y,)).lower(CAPS).calls
    assert call.kernel.name == variant.name
    rng = np.random.default_rng(n)
    arrays = [rng.standard_normal(spec.shape) for spec in (a, w)]
    words = run(in_few_groups(call), arrays, (a, w, y))
    left, right = (rounded(v, bf16) for v in arrays)
    wanted = left @ right.T
    size = np.abs(wanted).max()
    np.testing.assert_allclose(result(call, words), wanted, rtol=4 * bf16.epsilon, atol=1e-5 * size)


def test_which_products_are_streamed() -> None:
    """2 to 16 rows of 16 bits on Hopper, of whole chunks; not in the simulator, unless by name."""
    assert call_of(2, 64, 1024).kernel.name == "streamed_rows"
    for caps in (replace(CAPS, arch="sm_100"), replace(CAPS, arch="sm_80"), Caps("ir")):
        assert call_of(2, 64, 1024, caps=caps).kernel.name != "streamed_rows"
    assert call_of(17, 64, 1024).kernel.name != "streamed_rows"
    assert call_of(2, 64, 64).kernel.name != "streamed_rows"
    assert call_of(1, 64, 1024).kernel.name == "streamed"


@pytest.mark.parametrize("gate", ["", "silu"])
def test_which_rows_take_their_norm_along(gate: str) -> None:
    """3 to 16 of bf16 with an RMS norm, on Hopper."""
    normed, hopper = op.get("normed_linear"), replace(CAPS, family="nvidia")

    def chosen(m: int, dtype: DType = bf16, caps: Caps = hopper, kind: str = "rms") -> str:
        x, w = (make_spec((rows, 1024), dtype, 16) for rows in (m, 96 if gate else 48))
        inputs = (x, w, make_spec((1024,), f32, 16))
        attrs = {"extras": ("norm",), "gate": gate, "eps": 1e-5, "alpha": 1.0, "kind": kind}
        form = op_form(normed, inputs, (make_spec((m, 48), dtype, 16),), attrs)
        assert normed.preferred is not None
        if not normed.preferred(form, caps):
            return "apart"
        (call,) = form.lower(caps).calls
        return call.kernel.name

    for m in range(3, 17):
        assert chosen(m) == "streamed_rows"
    assert chosen(1) == "streamed"
    assert chosen(2) == "normed_linear"
    for m in (17, 40):
        assert chosen(m) == "apart"
    for caps in (replace(hopper, arch="sm_100"), replace(hopper, arch="sm_80"), Caps("ir")):
        assert chosen(5, caps=caps) == "apart"
    assert chosen(5, f16) == "apart"


@pytest.mark.parametrize(("m", "variant"), [(1, STREAMED), (2, STREAMED_ROWS)])
def test_a_device_without_room_is_no_fit(m: int, variant: Variant[Product, Stream]) -> None:
    """A group has 384 threads; of a long row two stages have no room in little shared memory."""
    x, w, y = (make_spec(shape, f16, 16) for shape in ((m, 4096), (512, 4096), (m, 512)))
    product = Product(Problem.of_rows(x, w, y), (x, w, y))
    assert variant.fits(product, CAPS)
    assert not variant.fits(product, replace(CAPS, max_workgroup=256))
    assert not variant.fits(product, replace(CAPS, max_shared=16 << 10))
    caps = replace(CAPS, max_shared=48 << 10)
    (call,) = variant.lower(product, caps).calls
    assert traced(call).shared_bytes <= caps.max_shared


@needs_ptxas
@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras"),
    [
        (16, 2560, 9728, "", ("residual",)), (8, 9728, 2560, "silu", ()),
        (16, 9728, 2560, "silu", ()), (16, 6144, 2560, "", ()),
        (5, 5120, 1280, "", ("bias",)), (16, 151936, 2560, "", ()),
    ],
)  # fmt: skip
def test_weights_are_asked_for_before_the_wait(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], tmp_path: Path
) -> None:
    """x is not; two groups have registers, and a ring holds some microseconds of the card.

    Where it has room for all of them, the next launch is let in before the wait, too.
    """
    call = call_of(m, n, k, *extras, gate=gate)
    tile = dict(call.constants)["tile"]
    assert tile.stages * tile.stage_bytes(2 if gate else 1) > 96 << 10
    ir = traced(call)
    assert [ir.args[i].name for i in ir.early] == ["w"]
    text = emit_ptx(ir, "sm_90a")
    before, wait, behind = text.partition("griddepcontrol.wait;")
    assert wait and "ld.global.nc" not in behind
    assert "cp.async.bulk.tensor" in before
    assert "griddepcontrol.launch_dependents" in (before if tile.flight else behind)
    report, _ = assemble(text, "sm_90a", tmp_path)
    registers, spilled = resources(report)
    assert spilled == 0 and registers * ir.workgroup <= 32_768
