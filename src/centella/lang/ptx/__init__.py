"""What NVIDIA GPUs alone can do, for kernels (PTX ISA): a kernel that uses it has no WGSL.

`Fragment`, `SharedTile`, `mma_sync`, `mma_bytes`, `ldmatrix`, `widen_i8`, `widen_u7`, `cp_async`
and its groups from sm_80 on; `stmatrix` and clusters from sm_90 on; warpgroups, memory barriers and
the copy engine on sm_90a (docs/kernel-language.md, "PTX alone").
"""

from centella.lang.ptx.bulk import (
    Barriers,
    TensorMap,
    async_fence,
    bulk_load,
    init_fence,
    tma_load,
    tma_store,
    tma_store_commit,
    tma_store_wait,
)
from centella.lang.ptx.clusters import (
    cluster,
    cluster_arrive,
    cluster_load,
    cluster_rank,
    cluster_size,
    cluster_wait,
)
from centella.lang.ptx.grids import grid, grid_barrier
from centella.lang.ptx.intrinsics import (
    await_launches,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    fetch_lines,
    launch_dependents,
    ldmatrix,
    max_pairs,
    mma_bytes,
    mma_sync,
    permute_bytes,
    prefetch,
    reciprocal,
    resident,
    rsqrt,
    stmatrix,
    widen_i8,
    widen_u7,
)
from centella.lang.ptx.tiles import Fragment, SharedTile
from centella.lang.ptx.warpgroups import (
    role,
    warpgroup,
    warpgroup_barrier,
    warpgroup_uniform,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_held,
    wgmma_wait,
)

__all__ = [
    "Barriers", "Fragment", "SharedTile", "TensorMap", "async_fence", "await_launches", "bulk_load",
    "cluster", "cluster_arrive", "cluster_load", "cluster_rank", "cluster_size", "cluster_wait",
    "cp_async", "cp_async_commit", "cp_async_wait", "fetch_lines", "grid", "grid_barrier",
    "init_fence", "launch_dependents", "ldmatrix", "max_pairs", "mma_bytes", "mma_sync",
    "permute_bytes", "prefetch", "reciprocal", "resident", "role", "rsqrt", "stmatrix",
    "tma_load", "tma_store", "tma_store_commit", "tma_store_wait", "warpgroup", "warpgroup_barrier",
    "warpgroup_uniform", "wgmma", "wgmma_commit", "wgmma_fence", "wgmma_held", "wgmma_wait",
    "widen_i8", "widen_u7",
]  # fmt: skip  # a table
