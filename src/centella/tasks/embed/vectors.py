"""Vectors on the host: in fewer bits, and how alike two are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from centella.dtypes import Array, host_numbers
from centella.errors import DTypeError, ShapeError
from centella.host.log import logger
from centella.tensors.arguments import one_of

DTYPES = {
    "f32": np.float32, "f16": np.float16, "int8": np.int8, "uint8": np.uint8, "binary": np.int8,
    "ubinary": np.uint8,
}  # fmt: skip
EMPTY, DENSE, SPARSE, MULTI = "empty", "dense", "sparse", "multi"  # kinds of outputs
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
    levels = np.clip(np.floor((vectors - least) / steps), 0, 255)
    return (levels - (128 if dtype == "int8" else 0)).astype(DTYPES[dtype])


def _ranges(vectors: Array, ranges: Any) -> tuple[Array, Array]:
    if ranges is not None:
        try:
            limits = np.asarray(ranges, np.float32)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"encode: ranges: expected numbers: {error}") from error
        if limits.shape != (2, vectors.shape[-1]):
            raise ShapeError(
                f"encode: expected ranges [2, {vectors.shape[-1]}], got {list(limits.shape)}"
            )
        return limits[0], limits[1]
    if len(vectors) < FEW:
        logger("embed").warning(
            "encode: the ranges of int8 are those of %d vectors; give ranges= to keep the steps of "
            "all calls alike", len(vectors),
        )  # fmt: skip
    if not len(vectors):
        return np.zeros(vectors.shape[-1], np.float32), np.ones(vectors.shape[-1], np.float32)
    return vectors.min(0), vectors.max(0)


def similarity(a: Any, b: Any, kind: str) -> Array:
    """How alike texts are: n and m of them to f32 [n, m]; distances are negative.

        dense    a [n, dim], b [m, dim]: cosine, dot, or a distance, as `kind` says
        sparse   lists of weights by token: the sum of the products of those that both have
        multi    lists of vectors [tokens, dim]: the mean of the best products of a's tokens

    An empty list is of the other's kind.

    Raises:
        ShapeError: outputs of two kinds, or vectors of unequal lengths; DTypeError: no numbers, or
            vectors in 8 bits or fewer.
    """
    first, second = _form(a), _form(b)
    if first == EMPTY or second == EMPTY:
        return np.zeros((_count(a), _count(b)), np.float32)
    if first != second:
        raise ShapeError(
            f"similarity: expected outputs of one kind, got {first} and {second}; those of one "
            f"text are sparse as a dict, multi as a list of one array"
        )
    if first != DENSE:
        alike = _sparse_similarity if first == SPARSE else _multi_similarity
        rows = [[alike(x, y) for y in _listed(b)] for x in _listed(a)]
        return np.array(rows, np.float32).reshape(len(rows), len(_listed(b)))
    x, y = (np.atleast_2d(_floats(v)) for v in (a, b))
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


def refuse_texts(op: str, vectors: Any) -> None:
    """Refuse texts where vectors are expected.

    Raises:
        DTypeError: says what makes vectors of texts.
    """
    several = isinstance(vectors, (list, tuple)) and bool(vectors)
    if isinstance(vectors[0] if several else vectors, str):
        raise DTypeError(
            f"{op}: expected numbers, an array or a nested list of them, got "
            f"{type(vectors).__name__}{' of str' if several else ''}; model.encode(texts) gives "
            f"vectors of texts"
        )


def _floats(vectors: Any) -> Array:
    refuse_texts("similarity", vectors)
    numbers = host_numbers("similarity", vectors)
    if numbers.dtype.itemsize == 1:
        raise DTypeError(
            f"similarity: expected floats, got {numbers.dtype}, whose numbers are steps or bits: "
            f'compare f32 or f16 vectors, or count the bits in which dtype="ubinary" differs: '
            f"np.bitwise_count(a[:, None] ^ b).sum(-1)"
        )
    return numbers.astype(np.float32)


def _listed(outputs: Any) -> Sequence[Any]:
    """Of texts, also where they are of one."""
    return [outputs] if isinstance(outputs, Mapping) else outputs


def _form(outputs: Any) -> str:
    """The kind of outputs."""
    listed = _listed(outputs)
    if isinstance(listed, np.ndarray):
        return EMPTY if listed.shape == (0,) else DENSE
    if isinstance(listed, (list, tuple)):
        if not listed:
            return EMPTY
        if isinstance(listed[0], Mapping):
            return SPARSE
        nested = isinstance(listed[0], (list, tuple))
        if np.ndim(host_numbers("similarity", listed[0]) if nested else listed[0]) == 2:
            return MULTI
    return DENSE


def _count(outputs: Any) -> int:
    """Of how many texts outputs are."""
    form = _form(outputs)
    if form == EMPTY:
        return 0
    return len(np.atleast_2d(outputs) if form == DENSE else _listed(outputs))


def _sparse_similarity(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    return sum(weight * b.get(token, 0.0) for token, weight in a.items())


def _multi_similarity(a: Array, b: Array) -> float:
    a, b = (host_numbers("similarity", each) for each in (a, b))
    if a.shape[1:] != b.shape[1:]:
        raise ShapeError(
            f"similarity: expected [tokens, dim] of one dim, got {list(a.shape)}, {list(b.shape)}"
        )
    return float((a @ b.T).max(1).mean()) if len(a) and len(b) else 0.0
