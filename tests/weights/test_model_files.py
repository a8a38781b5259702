"""Hostile model folders: bounded before they are read, and a typed error that says what to do."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import WeightsError
from centella.tasks.embed.embedder import Embedder, EmbedderConfig
from centella.tasks.load import load
from centella.tasks.text.tokenizer import Tokenizer
from centella.weights import open_checkpoint
from tests.support.model_common import DATA, copy_of

pytest.importorskip("tokenizers")

Edit = Callable[[Any], Any]
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "tiny-bert", tmp_path / "tiny-bert"))


def edit_json(file: Path, edit: Edit) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


def write_header(folder: Path, raw: bytes, data: bytes = b"") -> None:
    content = len(raw).to_bytes(8, "little") + raw + data
    (folder / "model.safetensors").write_bytes(content)


@contextmanager
def refused(text: str) -> Iterator[None]:
    """A WeightsError, in under a second and 64 MB."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(WeightsError, match=text) as caught:
            yield
        seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1 and peak < 2**26
    assert len(str(caught.value)) < 1000


# -- sizes ----------------------------------------------------------------------------------------


def test_a_shape_of_many_huge_sizes(tmp_path: Path) -> None:
    shape = b",".join([b"18446744073709551615"] * 100_000)
    entry = b'{"x":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,8]}}'
    write_header(tmp_path, entry, bytes(8))
    with refused("tensor 'x': shape: .* of 64 sizes at most, got 100000"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"x":[' + b"[]," * 30_000_000 + b"[]]}", "a header up to .* in a file of .*, got 9000"),
        (b'{"x":[' + b"[]," * 1_300_000 + b"[]]}", "JSON of at most .* values, got 2600"),
        (b'{"x":' + b'{"":' * 5_000 + b"0" + b"}" * 5_001, "bad JSON"),
        (b'{"x":' + b"9" * 5_000 + b"}", "bad JSON: Exceeds the limit"),
    ],
    ids=["lists of 90 MB", "lists of 4 MB", "depth", "digits"],
)
def test_headers_that_hold_much(tmp_path: Path, raw: bytes, text: str) -> None:
    write_header(tmp_path, raw)
    with refused(text):
        open_checkpoint(tmp_path)


def test_a_file_of_many_small_tensors_is_read(tmp_path: Path) -> None:
    header = {
        f"layer.{i}.bias": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(30_000)
    }
    write_header(tmp_path, json.dumps(header).encode(), bytes(30_000))
    assert len(open_checkpoint(tmp_path)) == 30_000


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_hidden_layers", 100_000, "expected at most 3, for 56 tensors .*, got 100000"),
        ("hidden_size", 3 * 10**9, "expected at most 1000, the largest extent .*, got 3000000000"),
        ("vocab_size", 10**400, "expected at most 1000"),
        ("max_position_embeddings", 2**31, "expected at most 1000"),
        ("layer_norm_eps", 1e999, "expected float over 0, got inf"),
    ],
)
def test_numbers_that_no_tensor_has(folder: Path, name: str, value: Any, text: str) -> None:
    edit_json(folder / "config.json", lambda c: c.update({name: value}))
    with refused(rf"config\.json: {name}: {text}"):
        load(folder, device="cpu")


FLOOD = b'{"x": [' + b"[]," * 1_300_000 + b"0]}"
NAMES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "modules.json",
    "sentence_bert_config.json", "special_tokens_map.json", "1_Pooling/config.json",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (FLOOD, "JSON of at most [0-9]+ values, got 2600"),
        (b'{"x": "' + b" " * 101_000_000 + b'"}', "at most [0-9]+ bytes, got 101000009"),
        (POINTER, "the pointer that Git LFS keeps in its place; type: git lfs install && git -C "),
    ],
    ids=["values", "bytes", "pointer"],
)
def test_json_files_are_bounded(folder: Path, name: str, content: bytes, text: str) -> None:
    (folder / name).write_bytes(content)
    with refused(f"{name}: expected.* {text}"):
        load(folder, device="cpu")


def test_an_index_is_bounded(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(FLOOD)
    with refused("index.json: expected JSON of at most .* values"):
        open_checkpoint(tmp_path)


def test_weights_that_are_a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(POINTER)
    with pytest.raises(WeightsError, match=r"model\.safetensors: .*pointer.* lfs pull"):
        load(folder, device="cpu")


# -- paths ----------------------------------------------------------------------------------------

ELSEWHERE = (
    "..", "../other", "a/../../other", "/etc", "C:\\x", "a\0b", "\ud800", "\x1b[2J", "d" * 5000, 7,
)  # fmt: skip


@pytest.mark.parametrize("path", ELSEWHERE)
def test_paths_of_modules_stay_in_the_folder(folder: Path, path: Any) -> None:
    edit_json(folder / "modules.json", lambda m: m[1].update(path=path))
    with refused(r"modules\.json: path: expected a path in the folder"):
        load(folder, device="cpu")


def sharded(folder: Path, shard: Any) -> Path:
    """The folder with an index, all of whose tensors are in one file."""
    names = list(open_checkpoint(folder))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    return folder


@pytest.mark.parametrize("shard", ELSEWHERE)
def test_shards_stay_in_the_folder(folder: Path, shard: Any) -> None:
    with refused(r"index\.json: tensor .*: expected (a path|the name of a file) in the folder"):
        load(sharded(folder, shard), device="cpu")


def test_a_link_may_not_leave_the_folder(folder: Path, tmp_path: Path) -> None:
    sharded(folder, "a.safetensors")
    (folder / "a.safetensors").rename(tmp_path / "a.safetensors")
    (folder / "a.safetensors").symlink_to("../a.safetensors")
    with refused("a link out of it"):
        load(folder, device="cpu")
    shutil.move(folder / "1_Pooling", tmp_path / "pooling")
    (folder / "1_Pooling").symlink_to(tmp_path / "pooling")
    with refused("a link out of it"):
        EmbedderConfig.from_folder(folder)


def test_a_snapshot_of_the_hub_is_made_of_links(folder: Path, tmp_path: Path) -> None:
    """models--owner--name/snapshots/<revision>/... -> ../../blobs/<hash>"""
    sharded(folder, "a.safetensors")
    snapshot, blobs = tmp_path / "hub/snapshots/0a1b", tmp_path / "hub/blobs"
    blobs.mkdir(parents=True)
    for i, file in enumerate(f for f in sorted(folder.rglob("*")) if f.is_file()):
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / str(i))
        link.symlink_to(os.path.relpath(blobs / str(i), link.parent))
    expected = load(DATA / "tiny-bert", device="cpu").encode("storm")
    np.testing.assert_array_equal(load(snapshot, device="cpu").encode("storm"), expected)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "modules.json"])
def test_a_pipe_is_no_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with refused(name):
        load(folder, device="cpu")


@pytest.mark.parametrize("path", ["d" * 5000, "a\0b", "d/" * 3000])
def test_paths_that_no_system_has(path: str) -> None:
    with pytest.raises(WeightsError, match="a path that cannot be read"):
        load(path, device="cpu")


# -- tokens ---------------------------------------------------------------------------------------


def test_a_padding_token_of_half_a_character(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda c: c.update(pad_token="\ud800"))
    with refused(r"tokenizer_config\.json: pad_token: expected valid Unicode, got '\\ud800'"):
        load(folder, device="cpu")


@pytest.mark.parametrize("pad_id", [-1, 1000, 2**31, 2**64])
def test_a_padding_token_beyond_the_table(folder: Path, pad_id: int) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit_json(folder / name, lambda c: c.pop("pad_token"))
    edit_json(folder / "config.json", lambda c: c.update(pad_token_id=pad_id))
    with refused(rf"config\.json: padding token: expected an id from 0 to 999.*, got {pad_id}$"):
        load(folder, device="cpu")


@pytest.mark.parametrize("token_id", [1000, 2**31, 2**32 - 1])
def test_token_ids_beyond_the_table(folder: Path, token_id: int) -> None:
    def edit(tokenizer: Any) -> None:
        tokenizer["model"]["vocab"]["storm"] = token_id

    edit_json(folder / "tokenizer.json", edit)
    embedder = load(folder, device="cpu")
    assert np.isfinite(embedder.encode("the rain")).all()
    text = rf"tokenizer\.json: token 'storm': expected an id below 1000, .*, got {token_id}$"
    with pytest.raises(WeightsError, match=text):
        embedder.encode(["the rain", "the storm"])


def test_what_the_tokenizers_library_raises(folder: Path) -> None:
    def no_unknown(tokenizer: Any) -> None:
        del tokenizer["model"]["vocab"]["[UNK]"]

    edit_json(folder / "tokenizer.json", no_unknown)
    with pytest.raises(
        WeightsError, match=r"tokenizer\.json: expected to encode texts, got: .*UNK"
    ):
        load(folder, device="cpu").encode("\u4e00\u4e01 ok \u2603")


def test_a_panic_of_the_tokenizers_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {})  # as pyo3_runtime's

    class Native:
        def __getattr__(self, name: str) -> Any:
            raise panic("index out of bounds")

    tokenizer = Tokenizer.from_folder(folder)
    monkeypatch.setattr(tokenizer, "native", Native())
    with pytest.raises(WeightsError, match=r"tokenizer\.json: .*, got: 'index out of bounds'"):
        tokenizer.encode(["storm"])
    monkeypatch.setattr("tokenizers.Tokenizer", Native())
    with pytest.raises(WeightsError, match=r"tokenizer\.json: .*, got: 'index out of bounds'"):
        Tokenizer.from_folder(folder)


# -- names ----------------------------------------------------------------------------------------


def no_network(*_: Any, **__: Any) -> str:
    raise AssertionError("asked the network")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("all-MiniLM-L6-v2", "did you mean 'sentence-transformers/all-MiniLM-L6-v2'?"),
        ("whisper-tiny", "did you mean 'openai/whisper-tiny'?"),
        ("Whisper-Tiny", "did you mean 'openai/whisper-tiny'?"),
        ("whisper-tinny", "did you mean 'openai/whisper-tiny'"),
        ("turbo", "did you mean 'openai/whisper-large-v3-turbo'?"),
        ("minlm", "did you mean 'minilm'?"),
        ("whisper", "did you mean 'openai/whisper-tiny' or 'openai/whisper-base' or 'openai/whi"),
        ("bge-small-en", "did you mean 'BAAI/bge-small-en-v1.5'?"),
        ("qwen3", "'Qwen/Qwen3-4B'"),
        ("my-own", "for a repository write its owner too: 'owner/my-own'"),
    ],
)
def test_a_model_without_its_owner(
    name: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(WeightsError) as caught:
        load(name, device="cpu")
    said = str(caught.value)
    assert said.startswith(f"{name}: expected a model folder, a .gguf file, a repository (owner/")
    assert end in said
    assert said.endswith(end) or not end.endswith("?")


def test_a_folder_here_and_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "whisper" / "tiny", tmp_path / "whisper-tuned")
    with pytest.raises(WeightsError, match=r"mean 'whisper-tuned' or 'openai/whisper-tiny'\?$"):
        load("whisper-tiny", device="cpu")


def test_a_mistyped_path_asks_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    (tmp_path / "models").mkdir()
    text = (
        r"^models/minilm: .*got nothing at that path, in the folder 'models' that is here; for .*"
    )
    with pytest.raises(WeightsError, match=text + r"snapshot_download\('models/minilm'\)\)$"):
        load("models/minilm", device="cpu")
    for path in ("./minilm", "../minilm", "/models/minilm", "models/bert/minilm", "~/minilm"):
        with pytest.raises(WeightsError, match=r"expected a model folder.* nothing at that path"):
            load(path, device="cpu")


# -- speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_narrow_weights_on_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    narrow = copy_of("tiny-bert", tmp_path, lambda t: {n: to_narrow(a) for n, a in t.items()})
    with caplog.at_level(logging.WARNING, "centella"):
        widened: Embedder = load(narrow, device="cpu")
        assert {t.dtype for _, t in widened.model.named_parameters()} == {ct.f32}
        assert not caplog.records
        load(narrow, device="cpu", dtype=kind)
    (record,) = caplog.records
    assert f"rounds each result to {kind}: f32, or auto, is faster" in record.getMessage()


def to_narrow(array: Any) -> Any:
    return array.astype(np.float16) if array.dtype == np.float32 else array


if sys.platform == "win32":
    del test_a_pipe_is_no_file
