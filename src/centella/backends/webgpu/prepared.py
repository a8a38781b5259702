"""Launches prepared once: parameters in a buffer of their own, bind groups, driver handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from centella.backends.webgpu.raw import Dispatch


class Prepared(Struct, frozen=True):
    """The launches of a plan, ready to be encoded again and again.

    Attributes:
        groups, params, offsets: what the dispatches refer to.
    """

    dispatches: Sequence[Dispatch]
    groups: Any
    params: Any
    offsets: Any
