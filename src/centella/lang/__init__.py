"""The kernel language: one traced Python function becomes WGSL, PTX and a NumPy simulation.

`docs/kernel-language.md` defines it: values, storage layout, uniformity, the arithmetic table.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from centella.dtypes import bf16, bool_, f16, f32, i8, i32, u8, u32
from centella.lang.atomics import (
    atomic_add,
    atomic_and,
    atomic_compare_exchange,
    atomic_exchange,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xor,
)
from centella.lang.control import (
    break_if,
    const,
    else_,
    if_,
    loop,
    parameter,
    range,
    shared,
    var,
    vars,
)
from centella.lang.functions import (
    abs,
    bitcast,
    cast,
    ceil,
    cos,
    erf,
    exp,
    exp2,
    exp2_native,
    floor,
    fma,
    fmax,
    fmin,
    isnan,
    log,
    log2,
    maximum,
    minimum,
    rsqrt,
    select,
    sigmoid,
    sin,
    sqrt,
    stored,
    tanh,
    trunc,
)
from centella.lang.groups import (
    barrier,
    global_id,
    group_id,
    lane_id,
    local_id,
    num_groups,
    shuffle_xor,
    subgroup_max,
    subgroup_min,
    subgroup_size,
    subgroup_sum,
    workgroup_reduce,
    workgroup_size,
    workgroup_uniform,
)
from centella.lang.hints import NAMES
from centella.lang.ir import KernelIR
from centella.lang.kernel_params import In, InOut, Out, Scalar, signature_of, storage
from centella.lang.trace import trace

if TYPE_CHECKING:
    from centella.lang import ptx as ptx
else:

    def __getattr__(name: str) -> Any:
        """Load `lang.ptx` when a kernel first asks for it: no other target needs it."""
        if name == "ptx":
            return import_module("centella.lang.ptx")
        text = f"module 'centella.lang' has no attribute {name!r}"
        raise AttributeError(f"{text}: {NAMES[name]}" if name in NAMES else text)


__all__ = [
    "In",
    "InOut",
    "KernelIR",
    "Out",
    "Scalar",
    "abs",
    "atomic_add",
    "atomic_and",
    "atomic_compare_exchange",
    "atomic_exchange",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xor",
    "barrier",
    "bf16",
    "bitcast",
    "bool_",
    "break_if",
    "cast",
    "ceil",
    "const",
    "cos",
    "else_",
    "erf",
    "exp",
    "exp2",
    "exp2_native",
    "f16",
    "f32",
    "floor",
    "fma",
    "fmax",
    "fmin",
    "global_id",
    "group_id",
    "i8",
    "i32",
    "if_",
    "isnan",
    "lane_id",
    "local_id",
    "log",
    "log2",
    "loop",
    "maximum",
    "minimum",
    "num_groups",
    "parameter",
    "range",
    "rsqrt",
    "select",
    "shared",
    "shuffle_xor",
    "sigmoid",
    "signature_of",
    "sin",
    "sqrt",
    "storage",
    "stored",
    "subgroup_max",
    "subgroup_min",
    "subgroup_size",
    "subgroup_sum",
    "tanh",
    "trace",
    "trunc",
    "u8",
    "u32",
    "var",
    "vars",
    "workgroup_reduce",
    "workgroup_size",
    "workgroup_uniform",
]  # fmt: skip  # a table
