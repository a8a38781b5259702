"""Groups of a launch that meet: `ptx.grid_barrier`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.dtypes import u32
from centella.emit.program import program_of
from centella.emit.ptx import emit_ptx
from centella.emit.wgsl import emit_wgsl
from centella.errors import LimitError, SimulationError, TraceError
from centella.lang import In, InOut, KernelIR, Out, ptx
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.support.fake_cuda import FakeCuda
from tests.support.lang_common import ORDERS, Tensor, empty, on_simulator, record
from tests.support.lang_common import tensor as tensor_of

Array = np.ndarray[Any, Any]
ROUNDS = 5


def turned(x: In[u32], y: InOut[u32], *, fault: str = "") -> None:
    """Each group reads what the group after it wrote in the round before, and adds its own."""
    size, group = lang.workgroup_size(), lang.group_id()
    at, t = group * size, lang.local_id()
    y[at + t] = x[at + t]
    for number in range(ROUNDS):
        after = (group + 1) % lang.num_groups()
        if fault != "unmet":
            ptx.grid_barrier()
        value = y[after * size + t] * 3
        if fault != "overwritten":
            ptx.grid_barrier()
        y[at + t] = value + group + number
    if fault == "alone":
        with lang.if_(group == 0):
            ptx.grid_barrier()


def wanted(x: Array, groups: int) -> Array:
    y = x.reshape(groups, -1).copy()
    for number in range(ROUNDS):
        y = np.roll(y, -1, 0) * 3 + np.arange(groups, dtype=np.uint32)[:, None] + number
    return y.reshape(-1).astype(np.uint32)


def meeting(groups: int, fault: str = "") -> tuple[KernelIR, dict[str, Tensor]]:
    x = np.random.default_rng(groups).integers(0, 1 << 20, groups * 64).astype(np.uint32)
    tensors = {"x": tensor_of(x, u32), "y": tensor_of(np.zeros_like(x), u32)}
    return record(turned, tensors, 64, fault=fault), tensors


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_groups_meet(groups: int) -> None:
    for order in ORDERS:
        ir, tensors = meeting(groups)
        on_simulator(ir, tensors, groups, order=order)
        x = tensors["x"].bits()
        np.testing.assert_array_equal(tensors["y"].bits(), wanted(x, groups))


FAULTS = {
    "unmet": "race: .* groups do not meet in between",
    "overwritten": "race: .* groups do not meet in between",
    "alone": "grid_barrier reached by 64 of 192 threads",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    ir, tensors = meeting(3, fault)
    with pytest.raises(SimulationError, match=FAULTS[fault]):
        on_simulator(ir, tensors, 3)


@pytest.mark.devices("cpu", "simulator", "cuda")
@pytest.mark.parametrize("groups", [1, 3, 100])
def test_groups_meet_on_a_device(device: ct.Device, groups: int) -> None:
    """Also of a kernel that meets again and again: the counter is never reset."""
    x = np.random.default_rng(1).integers(0, 1 << 20, groups * 64).astype(np.uint32)
    given = ct.asarray(x, device=device)
    kernel = ct.kernel(workgroup=64)(turned)

    def run(x: ct.Tensor) -> ct.Tensor:
        state = ct.State(ct.zeros(x.shape, "u32", device))
        kernel(x, state, groups=groups)
        return state.value

    for _ in range(3):
        np.testing.assert_array_equal(run(given).numpy(), wanted(x, groups))


@pytest.mark.devices("cuda")
def test_more_groups_than_a_device_holds_are_refused(device: ct.Device) -> None:
    groups = 100_000
    state = ct.State(ct.zeros((groups * 64,), "u32", device))
    x = ct.zeros((groups * 64,), "u32", device)
    with pytest.raises(LimitError, match=r"expected at most [\d,]+ groups, .* got 100,000"):
        ct.kernel(workgroup=64)(turned)(x, state, groups=groups)
        state.value.numpy()
    np.testing.assert_array_equal(ct.ones((3,), device=device).numpy(), np.ones(3))


def test_only_where_all_threads_come() -> None:
    def apart(y: Out[u32]) -> None:
        with lang.if_(lang.local_id() == 0):
            ptx.grid_barrier()
        y[lang.local_id()] = 1

    def clustered(y: Out[u32]) -> None:
        ptx.cluster(2)
        ptx.grid_barrier()
        y[lang.local_id()] = 1

    for kernel, text in ((apart, "control flow"), (clustered, "without clusters")):
        with pytest.raises(TraceError, match=text):
            record(kernel, {"y": empty((64,), u32)}, 64)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@needs_ptxas
def test_a_kernel_has_a_counter_of_its_own(arch: str, tmp_path: Path) -> None:
    """What all groups add turns its top bit; who waits reads it anew each time."""
    ir, _ = meeting(3)
    text = assemble_clean(ir, arch, tmp_path)
    assert text.count(".global .align 4 .u32 $arrived;") == 1
    assert text.count("atom.acq_rel.gpu.global.add.u32") == 2 * ROUNDS
    assert text.count("ld.acquire.gpu.global.u32") == 2 * ROUNDS
    assert "ld.global.nc" not in text.partition("$arrived]")[2]
    assert "$arrived" not in emit_ptx(record(plain, {"y": empty((64,), u32)}, 64), arch)


def plain(y: Out[u32]) -> None:
    y[lang.global_id()] = lang.global_id()


def test_only_ptx_has_it() -> None:
    ir, _ = meeting(3)
    with pytest.raises(TraceError, match="grid_barrier"):
        emit_wgsl(ir)
    with pytest.raises(TraceError, match="grid_barrier needs sm_80 or later, got sm_75"):
        emit_ptx(ir, "sm_75")


def test_all_groups_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for a cooperative launch, in a graph too."""
    driver = pytest.importorskip("cuda.bindings.driver")
    from centella.backends.cuda.backend import CudaBackend, _together

    fake = FakeCuda(driver).install(monkeypatch)
    name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    monkeypatch.setattr(driver, name, lambda *_: (driver.CUresult.CUDA_SUCCESS, 2))
    backend = CudaBackend()
    kernels = meeting(3)[0], record(plain, {"y": empty((64,), u32)}, 64)
    pipelines = [backend.compile(program_of(ir, backend.caps)) for ir in kernels]
    assert [p.meets for p in pipelines] == [True, False]
    assert pipelines[0].most == 2 * backend.processors
    config = _together()
    assert config.attrs[0].id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert config.attrs[0].value.cooperative == 1
    backend.close()
    assert fake.retained == 0
