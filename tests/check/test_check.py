"""`centella check`: a right device, wrong ones, rates, and a model layer by layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import centella as ct
from centella.check import check_device, check_model, rates
from centella.check.cases import table
from centella.check.cases.case import FLOATS
from centella.runtime.device import Device
from centella.tasks.embed.embedder import Embedder
from centella.tasks.load import load
from tests.support.fake_gpu import FakeGpu
from tests.support.model_common import DATA

pytest.importorskip("tokenizers")
DEVICE = sys.modules["centella.check.device"]
MODEL = sys.modules["centella.check.model"]
FEW = ("relu", "reshape", "softmax", "cast", "arange", "assign")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the table some rows."""
    rows = {name: table.TABLE[name] for name in FEW}
    monkeypatch.setattr(table, "TABLE", rows)
    monkeypatch.setattr(DEVICE, "TABLE", rows)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of small things."""
    small = {
        "COPY_BYTES": 1 << 16,
        "FIRST_BYTES": 1 << 14,
        "CHAIN": 2,
        "ROUNDS": 4,
        "CALLS": 6,
        "WARM": 0.0,
    }
    for name, value in {**small, "PRODUCTS": (16, 32), "ROWS": (32, 64), "SMALL_OPS": 8}.items():
        monkeypatch.setattr(rates, name, value)


# -- the cases ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few", "quick")
def test_a_right_device(device: ct.Device) -> None:
    told: list[tuple[int, int, str]] = []
    report = check_device(device, seconds=1e9, progress=lambda *step: told.append(step))
    assert report.ok and not report.failures and report.failed == report.left_out == 0
    cases = [
        case
        for name in FEW
        for dtype in table.TABLE[name].dtypes
        for case in table.sample_of(name, dtype, device.caps)
    ]
    assert report.passed == len(cases) > 60
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert told[0][2] == "relu f32" and told[-1] == (told[-1][1], told[-1][1], "")
    assert [r.what for r in report.rates] == [
        *("copy", "f32 product", "one row, f16 weights", "submit", "replay", "read-back"),
    ]  # fmt: skip
    assert all(0 < r.value < 1e9 for r in report.rates)
    assert report.rates[2].share is not None and report.rates[2].share > 0


@pytest.mark.usefixtures("few", "quick")
def test_the_card_and_the_json_say_the_same() -> None:
    report = check_device("cpu")
    card, plain = report.card(), json.loads(json.dumps(report.as_dict()))
    assert plain["device"] == "cpu" and card.startswith("device    cpu\n")
    for name, version in plain["versions"].items():
        assert f"{name} {version}" in " ".join(card.split())
    assert {"centella", "Python", "NumPy"} <= set(plain["versions"])
    assert f"cases     {plain['passed']} passed, 0 failed" in card
    for rate in plain["rates"]:
        assert f"{rate['value']:.4g} {rate['unit']}" in card and rate["note"] in card
    assert all(len(line) < 120 for line in card.splitlines())


@pytest.mark.usefixtures("few")
def test_wrong_numbers() -> None:
    report = check_device(Device(FakeGpu("softmax_rows")))
    assert not report.ok and report.rates == ()
    assert [(f.op, f.dtype) for f in report.failures] == [("softmax", d) for d in FLOATS]
    first = report.failures[0]
    assert (first.shapes, first.index) == (((3, 2100),), (0, 0))
    assert 0 < float(first.expected) < 1 and first.got == "1.5"
    assert str(first).startswith(
        f"softmax f32 [3, 2100]: at [0, 0]: expected {first.expected}, got"
    )
    assert f"\nfirst     {first}\nalso      softmax f16" in report.card()
    assert report.failed > 30
    assert report.as_dict()["failures"][0]["case"] == "[3, 2100]:normal:plain {}"


@pytest.mark.usefixtures("few")
def test_a_case_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of its row are right."""
    fake = FakeGpu()
    compiled = fake.compile

    def compile(program: Any) -> Any:
        if program.name == "softmax_rows" and "bf16" in str(program.ir.args):
            raise ct.CompileError("softmax_rows", "source", "no such instruction")
        return compiled(program)

    monkeypatch.setattr(fake, "compile", compile)
    report = check_device(Device(fake), rates=False)
    assert {(f.op, f.dtype) for f in report.failures} == {("softmax", "bf16")}
    (failure,) = report.failures
    assert failure.why.startswith("CompileError: ") and failure.index is None
    assert report.passed > 60


@pytest.mark.usefixtures("few")
def test_rates_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(device: Device) -> None:
        raise ct.OutOfMemoryError(f"{device.name}: no room\nat all")

    monkeypatch.setattr(DEVICE, "measure", measure)
    report = check_device("cpu")
    assert not report.ok and report.failed == 0
    assert "\nfirst     rates: OutOfMemoryError: cpu: no room\n" in report.card()


@pytest.mark.usefixtures("few")
def test_time_ends_but_not_before_each_operation_in_each_dtype() -> None:
    report = check_device("cpu", seconds=0.0, rates=False)
    assert report.passed == sum(len(row.dtypes) for row in table.TABLE.values())
    assert report.left_out > 30
    assert f"{report.passed} passed, 0 failed, {report.left_out} left out for time" in report.card()


@pytest.mark.usefixtures("few")
def test_a_device_that_is_lost() -> None:
    fake = FakeGpu()
    device = Device(fake)
    fake.lost = True
    report = check_device(device)
    assert (report.passed, len(report.failures)) == (0, 1)
    assert "fell off the bus" in report.failures[0].why
    assert report.failures[0].op == "relu"


def test_a_sample_has_every_operation_dtype_and_variant() -> None:
    for device in ("cpu", "simulator"):
        caps = ct.device(device).caps
        for name, row in table.TABLE.items():
            kept = [table.sample_of(name, d, caps) for d in row.dtypes]
            assert all(kept), name
            forced = {c.attrs.get("variant") for cases in kept for c in cases}
            whole = [table.cases_of(name, d, caps) for d in row.dtypes]
            assert forced == {c.attrs.get("variant") for cases in whole for c in cases}, name


# -- models ---------------------------------------------------------------------------------------


def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODEL, "REFERENCE", ("no_such_package",))


@pytest.mark.devices("simulator", "webgpu", "cuda", "webgpu-hardware")
def test_a_right_model(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    without_transformers(monkeypatch)
    report = check_model(DATA / "tiny-bert", device)
    assert report.ok and report.first is None
    assert report.against == "the CPU, f32"
    paths = [layer.path for layer in report.layers]
    assert paths[:3] == ["embeddings.word_embeddings", "embeddings.LayerNorm", "embeddings"]
    assert paths[-2:] == ["encoder", ""]
    assert "encoder.layer.2.attention.self.qkv" in paths
    assert all(layer.error is not None and layer.error <= layer.limit for layer in report.layers)
    assert f"layers    {len(paths)} passed, 0 failed" in report.card()


@pytest.mark.devices("simulator", "webgpu", "cuda", "webgpu-hardware")
def test_the_first_layer_that_differs(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    without_transformers(monkeypatch)

    def loaded(folder: Path, where: ct.Device | str, dtype: str) -> Embedder:
        task = load(folder, where, dtype, task="embed")
        if where is device:
            dense = task.model.encoder.layer[1].intermediate.dense
            dense.weight = dense.weight * 1.01
        return task

    monkeypatch.setattr(MODEL, "load", loaded)
    report = check_model(DATA / "tiny-bert", device)
    assert not report.ok and report.first is not None
    assert report.first.path == "encoder.layer.1.intermediate.dense"
    assert "first     encoder.layer.1.intermediate.dense f" in report.card()
    wrong = [layer.path for layer in report.layers if layer.why]
    assert wrong[-1] == "" and not any(p.startswith("encoder.layer.0") for p in wrong)


def test_numbers_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without_transformers(monkeypatch)
    task = load(DATA / "tiny-bert", "simulator")
    dense = task.model.encoder.layer[0].output.dense
    assert dense.bias is not None
    dense.bias = ct.full(dense.bias.shape, np.nan, device="simulator")
    monkeypatch.setattr(MODEL, "load", lambda f, d, t: load(f, d, t) if d == "cpu" else task)
    report = check_model(DATA / "tiny-bert", "simulator")
    assert report.first is not None and report.first.path == "encoder.layer.0.output.dense"
    assert report.first.error is None and "got nan" in report.first.why
    json.dumps(report.as_dict(), allow_nan=False)


def test_a_model_on_the_cpu_needs_something_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    without_transformers(monkeypatch)
    with pytest.raises(ct.MissingExtraError, match="transformers"):
        check_model(DATA / "tiny-bert", "cpu")


def test_the_reference_is_imported_before_a_device_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def opened(device: object) -> ct.Device:
        done.append("device")
        raise ct.DeviceError("no device")

    with monkeypatch.context() as patch, pytest.raises(ct.DeviceError, match="no device"):
        patch.setattr(MODEL, "open_device", opened)
        patch.setattr(MODEL.importlib.util, "find_spec", lambda name: name)
        patch.setattr(MODEL.importlib, "import_module", done.append)
        check_model(DATA / "tiny-bert")
    assert done == ["torch", "transformers", "triton", "device"]


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-bert-cls"])
def test_a_model_beside_transformers(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    report = check_model(DATA / name, "cpu")
    assert report.ok and report.against.startswith("transformers ")
    paths = [layer.path for layer in report.layers]
    assert paths[-1] == "" and "encoder.layer.1.attention.output.LayerNorm" in paths
    assert "encoder.layer.1.output.dense" not in paths  # ours has added the residual


def test_watching_leaves_a_model_as_it_was() -> None:
    model = load(DATA / "tiny-bert", "cpu").model
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    seen: list[str] = []
    with pytest.raises(ct.DTypeError), MODEL.watched(model, lambda p, *_: seen.append(p)):
        model(np.zeros((1, 2), np.int32), None)
    assert {path: dict(vars(m)) for path, m in model.named_modules()}.keys() == before.keys()
    assert all("forward" not in vars(m) for _, m in model.named_modules())


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def call() -> Iterator[Any]:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from centella.cli.app import build

    yield lambda *args: CliRunner().invoke(build(), ["check", *map(str, args)])


@pytest.mark.usefixtures("few", "quick")
def test_the_command(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = call("--device", "cpu", "--json", file)
    assert result.exit_code == 0 and result.output.startswith("device    cpu\n")
    stored = json.loads(file.read_text())
    assert stored["ok"] and f"{stored['passed']} passed" in result.output
    printed = call("--device", "cpu", "--json", "-")
    assert json.loads(printed.output)["passed"] == stored["passed"]


def test_a_file_that_cannot_be_written_is_named_before_the_work(call: Any, tmp_path: Path) -> None:
    (tmp_path / "file.json").touch()
    for folder in ("missing", "file.json"):
        with mock.patch("centella.check.check_device") as work:
            result = call("--device", "cpu", "--json", tmp_path / folder / "report.json")
        assert result.exit_code and "report.json" in result.output and not work.called


def test_what_fails_leaves_no_file(call: Any, tmp_path: Path) -> None:
    result = call("--device", "nonesuch", "--json", tmp_path / "report.json")
    assert result.exit_code and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("few")
def test_the_command_where_numbers_are_wrong(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Device(FakeGpu("softmax_rows"))
    monkeypatch.setattr(DEVICE, "open_device", lambda name: wrong)
    result = call("--json", "-")
    assert result.exit_code == 1
    stored = json.loads(result.output)
    assert not stored["ok"] and stored["failures"][0]["op"] == "softmax"


def test_the_command_for_a_model(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_transformers(monkeypatch)
    result = call("--model", DATA / "tiny-bert", "--device", "simulator")
    assert result.exit_code == 0 and "against   the CPU, f32" in result.output
    missing = call("--model", DATA / "nonesuch", "--device", "cpu")
    assert missing.exit_code == 1 and "expected a model folder" in missing.output
