"""WGSL from the kernel IR (W3C WebGPU Shading Language).

A pure value used once, in the block that computed it, is written into the expression that uses it;
everything else is a `let`. So a fused multiply-add on a register is one statement, which matters:
naga's time grows with the square of the number of statements.

Bindings: tensor arguments in order at 0 .. n-1, the launch parameters as a uniform buffer at n.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella.errors import TraceError
from centella.lang.ir import OPENS, PURE, SUBGROUP, KernelIR

BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^",
    "shl": "<<", "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
CALL = {
    "abs": "abs", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "sqrt": "sqrt",
    "min": "min", "max": "max", "minn": "min_nan", "maxn": "max_nan", "fma": "fma",
    "pack_f16": "pack_f16", "pack_bf16": "pack_bf16",
}  # fmt: skip
SUBGROUP_CALL = {
    "subgroup_add": "subgroupAdd", "subgroup_min": "subgroupMin", "subgroup_max": "subgroupMax",
}  # fmt: skip
IDS = {
    "thread": "thread", "group": "group", "groups": "params.v[0].x", "lane": "lane",
    "subgroup_size": "lanes",
}  # fmt: skip
LANES = "xyzw"
LARGEST = float(np.finfo(np.float32).max)
MAX_DEPTH = 12

FUNCTIONS = {
    "is_nan": """\
fn is_nan(x: f32) -> bool {
  return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}""",
    "max_nan": """\
fn max_nan(a: f32, b: f32) -> f32 {
  return select(select(max(a, b), b, is_nan(b)), a, is_nan(a));
}""",
    "min_nan": """\
fn min_nan(a: f32, b: f32) -> f32 {
  return select(select(min(a, b), b, is_nan(b)), a, is_nan(a));
}""",
    "to_i32": """\
fn to_i32(x: f32) -> i32 {
  let v = i32(clamp(x, -2147483648.0, 2147483520.0));
  return select(select(v, 2147483647i, x >= 2147483648.0), 0i, is_nan(x));
}""",
    "to_u32": """\
fn to_u32(x: f32) -> u32 {
  let v = u32(clamp(x, 0.0, 4294967040.0));
  return select(select(v, 0xffffffffu, x >= 4294967296.0), 0u, is_nan(x));
}""",
    "f16_bits": """\
fn f16_bits(x: f32) -> u32 {  // round to nearest even, subnormals kept
  let bits = bitcast<u32>(x);
  let a = bits & 0x7fffffffu;
  let r = a - 0x38000000u;
  let normal = (r + 0xfffu + ((r >> 13u) & 1u)) >> 13u;
  let s = clamp(126u - min(a >> 23u, 112u), 14u, 24u);
  let m = (a & 0x7fffffu) | 0x800000u;
  let tiny = (m + ((1u << (s - 1u)) - 1u) + ((m >> s) & 1u)) >> s;
  let small = select(0u, tiny, (a >> 23u) >= 102u);
  let finite = select(small, normal, a >= 0x38800000u);
  let capped = select(finite, 0x7c00u, a >= 0x477ff000u);
  return ((bits >> 16u) & 0x8000u) | select(capped, 0x7e00u, a > 0x7f800000u);
}""",
    "pack_f16": """\
fn pack_f16(lo: f32, hi: f32) -> u32 {
  return f16_bits(lo) | (f16_bits(hi) << 16u);
}""",
    "pack_f16_native": """\
fn pack_f16(lo: f32, hi: f32) -> u32 {
  return pack2x16float(vec2<f32>(lo, hi));
}""",
    "bf16_bits": """\
fn bf16_bits(x: f32) -> u32 {  // round to nearest even
  let b = bitcast<u32>(x);
  let rounded = b + 0x7fffu + ((b >> 16u) & 1u);
  return select(rounded, b | 0x400000u, (b & 0x7fffffffu) > 0x7f800000u) >> 16u;
}""",
    "pack_bf16": """\
fn pack_bf16(lo: f32, hi: f32) -> u32 {
  return bf16_bits(lo) | (bf16_bits(hi) << 16u);
}""",
}
NEEDS = {
    "max_nan": ("is_nan",), "min_nan": ("is_nan",), "to_i32": ("is_nan",), "to_u32": ("is_nan",),
    "pack_f16": ("f16_bits",), "pack_bf16": ("bf16_bits",),
}  # fmt: skip


def literal(value: Any, type_: str) -> str:
    """A WGSL literal of a value type."""
    if type_ == "bool":
        return "true" if value else "false"
    if type_ == "u32":
        return f"{value}u"
    if type_ == "i32":
        return "bitcast<i32>(0x80000000u)" if value == -(2**31) else f"i32({value})"
    if not math.isfinite(value):
        return bits_literal(value)
    text = str(np.float32(value))
    if abs(float(text)) > LARGEST:  # the short form of the largest f32 is above it
        text = repr(math.copysign(LARGEST, value))
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def bits_literal(value: float) -> str:
    """An f32 that no compiler sees as a constant: WGSL refuses infinities and NaN."""
    return f"bitcast<f32>(zero_bits | {int(np.float32(value).view(np.uint32)):#x}u)"


class _Emitter:
    """One emission: uses and blocks are counted first, then each statement is written."""

    def __init__(self, ir: KernelIR, native_f16: bool) -> None:
        self.ir = ir
        self.native_f16 = native_f16
        self.out: list[str] = []
        self.indent = 2
        self.text: dict[int, str] = {}
        self.depth: dict[int, int] = {}
        self.deferred: dict[int, frozenset[int]] = {}
        self.needed: set[str] = set()
        self.module: list[str] = []
        self.statements = 0
        self.temporaries = 0
        self.uses, self.foreign = self._scan()
        self.storage = self._storage_barriers()

    def _scan(self) -> tuple[list[int], set[int]]:
        """Uses of each id, and the ids used in another block than the one that computed them."""
        body = self.ir.body
        uses = [0] * len(body)
        block = [0] * len(body)
        foreign: set[int] = set()
        stack, count = [0], 0
        for i, (op, _, args, _) in enumerate(body):
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

    def _storage_barriers(self) -> dict[int, bool]:
        """For each barrier, whether accesses to a written buffer come before it (or come round)."""
        found: dict[int, bool] = {}
        waiting: list[int] = []  # barriers of the open outermost loop
        accessed = False
        opened: list[bool] = []
        for i, (op, _, _, attr) in enumerate(self.ir.body):
            if op in ("load", "load4", "store", "store4") and self.ir.args[attr].writable:
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

    # -- writing --------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.out.append("  " * self.indent + text)
        self.statements += 1

    def read(self, index: int) -> str:
        """The text of an operand; a deferred expression is consumed."""
        self.deferred.pop(index, None)
        return self.text[index]

    def let(self, index: int, expression: str) -> None:
        self.line(f"let v{index} = {expression};")
        self.text[index] = f"v{index}"
        self.depth[index] = 0

    def value(
        self, index: int, expression: str, args: tuple[int, ...], reads: frozenset[int]
    ) -> None:
        """Write a pure value: inside its only use, or as a `let`."""
        depth = 1 + max((self.depth.get(a, 0) for a in args), default=0)
        if self.uses[index] == 1 and index not in self.foreign and depth < MAX_DEPTH:
            self.text[index] = expression
            self.depth[index] = depth
            self.deferred[index] = reads
        elif self.uses[index]:
            self.let(index, expression)

    def temporary(self, index: int) -> str:
        """An operand as a name or a number, for what reads it twice or later; computed here.

        Its text stays as it is: other blocks may use it, where the temporary is unknown.
        """
        text = self.read(index)
        if self.ir.body[index][0] == "const" or text == f"v{index}":
            return text
        name = f"t{self.temporaries}"
        self.temporaries += 1
        self.line(f"let {name} = {text};")
        return name

    def settle(self, var: int | None = None) -> None:
        """Write out deferred values that read `var` (or any variable), before it changes."""
        for index, reads in list(self.deferred.items()):
            if (var in reads) if var is not None else reads:
                del self.deferred[index]
                self.let(index, self.text[index])

    def reads_of(self, args: tuple[int, ...]) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for a in args:
            found |= self.deferred.get(a, frozenset())
        return found

    # -- statements -------------------------------------------------------------------------------

    def emit(self) -> str:
        for index, (op, type_, args, attr) in enumerate(self.ir.body):
            if op == "const":
                self.text[index] = literal(attr, type_)
            elif op == "param":
                self.text[index] = self.param(attr, type_)
            elif op in IDS:
                self.text[index] = IDS[op]
            elif op == "extract":
                self.text[index] = f"{self.read(args[0])}.{LANES[attr]}"
            elif op == "get":
                self.value(index, f"r{args[0]}", (), frozenset((args[0],)))
            elif op in PURE:
                reads = self.reads_of(args)
                self.value(index, self.pure(op, type_, args, attr), args, reads)
            else:
                rule = getattr(self, f"do_{op}", None)
                if rule is None:
                    raise TraceError(f"WGSL has no {op}")
                rule(index, type_, args, attr)
        return self.assemble()

    def param(self, position: int, type_: str) -> str:
        slot = position + 1
        word = f"params.v[{slot // 4}].{LANES[slot % 4]}"
        return word if type_ == "u32" else f"bitcast<{type_}>({word})"

    def pure(self, op: str, type_: str, args: tuple[int, ...], attr: Any) -> str:
        texts = [self.read(a) for a in args]
        if op in ("shl", "shr") and self.most(args[1]) > 31:
            texts[1] = f"({texts[1]} & 31u)"
        if op == "div" and self.ir.body[args[1]][0] == "const" and self.ir.body[args[1]][3] == 0:
            op = "mul"  # compilers get a quotient by a known 0 wrong
            texts[1] = bits_literal(math.copysign(math.inf, self.ir.body[args[1]][3]))
        if op == "xor" and type_ == "bool":
            op = "ne"
        if op in BINARY:
            return f"({texts[0]} {BINARY[op]} {texts[1]})"
        if op in CALL:
            self.need(CALL[op])
            return f"{CALL[op]}({', '.join(texts)})"
        if op == "neg":
            return f"(0u - {texts[0]})" if type_ == "u32" else f"(-{texts[0]})"
        if op == "not":
            return f"(!{texts[0]})" if type_ == "bool" else f"(~{texts[0]})"
        if op == "select":
            return f"select({texts[2]}, {texts[1]}, {texts[0]})"
        if op == "bitcast":
            if self.ir.body[args[0]][0] == "const":  # the bits of a NaN
                return f"bitcast<f32>(zero_bits | bitcast<u32>({texts[0]}))"
            return f"bitcast<{type_}>({texts[0]})"
        if op == "unpack_f16":
            return f"unpack2x16float({texts[0]}).{LANES[attr]}"
        if op == "cast":
            if self.ir.body[args[0]][1] == "f32":
                self.need(f"to_{type_}")
                return f"to_{type_}({texts[0]})"
            return f"{type_}({texts[0]})"
        raise TraceError(f"WGSL has no {op}")

    def most(self, index: int) -> int:
        """An upper bound of a u32: of a constant, a masked value, or either times a constant."""
        op, _, args, value = self.ir.body[index]
        if op == "const":
            return int(value)
        if op == "and":
            return min(self.most(a) for a in args)
        if op == "mul" and all(self.ir.body[a][0] in ("const", "and") for a in args):
            return math.prod(self.most(a) for a in args)
        return 2**32 - 1

    def need(self, name: str) -> None:
        if name in FUNCTIONS:
            for other in NEEDS.get(name, ()):
                self.need(other)
            self.needed.add(name)

    def do_load(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        self.let(index, self.word(f"a{attr}", self.ir.args[attr].width, args[0]))

    def do_load4(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        self.let(index, f"a{attr}[{self.read(args[0])}]")

    def do_sload(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        self.let(index, self.word(f"s{attr}", self.ir.shared[attr].width, args[0]))

    def do_sload4(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        self.let(index, f"s{attr}[{self.read(args[0])}]")

    def word(self, array: str, width: int, index: int) -> str:
        """One word of an array: a lane of a chunk where the array is accessed by chunks."""
        if width == 1:
            return f"{array}[{self.read(index)}]"
        if self.ir.body[index][0] == "const":
            number = self.ir.body[index][3]
            return f"{array}[{number // 4}u].{LANES[number % 4]}"
        text = self.temporary(index)
        return f"{array}[{text} >> 2u][{text} & 3u]"

    def do_store(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        place = self.word(f"a{attr}", self.ir.args[attr].width, args[0])
        self.line(f"{place} = {self.read(args[1])};")

    def do_sstore(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        place = self.word(f"s{attr}", self.ir.shared[attr].width, args[0])
        self.line(f"{place} = {self.read(args[1])};")

    def do_store4(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        self.chunk_store(f"a{attr}", self.ir.args[attr].word, args)

    def do_sstore4(self, index: int, type_: str, args: tuple[int, ...], attr: int) -> None:
        self.chunk_store(f"s{attr}", self.ir.shared[attr].type, args)

    def chunk_store(self, array: str, type_: str, args: tuple[int, ...]) -> None:
        place, *values = (self.read(a) for a in args)
        self.line(f"{array}[{place}] = vec4<{type_}>({', '.join(values)});")

    def do_var(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self.line(f"var r{index}: {type_} = {self.read(args[0])};")

    def do_set(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        value = self.read(args[1])
        self.settle(args[0])
        self.line(f"r{args[0]} = {value};")

    def enter(self, header: str) -> None:
        self.settle()
        self.line(header)
        self.indent += 1

    def do_if(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        condition = self.read(args[0])
        self.enter(f"if ({condition}) {{")

    def do_else(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self.settle()
        self.indent -= 1
        self.line("} else {")
        self.indent += 1

    def do_end(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self.settle()
        self.indent -= 1
        self.line("}")

    def do_for(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        low = self.read(args[0])
        high, step = self.temporary(args[1]), self.temporary(args[2])
        name = self.text[index] = f"v{index}"
        self.enter(f"for (var {name}: {type_} = {low}; {name} < {high}; {name} += {step}) {{")

    def do_loop(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self.enter("loop {")

    def do_break_if(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self.line(f"if ({self.read(args[0])}) {{ break; }}")

    def do_barrier(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self.line("workgroupBarrier();")
        if self.storage[index]:
            self.line("storageBarrier();")

    def do_workgroup_uniform(
        self, index: int, type_: str, args: tuple[int, ...], attr: Any
    ) -> None:
        self.module.append(f"var<workgroup> shared_{index}: {type_};")
        if self.storage[index]:
            self.line("storageBarrier();")
        self.line(f"if (thread == 0u) {{ shared_{index} = {self.read(args[0])}; }}")
        self.let(index, f"workgroupUniformLoad(&shared_{index})")

    def _subgroup(self, index: int, op: str, args: tuple[int, ...]) -> None:
        self.let(index, f"{SUBGROUP_CALL[op]}({self.read(args[0])})")

    def do_subgroup_add(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self._subgroup(index, "subgroup_add", args)

    def do_subgroup_min(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self._subgroup(index, "subgroup_min", args)

    def do_subgroup_max(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self._subgroup(index, "subgroup_max", args)

    def do_shuffle_xor(self, index: int, type_: str, args: tuple[int, ...], attr: Any) -> None:
        self.let(index, f"subgroupShuffleXor({self.read(args[0])}, {attr}u)")

    # -- the module -------------------------------------------------------------------------------

    def assemble(self) -> str:
        ir = self.ir
        head = [f"// {ir.name}: {ir.workgroup} threads a group"]
        for i, arg in enumerate(ir.args):
            access = "read_write" if arg.writable else "read"
            element = arg.word if arg.width == 1 else f"vec4<{arg.word}>"
            head.append(
                f"@group(0) @binding({i}) var<storage, {access}> a{i}: array<{element}>;"
                f"  // {arg.name}: {arg.dtype.name}"
            )
        slots = -(-(1 + len(ir.params)) // 4)
        head.append(f"struct Params {{ v: array<vec4<u32>, {slots}> }}")
        head.append(f"@group(0) @binding({len(ir.args)}) var<uniform> params: Params;")
        for i, array in enumerate(ir.shared):
            element = array.type if array.width == 1 else f"vec4<{array.type}>"
            head.append(f"var<workgroup> s{i}: array<{element}, {array.words // array.width}>;")
        if any("zero_bits" in line for line in self.out):
            head.append("var<private> zero_bits: u32 = 0u;")
        head += self.module
        for name in FUNCTIONS:
            if name in self.needed:
                native = name == "pack_f16" and self.native_f16
                if name == "f16_bits" and self.native_f16:
                    continue
                head.append(FUNCTIONS["pack_f16_native" if native else name])
        ids = {
            "thread": "@builtin(local_invocation_index) thread: u32",
            "wid": "@builtin(workgroup_id) wid: vec3<u32>",
            "grid": "@builtin(num_workgroups) grid: vec3<u32>",
        }
        ops = {s[0] for s in ir.body} & SUBGROUP
        if "lane" in ops:
            ids["lane"] = "@builtin(subgroup_invocation_id) lane: u32"
        if "subgroup_size" in ops:
            ids["lanes"] = "@builtin(subgroup_size) lanes: u32"
        head.append(f"@compute @workgroup_size({ir.workgroup})")
        head.append(f"fn main({', '.join(ids.values())}) {{")
        head.append("  let group = wid.x + wid.y * grid.x;  // folded: no limit on groups")
        head.append("  if (group < params.v[0].x) {")
        return "\n".join([*head, *self.out, "  }", "}", ""])


def emit_wgsl(ir: KernelIR, *, native_f16: bool = False, enable_subgroups: bool = False) -> str:
    """The WGSL module of a kernel.

    Args:
        ir: the traced kernel.
        native_f16: use `pack2x16float` (only where a probe found it rounding to nearest even).
        enable_subgroups: write the `enable subgroups;` line that Tint demands and naga refuses.

    Raises:
        TraceError: for an operation that only another target has.
    """
    source = _Emitter(ir, native_f16).emit()
    if enable_subgroups and ir.uses_subgroups:
        return "enable subgroups;\n" + source
    return source


def count_statements(ir: KernelIR) -> int:
    """Statements that the WGSL of a kernel holds (a portable kernel keeps to 6 000)."""
    emitter = _Emitter(ir, False)
    emitter.emit()
    return emitter.statements
