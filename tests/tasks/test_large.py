"""Models of several shards: what the host holds meanwhile, how far it is, whether they fit."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.backends.base import Backend
from centella.cli import loading, output
from centella.ledger.call_sites import NOWHERE
from centella.nn import stored
from centella.runtime import storage
from centella.specs import make_spec
from centella.weights.checkpoint import INDEX
from tests.support.devices import name_of
from tests.support.fake_cuda import FakeCuda, installed

pytest.importorskip("gguf")
from tests.support.gguf_files import write  # needs the package
from tests.support.load_peak import SMALL, measure_alone, write_gguf, write_model  # likewise

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("large"))


@pytest.mark.sweep
@pytest.mark.devices("webgpu-minimum")
def test_a_vocabulary_larger_than_a_binding(device: ct.Device, tmp_path: Path) -> None:
    """135 MB of embedding and head, in windows where a binding has 128 MiB: the CPU's tokens."""
    folder = write_model(tmp_path, vocab_size=132_000, intermediate_size=64, num_hidden_layers=2)
    host, model = (ct.load(folder, d, "f32", task="generate") for d in ("cpu", device))
    assert model.model.embed_tokens.weight.nbytes > device.caps.max_binding
    prompts = [[5, 131_999, 77], [70_000]]
    drawn: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 3}
    for options in ({}, drawn):
        options = {"max_new_tokens": 6, "ignore_eos": True, **options}
        wanted = [host.generate(prompt, **options).ids for prompt in prompts]
        assert [model.generate(prompt, **options).ids for prompt in prompts] == wanted
        with ct.Scheduler(model, max_batch=2, tokens=256, background=False) as scheduler:
            requests = [scheduler.submit(prompt, **options) for prompt in prompts]
            scheduler.run()
            assert [request.result().ids for request in requests] == wanted


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield from installed(monkeypatch, FakeCuda)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a part, as small as can be; pieces of it have other rows."""
    monkeypatch.setattr(storage, "PART", 64)
    monkeypatch.setattr(Backend, "least_parts", 64)
    monkeypatch.setattr(stored, "PIECE", 300)
    return 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_the_host_holds_a_part_of_a_tensor(device: ct.Device, large: Path) -> None:
    peak = measure_alone(name_of(device), large)
    assert peak.host < 1.5 * peak.largest
    assert peak.last == (peak.weights, peak.weights) and peak.calls == 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "BF16"])
def test_the_host_holds_a_part_of_a_tensor_of_a_gguf_file(
    device: ct.Device, kind: str, tmp_path: Path
) -> None:
    peak = measure_alone(name_of(device), write_gguf(tmp_path / "large.gguf", kind))
    assert peak.host < 1.5 * peak.largest


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_local_experts": None, "moe_intermediate_size": 256}
MIXED = {"v_proj": "Q6_K", "up_proj": "F16", "": "Q3_K"}
SAME = {"v_proj": "Q6_K", "": "MXFP4"}


@pytest.mark.devices("cpu", "simulator", "webgpu")
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q4_K"), ("llama", MIXED), ("llama", "BF16"), ("qwen3-moe", SAME)],
)
def test_blocks_in_parts_are_the_weights(
    device: ct.Device, family: str, kind: str | dict[str, str], tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Rows of q and k that change places, stacked parameters of one format and of several."""
    file = tmp_path / "model.gguf"
    config = json.loads((SMALL.parent / family / "config.json").read_text())
    more = EXPERTS if family == "qwen3-moe" else {}
    write(SMALL.parent / family, file, kind, numbers={**config, **WIDE, **more})
    whole = ct.load(file, "cpu", "bf16").model.state_dict()
    request.getfixturevalue("parts")
    got = ct.load(file, device, "bf16").model.state_dict()
    assert got.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(got[name].numpy(), tensor.numpy(), err_msg=name)


@pytest.mark.devices("cpu", "simulator", "webgpu")
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_weights_in_parts_are_the_weights(
    device: ct.Device, family: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    folder = SMALL.parent / family
    whole = ct.load(folder, "cpu", dtype).model.state_dict()
    request.getfixturevalue("parts")
    got = ct.load(folder, device, dtype).model.state_dict()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(got[name].numpy(), tensor.numpy(), err_msg=name)


def test_cuda_reads_a_part_while_another_is_sent(fake: FakeCuda, parts: int) -> None:
    device = ct.device("cuda", native=0)
    data = np.random.default_rng(0).integers(0, 1 << 30, (37, 6)).astype(np.int32)
    spec = make_spec((37, 6), ct.i32, 16)  # rows of 24 bytes, 32 apart
    seen: list[Array] = []

    def read(first: int, out: Array) -> None:
        seen.append(out)
        out[...] = data[first : first + len(out)]

    before = len(fake.ops)
    with ct.ledger() as led:
        (value,) = device.storage.fill([spec], read, NOWHERE)
    led.expect(uploads=1, upload_bytes=spec.storage_bytes)
    assert [len(out) for out in seen] == [2] * 18 + [1]
    assert len({out.ctypes.data for out in seen}) == 2  # pinned, by turns
    assert [op.what for op in fake.ops[before:]] == ["copy"] * 19
    np.testing.assert_array_equal(ct.Tensor(value, spec).numpy(), data)
    device.close()
    assert not fake.memory


def test_cuda_reads_files_straight_into_pinned_memory(fake: FakeCuda) -> None:
    """Above 64 KB; below, tensors ride in the next submission's write."""
    cuda, other = ct.device("cuda", native=0), ct.device("simulator", pool="exact")
    for nbytes, direct in ((64 << 10, False), ((64 << 10) + 16, True)):
        spec = make_spec((nbytes // 16, 4), ct.f32, 16)
        values = cuda.recorder.fill([spec], lambda first, out: out.fill(first + 3))
        assert (values is not None) is direct
        assert other.recorder.fill([spec], lambda first, out: None) is None
        if values is not None:
            assert (ct.Tensor(values[0], spec).numpy() == 3).all()
    cuda.close()


def filled(device: ct.Device, data: Array, meanwhile: Callable[[], object]) -> ct.Tensor:
    """The data as a tensor, read in parts; in the middle of one a thread does other work."""
    spec = device.storage.spec(data.shape, ct.i32)

    def read(first: int, out: Array) -> None:
        out[...] = data[first : first + len(out)]
        if first == 4:
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "it waits for the file"

    (value,) = device.storage.fill([spec], read, NOWHERE)
    return ct.Tensor(value, spec)


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
def test_other_threads_use_the_device_while_a_file_is_read(device: ct.Device, parts: int) -> None:
    data, results = np.arange(37 * 6, dtype=np.int32).reshape(37, 6), list[Array]()

    def meanwhile() -> None:
        results.append((ct.ones((5,), device=device) + 1).numpy())
        results.append(filled(device, -data, lambda: None).numpy())

    np.testing.assert_array_equal(filled(device, data, meanwhile).numpy(), data)
    assert results[0].tolist() == [2.0] * 5
    np.testing.assert_array_equal(results[1], -data)


def test_two_threads_fill_their_own_pinned_memory(fake: FakeCuda, parts: int) -> None:
    device = ct.device("cuda", native=0)
    data, results = np.arange(37 * 6, dtype=np.int32).reshape(37, 6), list[ct.Tensor]()
    got = filled(device, data, lambda: results.append(filled(device, -data, lambda: None)))
    np.testing.assert_array_equal(got.numpy(), data)
    np.testing.assert_array_equal(results[0].numpy(), -data)
    with pytest.raises(OSError, match="gone"):
        device.storage.fill([device.storage.spec((37, 6), ct.i32)], _gone, NOWHERE)
    np.testing.assert_array_equal(filled(device, data, lambda: None).numpy(), data)
    del got
    results.clear()
    device.close()
    assert not fake.memory


def _gone(first: int, out: Array) -> None:
    if first:
        raise OSError("gone")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("missing", r"00002-of-00003\.safetensors: expected a safetensors file, got nothing at"),
        ("cut", r"00002-of-00003\.safetensors: tensor .*: truncated or out of range"),
        ("index", r"missing: norm\.weight; left over: none"),
    ],
)
def test_damaged_shards_and_indices(tmp_path: Path, large: Path, change: str, text: str) -> None:
    for file in large.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    shard, index = (tmp_path / n for n in ("model-00002-of-00003.safetensors", INDEX))
    changed = index if change == "index" else shard
    raw = changed.read_bytes()
    changed.unlink()
    if change == "cut":
        shard.write_bytes(raw[:-100])
    elif change == "index":
        content = json.loads(raw)
        del content["weight_map"]["model.norm.weight"]
        index.write_text(json.dumps(content))
    with pytest.raises(ct.WeightsError, match=text):
        ct.load(tmp_path, "cpu")


NONE_FITS = "no quantize= makes them fit"


@pytest.mark.parametrize(("limit", "advice"), [(140, r"='q4_0' needs [\d,]+$"), (30, NONE_FITS)])
def test_a_model_that_has_no_room(large: Path, limit: int, advice: str) -> None:
    device = ct.device("webgpu", memory_limit=limit << 20)
    with ct.ledger() as led, pytest.raises(ct.OutOfMemoryError) as caught:
        ct.load(large, device)
    led.expect(uploads=0)
    text = str(caught.value)
    assert re.search(r"expected room for 170,7\d\d,\d\d\d bytes of weights on webgpu", text), text
    assert re.search(advice, text), text
    assert (ct.zeros(3, device=device) + 1).numpy().tolist() == [1, 1, 1]


@pytest.mark.devices("cpu", "webgpu")
def test_a_model_larger_than_the_memory_of_the_machine(
    device: ct.Device, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a CPU computes, weights would take it, and more of it than there is."""
    if not device.caps.uses_host_memory:
        pytest.skip("this device has memory of its own")
    where = ct.device(device.name, pool="exact")  # whose pool keeps nothing, which would count
    monkeypatch.setattr("centella.nn.room.available", lambda: 140 << 20)
    advice = r"bytes of weights on .*, got 1\d\d,\d{3},\d{3} free; quantize='q4_0' needs [\d,]+$"
    with ct.ledger() as led, pytest.raises(ct.OutOfMemoryError, match=advice):
        ct.load(large, where, "bf16")
    led.expect(uploads=0, allocations=0)


def test_a_tensor_larger_than_a_buffer(large: Path) -> None:
    device = ct.device("simulator", pool="exact")
    device.backend.caps = replace(device.caps, max_buffer=1 << 20)
    with pytest.raises(ct.LimitError, match=r"has 112,640,000 bytes; a buffer of simulator has at"):
        ct.load(large, device, "f32")


def test_the_command_line_says_how_far_it_is(
    large: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "SECONDS", 0.0)
    loading.load_shown(str(SMALL), "cpu", "auto")
    lines = capfd.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"loaded [\d,]+ of [\d,]+ MB", line) for line in lines)
