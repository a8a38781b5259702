"""A norm joins the product before it where one kernel takes both, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.nn.attention import join_heads
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


# -- products after attention ----------------------------------------------------------------------

NVIDIA = Caps("wgsl", family="nvidia", max_shared=32 << 10)
IN_PARTS = ["rope_split", "combined_linear"]
IN_THREE = ["rope_split", "attention_combine", "thin"]


class Step:
    """A step's attention of one token, and what its product reads."""

    def __init__(
        self, device: ct.Device, batch: int = 1, capacity: int = 1024, heads: int = 16,
        dim: int = 128, tokens: int = 1, dtype: str = "f32", n: int = 1024, weight: str = "bf16",
    ) -> None:  # fmt: skip
        def zeros(*shape: int, kind: str = "f32") -> ct.Tensor:
            return ct.asarray(np.zeros(shape, np.float32), kind, device)

        kv = heads // 2
        self.cache = ct.KVCache(batch, kv, dim, capacity, dtype=dtype, device=device)
        self.cos, self.sin = zeros(capacity, dim // 2), zeros(capacity, dim // 2)
        self.qkv = zeros(batch, tokens, (heads + 2 * kv) * dim, kind=dtype)
        self.weight = zeros(n, heads * dim, kind=weight)
        self.residual = zeros(batch, tokens, n, kind=dtype)
        device.synchronize()

    def attended(self) -> ct.Tensor:
        """[batch, tokens, heads * dim]."""
        return join_heads(self.cache.attend_qkv(self.qkv, self.cos, self.sin))

    def planned(self, y: ct.Tensor, caps: Caps = NVIDIA, *more: ct.Tensor) -> list[str]:
        """The kernels, but for the launch that begins a step."""
        names = kernels(planned(y.device, [y, *more], caps))
        return [name for name in names if name != "cache_step"]


@pytest.mark.devices("simulator")
@pytest.mark.parametrize(
    "given",
    [{}, {"weight": "f32"}, {"capacity": 64, "n": 2112}, {"heads": 2, "dim": 8, "capacity": 100}],
)  # fmt: skip
def test_attention_and_its_product_are_two_launches(
    device: ct.Device, given: dict[str, Any]
) -> None:
    step = Step(device, **given)
    y = f.linear(step.attended(), step.weight, residual=step.residual)
    assert step.planned(f.softmax(y)) == [*IN_PARTS, "softmax_rows"]


@pytest.mark.devices("simulator")
def test_what_follows_the_product_reads_it_there(device: ct.Device) -> None:
    """The product takes the place of attention, and its result that of what the queries get."""
    step = Step(device)
    y = f.linear(step.attended(), step.weight, residual=step.residual)
    assert step.planned(f.softmax(y) + y) == [*IN_PARTS, "softmax_rows", "add"]


@pytest.mark.devices("simulator")
@pytest.mark.parametrize(
    ("given", "caps"),
    [
        ({"batch": 2}, NVIDIA),
        ({"tokens": 2}, NVIDIA),
        ({"capacity": 1344}, NVIDIA),  # more to read for each group than a launch costs
        ({"n": 2113}, NVIDIA),  # more groups than an H200 has multiprocessors
        ({"dim": 20}, NVIDIA),
        ({}, replace(NVIDIA, max_shared=8 << 10)),
        ({"heads": 32}, NVIDIA),  # more threads than a group has
        ({"n": 2048, "weight": "f32"}, NVIDIA),  # more to keep than there are registers
        ({}, replace(NVIDIA, family="amd")),
        ({}, replace(NVIDIA, family="software")),
        ({}, CAPS),
        ({"dtype": "bf16"}, NVIDIA),
    ],
)
def test_others_are_not_joined_to_attention(
    device: ct.Device, given: dict[str, Any], caps: Caps
) -> None:
    step = Step(device, **given)
    y = f.linear(step.attended(), step.weight, residual=step.residual)
    assert "combined_linear" not in step.planned(f.softmax(y), caps)


@pytest.mark.devices("simulator")
def test_a_product_that_cannot_take_the_place_of_attention_is_not_joined(
    device: ct.Device,
) -> None:
    """What attention gives is kept, or read twice; the product is kept, or adds a later value."""
    step = Step(device)
    h = step.attended()
    assert step.planned(f.softmax(f.linear(h, step.weight)), NVIDIA, h)[:3] == IN_THREE
    h = step.attended()
    twice = f.linear(h, step.weight) + f.linear(h, step.weight)
    del h
    assert step.planned(twice)[:2] == IN_THREE[:2]
    assert step.planned(f.linear(step.attended(), step.weight)) == IN_THREE
    h, later = step.attended(), f.softmax(step.residual)
    y = f.softmax(f.linear(h, step.weight, residual=later))
    del h, later
    assert "combined_linear" not in step.planned(y)


@pytest.mark.devices("simulator")
def test_a_quantised_product_is_not_joined_to_attention(device: ct.Device) -> None:
    for kind in ("q8_0", "int8"):
        step = Step(device)
        weight = ct.quantize(np.zeros((1024, 2048), np.float32), kind, device=device)
        device.synchronize()
        y = f.linear(step.attended(), weight, residual=step.residual)
        assert "combined_linear" not in step.planned(f.softmax(y))
