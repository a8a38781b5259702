"""What streamed products of 2 to 16 rows share: rows of x in a ring, sums of their warps, results.

Used with weights of 16 bits (`streamed_rows.py`) and with quantised ones (`ops/quant`).
"""

from __future__ import annotations

from typing import Any

from centella import lang
from centella.dtypes import f32, u32
from centella.ops.hopper import PANEL
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.one_row import CONSUMERS, DEPTH, EIGHT
from centella.ops.matmul.streamed_kernel import WARPGROUP
from centella.ops.matmul.streamed_norms import RowNorm
from centella.ops.rows import QUAD

PAD = 4  # elements between lines of sums, for banks of their own


class Rows:
    """Rows of x in a ring beside that of weights, and how they come there.

    Args:
        depth: columns of x.
        apart: their bytes count at barriers of their own, and not beside those of the weights.
    """

    def __init__(
        self, x: Any, depth: int, stages: int, eights: int, columns: int, apart: bool = False
    ) -> None:  # fmt: skip
        m, k, pitch = (lang.parameter(n, u32) for n in ("m", "k", "ldx"))
        self.ring: Any = lang.ptx.SharedTile(x.dtype, (stages, EIGHT * eights, columns))
        whole = depth % PANEL == 0
        self.map: Any = lang.ptx.TensorMap(x, self.ring, (k, m), (pitch,), whole=whole)
        self.nbytes: int = 2 * EIGHT * eights * columns  # of a stage
        self._columns = columns
        self._pairs = [(e, min(2, eights - e)) for e in range(0, eights, 2)]
        self._there = lang.ptx.Barriers(stages) if apart else None
        if self._there is not None:
            with lang.if_(lang.local_id() == WARPGROUP):
                for stage in range(stages):
                    self._there.init(stage, 1)
                lang.ptx.init_fence()
            lang.barrier()

    def bring(self, step: Any, stage: Any, full: Any) -> None:
        """Have the columns of a step copied to a stage; their bytes count at one of `full`."""
        at = (step * self._columns, lang.const(0, u32))
        lang.ptx.tma_load(self.map, at, stage, full, stage)

    def bring_all(self, count: Any, steps: int) -> None:
        """By one thread: have the rows of all tiles copied, if they come apart; all have room."""
        if self._there is not None:
            for number in lang.range(count):
                self._there.expect(number, lang.const(self.nbytes, u32))
                self.bring(number % steps, number, self._there)

    def wait(self, stage: Any, parity: Any) -> None:
        """Wait for the rows of a stage, if they come apart from its weights."""
        if self._there is not None:
            self._there.wait(stage, parity)

    def starts(self, lane: Any, column: Any) -> list[Any]:
        """Where a lane's rows begin for `ldmatrix`, which takes two eights at once."""
        chunk = column // EIGHT + lane // EIGHT % 2
        return [
            self.ring.chunk((lane // DEPTH % count + e) * EIGHT + lane % EIGHT, chunk)
            for e, count in self._pairs
        ]

    def load(self, starts: list[Any], sixteen: int, widths: list[Any]) -> None:
        """Sixteen columns of all rows as second factors."""
        for start, (e, count) in zip(starts, self._pairs, strict=True):
            at = self.ring.right(start, 2 * sixteen)
            lang.ptx.ldmatrix(self.ring, at, *widths[e : e + count])


class Sums:
    """What the warps of a group leave of a block, for each row of x a line of outputs.

    Args:
        parts: warps that add up the same outputs; rows: of x; pitch: from line to line.
    """

    def __init__(self, parts: int, rows: int, pitch: int) -> None:
        self.parts: int = parts
        self.rows: int = rows
        self.pitch: int = pitch
        self._memory = lang.shared(f32, parts * rows * pitch)

    def leave(
        self, sums: list[list[list[Any]]], part: Any, lane: Any, first: Any = 0,
        narrow: bool = False,
    ) -> None:  # fmt: skip
        """Write a warp's fragments, [sixteen][eight][chain], of outputs from `first` on.

        `narrow`: the last sixteen has eight outputs.
        """
        start = (part * self.rows + lane % QUAD * 2) * self.pitch + (lane // QUAD + first)
        for i, line in enumerate(sums):
            for e, chains in enumerate(line):
                for register in range(2 if narrow and i == len(sums) - 1 else 4):
                    total = chains[0][register]
                    for fragment in chains[1:]:
                        total = total + fragment[register]
                    column = e * EIGHT + register % 2
                    at = column * self.pitch + (i * DEPTH + register // 2 * EIGHT)
                    self._memory[start + at] = total

    def put(self, part: Any, row: Any, output: Any, total: Any) -> None:
        """Write what a part has of an output."""
        self._memory[(part * self.rows + row) * self.pitch + output] = total

    def total(self, row: Any, output: Any) -> Any:
        """What all parts have of an output."""
        at = row * self.pitch + output
        whole = self._memory[at]
        for i in range(1, self.parts):
            whole = whole + self._memory[at + i * (self.rows * self.pitch)]
        return whole


def store(
    shared: Any, sums: Sums, block: Any, me: Any, gated: bool, activation: str, y: Any,
    extra: dict[str, Any], threads: int = CONSUMERS, norm: RowNorm | None = None,
) -> None:  # fmt: skip
    """Add up the warps' sums, with the norm of a row, and store a word of outputs a thread."""
    tile, p, per = shared.tile, shared.p, y.dtype.per_word
    first, across = block * tile.rows, tile.rows // per
    items = sums.rows * across
    for base in range(0, items, threads):
        item = me + base
        row, offset = item // across, item % across * per
        inside = (row < lang.parameter("m", u32)) & (first + offset < p["n"])
        with lang.if_(inside & (item < items) if base + threads > items else inside):
            finish = Epilogue(activation, extra, first + offset, per, p["n"], gated=gated)
            outputs = [
                offset + j + half * tile.height
                for half in range(shared.halves) for j in range(per)
            ]  # fmt: skip
            if norm is None:
                out = [sums.total(row, output) for output in outputs]
            else:
                out = norm.totals(sums, row, outputs)
            y.store(row * lang.parameter("ldy", u32) + (first + offset), finish(out, row))
