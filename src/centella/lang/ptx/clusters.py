"""Clusters: groups that run at the same time and reach each other's shared memory (sm_90 on).

A kernel says how many groups a cluster has, so every launch of it has such clusters. Groups are
numbered in one dimension, and so are those of a cluster, by their rank.
"""

from __future__ import annotations

from typing import Any

from centella.errors import TraceError
from centella.lang.memory import Shared
from centella.lang.tracer import Tracer, current
from centella.lang.values import Expr, Value, expr_of

MOST_GROUPS = 8  # of a cluster that any GPU with clusters runs


def cluster(groups: int) -> None:
    """Have every `groups` neighbouring groups of a launch be a cluster, which runs together.

    PTX ISA, "Cluster Dimension Directives: .explicitcluster, .reqnctapercluster"; sm_90. Once, in
    front of what needs it. Group g has rank g % groups of cluster g / groups. A launch has a whole
    number of clusters, else it is a LimitError.

    Cost: a cluster starts when one part of the GPU (a GPC: 16 or 18 multiprocessors of an H200) has
    room for all of its groups, so that large ones leave multiprocessors idle; of groups that fill
    one each, pairs always fit.

    No group may end while another one still arrives at its barriers, copies to its shared memory or
    reads it: where that may be, the kernel ends with `cluster_arrive()` and `cluster_wait()`. The
    simulator, which runs the groups of a cluster by turns, reports it.

    Raises:
        TraceError: unless `groups` is a Python number from 2 to 8 (larger clusters are not
            portable), or where the kernel has said so before.
    """
    t = current()
    number: Any = groups
    if not isinstance(number, int) or not 2 <= number <= MOST_GROUPS:
        raise TraceError(f"a cluster has 2 to {MOST_GROUPS} groups, got {groups!r}")
    if t.cluster > 1:
        raise TraceError(f"ptx.cluster is said once: clusters of {t.cluster}, now {groups}")
    t.cluster = number
    t.effect("cluster", "", (), number)


def cluster_rank() -> Expr:
    """Which group of its cluster this one is, u32, uniform in the group.

    PTX ISA, "Special Registers: %cluster_ctarank"; sm_90. Cost: one move.

    Raises:
        TraceError: in a kernel without clusters.
    """
    t = current()
    clustered(t, "cluster_rank")
    return t.pure("cluster_rank", "u32")


def cluster_size() -> int:
    """Groups of a cluster: a Python number, as the kernel said; 1 without clusters."""
    return current().cluster


def cluster_arrive(*, relaxed: bool = False) -> None:
    """All threads of all groups of the cluster arrive; each of them waits later on.

    PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster"
    (.arrive.aligned, which releases); sm_90. What a thread does between arriving and waiting is
    ordered with nobody's.

    Control flow is to be uniform in the cluster: a condition on the group or its rank is not, and
    tracing does not see that. The simulator does: as a deadlock.

    Cost: unless relaxed a memory barrier of the GPU, for what each thread wrote; then a way between
    multiprocessors, which work before the wait hides.

    Args:
        relaxed: without the memory barrier (.arrive.relaxed): after the wait other groups have no
            promise but that barriers are initialised that were before `init_fence()`.

    Raises:
        TraceError: in a kernel without clusters, in a role or divergent control flow.
    """
    _meet("cluster_arrive", relaxed or None)


def cluster_wait() -> None:
    """Wait until all threads of all groups of the cluster have arrived.

    PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster"
    (.wait.aligned, which acquires); sm_90. What any of them wrote to shared or global memory before
    it arrived is visible after. Cost: besides waiting, the L1 cache is emptied.

    Raises:
        TraceError: as `cluster_arrive`.
    """
    _meet("cluster_wait")


def cluster_load(array: Shared, index: Value, rank: Value) -> Expr:
    """Word `index` of a shared array as the group of a rank has it.

    PTX ISA, "Data Movement and Conversion Instructions: mapa", "ld" (.shared::cluster); sm_90. That
    group's threads wrote it before a cluster barrier that lies behind, and write it again, or end,
    only after another one. No other barrier orders such loads; the simulator reports what does not
    keep to this.

    Cost: the way to another multiprocessor: some 180 clocks on an H100, as published, where one's
    own shared memory takes 30. Several loads on their way at once hide it; neighbouring threads
    read neighbouring words.

    Args:
        array: `lang.shared(...)`; index: u32; rank: u32 below `cluster_size()`, one's own too.

    Raises:
        TraceError: in a kernel without clusters, or for a rank that it does not have.
    """
    t = current()
    clustered(t, "cluster_load")
    where, whose = expr_of(t, index, "u32"), rank_of(t, rank)
    id_ = t.effect("cluster_load", array.type, (where, whose), array.position)
    return t.result(id_, array.type, False)


def clustered(tracer: Tracer, what: str) -> None:
    """Raise unless the kernel has clusters."""
    if tracer.cluster == 1:
        raise TraceError(f"{what} in a kernel without clusters: ptx.cluster(groups) comes before")


def rank_of(tracer: Tracer, rank: Value) -> Expr:
    """A rank as u32, below the cluster's size where it is known.

    Raises:
        TraceError: it is not.
    """
    which = expr_of(tracer, rank, "u32")
    if isinstance(which.const, int) and which.const >= tracer.cluster:
        raise TraceError(f"a cluster of {tracer.cluster} has no rank {which.const}")
    return which


def mask_of(tracer: Tracer, mask: Value) -> Expr:
    """Ranks as bits of u32, of this cluster and one of them at least, where that is known.

    Raises:
        TraceError: it is not so.
    """
    ranks = expr_of(tracer, mask, "u32")
    if isinstance(ranks.const, int) and not 0 < ranks.const < 1 << tracer.cluster:
        raise TraceError(
            f"a mask has a bit for each rank of a cluster of {tracer.cluster} and one set at "
            f"least, got {ranks.const:#b}"
        )
    return ranks


def _meet(op: str, relaxed: bool | None = None) -> None:
    t = current()
    clustered(t, op)
    t.need_uniform(op)
    t.effect(op, "", (), relaxed)
