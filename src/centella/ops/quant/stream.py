"""What the streamed products of quantised weights have in common (sm_90a).

One thread has tiles of stored bytes, and of high bits, copied into a ring, before the launches
before this one are over, and at once the other planes of a block of outputs, whose rows follow each
other in memory. Of the warps that multiply `across` share the columns of a stage, `teams` of them
its rows; where there are several such crews, they take stages in turn.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, u32
from centella.ops.matmul.one_row import DEPTH, EIGHT
from centella.ops.quant.beside import Beside, BesidePlane, Row, beside_of, rows_follow
from centella.ops.quant.format import CHUNK, GROUP, RUN, Cores, Format, Run
from centella.ops.ring import Ring
from centella.ops.rows import WARP, fold
from centella.specs import Caps, Spec

MOST_ROWS = 2 * DEPTH  # of a stage
REST = 2 << 10  # bytes of barriers, of what a norm adds up, and between arrays, at most
Factor = tuple[Any, Any | None]  # and what is added to numbers times it


class BlockStream(Struct, frozen=True):
    """How a group works: outputs of a block, stages of the ring, eights of rows of x.

    Attributes:
        halves: 2 where each output has two rows of the weight, with a gate.
        slots: blocks that have room for the other planes: 1 where a group has one.
        across: warps that share the columns of a stage; runs: that each of them has.
        teams: of such warps, that share its rows; crews: of teams, that take stages in turn.
        spare: words of shared memory that nobody uses, so that a multiprocessor has one group.
    """

    rows: int
    stages: int
    eights: int = 0
    halves: int = 1
    slots: int = 2
    across: int = 4
    runs: int = 1
    teams: int = 2
    crews: int = 1
    spare: int = 0

    @property
    def columns(self) -> int:
        """Columns of a stage."""
        return self.across * self.runs * RUN

    def rounds(self, depth: int) -> int:
        """Stages of a crew, for a block of so many columns; those past the last have zeros."""
        return -(-depth // (self.columns * self.crews))

    @property
    def warps(self) -> int:
        """Warps of a crew."""
        return self.across * self.teams

    @property
    def threads(self) -> int:
        """Threads that multiply."""
        return self.crews * self.warps * WARP

    @property
    def height(self) -> int:
        """Rows of a tile in shared memory: whole patterns."""
        return -(-self.rows // EIGHT) * EIGHT

    @property
    def lines(self) -> int:
        """Rows of a team: eight or sixteen."""
        return -(-self.height * self.halves // (self.teams * EIGHT)) * EIGHT


class Weights:
    """What all roles see: the ring of stored bytes, the other planes, barriers, sizes.

    Args:
        dtype: of x; the copy engine sees two stored bytes as an element of it.
        bringers: how many say what a stage is to have.
    """

    def __init__(
        self, tile: BlockStream, kind: Format, depth: int, beside: Beside, dtype: Any, w: Any,
        planes: list[Any], bringers: int = 1,
    ) -> None:  # fmt: skip
        self.tile: BlockStream = tile
        self.kind: Format = kind
        assert kind.cores is not None, "as `comes_in_blocks` says"
        self.cores: Cores = kind.cores
        self.depth: int = depth
        assert tile.stages % tile.crews == 0, "a stage is one crew's"
        self.halves: int = tile.halves
        names = ("n", "k", "width", "ldw", "half", "rows", "blocks")
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in names}
        self.words: int = tile.columns // (2 * per_byte(kind))  # elements of 16 bits
        self.rounds: int = tile.rounds(depth)
        self.steps: int = self.rounds * tile.crews
        slots = tile.stages * tile.halves
        self.ring: Any = lang.ptx.SharedTile(dtype, (slots, tile.height, self.words))
        extents = (self.p["width"], self.p["rows"])
        self.map: Any = lang.ptx.TensorMap(w, self.ring, extents, (self.p["ldw"],), tile.rows)
        self.high: HighBits | None = None
        if high := high_of(kind):
            plane, planes = planes[0], planes[1:]
            self.high = HighBits(tile, high, dtype, plane, self.p["rows"])
        self.planes: list[BesidePlane] = [
            BesidePlane(plane, tile.rows, tile.slots * tile.halves, *layout)
            for plane, layout in zip(planes, beside, strict=True)
        ]
        self.full: Any = lang.ptx.Barriers(tile.stages)
        self.empty: Any = lang.ptx.Barriers(tile.stages)
        self.told: Any = lang.ptx.Barriers(tile.slots)  # of the other planes
        self.read: Any = lang.ptx.Barriers(tile.slots)
        self.met: Any = lang.ptx.Barriers(1)
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, bringers)
                self.empty.init(stage, tile.warps)
            for slot in range(tile.slots):
                self.told.init(slot, 1)
                self.read.init(slot, tile.crews * tile.warps)
            self.met.init(0, tile.threads)
            lang.ptx.init_fence()
        lang.barrier()

    def blocks(self) -> Any:
        """The blocks of this group."""
        return lang.range(lang.group_id(), self.p["blocks"], lang.num_groups())

    def bring(self) -> None:
        """Have all planes copied, as stages become free: nobody writes weights."""
        tile, ring, beside = self.tile, Ring(self.tile.stages), Ring(self.tile.slots)
        nbytes = self.halves * tile.rows * bytes_of(self.kind, tile.columns)
        for block in self.blocks():
            self._bring_beside(block, beside)
            for step in lang.range(lang.const(self.steps, u32)):
                stage = ring.stage.get()
                self.empty.wait(stage, ring.parity ^ 1)
                self.full.expect(stage, lang.const(nbytes, u32))
                for half in range(self.halves):
                    at = (step * self.words, self.row(block, half))
                    slot = stage * self.halves + half
                    lang.ptx.tma_load(self.map, at, slot, self.full, stage)
                    if self.high:
                        self.high.bring(step, at[1], slot, self.full, stage)
                ring.advance()
        lang.ptx.launch_dependents()

    def rows(self, slot: Any, half: Any, first: Any, row: Any) -> list[Row]:
        """Where each of the other planes has a row of a block.

        Args:
            slot, half: of the block; first: its first row of the weight; row: counted from there.
        """
        last = lang.minimum(self.p["rows"] - first, self.tile.rows) - 1
        begin = slot * self.halves + half
        return [p.row(p.block(begin), first, lang.minimum(row, last)) for p in self.planes]

    def run(self, number: Any, rows: list[Row]) -> Run:
        """A run of a row whose other planes are these."""
        first = 2 if self.high else 1  # of the planes that lie beside

        def values(plane: int, word: Any) -> list[Any]:
            return list(self.planes[plane - first].plane.unpack([rows[plane - first].word(word)]))

        return Run(
            lang.minimum(number, self.depth // RUN - 1), values,
            lambda plane, word: rows[plane - first].word(word),
            lambda plane, word: rows[plane - first].chunk(word),
        )  # fmt: skip

    def fragment(self) -> Any:
        """For a load of stored bytes: four chunks of a team's eight rows, or two of sixteen."""
        return lang.ptx.Fragment(self.ring.dtype, (16, 16))

    def start(self, row: Any, part: Any, lane: Any, half: Any = 0) -> Any:
        """This thread's chunk of a stage, of a warp's runs, as `groups` takes it."""
        chunk, own = part * (self.tile.runs * chunks_of(self.kind)), lane // self.tile.lines
        if self._turned:
            own = own % 2 * 2 + own // 2
        return self.ring.chunk(row, chunk + own, half)

    @property
    def _turned(self) -> bool:
        """Whether a load's chunks are 0, 2, 1 and 3: the first halves of two groups, the last."""
        return self.tile.lines == EIGHT and per_byte(self.kind) == 1

    def groups(
        self, stage: Any, start: Any, stored: Any, high: tuple[Any, Any] | None, run: int = 0
    ) -> Iterator[list[tuple[Any, Any]]]:
        """The groups of a run: of each eight rows the first and the last sixteen numbers.

        Args:
            start: this thread's chunk in the ring; stored: a fragment for it.
            high: the same of `HighBits`; run: which of the warp's.
        """
        slot, eights = stage * self.halves, self.tile.lines // EIGHT
        highs = self.high.load(*high, slot, run) if self.high and high else []
        across = 4 // eights  # chunks of a load
        groups = across * per_byte(self.kind) // 2
        for group in range(0, RUN // GROUP, groups):
            chunk = run * chunks_of(self.kind) + 2 * group // per_byte(self.kind)
            lang.ptx.ldmatrix(self.ring, self.ring.right(start, chunk)
                              + self.ring.at_stage(slot), stored)  # fmt: skip
            yield from self._words(stored, across, group, highs)

    def _words(
        self, stored: Any, across: int, group: int, highs: list[list[Any]]
    ) -> list[list[tuple[Any, Any]]]:
        """What a fragment has, by group: see `groups`.

        Args:
            across: chunks of a row; group: the first of these chunks' in its run.
            highs: see `HighBits.load`.
        """
        cores, lines = self.cores, []
        groups = 4 // (cores.high or 4)  # in a chunk of high bits
        eights = 4 // across
        for eight in range(eights):
            words = []
            for c in range(across):
                chunk, field = divmod(group + c, groups)
                high = highs[eight][chunk] if highs else None
                at = (0, 2, 1, 3)[c] if self._turned else eight + eights * c
                words += cores.numbers(stored.word(at), high, 2 * field)
            lines.append(list(zip(words[::2], words[1::2], strict=True)))
        return [list(group) for group in zip(*lines, strict=True)]

    def _bring_beside(self, block: Any, ring: Ring) -> None:
        slot = ring.stage.get()
        self.read.wait(slot, ring.parity ^ 1)
        spans = [
            (plane, half, plane.span(row, lang.minimum(self.p["rows"] - row, self.tile.rows)))
            for half in range(self.halves) for row in [self.row(block, half)]
            for plane in self.planes
        ]  # fmt: skip
        self.told.expect(slot, fold([nbytes for _, _, (_, nbytes) in spans], operator.add))
        for plane, half, (first, nbytes) in spans:
            to = plane.block(slot * self.halves + half)
            lang.ptx.bulk_load(plane.plane, first, nbytes, plane.memory, to, self.told, slot)
        ring.advance()

    def row(self, block: Any, half: int) -> Any:
        """The first row of the weight of a block."""
        return block * self.tile.rows + (self.p["half"] if half else 0)


class HighBits:
    """The second plane of a format whose numbers have more than four bits, in a ring of its own."""

    def __init__(self, tile: BlockStream, bits: int, dtype: Any, plane: Any, rows: Any) -> None:
        self.tile: BlockStream = tile
        self.chunks: int = RUN * bits // (8 * CHUNK)  # of a run
        self.words: int = tile.columns * bits // 16
        self.ring: Any = lang.ptx.SharedTile(
            dtype, (tile.stages * tile.halves, tile.height, self.words)
        )
        extents = (lang.parameter("whigh", u32), rows)
        strides = (lang.parameter("ldhigh", u32),)
        self.map: Any = lang.ptx.TensorMap(plane, self.ring, extents, strides, tile.rows)

    def bring(self, step: Any, row: Any, slot: Any, full: Any, stage: Any) -> None:
        """Have a stage's copied."""
        lang.ptx.tma_load(self.map, (step * self.words, row), slot, full, stage)

    def start(self, row: Any, part: Any, lane: Any, half: Any = 0) -> tuple[Any, Any]:
        """This thread's chunk of a stage, and a fragment for it, as `load` takes them."""
        chunk = part * (self.tile.runs * self.chunks)
        if self.chunks == 2:
            chunk = chunk + lane // self.tile.lines % 2
        start = self.ring.chunk(row, chunk, half)
        both = self.tile.lines == 2 * EIGHT and self.chunks == 2
        return start, lang.ptx.Fragment(self.ring.dtype, (16, 16) if both else (16, 8))

    def load(self, start: Any, to: Any, slot: Any, run: int = 0) -> list[list[Any]]:
        """Of each eight rows this thread's words of the chunks of one of a warp's runs."""
        eights = self.tile.lines // EIGHT
        at = self.ring.right(start, run * self.chunks) + self.ring.at_stage(slot)
        lang.ptx.ldmatrix(self.ring, at, to)
        return [[to.word(e + eights * c) for c in range(self.chunks)] for e in range(eights)]


def per_byte(kind: Format) -> int:
    """Numbers of a byte."""
    return kind.block // kind.planes[0].length


def high_of(kind: Format) -> int:
    """Bits of a number that come in a ring of their own."""
    return kind.cores.high if kind.cores else 0


def chunks_of(kind: Format) -> int:
    """Chunks of stored bytes of a run."""
    return RUN // per_byte(kind) // CHUNK


def bytes_of(kind: Format, columns: int) -> int:
    """What so many columns of a row have in the rings."""
    return columns // per_byte(kind) + columns * high_of(kind) // 8


def parts_of(kind: Format, planes: Sequence[Spec]) -> tuple[Beside, tuple[tuple[str, int], ...]]:
    """How a weight's planes lie: those that lie beside, and scalars of those in rings.

    To the copy engine two bytes are an element.
    """
    stored, *others = planes
    scalars = {"width": stored.shape[1] // 2, "ldw": stored.strides[0] // 2}
    if high_of(kind):
        high, *others = others
        scalars |= {"whigh": high.shape[1] * 2, "ldhigh": high.strides[0] * 2}
    return beside_of(others), tuple(scalars.items())


def comes_in_blocks(kind: Format, k: int, x: DType, planes: Sequence[Spec], caps: Caps) -> bool:
    """Whether the copy engine can bring a weight's planes, in whole runs, for x of 16 bits."""
    if kind.cores is None or not caps.warpgroups or x not in (bf16, f16):
        return False
    if not k or k % max(RUN, kind.block) or f32 in (plane.dtype for plane in planes):
        return False
    rings = 2 if high_of(kind) else 1
    return all(s.aligned for s in planes[:rings]) and all(map(rows_follow, planes))
