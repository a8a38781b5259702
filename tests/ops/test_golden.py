"""Each op's NumPy formula in float64 against values that PyTorch computed (tests/reference).

A row of the table of element-wise ops that has another formula is compared with that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella.op import op
from centella.op.op import named
from centella.ops.elementwise import EXPRESSIONS
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NormAttrs
from centella.ops.rope_attend import RopeAttendAttrs
from centella.ops.steps import step_of

Array = np.ndarray[Any, Any]
Formula = Callable[..., Any]
ROWS = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text(encoding="utf-8"))

# What moves elements and computes nothing; tests/ops/test_ops.py compares it with NumPy exactly.
MOVES = {"copy", "reshape", "concat", "fill", "assign", "cache_write", "cache_step", "cache_copy",
         "cache_copy_i8"}  # fmt: skip
PLANES = {"dequantize"}  # with GGUF's own package: tests/ops/test_quant.py
OPS = [n for n in op.registry() if ":" not in n]  # a user's kernel has a colon


def formula(name: str, **attrs: Any) -> Formula:
    """The NumPy formula of an op, with some attributes given."""
    reference = op.get(name).reference
    assert reference is not None
    return lambda *arrays, **more: reference(*arrays, **attrs, **more)


def along(fn: Formula) -> Formula:
    """Over another axis than the last."""
    return lambda x, axis, **rest: np.moveaxis(fn(np.moveaxis(x, axis, -1), **rest), -1, axis)


def reduced(fn: Formula) -> Formula:
    """Over one axis, several, or all, as `centella.functional` does it."""

    def over(x: Array, axis: Any, keepdims: bool) -> Any:
        axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        gone = sorted(a % x.ndim for a in axes)
        kept = [a for a in range(x.ndim) if a not in gone]
        outer = tuple(x.shape[a] for a in kept)
        flat = x.transpose(*kept, *gone).reshape(*outer, math.prod(x.shape[a] for a in gone))
        shape = tuple(1 if a in gone else n for a, n in enumerate(x.shape))
        return fn(flat).reshape(shape if keepdims else outer)

    return over


def clip(x: Array, min: float | None, max: float | None) -> Any:
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    return formula("clip")(x, low=low, high=high)


def matmul(a: Array, b: Array, transpose_a: bool, transpose_b: bool) -> Any:
    a = a.swapaxes(-1, -2) if transpose_a else a
    return formula("matmul")(a, b.swapaxes(-1, -2) if transpose_b else b)


def linear(x: Array, weight: Array, activation: str | None, **more: Array) -> Any:
    return formula("linear")(
        x, weight, *more.values(), extras=tuple(more), activation=activation or ""
    )


def norm(kind: str) -> Formula:
    def fn(x: Array, eps: float, **more: Array) -> Any:
        return formula("norm", kind=kind)(x, *more.values(), eps=eps, vectors=tuple(more))

    return fn


def attention(
    q: Array, k: Array, v: Array, causal: bool, scale: float | None, **more: Array
) -> Any:
    attrs = {"causal": causal, "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale}
    y = formula("attention", masks=tuple(more), **attrs)(q, k, v, *more.values())
    return y.transpose(0, 2, 1, 3)


def arange(start: float, step: float, size: int) -> Any:
    return formula("arange", dtype="f32")(start=start, step=step, size=size)


def rope(x: Array, cos: Array, sin: Array, interleaved: bool, **first: Array) -> Any:
    return formula("rope")(x, cos, sin, *first.values(), interleaved=interleaved)


def conv1d(x: Array, weight: Array, activation: str | None, **more: Any) -> Any:
    bias = [more.pop("bias")] if "bias" in more else []
    return formula("conv1d")(x, weight, *bias, activation=activation or "", **more).swapaxes(1, 2)


# PyTorch's name: our op, and its formula with PyTorch's parameters.
FORMULAS: dict[str, tuple[str, Formula]] = {
    **{name: (name, formula(name)) for name in OPS if name in ROWS},
    "silu": ("swish", formula("swish")),
    "leaky_relu": (
        "leaky_relu", lambda x, negative_slope: formula("leaky_relu")(x, slope=negative_slope)),
    "clip": ("clip", clip),
    "matmul": ("matmul", matmul),
    "linear": ("linear", linear),
    "layer_norm": ("norm", norm("layer")),
    "rms_norm": ("norm", norm("rms")),
    "l2_normalize": ("norm", along(norm("l2"))),
    "softmax": ("softmax", along(formula("softmax"))),
    "log_softmax": ("softmax", along(formula("softmax", log=True))),
    **{name: ("reduce", reduced(formula("reduce", op=name))) for name in (
        "sum", "mean", "max", "min")},
    "argmax": ("argmax", reduced(formula("argmax"))),
    "attention": ("attention", attention),
    "arange": ("arange", arange),
    "rope": ("rope", rope),
    "conv1d": ("conv1d", conv1d),
}  # fmt: skip


def unpack(packed: dict[str, Any]) -> Array:
    return np.array(packed["data"], packed["dtype"]).reshape(packed["shape"])


def calls(name: str, case: dict[str, Any]) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Positional operands and the rest, as the formula takes them."""
    inputs = {k: unpack(v) for k, v in case["inputs"].items()}
    named = {"linear", "layer_norm", "rms_norm", "attention", "rope", "conv1d"}
    if name in named:
        first = {"linear": 2, "conv1d": 2, "attention": 3, "rope": 3}.get(name, 1)
        operands = list(inputs.items())
        return tuple(v for _, v in operands[:first]), {**dict(operands[first:]), **case["params"]}
    return tuple(inputs.values()), case["params"]


def close(got: Any, wanted: Array, what: object) -> None:
    """Within 1e-13; near 0 within 1e-15, as PyTorch's own erf cancels there."""
    got = np.asarray(got)
    assert got.shape == wanted.shape, what
    np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-15, err_msg=str(what))


@pytest.mark.parametrize("name", ROWS)
def test_golden(name: str) -> None:
    _, fn = FORMULAS[name]
    for case in ROWS[name]:
        operands, rest = calls(name, case)
        with np.errstate(all="ignore"):
            close(fn(*operands, **rest), unpack(case["output"]), case["params"])


EXACT = {name: e for name, e in EXPRESSIONS.items() if e.exact is not None}
VALUES = np.array([0, 1e-300, 1e-9, 0.3, 0.5, 0.7, 1, 1.5, 2.5, 3, 20, 800, 1e300, math.inf])


@pytest.mark.parametrize("name", EXACT)
def test_exact_values(name: str) -> None:
    """Every pair of odd values of both signs, and NaN; the signs of zeros too."""
    expression = EXACT[name]
    values = np.concatenate([VALUES, -VALUES, [math.nan], np.linspace(-4, 4, 101)])
    operands = np.meshgrid(*[values] * len(expression.operands))
    assert expression.exact is not None
    with np.errstate(all="ignore"):
        got, wanted = formula(name)(*operands), expression.exact(*operands)
    close(got, wanted, name)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got)[numbers], np.signbit(wanted)[numbers])


def test_mean_pool_is_the_mean_of_the_rows_that_count() -> None:
    for case in ROWS["mean"]:
        x, params = unpack(case["inputs"]["x"]), case["params"]
        if x.ndim == 3 and params["axis"] == 1 and not params["keepdims"]:
            padded = np.concatenate([x, np.full_like(x, np.nan)], 1)
            lengths = np.full(len(x), x.shape[1], np.int32)
            close(formula("mean_pool")(padded, lengths), unpack(case["output"]), params)
            return
    raise AssertionError("no golden value is a mean over the middle axis")


def test_a_fused_chain_is_its_ops() -> None:
    """silu_gate is swish, then mul."""
    steps = (step_of("swish", (0,), "f32"), step_of("mul", (2, 1), "f32"))
    for case in ROWS["silu_gate"]:
        operands, _ = calls("silu_gate", case)
        close(formula("fused", steps=steps)(*operands), unpack(case["output"]), "fused")


def test_what_is_appended_is_normalised_and_turned() -> None:
    """rms_norm of the heads of q and k, rope, then cache_write."""
    rng, starts = np.random.default_rng(3), np.array([0, 2], np.int32)
    caches = rng.standard_normal((2, 2, 1, 5, 8))
    again, x = caches.copy(), rng.standard_normal((2, 4, 2, 8))
    weights, tables = rng.standard_normal((2, 8)), rng.standard_normal((2, 9, 4))
    q, k = (
        formula("rope")(part / np.sqrt((part**2).mean(-1, keepdims=True) + 1e-6) * weight, *tables,
                        starts, interleaved=False)
        for part, weight in zip((x[:, :2], x[:, 2:3]), weights, strict=True)
    )  # fmt: skip
    formula("cache_write")(*again, k, x[:, 3:], starts)
    *_, got = formula("rope_cache_write")(*caches, x, *tables, starts, weights, interleaved=False,
                                          eps=1e-6)  # fmt: skip
    close(got, q, "q")
    close(caches, again, "caches")


def test_what_is_attended_to_is_what_was_appended() -> None:
    """rope_cache_write, then attention over what each sequence has."""
    rng, starts = np.random.default_rng(4), np.array([0, 2], np.int32)
    caches = rng.standard_normal((2, 2, 1, 5, 8))
    again, x, tables = caches.copy(), rng.standard_normal((2, 4, 2, 8)), np.ones((2, 9, 4))
    turned = {"interleaved": False, "eps": 1e-6}
    *_, q = formula("rope_cache_write")(*again, x, *tables, starts, **turned)
    wanted = formula("attention")(
        q, *again, starts, masks=("starts",), scale=0.3, causal=False, window=2
    )
    *_, got = formula("rope_attend")(*caches, x, *tables, starts, **turned, scale=0.3, window=2)
    close(got, wanted, "y")
    close(caches, again, "caches")


def test_attend_linear_is_rope_attend_and_linear() -> None:
    rng, starts = np.random.default_rng(6), np.array([0, 2], np.int32)
    caches = rng.standard_normal((2, 2, 1, 5, 8))
    again, x, tables = caches.copy(), rng.standard_normal((2, 4, 2, 8)), np.ones((2, 9, 4))
    w, bias, residual = (rng.standard_normal(s) for s in ((6, 16), (6,), (2, 2, 6)))
    attend = RopeAttendAttrs(False, 1e-6, 0.3, window=2)
    linear = LinearAttrs(("bias", "residual"), "", alpha=0.5)
    *_, h = formula("rope_attend", **named(attend))(*again, x, *tables, starts)
    wanted = formula("linear", **named(linear))(h.reshape(2, 2, 16), w, bias, residual)
    given = *caches, x, *tables, starts, w, bias, residual
    *_, got = formula("attend_linear", attend=attend, linear=linear)(*given)
    close(got, wanted, "y")
    close(caches, again, "caches")


def test_linear_norm_is_linear_and_norm() -> None:
    rng = np.random.default_rng(9)
    shapes = ((2, 3, 8), (6, 8), (6,), (2, 3, 6), (6,), (6,))
    x, w, bias, residual, weight, shift = (rng.standard_normal(s) for s in shapes)
    linear, affine = LinearAttrs(("bias", "residual"), "", alpha=0.5), ("weight", "bias")
    for kind, vectors in (("layer", (weight, shift)), ("rms", (weight,))):
        norm = NormAttrs(kind, 1e-5, affine[: len(vectors)])
        sums = formula("linear", **named(linear))(x, w, bias, residual)
        wanted = formula("norm", **named(norm))(sums, *vectors)
        got = formula("linear_norm", linear=linear, norm=norm)(x, w, bias, residual, *vectors)
        close(got, wanted, kind)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_golden_values(name: str) -> None:
    covered = {FORMULAS[row][0] for row in ROWS}
    tested = {
        "mean_pool",
        "fused",
        "rope_cache_write",
        "rope_attend",
        "attend_linear",
        "cache_write_i8",
        "rope_cache_write_i8",
        "linear_norm",
        "normed_linear",
        "expert_linear",
        "topk",
        "argsort",
        "cumsum",
        "take_along_axis",
        "scatter_reduce",
        "sample",
        "speech_token",
        "speech_scores",
        "speech_beams",
        "speech_move",
        "cache_attend",
        "beam_select",
        "beam_blocks",
    } | PLANES  # these have tests
    known = covered | MOVES | tested | EXACT.keys()
    assert name in known, "no values: `exact` in its row, or a case in tests/reference/golden.py"
