"""The tracer: records statements while a kernel function runs, and checks the type rules.

Blocks give scope (a value may be used only while its block is open); uniformity is a property of
each value and of each open block. Pure statements are value-numbered inside open blocks, so that
repeated address arithmetic is recorded once.
"""

from __future__ import annotations

import sys
from typing import Any

from centella.errors import TraceError
from centella.lang.fold import fold, identity
from centella.lang.ir import BufferArg, KernelIR, Param, SharedArray, Statement
from centella.lang.values import Expr, Number, Operand, Var, adapt

SIMPLER = frozenset({"shl", "shr", "div", "rem"})
UNIFORM_SOURCES = frozenset({"param", "group", "groups", "const", "subgroup_size"})
FORMS = {"if": "lang.if_", "else": "lang.else_", "for": "lang.range", "loop": "lang.loop"}
LOOPS = ("for", "loop")
_PACKAGE = __name__.rsplit(".", 1)[0] + "."


def _source_line() -> str:
    """File and line of the nearest frame outside the language."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "contextlib" and not name.startswith(_PACKAGE):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Block:
    """An open block: where it stands, whether control flow in it is uniform, what happened in it.

    `barrier`, `divergent_break` and `uniform_set` are the lines of the first of each, or None.
    """

    __slots__ = (
        *("barrier", "divergent_break", "id", "keys", "kind", "leaves", "line", "uniform"),
        "uniform_set",
    )

    def __init__(self, id_: int, kind: str, uniform: bool, line: str) -> None:
        self.id = id_
        self.kind = kind
        self.uniform = uniform
        self.line = line
        self.keys: list[Any] = []
        self.leaves = False
        self.barrier: str | None = None
        self.divergent_break: str | None = None
        self.uniform_set: str | None = None


class Tracer:
    """Records one kernel."""

    def __init__(self, name: str, workgroup: int) -> None:
        self.name = name
        self.workgroup = workgroup
        self.body: list[Statement] = []
        self.lines: dict[int, str] = {}
        self.params: list[Param] = []
        self.shared: list[SharedArray] = []
        self.starts: dict[int, tuple[int, int]] = {}
        self.blocks: list[Block] = [Block(0, "kernel", True, "")]
        self._open: set[int] = {0}
        self._next_block = 1
        self._numbers: dict[Any, Expr] = {}
        self._consts: dict[Any, Expr] = {}
        self.closed_if: bool | None = None  # right after an `if`: whether it was uniform

    # -- values ---------------------------------------------------------------------------------

    @property
    def uniform(self) -> bool:
        """True when all threads of a group reach this point together."""
        return self.blocks[-1].uniform

    def emit(self, op: str, type_: str, args: tuple[int, ...] = (), attr: Any = None) -> int:
        """Append a statement and return its id."""
        self.closed_if = None
        self.body.append((op, type_, args, attr))
        return len(self.body) - 1

    def effect(self, op: str, type_: str, args: tuple[Expr, ...], attr: Any = None) -> int:
        """Append a statement with an effect, remembering the source line."""
        self.check(args)
        index = self.emit(op, type_, tuple(a.id for a in args), attr)
        self.lines[index] = _source_line()
        return index

    def check(self, args: tuple[Expr, ...]) -> None:
        """Raise unless every operand belongs to this kernel and to an open block."""
        for a in args:
            if a.tracer is not self:
                raise TraceError("a value of another kernel was used in this one")
            if a.block not in self._open:
                raise TraceError(
                    "a value was used outside the block (lang.if_, lang.range, lang.loop) that "
                    "computed it; assign it to a lang.var declared before the block"
                )

    def constant(self, value: Number, type_: str) -> Expr:
        """A constant; visible in every block."""
        key = (type_, value, str(value))
        found = self._consts.get(key)
        if found is None:
            index = self.emit("const", type_, (), value)
            found = self._consts[key] = Expr(self, index, type_, True, 0, value)
        return found

    def pure(self, op: str, type_: str, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
        """A pure operation: folded, simplified, shared with an equal earlier one, or recorded."""
        self.check(args)
        consts = tuple(a.const for a in args)
        if args and None not in consts:
            types = tuple(a.type for a in args)
            value = fold(op, type_, attr, types, consts)  # type: ignore[arg-type]  # no None here
            if value is not None:
                return self.constant(value, type_)
        same = identity(op, type_, consts)
        if same is not None:
            return self.constant(0, type_) if same == "zero" else args[int(same)]
        if op in SIMPLER and isinstance(consts[1], int):
            op, args = self._simpler(op, type_, args, consts[1])
        key = (op, type_, tuple(a.id for a in args), attr)
        found = self._numbers.get(key)
        if found is not None:
            return found
        uniform = op in UNIFORM_SOURCES or (bool(args) and all(a.uniform for a in args))
        expr = self.result(self.emit(op, type_, key[2], attr), type_, uniform)
        self._numbers[key] = expr
        self.blocks[-1].keys.append(key)
        return expr

    def _simpler(
        self, op: str, type_: str, args: tuple[Expr, ...], number: int
    ) -> tuple[str, tuple[Expr, ...]]:
        """Shift amounts below 32; u32 division by a power of two as a shift or a mask."""
        a, b = args
        if op in ("shl", "shr"):
            return op, ((a, b) if number < 32 else (a, self.constant(number & 31, "u32")))
        if type_ != "u32" or number & (number - 1):
            return op, (a, b)
        if op == "div":
            return "shr", (a, self.constant(number.bit_length() - 1, "u32"))
        return "and", (a, self.constant(number - 1, "u32"))

    def result(self, index: int, type_: str, uniform: bool) -> Expr:
        """The Expr of a statement in the current block."""
        return Expr(self, index, type_, uniform, self.blocks[-1].id, None)

    def param(self, source: tuple[str | int, ...], type_: str) -> Expr:
        """A launch parameter, declared at its first use."""
        wanted = Param(source, type_)
        if wanted not in self.params:
            self.params.append(wanted)
        return self.pure("param", type_, (), self.params.index(wanted))

    # -- variables ------------------------------------------------------------------------------

    def var(self, init: Expr, uniform: bool) -> Var:
        """Declare a mutable register."""
        if uniform and not (init.uniform and self.uniform):
            raise TraceError("lang.var(..., uniform=True) needs a uniform value here")
        self.check((init,))
        index = self.emit("var", init.type, (init.id,))
        return Var(self, index, init.type, uniform, self.blocks[-1].id)

    def _check_var(self, var: Var) -> None:
        if var.tracer is not self or var.block not in self._open:
            raise TraceError("a lang.var was used outside the block that declared it")

    def read_var(self, var: Var) -> Expr:
        """The value of a register now."""
        self._check_var(var)
        return self.result(self.emit("get", var.type, (var.id,)), var.type, var.uniform)

    def set_var(self, var: Var, value: Any) -> None:
        """Assign a register."""
        self._check_var(var)
        expr = adapt(self, value, var.type)
        if expr.type != var.type:
            raise TraceError(f"mixed types: a {var.type} variable is set to a {expr.type}")
        if var.uniform and not (expr.uniform and self.uniform):
            raise TraceError(
                "a uniform lang.var was set to a value that may differ by thread, or where control "
                "flow does"
            )
        self.check((expr,))
        self.emit("set", "", (var.id, expr.id))
        if var.uniform:
            for block in self._blocks_within(var.block):
                block.uniform_set = block.uniform_set or _source_line()

    def _blocks_within(self, outer: int) -> list[Block]:
        """The open blocks inside block `outer`."""
        ids = [b.id for b in self.blocks]
        return self.blocks[ids.index(outer) + 1 :]

    # -- control flow ---------------------------------------------------------------------------

    def open(self, op: str, args: tuple[Expr, ...], uniform: bool) -> tuple[int, Block]:
        """Open a block; returns the id of the statement that opens it, and the block."""
        index = self.effect(op, args[0].type if op == "for" else "", args)
        return index, self._push(op, uniform, self.lines[index])

    def _push(self, kind: str, uniform: bool, line: str) -> Block:
        block = Block(self._next_block, kind, uniform and self.uniform, line)
        self._next_block += 1
        self.blocks.append(block)
        self._open.add(block.id)
        return block

    def close(self, block: Block) -> None:
        """Close a block: the innermost one, else it was left in a way that Python allows."""
        if self.blocks[-1] is not block:
            raise TraceError(self._left_open())
        self.blocks.pop()
        self._open.discard(block.id)
        for key in block.keys:
            del self._numbers[key]
        if block.kind in LOOPS:
            self._check_loop(block)
        parent = self.blocks[-1]
        parent.barrier = parent.barrier or block.barrier
        self.emit("end", "")
        if block.kind == "if":
            self.closed_if = block.uniform

    def _left_open(self) -> str:
        block = self.blocks[-1]
        return (
            f"the {FORMS[block.kind]} block opened at {block.line} was left open: leave a loop "
            f"with lang.break_if, not by a Python break"
        )

    def _check_loop(self, block: Block) -> None:
        if block.kind == "loop" and not block.leaves:
            raise TraceError("a lang.loop() without lang.break_if never ends")
        if not block.divergent_break:
            return
        ends = (
            f"ends on a condition that may differ by thread (break_if at {block.divergent_break}); "
            f"make it uniform, for example with lang.workgroup_uniform"
        )
        if block.barrier:
            raise TraceError(f"a loop with a barrier (at {block.barrier}) {ends}")
        if block.uniform_set:
            raise TraceError(f"a loop that sets a uniform var (at {block.uniform_set}) {ends}")

    def reopen_else(self) -> Block:
        """Turn the `end` just recorded into `else`."""
        if self.closed_if is None:
            raise TraceError("lang.else_() must follow the end of a lang.if_ block directly")
        uniform = self.closed_if
        self.body.pop()
        self.emit("else", "")
        return self._push("else", uniform, _source_line())

    def break_if(self, condition: Expr) -> None:
        """Leave the innermost loop where the condition holds."""
        loop = next((b for b in reversed(self.blocks) if b.kind in LOOPS), None)
        if loop is None:
            raise TraceError("lang.break_if is for the inside of lang.loop() or lang.range(...)")
        if self.blocks[-1] is not loop:
            raise TraceError("lang.break_if must stand directly in the loop, not inside lang.if_")
        self.effect("break_if", "", (condition,))
        loop.leaves = True
        if not (condition.uniform and self.uniform):
            loop.divergent_break = _source_line()
            loop.uniform = False

    def need_uniform(self, what: str) -> None:
        """Raise unless control flow is uniform here."""
        if not self.uniform:
            raise TraceError(
                f"{what} inside control flow that may differ by thread: its condition must be "
                f"uniform (constants, parameters, group ids, Scalars, lang.workgroup_uniform)"
            )
        self.blocks[-1].barrier = self.blocks[-1].barrier or _source_line()

    # -- end ------------------------------------------------------------------------------------

    def finish(self, args: tuple[BufferArg, ...]) -> KernelIR:
        """The finished kernel."""
        if len(self.blocks) != 1:
            raise TraceError(self._left_open())
        return KernelIR(
            self.name,
            args,
            tuple(self.params),
            tuple(self.shared),
            self.workgroup,
            tuple(self.body),
            self.lines,
            self.starts,
        )

    def abandon(self) -> None:
        """Close every block: values and variables of this kernel cannot be used any more."""
        self._open.clear()


def expr_of(tracer: Tracer, value: Any, type_: str) -> Expr:
    """`value` as an Expr of `type_`, or a TraceError naming both types."""
    expr = adapt(tracer, value, type_)
    if expr.type != type_:
        raise TraceError(f"expected a {type_} value, got {expr.type}")
    return expr


__all__ = ["Operand", "Tracer", "expr_of"]
