"""Random integer programs for the kernel language, and what they compute in plain Python.

`programs()` draws one (Hypothesis shrinks what fails), `program` records it as a kernel of one
argument z, `on_host` is the answer. Each thread has words of its own in z and in shared memory; at
an exchange, which stands only where all threads come, it reads a word of its neighbour.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from centella import lang
from centella.dtypes import i32, u32
from centella.lang import KernelIR
from centella.lang.kernel_params import Signature, TensorParam

Words = NDArray[np.uint32]

# -- integer arithmetic as the language defines it -------------------------------------------------


def truncated(a: Any, b: Any) -> Any:
    """Division towards 0; by 0 it gives the dividend."""
    a, b = a.astype(object), b.astype(object)
    pairs = zip(a, b, strict=True)
    q = [x if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in pairs]
    return np.array(q, object)


def remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, a.astype(object) - truncated(a, b) * b.astype(object))


def wrapped(values: Any, dtype: Any) -> Any:
    bits = np.array([int(v) & 0xFFFFFFFF for v in values], np.uint32)
    return bits.view(dtype)


# -- drawing ---------------------------------------------------------------------------------------

THREADS, GROUPS, SLOTS, VARS = 8, 2, 4, 3
SCALARS = {"p0": 0, "p1": 9, "p2": 2**31, "p3": 5}
Node = tuple[Any, ...]
BINARY = ("+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>", "i//", "i%", "i>>", "min", "imax")
COMPARE = ("<", "<=", "==", "!=", "i<", "i>=")
NUMBERS = st.one_of(st.integers(0, 5), st.sampled_from([31, 32, 255, 2**31 - 1, 2**31, 2**32 - 1]))
SLOT, VAR = st.integers(0, SLOTS - 1), st.integers(0, VARS - 1)


def expressions(depth: int) -> st.SearchStrategy[Node]:
    """Integer expressions over variables, memory, ids and values named before."""
    variable = st.tuples(st.just("var"), VAR)
    named = st.tuples(st.just("named"), st.integers(0, 3))
    leaf = st.one_of(
        *(variable, named, variable, named),  # the interesting ones more often
        st.tuples(st.just("number"), NUMBERS),
        st.tuples(st.sampled_from(["shared", "global", "param"]), SLOT),
        st.tuples(st.sampled_from(["me", "group"])),
    )
    if depth == 0:
        return leaf
    inner = expressions(depth - 1)
    return st.one_of(
        leaf,
        *[st.tuples(st.sampled_from(BINARY), inner, inner)] * 3,
        st.tuples(st.sampled_from(["-", "~"]), inner),
        st.tuples(st.just("select"), conditions(depth - 1), inner, inner),
        st.tuples(st.just("lane"), st.sampled_from(["shared", "global"]), SLOT),
        st.tuples(st.just("count"), conditions(depth - 1)),
    )


def conditions(depth: int) -> st.SearchStrategy[Node]:
    """Bools over expressions."""
    inner = expressions(max(depth - 1, 0))
    plain = st.tuples(st.sampled_from(COMPARE), inner, inner)
    if depth <= 0:
        return plain
    both = st.tuples(st.sampled_from(["&", "|", "^"]), plain, plain)
    return st.one_of(plain, both, st.tuples(st.just("~"), plain))


def statements(depth: int, loop: bool, uniform: bool, least: int) -> st.SearchStrategy[list[Node]]:
    """Statements of a block; barriers only where all threads come."""
    value = expressions(2)
    assign = st.tuples(st.sampled_from(["set", "add"]), VAR, value)
    simple = [
        *(assign, assign),
        st.tuples(st.just("name"), value),
        st.tuples(st.just("word"), st.sampled_from(["shared", "global"]), SLOT, value),
        st.tuples(st.just("chunk"), st.sampled_from(["shared", "global"]), value, value),
    ]
    if loop:
        simple.append(st.tuples(st.just("break"), conditions(1)))
    if uniform:
        simple.append(st.tuples(st.just("exchange"), VAR, SLOT))
    if depth == 0:
        return st.lists(st.one_of(*simple), min_size=least, max_size=least + 3)
    between = statements(depth - 1, False, uniform, 1)
    holding = st.tuples(st.just("hold"), VAR, value, between, VAR)
    block = statements(depth - 1, False, False, 1)
    inside = statements(depth - 1, True, False, 2)
    nested: list[st.SearchStrategy[Node]] = [
        st.tuples(st.just("if"), conditions(1), block, st.none() | block),
        st.tuples(st.just("for"), value, value, inside),
        st.tuples(st.just("loop"), value, inside),
    ]
    if uniform:
        together = statements(depth - 1, False, True, 2)
        nested.append(st.tuples(st.just("together"), st.integers(0, 3), together))
        nested.append(st.tuples(st.just("param if"), SLOT, together, together))
    every = st.one_of(*simple, *nested, holding, holding, holding)
    return st.lists(every, min_size=least, max_size=least + 4)


def _divided(rule: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: wrapped(rule(np.array([a]), np.array([b])), a.dtype)[0]


# The operations of a random program: recorded, and the same on NumPy scalars.
DEVICE = SimpleNamespace(
    div=operator.floordiv, rem=operator.mod, shl=operator.lshift, shr=operator.rshift,
    maximum=lang.maximum, minimum=lang.minimum, select=lang.select,
    word=lambda x: lang.const(x, u32), count=lambda x: lang.cast(x, u32),
    signed=lambda x: lang.bitcast(x, i32), unsigned=lambda x: lang.bitcast(x, u32),
)  # fmt: skip  # a table
HOST = SimpleNamespace(
    div=_divided(truncated), rem=_divided(remainder),
    shl=lambda a, b: a << (b & 31).astype(a.dtype), shr=lambda a, b: a >> (b & 31).astype(a.dtype),
    maximum=np.maximum, minimum=np.minimum, select=lambda condition, a, b: a if condition else b,
    word=np.uint32, count=np.uint32,
    signed=lambda x: x.view(np.int32), unsigned=lambda x: x.view(np.uint32),
)  # fmt: skip  # a table


class Thread(ABC):
    """One thread of a random program: its variables, the values it named, its words of memory."""

    def __init__(self, o: Any, me: Any, group: Any, params: list[Any]) -> None:
        self.o, self.me, self.group, self.params = o, me, group, params
        self.everyone = group * THREADS + me
        self.vars = [self.everyone * 3 + k for k in range(VARS)]
        self.named: list[Any] = [me]

    @abstractmethod
    def read(self, space: str, slot: int, chunk: bool = False) -> Any:
        """A word of its own, alone or out of a chunk."""

    @abstractmethod
    def write(self, space: str, slot: int, *values: Any) -> None:
        """Change a word of its own, or a chunk of them."""

    @abstractmethod
    def assign(self, var: int, value: Any) -> None:
        """Change a variable."""

    def is_simple(self, kind: str, *rest: Any) -> bool:
        """Do a statement that needs no other thread and no block; False for another."""
        if kind in ("set", "add"):
            value = self.value(rest[1])
            self.assign(rest[0], value if kind == "set" else self.vars[rest[0]] + value)
        elif kind == "name":
            self.named.append(self.value(rest[0]))
        elif kind == "word":
            self.write(rest[0], rest[1], self.value(rest[2]))
        elif kind == "chunk":
            a, b = self.value(rest[1]), self.value(rest[2])
            self.write(rest[0], 0, a, b, a ^ b, self.vars[0])
        else:
            return False
        return True

    def value(self, node: Node) -> Any:
        o, (kind, *rest) = self.o, node
        if kind == "var":
            return self.vars[rest[0]] + 0
        if kind == "number":
            return o.word(rest[0])
        if kind == "named":
            return self.named[-1 - rest[0] % len(self.named)]
        if kind == "param":
            return self.params[rest[0]]
        if kind in ("me", "group"):
            return self.me if kind == "me" else self.group
        if kind in ("shared", "global"):
            return self.read(kind, rest[0])
        if kind == "lane":
            return self.read(rest[0], rest[1], chunk=True)
        if kind == "count":
            return o.count(self.condition(rest[0]))
        if kind == "select":
            return o.select(self.condition(rest[0]), self.value(rest[1]), self.value(rest[2]))
        if len(rest) == 1:
            return -self.value(rest[0]) if kind == "-" else ~self.value(rest[0])
        a, b = (self.value(n) for n in rest)
        table: dict[str, Callable[[], Any]] = {
            "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "//": lambda: o.div(a, b),
            "%": lambda: o.rem(a, b), "&": lambda: a & b, "|": lambda: a | b, "^": lambda: a ^ b,
            "<<": lambda: o.shl(a, b), ">>": lambda: o.shr(a, b), "min": lambda: o.minimum(a, b),
            "i//": lambda: o.unsigned(o.div(o.signed(a), o.signed(b))),
            "i%": lambda: o.unsigned(o.rem(o.signed(a), o.signed(b))),
            "i>>": lambda: o.unsigned(o.shr(o.signed(a), b)),
            "imax": lambda: o.unsigned(o.maximum(o.signed(a), o.signed(b))),
        }  # fmt: skip  # a table
        return table[kind]()

    def condition(self, node: Node) -> Any:
        kind, *rest = node
        if kind == "~":
            return ~self.condition(rest[0])
        if kind in ("&", "|", "^"):
            p, q = (self.condition(n) for n in rest)
            return p & q if kind == "&" else p | q if kind == "|" else p ^ q
        a, b = (self.value(n) for n in rest)
        if kind.startswith("i"):
            a, b = self.o.signed(a), self.o.signed(b)
        table: dict[str, Callable[[], Any]] = {
            "<": lambda: a < b, "<=": lambda: a <= b, "==": lambda: a == b, "!=": lambda: a != b,
            "i<": lambda: a < b, "i>=": lambda: a >= b,
        }  # fmt: skip  # a table
        return table[kind]()


class Recorder(Thread):
    """Records the program as a kernel."""

    def __init__(self, z: Any, params: list[Any]) -> None:
        super().__init__(DEVICE, lang.local_id(), lang.group_id(), params)
        self.vars = [lang.var(v) for v in self.vars]
        self.z, self.tile = z, lang.shared(u32, THREADS * SLOTS)

    def array_of(self, space: str) -> tuple[Any, Any]:
        if space == "shared":
            return self.tile, self.me * SLOTS
        return self.z, self.everyone * SLOTS

    def read(self, space: str, slot: int, chunk: bool = False) -> Any:
        array, first = self.array_of(space)
        return array.load(first)[slot] if chunk else array[first + slot]

    def write(self, space: str, slot: int, *values: Any) -> None:
        array, first = self.array_of(space)
        if len(values) > 1:
            array.store(first, values)
        else:
            array[first + slot] = values[0]

    def assign(self, var: int, value: Any) -> None:
        self.vars[var].set(value)

    def block(self, nodes: list[Node]) -> None:
        known = len(self.named)
        for node in nodes:
            self.statement(*node)
        del self.named[known:]

    def loop(self, index: Any, nodes: list[Node]) -> None:
        self.named.append(index)
        self.block(nodes)
        self.named.pop()

    def statement(self, kind: str, *rest: Any) -> None:
        if self.is_simple(kind, *rest):
            return
        if kind == "hold":  # used once, and after what may change its operands
            difference = self.vars[rest[0]] - self.value(rest[1])
            for inner in rest[2]:
                self.statement(*inner)
            self.vars[rest[3]] ^= difference
        elif kind == "break":
            lang.break_if(self.condition(rest[0]))
        elif kind == "exchange":
            lang.barrier()
            word = self.tile[(self.me + 1) % THREADS * SLOTS + rest[1]]
            lang.barrier()
            self.vars[rest[0]].set(word)
        elif kind in ("if", "param if"):
            condition = self.condition(rest[0]) if kind == "if" else self.params[rest[0]] > 7
            with lang.if_(condition):
                self.block(rest[1])
            if rest[2] is not None:
                with lang.else_():
                    self.block(rest[2])
        elif kind == "for":
            start = self.value(rest[0]) & 0xFF
            for k in lang.range(start, start + (self.value(rest[1]) & 3)):
                self.loop(k, rest[2])
        elif kind == "together":
            for k in lang.range(rest[0]):
                self.loop(k, rest[1])
        else:
            left = lang.var(self.value(rest[0]) & 3)
            with lang.loop():
                lang.break_if(left == 0)
                left -= 1
                self.block(rest[1])


class Left(Exception):  # noqa: N818  # it says what happened
    """A thread leaves its innermost loop."""


Steps = Iterator[None]


class Runner(Thread):
    """Runs the program on the host; yields where it waits for the threads of its group."""

    def __init__(self, z: Any, tile: Any, me: int, group: int, params: list[Any]) -> None:
        super().__init__(HOST, np.uint32(me), np.uint32(group), params)
        self.memory = {"shared": tile, "global": z}

    def at(self, space: str) -> int:
        return SLOTS * int(self.me if space == "shared" else self.everyone)

    def read(self, space: str, slot: int, chunk: bool = False) -> Any:
        return self.memory[space][self.at(space) + slot]

    def write(self, space: str, slot: int, *values: Any) -> None:
        first = self.at(space) + slot
        self.memory[space][first : first + len(values)] = values

    def assign(self, var: int, value: Any) -> None:
        self.vars[var] = value

    def block(self, nodes: list[Node]) -> Steps:
        known = len(self.named)
        try:
            for node in nodes:
                yield from self.statement(*node)
        finally:
            del self.named[known:]

    def loop(self, times: int, nodes: list[Node], first: Any = None) -> Steps:
        known = len(self.named)
        try:
            for k in range(times):
                if first is not None:
                    self.named.append(first + np.uint32(k))
                yield from self.block(nodes)
                del self.named[known:]
        except Left:
            pass
        del self.named[known:]

    def statement(self, kind: str, *rest: Any) -> Steps:
        if self.is_simple(kind, *rest):
            return
        if kind == "hold":
            difference = self.vars[rest[0]] - self.value(rest[1])
            for inner in rest[2]:
                yield from self.statement(*inner)
            self.vars[rest[3]] = self.vars[rest[3]] ^ difference
        elif kind == "break":
            if self.condition(rest[0]):
                raise Left
        elif kind == "exchange":
            yield
            word = self.memory["shared"][int(self.me + 1) % THREADS * SLOTS + rest[1]]
            yield
            self.vars[rest[0]] = word
        elif kind in ("if", "param if"):
            yes = self.condition(rest[0]) if kind == "if" else self.params[rest[0]] > 7
            yield from self.block((rest[1] if yes else rest[2]) or [])
        elif kind == "for":
            start = self.value(rest[0]) & 0xFF
            yield from self.loop(int(self.value(rest[1]) & 3), rest[2], start)
        elif kind == "together":
            yield from self.loop(rest[0], rest[1], np.uint32(0))
        else:
            yield from self.loop(int(self.value(rest[0]) & 3), rest[1])


def programs() -> st.SearchStrategy[list[Node]]:
    """Whole programs."""
    return statements(2, loop=False, uniform=True, least=3)


def first_words() -> Words:
    """What z starts with: a third are small numbers."""
    z = np.random.default_rng(1).integers(0, 2**32, THREADS * GROUPS * SLOTS, dtype=np.uint32)
    z[::3] %= 9
    return z


def first_shared(me: Any, k: int) -> Any:
    """What shared memory starts with."""
    return me * 7 + k


def program(nodes: list[Node], chunked: bool) -> KernelIR:
    """The kernel of a random program; `chunked` makes z an array of chunks."""

    def kernel(z: Any, **params: Any) -> None:
        run = Recorder(z, list(params.values()))
        for k in range(SLOTS):
            run.tile[run.me * SLOTS + k] = first_shared(run.me, k)
        if chunked:
            z.store(run.everyone * SLOTS, z.load(run.everyone * SLOTS))
        run.block(nodes)
        for k, v in enumerate(run.vars):
            z[run.everyone * SLOTS + k] ^= v + run.tile[run.me * SLOTS + k]

    tensors = (("z", TensorParam("inout", u32, 1)),)
    signature = Signature(tensors, tuple((name, "u32") for name in SCALARS), ())
    return lang.trace(kernel, signature, workgroup=THREADS, dtypes={})


def on_host(nodes: list[Node]) -> Words:
    """What the program makes of z, thread by thread in Python."""
    z = first_words()
    params = [np.uint32(p) for p in SCALARS.values()]
    with np.errstate(all="ignore"):
        for group in range(GROUPS):
            _run_group(nodes, z, group, params)
    return z


def _run_group(nodes: list[Node], z: Words, group: int, params: list[Any]) -> None:
    words = [first_shared(me, k) for me in range(THREADS) for k in range(SLOTS)]
    tile = np.array(words, np.uint32)
    threads = [Runner(z, tile, me, group, params) for me in range(THREADS)]
    waiting = [t.block(nodes) for t in threads]
    done = object()
    while waiting:
        waiting = [w for w in waiting if next(w, done) is not done]
    for t in threads:
        for k, v in enumerate(t.vars):
            z[t.at("global") + k] ^= v + tile[t.at("shared") + k]
