"""Products of a few rows with their layer norm, stage by stage: in the simulator, and as PTX."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32
from centella.emit.ptx import emit_ptx
from centella.errors import LimitError
from centella.op import op
from centella.ops.matmul.streamed_norms import LONGEST
from centella.specs import make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.ops.test_decoding import LAYER, check, layer_norm
from tests.ops.test_streamed_rows import call_of, in_few_groups, product_of, run
from tests.support.attention import CAPS
from tests.support.launched import op_form, result, rounded, traced

Array = np.ndarray[Any, Any]
EPS = 1e-5
EVERY = ("norm", "shift", "bias", "residual")


class Layered:
    """A launch, its operands as they are stored, and in float64 what it should compute."""

    def __init__(
        self, m: int, n: int, k: int, *extras: str, gate: str = "", dtype: DType = f16,
        y: DType = f32,
    ) -> None:  # fmt: skip
        self.call, self.specs = product_of(
            m, n, k, *extras, gate=gate, dtype=dtype, y=y, kind="layer"
        )
        assert self.call.kernel.name == "streamed_rows"
        self.extras, self.gate, self.dtype, self.n = extras, gate, dtype, n
        rng = np.random.default_rng(m + n + k)
        self.arrays = [rng.standard_normal(spec.shape) for spec in self.specs[:-1]]
        self.x, self.norm = self.arrays[0], self.arrays[2]

    def run(self) -> Array:
        """What the launch computes in few groups, so that each has several blocks."""
        return result(self.call, run(in_few_groups(self.call), self.arrays, self.specs))

    def rows(self) -> tuple[Array, Array]:
        """x normalised, and the factor of each row."""
        x, _, *more = (
            rounded(a, spec.dtype) for a, spec in zip(self.arrays, self.specs, strict=False)
        )
        vectors = dict(zip(self.extras, more, strict=True))
        off = x - x.mean(1, keepdims=True)
        factor = 1 / np.sqrt((off * off).mean(1, keepdims=True) + EPS)
        return off * factor * vectors["norm"] + vectors.get("shift", 0), factor

    def after(self, rows: Array) -> Array:
        """The product of rows, and what follows it."""
        _, w, *more = (
            rounded(a, spec.dtype) for a, spec in zip(self.arrays, self.specs, strict=False)
        )
        vectors = dict(zip(self.extras, more, strict=True))
        y: Array = 0.5 * (rows @ w.T) + vectors.get("bias", 0)
        if self.gate:
            y = y[:, : self.n] / (1 + np.exp(-y[:, : self.n])) * y[:, self.n :]
        return np.asarray(y + vectors.get("residual", 0))


@pytest.mark.turns("dtype", "y")
@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras"),
    [
        (2, 2, 128, "", ("norm",)),
        (3, 38, 1000, "", EVERY),
        (5, 300, 136, "silu", ("norm", "shift", "bias")),
        (6, 530, 264, "", ("norm", "shift")),
        (7, 41, 648, "", ("norm", "residual")),
        (7, 151, 136, "silu", ("norm", "shift")),
        (8, 270, 512, "", EVERY),
        (14, 151, 136, "silu", ("norm", "shift", "bias")),
        (15, 530, 264, "", ("norm", "bias")),
        (16, 150, 520, "silu", ("norm", "shift")),
    ],
)
@pytest.mark.parametrize("y", [None, f32], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_it_equals_float64(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], dtype: DType, y: DType | None
) -> None:
    """Odd numbers of rows, outputs and columns; rows of the norm among those of x and beyond."""
    asked = Layered(m, n, k, *extras, gate=gate, dtype=dtype, y=y or dtype)
    asked.x += np.linspace(-30, 30, m)[:, None]  # means that are far from deviations
    wanted = asked.after(asked.rows()[0])
    size, kind = np.abs(wanted).max(), y or dtype
    near = max(kind.epsilon, 1e-5)
    np.testing.assert_allclose(asked.run(), wanted, rtol=4 * kind.epsilon, atol=near * size)


def spread(x: Array, norm: Array, values: str) -> None:
    """Change rows of x and weights to what is hard for sums."""
    if values == "far":
        x += 1000
    elif values == "outliers":
        x[:, 3] *= 1000
        x[0] *= 15
    elif values == "an outlier in the middle":
        x[:, 0] = 60_000
    elif values == "small":
        x *= 2.0**-20
        norm *= 2.0**-20
    elif values == "large weights":
        norm[::3] *= 1000


@pytest.mark.turns("values")
@pytest.mark.parametrize(
    "values", ["normal", "far", "outliers", "an outlier in the middle", "small", "large weights"]
)
@pytest.mark.parametrize("k", [136, 1280])
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_as_exact_as_a_norm_in_a_launch_of_its_own(dtype: DType, k: int, values: str) -> None:
    """Whose result is rounded before the product; each row for itself."""
    asked = Layered(5, 46, k, "norm", dtype=dtype)
    spread(asked.x, asked.norm, values)
    rows, _ = asked.rows()
    wanted = asked.after(rows)
    apart = np.abs(asked.after(rounded(rows, dtype)) - wanted).max(1)
    assert np.isfinite(apart).all()
    assert (np.abs(asked.run() - wanted).max(1) < apart).all()


@pytest.mark.parametrize("k", [136, 1280, LONGEST])
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_the_variance_that_loses_most(dtype: DType, k: int) -> None:
    """All of it is two elements, and the middle is one of them."""
    asked = Layered(5, 46, k, "norm", dtype=dtype)
    asked.x[:, [0, k // 2]] = 1000
    wanted = asked.after(asked.rows()[0])
    assert np.abs(asked.run() - wanted).max() < 2.0**-12 * np.abs(wanted).max()


@pytest.mark.parametrize("size", [2.0**-24, 2.0**-14, 1.0, 1800.0])
@pytest.mark.parametrize("weights", [2.0**-100, 2.0**-24, 1.0, 65504.0, 2.0**124])
def test_the_parts_of_f16(size: float, weights: float) -> None:
    """The bound of their error, by a weight that is one: rows of x from the smallest f16 on."""
    k = 136
    asked = Layered(3, k, k, "norm", dtype=f16)
    asked.arrays[1][:] = 2 * np.eye(k)  # alpha is 0.5
    asked.x[:] = np.round(asked.x * 8) * size
    asked.x[2] = np.where(asked.x[2] > 0, 65504.0, -65504.0)
    asked.norm *= weights / np.abs(asked.norm).max()
    x, norm = rounded(asked.x, f16), rounded(asked.norm, f32)
    rows, factor = asked.rows()
    middle = np.median(x[:, [0, k // 2, k - 1]], 1, keepdims=True)
    off, mean = np.abs(x - middle), np.abs((x - middle).mean(1, keepdims=True))
    error = 2.0**-22 * (off + mean) * np.abs(norm) + 2.0**-34 * weights * (1 + mean)
    error = 2 * error * factor + 2.0**-20 * np.abs(rows)
    assert (np.abs(asked.run() - rows) <= error).all()


@pytest.mark.parametrize("values", ["every number of its range", "weights"])
def test_nothing_is_beyond_f16(values: str) -> None:
    """Where neither d times its weight, nor what it becomes is an f16."""
    asked = Layered(5, 46, 264, *EVERY[:2], dtype=f16)
    asked.x[:] = np.where(asked.x > 0, 65504.0, -65504.0)
    if values == "weights":
        asked.norm *= 1e30
        asked.arrays[3] *= 1e20
    else:
        asked.norm[:] = asked.arrays[3][:] = 65504.0
    wanted = asked.after(asked.rows()[0])
    np.testing.assert_allclose(asked.run(), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_a_row_that_is_one_number(dtype: DType) -> None:
    """Nothing is left of it but the shift, and of weights that are zero."""
    asked = Layered(5, 46, 264, *EVERY[:2], dtype=dtype)
    asked.x[:] = 1000.0
    asked.x[1] = 0.0
    wanted = asked.after(asked.rows()[0])
    np.testing.assert_allclose(asked.run(), wanted, rtol=1e-4, atol=1e-4)
    asked.norm[:] = asked.arrays[3][:] = 0.0
    assert not asked.run().any()


def test_which_are_taken() -> None:
    """2 to 16 rows of both dtypes, of up to 2048 columns; eights have room for norm and shift."""
    for m, extras, eights in (
        (2, EVERY, 1), (6, EVERY, 1), (7, EVERY, 2), (7, ("norm",), 1), (8, ("norm",), 2),
        (14, EVERY, 2), (15, EVERY, 3), (15, ("norm",), 2), (16, ("norm",), 3),
    ):  # fmt: skip
        for dtype in (f16, bf16):
            call = call_of(m, 40, LONGEST, *extras, dtype=dtype, kind="layer")
            assert call.kernel.name == "streamed_rows"
            assert dict(call.constants)["tile"].eights == eights
    for m, k in ((5, LONGEST + 8), (17, 1280), (1, 1280)):
        with pytest.raises(LimitError, match="streamed_rows"):
            call_of(m, 40, k, "norm", dtype=f16, kind="layer")


@pytest.mark.parametrize("shift", [True, False])
def test_it_is_chosen_where_an_eight_has_room(shift: bool) -> None:
    """For norm and shift behind the rows; where outputs are few, in two."""
    normed, caps = op.get("normed_linear"), replace(CAPS, family="nvidia")
    vector = make_spec((1280,), f16, 16)
    extras = ("norm", "shift") if shift else ("norm",)
    attrs = {"extras": extras, "gate": "", "eps": EPS, "alpha": 1.0, "kind": "layer"}
    assert normed.preferred is not None
    for m, n in itertools.product(range(3, 17), (3840, 5120)):
        x, w, y = (make_spec(shape, f16, 16) for shape in ((m, 1280), (n, 1280), (m, n)))
        form = op_form(normed, (x, w, *[vector] * len(extras)), (y,), attrs)
        room = 16 if n == 3840 else 8
        assert normed.preferred(form, caps) == (m <= room - len(extras))


@needs_ptxas
@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras", "dtype"),
    [
        (5, 3840, 1280, "", EVERY[:3], f16), (5, 1280, 1280, "", EVERY, f16),
        (5, 5120, 1280, "", EVERY[:3], f16), (5, 51866, 1280, "", EVERY[:2], f16),
        (8, 5120, 1288, "", EVERY, f16), (16, 5120, 1288, "silu", EVERY[:3], f16),
        (5, 51866, 1280, "", EVERY[:2], bf16), (14, 51866, 1288, "", EVERY[:2], bf16),
        (16, 5120, 1288, "silu", EVERY[:3], bf16),
    ],
)  # fmt: skip
def test_it_stays_in_registers(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], dtype: DType, tmp_path: Path
) -> None:
    """Two groups have registers; weights and those of the norm are read before the wait, x not."""
    call = call_of(m, n, k, *extras, gate=gate, dtype=dtype, kind="layer")
    tile, ir = dict(call.constants)["tile"], traced(call)
    assert tile.stages * tile.stage_bytes(2 if gate else 1) > 64 << 10
    assert ir.shared_bytes <= 190 << 10
    vectors = [name for name in extras if name in ("norm", "shift")]
    assert sorted(ir.args[i].name for i in ir.early) == sorted(["w", *vectors])
    text = emit_ptx(ir, "sm_90a")
    assert "ld.global.nc" not in text.rpartition("griddepcontrol.wait;")[2]
    report, _ = assemble(text, "sm_90a", tmp_path)
    registers, spilled = resources(report)
    assert spilled == 0 and registers * ir.workgroup <= 32_768


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_what_follows_it_in_a_whisper_layer(dtype: DType) -> None:
    """Shift, bias, GELU and residual behind five rows whose mean is 30 deviations away."""
    near = 8 * dtype.epsilon  # W and the residual are rounded as they are stored
    check("normed_linear", layer_norm(5, 136, 38, dtype), near, **LAYER, variant="streamed_rows")
