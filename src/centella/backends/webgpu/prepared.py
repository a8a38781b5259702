"""Launches prepared once: parameters in a buffer of their own, bind groups, driver handles."""

from __future__ import annotations

from typing import Any, NamedTuple

from centella.backends.webgpu.raw import Dispatch


class Prepared(NamedTuple):
    """The launches of a plan, ready to be encoded again and again.

    Attributes:
        params: the buffer of their parameters.
    """

    dispatches: list[Dispatch]
    params: Any
