"""What nodes have in common is computed once."""

from __future__ import annotations

import numpy as np
import pytest

import centella as ct
from centella.plan import share
from centella.plan.plan import Plan
from centella.tensors.tensor import apply_with
from tests.plan.test_join import kernels, planned

EXPERTS, N, K = 4, 64, 64


def mixture(
    device: ct.Device, ids: ct.Tensor, other: ct.Tensor, variant: str | None = None
) -> ct.Tensor:
    """The two products of a mixture of experts over 100 tokens; the second one by other ids."""
    rng = np.random.default_rng(0)

    def tensor(*shape: int) -> ct.Tensor:
        return ct.asarray(rng.standard_normal(shape).astype(np.float16), device=device)

    def attrs(gate: str) -> dict[str, str | None]:
        return {"gate": gate, "variant": variant}

    x, shares = tensor(100, K), tensor(100, 2)
    gate, up, down = tensor(EXPERTS, N, K), tensor(EXPERTS, N, K), tensor(EXPERTS, K, N)
    gated = apply_with("expert_linear", (x, gate, ids), "extras", {"up": up}, attrs("silu"))
    extras = {"shares": shares, "residual": None}
    return apply_with("expert_linear", (gated, down, other), "extras", extras, attrs(""))


def ids_of(device: ct.Device, seed: int) -> ct.Tensor:
    picks = np.random.default_rng(seed).integers(0, EXPERTS, (100, 2), dtype=np.int32)
    return ct.asarray(picks, device=device)


@pytest.mark.devices("simulator")
def test_the_pairs_of_a_mixture_are_put_in_order_once(device: ct.Device) -> None:
    ids = ids_of(device, 1)
    plan = planned(device, [mixture(device, ids, ids)])
    assert kernels(plan) == [
        "expert_count", "expert_order", "expert_tiles", "expert_tiles", "expert_sum",
    ]  # fmt: skip
    products = [launch for launch in plan.launches if launch.program.name == "expert_tiles"]
    assert len({slot for each in products for slot in each.slots} & written(plan)) == 2


def written(plan: Plan) -> set[int]:
    """The memory of the launch that puts pairs in order."""
    (order,) = (launch for launch in plan.launches if launch.program.name == "expert_order")
    return set(order.slots[2:])


@pytest.mark.devices("simulator")
def test_other_ids_have_an_order_of_their_own(device: ct.Device) -> None:
    plan = planned(device, [mixture(device, ids_of(device, 1), ids_of(device, 2))])
    assert kernels(plan).count("expert_order") == kernels(plan).count("expert_count") == 2


@pytest.mark.devices("simulator")
def test_large_memory_is_not_kept(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "MOST", 100)
    ids = ids_of(device, 1)
    assert kernels(planned(device, [mixture(device, ids, ids)])).count("expert_order") == 2


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
def test_what_is_shared_has_its_numbers(device: ct.Device) -> None:
    """Three products of one order; the ids are written anew between the first two and the last."""
    ids, variant = ids_of(device, 1), None if device.caps.target == "numpy" else "tiles"
    host = ct.device("cpu")
    wanted = [mixture(host, ids_of(host, 1), ids_of(host, n)).numpy() for n in (1, 2)]
    with ct.ledger(timing=True) as led, device.batch():
        got = [mixture(device, ids, other, variant) for other in (ids, ids_of(device, 2))]
    for values, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(values.numpy(), expected, rtol=2e-2, atol=2e-2 * 8)
    if variant:
        orders = [k.launches for k in led.kernels() if k.kernel == "expert_order"]
        assert orders == [2]  # of four products
