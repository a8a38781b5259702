"""Operands bound by the window that a launch sees: of buffers larger than a binding, and of users'.

A window begins at the last multiple of the device's offset alignment before the operand's first
element and ends with its last chunk. The operand's offset, a launch parameter, counts from there.
A user's kernel may index anything: it gets windows of all operands, so that it reaches no other
tensor that lies in the same buffer. Tensors of one upload begin on such multiples; before a part of
a tensor there may be elements of that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from centella.backends.base import Bound, Buffer, Window
from centella.emit.program import HostProgram
from centella.errors import LimitError
from centella.specs import Caps, Spec


def narrowed(bound: Bound, patches: Sequence[tuple[int, int]], caps: Caps) -> Bound:
    """A launch of a user's kernel with a window of each operand; any other as it is.

    CUDA has no windows: a kernel there sees all memory.

    Args:
        patches: (word, operand) of each parameter that is an operand's offset.

    Raises:
        LimitError: an operand's window is larger than a binding.
    """
    program = bound.program
    if isinstance(program, HostProgram) or program.trusted or caps.target == "ptx":
        return bound
    return _bound_by(bound, patches, [_window(*view, caps) for view in bound.views], caps)


def windowed(
    bound: Bound, patches: Sequence[tuple[int, int]], slots: Sequence[Buffer], caps: Caps
) -> Bound:
    """A launch whose operands in buffers larger than a binding are bound by windows.

    Args:
        patches: (word, operand) of each parameter that is an operand's offset.

    Raises:
        LimitError: an operand's window is larger than a binding.
    """
    windows: list[Window | None] = [
        _window(*view, caps) if slots[slot].nbytes > caps.max_binding else None
        for view, slot in zip(bound.views, bound.slots, strict=True)
    ]
    if bound.windows or not any(windows):
        return bound
    return ending(_bound_by(bound, patches, windows, caps), slots)


def ending(bound: Bound, slots: Sequence[Buffer]) -> Bound:
    """A launch whose windows end with their buffers: imported memory may end within a chunk."""
    sizes = [slots[slot].nbytes for slot in bound.slots]
    windows = tuple(
        window if window is None or sum(window) <= nbytes else (window[0], nbytes - window[0])
        for window, nbytes in zip(bound.windows, sizes, strict=False)
    )
    return bound if windows == bound.windows else replace(bound, windows=windows)


def _bound_by(
    bound: Bound, patches: Sequence[tuple[int, int]], windows: Sequence[Window | None], caps: Caps
) -> Bound:
    views = list(bound.views)
    back = [0] * len(views)  # elements that an offset is less
    for index, ((spec, offset), window) in enumerate(zip(bound.views, windows, strict=True)):
        if window is not None:
            start, nbytes = window
            if nbytes > caps.max_binding:
                raise LimitError(
                    f"kernel {bound.program.name!r}: {nbytes:,} bytes of an operand; this device "
                    f"binds {caps.max_binding:,}"
                )
            back[index] = start // spec.dtype.itemsize if spec.size else offset
            views[index] = (spec, offset - back[index])
    words = np.frombuffer(bound.parameters, np.uint32).copy()
    for position, operand in patches:
        words[1 + position] -= back[operand]
    return replace(bound, views=tuple(views), parameters=words.tobytes(), windows=tuple(windows))


def _window(spec: Spec, offset: int, caps: Caps) -> Window:
    """The bytes of a buffer that a launch sees as `spec` from an element on."""
    first = offset * spec.dtype.itemsize if spec.size else 0
    start = first - first % caps.binding_alignment
    return start, -(-(first + spec.storage_bytes) // 16) * 16 - start
