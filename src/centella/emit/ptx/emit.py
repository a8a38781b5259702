"""One emission: statements in order, each by its table entry or its rule."""

from __future__ import annotations

from centella.emit.ptx import control, hopper, memory, values, warps
from centella.emit.ptx.facts import NO_REGISTER
from centella.emit.ptx.layout import entry_name
from centella.emit.ptx.tables import (
    INSTRUCTIONS,
    LINES,
    REGISTERS,
    SIGNED,
    TARGETS,
    number_of,
    overlaps,
)
from centella.emit.ptx.writer import Rule, Writer
from centella.errors import DeviceError, TraceError
from centella.lang.ir import FROM_90, HOPPER, PTX_ONLY, PURE, KernelIR
from centella.lang.structure import may_end_unawaited

IN_HEAD = ("resident", "cluster")  # the entry's head has them
PREFETCH_VERSION = "7.4"  # which knows .level::prefetch_size
SEND_VERSION = "8.1"  # st.async

RULES: dict[str, Rule] = values.RULES | memory.RULES | control.RULES | warps.RULES | hopper.RULES


def emit_ptx(ir: KernelIR, arch: str = "sm_80") -> str:
    """PTX text of a kernel for one target.

    Args:
        ir: a traced kernel.
        arch: a target of `TARGETS`, such as "sm_80" or "sm_90a".

    Returns:
        The text, equal to the byte for equal arguments.

    Raises:
        DeviceError: for a target that the table does not have.
        TraceError: for an operation that PTX, or this target, cannot express.
    """
    if arch not in TARGETS:
        raise DeviceError(f"no PTX target {arch!r}; expected one of {', '.join(TARGETS)}")
    w = Writer(ir, arch)
    number = number_of(arch)
    for ops, needed, has in (
        (PTX_ONLY, "sm_80 or later", number >= 80),
        (HOPPER | {"role"}, "sm_90a", arch == "sm_90a"),
        (FROM_90, "sm_90 or later", number >= 90),
    ):  # fmt: skip  # a table
        if not has and (op := ir.first(ops)):
            raise TraceError(f"kernel {ir.name!r}: {op} needs {needed}, got {arch}")
    _write_body(w)
    # Where no thread may have waited, the launch could be over before those before it. A wait at
    # the end of the others costs a decoder's step a tenth (benchmarks/LOG.md).
    last = ["  griddepcontrol.wait;"] if may_end_unawaited(ir.body) else []
    return "\n".join([*_head(w), *_prologue(w), *w.blocks[0].lines, *last, "  ret;", "}", ""])


def _write_body(w: Writer) -> None:
    """Every statement that is used; integer values that a loop does not change go before it."""
    body = w.ir.body
    for i, statement in enumerate(body):
        op, type_, args, attr = statement
        pure = op in PURE
        if w.facts.last[i] < 0 and (pure or op in ("get", "fragment_get")):
            continue
        w.at = len(w.blocks) - 1
        if pure and type_ in SIGNED and i not in w.facts.direct:
            w.at = w.outermost(args, int(op not in NO_REGISTER and op != "param"))
        w.depth[i] = w.at if op != "const" else 0
        operand = body[args[0]][1] if args else ""
        text = INSTRUCTIONS.get((op, operand))
        if text is not None and (w.ampere or op not in ("minn", "maxn")):
            operands = ", ".join([w.values[a] for a in args])
            w.emit(f"{text} {w.result(i)}, {operands};")
        elif op in LINES:
            w.emit(LINES[op].format(d=w.result(i) if type_ else "", n=attr))
        elif op in RULES:
            RULES[op](w, i, statement)
        elif op not in IN_HEAD:
            raise TraceError(f"PTX has no {op} {operand}".rstrip())


def _head(w: Writer) -> list[str]:
    """The module's directives, and the entry's up to its first declaration."""
    ir, name = w.ir, entry_name(w.ir)
    arguments = ", ".join(f"{a.mode} {a.dtype.name}" for a in ir.args)
    lines = [f".version {_version(w)}", f".target {w.arch}", ".address_size 64", ""]
    if w.shared.dynamic:
        lines += [f"// {w.shared.size} bytes of dynamic shared memory"]
        lines += [f".extern .shared .align {w.shared.align} .b8 $smem[];", ""]
    if ir.meets:
        lines += [f".global .align 4 .u32 {control.COUNTER};", ""]
    lines += [f"// {name}({arguments}), groups, {len(ir.params)} launch parameters"]
    align = 64 if ir.maps else 8
    lines += [f".visible .entry {name}(", f"  .param .align {align} .b8 params[{w.params.size}]"]
    lines += [")", f".reqntid {ir.workgroup}, 1, 1"]
    if ir.cluster > 1:
        lines += [".explicitcluster", f".reqnctapercluster {ir.cluster}, 1, 1"]
    lines += [f".minnctapersm {s[3]}" for s in ir.body if s[0] == "resident"]
    if ir.first({"setmaxnreg"}):  # which needs a bound at entry
        lines.append(".minnctapersm 1")
    return [*lines, "{"]


def _version(w: Writer) -> str:
    """The PTX version that a target needs, or what the kernel asks of it."""
    needed = [TARGETS[w.arch], *([PREFETCH_VERSION] if w.lines else [])]
    if w.ir.first({"cluster_store"}):
        needed.append(SEND_VERSION)
    return max(needed, key=_number)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _prologue(w: Writer) -> list[str]:
    """Declarations; the return of blocks past the launch; what fills the fixed registers."""
    lines = [f"  .reg .{k} {prefix}<{w.count[prefix]}>;" for prefix, k in REGISTERS.items()
             if w.count[prefix]]  # fmt: skip
    lines += ["  .reg .b32 %group, %groups;", "  .reg .pred %past;"]
    lines += [f"  .reg .{kind} {name};" for name, (kind, _) in w.fixed.items()]
    lines += [f"  .reg .{kind} {name}<{count}>;" for kind, name, count in w.fragments]
    if w.shared.size and not w.shared.dynamic:
        lines.append(f"  .shared .align {w.shared.align} .b8 $smem[{w.shared.size}];")
    # Every block waits, also one past the launch: its end is not another's.
    if overlaps(w.arch) and not w.ir.first({"await_launches"}):
        lines.append("  griddepcontrol.wait;")
    lines += ["  mov.u32 %group, %ctaid.x;", f"  ld.param.u32 %groups, [params+{w.params.groups}];"]
    lines += ["  setp.ge.u32 %past, %group, %groups;", "  @%past ret;"]
    return lines + [f"  {text}" for _, text in w.fixed.values()]
