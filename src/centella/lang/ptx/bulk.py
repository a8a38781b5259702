"""Barriers in shared memory, and copies of whole boxes that complete at them (sm_90a).

One thread asks for a box of a tensor by its coordinates; the copy engine computes the addresses,
fills with zeros what lies outside of the tensor, and counts the bytes at a barrier. Whoever waits
there may then read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from centella.dtypes import i8, u8, u32
from centella.errors import TraceError
from centella.lang.ir import MapParam
from centella.lang.memory import Argument, Shared
from centella.lang.ptx.clusters import clustered, mask_of, rank_of
from centella.lang.ptx.tiles import CHUNK, SharedTile
from centella.lang.tracer import Tracer, current
from centella.lang.values import Expr, Value, expr_of

ALIGNED = 1024  # bytes: where the pattern of a 128-byte swizzle begins
MOST_BOX = 256  # elements along a dimension of a box
MOST_DIMENSIONS = 5


class Barriers:
    """`count` memory barriers in shared memory, each with a phase.

    PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier"; here sm_90a. A
    phase is over when as many arrivals have come as `init` said, and all bytes that `expect`
    announced have been copied. The first phase has parity 0; of a fresh barrier the phase before
    it, of parity 1, counts as over. The threads that did not initialise it see a barrier after
    `init_fence()` and `lang.barrier()`.

    Raises:
        TraceError: unless `count` is a Python number, 1 or more.
    """

    def __init__(self, count: int) -> None:
        number: Any = count
        if not isinstance(number, int) or number < 1:
            raise TraceError(f"Barriers takes a Python number of them, got {count!r}")
        self.count: int = count
        self.memory: Shared = Shared(current(), "u32", 2 * count)

    def _index(self, index: Value) -> tuple[Tracer, Expr]:
        t = current()
        which = expr_of(t, index, "u32")
        if isinstance(which.const, int) and which.const >= self.count:
            raise TraceError(f"there are {self.count} barriers, got number {which.const}")
        return t, which

    def init(self, index: Value, arrivals: int) -> None:
        """Make one ready for phases of `arrivals` arrivals, a Python number; by one thread."""
        t, which = self._index(index)
        t.effect("mbar_init", "", (which,), (self.memory.position, arrivals))

    def arrive(self, index: Value, rank: Value | None = None) -> None:
        """This thread arrives: what it read and wrote before comes before the end of the phase.

        Args:
            rank: of the group of the cluster whose barrier it is, u32; None: this group's. (PTX
                ISA, "mapa", "mbarrier.arrive" with .shared::cluster.) What this thread has read may
                then be overwritten by copies that wait there; what it wrote is seen by no other
                group before a cluster barrier. Nobody here waits for its way there.

        Raises:
            TraceError: for a rank in a kernel without clusters, or that its cluster has not.
        """
        t, which = self._index(index)
        if rank is None:
            t.effect("mbar_arrive", "", (which,), self.memory.position)
            return
        clustered(t, "an arrival at another group's barrier")
        t.effect("mbar_arrive_at", "", (which, rank_of(t, rank)), self.memory.position)

    def expect(self, index: Value, nbytes: Value) -> None:
        """This thread arrives and announces bytes, which the phase waits for, too."""
        t, which = self._index(index)
        t.effect("mbar_expect", "", (which, expr_of(t, nbytes, "u32")), self.memory.position)

    def send(
        self, index: Value, array: Shared, first: Value, values: Sequence[Value], rank: Value
    ) -> None:
        """Store one word or four to the shared memory of the group of a rank; they count there.

        PTX ISA, "Data Movement and Conversion Instructions: st.async"; sm_90. Whoever has waited
        for the phase of that group's barrier sees them: no cluster barrier is needed behind, and
        nobody here waits. That group has made its barrier ready, and met the cluster, before; it
        stays until it has waited.

        Args:
            index: of the barrier, which has announced their bytes (`expect`); array, first: where
                to, of four words a multiple of 4; rank: one's own, too.

        Raises:
            TraceError: in a kernel without clusters, for a rank that its cluster has not, or
                another number of words.
        """
        t, which = self._index(index)
        clustered(t, "a store to another group's memory")
        if len(values) not in (1, 4):
            raise TraceError(f"send takes 1 or 4 words, got {len(values)}")
        array.align(4 * len(values))
        words = [expr_of(t, v, array.type) for v in values]
        operands = (expr_of(t, first, "u32"), which, rank_of(t, rank), *words)
        t.effect("cluster_store", "", operands, (array.position, self.memory.position))

    def wait(self, index: Value, parity: Value) -> None:
        """Wait until the phase of a parity, 0 or 1, is over; it is the present one or the last."""
        t, which = self._index(index)
        t.effect("mbar_wait", "", (which, expr_of(t, parity, "u32")), self.memory.position)


def init_fence() -> None:
    """Barriers that this thread initialised are there for copies, and for others after a barrier.

    PTX ISA, "membar / fence" (fence.mbarrier_init.release.cluster); sm_90a.
    """
    current().effect("mbar_fence", "", ())


def async_fence() -> None:
    """What this thread stored to shared memory is there for copies and wgmma that follow.

    PTX ISA, "membar / fence" (fence.proxy.async.shared::cta); sm_90a. Each thread that stored calls
    it, before the barrier behind which another one starts the copy.
    """
    current().effect("async_fence", "", ())


class TensorMap:
    """How boxes of a tensor argument go to the panels of a `SharedTile` and back.

    PTX ISA, "Tensors"; CUDA driver API, "Tensor Map Object Management". The driver makes the map
    when a launch is bound, from the argument's address and the launch's parameters, with the tile's
    own swizzle and panels, so that the two cannot disagree. It is passed with the parameters.

    Args:
        argument: an argument of rank 1 whose first element lies on 16 bytes, of the tile's dtype;
            or an In argument of i8, u8 or u32, of which two bytes stand for an element: extents,
            strides and coordinates count pairs of them. Of one that is changed in place a box that
            a group of the launch writes to has any content.
        tile: where boxes go: (a stage of) its rows and columns are the first two dimensions.
        extents: launch parameters: elements along each dimension, from the one whose elements are
            neighbours on; at least 1 each.
        strides: launch parameters: elements from one to the next along the dimensions but the
            first; multiples of 16 bytes where there is a next.
        rows: of a box; None: the tile's.
        whole: the first extent is whole panels, and so are first coordinates: then all panels of a
            stage are one copy. Of boxes with all rows of the tile.

    Raises:
        TraceError: for another argument or dtype, dimensions that are no launch parameters, or a
            tile with another swizzle than its panels' rows or more than 256 of them; for `whole`
            with fewer rows than the tile's, or five extents.
    """

    def __init__(
        self,
        argument: Argument,
        tile: SharedTile,
        extents: Sequence[Value],
        strides: Sequence[Value],
        rows: int | None = None,
        whole: bool = False,
    ) -> None:
        t = current()
        same = argument.dtype is tile.dtype
        pairs = argument.dtype in (i8, u8, u32) and argument.mode == "in"
        if argument.rank != 1 or not (same or pairs):
            raise TraceError(
                f"a TensorMap is of an argument of rank 1 and {tile.dtype.name}, or of "
                f"bytes or words that are read, got {argument.name!r}: {argument.mode}, rank "
                f"{argument.rank}, {argument.dtype.name}"
            )
        if not 2 <= len(extents) <= MOST_DIMENSIONS or len(strides) != len(extents) - 1:
            raise TraceError(
                f"a TensorMap has 2 to {MOST_DIMENSIONS} extents and a stride less, got "
                f"{len(extents)} and {len(strides)}"
            )
        patterned(tile, "a TensorMap")
        down = tile.rows if rows is None else rows
        if not 0 < down <= min(MOST_BOX, tile.rows):
            raise TraceError(
                f"a box has at most {MOST_BOX} rows, of a tile of {tile.rows}, got {down}"
            )
        width = tile.panel // tile.dtype.itemsize
        panels = tile.columns // width if whole else 1
        if panels > 1 and (down < tile.rows or len(extents) == MOST_DIMENSIONS):
            raise TraceError(
                f"panels are copied at once in boxes of all {tile.rows} rows, with fewer than "
                f"{MOST_DIMENSIONS} extents, got {down} rows, {len(extents)} extents"
            )
        self.argument: Argument = argument
        self.tile: SharedTile = tile
        self.panels: int = panels
        self.dimensions: int = len(extents)
        self.rows: int = down
        box = (width, down, *(1,) * (len(extents) - 2))
        offset = t.param((argument.name, "offset"), "u32")
        places = [_parameter(t, e) for e in (offset, *extents, *strides)]
        param = MapParam(
            argument.position, places[0], tuple(places[1 : 1 + len(extents)]),
            tuple(places[1 + len(extents) :]), box, tile.swizzle, tile.dtype.name, panels,
        )  # fmt: skip
        self.position: int = len(t.maps)
        t.maps.append(param)


def patterned(tile: SharedTile, what: str) -> None:
    """Have a tile lie as copy engine and tensor cores address it.

    Raises:
        TraceError: its swizzle is not that of its panels.
    """
    if tile.swizzle != tile.panel:
        raise TraceError(
            f"{what} needs a SharedTile whose swizzle is a panel's row ({tile.panel} bytes, 32 or "
            f"more), got {tile.swizzle}"
        )
    tile.memory.align(ALIGNED)


def _parameter(t: Tracer, value: Value) -> int:
    """The position of a launch parameter among the parameters."""
    if not isinstance(value, Expr) or value.type != "u32" or t.body[value.id][0] != "param":
        raise TraceError(f"extents and strides of a TensorMap are u32 launch parameters: {value!r}")
    position: int = t.body[value.id][3]
    return position


def tma_load(
    source: TensorMap,
    at: Sequence[Value],
    stage: Value,
    barriers: Barriers,
    b: Value,
    mask: Value | None = None,
    row: int = 0,
) -> None:
    """Start to copy a box to a stage of the map's tile; by one thread.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor"
    (.shared::cluster.global.tile.mbarrier::complete_tx::bytes); sm_90a. What lies outside of the
    tensor becomes zeros, and counts.

    Args:
        at: coordinates of the box's first element, u32, by dimension.
        barriers, b: the barrier, announced there by `expect`, that the bytes count at.
        mask: the groups of the cluster that get the box, bit r for rank r, u32; None: this one.
            (.multicast::cluster.) It lands in each of them at the same place of the same tile, and
            counts at its own barrier of that number, which each group itself expects it at. L2 is
            read once for all of them. Whoever asks knows that all have initialised that barrier
            (a cluster barrier), and are done with that stage (`arrive` with a rank).
        row: of the stage that the box begins at, a multiple of 8.

    Raises:
        TraceError: for an Out argument, or another number of coordinates; for a mask in a kernel
            without clusters, or with ranks that its cluster has not, or with none; for a box that
            ends past the rows of a stage, or begins at a row that is no multiple of 8.
    """
    t = current()
    if mask is not None:
        clustered(t, "a tma_load to several groups")
    if source.argument.mode == "out":
        raise TraceError(f"tma_load reads no Out argument, got {source.argument.name!r}")
    _, which = barriers._index(b)
    if not 0 <= row <= source.tile.rows - source.rows:
        raise TraceError(
            f"a box of {source.rows} rows ends within a stage of {source.tile.rows}, got row {row}"
        )
    for first, where in _panels(t, source, at, stage):
        first = first + source.tile.down(row) if row else first
        attr = (source.tile.memory.position, barriers.memory.position, source.position)
        if mask is None:
            t.effect("tma_load", "", (first, which, *where), attr)
        else:
            t.effect("tma_multicast", "", (first, which, mask_of(t, mask), *where), attr)


def bulk_load(
    source: Argument, element: Value, nbytes: Value, array: Shared, word: Value,
    barriers: Barriers, b: Value,
) -> None:  # fmt: skip
    """Start to copy neighbouring bytes of an argument to shared memory; by one thread.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk"
    (.shared::cluster.global.mbarrier::complete_tx::bytes); here sm_90a. They count at a barrier, as
    those of `tma_load` do, but all of them are in the argument's memory.

    Args:
        source: an In argument of rank 1; element: the copy begins with the 16 bytes that it is in
            (`source.within_chunk(element)`).
        nbytes: how many, u32: a multiple of 16, and not 0. The argument's last 16 bytes may have
            more than it has.
        array, word: where to, from a word on that is a multiple of 4.
        barriers, b: the barrier, announced there by `expect`, that the bytes count at.

    Raises:
        TraceError: for an argument that is written, or of another rank.
    """
    t = current()
    if source.mode != "in" or source.rank != 1:
        raise TraceError(
            f"bulk_load reads an In argument of rank 1, got {source.name!r}: {source.mode}, rank "
            f"{source.rank}"
        )
    array.align(CHUNK)
    where, _ = source.chunk((element,))
    _, which = barriers._index(b)
    chunk = expr_of(t, word, "u32") // (CHUNK // 4)
    operands = (chunk, where, which, expr_of(t, nbytes, "u32"))
    attr = (array.position, source.position, barriers.memory.position)
    t.effect("bulk_load", "", operands, attr)


def tma_store(target: TensorMap, at: Sequence[Value], stage: Value = 0) -> None:
    """Start to copy a stage of the map's tile to a box; by one thread, in its open group.

    PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor"
    (.global.shared::cta.tile.bulk_group); sm_90a. What lies outside of the tensor is not written.
    Threads that stored to the tile call `async_fence()` and meet before.

    Raises:
        TraceError: for an In argument, or another number of coordinates.
    """
    t = current()
    target.argument.written()
    for first, where in _panels(t, target, at, stage):
        t.effect("tma_store", "", (first, *where), (target.tile.memory.position, target.position))


def tma_store_commit() -> None:
    """Make a group of the stores that this thread started since the last one.

    PTX ISA, "cp.async.bulk.commit_group"; sm_90a.
    """
    current().effect("tma_store_commit", "", ())


def tma_store_wait(pending: int = 0) -> None:
    """Wait until of this thread's groups all but the latest `pending` have read their tile.

    PTX ISA, "cp.async.bulk.wait_group.read"; sm_90a. The tile may then be written again; the stores
    are done at the end of the launch.
    """
    current().effect("tma_store_wait", "", (), pending)


def _panels(
    t: Tracer, map_: TensorMap, at: Sequence[Value], stage: Value
) -> list[tuple[Expr, tuple[Expr, ...]]]:
    """The first chunk and the coordinates of each panel of a stage."""
    if len(at) != map_.dimensions:
        raise TraceError(f"a map of {map_.dimensions} dimensions takes as many coordinates: {at!r}")
    tile = map_.tile
    first = tile.at_stage(stage)
    width = tile.panel // tile.dtype.itemsize
    x, y, *rest = (expr_of(t, c, "u32") for c in at)
    if map_.panels > 1:
        return [(first, (expr_of(t, 0, "u32"), y, expr_of(t, x // width, "u32"), *rest))]
    return [
        (first + n * tile.down(tile.rows), (expr_of(t, x + n * width, "u32"), y, *rest))
        for n in range(tile.columns // width)
    ]
