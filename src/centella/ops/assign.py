"""assign: a State's memory gets the elements of x, broadcast to its shape, in place."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from centella.dtypes import Array
from centella.emit.program import Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.op.op import Form, Lowered, NoAttrs, Op, Out, broadcasting
from centella.ops.elements import element_call, element_kernel
from centella.specs import Caps, Spec

kernel: Kernel = element_kernel("assign", lambda values, numbers, attrs: values[0], moves=True)


def rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """The State's shape and dtype, which x broadcasts to."""
    state, x = specs
    if x.dtype is not state.dtype:
        raise DTypeError(f"assign: expected {state.dtype.name}, got {x.dtype.name}")
    pairs = zip(reversed(x.shape), reversed(state.shape), strict=False)
    if len(x.shape) > len(state.shape) or any(n not in (1, m) for n, m in pairs):
        raise ShapeError(
            f"assign: expected a shape that broadcasts to {list(state.shape)}, got "
            f"{list(x.shape)}; a State keeps its shape: reshape the value, or make another State"
        )
    return ((state.shape, state.dtype),)


def reference(state: Array, x: Array) -> Array:
    """The NumPy formula: changes `state`."""
    np.copyto(state, x)
    return state


def lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch."""
    call = element_call(kernel, form.inputs[1:], form.outputs[0])
    x, _ = call.tensors
    refs, params = (Ref(1, x.spec), Ref(0, form.outputs[0])), signature({"x0": 1}, {}, {"y": 1})
    return Lowered((replace(call, tensors=refs, signature=params),))


ASSIGN = Op("assign", rule, reference, lower, mutates=(0,), overwrites=(0,), axes=broadcasting,
            doc=__doc__ or "")  # fmt: skip
