"""What the streamed products of quantised weights have in common (sm_90a).

One thread has tiles of stored bytes copied into a ring, before the launches before this one are
over. The other planes of a block of outputs lie one behind the other in memory; two warps copy
them, a block ahead. Of the warps that multiply four share the columns of a stage, two of these
teams its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import bf16, f16, u32
from centella.ops.matmul.streamed_kernel import DEPTH, EIGHT, WARPGROUP
from centella.ops.quant.format import CHUNK, RUN, Format
from centella.ops.ring import Ring
from centella.ops.rows import WARP
from centella.specs import Spec

COPIERS = WARPGROUP - 2 * WARP  # threads that bring the other planes
AT_ONCE = 4  # chunks that each of them has under way
ACROSS, TEAMS = 4, 2  # warps that share a stage's columns, a run each; its rows
WARPS = ACROSS * TEAMS
CONSUMERS = WARPS * WARP
COLUMNS = ACROSS * RUN  # of x, of a stage
MOST_ROWS = TEAMS * DEPTH  # of a stage
Beside = tuple[tuple[int, bool], ...]  # of planes: words of a row, whether they are whole chunks


class BlockStream(Struct, frozen=True):
    """How a group works: outputs of a block, stages of the ring, eights of rows of x.

    `halves`: 2 where each output has two rows of the weight, with a gate.
    """

    rows: int
    stages: int
    eights: int = 0
    halves: int = 1

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
        bringers: who says what a stage is to have.
        names: scalars of the launch besides.
    """

    def __init__(
        self, tile: BlockStream, kind: Format, depth: int, beside: Beside, dtype: Any, w: Any,
        planes: list[Any], bringers: int, names: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.tile: BlockStream = tile
        self.kind: Format = kind
        self.depth: int = depth
        self.halves: int = tile.halves
        own = ("n", "k", "width", "ldw", "half", "rows", "blocks")
        self.p: dict[str, Any] = {n: lang.parameter(n, u32) for n in (*own, *names)}
        self.words: int = COLUMNS // (2 * per_byte(kind))  # elements of 16 bits
        self.steps: int = -(-depth // COLUMNS)
        slots = tile.stages * tile.halves
        self.ring: Any = lang.ptx.SharedTile(dtype, (slots, tile.height, self.words))
        extents = (self.p["width"], self.p["rows"])
        self.map: Any = lang.ptx.TensorMap(w, self.ring, extents, (self.p["ldw"],), tile.rows)
        self.planes: list[BesidePlane] = [
            BesidePlane(plane, tile, *layout) for plane, layout in zip(planes, beside, strict=True)
        ]
        self.full: Any = lang.ptx.Barriers(tile.stages)
        self.empty: Any = lang.ptx.Barriers(tile.stages)
        self.told: Any = lang.ptx.Barriers(2)  # of the other planes
        self.read: Any = lang.ptx.Barriers(2)
        self.met: Any = lang.ptx.Barriers(1)
        with lang.if_(lang.local_id() == 0):
            for stage in range(tile.stages):
                self.full.init(stage, bringers)
                self.empty.init(stage, WARPS)
            for slot in range(2):
                self.told.init(slot, COPIERS)
                self.read.init(slot, WARPS)
            self.met.init(0, CONSUMERS)
            lang.ptx.init_fence()
        lang.barrier()

    def blocks(self) -> Any:
        """The blocks of this group."""
        return lang.range(lang.group_id(), self.p["blocks"], lang.num_groups())

    def bring(self) -> None:
        """Have all tiles of stored bytes copied, as stages become free: nobody writes weights."""
        tile, ring = self.tile, Ring(self.tile.stages)
        nbytes = 2 * self.halves * tile.rows * self.words
        for block in self.blocks():
            for step in lang.range(lang.const(self.steps, u32)):
                stage = ring.stage.get()
                self.empty.wait(stage, ring.parity ^ 1)
                self.full.expect(stage, lang.const(nbytes, u32))
                for half in range(self.halves):
                    at = (step * self.words, self.row(block, half))
                    slot = stage * self.halves + half
                    lang.ptx.tma_load(self.map, at, slot, self.full, stage)
                ring.advance()
        lang.ptx.launch_dependents()

    def row(self, block: Any, half: int) -> Any:
        """The first row of the weight of a block."""
        return block * self.tile.rows + (self.p["half"] if half else 0)

    def copy(self, me: Any) -> None:
        """Bring the other planes of block after block, two ahead at most.

        Args:
            me: which of the COPIERS this thread is.
        """
        ring = Ring(2)
        for block in self.blocks():
            slot = ring.stage.get()
            self.read.wait(slot, ring.parity ^ 1)
            for plane in self.planes:
                for half in range(self.halves):
                    plane.copy(me, self.row(block, half), slot, half, self.p["rows"])
            self.told.arrive(slot)
            ring.advance()


class BesidePlane:
    """A plane of two blocks of outputs in shared memory, row after row.

    Args:
        pitch: words of a row.
        whole: rows start on 16 bytes, and are copied in chunks; else element by element.
    """

    def __init__(self, plane: Any, tile: BlockStream, pitch: int, whole: bool) -> None:
        self.plane: Any = plane
        self.rows: int = tile.rows
        self.halves: int = tile.halves
        self.pitch: int = pitch
        self.whole: bool = whole
        self._memory = lang.shared(u32, 2 * tile.halves * tile.rows * pitch)

    def copy(self, me: Any, row: Any, slot: Any, half: int, count: Any) -> None:
        """Bring the rows from one on, of which there are `count`; then the last one again."""
        step, per = 4 if self.whole else 1, self.plane.dtype.per_word
        last = count * (self.pitch // step) - 1
        first, every = row * (self.pitch // step), self.rows * self.pitch // step
        for at in lang.range(me, lang.const(every, u32), COPIERS * AT_ONCE):
            several = [at + COPIERS * i for i in range(AT_ONCE)]
            loaded = [self._load(lang.minimum(first + i, last) * (step * per)) for i in several]
            for i, words in zip(several, loaded, strict=True):
                with lang.if_(i < every):
                    self._store(self.start(slot, half) + i * step, words)

    def _load(self, element: Any) -> list[Any]:
        """The words from an element on: four, or one."""
        if self.whole:
            return list(self.plane.load_bits(element))
        return list(self.plane.pack([self.plane[element + e] for e in range(2)]))

    def _store(self, at: Any, words: list[Any]) -> None:
        if self.whole:
            self._memory.store(at, words)
        else:
            self._memory[at] = words[0]

    def start(self, slot: Any, half: Any = 0) -> Any:
        """Where the first row begins, in words."""
        return (slot * self.halves + half) * (self.rows * self.pitch)

    def values(self, word: Any) -> list[Any]:
        """The elements of a word."""
        return list(self.plane.unpack([self._memory[word]]))


def per_byte(kind: Format) -> int:
    """Numbers of a byte."""
    return kind.block // kind.planes[0].length


def beside_of(planes: Sequence[Spec]) -> Beside:
    """How planes lie."""
    return tuple((s.strides[0] * s.dtype.itemsize // 4, s.aligned) for s in planes)


def rows_follow(spec: Spec) -> bool:
    """Whether rows follow each other, in chunks or in words of two 16-bit numbers."""
    width, (pitch, step) = spec.shape[1], spec.strides
    if step != 1 or (pitch - width) * spec.dtype.itemsize >= CHUNK:
        return False
    return spec.aligned or (spec.dtype in (bf16, f16) and pitch == width and width % 2 == 0)
