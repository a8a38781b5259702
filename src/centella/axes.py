"""How an op's work may be divided: which parts of its operands a part of its results needs.

Each axis of each operand and result has a letter, as in einsum, or none. Axes with one letter run
together: a part of the letter is the op on those parts of the operands, and gives those parts of
the results. An axis without a letter is needed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from centella.specs import Shape

LETTERS = "abcdefghijklmnop"  # for the dimensions that rank alone decides
WHOLE = "."


class Along(NamedTuple):
    """An axis that runs along a letter: element i of the letter is `step` elements of the axis.

    They begin at i * step - start; those before the axis's first or after its last are not there.
    """

    letter: str
    step: int = 1
    start: int = 0


Dims = tuple[Along | None, ...]


class Fold(Struct, frozen=True):
    """A letter that no result has: results of its parts are put together, two by two.

    Attributes:
        letter: of the operands' axes.
        by: the element-wise op that puts two together, in the type that the op computes in.
        attrs: attributes of the parts that are not those of the whole.
        factor: what the whole is multiplied by at the end.
    """

    letter: str
    by: str = "add"
    attrs: tuple[tuple[str, Any], ...] = ()
    factor: float | None = None


class Axes(Struct, frozen=True):
    """The letters of an op's operands and results.

    Attributes:
        inputs, outputs: of each, the letter of each axis.
        told: letters whose parts an op is told, as `attrs["parts"]`: first element and extent of
            the whole by letter.
        chosen: letters along which data says what is read. Each part after the first (which is
            computed as if it were all) writes only what is chosen in it, and keeps the rest of the
            result. They are told too.
        fold: the letter along which results are put together.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    told: str = ""
    chosen: str = ""
    fold: Fold | None = None


def dims(letters: str) -> Dims:
    """Axes by their letters; `.` is an axis that is needed whole."""
    return tuple(None if letter == WHOLE else Along(letter) for letter in letters)


def axes(
    inputs: Sequence[str], outputs: Sequence[str], *, told: str = "", chosen: str = "",
    fold: Fold | None = None,
) -> Axes:  # fmt: skip
    """The axes of an op by letters, a string an operand: `axes(["mk", "nk"], ["mn"])`."""
    made = tuple(map(dims, inputs)), tuple(map(dims, outputs))
    return Axes(*made, told, chosen, fold)


def spread(shape: Shape, letters: str) -> str:
    """Letters of an operand that broadcasts to axes with these."""
    own = letters[len(letters) - len(shape) :]
    return "".join(WHOLE if n == 1 else c for n, c in zip(shape, own, strict=True))


def part_of(attrs: dict[str, Any], letter: str, extent: int) -> tuple[int, int]:
    """First element of the part that an op is asked for, and the extent of the whole.

    Args:
        extent: of the letter as the op sees it: the whole, where nothing is divided.
    """
    found: tuple[int, int] = attrs.get("parts", {}).get(letter, (0, extent))
    return found
