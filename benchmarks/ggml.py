"""Whisper of random weights as whisper.cpp reads it: one file, header, filters, words, tensors.

Layout: whisper.cpp, `models/convert-pt-to-ggml.py` and `whisper_model_load`. Weights of products
are f16, all others f32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC, MULTILINGUAL, WORDS = 0x67676D6C, 51_865, 50_257
PLACES, POSITIONS, BINS = 1500, 448, 201
LOOKED_UP = (" ", " -", " '")  # words that decoding asks the vocabulary for


def write_ggml(path: Path, mels: int, width: int, heads: int, encoder: int, decoder: int) -> None:
    """A model whose encoder and decoder have so many layers."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        sizes = (MULTILINGUAL, PLACES, width, heads, encoder, POSITIONS, width, heads, decoder)
        file.write(struct.pack("<12i", MAGIC, *sizes, mels, 1))
        file.write(struct.pack("<2i", mels, BINS))
        file.write(np.abs(rng.standard_normal((mels, BINS))).astype("<f4") * np.float32(0.01))
        file.write(struct.pack("<i", WORDS))
        for number in range(WORDS):
            word = (LOOKED_UP[number] if number < len(LOOKED_UP) else f" w{number}").encode()
            file.write(struct.pack("<i", len(word)) + word)
        for name, shape in _tensors(mels, width, encoder, decoder):
            _put(file, name, shape, rng)


def _put(file: BinaryIO, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """One tensor; rows of a weight are as long as what they are multiplied with."""
    wide = name.endswith("weight") and len(shape) > 1
    values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    if name.endswith(("ln.weight", "ln_post.weight")):
        values += 1
    called = name.encode()
    file.write(struct.pack("<3i", len(shape), len(called), int(wide)))
    file.write(struct.pack(f"<{len(shape)}i", *reversed(shape)) + called)
    file.write(values.astype("<f2" if wide else "<f4"))


def _tensors(
    mels: int, width: int, encoder: int, decoder: int
) -> Iterator[tuple[str, tuple[int, ...]]]:  # fmt: skip
    """Names and shapes, the last dimension innermost."""
    yield "encoder.positional_embedding", (PLACES, width)
    for name, bands in (("encoder.conv1", mels), ("encoder.conv2", width)):
        yield f"{name}.weight", (width, bands, 3)
        yield f"{name}.bias", (width, 1)
    for end in ("weight", "bias"):
        yield f"encoder.ln_post.{end}", (width,)
    for layer in range(encoder):
        yield from _block(f"encoder.blocks.{layer}", width, ("attn",))
    yield "decoder.positional_embedding", (POSITIONS, width)
    yield "decoder.token_embedding.weight", (MULTILINGUAL, width)
    for end in ("weight", "bias"):
        yield f"decoder.ln.{end}", (width,)
    for layer in range(decoder):
        yield from _block(f"decoder.blocks.{layer}", width, ("attn", "cross_attn"))


def _block(name: str, width: int, kinds: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind in (*(f"{kind}_ln" for kind in kinds), "mlp_ln"):
        for end in ("weight", "bias"):
            yield f"{name}.{kind}.{end}", (width,)
    for kind in kinds:
        for part in ("query", "key", "value", "out"):
            yield f"{name}.{kind}.{part}.weight", (width, width)
            if part != "key":
                yield f"{name}.{kind}.{part}.bias", (width,)
    for part, shape in (("0", (4 * width, width)), ("2", (width, 4 * width))):
        yield f"{name}.mlp.{part}.weight", shape
        yield f"{name}.mlp.{part}.bias", shape[:1]
