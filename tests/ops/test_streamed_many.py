"""Products of 17 to 64 rows whose weights the copy engine brings: in the simulator, and as PTX."""

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
from centella.ops.hopper import AT_ONCE
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.product import Product
from centella.ops.matmul.streamed_many import STREAMED_MANY, ManyTile
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from centella.tensors import functional
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.ops.test_streamed_rows import call_of, near_float64, product_of
from tests.support.attention import CAPS
from tests.support.launched import laid_out, parameters, result, traced

Array = np.ndarray[Any, Any]
NARROW = replace(CAPS, max_shared=64 << 10)  # rings that come round


def tile_of(call: Call) -> ManyTile:
    tile = dict(call.constants)["tile"]
    assert isinstance(tile, ManyTile)
    return tile


def product(m: int, n: int, k: int, gated: bool = False) -> Product:
    """Of whole matrices in bf16."""
    x, y = make_spec((m, k), bf16, 16), make_spec((m, n), bf16, 16)
    w = make_spec((2 * n if gated else n, k), bf16, 16)
    return Product(
        Problem.of_rows(x, w, y), (x, w, y), activation="silu" if gated else "", gated=gated
    )


def computed(
    call: Call, specs: tuple[Spec, ...], arrays: list[Array], groups: int | None = None
) -> Array:
    """What a launch computes in the simulator, by so many groups."""
    ir = traced(call)
    words = [laid_out(a, spec) for a, spec in zip((*arrays, None), specs, strict=True)]
    simulate(ir, words, parameters(call, ir), groups or call.groups)
    return result(call, words)


@pytest.mark.turns("dtype", "y", "caps")
@pytest.mark.parametrize(
    ("m", "n", "k", "gate", "extras", "parts"),
    [
        (17, 2, 128, "", (), 1),
        (64, 41, 1024, "", ("bias", "residual"), 4),
        (33, 270, 648, "", (), 4),
        (40, 1500, 648, "", ("bias",), 2),
        (18, 2560, 256, "", ("residual",), 1),
        (20, 150, 520, "silu", (), 4),
        (64, 300, 136, "silu", ("bias",), 1),
        (50, 151, 1100, "silu", ("bias",), 8),
    ],
)
@pytest.mark.parametrize("y", [None, f32], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
@pytest.mark.parametrize("caps", [CAPS, NARROW], ids=["wide", "narrow"])
def test_it_equals_float64(
    m: int, n: int, k: int, gate: str, extras: tuple[str, ...], parts: int, dtype: DType,
    y: DType | None, caps: Caps,
) -> None:  # fmt: skip
    """Odd numbers of rows, outputs and columns; tiles in turn, depths that parts share unevenly."""
    how: dict[str, Any] = {"gate": gate, "dtype": dtype, "y": y, "caps": caps}
    call, specs = product_of(m, n, k, *extras, variant="streamed_many", **how)
    assert call.kernel.name == "streamed_many"
    if caps is CAPS:
        assert tile_of(call).parts == parts
    rng = np.random.default_rng(n)
    arrays = [rng.standard_normal(spec.shape) for spec in specs[:-1]]
    in_turn = 3 if tile_of(call).parts == 1 and call.groups > 3 else None
    got = computed(call, specs, arrays, in_turn)
    near_float64(got, arrays, specs, extras, gate)


def test_a_row_has_the_same_bits_among_any_others() -> None:
    """Its sums are those of its own elements, in an order that other rows do not change."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 648)), rng.standard_normal((270, 648))
    call, specs = product_of(64, 270, 648, variant="streamed_many")
    whole = computed(call, specs, [x, w])
    for rows in (slice(0, 17), slice(20, 60)):
        call, specs = product_of(rows.stop - rows.start, 270, 648, variant="streamed_many")
        assert np.array_equal(computed(call, specs, [x[rows], w]), whole[rows])


def test_which_products_are_streamed() -> None:
    """17 to 64 rows of 16 bits on Hopper, of whole chunks; not in the simulator.

    Up to 32 rows of a small weight are another kernel's.
    """
    for m in (17, 32, 33, 64):
        assert call_of(m, 1280, 1024).kernel.name == "streamed_many"
        assert call_of(m, 640, 1024).kernel.name == ("streamed_many" if m > 32 else "skinny")
        assert call_of(m, 640, 1024, gate="silu").kernel.name == "streamed_many"
    for caps in (replace(CAPS, arch="sm_100"), replace(CAPS, arch="sm_80")):
        assert call_of(64, 640, 1024, caps=caps).kernel.name != "streamed_many"
    for m, k in ((16, 1024), (65, 1024), (64, 64)):
        assert call_of(m, 640, k).kernel.name != "streamed_many"


@pytest.mark.parametrize(("m", "gate"), [(2, ""), (17, ""), (64, ""), (64, "silu")])
def test_a_weight_without_rows_is_no_fit(m: int, gate: str) -> None:
    """There is no tile of nothing; other kernels have launches of no groups."""
    assert call_of(m, 0, 1024, gate=gate).groups == 0


def test_a_gate_of_no_outputs() -> None:
    """Whether a kernel takes it is asked before there is anything to launch."""
    x, weight = (ct.zeros((rows, 256), dtype="f16", device="simulator") for rows in (40, 0))
    assert functional.normed_linear(x, weight, gate="silu").shape == (40, 0)


@pytest.mark.parametrize(
    ("n", "k", "gate", "columns", "parts", "groups"),
    [
        (6144, 2560, "", 96, 2, 128),
        (2560, 4096, "", 96, 4, 108),
        (9728, 2560, "silu", 160, 1, 122),
        (2560, 9728, "", 96, 4, 108),
        (151936, 2560, "", 192, 1, 132),
        (1024, 3072, "", 80, 8, 104),
    ],
)
def test_all_multiprocessors_read(
    n: int, k: int, gate: str, columns: int, parts: int, groups: int
) -> None:
    """The tiles of Qwen3's products: groups are nearly as many as run at a time, and no more."""
    call = call_of(64, n, k, gate=gate)
    tile = tile_of(call)
    assert (tile.columns, tile.parts, call.groups) == (columns, parts, groups)
    assert groups <= AT_ONCE[parts] and tile.shared_bytes <= CAPS.max_shared


@pytest.mark.parametrize(
    ("n", "k", "gate"), [(1024, 3072, ""), (151936, 2560, ""), (9728, 2560, "silu")]
)
def test_weights_are_asked_for_before_the_wait(n: int, k: int, gate: str) -> None:
    """x and what follows the product are not: launches before may still write them.

    The next launch is let in there, too, where a ring has room for all weights.
    """
    ir = traced(call_of(64, n, k, "bias", gate=gate))
    assert [ir.args[i].name for i in ir.early] == ["b"]
    before, wait, behind = emit_ptx(ir, "sm_90a").partition("griddepcontrol.wait;")
    assert wait and "cp.async.bulk.tensor" in before and "ld.global" not in before
    for part in (before, behind):
        assert "griddepcontrol.launch_dependents" in part


@pytest.mark.parametrize("room", [227, 163, 99, 64, 48, 32])
def test_it_keeps_to_the_shared_memory_of_a_device(room: int) -> None:
    """Fewer stages, fewer columns, no parts; or another kernel."""
    caps = replace(CAPS, max_shared=room << 10)
    for n, k, gate in (
        (2560, 4096, False), (300, 9728, True), (1, 128, False), (151936, 2560, False),
    ):  # fmt: skip
        asked = product(64, n, k, gated=gate)
        if STREAMED_MANY.fits(asked, caps):
            (call,) = STREAMED_MANY.lower(asked, caps).calls
            assert traced(call).shared_bytes <= caps.max_shared
        else:
            assert room <= 48


@needs_ptxas
@pytest.mark.turns("y")
@pytest.mark.parametrize(
    ("n", "k", "gate", "extras"),
    [
        (6144, 2560, "", ("bias",)),
        (2560, 9728, "", ("bias", "residual")),
        (9728, 2560, "silu", ()),
        (151936, 2560, "", ()),
        (1024, 3072, "", ("residual",)),
    ],
)
@pytest.mark.parametrize("y", [None, f32], ids=str)
def test_ptxas_accepts_it(
    n: int, k: int, gate: str, extras: tuple[str, ...], y: DType | None, tmp_path: Path
) -> None:
    """No register spills, and no waits between products of warpgroups."""
    assemble_clean(traced(call_of(64, n, k, *extras, gate=gate, y=y)), "sm_90a", tmp_path)
