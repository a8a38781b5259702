"""What is said of an adapter's cooperative matrices."""

from __future__ import annotations

from typing import Any

import pytest

import centella as ct

pytest.importorskip("wgpu")
from centella.backends.webgpu.cooperative import FEATURE, matrices, offered


class Adapter:
    """One that has features, and grants them or raises."""

    def __init__(self, features: set[str], refusal: Exception | None = None) -> None:
        self.features = features
        self.asked: list[Any] = []
        self.destroyed = 0
        self._refusal = refusal

    def request_device_sync(self, required_features: Any) -> Any:
        self.asked.append(required_features)
        if self._refusal is not None:
            raise self._refusal
        return self

    def destroy(self) -> None:
        self.destroyed += 1


def test_an_adapter_without_them_is_not_asked() -> None:
    adapter = Adapter({"subgroup"})
    assert not offered(adapter) and matrices(adapter) == "none" and adapter.asked == []


def test_a_refusal_is_said_with_its_reason() -> None:
    why = "Some experimental features were requested, but experimental features are not enabled"
    text = f"Request device failed (3): Validation Error\n\nCaused by:\n  {why}\n\n"
    assert matrices(Adapter({FEATURE}, RuntimeError(text))) == f"refused by wgpu: {why}"
    assert matrices(Adapter({FEATURE}, ValueError())) == "refused by wgpu: ValueError"


def test_where_they_are_granted_the_device_is_given_back() -> None:
    adapter = Adapter({FEATURE})
    assert matrices(adapter) == "granted, used by no kernel"
    assert adapter.asked == [[FEATURE]] and adapter.destroyed == 1


@pytest.mark.devices("webgpu", "webgpu-hardware")
def test_a_device_says_what_its_adapter_offers(device: ct.Device) -> None:
    adapter = device.native.adapter
    said = device.describe()["cooperative_matrix"]
    assert said == ("offered" if FEATURE in adapter.features else "none")
    assert FEATURE not in device.native.features  # an experiment that nothing uses stays off


@pytest.mark.devices("webgpu", "webgpu-hardware")
def test_asking_a_driver_leaves_its_devices_as_they_are(device: ct.Device) -> None:
    assert matrices(device.native.adapter).startswith(("none", "refused by wgpu: ", "granted"))
    assert ct.asarray([1.0, 2.0], device=device).numpy().tolist() == [1.0, 2.0]
