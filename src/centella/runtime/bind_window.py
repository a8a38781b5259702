"""Launches on buffers larger than a binding: each operand is bound by the window that it sees.

A window begins at the last multiple of the device's offset alignment before the operand's first
element and ends with its last chunk. The operand's offset, a launch parameter, counts from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from centella.backends.base import Bound, Buffer, Window
from centella.errors import LimitError
from centella.specs import Caps, Spec


def windowed(
    bound: Bound, patches: Sequence[tuple[int, int]], slots: Sequence[Buffer], caps: Caps
) -> Bound:
    """A launch whose operands in buffers larger than a binding are bound by windows.

    Args:
        patches: (word, operand) of each parameter that is an operand's offset.

    Raises:
        LimitError: an operand's window is larger than a binding.
    """
    views = list(bound.views)
    windows: list[Window | None] = [None] * len(views)
    back = [0] * len(views)  # elements that an offset is less
    for index, ((spec, offset), slot) in enumerate(zip(bound.views, bound.slots, strict=True)):
        if slots[slot].nbytes > caps.max_binding:
            start, nbytes = windows[index] = _window(spec, offset, slots[slot].nbytes, caps)
            if nbytes > caps.max_binding:
                raise LimitError(
                    f"kernel {bound.program.name!r}: {nbytes:,} bytes of an operand; this device "
                    f"binds {caps.max_binding:,}"
                )
            back[index] = start // spec.dtype.itemsize if spec.size else offset
            views[index] = (spec, offset - back[index])
    if not any(windows):
        return bound
    words = np.frombuffer(bound.parameters, np.uint32).copy()
    for position, operand in patches:
        words[1 + position] -= back[operand]
    return replace(bound, views=tuple(views), parameters=words.tobytes(), windows=tuple(windows))


def _window(spec: Spec, offset: int, whole: int, caps: Caps) -> Window:
    """The bytes of a buffer of `whole` bytes that a launch sees as `spec` from an element on."""
    first = offset * spec.dtype.itemsize if spec.size else 0
    start = first - first % caps.binding_alignment
    end = min(-(-(first + spec.storage_bytes) // 16) * 16, whole)
    return start, end - start
