"""The safetensors reader: what it reads, and that every malformed file is a WeightsError."""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella import dtypes
from centella.errors import WeightsError
from centella.weights import open_checkpoint, read_file
from tests.support.model_common import minilm

DATA = Path(__file__).parents[1] / "data"


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with any header (an object, or raw bytes) and any stated length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = len(raw) if length is None else length
    path.write_bytes(stated.to_bytes(8, "little") + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


STORED = [
    ("F32", dtypes.f32, "<f4"),
    ("F16", dtypes.f16, "<f2"),
    ("BF16", dtypes.bf16, "<u2"),
    ("I32", dtypes.i32, "<i4"),
    ("U32", dtypes.u32, "<u4"),
    ("I8", dtypes.i8, "i1"),
    ("U8", dtypes.u8, "u1"),
    ("BOOL", dtypes.bool_, "?"),
    ("F64", None, "<f8"),
    ("I64", None, "<i8"),
    ("U64", None, "<u8"),
    ("I16", None, "<i2"),
    ("U16", None, "<u2"),
]


@pytest.mark.parametrize(("name", "dtype", "numpy"), STORED)
def test_every_dtype(tmp_path: Path, name: str, dtype: dtypes.DType | None, numpy: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]], dtype=numpy)
    file = write(
        tmp_path / "m.safetensors", {"x": entry([2, 3], 0, values.nbytes, name)}, values.tobytes()
    )
    tensor = read_file(file)["x"]
    assert tensor.dtype is dtype
    assert tensor.shape == (2, 3)
    assert tensor.file == file
    assert tensor.nbytes == values.nbytes
    np.testing.assert_array_equal(tensor.array, values)
    if dtype is not None:
        assert tensor.array.dtype == dtype.numpy


def test_a_bool_that_is_neither_0_nor_1(tmp_path: Path) -> None:
    """NumPy's bools of such bytes would be true, and yet not equal to True."""
    header = {"x": entry([3], 0, 3, "BOOL"), "none": entry([0], 3, 3, "BOOL")}
    tensors = read_file(write(tmp_path / "m.safetensors", header, b"\0\1\2"))
    with pytest.raises(WeightsError, match=r"m\.safetensors: tensor 'x': .* 0 or 1 .*, got 2$"):
        _ = tensors["x"].array
    assert tensors["none"].array.shape == (0,)


def test_data_is_read_each_time_into_memory_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path / "m.safetensors", {"x": entry([4], 0, 16)}, bytes(16))
    tensor = read_file(file)["x"]
    first, second = tensor.array, tensor.array
    assert not np.shares_memory(first, second)
    first[0] = 1
    np.testing.assert_array_equal(second, np.zeros(4, np.float32))


CHANGES: dict[str, Callable[[Path], object]] = {
    "shorter": lambda file: os.truncate(file, file.stat().st_size - 4),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "other bytes": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\1"),
    "another file": lambda file: Path(shutil.copy(file, file.with_suffix(".new"))).replace(file),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_open(tmp_path: Path, change: str) -> None:
    file = write(tmp_path / "m.safetensors", {"x": entry([4], 0, 16)}, bytes(16))
    os.utime(file, (1, 1))
    tensor = read_file(file)["x"]
    np.testing.assert_array_equal(tensor.array, np.zeros(4, np.float32))
    CHANGES[change](file)
    text = "cannot be read" if change == "gone" else "written since: load it again"
    with pytest.raises(WeightsError, match=rf"m\.safetensors: .*{text}"):
        _ = tensor.array


def test_scalar_empty_unaligned_and_metadata(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "tail": entry([2], 5, 13),  # 5 bytes into the data: unaligned
        "byte": entry([1], 0, 1, "U8"),
        "scalar": entry([], 1, 5),
        "none": entry([3, 0, 2], 5, 5),
    }
    data = b"\x07" + np.array([2.5, -1, 3], np.float32).tobytes()
    tensors = read_file(
        write(tmp_path / "m.safetensors", json.dumps(header).encode() + b"  ", data)
    )
    assert list(tensors) == ["byte", "scalar", "none", "tail"]  # in the order of the data
    assert tensors["scalar"].array.shape == ()
    assert tensors["scalar"].array == 2.5
    assert tensors["none"].array.shape == (3, 0, 2)
    np.testing.assert_array_equal(tensors["tail"].array, np.array([-1, 3], np.float32))


def test_no_tensors(tmp_path: Path) -> None:
    assert read_file(write(tmp_path / "m.safetensors", {})) == {}


def test_an_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.touch()
    with pytest.raises(WeightsError, match="expected a safetensors file, got an empty one"):
        read_file(file)


F32_2 = entry([2], 0, 8)
MALFORMED: dict[str, tuple[Any, bytes, int | None, str]] = {
    "header beyond the file": ({"x": F32_2}, b"", 10_000, r"truncated.*header of 10000 bytes"),
    "header length of garbage": ({}, b"", 2**63, "expected a header up to"),
    "no JSON": (b"garbage", b"", None, "bad JSON"),
    "no UTF-8": (b'{"\xff": 1}', b"", None, "bad JSON"),
    "cut JSON": (b'{"x": {"dty', b"", None, "bad JSON"),
    "deep JSON": (b"[" * 100_000, b"", None, "bad JSON"),
    "empty header": (b"", b"", None, "bad JSON"),
    "a list": ([1], b"", None, "expected a JSON object"),
    "a name twice": (b'{"x": 1, "x": 2}', b"", None, "'x' comes twice"),
    "metadata of another kind": ({"__metadata__": 3}, b"", None, "__metadata__"),
    "an entry of another kind": ({"x": 3}, b"", None, "'x': expected an object, got 3"),
    "no dtype": ({"x": {"shape": [], "data_offsets": [0, 4]}}, bytes(4), None, "got None"),
    "unknown dtype": ({"x": entry([2], 0, 2, "F8_E4M3")}, bytes(2), None, "got 'F8_E4M3'"),
    "no shape": ({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4), None, "shape"),
    "a negative size": ({"x": entry([-2, -1], 0, 8)}, bytes(8), None, r"shape.*\[-2, -1\]"),
    "a size of another kind": ({"x": entry([2.0, True], 0, 8)}, bytes(8), None, "shape"),  # type: ignore[list-item]
    "one offset": ({"x": {**F32_2, "data_offsets": [0]}}, bytes(8), None, "data_offsets"),
    "offsets turned round": ({"x": entry([2], 8, 0)}, bytes(8), None, "got -8"),
    "shape product": ({"x": entry([3], 0, 8)}, bytes(8), None, r"expected 12 bytes .* got 8"),
    "shape that overflows": ({"x": entry([2**62, 8], 0, 0)}, b"", None, "expected .* bytes"),
    "rank 65": ({"x": entry([1] * 65, 0, 4)}, bytes(4), None, "NumPy can hold"),
    "sizes beyond 2**63": ({"x": entry([0, 2**62, 8], 0, 0)}, b"", None, "NumPy can hold"),
    "size 2**63": ({"x": entry([0, 2**63], 0, 0)}, b"", None, "NumPy can hold"),
    "truncated data": ({"x": F32_2}, bytes(7), None, "up to byte 8, got 7"),
    "out of range": ({"x": entry([2], 4, 12)}, bytes(8), None, "up to byte 12, got 8"),
    "overlap": ({"x": F32_2, "y": entry([2], 4, 12)}, bytes(12), None, "'y' overlaps"),
    "the same bytes twice": ({"x": F32_2, "y": F32_2}, bytes(8), None, "'y' overlaps"),
    "hole": ({"x": F32_2, "y": entry([1], 12, 16)}, bytes(16), None, "'y' leaves a hole"),
    "bytes beyond": ({"x": F32_2}, bytes(9), None, "expected 8 bytes of data .* got 9"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    header, data, length, text = MALFORMED[case]
    write(tmp_path / "model.safetensors", header, data, length=length)
    with pytest.raises(WeightsError, match=text) as caught:
        open_checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("count", [50_000, 50_001, 1_000_000])
def test_many_entries_in_a_file_of_holes(tmp_path: Path, count: int) -> None:
    """What a large file lets a header have is bounded before each entry is looked at."""
    file = tmp_path / "model.safetensors"
    one = '"%x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join([one % i for i in range(count)]) + "}").encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(32 * len(header))
    few = count <= 50_000
    text = "expected 0 bytes of data" if few else f"50,000 tensors at most, got {count:,}"
    gc.collect()
    gc.freeze()  # what other tests have left is not looked at while entries come
    started = time.process_time()
    with pytest.raises(WeightsError, match=text):
        read_file(file)
    took = time.process_time() - started
    gc.unfreeze()
    assert took < 1


@pytest.mark.parametrize("size", [1, 7])
def test_shorter_than_the_header_length(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    with pytest.raises(WeightsError, match=f"got {size} bytes"):
        open_checkpoint(tmp_path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="an empty folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(WeightsError, match=r"got model\.onnx"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="expected a model folder, got nothing"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="expected a model folder, got a file"):
        open_checkpoint(tmp_path / "model.onnx")
    with pytest.raises(WeightsError, match="got nothing at that path"):
        read_file(tmp_path / "nothing.safetensors")
    with pytest.raises(WeightsError, match="got a folder"):
        read_file(tmp_path)


def test_damaged_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing but a WeightsError is raised."""
    header = {"x": F32_2, "y": entry([2, 2], 8, 16, "BF16")}
    whole = write(tmp_path / "model.safetensors", header, bytes(range(16))).read_bytes()
    rng = np.random.default_rng(0)
    outcomes = Counter[str]()
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), size=rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        end = len(whole) if rng.random() < 0.5 else rng.integers(1, len(whole))
        (tmp_path / "model.safetensors").write_bytes(damaged[:end])
        try:
            open_checkpoint(tmp_path)
            outcomes["read"] += 1
        except WeightsError:
            outcomes["refused"] += 1
    assert set(outcomes) == {"read", "refused"}


def shard(folder: Path, weight_map: Any) -> Path:
    """A folder of two shards, x and y, with the given index."""
    write(folder / "a.safetensors", {"x": F32_2, "z": entry([1], 8, 12)}, bytes(12))
    write(folder / "b.safetensors", {"y": entry([1], 0, 4)}, bytes(4))
    index = {"metadata": {"total_size": 16}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_sharded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shard(tmp_path, {"y": "b.safetensors", "x": "a.safetensors"}))
    assert list(checkpoint) == ["y", "x"]  # z is not listed
    assert [f.name for f in checkpoint.files] == ["b.safetensors", "a.safetensors"]
    assert checkpoint["x"].shape == (2,)
    assert checkpoint.nbytes == 12
    assert "z" not in checkpoint
    assert checkpoint.get("z") is None
    assert repr(checkpoint).endswith("tensors=2, files=2, nbytes=12)")


def test_a_single_file_comes_before_the_index(tmp_path: Path) -> None:
    shard(tmp_path, {"y": "b.safetensors"})
    write(tmp_path / "model.safetensors", {"w": F32_2}, bytes(8))
    assert list(open_checkpoint(tmp_path)) == ["w"]


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        (None, "weight_map: expected an object"),
        ({"x": "b.safetensors"}, r"b\.safetensors: tensor 'x': expected here"),
        ({"x": "c.safetensors"}, r"c\.safetensors: expected a safetensors file, got nothing"),
        ({"x": "../a.safetensors"}, "name of a file in the folder"),
        ({"x": "/etc/a.safetensors"}, "name of a file in the folder"),
        ({"x": ".."}, "name of a file in the folder"),
        ({"x": 3}, "name of a file in the folder, got 3"),
    ],
)
def test_malformed_index(tmp_path: Path, weight_map: Any, text: str) -> None:
    with pytest.raises(WeightsError, match=text):
        open_checkpoint(shard(tmp_path, weight_map))


def test_index_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightsError, match=r"index\.json.*bad JSON"):
        open_checkpoint(tmp_path)


def agrees_with_the_reference_reader(folder: Path) -> None:
    """Every tensor equals what the safetensors package reads."""
    numpy = pytest.importorskip("safetensors.numpy")
    expected = numpy.load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint) == set(expected)
    for name, tensor in checkpoint.items():
        assert tensor.array.dtype == expected[name].dtype
        np.testing.assert_array_equal(tensor.array, expected[name])


@pytest.mark.parametrize("folder", ["tiny-bert", "tiny-bert-cls"])
def test_tiny_checkpoints(folder: str) -> None:
    agrees_with_the_reference_reader(DATA / folder)
    positions = open_checkpoint(DATA / folder)["embeddings.position_ids"]
    assert positions.dtype is None
    assert positions.array.dtype == np.int64


def test_minilm() -> None:
    agrees_with_the_reference_reader(minilm())
