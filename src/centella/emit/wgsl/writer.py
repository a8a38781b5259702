"""The text of one kernel while it grows: lines, and expressions that wait for their only use."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from centella.emit.wgsl.functions import FUNCTIONS, NEEDS
from centella.lang.ir import GLOBAL, KernelIR
from centella.lang.rounds import Copies
from centella.lang.structure import OPENS, Statement

MAX_DEPTH = 12  # of operations in an expression


class Block(Struct, frozen=True):
    """A block that is open: its first line, how often it shall stand, what comes between.

    Attributes:
        loop: it is a loop's.
    """

    first: int
    copies: int = 1
    between: str = ""
    loop: bool = False


class Writer:
    """One emission: its lines, the text of each value, and what the module must define."""

    def __init__(
        self, ir: KernelIR, native_f16: bool, keep_loops: bool,
        settled: frozenset[str] = frozenset(), copies: Copies = (), report_stops: bool = False,
    ) -> None:  # fmt: skip
        self.ir: KernelIR = ir
        self.report_stops: bool = report_stops
        self.native_f16: bool = native_f16
        self.keep_loops: bool = keep_loops
        self.settled: frozenset[str] = settled
        self.copies: dict[int, int] = dict(copies)
        self.opened: list[Block] = []
        self.lines: list[str] = []
        self.indent: int = 2
        self.text: dict[int, str] = {}
        self.depth: dict[int, int] = {}
        self.deferred: dict[int, frozenset[int]] = {}  # unwritten values: the variables they read
        self.needed: set[str] = set()
        self.module: list[str] = []  # declarations that statements ask for
        self.temporaries: int = 0
        uses, foreign = _uses_of(ir)
        self.uses: list[int] = uses
        self.foreign: set[int] = foreign
        self.storage: dict[int, bool] = _storage_barriers(ir)
        # Operands of what is rounded in registers: a driver would take its own f16 and back for x,
        # so the word has bits of the group's third number added, which is 0 in every launch.
        self.rounded: set[tuple[int, ...]] = {
            ir.body[s[2][0]][2] for s in ir.body if s[0] == "unpack_f16"
        }

    def line(self, text: str) -> None:
        """Append a line of the entry function, indented by the open blocks."""
        self.lines.append("  " * self.indent + text)

    def need(self, name: str) -> None:
        """Define a function, where WGSL has none of that name."""
        if name in FUNCTIONS:
            self.needed.update((name, *NEEDS.get(name, ())))

    # -- values ---------------------------------------------------------------------------------

    def read(self, index: int) -> str:
        """The text of an operand; a deferred expression is consumed."""
        self.deferred.pop(index, None)
        return self.text[index]

    def let(self, index: int, expression: str) -> None:
        """Write a value as a `let`."""
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

    def reads_of(self, args: tuple[int, ...]) -> frozenset[int]:
        """The variables that deferred operands read."""
        return frozenset().union(*(self.deferred.get(a, ()) for a in args))

    def settle(self, var: int | None = None) -> None:
        """Write out deferred values that read `var` (or any variable), before it changes."""
        for index, reads in list(self.deferred.items()):
            if (var in reads) if var is not None else reads:
                del self.deferred[index]
                self.let(index, self.text[index])

    # -- blocks ---------------------------------------------------------------------------------

    def open(self, header: str, index: int = -1, between: str = "", *, loop: bool = False) -> None:
        """The first line of a block.

        Args:
            index: of its statement, by which `copies` know it.
            between: a line between two copies.
            loop: it is a loop's.
        """
        self.settle()
        self.line(header)
        self.indent += 1
        self.opened.append(Block(len(self.lines), self.copies.get(index, 1), between, loop))

    def close(self) -> Block:
        """The end of a block's lines; its last is still to be written."""
        self.settle()
        block = self.opened.pop()
        if block.copies > 1:
            indent = "  " * self.indent
            once = [f"{indent}{{", *self.lines[block.first :], f"{indent}}}"]
            again = [f"{indent}{block.between}", *once]
            self.lines[block.first :] = once + again * (block.copies - 1)
        self.indent -= 1
        return block


def _uses_of(ir: KernelIR) -> tuple[list[int], set[int]]:
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


def _storage_barriers(ir: KernelIR) -> dict[int, bool]:
    """For each barrier, whether accesses to a written buffer come before it (or come round)."""
    storage: dict[int, bool] = {}
    waiting: list[int] = []  # barriers of the open outermost loop
    accessed = False
    opened: list[bool] = []
    for i, (op, _, _, position) in enumerate(ir.body):
        if op in GLOBAL and ir.args[position].writable:
            accessed = True
        elif op in OPENS:
            opened.append(op != "if")
        elif op == "end" and opened.pop() and not any(opened):
            storage.update(dict.fromkeys(waiting, accessed))
            waiting.clear()
        elif op in ("barrier", "workgroup_uniform"):
            storage[i] = accessed
            if any(opened):
                waiting.append(i)
    return storage


Rule = Callable[[Writer, int, Statement], None]
