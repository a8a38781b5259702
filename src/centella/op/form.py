"""What an operation is asked to do, apart from the data."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from msgspec import Struct
from msgspec.structs import asdict

from centella.op.axes import Part
from centella.specs import Caps, Spec

if TYPE_CHECKING:
    from centella.op.op import Lower, Lowered, Op

A_co = TypeVar("A_co", bound=Struct, covariant=True)
WHOLE: Mapping[str, Part] = MappingProxyType({})


def loaded(where: str) -> Any:
    """What a module has, by "module:name"; the module is imported with the first such call."""
    module, name = where.split(":")
    return getattr(import_module(module), name)


def named(attrs: Struct) -> dict[str, Any]:
    """The attributes that are given, as keyword arguments of a formula."""
    return {n: v for n, v in asdict(attrs).items() if v is not None}


class Form(Struct, Generic[A_co], frozen=True, eq=False):
    """What an op is asked to do; a device has one Form for equal requests.

    Attributes:
        inputs: how each operand is seen.
        outputs: how each result will lie in memory; `nbytes` of them all.
        attrs: its attributes, as `Op.attrs` declares them.
        copies: operands whose layout the op does not take.
        parts: of each letter that it is told, where this part of the op lies.
    """

    op: Op[Any]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    attrs: A_co
    nbytes: int = 0
    copies: tuple[int, ...] = ()
    parts: Mapping[str, Part] = WHOLE

    def lower(self, caps: Caps) -> Lowered:
        """The launches on a device."""
        lowering = self.op.lowering
        lowering = loaded(lowering) if isinstance(lowering, str) else lowering
        return cast("Lower[Any]", lowering)(self, caps)

    def within_binding(self, caps: Caps) -> bool:
        """Whether a launch may see all of each operand and result at once."""
        return all(s.storage_bytes <= caps.safe_binding for s in (*self.inputs, *self.outputs))

    def part(self, letter: str, extent: int) -> Part:
        """The part of a letter that is asked for.

        Args:
            extent: of the letter as the op sees it, which is the whole where nothing is divided.
        """
        return self.parts.get(letter, Part(0, extent, extent))
