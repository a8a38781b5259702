"""What four warps do together on sm_90a: products from shared memory; roles in a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from centella.dtypes import f32
from centella.errors import TraceError
from centella.lang.groups import local_id
from centella.lang.ir import Matrix
from centella.lang.ptx.bulk import patterned
from centella.lang.ptx.tiles import HALVES, WARP, Fragment, SharedTile
from centella.lang.tracer import WARPGROUP, Tracer, current
from centella.lang.values import Expr, Value, expr_of, traced

DEPTH = 16  # k of one product


def warpgroup() -> Expr:
    """Which 128 threads of the group these are, u32; in a role it counts as uniform.

    Raises:
        TraceError: outside of a role, where threads that meet have different ones.
    """
    t = current()
    if t.role is None:
        raise TraceError("ptx.warpgroup() is for the inside of a ptx.role")
    return t.pure("warpgroup", "u32")


def warpgroup_uniform(x: Value) -> Expr:
    """A number that is equal in all threads of a warpgroup, as one that control flow may follow.

    Such as what all of them loaded from one place. The simulator reports one that is not. On PTX
    each warp takes its first thread's ("shfl.sync.idx"), so that the assembler knows it as well.

    Raises:
        TraceError: for a bool, or in divergent control flow.
    """
    t = current()
    _whole(t, "warpgroup_uniform")
    value = traced(x, "ptx.warpgroup_uniform")
    if value.type == "bool":
        raise TraceError("ptx.warpgroup_uniform is for numbers, got bool; use lang.cast")
    return t.result(t.effect("warpgroup_uniform", value.type, (value,)), value.type, True)


@contextmanager
def role(first: int, threads: int, *, registers: int | None = None) -> Iterator[None]:
    """A block that threads `first` to `first + threads - 1` of the group run, beside other roles.

    Inside, control flow is uniform where it does not differ within a warpgroup: its threads meet,
    by `wgmma` and `warpgroup_barrier()`; what needs all of the group is a `TraceError`. A role of
    some warps of a warpgroup runs beside the roles of its other warps: its threads meet nobody.

    Args:
        first, threads: Python numbers, multiples of 32.
        registers: a thread gets from here on, a multiple of 8 from 24 to 256 (PTX ISA,
            "setmaxnreg"). What all roles ask for together has to be there.

    Raises:
        TraceError: for other numbers, inside of another block that threads may enter apart, or in
            a role.
    """
    t = current()
    if first % WARP or threads % WARP or not 0 < threads <= t.workgroup - first:
        raise TraceError(
            f"a role is of whole warps of {WARP} threads, of {t.workgroup}; got {threads} from "
            f"{first} on"
        )
    if registers is not None and (first % WARPGROUP or threads % WARPGROUP):
        raise TraceError(f"registers are those of whole warpgroups of {WARPGROUP} threads")
    if registers is not None and (registers % 8 or not 24 <= registers <= 256):
        raise TraceError(f"a thread gets 24 to 256 registers, in eights; got {registers!r}")
    t.need_uniform("a role")
    mine = (local_id() >= first) & (local_id() < first + threads)
    _, block = t.open("if", (mine,), True, (first, threads))
    if registers is not None:
        t.effect("setmaxnreg", "", (), registers)
    yield
    t.close(block)


def warpgroup_barrier() -> None:
    """The threads of each warpgroup meet; their writes to shared memory are visible after.

    PTX ISA, "bar" (bar.sync with a number of threads), at barrier 1 + warpgroup.

    Raises:
        TraceError: in divergent control flow, or for a workgroup of other than whole warpgroups.
    """
    t = current()
    _whole(t, "warpgroup_barrier")
    t.effect("warpgroup_barrier", "", ())


def _whole(t: Tracer, what: str) -> None:
    """Raise unless whole warpgroups come here together."""
    if t.role is None and t.workgroup % WARPGROUP:
        raise TraceError(
            f"{what} needs a workgroup of a multiple of {WARPGROUP} threads, got {t.workgroup}"
        )
    t.need_uniform(what, role=True)


def wgmma(
    c: Fragment, a: SharedTile, at_a: Value, b: SharedTile, at_b: Value, *,
    a_along_k: bool = True, b_along_k: bool = True, accumulate: Value = True,
) -> None:  # fmt: skip
    """Start c += a b on the tensor cores: [64, 16] by [16, n], f16 or bf16 factors, f32 sums.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async" (m64nNk16); sm_90a.
    Both factors are read from shared memory by descriptors that the tiles' layouts give. Thread
    `thread` of the warpgroup holds, of c, in register r the element (16 (thread / 32) + lane / 4 +
    8 (r / 2 % 2), 8 (r / 4) + 2 (lane % 4) + r % 2), as `c.place(r)` says. From here until
    `wgmma_wait` has seen its group, c may be read by nobody, and no tile be written.

    Args:
        c: a Fragment of f32 (64, n), n a multiple of 8 up to 256.
        at_a, at_b: where the factors begin, as `tile.start(row, column, stage)` gives it; equal in
            all threads of a warpgroup.
        a_along_k, b_along_k: a row of the tile is along k: the tile is [m, k], of b [n, k]; else
            [k, m], [k, n].
        accumulate: False: c = a b, whatever c holds; a bool that is uniform in the warpgroup.

    Raises:
        TraceError: for other shapes or dtypes, or in divergent control flow.
    """
    t = current()
    _whole(t, "wgmma")
    if c.shape[0] != 64 or a.dtype is not b.dtype or c.dtype is not f32 or a.dtype not in HALVES:
        raise TraceError(
            f"wgmma takes sums of f32 (64, n) and two tiles of f16 or bf16, got {c.dtype.name} "
            f"{c.shape}, {a.dtype.name} and {b.dtype.name}"
        )
    patterned(a, "wgmma")
    patterned(b, "wgmma")
    places = expr_of(t, at_a, "u32"), expr_of(t, at_b, "u32")
    matrices = _matrix(a, a_along_k), _matrix(b, b_along_k)
    add = expr_of(t, accumulate, "bool")
    t.effect("wgmma", "", (*places, c.pend(), add), (*matrices, a.dtype.name))


def wgmma_held(
    c: Fragment, a: Fragment, b: SharedTile, at_b: Value, *, b_along_k: bool = True,
    accumulate: Value = True,
) -> None:  # fmt: skip
    """Start c += a b with a in registers: [64, 16] by [16, n], f16 or bf16 factors, f32 sums.

    PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async", with a vector of
    registers for A; sm_90a. As `wgmma`; register r of a holds the pair from (16 (thread / 32) +
    lane / 4 + 8 (r % 2), 8 (r / 2) + 2 (lane % 4)) on, as `a.place(r)` says: what registers 2 r and
    2 r + 1 of sums hold of the same 16 columns. Until `wgmma_wait` has seen the group nobody may
    touch a either.

    Args:
        c: a Fragment of f32 (64, n); a: one of f16 or bf16 (64, 16).
        b, at_b, b_along_k, accumulate: as of `wgmma`.

    Raises:
        TraceError: for other shapes or dtypes, or in divergent control flow.
    """
    t = current()
    _whole(t, "wgmma_held")
    if c.shape[0] != 64 or c.dtype is not f32 or a.shape != (64, DEPTH) or a.dtype is not b.dtype:
        raise TraceError(
            f"wgmma_held takes sums of f32 (64, n), a factor (64, {DEPTH}) and a tile of its "
            f"dtype, got {c.dtype.name} {c.shape}, {a.dtype.name} {a.shape} and {b.dtype.name}"
        )
    patterned(b, "wgmma_held")
    start, add = expr_of(t, at_b, "u32"), expr_of(t, accumulate, "bool")
    attr = (_matrix(b, b_along_k), b.dtype.name)
    t.effect("wgmma_held", "", (start, c.pend(), a.lend(), add), attr)


def _matrix(tile: SharedTile, along_k: bool) -> Matrix:
    """A factor in a tile; along k one product reads one panel, whose distance has no meaning."""
    leading = 16 if along_k else tile.rows * tile.panel
    return Matrix(tile.memory.position, tile.swizzle, along_k, 8 * tile.panel, leading)


def wgmma_fence() -> None:
    """Before a wgmma: registers and shared memory written by this warpgroup are there for it.

    PTX ISA, "wgmma.fence"; sm_90a. Needed before the first, and where sums were written otherwise.
    """
    t = current()
    _whole(t, "wgmma_fence")
    t.effect("wgmma_fence", "", ())


def wgmma_commit() -> None:
    """Make a group of the products started since the last one (PTX ISA, "wgmma.commit_group")."""
    t = current()
    _whole(t, "wgmma_commit")
    t.effect("wgmma_commit", "", ())
    t.pending.append(set())


def wgmma_wait(pending: int = 0) -> None:
    """Wait until at most `pending` groups of products, the latest, are under way.

    PTX ISA, "wgmma.wait_group"; sm_90a. Sums of the others may be read, their tiles written.

    Raises:
        TraceError: unless `pending` is a Python number, 0 or more.
    """
    groups: Any = pending
    if not isinstance(groups, int) or groups < 0:
        raise TraceError(f"wgmma_wait takes a Python number of groups, got {pending!r}")
    t = current()
    _whole(t, "wgmma_wait")
    t.effect("wgmma_wait", "", (), pending)
    del t.pending[: max(len(t.pending) - 1 - pending, 0)]
