"""Products of 17 to 64 rows with their RMS norm in one launch: in the simulator, and as PTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.dtypes import DType, bf16, f16, f32
from centella.emit.program import Call
from centella.op import op
from centella.op.op import Form
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.ops.test_streamed_many import NARROW, tile_of
from tests.support.attention import CAPS
from tests.support.launched import laid_out, op_form, parameters, result, rounded, traced

NORMED = op.get("normed_linear")
EPS = 1e-6
Array = np.ndarray[Any, Any]


def form_of(
    m: int, n: int, k: int, gate: str = "", extras: tuple[str, ...] = (), dtype: DType = bf16,
    y: DType = bf16, variant: str | None = "streamed_many", kind: str = "rms",
) -> Form[Any]:  # fmt: skip
    rows = 2 * n if gate else n
    kinds = {"norm": ((k,), f32), "bias": ((rows,), f32), "residual": ((m, n), dtype)}
    names = ("norm", *extras)
    inputs = [make_spec((m, k), dtype, 16), make_spec((rows, k), dtype, 16)]
    inputs += [make_spec(*kinds[name], 16) for name in names]
    attrs = {"extras": names, "gate": gate, "eps": EPS, "alpha": 0.5, "dtype": y.name,
             "variant": variant, "kind": kind}  # fmt: skip
    return op_form(NORMED, tuple(inputs), (make_spec((m, n), y, 16),), attrs)


def off_by(form: Form[Any], caps: Caps = CAPS, groups: int | None = None) -> float:
    """The largest error beside the largest result, of rows of many sizes."""
    random, (m, k) = np.random.default_rng(1), form.inputs[0].shape
    arrays = [random.standard_normal(s.shape) for s in form.inputs]
    arrays[0] *= 10.0 ** random.integers(-3, 4, (m, 1))
    arrays[0][0, k // 2] = 3e4  # a column that outweighs its row
    arrays[1] /= k**0.5
    call = launched(form, caps)
    ir, specs = traced(call), (*form.inputs, form.outputs[0])
    words = [laid_out(a, spec) for a, spec in zip((*arrays, None), specs, strict=True)]
    simulate(ir, words, parameters(call, ir), groups or call.groups)
    wide = [rounded(a, s.dtype) for a, s in zip(arrays, form.inputs, strict=True)]
    attrs = {name: getattr(form.attrs, name) for name in form.attrs.__struct_fields__}
    assert NORMED.reference is not None
    wanted = NORMED.reference(*wide, **attrs)
    return float(np.abs(result(call, words) - wanted).max() / np.abs(wanted).max())


def launched(form: Form[Any], caps: Caps = CAPS) -> Call:
    (call,) = form.lower(caps).calls
    assert call.kernel.name == "streamed_many"
    return call


@pytest.mark.turns("y", "caps")
@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras", "parts"),
    [
        (17, 96, 512, "", (), 2),
        (64, 200, 1040, "", ("residual",), 8),
        (33, 131, 264, "", ("bias",), 1),
        (40, 61, 520, "silu", (), 4),
        (64, 640, 248, "gelu", (), 1),
    ],
)
@pytest.mark.parametrize("caps", [CAPS, NARROW], ids=["rings", "rings that come round"])
@pytest.mark.parametrize("y", [bf16, f32], ids=str)
def test_it_equals_float64(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], parts: int, caps: Caps, y: DType
) -> None:
    """Parts of the depth, whose squares meet, and whole ones; odd rows, outputs and columns."""
    form = form_of(m, n, k, gate, extras, y=y)
    assert tile_of(launched(form, CAPS)).parts == parts
    assert off_by(form, caps) < bf16.epsilon


def test_a_group_takes_several_tiles() -> None:
    """Squares are those of one tile, not of all."""
    form = form_of(20, 640, 264)
    assert tile_of(launched(form)).parts == 1
    assert off_by(form, groups=3) < bf16.epsilon


def test_which_rows_take_it_along() -> None:
    """17 to 64 of bf16, with an RMS norm, on Hopper."""
    hopper = replace(CAPS, family="nvidia")

    def takes(caps: Caps = hopper, **form: Any) -> bool:
        asked = form_of(**{"m": 40, "n": 96, "k": 512, "variant": None, **form})
        assert NORMED.preferred is not None
        return NORMED.preferred(asked, caps) and launched(asked, caps) is not None

    assert takes(m=17) and takes(m=64) and takes(gate="silu") and takes(y=f32)
    assert not (takes(m=65) or takes(dtype=f16) or takes(kind="layer"))
    assert not any(takes(replace(hopper, arch=arch)) for arch in ("sm_80", "sm_100"))


@needs_ptxas
@pytest.mark.parametrize(
    ("n", "k", "gate", "y"),
    [(6144, 2560, "", bf16), (9728, 2560, "silu", bf16), (151936, 1024, "", f32)],
)
def test_it_stays_in_registers(n: int, k: int, gate: str, y: DType, tmp_path: Path) -> None:
    call = launched(form_of(64, n, k, gate, y=y))
    ir = traced(call)
    assert ir.shared_bytes <= CAPS.max_shared
    assert ir.early == (1, 2)  # W, and what the norm multiplies by
    assemble_clean(ir, "sm_90a", tmp_path)
