"""The floor's three claims, by count; and that wrong numbers are no figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import centella as ct
from centella.check.bench import Report, cached, encoder, ffn, floor
from centella.check.bench.figures import seconds, verify


@pytest.fixture(name="report")
def _report(device: ct.Device) -> Report:
    return floor(device, small=True)


@pytest.mark.devices("cpu", "webgpu", "webgpu-minimum", "cuda", "webgpu-hardware")
def test_the_floors_claims(report: Report, device: ct.Device) -> None:
    def ours(part: str, what: str) -> float:
        return report.find(part, what).ours

    # product, product + residual, silu-gate; a formula is not compiled
    compiled = 0 if device.caps.target == "numpy" else 3
    assert ours("ffn", "programs compiled in all") == compiled
    assert ours("ffn", "compiled in the second pass") == 0
    assert ours("ffn", "submissions, a batch a layer") == 36
    assert ours("ffn", "submissions, one batch") == 1
    assert ours("ffn", "launches") == 36 * 4
    assert ours("encoder", "transfers") == 2
    assert ours("encoder", "submissions") == 1
    # convolutions and positions, four blocks of seven, a norm; see test_blocks.py
    assert ours("encoder", "launches") == (3 if device.caps.target == "numpy" else 5) + 4 * 7 + 1
    assert report.find("cached", "a call, weight kept").rounds >= 100
    assert all(np.isfinite(f.ours) for f in report.figures)
    assert report.device == device.name
    assert report.small
    assert json.loads(json.dumps(report.as_dict()))["figures"][0]["part"] == "cached"


def test_the_shapes_are_those_of_the_claims() -> None:
    assert (ffn.HIDDEN, ffn.INNER, ffn.LAYERS) == (2560, 9728, 36)
    assert cached.SIZE == 1536
    assert encoder.Size(width=384, heads=6, inner=1536, mels=80, frames=3000) == encoder.TINY


@pytest.mark.devices("cpu", "webgpu", "cuda")
def test_the_weights_made_on_a_device_are_random_and_equal_everywhere(device: ct.Device) -> None:
    layers, note = ffn._weights(device, 96, 200)
    assert "weights of its own" in note
    gate, down = layers[0].gate.numpy(), layers[35].down.numpy()
    assert (gate.shape, down.shape) == ((200, 96), (96, 200))
    assert abs(gate.mean()) < 0.01
    assert abs(gate.std() * 96**0.5 - 1) < 0.02
    # Of independent numbers the largest singular value is 1 + sqrt(200 / 96) in these units.
    assert np.linalg.svd(gate, compute_uv=False)[0] < 2.7
    assert abs(np.corrcoef(gate[:48])[~np.eye(48, dtype=bool)].std() * 96**0.5 - 1) < 0.1
    there = ffn._weights(ct.device("cpu"), 96, 200)[0][35].down.numpy()
    np.testing.assert_allclose(down, there, rtol=1e-6)


@pytest.mark.devices("cpu")
def test_one_layer_stands_for_all_where_memory_is_not_known(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffn, "SMALL_BYTES", 0)
    layers, note = ffn._weights(device, 40, 152)
    assert len(layers) == 36
    assert layers[0] is layers[35]
    assert "one layer's random weights stand for all" in note


@pytest.mark.devices("cpu")
def test_wrong_numbers_are_no_figures(device: ct.Device) -> None:
    wanted = np.ones((2, 3))
    verify("sum", device, wanted.astype(np.float32), wanted)
    for wrong in (wanted * 1.001, wanted * np.nan):
        with pytest.raises(ct.DeviceError, match="sum on cpu: expected a squared error of at most"):
            verify("sum", device, wrong, wanted)
    with pytest.raises(ct.DeviceError, match=r"expected \[2, 3\], got \[1, 3\]"):
        verify("sum", device, wanted[:1], wanted)


@pytest.mark.devices("cpu")
def test_a_product_that_allocates_is_no_figure(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = ct.MatmulCache.matmul
    kept: list[ct.Tensor] = []

    def hoarding(cache: ct.MatmulCache, name: str, x: object) -> object:
        kept.append(ct.full((1 << 16,), 0.0, device=device))
        kept[-1].numpy()
        return matmul(cache, name, x)  # type: ignore[call-overload]

    monkeypatch.setattr(ct.MatmulCache, "matmul", hoarding)
    with pytest.raises(ct.ContractError, match="expected 0"):
        cached.measure(device, True, lambda _: None)


def test_what_begins_is_told_and_rounds_end() -> None:
    told: list[str] = []
    floor("cpu", small=True, progress=told.append)
    assert [told[0].split(":")[0], told[-1].split(":")[0]] == ["cached product", "encoder"]
    assert len(seconds(lambda number: number, 30)) == 30
    with pytest.raises(ct.DeviceError, match="unknown device 'gpu'"):
        floor("gpu")


def test_the_committed_runs_have_every_figure() -> None:
    """README prints figures of these files."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    for path in results.glob("*-floor.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        assert run["machine"]["commit"]
        for name in {row["who"] for row in run["rows"]}:
            benches = {row["bench"] for row in run["rows"] if row["who"] == name}
            assert {"ffn: programs compiled in all", "encoder: transfers"} <= benches
