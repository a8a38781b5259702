"""What kernels over rows share: a thread takes a chunk or a word of a row at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from centella import lang
from centella.dtypes import u32
from centella.specs import Spec

Values = list[Any]


def chunked(*specs: Spec) -> bool:
    """True when all of these can be read and written in 16-byte chunks of one item size."""
    return all(s.aligned and s.unit_rows for s in specs) and (
        len({s.dtype.itemsize for s in specs}) == 1
    )


def workgroup_for(columns: int, width: int) -> int:
    """Threads a group for rows of this length: enough, and not many more."""
    needed = -(-columns // width)
    return 64 if needed <= 64 else 128 if needed <= 256 else 256


def width_of(y: Any, chunk: bool) -> int:
    """Elements of y (an argument or a Spec) that a thread handles at a time."""
    return int(y.dtype.per_chunk if chunk else y.dtype.per_word)


def place_of(width: int) -> tuple[Any, Any]:
    """Row and first column of this thread's item, where a row has `items` of `width` elements."""
    thread, items = lang.global_id(), lang.parameter("items", u32)
    row = thread // items
    return row, (thread - row * items) * width


def walk(columns: Any, width: int) -> Iterator[Any]:
    """The columns at which this thread's items start."""
    items = (columns + (width - 1)) // width
    for item in lang.range(lang.local_id(), items, lang.workgroup_size()):
        yield item * width


def load(x: Any, row: Any, column: Any, columns: Any, width: int, chunk: bool) -> Values:
    """`width` elements from a column; those past the row's end are some element of it."""
    if chunk:
        return x.load(row, column)  # type: ignore[no-any-return]  # traced values
    if width == 1:
        return [x[row, column]]
    return [x[row, lang.minimum(column + j, columns - 1)] for j in range(width)]


def masked(values: Values, column: Any, columns: Any, neutral: float | int) -> Values:
    """Values with those past the row's end replaced."""
    if len(values) == 1:
        return values
    return [lang.select(column + j < columns, v, neutral) for j, v in enumerate(values)]


def fold(values: Values, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine a list as a balanced tree."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]
