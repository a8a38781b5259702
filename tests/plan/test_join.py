"""A norm joins the product before it where one kernel takes both, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.ops.matmul import whole_rows
from centella.plan.build import Memo, build
from centella.plan.plan import Plan
from centella.record.recording import Recorded
from centella.runtime import prepare
from centella.specs import Caps
from centella.tensors import functional as f
from tests.ops.test_mma import CAPS

ROWS = 40_000  # enough for every multiprocessor


def tensor(device: ct.Device, *shape: int) -> ct.Tensor:
    return ct.asarray(np.zeros(shape, np.float16), device=device)


def planned(device: ct.Device, outputs: list[ct.Tensor], caps: Caps = CAPS) -> Plan:
    """What is recorded, planned for another device; nothing is run."""
    recording = device.recorder.implicit()
    taken = Recorded(recording.nodes, recording.uploads)
    ends = prepare.boundary_of(taken, [t._value for t in outputs])
    try:
        return build(taken.nodes, ends.slots, ends.wanted, caps, Memo())
    finally:
        recording.fail()


def kernels(plan: Plan) -> list[str]:
    return [launch.program.name for launch in plan.launches]


def block(device: ct.Device, rows: int = ROWS, n: int = 384, k: int = 384) -> ct.Tensor:
    """layer_norm(x W^T + bias + residual), as a BERT has it."""
    x, w, residual = (tensor(device, *s) for s in ((rows, k), (n, k), (rows, n)))
    y = f.linear(x, w, tensor(device, n), residual=residual)
    return f.layer_norm(y, tensor(device, n), tensor(device, n))


@pytest.mark.devices("simulator")
def test_product_residual_and_norm_are_one_launch(device: ct.Device) -> None:
    plan = planned(device, [block(device)])
    assert kernels(plan) == ["whole_rows"]
    assert "linear_norm" in plan.explain()


@pytest.mark.devices("simulator")
@pytest.mark.parametrize("caps", ["sm_80", "sm_90", "sm_100"])
def test_other_devices_take_two_launches(device: ct.Device, caps: str) -> None:
    plan = planned(device, [block(device)], replace(CAPS, arch=caps))
    assert "whole_rows" not in kernels(plan) and len(plan.launches) == 2


@pytest.mark.devices("simulator")
@pytest.mark.parametrize(("rows", "n"), [(128, 384), (ROWS, 392), (ROWS, 448)])
def test_products_that_do_not_fit_or_fill_the_device_are_not_joined(
    device: ct.Device, rows: int, n: int
) -> None:
    assert "whole_rows" not in kernels(planned(device, [block(device, rows, n)]))


@pytest.mark.devices("simulator")
def test_a_product_that_is_kept_or_read_twice_is_not_joined(device: ct.Device) -> None:
    x, w = tensor(device, ROWS, 64), tensor(device, 384, 64)
    y = f.linear(x, w)
    kept = planned(device, [f.rms_norm(y), y])
    assert kernels(kept) == ["wgmma", "normalise"]
    x, w = tensor(device, ROWS, 64), tensor(device, 384, 64)
    y = f.linear(x, w)
    twice = planned(device, [f.rms_norm(y), f.softmax(y)])
    assert sorted(kernels(twice))[1:] == ["softmax_rows", "wgmma"]


@pytest.mark.devices("simulator")
def test_without_the_variant_nothing_is_joined(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_rows, "ORDER", ())
    assert kernels(planned(device, [block(device)])) == ["wgmma", "normalise"]


@pytest.mark.devices("simulator")
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_a_product_of_a_weight_in_planes_is_not_joined(device: ct.Device, kind: str) -> None:
    weight = ct.quantize(np.zeros((96, 256), np.float32), kind, device=device)
    y = f.rms_norm(f.linear(tensor(device, 48, 256), weight), tensor(device, 96))
    assert "whole_rows" not in kernels(planned(device, [y]))
