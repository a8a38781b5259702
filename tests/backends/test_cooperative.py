"""What is said of an adapter's cooperative matrices."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import centella as ct

pytest.importorskip("wgpu")
from centella.backends.webgpu.cooperative import FEATURE, matrices, offered

WHY = "Some experimental features were requested, but experimental features are not enabled"


@pytest.mark.parametrize(
    ("features", "answer", "said"),
    [
        ({"subgroup"}, [], "none"),  # which is not asked
        ({FEATURE}, [RuntimeError(f"failed (3): Validation Error\n\nCaused by:\n  {WHY}\n\n")],
         f"refused by wgpu: {WHY}"),
        ({FEATURE}, [ValueError()], "refused by wgpu: ValueError"),
        ({FEATURE}, [mock.Mock()], "granted, used by no kernel"),
    ],
)  # fmt: skip
def test_what_is_said_of_an_adapter(features: set[str], answer: list[Any], said: str) -> None:
    adapter = mock.Mock(features=features)
    adapter.request_device_sync.side_effect = answer
    assert offered(adapter) is bool(answer) and matrices(adapter) == said
    assert adapter.request_device_sync.call_args_list == [
        mock.call(required_features=[FEATURE]) for _ in answer
    ]
    if said.startswith("granted"):
        answer[0].destroy.assert_called_once_with()


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
