"""rope_cache_write: what a decoder does with the product of q, k and v, in one launch.

Of x [b, h + 2 h', t, d], heads of queries, of keys and of values beside each other, token i of
sequence b at position s_b + i:

    q = rope(norm(x[:, :h]))    K[b, h', s_b + i] = rope(norm(x[:, h:-h']))    V[...] = x[:, -h':]

norm is the RMS norm of each head with a weight for q and one for k, where there are some (Qwen3).
`rope` and `cache_write` say the rest: which columns are a pair, tables, capacity, and blocks, whose
table takes the place of s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, f32, narrow, u32, widen
from centella.emit.program import Call, Constants, HostProgram, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out, unit_rows
from centella.ops.cache import cache_scalars, cache_shape, place_in, whole_rows, write_reference
from centella.ops.elements import offset_of
from centella.ops.layout import flat
from centella.ops.rope import Turn, check_tables, layout_of, table_entries
from centella.ops.rope import reference as rotate
from centella.ops.rope_heads import THREADS, PairTurn, Share, first_of, shared, write_heads
from centella.ops.rows import place_of, rows_call, strides_of, width_of
from centella.specs import Caps, Spec

WORKGROUP = 256


class Head:
    """A head of a token as `rope` reads it: its columns, normalised where there are weights.

    Args:
        norm_chunk: weights of the norm are loaded by chunks.
    """

    def __init__(
        self, x: Any, place: Any, width: int, chunk: bool, norms: Any, which: Any,
        norm_chunk: bool = False,
    ) -> None:  # fmt: skip
        self._x, self._place, self._chunk = x, place, chunk
        self._norms, self._which, self._factor = norms, which, None
        self._norm_chunk = norm_chunk
        if norms is None:
            return
        dim, eps = lang.parameter("dim", u32), lang.parameter("eps", f32)
        self._factor = 1.0 / lang.sqrt(self._squares(width) / lang.cast(dim, f32) + eps)

    def _squares(self, width: int) -> Expr:
        dim = lang.parameter("dim", u32)
        squares = lang.vars(f32, width, init=0.0)
        for column in lang.range(lang.const(0, u32), dim, width):
            for e, (into, value) in enumerate(zip(squares, self._read(column), strict=True)):
                counted = lang.select(column + e < dim, value, 0.0)
                into.set(lang.fma(counted, counted, into))
        total = squares[0] + 0.0
        for other in squares[1:]:
            total = total + other
        return total  # type: ignore[no-any-return]  # traced

    def _read(self, column: Operand) -> list[Expr]:
        """A thread's elements from a column, as they are stored."""
        if self._chunk:
            return self._x.load(self._place + column)  # type: ignore[no-any-return]  # traced
        last = lang.parameter("dim", u32) - 1
        return [
            self._x[self._place + lang.minimum(column + e, last)]
            for e in range(self._x.dtype.per_word)
        ]

    def load(self, column: Operand) -> list[Expr]:
        """A chunk of it from a column on."""
        values = self._x.load(self._place + column)
        if self._factor is None:
            return values  # type: ignore[no-any-return]  # traced
        lanes = [self._inside(column + e) for e in range(len(values))]
        lanes = [column, *lanes[1:]] if self._norm_chunk else lanes
        weights = table_entries(self._norms, self._which, lanes, self._norm_chunk)
        return [v * self._factor * w for v, w in zip(values, weights, strict=True)]

    def __getitem__(self, column: Operand) -> Any:
        value = self._x[self._place + column]
        if self._factor is None:
            return value
        return value * self._factor * self._norms[self._which, self._inside(column)]

    def _inside(self, column: Operand) -> Any:
        return lang.minimum(column, lang.parameter("dim", u32) - 1)


def _run(
    *, x: Argument, cos: Argument, sin: Argument, starts: Argument, y: Argument, keys: Argument,
    values: Argument, norms: Argument | None = None, share: Share | None = None,
    norm_chunk: bool = False, **layout: bool,
) -> None:  # fmt: skip
    """A thread has two chunks of several heads, or a chunk (or word) of one."""
    rest = x, starts, y, keys, values, norms, norm_chunk
    if share is None:
        _one_head(Turn(cos, sin, **layout), *rest)
    else:
        write_heads(share, PairTurn(cos, sin, **layout), *rest)


def _one_head(
    turn: Turn, x: Argument, starts: Argument, y: Argument, keys: Argument, values: Argument,
    norms: Argument | None, norm_chunk: bool,
) -> None:  # fmt: skip
    """A thread has a chunk (or word) of a head of a token, and reads all of it for its norm."""
    width = width_of(y, turn.chunk)
    heads, kv_heads, tokens, dim, height, threads = (
        lang.parameter(n, u32) for n in ("heads", "kv_heads", "tokens", "dim", "height", "threads")
    )
    with lang.if_(lang.global_id() < threads):
        row, column = place_of(width)
        i, rest = row % tokens, row // tokens
        head, b = rest % (heads + kv_heads * 2), rest // (heads + kv_heads * 2)
        place, which = (
            offset_of([b, head, i], "x"),
            lang.select(head < heads, 0, lang.const(1, u32)),
        )
        position = first_of(starts, b) + i
        every = [lang.minimum(column + e, dim - 1) for e in range(width)]
        every = [column, *every[1:]] if turn.chunk else every
        turns = head < heads + kv_heads
        with lang.if_(turns):
            source = Head(x, place, width, turn.chunk, norms, which, norm_chunk)
            own = source.load(column) if turn.chunk else [source[c] for c in every]
            at, none = lang.minimum(position, height - 1), lang.const(0, u32)
            turned = turn.turned(source, none, own, turn.entries(at, every), every)
            turned = turn.passed(turned, own, every, position < height)
            with lang.if_(head < heads):
                y.store(offset_of([b, head, i], "y") + column, turned)
            with lang.else_():
                to, fits = place_in(starts, b, head - heads, i, "kc")
                with lang.if_(fits):
                    keys.store(to + column, turned)
        with lang.else_():
            to, fits = place_in(starts, b, head - heads - kv_heads, i, "vc")
            with lang.if_(fits):
                values.store(to + column, turn.read(x, place, every))


kernel: Kernel = Kernel(_run, workgroup=WORKGROUP, name="rope_cache_write")


class RopeCacheAttrs(Struct, frozen=True):
    """As in `rope`, and eps of the norms."""

    interleaved: bool
    eps: float


def rule(specs: tuple[Spec, ...], attrs: RopeCacheAttrs) -> tuple[Out, ...]:
    """As `check_step` says."""
    return check_step("rope_cache_write", specs)


def check_step(op: str, specs: tuple[Spec, ...]) -> tuple[Out, Out, Out]:
    """Caches [b, h', n, d], x [b, h + 2 h', t, d], tables [m, r / 2], starts [b], norms [2, d].

    Returns:
        The caches, and q [b, h, t, d].
    """
    keys, values, x, cos, sin, starts, *norms = specs
    b, kv_heads, capacity, d = cache_shape(op, keys, starts)
    fits = len(x.shape) == 4 and (x.shape[0], x.shape[3]) == (b, d) and x.shape[2] <= capacity
    if not fits or x.shape[1] <= 2 * kv_heads:
        raise ShapeError(
            f"{op}: expected x [{b}, more than {2 * kv_heads}, up to {capacity}, {d}], "
            f"got {list(x.shape)}"
        )
    check_tables(op, cos, sin, d)
    if any(s.shape != (2, d) for s in norms):
        raise ShapeError(f"{op}: expected norms [2, {d}], got {list(norms[0].shape)}")
    if any(s.dtype is not keys.dtype for s in (values, x)) or not x.dtype.is_float:
        raise DTypeError(f"{op}: expected x of {keys.dtype.name}, a float, got {x.dtype.name}")
    if any(s.dtype is not f32 for s in (cos, sin)) or any(not s.dtype.is_float for s in norms):
        names = ", ".join(s.dtype.name for s in (cos, sin, *norms))
        raise DTypeError(f"{op}: expected f32 tables and float norms, got {names}")
    shape = (b, x.shape[1] - 2 * kv_heads, x.shape[2], d)
    return (keys.shape, keys.dtype), (values.shape, values.dtype), (shape, x.dtype)


def divided(
    x: Array, keys: Array, cos: Array, sin: Array, starts: Array, norms: tuple[Array, ...],
    interleaved: bool, eps: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """q, k and v as they are stored, for the NumPy formula."""
    blocks = starts.ndim == 2
    kv_heads = keys.shape[0 if blocks else 1]
    heads, starts = x.shape[1] - 2 * kv_heads, starts[:, 0] if blocks else starts
    parts = [x[:, :heads], x[:, heads : heads + kv_heads]]
    for n, part in enumerate(parts):
        if norms:
            mean = np.mean(part * part, axis=-1, keepdims=True)
            part = part / np.sqrt(mean + part.dtype.type(eps)) * norms[0][n]
        parts[n] = rotate(part, cos, sin, starts, interleaved=interleaved)
    return parts[0], parts[1], x[:, heads + kv_heads :]


def reference(
    keys: Array, values: Array, x: Array, cos: Array, sin: Array, starts: Array, *norms: Array,
    interleaved: bool, eps: float,
) -> Any:  # fmt: skip
    """The NumPy formula: changes `keys` and `values`."""
    q, k, v = divided(x, keys, cos, sin, starts, norms, interleaved, eps)
    return (*write_reference(keys, values, k, v, starts), q)


def host(form: Form[RopeCacheAttrs]) -> HostProgram:
    """On the CPU: computed in f32, rounded once."""
    dtypes = [s.dtype for s in form.inputs]
    interleaved, eps = form.attrs.interleaved, form.attrs.eps

    def call(arrays: list[Array], outs: list[Array]) -> None:
        keys, values, *given = arrays
        x, cos, sin, starts, *norms = (widen(a, d) for a, d in zip(given, dtypes[2:], strict=True))
        with np.errstate(all="ignore"):
            q, k, v = divided(x, keys, cos, sin, starts, tuple(norms), interleaved, eps)
        k, v = (narrow(part, dtypes[0]) for part in (k, v))
        write_reference(keys, values, k, v, starts)
        np.copyto(outs[2], narrow(q, dtypes[0]))

    return HostProgram("numpy:rope_cache_write", "rope_cache_write", call)


def lower(form: Form[RopeCacheAttrs], caps: Caps) -> Lowered:
    """One launch."""
    keys, values, x, cos, sin, starts, *norms = form.inputs
    y = form.outputs[2]
    batch, all_heads, tokens, dim = x.shape
    layout = layout_of(cos, sin, form.attrs.interleaved, y, keys, values, x)
    kv_heads = (all_heads - y.shape[1]) // 2
    scalars: dict[str, int | float] = {
        "heads": y.shape[1], "kv_heads": kv_heads, "tokens": tokens,
        "dim": dim, "rotary": 2 * cos.shape[1], "height": cos.shape[0], "eps": form.attrs.eps,
        **cache_scalars(keys, starts), **strides_of(x=x, y=y, kc=keys, vc=values),
    }  # fmt: skip
    reads = {"x": 1, "cos": 2, "sin": 2, "starts": len(starts.shape)}
    reads |= {"norms": 2} if norms else {}
    refs = (
        Ref(2, flat(x)), Ref(3, cos), Ref(4, sin), Ref(5, starts),
        *(Ref(6, s) for s in norms), Ref(len(form.inputs) + 2, y),
        Ref(0, flat(keys)), Ref(1, flat(values)),
    )  # fmt: skip
    params = signature(reads, {"y": 1}, {"keys": 1, "values": 1})
    rows, width = batch * all_heads * tokens, width_of(y, layout["chunk"])
    across = whole_rows(keys, values, y)
    whole = layout["chunk"] and dim % width == 0  # else the last chunk ends in what pads x
    by_chunk = whole and all(s.aligned and width % s.dtype.per_chunk == 0 for s in norms)
    constants: Constants = (*layout.items(), ("norm_chunk", bool(norms) and by_chunk))
    share = shared(y, kv_heads, width, bool(norms), caps) if whole and across == dim else None
    if share is None:
        call = rows_call(kernel, refs, rows, across, width, scalars, constants, params)
        return Lowered((call,))
    threads = rows // share.each * share.lanes
    told = {"threads": threads, **scalars}
    constants = (*constants, ("share", share))
    groups = -(-threads // THREADS)
    return Lowered(
        (Call(kernel, refs, tuple(told.items()), constants, groups, THREADS, signature=params),)
    )


def axes_of(form: Form[Any]) -> Axes:
    """Sequences: heads of three kinds lie beside each other. Blocks belong to any of them."""
    rest = [".." for _ in form.inputs[6:]]
    if len(form.inputs[5].shape) == 2:
        return axes(["....", "....", "....", "..", "..", "..", *rest], ["...."] * 3)
    return axes(["b...", "b...", "b...", "..", "..", "b", *rest], ["b..."] * 3)


ROPE_CACHE = Op(
    "rope_cache_write", rule, reference, lower, unit_rows, attrs=RopeCacheAttrs, mutates=(0, 1),
    host=host, axes=axes_of, preferred=Form.within_binding,
    doc="q, k and v of a step: rotated, k and v into a KV cache",
)  # fmt: skip
