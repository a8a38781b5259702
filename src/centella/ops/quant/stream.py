"""What the streamed products of quantised weights have in common (sm_90a).

One thread has tiles of stored bytes, and of high bits, copied into a ring, before the launches
before this one are over, and at once the other planes of a block of outputs, whose rows follow each
other in memory. Of the warps that multiply four share the columns of a stage, two of these teams
its rows; where there are two such crews, they take stages in turn.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, u32
from centella.ops.matmul.streamed_kernel import DEPTH, EIGHT
from centella.ops.quant.format import CHUNK, GROUP, RUN, Cores, Format, Run
from centella.ops.ring import Ring
from centella.ops.rows import WARP, fold
from centella.specs import Caps, Spec

ACROSS, TEAMS = 4, 2  # warps that share a stage's columns, a run each; its rows
WARPS = ACROSS * TEAMS  # of a crew
COLUMNS = ACROSS * RUN  # of x, of a stage
MOST_ROWS = TEAMS * DEPTH  # of a stage
Row = Callable[[Any], Any]  # of a plane: a word
Factor = tuple[Any, Any | None]  # and what is added to numbers times it
Beside = tuple[tuple[int, bool], ...]  # of planes: words of a row, whether they are whole chunks


class BlockStream(Struct, frozen=True):
    """How a group works: outputs of a block, stages of the ring, eights of rows of x.

    `halves`: 2 where each output has two rows of the weight, with a gate. `slots`: blocks that have
    room for the other planes: 1 where a group has one.
    """

    rows: int
    stages: int
    eights: int = 0
    halves: int = 1
    slots: int = 2

    @property
    def height(self) -> int:
        """Rows of a tile in shared memory: whole patterns."""
        return -(-self.rows // EIGHT) * EIGHT

    @property
    def lines(self) -> int:
        """Rows of a team: eight or sixteen."""
        return -(-self.height * self.halves // (TEAMS * EIGHT)) * EIGHT


class Weights:
    """What all roles see: the ring of stored bytes, the other planes, barriers, sizes.

    Args:
        dtype: of x; the copy engine sees two stored bytes as an element of it.
        crews: of WARPS warps, that multiply.
        bringers: how many say what a stage is to have.
    """

    def __init__(
        self, tile: BlockStream, kind: Format, depth: int, beside: Beside, dtype: Any, w: Any,
        planes: list[Any], crews: int, bringers: int = 1,
    ) -> None:  # fmt: skip
        self.tile: BlockStream = tile
        self.kind: Format = kind
        assert kind.cores is not None, "as `comes_in_blocks` says"
        self.cores: Cores = kind.cores
        self.depth: int = depth
        self.halves: int = tile.halves
        names = ("n", "k", "width", "ldw", "half", "rows", "blocks")
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in names}
        self.words: int = COLUMNS // (2 * per_byte(kind))  # elements of 16 bits
        self.steps: int = -(-depth // COLUMNS)
        slots = tile.stages * tile.halves
        self.ring: Any = lang.ptx.SharedTile(dtype, (slots, tile.height, self.words))
        extents = (self.p["width"], self.p["rows"])
        self.map: Any = lang.ptx.TensorMap(w, self.ring, extents, (self.p["ldw"],), tile.rows)
        self.high: HighBits | None = None
        if high := high_of(kind):
            plane, planes = planes[0], planes[1:]
            self.high = HighBits(tile, high, dtype, plane, self.p["rows"])
        self.planes: list[BesidePlane] = [
            BesidePlane(plane, tile, *layout) for plane, layout in zip(planes, beside, strict=True)
        ]
        self.full: Any = lang.ptx.Barriers(tile.stages)
        self.empty: Any = lang.ptx.Barriers(tile.stages)
        self.told: Any = lang.ptx.Barriers(tile.slots)  # of the other planes
        self.read: Any = lang.ptx.Barriers(tile.slots)
        self.met: Any = lang.ptx.Barriers(1)
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, bringers)
                self.empty.init(stage, WARPS)
            for slot in range(tile.slots):
                self.told.init(slot, 1)
                self.read.init(slot, crews * WARPS)
            self.met.init(0, crews * WARPS * WARP)
            lang.ptx.init_fence()
        lang.barrier()

    def blocks(self) -> Any:
        """The blocks of this group."""
        return lang.range(lang.group_id(), self.p["blocks"], lang.num_groups())

    def bring(self) -> None:
        """Have all planes copied, as stages become free: nobody writes weights."""
        tile, ring, beside = self.tile, Ring(self.tile.stages), Ring(self.tile.slots)
        nbytes = self.halves * tile.rows * bytes_of(self.kind)
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
        return [p.row(p.slot(slot, half), first, lang.minimum(row, last)) for p in self.planes]

    def run(self, number: Any, rows: list[Row]) -> Run:
        """A run of a row whose other planes are these."""
        first = 2 if self.high else 1  # of the planes that lie beside

        def values(plane: int, word: Any) -> list[Any]:
            return list(self.planes[plane - first].plane.unpack([rows[plane - first](word)]))

        return Run(number, values, lambda plane, word: rows[plane - first](word))

    def groups(
        self, planes: list[list[Row]], number: Any, stage: Any, start: Any, stored: Any,
        high: tuple[Any, Any] | None,
    ) -> Iterator[tuple[int, list[tuple[Any, Any]], list[list[Factor]]]]:  # fmt: skip
        """The groups of a run: number, words and factors of each, by eight rows.

        Args:
            planes: rows of the other planes; number: of the run, past the last it is the last.
            start: this thread's chunk in the ring; stored: a fragment for it.
            high: the same of `HighBits`.
        """
        inside = lang.minimum(number, self.depth // RUN - 1)
        factors = [self.cores.factors(self.run(inside, rows)) for rows in planes]
        slot, share = stage * self.halves, GROUP // self.cores.shared
        highs = self.high.load(*high, slot) if self.high and high else []
        words: list[list[tuple[Any, Any]]] = []  # of the next groups
        for group in range(RUN // GROUP):
            if not words:
                chunk = 2 * (group // per_byte(self.kind))
                at = self.ring.right(start, chunk) + self.ring.at_stage(slot)
                words = self._words_at(at, stored, len(planes), group, highs)
            own = slice(group * share, (group + 1) * share)
            yield group, words.pop(0), [line[own] for line in factors]

    def _words_at(
        self, at: Any, stored: Any, eights: int, group: int, highs: list[list[Any]]
    ) -> list[list[tuple[Any, Any]]]:
        """Of two chunks, by group: of each eight rows the first and the last sixteen numbers.

        Args:
            at: this thread's chunk in the ring; stored: a fragment for them.
            group: the first of these chunks' in its run; highs: see `HighBits.load`.
        """
        cores, lines = self.cores, []
        groups = 4 // (cores.high or 4)  # in a chunk of high bits
        lang.ptx.ldmatrix(self.ring, at, stored)
        for eight in range(eights):
            words = []
            for c in range(2):
                chunk, field = divmod(group + c, groups)
                high = highs[eight][chunk] if highs else None
                words += cores.numbers(stored.word(eight + eights * c), high, 2 * field)
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
            to = plane.slot(slot, half)
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
        self.words: int = COLUMNS * bits // 16
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
        chunk = part * self.chunks
        if self.chunks == 2:
            chunk = chunk + lane // self.tile.lines % 2
        start = self.ring.chunk(row, chunk, half)
        both = self.tile.lines == 2 * EIGHT and self.chunks == 2
        return start, lang.ptx.Fragment(self.ring.dtype, (16, 16) if both else (16, 8))

    def load(self, start: Any, to: Any, slot: Any) -> list[list[Any]]:
        """Of each eight rows this thread's words of the chunks of a run."""
        eights = self.tile.lines // EIGHT
        lang.ptx.ldmatrix(self.ring, start + self.ring.at_stage(slot), to)
        return [[to.word(e + eights * c) for c in range(self.chunks)] for e in range(eights)]


class BesidePlane:
    """A plane of a block of outputs, or two, in shared memory, row after row.

    Args:
        pitch: words of a row; whole: rows start on 16 bytes, else with any element.
    """

    def __init__(self, plane: Any, tile: BlockStream, pitch: int, whole: bool) -> None:
        self.plane: Any = plane
        self.tile: BlockStream = tile
        self.pitch: int = pitch
        self.whole: bool = whole
        self._words = words_of(tile.rows, pitch, whole)
        self.memory: Any = lang.shared(u32, tile.slots * tile.halves * self._words)

    def span(self, row: Any, rows: Any) -> tuple[Any, Any]:
        """The first element of rows, and the bytes from the chunk that it is in to their end."""
        first, nbytes = row * (self.pitch * self.plane.dtype.per_word), rows * (4 * self.pitch)
        if self.whole:
            return first, nbytes
        before = self.plane.within_chunk(first) * self.plane.dtype.itemsize
        return first, (before + nbytes + (CHUNK - 1)) & (0xFFFFFFFF - (CHUNK - 1))

    def slot(self, slot: Any, half: Any = 0) -> Any:
        """Where what a block has begins, in words."""
        return (slot * self.tile.halves + half) * self._words

    def row(self, begin: Any, first: Any, row: Any) -> Row:
        """A row of a block that begins at a word, and at a row of the weight."""
        start = begin + row * self.pitch
        if self.whole:
            return lambda word: self.memory[start + word]
        before = self.plane.within_chunk(first * (self.pitch * self.plane.dtype.per_word))
        odd, start = before % 2, start + before // 2

        def word_of(word: Any) -> Any:
            low, high = self.memory[start + word], self.memory[start + word + odd]
            return lang.select(odd == 1, low >> 16 | high << 16, low)

        return word_of


def words_of(rows: int, pitch: int, whole: bool) -> int:
    """Words of shared memory for rows of a plane."""
    return rows * pitch if whole else -(-(rows * pitch + 4) // 4) * 4


def per_byte(kind: Format) -> int:
    """Numbers of a byte."""
    return kind.block // kind.planes[0].length


def high_of(kind: Format) -> int:
    """Bits of a number that come in a ring of their own."""
    return kind.cores.high if kind.cores else 0


def bytes_of(kind: Format) -> int:
    """What a row of a stage has in the rings."""
    return COLUMNS // per_byte(kind) + COLUMNS * high_of(kind) // 8


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


def beside_of(planes: Sequence[Spec]) -> Beside:
    """How planes lie."""
    return tuple((s.strides[0] * s.dtype.itemsize // 4, in_chunks(s)) for s in planes)


def rows_follow(spec: Spec) -> bool:
    """Whether rows follow each other, in chunks or in words of two 16-bit numbers."""
    width, (pitch, step) = spec.shape[1], spec.strides
    if step != 1 or not 0 <= (pitch - width) * spec.dtype.itemsize < CHUNK:
        return False
    return in_chunks(spec) or (spec.dtype in (bf16, f16) and pitch == width and width % 2 == 0)


def in_chunks(spec: Spec) -> bool:
    """Whether rows are whole chunks; the only row of an aligned plane may be none."""
    return spec.aligned and spec.strides[0] * spec.dtype.itemsize % CHUNK == 0
