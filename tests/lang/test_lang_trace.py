"""Tracing: what is refused and at which line, identity, value numbering, speed; and the page.

The last test holds docs/kernel-language.md to its word: each sentence names the tests that show it.
"""

# Parameters annotated by dtypes are traced values, which mypy cannot know.
# mypy: disable-error-code="operator"

from __future__ import annotations

import gc
import inspect
import math
import re
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.dtypes import DType, bool_, f16, f32, i8, i32, u32
from centella.emit.wgsl import emit_wgsl
from centella.errors import SimulationError, TraceError
from centella.lang import In, InOut, KernelIR, Out, Scalar, signature_of, storage
from centella.lang.kernel_params import TensorParam
from centella.lang.tracer import current
from centella.specs import dense_strides
from tests.support.lang_common import compute, empty, on_simulator, tensor
from tests.support.sentences import assert_shown, sentences

LIBRARY = str(Path(lang.__file__).parent)
HERE = __file__

# -- errors, at the user's line --------------------------------------------------------------------


def trace(
    fn: Callable[..., Any], dtype: DType = f32, workgroup: int = 32, **constants: Any
) -> KernelIR:
    """The IR of a kernel whose `storage` arguments all have one dtype."""
    signature = signature_of(fn)
    dtypes = {n: p.dtype or dtype for n, p in signature.tensors}
    return lang.trace(fn, signature, workgroup=workgroup, dtypes=dtypes, constants=constants)


def user_line(error: BaseException) -> int:
    """The line of the last frame outside the library."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max(i for i, f in enumerate(frames) if f.filename == HERE)
    inside = [f.filename for f in frames[last + 1 :]]
    assert all(LIBRARY in name or name.endswith("contextlib.py") for name in inside)
    line = frames[last].lineno
    assert line is not None
    return line


MARK = "# <-"
SOURCE = Path(HERE).read_text().splitlines()


def marked(fn: Callable[..., Any]) -> int:
    """The line of a kernel that is marked as wrong."""
    first = fn.__code__.co_firstlineno
    return next(n for n in range(first, first + 40) if MARK in SOURCE[n - 1])


def barrier_before_divergent_break(y: Out[f32]) -> None:
    with lang.loop():  # <- a loop with a barrier (at
        lang.barrier()
        lang.break_if(lang.local_id() > 3)


def uniform_var_counts_divergent_rounds(y: Out[f32]) -> None:
    v = lang.var(0, uniform=True)
    with lang.loop():  # <- a loop that sets a uniform var (at
        v += 1
        lang.break_if(lang.local_id() < v)


# Programs, each wrong at the line that is marked, in a kernel of the parameters in `HEAD`.
PROGRAMS = """
if x[0] > 1.0:  # <- use lang.if_
    y[0] = 1.0

for k in range(n):  # <- use lang.range
    y[k] = 0.0

registers = lang.vars(f32, 8, 8)
y[0] = registers[0][lang.local_id()]  # <- a Python list of variables cannot be indexed

for v in x:  # <- an array cannot be iterated
    y[0] = v

for v in lang.shared(f32, 8):  # <- an array cannot be iterated
    y[0] = v

with lang.if_(x[0] > 1.0):
    value = x[0] * 2.0
y[0] = value  # <- outside the block

for k in lang.range(n):
    last = lang.cast(k, f32)
y[0] = last + 1.0  # <- outside the block

with lang.if_(x[0] > 1.0):
    value = x[1]
with lang.else_():
    y[0] = value  # <- outside the block

with lang.if_(x[0] > 1.0):
    v = lang.var(1.0)
v.set(2.0)  # <- outside the block that declared it
y[0] = v

h[0] = h[0]  # <- h.store(index, values) with 2 or 8 values

h.store(0, [1.0, 2.0, 3.0])  # <- 2 (a word) or 8 (a chunk) values of f16, got 3

y[0] = n  # <- expected a f32 value, got u32

x[0] = 1.0  # <- 'x' is an in argument and cannot be written

y[0] = w.shape(2)  # <- 'w' has rank 2, got axis 2

with lang.if_(lang.local_id() < 4):
    y[0] = 1.0
with lang.else_():
    lang.barrier()  # <- a barrier inside control flow that may differ by thread

for _ in lang.range(k[lang.local_id()]):
    lang.barrier()  # <- a barrier inside control flow that may differ by thread

with lang.loop():
    lang.break_if(lang.local_id() > 3)
    lang.barrier()  # <- a barrier inside control flow that may differ by thread

for _ in lang.range(n):  # <- a loop with a barrier (at
    with lang.if_(n > 3), lang.loop():
        lang.break_if(n > 5)
        lang.barrier()
    lang.break_if(lang.local_id() > 3)

v = lang.var(0, uniform=True)
v.set(lang.local_id())  # <- a uniform lang.var was set to a value that may differ

v = lang.var(0, uniform=True)
with lang.if_(lang.local_id() < 4):
    v += 1  # <- a uniform lang.var was set

v = lang.var(0, uniform=True)
for _ in lang.range(n):  # <- a loop that sets a uniform var (at
    with lang.if_(n > 3):
        v += 1
    lang.break_if(lang.local_id() < 5)

with lang.loop(), lang.if_(n > 3):
    lang.break_if(n > 5)  # <- directly in the loop, not inside lang.if_

with lang.loop():  # <- without lang.break_if never ends
    y[0] = 1.0

with lang.if_(n > 3):  # <- the lang.range block opened at
    for _ in lang.range(n):
        break
    y[0] = 1.0

with lang.range(n):  # <- write `for i in lang.range(n):`
    y[0] = 1.0

with lang.else_():  # <- must follow the end of a lang.if_
    y[0] = 1.0

with lang.if_(n > 3):
    y[0] = 1.0
y[1] = 2.0
with lang.else_():  # <- must follow the end of a lang.if_
    y[0] = 1.0

with lang.if_(n):  # <- expected a bool value, got u32
    y[0] = 1.0

for _ in lang.range(s):  # <- takes u32 or i32 bounds, got f32
    y[0] = 1.0

for _ in lang.range(n, 0, -1):  # <- needs a positive step, got -1
    y[0] = 1.0

for _ in lang.range(n, m):  # <- expected a u32 value, got i32
    y[0] = 1.0

mask: Any = lang.local_id()
y[0] = lang.shuffle_xor(x[0], mask)  # <- takes a Python number from 1 to 127

y[0], y[1] = divmod(n, 2)  # <- divmod(a, b) is not for traced values: write a // b and a % b

v = lang.var(2.0)
y[0] = v**0.5  # <- x ** n is not for traced values: write x * x for a square, lang.sqrt(x)
"""
HEAD = "(x: In[f32], y: Out[f32], n: u32, m: i32, s: f32, h: InOut[f16], w: In[f32, 2], k: In[u32])"


def programs() -> Iterator[Callable[..., Any]]:
    """The kernels, with the lines that they have in this file."""
    line = SOURCE.index('PROGRAMS = """') + 2
    for program in PROGRAMS.strip("\n").split("\n\n"):
        code = f"def kernel{HEAD}:\n{textwrap.indent(program, '  ')}"
        space = dict(globals())
        exec(compile("\n" * (line - 2) + code, HERE, "exec", dont_inherit=True), space)
        yield space["kernel"]
        line += program.count("\n") + 2


def apart(wrong: Callable[[], Any]) -> None:
    """What only some threads come to."""
    with lang.if_(lang.local_id() < 4):
        wrong()


# What is wrong in one expression: each is run in a kernel that has these parameters.
EXPRESSIONS: list[Callable[..., Any]] = [
    lambda x: lang.select((x[0] > 1.0) and (x[0] < 2.0), 1.0, 0.0),  # <- & | ~ instead of and
    lambda x: lang.select(not x[0] > 1.0, 1.0, 0.0),  # <- no truth value
    lambda x: bool(lang.var(x[0])),  # <- lang.select
    lambda x: lang.select(0.0 < x[0] < 1.0, 1.0, 0.0),  # <- no truth value
    lambda x: 1.0 if x[0] in (1.0, 2.0) else 2.0,  # <- no truth value
    lambda n, y: y[int(n)],  # <- not a Python integer
    lambda s: math.sin(s),  # <- not a Python float
    lambda x: math.exp(x[0]),  # <- use lang.exp
    lambda x: sum(x[0]),  # <- cannot be iterated
    lambda n, s: s * n,  # <- mixed types: f32 mul u32
    lambda n, m: n + m,  # <- mixed types: u32 add i32
    lambda n: n + 1.5,  # <- mixed types: a u32 value with the Python value 1.5
    lambda s: s + True,  # <- mixed types: a f32 value with the Python value True
    lambda s: s + "1",  # <- mixed types
    lambda n: n + 2**32,  # <- 4294967296 does not fit u32
    lambda n: n + -1,  # <- -1 does not fit u32
    lambda s: s * 1e39,  # <- 1e+39 does not fit f32
    lambda x: x[-1],  # <- -1 does not fit u32
    lambda x, s: x[s],  # <- an index must be u32
    lambda n: n / 2,  # <- use // for integers
    lambda s: s // 2.0,  # <- // is for integers
    lambda s: s << 2,  # <- << is for integers
    lambda s: lang.cast(-(s > 1.0), f32),  # <- use ~x on a bool
    lambda s: lang.cast((s > 1.0) + (s > 2.0), f32),  # <- add is for numbers, got bool
    lambda s: lang.cast((s > 1.0) < (s > 2.0), f32),  # <- bools have no order
    lambda s: ~s,  # <- ~x is for integers and bools
    lambda n: lang.sqrt(n),  # <- expected a f32 value, got u32
    lambda n: lang.select(lang.isnan(n), 1.0, 0.0),  # <- expected a f32 value, got u32
    lambda y, s: y.store(0, s),  # <- takes a list of values
    lambda y: y[1] + 1.0,  # <- 'y' is an Out argument and cannot be read
    lambda y: y.store(0, y.load(4)),  # <- 'y' is an Out argument and cannot be read
    lambda x: x[0, 1],  # <- 'x' has rank 1, got 2 indices
    lambda x: x[0:4],  # <- mixed types
    lambda: lang.shared(f16, 8),  # <- shared memory holds f32, i32 or u32, got f16
    lambda n: lang.shared(f32, n),  # <- needs a positive Python size
    lambda y: y.store(0, lang.shared(f32, 8).load(3)),  # <- a chunk starts at a multiple of 4 words, got 3
    lambda: lang.shared(f32, 8).store(6, [0.0] * 4),  # <- a chunk starts at a multiple of 4 words, got 6
    lambda: lang.shared(f32, 7).load(0),  # <- chunk access needs a multiple of 4 words, got 7
    lambda: lang.shared(f32, 8).store_chunk(1, [0.0] * 3),  # <- a list of 4 values
    lambda: lang.var(lang.local_id(), uniform=True),  # <- needs a uniform value here
    lambda n: lang.break_if(n > 5),  # <- for the inside of lang.loop
    lambda s: lang.cast(lang.maximum(s > 1.0, s > 2.0), f32),  # <- maximum is for numbers, got bool
    lambda: lang.bitcast(1.5, u32),  # <- takes a traced value, got 1.5
    lambda s: lang.bitcast(s > 1.0, u32),  # <- bitcast is for f32, i32 and u32
    lambda: lang.workgroup_uniform(2.0),  # <- takes a traced value, got 2.0
    lambda x: lang.workgroup_reduce(x[0], "mul"),  # <- one of add, max, min, fmax, fmin; got f32
    lambda: lang.parameter("s", f16),  # <- a launch parameter is f32, i32 or u32, got f16
    lambda x: np.sqrt(x[0]),  # <- act on arrays, not on traced values: np.sqrt; use lang.sqrt
    lambda x: np.abs(x[0]),  # <- np.absolute; use lang.abs
    lambda x: np.arctan(x[0]),  # <- use a function of centella.lang, such as lang.sqrt
    lambda x: np.add(x[0], x[1]),  # <- np.add; use an operator of Python
    lambda: np.exp(lang.var(1.0, f32)),  # <- use lang.exp
    lambda x: x[x.size],  # <- pass sizes as u32 parameters, or use x.shape(axis)
    lambda x: x[0] ** 2,  # <- x ** n is not for traced values: write x * x for a square
    lambda x: 2.0 ** x[0],  # <- n ** x is not for traced values: write lang.exp2(x) for 2 ** x
    lambda x: max(x[0], 0.0),  # <- lang.maximum(a, b) and lang.minimum(a, b) instead of max() and min()
    lambda x: abs(x[0]),  # <- abs(x) is not for traced values: write lang.abs(x)
    lambda x: round(x[0]),  # <- round(x) is not for traced values: write lang.floor(x + 0.5)
    lambda x: math.floor(x[0]),  # <- math.floor(x) is not for traced values: write lang.floor(x)
    lambda: apart(lambda: lang.barrier()),  # <- a barrier inside control flow that may differ by
    lambda: apart(lambda: lang.workgroup_uniform(lang.local_id())),  # <- workgroup_uniform inside
    lambda: apart(lambda: lang.workgroup_reduce(lang.local_id(), "add")),  # <- workgroup_reduce inside
    lambda: apart(lambda: lang.subgroup_sum(lang.local_id())),  # <- a subgroup operation inside
    lambda: apart(lambda: lang.var(0, uniform=True)),  # <- needs a uniform value here
    lambda x: x[0][1],  # <- x[i] of a value is not for traced values: write x[i] of a tensor argument
]  # fmt: skip  # a table


def around(wrong: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that computes an expression."""

    def kernel(x: In[f32], y: Out[f32], n: u32, m: i32, s: f32) -> None:
        given = {"x": x, "y": y, "n": n, "m": m, "s": s}
        wrong(*(given[name] for name in inspect.signature(wrong).parameters))

    return kernel


WRONG = [
    *((fn, fn) for fn in (barrier_before_divergent_break, uniform_var_counts_divergent_rounds)),
    *((fn, fn) for fn in programs()),
    *((fn, around(fn)) for fn in EXPRESSIONS),
]


@pytest.mark.parametrize(("fn", "kernel"), WRONG)
def test_errors_stand_at_the_line(fn: Callable[..., Any], kernel: Callable[..., Any]) -> None:
    with pytest.raises(TraceError) as caught:
        trace(kernel)
    line = marked(fn)
    assert user_line(caught.value) == line
    text = str(caught.value)
    assert SOURCE[line - 1].split(MARK)[1].strip() in text
    assert text.endswith(f" (kernel {kernel.__name__!r} at {HERE}:{line})")
    with pytest.raises(TraceError, match="only inside a kernel function"):
        lang.local_id()  # the tracer is gone


def test_operators_of_numpy_numbers_are_traced() -> None:
    def kernel(x: In[f32], n: In[u32], y: Out[f32], *, two: Any, three: Any) -> None:
        v, i = x[0], n[0]
        for value in (two + v, two - v, two * v, two / v):
            y[0] = value
        by, rest = three // i, three % i
        for whole in (by, rest, three & i, three | i, three ^ i, three << i, three >> i):
            y[0] = lang.cast(whole, f32)
        for flag in (two < v, two <= v, two > v, two >= v, two == v, two != v):
            y[0] = lang.select(flag, 1.0, v)

    pairs: list[tuple[Any, Any]] = [(np.float32(2), np.uint32(3)), (2.0, 3)]
    numpys, pythons = (trace(kernel, two=two, three=three).text() for two, three in pairs)
    assert numpys == pythons


def test_messages_name_the_line_of_the_cause() -> None:
    for fn, what in (
        (barrier_before_divergent_break, "lang.barrier()"),
        (uniform_var_counts_divergent_rounds, "v += 1"),
    ):
        with pytest.raises(TraceError) as caught:
            trace(fn)
        cause, _, kernel = str(caught.value).rpartition(" (kernel ")
        assert kernel == f"{fn.__name__!r} at {HERE}:{marked(fn)})"
        for line in re.findall(rf"{re.escape(HERE)}:(\d+)", cause):
            assert what in SOURCE[int(line) - 1] or "break_if" in SOURCE[int(line) - 1]


def test_output_never_written() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        x[0] + 1.0

    location = f"kernel 'kernel' at {HERE}:{kernel.__code__.co_firstlineno}"
    with pytest.raises(TraceError, match=re.escape(f"output 'y' is never written ({location})")):
        trace(kernel)

    def early(x: In[f32], y: Out[f32], n: u32) -> None:
        with lang.if_(lang.global_id() >= n):
            return
        y[0] = 1.0

    with pytest.raises(TraceError, match="'y' is never written"):
        trace(early)


def test_python_break_out_of_a_loop() -> None:
    def kernel(y: Out[f32], n: u32) -> None:
        for _ in lang.range(n):
            y[0] = 1.0
            break

    line = kernel.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=f"lang.range block opened at .*:{line} was left open"):
        trace(kernel)


# -- annotations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: In[f32, 3], "In[...] takes a dtype and a rank of 1 or 2"),
        (lambda: Out["f32"], "Out[...] takes a dtype"),
        (lambda: InOut[np.float32], "InOut[...] takes a dtype"),
        (lambda: Scalar[f16], "Scalar[...] takes f32, i32 or u32"),
        (lambda: Scalar[f32, 2], "Scalar[...] takes f32, i32 or u32"),
        (lambda: Scalar[storage], "Scalar[...] takes f32, i32 or u32"),
    ],
)
def test_bad_annotations(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TraceError, match=re.escape(text)) as caught:
        make()
    assert user_line(caught.value) == make.__code__.co_firstlineno


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ("x, y: Out[f32]", "parameter 'x' must be annotated"),
        ("x: In[f32], n: i8", "parameter 'n' must be annotated"),
        ("x: In[f32], n: bool_", "parameter 'n': pass bools as u32"),
        ("*xs: In[f32]", r"parameter '\*xs' has no name that a launch could use"),
        ("**xs: In[f32]", r"parameter '\*\*xs' has no name"),
        ("x: In[f32], /", "parameter 'x' has no name"),
        ("y: 'Out[missing]'", "an annotation cannot be evaluated .*missing"),
    ],
)
def test_bad_faces(parameters: str, text: str) -> None:
    space = dict(globals())
    exec(compile(f"def kernel({parameters}): pass", "<kernel>", "exec", dont_inherit=True), space)
    with pytest.raises(TraceError, match=text):
        signature_of(space["kernel"])


def test_faces_are_read_from_annotations() -> None:
    def kernel(
        x: In[storage], a: In[f16, 2], p: Scalar[u32], z: InOut[i8], y: Out[f32], n: u32, s: f32,
        m: i32, *, tile: int, name: str = "n",
    ) -> None:  # fmt: skip
        pass

    signature = signature_of(kernel)
    assert signature.tensors == (
        ("x", TensorParam("in", None, 1)),
        ("a", TensorParam("in", f16, 2)),
        ("p", TensorParam("scalar", u32, 1)),
        ("z", TensorParam("inout", i8, 1)),
        ("y", TensorParam("out", f32, 1)),
    )
    assert signature.scalars == (("n", "u32"), ("s", "f32"), ("m", "i32"))
    assert [n for n, _ in signature.constants] == ["tile", "name"]


def test_storage_must_be_said() -> None:
    def kernel(x: In[storage], y: Out[f32]) -> None:
        y[0] = x[0]

    with pytest.raises(TraceError, match="say which storage 'x' has"):
        lang.trace(kernel, signature_of(kernel), workgroup=1, dtypes={})
    with pytest.raises(TraceError, match="'y' is declared f32, got f16"):
        lang.trace(kernel, signature_of(kernel), workgroup=1, dtypes={"x": f32, "y": f16})


# -- the tracer's state ----------------------------------------------------------------------------


def test_lang_functions_need_a_kernel() -> None:
    calls: list[Callable[[], Any]] = [
        *(lang.local_id, lang.global_id, lang.barrier, lang.workgroup_size, lang.subgroup_size),
        *(lambda: lang.var(1.0), lambda: lang.shared(f32, 4), lambda: lang.exp(1.0)),
        *(lambda: next(lang.range(3)), lambda: lang.if_(True).__enter__()),
        *(lambda: lang.select(True, 1, 2), lambda: lang.const(1, f32)),
    ]
    for call in calls:
        with pytest.raises(TraceError, match="only inside a kernel function"):
            call()


def test_an_exception_leaves_no_trace() -> None:
    kept: list[Any] = []

    def broken(x: In[f32], y: Out[f32]) -> None:
        v = lang.var(1.0)
        kept.extend([x[0], v, lang.shared(f32, 4), x, y])
        with lang.if_(x[0] > 1.0):
            for _ in lang.range(4):
                raise ZeroDivisionError

    def sound(x: In[f32], y: Out[f32]) -> None:
        y[0] = x[0] * 2.0

    before = trace(sound).digest
    with pytest.raises(ZeroDivisionError):
        trace(broken)
    with pytest.raises(TraceError, match="only inside a kernel"):
        lang.local_id()
    assert trace(sound).digest == before

    value, variable, memory, x, y = kept
    uses: list[Callable[[], Any]] = [
        *(lambda: value + 1.0, lambda: variable + 1.0, lambda: variable.set(1.0)),
        *(lambda: memory[0] + value, lambda: x[value], lambda: y[0] + value),
    ]
    for use in uses:
        with pytest.raises(TraceError):
            use()

    def borrowing(y: Out[f32]) -> None:
        y[0] = value + 1.0

    with pytest.raises(TraceError, match="outside the block"):
        trace(borrowing)

    def mixing(z: In[f32], y: Out[f32]) -> None:
        y[0] = z[0] * value

    with pytest.raises(TraceError, match="a value of another kernel"):
        trace(mixing)


def test_values_do_not_outlive_their_kernel() -> None:
    kept: list[Any] = []

    def kernel(x: In[f32], y: Out[f32]) -> None:
        kept.append(lang.var(1.0))
        y[0] = x[0]

    trace(kernel)
    trace(kernel)
    with pytest.raises(TraceError, match="outside the block"):
        kept[0].set(2.0)


def test_kernels_are_traced_in_threads_and_inside_one_another() -> None:
    def inner(y: Out[f32]) -> None:
        y[lang.local_id()] = 1.0

    def outer(y: Out[f32]) -> None:
        i = lang.local_id()
        digests.append(trace(inner).digest)
        y[i] = 2.0

    digests: list[str] = []
    trace(outer)
    outer_digests: list[str] = []
    threads = [
        threading.Thread(target=lambda: outer_digests.append(trace(outer).digest)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(outer_digests)) == 1 and set(digests) == {trace(inner).digest}


# -- values ----------------------------------------------------------------------------------------


def test_python_numbers_adapt() -> None:
    def kernel(x: In[f32], y: Out[u32], n: u32, m: i32) -> None:
        kinds = [
            (x[0] + 1, f32), (2 * x[0], f32), (n + 1, u32), (m - 1, i32), (1 << n, u32),
            (x[0] * np.float32(2), f32), (np.float32(2) * x[0], f32), (np.uint32(3) + n, u32),
            (lang.var(0), u32), (lang.var(0.5), f32), (lang.var(True), bool_), (lang.var(m), i32),
            (lang.var(0, f32), f32), (lang.select(n > 1, 1, 2), u32), (lang.maximum(1, n), u32),
            (lang.select(n > 1, 1.0, 2), f32), (lang.select(n > 1, 1, x[0]), f32),
            (lang.select(n > 1, True, False), bool_), (n > 1, bool_), (m >> n, i32), (m << m, i32),
            (lang.const(1, f16), f32), (lang.cast(1, f32), f32),
        ]  # fmt: skip  # a table
        for value, dtype in kinds:
            assert value.dtype is dtype, (value, dtype)
        y[0] = n

    trace(kernel)


def test_variables_and_lists_of_them() -> None:
    def fn(a: Any) -> Any:
        grid = lang.vars(u32, 2, 3, init=1)
        assert len(grid) == 2 and len(grid[0]) == 3
        for row in grid:
            for v in row:
                v += a
        v = grid[1][2]
        v -= 1
        v *= 3
        v |= 8
        v &= 0xFFFF
        v ^= 5
        return v.get() + grid[0][0]

    a = np.arange(40, dtype=np.uint32)
    expected = ((((a * 3) | 8) & 0xFFFF) ^ 5) + a + 1
    np.testing.assert_array_equal(compute(fn, a, out=u32), expected)


def test_variables_carry_values_across_blocks() -> None:
    def fn(a: Any) -> Any:
        variable = lang.var(7)
        with lang.if_(a > 3):
            variable.set(a * 2)
        return variable

    a = np.arange(9, dtype=np.uint32)
    np.testing.assert_array_equal(compute(fn, a, out=u32), np.where(a > 3, a * 2, 7))


def test_loops_unroll_while_tracing() -> None:
    def kernel(x: In[f32], y: Out[f32], *, tile: int, twice: bool) -> None:
        for k in range(tile):
            y[k] = x[k]
            if twice:
                y[k + tile] = x[k]

    def stores(**constants: Any) -> int:
        return sum(s[0] == "store" for s in trace(kernel, **constants).body)

    assert stores(tile=4, twice=False) == 4 and stores(tile=5, twice=True) == 10
    one, other = trace(kernel, tile=4, twice=False), trace(kernel, tile=5, twice=False)
    assert one.digest != other.digest


def test_scalars_are_passed_with_the_launch() -> None:
    def kernel(x: In[f32], y: Out[f32], n: u32, s: f32, m: i32, unused: u32) -> None:
        with lang.if_(lang.global_id() < n):
            y[lang.global_id()] = x[lang.global_id()] * s + lang.cast(m, f32)

    ir = trace(kernel)
    sources = [p.source for p in ir.params]
    assert sources == [("n",), ("s",), ("m",), ("unused",), ("x", "offset"), ("y", "offset")]
    x, y = tensor(np.arange(8)), empty((8,), f32)
    for s in (2.0, -1.5):
        on_simulator(ir, {"x": x, "y": y}, 1, {"n": 8, "s": s, "m": -3, "unused": 0})
        np.testing.assert_array_equal(y.numpy(), np.arange(8) * s - 3)


def test_only_used_offsets_and_strides_are_passed() -> None:
    def kernel(x: In[f32, 2], w: In[f32, 2], v: In[f32], y: Out[f32]) -> None:
        y[lang.local_id()] = x[lang.local_id(), 1] + lang.cast(w.shape(1), f32)

    def sources(**unit: bool) -> list[Any]:
        ir = lang.trace(kernel, signature_of(kernel), workgroup=8, dtypes={}, unit=unit)
        return [p.source for p in ir.params]

    assert sources() == [("x", "offset"), ("x", "stride", 0), ("w", "shape", 1), ("y", "offset")]
    assert ("x", "stride", 1) in sources(x=False)

    def chunks(x: In[f32], y: Out[f32]) -> None:
        y.store(0, x.load(0))

    for name in ("x", "y"):
        with pytest.raises(TraceError, match=rf"'{name}'\..* needs neighbouring elements"):
            lang.trace(chunks, signature_of(chunks), workgroup=1, dtypes={}, unit={name: False})


def test_extents_of_an_argument() -> None:
    def rows(x: In[f32, 2], y: Out[u32]) -> None:
        y[0] = x.shape(0) + x.shape(-1)

    ir = trace(rows)
    assert [p.source for p in ir.params][:2] == [("x", "shape", 0), ("x", "shape", 1)]
    wrong: tuple[Callable[[Any], Any], ...] = (lambda x: x.shape[0], lambda x: len([*x.shape]))
    for read in wrong:

        def subscripted(x: In[f32], y: Out[f32], *, read: Any) -> None:
            y[0] = read(x)

        with pytest.raises(TraceError, match=r"x\.shape is a function of the axis: x\.shape\(0\)"):
            trace(subscripted, read=read)


def test_uniform_values() -> None:
    def kernel(x: In[f32], p: Scalar[u32], y: Out[f32], n: u32) -> None:
        first = lang.workgroup_uniform(x[lang.local_id()])
        v, w = lang.var(n, uniform=True), lang.var(n)
        for uniform in (
            lang.const(1, u32), n, lang.group_id(), lang.num_groups(), p.value, first, v,
            n * 2 + lang.group_id() % 3, lang.select(n > 1, first, 2.0), x.shape(0),
            lang.cast(first, u32), lang.exp(first), lang.subgroup_size(),
        ):  # fmt: skip  # a table
            assert uniform.uniform
        for other in (
            lang.local_id(), lang.global_id(), x[0], w, n + lang.local_id(), lang.lane_id(),
            lang.shared(f32, 4)[0], lang.workgroup_reduce(x[0], "add"), lang.subgroup_sum(x[0]),
        ):  # fmt: skip  # a table
            assert not (other.get() if isinstance(other, type(w)) else other).uniform
        assert v.get().uniform and not w.get().uniform
        with lang.if_(p.value > n):
            lang.barrier()
        for _ in lang.range(p.value):
            v += 1
            lang.barrier()
            lang.break_if(v > 7)
            lang.barrier()
        y[lang.local_id()] = first

    trace(kernel)


def test_reductions_need_no_more_than_they_say() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        for _ in lang.range(2):
            lang.workgroup_reduce(x[0], "add")
        y[0] = lang.workgroup_reduce(x[0], "max")

    ir = trace(kernel, workgroup=8)
    assert [s.words for s in ir.shared] == [8, 8]
    assert sum(s[0] == "barrier" for s in ir.body) == 1 + 3 + 1 + 1 + 3  # in the loop one more


def test_early_exit_is_a_predicate() -> None:
    """Threads without work come to the barrier too."""

    def kernel(x: In[f32], y: Out[f32], n: u32) -> None:
        i, tile = lang.global_id(), lang.shared(f32, 8)
        has_work = i < n
        tile[lang.local_id()] = lang.select(has_work, x[lang.minimum(i, n - 1)], 0.0)
        lang.barrier()
        with lang.if_(has_work):
            y[i] = tile[7 - lang.local_id()]

    x, y = tensor(np.arange(11)), empty((11,), f32)
    on_simulator(trace(kernel, workgroup=8), {"x": x, "y": y}, 2, {"n": 11})
    whole = np.append(np.arange(11), np.zeros(5)).reshape(2, 8)[:, ::-1].ravel()
    np.testing.assert_array_equal(y.numpy(), whole[:11])


def test_counters_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("centella.simulator.machine.MOST_ITERATIONS", 50)

    def fn(a: Any) -> Any:
        total = lang.var(0)
        for _ in lang.range(a, 2**32 - 1, 3):
            total += 1
        return total

    end = np.array([2**32 - 1], np.uint32)
    np.testing.assert_array_equal(compute(fn, end - 6, out=u32), [2])
    with pytest.raises(SimulationError, match="50 iterations"):
        compute(fn, end - 1, out=u32)  # the counter passes the end: 2^32 - 2, 1, 4 ...


def test_chunks_counted_from_the_start() -> None:
    """A chunk may start anywhere in a row, if it is a chunk of the buffer."""

    def kernel(x: In[f32], y: Out[f32]) -> None:
        y.store(0, x.load(1))

    x, y = tensor(np.arange(8), offset=3), empty((4,), f32)
    on_simulator(trace(kernel, workgroup=1), {"x": x, "y": y}, 1)
    np.testing.assert_array_equal(y.numpy(), np.arange(1, 5))


def test_chunks_of_shared_memory_by_their_number() -> None:
    """`load_chunk` takes any number; only the index of a word must be a multiple of 4."""

    def kernel(y: Out[f32]) -> None:
        tile, me = lang.shared(f32, 16), lang.local_id()
        with lang.if_(me < 4):
            tile.store_chunk(me, [lang.cast(me, f32)] * 4)
        lang.barrier()
        y[me] = tile.load_chunk(me >> 2)[0]

    y = empty((16,), f32)
    on_simulator(trace(kernel, workgroup=16), {"y": y}, 1)
    np.testing.assert_array_equal(y.numpy(), np.arange(16) // 4)


def test_layouts_of_devices() -> None:
    """Rows of 16 bytes or more start on 16 bytes, shorter ones on 4; the CPU stores densely."""
    for name in ("cpu", "simulator"):
        where = ct.device(name)
        for dtype, shape, padded in (
            (f32, (3, 5), (8, 1)), (f32, (3, 4), (4, 1)), (f32, (3, 3), (3, 1)),
            (f16, (2, 3, 9), (48, 16, 1)), (f16, (3, 5), (6, 1)), (i8, (3, 17), (32, 1)),
            (i8, (3, 5), (8, 1)), (f16, (7,), (1,)), (f32, (5,), (1,)),
        ):  # fmt: skip  # a table
            wanted = dense_strides(shape) if name == "cpu" else padded
            assert where.storage.spec(shape, dtype).strides == wanted, (name, shape)


def test_outputs_are_fresh_values() -> None:
    """A launch whose output handle is its input reads the old value and makes a new one."""

    @ct.kernel(workgroup=8)
    def turned(x: In[f32], y: Out[f32]) -> None:
        i = lang.global_id()
        with lang.if_(i < x.shape(0)):
            y[i] = x[x.shape(0) - 1 - i]

    @ct.kernel(workgroup=8)
    def doubled(z: InOut[f32]) -> None:
        z[lang.global_id()] *= 2.0

    for name in ("cpu", "simulator"):
        x = ct.asarray(np.arange(20, dtype=np.float32), device=name)
        before = x.reshape(4, 5)
        turned(x, x, threads=20)
        np.testing.assert_array_equal(x.numpy(), np.arange(20)[::-1])
        np.testing.assert_array_equal(before.numpy(), np.arange(20).reshape(4, 5))
        with pytest.raises(ct.CentellaError, match="State"):
            doubled(x, threads=20)


def test_select_computes_both() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        y[0] = lang.select(x[0] > 0.0, x[1] * 2.0, x[2] * 3.0)

    assert ops(trace(kernel)).count("mul") == 2 and ops(trace(kernel)).count("load") == 3


# -- value numbering and folding -------------------------------------------------------------------


def ops(ir: KernelIR) -> list[str]:
    return [s[0] for s in ir.body]


def test_equal_values_are_recorded_once() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        a = x[lang.global_id() * 2 + 1]
        b = x[lang.global_id() * 2 + 1]  # loads are not merged: a store may stand between
        y[lang.global_id() * 2 + 1] = a + b

    ir = trace(kernel)
    assert ops(ir).count("load") == 2
    for s in set(ir.body):
        assert ir.body.count(s) == 1 or s[0] == "load", s


def test_values_of_a_block_are_not_reused_outside_it() -> None:
    def kernel(x: In[f32], y: Out[f32], n: u32) -> None:
        with lang.if_(x[0] > 0.0):
            y[n * 3] = 1.0
        with lang.else_():
            y[n * 3] = 2.0
        for _ in lang.range(n):
            y[n * 3 + 1] = 1.0
        y[n * 3] = 3.0

    ir = trace(kernel)
    assert sum(s[0] == "mul" and ir.body[s[2][1]][3] == 3 for s in ir.body) == 4


def test_variables_are_read_where_they_stand() -> None:
    def fn(a: Any) -> Any:
        v = lang.var(a)
        first = v + 1
        v.set(first * 10)
        second = v + 1
        with lang.if_(a > 2):
            v += 1
        return first * 10000 + second * 100 + (v - a)

    a = np.arange(6, dtype=np.uint32)
    expected = (a + 1) * 10000 + (10 * (a + 1) + 1) * 100 + (10 * (a + 1) + (a > 2) - a)
    np.testing.assert_array_equal(compute(fn, a, out=u32), expected)


def test_effects_keep_their_order() -> None:
    def kernel(x: In[f32], y: Out[f32], n: u32) -> None:
        tile, me = lang.shared(f32, 32), lang.local_id()
        tile[me] = 1.0  # overwritten, and kept
        tile[me] = x[me]
        lang.barrier()
        lang.barrier()
        v = lang.var(0.0)
        v.set(1.0)
        v.set(2.0)
        with lang.if_(n > 1):
            pass
        with lang.loop():
            lang.break_if(n > 0)
        y[me] = v
        y[me] = 5.0

    effects = ("sstore", "load", "barrier", "set", "if", "end", "loop", "break_if", "store")
    expected = "sstore load sstore barrier barrier set set if end loop break_if end store store"
    ir = trace(kernel)
    assert [op for op in ops(ir) if op in effects] == expected.split()
    order = ["s0[", "a0[", "s0[", "workgroupBarrier", "workgroupBarrier", "r", "r", "if", "loop"]
    text, at = emit_wgsl(ir), 0
    text = text[text.index("fn main") :]
    for part in order:
        at = text.index(part, at) + 1


def test_constants_are_folded() -> None:
    def kernel(y: Out[f32], z: Out[u32]) -> None:
        two, big = lang.const(2.0, f32), lang.const(3e38, f32)
        floats = [
            (two * 3.0 + 1.0, 7.0), (two / 3.0, float(np.float32(2) / np.float32(3))),
            (lang.sqrt(two), float(np.sqrt(np.float32(2)))), (-two, -2.0), (big * 10.0, math.inf),
            (lang.floor(two * 1.3), 2.0), (lang.maximum(two, 3.0), 3.0), (two / 0.0, math.inf),
            (lang.select(two > 1.0, two, 0.0), 2.0), (lang.fma(two, two, 1.0), 5.0),
            (lang.exp(two * 0.0), 1.0), (lang.minimum(two, 1.0), 1.0), (lang.abs(-two), 2.0),
            (lang.bitcast(lang.const(0x40000000, u32), f32), 2.0), (lang.cast(two > 1.0, f32), 1.0),
        ]  # fmt: skip  # a table
        integers = [
            (lang.const(7, u32) // 2, 3), (lang.const(7, i32) // -2, -3),
            (lang.const(-7, i32) % 2, -1), (lang.const(7, u32) // 0, 7),
            (lang.const(7, u32) % 0, 0), (lang.const(1, u32) << 33, 2),
            (lang.const(-8, i32) >> 1, -4), (lang.const(2**31 - 1, i32) + 1, -(2**31)),
            (-lang.const(1, u32), 2**32 - 1), (~lang.const(0, u32), 2**32 - 1),
            (lang.const(6, u32) & 3, 2), (lang.const(6, u32) | 1, 7), (lang.const(6, u32) ^ 5, 3),
            (lang.cast(big, i32), 2**31 - 1), (lang.cast(two, u32), 2),
            (lang.bitcast(two, u32), 0x40000000), (lang.cast(lang.const(-1, i32), u32), 2**32 - 1),
        ]  # fmt: skip  # a table
        bools = [(two > 1.0, True), (~(two > 1.0), False), ((two > 1.0) ^ (two > 3.0), True)]
        for value, number in [*floats, *integers, *bools]:
            assert value.const == number and type(value.const) is type(number), (
                value.const,
                number,
            )
        assert math.isnan((big * 10.0 - big * 10.0).const or 0.0)
        assert lang.bitcast(lang.const(0x7FC00001, u32), f32).const is None  # a NaN keeps its bits
        i = lang.local_id()
        for value, same in (
            (i + 0, i), (0 + i, i), (i * 1, i), (i - 0, i), (i << 0, i), (i // 1, i), (i // 0, i),
            (i | 0, i), (i ^ 0, i), (i >> 32, i >> 0), (i // 8, i >> 3), (i % 8, i & 7),
        ):  # fmt: skip  # a table
            assert value.id == same.id or current().body[value.id][:2] == ("shr", "u32")
        assert (i * 0).const == (i % 1).const == (i & 0).const == (i % 0).const == 0
        y[i], z[i] = two, i

    trace(kernel)


# -- identity --------------------------------------------------------------------------------------

SCRIPT = """
from centella import lang
from centella.dtypes import f16, f32, u32
from centella.lang import In, Out, signature_of, storage

def kernel(x: In[storage, 2], y: Out[storage], n: u32, s: f32, *, names):
    total = lang.var(0.0)
    for k in lang.range(n):
        for name in names:
            total += lang.exp(x[k, len(name)]) * s
    y.store(lang.global_id() * 2, [total, -0.0])

signature = signature_of(kernel)
ir = lang.trace(kernel, signature, workgroup=64, dtypes={"x": f16, "y": f16},
                constants={"names": ("a", "bc")})
print(ir.digest)
"""


def test_identity_is_equal_in_every_process() -> None:
    def digest(seed: str) -> str:
        path = [p for p in sys.path if p]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    space: dict[str, Any] = {}
    exec(SCRIPT.replace("print(ir.digest)", ""), space)
    assert digest("0") == digest("12345") == space["ir"].digest
    assert re.fullmatch("[0-9a-f]{64}", space["ir"].digest)


def test_identity_is_the_content() -> None:
    def kernel(x: In[storage], y: Out[f32], *, k: Any) -> None:
        y[lang.global_id()] = x[lang.global_id()] * k

    base = trace(kernel, k=2.0)
    assert base == trace(kernel, k=2.0) and base.digest == trace(kernel, k=2.0).digest
    others = [trace(kernel, k=3.0), trace(kernel, f16, k=2.0), trace(kernel, workgroup=64, k=2.0)]
    others += [trace(kernel, k=0.0), trace(kernel, k=-0.0)]
    assert len({o.digest for o in [base, *others]}) == 6
    text = base.text()
    assert text.startswith("kernel kernel workgroup=32\narg x in f32 f32x1\narg y out f32 f32x1\n")
    assert HERE not in text and f":{kernel.__code__.co_firstlineno + 1}" in str(base.lines)


def test_the_ir_is_flat() -> None:
    ir = trace(else_free)
    assert all(a < i for i, s in enumerate(ir.body) for a in s[2])  # operands come before
    assert [s[0] for s in ir.body if s[0] in ("if", "for", "end")] == ["for", "if", "end", "end"]
    assert all(isinstance(a, int) for s in ir.body for a in s[2])


def else_free(x: In[f32], y: Out[f32], n: u32) -> None:
    for k in lang.range(n):
        with lang.if_(k > 2):
            y[k] = x[k]


def test_kernels_without_source() -> None:
    """Tracing runs the function: it may come from a prompt, a notebook or a frozen application."""
    space: dict[str, Any] = {"lang": lang, "In": In, "Out": Out, "f32": f32, "u32": u32}
    code = "def k(x: In[f32], y: Out[f32], n: u32):\n  i = lang.global_id()\n"
    exec(compile(code + "  y[i] = x[i] * 2.0\n", "<prompt>", "exec"), space)
    ir = trace(space["k"])
    assert "<prompt>:3" in ir.lines.values()
    exec(compile(code + "  y[i] = x[i] * n\n", "<prompt>", "exec"), space)
    with pytest.raises(TraceError) as caught:
        trace(space["k"])
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [f.lineno for f in frames if f.filename == "<prompt>"] == [3]
    double = lambda x, y: y.store(0, [x[0] * 2.0])  # noqa: E731  # a lambda has no annotations
    signature = lang.kernel_params.Signature(
        (("x", TensorParam("in", f32, 1)), ("y", TensorParam("out", f32, 1))), (), ()
    )
    assert lang.trace(double, signature, workgroup=1, dtypes={}).name == "<lambda>"


def test_lines_of_statements() -> None:
    def kernel(x: In[f32], y: Out[f32]) -> None:
        value = x[0]
        lang.barrier()
        y[0] = lang.workgroup_reduce(value, "add")

    first = kernel.__code__.co_firstlineno
    ir = trace(kernel)
    lines = {ir.body[i][0]: line for i, line in ir.lines.items()}
    assert lines["load"] == f"{HERE}:{first + 1}"
    assert lines["store"] == f"{HERE}:{first + 3}"
    reduces = [ir.line_of(i) for i, s in enumerate(ir.body) if s[0] == "sstore"]
    assert set(reduces) == {f"{HERE}:{first + 3}"}  # the user's line, not the library's
    assert ir.line_of(10**6) == "statement %1000000"


# -- speed -----------------------------------------------------------------------------------------


@pytest.mark.alone
def test_tracing_and_emission_are_quick() -> None:
    """About 10 us a statement, of this thread's own time; the bound leaves room for a slow machine.

    The best of many rounds: a core that others share is slow for a while. What other tests left for
    the collector to walk is not counted.
    """

    def tile(x: In[f32], y: Out[f32], *, size: int) -> None:
        sums = lang.vars(f32, size, size)
        for k in range(8):
            a = [x[k * 64 + i + lang.local_id()] for i in range(size)]
            for i in range(size):
                for j in range(size):
                    sums[i][j].set(lang.fma(a[i], a[j], sums[i][j]))
        for i in range(size):
            for j in range(size):
                y[i * size + j] = lang.exp(sums[i][j])

    best = math.inf
    gc.disable()
    try:
        for _ in range(40):
            start = time.thread_time()
            ir = trace(tile, size=8)
            emit_wgsl(ir)
            best = min(best, time.thread_time() - start)
            assert len(ir.body) > 3000
            if best / len(ir.body) < 40e-6:
                break
    finally:
        gc.enable()
    assert best / len(ir.body) < 40e-6


# -- the page --------------------------------------------------------------------------------------

PAGE = Path(HERE).parents[2] / "docs" / "kernel-language.md"

# Rows of the table of arithmetic.
ARITHMETIC = (
    "`+ - *` f32; `/` f32; `sqrt`; `+ - *` i32; `& \\| ^ ~`; `//`, `%`; `<< >>`; `< <=; "
    "`isnan`; `maximum`; `fmax`; `floor ceil; `abs` i32; `cast` f32 to; "
    "`cast` i32, u32 to; `cast` to bool"
)
# The start of each sentence or table row, and tests that show it: tests/test_lang_(file).(test).
SHOWN = {
    "A kernel is a Python function that is run once": "trace.kernels_without_source",
    "The recording is emitted as WGSL": "wgsl.random_programs ptx.ptx_equals_the_simulator",
    "Each sentence on this page": "trace.every_sentence_has_a_test",
    # values
    "Inside a kernel a value is": "trace.python_numbers_adapt",
    "Python numbers adapt": "trace.python_numbers_adapt",
    "Any other mix of types": "trace.errors_stand_at_the_line",
    "Python `for`, `if` and numbers act": "trace.loops_unroll_while_tracing",
    "`lang.range`, `lang.loop`, `lang.if_` act": "wgsl.control_flow wgsl.random_programs",
    "A traced value in a Python `if`": "trace.errors_stand_at_the_line",
    "A loop is left by `lang.break_if`": "wgsl.control_flow trace.errors_stand_at_the_line",
    "A `lang.loop` without one": "trace.errors_stand_at_the_line trace.python_break_out_of_a_loop",
    "A value can be used only while": "trace.errors_stand_at_the_line",
    "`lang.var` carries values": "trace.variables_carry_values_across_blocks",
    "`lang.vars(f32, 8, 8)`": "trace.variables_and_lists_of_them trace.errors_stand_at_the_line",
    "Constants (keyword-only parameters)": "trace.loops_unroll_while_tracing",
    "Scalars annotated": "trace.scalars_are_passed_with_the_launch",
    "`lang.range(start, stop, step)` reads": "wgsl.bounds_of_loops_are_read_once",
    "Like `i += step` anywhere": "trace.counters_wrap",
    "Mesa's llvmpipe (lavapipe) stops": "rounds.the_probe_says_where_a_driver_stops",
    "If a probe, when the device is opened": "rounds.long_loops_of_a_user "
    "rounds.nested_loops_of_a_user rounds.bodies_are_repeated_until_a_thread_keeps_to_the_bound",
    "If that takes more than 6 000 statements": "rounds.what_no_text_can_do_is_refused_at_the_launch",
    "The number of rounds follows": "rounds.turns_follow_from_parameters_and_ids "
    "rounds.what_only_the_device_knows_is_not_counted",
    "If the driver stops such a loop": "rounds.an_uncounted_loop_that_is_cut_short_raises_at_the_read",
    "What the kernel wrote, and what": "rounds.every_use_of_what_a_stopped_loop_left_raises "
    "rounds.a_state_and_a_replay_after_a_stopped_loop",
    "Operations on constants alone": "trace.constants_are_folded wgsl.constants_keep_every_bit",
    # names
    "All are in `centella.lang`": "trace.every_name_is_on_the_page",
    "A type is one of": "trace.variables_and_lists_of_them wgsl.any_element_loads_by_itself",
    "| name |": "trace.every_name_is_on_the_page",
    "| `In[dtype]`": "trace.faces_are_read_from_annotations trace.storage_must_be_said",
    "| `x[i]`": "wgsl.words_and_chunks trace.extents_of_an_argument memory.a_chunk_is_four_words",
    "| `Scalar[dtype]`": "wgsl.scalars_in_device_memory",
    "| `global_id()`": "simulate.ids",
    "| `num_groups()`": "simulate.ids",
    "| `const(value": "wgsl.constants_keep_every_bit trace.scalars_are_passed_with_the_launch",
    "| `var(init": "trace.variables_and_lists_of_them",
    "| `shared(dtype": "trace.chunks_of_shared_memory_by_their_number simulate.shared_races",
    "| `atomic_add(array, index, value)`, ": "atomics.every_step atomics.an_index_of_rank_two",
    "| `if_(condition)`": "wgsl.control_flow",
    "| `range(start": "wgsl.control_flow",
    "| `select(condition": "trace.select_computes_both",
    "| `maximum(a": "simulate.arithmetic simulate.fma_rounds_once_or_twice",
    "| `abs(x)`": "simulate.arithmetic",
    "| `exp(x)`": "wgsl.formulas_keep_their_bounds",
    "| `exp2_native(x)`": "wgsl.powers_by_the_target wgsl.a_device_that_lacks_an_operation_says_so",
    "| `cast(x": "simulate.arithmetic simulate.bitcast_keeps_every_bit wgsl.stores_round_to_nearest_even",
    "| `barrier()`": "wgsl.groups_meet simulate.workgroup_uniform",
    "| `workgroup_reduce(value": "simulate.workgroup_reduce",
    "| `lane_id()`": "simulate.subgroup_operations",
    "| `subgroup_sum(x)`": "simulate.subgroup_operations simulate.shuffle "
    "wgsl.a_device_that_lacks_an_operation_says_so",
    "| `trace(fn": "trace.faces_are_read_from_annotations trace.the_ir_is_flat",
    # storage and layout
    "Storage is addressed in 32-bit words": "wgsl.words_and_chunks",
    "Storage types are": "wgsl.any_element_loads_by_itself wgsl.packed_four_bit_values",
    "Any element of any type": "wgsl.any_element_loads_by_itself wgsl.words_and_chunks memory.a_chunk_is_four_words",
    "Stores are whole words": "wgsl.words_and_chunks trace.errors_stand_at_the_line",
    "`y[i] = v` is for 4-byte dtypes": "trace.errors_stand_at_the_line",
    "`y.store(i, values)` writes": "wgsl.words_and_chunks simulate.global_races",
    "The index of a chunk": "simulate.off_boundary trace.chunks_counted_from_the_start",
    "The simulator reports any other": "simulate.off_boundary trace.errors_stand_at_the_line",
    "A tensor that a GPU allocates": "trace.layouts_of_devices",
    "Pad bytes may hold anything": "shipped.results_are_right",
    "The CPU stores rows": "trace.layouts_of_devices",
    "Every tensor argument has": "trace.only_used_offsets_and_strides_are_passed",
    "Whether the innermost stride is 1": "trace.only_used_offsets_and_strides_are_passed",
    "A buffer is accessed by words": "wgsl.words_and_chunks wgsl.lanes_of_chunks",
    "The width of access": "wgsl.words_and_chunks wgsl.lanes_of_chunks",
    "A launch runs `ceil(threads": "wgsl.a_launch_runs_whole_groups",
    "Grids are folded": "wgsl.grids_are_folded wgsl.a_launch_runs_whole_groups",
    # uniformity
    "A value is uniform when": "trace.uniform_values wgsl.scalars_in_device_memory",
    "A variable is uniform only": "trace.uniform_values",
    "A barrier, `workgroup_uniform`": "trace.errors_stand_at_the_line simulate.divergent_meetings",
    "Early exit is a predicate": "trace.early_exit_is_a_predicate",
    "A loop that contains a barrier": "trace.errors_stand_at_the_line "
    "trace.messages_name_the_line_of_the_cause",
    # arithmetic
    "The same on WGSL, PTX": "wgsl.arithmetic ptx.ptx_equals_the_simulator",
    "Emitters add what a target lacks": "wgsl.arithmetic ptx.ptx_equals_the_simulator",
    "| operation |": "trace.every_sentence_has_a_test",
    **{f"| {row}": "wgsl.arithmetic simulate.arithmetic" for row in ARITHMETIC.split("; ")},
    "| `fma(a, b, c)`": "wgsl.fma_rounds_once_or_twice simulate.fma_rounds_once_or_twice "
    "ieee.no_two_fma_become_one",
    "| `select(c, a, b)`": "wgsl.arithmetic trace.select_computes_both",
    "| store f16, bf16": "wgsl.stores_round_to_nearest_even "
    "wgsl.native_half_stores_are_the_same_for_exact_values",
    "| load f16, bf16": "wgsl.loads_widen_every_half wgsl.stores_round_to_nearest_even",
    "| `bitcast`": "wgsl.arithmetic simulate.bitcast_keeps_every_bit",
    "| store i8, u8": "wgsl.bytes_store_their_low_bits wgsl.words_and_chunks",
    "| store bool": "wgsl.bytes_store_their_low_bits wgsl.words_and_chunks",
    "| `exp exp2": "wgsl.formulas_keep_their_bounds math.error_is_within_the_stated_bound",
    "| `exp2_native` |": "wgsl.powers_by_the_target tiles.sums_that_become_a_factor",
    "| `workgroup_reduce`": "wgsl.reduction_is_bitwise_repeatable simulate.workgroup_reduce",
    "WGSL lets a driver rewrite": "ieee.a_probe_sees_each_formula_rewritten",
    "If a probe shows that a driver does so": "ieee.formulas_have_the_values_of_their_operations "
    "ieee.zero_by_zero_is_nan ieee.a_driver_that_keeps_to_it_has_the_plain_text",
    "So on such a device": "ieee.fused_programs_have_the_same_bits",
    "Masks are finite": "shipped.masks_are_finite",
    "There are no float atomics": "atomics.refused",
    "Softmax, statistics": "shipped.statistics_are_f32_whatever_the_storage",
    # atomics
    "| atomic |": "trace.every_sentence_has_a_test",
    "| `atomic_add(array, index, value)` |": "atomics.every_step atomics.launched",
    "| `atomic_min(...)`": "atomics.every_step",
    "| `atomic_and(...)`": "atomics.every_step",
    "| `atomic_exchange(...)`": "atomics.every_step",
    "| `atomic_compare_exchange(": "atomics.every_step atomics.a_compare_exchange_loop",
    "An atomic is one indivisible step": "atomics.every_step atomics.launched",
    "Words are i32 or u32": "atomics.refused",
    "An array that some atomic changes": "atomics.refused",
    "Its `x[i]` and `x[i] = v`": "atomics.atomics_race_with_plain_accesses",
    "Atomics of several threads on one word": "atomics.histogram atomics.compaction",
    "The final words of `add`": "atomics.histogram atomics.a_compare_exchange_loop",
    "Three things differ": "atomics.compaction",
    "Atomics order no other access": "atomics.atomics_race_with_plain_accesses",
    "On PTX atomics are visible": "atomics.a_result_that_nobody_wants_costs_nothing atomics.texts_assemble",
    # effects
    "Statements run in program order": "trace.effects_keep_their_order wgsl.random_programs",
    "Stores, variable assignments": "trace.effects_keep_their_order wgsl.random_programs",
    "After `barrier()` a thread sees": "wgsl.groups_meet "
    "wgsl.storage_barriers_where_they_are_needed",
    "Threads of two groups never": "simulate.global_races",
    "Shared memory starts undefined": "simulate.read_of_unwritten_memory",
    "No launch has `In` and `Out`": "trace.outputs_are_fresh_values",
    "An `Out` argument is a new value": "trace.outputs_are_fresh_values",
    # ptx alone
    "`from centella.lang import ptx` has": "tiles.other_targets_refuse_these_operations",
    "A kernel that uses it has no WGSL": "tiles.other_targets_refuse_these_operations",
    "The simulator runs it": "tiles.ptx_equals_the_simulator",
    "| in `ptx` |": "tiles.every_name_is_on_the_page",
    "| `ptx.Fragment(dtype": "tiles.a_product_in_every_layout tiles.refused",
    "| `f.fill(value)`": "tiles.a_product_in_every_layout",
    "| `f[register] = value`": "tiles.sums_that_become_a_factor tiles.refused "
    "tiles.a_factor_takes_words_as_they_are_stored",
    "| `ptx.SharedTile(dtype": "tiles.layout_of_a_shared_tile tiles.refused",
    "| `t.chunk(row": "tiles.layout_of_a_shared_tile tiles.rows_further_down_are_a_number_away "
    "tiles.columns_further_right_are_one_operation_away",
    "| `ptx.mma_sync(c": "tiles.a_product_in_every_layout tiles.texts_assemble",
    "| `ptx.widen_i8(word, dtype)`": "tiles.integers_become_factors tiles.refused",
    "| `ptx.mma_bytes(c": "tiles.bytes_are_multiplied_exactly tiles.texts_assemble",
    "| `ptx.permute_bytes(a": "tiles.bytes_are_multiplied_exactly tiles.refused",
    "| `ptx.widen_u7(word, dtype": "tiles.integers_become_factors tiles.refused",
    "| `ptx.max_pairs(a, b, dtype)`": "tiles.pairs_of_halves_have_their_larger tiles.refused",
    "| `ptx.rsqrt(x)`": "tiles.roots_and_reciprocals_by_the_target tiles.refused",
    "| `ptx.fetch_lines(source": "tiles.lines_are_fetched_where_it_is_asked_for tiles.lines_of_written_arguments_are_refused",
    "| `ptx.prefetch(source": "tiles.memory_is_asked_for tiles.what_cannot_be_read_is_not_asked_for "
    "clusters.arguments_read_early_are_marked",
    "| `ptx.resident(groups)`": "tiles.residents_are_in_the_head tiles.refused",
    "| `ptx.ldmatrix(tile": "tiles.ptx_equals_the_simulator tiles.texts_assemble",
    "| `ptx.cp_async(tile": "tiles.a_copy_of_fewer_bytes_ends_in_zeros tiles.texts_assemble",
    "| `ptx.cp_async_commit()`": "tiles.copies_are_there_when_waited_for",
    # of those, from sm_90 on
    "From sm_90 on": "clusters.other_targets_refuse",
    "| from sm_90 on, in `ptx` |": "tiles.every_name_is_on_the_page",
    "| `ptx.stmatrix(tile": "clusters.matrices_are_stored clusters.sums_are_stored_in_a_role",
    "| `ptx.cluster(groups)`": "clusters.a_cluster_meets_and_reads clusters.ranks_are_uniform "
    "clusters.refused",
    "| `ptx.cluster_arrive(": "clusters.a_cluster_meets_and_reads clusters.refused",
    "| `ptx.cluster_load(array": "clusters.a_cluster_meets_and_reads clusters.refused",
    "| `ptx.launch_dependents()`": "clusters.texts_assemble",
    "| `ptx.await_launches()`": "clusters.arguments_read_early_are_marked",
    "| `b.send(i": "clusters.sent_words_that_are_not_waited_for_are_reported clusters.sends_that_are_refused",
    "No launch that may still run": "clusters.arguments_read_early_are_marked",
    "So `launch_dependents` changes": "clusters.texts_assemble",
    "| `ptx.grid_barrier()`": "grids.groups_meet",
    # of those, on Hopper
    "On Hopper (sm_90a) alone": "hopper.other_targets_refuse",
    "| on Hopper, in `ptx` |": "tiles.every_name_is_on_the_page",
    "| `ptx.role(first": "hopper.boxes_and_products hopper.refused",
    "| `ptx.warpgroup_barrier()`": "hopper.the_case_covers_every_operation",
    "| `ptx.warpgroup_uniform(x)`": "hopper.a_number_that_a_warpgroup_has_in_common",
    "| `ptx.grid()`": "hopper.the_case_covers_every_operation",
    "| `ptx.Barriers(count)`": "hopper.boxes_and_products hopper.the_simulator_reports "
    "clusters.a_box_reaches_every_group",
    "| `ptx.TensorMap(argument": "hopper.boxes_and_products "
    "hopper.maps_refuse_what_they_cannot_describe",
    "| `ptx.bulk_load(source": "hopper.neighbouring_bytes_come "
    "hopper.the_simulator_reports_of_neighbouring_bytes",
    "| `ptx.tma_load(source": "hopper.boxes_and_products hopper.texts_assemble "
    "clusters.a_box_reaches_every_group clusters.a_mask_is_of_the_cluster",
    "| `ptx.tma_store(target": "hopper.boxes_and_products hopper.texts_assemble",
    "| `ptx.tma_store_commit()`": "hopper.boxes_and_products hopper.the_simulator_reports",
    "| `ptx.async_fence()`": "hopper.boxes_and_products hopper.the_simulator_reports",
    "| `ptx.wgmma(c": "hopper.boxes_and_products hopper.texts_assemble",
    "| `ptx.wgmma_held(c": "hopper.boxes_and_products hopper.texts_assemble",
    "| `ptx.wgmma_fence()`": "hopper.boxes_and_products hopper.refused",
    "Sums of `wgmma` are a `Fragment`": "hopper.refused",
    "The same holds for the factor": "hopper.refused",
    "In a role control flow is uniform": "hopper.refused",
    "Subgroup and matrix operations are allowed": "hopper.boxes_and_products "
    "clusters.sums_are_stored_in_a_role",
    "Operations of the whole group": "hopper.refused",
    "The driver encodes a tensor map": "hopper.maps_that_the_driver_would_not_make "
    "hopper.the_layout_of_a_tile_is_that_of_its_map_and_descriptor",
    "Copies read zeros outside": "hopper.boxes_and_products",
    "The simulator runs a kernel for Hopper": "hopper.boxes_and_products",
    "It reports access to the memory": "hopper.the_simulator_reports",
    "It cannot report a missing `init_fence`": "hopper.the_simulator_reports",
    "A wait for a phase": "clocks.waiting_for_another_barrier_orders_nothing "
    "clocks.a_box_is_overwritten_once_it_is_read clocks.order_is_passed_on",
    "A wait orders nothing else": "clocks.waiting_for_another_barrier_orders_nothing "
    "clocks.a_phase_tells_what_was_published_to_it",
    "The simulator has a vector clock": "clocks.slots_that_are_used_too_early "
    "clocks.each_thread_waits_for_a_box_itself",
    "One thread arrives or waits": "clocks.slots_are_used_again clocks.a_warp_is_taken_for_one",
    "Within a warp, for atomics": "clocks.a_warp_is_taken_for_one clocks.atomics_and_device_memory",
    "A launch whose groups meet by": "grids.more_groups_than_a_device_holds_are_refused",
    "The simulator runs them together and": "grids.faults_are_seen",
    "A cluster is part of the kernel": "clusters.the_head_has_the_cluster",
    "A number of groups that is not": "clusters.groups_are_whole_clusters",
    "`cluster_arrive(relaxed=True)` orders": "clusters.the_simulator_reports",
    "The simulator reports memory that relies": "clusters.the_simulator_reports",
    "`cluster_arrive` and `cluster_wait` order": "clusters.a_cluster_meets_and_reads "
    "clusters.what_another_group_reads_is_kept",
    "Accesses between the two": "clusters.the_simulator_reports",
    "No group ends while another": "clusters.the_simulator_reports "
    "clusters.the_simulator_reports_faults_of_rings",
    "The simulator runs the groups of a cluster": "clusters.the_simulator_reports "
    "clusters.groups_that_do_not_meet clusters.the_simulator_reports_faults_of_rings "
    "clusters.what_another_group_reads_is_kept",
    "It treats accesses between": "clusters.writes_between_arriving_and_waiting_count_as_earlier",
    "For sm_90 and later a kernel's first": "clusters.the_wait_is_first_and_has_no_name",
    # of all
    "A fragment is opaque and linear": "tiles.refused tiles.fragments_keep_their_registers",
    "Layouts are those of the PTX ISA": "tiles.ptx_equals_the_simulator",
    "Matrix operations need whole warps": "tiles.half_a_warp_is_refused tiles.refused",
    "A warp has 32 threads": "tiles.fragments_in_loops_and_among_groups",
    "Products of `mma_sync` are exact": "tiles.a_product_in_every_layout",
    "A `SharedTile` derives every address": "tiles.layout_of_a_shared_tile",
    "Its swizzles are those of tensor maps": "tiles.layout_of_a_shared_tile",
    "The thread that started a copy": "tiles.copies_are_there_when_waited_for",
    "Before the wait no thread may": "tiles.what_is_in_flight_is_not_written",
    "The simulator completes copies": "tiles.copies_are_there_when_waited_for",
    # simulator
    "`trace(...)` returns a `KernelIR`": "trace.scalars_are_passed_with_the_launch",
    "It reports, with the source line": "simulate.out_of_bounds simulate.shared_races "
    "simulate.unwritten_output simulate.read_of_unwritten_memory simulate.divergent_meetings "
    "simulate.off_boundary simulate.global_races",
    "The device `simulator` tracks written memory": "memory.a_word_that_nobody_wrote_is_not_read "
    "memory.pads_of_results_are_read_and_nothing_else_beside_them "
    "memory.a_copy_of_a_state_copies_what_nobody_wrote",
    "Conflicting stores are applied": "simulate.order_of_conflicting_stores "
    "simulate.subgroup_operations",
    # identity
    "The IR is a flat list": "trace.the_ir_is_flat",
    "The SHA-256 of its canonical text": "trace.identity_is_equal_in_every_process",
    "The portable kernels that the": "shipped.statements_are_few wgsl.statements_are_counted",
    "A kernel of yours may have": "wgsl.a_users_kernel_has_no_bound",
}


def test_every_name_is_on_the_page() -> None:
    table = PAGE.read_text().partition("## Names")[2].partition("\n## ")[0]
    quoted = re.findall(r"`([^`]+)`", table)
    written = {q.partition("(")[0].partition("[")[0]: q for q in reversed(quoted)}
    assert set(lang.__all__) <= set(written), set(lang.__all__) - set(written)
    for name, text in written.items():
        function = getattr(lang, name, None)
        if not inspect.isfunction(function) or text.endswith("...)"):
            continue
        parameters = inspect.signature(function).parameters.values()
        plain = [str(p.replace(annotation=p.empty)) for p in parameters]
        assert text == f"{name}({', '.join(plain)})"


def test_every_sentence_has_a_test() -> None:
    said = sentences(PAGE.read_text())
    assert len(said) > 70
    assert_shown(said, SHOWN, "lang_")
