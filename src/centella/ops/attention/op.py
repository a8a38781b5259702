"""`attention` as an op: rule, NumPy formula, lowering to the streaming kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.dtypes import i32
from centella.errors import DTypeError, ShapeError
from centella.lang.face import Face, TensorParam
from centella.op import Lowered, Op, Out
from centella.ops.attention.stream import LOWEST, THREADS, stream
from centella.ops.layout import flat
from centella.program import Call, Ref
from centella.specs import Caps, Spec

MASKS = ("lengths", "key_mask", "mask")


def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Out, ...]:
    """q [b, h, lq, d], k and v [b, h', lk, d], h a multiple of h'; result [b, lq, h, d]."""
    q, k, v, *more = specs
    if any(len(s.shape) != 4 for s in (q, k, v)) or k.shape != v.shape:
        raise ShapeError(
            f"attention: expected q [b, h, lq, d], k and v [b, h', lk, d], got "
            f"{[list(s.shape) for s in (q, k, v)]}"
        )
    b, heads, lq, dim = q.shape
    _, kv_heads, lk, _ = k.shape
    if (k.shape[0], k.shape[3]) != (b, dim) or kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"attention: expected k and v [{b}, a divisor of {heads}, lk, {dim}], got "
            f"{list(k.shape)}"
        )
    if any(not s.dtype.is_float for s in (q, k, v)) or len({s.dtype for s in (q, k, v)}) > 1:
        raise DTypeError(
            f"attention: expected one float dtype, got {[s.dtype.name for s in (q, k, v)]}"
        )
    for name, spec in zip(attrs["masks"], more, strict=True):
        _check_mask(name, spec, b, heads, lq, lk)
    return (((b, lq, heads, dim), q.dtype),)


def _check_mask(name: str, spec: Spec, b: int, heads: int, lq: int, lk: int) -> None:
    wanted = {"lengths": (b,), "key_mask": (b, lk)}.get(name)
    if wanted is not None and spec.shape != wanted:
        raise ShapeError(f"attention: expected {name} {list(wanted)}, got {list(spec.shape)}")
    if name == "mask":
        pairs = zip(spec.shape, (b, heads, lq, lk), strict=False)
        if len(spec.shape) != 4 or any(n not in (1, m) for n, m in pairs):
            raise ShapeError(
                f"attention: expected mask [{b} or 1, {heads} or 1, {lq} or 1, {lk} or 1], got "
                f"{list(spec.shape)}"
            )
    if name == "lengths" and spec.dtype is not i32:
        raise DTypeError(f"attention: expected i32 lengths, got {spec.dtype.name}")
    if name == "mask" and not spec.dtype.is_float:
        raise DTypeError(f"attention: expected a float mask, got {spec.dtype.name}")
    if name == "key_mask" and spec.dtype.is_float:
        raise DTypeError(f"attention: expected a bool or integer key_mask, got {spec.dtype.name}")


def reference(
    q: Any, k: Any, v: Any, *more: Any, masks: tuple[str, ...], causal: bool, scale: float
) -> Any:
    """The NumPy formula."""
    named = dict(zip(masks, more, strict=True))
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    lq, lk = q.shape[2], k.shape[2]
    scores = np.matmul(q * q.dtype.type(scale), k.swapaxes(-1, -2))
    counts: Any = np.ones((1, 1, 1, lk), bool)
    if "lengths" in named:
        counts = counts & (np.arange(lk) < named["lengths"][:, None])[:, None, None, :]
    if "key_mask" in named:
        counts = counts & (named["key_mask"] != 0)[:, None, None, :]
    if causal:
        counts = counts & (np.arange(lk) <= np.arange(lq)[:, None] + (lk - lq))
    if "mask" in named:
        counts = counts & ~(named["mask"] <= LOWEST)
        scores = scores + named["mask"]
    if not counts.all():
        np.copyto(scores, -np.inf, where=~counts)
        dead = ~counts.any(axis=2, keepdims=True).swapaxes(-1, -2)
        v = np.where(dead, v.dtype.type(0), v) if dead.any() else v
    scores -= scores.max(-1, keepdims=True, initial=LOWEST)
    e = np.exp(scores, out=scores)
    total = e.sum(-1, keepdims=True)
    y = np.matmul(e, v)
    return np.divide(y, total, out=np.zeros_like(y), where=total != 0).transpose(0, 2, 1, 3)


def takes(index: int, spec: Spec) -> bool:
    """q, k, v, key_mask: rows of neighbouring elements; an additive mask as it lies."""
    return spec.unit_rows or (index > 2 and len(spec.shape) == 4)


def lower(
    inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
) -> Lowered:
    """One launch: a group has 64 (or 128) queries of one head."""
    q, k, v, *more = inputs
    y = outputs[0]
    batch, lq, heads, dim = y.shape
    part = min(-(-dim // 8) * 8, 64)
    queries = 2 if dim <= 32 and lq > THREADS else 1
    blocks = -(-lq // (THREADS * queries))
    names = attrs["masks"]
    face = Face(
        (
            *((n, TensorParam("in", None, 1)) for n in ("q", "k", "v", *names)),
            ("y", TensorParam("out", None, 1)),
        ),
        (),
        (),
    )
    constants = (
        ("causal", attrs["causal"]),
        ("dim", dim),
        ("keys", 16 if dim <= 128 else 8),
        ("part", part),
        ("queries", queries),
        ("vector", all(s.aligned for s in (q, k, v))),
        ("vector_y", y.aligned),
    )
    scalars = {"blocks": blocks, "scale": attrs["scale"], **_steps((q, k, v), y)}
    for name, spec in zip(names, more, strict=True):
        scalars.update(_mask_steps(name, spec))
    tensors = (*(Ref(i, flat(s)) for i, s in enumerate(inputs)), Ref(len(inputs), y))
    groups = batch * heads * blocks * -(-dim // part)
    call = Call(stream, tensors, tuple(scalars.items()), constants, groups, face=face)
    return Lowered((call,))


def _steps(qkv: tuple[Spec, ...], y: Spec) -> dict[str, int]:
    """Extents, and the strides of batch, head and position."""
    q, k, _ = qkv
    heads, lq, lk = q.shape[1], q.shape[2], k.shape[2]
    steps = {"heads": heads, "share": heads // k.shape[1], "lq": lq, "lk": lk}
    for name, spec in zip("qkv", qkv, strict=True):
        steps.update({f"{name}{axis}": s for axis, s in zip("bhl", spec.strides, strict=False)})
    return {**steps, "yb": y.strides[0], "yl": y.strides[1], "yh": y.strides[2]}


def _mask_steps(name: str, spec: Spec) -> dict[str, int]:
    if name == "key_mask":
        return {"mb": spec.strides[0]}
    if name == "mask":
        steps = (0 if n == 1 else s for n, s in zip(spec.shape, spec.strides, strict=True))
        return dict(zip(("ab", "ah", "al", "ak"), steps, strict=True))
    return {}


ATTENTION = Op("attention", rule, reference, lower, takes, doc="scaled dot-product attention")
