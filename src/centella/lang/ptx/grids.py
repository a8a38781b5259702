"""Groups of a launch that the device holds all at once: they take work in turn, or meet."""

from __future__ import annotations

from centella.errors import TraceError
from centella.lang.tracer import current
from centella.lang.values import Expr


def grid() -> Expr:
    """How many groups run at a time, u32, uniform: those of the launch are theirs in turn.

    A kernel that asks is launched with no more groups than the device holds at once; its groups
    take `lang.group_id()`, `lang.group_id() + ptx.grid()` and so on below `lang.num_groups()`.
    """
    return current().pure("grid", "u32")


def grid_barrier() -> None:
    """All threads of all groups of the launch meet; what they wrote before is visible after.

    A launch has no more groups than the device holds at once, which begin together; more are a
    LimitError that says how many. Arguments that one group writes and
    another reads are `InOut`. PTX ISA, "Memory Consistency Model": one thread of each group adds to
    a counter of the kernel's own (`atom.acq_rel.gpu`) and reads it until all have
    (`ld.acquire.gpu`), between two barriers of the group; sm_80. The counter's top bit turns at
    each meeting, so that it is never reset.

    Cost: two ways to the L2 cache and back, some 1.5 us on an H200; less where copies that do not
    depend on it (`cp_async`) are under way meanwhile.

    Control flow is to be uniform in the whole launch: a condition on the group is not, and tracing
    does not see that. The simulator does.

    Raises:
        TraceError: in a role, in a cluster, or in divergent control flow.
    """
    t = current()
    t.need_uniform("a grid_barrier")
    if t.cluster > 1:
        raise TraceError("a grid_barrier is for kernels without clusters")
    t.effect("grid_barrier", "", ())
