"""Where a role is in a ring of stages that another role fills or reads."""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import u32


class Ring:
    """A stage, and the parity of this time around."""

    def __init__(self, stages: int) -> None:
        self.stages: int = stages
        self.stage: Any = lang.var(0, u32)
        self.parity: Any = lang.var(0, u32)

    def advance(self) -> None:
        """To the next stage."""
        following = self.stage + 1
        around = following == self.stages
        self.parity.set(self.parity ^ lang.cast(around, u32))
        self.stage.set(lang.select(around, 0, following))

    def skip(self, steps: int) -> None:
        """On by a number of stages, which there are."""
        following = self.stage + steps
        around = following >= self.stages
        self.parity.set(self.parity ^ lang.cast(around, u32))
        self.stage.set(lang.select(around, following - self.stages, following))

    def move(self, steps: Any) -> None:
        """On by a number of stages."""
        there = self.stage + steps
        rounds = there // self.stages
        self.parity.set((self.parity + rounds) & 1)
        self.stage.set(there - rounds * self.stages)
