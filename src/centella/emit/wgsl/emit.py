"""One emission: statements in order, each by its rule; then the module around them."""

from __future__ import annotations

from centella.emit.wgsl import expressions, statements
from centella.emit.wgsl.functions import FUNCTIONS
from centella.emit.wgsl.writer import Rule, Writer
from centella.errors import TraceError
from centella.lang.ir import SUBGROUP, BufferArg, KernelIR, SharedArray
from centella.lang.rounds import Copies

RULES: dict[str, Rule] = expressions.RULES | statements.RULES


def emit_wgsl(
    ir: KernelIR, *, native_f16: bool = False, keep_loops: bool = False,
    settled: frozenset[str] = frozenset(), enable_subgroups: bool = False, copies: Copies = (),
    report_stops: bool = False,
) -> str:  # fmt: skip
    """The WGSL module of a kernel.

    Args:
        ir: the traced kernel.
        native_f16: use `pack2x16float` (only where a probe found it rounding to nearest even).
        keep_loops: keep a driver from unrolling loops. One that compiles for a CPU gains nothing
            by it, and takes milliseconds for each load that it repeats.
        settled: float operations that a driver is kept from rewriting (where a probe found it to).
        enable_subgroups: write the `enable subgroups;` line that Tint demands and naga refuses.
        copies: how often bodies of loops stand, for drivers that count rounds (`lang.rounds`).
        report_stops: bind two words behind the parameters: how often such a driver has ended a
            loop that was not over, and the first 32 bits of the digest of the kernel.

    Raises:
        TraceError: for an operation that only another target has.
    """
    w = _written(ir, native_f16, keep_loops, settled, copies, report_stops)
    enabled = ["enable subgroups;"] if enable_subgroups and ir.uses_subgroups else []
    return "\n".join([*enabled, *_declarations(w), *_entry(ir), *w.lines, "  }", "}", ""])


def count_statements(ir: KernelIR) -> int:
    """Statements that the WGSL of a kernel holds (one that the library ships: 6 000 at most)."""
    return len(_written(ir, False).lines)


def _written(
    ir: KernelIR, native_f16: bool, keep_loops: bool = False, settled: frozenset[str] = frozenset(),
    copies: Copies = (), report_stops: bool = False,
) -> Writer:  # fmt: skip
    """The statements of a kernel, a line each."""
    w = Writer(ir, native_f16, keep_loops, settled, copies, report_stops)
    if report_stops:
        w.line("ended[thread] = 0u;  // some drivers leave what another kernel left there")
    for i, statement in enumerate(ir.body):
        rule = RULES.get(statement[0])
        if rule is None:
            raise TraceError(f"WGSL has no {statement[0]}")
        rule(w, i, statement)
    return w


def _declarations(w: Writer) -> list[str]:
    """Bindings, workgroup memory and functions."""
    ir = w.ir
    lines = [f"// {ir.name}: {ir.workgroup} threads a group"]
    for i, arg in enumerate(ir.args):
        access = "read_write" if arg.writable else "read"
        lines.append(
            f"@group(0) @binding({i}) var<storage, {access}> a{i}: array<{_element(arg)}>;"
            f"  // {arg.name}: {arg.dtype.name}"
        )
    slots = -(-(1 + len(ir.params)) // 4)
    lines.append(f"struct Params {{ v: array<vec4<u32>, {slots}> }}")
    lines.append(f"@group(0) @binding({len(ir.args)}) var<uniform> params: Params;")
    if w.report_stops:
        at = f"@group(0) @binding({len(ir.args) + 1})"
        lines.append(f"{at} var<storage, read_write> stopped: array<atomic<u32>, 2>;")
        lines.append(f"var<workgroup> ended: array<u32, {ir.workgroup}>;")
    for i, array in enumerate(ir.shared):
        size = array.words // array.width
        lines.append(f"var<workgroup> s{i}: array<{_element(array)}, {size}>;")
    if any("zero_bits" in line for line in w.lines):
        lines.append("var<private> zero_bits: u32 = 0u;")
    return lines + w.module + [text for name, text in FUNCTIONS.items() if name in w.needed]


def _element(array: BufferArg | SharedArray) -> str:
    """The element of an array in memory: a word, or a chunk."""
    if array.atomic:
        return f"atomic<{array.word}>"
    return array.word if array.width == 1 else f"vec4<{array.word}>"


def _entry(ir: KernelIR) -> list[str]:
    """The entry point up to the first statement."""
    ids = [
        "@builtin(local_invocation_index) thread: u32",
        "@builtin(workgroup_id) wid: vec3<u32>",
        "@builtin(num_workgroups) grid: vec3<u32>",
    ]
    ops = {s[0] for s in ir.body} & SUBGROUP
    if "lane" in ops:
        ids.append("@builtin(subgroup_invocation_id) lane: u32")
    if "subgroup_size" in ops:
        ids.append("@builtin(subgroup_size) lanes: u32")
    return [
        f"@compute @workgroup_size({ir.workgroup})",
        f"fn main({', '.join(ids)}) {{",
        "  let group = wid.x + wid.y * grid.x;  // folded: no limit on groups",
        "  if (group < params.v[0].x) {",
    ]
