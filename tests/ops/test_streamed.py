"""Products of one row whose weights the copy engine brings: in the simulator, and as PTX."""

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
from centella.ops.matmul import streamed
from centella.ops.matmul.problem import Problem
from centella.ops.matmul.streamed import FLIGHT, SHARED, stream_of
from centella.ops.matmul.streamed_kernel import Stream
from centella.simulator import tma
from centella.simulator.run import simulate
from centella.simulator.tma import send
from centella.specs import Caps, make_spec
from tests.emit.test_lang_ptx import assemble, needs_ptxas, resources
from tests.support.attention import CAPS
from tests.support.launched import laid_out, op_form, parameters, result, rounded, traced

Array = np.ndarray[Any, Any]
EPS = 1e-5


def call_of(
    name: str, n: int, k: int, y: DType = bf16, gate: str = "", *extras: str, caps: Caps = CAPS,
    dtype: DType = bf16,
) -> Call:  # fmt: skip
    """The launch of a product of one row: n outputs, of twice as many rows with a gate.

    With a shift the norm is a layer norm.
    """
    rows = 2 * n if gate else n
    specs = {"norm": (k,), "shift": (k,), "bias": (rows,), "residual": (1, n)}
    given = tuple(make_spec(specs[e], f32 if e == "bias" else dtype, 16) for e in extras)
    x, w = make_spec((1, k), dtype, 16), make_spec((rows, k), dtype, 16)
    attrs: dict[str, Any] = {"extras": tuple(extras), "activation": "", "alpha": 0.5}
    if name == "normed_linear":
        attrs |= {"gate": gate, "eps": EPS, "kind": "layer" if "shift" in extras else "rms"}
    attrs |= {"dtype": y.name} if y is not dtype else {}
    (call,) = (
        op_form(op.get(name), (x, w, *given), (make_spec((1, n), y, 16),), attrs).lower(caps).calls
    )
    return call


@pytest.mark.turns("dtype", "y")
@pytest.mark.parametrize(
    ("name", "n", "k", "gate", "extras"),
    [
        ("linear", 2, 128, "", ()),
        ("linear", 38, 1000, "", ("residual",)),
        ("linear", 530, 264, "", ("bias",)),
        ("linear", 41, 136, "", ("bias", "residual")),
        ("linear", 601, 264, "", ("residual",)),
        ("linear", 608, 264, "", ()),
        ("normed_linear", 601, 264, "", ("norm",)),
        ("normed_linear", 270, 648, "", ("norm",)),
        ("normed_linear", 300, 136, "silu", ("norm",)),
        ("normed_linear", 6, 520, "silu", ()),
        ("normed_linear", 151, 136, "silu", ("norm", "bias")),
        ("normed_linear", 34, 2184, "", ("norm", "shift", "bias")),
        ("normed_linear", 270, 264, "", ("norm", "shift")),
    ],
)
@pytest.mark.parametrize("y", [None, f32], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_it_equals_float64(
    name: str, n: int, k: int, gate: str, extras: tuple[str, ...], dtype: DType, y: DType | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Odd numbers of outputs and columns; several blocks a group, stages that come round.

    Blocks are larger where there are more outputs, for so few multiprocessors more than 500.
    """
    y = y or dtype
    if n > 600:
        monkeypatch.setattr(streamed, "MULTIPROCESSORS", 33)
    call = call_of(name, n, k, y, gate, *extras, dtype=dtype)
    assert call.kernel.name == "streamed"
    rng, ir = np.random.default_rng(n), traced(call)
    arrays = [rng.standard_normal(r.spec.shape) for r in call.tensors[:-1]]
    if "shift" in extras:
        arrays[0] += 30  # a mean of x that is far from its deviation
    x, w, *more = (rounded(a, r.spec.dtype) for a, r in zip(arrays, call.tensors, strict=False))
    words = [laid_out(a, r.spec) for a, r in zip(arrays, call.tensors, strict=False)]
    words.append(laid_out(None, call.tensors[-1].spec))
    simulate(ir, words, parameters(call, ir), min(call.groups, 3))  # each has several blocks
    vectors = {
        e: v.reshape(-1)[: k if e in ("norm", "shift") else w.size // k]
        for e, v in zip(extras, more, strict=True)
    }
    x, w = x.reshape(1, k), w.reshape(-1, k)
    if "norm" in vectors:
        x = x - x.mean() if "shift" in vectors else x
        x = x / np.sqrt((x * x).mean() + EPS) * vectors["norm"] + vectors.get("shift", 0)
    product = 0.5 * (x @ w.T) + vectors.pop("bias", 0)
    if gate:
        product = product[:, :n] / (1 + np.exp(-product[:, :n])) * product[:, n:]
    wanted = product + vectors.get("residual", 0)
    got = result(call, words).reshape(1, -1)[:, :n]
    size = np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, rtol=4 * y.epsilon, atol=max(y.epsilon, 1e-5) * size)


def test_squares_of_large_f16() -> None:
    """x times the norm's weight is beyond f16, what it becomes is not."""
    call = call_of("normed_linear", 8, 128, f32, "", "norm", dtype=f16)
    ir, x = traced(call), np.full(128, 6e4)
    arrays = [x, np.full(8 * 128, 0.25), np.full(128, 4.0), None]
    words = [laid_out(a, r.spec) for a, r in zip(arrays, call.tensors, strict=True)]
    simulate(ir, words, parameters(call, ir), call.groups)
    np.testing.assert_allclose(result(call, words).reshape(-1)[:8], 64.0, rtol=1e-6)


def test_a_normalised_value_beyond_f16() -> None:
    """It is the sum of two numbers that are not."""
    call = call_of("normed_linear", 8, 128, f32, "", "norm", dtype=f16)
    ir, rng = traced(call), np.random.default_rng(0)
    x, w = np.full(128, 0.01), rng.standard_normal((8, 128))
    x[0], norm = 8.0, np.full(128, 10_000.0)
    words = [
        laid_out(a.reshape(-1), r.spec) for a, r in zip((x, w, norm), call.tensors, strict=False)
    ]
    words.append(laid_out(None, call.tensors[-1].spec))
    simulate(ir, words, parameters(call, ir), call.groups)
    x, w = rounded(x, f16), rounded(w, f16)
    normed = x / np.sqrt((x * x).mean() + EPS) * 10_000.0
    assert 65_504 < normed.max() < 131_000
    np.testing.assert_allclose(result(call, words)[0], 0.5 * w @ normed, rtol=1e-4)


@pytest.mark.parametrize("n", [8, 16, 24])
def test_what_is_past_the_last_column_counts_for_nothing(n: int) -> None:
    """Where x is infinite in its last columns it is not so past them, where weights are 0."""
    call = call_of("linear", n, 264, f32)
    ir, x = traced(call), np.ones(264)
    x[-8:] = np.inf
    arrays = [x, np.full(n * 264, 0.5), None]
    words = [laid_out(a, r.spec) for a, r in zip(arrays, call.tensors, strict=True)]
    simulate(ir, words, parameters(call, ir), call.groups)
    np.testing.assert_array_equal(result(call, words).reshape(-1)[:n], np.inf)


@pytest.mark.parametrize(("n", "products"), [(1024, 2), (2048, 4), (3072, 3), (4096, 4)])
def test_eight_rows_have_half_the_products(n: int, products: int) -> None:
    """Of groups with 8, 16, 24 and 32 rows: eight are a whole first factor, of 32 columns."""
    ir = traced(call_of("linear", n, 2048))
    assert [op for op, *_ in ir.body].count("mma") == products


@pytest.mark.parametrize(
    ("n", "k", "gate", "flight"),
    [(24, 3592, "", 6), (24, 2048, "silu", 3), (24, 2048, "", 4)],
)  # fmt: skip
def test_a_ring_that_is_used_once_asks_for_some_at_a_time(
    n: int, k: int, gate: str, flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage is asked for once the one `flight` before it is there."""
    call = call_of("normed_linear" if gate else "linear", n, k, bf16, gate)
    tile, ir = dict(call.constants)["tile"], traced(call)
    assert isinstance(tile, Stream) and tile.flight == flight
    assert tile.stages == -(-k // tile.columns)
    nbytes = tile.stage_bytes(2 if gate else 1)
    if flight < tile.stages:
        assert FLIGHT - nbytes < flight * nbytes <= FLIGHT < tile.stages * nbytes
    asked: dict[tuple[int, int], list[int]] = {}

    def noted(machine: Any, index: int, group: Any, number: int, box: Any, barriers: int,
              known: Array) -> None:  # fmt: skip
        units = [group.barriers.at(barriers, stage).unit for stage in range(tile.stages)]
        there = [stage for stage, unit in enumerate(units) if known[unit]]
        assert asked.setdefault((id(group.barriers), number), there) == there
        send(machine, index, group, number, box, barriers, known)

    monkeypatch.setattr(tma, "send", noted)
    arrays = [np.ones(r.spec.shape) for r in call.tensors[:-1]]
    words = [laid_out(a, r.spec) for a, r in zip([*arrays, None], call.tensors, strict=True)]
    simulate(ir, words, parameters(call, ir), call.groups)
    assert len(asked) == call.groups * tile.stages
    for (_, stage), there in asked.items():
        assert there == [*range(stage - flight + 1)]


def test_a_ring_with_few_on_their_way_may_come_round() -> None:
    """Of fewer groups than a launch has each takes several blocks."""
    call = call_of("linear", 24, 3592, f32)
    (tile,) = (value for name, value in call.constants if name == "tile")
    assert isinstance(tile, Stream) and tile.flight == 6 and call.groups == 3
    w = rounded(np.random.default_rng(0).standard_normal((24, 3592)), bf16)
    for groups in (1, 2):
        arrays, ir = [np.ones(3592), w.reshape(-1), None], traced(call)
        words = [laid_out(a, r.spec) for a, r in zip(arrays, call.tensors, strict=True)]
        simulate(ir, words, parameters(call, ir), groups)
        got = result(call, words).reshape(-1)[:24]
        np.testing.assert_allclose(got, 0.5 * w.sum(1), rtol=1e-5, atol=1e-4)


def test_which_products_are_streamed() -> None:
    """One row of 16 bits on Hopper, of whole chunks; not in the simulator, unless by name."""
    assert call_of("linear", 64, 1024).kernel.name == "streamed"
    for caps in (replace(CAPS, arch="sm_100"), replace(CAPS, arch="sm_80"), Caps("ir")):
        assert call_of("linear", 64, 1024, caps=caps).kernel.name != "streamed"
    assert call_of("linear", 64, 1020).kernel.name != "streamed"
    assert call_of("linear", 64, 131_072).kernel.name != "streamed"  # no room for two stages
    x, w, y = (
        make_spec((1, 256), f32, 16),
        make_spec((64, 256), f16, 16),
        make_spec((1, 64), f32, 16),
    )
    (call,) = (
        op_form(op.get("linear"), (x, w), (y,), {"extras": (), "activation": ""}).lower(CAPS).calls
    )
    assert call.kernel.name != "streamed"


def test_groups_leave_room_for_one_of_attention() -> None:
    for n, k, halves in ((6144, 2560, 1), (2560, 4096, 1), (9728, 2560, 2), (2560, 9728, 1)):
        problem = Problem(1, 1, n, k, k, k, n, 0, 0, 0, True, True)
        tile = stream_of(problem, (bf16, bf16, bf16), halves, True, CAPS)
        assert tile is not None
        assert SHARED // 2 < tile.stages * tile.stage_bytes(halves) < SHARED
        assert not tile.flight  # rings that come round fill what becomes free


@needs_ptxas
@pytest.mark.parametrize(
    ("name", "n", "k", "gate", "extras", "dtype"),
    [
        ("linear", 2560, 9728, "", ("residual",), bf16),
        ("normed_linear", 9728, 2560, "silu", ("norm",), bf16),
        ("normed_linear", 9728, 2560, "silu", ("norm",), f16),
        ("normed_linear", 5120, 1280, "", ("norm", "shift", "bias"), f16),
        ("linear", 1280, 5120, "", ("bias", "residual"), f16),
    ],
)
def test_weights_are_asked_for_before_the_wait(
    name: str, n: int, k: int, gate: str, extras: tuple[str, ...], dtype: DType, tmp_path: Path
) -> None:
    """So are the norm's weights, whose loads nothing moves behind it; x is not, nor read-only."""
    ir = traced(call_of(name, n, k, dtype, gate, *extras, dtype=dtype))
    names = [a.name for a in ir.args]
    normed = [e for e in extras if e in ("norm", "shift")]
    assert [names[i] for i in ir.early] == ["w", *normed]
    text = emit_ptx(ir, "sm_90a")
    before, wait, behind = text.partition("griddepcontrol.wait;")
    assert wait and "griddepcontrol.wait" not in behind
    assert "cp.async.bulk.tensor" in before and "griddepcontrol.launch_dependents" in before
    assert ("ld.global.v4" in before) == bool(normed) and "ld.global.nc" not in text
    report, _ = assemble(text, "sm_90a", tmp_path)
    registers, spilled = resources(report)
    assert spilled == 0 and registers * ir.workgroup <= 32_768
