"""`ct.kernel`: kernels that users write, on every backend and in the simulator."""

from __future__ import annotations

import gc
import importlib.util
import textwrap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.op.op import registry
from centella.runtime import prepare
from centella.tensors.kernel import user

Array = np.ndarray[Any, Any]
f32, i32, u32 = ct.f32, ct.i32, ct.u32
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
FLAT = np.arange(1000, dtype=np.float32) / 8


@ct.kernel(workgroup=64)
def scale(x: ct.In[f32], y: ct.Out[f32], n: u32, s: f32) -> None:
    """y = s x."""
    i = lang.global_id()
    with lang.if_(i < n):
        y[i] = x[i] * s


@ct.kernel(workgroup=32)
def transpose(x: ct.In[f32, 2], y: ct.Out[f32, 2]) -> None:
    i = lang.global_id()
    rows, columns = x.shape(0), x.shape(1)
    with lang.if_(i < rows * columns):
        r, c = i // columns, i % columns
        y[c, r] = x[r, c]


@ct.kernel(workgroup=64)
def double(x: ct.In[lang.storage], y: ct.Out[lang.storage], n: u32) -> None:
    i = lang.global_id() * y.dtype.per_word
    with lang.if_(i < n):
        y.store(i, [x[lang.minimum(i + k, n - 1)] * 2 for k in range(y.dtype.per_word)])


@ct.kernel(workgroup=64)
def two(x: ct.In[f32], low: ct.Out[f32], high: ct.Out[i32], n: u32, *, shift: int, up: int = 10
        ) -> None:  # fmt: skip
    i = lang.global_id()
    with lang.if_(i < n):
        low[i] = x[i] - float(shift)
        high[i] = lang.cast(x[i], i32) + up


@ct.kernel(workgroup=64)
def reduce_groups(x: ct.In[f32], y: ct.Out[f32], n: u32) -> None:
    i = lang.global_id()
    kept = lang.var(0.0, f32)
    with lang.if_(i < n):
        kept.set(x[i])
    total = lang.workgroup_reduce(kept + 0.0, "add")
    with lang.if_(lang.local_id() == 0):
        y[lang.group_id()] = total


@ct.kernel(workgroup=64)
def add_scalar(x: ct.In[f32], by: ct.Scalar[f32], y: ct.Out[f32], n: u32) -> None:
    i = lang.global_id()
    with lang.if_(i < n):
        y[i] = x[i] + by.value


@ct.kernel(workgroup=64)
def iota(y: ct.Out[u32], n: u32, first: i32) -> None:
    i = lang.global_id()
    with lang.if_(i < n):
        y[i] = i + lang.bitcast(first, u32)


# -- launching ------------------------------------------------------------------------------------


def test_a_launch_is_recorded_like_an_op(device: ct.Device) -> None:
    with ct.ledger() as led:
        x = ct.asarray(FLAT, device=device)
        y = ct.empty(x.shape, device=device)
        scale(x + 1.0, y, n=x.size, s=2.0, threads=x.size)
        z = y + 0.5
        assert led.counts.submissions == 0
        result = z.numpy()
    led.expect(submissions=1, launches=3, downloads=1)
    np.testing.assert_array_equal(result, (FLAT + 1) * 2 + 0.5)


def test_an_out_argument_is_a_handle(device: ct.Device) -> None:
    x = ct.asarray(FLAT, device=device)
    y = ct.zeros(FLAT.shape, device=device)
    before = y[:4]
    scale(x, y, FLAT.size, 3.0, threads=FLAT.size)
    np.testing.assert_array_equal(y.numpy(), 3 * FLAT)
    np.testing.assert_array_equal(before.numpy(), np.zeros(4))
    scale(y, y, FLAT.size, 2.0, groups=16)  # reads the value before
    np.testing.assert_array_equal(y.numpy(), 6 * FLAT)


def test_scalars_ride_with_the_launch(device: ct.Device) -> None:
    x, y = ct.asarray(FLAT, device=device), ct.empty(FLAT.shape, device=device)
    scale(x, y, FLAT.size, 1.5, threads=1000)
    y.numpy()
    with ct.ledger() as led, ct.forbid("compile"):
        for s in (0.0, -0.0, 2, np.float32(0.25), np.int64(3), float("inf")):
            scale(x, y, n=np.int32(1000), s=s, threads=1000)
            with np.errstate(invalid="ignore"):
                want = FLAT * np.float32(s)
            got = y.numpy()
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(np.signbit(got[1:]), np.signbit(want[1:]))
    led.expect(compiles=0)


def test_rank_2_has_strides(device: ct.Device) -> None:
    data = np.arange(35, dtype=np.float32).reshape(5, 7)
    x = ct.asarray(data, device=device)
    for view, want in ((x, data), (x.T, data.T), (x[1:, 2:5], data[1:, 2:5]), (x[::2], data[::2])):
        y = ct.empty(want.T.shape, device=device)
        transpose(view, y, threads=want.size)
        np.testing.assert_array_equal(y.numpy(), want.T)
        np.testing.assert_array_equal((y + 1.0).numpy(), want.T + 1)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 3), (1, 1), (7, 1), (5, 4)])
def test_rank_1_arguments_take_any_shape(device: ct.Device, shape: tuple[int, ...]) -> None:
    """Rows are padded on a GPU; a kernel of rank 1 sees the elements one after the other."""
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x, y = ct.asarray(data, device=device), ct.empty(shape, device=device)
    scale(x, y, n=data.size, s=2.0, threads=data.size)
    assert y.shape == shape
    np.testing.assert_array_equal(y.numpy(), 2 * data)
    scale(x.T, y, n=data.size, s=2.0, threads=data.size)
    np.testing.assert_array_equal(y.numpy().reshape(-1), 2 * np.swapaxes(data, -1, -2).reshape(-1))


def test_views_with_an_odd_start(device: ct.Device) -> None:
    x = ct.asarray(FLAT, device=device)
    y = ct.empty(100, device=device)
    scale(x[3:103], y, n=100, s=1.0, threads=100)
    np.testing.assert_array_equal(y.numpy(), FLAT[3:103])
    one = ct.empty((), device=device)
    scale(x[5], one, n=1, s=2.0, threads=1)
    assert one.shape == ()
    assert one.item() == FLAT[5] * 2


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "i32", "u32", "i8", "u8"])
@pytest.mark.parametrize("size", [1, 3, 64, 101])
def test_storage_is_the_arguments_own(device: ct.Device, kind: str, size: int) -> None:
    data = np.arange(size) % 50
    x = ct.asarray(data, kind, device)
    y = ct.empty(size, kind, device)
    double(x, y, n=size, threads=size)
    np.testing.assert_array_equal(y.numpy().astype(np.int64), 2 * data)
    assert y.dtype.name == kind


def test_two_outputs_and_constants(device: ct.Device) -> None:
    x = ct.asarray(FLAT, device=device)
    for options, shift, up in (({"shift": 3}, 3, 10), ({"shift": 1, "up": -5}, 1, -5)):
        low, high = ct.empty(FLAT.shape, device=device), ct.empty(FLAT.shape, "i32", device)
        two(x, low, high, FLAT.size, threads=FLAT.size, **options)
        np.testing.assert_array_equal(low.numpy(), FLAT - shift)
        np.testing.assert_array_equal(high.numpy(), FLAT.astype(np.int32) + up)


def test_shared_memory_and_groups(device: ct.Device) -> None:
    x = ct.asarray(FLAT, device=device)
    groups = -(-FLAT.size // 64)
    y = ct.empty(groups, device=device)
    reduce_groups(x, y, n=FLAT.size, groups=groups)
    want = np.add.reduceat(FLAT, np.arange(0, FLAT.size, 64))
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-6)


def test_scalars_in_device_memory(device: ct.Device) -> None:
    x = ct.asarray(FLAT, device=device)
    by = ct.asarray([7.0], device=device)
    y = ct.empty(FLAT.shape, device=device)
    add_scalar(x, by * 2.0, y, FLAT.size, threads=FLAT.size)
    np.testing.assert_array_equal(y.numpy(), FLAT + 14)
    add_scalar(x, ct.asarray(1.0, device=device), y, FLAT.size, threads=FLAT.size)
    np.testing.assert_array_equal(y.numpy(), FLAT + 1)


def test_a_kernel_without_inputs(device: ct.Device) -> None:
    y = ct.empty(70, "u32", device)
    iota(y, n=70, first=-3, threads=70)
    np.testing.assert_array_equal(y.numpy(), np.arange(70, dtype=np.uint32) - np.uint32(3))


def test_in_a_batch(device: ct.Device) -> None:
    with ct.ledger() as led, device.batch() as batch:
        x = batch.upload(FLAT)
        y = ct.empty(FLAT.shape, device=device)
        scale(x, y, FLAT.size, 2.0, threads=FLAT.size)
        z = ct.relu(y)
        with pytest.raises(ct.ContractError, match=r"scale:\d+ \(recorded at .*test_user_kernel"):
            y.numpy()
    led.expect(submissions=1, uploads=1)
    np.testing.assert_array_equal(z.numpy(), 2 * FLAT)


def test_more_groups_than_one_side_of_a_grid(device: ct.Device) -> None:
    if device.name == "simulator":
        pytest.skip("its shapes are small")

    @ct.kernel(workgroup=1)
    def one(y: ct.Out[u32]) -> None:
        y[lang.global_id()] = lang.global_id() + 1

    y = ct.empty(70_001, "u32", device)
    one(y, threads=70_001)
    np.testing.assert_array_equal(y.numpy(), np.arange(1, 70_002))


# -- where kernels come from ----------------------------------------------------------------------


def test_a_closure(device: ct.Device) -> None:
    def make(power: int) -> ct.UserKernel:
        @ct.kernel(workgroup=32)
        def raised(x: ct.In[f32], y: ct.Out[f32], n: u32) -> None:
            i = lang.global_id()
            with lang.if_(i < n):
                value = x[i]
                for _ in range(power - 1):
                    value = value * x[i]
                y[i] = value

        return raised

    x = ct.asarray(FLAT[:40], device=device)
    for power in (1, 2, 3, 2):
        y = ct.empty(40, device=device)
        make(power)(x, y, n=40, threads=40)
        np.testing.assert_allclose(y.numpy(), FLAT[:40] ** power, rtol=1e-6)


CELL = """
import centella as ct
from centella import lang
@ct.kernel(workgroup=32)
def plus(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32):
    i = lang.global_id()
    with lang.if_(i < n):
        y[i] = x[i] + FACTOR
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_notebook_cell_is_run_again(device: ct.Device, future: str) -> None:
    """No source file exists; the cell is edited and defines the same name again."""
    space: dict[str, Any] = {"__name__": "__main__"}
    cell = compile(future + CELL, "<cell>", "exec", dont_inherit=True)
    x = ct.asarray(FLAT[:40], device=device)
    for factor in (1.0, 2.0, 1.0):
        space["FACTOR"] = factor
        exec(cell, space)
        y = ct.empty(40, device=device)
        space["plus"](x, y, n=40, threads=40)
        np.testing.assert_array_equal(y.numpy(), FLAT[:40] + np.float32(factor))


def test_a_module_with_postponed_annotations(tmp_path: Path) -> None:
    path = tmp_path / "postponed.py"
    path.write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            import centella as ct
            from centella import lang
            from centella.dtypes import f32, u32

            @ct.kernel(workgroup=32)
            def plus(x: ct.In[f32], y: ct.Out[f32], n: u32):
                with lang.if_(lang.global_id() < n):
                    y[lang.global_id()] = x[lang.global_id()] + 1.0

            def local():
                short = f32
                @ct.kernel(workgroup=32)
                def hidden(x: ct.In[short], y: ct.Out[short]):
                    y[lang.global_id()] = x[lang.global_id()]
                return hidden
            """
        )
    )
    spec = importlib.util.spec_from_file_location("postponed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, y = ct.asarray(FLAT, device="cpu"), ct.empty(1000, device="cpu")
    module.plus(x, y, n=1000, threads=1000)
    np.testing.assert_array_equal(y.numpy(), FLAT + 1)
    with pytest.raises(ct.TraceError, match="'hidden': an annotation cannot be evaluated"):
        module.local()(x, y, threads=32)


def test_kernels_stay_out_of_the_registry_and_go_away() -> None:
    known = set(registry())
    device = ct.device("cpu", pool="reuse")

    def use() -> weakref.ref[Any]:
        @ct.kernel(workgroup=32)
        def brief(y: ct.Out[u32]) -> None:
            y[lang.global_id()] = lang.global_id()

        y = ct.empty(32, "u32", device)
        brief(y, threads=32)
        assert y.numpy()[31] == 31
        return weakref.ref(brief)

    watch = use()
    gc.collect()
    assert watch() is None
    assert set(registry()) == known


def test_what_a_kernel_says_of_itself() -> None:
    assert repr(scale) == "<centella.kernel scale workgroup=64>"
    assert scale.__doc__ == "y = s x."
    assert scale.__name__ == "scale"


# -- looking at it --------------------------------------------------------------------------------


def test_source() -> None:
    assert "@compute @workgroup_size(64" in scale.source()
    assert ".visible .entry" in scale.source("ptx", arch="sm_90a")
    assert ".target sm_90a" in scale.source("ptx", arch="sm_90a")
    assert scale.source("ir") != two.source("ir", shift=1)
    assert two.source("ir", shift=1) != two.source("ir", shift=2)
    assert "f16" in double.ir({"x": "f16", "y": "f16"}).text()
    with pytest.raises(ct.TraceError, match="source: expected wgsl, ptx or ir, got 'hlsl'"):
        scale.source("hlsl")
    with pytest.raises(ct.TraceError, match=r"double: say dtypes={'x': ...}"):
        double.source()
    with pytest.raises(ct.TraceError, match="constant 'shift' has no value"):
        two.source()
    with pytest.raises(ct.TraceError, match=r"scale: unknown \['z', 'tile'\]"):
        scale.source(dtypes={"z": "f16"}, tile=2)
    with pytest.raises(ct.TraceError, match="'x' is declared f32, got f16"):
        scale.source(dtypes={"x": "f16"})


@pytest.mark.parametrize("subgroup", [8, 32])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_simulate(order: str, subgroup: int) -> None:
    got = scale.simulate(
        FLAT, np.empty_like(FLAT), n=1000, s=2.0, threads=1000, order=order, subgroup=subgroup
    )
    assert set(got) == {"y"}
    np.testing.assert_array_equal(got["y"], 2 * FLAT)
    got = two.simulate(FLAT, FLAT, FLAT, 1000, threads=1000, shift=1)
    np.testing.assert_array_equal(got["low"], FLAT - 1)
    assert got["high"].dtype == np.int32
    sums = reduce_groups.simulate(x=FLAT, y=np.zeros(16), n=1000, groups=16, order=order)
    np.testing.assert_allclose(sums["y"], np.add.reduceat(FLAT, np.arange(0, 1000, 64)), rtol=1e-6)


def test_simulate_takes_the_arrays_that_a_launch_would() -> None:
    half, empty = [0.5, 1.5], np.zeros(2)  # a list is converted; of an output the shape counts
    got = scale.simulate(half, empty, n=2, s=2.0, threads=2)
    np.testing.assert_array_equal(got["y"], [1, 3])
    for wrong in (np.ones(2), np.ones(2, np.int32), np.ones(2, np.float16)):
        with pytest.raises(ct.DTypeError, match=f"scale: expected f32 for 'x', .* {wrong.dtype}"):
            scale.simulate(wrong, empty, n=2, s=2.0, threads=2)
    with pytest.raises(ct.DTypeError, match="add_scalar: expected f32 for 'by'"):
        add_scalar.simulate(FLAT, np.ones(1), FLAT, FLAT.size, threads=FLAT.size)


def test_nothing_is_launched_for_empty_outputs(device: ct.Device) -> None:
    x, y = ct.zeros(0, device=device), ct.empty(0, device=device)
    scale(x, y, n=0, s=1.0, threads=0)
    assert y.numpy().shape == (0,)


@pytest.mark.parametrize("wrong", [{"order": "sorted"}, {"subgroup": 0}, {"subgroup": 129}])
def test_simulate_in_no_such_order(wrong: dict[str, Any]) -> None:
    with pytest.raises(ct.SimulationError, match="expected order of forward, reverse, shuffled"):
        scale.simulate(FLAT, np.empty_like(FLAT), n=1000, s=2.0, threads=1000, **wrong)


def test_simulate_says_the_subgroups_size() -> None:
    @ct.kernel(workgroup=64)
    def lanes(y: ct.Out[u32]) -> None:
        y[lang.global_id()] = lang.subgroup_size()

    for size in (8, 32):
        assert set(lanes.simulate(np.zeros(64), threads=64, subgroup=size)["y"]) == {size}


@ct.kernel(workgroup=64)
def over_subgroups(x: ct.In[f32], y: ct.Out[f32], lanes: ct.Out[u32]) -> None:
    i = lang.global_id()
    low, high = lang.subgroup_min(x[i]), lang.subgroup_max(x[i])
    y[i] = lang.subgroup_sum(x[i]) + lang.shuffle_xor(x[i], 5) * (high - low)
    lanes[i] = lang.lane_id() + lang.subgroup_size() * 256


def test_subgroups_are_neighbours_or_refused(device: ct.Device) -> None:
    x = np.random.default_rng(5).integers(-9, 9, 256).astype(np.float32)
    there = ct.asarray(x, device=device)
    y, lanes = ct.empty(256, device=device), ct.empty(256, "u32", device)
    if device.caps.target == "wgsl" and not device.caps.subgroups:
        with pytest.raises(ct.LimitError, match="subgroup operations, which this device has not"):
            over_subgroups(there, y, lanes, threads=256)
        assert (there + 1).numpy()[0] == x[0] + 1
        return
    over_subgroups(there, y, lanes, threads=256)
    (size,) = set((lanes.numpy() // 256).tolist())
    rows = x.reshape(-1, size)
    wanted = rows.sum(1) + x[np.arange(256) ^ 5].reshape(rows.shape).T * np.ptp(rows, axis=1)
    np.testing.assert_array_equal(y.numpy(), wanted.T.ravel())
    np.testing.assert_array_equal(lanes.numpy() % 256, np.arange(256) % size)


@ct.kernel(workgroup=32)
def out_of_bounds(x: ct.In[f32], y: ct.Out[f32]) -> None:
    y[lang.global_id()] = x[lang.global_id() + 1]


@ct.kernel(workgroup=32)
def race(x: ct.In[f32], y: ct.Out[f32]) -> None:
    y[lang.global_id() // 2] = x[lang.global_id()]


@ct.kernel(workgroup=32)
def unwritten(x: ct.In[f32], y: ct.Out[f32]) -> None:
    i = lang.global_id()
    with lang.if_(i < 31):
        y[i] = x[i]


@ct.kernel(workgroup=32)
def no_barrier(x: ct.In[f32], y: ct.Out[f32]) -> None:
    i = lang.global_id()
    tile = lang.shared(f32, 32)
    tile[i] = x[i]
    y[i] = tile[31 - i]


@ct.kernel(workgroup=32)
def unwritten_shared(x: ct.In[f32], y: ct.Out[f32]) -> None:
    i = lang.global_id()
    tile = lang.shared(f32, 64)
    tile[i] = x[i]
    lang.barrier()
    y[i] = tile[i + 1]


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (out_of_bounds, "'x' word 32 is out of bounds"),
        (race, "'y' word 0: race"),
        (unwritten, "'y' word 31 was never written"),
        (no_barrier, "shared array 0 word [0-9]+: race: read here, written by thread"),
        (unwritten_shared, "shared array 0 word 32: read, but nobody wrote it"),
    ],
    ids=lambda k: getattr(k, "__name__", ""),
)
def test_planted_faults_are_found(kernel: ct.UserKernel, text: str) -> None:
    x = np.arange(32, dtype=np.float32)
    with pytest.raises(ct.SimulationError, match=f"kernel '{kernel.__name__}': {text}"):
        kernel.simulate(x, np.empty_like(x), threads=32)
    device = ct.device("simulator", checked=True)
    y = ct.empty(32, device=device)
    kernel(ct.asarray(x, device=device), y, threads=32)
    with pytest.raises(ct.SimulationError, match=kernel.__name__):
        y.numpy()
    with pytest.raises(ct.ContractError, match=f"{kernel.__name__}.* was never computed: kernel"):
        y.numpy()
    fine = ct.empty(32, device=device)
    scale(ct.asarray(x, device=device), fine, 32, 2.0, threads=32)  # the device is as good as new
    np.testing.assert_array_equal(fine.numpy(), 2 * x)


def test_unchecked_only_computes() -> None:
    x = np.arange(32, dtype=np.float32)
    got = unwritten.simulate(x, np.empty_like(x), threads=32, check=False)
    np.testing.assert_array_equal(got["y"][:31], x[:31])


def test_a_fault_on_the_cpu_surfaces_in_the_result() -> None:
    device = ct.device("cpu", pool="reuse")
    batch = device.batch()
    y = ct.empty(32, device=device)
    with batch:
        out_of_bounds(batch.upload(np.zeros(32, np.float32)), y, threads=32)
    with pytest.raises(ct.SimulationError, match=r"out_of_bounds failed on the CPU: .* bounds"):
        y.numpy()
    assert not device.lost


# -- wrong arguments ------------------------------------------------------------------------------


def call(*args: Any, **named: Any) -> Any:
    """A launch of `scale` with something wrong: positional changes, then named ones."""
    device = ct.device("cpu")
    given: dict[str, Any] = {
        "x": ct.zeros(8, device=device), "y": ct.empty(8, device=device), "n": 8, "s": 1.0,
        "threads": 8,
    }  # fmt: skip
    given.update(named)
    scale(*args, **{k: v for k, v in given.items() if v is not ...})


OTHER = "simulator"


@pytest.mark.parametrize(
    ("named", "kind", "text"),
    [
        ({"n": ...}, ct.TraceError, r"^scale: missing \['n'\]$"),
        ({"m": 3}, ct.TraceError, r"^scale: unknown \['m'\]$"),
        ({"n": ..., "m": 3}, ct.TraceError, r"^scale: missing \['n'\], unknown \['m'\]$"),
        ({"x": X}, ct.DTypeError, "scale: expected a Tensor for 'x', got ndarray"),
        ({"x": ct.zeros(8, "f16", "cpu")}, ct.DTypeError, "expected f32 for 'x', got f16"),
        ({"n": 8.5}, ct.DTypeError, "expected u32 for 'n', got 8.5"),
        ({"n": "8"}, ct.DTypeError, "expected u32 for 'n', got '8'"),
        ({"n": -1}, ct.DTypeError, "'n': -1 does not fit a u32 parameter"),
        ({"n": 2**32}, ct.DTypeError, "'n': 4294967296 does not fit a u32"),
        ({"s": None}, ct.DTypeError, "expected f32 for 's', got None"),
        ({"s": 1j}, ct.DTypeError, "expected f32 for 's'"),
        ({"s": ct.zeros(1, device="cpu")}, ct.DTypeError, r"declare it Scalar\[f32\]"),
        ({"threads": ...}, ct.TraceError, "scale: give threads= or groups="),
        ({"groups": 1}, ct.TraceError, r"scale: give .* or groups=, not both \(a group has 64 t"),
        ({"threads": 0}, ct.TraceError, r"scale: expected threads to write 'y' of \[8\], got 0"),
        ({"threads": ..., "groups": 0}, ct.TraceError, "expected threads to write 'y'"),
        ({"threads": -1}, ct.TraceError, "expected a number of threads or groups, got -1"),
        ({"threads": 1.5}, ct.TraceError, "got 1.5"),
        ({"threads": True}, ct.TraceError, "got True"),
        ({"threads": 2**32}, ct.LimitError, "expected at most 4,294,966,272 threads, as lang.glob"),
        ({"threads": ..., "groups": 2**31}, ct.LimitError, "fewer than 2,147,483,648 groups"),
        ({"x": ct.zeros(8, device=OTHER)}, ct.DeviceError, "operands on"),
    ],
)
def test_arguments_that_do_not_fit(named: dict[str, Any], kind: Any, text: str) -> None:
    y = ct.empty(8, device="cpu")
    before = y._value
    with pytest.raises(kind, match=text):
        call(**{"y": y, **named})
    assert y._value is before


def test_more_arguments_that_do_not_fit() -> None:
    x, y = ct.zeros(8, device="cpu"), ct.empty(8, device="cpu")
    with pytest.raises(ct.TraceError, match="scale: expected at most 4 arguments, got 5"):
        scale(x, y, 8, 1.0, 3, threads=8)
    with pytest.raises(ct.TraceError, match=r"^scale: given twice \['x'\]$"):
        scale(x, y, 8, 1.0, threads=8, x=x)
    with pytest.raises(ct.TraceError, match=r"^scale: given twice \['x'\]$"):
        scale.simulate(FLAT, FLAT, 8, 1.0, threads=8, x=FLAT)
    with pytest.raises(ct.TraceError, match="both: one tensor is given for two Out arguments"):
        pair: Any = ct.empty(8, "i32", "cpu")

        @ct.kernel(workgroup=32)
        def both(a: ct.Out[i32], b: ct.Out[i32]) -> None:
            a[lang.global_id()] = 1
            b[lang.global_id()] = 2

        both(pair, pair, threads=8)
    with pytest.raises(ct.TraceError, match=r"two: missing \['shift'\]"):
        two(x, y, ct.empty(8, "i32", "cpu"), 8, threads=8)
    with pytest.raises(
        ct.TraceError, match="constant 'shift' chooses the program and must be hash"
    ):
        two(x, y, ct.empty(8, "i32", "cpu"), 8, threads=8, shift=[1])
    with pytest.raises(ct.ShapeError, match=r"transpose: expected rank 2 for 'x', got \[8\]"):
        transpose(x, y, threads=8)
    with pytest.raises(
        ct.ShapeError, match=r"add_scalar: expected one element for 'by', got \[8\]"
    ):
        add_scalar(x, x, y, 8, threads=8)


def test_the_decorator_needs_no_parentheses(device: ct.Device) -> None:
    @ct.kernel
    def plain(x: ct.In[f32], y: ct.Out[f32], n: u32) -> None:
        """y = 2 x."""
        i = lang.global_id()
        with lang.if_(i < n):
            y[i] = x[i] * 2.0

    x, y = ct.asarray(FLAT, device=device), ct.empty(FLAT.size, device=device)
    plain(x, y, n=x.size, threads=x.size)
    np.testing.assert_array_equal(y.numpy(), FLAT * 2)
    assert repr(plain) == "<centella.kernel plain workgroup=256>"
    with pytest.raises(ct.TraceError, match="expected a function, got 64; say workgroup=64"):
        ct.kernel(64)  # type: ignore[call-overload]  # that is the point


def test_workgroups_that_are_none() -> None:
    for size in (0, 1025, -1, 2.5, "64"):
        with pytest.raises(ct.TraceError, match="workgroup: expected 1 to 1024 threads, got"):
            ct.kernel(workgroup=size)(lambda: None)  # type: ignore[arg-type]  # that is the point


def test_a_mistake_in_the_kernel_is_raised_at_the_launch(device: ct.Device) -> None:
    @ct.kernel(workgroup=32)
    def branches(x: ct.In[f32], y: ct.Out[f32]) -> None:
        if x[lang.global_id()] > 0.0:
            y[lang.global_id()] = 1.0

    x, y = ct.zeros(32, device=device), ct.empty(32, device=device)
    with pytest.raises(ct.TraceError, match=r"lang\.if_"):
        branches(x, y, threads=32)

    @ct.kernel(workgroup=32)
    def state(x: ct.InOut[f32]) -> None:
        x[lang.global_id()] = 1.0

    with pytest.raises(ct.TraceError, match=r"expected a State for .x., which is InOut"):
        state(x, threads=32)

    @ct.kernel(workgroup=32)
    def nothing(n: u32) -> None:
        pass

    with pytest.raises(ct.TraceError, match="nothing: a kernel needs a tensor argument"):
        nothing(n=3, threads=32)


@pytest.mark.devices("webgpu-minimum", "simulator")
def test_limits_are_raised_at_the_launch(device: ct.Device) -> None:
    @ct.kernel(workgroup=1024)
    def wide(y: ct.Out[f32]) -> None:
        y[lang.global_id()] = 1.0

    @ct.kernel(workgroup=32)
    def hungry(y: ct.Out[f32]) -> None:
        tile = lang.shared(f32, 8192)
        tile[lang.local_id()] = 1.0
        lang.barrier()
        y[lang.global_id()] = tile[lang.local_id()]

    y = ct.empty(1024, device=device)
    with pytest.raises(ct.LimitError, match=r"'wide': 1024 threads a workgroup; this .* 256"):
        wide(y, threads=1024)
    with pytest.raises(
        ct.LimitError, match=r"'hungry': 32768 bytes of workgroup memory; this .* 16"
    ):
        hungry(y, threads=1024)


# -- what a launch costs the host -----------------------------------------------------------------


@ct.kernel(workgroup=64)
def repeat(x: ct.In[f32], y: ct.Out[f32], n: u32) -> None:
    """y = n x, by a loop."""
    result = lang.var(0.0)
    for _ in lang.range(n):
        result += x[lang.global_id()]
    y[lang.global_id()] = result.get()


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[Any]:
    """The calls of a function from now on, by their first argument."""
    calls: list[Any] = []
    original = getattr(where, name)

    def call(*args: Any, **named: Any) -> Any:
        calls.append(args[0])
        return original(*args, **named)

    monkeypatch.setattr(where, name, call)
    return calls


@pytest.mark.devices("webgpu")
def test_loops_are_counted_once_for_each_form(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not device.caps.max_loop_rounds:
        pytest.skip("this driver stops no loop")
    calls = counted(monkeypatch, user, "parameter_words")
    x = ct.ones((64,), device=device)
    for n in (3, 3, 5, 3, 5):
        y = ct.zeros((64,), device=device)
        repeat(x, y, n=n, threads=64)
        np.testing.assert_array_equal(y.numpy(), np.float32(n))
    assert len(calls) == 2


@pytest.mark.devices("webgpu")
def test_a_run_binds_each_launch_once(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, prepare, "bound")
    x = ct.asarray(FLAT, device=device)
    for run in range(1, 4):
        y, z = ct.zeros(FLAT.shape, device=device), ct.zeros(FLAT.shape, device=device)
        device.synchronize()
        with device.batch():
            scale(x, y, n=x.size, s=2.0, threads=x.size)
            scale(y, z, n=x.size, s=3.0, threads=x.size)
        assert len(calls) == 2 * run
        np.testing.assert_array_equal(z.numpy(), 6 * FLAT)
