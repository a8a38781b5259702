"""Thin products in every shape of a group, with and without shuffles, in the simulator."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella import lang
from centella.dtypes import DType, dtype_of, f16, f32, i8, u32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.lang import KernelIR
from centella.op import op
from centella.ops.matmul import thin
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.sums import SHARED_WORDS, TeamSums, Thin
from centella.ops.matmul.thin import thin_of
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas
from tests.support.lang_common import empty, on_simulator, record, tensor
from tests.support.launched import laid_out, op_form, parameters, result, rounded, traced

Array = np.ndarray[Any, Any]
CUDA = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=48 << 10,
            subgroups=True, arch="sm_80")  # fmt: skip
N = 37
TILES = [
    Thin(1, 128, 2, 4), Thin(1, 128, 4, 1), Thin(1, 256, 2, 2, 256), Thin(1, 32, 2, 2),
    Thin(1, 64, 1, 2), Thin(1, 8, 2, 1), Thin(1, 4, 1, 1, 256), Thin(2, 128, 2, 2),
    Thin(2, 16, 1, 4), Thin(4, 32, 2, 2), Thin(4, 128, 4, 1), Thin(8, 32, 4, 1),
    Thin(8, 32, 2, 2, 256), Thin(16, 32, 2, 1), Thin(16, 8, 1, 1, 64),
]  # fmt: skip
K = 4096
SHIPPED = {
    thin_of(Problem(1, m, n, K, K, K, n, 0, 0, 0, True, True), (f32, w), caps)
    for caps in (CUDA, *(Caps("wgsl", family=f) for f in ("nvidia", "software", "amd")))
    for m in (1, 4, 16) for n in (64, 4096) for w in (f32, i8)
}  # fmt: skip
TILES += sorted(SHIPPED - set(TILES), key=str)


def lowered(tile: Thin, shuffle: bool, k: int, dtypes: tuple[DType, DType]) -> tuple[Call, Any]:
    """The launch of a product of `tile.m` rows and its kernel."""
    x, w = make_spec((tile.m, k), dtypes[0], 16), make_spec((N, k), dtypes[1], 16)
    scale, y = make_spec((N,), f32, 16), make_spec((tile.m, N), dtypes[0], 16)
    attrs = {"extras": ("scale",), "activation": "", "alpha": 1.0, "variant": "skinny"}
    caps = CUDA if shuffle else Caps("ir")
    (call,) = op_form(op.get("linear"), (x, w, scale), (y,), attrs).lower(caps).calls
    constants = tuple((n, shuffle if n == "shuffle" else v) for n, v in call.constants)
    return call, traced(replace(call, constants=constants))


def check(call: Call, ir: KernelIR, k: int, *, ptx: bool = False) -> None:
    """Run it on random numbers; its PTX too, bit for bit."""
    rng = np.random.default_rng(k)
    x_spec, w_spec = (
        make_spec((len_, k), r.spec.dtype, 16)
        for len_, r in zip((dict(call.scalars)["m"], N), call.tensors, strict=False)
    )
    x, scale = rng.standard_normal(x_spec.shape), rng.random(N) + 0.5
    whole = w_spec.dtype is i8
    w = rng.integers(-127, 128, w_spec.shape) if whole else rng.standard_normal(w_spec.shape)
    y_spec = call.tensors[-1].spec
    words = [laid_out(x, x_spec), laid_out(w, w_spec), laid_out(scale, make_spec((N,), f32, 16)),
             np.full(y_spec.storage_bytes // 4, 0x7FC07FC0, np.uint32)]  # fmt: skip
    again, params = [w.copy() for w in words], parameters(call, ir)
    simulate(ir, words, params, call.groups, subgroup=32)
    if ptx:
        execute(ir, "sm_80", again, params, call.groups)
        np.testing.assert_array_equal(again[-1], words[-1])
    wanted = rounded(x, x_spec.dtype) @ rounded(w, w_spec.dtype).T * scale.astype(np.float32)
    got = result(call, words)
    near = max(y_spec.dtype.epsilon * 4, 1e-5)
    np.testing.assert_allclose(got, wanted, rtol=near, atol=near * np.abs(wanted).max())


def force(tile: Thin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have thin products of floats and int8 take a shape."""
    for module in ("experts.rows", "matmul.normed_kernel", "quant.kernels"):
        import_module(f"centella.ops.{module}")  # those that first load now would keep it
    monkeypatch.setattr(thin, "thin_of", lambda *_: tile)


@pytest.mark.turns("shuffle")
@pytest.mark.parametrize("shuffle", [False, True], ids=["shared", "shuffle"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_shape_of_a_group(tile: Thin, shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    force(tile, monkeypatch)
    for dtypes in ((f32, f32), (f16, f16), (f32, i8), (f16, f32)):
        if tile.outputs % dtypes[0].per_word:
            continue
        width = max(d.per_chunk for d in dtypes)
        block = tile.lanes * tile.unroll * width
        for k in (1, 67, block, 2 * block):
            call, ir = lowered(tile, shuffle, k, dtypes)
            assert dict(call.constants)["tile"] == tile
            assert ir.shared_bytes <= 16 << 10
            check(call, ir, k)


@pytest.mark.parametrize("tile", [Thin(1, 64, 4, 2, 64), Thin(2, 32, 2, 1, 64)], ids=str)
def test_ptx_equals_the_simulator(tile: Thin, monkeypatch: pytest.MonkeyPatch) -> None:
    force(tile, monkeypatch)
    for dtypes in ((f32, f32), (f16, i8)):
        call, ir = lowered(tile, True, 67, dtypes)
        assert ir.uses_subgroups
        check(call, ir, 67, ptx=True)


@pytest.mark.parametrize("rolled", [False, True], ids=["", "rolled"])
@pytest.mark.parametrize(
    ("threads", "teams", "slots", "count"),
    [(64, 1, 64, 1), (128, 2, 128, 9), (128, 2, 128, 18), (128, 1, 128, 17), (128, 4, 16, 9),
     (128, 8, 128, 18), (128, 16, 128, 36), (256, 1, 256, 9), (256, 8, 256, 16), (256, 1, 8, 5),
     (320, 1, 320, 9), (96, 3, 96, 7), (64, 64, 64, 2)],
)  # fmt: skip
def test_sums_of_teams_of_any_number_of_values(
    threads: int, teams: int, slots: int, count: int, rolled: bool
) -> None:
    """Twice in the same memory; every thread reads each sum of each team."""
    whole = threads * count

    def kernel(x: lang.In[f32], y: lang.Out[f32]) -> None:
        add, me = TeamSums(threads, teams, slots, count, rolled), lang.local_id()
        for turn in range(2):
            added = add([x[me * count + (v + turn * whole)] for v in range(count)])
            with lang.if_(me < teams):
                for v in range(count):
                    y[me * count + (v + turn * count * teams)] = added(lang.const(v, u32), me)
            lang.barrier()

    if rolled and threads != slots:
        pytest.skip("a CPU has no shuffles")
    x = np.random.default_rng(count).integers(-99, 99, 2 * whole).astype(np.float32)
    tensors = {"x": tensor(x), "y": empty((2 * teams * count,), f32)}
    ir = record(kernel, tensors, threads)
    assert ir.shared_bytes <= 4 * max(SHARED_WORDS, slots * count)
    on_simulator(ir, tensors, 1, subgroup=32)
    wanted = x.reshape(2, threads // teams, teams, count).sum(1)
    np.testing.assert_array_equal(tensors["y"].numpy(), wanted.reshape(-1))


def test_warps_shuffle_and_others_do_not() -> None:
    for m, shuffles in ((1, True), (2, True), (3, False), (16, False)):
        x, w, y = (make_spec(s, f16, 16) for s in ((m, 4096), (64, 4096), (m, 64)))
        attrs = {"extras": (), "activation": "", "variant": "skinny"}
        for caps, able in (
            (CUDA, True),
            (Caps("wgsl", subgroups=True), False),
            (Caps("ir"), False),
        ):
            (call,) = op_form(op.get("linear"), (x, w), (y,), attrs).lower(caps).calls
            assert dict(call.constants)["shuffle"] == (shuffles and able)


@needs_ptxas
def test_ptxas_accepts_shuffles(tmp_path: Path) -> None:
    for dtype in ("f32", "f16", "i8"):
        stored = dtype_of(dtype)
        _, ir = lowered(Thin(1, 128, 2, 4), True, 4095, (f32 if stored is i8 else stored, stored))
        assert ir.uses_subgroups
        assemble(emit_ptx(ir, "sm_80"), "sm_80", tmp_path)
