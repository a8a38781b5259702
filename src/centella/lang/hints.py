"""What to write for names of CUDA, Triton, Numba and WGSL that this language spells otherwise."""

from __future__ import annotations

_THREAD = "lang.local_id() in its group, lang.global_id() in the launch"
_GROUP = "lang.group_id()"
NAMES: dict[str, str] = {
    **dict.fromkeys(("thread_id", "thread_idx", "threadIdx", "local_invocation_id"), _THREAD),
    **dict.fromkeys(("grid", "global_invocation_id"), "lang.global_id()"),
    **dict.fromkeys(("block_id", "block_idx", "blockIdx", "program_id", "workgroup_id"), _GROUP),
    **dict.fromkeys(("block_dim", "blockDim"), "lang.workgroup_size()"),
    **dict.fromkeys(("grid_dim", "gridDim", "num_programs", "num_workgroups"), "lang.num_groups()"),
    **dict.fromkeys(("syncthreads", "sync", "workgroupBarrier"), "lang.barrier()"),
    **dict.fromkeys(("atomicAdd", "add_atomic"), "lang.atomic_add(x, i, value)"),
    **dict.fromkeys(("while_", "while_loop"), "lang.loop() with lang.break_if(condition)"),
    **dict.fromkeys(("for_", "for_range", "arange"), "lang.range(n)"),
    **dict.fromkeys(("shared_array", "shared_memory"), "lang.shared(dtype, n)"),
    "max": "lang.maximum(a, b)",
    "min": "lang.minimum(a, b)",
    "where": "lang.select(condition, a, b)",
    "load": "x[i] reads",
    "store": "y[i] = value",
    "float32": "lang.f32",
    "int32": "lang.i32",
}
