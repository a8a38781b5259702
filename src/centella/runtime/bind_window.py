"""Operands bound by the window that a launch sees: of buffers larger than a binding, and of users'.

A window begins at the last multiple of the device's offset alignment before the operand's first
element and ends with its last chunk. The operand's offset, a launch parameter, counts from there.
A user's kernel may index anything: it gets windows of all operands, so that it reaches no other
tensor that lies in the same buffer. Tensors of one upload begin on such multiples; before a part of
a tensor there may be elements of that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from centella.backends.base import Buffer, Launch, Window
from centella.emit.program import HostProgram
from centella.errors import LimitError
from centella.specs import Caps, Spec


def narrowed(launch: Launch, caps: Caps) -> Launch:
    """A launch of a user's kernel with a window of each operand; any other as it is.

    Raises:
        LimitError: an operand's window is larger than a binding.
    """
    program = launch.program
    if isinstance(program, HostProgram) or program.trusted or caps.binds_by_pointer:
        return launch
    return _bound_by(launch, [_window(*view, caps) for view in launch.views], caps)


def bound(
    planned: Launch, compiled: Launch, offsets: Sequence[int], slots: Sequence[Buffer], caps: Caps
) -> Launch:
    """A launch on the buffers that it runs with; `compiled` itself where nothing changes.

    Args:
        planned: as the plan has it; compiled: with its pipeline, and windows if it is a user's.
        offsets: elements from each external buffer to its first.

    Raises:
        LimitError: an operand's window is larger than a binding.
    """
    elements = [offsets[slot] if slot < len(offsets) else 0 for slot in planned.slots]
    if compiled.windows:
        if any(elements):  # those of `compiled` count from its windows
            launch = replace(planned, pipeline=compiled.pipeline).shifted(elements)
            compiled = narrowed(launch, caps)
        return _ending(compiled, slots)
    launch = compiled.shifted(elements)
    windows = [
        _window(*view, caps) if slots[slot].nbytes > caps.max_binding else None
        for view, slot in zip(launch.views, launch.slots, strict=True)
    ]
    return _ending(_bound_by(launch, windows, caps), slots) if any(windows) else launch


def _ending(launch: Launch, slots: Sequence[Buffer]) -> Launch:
    """A launch whose windows end with their buffers: imported memory may end within a chunk."""
    sizes = [slots[slot].nbytes for slot in launch.slots]
    windows = tuple(
        window if window is None or sum(window) <= nbytes else (window[0], nbytes - window[0])
        for window, nbytes in zip(launch.windows, sizes, strict=True)
    )
    return launch if windows == launch.windows else replace(launch, windows=windows)


def _bound_by(launch: Launch, windows: Sequence[Window | None], caps: Caps) -> Launch:
    elements = [0] * len(windows)
    for index, ((spec, offset), window) in enumerate(zip(launch.views, windows, strict=True)):
        if window is not None:
            start, nbytes = window
            if nbytes > caps.max_binding:
                raise LimitError(
                    f"kernel {launch.program.name!r}: {nbytes:,} bytes of an operand; this device "
                    f"binds {caps.max_binding:,}"
                )
            elements[index] = -(start // spec.dtype.itemsize) if spec.size else -offset
    return replace(launch.shifted(elements), windows=tuple(windows))


def _window(spec: Spec, offset: int, caps: Caps) -> Window:
    """The bytes of a buffer that a launch sees as `spec` from an element on."""
    first = offset * spec.dtype.itemsize if spec.size else 0
    start = first - first % caps.binding_alignment
    return start, -(-(first + spec.storage_bytes) // 16) * 16 - start
