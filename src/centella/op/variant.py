"""A way to compute an op: the forms that it takes on a device, and its launches.

An op with several kernels has a `Variant` in each kernel's file, and a list of them in the order in
which they are preferred. `choose` walks the list, or takes the variant that is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import Struct

from centella.errors import LimitError
from centella.op.op import Lowered
from centella.specs import Caps

F = TypeVar("F")  # what is to be computed: a Form, or what an op makes of it
T = TypeVar("T")  # how a group of the kernel works: its tile
APART = "apart"  # of an op that stands for others: these


def always(form: object, caps: Caps) -> bool:
    """Preferred wherever it fits."""
    return True


class Variant(Struct, Generic[F, T], frozen=True, eq=False):
    """One kernel among those of an op.

    Attributes:
        name: as `variant=` has it.
        tile: `tile(form, caps)`: how its groups work; None where it cannot compute the form.
        launches: `launches(form, tile, caps)`.
        preferred: `preferred(form, caps)`: whether a walk of the list takes it where it fits.
    """

    name: str
    tile: Callable[[F, Caps], T | None]
    launches: Callable[[F, T, Caps], Lowered]
    preferred: Callable[[F, Caps], bool] = always

    def fits(self, form: F, caps: Caps) -> bool:
        """Whether it can compute a form on a device."""
        return self.tile(form, caps) is not None

    def takes(self, form: F, caps: Caps, name: str | None = None) -> bool:
        """Whether it fits a form, and is preferred for it; or has the name that is forced."""
        if name is not None:
            return self.name == name and self.fits(form, caps)
        return self.fits(form, caps) and self.preferred(form, caps)

    def lower(self, form: F, caps: Caps) -> Lowered:
        """The launches of a form that it fits."""
        tile = self.tile(form, caps)
        assert tile is not None, f"{self.name} was chosen where it fits"
        return self.launches(form, tile, caps)


def choose(
    variants: Sequence[Variant[F, Any]], form: F, caps: Caps, name: str | None, what: str
) -> Variant[F, Any]:
    """The first variant that is preferred and fits; or the one of a name.

    Args:
        variants: in order of preference; the last ones take every form.
        name: of the one that is forced; None: none is.
        what: the op and its sizes, for the error.

    Raises:
        LimitError: the forced one cannot compute the form on this device; or none can.
    """
    for variant in variants:
        if variant.takes(form, caps, name):
            return variant
    forced = "no variant fits" if name is None else f"variant {name!r} does not fit"
    raise LimitError(f"{what}: {forced} on {caps.target}")
