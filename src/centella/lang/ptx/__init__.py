"""PTX from the kernel IR (NVIDIA PTX ISA): what `ptxas` or the driver assembles, no toolkit.

One table of types, one of instructions, and a small rule for each operation that needs more than
one instruction. Every value is a virtual register of its own (`%f` f32, `%r` i32 and u32, `%p`
bool); the assembler allocates. Floating point is never contracted: add.rn, mul.rn, fma.rn.
Integer values that a loop does not change are computed before it, up to `ROOM` of them a loop;
nothing moves out of an `if`.

For kernels there are the operations that no other target has: `Fragment`, `SharedTile`, `mma_sync`,
`ldmatrix`, `widen_i8`, `cp_async` and its groups; `stmatrix` and clusters from sm_90 on;
warpgroups, memory barriers and the copy engine on sm_90a (docs/kernel-language.md, "PTX alone").
"""

from centella.lang.ptx.bulk import (
    Barriers,
    TensorMap,
    async_fence,
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
from centella.lang.ptx.control import ROOM
from centella.lang.ptx.emit import emit_ptx
from centella.lang.ptx.intrinsics import (
    cp_async,
    cp_async_commit,
    cp_async_wait,
    fetch_lines,
    launch_dependents,
    ldmatrix,
    max_pairs,
    mma_sync,
    resident,
    stmatrix,
    widen_i8,
)
from centella.lang.ptx.layout import (
    ParamLayout,
    SharedLayout,
    entry_name,
    param_layout,
    shared_layout,
)
from centella.lang.ptx.tables import TARGETS, literal, overlaps
from centella.lang.ptx.tiles import Fragment, SharedTile
from centella.lang.ptx.warpgroups import (
    grid,
    role,
    warpgroup,
    warpgroup_barrier,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_held,
    wgmma_wait,
)

__all__ = [
    "ROOM",
    "TARGETS",
    "Barriers",
    "Fragment",
    "ParamLayout",
    "SharedLayout",
    "SharedTile",
    "TensorMap",
    "async_fence",
    "cluster",
    "cluster_arrive",
    "cluster_load",
    "cluster_rank",
    "cluster_size",
    "cluster_wait",
    "cp_async",
    "cp_async_commit",
    "cp_async_wait",
    "emit_ptx",
    "entry_name",
    "fetch_lines",
    "grid",
    "init_fence",
    "launch_dependents",
    "ldmatrix",
    "literal",
    "max_pairs",
    "mma_sync",
    "overlaps",
    "param_layout",
    "resident",
    "role",
    "shared_layout",
    "stmatrix",
    "tma_load",
    "tma_store",
    "tma_store_commit",
    "tma_store_wait",
    "warpgroup",
    "warpgroup_barrier",
    "wgmma",
    "wgmma_commit",
    "wgmma_fence",
    "wgmma_held",
    "wgmma_wait",
    "widen_i8",
]
