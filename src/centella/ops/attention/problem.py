"""The attributes of attention, and the names of the kernels that may compute it."""

from __future__ import annotations

from msgspec import Struct

VARIANTS = ("tiled", "stream", "split", "mma", "wgmma", "split_mma")


class AttentionAttrs(Struct, frozen=True):
    """The masks that come after v, the factor of scores, and a kernel that is forced."""

    masks: tuple[str, ...]
    scale: float
    causal: bool = False
    variant: str | None = None
