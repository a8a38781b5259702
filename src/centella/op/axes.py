"""How an op's work may be divided: which parts of its operands a part of its results needs.

Each axis of each operand and result has a letter, as in einsum, or none. Axes with one letter run
together: a part of the letter is the op on those parts of the operands, and gives those parts of
the results. An axis without a letter is needed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from centella.specs import Shape

LETTERS = (
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of dimensions of which the rank alone says how many there are
)
WHOLE = "."


class Along(NamedTuple):
    """An axis that runs along a letter: element i of the letter is `step` elements of the axis.

    They begin at i * step - start; those before the axis's first or after its last are not there.
    """

    letter: str
    step: int = 1
    start: int = 0


class Part(NamedTuple):
    """Some elements of a letter: the first, how many, of how many."""

    first: int
    extent: int
    whole: int


Dims = tuple[Along | None, ...]


class Fold(Struct, frozen=True):
    """A letter that no result has: results of its parts are put together, two by two.

    Attributes:
        letter: of the operands' axes.
        by: the element-wise op that puts two together, in the type that the op computes in.
        attrs: of the parts; None: those of the whole.
        factor: what the whole is multiplied by at the end.
    """

    letter: str
    by: str = "add"
    attrs: Struct | None = None
    factor: float | None = None


class Axes(Struct, frozen=True):
    """The letters of an op's operands and results.

    Attributes:
        inputs, outputs: of each, the letter of each axis.
        told: letters of which an op is told where its part is: see `Form.part`.
        chosen: letters along which a result reads what data or places say. Each part writes what
            is in it and leaves the rest as it is; the first may write the rest as well, as if it
            were the whole. They are told too.
        fold: the letter along which results are put together.
        scratch: the letter that temporaries grow with: its parts are made smaller where one is too
            large; "": those of the outermost axis of a result.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    told: str = ""
    chosen: str = ""
    fold: Fold | None = None
    scratch: str = ""


def dims(letters: str) -> Dims:
    """Axes by their letters; `.` is an axis that is needed whole."""
    return tuple(None if letter == WHOLE else Along(letter) for letter in letters)


def axes(
    inputs: Sequence[str], outputs: Sequence[str], *, told: str = "", chosen: str = "",
    fold: Fold | None = None, scratch: str = "",
) -> Axes:  # fmt: skip
    """The axes of an op by letters, a string an operand: `axes(["mk", "nk"], ["mn"])`."""
    lettered = tuple(map(dims, inputs)), tuple(map(dims, outputs))
    return Axes(*lettered, told, chosen, fold, scratch)


def spread(shape: Shape, letters: str) -> str:
    """Letters of an operand that broadcasts to axes with these."""
    own = letters[len(letters) - len(shape) :]
    return "".join(WHOLE if n == 1 else c for n, c in zip(shape, own, strict=True))
