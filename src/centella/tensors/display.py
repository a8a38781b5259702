"""How tensors and modules look when they are printed: values by their ends, modules as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from textwrap import indent

import numpy as np

from centella.dtypes import Array, DType, widen
from centella.record.values import Value
from centella.runtime.device import Device
from centella.specs import Spec

# As `html.escape` does, whose module loads a table of two thousand names.
_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})


def values_of(array: Array, dtype: DType) -> str:
    """The elements of an array of stored numbers; above NumPy's threshold those at its ends.

    Returns:
        "" where even the ends are too many: of a long list of short dimensions.
    """
    options = np.get_printoptions()
    most, edge = options["threshold"], options["edgeitems"]
    large = array.size > most
    if large:
        array = _ends(array, edge)
        if array.size > most:
            return ""
    shown = widen(array, dtype)
    return np.array2string(shown, separator=", ", prefix=" ", threshold=0 if large else most)


def _ends(array: Array, edge: int) -> Array:
    """The elements that a summary shows, and one between those of each long dimension."""
    for axis, extent in enumerate(array.shape):
        if extent > 2 * edge:
            kept = [*range(edge + 1), *range(extent - edge, extent)]
            array = array.take(kept, axis)
    return array


def shown(name: str, value: Value, spec: Spec, offset: int) -> tuple[str, str]:
    """What a tensor is, and its values where they lie in the host's memory, else ""."""
    device: Device = value.device
    array = device.glance(value, spec, offset)
    values = "" if array is None else values_of(array, spec.dtype)
    return f"{name} {list(spec.shape)} {spec.dtype.name} on {device.name}, {value.state}", values


def as_text(heading: str, values: str) -> str:
    """A heading and values, from a line of their own on where they have several."""
    lead = ":\n " if "\n" in values else ": " if values else ""
    return f"<{heading}{lead}{values}>"


def as_html(heading: str, values: str) -> str:
    """A heading and values for a notebook, escaped."""
    body = f"<pre>{values.translate(_ESCAPED)}</pre>" if values else ""
    return f"<div><code>{heading.translate(_ESCAPED)}</code>{body}</div>"


def as_tree(name: str, own: list[str], children: list[tuple[str, str]]) -> str:
    """A module as a tree: what it has itself, then its children, equal neighbours as one.

    Args:
        children: name and text of each; neighbours "layers.0" to "layers.5" with one text become
            "layers.0-5".
    """
    if not children:
        return f"{name}({', '.join(own)})"
    lines = list(own)
    for first, last, count, text in _runs(children):
        many = f"-{last.rpartition('.')[2]}" if count > 1 else ""
        times = f"{count} x " if count > 1 else ""
        lines.append(f"({first}{many}): {times}{text}")
    return f"{name}(\n{indent(chr(10).join(lines), '  ')}\n)"


def _runs(children: list[tuple[str, str]]) -> Iterator[tuple[str, str, int, str]]:
    """First and last name, number and text of neighbours with one text in one list."""
    for (_, text), run in groupby(children, lambda c: (_list_of(c[0]), c[1])):
        names = [name for name, _ in run]
        yield names[0], names[-1], len(names), text


def _list_of(name: str) -> str:
    """What holds an element, by its name; the name itself of what is no element of a list."""
    home, _, last = name.rpartition(".")
    return home if home and last.isdigit() else name
