"""Launches prepared once, with parameters and bind groups of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from centella.backends.webgpu.encode import Dispatch, Offsets, encode
from centella.backends.webgpu.stamps import Stamps


class Prepared(Struct, frozen=True):
    """The launches of a plan, ready to be encoded again and again.

    Attributes:
        groups, params, offsets: what the dispatches refer to.
    """

    dispatches: Sequence[Dispatch]
    groups: Sequence[Any]
    params: Any
    offsets: Offsets

    def encode(self, encoder: Any, stamps: Stamps | None = None) -> None:
        """Put them into a command encoder."""
        encode(encoder, self.dispatches, stamps)
