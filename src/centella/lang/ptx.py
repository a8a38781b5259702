"""PTX from the kernel IR (NVIDIA PTX ISA): what `ptxas` or the driver assembles, no toolkit.

One table of types, one of instructions, and a small rule for each operation that needs more than
one instruction. Every value is a virtual register of its own (`%f` f32, `%r` i32 and u32, `%p`
bool); the assembler allocates. Floating point is never contracted: add.rn, mul.rn, fma.rn.

Launch: a 1-D grid, at least `groups` blocks of `workgroup` threads; blocks past `groups` return.
The one kernel parameter is a struct (`param_layout`): 64-bit addresses of the tensor arguments in
order, u32 number of groups, the launch parameters of 4 bytes in order. Workgroup memory past
48 KiB is dynamic: the launch passes `shared_layout(ir).dynamic` bytes.

Addresses: `x[i + 1]` and `x[i + 2]` share one address register and differ in the immediate of the
load. That needs an index whose sum does not pass 2^32 on the way, as element indices never do;
where a subtraction or a signed number is part of the sum (which may pass below 0 and come back),
only what is exact modulo 2^32 is folded. Integer values that a loop does not change are computed
before it, up to `ROOM` of them a loop; nothing moves out of an `if`.

A device loop tests at its bottom, after one guard at its top. Like `i += step` anywhere, it does
not end if `i + step` passes 2^32 (2^31 for i32) before the bound is reached.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from centella.errors import DeviceError, TraceError
from centella.lang.ir import PURE, KernelIR, Statement
from centella.lang.ptx_facts import (
    MAX_FOLDED,
    NO_REGISTER,
    Terms,
    facts_of,
    leaves,
    same_register,
)

# Target: the lowest PTX version that knows it and shfl.sync (6.0), with all that is used here.
TARGETS = {
    "sm_50": "6.0", "sm_52": "6.0", "sm_53": "6.0", "sm_60": "6.0", "sm_61": "6.0", "sm_62": "6.0",
    "sm_70": "6.0", "sm_72": "6.1", "sm_75": "6.3", "sm_80": "7.0", "sm_86": "7.1", "sm_87": "7.4",
    "sm_88": "9.0", "sm_89": "7.8", "sm_90": "7.8", "sm_90a": "8.0", "sm_100": "8.6",
    "sm_100a": "8.6", "sm_103": "8.8", "sm_103a": "8.8", "sm_110": "9.0", "sm_110a": "9.0",
    "sm_120": "8.7", "sm_120a": "8.7", "sm_121": "8.8", "sm_121a": "8.8",
}  # fmt: skip
STATIC_SHARED_BYTES = 48 * 1024
SUBGROUP_SIZE = 32
ROOM = 20  # values moved before a loop at most: past 22, small GEMM tiles spill on Blackwell

# Value type: its registers, and its name in moves and memory accesses.
TYPES = {"f32": ("%f", "f32"), "i32": ("%r", "b32"), "u32": ("%r", "b32"), "bool": ("%p", "pred")}
REGISTERS = {"%f": "f32", "%r": "b32", "%p": "pred", "%rd": "b64", "%h": "b16"}

# Operation: its instruction for operands of each type. "" is a rule of its own, or a type error.
_TABLE = {
    #         f32                i32            u32            bool
    "neg":   ("neg.f32",         "neg.s32",     "neg.s32",     ""),
    "abs":   ("abs.f32",         "abs.s32",     "",            ""),
    "floor": ("cvt.rmi.f32.f32", "",            "",            ""),
    "ceil":  ("cvt.rpi.f32.f32", "",            "",            ""),
    "trunc": ("cvt.rzi.f32.f32", "",            "",            ""),
    "sqrt":  ("sqrt.rn.f32",     "",            "",            ""),
    "not":   ("",                "not.b32",     "not.b32",     "not.pred"),
    "add":   ("add.rn.f32",      "add.s32",     "add.u32",     ""),
    "sub":   ("sub.rn.f32",      "sub.s32",     "sub.u32",     ""),
    "mul":   ("mul.rn.f32",      "mul.lo.s32",  "mul.lo.u32",  ""),
    "div":   ("div.rn.f32",      "",            "",            ""),
    "fma":   ("fma.rn.f32",      "",            "",            ""),
    "and":   ("",                "and.b32",     "and.b32",     "and.pred"),
    "or":    ("",                "or.b32",      "or.b32",      "or.pred"),
    "xor":   ("",                "xor.b32",     "xor.b32",     "xor.pred"),
    "min":   ("min.f32",         "min.s32",     "min.u32",     ""),
    "max":   ("max.f32",         "max.s32",     "max.u32",     ""),
    "minn":  ("min.NaN.f32",     "min.s32",     "min.u32",     ""),
    "maxn":  ("max.NaN.f32",     "max.s32",     "max.u32",     ""),
    "lt":    ("setp.lt.f32",     "setp.lt.s32", "setp.lt.u32", ""),
    "le":    ("setp.le.f32",     "setp.le.s32", "setp.le.u32", ""),
    "gt":    ("setp.gt.f32",     "setp.gt.s32", "setp.gt.u32", ""),
    "ge":    ("setp.ge.f32",     "setp.ge.s32", "setp.ge.u32", ""),
    "eq":    ("setp.eq.f32",     "setp.eq.s32", "setp.eq.u32", ""),
    "ne":    ("setp.neu.f32",    "setp.ne.s32", "setp.ne.u32", "xor.pred"),
}  # fmt: skip
INSTRUCTIONS = {
    (op, type_): text
    for op, row in _TABLE.items()
    for type_, text in zip(("f32", "i32", "u32", "bool"), row, strict=True)
    if text
}
CASTS = {  # float to int clamps, and NaN gives 0: PTX's cvt
    ("f32", "i32"): "cvt.rzi.s32.f32 {d}, {a};", ("f32", "u32"): "cvt.rzi.u32.f32 {d}, {a};",
    ("i32", "f32"): "cvt.rn.f32.s32 {d}, {a};", ("u32", "f32"): "cvt.rn.f32.u32 {d}, {a};",
    ("bool", "f32"): "selp.f32 {d}, 0f3F800000, 0f00000000, {a};",
    ("bool", "i32"): "selp.b32 {d}, 1, 0, {a};", ("bool", "u32"): "selp.b32 {d}, 1, 0, {a};",
    ("f32", "bool"): "setp.neu.f32 {d}, {a}, 0f00000000;",
    ("i32", "bool"): "setp.ne.s32 {d}, {a}, 0;", ("u32", "bool"): "setp.ne.u32 {d}, {a}, 0;",
}  # fmt: skip
SIGNED = {"i32": "s32", "u32": "u32"}


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """Byte offsets in the parameter struct, and its size."""

    pointers: tuple[int, ...]
    groups: int
    scalars: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Byte offsets of the workgroup arrays (and of the word of `workgroup_uniform`), total size."""

    offsets: tuple[int, ...]
    uniform: int
    size: int

    @property
    def dynamic(self) -> int:
        """Bytes that the launch must pass as dynamic shared memory."""
        return self.size if self.size > STATIC_SHARED_BYTES else 0


def param_layout(ir: KernelIR) -> ParamLayout:
    """Where the launch writes addresses, the number of groups and the scalars."""
    groups = 8 * len(ir.args)
    scalars = tuple(groups + 4 + 4 * i for i in range(len(ir.params)))
    return ParamLayout(tuple(range(0, groups, 8)), groups, scalars, groups + 4 + 4 * len(scalars))


def shared_layout(ir: KernelIR) -> SharedLayout:
    """Where the workgroup arrays lie: each on 16 bytes, in order."""
    offsets, size = [], 0
    for array in ir.shared:
        offsets.append(size)
        size += (4 * array.words + 15) // 16 * 16
    uses_word = any(s[0] == "workgroup_uniform" for s in ir.body)
    return SharedLayout(tuple(offsets), size, size + 16 * uses_word)


def entry_name(ir: KernelIR) -> str:
    """The name of the entry point: the kernel's, as a PTX identifier."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", ir.name)
    return name if name[:1].isalpha() else f"k{name}"


def emit_ptx(ir: KernelIR, arch: str = "sm_80") -> str:
    """PTX text of a kernel for one target.

    Args:
        ir: a traced kernel.
        arch: a target of `TARGETS`, such as "sm_80" or "sm_90a".

    Returns:
        The text, equal to the byte for equal arguments.

    Raises:
        DeviceError: for a target that the table does not have.
        TraceError: for an operation that PTX cannot express.
    """
    if arch not in TARGETS:
        raise DeviceError(f"no PTX target {arch!r}; expected one of {', '.join(TARGETS)}")
    return _Emitter(ir, arch).text()


# -- the text --------------------------------------------------------------------------------------


def literal(value: Any, type_: str) -> str:
    """An immediate of a value type; bools are two predicate registers."""
    if type_ == "bool":
        return "%true" if value else "%false"
    if type_ != "f32":
        return str(value)
    try:
        return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"
    except OverflowError:  # past the largest f32
        return "0fFF800000" if value < 0 else "0f7F800000"


@dataclass(slots=True)
class _Block:
    """An open block: what opened it, how many values may still move before it, what it holds."""

    kind: str
    opening: int
    room: int
    lines: list[str]
    keys: list[Any]


class _Emitter:
    """One emission: statements in order, each by its table entry or its rule."""

    def __init__(self, ir: KernelIR, arch: str) -> None:
        self.ir = ir
        self.arch = arch
        self.ampere = int(re.sub(r"\D", "", arch)) >= 80
        self.params = param_layout(ir)
        self.memory = shared_layout(ir)
        self.facts = facts_of(ir)
        self.blocks = [_Block("kernel", -1, 0, [], [])]
        self.at = 0  # the block that lines go to
        self.values = [""] * len(ir.body)  # register or immediate of each value
        self.depth = [0] * len(ir.body)  # the block that each value is computed in
        self.chunks: dict[int, list[str]] = {}
        self.count = dict.fromkeys(REGISTERS, 0)
        self.fixed: dict[str, tuple[str, str]] = {}  # registers of the prologue: kind, lines
        self.known: dict[Any, str] = {}  # addresses and halves computed in the open blocks

    def text(self) -> str:
        """The whole module."""
        last, direct, body = self.facts.last, self.facts.direct, self.ir.body
        for i, statement in enumerate(body):
            op, type_, args, _ = statement
            pure = op in PURE
            if last[i] < 0 and (pure or op == "get"):
                continue
            self.at = len(self.blocks) - 1
            if pure and type_ in SIGNED and i not in direct:
                self.at = self.outermost(args, int(op not in NO_REGISTER and op != "param"))
            self.depth[i] = self.at if op != "const" else 0
            operand = body[args[0]][1] if args else ""
            text = INSTRUCTIONS.get((op, operand))
            if text is None or (not self.ampere and op in ("minn", "maxn")):
                rule = RULES.get(op)
                if rule is None:
                    raise TraceError(f"PTX has no {op} {operand}".rstrip())
                rule(self, i, statement)
            else:
                operands = ", ".join([self.values[a] for a in args])
                self.emit(f"{text} {self.result(i)}, {operands};")
        return "\n".join([*self.head(), *self.blocks[0].lines, "  ret;", "}", ""])

    def head(self) -> list[str]:
        """Everything above the first statement."""
        ir, size = self.ir, self.memory.size
        arguments = ", ".join(f"{a.mode} {a.dtype.name}" for a in ir.args)
        lines = [f".version {TARGETS[self.arch]}", f".target {self.arch}", ".address_size 64", ""]
        if self.memory.dynamic:
            lines += [f"// {size} bytes of dynamic shared memory"]
            lines += [".extern .shared .align 16 .b8 $smem[];", ""]
        lines += [f"// {entry_name(ir)}({arguments}), groups, {len(ir.params)} launch parameters"]
        lines += [f".visible .entry {entry_name(ir)}("]
        lines += [f"  .param .align 8 .b8 params[{self.params.size}]", ")"]
        lines += [f".reqntid {ir.workgroup}, 1, 1", "{"]
        for prefix, kind in REGISTERS.items():
            if self.count[prefix]:
                lines.append(f"  .reg .{kind} {prefix}<{self.count[prefix]}>;")
        lines += ["  .reg .b32 %group, %groups;", "  .reg .pred %past;"]
        lines += [f"  .reg .{kind} {name};" for name, (kind, _) in self.fixed.items()]
        if size and not self.memory.dynamic:
            lines.append(f"  .shared .align 16 .b8 $smem[{size}];")
        lines += ["  mov.u32 %group, %ctaid.x;"]
        lines += [f"  ld.param.u32 %groups, [params+{self.params.groups}];"]
        lines += ["  setp.ge.u32 %past, %group, %groups;", "  @%past ret;"]
        return lines + [f"  {text}" for _, text in self.fixed.values()]

    # -- registers ------------------------------------------------------------------------------

    def emit(self, text: str) -> None:
        """One line."""
        self.blocks[self.at].lines.append("  " + text)

    def label(self, text: str) -> None:
        """One line at the margin."""
        self.blocks[-1].lines.append(text)

    def outermost(self, ids: Iterable[int], cost: int = 1) -> int:
        """The outermost block in which a value of these operands may be computed."""
        depth = max((self.depth[i] for i in ids), default=0)
        inner = len(self.blocks) - 1
        while inner > depth and self.blocks[inner].room:
            self.blocks[inner].room -= cost
            inner -= 1
        return inner

    def new(self, prefix: str) -> str:
        """A fresh register."""
        number = self.count[prefix]
        self.count[prefix] = number + 1
        return f"{prefix}{number}"

    def result(self, i: int) -> str:
        """The register that statement `i` writes: its own, or that of the variable it feeds."""
        variable = self.facts.direct.get(i)
        if variable is not None:
            register = self.variable(variable)
        else:
            register = self.new(TYPES[self.ir.body[i][1]][0])
        self.values[i] = register
        return register

    def variable(self, i: int) -> str:
        """The register of a variable."""
        register = self.values[i]
        if not register:
            register = self.values[i] = self.new(TYPES[self.ir.body[i][1]][0])
        return register

    def in_register(self, i: int) -> str:
        """A value that is no immediate."""
        value = self.values[i]
        if value[0] == "%":
            return value
        prefix, kind = TYPES[self.ir.body[i][1]]
        register = self.new(prefix)
        self.emit(f"mov.{kind} {register}, {value};")
        return register

    def fixed_register(self, name: str, kind: str, text: str) -> str:
        """A register that the prologue fills."""
        if name not in self.fixed:
            self.fixed[name] = kind, text
        return name

    def once(self, key: Any, prefix: str, text: str, ids: Iterable[int]) -> str:
        """The result of an instruction (`{}` is its register) on `ids`, shared in its block."""
        register = self.known.get(key)
        if register is None:
            register = self.known[key] = self.new(prefix)
            before, self.at = self.at, min(self.at, self.outermost(ids))
            self.blocks[self.at].keys.append(key)
            self.emit(text.format(register))
            self.at = before
        return register

    # -- values ---------------------------------------------------------------------------------

    def const(self, i: int, statement: Statement) -> None:
        """A number: an immediate."""
        name = self.values[i] = literal(statement[3], statement[1])
        if statement[1] == "bool":
            self.fixed_register(name, "pred", f"mov.pred {name}, {int(statement[3])};")

    def param(self, i: int, statement: Statement) -> None:
        """A launch parameter."""
        kind = TYPES[statement[1]][1]
        offset = self.params.scalars[statement[3]]
        self.emit(f"ld.param.{kind} {self.result(i)}, [params+{offset}];")

    def identity(self, i: int, statement: Statement) -> None:
        """Ids of the thread, the group and the lane."""
        op = statement[0]
        if op in ("group", "groups"):
            self.values[i] = f"%{op}"
        elif op == "subgroup_size":
            self.values[i] = str(SUBGROUP_SIZE)
        else:
            self.emit(f"mov.u32 {self.result(i)}, {'%tid.x' if op == 'thread' else '%laneid'};")

    def convert(self, i: int, statement: Statement) -> None:
        """Value and bit conversions."""
        op, type_, (a,), _ = statement
        value, source = self.values[a], self.ir.body[a][1]
        if same_register(self.ir.body, statement):
            self.values[i] = value
        elif op == "bitcast":
            self.emit(f"mov.b32 {self.result(i)}, {value};")
        else:
            self.emit(CASTS[source, type_].format(d=self.result(i), a=value))

    def divide(self, i: int, statement: Statement) -> None:
        """Integer quotient and remainder: x // 0 is x, x % 0 is 0."""
        op, type_, (a, b), _ = statement
        x, y, kind = self.values[a], self.values[b], SIGNED[type_]
        divisor = self.ir.body[b]
        if divisor[0] == "const":
            text = f"{op}.{kind} {{}}, {x}, {y};"
            if divisor[3] == 0:
                text = f"mov.b32 {{}}, {x if op == 'div' else 0};"
            self.emit(text.format(self.result(i)))
            return
        zero = self.once(("zero", b), "%p", f"setp.eq.{kind} {{}}, {y}, 0;", (b,))
        quotient = self.new("%r")
        self.emit(f"{op}.{kind} {quotient}, {x}, {y};")
        self.emit(f"selp.b32 {self.result(i)}, {x if op == 'div' else 0}, {quotient}, {zero};")

    def shift(self, i: int, statement: Statement) -> None:
        """Shifts by the amount modulo 32 (PTX clamps instead)."""
        op, type_, (a, b), _ = statement
        amount = self.values[b]
        if self.ir.body[b][0] == "const":
            amount = str(int(amount) & 31)
        else:
            amount = self.once(("mask", b), "%r", f"and.b32 {{}}, {amount}, 31;", (b,))
        name = "shl.b32" if op == "shl" else f"shr.{SIGNED[type_]}"
        self.emit(f"{name} {self.result(i)}, {self.values[a]}, {amount};")

    def nan_extreme(self, i: int, statement: Statement) -> None:
        """maxn and minn before sm_80, which lack max.NaN."""
        a, b = (self.values[x] for x in statement[2])
        nan, extreme = self.new("%p"), self.new("%f")
        self.emit(f"setp.nan.f32 {nan}, {a}, {b};")
        self.emit(f"{statement[0][:3]}.f32 {extreme}, {a}, {b};")
        self.emit(f"selp.f32 {self.result(i)}, 0f7FC00000, {extreme}, {nan};")

    def select(self, i: int, statement: Statement) -> None:
        """Choice; of bools by (c & (a ^ b)) ^ b."""
        _, type_, args, _ = statement
        c, a, b = (self.values[x] for x in args)
        if type_ != "bool":
            self.emit(f"selp.{TYPES[type_][1]} {self.result(i)}, {a}, {b}, {c};")
            return
        t, u = self.new("%p"), self.new("%p")
        self.emit(f"xor.pred {t}, {a}, {b};")
        self.emit(f"and.pred {u}, {t}, {c};")
        self.emit(f"xor.pred {self.result(i)}, {u}, {b};")

    def equal(self, i: int, statement: Statement) -> None:
        """Equality of bools."""
        t = self.new("%p")
        self.emit(f"xor.pred {t}, {self.values[statement[2][0]]}, {self.values[statement[2][1]]};")
        self.emit(f"not.pred {self.result(i)}, {t};")

    def unpack_f16(self, i: int, statement: Statement) -> None:
        """One half of a word, widened."""
        word = statement[2][0]
        low = self.known.get(("low half", word))
        if low is None:
            low, high = self.new("%h"), self.new("%h")
            for key, half in ((("low half", word), low), (("high half", word), high)):
                self.known[key] = half
                self.blocks[self.at].keys.append(key)
            self.emit(f"mov.b32 {{{low}, {high}}}, {self.in_register(word)};")
        half = self.known["high half", word] if statement[3] else low
        self.emit(f"cvt.f32.f16 {self.result(i)}, {half};")

    def pack(self, i: int, statement: Statement) -> None:
        """Two f32 as a word of f16 or bf16, to nearest even; NaN stays NaN."""
        lo, hi = (self.in_register(a) for a in statement[2])
        kind = statement[0][5:]
        if self.ampere:
            self.emit(f"cvt.rn.{kind}x2.f32 {self.result(i)}, {hi}, {lo};")
        elif kind == "f16":
            a, b = self.new("%h"), self.new("%h")
            self.emit(f"cvt.rn.f16.f32 {a}, {lo};")
            self.emit(f"cvt.rn.f16.f32 {b}, {hi};")
            self.emit(f"mov.b32 {self.result(i)}, {{{a}, {b}}};")
        else:
            low, high = self.bf16_bits(lo), self.bf16_bits(hi)
            self.emit(f"prmt.b32 {self.result(i)}, {low}, {high}, 0x7632;")

    def bf16_bits(self, value: str) -> str:
        """A register whose upper half is an f32 rounded to bf16."""
        bits, odd, sum_, rounded, quiet, chosen = (self.new("%r") for _ in range(6))
        nan = self.new("%p")
        self.emit(f"mov.b32 {bits}, {value};")
        self.emit(f"bfe.u32 {odd}, {bits}, 16, 1;")
        self.emit(f"add.u32 {sum_}, {bits}, {odd};")
        self.emit(f"add.u32 {rounded}, {sum_}, 32767;")
        self.emit(f"or.b32 {quiet}, {bits}, 4194304;")
        self.emit(f"setp.nan.f32 {nan}, {value}, {value};")
        self.emit(f"selp.b32 {chosen}, {quiet}, {rounded}, {nan};")
        return chosen

    # -- memory ---------------------------------------------------------------------------------

    def term(self, term: Any) -> str:
        """The register of one term of an index."""
        if isinstance(term, int):
            return self.values[term]
        op, inner, number = term
        name = "mul.lo.u32" if op == "mul" else "shr.u32"
        text = f"{name} {{}}, {self.total(inner)}, {number};"
        return self.once(term, "%r", text, leaves(inner))

    def total(self, terms: Terms) -> str:
        """The register of a sum of terms."""
        register = self.term(terms[0])
        for n in range(2, len(terms) + 1):
            text = f"add.u32 {{}}, {register}, {self.term(terms[n - 1])};"
            register = self.once(("sum", terms[:n]), "%r", text, leaves(terms[:n]))
        return register

    def address(self, statement: Statement) -> str:
        """`[register+bytes]` of an access."""
        op, _, args, attr = statement
        index = args[0]
        scale = 16 if op[-1] == "4" else 4
        terms, constant = self.facts.sums.get(index) or ((index,), 0)
        if self.ir.body[index][0] == "const" and self.ir.body[index][3] < MAX_FOLDED:
            terms, constant = (), self.ir.body[index][3]
        offset = constant * scale
        if op[:2] in ("sl", "ss"):
            base, add, prefix = self.smem(), "mad.lo.u32", "%r"
            offset += self.memory.offsets[attr]
        else:
            base, add, prefix = self.base(attr), "mad.wide.u32", "%rd"
        if terms:
            text = f"{add} {{}}, {self.total(terms)}, {scale}, {base};"
            base = self.once((base, terms, scale), prefix, text, leaves(terms))
        return f"[{base}+{offset}]" if offset else f"[{base}]"

    def base(self, position: int) -> str:
        """The global address of an argument."""
        name = f"%base{position}"
        text = f"ld.param.b64 {name}, [params+{self.params.pointers[position]}];\n"
        return self.fixed_register(name, "b64", f"{text}  cvta.to.global.u64 {name}, {name};")

    def smem(self) -> str:
        """The address of workgroup memory."""
        return self.fixed_register("%smem", "b32", "mov.u32 %smem, $smem;")

    def load(self, i: int, statement: Statement) -> None:
        """A word or a chunk; what no thread writes goes through the read-only path."""
        op, type_, _, attr = statement
        space = "shared"
        if op[0] == "l":
            space = "global" if self.ir.args[attr].writable else "global.nc"
        address = self.address(statement)
        prefix, kind = TYPES[type_[:3]]
        if op[-1] == "4":
            lanes = self.chunks[i] = [self.new(prefix) for _ in range(4)]
            self.emit(f"ld.{space}.v4.{kind} {{{', '.join(lanes)}}}, {address};")
        else:
            self.emit(f"ld.{space}.{kind} {self.result(i)}, {address};")

    def extract(self, i: int, statement: Statement) -> None:
        """A lane of a chunk: a register that the load wrote."""
        self.values[i] = self.chunks[statement[2][0]][statement[3]]

    def store(self, i: int, statement: Statement) -> None:
        """A word or a chunk."""
        op, _, args, _ = statement
        space = "shared" if op[:2] == "ss" else "global"
        address = self.address(statement)
        words = [self.in_register(a) for a in args[1:]]
        kind = TYPES[self.ir.body[args[1]][1]][1]
        if len(words) == 4:
            self.emit(f"st.{space}.v4.{kind} {address}, {{{', '.join(words)}}};")
        else:
            self.emit(f"st.{space}.{kind} {address}, {words[0]};")

    # -- variables and control flow -------------------------------------------------------------

    def assign(self, i: int, statement: Statement) -> None:
        """`var` and `set`: a move, unless the value was computed in place."""
        op, _, args, _ = statement
        variable, value = (i, args[0]) if op == "var" else args
        register = self.variable(variable)
        if value not in self.facts.direct:
            kind = TYPES[self.ir.body[variable][1]][1]
            self.emit(f"mov.{kind} {register}, {self.values[value]};")

    def get(self, i: int, statement: Statement) -> None:
        """A variable's value now: its register, or a copy where it changes before the last use."""
        register = self.values[statement[2][0]]
        if i in self.facts.snapshots:
            self.emit(f"mov.{TYPES[statement[1]][1]} {self.result(i)}, {register};")
        else:
            self.values[i] = register

    def open(self, i: int, statement: Statement) -> None:
        """The start of a block."""
        op, type_, args, _ = statement
        if op == "if":
            self.emit(f"@!{self.values[args[0]]} bra L{i}_else;")
            self.blocks.append(_Block(op, i, 0, [], []))
            return
        comment, guard = "loop", []
        if op == "for":
            low, high = self.values[args[0]], self.values[args[1]]
            index = self.values[i] = self.new("%r")
            guard.append(f"  mov.b32 {index}, {low};")
            if low[0] == "%" or high[0] == "%" or int(low) >= int(high):
                empty = self.new("%p")
                guard.append(f"  setp.ge.{SIGNED[type_]} {empty}, {index}, {high};")
                guard.append(f"  @{empty} bra L{i}_end;")
            comment = f"for {index} < {high}"
        # What moves out of the loop stands before the guard: it may be used after an empty loop.
        self.blocks.append(_Block(op, i, ROOM, [*guard, f"L{i}:  // {comment}"], []))
        self.depth[i] = len(self.blocks) - 1

    def otherwise(self, i: int, statement: Statement) -> None:
        """The other branch of an `if`."""
        opening = self.blocks[-1].opening
        self.emit(f"bra L{opening}_end;")
        self.label(f"L{opening}_else:")
        self.close()
        self.blocks.append(_Block("else", opening, 0, [], []))

    def end(self, i: int, statement: Statement) -> None:
        """The end of a block."""
        kind, opening = self.blocks[-1].kind, self.blocks[-1].opening
        if kind == "for":
            _, type_, (_, high, step), _ = self.ir.body[opening]
            index, again = self.values[opening], self.new("%p")
            self.emit(f"add.{SIGNED[type_]} {index}, {index}, {self.values[step]};")
            self.emit(f"setp.lt.{SIGNED[type_]} {again}, {index}, {self.values[high]};")
            self.emit(f"@{again} bra L{opening};")
        elif kind == "loop":
            self.emit(f"bra L{opening};")
        self.label(f"L{opening}_else:" if kind == "if" else f"L{opening}_end:")
        self.close()

    def close(self) -> None:
        """Hand the block's lines to the one around it; forget what it computed."""
        block = self.blocks.pop()
        self.blocks[-1].lines += block.lines
        for key in block.keys:
            del self.known[key]

    def break_if(self, i: int, statement: Statement) -> None:
        """Leave the innermost loop."""
        loop = next(b.opening for b in reversed(self.blocks) if b.kind in ("for", "loop"))
        self.emit(f"@{self.values[statement[2][0]]} bra L{loop}_end;")

    # -- groups ---------------------------------------------------------------------------------

    def barrier(self, i: int, statement: Statement) -> None:
        """All threads meet; bar.sync also orders their memory accesses."""
        self.emit("bar.sync 0;")

    def workgroup_uniform(self, i: int, statement: Statement) -> None:
        """The first thread's value, through a word of its own."""
        value = self.in_register(statement[2][0])
        kind = TYPES[statement[1]][1]
        word = f"[{self.smem()}+{self.memory.uniform}]"
        thread = self.fixed_register("%thread", "b32", "mov.u32 %thread, %tid.x;")
        first = self.new("%p")
        self.emit(f"setp.eq.u32 {first}, {thread}, 0;")
        self.emit(f"@{first} st.shared.{kind} {word}, {value};")
        self.emit("bar.sync 0;")
        self.emit(f"ld.shared.{kind} {self.result(i)}, {word};")
        self.emit("bar.sync 0;")

    def subgroup(self, i: int, statement: Statement) -> None:
        """A butterfly of shuffles: every lane computes the same tree."""
        op, type_, (a,), attr = statement
        if self.ir.workgroup % SUBGROUP_SIZE or type_ == "bool":
            raise TraceError(
                f"{op} on PTX needs f32, i32 or u32 and a workgroup of a multiple of "
                f"{SUBGROUP_SIZE} threads, got {type_} and {self.ir.workgroup}"
            )
        prefix, value = TYPES[type_][0], self.in_register(a)
        shuffle = "shfl.sync.bfly.b32 {}, {}, {}, 31, 0xffffffff;"
        if op == "shuffle_xor":
            self.emit(shuffle.format(self.result(i), value, attr))
            return
        combine = INSTRUCTIONS[op[9:], type_]
        for mask in (16, 8, 4, 2, 1):
            other = self.new(prefix)
            self.emit(shuffle.format(other, value, mask))
            total = self.result(i) if mask == 1 else self.new(prefix)
            self.emit(f"{combine} {total}, {value}, {other};")
            value = total


Rule = Callable[[_Emitter, int, Statement], None]
RULES: dict[str, Rule] = {
    "const": _Emitter.const, "param": _Emitter.param, "thread": _Emitter.identity,
    "group": _Emitter.identity, "groups": _Emitter.identity, "lane": _Emitter.identity,
    "subgroup_size": _Emitter.identity, "cast": _Emitter.convert, "bitcast": _Emitter.convert,
    "div": _Emitter.divide, "rem": _Emitter.divide, "shl": _Emitter.shift, "shr": _Emitter.shift,
    "minn": _Emitter.nan_extreme, "maxn": _Emitter.nan_extreme, "select": _Emitter.select,
    "eq": _Emitter.equal, "unpack_f16": _Emitter.unpack_f16, "pack_f16": _Emitter.pack,
    "pack_bf16": _Emitter.pack, "extract": _Emitter.extract,
    "load": _Emitter.load, "load4": _Emitter.load, "sload": _Emitter.load,
    "sload4": _Emitter.load, "store": _Emitter.store, "store4": _Emitter.store,
    "sstore": _Emitter.store, "sstore4": _Emitter.store,
    "var": _Emitter.assign, "set": _Emitter.assign, "get": _Emitter.get,
    "if": _Emitter.open, "for": _Emitter.open, "loop": _Emitter.open, "else": _Emitter.otherwise,
    "end": _Emitter.end, "break_if": _Emitter.break_if, "barrier": _Emitter.barrier,
    "workgroup_uniform": _Emitter.workgroup_uniform, "subgroup_add": _Emitter.subgroup,
    "subgroup_min": _Emitter.subgroup, "subgroup_max": _Emitter.subgroup,
    "shuffle_xor": _Emitter.subgroup,
}  # fmt: skip
