"""What every variant passes to its kernel: operands, extents, strides."""

from __future__ import annotations

from centella.op.form import Form
from centella.ops.attention.problem import AttentionAttrs
from centella.specs import Spec


def extents(form: Form[AttentionAttrs]) -> dict[str, int | float]:
    """Scale, extents, and the strides of every input: batch, head and position (b, h, l)."""
    q, k, _, *more = form.inputs
    heads, lq, lk = q.shape[1], q.shape[2], k.shape[2]
    found: dict[str, int | float] = {
        "scale": form.attrs.scale, "heads": heads, "share": heads // k.shape[1], "lq": lq, "lk": lk,
    }  # fmt: skip
    part = form.part("q", lq)
    found["start"] = part.first + (lk - part.whole if form.attrs.causal else 0)
    for name, spec in zip("qkv", form.inputs, strict=False):
        found.update({f"{name}{axis}": s for axis, s in zip("bhl", spec.strides, strict=False)})
    for name, spec in zip(form.attrs.masks, more, strict=True):
        found.update(_mask_steps(name, spec))
    return found


def _mask_steps(name: str, spec: Spec) -> dict[str, int]:
    if name == "key_mask":
        return {"mb": spec.strides[0]}
    if name == "mask":
        steps = (0 if n == 1 else s for n, s in zip(spec.shape, spec.strides, strict=True))
        return dict(zip(("ab", "ah", "al", "ak"), steps, strict=True))
    return {}


def out_steps(y: Spec) -> dict[str, int]:
    """Strides of the result [batch, position, head, element]."""
    return dict(zip(("yb", "yl", "yh"), y.strides, strict=False))
