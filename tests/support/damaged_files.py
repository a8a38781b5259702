"""Damage to JSON values, texts and bytes, to safetensors files and to model folders."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "tiny-bert"
WIDTH, HEADS, WIDE, ROWS, POSITIONS = 8, 2, 12, 1000, 64
DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U8": 1, "BOOL": 1, "F64": 8, "I64": 8}
Header = dict[str, Any]

# -- damage ---------------------------------------------------------------------------------------

NUMBERS = (
    "-1", "0", "1", "2", "63", "65", "999", "2147483647", "2147483648", "4294967295",
    "9223372036854775808", "18446744073709551615", "18446744073709551616", "1e999", "-1e400",
    "NaN", "-Infinity", "0.5", "1e30", "9" * 400, "9" * 5000,
)  # fmt: skip
VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: "", lambda: [], lambda: {}, lambda: "x" * 5000,
    lambda: "../../etc/passwd", lambda: "/etc/passwd", lambda: "a\0b", lambda: "\ud800",
    lambda: "C:\\x", lambda: "d/" * 3000, lambda: "\U0001f600\x1b[2J", lambda: [0] * 70,
    lambda: [2**64 - 1] * 3000, lambda: [[]] * 3000, lambda: [{"a": [1]}] * 500,
    lambda: {str(i): i for i in range(3000)}, lambda: ["[UNK]", 0], lambda: nested(200),
    lambda: nested(3000), lambda: -1, lambda: 2**31, lambda: 2**32, lambda: 10**30, lambda: 1e30,
    lambda: 100_000, lambda: "mean", lambda: {"content": "\udfff"},
)  # fmt: skip


def nested(depth: int) -> Any:
    """A list in a list in a list ..."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def nodes_of(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of each value in a JSON value."""
    nodes: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        at = todo.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        nodes += [(at, key) for key in keys]
        todo += [at[key] for key in keys]
    return nodes


def damaged_value(rng: random.Random, value: Any) -> Any:
    """A JSON value with a few of its parts replaced, removed, doubled or renamed."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        nodes = nodes_of(value)
        if not nodes:
            return rng.choice(VALUES)()
        # The outer parts are few and say most, so they come as often as the rest.
        at, key = rng.choice(nodes[:40] if rng.random() < 0.5 else nodes)
        act = rng.random()
        if act < 0.6:
            at[key] = rng.choice(VALUES)()
        elif act < 0.75:
            del at[key]
        elif act < 0.9 or isinstance(at, list):
            other, source = rng.choice(nodes)
            if source in other if isinstance(other, dict) else source < len(other):
                at[key] = json.loads(json.dumps(other[source]))
        else:
            name = rng.choice(VALUES)()
            at[name if isinstance(name, str) else "x"] = at.pop(key)
    return value


def damaged_json(rng: random.Random, raw: bytes) -> bytes:
    """A JSON text with damage to its values, its numbers or its bytes."""
    act = rng.random()
    if act < 0.6:
        try:
            return json.dumps(damaged_value(rng, json.loads(raw))).encode()
        except (RecursionError, ValueError):  # what is nested too deep to be written
            return b"[" * 100_000
    if act < 0.75 and (numbers := list(re.finditer(rb"-?\d[\d.eE+-]*", raw))):
        number = rng.choice(numbers)
        return raw[: number.start()] + rng.choice(NUMBERS).encode() + raw[number.end() :]
    if act < 0.78:
        unit = rng.choice((b"[],", b"{},", b'{"a":0},', b"0,", b'{"":{"":0}},', b'["a",0],'))
        flood = b"[" + unit * rng.choice((20_000, 60_000, 60_000, 400_000, 3_000_000)) + b"0]"
        at = raw.find(b":", rng.randrange(len(raw) or 1)) + 1
        end = re.compile(rb"[,}\n]").search(raw, at)
        return raw[:at] + flood + raw[end.start() if end else len(raw) :]
    return damaged_bytes(rng, raw)


def damaged_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Bits turned, spans cut, doubled or moved, the end cut off or more added."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        size = len(data)
        at = rng.randrange(min(size, 2000) if rng.random() < 0.5 else size) if size else 0
        span = rng.choice((1, 2, 8, 100, 5000))
        act = rng.randrange(6)
        if act <= 1 and size:
            data[at] ^= 1 << rng.randrange(8)
        elif act == 2 and size:
            data[at] = rng.choice(b'\x00\xff{}[]",:0-9e')
        elif act == 3:
            del data[at : at + span]
        elif act == 4:
            data[at:at] = data[at : at + span]
        elif rng.random() < 0.5:
            del data[at:]
        else:
            data += rng.randbytes(span)
    return bytes(data)


# -- safetensors ----------------------------------------------------------------------------------


def packed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def sound_file(rng: random.Random) -> tuple[Header, bytes]:
    """A header that describes its data."""
    header: Header = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    at = 0
    for i in range(rng.choice((0, 1, 3, 8))):
        dtype = rng.choice(tuple(DTYPES))
        shape = [rng.choice((0, 1, 2, 3, 7)) for _ in range(rng.randrange(4))]
        end = at + int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype]
        header[f"layer.{i}.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header, rng.randbytes(at)


def broken_safetensors(rng: random.Random, raw: bytes) -> bytes:
    """A safetensors file with damage to its length, its header or its bytes."""
    size = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + size], raw[8 + size :]
    act = rng.random()
    if act < 0.6:
        return packed(damaged_json(rng, header), data)
    if act < 0.7:
        return packed(header, data, rng.choice((0, 1, size - 1, size + 1, 10**8, 2**63, 2**64 - 1)))
    if act < 0.705:  # many entries, for which a file is as large as one with holes would be
        entry = '"%x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        many = ",".join(entry % i for i in range(rng.choice((20_000, 50_001, 150_000))))
        return packed(f"{{{many}}}".encode(), bytes(8 * len(many)))
    if act < 0.75:  # a name twice
        return packed(header.replace(b"}}", b"}," + header[1:], 1), data)
    return damaged_bytes(rng, raw)


# -- folders --------------------------------------------------------------------------------------


def tensors_of() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a BERT of one layer."""
    layer = "encoder.layer.0"
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (ROWS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
    }
    for name in ("embeddings", f"{layer}.attention.output", f"{layer}.output"):
        shapes |= {f"{name}.LayerNorm.{part}": (WIDTH,) for part in ("weight", "bias")}
    sides = {f"{layer}.attention.self.{n}": (WIDTH, WIDTH) for n in ("query", "key", "value")}
    sides[f"{layer}.attention.output.dense"] = (WIDTH, WIDTH)
    sides[f"{layer}.intermediate.dense"] = (WIDE, WIDTH)
    sides[f"{layer}.output.dense"] = (WIDTH, WIDE)
    for name, shape in sides.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def weights_file(names: list[str]) -> bytes:
    """Some tensors of it, as a file."""
    shapes, header, parts, at = tensors_of(), {}, [], 0
    rng = np.random.default_rng(len(names))
    for name in names:
        data = rng.normal(scale=0.3, size=shapes[name]).astype("<f4").tobytes()
        offsets = [at, at + len(data)]
        header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": offsets}
        parts.append(data)
        at += len(data)
    return packed(json.dumps(header).encode(), b"".join(parts))


def sound_folder(shards: bool) -> dict[str, bytes]:
    """The files of a small model."""
    names = list(tensors_of())
    files = {
        str(f.relative_to(DATA)): f.read_bytes()
        for f in DATA.rglob("*.json")
        if f.name != "texts.json"
    }
    config = json.loads(files["config.json"])
    config |= {
        "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "intermediate_size": WIDE, "vocab_size": ROWS, "max_position_embeddings": POSITIONS,
    }  # fmt: skip
    files["config.json"] = json.dumps(config).encode()
    if not shards:
        return files | {"model.safetensors": weights_file(names)}
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    shard_of = {name: shard for shard, some in parts.items() for name in some}
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    return files | {shard: weights_file(some) for shard, some in parts.items()}


SOUND = {shards: sound_folder(shards) for shards in (False, True)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90868376\n"


def put(rng: random.Random, file: Path, raw: bytes) -> None:
    """Leave something else than a file's content in its place."""
    act = rng.randrange(7)
    if act == 0:
        return
    if act == 1:
        file.mkdir()
    elif act == 2:
        os.mkfifo(file)
    elif act == 3:
        file.symlink_to("/etc/passwd")
    elif act == 4:
        file.symlink_to(file)
    elif act == 5:
        file.write_bytes(POINTER)
    else:
        file.write_bytes(raw[: rng.randrange(3)])


def write_folder(rng: random.Random, folder: Path) -> bool:
    """A model folder, most of the time broken; whether its weights are sound."""
    files = dict(SOUND[rng.random() < 0.4])
    chosen = rng.sample(sorted(files), rng.choice((0, 1, 1, 1, 1, 1, 2, 3)))
    for name, raw in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name not in chosen:
            file.write_bytes(raw)
        elif rng.random() < 0.1:
            put(rng, file, raw)
        elif name.endswith(".safetensors"):
            file.write_bytes(broken_safetensors(rng, raw))
        else:
            file.write_bytes(damaged_json(rng, raw))
    return not any("safetensors" in name for name in chosen)
