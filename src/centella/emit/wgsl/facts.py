"""What the WGSL emitter knows of a kernel before its first line."""

from __future__ import annotations

from centella.lang.ir import GLOBAL, OPENS, KernelIR


def uses_of(ir: KernelIR) -> tuple[list[int], set[int]]:
    """Uses of each id, and the ids used in another block than the one that computed them."""
    uses = [0] * len(ir.body)
    block = [0] * len(ir.body)
    foreign: set[int] = set()
    stack, count = [0], 0
    for i, (op, _, args, _) in enumerate(ir.body):
        if op in ("else", "end"):
            stack.pop()
        block[i] = stack[-1]
        for a in args:
            uses[a] += 1
            if block[a] != stack[-1]:
                foreign.add(a)
        if op in OPENS or op == "else":
            count += 1
            stack.append(count)
    return uses, foreign


def storage_barriers(ir: KernelIR) -> dict[int, bool]:
    """For each barrier, whether accesses to a written buffer come before it (or come round)."""
    found: dict[int, bool] = {}
    waiting: list[int] = []  # barriers of the open outermost loop
    accessed = False
    opened: list[bool] = []
    for i, (op, _, _, position) in enumerate(ir.body):
        if op in GLOBAL and ir.args[position].writable:
            accessed = True
        elif op in OPENS:
            opened.append(op != "if")
        elif op == "end" and opened.pop() and not any(opened):
            found.update(dict.fromkeys(waiting, accessed))
            waiting.clear()
        elif op in ("barrier", "workgroup_uniform"):
            found[i] = accessed
            if any(opened):
                waiting.append(i)
    return found
