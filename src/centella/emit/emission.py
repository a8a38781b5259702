"""What an emitter takes beside a kernel and a device, and what it gives."""

from __future__ import annotations

from msgspec import Struct

from centella.lang.rounds import Copies


class Emission(Struct, frozen=True):
    """How a kernel is to be written.

    Attributes:
        trusted: the driver may compile it without bounds checks of its own.
        rewritable: a driver may rewrite its float arithmetic other than sums.
        copies: how often bodies of loops stand in it (`lang.rounds`).
        reports: it counts in a word of the device how often its driver has stopped a loop.
    """

    trusted: bool = False
    rewritable: bool = False
    copies: Copies = ()
    reports: bool = False


class Text(Struct, frozen=True):
    """A program's text, and the key of its content."""

    key: str
    source: str
