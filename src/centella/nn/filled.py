"""What the host knows of the tokens in a cache."""

from __future__ import annotations

from msgspec import Struct

from centella.errors import KVCacheFullError, ShapeError


class Filled(Struct, frozen=True):
    """What a cache holds, as the host knows it.

    Attributes:
        ends: tokens of each sequence, the current step's included.
        tokens: how many of them the current step brings; 0 when there is none.
        step: number of the current step; a layer that has its keys and values is marked with it.
    """

    ends: tuple[int, ...]
    tokens: int = 0
    step: int = 0

    def begun(self, tokens: int, capacity: int) -> Filled:
        """One step further.

        Raises:
            KVCacheFullError: there is no room.
        """
        if max(self.ends) + tokens > capacity:
            raise KVCacheFullError(
                f"KVCache: {max(self.ends):,} of {capacity:,} positions are filled; no room for "
                f"{tokens:,} more"
            )
        return Filled(tuple(n + tokens for n in self.ends), tokens, self.step + 1)

    def cut(self, ends: tuple[int, ...]) -> Filled:
        """Back at these lengths, between two steps.

        Raises:
            ShapeError: some are longer than what is there.
        """
        if len(ends) != len(self.ends) or not all(
            0 <= n <= have for n, have in zip(ends, self.ends, strict=True)
        ):
            raise ShapeError(
                f"truncate: expected lengths of 0 to {list(self.ends)}, got {list(ends)}"
            )
        return Filled(ends, 0, self.step)
