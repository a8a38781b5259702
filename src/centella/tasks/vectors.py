"""Vectors on the host: in fewer bits, and how alike two are."""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.dtypes import Array
from centella.errors import DTypeError, ShapeError
from centella.host.log import logger
from centella.tensors.arguments import one_of

DTYPES = {
    "f32": np.float32, "f16": np.float16, "int8": np.int8, "uint8": np.uint8, "binary": np.int8,
    "ubinary": np.uint8,
}  # fmt: skip
FEW = 100  # vectors, whose own ranges say little of others


def packed(vectors: Array, dtype: str, ranges: Any = None) -> Array:
    """Vectors f32 [n, dim] in fewer bits.

        int8, uint8      255 steps from the least to the largest value of each dimension
        binary, ubinary  a bit for each value over 0, eight a byte, the first the highest; those of
                         binary less 128

    Args:
        ranges: [2, dim], the least and the largest value of each dimension, for int8 and uint8;
            default: of these vectors, so that vectors of another call have other steps.

    Raises:
        ShapeError: another dtype, or ranges of another shape; DTypeError: ranges of no numbers.

    Source: `quantize_embeddings` of sentence-transformers.
    """
    one_of("encode", "dtype", dtype, DTYPES)
    if dtype in ("f32", "f16"):
        return vectors.astype(DTYPES[dtype], copy=False)
    if dtype in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return (bits.astype(np.int16) - 128).astype(np.int8) if dtype == "binary" else bits
    least, most = _ranges(vectors, ranges)
    steps = np.where(most > least, (most - least) / np.float32(255), np.float32(1))
    levels = np.clip((vectors - least) / steps, 0, 255) - (128 if dtype == "int8" else 0)
    return levels.astype(DTYPES[dtype])


def _ranges(vectors: Array, ranges: Any) -> tuple[Array, Array]:
    if ranges is not None:
        try:
            given = np.asarray(ranges, np.float32)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"encode: ranges: expected numbers: {error}") from error
        if given.shape != (2, vectors.shape[-1]):
            raise ShapeError(
                f"encode: expected ranges [2, {vectors.shape[-1]}], got {list(given.shape)}"
            )
        return given[0], given[1]
    if len(vectors) < FEW:
        logger("embed").warning(
            "encode: the ranges of int8 are those of %d vectors; give ranges= to keep the steps of "
            "all calls alike", len(vectors),
        )  # fmt: skip
    if not len(vectors):
        return np.zeros(vectors.shape[-1], np.float32), np.ones(vectors.shape[-1], np.float32)
    return vectors.min(0), vectors.max(0)


def similarity(a: Any, b: Any, kind: str) -> Array:
    """How alike vectors are: a [n, dim], b [m, dim] to [n, m]; distances are negative.

    Raises:
        ShapeError: vectors of unequal lengths.
    """
    x, y = (np.atleast_2d(np.asarray(v, np.float32)) for v in (a, b))
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ShapeError(
            f"similarity: expected [n, dim] and [m, dim], got {list(x.shape)}, {list(y.shape)}"
        )
    if kind == "cosine":
        x, y = (v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (x, y))
    if kind in ("cosine", "dot"):
        product: Array = x @ y.T
        return product
    order = 1 if kind == "manhattan" else 2
    rows = [-np.linalg.norm(row - y, ord=order, axis=1) for row in x]
    return np.array(rows, np.float32).reshape(len(x), len(y))
