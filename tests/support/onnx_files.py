"""ONNX files written by hand: a stand-in for Silero's network, and others that are none.

A file is a few protobuf messages (onnx.proto): fields of numbers (key, varint) and of bytes (key,
length, bytes). The package `onnx` would write them, but is as large as the other test packages.

The stand-in computes what a test can tell exactly:

    ok      1 where `sr` is 16000, and the context is the end of the window before
    energy  e / (e + 1e-3), e the mean square of the window
    count   windows so far / 100000

and its output is `energy * ok` or `count * ok`. The first row of the state counts windows, the
other has the last samples of the last one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Dims = tuple[int | str, ...]

FLOAT, INT64 = 1, 7  # element types
_TYPES = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64}


def field(number: int, value: int | str | bytes) -> bytes:
    """A field of a message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # of a negative number: two's complement
    digits = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def node(op: str, inputs: str, output: str, **attributes: int) -> bytes:
    """An operation; names of its inputs between spaces, and whole numbers that it is told."""
    named = b"".join(field(1, name) for name in inputs.split())
    whole = [field(1, k) + field(3, v) + field(20, 2) for k, v in attributes.items()]
    return named + field(2, output) + field(4, op) + b"".join(field(5, a) for a in whole)


def tensor(name: str, values: Array) -> bytes:
    """An initial value."""
    dims = b"".join(field(1, size) for size in values.shape)
    return dims + field(2, _TYPES[values.dtype]) + field(8, name) + field(9, values.tobytes())


def value_info(name: str, dims: Dims, kind: int = FLOAT) -> bytes:
    """An input or output; an axis of any length has a name."""
    axes = b"".join(field(1, field(1 if isinstance(d, int) else 2, d)) for d in dims)
    return field(1, name) + field(2, field(1, field(1, kind) + field(2, axes)))


def model(
    nodes: list[bytes], inputs: list[bytes], outputs: list[bytes], constants: dict[str, Array]
) -> bytes:
    """A file."""
    parts = [field(1, n) for n in nodes] + [field(2, "stand-in")]
    parts += [field(5, tensor(name, values)) for name, values in constants.items()]
    parts += [field(11, i) for i in inputs] + [field(12, o) for o in outputs]
    return field(1, 8) + field(7, b"".join(parts)) + field(8, field(1, "") + field(2, 18))


def _constants(context: int, width: int) -> dict[str, Array]:
    bounds = {
        "zero": 0, "one": 1, "two": 2, "context": context, "end": context + 512,
        "tail": context + 512 - width, "after": width - context, "width": width,
    }  # fmt: skip
    return {
        **{name: np.array([at], np.int64) for name, at in bounds.items()},
        "rate": np.array(16000, np.int64), "step": np.ones(1, np.float32),
        "small": np.full(1, 1e-3, np.float32), "least": np.full(1, 1e-5, np.float32),
    }  # fmt: skip


def _common(state: str, output: str) -> list[bytes]:
    """Nodes of every version: rate, energy, count, the two rows of the next state."""
    return [
        node("Equal", "sr rate", "same_rate"),
        node("Cast", "same_rate", "rate_ok", to=FLOAT),
        node("Slice", "input context end one", "window"),
        node("Mul", "window window", "squares"),
        node("ReduceMean", "squares one", "e", keepdims=1),
        node("Add", "e small", "more"),
        node("Div", "e more", "energy"),
        node("Slice", f"{state} zero one zero", "row"),
        node("Add", "row step", "counted"),
        node("Slice", "counted zero one two", "counts"),
        node("Squeeze", "counts zero", "counts2"),
        node("Mul", "counts2 least", "count"),
        node("Mul", f"{output} rate_ok", "judged"),
        node("Slice", "input tail end one", "samples"),
        node("Unsqueeze", "samples zero", "last"),
    ]


def silero(output: str = "energy", version: int = 5) -> bytes:
    """The stand-in, with the interface of a version, 4 or 5."""
    batch: Dims = ("batch",)
    inputs = [value_info("input", (*batch, "samples")), value_info("sr", (), INT64)]
    outputs = [value_info("output", (*batch, 1))]
    states: tuple[str, ...]
    after: tuple[str, ...]
    if version == 4:
        states, after, width, context = ("h", "c"), ("hn", "cn"), 64, 0
        nodes = [
            *_common("h", output),
            node("Identity", "judged", "output"),
            node("Concat", "counted last", "hn", axis=0),
            node("Sub", "c step", "cn"),
        ]
    else:
        states, after, width, context = ("state",), ("stateN",), 128, 64
        nodes = [
            *_common("state", output),
            node("Slice", "state one two zero", "kept"),
            node("Slice", "kept after width two", "kept_end"),
            node("Squeeze", "kept_end zero", "expected"),
            node("Slice", "input zero context one", "given"),
            node("Sub", "expected given", "difference"),
            node("Abs", "difference", "size"),
            node("ReduceMax", "size one", "largest", keepdims=1),
            node("Less", "largest least", "equal"),
            node("Cast", "equal", "context_ok", to=FLOAT),
            node("Mul", "judged context_ok", "output"),
            node("Concat", "counted last", "stateN", axis=0),
        ]
    inputs += [value_info(name, (2, *batch, width)) for name in states]
    outputs += [value_info(name, (2, *batch, width)) for name in after]
    return model(nodes, inputs, outputs, _constants(context, width))


def written(path: Path, content: bytes) -> Path:
    """A file of these bytes."""
    path.write_bytes(content)
    return path
