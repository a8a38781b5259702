"""Products of one row with quantised weights, of integers: in the simulator, and as PTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.emit.ptx.layout import shared_layout
from centella.errors import LimitError
from centella.op import op
from centella.op.op import Form
from centella.ops.matmul import streamed
from centella.ops.matmul.normed import reference
from centella.ops.quant.digits import STREAMED_DIGITS, preferred
from centella.ops.quant.stream import BlockStream
from centella.ops.quant.table import FORMATS
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_streamed_blocks import STREAMED, compare_with_float64, filled, product_of
from tests.support.attention import CAPS
from tests.support.launched import laid_out, op_form, parameters, result, rounded, traced

Array = np.ndarray[Any, Any]


@pytest.mark.turns("dtype")
@pytest.mark.parametrize(
    ("format", "n", "k", "extras"),
    [
        ("q8_0", 20, 128, ()), ("q8_0", 38, 640, ("residual",)),
        ("q8_0", 530, 1152, ("bias", "residual")), ("q4_0", 70, 256, ()),
        ("q4_0", 150, 2304, ("bias",)), ("q4_1", 34, 1280, ()), ("q4_k", 44, 256, ("residual",)),
        ("q4_k", 270, 2560, ()), ("q4_k", 36, 1024, ("bias", "residual")),
        ("q6_k", 70, 512, ("residual",)), ("q6_k", 44, 2560, ()), ("q5_k", 70, 512, ()),
        ("q5_k", 300, 2816, ("bias",)), ("iq4_xs", 44, 2560, ("residual",)),
        ("iq4_nl", 150, 640, ()), ("mxfp4", 300, 1536, ("bias",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_it_equals_float64(
    format: str, n: int, k: int, extras: tuple[str, ...], dtype: DType
) -> None:
    """Odd numbers of outputs and columns; several blocks a group, rings that come round."""
    factors, align = (dtype, 1) if n % 4 else (f16, 16)
    (call,), specs = product_of(
        format, 1, n, k, *extras, dtype=dtype, y=f32, factors=factors, align=align,
        variant=STREAMED_DIGITS,
    )  # fmt: skip
    assert call.kernel.name == "streamed_digits"
    compare_with_float64(format, call, specs, extras, n, 1e-6)


@pytest.mark.parametrize("format", STREAMED)
def test_stages_of_four_runs(format: str) -> None:
    """Two scales of x a stage, and four runs of high bits, as long rows have."""
    (call,), specs = product_of(format, 1, 40, 8192, y=f32, variant=STREAMED_DIGITS)
    assert tile_of(call).runs == 4
    compare_with_float64(format, call, specs, (), 40, 1e-6)


@pytest.mark.parametrize("format", STREAMED)
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_results_of_16_bits(format: str, dtype: DType) -> None:
    """An odd number of outputs, of which the last has a word of its own."""
    (call,), specs = product_of(
        format, 1, 75, 512, "residual", dtype=dtype, variant=STREAMED_DIGITS
    )
    assert call.kernel.name == "streamed_digits"
    step = 2.0**-8 if dtype is bf16 else 2.0**-11
    compare_with_float64(format, call, specs, ("residual",), 75, step)


def normed_form(
    format: str, n: int, k: int, *extras: str, gate: str = "", activation: str = "",
    dtype: DType = bf16,
) -> Form[Any]:  # fmt: skip
    """A product behind a norm, or with a gate."""
    kind, rows = FORMATS[format], 2 * n if gate else n
    planes = [make_spec(p.shape(rows, k // kind.block), p.dtype or f16, 16) for p in kind.planes]
    shapes = {"norm": (k,), "shift": (k,), "bias": (rows,), "residual": (1, n)}
    more = [make_spec(shapes[e], dtype if e == "residual" else f32, 16) for e in extras]
    specs = [make_spec((1, k), dtype, 16), *planes, *more, make_spec((1, n), f32, 16)]
    attrs = {
        "extras": extras, "gate": gate, "eps": 1e-5, "alpha": 0.5, "dtype": "f32",
        "activation": activation, "kind": "layer" if "shift" in extras else "rms", "format": format,
    }  # fmt: skip
    return op_form(op.get("normed_linear"), tuple(specs[:-1]), (specs[-1],), attrs)


def normed_of(
    format: str, n: int, k: int, *extras: str, **options: Any
) -> tuple[list[Call], list[Spec]]:
    """Its launches, and their operands."""
    form = normed_form(format, n, k, *extras, **options)
    assert preferred(form, CAPS)
    return list(form.lower(CAPS).calls), [*form.inputs, *form.outputs]


@pytest.mark.turns("dtype")
@pytest.mark.parametrize(
    ("format", "n", "k", "extras", "gate"),
    [
        ("q8_0", 38, 640, ("norm",), ""), ("q8_0", 150, 256, ("norm", "bias"), "silu"),
        ("q4_0", 300, 256, (), "gelu"), ("q4_k", 20, 1280, ("norm", "residual"), ""),
        ("q4_k", 600, 256, ("norm",), "silu"), ("q6_k", 300, 1536, ("norm",), "silu"),
        ("q5_k", 40, 256, (), "gelu"), ("q4_1", 30, 1152, ("norm", "shift", "bias"), ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_norms_and_gates_join_it(
    format: str, n: int, k: int, extras: tuple[str, ...], gate: str, dtype: DType
) -> None:
    """Both halves of a weight; the factor of a norm; means that are far from the deviation."""
    (call,), specs = normed_of(format, n, k, *extras, gate=gate, dtype=dtype)
    assert call.kernel.name == "streamed_digits"
    rng, ir = np.random.default_rng(n), traced(call)
    arrays = [filled(rng, spec) for spec in specs[:-1]]
    if "shift" in extras:
        arrays[0] += 30
    words = [laid_out(a, spec) for a, spec in zip(arrays, specs, strict=False)]
    words.append(laid_out(None, specs[-1]))
    simulate(ir, words, parameters(call, ir), min(call.groups, 3))
    exact = [a if a.dtype.kind in "iu" else rounded(a, s.dtype)
             for a, s in zip(arrays, specs, strict=False)]  # fmt: skip
    attrs = {
        "extras": extras, "gate": gate, "eps": 1e-5, "alpha": 0.5, "format": format,
        "kind": "layer" if "shift" in extras else "rms",
    }  # fmt: skip
    wanted = reference(*exact, **attrs)
    size = np.abs(wanted).max()
    np.testing.assert_allclose(result(call, words), wanted, rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize(
    ("format", "n", "k", "room", "runs"),
    [("q8_0", 574, 640, 60, 2), ("q4_k", 574, 2048, 60, 4), ("q6_k", 574, 512, 60, 2)],
)
def test_rings_come_round_where_a_warpgroup_has_warps_of_several_crews(
    format: str, n: int, k: int, room: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three warps are a crew, so that one of four has parts of two; few groups run."""
    monkeypatch.setattr(streamed, "MULTIPROCESSORS", 33)  # each has more outputs than eight a warp
    caps = replace(CAPS, max_shared=room << 10)
    (call,), specs = product_of(format, 1, n, k, y=f32, caps=caps, variant=STREAMED_DIGITS)
    tile = tile_of(call)
    assert tile.teams == 3 and tile.runs == runs
    compare_with_float64(format, call, specs, (), n, 1e-6)


def tile_of(call: Call) -> BlockStream:
    tile = dict(call.constants)["tile"]
    assert isinstance(tile, BlockStream)
    return tile


def stages_of(call: Call, k: int, n: int) -> int:
    """What a group takes in all, with what is behind the last columns."""
    tile = tile_of(call)
    blocks = -(-n // tile.rows)
    return -(-k // (tile.columns * tile.crews)) * tile.crews * -(-blocks // call.groups)


@pytest.mark.parametrize("format", STREAMED)
@pytest.mark.parametrize("k", [512, 1024, 2560, 3072, 4096, 9728, 12288])
@pytest.mark.parametrize("n", [38, 1024, 2560, 4300, 6144, 151936])
def test_a_stage_is_one_crews_and_a_multiprocessor_one_groups(format: str, n: int, k: int) -> None:
    """Else a warp could take the numbers of another's stage, and groups be two on one."""
    (call,), _ = product_of(format, 1, n, k, variant=STREAMED_DIGITS)
    tile, ir = tile_of(call), traced(call)
    assert tile.stages % tile.crews == 0 and tile.threads % 128 == 0
    assert tile.stages >= min(2 * tile.crews, stages_of(call, k, n))
    used = sum(4 * array.words for array in ir.shared)
    assert 114 << 10 < used < 216 << 10 and ir.workgroup == tile.threads + 32


@pytest.mark.parametrize("format", STREAMED)
@pytest.mark.parametrize("room", [80, 100, 112, 115, 116, 120])
def test_a_group_has_no_more_memory_than_there_is(format: str, room: int) -> None:
    """Words that nobody uses are no more than what is left."""
    caps = replace(CAPS, max_shared=room << 10)
    for n, k in ((38, 512), (2560, 2560), (151936, 2560)):
        (call,), _ = product_of(format, 1, n, k, caps=caps, forced=False)
        assert call.kernel.name == "streamed_digits"
        assert shared_layout(traced(call)).size <= caps.max_shared


def product_with(x: Array, format: str = "q8_0") -> tuple[Array, Array, Array]:
    """The product of a row with a weight in the simulator; in f64; that of amounts.

    Factors are small, so that outputs are not beyond f32 where x is at its end.
    """
    (call,), specs = product_of(format, 1, 8, len(x), y=f32, variant=STREAMED_DIGITS)
    rng, ir = np.random.default_rng(5), traced(call)
    arrays = [x[None].astype(np.float32), *(filled(rng, spec) for spec in specs[1:-1])]
    arrays = [a if a.dtype.kind in "iu" or n == 0 else a / 8192 for n, a in enumerate(arrays)]
    words = [laid_out(a, spec) for a, spec in zip(arrays, specs, strict=False)]
    words.append(laid_out(None, specs[-1]))
    simulate(ir, words, parameters(call, ir), 1)
    exact = [a if a.dtype.kind in "iu" else rounded(a, s.dtype)
             for a, s in zip(arrays, specs, strict=False)]  # fmt: skip
    weight = FORMATS[format].decode(*exact[1:]).T.astype(np.float64)
    most = np.abs(weight).max()  # numbers times factors, and what is added
    wanted = np.maximum(0.5 * (exact[0].astype(np.float64) @ weight), 0)
    return result(call, words), wanted, np.abs(exact[0]).sum(dtype=np.float64) * most


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_k", "q6_k", "iq4_xs"])
@pytest.mark.parametrize("scale", [1e-30, 1e-27, 1e-9, 1.0, 1e30, 1e35, 2e37])
def test_numbers_of_any_size(scale: float, format: str) -> None:
    """Outliers beside small numbers, powers of two, zeros; sums of x that are beyond f32."""
    x = np.random.default_rng(1).standard_normal(512) * scale / 4
    x[::7] *= 1e-4
    x[3], x[40], x[32:36], x[64:96] = scale / 2, -scale / 2, 0.0, 0.0
    if scale > 1e36:
        x[256:288] = scale / 2
    got, wanted, amounts = product_with(x, format)
    assert (np.abs(got - wanted) <= 3e-7 * amounts).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_seen(wrong: float) -> None:
    """A NaN makes all outputs NaN, and so does an infinity."""
    x = np.random.default_rng(2).standard_normal(256)
    x[130] = wrong
    with np.errstate(invalid="ignore"):
        assert np.isnan(product_with(x)[0]).all()


def test_which_products_have_digits() -> None:
    """One row of 16 bits on Hopper, of whole runs that fit; norms and gates join none other."""

    def name(m: int = 1, k: int = 1024, format: str = "q8_0", **options: Any) -> str:
        calls, _ = product_of(format, m, 64, k, forced=False, **options)
        return str(calls[-1].kernel.name)

    every = {name(format=format) for format in ("q8_0", "q4_k", "q5_k", "q6_k")}
    assert every == {"streamed_digits"}
    assert name(k=768, format="q6_k") == "linear_blocks"  # factors in no whole words
    assert {name(k=96), name(factors=f32), name(dtype=f32), name(format="q5_0"),
            name(k=32768), name(caps=Caps("ir"))} == {"linear_blocks"}  # fmt: skip
    x, planes = make_spec((2, 256), bf16, 16), FORMATS["q8_0"].planes
    stored = [make_spec(p.shape(64, 8), p.dtype or f16, 16) for p in planes]
    norm, y = make_spec((256,), f32, 16), make_spec((2, 64), bf16, 16)
    attrs = {"extras": ("norm",), "gate": "", "eps": 1e-5, "alpha": 1.0, "format": "q8_0"}
    form = op_form(op.get("normed_linear"), (x, *stored, norm), (y,), attrs)
    assert not preferred(form, CAPS)
    assert not preferred(normed_form("q8_0", 0, 256, "norm", gate="silu"), CAPS)  # of no outputs
    with pytest.raises(LimitError, match=r"\[2, 256\], q8_0: no variant fits"):
        form.lower(CAPS)


@needs_ptxas
@pytest.mark.parametrize("format", STREAMED)
@pytest.mark.parametrize(
    ("n", "k", "extras", "gate"),
    [
        (2560, 9728, ("residual",), ""), (9728, 2560, ("norm",), "silu"),
        (6144, 2560, ("norm", "bias"), ""), (151936, 2560, ("norm",), ""),
        (5120, 1536, ("norm", "shift", "bias"), ""),
    ],
)  # fmt: skip
def test_weights_are_asked_for_before_the_wait(
    format: str, n: int, k: int, extras: tuple[str, ...], gate: str, tmp_path: Path
) -> None:
    """So are the norm's weights; x is not. Nothing is spilled."""
    (call,), _ = normed_of(format, n, k - k % FORMATS[format].block, *extras, gate=gate)
    ir = traced(call)
    vectors = [e for e in extras if e in ("norm", "shift")]
    planes = list("wstuv"[: len(FORMATS[format].planes)])
    assert [ir.args[i].name for i in ir.early] == [*planes, *vectors]
    text = emit_ptx(ir, "sm_90a")
    assert text.count("griddepcontrol.wait;") == 1 and "griddepcontrol.launch_dependents" in text
    assert "cp.async.bulk.tensor" in text and "cp.async.bulk.shared" in text
    report, _ = assemble(text, "sm_90a", tmp_path)
    registers, spilled = resources(report)
    assert spilled == 0 and registers * ir.workgroup <= 65_536
