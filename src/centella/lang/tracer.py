"""The tracer: records statements while a kernel function runs, and checks the type rules.

Blocks give scope (a value may be used only while its block is open); uniformity is a property of
each value and of each open block. Pure statements are value-numbered inside open blocks, so that
repeated address arithmetic is recorded once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from centella.errors import TraceError
from centella.lang.blocks import LOOPS, Block, source_line
from centella.lang.fold import fold, identity
from centella.lang.ir import STORES, BufferArg, KernelIR, MapParam, Number, Param, SharedArray
from centella.lang.structure import Statement, unawaited
from centella.lang.values import Expr, Value, Var, adapt

WARPGROUP = 128  # threads
SIMPLER = frozenset({"shl", "shr", "div", "rem"})
UNIFORM_SOURCES = frozenset(
    {"param", "group", "groups", "subgroup_size", "grid", "warpgroup", "cluster_rank"}
)
_active = threading.local()


def current() -> Tracer:
    """The tracer of the kernel being recorded on this thread."""
    tracer: Tracer | None = getattr(_active, "tracer", None)
    if tracer is None:
        raise TraceError("centella.lang functions work only inside a kernel function")
    return tracer


@contextmanager
def recording(tracer: Tracer) -> Iterator[None]:
    """Record what this thread calls; afterwards no value of the kernel can be used."""
    before = getattr(_active, "tracer", None)
    _active.tracer = tracer
    try:
        yield
    finally:
        tracer.abandon()
        _active.tracer = before


class Tracer:
    """Records one kernel."""

    def __init__(self, name: str, workgroup: int) -> None:
        self.name = name
        self.workgroup = workgroup
        self.cluster: int = 1  # groups of one
        self.body: list[Statement] = []
        self.lines: dict[int, str] = {}
        self.params: dict[Param, int] = {}  # and their positions
        self.shared: list[SharedArray] = []
        self.maps: list[MapParam] = []
        self.pending: list[set[int]] = [set()]  # accumulators by group of wgmma; last: the open one
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
        self.lines[index] = source_line()
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
        expr = self._consts.get(key)
        if expr is None:
            index = self.emit("const", type_, (), value)
            expr = self._consts[key] = Expr(self, index, type_, True, 0, value)
        return expr

    def pure(self, op: str, type_: str, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
        """A pure operation: folded, simplified, shared with an equal earlier one, or recorded."""
        self.check(args)
        consts = tuple([a.const for a in args])
        known = [c for c in consts if c is not None]
        if args and len(known) == len(args):
            value = fold(op, type_, attr, [a.type for a in args], known)
            if value is not None:
                return self.constant(value, type_)
        same = identity(op, type_, consts)
        if same is not None:
            return self.constant(0, type_) if same == "zero" else args[int(same)]
        if op in SIMPLER and isinstance(consts[1], int):
            op, args = self._simpler(op, type_, args, consts[1])
        key = (op, type_, tuple([a.id for a in args]), attr)
        recorded = self._numbers.get(key)
        if recorded is not None:
            return recorded
        uniform = op in UNIFORM_SOURCES or (bool(args) and all([a.uniform for a in args]))
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
        position = self.params.setdefault(Param(source, type_), len(self.params))
        return self.pure("param", type_, (), position)

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

    def set_var(self, var: Var, value: Value) -> None:
        """Assign a register."""
        self._check_var(var)
        expr = adapt(self, value, var.type)
        role = self.role
        if var.uniform and role is not None and var.block < role.id:
            raise TraceError("a uniform lang.var is set in a role, which not all threads run")
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
            inside = [b for b in self.blocks if b.id > var.block]  # ids grow inwards
            for block in inside:
                block.uniform_set = block.uniform_set or source_line()

    # -- control flow ---------------------------------------------------------------------------

    def open(
        self, op: str, args: tuple[Expr, ...], uniform: bool, role: tuple[int, int] | None = None
    ) -> tuple[int, Block]:
        """Open a block; returns the id of the statement that opens it, and the block.

        Args:
            role: first thread and number of those that run it; among them control flow is uniform.
        """
        index = self.effect(op, args[0].type if op == "for" else "", args, role)
        block = self._push(op, uniform, self.lines[index])
        block.role = role
        return index, block

    @property
    def role(self) -> Block | None:
        """The role that is open."""
        return next((b for b in reversed(self.blocks) if b.role is not None), None)

    def _push(self, kind: str, uniform: bool, line: str) -> Block:
        block = Block(self._next_block, kind, uniform and self.uniform, line)
        self._next_block += 1
        self.blocks.append(block)
        self._open.add(block.id)
        return block

    def close(self, block: Block) -> None:
        """Close a block: the innermost one, else it was left in a way that Python allows."""
        if self.blocks[-1] is not block:
            raise TraceError(self.blocks[-1].left_open())
        self.blocks.pop()
        self._open.discard(block.id)
        for key in block.keys:
            del self._numbers[key]
        block.check_loop()
        self._check_pending(block)
        parent = self.blocks[-1]
        parent.barrier = parent.barrier or block.barrier
        self.emit("end", "")
        if block.kind == "if":
            self.closed_if = block.uniform

    def reopen_else(self) -> Block:
        """Turn the `end` just recorded into `else`."""
        if self.closed_if is None:
            raise TraceError("lang.else_() must follow the end of a lang.if_ block directly")
        uniform = self.closed_if
        self.body.pop()
        self.emit("else", "")
        return self._push("else", uniform, source_line())

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
            loop.divergent_break = source_line()
            loop.uniform = False

    def _check_pending(self, block: Block) -> None:
        """What a wgmma of one iteration leaves pending, the next one may not touch."""
        parent = self.blocks[-1]
        if block.kind in LOOPS and not block.touched.isdisjoint(set().union(*self.pending)):
            raise TraceError(
                "a loop reads a Fragment that a wgmma at its end leaves pending: wait before the "
                "loop ends (ptx.wgmma_wait)"
            )
        parent.touched |= block.touched

    def need_uniform(self, what: str, role: bool = False) -> None:
        """Raise unless control flow is uniform here, among the threads of a role if `role`."""
        if not role and self.role is not None:
            raise TraceError(
                f"{what} inside a ptx.role: threads of other roles do not come there; the threads "
                f"of one warpgroup meet by ptx.warpgroup_barrier()"
            )
        if self.role is not None and any(n % WARPGROUP for n in self.role.role or ()):
            raise TraceError(
                f"{what} in a ptx.role of some warps: a role whose threads meet is of whole "
                f"warpgroups of {WARPGROUP} threads"
            )
        if not self.uniform:
            raise TraceError(
                f"{what} inside control flow that may differ by thread: its condition must be "
                f"uniform (constants, parameters, group ids, Scalars, lang.workgroup_uniform)"
            )
        self.blocks[-1].barrier = self.blocks[-1].barrier or source_line()

    # -- end ------------------------------------------------------------------------------------

    def finish(self, args: tuple[BufferArg, ...]) -> KernelIR:
        """The finished kernel."""
        if len(self.blocks) != 1:
            raise TraceError(self.blocks[-1].left_open())
        early = [i for i in unawaited(self.body) if self.body[i][0] in STORES]
        if early:
            raise TraceError(
                "await_launches comes before what a kernel writes, in each branch and role; it "
                f"does not at {self.lines[early[0]]}"
            )
        parts = tuple(self.params), tuple(self.shared), self.workgroup, tuple(self.body)
        return KernelIR(self.name, args, *parts, self.lines, self.starts, tuple(self.maps))

    def abandon(self) -> None:
        """Close every block: values and variables of this kernel cannot be used any more."""
        self._open.clear()
