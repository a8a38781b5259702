"""`Index`: vectors that stay on a device, and the rows that are nearest to a query, exactly.

Scores of all rows are one product, of which `topk` chooses. So a search reads the vectors once, and
k scores and rows come back. 16-bit vectors are multiplied by queries of their dtype, which tensor
cores do; the queries are scaled by a power of 2 first, so that none is beyond the dtype's range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Never

import numpy as np
from msgspec import Struct

from centella.dtypes import (
    DType,
    dtype_of,
    f32,
    from_host_array,
    from_numpy,
    host_numbers,
    narrow,
    widen,
)
from centella.errors import ContractError, DTypeError, ShapeError
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.specs import make_spec
from centella.tasks.embed.vectors import refuse_texts
from centella.tensors import functional as fn
from centella.tensors.arguments import refuse_names, whole
from centella.tensors.creation import asarray
from centella.tensors.hints import OF_INDEX, Hinted, matches_getattr
from centella.tensors.jit import Jitted, method_of
from centella.tensors.tensor import Tensor
from centella.weights.vectors import open_vectors

if TYPE_CHECKING:
    from centella.runtime.pending import Pending

Array = np.ndarray[Any, Any]
PART = 1 << 20  # rows of one tensor, at most
LARGEST = 1 << 30  # bytes of one, at most: what the host converts and uploads at a time
QUERIES = 64  # that are scored at once: 268 MB of scores of a part
CAPTURES = 16


class Matches(Struct, frozen=True):
    """The rows nearest to each query, the best first; for equal scores the lower row first.

    Attributes:
        scores: f32 [queries, k].
        rows: i64 [queries, k], of the vectors as they were given.
    """

    scores: Array
    rows: Array

    def __iter__(self) -> Never:
        """Refuse FAISS's `scores, rows = index.search(..)`.

        Raises:
            TypeError: always; with what to write.
        """
        raise TypeError("Matches is no pair: write matches.scores and matches.rows")

    if not TYPE_CHECKING:  # which is to say itself what it has not
        __getattr__ = matches_getattr


class Index(Hinted):
    """Vectors on a device, searched exactly; threads may share one.

    Args:
        vectors: [n, dim] of floats: a NumPy array (also one that is mapped from a file), which is
            uploaded in pieces, a Tensor, or what NumPy makes an array of, such as nested lists.
        texts: what each row stands for; kept for the caller.
        device: default: that of the Tensor, else the default device.
        dtype: of the vectors on the device; None: as given, on the CPU f32. "f16" takes half the
            memory and time, for a score that is rounded to some 0.0005 of itself: the queries are
            rounded, too.

    Raises:
        ShapeError: vectors of another rank, or none; as many texts as rows are expected.
        DTypeError: vectors or a dtype that are no floats; float64 without `dtype=`; texts that have
            no length.
        ContractError: a number that is not finite, or not within the range of the dtype (65,504 for
            f16); names its row. Of a Tensor, 4 bytes a row are read back to check it.
    """

    _hints: ClassVar[dict[str, str]] = OF_INDEX
    _instead: ClassVar[str] = "ct.Index(vectors) makes one where it is needed"

    def __init__(
        self, vectors: Array | Tensor | Sequence[Sequence[float]], *,
        texts: Sequence[str] | None = None, device: str | Device | None = None,
        dtype: str | DType | None = None, **other: Never,
    ) -> None:  # fmt: skip
        refuse_names("Index", other)
        if not isinstance(vectors, (Tensor, np.ndarray)):
            refuse_texts("Index", vectors)
            vectors = from_host_array("Index", vectors, None)[0]
        if len(vectors.shape) != 2 or not all(vectors.shape):
            raise ShapeError(f"Index: expected vectors [n, dim], got {list(vectors.shape)}")
        if texts is not None and (isinstance(texts, str) or not isinstance(texts, Sized)):
            raise DTypeError(f"Index: expected texts in a list, got {type(texts).__name__}")
        if texts is not None and len(texts) != vectors.shape[0]:
            raise ShapeError(
                f"Index: expected a text for each of the {vectors.shape[0]:,} rows, got "
                f"{len(texts):,}"
            )
        where_to = vectors.device if isinstance(vectors, Tensor) and device is None else device
        self.device: Device = open_device(where_to)
        if isinstance(vectors, Tensor):
            own = vectors.dtype
        elif dtype is not None and vectors.dtype == np.float64:
            own = f32
        else:
            own = from_numpy(vectors.dtype, "Index")
        kind = dtype_of(dtype) if dtype is not None else own
        if not own.is_float or not kind.is_float:
            raise DTypeError(f"Index: expected floats, got {own.name} as {kind.name}")
        if dtype is None and (self.device.name == "cpu" or kind.itemsize > f32.itemsize):
            kind = f32
        self.texts: Sequence[str] | None = texts
        self.dtype: DType = kind
        self.shape: tuple[int, int] = (vectors.shape[0], vectors.shape[1])
        self._parts: list[Tensor] = [
            self._uploaded(vectors, some) for some in _slices(len(self), self._most())
        ]
        self._best: Jitted[..., tuple[Tensor, Tensor]] = Jitted(
            method_of(self._nearest), self.device, CAPTURES
        )

    def _most(self) -> int:
        """Rows of a part: neither it nor the scores of its rows are larger than a buffer."""
        row = make_spec((2, self.shape[1]), self.dtype, 16).strides[0] * self.dtype.itemsize
        most = self.device.caps.max_buffer
        rows = min(PART, LARGEST // row, most // row, most // (f32.itemsize * QUERIES))
        return max(1, rows)

    def _uploaded(self, vectors: Array | Tensor, rows: slice) -> Tensor:
        part = vectors[rows]
        if not isinstance(part, Tensor):
            self._check(np.maximum(part.max(axis=1), -part.min(axis=1)), rows.start)
            part = asarray(part, self.dtype, device=self.device)
        else:
            largest = fn.maximum(fn.max(part, 1), -fn.min(part, 1)).astype(f32)
            self._check(largest.numpy(), rows.start)
        return part.to(self.device).astype(self.dtype).contiguous()

    def _check(self, largest: Array, start: int) -> None:
        """Refuse rows, of which the first is `start`, by the largest absolute value of each."""
        with np.errstate(over="ignore"):
            kept = np.isfinite(widen(narrow(largest.astype(np.float32), self.dtype), self.dtype))
        if not kept.all():
            at = int(np.argmin(kept))
            raise ContractError(
                f"Index: expected finite numbers within the range of {self.dtype.name}, got "
                f"{largest[at]:.6g} in row {start + at:,}"
            )

    @classmethod
    def open(
        cls, path: str | PathLike[str], *, device: str | Device | None = None,
        dtype: str | DType | None = None,
    ) -> Index:  # fmt: skip
        """The vectors of a .npy, .parquet or .arrow file; the latter have their texts in them.

        Raises:
            WeightsError: the file has no vectors; MissingExtraError: pyarrow is not installed.
            OSError: it cannot be read.
        """
        stored = open_vectors(path)
        return cls(stored.vectors, texts=stored.texts, device=device, dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        rows, dim = self.shape
        return f"<Index of {rows:,} x {dim} {self.dtype.name} on {self.device.name}>"

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in self._parts)

    def search(
        self, queries: Array | Tensor | Sequence[float] | Sequence[Sequence[float]], k: int = 10,
        **other: Never,
    ) -> Matches:  # fmt: skip
        """The k rows with the largest dot products with each query.

        Of vectors of length 1, which most models give, that is the cosine of the angle.

        Args:
            queries: [queries, dim] or [dim], of floats: an array, a Tensor or nested lists.
            k: number of rows; all rows if there are fewer.

        Raises:
            ShapeError: queries of another size, rows of unequal length, k below 1.
            DTypeError: queries that are no floats.
            ContractError: a number in them that is not finite, or not in f32; names its query.
        """
        refuse_names("search", other)
        k = min(whole("search", "k", k, 1), len(self))
        rows = self._rows(queries.numpy() if isinstance(queries, Tensor) else queries)
        _, exponents = np.frexp(np.abs(rows).max(1, keepdims=True))
        rows = np.ldexp(rows, -exponents)
        scores = np.empty((len(rows), k), np.float32)
        matched = np.empty((len(rows), k), np.int64)
        running = [(some, self._submit(rows[some], k)) for some in _slices(len(rows), QUERIES)]
        for some, pending in running:
            best, at = pending.result()
            scores[some], matched[some] = (x[: some.stop - some.start] for x in (best, at))
        with np.errstate(over="ignore"):  # of numbers whose products f32 does not hold
            return Matches(np.ldexp(scores, exponents), matched)

    def _rows(self, queries: Any) -> Array:
        """Queries as they are asked for, f32 [queries, dim]."""
        refuse_texts("search", queries)
        array = host_numbers("search", queries)
        if array.dtype.kind != "f":
            raise DTypeError(f"search: expected queries of floats, got {array.dtype}")
        rows = array[None] if array.ndim == 1 else array
        if rows.ndim != 2 or rows.shape[1] != self.shape[1]:
            raise ShapeError(
                f"search: expected queries [queries, {self.shape[1]}] or [{self.shape[1]}], got "
                f"{list(array.shape)}"
            )
        asked = narrow(rows, f32)
        odd = np.argwhere(~np.isfinite(asked))
        if len(odd):
            row, column = odd[0]
            raise ContractError(
                f"search: expected finite numbers within the range of f32 in the queries, got "
                f"{rows[row, column]:.6g} in query {row:,}"
            )
        return asked

    def _submit(self, queries: Array, k: int) -> Pending[Any]:
        """Queries are filled up to a power of two, so that few sizes are captured."""
        padded = np.zeros((1 << (len(queries) - 1).bit_length(), self.shape[1]), np.float32)
        padded[: len(queries)] = queries
        return self._best.fetch(padded, k)

    def _nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores f32 and rows i32 [queries, k] of queries f32 [queries, dim]."""
        scores, rows, start = [], [], 0
        asked = queries.astype(self.dtype)
        for part in self._parts:
            best, at = fn.topk(fn.linear(asked, part, dtype=f32), min(k, part.shape[0]))
            scores.append(best)
            rows.append(at + start if start else at)
            start += part.shape[0]
        if len(rows) == 1:
            return scores[0], rows[0]
        best, at = fn.topk(fn.concat(scores, 1), k)
        return best, fn.take_along_axis(fn.concat(rows, 1), at)


def _slices(n: int, step: int) -> Iterator[slice]:
    for at in range(0, n, step):
        yield slice(at, min(at + step, n))
