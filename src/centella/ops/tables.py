"""Rows of a table, by ids, as steps of a chain: they only say where an operand is read.

`embedding` and `gather` along the first axis have two operands, which a chain gets from outside.
Both broadcast to the rows of the result: an id is one element a row, and the table is one row at
the place that the id says. So a kernel of a chain numbers its operands as ever, and moves the start
of the table before it reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from centella import lang
from centella.dtypes import DType, bool_, u32
from centella.op.axes import WHOLE, spread
from centella.op.op import Form
from centella.ops.elements import Number
from centella.specs import Caps, Spec


class Lookup(NamedTuple):
    """An op that reads rows of a table.

    Attributes:
        ids, table: which operand is which.
        wraps: whether a negative id counts from the end.
    """

    ids: int
    table: int
    wraps: bool


LOOKUPS: dict[str, Lookup] = {"embedding": Lookup(0, 1, False), "gather": Lookup(1, 0, True)}


def takes(form: Form[Any], caps: Caps) -> bool:
    """Whether a chain may have an op as a step: the rows of one tensor, which a launch may see.

    A row has several elements, so what a thread has of the result is of one row.
    """
    if form.op.name not in LOOKUPS or caps.on_host:
        return False
    table = form.inputs[LOOKUPS[form.op.name].table]
    return (
        not getattr(form.attrs, "format", "")
        and getattr(form.attrs, "axis", 0) == 0
        and len(table.shape) > 1
        and table.shape[-1] > 1
        and table.storage_bytes <= caps.safe_binding
        and caps.has_room(table)
    )


def seen(name: str, operands: Sequence[Spec]) -> tuple[Spec, ...]:
    """The operands of an op as they broadcast to its result: ids, and the table's first row."""
    lookup, both = LOOKUPS[name], list(operands)
    ids, table = operands[lookup.ids], operands[lookup.table]
    inner = len(table.shape) - 1
    both[lookup.ids] = Spec(
        ids.shape + (1,) * inner, ids.dtype, ids.strides + (0,) * inner, ids.aligned
    )
    both[lookup.table] = Spec(table.shape[1:], table.dtype, table.strides[1:], table.aligned)
    return tuple(both)


def dims(name: str, operands: Sequence[Spec], letters: str) -> tuple[str, ...]:
    """The letters of the operands of an op whose result broadcasts to axes with these."""
    lookup, both = LOOKUPS[name], ["", ""]
    ids, inner = operands[lookup.ids].shape, operands[lookup.table].shape[1:]
    own = letters[len(letters) - len(ids) - len(inner) :]
    both[lookup.ids] = spread(ids, own[: len(ids)])
    both[lookup.table] = WHOLE + spread(inner, own[len(ids) :])
    return tuple(both)


def numbers(name: str, operands: Sequence[Spec]) -> tuple[Number, ...]:
    """What rides with the launch: the table's rows, and the elements between them."""
    table = operands[LOOKUPS[name].table]
    return Number("height", u32.name, table.shape[0]), Number("pitch", u32.name, table.strides[0])


def missing(dtype: DType) -> Any:
    """What an id outside the table gives."""
    return False if dtype is bool_ else math.nan if dtype.is_float else 0


# -- in a kernel ----------------------------------------------------------------------------------


def chosen(
    steps: Sequence[Any],
    inputs: Mapping[str, Any],
    starts: Sequence[Any],
    riding: Mapping[str, Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Where a row begins in each operand, in tables too, and the numbers with what is inside them.

    Args:
        steps: of the chain; those are left out whose operands the launch does not have.
        starts: as they are without ids; riding: the numbers of the launch.
    """
    places, values = list(starts), dict(riding)
    for index, step in enumerate(steps):
        lookup = LOOKUPS.get(step.name)
        if lookup is None or f"x{step.operands[lookup.ids]}" not in inputs:
            continue
        ids, table = step.operands[lookup.ids], step.operands[lookup.table]
        height = values[f"{index}.height"]
        given = inputs[f"x{ids}"][starts[ids]]
        row = lang.bitcast(given, u32)
        if lookup.wraps:
            row = lang.select(given < 0, row + height, row)
        inside = values[f"{index}.inside"] = row < height
        places[table] = places[table] + lang.select(inside, row, 0) * values[f"{index}.pitch"]
    return places, values
