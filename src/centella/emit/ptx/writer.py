"""The text of one kernel while it grows: blocks of lines, registers, and what they hold.

A line goes to the block `at`: the innermost one, or an outer one for a value that may be computed
there. What several statements need (an address, a mask) is computed `once` a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field

from centella.emit.ptx.facts import Facts, facts_of
from centella.emit.ptx.layout import ParamLayout, SharedLayout, param_layout, shared_layout
from centella.emit.ptx.tables import REGISTERS, TYPES, number_of
from centella.lang.ir import KernelIR
from centella.lang.structure import Statement


class Block(Struct, eq=False):
    """An open block: what opened it, how many values may still move before it, what it holds."""

    kind: str
    opening: int
    room: int = 0
    lines: list[str] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)  # of what is known only in it


class Writer:
    """One emission: lines, registers and what they hold."""

    def __init__(self, ir: KernelIR, arch: str) -> None:
        self.ir: KernelIR = ir
        self.arch: str = arch
        self.ampere: bool = number_of(arch) >= 80
        self.params: ParamLayout = param_layout(ir)
        self.shared: SharedLayout = shared_layout(ir)
        self.facts: Facts = facts_of(ir)
        self.blocks: list[Block] = [Block("kernel", -1)]
        self.at: int = 0  # the block that lines go to
        self.values: list[str] = [""] * len(ir.body)  # register or immediate of each value
        self.depth: list[int] = [0] * len(ir.body)  # the block that each value is computed in
        self.chunks: dict[int, list[str]] = {}
        self.count: dict[str, int] = dict.fromkeys(REGISTERS, 0)
        self.fixed: dict[str, tuple[str, str]] = {}  # registers of the prologue: kind, lines
        self.fragments: list[tuple[str, str, int]] = []  # kind, name, registers of each
        self.lines: dict[int, int] = {}  # bytes that loads of an argument bring to L2
        self.known: dict[Any, Any] = {}  # registers, by what they hold in the open blocks

    # -- lines ----------------------------------------------------------------------------------

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

    def close(self) -> None:
        """Hand the block's lines to the one around it; forget what it computed."""
        block = self.blocks.pop()
        self.blocks[-1].lines += block.lines
        for key in block.keys:
            del self.known[key]

    # -- registers ------------------------------------------------------------------------------

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

    def kind(self, i: int) -> str:
        """The name of a value's type in moves and memory accesses."""
        return TYPES[self.ir.body[i][1]][1]

    def read(self, i: int, register: str) -> None:
        """A register that changes, as it is now: a copy where that is before the last use."""
        if i in self.facts.snapshots:
            self.emit(f"mov.{self.kind(i)} {self.result(i)}, {register};")
        else:
            self.values[i] = register

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
        if key not in self.known:
            before, self.at = self.at, min(self.at, self.outermost(ids))
            self.emit(text.format(self.remember(key, self.new(prefix))))
            self.at = before
        register: str = self.known[key]
        return register

    def remember(self, key: Any, registers: Any) -> Any:
        """Keep what registers hold, while the block of their lines is open."""
        self.known[key] = registers
        self.blocks[self.at].keys.append(key)
        return registers

    def smem(self) -> str:
        """The address of workgroup memory."""
        return self.fixed_register("%smem", "b32", "mov.u32 %smem, $smem;")


def braced(registers: Iterable[str]) -> str:
    """Registers as one operand."""
    return f"{{{', '.join(registers)}}}"


Rule = Callable[[Writer, int, Statement], None]
