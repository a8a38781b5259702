"""Files of vectors: .npy, .parquet and .arrow, written row after row, so that a run can go on.

Rows go to `F.part`, which is a .npy file whose header is written last, and `F.part.note` says of
what run they are, and how many bytes. A process that ends leaves both; the next run with the same
description goes on behind the rows of the note. What is finished gets its name in one step.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, Self

import numpy as np
from msgspec import Struct

from centella.errors import MissingExtraError, ShapeError, WeightsError
from centella.host.files import Growing, replaced
from centella.weights.model_files import kind_of, show

Array = np.ndarray[Any, Any]
SUFFIXES = (".npy", ".parquet", ".arrow")
VECTORS, TEXTS, LINES, MODEL = "embedding", "text", "line", "centella.model"
CUT = "cut"  # in the note
HEADER = 128  # bytes of a .npy header, with room for any number of rows
GROUP = 1 << 16  # rows that a .parquet or .arrow file has together


class Stored(Struct, frozen=True):
    """The vectors of a file.

    Attributes:
        vectors: [n, dim] of floats, read: a file that is mapped and cut short kills the process.
        texts: one a row, where the file has them; of a missing one "".
        lines: of each row the line that its text is from, where the file says so.
        model: what made them, where the file says so.
    """

    vectors: Array
    texts: Sequence[str] | None = None
    model: str | None = None
    lines: Sequence[int] | None = None


def open_vectors(path: str | PathLike[str]) -> Stored:
    """The vectors of a .npy, .parquet or .arrow file.

    Raises:
        WeightsError: another kind of file, a folder, FIFO, socket or device, or no vectors in it.
        MissingExtraError: pyarrow is not installed; OSError: the file cannot be read.
    """
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise WeightsError(f"{file}: expected a file of {', '.join(SUFFIXES)}")
    if (got := kind_of(file.stat().st_mode)) != "a file":
        raise WeightsError(f"{file}: expected a file of vectors, got {got}")
    try:
        with file.open("rb") as stream:
            stored = _npy(stream) if file.suffix == ".npy" else _arrow(stream, file.suffix)
    except (ValueError, EOFError, KeyError, MemoryError) as error:  # Arrow's own are ValueErrors
        raise WeightsError(f"{file}: expected vectors in {file.suffix}: {error}") from error
    if stored.vectors.ndim != 2 or stored.vectors.dtype.kind != "f":
        raise WeightsError(
            f"{file}: expected vectors [n, dim] of floats, got {list(stored.vectors.shape)} of "
            f"{stored.vectors.dtype}"
        )
    return stored


def _npy(file: BinaryIO) -> Stored:
    array = np.lib.format.read_array(file, allow_pickle=False)
    return Stored(array.astype(array.dtype.newbyteorder("="), copy=False))


def _arrow(file: BinaryIO, suffix: str) -> Stored:
    arrow = _pyarrow()
    if suffix == ".parquet":
        table = arrow.parquet.read_table(file)
    else:
        table = arrow.ipc.open_file(file).read_all()
    if VECTORS not in table.column_names:
        names = ", ".join(table.column_names) or "none"
        raise ValueError(f"expected a column {VECTORS}, got {names}")
    column = table.column(VECTORS)
    flat = _numbers(column.combine_chunks())
    texts = table.column(TEXTS).to_pylist() if TEXTS in table.column_names else None
    if texts is not None and not all(isinstance(text, str | None) for text in texts):
        raise ValueError(f"expected texts in {TEXTS}, got {table.column(TEXTS).type}")
    texts = None if texts is None else [text or "" for text in texts]
    lines = table.column(LINES).to_pylist() if LINES in table.column_names else None
    if lines is not None and not all(type(line) is int for line in lines):
        raise ValueError(f"expected numbers in {LINES}, got {table.column(LINES).type}")
    model = (table.schema.metadata or {}).get(MODEL.encode())
    dim = -1 if len(table) else getattr(column.type, "list_size", 0)
    return Stored(flat.reshape(len(table), dim), texts, model.decode() if model else None, lines)


def _numbers(column: Any) -> Array:
    """The numbers of a column of lists, which all have one length and no gaps."""
    if not hasattr(column, "value_lengths"):
        raise ValueError(f"expected lists in {VECTORS}, got {column.type}")
    lengths = column.value_lengths().unique().to_pylist()
    if len(lengths) > 1 or None in lengths:
        names = ", ".join("no row" if n is None else str(n) for n in lengths[:4])
        raise ValueError(f"expected rows of one length in {VECTORS}, got {names}")
    flat = column.flatten()
    if flat.null_count:
        raise ValueError(f"expected numbers in {VECTORS}, got {flat.null_count:,} missing ones")
    numbers: Array = flat.to_numpy(zero_copy_only=False)
    return numbers


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]  # it has pyarrow.ipc
    except ImportError as error:
        raise MissingExtraError("pyarrow", "arrow") from error
    return pyarrow


class VectorFile:
    """Rows of vectors on their way into a file; use as a context, then `finish`.

    Args:
        path: of `SUFFIXES`.
        dim: numbers of a row, f32.
        about: of what run the rows are: what is in the JSON file beside them.
        restart: begin anew, whatever there is of a run before.

    Attributes:
        rows: rows that are in the file, those of an interrupted run included.
        cut: of these, how many are of texts that were cut.

    Raises:
        WeightsError: there are rows of another run, or of which nothing can be known.
        MissingExtraError: pyarrow is not installed, which .parquet and .arrow need.
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: str | PathLike[str], dim: int, about: Mapping[str, Any], *,
        restart: bool = False,
    ) -> None:  # fmt: skip
        self.path: Path = Path(path)
        if self.path.suffix != ".npy":
            _pyarrow()
        self.dim: int = dim
        self._file = Growing(path)
        self._about = {**about, "dim": dim}
        self.rows: int = 0
        self.cut: int = 0
        if not restart and self._file.size > HEADER:
            cut = self._cut_before()
            self.rows = (self._file.size - HEADER) // (4 * dim)
            self.cut = cut if self.rows else 0
        self._file.open(HEADER + 4 * dim * self.rows if self.rows else 0, self._note())
        if not self.rows:
            self._file.append(bytes(HEADER), self._note())

    def _note(self) -> str:
        return json.dumps({**self._about, CUT: self.cut})

    def _cut_before(self) -> int:
        """Texts that an interrupted run has cut; refuses the rows of another run."""
        try:
            before = json.loads(self._file.note)
        except (ValueError, RecursionError):
            before = None
        cut = before.get(CUT, 0) if isinstance(before, dict) else None
        if not isinstance(before, dict) or type(cut) is not int:
            raise WeightsError(
                f"{self._file.part}.note: expected what run the rows are of, as JSON, got "
                f"{show(self._file.note)}; begin anew with --restart"
            )
        about = self._about
        names = [k for k in {**about, **before} if k != CUT]
        other = [k for k in names if before.get(k) != about.get(k)]
        if other:
            differs = "; ".join(f"{k} {before.get(k)!r}, now {about.get(k)!r}" for k in other)
            raise WeightsError(
                f"{self._file.part}: expected the rows of this run, got those of another one "
                f"({differs}); finish that one, or begin anew with --restart"
            )
        return cut

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()

    def append(self, vectors: Array, cut: int = 0) -> None:
        """Write rows [n, dim] behind those that are there.

        Args:
            cut: how many of them are of texts that were cut, for `cut` of a run that goes on.

        Raises:
            ShapeError: rows of another length. OSError: a full disk.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ShapeError(
                f"{self.path}: expected rows [n, {self.dim}], got {list(vectors.shape)}"
            )
        self.cut += cut
        self._file.append(np.ascontiguousarray(vectors, "<f4").tobytes(), self._note())
        self.rows += len(vectors)

    def finish(
        self, texts: Sequence[str] = (), model: str = "", lines: Sequence[int] | None = None
    ) -> None:
        """Give the file its name, once all rows are there.

        Args:
            texts: one a row; model: its name; lines: of each row the line that its text is from.
                These are for .parquet and .arrow.

        Raises:
            ShapeError: more texts than rows, or fewer. OSError: a full disk.
        """
        _expect_texts(self.path, self.rows, texts)
        header = io.BytesIO()
        shape: Any = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.dim)}
        np.lib.format.write_array_header_1_0(header, shape)
        assert header.tell() == HEADER, "a .npy header has room for any number of rows"
        self._file.begin(header.getvalue())
        if self.path.suffix == ".npy":
            self._file.rename()
        else:
            rows = np.load(self._file.part, mmap_mode="r")
            write_vectors(self.path, rows, texts, model, lines)
        self.discard()

    def discard(self) -> None:
        """Remove the rows of a run that is not finished."""
        self._file.discard()


def write_vectors(
    path: str | PathLike[str], vectors: Array, texts: Sequence[str] = (), model: str = "",
    lines: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Vectors [n, dim] f32 as a file, whole or not at all; the others as for `finish`.

    Raises:
        ShapeError: vectors of another rank, or more texts than rows, or fewer.
        MissingExtraError: pyarrow is not installed; OSError: the file cannot be written.
    """
    if vectors.ndim != 2:
        raise ShapeError(f"{path}: expected vectors [n, dim], got {list(vectors.shape)}")
    suffix = Path(path).suffix
    _expect_texts(path, len(vectors), texts)
    with replaced(path) as file:
        sink: Any = SimpleNamespace(write=file.write)  # of a file, NumPy's errors have no reason
        if suffix == ".npy":
            np.save(sink, vectors)
            return
        arrow = _pyarrow()
        rows = arrow.list_(arrow.float32(), vectors.shape[1])
        numbers = [] if lines is None else [(LINES, arrow.int64())]
        columns = [(TEXTS, arrow.string()), (VECTORS, rows), *numbers]
        schema = arrow.schema(columns, metadata={MODEL: model})
        with (arrow.parquet.ParquetWriter if suffix == ".parquet" else arrow.ipc.new_file)(
            file, schema
        ) as out:
            for start in range(0, len(vectors), GROUP):
                some = np.ascontiguousarray(vectors[start : start + GROUP])
                column = arrow.FixedSizeListArray.from_arrays(some.reshape(-1), some.shape[1])
                text = arrow.array(texts[start : start + GROUP], arrow.string())
                of = [] if lines is None else [arrow.array(lines[start : start + GROUP])]
                out.write_table(arrow.table([text, column.cast(rows), *of], schema=schema))


def _expect_texts(path: str | PathLike[str], rows: int, texts: Sequence[str]) -> None:
    if Path(path).suffix != ".npy" and len(texts) != rows:
        raise ShapeError(
            f"{path}: expected a text for each of the {rows:,} rows, got {len(texts):,}"
        )
