"""Products of 16-bit operands whose rows do not start on 16 bytes: copied first where that pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, f32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.op import op
from centella.op.op import Lowered
from centella.ops.matmul import wgmma_tiles
from centella.ops.matmul.mma import MMA_TILES
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from tests.backends.test_cuda import fake  # noqa: F401  # a fixture
from tests.emit.test_lang_ptx import assemble, needs_ptxas
from tests.ops.test_mma import BEYOND, CAPS, LAYOUTS, lies
from tests.ops.test_wgmma import SMALL
from tests.support.lang_common import Tensor
from tests.support.launched import laid_out, op_form, parameters, rounded, traced

Array = np.ndarray[Any, Any]
SM_80 = replace(CAPS, arch="sm_80", max_shared=163 << 10)
ODD = (4097, 4093, 4099)


def lowered(
    m: int, n: int, k: int, off: tuple[bool, bool] = (True, True), caps: Caps = CAPS,
    dtype: DType = f16, layout: str = "NT", epilogue: bool = False, variant: str | None = None,
) -> tuple[Lowered, tuple[Spec, ...]]:  # fmt: skip
    """The launches of a product and its operands; `off`: whose rows do not start on 16 bytes."""
    y = make_spec((m, n), dtype, 16)
    attrs: dict[str, Any] = {"alpha": 0.5, "variant": variant}
    a = lies((m, k), dtype, layout[0] == "T", off[0])
    if not epilogue:
        inputs: tuple[Spec, ...] = (a, lies((k, n), dtype, layout[1] == "T", off[1]))
        return op_form(op.get("matmul"), inputs, (y,), attrs).lower(caps), (*inputs, y)
    more = (make_spec((n,), dtype, 16), make_spec((m, n), dtype, 16))
    inputs = (a, lies((n, k), dtype, False, off[1]), *more)
    attrs |= {"extras": ("bias", "residual"), "activation": ""}
    return op_form(op.get("linear"), inputs, (y,), attrs).lower(caps), (*inputs, y)


def names(launches: Lowered) -> list[str]:
    return [call.kernel.name for call in launches.calls]


def launched(calls: tuple[Call, ...], words: list[Array]) -> None:
    """Run launches in the simulator, over the words of operands, results and temporaries."""
    for call in calls:
        ir, operands = traced(call), [words[r.index] for r in call.tensors]
        simulate(ir, operands, parameters(call, ir), call.groups)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_tiles, "WGMMA_TILES", {SMALL: 1})


@pytest.mark.parametrize("off", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", [*LAYOUTS, "linear"])
@pytest.mark.parametrize(
    ("dtype", "shape"), [(f16, (70, 41, 37)), (bf16, (70, 41, 37)), (f16, (3, 5, 7))]
)
def test_a_product_of_copies_is_right(
    dtype: DType, shape: tuple[int, int, int], layout: str, off: tuple[bool, bool], small: None
) -> None:
    m, n, k = shape
    linear = layout == "linear"
    launches, specs = lowered(m, n, k, off, dtype=dtype, layout="NT" if linear else layout,
                              epilogue=linear, variant="wgmma")  # fmt: skip
    copies = len(launches.calls) - 1
    assert names(launches) == ["copy"] * copies + ["wgmma"]
    assert copies == sum(off) or (min(shape) < 8 and copies == 2)  # short rows are off anyway
    rng = np.random.default_rng(2)
    for _ in range(2):  # a copy is made again: the operand may be another's, who changed it
        values = [rng.standard_normal(s.shape).astype(np.float32) for s in specs[:-1]]
        a, b, *more = [rounded(v, dtype) for v in values]
        words = [laid_out(v, s, BEYOND) for s, v in zip(specs, [*values, None], strict=True)]
        words += [laid_out(None, s, BEYOND) for s in launches.temporaries]
        launched(launches.calls, words)
        y = specs[-1]
        got = Tensor(words[len(specs) - 1], y.dtype, y.shape, y.strides, 0).numpy()
        want = 0.5 * (a @ (b.T if linear else b)) + sum(more)
        np.testing.assert_allclose(got, want, rtol=2 * dtype.epsilon, atol=0.02)


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_large_products_are_repacked(dtype: DType) -> None:
    for layout in LAYOUTS:
        for off in ((True, False), (False, True), (True, True)):
            hopper, _ = lowered(*ODD, off, dtype=dtype, layout=layout)
            ampere, _ = lowered(*ODD, off, SM_80, dtype, layout)
            assert names(hopper) == ["copy"] * sum(off) + ["wgmma"]
            assert names(ampere) == ["copy"] * sum(off) + ["mma"]
            constants = dict(ampere.calls[-1].constants)
            assert constants["tile"] == MMA_TILES[0]
            assert constants["vector_a"] and constants["vector_b"]
    launches, _ = lowered(*ODD, dtype=dtype, epilogue=True)
    assert names(launches) == ["copy", "copy", "wgmma"]
    assert [c.reason for c in launches.calls] == [
        f"copy for linear operand {i}: rows do not start on 16 bytes" for i in (0, 1)
    ] + [""]
    assert all(t.strides[-2] * t.dtype.itemsize % 16 == 0 for t in launches.temporaries)


def test_where_a_copy_costs_more_than_it_saves_there_is_none() -> None:
    for shape in ((65537, 33, 4099), (129, 131, 69), (1, 1, 5)):
        assert "copy" not in names(lowered(*shape)[0]), shape
    (call,) = lowered(129, 131, 69)[0].calls
    assert call.kernel.name == "mma" and dict(call.constants)["tile"] == MMA_TILES[-1]
    assert names(lowered(129, 131, 1029)[0]) == ["copy", "copy", "wgmma"]
    assert names(lowered(1025, 1027, 1029)[0]) == ["copy", "copy", "wgmma"]
    assert names(lowered(*ODD, (False, False))[0]) == ["wgmma"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_shorter_than_16_bytes_are_copied_to_such_rows(layout: str) -> None:
    for shape in ((3, 5, 8), (5, 3, 2), (1, 7, 3)):
        launches, _ = lowered(*shape, variant="wgmma", layout=layout)
        assert names(launches)[-1] == "wgmma"
        assert all(t.strides[-2] * t.dtype.itemsize % 16 == 0 for t in launches.temporaries)


def test_a_forced_variant_is_what_runs() -> None:
    assert names(lowered(*ODD, variant="mma")[0]) == ["mma"]
    assert names(lowered(9, 9, 9, variant="wgmma")[0]) == ["copy", "copy", "wgmma"]
    assert "copy" not in names(lowered(*ODD, caps=replace(CAPS, arch="sm_75"))[0])
    assert "copy" not in names(lowered(*ODD, dtype=f32)[0])


def test_what_is_repeated_is_copied_once() -> None:
    a = Spec((8, 1000, 1001), f16, (1000 * 1001, 1001, 1), False)
    b = Spec((1001, 1003), f16, (1003, 1), False)
    y = make_spec((8, 1000, 1003), f16, 16)
    launches = op_form(op.get("matmul"), (a, b), (y,), {"alpha": 1.0}).lower(CAPS)
    assert names(launches) == ["copy", "copy", "wgmma"]
    assert [t.shape for t in launches.temporaries] == [(8, 1000, 1001), (1001, 1003)]
    scalars = dict(launches.calls[-1].scalars)
    assert (scalars["sb"], scalars["batches_b"], scalars["batches_a"]) == (0, 1, 8)
    assert scalars["sa"] == 1000 * 1008 and scalars["lda"] == scalars["ldb"] == 1008


@needs_ptxas
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_assemble(layout: str, tmp_path: Path) -> None:
    for call in lowered(*ODD, layout=layout)[0].calls:
        assemble(emit_ptx(traced(call), "sm_90a"), "sm_90a", tmp_path)


def test_a_plan_says_that_it_copies_and_why(fake: Any) -> None:  # noqa: F811  # the fixture
    device = ct.device("cuda", native=0, pool="reuse")
    x = ct.empty((1025, 1030), f16, device=device)[:, 1:]
    w = ct.empty((1027, 1029), f16, device=device)
    with device.batch() as batch:
        y = ct.linear(x, w)
    assert y.shape == (1025, 1027)
    text = batch.explain()
    assert "2 launches (1 copies)" in text
    assert "copy for linear operand 0: rows do not start on 16 bytes copy" in text
    assert "[1025, 1029] -> [1025, 1029]:f16" in text
