"""The RMS norm of up to 64 rows of x in the product that follows it (sm_90a).

    y = factor (x norm . W)                                                   factor = 1 / rms(x)

A warpgroup takes its columns of x from shared memory to registers, multiplies them by the weights
of the norm and rounds: they are the first factor of `wgmma`. So x is rounded once, as a norm of its
own rounds its result. A thread adds up the squares that it meets. Where groups of a cluster have a
part of the depth each, they send each other the squares of theirs with the sums. The factor of a
row multiplies its sums.
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.lang.ptx import Fragment
from centella.ops.matmul.results import K, M
from centella.ops.ring import Ring
from centella.ops.rows import QUAD, WARP, over_lanes

WARPGROUP = 128


class ManyNorm:
    """The weights of the norm, and the squares of this group's columns of x.

    Args:
        columns: of x, whole stages.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._weights = lang.shared(f32, columns)  # of sixteen columns those of a thread in a row
        self._squares = lang.vars(f32, 2, init=0.0)  # of this thread's two rows
        self._lane = lang.local_id() % WARP

    def load(self, norm: Any) -> None:
        """Write the weights, which no launch before this one writes; 0 past the last."""
        k, me = lang.parameter("k", u32), lang.local_id() % WARPGROUP
        for base in range(0, self._columns, WARPGROUP):
            column = me + base
            weight = lang.select(column < k, norm[lang.minimum(column, k - 1)], 0.0)
            near = column % K
            at = column - near + near % 8 // 2 * QUAD + near % 2 + near // 8 * 2
            with lang.if_(column < self._columns):
                self._weights[at] = weight
        lang.ptx.warpgroup_barrier()

    def multiply(self, shared: Any, ring: Ring, sums: Any, source: Any, leader: Any) -> None:
        """The steps of a tile.

        Args:
            source: x, whose elements are packed as it stores them.
        """
        left, right, depth = shared.left, shared.right, shared.tile.bk
        lane, warp = self._lane, lang.local_id() // WARP % 4
        mine = left.ring.chunk(warp * 16 + lane % 16, lane // 16)
        factors = [Fragment(source.dtype, (M, K)) for _ in range(depth // K)]
        for total in self._squares:
            total.set(0.0)
        for step in lang.range(shared.steps):
            stage, column = ring.stage.get(), (shared.first + step) * depth
            shared.full.wait(stage, ring.parity)
            for n, fragment in enumerate(factors):
                at = left.ring.right(mine + left.ring.at_stage(stage), 2 * n)
                lang.ptx.ldmatrix(left.ring, at, fragment)
            for n, fragment in enumerate(factors):
                for register, word in enumerate(self._weighted(fragment, column + n * K, source)):
                    fragment[register] = word
            lang.ptx.wgmma_fence()
            for n, fragment in enumerate(factors):
                lang.ptx.wgmma_held(
                    sums, fragment, right.ring, right.start(0, n * K, stage), b_along_k=True,
                    accumulate=step > 0 if n == 0 else True,
                )  # fmt: skip
            lang.ptx.wgmma_commit()
            lang.ptx.wgmma_wait(0)
            lang.ptx.warpgroup_barrier()  # all warps have read the stage
            with lang.if_(leader):
                shared.empty.arrive(stage)
            ring.advance()

    def _weighted(self, fragment: Any, column: Any, source: Any) -> list[Any]:
        """The words of sixteen columns times their weights; adds up their squares."""
        weights = self._weights.load(column + self._lane % QUAD * QUAD)
        words = []
        for register in range(4):
            pair, total = fragment[register], self._squares[register % 2]
            for value in pair:
                total.set(lang.fma(value, value, total))
            both = weights[register // 2 * 2 :]
            words += source.pack([v * w for v, w in zip(pair, both, strict=False)])
        return words

    def squares(self) -> list[Any]:
        """Those of this thread's two rows, over this group's columns."""
        return [over_lanes(total.get(), QUAD) for total in self._squares]

    def apply(self, sums: Any) -> None:
        """Multiply all sums by the factor of their row, where a group has the whole depth."""
        factors = [factor_of(total) for total in self.squares()]
        for register in range(sums.registers):
            sums[register] = sums[register] * factors[register // 2 % 2]


def factor_of(squares: Any) -> Any:
    """1 / rms of a row."""
    mean = squares / lang.cast(lang.parameter("k", u32), f32)
    return 1.0 / lang.sqrt(mean + lang.parameter("eps", f32))
