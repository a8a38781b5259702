"""Rows of tables are read by the nodes that follow: bit for bit what launches of their own give."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import dtype_of, f16, i8, i32
from centella.op.op import Form
from centella.ops import tables
from centella.ops.fused import FUSED
from centella.ops.gather import GATHER, GatherAttrs
from centella.ops.steps import FusedAttrs, step_of
from centella.specs import make_spec
from centella.tensors import functional as f
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.ops.test_skinny import HOPPER
from tests.support.devices import WINDOWED
from tests.support.launched import traced
from tests.support.windowed import BINDING

Array = np.ndarray[Any, Any]
Keep = Callable[[ct.Tensor], ct.Tensor]
FLOATS = ("f32", "f16", "bf16")
GPUS = pytest.mark.devices("simulator", "webgpu", "webgpu-minimum", "cuda")
EVERY = pytest.mark.devices("cpu", "simulator", "webgpu", "webgpu-minimum", "cuda")
IDS: dict[str, Array] = {  # of 9 rows: outside, negative, of every rank
    "scalar": np.array(3, np.int32),
    "outside": np.array([0, 8, 9, -1, -9, -10, 1 << 30, -(1 << 31), 5], np.int32),
    "matrix": np.array([[4, -2, 8], [0, 9, 7]], np.int32),
    "cube": np.arange(-6, 12, dtype=np.int32).reshape(3, 2, 3),
    "column": np.array([[[7]], [[-3]]], np.int32),
}


def chosen(table: Array, ids: Array, wraps: bool) -> Array:
    """Rows by NumPy; NaN (or 0, or False) for what is outside."""
    n = len(table)
    at = np.where(ids < 0, ids.astype(np.int64) + n, ids) if wraps else ids.astype(np.int64)
    inside = (at >= 0) & (at < n)
    none = table.dtype.type(np.nan if table.dtype.kind == "f" else 0)
    lead = inside.reshape(inside.shape + (1,) * (table.ndim - 1))
    return np.where(lead, table[np.where(inside, at, 0)], none)


def ready(device: ct.Device, *arrays: Any, dtype: str | None = None) -> list[ct.Tensor]:
    """Arrays on a device; those of floats in a dtype."""
    each = [ct.asarray(a, device=device) for a in arrays]
    each = [t.astype(dtype) if dtype and t.dtype.is_float else t for t in each]
    ct.fetch(*each).result()
    return each


def both_ways(build: Callable[[Keep], ct.Tensor], most: int = 1) -> Array:
    """A result of at most so many launches, which has the bits that more launches give."""
    kept: list[ct.Tensor] = []

    def keep(t: ct.Tensor) -> ct.Tensor:
        kept.append(t)
        return t

    outcomes = []
    for each in (lambda t: t, keep):
        with ct.ledger() as led:
            y = build(each)
            outcomes.append((y.numpy(), led.launches))
    (fused, few), (plain, many) = outcomes
    if kept[0].device.name != "cpu":  # where all tables are read by themselves
        assert few <= most and few < many
    assert fused.dtype == plain.dtype
    assert fused.tobytes() == plain.tobytes()
    return wide(fused)


def wide(x: Array) -> Array:
    """Floats of 16 bits as f32."""
    return np.asarray(x, np.float32) if x.dtype.itemsize == 2 else x


def normal(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5))


@EVERY
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [2, 13, 48])
@pytest.mark.parametrize("name", IDS)
def test_rows_of_two_tables_and_a_norm(
    device: ct.Device, name: str, columns: int, dtype: str
) -> None:
    """As an encoder adds words and positions, and a decoder, which does not normalise them."""
    rng, ids = np.random.default_rng(columns), IDS[name]
    words, places = (rng.standard_normal((9, columns)).astype(np.float32) for _ in range(2))
    w, p, v, i = ready(device, words, places, words[0], ids, dtype=dtype)

    def total(keep: Keep) -> ct.Tensor:
        return keep(f.embedding(i, w)) + keep(f.gather(p, i))

    stored = [t.astype("f32").numpy() for t in (w, p)]
    added = chosen(stored[0], ids, False) + chosen(stored[1], ids, True)
    near = {"f32": 1e-5, "f16": 2e-2, "bf16": 8e-2}[dtype]
    got = both_ways(total)
    np.testing.assert_allclose(got, added, near, near)
    got = both_ways(lambda keep: f.layer_norm(keep(total(keep)), v))
    if columns > 2:  # two elements far apart by little are whatever rounding makes them
        wanted = normal(added) * v.astype("f32").numpy()
        np.testing.assert_allclose(got, wanted, 4 * near, 4 * near)


@EVERY
@pytest.mark.parametrize(("stored", "to"), [("f32", "f16"), ("f16", "f32"), ("bf16", "f16")])
@pytest.mark.parametrize("columns", [13, 48])
def test_casts_between(device: ct.Device, stored: str, to: str, columns: int) -> None:
    rng, ids = np.random.default_rng(1), IDS["matrix"]
    values = rng.standard_normal((10, columns)).astype(np.float32)
    w, x, i = ready(device, values[:9], values[9], ids)
    (w,) = ready(device, w.astype(stored))
    (x,) = ready(device, x.astype(to))

    def total(keep: Keep) -> ct.Tensor:
        return keep(keep(keep(f.embedding(i, w)).astype(to)) * 1.5) + x

    both_ways(total)
    both_ways(lambda keep: f.rms_norm(keep(total(keep)), x) * 2.0, 1)
    both_ways(lambda keep: f.max(keep(total(keep)), -1) + 1.0, 2)


@EVERY
@pytest.mark.parametrize("dtype", ["f32", "i32", "i8", "bool"])
@pytest.mark.parametrize("shape", [(9, 5), (9, 3, 16), (9, 1, 7), (1, 4)])
def test_tables_of_every_dtype_and_rank(
    device: ct.Device, dtype: str, shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(2).integers(-40, 40, shape)
    for ids in (IDS["outside"], IDS["matrix"]):
        t, i = ready(device, (values > 0) if dtype == "bool" else values.astype(np.int32), ids)
        (t,) = ready(device, t.astype(dtype))
        wanted = chosen(t.numpy(), ids, True)
        if dtype == "bool":
            got = both_ways(lambda keep, t=t, i=i: ~keep(f.gather(t, i)))
            np.testing.assert_array_equal(got, ~wanted)
        else:
            got = both_ways(lambda keep, t=t, i=i: keep(f.gather(t, i)) + 3)
            np.testing.assert_array_equal(got, wanted + np.asarray(3, wanted.dtype))


@EVERY
def test_rows_before_and_after_a_reduction(device: ct.Device) -> None:
    rng = np.random.default_rng(3)
    x, rows, row, long = (
        rng.standard_normal(s).astype(np.float32) for s in ((9, 40), (9, 6), (9, 2), (4, 16500))
    )
    a, b, c, d, i, j, k = ready(
        device, x, rows, row, long, IDS["matrix"], np.array([1, -1], np.int32), np.int32(2)
    )
    got = both_ways(lambda keep: f.sum(keep(keep(f.embedding(i, a)) * 2.0), -1) + 1.0)
    np.testing.assert_allclose(got, 2 * chosen(x, IDS["matrix"], False).sum(-1) + 1, 1e-5, 1e-5)
    got = both_ways(
        lambda keep: keep(f.max(keep(f.gather(a, i)) + a[0], -1)) * keep(f.gather(b[:, :3], j)), 1
    )
    wanted = (chosen(x, IDS["matrix"], True) + x[0]).max(-1)
    np.testing.assert_allclose(got, wanted * rows[[1, -1], :3], 1e-6)
    got = both_ways(lambda keep: keep(f.sum(keep(f.gather(d, j)), -1)) - keep(f.gather(c, k)), 2)
    np.testing.assert_allclose(got, long[[1, -1]].sum(-1) - row[2], 1e-4, 1e-3)


@EVERY
def test_parts_of_tables_and_ids(device: ct.Device) -> None:
    """Rows off every boundary, a turned table, ids of a column, an id for several rows."""
    x = np.random.default_rng(4).standard_normal((9, 21)).astype(np.float32)
    pairs = np.array([[1, 5], [-2, 8], [9, 0]], np.int32)
    for dtype in ("f32", "f16"):
        t, w, i = ready(device, x, x[0, 3:], pairs, dtype=dtype)
        v = t.astype("f32").numpy()
        got = both_ways(lambda keep, t=t, i=i, w=w: keep(f.gather(t[1:, 3:], i[:, 1])) * w)
        np.testing.assert_allclose(got, chosen(v[1:, 3:], pairs[:, 1], True) * v[0, 3:], 2e-3, 1e-3)
        got = both_ways(lambda keep, t=t, i=i: keep(f.gather(t.T, i)) - 1.0)
        np.testing.assert_allclose(got, chosen(v.T, pairs, True) - 1, 2e-3, 1e-3)
        one = f.broadcast_to(i[:, :1], (3, 4))
        got = both_ways(lambda keep, t=t, one=one: keep(f.gather(t, one)) * 2.0)
        each = np.broadcast_to(pairs[:, :1], (3, 4))
        np.testing.assert_array_equal(got, 2 * chosen(v, each, True))


@GPUS
def test_what_stays_apart(device: ct.Device) -> None:
    x = np.random.default_rng(5).standard_normal((9, 32)).astype(np.float32)
    back = np.arange(8, -1, -1, dtype=np.int32)
    t, i, n, order = ready(device, x, IDS["matrix"], np.array([2, 3], np.int32), back)

    def launches(build: Callable[[], Any], wanted: int) -> None:
        with ct.ledger() as led:
            ct.fetch(*build()).result()
        assert led.launches == wanted

    def several() -> list[ct.Tensor]:
        rows = f.embedding(i, t)
        return [rows + 1.0, f.softmax(rows)]

    launches(several, 3)
    launches(lambda: [f.embedding(n + 1, t) * 2.0], 2)  # ids that are computed
    launches(lambda: [f.gather(t * 2.0, n) * 2.0], 2)  # a table that is
    launches(lambda: [f.gather(t, n, axis=1) * 2.0], 2)
    launches(lambda: [f.gather(t[0], n) * 2.0], 2)  # no rows
    launches(lambda: [f.gather(t[:, :1], n) * 2.0], 2)  # of one element
    launches(lambda: [f.softmax(f.embedding(i, t))], 2)
    planes = ct.quantize(t, "q8_0")
    launches(lambda: [f.embedding(i, planes) * 2.0], 2)

    def both() -> list[ct.Tensor]:
        doubled = ct.relu(t)  # read as it is, and as a table
        return [doubled[:9] + f.gather(doubled, order)]

    launches(both, 2)
    np.testing.assert_array_equal(both()[0].numpy(), np.maximum(x, 0) + np.maximum(x[::-1], 0))


@EVERY
def test_one_table_by_two_ids_and_by_the_same_twice(device: ct.Device) -> None:
    x = np.random.default_rng(6).standard_normal((9, 20)).astype(np.float32)
    t, i, j = ready(device, x, IDS["matrix"], IDS["matrix"][::-1].copy())
    got = both_ways(lambda keep: keep(f.embedding(i, t)) + keep(f.embedding(j, t)))
    rows = [chosen(x, ids, False) for ids in (IDS["matrix"], IDS["matrix"][::-1])]
    np.testing.assert_array_equal(got, rows[0] + rows[1])
    got = both_ways(lambda keep: keep(f.embedding(i, t)) - keep(f.gather(t, i)))
    np.testing.assert_array_equal(got, rows[0] - chosen(x, IDS["matrix"], True))
    square = x[:, :9].copy()
    s, order = ready(device, square, np.arange(8, -1, -1, dtype=np.int32))
    got = both_ways(lambda keep: keep(f.gather(s, order)) + s)
    np.testing.assert_array_equal(got, square[::-1] + square)


@EVERY
def test_a_tensor_that_is_the_table_of_its_own_elements(device: ct.Device) -> None:
    x = np.random.default_rng(11).integers(-12, 12, (9, 5)).astype(np.int32)
    (t,) = ready(device, x)
    rows = chosen(x, x, True)
    np.testing.assert_array_equal((f.gather(t, t) + 1).numpy(), rows + 1)
    np.testing.assert_array_equal((f.max(f.gather(t, t), -1) + 1).numpy(), rows.max(-1) + 1)


@EVERY
def test_states_that_change_between_calls_and_within_one(device: ct.Device) -> None:
    x = np.random.default_rng(7).standard_normal((9, 24)).astype(np.float32)
    table, ids = ct.State(x, device=device), ct.State(np.array([[2], [7]], np.int32), device=device)

    @ct.jit
    def step(scale: ct.Tensor) -> ct.Tensor:
        rows = f.embedding(ids.value, table.value)
        y = rows * scale
        del rows
        ids.assign(ids.value + 1)
        return y

    (scale,) = ready(device, np.float32(3))
    want = np.array([[2], [7]])
    for turn in range(3):
        np.testing.assert_array_equal(
            step(scale).numpy(), chosen(x, want + turn, False) * np.float32(3)
        )
    table.assign(x * 2)
    ids.assign(np.array([[8], [0]], np.int32))
    np.testing.assert_array_equal(step(scale).numpy(), 2 * x[[[8], [0]]] * np.float32(3))


@GPUS
def test_a_node_moves_only_past_what_changes_nothing_that_it_reads(device: ct.Device) -> None:
    """A change after the last node of a chain keeps no node of it apart; one between them does."""
    x = np.random.default_rng(8).standard_normal((9, 24)).astype(np.float32)
    (t,) = ready(device, x)
    for between in (False, True):
        ids = ct.State(np.array([2, 7], np.int32), device=device)
        device.synchronize()
        with ct.ledger() as led:
            rows = f.embedding(ids.value, t)
            if between:
                ids.assign(0)
            y = rows + 1.0
            del rows
            if not between:
                ids.assign(0)
            got, now = ct.fetch(y, ids.value).result()
        np.testing.assert_array_equal(got, x[[2, 7]] + 1)
        assert not now.any()
        led.expect(launches=2 + between)


@pytest.mark.devices(*WINDOWED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_tables_and_results_above_a_binding(device: ct.Device, dtype: str) -> None:
    rng = np.random.default_rng(9)
    small, large = (rng.standard_normal((n, 40)).astype(np.float32) for n in (11, 90))
    many = rng.integers(-2, 13, (7, 31)).astype(np.int32)
    few = rng.integers(-2, 93, (2, 3)).astype(np.int32)
    s, t, w, i, j = ready(device, small, large, small[0], many, few, dtype=dtype)
    assert t.nbytes > BINDING > s.nbytes and many.size * 40 * 2 > BINDING
    v, u = s.astype("f32").numpy(), t.astype("f32").numpy()
    near = {"f32": 1e-6, "f16": 2e-3, "bf16": 2e-2}[dtype]

    def parts(keep: Keep) -> ct.Tensor:
        return keep(f.embedding(i, s)) * 2.0

    np.testing.assert_allclose(both_ways(parts, 32), 2 * chosen(v, many, False), near, near)
    both_ways(lambda keep: f.layer_norm(keep(parts(keep)), w), 32)
    both_ways(lambda keep: f.sum(keep(parts(keep)), -1), 32)
    flat, deep = (rng.standard_normal(n).astype(np.float32) for n in ((40, 60), (11, 40, 7)))
    a, b, one, all_of = ready(
        device, flat, deep, np.array(4, np.int32), np.arange(11, dtype=np.int32), dtype=dtype
    )
    assert a.nbytes > BINDING and b.nbytes > BINDING  # of what is reduced, beside rows after it
    both_ways(lambda keep: keep(f.sum(a, -1)) + keep(f.gather(s, one)), 32)
    both_ways(lambda keep: keep(f.sum(b, -1)) + keep(f.gather(s, all_of)), 32)
    with device.batch() as batch:
        apart = f.gather(t, j) + w
    assert "gather" in batch.explain() or device.name == "cpu"
    wanted = chosen(u, few, True) + v[0]
    np.testing.assert_allclose(batch.read(apart).astype(np.float32), wanted, near, near)


@needs_ptxas
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rows_on_boundaries_are_read_in_chunks(dtype: str, tmp_path: Path) -> None:
    """As a decoder's step and an encoder read them: no element of a table is loaded alone."""
    kind = dtype_of(dtype)
    ids, table, y = (make_spec(s, d, 16) for s, d in (
        ((4, 7), i32), ((90, 384), kind), ((4, 7, 384), kind),
    ))  # fmt: skip
    vector = make_spec((384,), kind, 16)
    rows = [step_of("embedding", (0, 1), dtype), step_of("gather", (2, 3), dtype, axis=0)]
    added = [*rows, step_of("add", (4, 5), dtype)]
    inputs = ids, table, table, ids
    normed = [
        *(s._replace(operands=tuple(k + (k > 3) for k in s.operands)) for s in added),
        step_of("norm", (7, 4), dtype, kind="rms", eps=1e-5, vectors=("weight",)),
    ]
    for operands, steps in ((inputs, added), ((*inputs, vector), normed)):
        form = Form(FUSED, operands, (y,), FusedAttrs(tuple(steps)))
        (call,) = form.lower(HOPPER).calls
        text = assemble_clean(traced(call), "sm_90a", tmp_path)
        loads = Counter(re.findall(r"ld\.global\S*", text))
        assert loads.pop("ld.global.nc.b32") == 2  # an id of each table
        assert list(loads) == ["ld.global.nc.v4.b32"]


@pytest.mark.devices("cpu")
def test_the_cpu_reads_tables_by_themselves(device: ct.Device) -> None:
    x = np.random.default_rng(5).standard_normal((9, 32)).astype(np.float32)
    t, i = ready(device, x, IDS["matrix"])
    with ct.ledger() as led:
        ct.fetch(f.gather(t, i) * 2.0).result()
    assert led.launches == 2


@pytest.mark.parametrize(
    ("shape", "binding", "taken"),
    [((16, 64), 4096, True), ((30, 64), 4096, True), ((31, 64), 4096, False),
     ((32, 64), 4096, False), ((1 << 16, (1 << 16) - 16), 1 << 40, True),
     ((1 << 16, 1 << 16), 1 << 40, False)],
)  # fmt: skip
def test_tables_that_a_launch_sees_whole(shape: tuple[int, int], binding: int, taken: bool) -> None:
    """Wherever they begin in a buffer, and no more elements than 32 bits count."""
    kind = i8 if binding > 1 << 32 else f16
    caps = replace(HOPPER, max_binding=binding, binding_alignment=256)
    table, ids, y = (make_spec(s, d, 16) for s, d in (
        (shape, kind), ((2,), i32), ((2, shape[1]), kind),
    ))  # fmt: skip
    assert tables.takes(Form(GATHER, (table, ids), (y,), GatherAttrs(0)), caps) is taken


@GPUS
def test_explain_names_tables(device: ct.Device) -> None:
    x = np.random.default_rng(10).standard_normal((9, 24)).astype(np.float32)
    t, i = ready(device, x, IDS["matrix"])
    batch = device.batch()
    with batch:
        y = f.layer_norm(f.embedding(i, t) + t[0])
        assert "norm <- embedding add" in batch.explain(outputs=[y])


SHAPES = ((3, 5, 34), (5, 34), (34,), (3, 5), (5,))
TABLES = ((7, 34), (4, 5, 34), (3, 5))
ROWS: tuple[tuple[int, ...], ...] = ((3, 5), (5,), (), (3,))


@pytest.mark.devices("simulator", "cuda")
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_have_the_bits_of_their_ops(device: ct.Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in (*SHAPES, *TABLES)]
    given = ready(device, *arrays, dtype=FLOATS[seed % 3])
    ids = ready(device, *(rng.integers(-9, 9, s).astype(np.int32) for s in ROWS))

    def program(keep: Keep) -> ct.Tensor:
        draw = np.random.default_rng(seed)
        have, tables = given[: len(SHAPES)], given[len(SHAPES) :]
        for _ in range(40):
            x, y = (have[int(draw.integers(len(have)))] for _ in range(2))
            pick, some = int(draw.integers(8)), ids[int(draw.integers(len(ids)))]
            if pick < 3:
                table = tables[int(draw.integers(len(tables)))]
                words = pick == 0 and table.ndim == 2
                result = f.embedding(some, table) if words else f.gather(table, some)
            elif pick == 3:
                result = f.rms_norm(x)
            elif pick == 4 and x.ndim > 1:
                result = f.mean(x, -1)
            elif x.shape != y.shape and not {x.shape[1:], y.shape[1:]} & {x.shape, y.shape}:
                continue
            else:
                result = x + y if pick == 5 else x * y
            if result.shape in SHAPES:
                have[int(draw.integers(len(have)))] = keep(result)
        return f.sum(have[0], -1) if have[0].ndim > 1 else have[0] * 1.0

    both_ways(program, 64)
