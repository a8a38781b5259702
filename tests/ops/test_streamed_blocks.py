"""Products of few rows with quantised weights that the copy engine brings: simulator and PTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32, i8, u8, u32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.op import op
from centella.op.variant import Variant
from centella.ops.matmul import streamed
from centella.ops.quant.digits import STREAMED_DIGITS
from centella.ops.quant.streamed import STREAMED_BLOCKS
from centella.ops.quant.table import FORMATS, ROWS
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.support.attention import CAPS
from tests.support.launched import laid_out, op_form, parameters, result, rounded, traced

Array = np.ndarray[Any, Any]
STREAMED = [name for name in ROWS if FORMATS[name].cores is not None]


def product_of(
    format: str, m: int, n: int, k: int, *extras: str, dtype: DType = bf16, y: DType | None = None,
    factors: DType = f16, align: int = 16, caps: Caps = CAPS, forced: bool = True,
    variant: Variant[Any, Any] = STREAMED_BLOCKS, aligned: bool = True,
) -> tuple[list[Call], list[Spec]]:  # fmt: skip
    """The launches of a product of m rows and n outputs, streamed if it can be, and operands.

    Args:
        aligned: whether factors begin with a chunk.
    """
    kind = FORMATS[format]
    planes = [make_spec(p.shape(n, k // kind.block), p.dtype or factors, 16 * (i == 0) or align)
              for i, p in enumerate(kind.planes)]  # fmt: skip
    if not aligned:
        planes = [p if q.dtype else replace(p, aligned=False)
                  for p, q in zip(planes, kind.planes, strict=True)]  # fmt: skip
    shapes = {"bias": (n,), "residual": (m, n)}
    more = [make_spec(shapes[e], f32 if e == "bias" else dtype, 16) for e in extras]
    specs = [make_spec((m, k), dtype, 16), *planes, *more, make_spec((m, n), y or dtype, 16)]
    attrs = {"extras": extras, "alpha": 0.5, "activation": "relu", "format": format}
    attrs |= {"dtype": y.name} if y else {}
    form = op_form(op.get("linear"), tuple(specs[:-1]), (specs[-1],), attrs)
    if forced and variant.takes(form, caps, variant.name):
        return list(variant.lower(form, caps).calls), specs
    return list(form.lower(caps).calls), specs


def filled(rng: np.random.Generator, spec: Spec) -> Array:
    """Random numbers of a dtype: all of bytes and words, small ones of floats."""
    if spec.dtype in (u8, u32):
        return rng.integers(0, 256**spec.dtype.itemsize, spec.shape, spec.dtype.numpy)
    if spec.dtype is i8:
        return rng.integers(-128, 128, spec.shape).astype(np.int8)
    return rng.standard_normal(spec.shape).astype(np.float32)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize(
    ("format", "m", "n", "k", "extras"),
    [
        ("q8_0", 1, 20, 128, ()), ("q8_0", 3, 38, 640, ("residual",)),
        ("q8_0", 16, 530, 1152, ("bias", "residual")), ("q4_0", 1, 70, 256, ()),
        ("q4_0", 9, 150, 2304, ("bias",)), ("q4_1", 2, 34, 1280, ()),
        ("q4_k", 1, 44, 256, ("residual",)), ("q4_k", 8, 270, 2560, ()),
        ("q4_k", 16, 36, 1024, ("bias", "residual")), ("q6_k", 3, 70, 512, ("residual",)),
        ("q6_k", 16, 44, 2560, ()), ("q5_k", 9, 70, 1024, ()), ("iq4_xs", 5, 44, 1024, ("bias",)),
        ("iq4_nl", 16, 70, 640, ()), ("mxfp4", 4, 38, 1536, ("residual",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_it_equals_float64(
    format: str, m: int, n: int, k: int, extras: tuple[str, ...], dtype: DType
) -> None:
    """Odd numbers of rows and outputs; with few groups several blocks each: rings come round."""
    check(format, m, n, k, extras, dtype, 8)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize(
    ("format", "m", "n", "k", "extras"),
    [
        ("q8_0", 5, 574, 384, ()), ("q4_1", 16, 575, 256, ("bias",)), ("q4_k", 3, 574, 256, ()),
        ("q6_k", 16, 575, 512, ()), ("q5_k", 2, 574, 256, ()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_warps_of_sixteen_outputs(
    format: str, m: int, n: int, k: int, extras: tuple[str, ...], dtype: DType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where there are more outputs than eight a warp; of 33 multiprocessors here, which are few."""
    monkeypatch.setattr(streamed, "MULTIPROCESSORS", 33)
    check(format, m, n, k, extras, dtype, 16)


def check(
    format: str, m: int, n: int, k: int, extras: tuple[str, ...], dtype: DType, lines: int
) -> None:
    """Compare a product whose warps have so many rows of the weight."""
    factors, align = (dtype, 1) if m in (1, 9) else (f16, 16)
    (call,), specs = product_of(
        format, m, n, k, *extras, dtype=dtype, y=f32, factors=factors, align=align
    )
    assert call.kernel.name == "streamed_blocks"
    assert dict(call.constants)["tile"].lines == lines
    compare_with_float64(format, call, specs, extras, n)


def compare_with_float64(
    format: str, call: Call, specs: list[Spec], extras: tuple[str, ...], seed: int,
    tolerance: float = 2e-6, beyond: int = 0,
) -> None:  # fmt: skip
    """Simulate a launch over random operands and compare its result.

    Operands begin somewhere in their buffers, each somewhere else.

    Args:
        beyond: elements between a chunk and those that are not aligned.
    """
    rng, ir = np.random.default_rng(seed), traced(call)
    arrays = [filled(rng, spec) for spec in specs[:-1]]
    if format == "mxfp4":
        arrays[2] = arrays[2] % 16 + 120  # exponents whose powers do not go beyond f32
    words = [laid_out(a, spec) for a, spec in zip(arrays, specs, strict=False)]
    words.append(laid_out(None, specs[-1]))
    at = {p.source: i for i, p in enumerate(ir.params)}
    scalars = parameters(call, ir)
    for n_, (arg, memory) in enumerate(zip(ir.args, words[:-1], strict=False)):
        size = arg.dtype.itemsize
        start = 16 * (n_ + 1) // size + (0 if specs[n_].aligned else beyond)
        raw = np.zeros(-(-(start * size + memory.nbytes) // 16) * 16, np.uint8)
        raw[start * size : start * size + memory.nbytes] = memory.view(np.uint8)
        words[n_] = raw.view(np.uint32)
        scalars[at[arg.name, "offset"]] += start
    simulate(ir, words, scalars, min(call.groups, 3))
    exact = [a if a.dtype.kind in "iu" else rounded(a, s.dtype)
             for a, s in zip(arrays, specs, strict=False)]  # fmt: skip
    planes = 1 + len(FORMATS[format].planes)
    weight = FORMATS[format].decode(*exact[1:planes])
    vectors = dict(zip(extras, exact[planes:], strict=True))
    wanted = np.maximum(0.5 * (exact[0] @ weight.T) + vectors.get("bias", 0), 0)
    wanted = wanted + vectors.get("residual", 0)
    size = np.abs(wanted).max()
    wanted = rounded(wanted, specs[-1].dtype)  # beyond f16 an infinity
    np.testing.assert_allclose(result(call, words), wanted, rtol=1e-5, atol=tolerance * size)


@pytest.mark.parametrize(("m", "variant"), [(1, STREAMED_DIGITS), (3, STREAMED_BLOCKS)])
@pytest.mark.parametrize(
    ("format", "k", "align"), [("q8_0", 128, 16), ("q8_0", 384, 1), ("q4_k", 768, 16)]
)
def test_a_single_output(
    format: str, k: int, align: int, m: int, variant: Variant[Any, Any]
) -> None:
    """Its factors begin on a chunk and end within one."""
    (call,), specs = product_of(format, m, 1, k, y=f32, align=align, variant=variant)
    assert call.kernel.name == variant.name
    compare_with_float64(format, call, specs, (), k)


@pytest.mark.parametrize(("m", "variant"), [(1, STREAMED_DIGITS), (3, STREAMED_BLOCKS)])
@pytest.mark.parametrize(("format", "k"), [("q8_0", 384), ("q4_k", 768), ("q6_k", 512)])
def test_factors_begin_with_any_element(
    format: str, k: int, m: int, variant: Variant[Any, Any]
) -> None:
    """Halves of two words are a word of factors."""
    (call,), specs = product_of(
        format, m, 44, k, y=f32, align=1, variant=variant, aligned=False
    )  # fmt: skip
    assert call.kernel.name == variant.name
    compare_with_float64(format, call, specs, (), k, beyond=3)


def test_which_products_are_streamed() -> None:
    """2 to 16 rows of 16 bits on Hopper, of whole runs; not in the simulator."""

    def name(m: int, k: int = 1024, format: str = "q8_0", **options: Any) -> str:
        calls, _ = product_of(format, m, 64, k, forced=False, **options)
        return str(calls[-1].kernel.name)

    assert {name(m) for m in (2, 3, 16)} == {"streamed_blocks"}
    assert name(1) == "streamed_digits"
    for caps in (replace(CAPS, arch="sm_100"), replace(CAPS, arch="sm_80"), Caps("ir")):
        assert name(4, caps=caps) == "linear_blocks"
    assert name(4, dtype=f32) == "linear_blocks"
    assert name(4, k=96) == "linear_blocks"  # no whole run
    assert name(4, factors=f32) == "linear_blocks"
    assert name(4, format="q5_0") == "linear_blocks"  # fifth bits of blocks of 32
    assert name(4, format="q6_k") == name(4, format="q5_k") == "streamed_blocks"
    assert name(4, k=768, format="q6_k") == "linear_blocks"  # factors in no whole words
    assert name(17) != "streamed_blocks"


@needs_ptxas
@pytest.mark.parametrize("format", STREAMED)
@pytest.mark.parametrize(
    ("m", "n", "k", "extras"),
    [
        (1, 2560, 9728, ("residual",)), (1, 19456, 2560, ()), (16, 2560, 9728, ("residual",)),
        (16, 19456, 2560, ()), (8, 6144, 2560, ("bias",)), (1, 151936, 2560, ()),
    ],
)  # fmt: skip
def test_weights_are_asked_for_before_the_wait(
    format: str, m: int, n: int, k: int, extras: tuple[str, ...], tmp_path: Path
) -> None:
    """x is not; nothing is spilled, and a ring holds some microseconds of the card."""
    (call,), _ = product_of(format, m, n, k, *extras)
    assert call.kernel.name == "streamed_blocks"
    ir = traced(call)
    planes = FORMATS[format].planes
    assert [ir.args[i].name for i in ir.early] == list("wstuv"[: len(planes)])
    text = emit_ptx(ir, "sm_90a")
    before, wait, behind = text.partition("griddepcontrol.wait;")
    assert wait and "cp.async.bulk.tensor" in before and "cp.async.bulk.tensor" in behind
    assert "griddepcontrol.launch_dependents" in before
    report, _ = assemble(text, "sm_90a", tmp_path)
    registers, spilled = resources(report)
    assert spilled == 0 and registers * ir.workgroup <= 65_536
