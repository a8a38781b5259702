"""Files of torch.save: tensors are read, nothing is run, what is malformed is a WeightsError."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import dtypes
from centella.errors import WeightsError
from centella.weights import open_checkpoint
from centella.weights.torch_zip import read_torch

HEADS = Path(__file__).parents[1] / "data" / "heads"


def test_tensors_of_every_dtype() -> None:
    tensors = read_torch(HEADS / "views.pt")
    with np.load(HEADS / "views.npz") as wanted:
        for name in wanted:
            array = tensors[name].array
            assert (array.dtype, array.shape) == (wanted[name].dtype, wanted[name].shape)
            np.testing.assert_array_equal(array, wanted[name])
        bits = wanted["f32"].view(np.uint32) >> 16
    assert tensors["bf16"].dtype is dtypes.bf16
    np.testing.assert_array_equal(tensors["bf16"].array, bits.astype(np.uint16))
    assert (tensors["f64"].dtype, tensors["i64"].dtype) == (None, None)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes(tmp_path: Path, protocol: int) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(7, 3)
    torch.save(layer.state_dict(), tmp_path / "x.pt", pickle_protocol=protocol)
    tensors = read_torch(tmp_path / "x.pt")
    assert list(tensors) == ["weight", "bias"]
    np.testing.assert_array_equal(tensors["weight"].array, layer.weight.detach().numpy())


def test_tensors_without_elements(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0)
    wanted = {
        "full": x, "empty": torch.zeros(0), "end": x[12:], "column": x.reshape(3, 4)[:, :0],
        "turned": torch.zeros(2, 0, 4).transpose(0, 2), "scalar": torch.tensor(3.0),
    }  # fmt: skip
    torch.save(wanted, tmp_path / "x.pt")
    tensors = read_torch(tmp_path / "x.pt")
    assert list(tensors) == list(wanted)
    for name, tensor in wanted.items():
        assert tensors[name].array.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(tensors[name].array, tensor.numpy())


def test_a_tensor_whose_numbers_are_not_as_stored(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch._neg_view(torch.arange(12.0))}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match=r"a tensor with metadata \{'neg': True\}"):
        read_torch(tmp_path / "x.pt")


def entries() -> dict[str, bytes]:
    with zipfile.ZipFile(HEADS / "sparse_linear.pt") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(file: Path, changed: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    """The file of a sparse head with other entries; those that are empty are left out."""
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, data in (entries() | changed).items():
            if data:
                archive.writestr(name, data)
    return file


def test_weights_of_a_folder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    tiny = HEADS.parent / "tiny-bert"
    shutil.copytree(tiny, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    tensors = {n: torch.from_numpy(t.array) for n, t in open_checkpoint(tiny).items()}
    torch.save(tensors, tmp_path / "m" / "pytorch_model.bin")
    expected = ct.load(tiny, "cpu").encode("one storm")
    np.testing.assert_array_equal(ct.load(tmp_path / "m", "cpu").encode("one storm"), expected)
    (tmp_path / "m" / "pytorch_model.bin").unlink()
    names = [list(tensors)[::2], list(tensors)[1::2]]
    shards = {name: f"pytorch_model-{i}.bin" for i, some in enumerate(names) for name in some}
    for some in names:
        torch.save({name: tensors[name] for name in some}, tmp_path / "m" / shards[some[0]])
    index = tmp_path / "m" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    np.testing.assert_array_equal(ct.load(tmp_path / "m", "cpu").encode("one storm"), expected)
    (tmp_path / "m" / shards["embeddings.word_embeddings.weight"]).write_bytes(b"")
    with pytest.raises(WeightsError, match=r"expected a zip file of torch\.save"):
        ct.load(tmp_path / "m", "cpu")


class Evil:
    """What runs a command where a pickle is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


NESTED: Any = ()
for _ in range(60):
    NESTED = (NESTED, NESTED)  # 2^60 leaves once it is written out
LIST = "sparse_linear/data.pkl"
PICKLES: list[tuple[Any, str]] = [
    (Evil(), "a call of _Name"),
    ({"weight": Evil()}, "a call of _Name"),
    ({"weight": [1]}, "an instruction EMPTY_LIST"),
    ({"weight": 7}, "'weight': expected a tensor, got 7"),
    ({"weight": NESTED}, "'weight': expected a tensor"),
    ({(1, 2): 1}, "a name that is no text"),
    ((1, 2), "expected a dict of tensors, got a tuple"),
    (b"x", "an instruction|a call of"),
    (b"", "an instruction|a call of"),
]


@pytest.mark.parametrize(("value", "text"), PICKLES)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, text: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "x.pt", {LIST: pickle.dumps(value, protocol)})
    with pytest.raises(WeightsError, match=text):
        read_torch(file)
    assert not (tmp_path / "ran").exists()


def test_what_is_malformed(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, bytes], str]] = [
        ({LIST: b""}, "expected one entry data.pkl"),
        ({"other/data.pkl": b"x"}, "expected one entry data.pkl"),
        ({LIST: bytes(2**22 + 1)}, "expected one entry data.pkl"),
        ({"sparse_linear/byteorder": b"big"}, "expected little-endian numbers"),
        ({"sparse_linear/data/0": b""}, "tensor 'weight': expected 30 x 2 bytes"),
        ({"sparse_linear/data/0": b"12"}, "tensor 'weight': expected 30 x 2 bytes"),
        ({LIST: b"\x80\x02}q\x00"}, "pickle exhausted before seeing STOP"),
        ({LIST: b"\x80\x02R."}, "it takes more than there is"),
    ]
    for changed, text in wrong:
        with pytest.raises(WeightsError, match=text):
            read_torch(write(tmp_path / "x.pt", changed))
    with pytest.raises(WeightsError, match="bytes that are not compressed"):
        read_torch(write(tmp_path / "x.pt", {}, zipfile.ZIP_DEFLATED))
    packed = bytearray(write(tmp_path / "x.pt", {}, zipfile.ZIP_LZMA).read_bytes())
    begin = packed.index(LIST.encode()) + len(LIST)
    packed[begin + 20 : begin + 40] = b"\xff" * 20
    (tmp_path / "x.pt").write_bytes(packed)
    with pytest.raises(WeightsError, match=r"data\.pkl: expected it stored or deflated"):
        read_torch(tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"\x80\x02}q\x00.")  # as torch wrote before 1.6
    with pytest.raises(WeightsError, match=r"expected a zip file of torch\.save"):
        read_torch(tmp_path / "y.pt")
    (tmp_path / "y.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(WeightsError, match="the pointer that Git LFS keeps"):
        read_torch(tmp_path / "y.pt")
    with pytest.raises(WeightsError, match="got nothing at that path"):
        read_torch(tmp_path / "z.pt")


def test_damaged_bytes_are_read_or_refused(tmp_path: Path) -> None:
    rng, raw = random.Random(4), (HEADS / "views.pt").read_bytes()
    file, outcomes = tmp_path / "x.pt", set()
    program = entries()[LIST]
    for _ in range(300):
        data = bytearray(raw)
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        outcomes.add(outcome(file))
        changed = bytearray(program)
        for _ in range(rng.choice((1, 2))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        outcomes.add(outcome(write(file, {LIST: bytes(changed)})))
    assert outcomes == {"read", "WeightsError"}


def outcome(file: Path) -> str:
    try:
        for tensor in read_torch(file).values():
            assert tensor.array.shape == tensor.shape
    except WeightsError:
        return "WeightsError"
    return "read"
