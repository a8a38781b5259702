"""A decoder's rotation and cache in the launch that attends to the parts of its keys, in 16 bits.

The groups work as those of `rope_attend`; what they have goes to memory, as in `split_mma`, where a
second launch adds it up. The part that ends the keys has those of the step.
"""

from __future__ import annotations

from centella import lang
from centella.emit.program import Kernel
from centella.lang.memory import Argument
from centella.ops.attention.masks import Scoring
from centella.ops.attention.parts import Work
from centella.ops.attention.rope_cluster import RopeTile, masks_of, walked
from centella.ops.attention.split_mma import leave
from centella.ops.rope import Turn


def _rope_split_mma(
    *, tile: RopeTile, dim: int, rows: int, tokens: int, scoring: Scoring,
    layout: tuple[tuple[str, bool], ...], blocks: bool, x: Argument, cos: Argument, sin: Argument,
    starts: Argument, keys: Argument, values: Argument, partial: Argument,
    norms: Argument | None = None,
) -> None:  # fmt: skip
    lang.ptx.resident(tile.split.together)
    table, masks = masks_of(starts, blocks)
    work = Work(masks, scoring, rows, tokens == 1)

    def walk() -> None:
        writes = (work.end == work.all_end) & (work.block == 0)
        warp = walked(
            work, masks, writes, tile=tile, dim=dim, rows=rows, tokens=tokens, scoring=scoring,
            turn=Turn(cos, sin, **dict(layout)), x=x, norms=norms, keys=keys, values=values,
            table=table,
        )  # fmt: skip
        leave(warp, work, tile.split, rows, partial)

    if not tile.early:
        with lang.if_(work.begin < work.end):
            walk()
        return
    with lang.if_(work.begin >= work.end):  # a group without keys
        lang.ptx.await_launches()
    with lang.else_():
        walk()


kernel: Kernel = Kernel(_rope_split_mma, workgroup=128, name="rope_split_mma")
