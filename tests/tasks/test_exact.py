"""`encode(exact=True)`: the bits of a text's vector, whatever the batch and its place in it."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.specs import Caps
from centella.tasks.load import load
from centella.tasks.text import batches
from centella.tasks.text.tokens import Tokens
from tests.support.model_common import DATA

tokenizers = pytest.importorskip("tokenizers")
WORDS = (DATA / "tiny-bert" / "vocab.txt").read_text().split()[200:400]
TEXTS = 60
FAMILIES = ("xlm-roberta", "mpnet", "nomic", "modernbert", "gte", "qwen3-embed")


def same_bits(
    device: ct.Device, calls: int, folder: Path = DATA / "tiny-bert", many: int = TEXTS
) -> None:
    model, choose = load(folder, device=device, task="embed"), random.Random(1)
    most = min(40, model.config.max_length)
    texts = [" ".join(choose.choices(WORDS, k=choose.randint(0, most))) for _ in range(many)]
    alone = [model.encode(text, exact=True) for text in texts]
    for _ in range(calls):
        some = choose.sample(range(many), choose.randint(1, 12))
        size = choose.choice([1, 3, 32])
        together = model.encode([texts[i] for i in some], batch_size=size, exact=True)
        for i, vector in zip(some, together, strict=True):
            np.testing.assert_array_equal(vector, alone[i], strict=True)
    atol = 1e-6 if model.config.normalize else 1e-5
    np.testing.assert_allclose(model.encode(texts), alone, atol=atol)


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_one_size_of_batches_for_each_length(device: ct.Device) -> None:
    if device.name.startswith("webgpu:llvmpipe"):  # a CPU's threads
        same_bits(device, 15, many=20)
    else:
        same_bits(device, 60)


@pytest.mark.devices("webgpu", "simulator")
def test_texts_that_share_a_batch(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with few tokens."""
    monkeypatch.setattr(batches, "SLOW", ())
    monkeypatch.setattr(batches, "EXACT", 96)
    same_bits(device, 6 if device.name == "simulator" else 12, many=20)


def with_words(family: str, where: Path) -> Path:
    """A checkpoint with a tokenizer of as many words as it has tokens."""
    folder = where / family
    shutil.copytree(DATA / "encoders" / family, folder)
    config = json.loads((folder / "config.json").read_text())
    pad = config.get("pad_token_id") or 0
    names = ["<unk>", *WORDS][: min(config["vocab_size"], len(WORDS)) - 1]
    names.insert(pad, "<pad>")
    vocab = {name: i for i, name in enumerate(names)}
    native = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    native.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    native.add_special_tokens(["<pad>"])
    native.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.devices("cpu", "webgpu")
def test_families_that_share_a_batch(
    device: ct.Device, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "SLOW", ())
    monkeypatch.setattr(batches, "EXACT", 96)
    same_bits(device, 8, with_words(family, tmp_path))


@pytest.mark.sweep
@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
def test_two_thousand_batches(device: ct.Device) -> None:
    same_bits(device, 2000)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["tiny-bert", *FAMILIES])
@pytest.mark.devices("webgpu", "webgpu-hardware", "cuda")
def test_two_thousand_shared_batches(
    device: ct.Device, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a software adapter too, whose batches are of one text otherwise."""
    monkeypatch.setattr(batches, "SLOW", ())
    monkeypatch.setattr(batches, "EXACT", 96)
    own = family == "tiny-bert"
    same_bits(device, 2000, DATA / family if own else with_words(family, tmp_path))


def test_batches_of_one_width() -> None:
    lengths = np.array([3, 40, 16, 17, 5, 33, 1])

    def listed(tokens: int) -> list[list[int]]:
        return [rows.tolist() for rows in batches.by_columns(lengths, 48, tokens)]

    assert listed(64) == [[1], [5], [3], [2, 4, 0, 6]]
    assert listed(1) == [[i] for i in (1, 5, 3, 2, 4, 0, 6)]
    assert batches.by_columns(lengths[:0], 48, 64) == []
    columns = [batches.columns_of(n, 100) for n in (0, 1, 4, 31, 33, 64, 65, 97)]
    assert columns == [1, 4, 4, 32, 40, 64, 80, 100]
    assert [batches.columns_of(n, 100, exact=True) for n in (1, 17, 64)] == [16, 32, 64]


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_ahead(threads: int) -> None:
    """In their order; as many more are begun as there are threads."""
    begun: list[int] = []
    most = 0

    def call(number: int) -> int:
        begun.append(number)
        sleep(0.001 * (number % 3))
        return number

    for number, result in enumerate(batches.ahead([partial(call, n) for n in range(12)], threads)):
        most = max(most, len(begun) - number - 1)
        assert result == number
    assert sorted(begun) == list(range(12)) and 1 <= most <= threads
    with pytest.raises(ZeroDivisionError):
        list(batches.ahead([lambda: 1, lambda: 1 // 0, lambda: 2], threads))


def test_threads_leave_the_cores_to_a_device_that_computes_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = ct.device("cpu")
    gpu: Any = SimpleNamespace(caps=Caps("ptx", family="nvidia"))
    for cores, expected in ((1, 1), (2, 1), (4, 3)):
        monkeypatch.setattr(batches, "cores", lambda cores=cores: cores)
        assert batches.threads_ahead([gpu, gpu]) == expected
        assert batches.threads_ahead([gpu, cpu]) == 1


def test_portions_of_texts() -> None:
    sizes = [len(range(9000)[part]) for part in batches.portions(9000)]
    assert sizes == [512, 1024, 2048, 2048, 2048, 1320]
    assert list(batches.portions(0)) == [] and list(batches.portions(1)) == [slice(0, 512)]


@pytest.mark.parametrize("room", [0, 64])
def test_batches_of_texts_that_come_in_parts(room: int) -> None:
    """Each text once; full ones of one width before the last part is there."""
    lengths = np.random.default_rng(3).integers(0, 81, 700)
    tokens = Tokens.of([[i] * n for i, n in enumerate(lengths.tolist())])
    asked: list[int] = []

    def part(first: int) -> Tokens:
        asked.append(first)
        return tokens.taken(np.arange(first, min(first + 200, 700)))

    texts, before = [], 0
    for batch in batches.batches_of([partial(part, n) for n in range(0, 700, 200)], 8, 80, room):
        before += asked[-1] < 600
        size = batches.rows_of(batch.columns(80, exact=True), room) if room else 8
        padded, sizes = batch.grid(size, 80, -1, exact=bool(room))
        assert len(batch.texts) <= size and padded.shape[1] <= 80
        for row, text in enumerate(batch.texts.tolist()):
            length = lengths[text]
            assert sizes[row] == length
            assert (padded[row, :length] == text).all() and (padded[row, length:] == -1).all()
        texts += batch.texts.tolist()
    assert sorted(texts) == list(range(700)) and before > 5
    with pytest.raises(ct.DTypeError, match="exact"):
        load(DATA / "tiny-bert", device="cpu", task="embed").encode("a", exact="yes")  # type: ignore[arg-type]
