"""Float64 values of every op, computed by PyTorch: golden values for the NumPy formulas.

`golden_values()` returns {op: [{"inputs": {name: array}, "params": {...}, "output": array}, ...]},
an array being {"shape": [...], "dtype": "float64", "data": [flat, C order]}. Conventions where
PyTorch leaves a choice:

    gelu        kind "none" (erf), "tanh", "quick" (x sigmoid(1.702 x))
    linear      activation((x W^T) scale + bias) + residual, W is [out_features, in_features]
    attention   q, k, v [batch, heads, length, head_dim]; key_mask [batch, keys], True = attend;
                mask is added to the scores; causal: query i sees keys up to i + keys - queries;
                starts: up to starts + i
    cast        towards zero, values in range
    rope        the tables are operands: cos, sin [positions, pairs]; first: a position a sequence
    conv1d      result [batch, channels_out, length_out]
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf

Cases = list[dict[str, Any]]

SHAPES = [(), (1,), (0,), (3, 0), (3, 5), (2, 1, 7)]
PAIRS = [((), ()), ((1,), (1,)), ((0,), (1,)), ((3, 0), (3, 0)), ((4,), ()), ((3, 5), (3, 5)),
         ((3, 5), (5,)), ((2, 1, 7), (3, 1))]  # fmt: skip
HUGE = [0.0, -0.0, 1e-300, -1e-300, 1e300, -1e300]
TURNS = [0.0, -0.0, 1e-300, 1e-8, 0.5, -2.0, 20.0, -40.0, 800.0, 6e4]
WIDE = [0.0, -0.0, 1e-300, -1e-300, 1e-8, -1e-8, 20.0, -20.0, 40.0, -40.0, 700.0, -700.0]


def rng_of(op: str) -> np.random.Generator:
    """Random numbers of one op, whatever the ops before it."""
    return np.random.default_rng(zlib.crc32(op.encode()))


def t(values: Any) -> Tensor:
    """A tensor: floats as float64, whole numbers as int64, bools as bool."""
    return torch.from_numpy(np.array(values))


def pack(x: Tensor) -> dict[str, Any]:
    """An array as JSON holds it."""
    dtype = str(x.dtype).removeprefix("torch.")
    return {"shape": list(x.shape), "dtype": dtype, "data": x.reshape(-1).tolist()}


def case(fn: Callable[..., Tensor], inputs: dict[str, Tensor], **params: Any) -> dict[str, Any]:
    """One row: the inputs, the params and what `fn` makes of them."""
    output = fn(**inputs, **params)
    packed = {name: pack(x) for name, x in inputs.items()}
    return {"inputs": packed, "params": params, "output": pack(output)}


def plain(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A PyTorch function, called with our names: they come in its order."""
    return lambda **named: fn(*named.values())


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """Gaussian float64 values."""
    return t(np.asarray(rng.standard_normal(shape) * scale, dtype=np.float64))


def unary(op: str, fn: Callable[..., Tensor], extreme: list[float], **params: Any) -> Cases:
    """Random values of several shapes, then the extremes."""
    rng = rng_of(op)
    xs = [normal(rng, shape, 3.0) for shape in SHAPES]
    xs = [x.abs() + 1e-3 for x in xs] if op in ("sqrt", "log") else xs
    return [case(fn, {"x": x}, **params) for x in [*xs, t(extreme)]]


def gelu(x: Tensor, kind: str) -> Tensor:
    """The three kinds of GELU."""
    return x * torch.sigmoid(1.702 * x) if kind == "quick" else nnf.gelu(x, approximate=kind)


UNARY: dict[str, tuple[Callable[..., Tensor], list[float]]] = {
    "neg": (torch.neg, HUGE), "abs": (torch.abs, HUGE), "relu": (nnf.relu, HUGE),
    "sqrt": (torch.sqrt, [0.0, 1e-300, 1.0, 4.0, 2.0, 1e300]),
    "exp": (torch.exp, [*WIDE, -708.0, 709.0]),
    "log": (torch.log, [1e-300, 1.0, 1 - 1e-10, 1 + 1e-10, 2.0, 1e300]),
    "sigmoid": (torch.sigmoid, WIDE), "tanh": (torch.tanh, [*WIDE, 1e300, -1e300]),
    "silu": (nnf.silu, WIDE), "sin": (torch.sin, TURNS), "cos": (torch.cos, TURNS),
    "square": (torch.square, [0.0, -0.0, 1e-150, -1e150]),
}  # fmt: skip
BELL = [v for v in WIDE if abs(v) < 100] + [400.0, -400.0]
WITH: dict[str, tuple[Callable[..., Tensor], list[float], str, tuple[Any, ...]]] = {
    "leaky_relu": (plain(nnf.leaky_relu), HUGE, "negative_slope", (0.01, 0.3)),
    "elu": (plain(nnf.elu), WIDE, "alpha", (1.0, 0.5)),
    "gelu": (gelu, BELL, "kind", ("none", "tanh", "quick")),
    "scale": (plain(torch.mul), HUGE, "factor", (-0.125, 3.0, 0.0)),
}


def unary_ops() -> dict[str, Cases]:
    """One operand, and at most one number."""
    ops = {op: unary(op, plain(fn), extreme) for op, (fn, extreme) in UNARY.items()}
    roots = [normal(rng_of("rsqrt"), shape, 3.0).abs() + 1e-3 for shape in SHAPES]
    roots.append(t([1e-300, 1.0, 4.0, 2.0, 1e300]))
    ops["rsqrt"] = [case(plain(torch.rsqrt), {"x": x}) for x in roots]
    for op, (fn, extreme, name, values) in WITH.items():
        ops[op] = [row for v in values for row in unary(op, fn, extreme, **{name: v})]
    return ops


def binary_ops() -> dict[str, Cases]:
    """Two operands that broadcast: arithmetic, comparisons, logic, division of integers."""
    far = ([1e300, -1e300, 1e-300, -0.0, 0.0], [-1e300, 1e300, 1e-300, 0.0, 0.0])
    product = ([1e200, -1e200, 1e-200, -0.0, 1e300], [1e-200, 1e100, 1e-90, 5.0, 1e-300])
    ratio = ([1e200, -1e200, 1e-200, -0.0, 1e300], [1e-100, 1e100, 1e-90, 5.0, 1e300])
    special = ([0.0, 1e300, 1.0, -1e-300], [-0.0, 1.0, 1.0, 1e-300])
    extremes = {"mul": product, "div": ratio, "silu_gate": (WIDE, WIDE[::-1])}
    fns: dict[str, Callable[..., Tensor]] = {
        **{op: getattr(torch, op) for op in (
            "add sub mul div maximum minimum eq ne lt le gt ge logical_and logical_or floor_divide "
            "remainder").split()},
        "silu_gate": lambda gate, up: nnf.silu(gate) * up,
    }  # fmt: skip
    ops: dict[str, Cases] = {}
    for op, fn in fns.items():
        rng, names = rng_of(op), ("gate", "up") if op == "silu_gate" else ("a", "b")
        scale = 3.0 if op == "silu_gate" else 1.0
        if op in ("floor_divide", "remainder"):
            pairs = [(t(rng.integers(-99, 99, a)), t(rng.integers(1, 9, b))) for a, b in PAIRS]
            pairs += [(a, -b) for a, b in pairs[-3:]]
        else:
            pairs = [(normal(rng, a, scale), normal(rng, b)) for a, b in PAIRS]
            if op.startswith("logical"):
                pairs = [(a > 0, b > 0) for a, b in pairs]
            elif op in ("eq", "ne", "lt", "le", "gt", "ge"):
                pairs = [(a.round(), b.round()) for a, b in pairs] + [tuple(map(t, special))]
            else:
                pairs.append(tuple(map(t, extremes.get(op, far))))
        ops[op] = [case(plain(fn), dict(zip(names, pair, strict=True))) for pair in pairs]
    rng = rng_of("logical_not")
    ops["logical_not"] = [case(plain(torch.logical_not), {"x": normal(rng, s) > 0}) for s in SHAPES]
    return ops


def choice_ops() -> dict[str, Cases]:
    """clip, where, cast."""

    def cast(x: Tensor, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype))

    rng = rng_of("choice")
    clips = [(-1.0, 0.5), (None, 0.5), (-1.0, None)]
    xs = [*[normal(rng, shape, 2.0) for shape in SHAPES], t(HUGE)]
    triples = [((3, 5), (3, 5), (3, 5)), ((5,), (3, 1), ()), ((0,), (1,), (0,)), ((1,), (1,), (1,))]
    whole = [0.0, -0.0, 0.5, -0.5, 0.999, -0.999, 1.5, -1.5, 2.5, -2.5, 100.7, -100.7]
    return {
        "clip": [case(plain(torch.clamp), {"x": x}, min=a, max=b) for a, b in clips for x in xs],
        "where": [
            case(
                plain(torch.where),
                {"condition": normal(rng, c) > 0, "x": normal(rng, x), "y": normal(rng, y)},
            )
            for c, x, y in triples
        ],
        "cast": [
            case(cast, {"x": t([*whole, 2147483647.0, -2147483648.0])}, dtype="int32"),
            case(cast, {"x": t(whole)}, dtype="int8"),
            case(cast, {"x": t([v for v in whole if v > -1.0])}, dtype="uint8"),
            case(cast, {"x": t([0.0, -0.0, 0.5, -3.0, 1e-300])}, dtype="bool"),
            case(cast, {"x": normal(rng, (3, 0))}, dtype="int32"),
            case(cast, {"x": normal(rng, (2, 1, 7), 50.0)}, dtype="int32"),
        ],
    }


def matmul(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """The product a b, with either side transposed in its last two axes."""
    a = a.mT if transpose_a else a
    b = b.mT if transpose_b else b
    return a @ b


def product_ops() -> dict[str, Cases]:
    """matmul, dot, linear, embedding."""
    rng = rng_of("matmul")
    shapes = [((1, 1), (1, 1)), ((1, 7), (7, 3)), ((5, 3), (3, 4)), ((3, 0), (0, 2)),
             ((0, 3), (3, 2)), ((2, 3), (3, 0)), ((2, 3, 4), (2, 4, 5)), ((1, 3, 4), (2, 4, 5)),
             ((2, 1, 3, 4), (3, 4, 2)), ((4, 3), (2, 3, 5)), ((0, 3, 4), (0, 4, 5))]  # fmt: skip
    rows = [
        case(matmul, {"a": normal(rng, a), "b": normal(rng, b)}, transpose_a=False,
             transpose_b=False)
        for a, b in shapes
    ]  # fmt: skip
    for ta, tb in ((True, False), (False, True), (True, True)):
        for lead in ((), (2,)):
            a = normal(rng, (*lead, 3, 5) if ta else (*lead, 5, 3))
            b = normal(rng, (*lead, 4, 3) if tb else (*lead, 3, 4))
            rows.append(case(matmul, {"a": a, "b": b}, transpose_a=ta, transpose_b=tb))
    a, b = normal(rng, (3, 5), 1e150), normal(rng, (5, 2), 1e-150)
    rows.append(case(matmul, {"a": a, "b": b}, transpose_a=False, transpose_b=False))

    rng = rng_of("dot")
    sizes = [0, 1, 7, 255, 257]
    dots = [case(plain(torch.dot), {"a": normal(rng, (n,)), "b": normal(rng, (n,))})
            for n in sizes]  # fmt: skip

    rng = rng_of("embedding")
    table = normal(rng, (7, 3))
    ids = [[0], [6, 0, 3], [[1, 2], [2, 5]], np.zeros((0,), np.int64), np.zeros((2, 0), np.int64)]
    lookups = [case(plain(nnf.embedding), {"ids": t(i), "weight": table})
               for i in ids]  # fmt: skip
    return {"matmul": rows, "dot": dots, "linear": linear_cases(), "embedding": lookups}


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": nnf.relu,
    "gelu": nnf.gelu,
    "silu": nnf.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def linear_cases() -> Cases:
    """activation((x W^T) scale + bias) + residual, with and without each part."""
    rng = rng_of("linear")

    def linear(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
        scale: Tensor | None = None, activation: str | None,
    ) -> Tensor:  # fmt: skip
        scaled = weight if scale is None else weight * scale[:, None]
        y = ACTIVATIONS[activation](nnf.linear(x, scaled, bias))
        return y if residual is None else y + residual

    rows = []
    for lead, k, n in [((1,), 1, 1), ((5,), 3, 4), ((2, 3), 7, 5), ((0,), 3, 2), ((2,), 0, 3)]:
        x, weight, bias = normal(rng, (*lead, k)), normal(rng, (n, k)), normal(rng, (n,))
        residual = normal(rng, (*lead, n))
        rows.append(case(linear, {"x": x, "weight": weight}, activation=None))
        rows.append(case(linear, {"x": x, "weight": weight, "bias": bias}, activation=None))
        every = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        rows.append(case(linear, every, activation=None))
        rows.append(case(linear, {"x": x, "weight": weight, "residual": residual}, activation=None))
    x, weight, bias = normal(rng, (3, 5)), normal(rng, (4, 5)), normal(rng, (4,))
    every = {"x": x, "weight": weight, "bias": bias, "residual": normal(rng, (3, 4))}
    rows += [case(linear, every, activation=name) for name in ACTIVATIONS if name]
    scale, whole = normal(rng, (4,)), normal(rng, (4, 5), 30.0).round()
    for more in ({}, {"bias": bias}, {"bias": bias, "residual": every["residual"]}):
        inputs = {"x": x, "weight": whole, "scale": scale, **more}
        rows.append(case(linear, inputs, activation="silu" if more else None))
    return rows


def norm_ops() -> dict[str, Cases]:
    """layer_norm, rms_norm, l2_normalize, over the last axis but for one row."""

    def layer_norm(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
    ) -> Tensor:
        return nnf.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
        return nnf.rms_norm(x, x.shape[-1:], weight, eps)

    rng = rng_of("norm")
    layers, rms = [], []
    for shape in [(3, 5), (1, 1), (2, 1, 7), (0, 8), (4,), (2, 33)]:
        x = normal(rng, shape, 2.0) + 1.0
        weight, bias = normal(rng, shape[-1:]), normal(rng, shape[-1:])
        for eps in (1e-5, 1e-12):
            layers.append(case(layer_norm, {"x": x}, eps=eps))
            layers.append(case(layer_norm, {"x": x, "weight": weight, "bias": bias}, eps=eps))
            rms.append(case(rms_norm, {"x": x}, eps=eps))
            rms.append(case(rms_norm, {"x": x, "weight": weight}, eps=eps))
    x = t([[0.0, 0.0, 0.0, 0.0], [1e100, -1e100, 3e100, 0.5e100], [1e-6, -1e-6, 2e-6, 0.0]])
    layers += [case(layer_norm, {"x": x}, eps=eps) for eps in (1e-5, 1e-12)]
    rms += [case(rms_norm, {"x": x}, eps=eps) for eps in (1e-5, 1e-12)]

    def l2_normalize(x: Tensor, axis: int, eps: float) -> Tensor:
        return nnf.normalize(x, p=2.0, dim=axis, eps=eps)

    rng = rng_of("l2_normalize")
    xs = [normal(rng, s) for s in ((3, 5), (1, 1), (2, 1, 7), (0, 4), (4,))]
    xs.append(t([[0.0, 0.0, 0.0], [1e-13, -1e-13, 0.0], [1e100, 2e100, -3e100]]))
    unit = [case(l2_normalize, {"x": x}, axis=-1, eps=1e-12) for x in xs]
    unit.append(case(l2_normalize, {"x": xs[2]}, axis=0, eps=1e-12))
    return {"layer_norm": layers, "rms_norm": rms, "l2_normalize": unit}


def softmax_ops() -> dict[str, Cases]:
    """Softmax and its logarithm."""
    fns = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
    ops: dict[str, Cases] = {}
    for op, fn in fns.items():
        rng = rng_of(op)
        xs = [normal(rng, s, 3.0) for s in ((3, 5), (1, 1), (2, 1, 7), (0, 5), (4,), (2, 33))]
        xs.append(t([[1e4, -1e4, 0.0], [1e300, 1e300, -1e300], [-5.0, -5.0, -5.0]]))
        ops[op] = [case(plain(fn), {"x": x}, axis=-1) for x in xs]
        ops[op] += [case(plain(fn), {"x": xs[2]}, axis=axis) for axis in (0, 1)]
    return ops


def reduce_ops() -> dict[str, Cases]:
    """Reductions over one, several, all axes."""
    axes: list[int | list[int] | None] = [None, 0, 1, -1, [0, 2], [1, 2], [0, 1, 2]]
    ops: dict[str, Cases] = {}
    fns = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}
    for op, fn in fns.items():

        def reduce(x: Tensor, axis: Any, keepdims: bool, fn: Any = fn) -> Tensor:
            return fn(x, dim=tuple(range(x.ndim)) if axis is None else axis, keepdim=keepdims)

        rng = rng_of(op)
        x = normal(rng, (3, 5, 2))
        rows = [case(reduce, {"x": x}, axis=a, keepdims=k) for a in axes for k in (False, True)]
        for shape in ((1,), (1, 1), (0, 4), (2, 33)):
            rows.append(case(reduce, {"x": normal(rng, shape)}, axis=-1, keepdims=False))
        far = t([[1e300, -1e290], [1e-300, 3e-300]])
        rows.append(case(reduce, {"x": far}, axis=-1, keepdims=True))
        if op == "sum":
            none = normal(rng, (0, 4))
            rows += [case(reduce, {"x": none}, axis=a, keepdims=False) for a in (0, None)]
        ops[op] = rows

    rng = rng_of("argmax")
    xs = [normal(rng, shape) for shape in ((3, 5, 2), (1,), (1, 1), (0, 4), (2, 33))]
    ops["argmax"] = [
        case(plain(torch.argmax), {"x": xs[0]}, axis=a, keepdims=k)
        for a in (None, 0, 1, -1)
        for k in (False, True)
    ]
    ops["argmax"] += [case(plain(torch.argmax), {"x": x}, axis=-1, keepdims=False) for x in xs[1:]]
    return ops


def attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, mask: Tensor | None = None,
    starts: Tensor | None = None, *, causal: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """PyTorch's, with the masks of this project made into its one additive mask."""
    queries, keys = q.shape[-2], k.shape[-2]
    added = torch.zeros(q.shape[0], 1, queries, keys, dtype=q.dtype)
    if key_mask is not None:
        added = added.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        added = added.masked_fill(~seen, -torch.inf)
    if starts is not None:
        positions = starts[:, None, None, None] + torch.arange(queries)[:, None]
        added = added.masked_fill(torch.arange(keys) > positions, -torch.inf)
    if mask is not None:
        added = added + mask
    return nnf.scaled_dot_product_attention(
        q, k, v, attn_mask=added, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def attention_ops() -> dict[str, Cases]:
    """Self, cross, causal, masked, grouped; one query, none, many keys."""
    rng = rng_of("attention")
    rows: Cases = []

    def add(
        batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int,
        *, causal: bool = False, scale: float | None = None, spread: float = 1.0, **masks: Tensor,
    ) -> None:  # fmt: skip
        q = normal(rng, (batch, heads, queries, dim), spread)
        k, v = (normal(rng, (batch, kv_heads, keys, dim), spread) for _ in range(2))
        rows.append(case(attention, {"q": q, "k": k, "v": v, **masks}, causal=causal, scale=scale))

    padded = t([[True, True, True, False, False], [True] * 5])
    holes = t([[True, False, True, False, True], [True, True, False, False, False]])
    add(1, 1, 1, 1, 1, 4)
    add(2, 3, 3, 5, 5, 4)
    add(2, 3, 3, 2, 7, 5)  # cross attention
    add(2, 1, 1, 3, 5, 4, key_mask=padded)
    add(2, 2, 2, 5, 5, 3, key_mask=holes)
    add(1, 2, 2, 6, 6, 4, causal=True)
    add(1, 2, 2, 2, 6, 4, causal=True)  # the last 2 of 6 positions
    add(1, 2, 2, 1, 6, 4, causal=True)  # decoding
    add(2, 2, 2, 5, 5, 4, causal=True, key_mask=padded)
    add(1, 4, 2, 3, 5, 4)  # grouped queries
    add(1, 4, 1, 3, 3, 4, causal=True)  # one key head
    add(2, 6, 3, 5, 5, 2, causal=True, key_mask=holes)
    add(1, 2, 2, 3, 4, 4, scale=0.25)
    add(1, 2, 2, 3, 4, 4, mask=normal(rng, (1, 2, 3, 4), 2.0))
    add(1, 1, 1, 3, 40, 16)
    add(1, 1, 1, 3, 5, 4, spread=60.0)  # scores in the thousands
    add(1, 2, 2, 0, 3, 4)
    add(0, 2, 2, 3, 3, 4)
    add(2, 4, 2, 2, 7, 4, starts=t([1, 4]))  # in a buffer filled in part
    return {"attention": rows}


def row_ops() -> dict[str, Cases]:
    """arange, gather, scatter: the indices of scatter differ, as PyTorch leaves equal ones open."""

    def arange(start: float, step: float, size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float64) * step + start

    def gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
        y = torch.index_select(x, axis, indices.reshape(-1))
        return y.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])

    def scatter(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        return x.index_copy(0, indices, values)

    rng = rng_of("rows")
    x = normal(rng, (4, 5, 3))
    ids = [[0], [2, 0, 2], [[1, 2], [2, 0]], np.zeros((0,), np.int64)]
    counts = [(0.0, 1.0, 4), (-2.0, 0.5, 5), (3.0, -0.125, 6), (1.0, 1.0, 0)]
    return {
        "arange": [case(arange, {}, start=a, step=b, size=n) for a, b, n in counts],
        "gather": [case(gather, {"x": x, "indices": t(i)}, axis=a) for i in ids for a in (0, 1, 2)],
        "scatter": [
            case(scatter, {"x": x, "indices": t(i), "values": normal(rng, (len(i), 5, 3))})
            for i in (np.array([2]), np.array([3, 0, 1]), np.zeros((0,), np.int64))
        ],
    }


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, first: Tensor | None = None, *, interleaved: bool
) -> Tensor:
    """As complex numbers: each pair times the one of its position."""
    batch, _, length, _ = x.shape
    pairs = cos.shape[1]
    start = torch.zeros(batch, dtype=torch.int64) if first is None else first
    turn = torch.complex(cos, sin)[start[:, None] + torch.arange(length)][:, None]
    part = x[..., : 2 * pairs]
    if interleaved:
        a, b = part[..., ::2], part[..., 1::2]
    else:
        a, b = part.chunk(2, dim=-1)
    turned = torch.complex(a.contiguous(), b.contiguous()) * turn
    stacked = torch.stack([turned.real, turned.imag], -1 if interleaved else -2)
    return torch.cat([stacked.flatten(-2), x[..., 2 * pairs :]], -1)


def sequence_ops() -> dict[str, Cases]:
    """rope and conv1d."""
    rng = rng_of("rope")
    ropes: Cases = []
    for (b, h, s, d), pairs in (((1, 1, 1, 2), 1), ((2, 3, 4, 8), 4), ((2, 1, 3, 10), 3)):
        angles = normal(rng, (9, pairs), 3.0)
        tables = {"cos": angles.cos(), "sin": angles.sin()}
        first = {"first": t(rng.integers(0, 5, (b,)))}
        for interleaved in (False, True):
            x = normal(rng, (b, h, s, d))
            ropes.append(case(rope, {"x": x, **tables}, interleaved=interleaved))
            ropes.append(case(rope, {"x": x, **tables, **first}, interleaved=interleaved))

    def conv1d(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int, padding: int,
        activation: str | None,
    ) -> Tensor:  # fmt: skip
        return ACTIVATIONS[activation](nnf.conv1d(x, weight, bias, stride, padding))

    rng = rng_of("conv1d")
    convs: Cases = []
    for (b, c, n), (out, taps), stride, padding in (
        *(((1, 1, 1), (1, 1), 1, 0), ((2, 3, 9), (5, 3), 1, 1), ((2, 4, 12), (3, 3), 2, 1)),
        *(((1, 1, 17), (3, 7), 1, 0), ((2, 4, 5), (1, 2), 3, 4), ((1, 5, 4), (2, 1), 1, 0)),
    ):
        x, weight, bias = normal(rng, (b, c, n)), normal(rng, (out, c, taps)), normal(rng, (out,))
        for activation in (None, "gelu"):
            params = {"stride": stride, "padding": padding, "activation": activation}
            convs.append(case(conv1d, {"x": x, "weight": weight, "bias": bias}, **params))
        convs.append(case(conv1d, {"x": x, "weight": weight}, **params))
    return {"rope": ropes, "conv1d": convs}


ORDER = (  # of the stored file
    "neg abs sqrt exp log relu leaky_relu elu sigmoid tanh silu gelu scale add sub mul div maximum "
    "minimum clip where cast matmul dot linear embedding layer_norm rms_norm l2_normalize softmax "
    "log_softmax sum mean max min argmax attention sin cos square rsqrt eq ne lt le gt ge "
    "logical_and logical_or logical_not floor_divide remainder silu_gate arange gather scatter "
    "rope conv1d"
).split()


def golden_values() -> dict[str, Cases]:
    """Every op's rows."""
    parts = (unary_ops, binary_ops, choice_ops, product_ops, norm_ops, softmax_ops, reduce_ops,
             attention_ops, row_ops, sequence_ops)  # fmt: skip
    rows = {op: rows for part in parts for op, rows in part().items()}
    return {op: rows[op] for op in ORDER}
